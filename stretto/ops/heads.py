"""From the residual stream to queries, keys and values: a projection, its heads and their rotary positions.

    q, k, v = split(x @ weight^T + bias)        parts of H, K and K heads of size D
    q, k    = rotate(q), rotate(k)              with rotary positions

    rotate: (a, b) -> (a cos - b sin, b cos + a sin) for the channels a = i, b = i + D/2 of each head

Forward, the product adds the bias, the heads to be rotated are rotated in place in its result, and the parts are views
of it: without rotary positions there is nothing but the product.

Backward, attention returns one gradient for each part, each a tensor of its own with strides of its own. The two
products that follow want one matrix, and the bias wants its column sums. One kernel does all of it: it reads the parts
wherever they are, rotates back (the angles with the other sign), writes the matrix and adds up its columns. Plain torch
would rotate in kernels of their own, copy the parts together and read the matrix once more for the bias.

The kernel moves tiles of [ROWS, GROUP heads, D/2], one tile for each half of a head, so that the angles of a token are
read once for a group of heads. Column sums are taken as sums.py says. All of its arithmetic is fp32.

Any list of parts will do: queries alone, or the keys and values of all layers that attend to one encoder. For queries
and keys that no projection made, `rotate_heads` runs the same kernel, one pass forward and one backward.

Shapes: x [T, C]; weight [W, C], bias [W], W = D * the heads of all parts; cos and sin [T, D/2], fp32, without gradient;
results [T, heads, D].

Saved for backward: x, cos, sin, and the weight as it was given. The weights of several layers that read one input, such
as the queries, keys and values of a Hugging Face model, may be given as they are: their rows are the rows of `weight`.
One matrix of them, in the dtype of the product, exists during the forward product and again during the backward
products; kept in between, it would cost every layer the bytes of its weights once more (6 C^2 in 16 bits for queries,
keys and values of width C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.ops import language
from stretto.ops.language import cdiv, dense_rows, jit, next_power_of_2, runs_kernels, tl, wide
from stretto.ops.linear import linear_gradients
from stretto.ops.op import Op
from stretto.ops.products import Kept, Product, count_flops, join_rows, multiply, split_rows
from stretto.ops.sums import launch_sums

ROTATED = 2  # parts, the first ones: queries and keys


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each head of x [T, heads, D] turned by its token's angles."""
    a, b = wide(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def merge_heads_ref(
    parts: list[Tensor], cos: Tensor | None, sin: Tensor | None, sums: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Returns the parts rotated back, side by side, [T, W], and the sums over its rows in the dtype `sums`, [W], which
    are empty if `sums` is None."""
    turned = [wide(part) for part in parts]
    if cos is not None and sin is not None:
        turned[:ROTATED] = [rotate_ref(part, cos, -sin) for part in turned[:ROTATED]]
    merged = torch.cat(turned, dim=1).flatten(1)
    total = merged.new_empty(0, dtype=torch.float32) if sums is None else merged.sum(0).to(sums)
    return merged.to(parts[0].dtype), total


@jit
def _turn_part(
    part_ptr, out_ptr, cos_ptr, sin_ptr, sums_ptr, group, rows, out_stride, row_stride, head_stride,
    BEFORE: tl.constexpr,  # heads of the parts before this one
    NUM_HEADS: tl.constexpr, D: tl.constexpr, SIGN: tl.constexpr, ROTATE: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = (D + 1) // 2  # an odd head, which has no rotation, has a first half that is longer by one
    head = group * GROUP + tl.arange(0, GROUP)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    in_first = (head < NUM_HEADS) & (col < HALF)
    in_second = (head < NUM_HEADS) & (col < D - HALF)
    read = (part_ptr + head.to(tl.int64) * head_stride + col)[None]
    place = (BEFORE + head) * D + col
    write = (out_ptr + place)[None]
    first_sum = tl.zeros([ROWS, GROUP, BLOCK], tl.float32)
    second_sum = tl.zeros([ROWS, GROUP, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
        first_mask = (row < rows) & in_first[None]
        second_mask = (row < rows) & in_second[None]
        first = tl.load(read + row * row_stride, mask=first_mask, other=0.0).to(tl.float32)
        second = tl.load(read + row * row_stride + HALF, mask=second_mask, other=0.0).to(tl.float32)
        if ROTATE:
            angle = row * HALF + col[None]
            angle_mask = (row < rows) & (col < HALF)[None]
            cos = tl.load(cos_ptr + angle, mask=angle_mask, other=0.0)
            sin = tl.load(sin_ptr + angle, mask=angle_mask, other=0.0) * SIGN
            first, second = first * cos - second * sin, second * cos + first * sin
        tl.store(write + row * out_stride, first.to(out_ptr.dtype.element_ty), mask=first_mask)
        tl.store(write + row * out_stride + HALF, second.to(out_ptr.dtype.element_ty), mask=second_mask)
        if sums_ptr is not None:
            first_sum += first
            second_sum += second
    if sums_ptr is not None:
        sums_ptr += place
        tl.store(sums_ptr, tl.sum(first_sum, 0), mask=in_first)
        tl.store(sums_ptr + HALF, tl.sum(second_sum, 0), mask=in_second)


@jit
def _turn_kernel(
    a_ptr, b_ptr, c_ptr,  # up to three parts; a part that is not there has no heads
    out_ptr, cos_ptr, sin_ptr,
    sums_ptr,  # [programs, width], or None
    rows, out_stride, a_row_stride, a_head_stride, b_row_stride, b_head_stride, c_row_stride, c_head_stride,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,  # heads of each part
    D: tl.constexpr, SIGN: tl.constexpr,
    NUM_ROTATED: tl.constexpr,  # parts
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program turns a group of heads of one part. Parts do not share groups, so a program knows at compile time
    whether its heads are rotated."""
    A_GROUPS: tl.constexpr = (A + GROUP - 1) // GROUP
    B_GROUPS: tl.constexpr = (B + GROUP - 1) // GROUP
    if sums_ptr is not None:
        sums_ptr += tl.program_id(1) * (A + B + C) * D
    group = tl.program_id(0)
    if group < A_GROUPS:
        _turn_part(
            a_ptr, out_ptr, cos_ptr, sin_ptr, sums_ptr, group, rows, out_stride, a_row_stride, a_head_stride,
            0, A, D, SIGN, NUM_ROTATED > 0, ROWS, GROUP, BLOCK, STAGES,
        )  # fmt: skip
    elif group < A_GROUPS + B_GROUPS:
        _turn_part(
            b_ptr, out_ptr, cos_ptr, sin_ptr, sums_ptr, group - A_GROUPS, rows, out_stride, b_row_stride, b_head_stride,
            A, B, D, SIGN, NUM_ROTATED > 1, ROWS, GROUP, BLOCK, STAGES,
        )  # fmt: skip
    else:
        _turn_part(
            c_ptr, out_ptr, cos_ptr, sin_ptr, sums_ptr, group - A_GROUPS - B_GROUPS, rows, out_stride, c_row_stride,
            c_head_stride, A + B, C, D, SIGN, NUM_ROTATED > 2, ROWS, GROUP, BLOCK, STAGES,
        )  # fmt: skip


def launch_turn(
    parts: Sequence[Tensor], out: Tensor, cos: Tensor | None, sin: Tensor | None,
    sign: float, num_rotated: int, total: Tensor | None,
) -> None:  # fmt: skip
    """Writes up to three parts [T, heads, D] side by side to `out`, the first `num_rotated` of them turned, and the
    sums over the rows of `out`, [W], to `total`."""
    rows, _, size = parts[0].shape
    counts = [part.shape[1] for part in parts] + [0] * (3 - len(parts))
    block = next_power_of_2(cdiv(size, 2))
    group = min(next_power_of_2(max(counts)), 8 if max(counts) % 8 == 0 else 4)
    tile = max(1, min(2048 // (group * block), 64))
    groups = sum(cdiv(count, group) for count in counts)
    # With sums as many programs as a GPU holds at once, so that there are few sums to add up; each of them reads two
    # tiles ahead. Otherwise a program for each tile, as far as a grid reaches.
    most = cdiv(4 * language.num_processors(out.device), groups) if total is not None else 65535
    programs = min(cdiv(rows, tile), most)
    partial = None if total is None else out.new_empty(programs, 1, sum(counts) * size, dtype=torch.float32)
    if out.numel():
        cos, sin = (None if t is None else t.contiguous() for t in (cos, sin))
        present = [dense_rows(part) for part in parts]
        present += present[:1] * (3 - len(parts))
        _turn_kernel[(groups, programs)](
            *present, out, cos, sin, partial, rows, out.stride(0),
            *(stride for part in present for stride in part.stride()[:2]),
            *counts, size, sign, num_rotated, ROWS=tile, GROUP=group, BLOCK=block, STAGES=1 if total is None else 3,
        )  # fmt: skip
    if partial is not None and total is not None:
        launch_sums(partial, [total])


def launch_merge_heads(
    parts: list[Tensor], cos: Tensor | None, sin: Tensor | None, sums: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    merged, total = _new_merged(parts, sums)
    column = 0
    for i in range(0, len(parts), 3):
        some = parts[i : i + 3]
        here = slice(column, column + sum(part.shape[1] for part in some) * parts[0].shape[2])
        num_rotated = ROTATED if cos is not None and i == 0 else 0
        launch_turn(some, merged[:, here], cos, sin, -1.0, num_rotated, None if sums is None else total[here])
        column = here.stop
    return merged, total


def _new_merged(parts: list[Tensor], sums: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """An empty matrix [T, W], and an empty vector for the sums over its rows, [W], or [0] if `sums` is None."""
    width = sum(part.shape[1] for part in parts) * parts[0].shape[2]
    total = parts[0].new_empty(0 if sums is None else width, dtype=sums or torch.float32)
    return parts[0].new_empty(parts[0].shape[0], width), total


def _project_and_turn(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], size: int, rotated: int,
    cos: Tensor | None, sin: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns the product [T, W], with its first `rotated` heads of `size` channels turned. This is one op: nothing
    else has seen the product when it is changed in place, and nothing can keep the matrix of all weights."""
    out = multiply(x, join_rows(weights, x.dtype), join_rows(biases, x.dtype) if biases else None)
    return _turn(out, size, rotated, cos, sin)


def _turn(out: Tensor, size: int, rotated: int, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Turns the first `rotated` heads of `out` in place."""
    if cos is not None and sin is not None:
        heads = out[:, : rotated * size].unflatten(1, (rotated, size))
        if runs_kernels(out):
            launch_turn([heads], out, cos, sin, 1.0, 1, None)
        else:
            heads.copy_(rotate_ref(heads, cos, sin))
    return out


_project = Op(
    "project_heads",
    _project_and_turn,
    fake=lambda x, weights: x.new_empty(len(x), sum(map(len, weights))),
    flops=lambda x, weights: count_flops(len(x), *weights),
)
_merge = Op("merge_heads", merge_heads_ref, launch_merge_heads, fake=_new_merged)


class _ProjectHeads(torch.autograd.Function):
    """The parts are views of one product, but their gradients come one by one: an op may not return views, and torch's
    own backward of a split would copy the gradients together before the kernel could read them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, parts: tuple[int, ...], count: int,
        product: Product | None, *parameters: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The parameters are `count` weights, then as many biases or none."""
        need_x, *_ = ctx.needs_input_grad
        ctx.needed = ctx.needs_input_grad[-len(parameters) :]
        weights, biases = list(parameters[:count]), list(parameters[count:])
        ctx.product, ctx.num_weights = product, len(weights) if need_x else 0
        ctx.rows, ctx.dtypes = [weight.shape[0] for weight in weights], [t.dtype for t in parameters]
        size, rotated = sum(ctx.rows) // sum(parts), sum(parts[:ROTATED])
        kept: Kept = (x,)
        if product is None:
            out = _project(x, weights, biases, size, rotated, cos, sin)
        else:
            out, kept = product.multiply(x, join_rows(weights), join_rows(biases) if biases else None)
            _turn(out, size, rotated, cos, sin)
        kept = kept if any(ctx.needed[:count]) else ()
        ctx.save_for_backward(cos, sin, *weights[: ctx.num_weights], *kept)
        return out.view(x.shape[0], sum(parts), size).split(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *dparts: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *others = ctx.saved_tensors
        weights, kept = others[: ctx.num_weights], others[ctx.num_weights :]
        count = len(ctx.rows)
        need_bias, product = any(ctx.needed[count:]), ctx.product
        merging = (list(dparts), cos, sin, ctx.dtypes[count] if need_bias else None)
        made = None if product is None else product.take_merged(*merging)
        if made is None:
            dout, dbias = _merge(*merging)
            made = (None if product is None else product.take(dout)), dbias
        taken, dbias = made
        if product is None:
            dx, dweight = linear_gradients(dout, kept[0] if kept else None, weights)
        else:
            dx, dweight = product.compute_taken(taken, tuple(kept) or None, join_rows(weights) if weights else None)
        dweights = split_rows(dweight, ctx.rows, ctx.dtypes[:count], ctx.needed[:count])
        dbiases = split_rows(dbias if need_bias else None, ctx.rows, ctx.dtypes[count:], ctx.needed[count:])
        return dx, None, None, None, None, None, *dweights, *dbiases


def project_heads(
    x: Tensor, weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor] | None, parts: Sequence[int],
    cos: Tensor | None = None, sin: Tensor | None = None, product: Product | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Projects x [T, C] to heads and returns one tensor [T, heads, D] for each number of heads in `parts`; with cos and
    sin [T, D/2] the first two, queries and keys, are rotated. The product has the dtype of x or, like F.linear, of an
    enclosing autocast; parameters may have any dtype. Several weights, and as many biases or None, are one projection,
    whose rows they have in their order; a part need not end where a weight ends. `product` says how to multiply, if not
    in that dtype."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    heads, width = sum(parts), sum([weight.shape[0] for weight in weights])
    fit = x.ndim == 2 and all(w.shape[1:] == x.shape[1:] for w in weights) and width % heads == 0
    if not fit or (biases and [b.shape for b in biases] != [w.shape[:1] for w in weights]):
        of_weights, of_biases = ([list(t.shape) for t in some] for some in (weights, biases))
        raise ValueError(
            f"x {list(x.shape)}, weights {of_weights} and biases {of_biases} do not give {heads} heads: they have to "
            "be [T, C] and together [heads * D, C] and [heads * D]"
        )
    if (cos is None) != (sin is None) or any(
        t is not None and (t.shape != (x.shape[0], width // heads // 2) or width // heads % 2) for t in (cos, sin)
    ):
        shapes = [None if t is None else list(t.shape) for t in (cos, sin)]
        raise ValueError(f"cos and sin {shapes} have to be [T, D/2] = {[x.shape[0], width / heads / 2]} both")
    x = x.to(language.product_dtype(x))
    return _ProjectHeads.apply(x, cos, sin, tuple(parts), len(weights), product, *weights, *biases)


class _RotateHeads(torch.autograd.Function):
    """Merging parts rotates them back; with the angles' other sign it rotates them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _turn_both(q, k, cos, -sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_turn_both(dq, dk, *ctx.saved_tensors), None, None


def _turn_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    merged, _ = _merge([q, k], cos, sin, None)
    heads = [q.shape[1], k.shape[1]]
    return merged.view(q.shape[0], sum(heads), q.shape[2]).split(heads, dim=1)


def rotate_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, [T, heads, D] each, turned by their tokens' angles, cos and sin [T, D/2], fp32."""
    if q.ndim != 3 or k.ndim != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]) or q.shape[2] % 2:
        raise ValueError(f"queries {list(q.shape)} and keys {list(k.shape)} have to be [T, heads, D], D even")
    if any(t.shape != (q.shape[0], q.shape[2] // 2) for t in (cos, sin)):
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} have to be {[q.shape[0], q.shape[2] // 2]}")
    return _RotateHeads.apply(q, k, cos, sin)
