"""An affine in the place of a norm, whose backward pass also pulls its result towards mean 0 and variance 1.

    stream = residual + dropout(branch + branch_bias)
    y      = weight * stream + bias

The sum is the one in front of a norm (residual.py), but nothing is summed over a row. What a norm would enforce, a loss
asks for: the standardization loss of Collins, Ballé and Shlens (arXiv 1903.00925), the KL divergence of y, taken as
Gaussian, from N(0, 1). With mean and variance of a token over its channels, of a channel over the tokens, or of all of
y (`axis`), and weights `rows` that sum to 1 over the tokens that count:

    KL = 1/2 sum over channels, weighted mean over tokens, of (mean^2 + variance - log(variance + eps) - 1)

The value is never needed, only its gradient, which is the same formula on each axis and is added to dy where dy
arrives: nothing has to travel from here to the loss, so recomputation, sharded weights and recorded steps need no care.

    dy'       = dy + factor * rows * (mean + (1 - 1 / (variance + eps)) * (y - mean))
    dresidual = dstream + weight * dy'
    dbranch   = dresidual / (1 - p) where the element was kept, else 0        (p = 0: the same tensor)
    dweight, dbias, dbranch_bias = sums over rows of dy' * stream, dy', dbranch

`rows` is 0 for most tokens (one in `stride` is enough), and a token with 0 costs no sum over its channels. Statistics
of a token are taken in the backward kernel, where its row is in registers anyway. Statistics of channels are taken
from every `stride`-th row after the forward kernel.

With `from_output` (residual.py) the backward pass reads y in place of the stream: the pull takes y itself, dresidual
does not change, and dweight takes stream = (y - bias) / weight, which adds one rounding to it, and is 0 in a lost
channel.

Shapes: branch, residual, stream, y [T, C], one dtype; weight and biases [C], any float dtype, their gradients in it;
rows [T], fp32, 0 unless the row's number is a multiple of `stride`; factor [], fp32, read by the backward pass.
Saved for backward: stream, or with `from_output` y; rows; stats, fp32, [2, C] (mean, variance) or [2, 0] (token); the
dropout key.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.ops import residual as shared
from stretto.ops.dropout import keeps, row_words
from stretto.ops.language import dense_rows, jit, tl, wide, wide_dtype
from stretto.ops.norm import check_width
from stretto.ops.op import Op
from stretto.ops.residual import Backward, Forward, add_row, invert, store_sums

EPS = 1e-5  # a dead token or channel is pulled back by a finite force
AXES = ("token", "channel", "layer")


def standardization_loss(y: Tensor, rows: Tensor, axis: str, eps: float = EPS) -> Tensor:
    """Returns KL, the definition of correct: the backward pass adds autograd's gradient of KL."""
    mean, variance = moments_ref(y, rows, axis)
    kl = 0.5 * (mean.square() + variance - (variance + eps).log() - 1)
    if axis == "token":
        return y.shape[1] * (rows * kl).sum()
    return kl.sum() if axis == "channel" else y.shape[1] * kl


