"""The activation between two products of 8 bits: it writes the next product's factor, and not a bf16 tensor.

    forward    h8    = round(act(pre + bias))            E4M3, both ways
    backward   dpre8 = round(dh act'(pre + bias))        E5M2, both ways; column sums for the bias
               h8 once more, transposed, for a caller that did not keep it, with the very bits of the forward pass

The definition is activation.py, then round8.py: results are rounded to the dtype of `pre`, and then to 8 bits, so that
it shows nowhere which of the two ways was taken. Bounds are known beforehand. A program has a tile, which it reads
once; its column sums are taken before any rounding, in fp32, and added up as sums.py says.

Shapes: pre and dpre [T, I], or [T, 2I] for a gated kind (gate, then value); h and dh [T, I]. relu, whose backward pass
reads h itself, has no kernel here.

Bytes an element of h: forward 4, where the two steps take 10 (gated 6 of 12); backward 6, where they take 14 (gated 10
of 22), and 1 more for h, which takes 2 and 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.ops.activation import (
    GATES,
    Activation,
    activate_backward_ref,
    activate_block,
    activate_ref,
    differentiate_block,
    load_bias,
)
from stretto.ops.language import cdiv, dense_rows, jit, runs_kernels, tl, wide_dtype
from stretto.ops.round8 import (
    E4M3,
    E5M2,
    Bound,
    Narrow,
    magnitude,
    narrow_row,
    new_narrow,
    put_row,
    put_words,
    quantize_ref,
    scale_of,
    see,
)
from stretto.ops.sums import launch_sums

# A tile of 4 QUADS x COLS: 256 bytes of each row of bf16, 128 of 8 bits and 64 of each transposed row. Of each fourth
# of its rows a thread has 8 elements, which leaves registers for the arithmetic, and for programs that hide waiting.
QUADS, COLS, WARPS = 16, 128, 8


def activate8_ref(pre: Tensor, activation: Activation, bound: Bound) -> Narrow:
    kind, bias, p, key = activation
    return quantize_ref(activate_ref(pre, bias, kind, p, key), E4M3, "tensor", bound, False)


def activate8_backward_ref(
    dh: Tensor, pre: Tensor, activation: Activation, bound: Bound, h_bound: Bound | None, want_dbias: bool
) -> tuple[Narrow, tuple[Tensor, ...], Tensor]:
    """Returns dpre; the transposed h and its scale, if `h_bound` says how h is rounded; and the column sums."""
    kind, bias, p, key = activation
    dpre, h, dbias = activate_backward_ref(dh, pre, bias, kind, p, key, h_bound is not None, want_dbias)
    h8 = () if h_bound is None else quantize_ref(h, E4M3, "tensor", h_bound, False)[2:]
    return quantize_ref(dpre, E5M2, "tensor", bound, False), tuple(h8), dbias


@jit
def _round_h(
    x_ptr, bias, value_bias, key_ptr, row, col, rows, cols, x_stride, scale, data_ptr, most,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Writes a tile of rows of h; returns its bytes, and the larger of `most` and its magnitudes."""
    row_at, inside = row.to(tl.int64), (row < rows) & (col < cols)
    x_at = x_ptr + row_at * x_stride + col
    h = activate_block(x_at, bias, value_bias, key_ptr, row, col, cols, inside, KIND, GATED, P)
    h = tl.where(inside, h, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
    return put_row(h, scale, data_ptr, row_at * cols + col, inside, 448), tl.maximum(most, magnitude(h))


@jit
def _activate8_kernel(
    x_ptr, bias_ptr, key_ptr, most_ptr, seen_ptr, data_ptr, scale_ptr, data_t_ptr, rows, cols, filled_rows, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr,
    QUADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    bias = load_bias(bias_ptr, col, cols, HAS_BIAS)
    value_bias = load_bias(bias_ptr + cols, col, cols, HAS_BIAS) if GATED else bias
    scale, none = scale_of(tl.load(most_ptr), 448), tl.zeros([QUADS, COLS], tl.int32)
    tl.store(scale_ptr, scale)  # by all programs, the same
    a, most = _round_h(
        x_ptr, bias, value_bias, key_ptr, 4 * quad, col, rows, cols, x_stride, scale, data_ptr, none, KIND, GATED, P
    )
    b, most = _round_h(
        x_ptr, bias, value_bias, key_ptr, 4 * quad + 1, col, rows, cols, x_stride, scale, data_ptr, most, KIND, GATED, P
    )
    c, most = _round_h(
        x_ptr, bias, value_bias, key_ptr, 4 * quad + 2, col, rows, cols, x_stride, scale, data_ptr, most, KIND, GATED, P
    )
    d, most = _round_h(
        x_ptr, bias, value_bias, key_ptr, 4 * quad + 3, col, rows, cols, x_stride, scale, data_ptr, most, KIND, GATED, P
    )
    put_words(a, b, c, d, data_t_ptr, quad.to(tl.int64), col.to(tl.int64), col < cols, filled_rows)
    see(most, seen_ptr)


@jit
def _round_dx(
    dh_ptr, x_ptr, bias, value_bias, key_ptr, row, col, rows, cols, dh_stride, x_stride,
    scale, h_scale, data_ptr, most, sums, value_sums,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, WANT_H: tl.constexpr,
):  # fmt: skip
    """Writes a tile of rows of dx; returns its bytes; those of the gate's value and of h, which are the same where
    there is none; and `most` and the sums with this tile in them."""
    row_at, inside = row.to(tl.int64), (row < rows) & (col < cols)
    dx, dvalue, h = differentiate_block(
        dh_ptr + row_at * dh_stride + col, x_ptr + row_at * x_stride + col, bias, value_bias, key_ptr,
        row, col, cols, inside, KIND, GATED, P,
    )  # fmt: skip
    dx = tl.where(inside, dx, 0.0)
    sums += dx
    dx = dx.to(x_ptr.dtype.element_ty).to(tl.float32)
    most = tl.maximum(most, magnitude(dx))
    data_ptr += row_at * (2 * cols if GATED else cols) + col
    found = put_row(dx, scale, data_ptr, 0, inside, 57344)
    value, again = found, found
    if GATED:
        dvalue = tl.where(inside, dvalue, 0.0)
        value_sums += dvalue
        dvalue = dvalue.to(x_ptr.dtype.element_ty).to(tl.float32)
        most = tl.maximum(most, magnitude(dvalue))
        value = put_row(dvalue, scale, data_ptr, cols, inside, 57344)
    if WANT_H:
        h = tl.where(inside, h, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
        again = narrow_row(h, h_scale, 448)
    return found, value, again, most, sums, value_sums


@jit
def _activate8_backward_kernel(
    dh_ptr, x_ptr, bias_ptr, key_ptr, most_ptr, seen_ptr, data_ptr, scale_ptr, data_t_ptr,
    h_most_ptr, h_t_ptr, h_scale_ptr,  # None: h is not wanted
    sums_ptr,  # [programs of a column, width], or None
    rows, cols, filled_rows, dh_stride, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr, WANT_H: tl.constexpr,
    QUADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    width = 2 * cols if GATED else cols
    bias = load_bias(bias_ptr, col, cols, HAS_BIAS)
    value_bias = load_bias(bias_ptr + cols, col, cols, HAS_BIAS) if GATED else bias
    scale = scale_of(tl.load(most_ptr), 57344)
    h_scale = scale
    tl.store(scale_ptr, scale)
    if WANT_H:
        h_scale = scale_of(tl.load(h_most_ptr), 448)
        tl.store(h_scale_ptr, h_scale)
    none, zeros = tl.zeros([QUADS, COLS], tl.int32), tl.zeros([QUADS, COLS], tl.float32)
    a, value_a, h_a, most, sums, value_sums = _round_dx(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad, col, rows, cols, dh_stride, x_stride,
        scale, h_scale, data_ptr, none, zeros, zeros, KIND, GATED, P, WANT_H,
    )  # fmt: skip
    b, value_b, h_b, most, sums, value_sums = _round_dx(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad + 1, col, rows, cols, dh_stride, x_stride,
        scale, h_scale, data_ptr, most, sums, value_sums, KIND, GATED, P, WANT_H,
    )  # fmt: skip
    c, value_c, h_c, most, sums, value_sums = _round_dx(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad + 2, col, rows, cols, dh_stride, x_stride,
        scale, h_scale, data_ptr, most, sums, value_sums, KIND, GATED, P, WANT_H,
    )  # fmt: skip
    d, value_d, h_d, most, sums, value_sums = _round_dx(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad + 3, col, rows, cols, dh_stride, x_stride,
        scale, h_scale, data_ptr, most, sums, value_sums, KIND, GATED, P, WANT_H,
    )  # fmt: skip
    quad_at, col_at = quad.to(tl.int64), col.to(tl.int64)
    put_words(a, b, c, d, data_t_ptr, quad_at, col_at, col < cols, filled_rows)
    if GATED:
        put_words(value_a, value_b, value_c, value_d, data_t_ptr, quad_at, col_at + cols, col < cols, filled_rows)
    if WANT_H:
        put_words(h_a, h_b, h_c, h_d, h_t_ptr, quad_at, col_at, col < cols, filled_rows)
    if sums_ptr is not None:
        sums_at = sums_ptr + tl.program_id(0).to(tl.int64) * width + col
        tl.store(sums_at, tl.sum(sums, 0, keep_dims=True), mask=col < cols)
        if GATED:
            tl.store(sums_at + cols, tl.sum(value_sums, 0, keep_dims=True), mask=col < cols)
    see(most, seen_ptr)


def launch_activate8(pre: Tensor, activation: Activation, bound: Bound) -> Narrow:
    pre, (kind, bias, p, key) = dense_rows(pre), activation
    rows, cols = pre.shape[0], pre.shape[1] // 2 if kind in GATES else pre.shape[1]
    out = new_narrow(pre, (rows, cols), E4M3, "tensor")
    _activate8_kernel[(cdiv(rows, 4 * QUADS), cdiv(cols, COLS))](
        pre, pre if bias is None else bias, pre if key is None else key, bound.most, bound.seen,
        out.data, out.scale, out.data_t.view(torch.int32), rows, cols, out.data_t.shape[1], pre.stride(0),
        KIND=GATES.get(kind, kind), GATED=kind in GATES, P=0.0 if key is None else p, HAS_BIAS=bias is not None,
        QUADS=QUADS, COLS=COLS, num_warps=WARPS,
    )  # fmt: skip
    return out


def launch_activate8_backward(
    dh: Tensor, pre: Tensor, activation: Activation, bound: Bound, h_bound: Bound | None, want_dbias: bool
) -> tuple[Narrow, tuple[Tensor, ...], Tensor]:
    dh, pre, (kind, bias, p, key) = dense_rows(dh), dense_rows(pre), activation
    (rows, cols), width = dh.shape, pre.shape[1]
    out, wide = new_narrow(pre, (rows, width), E5M2, "tensor"), wide_dtype(pre.dtype)
    filled_rows = out.data_t.shape[1]
    h8: tuple[Tensor, ...] = ()
    if h_bound is not None:
        h8 = pre.new_empty(cols, filled_rows, dtype=E4M3), pre.new_empty(1, 1, dtype=torch.float32)
    partial = pre.new_empty(cdiv(rows, 4 * QUADS), 1, width, dtype=torch.float32) if want_dbias else None
    dbias = pre.new_empty(width if want_dbias else 0, dtype=wide if bias is None else bias.dtype)
    _activate8_backward_kernel[(cdiv(rows, 4 * QUADS), cdiv(cols, COLS))](
        dh, pre, pre if bias is None else bias, pre if key is None else key,
        bound.most, bound.seen, out.data, out.scale, out.data_t.view(torch.int32),
        None if h_bound is None else h_bound.most, *((h8[0].view(torch.int32), h8[1]) if h8 else (None, None)), partial,
        rows, cols, filled_rows, dh.stride(0), pre.stride(0),
        KIND=GATES.get(kind, kind), GATED=kind in GATES, P=0.0 if key is None else p, HAS_BIAS=bias is not None,
        WANT_H=h_bound is not None, QUADS=QUADS, COLS=COLS, num_warps=WARPS,
    )  # fmt: skip
    if partial is not None:
        launch_sums(partial, [dbias])
    return out, h8, dbias


def activate8(pre: Tensor, activation: Activation, bound: Bound) -> Narrow:
    """act(pre) in E4M3, for a bound that is known and an activation other than relu."""
    return (launch_activate8 if runs_kernels(pre) else activate8_ref)(pre, activation, bound)


def activate8_backward(
    dh: Tensor, pre: Tensor, activation: Activation, bound: Bound, h_bound: Bound | None, want_dbias: bool
) -> tuple[Narrow, tuple[Tensor, ...], Tensor]:
    """As activate8_backward_ref, with dpre in E5M2, both bounds known."""
    run = launch_activate8_backward if runs_kernels(dh) else activate8_backward_ref
    return run(dh, pre, activation, bound, h_bound, want_dbias)
