"""Bias, activation and dropout between the two matrix products of an MLP: one pass forward, one backward.

    h = dropout(act(x + bias))      x [T, I] or, for gated kinds, [T, 2I]; bias [I] or [2I]; h [T, I]

Every smooth kind is a value times a gate between 0 and 1, act(x) = x s(x), with act'(x) = s(x) + x s'(x):

    gelu       s = (1 + erf(x / sqrt 2)) / 2                                   s' = exp(-x^2 / 2) / sqrt(2 pi)
    gelu_tanh  s = (1 + tanh u) / 2 = sigmoid(2 u),                            s' = s (1 - s) 2 u'
               u = sqrt(2 / pi) (x + 0.044715 x^3)
    silu       s = sigmoid                                                     s' = s (1 - s)
    gelu_quick s = sigmoid(1.702 x)                                            s' = s (1 - s) 1.702
    relu       act(x) = max(x, 0)

In a gated kind, x is a gate a and next to it a value b: swiglu is silu(a) b, geglu is gelu_tanh(a) b, and geglu_erf is
gelu(a) b.

The sigmoid form of gelu_tanh never subtracts nearly equal numbers, and needs no tanh. The arithmetic is fp32 with one
rounding at the end, forward and backward (fp64 inputs: fp64 on a CPU).

Saved for backward: x, bias and the dropout key; relu saves h alone, since h > 0 exactly where an element was positive
and kept. The backward pass gives dx and, if asked, two things for no further reading: h once more, for a caller that
did not keep it, with the very bits of the forward pass; and dbias, the column sums of dx before its rounding (sums.py).
coded_activation.py keeps less than x, with a stated error.

Traffic in bf16: 4 bytes an element of h forward (gated 6), 6 backward (gated 10), 2 more where h is wanted.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.dropout import drop_ref, keeps, row_words
from stretto.ops.language import (
    cdiv,
    dense_rows,
    exp2,
    jit,
    next_power_of_2,
    num_processors,
    reciprocal,
    runs_kernels,
    tl,
    wide,
    wide_dtype,
)
from stretto.ops.op import Op
from stretto.ops.sums import launch_sums

GATES = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu_erf": "gelu"}  # what a gated kind does to its gate
KINDS = ("gelu", "gelu_tanh", "gelu_quick", "relu", "silu", *GATES)
QUICK = 1.702  # of gelu_quick
KEEPS = ("input", "code8", "bit")


class Activation(NamedTuple):
    """What stands between two products."""

    kind: str
    bias: Tensor | None
    p: float  # of dropout
    key: Tensor | None


_ACT: dict[str, Any] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": lambda x: F.silu(QUICK * x) / QUICK,
}
ACT_BACKWARD: dict[str, Any] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "gelu_quick": lambda dy, x: torch.ops.aten.silu_backward(dy, QUICK * x),
}


def activate_ref(x: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None) -> Tensor:
    y = wide(x) if bias is None else wide(x) + bias
    if kind in GATES:
        gate, value = y.chunk(2, dim=1)
        h = _ACT[GATES[kind]](gate) * value
    else:
        h = _ACT[kind](y)
    return drop_ref(h, p, key).to(x.dtype).contiguous()


def activate_backward_ref(
    dh: Tensor, kept: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None,
    want_h: bool, want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dx; h, if it is wanted; the column sums of dx in the dtype of the bias, if they are wanted. `kept` is x,
    or for relu h: relu has no other use for the bias and never wants h again. This is the gradient of activate_ref
    written out, because autograd does not reach inside of an op."""
    dy = wide(dh)
    if kind == "relu":
        dx = torch.where(kept <= 0, 0.0, dy / (1 - p))
    else:
        dy, y = drop_ref(dy, p, key), wide(kept) if bias is None else wide(kept) + bias
        if kind in GATES:
            gate, value = y.chunk(2, dim=1)
            dx = torch.cat([ACT_BACKWARD[GATES[kind]](dy * value, gate), dy * _ACT[GATES[kind]](gate)], dim=1)
        else:
            dx = ACT_BACKWARD[kind](dy, y)
    h = activate_ref(kept, bias, kind, p, key) if want_h else kept.new_empty(0)
    dbias = dx.sum(0).to(_dbias_dtype(kept, bias)) if want_dbias else dx.new_empty(0)
    return dx.to(kept.dtype).contiguous(), h, dbias


