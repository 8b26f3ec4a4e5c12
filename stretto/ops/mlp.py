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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.ops import activation
from stretto.ops.activation import GATES, check_activation
from stretto.ops.language import product_dtype, runs_kernels, wide_dtype
from stretto.ops.op import Op, fill_in
from stretto.ops.products import compute_dweight, compute_some_gradients, multiply


def _activate(pre: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None) -> Tensor:
    return (activation.launch_activate if runs_kernels(pre) else activation.activate_ref)(pre, bias, kind, p, key)


def run_mlp(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
    kind: str, p: float, key: Tensor | None, recompute: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns out; what the backward pass of the activation needs, x @ up_weight^T or for relu h; and h, which is empty
    for relu, or if the backward pass recomputes h."""
    if kind == "relu":  # a sign decides here, and rounding without the bias could turn it
        h = _activate(multiply(x, up_weight, up_bias), None, kind, p, key)
        return multiply(h, down_weight, down_bias), h, x.new_empty(0)
    pre = multiply(x, up_weight)
    h = _activate(pre, up_bias, kind, p, key)
    return multiply(h, down_weight, down_bias), pre, x.new_empty(0) if recompute else h


def _new_outputs(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, kind: str, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, (width, inner) = x.shape[0], down_weight.shape
    h = x.new_empty(0) if kind == "relu" or recompute else x.new_empty(rows, inner)
    return x.new_empty(rows, width), x.new_empty(rows, up_weight.shape[0]), h


def run_mlp_backward(
    dout: Tensor, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, kept: Tensor,
    h: Tensor | None, kind: str, p: float, key: Tensor | None, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of x, up_weight, up_bias, down_weight and down_bias that are `needed`. The gradient of
    up_bias has the dtype of up_bias, the gradient of down_bias is fp32. `kept` and `h` are as in run_down_backward."""
    need_x, need_up_weight, need_up_bias, need_down_weight, need_down_bias = needed
    some = [need_x or need_up_weight or need_up_bias, need_up_bias, need_down_weight]
    gradients = run_down_backward(dout, kept, up_bias, down_weight, h, kind, p, key, some)
    dpre, dup_bias, ddown_weight = fill_in(gradients, some)
    ddown_bias = dout.sum(0, dtype=wide_dtype(x.dtype)) if need_down_bias else None
    dx = dup_weight = None
    if dpre is not None:
        dx, dup_weight = compute_some_gradients(dpre, x if need_up_weight else None, up_weight if need_x else None)
    return [g for g in (dx, dup_weight, dup_bias, ddown_weight, ddown_bias) if g is not None]


def run_down_backward(
    dout: Tensor, kept: Tensor, bias: Tensor | None, weight: Tensor, h: Tensor | None,
    kind: str, p: float, key: Tensor | None, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of pre, bias and weight that are `needed`, for dropout(act(pre + bias)) @ weight^T. `kept`
    is pre, or h for relu; without `h` the backward kernel writes h again, or, for relu, `kept` is h."""
    need_pre, need_bias, need_weight = needed
    h = kept if kind == "relu" else h
    want_h = need_weight and h is None
    dpre = dbias = dweight = None
    if need_pre:
        dh, dweight = compute_some_gradients(dout, h if need_weight else None, weight)
        wanted = (kind, p, key, want_h, need_bias)
        if runs_kernels(dout):
            dpre, again, dbias = activation.launch_activate_backward(dh, kept, bias, *wanted, overwrite_dh=True)
        else:
            dpre, again, dbias = activation.activate_backward_ref(dh, kept, bias, *wanted)
        h = again if want_h else h
        del again, dh
    elif want_h:
        h = _activate(kept, bias, kind, p, key)
    if need_weight and dweight is None and h is not None:
        dweight = compute_dweight(dout, h)
    return [g for g, need in zip((dpre, dbias, dweight), needed, strict=True) if need and g is not None]


def _new_needed(
    like: Tensor, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], needed: list[bool]
) -> list[Tensor]:
    some = zip(shapes, dtypes, needed, strict=True)
    return [like.new_empty(shape, dtype=dtype) for shape, dtype, need in some if need]


def _new_gradients(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, needed: list[bool]
) -> list[Tensor]:
    up, down, wide = up_weight.shape, down_weight.shape, wide_dtype(x.dtype)
    dtypes = (x.dtype, x.dtype, wide if up_bias is None else up_bias.dtype, x.dtype, wide)
    return _new_needed(x, (x.shape, up, up[:1], down, down[:1]), dtypes, needed)


_mlp = Op("mlp", run_mlp, fake=_new_outputs)
_mlp_backward = Op("mlp_backward", run_mlp_backward, fake=_new_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.kind, ctx.p, key, recompute = inputs
    _, kept, h = output
    ctx.save_for_backward(*tensors, key, kept, None if recompute or ctx.kind == "relu" else h)
    ctx.mark_non_differentiable(kept, h)
    ctx.set_materialize_grads(False)  # no zeros in place of the gradients of kept and h


@_mlp.gradient(_save)
def _backward(ctx: Any, dout: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *inputs, down_bias, key, kept, h = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:5])
    gradients = fill_in(_mlp_backward(dout, *inputs, kept, h, ctx.kind, ctx.p, key, needed), needed)
    given = (None if g is None else g.to(t.dtype) for g, t in zip(gradients, (*inputs, down_bias), strict=True))
    return *given, None, None, None, None


def mlp(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
    kind: str, p: float, key: Tensor | None, recompute: bool,
) -> Tensor:  # fmt: skip
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


def _new_down_gradients(kept: Tensor, bias: Tensor | None, weight: Tensor, needed: list[bool]) -> list[Tensor]:
    dtypes = (kept.dtype, wide_dtype(kept.dtype) if bias is None else bias.dtype, kept.dtype)
    return _new_needed(kept, (kept.shape, kept.shape[1:], weight.shape), dtypes, needed)


_activate_linear = Op(
    "activate_linear", _activate_multiply, fake=lambda pre, weight: pre.new_empty(pre.shape[0], weight.shape[0])
)
_activate_linear_backward = Op("activate_linear_backward", run_down_backward, fake=_new_down_gradients)


def _save_pre(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, bias, weight, ctx.kind, ctx.p, key = inputs
    ctx.save_for_backward(pre, bias, weight, key)


@_activate_linear.gradient(_save_pre)
def _backward_pre(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    pre, bias, weight, key = ctx.saved_tensors
    need_pre, need_bias, need_weight = wanted = ctx.needs_input_grad[:3]
    needed = [need_pre or need_bias, need_bias, need_weight]  # one kernel computes the first two
    found = _activate_linear_backward(dout, pre, bias, weight, None, ctx.kind, ctx.p, key, needed)
    gradients = fill_in(found, needed)
    return *(g if want else None for g, want in zip(gradients, wanted, strict=True)), None, None, None


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
