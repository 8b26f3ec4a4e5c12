"""The sum in front of a norm, and what norm.py and affine.py share around their kernels.

    stream = residual + scale * dropout(branch + branch_bias)         y = norm or affine of the stream

Both files have an op of y and stream and a second op for the backward pass. The arguments of these ops are NamedTuples,
`Forward` and `Backward` in each file, with these fields in common:

    Forward    branch, residual [T, C]; branch_bias, weight, bias [C]; p, key: dropout; post
    Backward   dy, dstream: gradients of y and stream, None where that result was not used
               stream, stats, weight, key: saved by the forward pass
               p, post
               branch_rows: rows of the branch; None where its gradient is the same tensor as the residual's
               weight_dtype, bias_dtype, branch_bias_dtype: of the gradients; None where one is not needed

A pre-norm model uses y and stream. A post-norm model uses y twice, for the next branch and as the next residual, and
asks for that by `post`: then dstream is the gradient of the second y, and the backward kernel adds it to dy.

Backward kernels walk over the rows with few programs, keep the sums over rows that are the gradients of the parameters
in registers, and leave it to sums.py to add up the programs' sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.ops.dropout import dropout_ref
from stretto.ops.language import dense_rows, next_power_of_2, num_processors, wide
from stretto.ops.sums import launch_sums


def add_ref(
    branch: Tensor,
    residual: Tensor,
    branch_bias: Tensor | None,
    p: float,
    key: Tensor | None,
    scale: Tensor | None = None,
    branch_at: Tensor | None = None,
) -> Tensor:
    """Returns the stream."""
    branch = wide(branch) if branch_bias is None else wide(branch) + branch_bias
    if key is not None:
        branch = dropout_ref(branch, p, key)
    branch = branch if scale is None else scale * branch
    if branch_at is not None:
        branch = torch.zeros_like(residual, dtype=branch.dtype).index_copy(0, find_tokens(branch_at), branch)
    return (wide(residual) + branch).to(residual.dtype)


def find_tokens(at: Tensor) -> Tensor:
    """The tokens that have a row, in the order of rows; `at` has the row of each token, or -1."""
    return (at >= 0).nonzero().flatten()


def split_gradient_ref(
    a: Any,
    dx: Tensor,
    sums: Sequence[tuple[torch.dtype | None, Tensor]],
    scale: Tensor | None = None,
    branch_at: Tensor | None = None,
) -> list[Tensor]:
    """Returns dresidual; dbranch, if it is another tensor; then the sums over rows whose dtype is given, first of
    `sums`, then that of branch_bias. `dx` is the gradient of the stream."""
    inputs = [dx]
    if a.branch_rows is not None:
        dbranch = dx if branch_at is None else dx[find_tokens(branch_at)]
        dbranch = dbranch if a.key is None else dropout_ref(dbranch, a.p, a.key)
        inputs.append(dbranch if scale is None else scale * dbranch)
    copies = [a.stream.new_empty(d.shape).copy_(d) for d in inputs]  # never an alias of dstream
    terms = [*sums, (a.branch_bias_dtype, inputs[-1])]
    return copies + [term.sum(0).to(dtype) for dtype, term in terms if dtype is not None]


def new_gradients(
    stream: Tensor,
    branch_rows: int | None,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    branch_bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Empty results of a backward op, in the order of split_gradient_ref."""
    sizes = [len(stream)] if branch_rows is None else [len(stream), branch_rows]
    dtypes = [dtype for dtype in (weight_dtype, bias_dtype, branch_bias_dtype) if dtype is not None]
    activations = [stream.new_empty(rows, stream.shape[1]) for rows in sizes]
    return activations + [stream.new_empty(stream.shape[1], dtype=dtype) for dtype in dtypes]


