"""The sum in front of a norm, and what norm.py and affine.py share around their kernels.

    stream = residual + scale * dropout(branch + branch_bias)         y = norm or affine of the stream

Both files have an op of y and stream and a second op for the backward pass. The first arguments of these ops are in the
tuples `Forward` and `Backward`.

A pre-norm model uses y and stream. A post-norm model uses y twice, for the next branch and as the next residual, and
asks for that by `post`: then dstream is the gradient of the second y, and the backward kernel adds it to dy.

`from_output` keeps y for the backward pass (Tempo, arXiv 2210.10246) instead of the stream. The matrix product behind
it keeps y anyway, and nobody else needs the stream. What the backward pass has to know, xhat of a norm or the stream of
an affine, is

    (y - bias) / weight        0 in a lost channel: |weight| <= 2^-10 |bias|, or |weight| < 1e-20

The error of y is that of its rounding, so what is restored is off by half an ulp of y divided by the weight: less than
one rounding in a channel where |weight| >= |bias|, nothing that is left in a lost one. `can_restore` says whether all
channels are good enough for training. The parameters must not change between the two passes.

Backward kernels walk over the rows with few programs, keep the sums over rows that are the gradients of the parameters
in registers, and leave it to sums.py to add up the programs' sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.ops.dropout import drop_ref, keeps, row_words
from stretto.ops.language import dense_rows, jit, next_power_of_2, num_processors, tl, wide, wide_dtype
from stretto.ops.sums import launch_sums


class Forward(NamedTuple):
    branch: Tensor | None  # [T, C]; None: the residual is the stream
    residual: Tensor  # [T, C]
    branch_bias: Tensor | None  # [C]
    weight: Tensor | None  # [C], of the norm or affine
    bias: Tensor | None  # [C], of the norm or affine
    p: float  # probability of dropout
    key: Tensor | None  # [2]; None: no dropout
    post: bool
    from_output: bool  # y is kept for the backward pass, not the stream


class Backward(NamedTuple):
    dy: Tensor | None  # gradient of y; None: y was not used
    dstream: Tensor | None  # gradient of the stream; None: the stream was not used
    kept: Tensor  # the stream, or with from_output y
    stats: Tensor
    weight: Tensor | None
    bias: Tensor | None  # of the norm or affine, if it is needed
    key: Tensor | None
    p: float
    post: bool
    from_output: bool
    tokens: int  # rows of the stream
    branch_rows: int | None  # rows of the branch; None: its gradient is the same tensor as the residual's
    weight_dtype: torch.dtype | None  # dtype of the gradient; None: the gradient is not needed
    bias_dtype: torch.dtype | None
    branch_bias_dtype: torch.dtype | None


# A channel is lost if the rounding of a bf16 y is as large as the weight, or if 1 / weight nears the end of fp32.
LOST_RATIO, LOST_SIZE = 2.0**-10, 1e-20
# A channel is good for training if the rounding of y is at most 16 times that of xhat, and fp16 can hold y.
GOOD_RATIO, GOOD_SIZE = 1 / 16, 1e-3


def can_restore(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Whether y determines all channels well enough for training: a bool on the device, which the host need not wait
    for."""
    size = wide(weight).abs()
    good = size >= GOOD_SIZE
    return (good if bias is None else good & (size >= GOOD_RATIO * wide(bias).abs())).all()


