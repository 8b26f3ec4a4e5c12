"""A linear layer whose backward products run side by side.

    dx = dout weight,   dweight = dout^T x

The two do not need each other. With few tokens neither fills the GPU (512 tokens and a width of 1024 make 32 tiles of
128 x 128, for 132 processors), so the second one gets a stream of its own, from after what came before to before what
comes next; in a CUDA graph they become two branches. Products of many tokens run one after the other.

Shapes: x [T, C], weight [O, C], bias [O], dout [T, O]. Saved for backward: x, weight.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.language import product_dtype, wide_dtype
from stretto.ops.op import define

FEW = 2048  # tokens


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def linear_backward(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dweight."""
    # Both are made here: memory that is taken on a stream is free for that stream's next use alone.
    dx, dweight = dout.new_empty(x.shape), dout.new_empty(weight.shape)
    if dout.is_cuda and dout.shape[0] <= FEW:
        here, side = torch.cuda.current_stream(dout.device), _side_stream(dout.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.mm(dout.t(), x, out=dweight)
        torch.mm(dout, weight, out=dx)
        here.wait_stream(side)
    else:
        torch.mm(dout.t(), x, out=dweight)
        torch.mm(dout, weight, out=dx)
    return dx, dweight


_linear_backward = define("linear_backward")(linear_backward)


@_linear_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return dout.new_empty(x.shape), dout.new_empty(weight.shape)


def linear_gradients(dout: Tensor, x: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """dx, which needs weight, and dweight, which needs x; None where that was not kept."""
    if x is None or weight is None:
        return None if weight is None else dout @ weight, None if x is None else dout.t() @ x
    gradients: tuple[Tensor, Tensor] = _linear_backward(dout, x, weight)
    return gradients


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dbias = dout.sum(0, dtype=wide_dtype(dout.dtype)).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return *linear_gradients(dout, *ctx.saved_tensors), dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, C] times weight [O, C], transposed, plus bias [O], in the dtype of x or, like F.linear, of an enclosing
    autocast. The product itself adds the bias."""
    dtype = product_dtype(x)
    out: Tensor = _Linear.apply(x.to(dtype), weight.to(dtype), bias)
    return out


@define("linears")
def _linears(x: Tensor, weights: list[Tensor]) -> Tensor:
    out = x.new_empty(x.shape[0], sum(len(weight) for weight in weights))
    for part, weight in zip(out.split([len(weight) for weight in weights], dim=1), weights, strict=True):
        torch.mm(x, weight.t(), out=part)
    return out


@_linears.register_fake
def _(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(len(weight) for weight in weights))


@define("linears_backward")
def _linears_backward(dout: Tensor, x: Tensor, weights: list[Tensor], need_x: bool) -> list[Tensor]:
    """dx, if needed, then those of the weights."""
    parts = dout.split([len(weight) for weight in weights], dim=1)
    gradients = [part.t() @ x for part in parts]
    if need_x:
        dx = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            dx.addmm_(part, weight)
        gradients.insert(0, dx)
    return gradients


@_linears_backward.register_fake
def _(dout: Tensor, x: Tensor, weights: list[Tensor], need_x: bool) -> list[Tensor]:
    return [dout.new_empty(t.shape) for t in ([x] if need_x else []) + weights]


def _save_linears(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)


def _backward_linears(ctx: Any, dout: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    x, *weights = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    gradients = _linears_backward(dout, x, weights, need_x)
    return (gradients[0], gradients[1:]) if need_x else (None, gradients)


_linears.register_autograd(_backward_linears, setup_context=_save_linears)


def linears(x: Tensor, weights: list[Tensor]) -> Tensor:
    """x [T, C] times each of several weights [O, C], side by side: [T, sum of O], in the dtype of x or of an enclosing
    autocast. The weights stay where they are: no copy of them joined is made, nor kept for the backward pass."""
    dtype = product_dtype(x)
    out: Tensor = _linears(x.to(dtype), [weight.to(dtype) for weight in weights])
    return out
