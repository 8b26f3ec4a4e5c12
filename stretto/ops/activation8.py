"""The activation between two products of 8 bits: it writes the next product's factor, and not a bf16 tensor.

    forward    h8    = round(act(pre + bias))            E4M3, both ways
    backward   dpre8 = round(dh act'(pre + bias))        E5M2, both ways; column sums for the bias
               h8 once more, transposed, for a caller that did not keep it, with the very bits of the forward pass

The definition is activation.py, then round8.py: results are rounded to the dtype of `pre`, and then to 8 bits, so that
it shows nowhere which of the two ways was taken. Bounds are known beforehand. A program has a tile, which it reads
once; its column sums are taken before any rounding, in fp32, and added up as sums.py says.

Shapes: pre and dpre [T, I], or [T, 2I] for a gated kind (gate, then value); h and dh [T, I]. relu, too, is given pre:
h, which its backward pass reads in activation.py, is not there in 16 bits.

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
from stretto.ops.language import cdiv, dense_rows, jit, rounded, runs_kernels, tl, wide_dtype
from stretto.ops.round8 import (
    E4M3,
    E5M2,
    Bound,
    Narrow,
    larger,
    new_narrow,
    put_both,
    put_turned,
    quantize_ref,
    scale_of,
    see,
)
from stretto.ops.sums import launch_sums

# Tiles of 4 QUADS x COLS, and warps: the fastest of 25 on an H200. A thread has 32 elements of a tile, or 16 of a gated
# one in the backward pass, whose registers leave room for fewer programs.
FORWARD = {"QUADS": 16, "COLS": 128, "num_warps": 8}
BACKWARD = {"QUADS": 16, "COLS": 64, "num_warps": 4}
GATED_BACKWARD = {"QUADS": 8, "COLS": 128, "num_warps": 8}


def activate8_ref(pre: Tensor, activation: Activation, bound: Bound) -> Narrow:
    kind, bias, p, key = activation
    return quantize_ref(activate_ref(pre, bias, kind, p, key), E4M3, "tensor", bound, False)


def activate8_backward_ref(
    dh: Tensor, pre: Tensor, activation: Activation, bound: Bound, h_bound: Bound | None, want_dbias: bool
) -> tuple[Narrow, tuple[Tensor, ...], Tensor]:
    """Returns dpre; the transposed h and its scale, if `h_bound` says how h is rounded; and the column sums."""
    kind, bias, p, key = activation
    h = activate_ref(pre, bias, kind, p, key) if kind == "relu" else pre
    dpre, again, dbias = activate_backward_ref(dh, h, bias, kind, p, key, kind != "relu", want_dbias)
    h = h if kind == "relu" else again
    h8 = () if h_bound is None else quantize_ref(h, E4M3, "tensor", h_bound, False)[2:]
    return quantize_ref(dpre, E5M2, "tensor", bound, False), tuple(h8), dbias


@jit
def _activate_row(
    x_ptr, bias, value_bias, key_ptr, row, col, rows, cols, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Returns a tile of rows of h."""
    inside = (row < rows) & (col < cols)
    x_at = x_ptr + row.to(tl.int64) * x_stride + col
    h = activate_block(x_at, bias, value_bias, key_ptr, row, col, cols, inside, KIND, GATED, P)
    return rounded(tl.where(inside, h, 0.0), x_ptr.dtype.element_ty)


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
    scale = scale_of(tl.load(most_ptr), 448)
    a = _activate_row(x_ptr, bias, value_bias, key_ptr, 4 * quad, col, rows, cols, x_stride, KIND, GATED, P)
    b = _activate_row(x_ptr, bias, value_bias, key_ptr, 4 * quad + 1, col, rows, cols, x_stride, KIND, GATED, P)
    c = _activate_row(x_ptr, bias, value_bias, key_ptr, 4 * quad + 2, col, rows, cols, x_stride, KIND, GATED, P)
    d = _activate_row(x_ptr, bias, value_bias, key_ptr, 4 * quad + 3, col, rows, cols, x_stride, KIND, GATED, P)
    quad_at, col_at = quad.to(tl.int64), col.to(tl.int64)
    most = put_both(
        a, b, c, d, scale, data_ptr, data_t_ptr, quad_at, col_at, rows, cols, col < cols, filled_rows, 448
    )  # fmt: skip
    tl.store(scale_ptr, scale)  # by all programs, the same
    see(most, seen_ptr)