def launch_backward(kernel: Any, a: Any, *own: Any, **constants: Any) -> list[Tensor]:
    """Runs a backward kernel. `own` are its own arguments, which come after the gradients and the stream."""
    gradients = new_gradients(a.stream, a.branch_rows, a.weight_dtype, a.bias_dtype, a.branch_bias_dtype)
    dresidual, dbranch = gradients[0], None if a.branch_rows is None else gradients[1]
    sums = gradients[1:] if dbranch is None else gradients[2:]
    dy, dstream, stream = dense_rows(a.dy), dense_rows(a.dstream), dense_rows(a.stream)
    rows, cols = stream.shape
    if rows == 0:
        for total in sums:
            total.zero_()
        return gradients
    # A thread has 16 channels and their sums, and 8 warps fill a processor: then a thread may use all of its 255
    # registers and every program is resident. While a row is in work the next two are being loaded: 8 warps * 32
    # threads * 16 channels * 3 tensors * 2 rows, 48 KiB of bf16, more than a processor's share of the memory's
    # bandwidth times its latency. More programs would mean more partial sums to write and to add. Rows of more than
    # 4096 channels have a program of up to 32 warps to themselves.
    block = next_power_of_2(cols)
    num_warps = max(1, block // 512)
    programs = min(rows, num_processors(stream.device) * max(1, 8 // num_warps))
    partial = stream.new_empty(programs, len(sums), cols, dtype=torch.float32)
    kernel[(programs,)](
        dy, dstream, stream, *own, dresidual, dbranch, partial, rows, cols,
        0 if dy is None else dy.stride(0), 0 if dstream is None else dstream.stride(0), stream.stride(0),
        P=a.p, DWEIGHT=a.weight_dtype is not None, DBIAS=a.bias_dtype is not None,
        DBRANCH_BIAS=a.branch_bias_dtype is not None, BLOCK=block,
        STAGES=3 if block * stream.element_size() <= 32768 else 1,  # shared memory holds two rows up to this size
        POST=a.post and dy is not None and dstream is not None, num_warps=num_warps, **constants,
    )  # fmt: skip
    launch_sums(partial, sums)
    return gradients


def save(ctx: Any, a: Any, output: tuple[Tensor, Tensor, Tensor], same: bool, *own: Tensor | None) -> None:
    """Keeps what `run_backward` needs, and `own` for the backward op. `same`: the sum has neither dropout nor scale nor
    places, so that the gradient of the branch is that of the residual."""
    _, stream, stats = output
    ctx.save_for_backward(a.residual if a.branch is None else stream, stats, a.weight, a.key, *own)
    ctx.p, ctx.post, ctx.branch_rows = a.p, a.post, None if same or a.branch is None else len(a.branch)
    ctx.dtypes = [None if t is None else t.dtype for t in (a.weight, a.bias, a.branch_bias)]
    ctx.mark_non_differentiable(*((stream, stats) if a.branch is None else (stats,)))
    ctx.set_materialize_grads(False)  # a result that was not used has gradient None, and costs nothing


def run_backward(ctx: Any, op: Any, dy: Tensor | None, dstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns a gradient, or None, for each argument of the forward op."""
    count = len(ctx.needs_input_grad)
    if ctx.post and dy is None:
        dy, dstream = dstream, None
    if dy is None and dstream is None:
        return (None,) * count
    for_branch, _, for_branch_bias, for_weight, for_bias, *_ = ctx.needs_input_grad
    wanted = (for_weight and dy is not None, for_bias and dy is not None, for_branch_bias)
    dtypes = [dtype if want else None for dtype, want in zip(ctx.dtypes, wanted, strict=True)]
    gradients = iter(op(dy, dstream, *ctx.saved_tensors, ctx.p, ctx.post, ctx.branch_rows, *dtypes))
    dresidual = next(gradients)
    dbranch = dresidual if ctx.branch_rows is None else next(gradients)
    dweight, dbias, dbranch_bias = (None if dtype is None else next(gradients) for dtype in dtypes)
    return dbranch if for_branch else None, dresidual, dbranch_bias, dweight, dbias, *(None,) * (count - 5)


class Again(torch.autograd.Function):
    """Returns y as a second result. Its gradient goes where the gradient of `stream` would go, so that the backward
    kernel adds it to the gradient of the first y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stream: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


def choose_results(
    branch: Tensor | None, residual: Tensor, y: Tensor, stream: Tensor, post: bool
) -> tuple[Tensor, Tensor]:
    """Returns y and what the next branch is added to."""
    if branch is None:
        return y, y if post else residual
    return y, Again.apply(y, stream) if post else stream


def check_sum(
    name: str, branch: Tensor | None, residual: Tensor, p: float, key: Tensor | None, all_tokens: bool = True
) -> None:
    if branch is not None and (branch.dtype != residual.dtype or (all_tokens and branch.shape != residual.shape)):
        raise ValueError(
            f"{name} takes branch and residual of one shape and dtype, "
            f"not {list(branch.shape)} {branch.dtype} and {list(residual.shape)} {residual.dtype}"
        )
    if not 0 <= p < 1 or (p > 0 and branch is not None and (key is None or key.shape != (2,))):
        raise ValueError(f"{name} takes 0 <= p < 1, and a key [2] with p > 0, not p = {p} and key = {key}")
