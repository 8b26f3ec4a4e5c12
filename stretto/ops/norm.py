"""LayerNorm and RMSNorm, fused with what stands before them: the branch's bias, dropout and the residual add.

    stream = residual + dropout(branch + branch_bias)
    y      = (stream - mean) * rstd * weight + norm_bias        rstd = 1 / sqrt(mean((stream - mean)^2) + eps)

RMSNorm leaves `mean` and `norm_bias` out. In plain torch this is four kernels, which together read or write the
activations nine times; here it is one, which reads two tensors and writes two. The sum, and pre-norm and post-norm
models, are described in residual.py.

Where blocks work on some of the tokens only (layer_drop.py), `scale`, one number on the device, multiplies what is
added, and `branch_at` and `y_at` [T] have the row of each token in the branch and in y, or -1. The stream has all
tokens, so nothing is gathered or scattered between blocks that work on different tokens.

The stream is rounded to its dtype first and the rounded values are normalised, as in plain torch: forward, backward
and the next layer see the same numbers. Everything else is fp32. Mean and variance take two passes over the row, which
stays in registers; the one-pass formula E[x^2] - mean^2 would lose all digits where the mean is large.

Backward, with g = dy * weight and xhat = (stream - mean) * rstd, averages over the row's channels:

    dresidual = dstream + (g - mean(g) - xhat * mean(g * xhat)) * rstd        (RMSNorm: no mean(g))
    dbranch   = scale * dresidual / (1 - p) where the element was kept, else 0        (neither: the same tensor)
    dweight, dnorm_bias, dbranch_bias = sums over rows of dy * xhat, dy, dbranch

One kernel reads dy, dstream and stream once and keeps the three sums in registers. With `from_output` (residual.py) it
reads y in place of the stream, xhat = (y - norm_bias) / weight, and needs no mean. In bf16, with weights near 1, dx has
the error of its own rounding as before, and dweight that of one rounding of xhat, 1.7e-3; a lost channel has dweight 0,
and dresidual lacks its term with xhat there.

Shapes: residual and stream [T, C]; branch and y the same, or [rows, C] with `branch_at` and `y_at`; all of one dtype;
weight and biases [C], any float dtype, their gradients in it. Saved for backward: stream; stats, fp32, [2, rows of y]
(rstd, mean) or [1, rows of y] (RMSNorm: rstd); the dropout key, scale and places. With `from_output`: y, which a matrix
product behind it shares; stats [1, rows of y] (rstd); the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.ops import residual as shared
from stretto.ops.dropout import keeps, row_words
from stretto.ops.language import dense_rows, jit, tl, wide, wide_dtype
from stretto.ops.op import Op
from stretto.ops.residual import Backward, Forward, add_row, find_row, find_tokens, invert, store_sums

MAX_WIDTH = 16384  # a row, and in backward three sums as wide, must fit into the registers of one program


def stats_ref(x: Tensor, eps: float, rms: bool) -> Tensor:
    """Returns rstd and mean [2, T], or rstd [1, T]."""
    x = wide(x)
    if rms:
        return (x.square().mean(1) + eps).rsqrt()[None]
    mean = x.mean(1)
    return torch.stack([((x - mean[:, None]).square().mean(1) + eps).rsqrt(), mean])


def normalized_ref(x: Tensor, stats: Tensor) -> Tensor:
    """Returns xhat."""
    return (wide(x) if len(stats) == 1 else wide(x) - stats[1][:, None]) * stats[0][:, None]


def norm_ref(x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    y = normalized_ref(x, stats_ref(x, eps, rms)) * weight
    return (y if norm_bias is None else y + norm_bias).to(x.dtype)


def norm_gradient_ref(g: Tensor, xhat: Tensor, rstd: Tensor, rms: bool) -> Tensor:
    """Returns the gradient of x, by the formula above."""
    dx = g - xhat * (g * xhat).mean(1, keepdim=True)
    return (dx if rms else dx - g.mean(1, keepdim=True)) * rstd[:, None]


def add_norm_ref(
    a: Forward, eps: float, rms: bool, scale: Tensor | None, branch_at: Tensor | None, y_at: Tensor | None, y_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, stream and stats; the definition of correct."""
    y, stream, stats = new_outputs(a.branch, a.residual, a.from_output, rms, y_rows)
    x = a.residual
    if a.branch is not None:
        x = stream.copy_(shared.add_ref(a.branch, x, a.branch_bias, a.p, a.key, scale, branch_at))
    x = x if y_at is None else x[find_tokens(y_at)]
    assert a.weight is not None
    return y.copy_(norm_ref(x, a.weight, a.bias, eps, rms)), stream, stats.copy_(stats_ref(x, eps, rms)[: len(stats)])


