"""The gradient of logits in 8 bits, for the two products that follow in the output layer.

    dz8 = round(softmax(z)_k - s / V - (1 - s) [k = t])        E5M2, both ways; |dz| <= 1

The kernel of cross_entropy.py reads the logits, and leaves the losses, and for each row its maximum and the logarithm
of its sum. With these a second kernel reads the logits by tiles, and writes 8 bits in place of the gradient. The
definition is rows_ref, then round8.py: gradients are rounded to the dtype of the logits, and then to 8 bits. The bound
is known beforehand.

Shapes: logits [T, V], labels [T]. Bytes a logit in bf16: 2 read, then 2 read and 2 written; the kernel with gradients
and rounding take 8, and a reading from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.ops.cross_entropy import gradient_of, launch_rows, rows_ref
from stretto.ops.language import cdiv, dense_rows, jit, rounded, runs_kernels, tl
from stretto.ops.round8 import (
    COLS,
    E5M2,
    QUADS,
    WARPS,
    Bound,
    Narrow,
    new_narrow,
    put_both,
    quantize_ref,
    scale_of,
    see,
)


def rows8_ref(logits: Tensor, labels: Tensor, smoothing: float, ignore: int, bound: Bound) -> tuple[Tensor, Narrow]:
    """Returns the losses and the gradient; the logits are overwritten."""
    losses = rows_ref(logits, labels, smoothing, ignore, True)
    return losses, quantize_ref(logits, E5M2, "tensor", bound, False)


@jit
def _gradient_row(z_ptr, label_ptr, shape_ptr, row, col, rows, cols, z_stride, smoothing, ignore, SMOOTH: tl.constexpr):
    """Returns a tile of rows of the gradient."""
    inside = (row < rows) & (col < cols)
    label = tl.load(label_ptr + row, mask=row < rows, other=ignore)
    counts = label != ignore  # a row that does not has no maximum and no sum
    top = tl.load(shape_ptr + 2 * row, mask=(row < rows) & counts, other=0.0)
    log_total = tl.load(shape_ptr + 2 * row + 1, mask=(row < rows) & counts, other=0.0)
    z = tl.load(z_ptr + row * z_stride + col, mask=inside, other=0.0)
    dz = gradient_of(z.to(tl.float32), col, cols, label, top, log_total, smoothing, SMOOTH)
    return rounded(tl.where(inside & counts, dz, 0.0), z.dtype)


@jit
def _dlogits8_kernel(
    z_ptr, label_ptr, shape_ptr, most_ptr, seen_ptr, data_ptr, scale_ptr, data_t_ptr, rows, cols, filled_rows, z_stride,
    smoothing, ignore, SMOOTH: tl.constexpr, QUADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    quad = (tl.program_id(0) * QUADS + tl.arange(0, QUADS)).to(tl.int64)[:, None]
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    row, scale = 4 * quad, scale_of(tl.load(most_ptr), 57344)
    a = _gradient_row(z_ptr, label_ptr, shape_ptr, row, col, rows, cols, z_stride, smoothing, ignore, SMOOTH)
    b = _gradient_row(z_ptr, label_ptr, shape_ptr, row + 1, col, rows, cols, z_stride, smoothing, ignore, SMOOTH)
    c = _gradient_row(z_ptr, label_ptr, shape_ptr, row + 2, col, rows, cols, z_stride, smoothing, ignore, SMOOTH)
    d = _gradient_row(z_ptr, label_ptr, shape_ptr, row + 3, col, rows, cols, z_stride, smoothing, ignore, SMOOTH)
    most = put_both(
        a, b, c, d, scale, data_ptr, data_t_ptr, quad, col.to(tl.int64), rows, cols, col < cols, filled_rows, 57344
    )
    tl.store(scale_ptr, scale)  # by all programs, the same
    see(most, seen_ptr)


def launch_rows8(logits: Tensor, labels: Tensor, smoothing: float, ignore: int, bound: Bound) -> tuple[Tensor, Narrow]:
    logits, labels = dense_rows(logits), labels.contiguous()
    rows, cols = logits.shape
    out, shape = new_narrow(logits, (rows, cols), E5M2, "tensor"), logits.new_empty(rows, 2, dtype=torch.float32)
    losses = launch_rows(logits, labels, smoothing, ignore, False, shape)
    _dlogits8_kernel[(cdiv(rows, 4 * QUADS), cdiv(cols, COLS))](
        logits, labels, shape, bound.most, bound.seen, out.data, out.scale, out.data_t.view(torch.int32),
        rows, cols, out.data_t.shape[1], logits.stride(0), smoothing, ignore,
        SMOOTH=smoothing != 0.0, QUADS=QUADS, COLS=COLS, num_warps=WARPS,
    )  # fmt: skip
    return losses, out


def rows8(logits: Tensor, labels: Tensor, smoothing: float, ignore: int, bound: Bound) -> tuple[Tensor, Narrow]:
    """The losses of rows of logits, which are a temporary, and the gradient of their sum in E5M2."""
    return (launch_rows8 if runs_kernels(logits) else rows8_ref)(logits, labels, smoothing, ignore, bound)
