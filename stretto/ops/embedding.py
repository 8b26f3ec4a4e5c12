"""The embedding in one kernel: up to three table look-ups, their sum, its norm and dropout.

    x = scale * token[ids] + position[positions] + token_type[types]
    y = dropout(norm(x))                    norm: LayerNorm, RMSNorm or none

Plain torch writes and reads [T, C] for each of these steps; here the tables are read and y is written. Sums and
statistics are fp32, the variance in two passes over the row in registers. Sinusoidal positions are a `position` table
that needs no gradient: computed once by the model's own formula they are exact at any position, which a kernel that
computes its own frequencies is not (at position 1e5 the last bit of a frequency turns the angle by 0.01).

Backward is two steps. The first gathers x again instead of keeping it and goes back through dropout and norm to dx
[T, C] in the dtype of dy, and to the sums over rows that are the gradients of the norm's parameters (sums.py). Without
a norm it is the backward pass of dropout, or nothing.

The second step makes the gradient of a table: row i is the sum of dx over the tokens that looked up i. The ids are
sorted, which brings the tokens of one row together into a run, and each run is added up in order, in fp32, rounded
once. So the result repeats bit for bit, unlike one of atomic additions, and needs no array of the table's size in
fp32. Frequent ids make long runs (token types: one or two runs for all tokens), so the sorted order is cut into chunks
of about sqrt(T) / 4 tokens:

    ids, sorted    3 3 3 7 | 7 7 7 7 | 7 9 9 9 | 9 9 9 9        chunks of 4
    runs           a a a b   b b b b   b c c c   c c c c        a is whole: its sum goes to the table
                                                                b has three pieces, c two: they go to `partials`

One program adds up each piece. A second kernel, with a program for each chunk, adds up the pieces of the run that
begins in this chunk and goes beyond it. A chunk has at most two such pieces, one at its beginning and one at its end:
partials is [2 * chunks, C].

Shapes: ids, positions, types [T], integers; token [V, C], position [P, C], token_type [K, C], fp32 or bf16, with more
than 2^31 elements if need be; y [T, C]. Rows that no token looked up have gradient zero. Ids out of range are an
IndexError on a CPU; a GPU trusts its ids, and with wrong ones reads and writes memory that is not the table's.
Saved for backward: the arguments; nothing of size [T, C].
"""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.dropout import drop_ref, dropout, keeps, row_words
from stretto.ops.language import cdiv, dense_rows, jit, next_power_of_2, num_processors, tl, wide, wide_dtype
from stretto.ops.norm import norm_gradient_ref, norm_ref, normalized_ref, stats_ref
from stretto.ops.op import Op
from stretto.ops.sums import launch_sums


class Forward(NamedTuple):
    """The arguments of both ops. Without a table its ids are None too; without types every token is of type 0."""

    ids: Tensor
    token: Tensor
    positions: Tensor | None
    position: Tensor | None
    types: Tensor | None
    token_type: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    key: Tensor | None
    scale: float
    eps: float
    rms: bool
    p: float
    dtype: torch.dtype


def sum_rows_ref(a: Forward) -> Tensor:
    """Returns x, in fp32 or fp64."""
    x = wide(F.embedding(a.ids, a.token)) * a.scale
    if a.positions is not None and a.position is not None:
        x = x + F.embedding(a.positions, a.position)
    if a.token_type is not None:
        x = x + (a.token_type[0] if a.types is None else F.embedding(a.types, a.token_type))
    return x


def embed_ref(a: Forward) -> Tensor:
    """The definition of correct."""
    check_ranges(a)
    x = sum_rows_ref(a)
    if a.weight is not None:
        x = norm_ref(x, a.weight, a.bias, a.eps, a.rms)
    return drop_ref(x, a.p, a.key).to(a.dtype)


