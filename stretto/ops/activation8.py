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
from stretto.ops.round8 import E4M3, E5M2, Bound, Narrow, new_narrow, put, put_both, quantize_ref, scale_of, see
from stretto.ops.sums import launch_sums

# A tile: 256 bytes of each row of bf16, 128 of 8 bits and 64 of each transposed row; 32 elements a thread, so that
# there are registers for the arithmetic.
ROWS, COLS, WARPS = 64, 128, 8


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
def _activate8_kernel(
    x_ptr, bias_ptr, key_ptr, most_ptr, seen_ptr, data_ptr, scale_ptr, data_t_ptr, rows, cols, filled_rows, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    row_at, inside = row.to(tl.int64), (row < rows) & (col < cols)
    x_at = x_ptr + row_at * x_stride + col
    h = activate_block(x_at, bias_ptr, key_ptr, row, col, cols, inside, KIND, GATED, P, HAS_BIAS)
    h = tl.where(inside, h, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
    scale = scale_of(tl.load(most_ptr), 448)
    tl.store(scale_ptr, scale)  # by all programs, the same
    put_both(h, scale, data_ptr, data_t_ptr, row_at, col.to(tl.int64), rows, cols, cols, filled_rows, 448)
    see(h, seen_ptr)


@jit
def _activate8_backward_kernel(
    dh_ptr, x_ptr, bias_ptr, key_ptr, most_ptr, seen_ptr, data_ptr, scale_ptr, data_t_ptr,
    h_most_ptr, h_t_ptr, h_scale_ptr,  # None: h is not wanted
    sums_ptr,  # [programs of a column, width], or None
    rows, cols, filled_rows, dh_stride, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    row_at, col_at, inside = row.to(tl.int64), col.to(tl.int64), (row < rows) & (col < cols)
    bias = load_bias(bias_ptr, col, cols, HAS_BIAS)
    value_bias = load_bias(bias_ptr + cols, col, cols, HAS_BIAS) if GATED else bias
    dx, dvalue, h = differentiate_block(
        dh_ptr + row_at * dh_stride + col, x_ptr + row_at * x_stride + col, bias, value_bias, key_ptr,
        row, col, cols, inside, KIND, GATED, P,
    )  # fmt: skip
    scale = scale_of(tl.load(most_ptr), 57344)
    tl.store(scale_ptr, scale)
    width = 2 * cols if GATED else cols
    dx = tl.where(inside, dx, 0.0)
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0).to(tl.int64) * width
        tl.store(sums_ptr + col, tl.sum(dx, 0, keep_dims=True), mask=col < cols)
    dx = dx.to(x_ptr.dtype.element_ty).to(tl.float32)
    put_both(dx, scale, data_ptr, data_t_ptr, row_at, col_at, rows, cols, width, filled_rows, 57344)
    see(dx, seen_ptr)
    if GATED:
        dvalue = tl.where(inside, dvalue, 0.0)
        if sums_ptr is not None:
            tl.store(sums_ptr + cols + col, tl.sum(dvalue, 0, keep_dims=True), mask=col < cols)
        dvalue = dvalue.to(x_ptr.dtype.element_ty).to(tl.float32)
        data_ptr, data_t_ptr = data_ptr + cols, data_t_ptr + filled_rows.to(tl.int64) * cols
        put_both(dvalue, scale, data_ptr, data_t_ptr, row_at, col_at, rows, cols, width, filled_rows, 57344)
        see(dvalue, seen_ptr)
    if h_t_ptr is not None:
        h = tl.where(inside, h, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
        h_scale = scale_of(tl.load(h_most_ptr), 448)
        tl.store(h_scale_ptr, h_scale)
        put(h, h_scale, h_t_ptr, col_at * filled_rows + row_at, (row < filled_rows) & (col < cols), 448)


def launch_activate8(pre: Tensor, activation: Activation, bound: Bound) -> Narrow:
    pre, (kind, bias, p, key) = dense_rows(pre), activation
    rows, cols = pre.shape[0], pre.shape[1] // 2 if kind in GATES else pre.shape[1]
    out = new_narrow(pre, (rows, cols), E4M3, "tensor")
    _activate8_kernel[(cdiv(rows, ROWS), cdiv(cols, COLS))](
        pre, pre if bias is None else bias, pre if key is None else key, bound.most, bound.seen,
        out.data, out.scale, out.data_t, rows, cols, out.data_t.shape[1], pre.stride(0),
        KIND=GATES.get(kind, kind), GATED=kind in GATES, P=0.0 if key is None else p, HAS_BIAS=bias is not None,
        ROWS=ROWS, COLS=COLS, num_warps=WARPS,
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
    partial = pre.new_empty(cdiv(rows, ROWS), 1, width, dtype=torch.float32) if want_dbias else None
    dbias = pre.new_empty(width if want_dbias else 0, dtype=wide if bias is None else bias.dtype)
    _activate8_backward_kernel[(cdiv(rows, ROWS), cdiv(cols, COLS))](
        dh, pre, pre if bias is None else bias, pre if key is None else key,
        bound.most, bound.seen, out.data, out.scale, out.data_t,
        None if h_bound is None else h_bound.most, *(h8 or (None, None)), partial,
        rows, cols, filled_rows, dh.stride(0), pre.stride(0),
        KIND=GATES.get(kind, kind), GATED=kind in GATES, P=0.0 if key is None else p, HAS_BIAS=bias is not None,
        ROWS=ROWS, COLS=COLS, num_warps=WARPS,
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
