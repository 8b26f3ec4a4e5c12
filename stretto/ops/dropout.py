"""Dropout from a counter-based generator: nothing is kept for the backward pass but a 128-bit key.

Whether element (row, column) survives is a pure function of (key, row, column). A model draws one key per place where
it drops, once per forward pass, from torch's generator, which the trainer seeds by (seed, micro-batch): so a mask
depends on (seed, step, layer, position) and on nothing that ran before. Kernels compute the mask where they need it,
in both directions; all kernels that drop use the functions of this file.

    y = x / (1 - p) where hash(key, row, column) >= p * 2^32, else 0

The hash mixes 32-bit words with two multiplications a round (a xorshift-multiply permutation of the 32-bit integers).
Key and row give two words, once per row; each element then costs two rounds, about 16 integer instructions. A Philox
word costs ten rounds of four multiplications, more than the arithmetic of any kernel it would be fused into.

Where x has some rows of a larger matrix, `rows` has their numbers there: the elements of x are dropped as they would be
in the larger matrix.

Shapes: x [R, C], R and C below 2^31; key [2], int64; rows [R], int64. Saved for backward: key and rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.ops.language import cdiv, dense_rows, jit, tl
from stretto.ops.op import Op

_WORD = 0xFFFFFFFF


def _draw_keys(like: Tensor, count: int) -> Tensor:
    """New keys [count, 2], int64, from torch's generator of the device of `like`. This is an op, so that compiled code
    draws the same keys as eager code. A compiler may merge two calls with equal arguments: `like` should be a tensor
    that no other call in the same graph has, such as the input of the module that drops."""
    return torch.randint(-(2**63), 2**63 - 1, (count, 2), dtype=torch.int64, device=like.device)


def _new_keys(like: Tensor, count: int) -> Tensor:
    return torch.empty(count, 2, dtype=torch.int64, device=like.device)


draw_keys = Op("draw_keys", _draw_keys, fake=_new_keys, tags=[torch.Tag.nondeterministic_seeded])


def mix_ref(x: Tensor) -> Tensor:
    """The permutation of 32-bit words, on int64 tensors that hold them."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def row_words_ref(key: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of each row."""
    (a, c), (b, d) = ((word & _WORD, (word >> 32) & _WORD) for word in key)
    return mix_ref((mix_ref(row ^ a) + b) & _WORD), mix_ref((mix_ref(row ^ c) + d) & _WORD)


def hash_ref(key: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """32 random bits for each (row, column); the definition of correct."""
    first, second = row_words_ref(key, row)
    return mix_ref((mix_ref(col ^ first) + second) & _WORD)


def keep_ref(key: Tensor, rows: int | Tensor, cols: int, p: float) -> Tensor:
    """The mask [rows, cols], True where an element survives. `rows` is a number of rows or the numbers of the rows."""
    row = torch.arange(rows, device=key.device) if isinstance(rows, int) else rows
    return hash_ref(key, row[:, None], torch.arange(cols, device=key.device)[None]) >= int(p * 2**32)


def dropout_ref(x: Tensor, p: float, key: Tensor, rows: Tensor | None = None) -> Tensor:
    return torch.where(keep_ref(key, x.shape[0] if rows is None else rows, x.shape[1], p), x / (1 - p), 0.0)


def drop_ref(x: Tensor, p: float, key: Tensor | None) -> Tensor:
    """Returns x without a key, and with a key x with elements dropped."""
    return x if key is None else dropout_ref(x, p, key)


@jit
def mix(x):
    """Computes mix_ref on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def row_words(key_ptr, row):
    """Computes row_words_ref on uint32, for a row or a block of rows."""
    low = tl.load(key_ptr).to(tl.uint64, bitcast=True)
    high = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    row = row.to(tl.uint32)
    first = mix(mix(row ^ low.to(tl.uint32)) + high.to(tl.uint32))
    second = mix(mix(row ^ (low >> 32).to(tl.uint32)) + (high >> 32).to(tl.uint32))
    return first, second


@jit
def keeps(first, second, col, P: tl.constexpr):
    """Returns hash_ref >= p * 2^32; `first` and `second` broadcast against the columns."""
    threshold: tl.constexpr = int(P * 4294967296)
    return mix(mix(col.to(tl.uint32) ^ first) + second) >= threshold


@jit
def _dropout_kernel(x_ptr, y_ptr, key_ptr, rows_ptr, cols, x_stride, P: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, second = row_words(key_ptr, row if rows_ptr is None else tl.load(rows_ptr + row))
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols).to(tl.float32)
    y = tl.where(keeps(first, second, col, P), x / (1 - P), 0.0)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)


def launch_dropout(x: Tensor, p: float, key: Tensor, rows: Tensor | None) -> Tensor:
    count, cols = x.shape
    x = dense_rows(x)
    y = x.new_empty(count, cols)
    if y.numel():
        _dropout_kernel[(count, cdiv(cols, 1024))](x, y, key, rows, cols, x.stride(0), P=p, BLOCK=1024)
    return y


_dropout = Op("dropout", dropout_ref, launch_dropout, fake=lambda x: x.new_empty(x.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, key, rows = inputs
    ctx.save_for_backward(key, rows)


@_dropout.gradient(_save)
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    return _dropout(dy, ctx.p, *ctx.saved_tensors), None, None, None  # dropout is linear: the same mask and factor


def dropout(x: Tensor, p: float, key: Tensor, rows: Tensor | None = None) -> Tensor:
    """Returns x [R, C] with each element dropped with probability p, the others scaled by 1 / (1 - p). `rows` [R] has
    the numbers of the rows, if they are not 0, 1, 2, ..."""
    if x.ndim != 2 or key.shape != (2,):
        raise ValueError(f"dropout takes [rows, columns] and a key [2], not {list(x.shape)} and {list(key.shape)}")
    if rows is not None and rows.shape != x.shape[:1]:
        raise ValueError(f"dropout takes a number for each of {x.shape[0]} rows, not {list(rows.shape)}")
    return _dropout(x, p, key, rows) if p > 0.0 else x
