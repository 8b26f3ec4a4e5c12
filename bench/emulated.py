"""Training in 8 bits as Wang et al. did it in 2018 (NeurIPS, arXiv 1812.08011), in emulated numbers.

    products      both factors (1,5,2), rounded to nearest; sums (1,6,9), in chunks of 64; no scale factors
    first, last   the product with the images, and the output layer: factors (1,6,9)
    loss          times 1000, so that gradients are not lost below 2^-16
    update        g = g / 1000 + decay w;  v = momentum v + g;  w = w - lr v;  each rounded at random to (1,6,9)

The model is one of our own kernels, whose layers ask a `Product` (ops/products.py) for their products, forward and
backward; here that object rounds and adds up as above. What is between products, attention too, is in the dtype of the
model. Sums are sequential inside of a chunk: training is thousands of times slower than in real numbers of 8 bits,
and its speed says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.batch import Batch
from stretto.numerics.formats import IBM8, IBM16, Format
from stretto.numerics.sums import multiply
from stretto.ops.linear import linear
from stretto.ops.products import Kept, Product

LOSS_SCALE = 1000.0


@dataclass(frozen=True)
class Emulated(Product):
    """Factors rounded to one format, and sums of products in another one."""

    factors: Format = IBM8
    sums: Format = IBM16
    chunk: int = 64  # 0: each sum in one go

    def _multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b, self.sums, self.chunk)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Kept]:
        kept = self.keep(x)
        out = self._multiply(kept[0], self.factors.round(weight).t())
        out = out if bias is None else self.sums.round(out + bias.double())
        return out.to(x.dtype), kept

    def keep(self, x: Tensor) -> Kept:
        return (self.factors.round(x).to(x.dtype),)

    def take(self, dout: Tensor) -> Kept:
        return self.keep(dout)

    def compute_dx(self, taken: Kept, weight: Tensor) -> Tensor:
        return self._multiply(taken[0], self.factors.round(weight)).to(taken[0].dtype)

    def compute_dweight(self, taken: Kept, kept: Kept) -> Tensor:
        return self._multiply(taken[0].t(), kept[0]).to(kept[0].dtype)


def set_products(model: nn.Module, blocks: Sequence[str], product: Emulated) -> None:
    """Gives every linear layer of the model its products: those in `blocks` the given one, all others, which are the
    first and the last, one with factors as wide as its sums. Plain layers are made to ask for it."""
    wide = Emulated(product.sums, product.sums, product.chunk)
    inside = tuple(f"{name}." for name in blocks)
    for name, layer in model.named_modules():
        if name.startswith(inside) and isinstance(layer, nn.Linear):
            layer.product = product  # type: ignore[assignment]
        elif isinstance(layer, nn.Linear):
            layer.forward = partial(_multiply_plain, layer, wide)  # type: ignore[method-assign]
        elif name == "head":
            layer.product = wide


def _multiply_plain(layer: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return linear(x.flatten(0, -2), layer.weight, layer.bias, product).view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Momentum:
    """Stochastic gradient descent, each of its three sums rounded at random to `form`; None: not rounded."""

    lr: float
    form: Format | None = IBM16
    momentum: float = 0.9
    decay: float = 1e-4
    seed: int = 0

    def start(self, parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
        """Rounds the parameters, and returns a function that updates them by their gradients, which are then gone."""
        parameters, generator = list(parameters), torch.Generator().manual_seed(self.seed)
        speeds = [torch.zeros_like(p) for p in parameters]

        def rounded(x: Tensor) -> Tensor:
            return x if self.form is None else self.form.round(x, "stochastic", generator).to(x.dtype)

        @torch.no_grad()
        def update() -> None:
            for p, speed in zip(parameters, speeds, strict=True):
                if p.grad is not None:
                    gradient = rounded(p.grad / LOSS_SCALE + self.decay * p)
                    speed.copy_(rounded(self.momentum * speed + gradient))
                    p.copy_(rounded(p - self.lr * speed))
                    p.grad = None

        with torch.no_grad():
            for p in parameters:
                p.copy_(rounded(p))
        return update


def train(model: Any, batches: Iterable[Batch], rule: Momentum) -> list[float]:
    """Returns the mean loss of each batch, before the model has learned from it."""
    update, losses = rule.start(model.parameters()), []
    for batch in batches:
        loss = model(batch) / max(batch.counts.labels, 1)
        (LOSS_SCALE * loss).backward()
        update()
        losses.append(float(loss.detach()))
    return losses
