"""The MLP of a Transformer as one differentiable operation: two matrix products around the kernels of activation.py.

    out = dropout(act(x @ up_weight^T + up_bias)) @ down_weight^T + down_bias

Shapes: T tokens, C width, I inner width. x, out [T, C]; up_weight [I, C], or [2I, C] with a gate; down_weight [C, I].

Why one operation: autograd sees only its ends, so what happens between them can be arranged. The bias in front of the
activation is added by its kernel, unrounded, and its gradient falls out of the backward kernel; the gradient of h is a
temporary, which that kernel overwrites with the gradient of the product; and `keep` chooses what stays till then:

    activation   the first product and h: nothing is computed twice
    product      the first product alone: the backward kernel writes h again while it reads what it needs anyway
    input        neither: the first product is computed once more, 2 T I C FLOPs (gated twice that), then as above

All three give the same results, bit for bit. Bytes kept per token in a 16-bit type, next to the parameters (plain torch
in brackets, with dropout):

                     gelu, gelu_tanh,     relu                swiglu, geglu
                     silu
    activation       2C + 4I  [2C + 5I]   2C + 2I  [2C + 5I]  2C + 6I  [2C + 9I]
    product          2C + 2I              2C + 2I             2C + 4I
    input            2C                   2C                  2C

Parameters may be wider than x: they are cast to its dtype where they are multiplied, and cast again by the backward
pass, so that no 16-bit copy of them stays alive in between. Only gradients that are needed are computed. The products
are in products.py; bias gradients are fp32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.ops.activation import GATES, Activation, check_activation, run_activate, run_activate_backward
from stretto.ops.language import product_dtype, wide_dtype
from stretto.ops.op import Op, fill_in
from stretto.ops.products import (
    Product,
    compute_dweight,
    compute_some_gradients,
    count_flops,
    join_rows,
    multiply,
    split_rows,
)

KEEPS = ("activation", "product", "input")


def place_bias(kind: str, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What the product adds, and what the activation does, which need not round it. In relu a sign decides, and
    rounding without the bias could turn it."""
    return (bias, None) if kind == "relu" else (None, bias)


def _multiply_up(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, p: float, key: Tensor | None) -> Tensor:
    """Returns what the backward pass of the activation needs: x @ weight^T, or for relu h."""
    early, late = place_bias(kind, bias)
    pre = multiply(x, weight.to(x.dtype), early)
    return run_activate(pre, Activation(kind, late, p, key)) if kind == "relu" else pre