@jit
def gate_of(x, KIND: tl.constexpr):
    """Returns s(x) and 1 - s(x); the smaller of the two is never the difference of 1 and the larger. Products are fused
    by hand where the compiler might or might not fuse them, so that both kernels round alike."""
    if KIND == "gelu":
        # 1 - Phi(z) = 2^(polynomial of z >= 0): minimax, within 2e-8. The erf of the CUDA library chooses between two
        # polynomials and takes twice the instructions, enough to keep the memory waiting.
        z = tl.abs(x)
        power = tl.fma(z, -2.33494893e-06, 3.37378151e-05)
        power = tl.fma(z, power, -1.61293836e-04)
        power = tl.fma(z, power, -1.91703541e-04)
        power = tl.fma(z, power, 7.12686498e-03)
        power = tl.fma(z, power, -5.25336117e-02)
        power = tl.fma(z, power, -4.59198296e-01)
        power = tl.fma(z, power, -1.15110600e00)
        tail = exp2(tl.fma(z, power, -1.0))
        s = tl.where(x < 0, tail, 1 - tail)
        t = tl.where(x < 0, 1 - tail, tail)
    else:  # e = exp(-z), as a power of two
        if KIND == "gelu_tanh":
            z = x * tl.fma(x * x, 0.10294324, 2.3022082)  # 2 sqrt(2 / pi) / ln 2 and 0.044715 of it
        elif KIND == "gelu_quick":
            z = x * 2.4554669  # 1.702 / ln 2
        else:
            z = x * 1.4426950  # 1 / ln 2
        e = exp2(-tl.maximum(z, -115.0))  # stays finite, and so does its product with s
        s = reciprocal(1 + e)
        t = e * s
    return s, t


@jit
def slope_of(x, s, t, KIND: tl.constexpr):
    """Returns s + x s'(x), from s and t = 1 - s."""
    if KIND == "gelu":
        ds = exp2(tl.fma(x * x, -0.72134752, -1.3257480647361593))  # exp(-x^2 / 2) / sqrt(2 pi)
    elif KIND == "gelu_tanh":
        ds = s * t * tl.fma(x * x, 0.21406443846156, 1.5957691216057308)
    elif KIND == "gelu_quick":
        ds = s * t * 1.702
    else:
        ds = s * t
    return tl.fma(x, ds, s)


@jit
def survives(key_ptr, row, col, P: tl.constexpr):
    """Computes keep_ref for a block with row [R, 1] and col [1, C]."""
    first, second = row_words(key_ptr, row)
    return keeps(first, second, col, P)


@jit
def load_bias(bias_ptr, col, cols, HAS_BIAS: tl.constexpr):
    return tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32) if HAS_BIAS else 0.0


@jit
def activate_block(
    x_at, bias, value_bias, key_ptr, row, col, cols, inside, KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr
):
    """Returns h of a block of elements, in fp32, given where its x are."""
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32) + bias
    if KIND == "relu":
        h = tl.where(x <= 0, 0.0, x)  # NaN passes, as it does in torch
    else:
        s, _ = gate_of(x, KIND)
        h = x * s
    if GATED:
        h *= tl.load(x_at + cols, mask=inside, other=0.0).to(tl.float32) + value_bias
    if P > 0:
        scale: tl.constexpr = 1 / (1 - P)
        h = tl.where(survives(key_ptr, row, col, P), h * scale, 0.0)
    return h


