"""Activations whose backward pass does not need their input, for a model whose two linear layers are separate modules.

    h = dropout(act(x + bias))      x, h [T, I]; bias [I]; act one of gelu, gelu_tanh, silu, gelu_quick

The layer after an activation keeps h for the gradient of its weight. activation.py keeps x too, 2 bytes an element in a
16-bit type, for act' alone. Here the forward kernel notes less about act', while it has x + bias in fp32:

    code8   act' itself in one byte: round(act' / 0.005) + 26, with 255 for NaN. act' lies between -0.129 and 1.129, so
            that codes are 0 to 252. 0 and 1 are exact, any other act' is within 2.5e-3. Backward is one multiplication.
    bit     one bit, 8 to a byte: whether x + bias lies right of x*, where act has its only minimum y*. On either side
            act is monotone, so that h and the bit determine x and thereby act'.

From y = h (1 - p) and the bit to act': near the minimum, act' goes like the root of y - y*, and it is smooth as a
function of the signed root

    s = sqrt(y - y*) right of x*, -sqrt(y - y*) left of it

    right   act' = 1 + e(y) R(s)            e = exp(-y^2 / 2), for silu exp(-y): exactly 1 for large y
    left    act' = y (a g(y) + Q(s))        g = sqrt(-ln -y), for silu 1 / ln -y: exactly 0 where y is

gelu_quick(x) is silu(1.702 x) / 1.702, so that its act' follows from 1.702 y as that of silu does from y.

R and Q are polynomials and a is a number, fitted by Lawson's iteration to the smallest largest error of act': below
3.4e-4 for a 16-bit h, below 6e-5 for others. What counts is the rounding of h, which the root magnifies next to the
minimum. So the root is the mean of the roots of the two ends of what was rounded to h, which lowers the largest error
in bf16 from 1.5e-2 to 1.1e-2. Errors of act' (of silu up to 1.2 times these), relative in the Euclidean norm for x from
a standard normal distribution, and the largest one at all:

    h in bf16   2.2e-3, 1.1e-2 (for comparison: act' rounded to bf16 has 1.9e-3, 3.9e-3)
    h in fp16   5.7e-4, 4.9e-3
    h in fp32   2e-5, 1.5e-4 (fp64 is no better)

A dropped element has h = 0 and code 26 or bit 0, all of which mean act' = 0: the backward kernels need no mask.

Saved for backward: code8 the bytes [T, I]; bit the bytes [T, ceil(I / 8)], and h, which is no memory of its own. Bias
gradients are the column sums of dx before its rounding (sums.py). A gated kind has one output for two inputs, which it
does not determine; relu needs neither code nor bit.

Traffic in bf16, bytes an element: code8 5 forward and 5 backward, bit 4.125 and 6.125.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.activation import ACT_BACKWARD, QUICK, activate_ref, gate_of, load_bias, slope_of, survives
from stretto.ops.dropout import keep_ref
from stretto.ops.language import cdiv, dense_rows, jit, next_power_of_2, num_processors, tl, wide, wide_dtype
from stretto.ops.op import Op
from stretto.ops.sums import launch_sums

STEP, ZERO, NAN = 0.005, 26, 255  # of code8
TOP = 40.0  # where act' is 1 for good: keeps R(s) finite


class Minimum(NamedTuple):
    x: float
    y: float


class Fit(NamedTuple):
    """Coefficients of R, highest degree first; a; and coefficients of Q, highest degree first."""

    right: tuple[float, ...]
    a: float
    left: tuple[float, ...]


MINIMA = {
    "gelu": Minimum(-0.7517915246935645, -0.1699712074799037),
    "gelu_tanh": Minimum(-0.7524614220710163, -0.1700407505712541),
    "silu": Minimum(-1.278464542761074, -0.278464542761074),
    "gelu_quick": Minimum(-1.278464542761074 / QUICK, -0.278464542761074 / QUICK),
}
_TANH_LEFT = (-17.7444057, -17.3712064, -11.1885602, -5.44982462, -2.73377811)
FITS_16 = {
    "gelu": Fit(
        (-0.161553525, 0.454658503, 0.364121029, -1.92612674, 1.46123819, 0.935940083, -1.01445547),
        1.53153625, (-8.96714675, -8.59952191, -5.38000123, -2.03816404),
    ),
    "gelu_tanh": Fit(
        (-0.226085167, 0.741887315, -0.104384826, -1.57875693, 1.34504111, 0.950231949, -1.01482775),
        2.05376727, _TANH_LEFT,
    ),
    "silu": Fit(
        (-0.0398705169, 0.119579441, 0.0647730114, 0.0148975642, -0.0502667148, 0.492150697, -0.756693977),
        0.221282357, (-2.37303213, -3.09321859, -2.33282392, 0.17344864),
    ),
}  # fmt: skip
FITS_32 = {
    "gelu": Fit(
        (0.106065927, -0.793481489, 2.40184193, -3.70172248, 2.73235839, -0.298724209, -0.0721728191, -1.55789991,
         1.36835587, 0.943883009, -1.01456461),
        1.61132277, (-33.6157225, -37.3060573, -22.1923, -10.6368785, -5.46936366, -2.14505617),
    ),
    "gelu_tanh": Fit(
        (0.153464472, -1.2723403, 4.30039171, -7.67517608, 7.60950155, -3.92892903, 1.549714, -1.97438457, 1.4260426,
         0.939747661, -1.0145507),
        2.05376727, _TANH_LEFT,
    ),
    "silu": Fit(
        (-0.00653549689, 0.071534479, -0.299416501, 0.599213214, -0.600378357, 0.269046136, 0.150553792, -0.0102892527,
         -0.0708064752, 0.498725336, -0.756929597),
        0.644896097, (-2.38765341, -4.54375958, -4.48705653, -2.36444296, 0.504465407),
    ),
}  # fmt: skip


FITS_16["gelu_quick"], FITS_32["gelu_quick"] = FITS_16["silu"], FITS_32["silu"]


def find_fit(kind: str, dtype: torch.dtype) -> Fit:
    return (FITS_16 if dtype.itemsize == 2 else FITS_32)[kind]


def find_blur(kind: str, p: float, dtype: torch.dtype) -> float:
    """How far y = h (1 - p) lies from the exact y next to the minimum: half a unit in the last place of a 16-bit h, and
    up to 1.5 units where h is as fine as the arithmetic that it comes from."""
    h = torch.tensor(MINIMA[kind].y / (1 - p), dtype=torch.float64)
    return float(torch.finfo(dtype).eps * 2 ** h.abs().log2().floor() * (1 - p) * (0.5 if dtype.itemsize == 2 else 1.5))


def activate_coded_ref(
    x: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None, keep: str
) -> tuple[Tensor, Tensor]:
    """Returns h, and codes [T, I] or bits [T, ceil(I / 8)], the first of eight elements in the lowest bit."""
    y = wide(x) if bias is None else wide(x) + bias
    alive = torch.ones_like(y, dtype=torch.bool) if key is None else keep_ref(key, y.shape[0], y.shape[1], p)
    if keep == "code8":
        slope = ACT_BACKWARD[kind](torch.ones_like(y), y)
        code = torch.where(slope.isnan(), NAN, (slope / STEP + ZERO).round())
        code = torch.where(alive, code, ZERO).to(torch.uint8).contiguous()
    else:
        right = F.pad((y >= MINIMA[kind].x) & alive, (0, -y.shape[1] % 8)).to(torch.uint8)
        eights = right.view(y.shape[0], right.shape[1] // 8, 8)
        code = (eights << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(2, dtype=torch.uint8)
    return activate_ref(x, bias, kind, p, key), code


def _evaluate(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = torch.zeros_like(x)
    for coefficient in coefficients:
        total = total * x + coefficient
    return total


def slope_of_h_ref(y: Tensor, right: Tensor, kind: str, fit: Fit, blur: float) -> Tensor:
    """Returns act' from the activation y, in fp32 or fp64, and from whether x was right of the minimum."""
    if kind == "gelu_quick":
        y, blur, kind = QUICK * y, QUICK * blur, "silu"
    above = y.clamp(max=TOP) - MINIMA[kind].y
    root = ((above - blur).clamp(min=0).sqrt() + (above + blur).clamp(min=0).sqrt()) / 2
    s, tail = torch.where(right, root, -root), (-y).clamp(min=1e-30).log()
    decay, slow = (torch.exp(-y), 1 / tail) if kind == "silu" else (torch.exp(-0.5 * y * y), (-tail).sqrt())
    return torch.where(right, 1 + decay * _evaluate(s, fit.right), y * (fit.a * slow + _evaluate(s, fit.left)))