def run_mlp(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
    kind: str, p: float, key: Tensor | None, keep: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns out; the result of _multiply_up; and h. The last two are empty if they are not kept, and h is empty for
    relu, which has it as the second already."""
    kept, none = _multiply_up(x, up_weight, up_bias, kind, p, key), x.new_empty(0)
    h = kept if kind == "relu" else run_activate(kept, Activation(kind, up_bias, p, key))
    kept = none if keep == "input" else kept  # gives its memory back before the second product
    out = multiply(h, down_weight.to(x.dtype), down_bias)
    return out, kept, h if keep == "activation" and kind != "relu" else x.new_empty(0)


def _new_outputs(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, kind: str, keep: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows, (width, inner) = x.shape[0], down_weight.shape
    kept = x.new_empty(0) if keep == "input" else x.new_empty(rows, up_weight.shape[0])
    h = x.new_empty(rows, inner) if keep == "activation" and kind != "relu" else x.new_empty(0)
    return x.new_empty(rows, width), kept, h


def run_mlp_backward(
    dout: Tensor, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor,
    kept: Tensor | None, h: Tensor | None, kind: str, p: float, key: Tensor | None, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of x, up_weight, up_bias, down_weight and down_bias that are `needed`. The gradient of
    up_bias has the dtype of up_bias, the gradient of down_bias is fp32, the others have the dtype of x. `kept` and `h`
    are as in run_down_backward; without `kept`, it is computed from x again."""
    need_x, need_up_weight, need_up_bias, need_down_weight, need_down_bias = needed
    some = [need_x or need_up_weight or need_up_bias, need_up_bias, need_down_weight]
    dpre = dup_bias = ddown_weight = dx = dup_weight = None
    if any(some):
        kept = _multiply_up(x, up_weight, up_bias, kind, p, key) if kept is None else kept
        gradients = run_down_backward(dout, kept, up_bias, down_weight, h, kind, p, key, some)
        dpre, dup_bias, ddown_weight = fill_in(gradients, some)
    ddown_bias = dout.sum(0, dtype=wide_dtype(x.dtype)) if need_down_bias else None
    if dpre is not None:
        weight = up_weight.to(x.dtype) if need_x else None
        dx, dup_weight = compute_some_gradients(dpre, x if need_up_weight else None, weight)
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
        dh, dweight = compute_some_gradients(dout, h if need_weight else None, weight.to(dout.dtype))
        dpre, again, dbias = run_activate_backward(dh, kept, Activation(kind, bias, p, key), want_h, need_bias)
        h = again if want_h else h
        del again, dh
    elif want_h:
        h = run_activate(kept, Activation(kind, bias, p, key))
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


def _count_forward(x: Tensor, up_weight: Tensor, down_weight: Tensor) -> int:
    return count_flops(len(x), up_weight, down_weight)


def _count_backward(x: Tensor, up_weight: Tensor, down_weight: Tensor, kept: Tensor | None, needed: list[bool]) -> int:
    """With the product that is computed again where it was not kept."""
    need_x, need_up_weight, need_up_bias, need_down_weight, _ = needed
    some = need_x or need_up_weight or need_up_bias
    ups = need_x + need_up_weight + (kept is None and (some or need_down_weight))
    downs = some + need_down_weight
    return ups * count_flops(len(x), up_weight) + downs * count_flops(len(x), down_weight)


def _count_down_backward(dout: Tensor, weight: Tensor, needed: list[bool]) -> int:
    need_pre, _, need_weight = needed
    return (need_pre + need_weight) * count_flops(len(dout), weight)


_mlp = Op("mlp", run_mlp, fake=_new_outputs, flops=_count_forward)
_mlp_backward = Op("mlp_backward", run_mlp_backward, fake=_new_gradients, flops=_count_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.kind, ctx.p, key, keep = inputs
    _, kept, h = output
    has_h = keep == "activation" and ctx.kind != "relu"
    ctx.save_for_backward(*tensors, key, None if keep == "input" else kept, h if has_h else None)
    ctx.mark_non_differentiable(kept, h)
    ctx.set_materialize_grads(False)  # no zeros in place of the gradients of kept and h


@_mlp.gradient(_save)
def _backward(ctx: Any, dout: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *inputs, down_bias, key, kept, h = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:5])
    gradients = fill_in(_mlp_backward(dout, *inputs, kept, h, ctx.kind, ctx.p, key, needed), needed)
    given = (None if g is None else g.to(t.dtype) for g, t in zip(gradients, (*inputs, down_bias), strict=True))
    return *given, None, None, None, None


class _MlpBy(torch.autograd.Function):
    """The same by products of their own, which say what is kept of x and h. What they keep of h stays with
    `activation` alone, and is made again for relu, of which the first product stays here, too. Several weights are the
    rows of the first product's."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, p: float, key: Tensor | None, keep: str, up: Product, down: Product,
        x: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None, *up_weights: Tensor,
    ) -> Tensor:  # fmt: skip
        (early, late), (_, _, need_down_weight, _, *need_up) = place_bias(kind, up_bias), ctx.needs_input_grad[6:]
        pre, kept_x = up.multiply(x, join_rows(up_weights), early)
        out, kept_h = down.multiply_activated(pre, Activation(kind, late, p, key), down_weight, down_bias)
        ctx.kind, ctx.p, ctx.keep, ctx.products = kind, p, keep, (up, down)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, up_bias, down_weight, down_bias)]
        ctx.rows, ctx.up_dtypes = [len(weight) for weight in up_weights], [weight.dtype for weight in up_weights]
        kept_x = (x,) if keep == "input" else kept_x if any(need_up) else ()
        kept_h = kept_h if keep == "activation" and kind != "relu" and need_down_weight else ()
        ctx.num_x = len(kept_x)
        ctx.save_for_backward(
            up_bias, down_weight, key, *up_weights, *kept_x, *() if keep == "input" else (pre, *kept_h)
        )
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        up_bias, down_weight, key, *rest = ctx.saved_tensors
        count, (up, down), kind, p = len(ctx.rows), ctx.products, ctx.kind, ctx.p
        need_x, need_up_bias, need_down_weight, need_down_bias, *need_up = ctx.needs_input_grad[6:]
        up_weight, kept_x, kept = (
            join_rows(rest[:count]),
            tuple(rest[count : count + ctx.num_x]),
            rest[count + ctx.num_x :],
        )
        early, late = place_bias(kind, up_bias)
        if ctx.keep == "input":
            pre, kept_x = up.multiply(kept_x[0], up_weight, early)
            kept = [pre]
        pre, *kept_h = kept
        taken, activation = down.take(dout), Activation(kind, late, p, key)
        after = down if need_down_weight and not kept_h else None
        taken_pre, again, dup_bias = up.take_activated(
            down.compute_dx(taken, down_weight), pre, activation, after, need_up_bias
        )
        ddown_weight = down.compute_dweight(taken, tuple(kept_h) or again) if need_down_weight else None
        del taken, kept_h, again, pre, kept
        dx, dup_weight = up.compute_taken(taken_pre, kept_x if any(need_up) else None, up_weight if need_x else None)
        ddown_bias = dout.sum(0, dtype=wide_dtype(dout.dtype)) if need_down_bias else None
        found = zip((dx, dup_bias if need_up_bias else None, ddown_weight, ddown_bias), ctx.dtypes, strict=True)
        gradients = [None if g is None or dtype is None else g.to(dtype) for g, dtype in found]
        return *[None] * 6, *gradients, *split_rows(dup_weight, ctx.rows, ctx.up_dtypes, need_up)


def mlp(
    x: Tensor, up_weight: Tensor | Sequence[Tensor], up_bias: Tensor | None, down_weight: Tensor,
    down_bias: Tensor | None, kind: str, p: float, key: Tensor | None, keep: str,
    products: tuple[Product | None, Product | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Returns the MLP of x [T, C], computed in the dtype of x or, like F.linear, of an enclosing autocast. Parameters
    may be wider; their gradients have their own dtype. `key` [2] is needed where p > 0. `keep` is what stays for the
    backward pass, one of KEEPS. `products` say how to multiply by each of the two weights, if not in that dtype; where
    one does, the first weight may be several, whose rows make it up."""
    check_activation(kind, p, key)
    ups = [up_weight] if isinstance(up_weight, Tensor) else list(up_weight)
    if len(ups) > 1 and products == (None, None):
        raise ValueError("several first weights need products of their own")
    if keep not in KEEPS:
        raise ValueError(f"an MLP keeps one of {', '.join(KEEPS)}, not {keep!r}")
    inner = down_weight.shape[-1]
    up_rows = 2 * inner if kind in GATES else inner
    shape = (sum(map(len, ups)), *ups[0].shape[1:])
    if x.ndim != 2 or down_weight.ndim != 2 or shape != (up_rows, x.shape[1]):
        shapes = ", ".join(map(str, (list(x.shape), list(shape), list(down_weight.shape))))
        wide = "2 * inner" if kind in GATES else "inner"
        raise ValueError(f"{kind} takes x [tokens, width], up [{wide}, width], down [width, inner], not {shapes}")
    for name, bias, rows in ("up", up_bias, up_rows), ("down", down_bias, len(down_weight)):
        if bias is not None and bias.shape != (rows,):
            raise ValueError(f"the {name} bias is [{rows}], not {list(bias.shape)}")
    x, key = x.to(product_dtype(x)), key if p > 0.0 else None
    if products != (None, None):
        up, down = (product or Product() for product in products)
        return _MlpBy.apply(kind, p, key, keep, up, down, x, up_bias, down_weight, down_bias, *ups)
    return _mlp(x, ups[0], up_bias, down_weight, down_bias, kind, p, key, keep)[0]


def _activate_multiply(
    pre: Tensor, bias: Tensor | None, weight: Tensor, kind: str, p: float, key: Tensor | None
) -> Tensor:
    return multiply(run_activate(pre, Activation(kind, bias, p, key)), weight.to(pre.dtype))


def _new_down_gradients(kept: Tensor, bias: Tensor | None, weight: Tensor, needed: list[bool]) -> list[Tensor]:
    dtypes = (kept.dtype, wide_dtype(kept.dtype) if bias is None else bias.dtype, kept.dtype)
    return _new_needed(kept, (kept.shape, kept.shape[1:], weight.shape), dtypes, needed)


_activate_linear = Op(
    "activate_linear",
    _activate_multiply,
    fake=lambda pre, weight: pre.new_empty(pre.shape[0], weight.shape[0]),
    flops=lambda pre, weight: count_flops(len(pre), weight),
)
_activate_linear_backward = Op(
    "activate_linear_backward", run_down_backward, fake=_new_down_gradients, flops=_count_down_backward
)


def _save_pre(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, bias, weight, ctx.kind, ctx.p, key = inputs
    ctx.save_for_backward(pre, bias, weight, key)


@_activate_linear.gradient(_save_pre)
def _backward_pre(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    pre, bias, weight, key = ctx.saved_tensors
    need_pre, need_bias, need_weight = ctx.needs_input_grad[:3]
    needed = [need_pre or need_bias, need_bias, need_weight]  # one kernel computes the first two
    found = _activate_linear_backward(dout, pre, bias, weight, None, ctx.kind, ctx.p, key, needed)
    dpre, dbias, dweight = fill_in(found, needed)
    dweight = None if dweight is None else dweight.to(weight.dtype)
    return dpre if need_pre else None, dbias, dweight, None, None, None


def activate_linear(
    pre: Tensor, bias: Tensor | None, weight: Tensor, kind: str, p: float, key: Tensor | None
) -> Tensor:
    """Returns dropout(act(pre + bias)) @ weight^T, the second half of an MLP, for a caller that computes the first half
    in another way, in the dtype of `pre`. Only `pre` is kept: the backward kernel writes the activations again."""
    check_activation(kind, p, key)
    if kind == "relu":
        raise ValueError("activate_linear takes no relu, whose sign must be that of the rounded sum: use mlp")
    inner = pre.shape[-1] // 2 if kind in GATES else pre.shape[-1]
    if pre.ndim != 2 or weight.ndim != 2 or weight.shape[1] != inner:
        raise ValueError(f"{kind} of {list(pre.shape)} and a weight [out, {inner}], not {list(weight.shape)}")
    return _activate_linear(pre, bias, weight, kind, p, key if p > 0.0 else None)