@jit
def _differentiate_row(
    dh_ptr, x_ptr, bias, value_bias, key_ptr, row, col, rows, cols, dh_stride, x_stride, sums, value_sums,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, WANT_H: tl.constexpr,
):  # fmt: skip
    """Returns a tile of rows of dx; of the gradient of the gate's value and of h, which are the same where there is
    none; and the sums with these in them. Outside of the matrix dh is 0, and so are both gradients."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    inside, row_at = (row < rows) & (col < cols), row.to(tl.int64)
    dx, dvalue, h = differentiate_block(
        dh_ptr + row_at * dh_stride + col, x_ptr + row_at * x_stride + col, bias, value_bias, key_ptr,
        row, col, cols, inside, KIND, GATED, P, False,
    )  # fmt: skip
    sums += dx
    dx = rounded(dx, TYPE)
    if GATED:
        value_sums += dvalue
        dvalue = rounded(dvalue, TYPE)
    else:
        dvalue = dx
    h = rounded(tl.where(inside, h, 0.0), TYPE) if WANT_H else dx
    return dx, dvalue, h, sums, value_sums


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
    scale, zeros = scale_of(tl.load(most_ptr), 57344), tl.zeros([QUADS, COLS], tl.float32)
    a, value_a, h_a, sums, value_sums = _differentiate_row(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad, col, rows, cols, dh_stride, x_stride, zeros, zeros,
        KIND, GATED, P, WANT_H,
    )  # fmt: skip
    b, value_b, h_b, sums, value_sums = _differentiate_row(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad + 1, col, rows, cols, dh_stride, x_stride, sums, value_sums,
        KIND, GATED, P, WANT_H,
    )  # fmt: skip
    c, value_c, h_c, sums, value_sums = _differentiate_row(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad + 2, col, rows, cols, dh_stride, x_stride, sums, value_sums,
        KIND, GATED, P, WANT_H,
    )  # fmt: skip
    d, value_d, h_d, sums, value_sums = _differentiate_row(
        dh_ptr, x_ptr, bias, value_bias, key_ptr, 4 * quad + 3, col, rows, cols, dh_stride, x_stride, sums, value_sums,
        KIND, GATED, P, WANT_H,
    )  # fmt: skip
    quad_at, col_at, exists = quad.to(tl.int64), col.to(tl.int64), col < cols
    most = put_both(
        a, b, c, d, scale, data_ptr, data_t_ptr, quad_at, col_at, rows, width, exists, filled_rows, 57344
    )  # fmt: skip
    if GATED:
        values = put_both(
            value_a, value_b, value_c, value_d, scale, data_ptr, data_t_ptr, quad_at, col_at + cols, rows, width,
            exists, filled_rows, 57344,
        )  # fmt: skip
        most = larger(most, values)
    if WANT_H:
        h_scale = scale_of(tl.load(h_most_ptr), 448)
        put_turned(h_a, h_b, h_c, h_d, h_scale, h_t_ptr, quad_at, col_at, exists, filled_rows, 448)
        tl.store(h_scale_ptr, h_scale)
    if sums_ptr is not None:
        sums_at = sums_ptr + tl.program_id(0).to(tl.int64) * width + col
        tl.store(sums_at, tl.sum(sums, 0, keep_dims=True), mask=exists)
        if GATED:
            tl.store(sums_at + cols, tl.sum(value_sums, 0, keep_dims=True), mask=exists)
    tl.store(scale_ptr, scale)  # by all programs, the same
    see(most, seen_ptr)


def launch_activate8(pre: Tensor, activation: Activation, bound: Bound) -> Narrow:
    pre, (kind, bias, p, key) = dense_rows(pre), activation
    rows, cols = pre.shape[0], pre.shape[1] // 2 if kind in GATES else pre.shape[1]
    out = new_narrow(pre, (rows, cols), E4M3, "tensor")
    _activate8_kernel[(cdiv(rows, 4 * FORWARD["QUADS"]), cdiv(cols, FORWARD["COLS"]))](
        pre, pre if bias is None else bias, pre if key is None else key, bound.most, bound.seen,
        out.data, out.scale, out.data_t.view(torch.int32), rows, cols, out.data_t.shape[1], pre.stride(0),
        KIND=GATES.get(kind, kind), GATED=kind in GATES, P=0.0 if key is None else p, HAS_BIAS=bias is not None,
        **FORWARD,
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
    tile = GATED_BACKWARD if kind in GATES else BACKWARD
    grid = cdiv(rows, 4 * tile["QUADS"]), cdiv(cols, tile["COLS"])
    partial = pre.new_empty(grid[0], 1, width, dtype=torch.float32) if want_dbias else None
    dbias = pre.new_empty(width if want_dbias else 0, dtype=wide if bias is None else bias.dtype)
    _activate8_backward_kernel[grid](
        dh, pre, pre if bias is None else bias, pre if key is None else key,
        bound.most, bound.seen, out.data, out.scale, out.data_t.view(torch.int32),
        None if h_bound is None else h_bound.most, *((h8[0].view(torch.int32), h8[1]) if h8 else (None, None)), partial,
        rows, cols, filled_rows, dh.stride(0), pre.stride(0),
        KIND=GATES.get(kind, kind), GATED=kind in GATES, P=0.0 if key is None else p, HAS_BIAS=bias is not None,
        WANT_H=h_bound is not None, **tile,
    )  # fmt: skip
    if partial is not None:
        launch_sums(partial, [dbias])
    return out, h8, dbias


def activate8(pre: Tensor, activation: Activation, bound: Bound) -> Narrow:
    """act(pre) in E4M3, for a bound that is known."""
    return (launch_activate8 if runs_kernels(pre) else activate8_ref)(pre, activation, bound)


def activate8_backward(
    dh: Tensor, pre: Tensor, activation: Activation, bound: Bound, h_bound: Bound | None, want_dbias: bool
) -> tuple[Narrow, tuple[Tensor, ...], Tensor]:
    """As activate8_backward_ref, with dpre in E5M2, both bounds known."""
    run = launch_activate8_backward if runs_kernels(dh) else activate8_backward_ref
    return run(dh, pre, activation, bound, h_bound, want_dbias)
