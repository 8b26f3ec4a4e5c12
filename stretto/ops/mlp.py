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

Only gradients that someone needs are computed. Products accumulate as torch.mm does; bias gradients in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from stretto.ops.activation import (
    GATES,
    activate_backward_ref,
    activate_ref,
    check_activation,
    launch_activate,
    launch_activate_backward,
)
from stretto.ops.language import INTERPRET, product_dtype, wide_dtype
from stretto.ops.linear import linear_backward
from stretto.ops.op import define


def mlp_ref(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    kind: str,
    p: float,
    key: Tensor | None,
) -> Tensor:
    h = activate_ref(F.linear(x, up_weight, up_bias), None, kind, p, key)
    return F.linear(h, down_weight, down_bias)


def _activate(pre: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None) -> Tensor:
    return (launch_activate if pre.is_cuda or INTERPRET else activate_ref)(pre, bias, kind, p, key)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


@define("mlp")
def _mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    kind: str,
    p: float,
    key: Tensor | None,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out; what the activation's backward pass needs: x @ up_weight^T, or h for relu; h, unless that is it or it will
    be recomputed."""
    if kind == "relu":  # a sign decides here, and rounding without the bias could turn it
        h = _activate(_linear(x, up_weight, up_bias), None, kind, p, key)
        return _linear(h, down_weight, down_bias), h, x.new_empty(0)
    pre = _linear(x, up_weight, None)
    h = _activate(pre, up_bias, kind, p, key)
    return _linear(h, down_weight, down_bias), pre, x.new_empty(0) if recompute else h


@_mlp.register_fake
def _(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    kind: str,
    p: float,
    key: Tensor | None,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    keep_h = kind != "relu" and not recompute
    return (
        x.new_empty(x.shape[0], down_weight.shape[0]),
        x.new_empty(x.shape[0], up_weight.shape[0]),
        x.new_empty((x.shape[0], down_weight.shape[1]) if keep_h else 0),
    )


@define("mlp_backward")
def _mlp_backward(
    dout: Tensor,
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    kept: Tensor,
    h: Tensor,
    kind: str,
    p: float,
    key: Tensor | None,
    recompute: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, up_weight, up_bias, down_weight, down_bias: those that are `needed`, in this order, and empty
    tensors for the others. Those of the biases: up_bias in its own dtype, down_bias wide."""
    need_x, need_up_weight, need_up_bias, need_down_weight, need_down_bias = needed
    dx, dup_weight = x.new_empty(0), x.new_empty(0)
    ddown_bias = x.new_empty(0, dtype=wide_dtype(x.dtype))
    needed = [need_x or need_up_weight or need_up_bias, need_up_bias, need_down_weight]
    dpre, dup_bias, ddown_weight = _backward_down(dout, kept, up_bias, h, down_weight, kind, p, key, recompute, needed)
    if need_down_bias:
        ddown_bias = dout.sum(0, dtype=ddown_bias.dtype)
    if need_x and need_up_weight:
        dx, dup_weight = linear_backward(dpre, x, up_weight)
    elif need_up_weight:
        dup_weight = dpre.t() @ x
    elif need_x:
        dx = dpre @ up_weight
    return dx, dup_weight, dup_bias, ddown_weight, ddown_bias