def moments_ref(y: Tensor, rows: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance, [T], [C] or []; in two passes, since E[y^2] - mean^2 cancels."""
    y = wide(y)
    if axis == "token":
        mean = y.mean(1)
        return mean, (y - mean[:, None]).square().mean(1)
    rows = rows.to(y.dtype)
    mean = rows @ y
    mean = mean.mean() if axis == "layer" else mean
    variance = rows @ (y - mean).square()
    return mean, variance.mean() if axis == "layer" else variance


def pull_ref(y: Tensor, rows: Tensor, stats: Tensor) -> Tensor:
    """Returns the gradient of KL in y."""
    mean, variance = (part[:, None] for part in moments_ref(y, rows, "token")) if stats.numel() == 0 else stats
    return rows[:, None] * (mean + (1 - 1 / (variance + EPS)) * (y - mean))


def affine_ref(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = wide(x) if weight is None else wide(x) * weight
    return y if bias is None else y + bias


def add_affine_ref(
    a: Forward, rows: Tensor | None, factor: Tensor | None, stride: int, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, stream and stats."""
    y, stream, stats = new_outputs(a.branch, a.residual, rows, axis)
    x = a.residual
    if a.branch is not None:
        x = stream.copy_(shared.add_ref(a.branch, x, a.branch_bias, a.p, a.key))
    y.copy_(affine_ref(x, a.weight, a.bias))
    fill_stats(stats, x, y, a, rows, stride, axis)
    return y, stream, stats


def affine_backward_ref(a: Backward, rows: Tensor | None, factor: Tensor | None) -> list[Tensor]:
    """Returns the gradients in the order of split_gradient_ref."""
    dy, dx = shared.open_gradient_ref(a)
    sums = []
    if dy is not None:
        if rows is not None and factor is not None:
            y = wide(a.kept) if a.from_output else affine_ref(a.kept, a.weight, a.bias)
            dy = dy + factor * pull_ref(y, rows, a.stats)
        dx = dx + (dy if a.weight is None else dy * a.weight)
        stream = shared.restore_ref(a.kept, a.weight, a.bias) if a.from_output else a.kept
        sums = [(a.weight_dtype, dy * stream), (a.bias_dtype, dy)]
    return shared.split_gradient_ref(a, dx, sums, None, None)


@jit
def _affine_kernel(
    branch_ptr, residual_ptr, branch_bias_ptr, weight_ptr, bias_ptr, key_ptr, y_ptr, stream_ptr, cols, branch_stride,
    residual_stride, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    x = add_row(
        branch_ptr, residual_ptr, branch_bias_ptr, key_ptr, None, None, stream_ptr,
        row, col, inside, cols, branch_stride, residual_stride, P,
    )  # fmt: skip
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * cols + col, x.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _affine_backward_kernel(
    dy_ptr, dstream_ptr,  # None: y, or stream, was not used
    kept_ptr,  # the stream, or with FROM_OUTPUT y
    stats_ptr,  # None: a token has its own statistics
    weight_ptr, bias_ptr, key_ptr,
    rows_ptr,  # None: nothing is pulled
    factor_ptr, dresidual_ptr,
    dbranch_ptr,  # None: dresidual serves as both
    sums_ptr,  # [programs, the sums asked for, cols]
    rows, cols, dy_stride, dstream_stride, kept_stride, P: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, DBRANCH_BIAS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    POST: tl.constexpr,  # dstream is the gradient of a second y
    FROM_OUTPUT: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    bias = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if FROM_OUTPUT:
        inverse = invert(weight, bias)
    if rows_ptr is not None:
        factor = tl.load(factor_ptr)
        if stats_ptr is not None:
            means = tl.load(stats_ptr + col, mask=inside, other=0.0)
            variances = tl.load(stats_ptr + cols + col, mask=inside, other=1.0)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    dbranch_bias = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        dx = tl.zeros([BLOCK], tl.float32)
        if dy_ptr is not None:
            dy = tl.load(dy_ptr + row * dy_stride + col, mask=inside, other=0.0).to(tl.float32)
            if POST:
                dy += tl.load(dstream_ptr + row * dstream_stride + col, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(kept_ptr + row * kept_stride + col, mask=inside, other=0.0).to(tl.float32)
            if rows_ptr is not None:
                strength = factor * tl.load(rows_ptr + row)
                if strength != 0.0:
                    y = x if FROM_OUTPUT else x * weight + bias
                    if stats_ptr is None:
                        mean = tl.sum(tl.where(inside, y, 0.0), 0) / cols
                        away = tl.where(inside, y - mean, 0.0)
                        variance = tl.sum(away * away, 0) / cols
                        dy += strength * (mean + (1 - 1 / (variance + EPSILON)) * away)
                    else:
                        dy += strength * (means + (1 - 1 / (variances + EPSILON)) * (y - means))
            dx = dy * weight
            if DWEIGHT:
                dweight += dy * ((x - bias) * inverse if FROM_OUTPUT else x)
            if DBIAS:
                dbias += dy
        if dstream_ptr is not None and not POST:
            dx += tl.load(dstream_ptr + row * dstream_stride + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual_ptr + row * cols + col, dx.to(dresidual_ptr.dtype.element_ty), mask=inside)
        if dbranch_ptr is not None:
            first, second = row_words(key_ptr, row)
            dx = tl.where(keeps(first, second, col, P), dx * (1 / (1 - P)), 0.0)
            tl.store(dbranch_ptr + row * cols + col, dx.to(dbranch_ptr.dtype.element_ty), mask=inside)
        if DBRANCH_BIAS:
            dbranch_bias += dx
    store_sums(sums_ptr, program, dweight, dbias, dbranch_bias, col, cols, DWEIGHT, DBIAS, DBRANCH_BIAS)


def new_outputs(
    branch: Tensor | None, residual: Tensor, rows: Tensor | None, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty y, stream and stats."""
    by_channel = rows is not None and axis != "token"
    stats = residual.new_empty(2, residual.shape[1] if by_channel else 0, dtype=wide_dtype(residual.dtype))
    return residual.new_empty(residual.shape), shared.new_stream(branch, residual), stats


def fill_stats(stats: Tensor, x: Tensor, y: Tensor, a: Forward, rows: Tensor | None, stride: int, axis: str) -> None:
    """Fills in the statistics of y as the backward pass has it: kept, or computed again from x and not rounded."""
    if rows is not None and stats.numel():
        y = y[::stride] if a.from_output else affine_ref(x[::stride], a.weight, a.bias)
        for part, value in zip(stats, moments_ref(y, rows[::stride], axis), strict=True):
            part.copy_(value)


def launch_add_affine(
    a: Forward, rows: Tensor | None, factor: Tensor | None, stride: int, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, stream, stats = new_outputs(a.branch, a.residual, rows, axis)
    shared.launch_forward(_affine_kernel, a, y, stream)
    fill_stats(stats, a.residual if a.branch is None else stream, y, a, rows, stride, axis)
    return y, stream, stats


def launch_affine_backward(a: Backward, rows: Tensor | None, factor: Tensor | None) -> list[Tensor]:
    own = (a.stats if a.stats.numel() else None, dense_rows(a.weight), dense_rows(a.bias), a.key, rows, factor)
    return shared.launch_backward(_affine_backward_kernel, a, *own, EPSILON=EPS)


_add_affine = Op("add_affine", add_affine_ref, launch_add_affine, fake=new_outputs)
_affine_backward = Op("affine_backward", affine_backward_ref, launch_affine_backward, fake=shared.new_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *_, rows, factor, _, _ = inputs
    shared.save(ctx, inputs, output, True, rows is not None, rows, factor)


@_add_affine.gradient(_save)
def _backward(ctx: Any, dy: Tensor | None, dstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return shared.run_backward(ctx, _affine_backward, dy, dstream)


def add_affine(
    branch: Tensor | None, residual: Tensor, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    p: float, key: Tensor | None, post: bool = False,
    rows: Tensor | None = None, factor: Tensor | None = None, stride: int = 1, axis: str = "token",
    from_output: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns y, the affine of stream = residual + dropout(branch + branch_bias), and what the next branch is added to:
    the stream, or with `post` y. Both are [T, C]. Without a branch the residual is the stream. `rows` and `factor`,
    both or neither, say how strongly the backward pass pulls y towards mean 0 and variance 1. With `from_output` y is
    kept for the backward pass and not the stream; y must not be changed in place."""
    check_width(residual, branch_bias, weight, bias)
    if (rows is None) != (factor is None) or (rows is not None and rows.shape != residual.shape[:1]):
        found = None if rows is None else list(rows.shape)
        raise ValueError(f"add_affine takes rows [{residual.shape[0]}] and a factor, or neither, not rows {found}")
    if axis not in AXES:
        raise ValueError(f"add_affine takes an axis of {', '.join(AXES)}, not {axis!r}")
    if branch is None and branch_bias is not None:
        raise ValueError("add_affine takes a branch_bias only with a branch")
    p, key = shared.check_sum("add_affine", branch, residual, p, key)
    given = (branch, residual, branch_bias, weight, bias, p, key, post, from_output)
    y, stream, _ = _add_affine(*given, rows, factor, stride, axis)
    return shared.choose_results(branch, residual, y, stream, post)
