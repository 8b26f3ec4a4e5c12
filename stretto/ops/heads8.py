"""The gradients of queries, keys and values, merged into the factor of two products of 8 bits.

    dout8 = round(cat(rotate back(dq), rotate back(dk), dv))        E5M2, both ways; column sums for the bias

The definition is merge_heads_ref of heads.py, then round8.py: results are rounded to the dtype of the parts, and then
to 8 bits, so that it shows nowhere which of the two ways was taken. Bounds are known beforehand. There is a launch for
each part; a program has a tile of it, or where heads are rotated one tile of each half of its heads, whose channels
turn together. Column sums are taken before any rounding, in fp32, and added up as sums.py says.

Shapes: parts [T, heads, D], any strides but 1 from channel to channel, D even; cos and sin [T, D/2], fp32; dout8
[T, W], W = D * the heads of all parts. Bytes: 4 an element, where the two steps take 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.ops.heads import ROTATED, merge_heads_ref
from stretto.ops.language import cdiv, dense_rows, jit, rounded, runs_kernels, tl
from stretto.ops.round8 import (
    E5M2,
    Bound,
    Narrow,
    larger,
    new_narrow,
    put_both,
    quantize_ref,
    scale_of,
    see,
)
from stretto.ops.sums import launch_sums

# Tiles of 4 QUADS x COLS, and warps: the fastest of 25 on an H200. A thread that rotates has two halves of a head.
TILE = {"QUADS": 32, "COLS": 64, "num_warps": 4}
ROTATED_TILE = {"QUADS": 16, "COLS": 128, "num_warps": 8}


def merge_heads8_ref(
    parts: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None, sums: torch.dtype | None, bound: Bound
) -> tuple[Narrow, Tensor]:
    merged, total = merge_heads_ref(list(parts), cos, sin, sums)
    return quantize_ref(merged, E5M2, "tensor", bound, False), total


@jit
def _merge_row(
    read, cos_ptr, sin_ptr, row, col, angle, rows, cols, row_stride, sums, other_sums,
    HALF: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Returns a tile of rows, and that of the second halves, which is the same where nothing is rotated; and the sums
    with these in them."""
    inside = (row < rows) & (col < cols)
    first = tl.load(read + row * row_stride, mask=inside, other=0.0)
    TYPE: tl.constexpr = first.dtype
    first = first.to(tl.float32)
    if ROTATE:
        second = tl.load(read + row * row_stride + HALF, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + row * HALF + angle, mask=inside, other=0.0)
        # The product is as in heads.py, so that it rounds alike.
        sin = tl.load(sin_ptr + row * HALF + angle, mask=inside, other=0.0) * -1.0
        first, second = first * cos - second * sin, second * cos + first * sin
        other_sums += second
        second = rounded(second, TYPE)
    sums += first
    first = rounded(first, TYPE)
    if not ROTATE:
        second = first
    return first, second, sums, other_sums


@jit
def _merge_heads8_kernel(
    part_ptr, cos_ptr, sin_ptr, most_ptr, seen_ptr, data_ptr, scale_ptr, data_t_ptr,
    sums_ptr,  # [programs of a column, width], or None
    rows, cols, width, filled_rows, row_stride, head_stride,
    before,  # columns of the parts before this one
    D: tl.constexpr, ROTATE: tl.constexpr, QUADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`cols` counts columns of the part, or where heads are rotated those of first halves."""
    SIZE: tl.constexpr = D // 2 if ROTATE else D
    quad = (tl.program_id(0) * QUADS + tl.arange(0, QUADS)).to(tl.int64)[:, None]
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    head, angle = col // SIZE, col % SIZE
    read = part_ptr + head.to(tl.int64) * head_stride + angle
    place = before + head * D + angle
    scale = scale_of(tl.load(most_ptr), 57344)
    zeros = tl.zeros([QUADS, COLS], tl.float32)
    a, other_a, sums, other_sums = _merge_row(
        read, cos_ptr, sin_ptr, 4 * quad, col, angle, rows, cols, row_stride, zeros, zeros, SIZE, ROTATE
    )
    b, other_b, sums, other_sums = _merge_row(
        read, cos_ptr, sin_ptr, 4 * quad + 1, col, angle, rows, cols, row_stride, sums, other_sums, SIZE, ROTATE
    )
    c, other_c, sums, other_sums = _merge_row(
        read, cos_ptr, sin_ptr, 4 * quad + 2, col, angle, rows, cols, row_stride, sums, other_sums, SIZE, ROTATE
    )
    d, other_d, sums, other_sums = _merge_row(
        read, cos_ptr, sin_ptr, 4 * quad + 3, col, angle, rows, cols, row_stride, sums, other_sums, SIZE, ROTATE
    )
    place_at, exists = place.to(tl.int64), col < cols
    most = put_both(
        a, b, c, d, scale, data_ptr, data_t_ptr, quad, place_at, rows, width, exists, filled_rows, 57344
    )  # fmt: skip
    if ROTATE:
        others = put_both(
            other_a, other_b, other_c, other_d, scale, data_ptr, data_t_ptr, quad, place_at + SIZE, rows, width, exists,
            filled_rows, 57344,
        )  # fmt: skip
        most = larger(most, others)
    tl.store(scale_ptr, scale)  # by all programs, the same
    if sums_ptr is not None:
        sums_at = sums_ptr + tl.program_id(0).to(tl.int64) * width + place
        tl.store(sums_at, tl.sum(sums, 0, keep_dims=True), mask=col < cols)
        if ROTATE:
            tl.store(sums_at + SIZE, tl.sum(other_sums, 0, keep_dims=True), mask=col < cols)
    see(most, seen_ptr)


def launch_merge_heads8(
    parts: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None, sums: torch.dtype | None, bound: Bound
) -> tuple[Narrow, Tensor]:
    first, size = parts[0], parts[0].shape[2]
    rows, width = len(first), size * sum(part.shape[1] for part in parts)
    out = new_narrow(first, (rows, width), E5M2, "tensor")
    total = first.new_empty(0 if sums is None else width, dtype=sums or torch.float32)
    tile = TILE if cos is None else ROTATED_TILE
    high = cdiv(rows, 4 * tile["QUADS"])
    partial = None if sums is None else first.new_empty(high, 1, width, dtype=torch.float32)
    cos, sin = (None if t is None else t.contiguous() for t in (cos, sin))
    before = 0
    for i, part in enumerate(map(dense_rows, parts)):
        rotate = cos is not None and i < ROTATED
        cols = part.shape[1] * (size // 2 if rotate else size)
        _merge_heads8_kernel[(high, cdiv(cols, tile["COLS"]))](
            part, cos, sin, bound.most, bound.seen, out.data, out.scale, out.data_t.view(torch.int32), partial,
            rows, cols, width, out.data_t.shape[1], *part.stride()[:2], before,
            D=size, ROTATE=rotate, **tile,
        )  # fmt: skip
        before += part.shape[1] * size
    if partial is not None:
        launch_sums(partial, [total])
    return out, total


def merge_heads8(
    parts: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None, sums: torch.dtype | None, bound: Bound
) -> tuple[Narrow, Tensor]:
    """The parts rotated back, side by side, in E5M2, and the sums over rows in the dtype `sums`, which are empty if
    that is None. The bound is known."""
    run = launch_merge_heads8 if runs_kernels(parts[0]) else merge_heads8_ref
    return run(parts, cos, sin, sums, bound)
