"""Linear layers alone, and several linear layers of one input.

    linear     out = x weight^T + bias
    linears    out = [x weight_1^T, x weight_2^T, ...], side by side in one matrix

The products, and when two of them run at the same time, are in products.py.

Shapes: x [T, C], weight [O, C], bias [O], out and dout [T, O].

Saved for backward: x, and the weight as it was given. A weight that is wider than the product (an fp32 parameter under
a bf16 autocast) is cast for the forward product and again for dx: the cast moves 6 bytes per parameter, next to a
product of 2 T FLOPs per parameter, and its copy would otherwise wait for the backward pass in every layer, 2 bytes per
parameter. Gradients of weights are computed in the dtype of the product and cast to the dtype of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.ops import products
from stretto.ops.language import product_dtype, wide_dtype
from stretto.ops.op import Op, fill_in


def _compute_gradients(dout: Tensor, x: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
    weight = products.join_rows(weights, dout.dtype) if weights else None
    return [g for g in products.compute_some_gradients(dout, x, weight) if g is not None]


def _new_some_gradients(dout: Tensor, x: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
    shapes = [(dout.shape[0], weight.shape[1]) for weight in weights[:1]]
    shapes += [] if x is None else [(dout.shape[1], x.shape[1])]
    return [dout.new_empty(shape) for shape in shapes]


def _count_some(dout: Tensor, x: Tensor | None, weights: list[Tensor]) -> int:
    dweight = 0 if x is None else 2 * dout.numel() * x.shape[1]
    return products.count_flops(dout.shape[0], *weights) + dweight


# The weights are cast and joined inside the op, where a compiler cannot decide to keep the copy of the forward pass.
_linear_backward = Op("linear_backward", _compute_gradients, fake=_new_some_gradients, flops=_count_some)


def linear_gradients(dout: Tensor, x: Tensor | None, weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns dx, which needs the weights, and dweight, which needs x, in the dtype of dout; None in place of a
    gradient whose factor is None or an empty list. Several weights are one layer, whose rows they have."""
    return fill_in(_linear_backward(dout, x, list(weights)), [len(weights) > 0, x is not None])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, *[weight] if need_x else [])
        ctx.dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return products.multiply(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, *weights = ctx.saved_tensors
        dbias = dout.sum(0, dtype=wide_dtype(dout.dtype)).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        dx, dweight = linear_gradients(dout, x, weights)
        return dx, None if dweight is None else dweight.to(ctx.dtype), dbias


class _LinearBy(torch.autograd.Function):
    """The same by a product of its own, which says what is kept of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: products.Product) -> Tensor:
        need_x, need_weight, *_ = ctx.needs_input_grad
        out, kept = product.multiply(x, weight, bias)
        ctx.save_for_backward(weight if need_x else None, *kept if need_weight else ())
        ctx.product, ctx.dtype, ctx.bias_dtype = product, weight.dtype, None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dbias = dout.sum(0, dtype=wide_dtype(dout.dtype)).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        dx, dweight = ctx.product.compute_gradients(dout, tuple(kept) or None, weight)
        return dx, None if dweight is None else dweight.to(ctx.dtype), dbias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, product: products.Product | None = None) -> Tensor:
    """Returns x weight^T + bias for x [T, C], weight [O, C] and bias [O], in the dtype of x or, like F.linear, of an
    enclosing autocast. The product itself adds the bias. Parameters may have any dtype. `product` says how
    to multiply, if not in that dtype."""
    x = x.to(product_dtype(x))
    if product is not None:
        return _LinearBy.apply(x, weight, bias, product)
    # torch's own layer makes the same products of factors of one dtype, and takes the host a third of the time. Ours
    # sums up the bias's gradient in fp32, and in a CUDA graph has two products side by side.
    if bias is None and weight.dtype == x.dtype and not _is_recorded(x):
        return products.multiply(x, weight)
    return _Linear.apply(x, weight, bias)


def _is_recorded(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _multiply_all(x: Tensor, weights: list[Tensor]) -> Tensor:
    out = _new_out(x, weights)
    for part, weight in zip(_split_out(out, weights), weights, strict=True):
        products.multiply_into(part, x, weight.to(x.dtype))
    return out


def _new_out(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(len(weight) for weight in weights))


def _split_out(out: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    return out.split([len(weight) for weight in weights], dim=1)


def _compute_all_gradients(dout: Tensor, x: Tensor, weights: list[Tensor], need_x: bool) -> list[Tensor]:
    """Returns dx, if it is needed, then the gradients of the weights. One weight is cast at a time."""
    parts = _split_out(dout, weights)
    gradients = [
        products.compute_dweight(part, x).to(weight.dtype) for part, weight in zip(parts, weights, strict=True)
    ]
    if need_x:
        dx = products.compute_dx(parts[0], weights[0].to(x.dtype))
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            products.add_dx(dx, part, weight.to(x.dtype))
        gradients.insert(0, dx)
    return gradients


def _new_gradients(x: Tensor, weights: list[Tensor], need_x: bool) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in ([x] if need_x else []) + weights]


def _count_all(x: Tensor, weights: list[Tensor]) -> int:
    return products.count_flops(len(x), *weights)


def _count_all_backward(x: Tensor, weights: list[Tensor], need_x: bool) -> int:
    return (1 + need_x) * _count_all(x, weights)


_linears = Op("linears", _multiply_all, fake=_new_out, flops=_count_all)
_linears_backward = Op("linears_backward", _compute_all_gradients, fake=_new_gradients, flops=_count_all_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)


@_linears.gradient(_save)
def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    x, *weights = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    gradients = _linears_backward(dout, x, weights, need_x)
    return (gradients[0], gradients[1:]) if need_x else (None, gradients)


def linears(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Returns x [T, C] times each of several weights [O, C], side by side, [T, sum of O], in the dtype of x or of an
    enclosing autocast. The weights may have any dtype, and are not copied into one matrix, neither here nor for the
    backward pass."""
    return _linears(x.to(product_dtype(x)), weights)
