"""Layers that are given an object for their products get the same bits as without it, and ask it for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.dropout import draw_keys
from stretto.ops.heads import project_heads
from stretto.ops.language import INTERPRET
from stretto.ops.linear import linear
from stretto.ops.mlp import KEEPS, mlp
from stretto.ops.products import Kept, Product

TOKENS, WIDTH, WIDE = 10, 8, 24
Layer = Callable[[Product | None, list[Tensor]], Tensor | tuple[Tensor, ...]]


class Counting(Product):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Kept]:
        self.asked.append("out")
        return super().multiply(x, weight, bias)

    def compute_dx(self, taken: Kept, weight: Tensor) -> Tensor:
        self.asked.append("dx")
        return super().compute_dx(taken, weight)

    def compute_dweight(self, taken: Kept, kept: Kept) -> Tensor:
        self.asked.append("dweight")
        return super().compute_dweight(taken, kept)


def mlp_of(kind: str, keep: str) -> Layer:
    key = draw_keys(torch.zeros(1), 1)[0]
    return lambda product, t: mlp(*t, kind, 0.25, key, keep, (product, product))


def heads(product: Product | None, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    x, weight, bias = tensors[:3]
    cos, sin = torch.linspace(0, 1, TOKENS * 2).view(2, TOKENS, 1).expand(2, TOKENS, 2)
    return project_heads(x, weight, bias, [2, 2, 2], cos, sin, product)


def heads_of_three(product: Product | None, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a weight for queries, one for keys and one for values, whose rows make up one product."""
    x, weight, bias = tensors[:3]
    return project_heads(x, weight.chunk(3), bias.chunk(3), [2, 2, 2], product=product)


LAYERS: dict[str, Layer] = {
    "linear": lambda product, t: linear(*t[:3], product),
    "heads": heads,
    "heads_of_three": heads_of_three,
    "loss": lambda product, t: linear_cross_entropy(*t[:3], torch.arange(TOKENS), product=product),
    **{f"{kind} {keep}": mlp_of(kind, keep) for kind in ("gelu", "relu") for keep in KEEPS},
}


def learn(layer: Layer, product: Product | None, dtype: torch.dtype) -> list[Tensor]:
    """Results and all gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (WIDE, WIDTH), (WIDE,), (WIDTH, WIDE), (WIDTH,))
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    found = layer(product, tensors)
    results = [found] if isinstance(found, Tensor) else list(found)
    sum((out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum() for out in results).backward()  # type: ignore[union-attr]
    return results + [t.grad for t in tensors if t.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits(name: str, dtype: torch.dtype) -> None:
    product = Counting()
    without, with_it = (learn(LAYERS[name], each, dtype) for each in (None, product))
    assert len(without) == len(with_it) >= 4
    # A chunk's dweight is rounded before it is added to the sum; and what a kernel stores in bf16, here the gradient of
    # relu's bias, the interpreter cuts.
    close = dtype == torch.bfloat16 and (name == "loss" or (INTERPRET and name.startswith("relu")))
    for one, other in zip(without, with_it, strict=True):
        assert torch.allclose(one, other, rtol=0.02, atol=1e-3) if close else torch.equal(one, other)
    layers = 2 if " " in name else 1
    assert sorted(product.asked) == sorted(["out", "dx", "dweight"] * layers + ["out"] * name.endswith("input"))