def norm_backward_ref(
    a: Backward, scale: Tensor | None, branch_at: Tensor | None, y_at: Tensor | None, rms: bool
) -> list[Tensor]:
    """Returns the gradients in the order of split_gradient_ref."""
    dy, dx = shared.open_gradient_ref(a)
    sums = []
    if dy is not None and a.weight is not None:
        tokens = None if y_at is None else find_tokens(y_at)
        if a.from_output:
            xhat = shared.restore_ref(a.kept, a.weight, a.bias)
        else:
            xhat = normalized_ref(a.kept if tokens is None else a.kept[tokens], a.stats)
        inner = norm_gradient_ref(dy * a.weight, xhat, a.stats[0], rms)
        dx = dx + inner if tokens is None else dx.index_add(0, tokens, inner)
        sums = [(a.weight_dtype, dy * xhat), (a.bias_dtype, dy)]
    return shared.split_gradient_ref(a, dx, sums, scale, branch_at)


@jit
def _write_norm(
    x, row, col, inside, weight_ptr, norm_bias_ptr, y_ptr, stats_ptr, rows, cols, eps,
    RMS: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    if not RMS:
        mean = tl.div_rn(tl.sum(x, 0), tl.cast(cols, tl.float32))  # an error here shifts the whole row
        if MEAN:
            tl.store(stats_ptr + rows + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / cols + eps)
    tl.store(stats_ptr + row, rstd)
    y = x * rstd * tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if norm_bias_ptr is not None:
        y += tl.load(norm_bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _norm_kernel(
    branch_ptr, residual_ptr, branch_bias_ptr, weight_ptr, norm_bias_ptr, key_ptr, scale_ptr, branch_at_ptr, y_at_ptr,
    y_ptr, stream_ptr, stats_ptr, y_rows, cols, branch_stride, residual_stride, eps,
    P: tl.constexpr, RMS: tl.constexpr,
    MEAN: tl.constexpr,  # the mean is kept
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    x = add_row(
        branch_ptr, residual_ptr, branch_bias_ptr, key_ptr, scale_ptr, branch_at_ptr, stream_ptr,
        row, col, inside, cols, branch_stride, residual_stride, P,
    )  # fmt: skip
    if y_at_ptr is None:
        _write_norm(x, row, col, inside, weight_ptr, norm_bias_ptr, y_ptr, stats_ptr, y_rows, cols, eps, RMS, MEAN)
    else:
        at = tl.load(y_at_ptr + row).to(tl.int64)
        if at >= 0:
            _write_norm(x, at, col, inside, weight_ptr, norm_bias_ptr, y_ptr, stats_ptr, y_rows, cols, eps, RMS, MEAN)


@jit
def _norm_backward_kernel(
    dy_ptr, dstream_ptr,  # None: y, or stream, was not used
    kept_ptr,  # the stream, or with FROM_OUTPUT y
    stats_ptr, weight_ptr, norm_bias_ptr, key_ptr, scale_ptr, branch_at_ptr, y_at_ptr, y_rows, dresidual_ptr,
    dbranch_ptr,  # None: dresidual serves as both
    sums_ptr,  # [programs, the sums asked for, cols]
    rows, cols, dy_stride, dstream_stride, kept_stride, P: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, DBRANCH_BIAS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    POST: tl.constexpr,  # dstream is the gradient of a second y
    FROM_OUTPUT: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    if dy_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
        if FROM_OUTPUT:
            norm_bias = tl.zeros([BLOCK], tl.float32)
            if norm_bias_ptr is not None:
                norm_bias = tl.load(norm_bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
            inverse = invert(weight, norm_bias)
    dweight = tl.zeros([BLOCK], tl.float32)
    dnorm_bias = tl.zeros([BLOCK], tl.float32)
    dbranch_bias = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        dx = tl.zeros([BLOCK], tl.float32)
        if dy_ptr is not None:
            at, mask = find_row(y_at_ptr, row, inside)
            dy = tl.load(dy_ptr + at * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
            if POST:
                dy += tl.load(dstream_ptr + row * dstream_stride + col, mask=inside, other=0.0).to(tl.float32)
            kept_row = at if FROM_OUTPUT else row
            xhat = tl.load(kept_ptr + kept_row * kept_stride + col, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(stats_ptr + at, mask=at >= 0, other=0.0)
            if FROM_OUTPUT:
                xhat = (xhat - norm_bias) * inverse
            elif RMS:
                xhat *= rstd
            else:
                xhat = (xhat - tl.load(stats_ptr + y_rows + at, mask=at >= 0, other=0.0)) * rstd
            g = dy * weight
            if RMS:
                dx = (g - xhat * (tl.sum(g * xhat, 0) / cols)) * rstd
            else:
                # both sums in one reduction: the warps wait for each other once a row, not twice
                mean_gx, mean_g = tl.split(tl.sum(tl.join(g * xhat, g), 0) / cols)
                dx = (g - mean_g - xhat * mean_gx) * rstd
            if DWEIGHT:
                dweight += dy * xhat
            if DBIAS:
                dnorm_bias += dy
        if dstream_ptr is not None and not POST:
            dx += tl.load(dstream_ptr + row * dstream_stride + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual_ptr + row * cols + col, dx.to(dresidual_ptr.dtype.element_ty), mask=inside)
        if dbranch_ptr is not None:
            at, mask = find_row(branch_at_ptr, row, inside)
            if P > 0:
                first, second = row_words(key_ptr, at)
                dx = tl.where(keeps(first, second, col, P), dx * (1 / (1 - P)), 0.0)
            if scale_ptr is not None:
                dx *= tl.load(scale_ptr)
            dx = tl.where(mask, dx, 0.0)
            tl.store(dbranch_ptr + at * cols + col, dx.to(dbranch_ptr.dtype.element_ty), mask=mask)
        if DBRANCH_BIAS:
            dbranch_bias += dx
    store_sums(sums_ptr, program, dweight, dnorm_bias, dbranch_bias, col, cols, DWEIGHT, DBIAS, DBRANCH_BIAS)


def new_outputs(
    branch: Tensor | None, residual: Tensor, from_output: bool, rms: bool, y_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty y, stream and stats."""
    stats = residual.new_empty(1 if rms or from_output else 2, y_rows, dtype=wide_dtype(residual.dtype))
    return residual.new_empty(y_rows, residual.shape[1]), shared.new_stream(branch, residual), stats


def launch_add_norm(
    a: Forward, eps: float, rms: bool, scale: Tensor | None, branch_at: Tensor | None, y_at: Tensor | None, y_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = new_outputs(a.branch, a.residual, a.from_output, rms, y_rows)
    options = {"eps": eps, "RMS": rms, "MEAN": not a.from_output}
    shared.launch_forward(_norm_kernel, a, scale, branch_at, y_at, *outputs, y_rows, **options)
    return outputs


def launch_norm_backward(
    a: Backward, scale: Tensor | None, branch_at: Tensor | None, y_at: Tensor | None, rms: bool
) -> list[Tensor]:
    own = (a.stats, dense_rows(a.weight), dense_rows(a.bias), a.key, scale, branch_at, y_at, a.stats.shape[1])
    return shared.launch_backward(_norm_backward_kernel, a, *own, RMS=rms)


_add_norm = Op("add_norm", add_norm_ref, launch_add_norm, fake=new_outputs)
_norm_backward = Op("norm_backward", norm_backward_ref, launch_norm_backward, fake=shared.new_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *_, ctx.rms, scale, branch_at, y_at, _ = inputs
    shared.save(ctx, inputs, output, scale is None and branch_at is None, False, scale, branch_at, y_at)


@_add_norm.gradient(_save)
def _backward(ctx: Any, dy: Tensor | None, dstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return shared.run_backward(ctx, _norm_backward, dy, dstream, ctx.rms)


def add_norm(
    branch: Tensor | None, residual: Tensor, branch_bias: Tensor | None, weight: Tensor, norm_bias: Tensor | None,
    eps: float, rms: bool, p: float, key: Tensor | None, post: bool = False,
    scale: Tensor | None = None, branch_at: Tensor | None = None, y_at: Tensor | None = None, y_rows: int = 0,
    from_output: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns y, the norm of stream = residual + scale * dropout(branch + branch_bias), and what the next branch is
    added to: the stream, or with `post` y. Both are [T, C]. Without a branch the residual is the stream. With
    `branch_at` the branch has rows for some tokens only, with `y_at` y has, `y_rows` in number. `scale` gets no
    gradient. With `from_output` y is kept for the backward pass and not the stream; y must not be changed in
    place."""
    if branch is None and (branch_bias is not None or scale is not None or branch_at is not None):
        raise ValueError("add_norm takes a branch_bias, a scale or branch_at only with a branch")
    if post and (branch_at is not None or y_at is not None):
        raise ValueError("add_norm with post takes branches of all tokens only")
    for at in (branch_at, y_at):
        if at is not None and (at.shape != residual.shape[:1] or at.dtype != torch.int32):
            raise ValueError(f"add_norm takes places [{len(residual)}], int32, not {list(at.shape)}, {at.dtype}")
    check_width(residual, branch_bias, weight, norm_bias)
    p, key = shared.check_sum("add_norm", branch, residual, p, key, branch_at is None)
    places = (scale, branch_at, y_at, len(residual) if y_at is None else y_rows)
    given = (branch, residual, branch_bias, weight, norm_bias, p, key, post, from_output)
    y, stream, _ = _add_norm(*given, eps, rms, *places)
    return shared.choose_results(branch, residual, y, stream, post)


def norm(
    x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float, rms: bool, from_output: bool = False
) -> Tensor:
    """LayerNorm or RMSNorm of x [T, C]. With `from_output` y is kept for the backward pass and not x."""
    return add_norm(None, x, None, weight, norm_bias, eps, rms, 0.0, None, from_output=from_output)[0]


def check_width(x: Tensor, *parameters: Tensor | None) -> None:
    if x.ndim != 2 or not 1 <= x.shape[1] <= MAX_WIDTH:
        raise ValueError(f"norm takes [tokens, channels] with 1 to {MAX_WIDTH} channels, not {list(x.shape)}")
    for parameter in parameters:
        if parameter is not None and parameter.shape != x.shape[1:]:
            raise ValueError(f"norm of {list(x.shape)} takes parameters [{x.shape[1]}], not {list(parameter.shape)}")
