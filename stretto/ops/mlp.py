"""The MLP of a Transformer as one differentiable operation: two matrix products around the kernels of activation.py.

    out = dropout(act(x @ up_weight^T + up_bias)) @ down_weight^T + down_bias

Shapes: T tokens, C width, I inner width. x, out [T, C]; up_weight [I, C], or [2I, C] with a gate; down_weight [C, I].

Why one operation: autograd sees only its ends, so what happens between them can be arranged. The bias in front of the
activation is added by its kernel, unrounded, and its gradient falls out of the backward kernel; the gradient of h is a
temporary, which that kernel overwrites with the gradient of the product; and with `recompute` h is not kept at all,
since the backward kernel can write it again while it reads what it needs anyway. The results are the same, bit for bit,
with and without.

Kept for backward, bytes per token in a 16-bit type, next to the weights (plain torch in brackets, with dropout):

                     gelu, gelu_tanh,     relu                swiglu, geglu
                     silu
    recompute        2C + 2I              2C + 2I             2C + 4I
    otherwise        2C + 4I  [2C + 5I]   2C + 2I  [2C + 5I]  2C + 6I  [2C + 9I]

Only gradients that are needed are computed. The products are in products.py; bias gradients are fp32 sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from stretto.ops import activation
from stretto.ops.activation import (
    GATES,
    activate_backward_ref,
    activate_ref,
    check_activation,
    launch_activate,
    launch_activate_backward,
)
from stretto.ops.language import INTERPRET, product_dtype, wide_dtype
from stretto.ops.op import Op
from stretto.ops.products import compute_dweight, compute_dx, compute_gradients, multiply


class Forward(NamedTuple):
    x: Tensor
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    kind: str
    p: float
    key: Tensor | None
    recompute: bool


class Backward(NamedTuple):
    dout: Tensor
    x: Tensor
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    kept: Tensor  # x @ up_weight^T, or h for relu
    h: Tensor | None  # None: the backward kernel writes h again, or, for relu, `kept` is h
    kind: str
    p: float
    key: Tensor | None
    needed: list[bool]  # the gradients of x, up_weight, up_bias, down_weight, down_bias


class DownBackward(NamedTuple):
    """The arguments of the way back through dropout(act(kept + bias)) @ weight^T."""

    dout: Tensor
    kept: Tensor
    bias: Tensor | None
    weight: Tensor
    h: Tensor | None
    kind: str
    p: float
    key: Tensor | None
    needed: list[bool]  # the gradients of kept, bias, weight


def _activate(pre: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None) -> Tensor:
    return (launch_activate if pre.is_cuda or INTERPRET else activate_ref)(pre, bias, kind, p, key)


def run_mlp(a: Forward) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out; what the backward pass of the activation needs, x @ up_weight^T or for relu h; and h, which is empty
    for relu, or if the backward pass recomputes h."""
    if a.kind == "relu":  # a sign decides here, and rounding without the bias could turn it
        h = _activate(multiply(a.x, a.up_weight, a.up_bias), None, a.kind, a.p, a.key)
        return multiply(h, a.down_weight, a.down_bias), h, a.x.new_empty(0)
    pre = multiply(a.x, a.up_weight)
    h = _activate(pre, a.up_bias, a.kind, a.p, a.key)
    return multiply(h, a.down_weight, a.down_bias), pre, a.x.new_empty(0) if a.recompute else h


