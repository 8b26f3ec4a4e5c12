"""Linear layers alone, and several linear layers of one input.

    linear     out = x weight^T + bias
    linears    out = [x weight_1^T, x weight_2^T, ...], side by side in one matrix

The products, and when two of them run at the same time, are in products.py.

Shapes: x [T, C], weight [O, C], bias [O], out and dout [T, O]. Saved for backward: x, weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto.ops import products
from stretto.ops.language import product_dtype, wide_dtype
from stretto.ops.op import Op

_linear_backward = Op(
    "linear_backward",
    products.compute_gradients,
    fake=lambda dout, x, weight: (dout.new_empty(x.shape), dout.new_empty(weight.shape)),
)
linear_gradients = partial(products.compute_some_gradients, both=_linear_backward)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return products.multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dbias = dout.sum(0, dtype=wide_dtype(dout.dtype)).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return *linear_gradients(dout, *ctx.saved_tensors), dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x weight^T + bias for x [T, C], weight [O, C] and bias [O], in the dtype of x or, like F.linear, of an
    enclosing autocast. The product itself adds the bias."""
    dtype = product_dtype(x)
    return _Linear.apply(x.to(dtype), weight.to(dtype), bias)


def _multiply_all(x: Tensor, weights: list[Tensor]) -> Tensor:
    out = _new_out(x, weights)
    for part, weight in zip(_split_out(out, weights), weights, strict=True):
        products.multiply_into(part, x, weight)
    return out


def _new_out(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(len(weight) for weight in weights))


def _split_out(out: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    return out.split([len(weight) for weight in weights], dim=1)


def _compute_all_gradients(dout: Tensor, x: Tensor, weights: list[Tensor], need_x: bool) -> list[Tensor]:
    """Returns dx, if it is needed, then the gradients of the weights."""
    parts = _split_out(dout, weights)
    gradients = [products.compute_dweight(part, x) for part in parts]
    if need_x:
        dx = products.compute_dx(parts[0], weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            products.add_dx(dx, part, weight)
        gradients.insert(0, dx)
    return gradients


def _new_gradients(dout: Tensor, x: Tensor, weights: list[Tensor], need_x: bool) -> list[Tensor]:
    return [dout.new_empty(t.shape) for t in ([x] if need_x else []) + weights]


_linears = Op("linears", _multiply_all, fake=_new_out)
_linears_backward = Op("linears_backward", _compute_all_gradients, fake=_new_gradients)


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
    enclosing autocast. The weights are not copied into one matrix, neither here nor for the backward pass."""
    dtype = product_dtype(x)
    return _linears(x.to(dtype), [weight.to(dtype) for weight in weights])
