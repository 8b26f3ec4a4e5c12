"""LayerNorm and RMSNorm, fused with what stands before them: the branch's bias, dropout and the residual add.

    stream = residual + dropout(branch + branch_bias)
    y      = (stream - mean) * rstd * weight + norm_bias        rstd = 1 / sqrt(mean((stream - mean)^2) + eps)

RMSNorm leaves `mean` and `norm_bias` out. In plain torch this is four kernels, which together read or write the
activations nine times; here it is one, which reads two tensors and writes two. A pre-norm model uses both results. A
post-norm model uses y twice, for the next branch and as the next residual: it gets y as both results, and the backward
kernel adds their gradients.

Where blocks work on some of the tokens only (layer_drop.py), `scale`, one number on the device, multiplies what is
added, and `branch_at` and `y_at` [T] say which row of the branch is a token's, and which row of y, -1: none. The stream
is that of all tokens, so nobody need gather or scatter between blocks that work on different ones.

The stream is rounded to its dtype first and the rounded values are normalised, as in plain torch: forward, backward
and the next layer see the same numbers. Everything else is fp32. Mean and variance take two passes over the row, which
stays in registers; the one-pass formula E[x^2] - mean^2 would lose all digits where the mean is large.

Backward, with g = dy * weight and xhat = (stream - mean) * rstd, averages over the row's channels:

    dresidual = dstream + (g - mean(g) - xhat * mean(g * xhat)) * rstd        (RMSNorm: no mean(g))
    dbranch   = scale * dresidual / (1 - p) where the element was kept, else 0        (neither: the same tensor)
    dweight, dnorm_bias, dbranch_bias = sums over rows of dy * xhat, dy, dbranch

One kernel reads dy, dstream and stream once; post-norm, dstream is the gradient of the second y and is added to dy. Its
programs walk over the rows and keep the three sums in registers; a second small kernel adds up the programs' sums in a
fixed order, so results repeat bit for bit.

Shapes: residual and stream [T, C]; branch and y the same, or [rows, C] with `branch_at` and `y_at`; all of one dtype;
weight and biases [C], any float dtype, their gradients in it. Saved for backward: stream; stats, fp32, [2, rows of y]
(rstd, mean) or [1, rows of y] (RMSNorm: rstd); the dropout key, scale and places.
Error: outputs and gradients are at most twice as far from fp64 as those of plain torch that works in fp32 between the
rounded tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.ops.dropout import dropout_ref, keeps, row_words
from stretto.ops.language import INTERPRET, dense_rows, jit, next_power_of_2, num_processors, tl, wide, wide_dtype
from stretto.ops.op import define
from stretto.ops.sums import launch_sums

MAX_WIDTH = 16384  # a row, and in backward three sums as wide, must fit into the registers of one program


def add_ref(
    branch: Tensor,
    residual: Tensor,
    branch_bias: Tensor | None,
    p: float,
    key: Tensor | None,
    scale: Tensor | None = None,
    branch_at: Tensor | None = None,
) -> Tensor:
    """The stream."""
    branch = wide(branch) if branch_bias is None else wide(branch) + branch_bias
    if key is not None:
        branch = dropout_ref(branch, p, key)
    branch = branch if scale is None else scale * branch
    if branch_at is not None:
        branch = torch.zeros_like(residual, dtype=branch.dtype).index_copy(0, find_tokens(branch_at), branch)
    return (wide(residual) + branch).to(residual.dtype)


def find_tokens(at: Tensor) -> Tensor:
    """Which tokens have a row, in the order of rows, given the row of each token, or -1."""
    return (at >= 0).nonzero().flatten()


def stats_ref(x: Tensor, eps: float, rms: bool) -> Tensor:
    """rstd and mean [2, T], or rstd [1, T]."""
    x = wide(x)
    if rms:
        return (x.square().mean(1) + eps).rsqrt()[None]
    mean = x.mean(1)
    return torch.stack([((x - mean[:, None]).square().mean(1) + eps).rsqrt(), mean])


def normalized_ref(x: Tensor, stats: Tensor) -> Tensor:
    """xhat"""
    return (wide(x) if len(stats) == 1 else wide(x) - stats[1][:, None]) * stats[0][:, None]


def norm_ref(x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    y = normalized_ref(x, stats_ref(x, eps, rms)) * weight
    return (y if norm_bias is None else y + norm_bias).to(x.dtype)


def add_norm_ref(
    branch: Tensor,
    residual: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    key: Tensor | None,
    scale: Tensor | None = None,
    branch_at: Tensor | None = None,
    y_at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and stream; the definition of correct."""
    stream = add_ref(branch, residual, branch_bias, p, key, scale, branch_at)
    return norm_ref(stream if y_at is None else stream[find_tokens(y_at)], weight, norm_bias, eps, rms), stream