def _new_outputs(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, kind: str, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    keep_h = kind != "relu" and not recompute
    return (
        x.new_empty(x.shape[0], down_weight.shape[0]),
        x.new_empty(x.shape[0], up_weight.shape[0]),
        x.new_empty((x.shape[0], down_weight.shape[1]) if keep_h else 0),
    )


def run_mlp_backward(a: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients that are `needed`, and empty tensors in place of the others. The gradient of up_bias has
    the dtype of up_bias, the gradient of down_bias is fp32."""
    need_x, need_up_weight, need_up_bias, need_down_weight, need_down_bias = a.needed
    dx, dup_weight = a.x.new_empty(0), a.x.new_empty(0)
    ddown_bias = a.x.new_empty(0, dtype=wide_dtype(a.x.dtype))
    needed = [need_x or need_up_weight or need_up_bias, need_up_bias, need_down_weight]
    dpre, dup_bias, ddown_weight = run_down_backward(
        DownBackward(a.dout, a.kept, a.up_bias, a.down_weight, a.h, a.kind, a.p, a.key, needed)
    )
    if need_down_bias:
        ddown_bias = a.dout.sum(0, dtype=ddown_bias.dtype)
    if need_x and need_up_weight:
        dx, dup_weight = compute_gradients(dpre, a.x, a.up_weight)
    elif need_up_weight:
        dup_weight = compute_dweight(dpre, a.x)
    elif need_x:
        dx = compute_dx(dpre, a.up_weight)
    return dx, dup_weight, dup_bias, ddown_weight, ddown_bias


def run_down_backward(a: DownBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of kept, bias and weight that are `needed`, and empty tensors in place of the others."""
    need_kept, need_bias, need_weight = a.needed
    dkept, dweight = a.kept.new_empty(0), a.kept.new_empty(0)
    dbias = a.kept.new_empty(0, dtype=wide_dtype(a.kept.dtype))
    h = a.kept if a.kind == "relu" else a.h
    want_h = need_weight and h is None
    if need_kept:
        if need_weight and h is not None:
            dh, dweight = compute_gradients(a.dout, h, a.weight)
            need_weight = False  # any more
        else:
            dh = compute_dx(a.dout, a.weight)
        gradients = activation.Backward(dh, a.kept, a.bias, a.kind, a.p, a.key, want_h, need_bias)
        if a.dout.is_cuda or INTERPRET:
            dkept, again, dbias = launch_activate_backward(gradients, overwrite_dh=True)
        else:
            dkept, again, dbias = activate_backward_ref(gradients)
        h = again if want_h else h
        del again, dh, gradients
    elif want_h:
        h = _activate(a.kept, a.bias, a.kind, a.p, a.key)
    if need_weight and h is not None:
        dweight = compute_dweight(a.dout, h)
    return dkept, dbias, dweight


def _new_gradients(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = wide_dtype(x.dtype)
    need_x, need_up_weight, need_up_bias, need_down_weight, need_down_bias = needed
    return (
        x.new_empty(x.shape if need_x else 0),
        x.new_empty(up_weight.shape if need_up_weight else 0),
        x.new_empty(up_weight.shape[0] if need_up_bias else 0, dtype=wide if up_bias is None else up_bias.dtype),
        x.new_empty(down_weight.shape if need_down_weight else 0),
        x.new_empty(down_weight.shape[0] if need_down_bias else 0, dtype=wide),
    )


_mlp = Op("mlp", run_mlp, fake=_new_outputs)
_mlp_backward = Op("mlp_backward", run_mlp_backward, fake=_new_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.kind, ctx.p, key, recompute = inputs
    _, kept, h = output
    ctx.save_for_backward(*tensors, key, kept, None if recompute or ctx.kind == "relu" else h)
    ctx.mark_non_differentiable(kept, h)
    ctx.set_materialize_grads(False)  # no zeros in place of the gradients of kept and h


def _backward(ctx: Any, dout: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, up_weight, up_bias, down_weight, down_bias, key, kept, h = ctx.saved_tensors
    inputs, needed = (x, up_weight, up_bias, down_weight, down_bias), list(ctx.needs_input_grad[:5])
    gradients = _mlp_backward(dout, x, up_weight, up_bias, down_weight, kept, h, ctx.kind, ctx.p, key, needed)
    given = (g.to(t.dtype) if need else None for g, t, need in zip(gradients, inputs, needed, strict=True))
    return *given, None, None, None, None


_mlp.register_autograd(_backward, setup_context=_save)


def mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    kind: str,
    p: float,
    key: Tensor | None,
    recompute: bool,
) -> Tensor:
    """Returns the MLP of x [T, C], computed in the dtype of x or, like F.linear, of an enclosing autocast. Parameters
    may be wider; their gradients have their own dtype. `key` [2] is needed where p > 0."""
    check_activation(kind, p, key)
    inner = down_weight.shape[-1]
    up_rows = 2 * inner if kind in GATES else inner
    if x.ndim != 2 or down_weight.ndim != 2 or up_weight.shape != (up_rows, x.shape[1]):
        shapes = ", ".join(str(list(t.shape)) for t in (x, up_weight, down_weight))
        wide = "2 * inner" if kind in GATES else "inner"
        raise ValueError(f"{kind} takes x [tokens, width], up [{wide}, width], down [width, inner], not {shapes}")
    for name, bias, weight in ("up", up_bias, up_weight), ("down", down_bias, down_weight):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"the {name} bias is [{weight.shape[0]}], not {list(bias.shape)}")
    dtype = product_dtype(x)
    x, up_weight, down_weight = x.to(dtype), up_weight.to(dtype), down_weight.to(dtype)
    return _mlp(x, up_weight, up_bias, down_weight, down_bias, kind, p, key if p > 0.0 else None, recompute)[0]


def _activate_multiply(
    pre: Tensor, bias: Tensor | None, weight: Tensor, kind: str, p: float, key: Tensor | None
) -> Tensor:
    return multiply(_activate(pre, bias, kind, p, key), weight)


def _new_down_gradients(
    kept: Tensor, bias: Tensor | None, weight: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    need_kept, need_bias, need_weight = needed
    dtype = wide_dtype(kept.dtype) if bias is None else bias.dtype
    return (
        kept.new_empty(kept.shape if need_kept else 0),
        kept.new_empty(kept.shape[1] if need_bias else 0, dtype=dtype),
        kept.new_empty(weight.shape if need_weight else 0),
    )


_activate_linear = Op(
    "activate_linear", _activate_multiply, fake=lambda pre, weight: pre.new_empty(pre.shape[0], weight.shape[0])
)
_activate_linear_backward = Op("activate_linear_backward", run_down_backward, fake=_new_down_gradients)


def _save_pre(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, bias, weight, ctx.kind, ctx.p, key = inputs
    ctx.save_for_backward(pre, bias, weight, key)


def _backward_pre(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    pre, bias, weight, key = ctx.saved_tensors
    need_pre, need_bias, need_weight = wanted = ctx.needs_input_grad[:3]
    needed = [need_pre or need_bias, need_bias, need_weight]  # one kernel computes the first two
    gradients = _activate_linear_backward(dout, pre, bias, weight, None, ctx.kind, ctx.p, key, needed)
    return *(g if want else None for g, want in zip(gradients, wanted, strict=True)), None, None, None


_activate_linear.register_autograd(_backward_pre, setup_context=_save_pre)


def activate_linear(
    pre: Tensor, bias: Tensor | None, weight: Tensor, kind: str, p: float, key: Tensor | None
) -> Tensor:
    """Returns dropout(act(pre + bias)) @ weight^T, the second half of an MLP, for a caller that computes the first half
    in another way. Only `pre` is kept: the backward kernel writes the activations again."""
    check_activation(kind, p, key)
    if kind == "relu":
        raise ValueError("activate_linear takes no relu, whose sign must be that of the rounded sum: use mlp")
    inner = pre.shape[-1] // 2 if kind in GATES else pre.shape[-1]
    if pre.ndim != 2 or weight.ndim != 2 or weight.shape[1] != inner:
        raise ValueError(f"{kind} of {list(pre.shape)} and a weight [out, {inner}], not {list(weight.shape)}")
    return _activate_linear(pre, bias, weight.to(pre.dtype), kind, p, key if p > 0.0 else None)