def restore_ref(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns (y - bias) / weight, and 0 in lost channels."""
    x = wide(y) if bias is None else wide(y) - bias
    if weight is None:
        return x
    size = wide(weight).abs()
    lost = size < LOST_SIZE if bias is None else (size < LOST_SIZE) | (size <= LOST_RATIO * wide(bias).abs())
    return torch.where(lost, 0.0, x / weight)


def add_ref(
    branch: Tensor, residual: Tensor, branch_bias: Tensor | None, p: float, key: Tensor | None,
    scale: Tensor | None = None, branch_at: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the stream."""
    branch = drop_ref(wide(branch) if branch_bias is None else wide(branch) + branch_bias, p, key)
    branch = branch if scale is None else scale * branch
    if branch_at is not None:
        branch = torch.zeros_like(residual, dtype=branch.dtype).index_copy(0, find_tokens(branch_at), branch)
    return (wide(residual) + branch).to(residual.dtype)


def find_tokens(at: Tensor) -> Tensor:
    """The tokens that have a row, in the order of rows; `at` has the row of each token, or -1."""
    return (at >= 0).nonzero().flatten()


def open_gradient_ref(a: Backward) -> tuple[Tensor | None, Tensor]:
    """Returns the whole gradient of y, and the gradient of the stream but for the part that comes through y."""
    dy, dstream = a.dy, a.dstream
    if a.post and dy is not None and dstream is not None:
        dy, dstream = wide(dy) + dstream, None
    shape, dtype = (a.tokens, a.kept.shape[1]), wide_dtype(a.kept.dtype)
    dx = a.kept.new_zeros(shape, dtype=dtype) if dstream is None else wide(dstream)
    return None if dy is None else wide(dy), dx


def split_gradient_ref(
    a: Backward, dx: Tensor, sums: Sequence[tuple[torch.dtype | None, Tensor]], scale: Tensor | None, at: Tensor | None
) -> list[Tensor]:
    """Returns dresidual; dbranch, if it is another tensor; then the sums over rows whose dtype is given, first of
    `sums`, then that of branch_bias. `dx` is the gradient of the stream, `at` the place of each token in the branch."""
    inputs = [dx]
    if a.branch_rows is not None:
        dbranch = drop_ref(dx if at is None else dx[find_tokens(at)], a.p, a.key)
        inputs.append(dbranch if scale is None else scale * dbranch)
    copies = [a.kept.new_empty(d.shape).copy_(d) for d in inputs]  # never an alias of dstream
    terms = [*sums, (a.branch_bias_dtype, inputs[-1])]
    return copies + [term.sum(0).to(dtype) for dtype, term in terms if dtype is not None]


@jit
def invert(weight, bias, RATIO: tl.constexpr = LOST_RATIO, SIZE: tl.constexpr = LOST_SIZE):
    """Returns what restore_ref multiplies y - bias by: 1 / weight, or 0 in a lost channel."""
    lost = (tl.abs(weight) < SIZE) | (tl.abs(weight) <= RATIO * tl.abs(bias))
    return tl.where(lost, 0.0, 1 / tl.where(lost, 1.0, weight))


@jit
def find_row(at_ptr, token, inside):
    """Returns the number of the token's row and a mask of its elements, all False if it has no row."""
    at, mask = token, inside
    if at_ptr is not None:
        at = tl.load(at_ptr + token).to(tl.int64)
        mask = inside & (at >= 0)
    return at, mask


@jit
def add_row(
    branch_ptr,  # None: the residual is the stream, which is not written
    residual_ptr, branch_bias_ptr, key_ptr, scale_ptr, branch_at_ptr, stream_ptr, row, col, inside, cols,
    branch_stride, residual_stride, P: tl.constexpr,
):  # fmt: skip
    """Computes add_ref for one row, stores the stream, and returns it in fp32."""
    x = tl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        at, mask = find_row(branch_at_ptr, row, inside)
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
    return x


@jit
def store_sums(
    sums_ptr, program, dweight, dbias, dbranch_bias, col, cols,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, DBRANCH_BIAS: tl.constexpr,
):  # fmt: skip
    """Stores those of a program's sums that were asked for."""
    sums_ptr += program.to(tl.int64) * (DWEIGHT + DBIAS + DBRANCH_BIAS) * cols + col
    if DWEIGHT:
        tl.store(sums_ptr, dweight, mask=col < cols)
    if DBIAS:
        tl.store(sums_ptr + DWEIGHT * cols, dbias, mask=col < cols)
    if DBRANCH_BIAS:
        tl.store(sums_ptr + (DWEIGHT + DBIAS) * cols, dbranch_bias, mask=col < cols)


def launch_forward(kernel: Any, a: Forward, *own: Any, **named: Any) -> None:
    """Runs a forward kernel. `own` are its own arguments and its results, which come after the shared tensors."""
    branch, residual, (rows, cols) = dense_rows(a.branch), dense_rows(a.residual), a.residual.shape
    if rows:
        # A program has one row, a warp 1024 channels, a thread 32: four 16-byte loads of each bf16 tensor in flight,
        # registers for about 24 warps a processor; and up to 1024 channels the sums need no barrier.
        block = next_power_of_2(cols)
        kernel[(rows,)](
            branch, residual, dense_rows(a.branch_bias), dense_rows(a.weight), dense_rows(a.bias), a.key, *own, cols,
            0 if branch is None else branch.stride(0), residual.stride(0),
            P=a.p, BLOCK=block, num_warps=max(1, block // 1024), **named,
        )  # fmt: skip


def new_stream(branch: Tensor | None, residual: Tensor) -> Tensor:
    """An empty stream. Without a branch the residual is the stream; an op may not return its argument, so this has no
    rows."""
    return residual.new_empty(0 if branch is None else residual.shape[0], residual.shape[1])


def new_gradients(
    kept: Tensor, tokens: int, branch_rows: int | None,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None, branch_bias_dtype: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Empty results of a backward op, in the order of split_gradient_ref."""
    sizes = [tokens] if branch_rows is None else [tokens, branch_rows]
    dtypes = [dtype for dtype in (weight_dtype, bias_dtype, branch_bias_dtype) if dtype is not None]
    activations = [kept.new_empty(rows, kept.shape[1]) for rows in sizes]
    return activations + [kept.new_empty(kept.shape[1], dtype=dtype) for dtype in dtypes]


def launch_backward(kernel: Any, a: Backward, *own: Any, **constants: Any) -> list[Tensor]:
    """Runs a backward kernel. `own` are its own arguments, which come after the gradients and what was kept."""
    gradients = new_gradients(a.kept, a.tokens, a.branch_rows, a.weight_dtype, a.bias_dtype, a.branch_bias_dtype)
    dresidual, dbranch = gradients[0], None if a.branch_rows is None else gradients[1]
    sums = gradients[1:] if dbranch is None else gradients[2:]
    dy, dstream, kept = dense_rows(a.dy), dense_rows(a.dstream), dense_rows(a.kept)
    rows, cols = a.tokens, kept.shape[1]
    # A thread has 16 channels and their sums, and 8 warps fill a processor: then a thread may use all of its 255
    # registers and every program is resident. While a row is in work the next two are being loaded: 8 warps * 32
    # threads * 16 channels * 3 tensors * 2 rows, 48 KiB of bf16, more than a processor's share of the memory's
    # bandwidth times its latency. More programs would mean more partial sums to write and to add. Rows of more than
    # 4096 channels have a program of up to 32 warps to themselves.
    block = next_power_of_2(cols)
    num_warps = max(1, block // 512)
    programs = min(rows, num_processors(kept.device) * max(1, 8 // num_warps))
    partial = kept.new_empty(programs, len(sums), cols, dtype=torch.float32)
    if programs:
        kernel[(programs,)](
            dy, dstream, kept, *own, dresidual, dbranch, partial, rows, cols,
            0 if dy is None else dy.stride(0), 0 if dstream is None else dstream.stride(0), kept.stride(0),
            P=a.p, DWEIGHT=a.weight_dtype is not None, DBIAS=a.bias_dtype is not None,
            DBRANCH_BIAS=a.branch_bias_dtype is not None, BLOCK=block,
            STAGES=3 if block * kept.element_size() <= 32768 else 1,  # shared memory holds two rows up to this size
            POST=a.post and dy is not None and dstream is not None, FROM_OUTPUT=a.from_output,
            num_warps=num_warps, **constants,
        )  # fmt: skip
    launch_sums(partial, sums)
    return gradients


def save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], plain: bool, with_bias: bool, *own: Tensor | None
) -> None:
    """Keeps what `run_backward` needs, and `own` for the backward op. `plain`: the sum has neither scale nor places;
    without dropout the gradient of the branch is then that of the residual."""
    branch, residual, branch_bias, weight, bias, ctx.p, key, ctx.post, ctx.from_output, *_ = inputs
    y, stream, stats = output
    kept = y if ctx.from_output else residual if branch is None else stream
    ctx.save_for_backward(kept, stats, weight, bias if ctx.from_output or with_bias else None, key, *own)
    ctx.tokens = residual.shape[0]
    ctx.branch_rows = None if branch is None or (plain and key is None) else branch.shape[0]
    ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias, branch_bias)]
    ctx.mark_non_differentiable(*((stream, stats) if branch is None else (stats,)))
    ctx.set_materialize_grads(False)  # a result that was not used has gradient None, and costs nothing


def run_backward(
    ctx: Any, op: Any, dy: Tensor | None, dstream: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    """Returns a gradient, or None, for each argument of the forward op. `options` are the last arguments of the op."""
    count = len(ctx.needs_input_grad)
    if ctx.post and dy is None:
        dy, dstream = dstream, None
    if dy is None and dstream is None:
        return (None,) * count
    for_branch, _, for_branch_bias, for_weight, for_bias, *_ = ctx.needs_input_grad
    wanted = (for_weight and dy is not None, for_bias and dy is not None, for_branch_bias)
    dtypes = [dtype if want else None for dtype, want in zip(ctx.dtypes, wanted, strict=True)]
    kept, stats, weight, bias, key, *own = ctx.saved_tensors
    saved = (kept, stats, weight, bias, key, ctx.p, ctx.post, ctx.from_output, ctx.tokens, ctx.branch_rows)
    gradients = iter(op(dy, dstream, *saved, *dtypes, *own, *options))
    dresidual = next(gradients)
    dbranch = dresidual if ctx.branch_rows is None else next(gradients)
    dweight, dbias, dbranch_bias = (None if dtype is None else next(gradients) for dtype in dtypes)
    return dbranch if for_branch else None, dresidual, dbranch_bias, dweight, dbias, *(None,) * (count - 5)


class Again(torch.autograd.Function):
    """Returns x, which is y or the residual, as a second result. Its gradient goes where the gradient of `stream` would
    go, so that the backward kernel adds it to the other gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor]:
        return None, dx


def check_sum(
    name: str, branch: Tensor | None, residual: Tensor, p: float, key: Tensor | None, all_tokens: bool = True
) -> tuple[float, Tensor | None]:
    """Returns p and key, or 0 and None where nothing is dropped. `all_tokens`: the branch has a row for each token."""
    if branch is not None and (branch.dtype != residual.dtype or (all_tokens and branch.shape != residual.shape)):
        raise ValueError(
            f"{name} takes branch and residual of one shape and dtype, "
            f"not {list(branch.shape)} {branch.dtype} and {list(residual.shape)} {residual.dtype}"
        )
    if not 0 <= p < 1 or (p > 0 and branch is not None and (key is None or key.shape != (2,))):
        raise ValueError(f"{name} takes 0 <= p < 1, and a key [2] with p > 0, not p = {p} and key = {key}")
    return (p, key) if p > 0 and branch is not None else (0.0, None)


def choose_results(
    branch: Tensor | None, residual: Tensor, y: Tensor, stream: Tensor, post: bool
) -> tuple[Tensor, Tensor]:
    """Returns y and what the next branch is added to."""
    if branch is None:
        return y, y if post else residual
    return y, Again.apply(y, stream) if post else stream