def norm_backward_ref(
    dy: Tensor | None,
    dstream: Tensor | None,
    stream: Tensor,
    stats: Tensor,
    weight: Tensor,
    weight_dtype: torch.dtype | None,
    norm_bias_dtype: torch.dtype | None,
    branch_bias_dtype: torch.dtype | None,
    p: float,
    key: Tensor | None,
    post: bool,
    scale: Tensor | None,
    branch_at: Tensor | None,
    y_at: Tensor | None,
    branch_rows: int | None,
) -> list[Tensor]:
    """dresidual; dbranch if it is another tensor; then the sums whose dtype is given."""
    if post and dy is not None and dstream is not None:
        dy, dstream = wide(dy) + dstream, None
    dx = torch.zeros_like(stream, dtype=stats.dtype) if dstream is None else wide(dstream)
    sums = []
    if dy is not None:
        tokens = None if y_at is None else find_tokens(y_at)
        xhat, g = normalized_ref(stream if tokens is None else stream[tokens], stats), wide(dy) * weight
        inner = g - xhat * (g * xhat).mean(1, keepdim=True)
        if len(stats) == 2:
            inner = inner - g.mean(1, keepdim=True)
        inner = inner * stats[0][:, None]
        dx = dx + inner if tokens is None else dx.index_add(0, tokens, inner)
        sums = [(weight_dtype, dy * xhat), (norm_bias_dtype, wide(dy))]
    inputs = [dx]
    if branch_rows is not None:
        dbranch = dx if branch_at is None else dx[find_tokens(branch_at)]
        dbranch = dbranch if key is None else dropout_ref(dbranch, p, key)
        inputs.append(dbranch if scale is None else scale * dbranch)
    sums.append((branch_bias_dtype, inputs[-1]))
    copies = [stream.new_empty(d.shape).copy_(d) for d in inputs]  # never an alias of dstream
    return copies + [terms.sum(0).to(dtype) for dtype, terms in sums if dtype is not None]


@jit
def _find_row(at_ptr, token, inside):
    """Where the token's row is, and which of its elements there are."""
    at, mask = token, inside
    if at_ptr is not None:
        at = tl.load(at_ptr + token).to(tl.int64)
        mask = inside & (at >= 0)
    return at, mask


@jit
def _write_norm(
    x, row, col, inside, weight_ptr, norm_bias_ptr, y_ptr, stats_ptr, rows, cols, eps, RMS: tl.constexpr
):  # fmt: skip
    if not RMS:
        mean = tl.div_rn(tl.sum(x, 0), tl.cast(cols, tl.float32))  # an error here shifts the whole row
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
    branch_ptr,  # None: the residual is the stream, which is not written
    residual_ptr,
    branch_bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    key_ptr,
    scale_ptr,
    branch_at_ptr,
    y_at_ptr,
    y_ptr,
    stream_ptr,
    stats_ptr,
    y_rows,
    cols,
    branch_stride,
    residual_stride,
    eps,
    P: tl.constexpr,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    x = tl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        at, mask = _find_row(branch_at_ptr, row, inside)
        branch = tl.load(branch_ptr + at * branch_stride + col, mask=mask, other=0.0).to(tl.float32)
        if branch_bias_ptr is not None:
            branch += tl.load(branch_bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
        if P > 0:
            first, second = row_words(key_ptr, at)
            branch = tl.where(keeps(first, second, col, P), branch * (1 / (1 - P)), 0.0)
        if scale_ptr is not None:
            branch *= tl.load(scale_ptr)
        stream = (x + branch).to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + row * cols + col, stream, mask=inside)
        x = stream.to(tl.float32)
    if y_at_ptr is None:
        _write_norm(x, row, col, inside, weight_ptr, norm_bias_ptr, y_ptr, stats_ptr, y_rows, cols, eps, RMS)
    else:
        at = tl.load(y_at_ptr + row).to(tl.int64)
        if at >= 0:
            _write_norm(x, at, col, inside, weight_ptr, norm_bias_ptr, y_ptr, stats_ptr, y_rows, cols, eps, RMS)