@jit
def differentiate_block(
    dh_at, kept_at, bias, value_bias, key_ptr, row, col, cols, inside,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, KEPT_H: tl.constexpr,
):  # fmt: skip
    """Returns dx of a block, with a gate also that of the value; and h. All are fp32. KEPT_H: of relu, h is given in
    place of x, and the bias is in it."""
    scale: tl.constexpr = 1 / (1 - P)
    dy = tl.load(dh_at, mask=inside, other=0.0).to(tl.float32)
    kept = tl.load(kept_at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "relu" and KEPT_H:
        dx = tl.where(kept <= 0, 0.0, dy * scale)
        dvalue, y = dx, kept
    else:
        x = kept + bias
        if KIND == "relu":
            y = tl.where(x <= 0, 0.0, x)
        else:
            s, t = gate_of(x, KIND)
            y = x * s
        if P > 0:
            keep = survives(key_ptr, row, col, P)
            dy = tl.where(keep, dy * scale, 0.0)
        dvalue = dy * y
        if GATED:
            value = tl.load(kept_at + cols, mask=inside, other=0.0).to(tl.float32) + value_bias
            y *= value
            dy *= value
        dx = tl.where(x <= 0, 0.0, dy) if KIND == "relu" else dy * slope_of(x, s, t, KIND)
        if P > 0:
            y = tl.where(keep, y * scale, 0.0)
    return dx, dvalue, y


@jit
def _activate_kernel(
    x_ptr, bias_ptr, key_ptr, h_ptr, rows, cols, x_stride,
    KIND: tl.constexpr,  # of a gated kind, the function of the gate
    GATED: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    row_at = row.to(tl.int64)
    inside = (row < rows) & (col < cols)
    x_at = x_ptr + row_at * x_stride + col
    bias = load_bias(bias_ptr, col, cols, HAS_BIAS)
    value_bias = load_bias(bias_ptr + cols, col, cols, HAS_BIAS) if GATED else bias
    h = activate_block(x_at, bias, value_bias, key_ptr, row, col, cols, inside, KIND, GATED, P)
    tl.store(h_ptr + row_at * cols + col, h.to(h_ptr.dtype.element_ty), mask=inside)


@jit
def _activate_backward_kernel(
    dh_ptr, kept_ptr, bias_ptr, key_ptr, dx_ptr, h_ptr, sums_ptr, rows, cols, dh_stride, kept_stride, dx_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr,
    WANT_H: tl.constexpr, WANT_DBIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    bias = load_bias(bias_ptr, col, cols, HAS_BIAS)
    value_bias = load_bias(bias_ptr + cols, col, cols, HAS_BIAS) if GATED else bias
    sums = tl.zeros([1, BLOCK_C], tl.float32)
    if GATED:
        value_sums = tl.zeros([1, BLOCK_C], tl.float32)
    for start in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)[:, None]
        row_at = row.to(tl.int64)
        inside = (row < rows) & (col < cols)
        dx_at = dx_ptr + row_at * dx_stride + col
        dx, dvalue, h = differentiate_block(
            dh_ptr + row_at * dh_stride + col, kept_ptr + row_at * kept_stride + col, bias, value_bias, key_ptr,
            row, col, cols, inside, KIND, GATED, P, True,
        )  # fmt: skip
        if GATED:
            tl.store(dx_at + cols, dvalue.to(dx_ptr.dtype.element_ty), mask=inside)
            if WANT_DBIAS:
                value_sums += tl.sum(dvalue, 0, keep_dims=True)
        if WANT_H:
            tl.store(h_ptr + row_at * cols + col, h.to(h_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if WANT_DBIAS:
            sums += tl.sum(dx, 0, keep_dims=True)
    if WANT_DBIAS:
        width = 2 * cols if GATED else cols
        sums_at = sums_ptr + tl.program_id(0) * width + col
        tl.store(sums_at, sums, mask=col < cols)
        if GATED:
            tl.store(sums_at + cols, value_sums, mask=col < cols)


@cache
def _constants(cols: int, kind: str, p: float, has_bias: bool) -> dict[str, Any]:
    """The constants of both kernels. A block of 1024 columns is the 128 threads of a program with one 16-byte load of
    bf16 each: a thread owns whole columns and sums them without asking its neighbours. Two rows, or the two halves of
    one row where there is a gate, keep several loads in flight with few enough registers for five or six programs on a
    multiprocessor. A narrow tensor gets more rows instead."""
    block_c = min(next_power_of_2(cols), 1024)
    block = {"BLOCK_R": (1024 if kind in GATES else 2048) // block_c, "BLOCK_C": block_c}
    return {"KIND": GATES.get(kind, kind), "GATED": kind in GATES, "P": p, "HAS_BIAS": has_bias, **block}


def launch_activate(x: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None) -> Tensor:
    x = dense_rows(x)
    h = _new_h(x, kind)
    (rows, cols), constants = h.shape, _constants(h.shape[1], kind, 0.0 if key is None else p, bias is not None)
    if h.numel():
        _activate_kernel[(cdiv(rows, constants["BLOCK_R"]), cdiv(cols, constants["BLOCK_C"]))](
            x, x if bias is None else bias, x if key is None else key, h, rows, cols, x.stride(0), **constants
        )
    return h


def launch_activate_backward(
    dh: Tensor, kept: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None,
    want_h: bool, want_dbias: bool, overwrite_dh: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`overwrite_dh` puts dx where dh was, if both have one shape: for a caller to whom dh is a temporary."""
    dh, kept = dense_rows(dh), dense_rows(kept)
    rows, cols = dh.shape
    dx, h, dbias = _new_gradients(dh, kept, bias, want_h, want_dbias, overwrite_dh and kind not in GATES)
    constants = _constants(cols, kind, 0.0 if key is None else p, bias is not None)
    column_blocks, groups = cdiv(cols, constants["BLOCK_C"]), cdiv(rows, constants["BLOCK_R"])
    if want_dbias:  # few programs with many rows each; otherwise as many as there are blocks
        groups = min(groups, cdiv(6 * num_processors(dh.device), max(column_blocks, 1)))
    sums = kept.new_empty((groups, kept.shape[1]) if want_dbias else 0, dtype=wide_dtype(kept.dtype))
    if dh.numel():
        _activate_backward_kernel[(groups, column_blocks)](
            dh, kept, kept if bias is None else bias, kept if key is None else key, dx, h, sums,
            rows, cols, dh.stride(0), kept.stride(0), dx.stride(0),
            WANT_H=want_h, WANT_DBIAS=want_dbias, **constants,
        )  # fmt: skip
    if want_dbias:
        launch_sums(sums[:, None], [dbias])
    return dx, h, dbias


def run_activate(x: Tensor, activation: Activation) -> Tensor:
    """h, without autograd: for an operation that has more in it."""
    kind, bias, p, key = activation
    return (launch_activate if runs_kernels(x) else activate_ref)(x, bias, kind, p, key)


def run_activate_backward(
    dh: Tensor, kept: Tensor, activation: Activation, want_h: bool, want_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As activate_backward_ref; dh is a temporary, which a kernel overwrites with dx."""
    kind, bias, p, key = activation
    wanted = (kind, p, key, want_h, want_dbias)
    if runs_kernels(dh):
        return launch_activate_backward(dh, kept, bias, *wanted, overwrite_dh=True)
    return activate_backward_ref(dh, kept, bias, *wanted)


def _new_h(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2 if kind in GATES else x.shape[1])


def _new_gradients(
    dh: Tensor, kept: Tensor, bias: Tensor | None, want_h: bool, want_dbias: bool, overwrite_dh: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty dx, h and dbias; dx is dh if that is to be overwritten."""
    dbias = kept.new_empty(kept.shape[1] if want_dbias else 0, dtype=_dbias_dtype(kept, bias))
    return dh if overwrite_dh else kept.new_empty(kept.shape), kept.new_empty(dh.shape if want_h else 0), dbias


def _dbias_dtype(kept: Tensor, bias: Tensor | None) -> torch.dtype:
    return wide_dtype(kept.dtype) if bias is None else bias.dtype


_activate = Op("activate", activate_ref, launch_activate, fake=_new_h)
_activate_backward = Op("activate_backward", activate_backward_ref, launch_activate_backward, fake=_new_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.kind, ctx.p, key = inputs
    ctx.save_for_backward(output if ctx.kind == "relu" else x, bias, key)


@_activate.gradient(_save)
def _backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    kept, bias, key = ctx.saved_tensors
    want_dbias = ctx.needs_input_grad[1]
    dx, _, dbias = _activate_backward(dh, kept, bias, ctx.kind, ctx.p, key, False, want_dbias)
    return dx, dbias if want_dbias else None, None, None, None


def activate(x: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None, keep: str = "input") -> Tensor:
    """Returns dropout(act(x + bias)), [T, I], for x [T, I], or [T, 2I] for a gated kind (gate, then value). `key` [2]
    is needed where p > 0. `keep` is what stays for the backward pass: `input` is x; `code8` is a byte for each element
    and `bit` a bit and h, both without a gate (coded_activation.py has their errors). h is the same in all cases."""
    check_activation(kind, p, key)
    if keep not in KEEPS:
        raise ValueError(f"an activation keeps one of {', '.join(KEEPS)}, not {keep!r}")
    if keep != "input" and kind in GATES:
        raise ValueError(f"{kind} keeps its input, not {keep}: one output does not determine a gate and a value")
    if x.ndim != 2 or (kind in GATES and x.shape[1] % 2):
        raise ValueError(f"{kind} takes [tokens, {'2 * ' if kind in GATES else ''}width], not {list(x.shape)}")
    if bias is not None and bias.shape != x.shape[1:]:
        raise ValueError(f"the bias of {list(x.shape)} is [{x.shape[1]}], not {list(bias.shape)}")
    key = key if p > 0.0 else None
    if keep == "input" or kind == "relu":  # relu keeps h alone in any case
        return _activate(x, bias, kind, p, key)
    from stretto.ops.coded_activation import activate_coded  # which is made of functions of this file

    return activate_coded(x, bias, kind, p, key, keep)


def check_activation(kind: str, p: float, key: Tensor | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"the activation is one of {', '.join(KINDS)}, not {kind!r}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"the dropout probability is at least 0 and below 1, not {p}")
    if p > 0.0 and (key is None or key.shape != (2,)):
        raise ValueError(f"dropout with p = {p} needs a key [2], not {None if key is None else list(key.shape)}")