def embed_backward_ref(a: Forward, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns dx, and dweight and dbias as one tensor [2, C], where there is a norm."""
    assert a.weight is not None
    g = drop_ref(wide(dy), a.p, a.key)  # dropout is linear: the same mask
    x = sum_rows_ref(a)
    stats = stats_ref(x, a.eps, a.rms)
    xhat = normalized_ref(x, stats)
    dx = norm_gradient_ref(g * a.weight, xhat, stats[0], a.rms)
    return dx.to(dy.dtype), torch.stack([(g * xhat).sum(0), g.sum(0)])


def add_by_id_ref(dx: Tensor, ids: Tensor, num_rows: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns [num_rows, C], whose row i is scale * the sum of the rows of dx with the id i."""
    dx = wide(dx)
    return (dx.new_zeros(num_rows, dx.shape[1]).index_add(0, ids, dx) * scale).to(dtype)


@jit
def _look_up(ids_ptr, table_ptr, row, col, rows, cols):
    at = tl.load(ids_ptr + row, mask=row < rows, other=0).to(tl.int64)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return tl.load(table_ptr + at[:, None] * cols + col[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def _sum_rows(
    ids_ptr, token_ptr, positions_ptr, position_ptr, types_ptr, token_type_ptr, row, col, rows, cols, scale
):  # fmt: skip
    """Returns x of a block of rows."""
    x = _look_up(ids_ptr, token_ptr, row, col, rows, cols) * scale
    if position_ptr is not None:
        x += _look_up(positions_ptr, position_ptr, row, col, rows, cols)
    if token_type_ptr is not None:
        if types_ptr is not None:
            x += _look_up(types_ptr, token_type_ptr, row, col, rows, cols)
        else:
            x += tl.load(token_type_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    return x


@jit
def _normalize(x, col, cols, eps, RMS: tl.constexpr):
    """Returns xhat and rstd."""
    if not RMS:
        x = tl.where((col < cols)[None, :], x - tl.sum(x, 1)[:, None] / cols, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / cols + eps)
    return x * rstd[:, None], rstd


@jit
def _drop(x, key_ptr, row, col, P: tl.constexpr):
    first, second = row_words(key_ptr, row)
    return tl.where(keeps(first[:, None], second[:, None], col[None, :], P), x / (1 - P), 0.0)


@jit
def _embed_kernel(
    ids_ptr, token_ptr, positions_ptr, position_ptr, types_ptr, token_type_ptr, weight_ptr, bias_ptr, key_ptr, y_ptr,
    rows, cols, scale, eps, RMS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    x = _sum_rows(
        ids_ptr, token_ptr, positions_ptr, position_ptr, types_ptr, token_type_ptr, row, col, rows, cols, scale
    )  # fmt: skip
    if weight_ptr is not None:
        x, _ = _normalize(x, col, cols, eps, RMS)
        x *= tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    if key_ptr is not None:
        x = _drop(x, key_ptr, row, col, P)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], x.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _embed_backward_kernel(
    dy_ptr, ids_ptr, token_ptr, positions_ptr, position_ptr, types_ptr, token_type_ptr, weight_ptr, key_ptr, dx_ptr,
    sums_ptr,  # [programs, 2, cols]
    rows, cols, dy_stride, scale, eps, RMS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        at = row.to(tl.int64)[:, None]
        dy = tl.load(dy_ptr + at * dy_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if key_ptr is not None:
            dy = _drop(dy, key_ptr, row, col, P)
        x = _sum_rows(
            ids_ptr, token_ptr, positions_ptr, position_ptr, types_ptr, token_type_ptr, row, col, rows, cols, scale
        )  # fmt: skip
        xhat, rstd = _normalize(x, col, cols, eps, RMS)
        dweight += dy * xhat
        dbias += dy
        g = dy * weight
        dx = g - xhat * (tl.sum(g * xhat, 1) / cols)[:, None]
        if not RMS:
            dx -= (tl.sum(g, 1) / cols)[:, None]
        tl.store(dx_ptr + at * cols + col[None, :], (dx * rstd[:, None]).to(dx_ptr.dtype.element_ty), mask=inside)
    sums_ptr += tl.program_id(0).to(tl.int64) * 2 * cols + col
    tl.store(sums_ptr, tl.sum(dweight, 0), mask=col < cols)
    tl.store(sums_ptr + cols, tl.sum(dbias, 0), mask=col < cols)


@jit
def _add_pieces_kernel(
    dx_ptr,
    order_ptr,  # [rows]: the row of dx at each place of the sorted order
    ids_ptr,  # [rows], sorted
    table_ptr, partials_ptr, rows, cols, dx_stride, scale,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each place of the sorted order: it works if a piece begins there."""
    start = tl.program_id(0)
    run = tl.load(ids_ptr + start)
    begins = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1) != run
    if begins | (start % CHUNK == 0):
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        chunk = start // CHUNK
        window = start + tl.arange(0, CHUNK)
        limit = tl.minimum(chunk * CHUNK + CHUNK, rows)
        same = tl.load(ids_ptr + window, mask=window < limit, other=-1) == run
        end = start + tl.sum(same.to(tl.int32), 0)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(start, end, ROWS):
            place = first + tl.arange(0, ROWS)
            row = tl.load(order_ptr + place, mask=place < end, other=0)[:, None]
            inside = (place < end)[:, None] & (col < cols)[None, :]
            total += tl.load(dx_ptr + row * dx_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        piece = tl.sum(total, 0)
        ends = tl.load(ids_ptr + end, mask=end < rows, other=-1) != run
        if begins & ends:
            at = table_ptr + run.to(tl.int64) * cols + col
            tl.store(at, (piece * scale).to(table_ptr.dtype.element_ty), mask=col < cols)
        else:
            slot = 2 * chunk + (start % CHUNK != 0).to(tl.int32)
            tl.store(partials_ptr + slot.to(tl.int64) * cols + col, piece, mask=col < cols)


@jit
def _join_pieces_kernel(
    ids_ptr, table_ptr, partials_ptr, rows, cols, scale,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each chunk but the last: it works if a run begins there that goes on in the next chunk."""
    chunk = tl.program_id(0)
    run = tl.load(ids_ptr + (chunk + 1) * CHUNK)
    goes_on = tl.load(ids_ptr + (chunk + 1) * CHUNK - 1) == run
    begins = tl.load(ids_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=-1) != run
    if goes_on & begins:
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slot = 2 * chunk + (tl.load(ids_ptr + chunk * CHUNK) != run).to(tl.int32)
        first = tl.load(partials_ptr + slot.to(tl.int64) * cols + col, mask=col < cols, other=0.0)
        later = chunk + 1 + tl.arange(0, CHUNKS)
        same = tl.load(ids_ptr + later * CHUNK, mask=later * CHUNK < rows, other=-1) == run
        end = chunk + 1 + tl.sum(same.to(tl.int32), 0)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for left in range(chunk + 1, end, ROWS):
            slots = 2 * (left + tl.arange(0, ROWS))[:, None]
            at = partials_ptr + slots.to(tl.int64) * cols + col[None, :]
            total += tl.load(at, mask=(slots < 2 * end) & (col < cols)[None, :], other=0.0)
        total = (first + tl.sum(total, 0)) * scale
        tl.store(table_ptr + run.to(tl.int64) * cols + col, total.to(table_ptr.dtype.element_ty), mask=col < cols)


def _tile(cols: int) -> dict[str, int]:
    """A tile has whole rows, 2,048 elements or one row: 16 elements a thread."""
    block = next_power_of_2(cols)
    rows = max(1, min(2048 // block, 16))
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, min(rows * block // 512, 16))}


def launch_embed(a: Forward) -> Tensor:
    if not a.ids.is_cuda:
        check_ranges(a)
    y = _new_y(a.ids, a.token, a.dtype)
    rows, cols = y.shape
    if y.numel():
        tile, inputs = _tile(cols), [None if t is None else t.contiguous() for t in a[:9]]
        _embed_kernel[(cdiv(rows, tile["ROWS"]),)](*inputs, y, rows, cols, a.scale, a.eps, RMS=a.rms, P=a.p, **tile)
    return y


def _new_y(ids: Tensor, token: Tensor, dtype: torch.dtype) -> Tensor:
    return token.new_empty(ids.shape[0], token.shape[1], dtype=dtype)


def launch_embed_backward(a: Forward, dy: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = dy.shape
    dy, tile = dense_rows(dy), _tile(cols)
    # 16 warps fill a processor: then a thread may use 128 registers, and every program is resident.
    resident = num_processors(dy.device) * max(1, 16 // tile["num_warps"])
    programs = min(cdiv(rows, tile["ROWS"]), resident)
    dx, sums = _new_gradients(dy)
    partial = dy.new_empty(programs, 2, cols, dtype=torch.float32)
    if dx.numel():
        inputs = [None if t is None else t.contiguous() for t in (*a[:7], a.key)]
        _embed_backward_kernel[(programs,)](
            dy, *inputs, dx, partial, rows, cols, dy.stride(0), a.scale, a.eps, RMS=a.rms, P=a.p, **tile
        )
    launch_sums(partial, sums.unbind())
    return dx, sums


def _new_gradients(dy: Tensor) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape), dy.new_empty(2, dy.shape[1], dtype=wide_dtype(dy.dtype))


def launch_add_by_id(dx: Tensor, ids: Tensor, num_rows: int, scale: float, dtype: torch.dtype) -> Tensor:
    rows, cols = dx.shape
    table = dx.new_zeros(num_rows, cols, dtype=dtype)
    if not dx.numel():
        return table
    dx = dense_rows(dx)
    # A radix sort passes over its keys once for each of their bytes.
    ids, order = torch.sort(ids.to(torch.int16 if num_rows <= 2**15 else torch.int32), stable=True)
    chunk = max(16, next_power_of_2(isqrt(rows)) // 4)
    chunks = cdiv(rows, chunk)
    partials = dx.new_empty(2 * chunks, cols, dtype=torch.float32)
    block = min(next_power_of_2(cols), 1024)
    _add_pieces_kernel[(rows, cdiv(cols, block))](
        dx, order, ids, table, partials, rows, cols, dx.stride(0), scale,
        CHUNK=chunk, ROWS=4, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    if chunks > 1:
        block = min(block, 128)
        _join_pieces_kernel[(chunks - 1, cdiv(cols, block))](
            ids, table, partials, rows, cols, scale, CHUNK=chunk, CHUNKS=next_power_of_2(chunks), ROWS=32, BLOCK=block
        )
    return table


def check_ranges(a: Forward) -> None:
    """Raises an IndexError if an id is not in its table; a GPU would have to wait for this."""
    lookups = {"ids": (a.ids, a.token), "positions": (a.positions, a.position), "types": (a.types, a.token_type)}
    for name, (ids, table) in lookups.items():
        if ids is not None and table is not None and ids.numel():
            low, high = (int(bound) for bound in ids.aminmax())
            if low < 0 or high >= len(table):
                raise IndexError(f"{name} go from {low} to {high}, but their table has rows 0 to {len(table) - 1} only")


_embed = Op("embed", embed_ref, launch_embed, fake=_new_y)
_embed_backward = Op("embed_backward", embed_backward_ref, launch_embed_backward, fake=_new_gradients)
_add_by_id = Op(
    "add_by_id",
    add_by_id_ref,
    launch_add_by_id,
    fake=lambda dx, num_rows, dtype: dx.new_empty(num_rows, dx.shape[1], dtype=dtype),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[9:]


@_embed.gradient(_save)
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a = Forward(*ctx.saved_tensors, *ctx.options)
    dweight = dbias = None
    if a.weight is not None:
        dx, sums = _embed_backward(*a, dy)
        dweight, dbias = sums[0].to(a.weight.dtype), None if a.bias is None else sums[1].to(a.bias.dtype)
    else:
        dx = dy if a.key is None else dropout(dy, a.p, a.key)
    _, for_token, _, for_position, _, for_type, *_ = ctx.needs_input_grad
    dtoken = _table_gradient(dx, a.ids, a.token, a.scale) if for_token else None
    dposition = _table_gradient(dx, a.positions, a.position) if for_position else None
    dtoken_type = _table_gradient(dx, a.types, a.token_type) if for_type else None
    return None, dtoken, None, dposition, None, dtoken_type, dweight, dbias, *(None,) * 6


def _table_gradient(dx: Tensor, ids: Tensor | None, table: Any, scale: float = 1.0) -> Tensor:
    if ids is not None:
        return _add_by_id(dx, ids, len(table), scale, table.dtype)
    # every token looked up row 0
    first = dx.sum(0, keepdim=True, dtype=wide_dtype(dx.dtype))
    return F.pad(first, (0, 0, 0, len(table) - 1)).to(table.dtype)


def embed(
    ids: Tensor, token: Tensor, positions: Tensor | None = None, position: Tensor | None = None,
    types: Tensor | None = None, token_type: Tensor | None = None, scale: float = 1.0,
    norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, eps: float = 1e-5, rms: bool = False,
    p: float = 0.0, key: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Returns dropout(norm(scale * token[ids] + position[positions] + token_type[types])), [T, C], in `dtype`, or in
    the dtype of the tables.

    Without `types` every token is of type 0. With a norm_weight there is a norm: LayerNorm, or RMSNorm with `rms`. `p`
    above 0 needs a `key` (see dropout.py).
    """
    for name, at, table in (("positions", positions, position), ("types", types, token_type)):
        if at is not None and (table is None or at.shape != ids.shape):
            raise ValueError(f"{name} {list(at.shape)} need a table, and to be as many as the ids {list(ids.shape)}")
    if position is not None and positions is None:
        raise ValueError("a table of positions needs the tokens' positions")
    if ids.ndim != 1 or token.ndim != 2:
        raise ValueError(f"embed takes ids [T] and a table [V, C], not {list(ids.shape)} and {list(token.shape)}")
    for tensor in (position, token_type, norm_weight, norm_bias):
        if tensor is not None and tensor.shape[-1] != token.shape[1]:
            raise ValueError(f"the token table is {token.shape[1]} wide, but another tensor is {list(tensor.shape)}")
    if norm_bias is not None and (norm_weight is None or rms):
        raise ValueError("only LayerNorm has a norm_bias, next to its norm_weight")
    if p > 0 and (key is None or key.shape != (2,)):
        raise ValueError("dropout needs a key [2]")
    return _embed(
        ids, token, positions, position, types, token_type, norm_weight, norm_bias, key if p > 0 else None,
        scale, eps, rms, p, dtype or token.dtype,
    )  # fmt: skip