def activate_coded_backward_ref(
    dh: Tensor, h: Tensor | None, code: Tensor, kind: str, p: float, want_dbias: bool
) -> tuple[Tensor, Tensor]:
    """Returns dx, and its column sums in fp32 or fp64, if they are wanted. `h` is given with bits only."""
    if h is None:
        slope = torch.where(code == NAN, torch.nan, (code.to(wide_dtype(dh.dtype)) - ZERO) * STEP)
    else:
        bits = (code[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=code.device)) & 1
        right = bits.flatten(1)[:, : h.shape[1]] > 0
        blur = find_blur(kind, p, h.dtype)
        slope = slope_of_h_ref(wide(h) * (1 - p), right, kind, find_fit(kind, h.dtype), blur)
    dx = wide(dh) / (1 - p) * slope
    return dx.to(dh.dtype).contiguous(), dx.sum(0) if want_dbias else dx.new_empty(0)


@jit
def _activate_coded_kernel(
    x_ptr, bias_ptr, key_ptr, h_ptr, code_ptr, rows, cols, x_stride,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, KEEP: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    row_at = row.to(tl.int64)
    inside = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row_at * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    x += load_bias(bias_ptr, col, cols, HAS_BIAS)
    s, t = gate_of(x, KIND)
    h = x * s
    alive = inside
    if P > 0:
        scale: tl.constexpr = 1 / (1 - P)
        alive &= survives(key_ptr, row, col, P)
        h = tl.where(alive, h * scale, 0.0)
    tl.store(h_ptr + row_at * cols + col, h.to(h_ptr.dtype.element_ty), mask=inside)
    if KEEP == "code8":
        slope = slope_of(x, s, t, KIND)
        code = tl.floor(tl.fma(slope, 200.0, 26.5))  # rounds: all codes are positive
        code = tl.where(slope == slope, code, 255.0)
        code = tl.where(alive, code, 26.0).to(tl.int32).to(tl.uint8)
        tl.store(code_ptr + row_at * cols + col, code, mask=inside)
    else:
        right = ((x >= MIDDLE) & alive).to(tl.int32).reshape(BLOCK_R, BLOCK_C // 8, 8)
        code = tl.sum(right << tl.arange(0, 8)[None, None, :], 2).to(tl.uint8)
        byte = tl.program_id(1) * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
        width = tl.cdiv(cols, 8)
        tl.store(code_ptr + row_at * width + byte, code, mask=(row < rows) & (byte < width))


@jit
def _evaluate_block(x, COEFFICIENTS: tl.constexpr):
    total = tl.zeros_like(x)
    for i in tl.static_range(len(COEFFICIENTS)):
        total = tl.fma(total, x, COEFFICIENTS[i])
    return total


@jit
def slope_of_h(
    y, right, KIND: tl.constexpr, LOW: tl.constexpr, BLUR: tl.constexpr,
    RIGHT: tl.constexpr, A: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Computes slope_of_h_ref. `where` in place of minimum and maximum lets NaN pass."""
    if KIND == "gelu_quick":
        y = y * 1.702
    above = tl.where(y > 40.0, 40.0, y) - LOW
    near = tl.sqrt(tl.where(above < BLUR, 0.0, above - BLUR))
    far = tl.sqrt(tl.where(above < -BLUR, 0.0, above + BLUR))
    s = tl.where(right, 0.5, -0.5) * (near + far)
    tail = tl.log(tl.maximum(-y, 1e-30))
    if KIND == "silu" or KIND == "gelu_quick":
        decay = tl.exp(-y)
        slow = 1 / tail
    else:
        decay = tl.exp(-0.5 * y * y)
        slow = tl.sqrt(-tail)
    one = tl.fma(decay, _evaluate_block(s, RIGHT), 1.0)
    return tl.where(right, one, y * tl.fma(slow, A, _evaluate_block(s, LEFT)))


@jit
def _activate_coded_backward_kernel(
    dh_ptr, h_ptr, code_ptr, dx_ptr, sums_ptr, rows, cols, dh_stride,
    KIND: tl.constexpr, LOW: tl.constexpr, BLUR: tl.constexpr,
    RIGHT: tl.constexpr, A: tl.constexpr, LEFT: tl.constexpr,  # as in Fit
    KEEP: tl.constexpr, P: tl.constexpr, WANT_DBIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    scale: tl.constexpr = 1 / (1 - P)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    byte = tl.program_id(1) * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
    width = tl.cdiv(cols, 8)
    sums = tl.zeros([1, BLOCK_C], tl.float32)
    for start in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)[:, None]
        row_at = row.to(tl.int64)
        inside = (row < rows) & (col < cols)
        dy = tl.load(dh_ptr + row_at * dh_stride + col, mask=inside, other=0.0).to(tl.float32) * scale
        if KEEP == "code8":
            code = tl.load(code_ptr + row_at * cols + col, mask=inside, other=26).to(tl.int32)
            slope = tl.where(code == 255, float("nan"), (code - 26).to(tl.float32) * 0.005)
        else:
            bits = tl.load(code_ptr + row_at * width + byte, mask=(row < rows) & (byte < width), other=0).to(tl.int32)
            right = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]).reshape(BLOCK_R, BLOCK_C) & 1
            y = tl.load(h_ptr + row_at * cols + col, mask=inside, other=0.0).to(tl.float32) * (1 - P)
            slope = slope_of_h(y, right != 0, KIND, LOW, BLUR, RIGHT, A, LEFT)
        dx = dy * slope
        tl.store(dx_ptr + row_at * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if WANT_DBIAS:
            sums += tl.sum(dx, 0, keep_dims=True)
    if WANT_DBIAS:
        tl.store(sums_ptr + tl.program_id(0) * cols + col, sums, mask=col < cols)


@cache
def _blocks(cols: int) -> dict[str, int]:
    """A block has 1024 elements, 8 for each of 128 threads: 16 bytes of bf16, 8 codes, or one byte of bits. With more
    of them, the compiler gives a thread 16 codes and moves the elements between threads to match."""
    block_c = min(max(next_power_of_2(cols), 8), 1024)
    return {"BLOCK_R": 1024 // block_c, "BLOCK_C": block_c}


def launch_activate_coded(
    x: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None, keep: str
) -> tuple[Tensor, Tensor]:
    x = dense_rows(x)
    h, code = _new_outputs(x, keep)
    (rows, cols), blocks = x.shape, _blocks(x.shape[1])
    if h.numel():
        _activate_coded_kernel[(cdiv(rows, blocks["BLOCK_R"]), cdiv(cols, blocks["BLOCK_C"]))](
            x, x if bias is None else bias, x if key is None else key, h, code, rows, cols, x.stride(0),
            KIND=kind, MIDDLE=MINIMA[kind].x, KEEP=keep, P=0.0 if key is None else p, HAS_BIAS=bias is not None,
            **blocks,
        )  # fmt: skip
    return h, code


def launch_activate_coded_backward(
    dh: Tensor, h: Tensor | None, code: Tensor, kind: str, p: float, want_dbias: bool
) -> tuple[Tensor, Tensor]:
    dh, (rows, cols), blocks = dense_rows(dh), dh.shape, _blocks(dh.shape[1])
    (dx, dbias), fit = _new_gradients(dh, want_dbias), find_fit(kind, dh.dtype)
    speed = QUICK if kind == "gelu_quick" else 1.0  # of what the fit is for
    column_blocks, groups = cdiv(cols, blocks["BLOCK_C"]), cdiv(rows, blocks["BLOCK_R"])
    if want_dbias:  # few programs with many rows each; otherwise as many as there are blocks
        groups = min(groups, cdiv(6 * num_processors(dh.device), max(column_blocks, 1)))
    sums = dbias.new_empty((groups, cols) if want_dbias else 0)
    if dh.numel():
        _activate_coded_backward_kernel[(groups, column_blocks)](
            dh, dh if h is None else h.contiguous(), code.contiguous(), dx, sums, rows, cols, dh.stride(0),
            KIND=kind, LOW=speed * MINIMA[kind].y, BLUR=speed * find_blur(kind, p, dh.dtype),
            RIGHT=fit.right, A=fit.a, LEFT=fit.left, KEEP="code8" if h is None else "bit", P=p, WANT_DBIAS=want_dbias,
            **blocks,
        )  # fmt: skip
    if want_dbias:
        launch_sums(sums[:, None], [dbias])
    return dx, dbias


def _new_outputs(x: Tensor, keep: str) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    return x.new_empty(rows, cols), x.new_empty(rows, cols if keep == "code8" else (cols + 7) // 8, dtype=torch.uint8)


def _new_gradients(dh: Tensor, want_dbias: bool) -> tuple[Tensor, Tensor]:
    dbias = dh.new_empty(dh.shape[1] if want_dbias else 0, dtype=wide_dtype(dh.dtype))
    return dh.new_empty(dh.shape), dbias


_activate_coded = Op("activate_coded", activate_coded_ref, launch_activate_coded, fake=_new_outputs)
_activate_coded_backward = Op(
    "activate_coded_backward", activate_coded_backward_ref, launch_activate_coded_backward, fake=_new_gradients
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, bias, ctx.kind, p, key, keep = inputs
    h, code = output
    ctx.p, ctx.bias_dtype = 0.0 if key is None else p, None if bias is None else bias.dtype
    ctx.save_for_backward(h if keep == "bit" else None, code)
    ctx.mark_non_differentiable(code)
    ctx.set_materialize_grads(False)  # no zeros in place of the gradient of the code


@_activate_coded.gradient(_save)
def _backward(ctx: Any, dh: Tensor, _: None) -> tuple[Tensor | None, ...]:
    want_dbias = ctx.needs_input_grad[1]
    dx, dbias = _activate_coded_backward(dh, *ctx.saved_tensors, ctx.kind, ctx.p, want_dbias)
    return dx, dbias.to(ctx.bias_dtype) if want_dbias else None, None, None, None, None


def activate_coded(x: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None, keep: str) -> Tensor:
    """Returns dropout(act(x + bias)) for arguments that `activate` has checked; `keep` is code8 or bit."""
    return _activate_coded(x, bias, kind, p, key, keep)[0]