def _backward_down(
    dout: Tensor,
    kept: Tensor,
    bias: Tensor | None,
    h: Tensor,
    weight: Tensor,
    kind: str,
    p: float,
    key: Tensor | None,
    recompute: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back through dropout(act(kept + bias)) @ weight^T: gradients of kept, bias and weight."""
    need_kept, need_bias, need_weight = needed
    dkept, dweight = kept.new_empty(0), kept.new_empty(0)
    dbias = kept.new_empty(0, dtype=wide_dtype(kept.dtype))
    h = kept if kind == "relu" else h
    want_h = need_weight and recompute and kind != "relu"
    together = need_kept and need_weight and not want_h
    if need_kept:
        launch = partial(launch_activate_backward, overwrite_dh=True)
        backward = launch if dout.is_cuda or INTERPRET else activate_backward_ref
        if together:
            dh, dweight = linear_backward(dout, h, weight)
        else:
            dh = dout @ weight
        dkept, again, dbias = backward(dh, kept, bias, kind, p, key, want_h, need_bias)
        h = again if want_h else h
        del again, dh
    elif want_h:
        h = _activate(kept, bias, kind, p, key)
    if need_weight and not together:
        dweight = dout.t() @ h
    return dkept, dbias, dweight


@_mlp_backward.register_fake
def _(
    dout: Tensor,
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    kept: Tensor,
    h: Tensor,
    kind: str,
    p: float,
    key: Tensor | None,
    recompute: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_x, need_up_weight, need_up_bias, need_down_weight, need_down_bias = needed
    wide = wide_dtype(x.dtype)
    return (
        x.new_empty(x.shape if need_x else 0),
        x.new_empty(up_weight.shape if need_up_weight else 0),
        x.new_empty(up_weight.shape[0] if need_up_bias else 0, dtype=wide if up_bias is None else up_bias.dtype),
        x.new_empty(down_weight.shape if need_down_weight else 0),
        x.new_empty(down_weight.shape[0] if need_down_bias else 0, dtype=wide),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.kind, ctx.p, key, ctx.recompute = inputs
    _, kept, h = output
    ctx.save_for_backward(*tensors, key, kept, h)
    ctx.mark_non_differentiable(kept, h)
    ctx.set_materialize_grads(False)  # no zeros in place of the gradients of kept and h


def _backward(ctx: Any, dout: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, up_weight, up_bias, down_weight, down_bias, key, kept, h = ctx.saved_tensors
    inputs, needed = (x, up_weight, up_bias, down_weight, down_bias), list(ctx.needs_input_grad[:5])
    gradients = _mlp_backward(
        dout, x, up_weight, up_bias, down_weight, kept, h, ctx.kind, ctx.p, key, ctx.recompute, needed
    )
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
    """The MLP of x [T, C], computed in the dtype of x or, like F.linear, of an enclosing autocast. Parameters may be
    wider; their gradients have their own dtype. `key` [2] is needed where p > 0."""
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


@define("activate_linear")
def _activate_linear(
    pre: Tensor, bias: Tensor | None, weight: Tensor, kind: str, p: float, key: Tensor | None
) -> Tensor:
    return F.linear(_activate(pre, bias, kind, p, key), weight)


@_activate_linear.register_fake
def _(pre: Tensor, bias: Tensor | None, weight: Tensor, *others: Any) -> Tensor:
    return pre.new_empty(pre.shape[0], weight.shape[0])


@define("activate_linear_backward")
def _activate_linear_backward(
    dout: Tensor,
    pre: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    kind: str,
    p: float,
    key: Tensor | None,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_down(dout, pre, bias, pre, weight, kind, p, key, True, needed)


@_activate_linear_backward.register_fake
def _(dout: Tensor, pre: Tensor, bias: Tensor | None, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    need_pre, need_bias, need_weight = others[-1]
    return (
        pre.new_empty(pre.shape if need_pre else 0),
        pre.new_empty(pre.shape[1] if need_bias else 0, dtype=wide_dtype(pre.dtype) if bias is None else bias.dtype),
        pre.new_empty(weight.shape if need_weight else 0),
    )


def _save_pre(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, bias, weight, ctx.kind, ctx.p, key = inputs
    ctx.save_for_backward(pre, bias, weight, key)


def _backward_pre(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    pre, bias, weight, key = ctx.saved_tensors
    need_pre, need_bias, need_weight = ctx.needs_input_grad[:3]
    needed = [need_pre or need_bias, need_bias, need_weight]  # one kernel gives the first two
    gradients = _activate_linear_backward(dout, pre, bias, weight, ctx.kind, ctx.p, key, needed)
    wanted = (need_pre, need_bias, need_weight)
    return *(g if want else None for g, want in zip(gradients, wanted, strict=True)), None, None, None


_activate_linear.register_autograd(_backward_pre, setup_context=_save_pre)


def activate_linear(
    pre: Tensor, bias: Tensor | None, weight: Tensor, kind: str, p: float, key: Tensor | None
) -> Tensor:
    """dropout(act(pre + bias)) @ weight^T, the second half of an MLP, for who computes the first half in another way.
    Only `pre` is kept: its backward kernel writes the activations again."""
    check_activation(kind, p, key)
    if kind == "relu":
        raise ValueError("activate_linear takes no relu, whose sign must be that of the rounded sum: use mlp")
    inner = pre.shape[-1] // 2 if kind in GATES else pre.shape[-1]
    if pre.ndim != 2 or weight.ndim != 2 or weight.shape[1] != inner:
        raise ValueError(f"{kind} of {list(pre.shape)} and a weight [out, {inner}], not {list(weight.shape)}")
    return _activate_linear(pre, bias, weight.to(pre.dtype), kind, p, key if p > 0.0 else None)