@jit
def _norm_backward_kernel(
    dy_ptr,  # None: y was not used
    dstream_ptr,  # None: stream was not used
    stream_ptr,
    stats_ptr,
    weight_ptr,
    key_ptr,
    scale_ptr,
    branch_at_ptr,
    y_at_ptr,
    dresidual_ptr,
    dbranch_ptr,  # None: dresidual serves as both
    sums_ptr,  # [programs, the sums asked for, cols]
    rows,
    y_rows,
    cols,
    dy_stride,
    dstream_stride,
    stream_stride,
    P: tl.constexpr,
    RMS: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DNORM_BIAS: tl.constexpr,
    DBRANCH_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    POST: tl.constexpr,  # dstream belongs to y
):
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    if dy_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dnorm_bias = tl.zeros([BLOCK], tl.float32)
    dbranch_bias = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        dx = tl.zeros([BLOCK], tl.float32)
        if dy_ptr is not None:
            at, mask = _find_row(y_at_ptr, row, inside)
            dy = tl.load(dy_ptr + at * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
            if POST:
                dy += tl.load(dstream_ptr + row * dstream_stride + col, mask=inside, other=0.0).to(tl.float32)
            xhat = tl.load(stream_ptr + row * stream_stride + col, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(stats_ptr + at, mask=at >= 0, other=0.0)
            g = dy * weight
            if RMS:
                xhat *= rstd
                dx = (g - xhat * (tl.sum(g * xhat, 0) / cols)) * rstd
            else:
                xhat = (xhat - tl.load(stats_ptr + y_rows + at, mask=at >= 0, other=0.0)) * rstd
                # both sums in one reduction: the warps wait for each other once a row, not twice
                mean_gx, mean_g = tl.split(tl.sum(tl.join(g * xhat, g), 0) / cols)
                dx = (g - mean_g - xhat * mean_gx) * rstd
            if DWEIGHT:
                dweight += dy * xhat
            if DNORM_BIAS:
                dnorm_bias += dy
        if dstream_ptr is not None and not POST:
            dx += tl.load(dstream_ptr + row * dstream_stride + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual_ptr + row * cols + col, dx.to(dresidual_ptr.dtype.element_ty), mask=inside)
        if dbranch_ptr is not None:
            at, mask = _find_row(branch_at_ptr, row, inside)
            if P > 0:
                first, second = row_words(key_ptr, at)
                dx = tl.where(keeps(first, second, col, P), dx * (1 / (1 - P)), 0.0)
            if scale_ptr is not None:
                dx *= tl.load(scale_ptr)
            dx = tl.where(mask, dx, 0.0)
            tl.store(dbranch_ptr + at * cols + col, dx.to(dbranch_ptr.dtype.element_ty), mask=mask)
        if DBRANCH_BIAS:
            dbranch_bias += dx
    sums_ptr += program.to(tl.int64) * (DWEIGHT + DNORM_BIAS + DBRANCH_BIAS) * cols + col
    if DWEIGHT:
        tl.store(sums_ptr, dweight, mask=inside)
    if DNORM_BIAS:
        tl.store(sums_ptr + DWEIGHT * cols, dnorm_bias, mask=inside)
    if DBRANCH_BIAS:
        tl.store(sums_ptr + (DWEIGHT + DNORM_BIAS) * cols, dbranch_bias, mask=inside)


def new_outputs(branch: Tensor | None, residual: Tensor, rms: bool, y_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """y, stream, stats. Without a branch the residual is the stream; an op may not return it, so `stream` is empty."""
    rows, cols = residual.shape
    stats = residual.new_empty(1 if rms else 2, y_rows, dtype=wide_dtype(residual.dtype))
    return residual.new_empty(y_rows, cols), residual.new_empty(0 if branch is None else rows, cols), stats


def launch_add_norm(
    branch: Tensor | None,
    residual: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    key: Tensor | None,
    post: bool,
    scale: Tensor | None,
    branch_at: Tensor | None,
    y_at: Tensor | None,
    y_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    y, stream, stats = new_outputs(branch, residual, rms, y_rows)
    branch, residual, (rows, cols) = dense_rows(branch), dense_rows(residual), residual.shape
    if rows:
        # A program has one row, a warp 1024 channels, a thread 32: four 16-byte loads of each bf16 tensor in flight,
        # registers for about 24 warps a processor; and up to 1024 channels the sums need no barrier.
        block = next_power_of_2(cols)
        _norm_kernel[(rows,)](
            branch,
            residual,
            dense_rows(branch_bias),
            dense_rows(weight),
            dense_rows(norm_bias),
            key,
            scale,
            branch_at,
            y_at,
            y,
            stream,
            stats,
            y_rows,
            cols,
            0 if branch is None else branch.stride(0),
            residual.stride(0),
            eps,
            P=p,
            RMS=rms,
            BLOCK=block,
            num_warps=max(1, block // 1024),
        )
    return y, stream, stats


def launch_norm_backward(
    dy: Tensor | None,
    dstream: Tensor | None,
    stream: Tensor,
    stats: Tensor,
    weight: Tensor,
    weight_dtype: torch.dtype | None,
    norm_bias_dtype: torch.dtype | None,
    branch_bias_dtype: torch.dtype | None,
    p: float,
    key: Tensor | None,
    post: bool,
    scale: Tensor | None,
    branch_at: Tensor | None,
    y_at: Tensor | None,
    branch_rows: int | None,
) -> list[Tensor]:
    inputs, sums = new_gradients(stream, weight_dtype, norm_bias_dtype, branch_bias_dtype, branch_rows)
    dy, dstream, stream, (rows, cols) = dense_rows(dy), dense_rows(dstream), dense_rows(stream), stream.shape
    if rows == 0:
        return inputs + [total.zero_() for total in sums]
    # A thread has 16 channels and their sums, and 8 warps fill a processor: then a thread may use all of its 255
    # registers and every program is resident. While a row is in work the next two are being loaded: 8 warps * 32
    # threads * 16 channels * 3 tensors * 2 rows, 48 KiB of bf16, more than a processor's share of the memory's
    # bandwidth times its latency. More programs would mean more partial sums to write and to add. Rows of more than
    # 4096 channels have a program of up to 32 warps to themselves.
    block = next_power_of_2(cols)
    num_warps = max(1, block // 512)
    programs = min(rows, num_processors(stream.device) * max(1, 8 // num_warps))
    partial = stream.new_empty(programs, len(sums), cols, dtype=torch.float32)
    _norm_backward_kernel[(programs,)](
        dy,
        dstream,
        stream,
        stats,
        dense_rows(weight),
        key,
        scale,
        branch_at,
        y_at,
        inputs[0],
        inputs[1] if len(inputs) == 2 else None,
        partial,
        rows,
        stats.shape[1],
        cols,
        0 if dy is None else dy.stride(0),
        0 if dstream is None else dstream.stride(0),
        stream.stride(0),
        P=p,
        RMS=stats.shape[0] == 1,
        DWEIGHT=weight_dtype is not None,
        DNORM_BIAS=norm_bias_dtype is not None,
        DBRANCH_BIAS=branch_bias_dtype is not None,
        BLOCK=block,
        STAGES=3 if block * stream.element_size() <= 32768 else 1,  # shared memory holds two rows up to this size
        POST=post and dy is not None and dstream is not None,
        num_warps=num_warps,
    )
    launch_sums(partial, sums)
    return inputs + sums


def new_gradients(
    stream: Tensor,
    weight_dtype: torch.dtype | None,
    norm_bias_dtype: torch.dtype | None,
    branch_bias_dtype: torch.dtype | None,
    branch_rows: int | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Of the activations, and of the parameters. `branch_rows`: None where the branch's gradient is the residual's."""
    dtypes = [dtype for dtype in (weight_dtype, norm_bias_dtype, branch_bias_dtype) if dtype is not None]
    sizes = [len(stream)] if branch_rows is None else [len(stream), branch_rows]
    inputs = [stream.new_empty(rows, stream.shape[1]) for rows in sizes]
    return inputs, [stream.new_empty(stream.shape[1], dtype=dtype) for dtype in dtypes]


@define("add_norm", "cpu")
def _add_norm(
    branch: Tensor | None,
    residual: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    key: Tensor | None,
    post: bool,
    scale: Tensor | None,
    branch_at: Tensor | None,
    y_at: Tensor | None,
    y_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, stream (see `new_outputs`), stats"""
    if INTERPRET:
        places = (scale, branch_at, y_at, y_rows)
        return launch_add_norm(branch, residual, branch_bias, weight, norm_bias, eps, rms, p, key, post, *places)
    y, stream, stats = new_outputs(branch, residual, rms, y_rows)
    if branch is not None:
        residual = stream.copy_(add_ref(branch, residual, branch_bias, p, key, scale, branch_at))
    residual = residual if y_at is None else residual[find_tokens(y_at)]
    return y.copy_(norm_ref(residual, weight, norm_bias, eps, rms)), stream, stats.copy_(stats_ref(residual, eps, rms))


_add_norm.register_kernel("cuda")(launch_add_norm)


@_add_norm.register_fake
def _(branch: Tensor | None, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return new_outputs(branch, residual, others[4], others[-1])


@define("norm_backward", "cpu")
def _norm_backward(
    dy: Tensor | None,
    dstream: Tensor | None,
    stream: Tensor,
    stats: Tensor,
    weight: Tensor,
    weight_dtype: torch.dtype | None,
    norm_bias_dtype: torch.dtype | None,
    branch_bias_dtype: torch.dtype | None,
    p: float,
    key: Tensor | None,
    post: bool,
    scale: Tensor | None,
    branch_at: Tensor | None,
    y_at: Tensor | None,
    branch_rows: int | None,
) -> list[Tensor]:
    run = launch_norm_backward if INTERPRET else norm_backward_ref
    kept, places = (dy, dstream, stream, stats, weight), (scale, branch_at, y_at)
    return run(*kept, weight_dtype, norm_bias_dtype, branch_bias_dtype, p, key, post, *places, branch_rows)


_norm_backward.register_kernel("cuda")(launch_norm_backward)


@_norm_backward.register_fake
def _(dy: Tensor | None, dstream: Tensor | None, stream: Tensor, *others: Any) -> list[Tensor]:
    weight_dtype, norm_bias_dtype, branch_bias_dtype = others[2:5]
    inputs, sums = new_gradients(stream, weight_dtype, norm_bias_dtype, branch_bias_dtype, others[-1])
    return inputs + sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    branch, residual, branch_bias, weight, norm_bias, _, _, ctx.p, key, ctx.post, scale, branch_at, y_at, _ = inputs
    _, stream, stats = output
    ctx.save_for_backward(residual if branch is None else stream, stats, weight, key, scale, branch_at, y_at)
    ctx.dtypes = [None if t is None else t.dtype for t in (weight, norm_bias, branch_bias)]
    same = branch is None or (key is None and scale is None and branch_at is None)
    ctx.branch_rows = None if same else len(branch)
    ctx.mark_non_differentiable(*((stream, stats) if branch is None else (stats,)))
    ctx.set_materialize_grads(False)  # a result that nobody used has gradient None, and costs nothing


def _backward(ctx: Any, dy: Tensor | None, dstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if ctx.post and dy is None:
        dy, dstream = dstream, None
    if dy is None and dstream is None:
        return (None,) * 14
    stream, stats, weight, key, *places = ctx.saved_tensors
    for_branch, _, for_branch_bias, for_weight, for_norm_bias, *_ = ctx.needs_input_grad
    wanted = (for_weight and dy is not None, for_norm_bias and dy is not None, for_branch_bias)
    dtypes = [dtype if want else None for dtype, want in zip(ctx.dtypes, wanted, strict=True)]
    rest = (ctx.p, key, ctx.post, *places, ctx.branch_rows)
    gradients = iter(_norm_backward(dy, dstream, stream, stats, weight, *dtypes, *rest))
    dresidual = next(gradients)
    dbranch = dresidual if ctx.branch_rows is None else next(gradients)
    dweight, dnorm_bias, dbranch_bias = (None if dtype is None else next(gradients) for dtype in dtypes)
    return dbranch if for_branch else None, dresidual, dbranch_bias, dweight, dnorm_bias, *(None,) * 9


_add_norm.register_autograd(_backward, setup_context=_save)


class Again(torch.autograd.Function):
    """y as a second result. Its gradient goes where the gradient of `stream` would go, so that the norm's own backward
    kernel adds it to that of the first."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stream: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


def add_norm(
    branch: Tensor | None,
    residual: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    key: Tensor | None,
    post: bool = False,
    scale: Tensor | None = None,
    branch_at: Tensor | None = None,
    y_at: Tensor | None = None,
    y_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """y, the norm of stream = residual + scale * dropout(branch + branch_bias), and what the next branch is added to:
    the stream, or with `post` y. Both [T, C]. Without a branch the residual is the stream. `branch_at`: the branch has
    rows for some tokens only; `y_at`: so has y, `y_rows` of them. No gradient for `scale`."""
    if branch is None and (branch_bias is not None or scale is not None or branch_at is not None):
        raise ValueError("add_norm takes a branch_bias, a scale or branch_at only with a branch")
    if post and (branch_at is not None or y_at is not None):
        raise ValueError("add_norm with post takes branches of all tokens only")
    for at in (branch_at, y_at):
        if at is not None and (at.shape != residual.shape[:1] or at.dtype != torch.int32):
            raise ValueError(f"add_norm takes places [{len(residual)}], int32, not {list(at.shape)}, {at.dtype}")
    if branch is not None and (
        branch.dtype != residual.dtype or (branch_at is None and branch.shape != residual.shape)
    ):
        raise ValueError(
            "add_norm takes branch and residual of one shape and dtype, "
            f"not {list(branch.shape)} {branch.dtype} and {list(residual.shape)} {residual.dtype}"
        )
    if not 0 <= p < 1 or (p > 0 and (key is None or key.shape != (2,))):
        raise ValueError(f"add_norm takes 0 <= p < 1, and a key [2] with p > 0, not p = {p} and key = {key}")
    check_width(residual, branch_bias, weight, norm_bias)
    key = key if p > 0 and branch is not None else None
    p = p if key is not None else 0.0
    places = (scale, branch_at, y_at, len(residual) if y_at is None else y_rows)
    y, stream, _ = _add_norm(branch, residual, branch_bias, weight, norm_bias, eps, rms, p, key, post, *places)
    if branch is None:
        return y, y if post else residual
    return y, Again.apply(y, stream) if post else stream


def norm(x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    """LayerNorm or RMSNorm of x [T, C]."""
    check_width(x, weight, norm_bias)
    y, _, _ = _add_norm(None, x, None, weight, norm_bias, eps, rms, 0.0, None, False, None, None, None, len(x))
    return y


def check_width(x: Tensor, *parameters: Tensor | None) -> None:
    if x.ndim != 2 or not 1 <= x.shape[1] <= MAX_WIDTH:
        raise ValueError(f"norm takes [tokens, channels] with 1 to {MAX_WIDTH} channels, not {list(x.shape)}")
    for parameter in parameters:
        if parameter is not None and parameter.shape != x.shape[1:]:
            raise ValueError(f"norm of {list(x.shape)} takes parameters [{x.shape[1]}], not {list(parameter.shape)}")
