"""Matrix products of 8-bit factors: a `Product` that multiplies them.

A factor gets 8 bits by a scale (round8.py); the product of two is multiplied by both scales:

    a b^T = scale_a scale_b (data_a data_b^T)

    recipe     one scale for                                     forward        dx             dweight
    tensor     a matrix; a transposed copy is the same bytes     E4M3 E4M3      E5M2 E4M3      E5M2 E4M3
    row        a row of a factor, along what is added up         E4M3 E4M3      E4M3 E4M3      E4M3 E4M3
    block128   128 numbers of a row; 128 x 128 of a weight       E4M3 E4M3      E4M3 E4M3      E4M3 E4M3

Saved for backward: the transposed x, one byte an element, and its scales, in place of x itself. Sums are fp32: on a
GPU partial sums are promoted (no fast accumulation), in all three products; on a CPU the definition below computes
exact products of the rounded factors, in fp32. Weights are rounded once an update by `renew`, both ways.

With the recipe `tensor` and bounds that are known, activations (activation8.py), the gradients of heads (heads8.py) and
those of logits (cross_entropy8.py) are written in 8 bits by the kernels that compute them. What takes a pass of its own
is the rounding of what is there in any case: a norm's output, attention's, a gradient of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stretto.ops.activation import Activation
from stretto.ops.activation8 import activate8, activate8_backward
from stretto.ops.cross_entropy8 import rows8
from stretto.ops.heads8 import merge_heads8
from stretto.ops.products import Kept, Product, compute_dweight, compute_dx, multiply_scaled
from stretto.ops.round8 import E4M3, E5M2, PARTS, Bound, Narrow, most_of, new_narrow, quantize

WIDENED = 2**24  # numbers of a watched factor that are fp32 at a time
FACTORS = {"x": E4M3, "dout": E5M2, "weight": E4M3}  # of the recipe `tensor`, which has bounds


def can_multiply(recipe: str, out: int, inner: int) -> bool:
    """Whether a weight [out, inner] has a shape that the products of a GPU take; tokens may be any number."""
    return out % PARTS[recipe] == 0 and inner % PARTS[recipe] == 0


class Eight(Product):
    """The products of one layer in 8 bits, by one of RECIPES. It can be switched off, and then multiplies as usual, as
    it does with fewer tokens than `least` and in other precisions than bf16; and watched: then it measures its factors,
    and compares its gradients with those of factors that were not rounded, for which it keeps these too."""

    def __init__(
        self, recipe: str, bounds: Mapping[str, Bound] | None = None, least: float = 1, transposed: bool = False
    ) -> None:
        """`bounds` are those of FACTORS, for the recipe `tensor`; without them, maxima are taken. `transposed`: the
        weight is kept as [C, O], and products are given a view of it."""
        self.recipe, self.on, self.watched = recipe, True, False
        self.least, self.transposed = least, transposed
        self.bounds = bounds or {}
        self.gradients = E5M2 if recipe == "tensor" else E4M3  # the format of dout
        self.seen: dict[str, Tensor] = {}  # the most of what was measured; `dx` and `dweight`: 1 - cosine
        self._weight: Narrow | None = None
        self._version = -1
        self._dtype = torch.bfloat16  # of results

    @torch.no_grad()
    def renew(self, weight: Tensor) -> None:
        """Rounds the weight, before an update. It stays where it is on the device: a CUDA graph finds it there."""
        self._weight = quantize(weight, E4M3, self.recipe, self.bounds.get("weight"), True, self.take_room(weight))

    def take_room(self, weight: Tensor) -> Narrow:
        """The place of the rounded weight, as it is kept, for the caller to fill."""
        self._version = weight._version
        if self._weight is None:
            rows, cols = weight.shape
            self._weight = new_narrow(weight, (rows, cols), E4M3, self.recipe, weight=True)
        return self._weight

    def _weigh(self, weight: Tensor) -> Narrow:
        """The weight as it was rounded; a weight that has changed since, or was gathered or joined, is rounded here."""
        found = self._weight
        if found is None or self._version != weight._version:
            own = weight.t() if self.transposed else weight
            found = quantize(own, E4M3, self.recipe, self.bounds.get("weight"), weight=True)
        return Narrow(found.data_t, found.scale_t, found.data, found.scale) if self.transposed else found

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Kept]:
        if not self._can(x):
            return super().multiply(x, weight, bias)
        x8 = self._quantize("x", x)
        return self._multiply(x8, weight, bias, x.dtype), self._keep(x, x8)

    def _multiply(self, x8: Narrow, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        w8, self._dtype = self._weigh(weight), dtype
        return multiply_scaled(x8.data, w8.data, x8.scale, w8.scale, self.recipe, dtype, bias, square=True)

    def multiply_activated(
        self, pre: Tensor, activation: Activation, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        if not self._writes("x", pre):
            return super().multiply_activated(pre, activation, weight, bias)
        x8 = activate8(pre, activation, self.bounds["x"])
        return self._multiply(x8, weight, bias, pre.dtype), (x8.data_t, x8.scale_t)

    def _writes(self, name: str, x: Tensor) -> bool:
        """Whether a factor can be written in 8 bits as it is made: with a bound, and unless it is to be measured."""
        return self._can(x) and not self.watched and name in self.bounds and self.bounds[name].known

    def keep(self, x: Tensor) -> Kept:
        return self._keep(x, self._quantize("x", x)) if self._can(x) else super().keep(x)

    def _can(self, x: Tensor) -> bool:
        return self.on and len(x) >= self.least and x.dtype == torch.bfloat16

    def _quantize(self, name: str, x: Tensor) -> Narrow:
        return quantize(x, E4M3 if name == "x" else self.gradients, self.recipe, self.bounds.get(name))

    def _keep(self, x: Tensor, x8: Narrow) -> Kept:
        if self.watched:
            self._measure("x", x, x8)
            return x8.data_t, x8.scale_t, x
        return x8.data_t, x8.scale_t

    def take(self, dout: Tensor) -> Kept:
        if not self._can(dout):
            return super().take(dout)
        dout8, self._dtype = self._quantize("dout", dout), dout.dtype
        if self.watched:
            self._measure("dout", dout, dout8)
            return *dout8, dout
        return tuple(dout8)

    def take_loss(self, logits: Tensor, labels: Tensor, smoothing: float, ignore: int) -> tuple[Tensor, Kept] | None:
        if not self._writes("dout", logits):
            return None
        losses, dlogits8 = rows8(logits, labels, smoothing, ignore, self.bounds["dout"])
        return losses, tuple(dlogits8)

    def take_merged(
        self, parts: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None, sums: torch.dtype | None
    ) -> tuple[Kept, Tensor] | None:
        if not self._writes("dout", parts[0]) or parts[0].shape[2] % 2:
            return None
        self._dtype = parts[0].dtype
        dout8, total = merge_heads8(parts, cos, sin, sums, self.bounds["dout"])
        return tuple(dout8), total

    def take_activated(
        self, dh: Tensor, kept: Tensor, activation: Activation, after: Product | None, want_dbias: bool
    ) -> tuple[Kept, Kept, Tensor]:
        next_too = after is None or (isinstance(after, Eight) and after._writes("x", dh))
        if not self._writes("dout", dh) or not next_too:
            return super().take_activated(dh, kept, activation, after, want_dbias)
        bound = after.bounds["x"] if isinstance(after, Eight) else None
        dpre8, h8, dbias = activate8_backward(dh, kept, activation, self.bounds["dout"], bound, want_dbias)
        self._dtype = dh.dtype
        return tuple(dpre8), h8, dbias

    def compute_dx(self, taken: Kept, weight: Tensor) -> Tensor:
        if len(taken) == 1:
            return super().compute_dx(taken, weight)
        w8 = self._weigh(weight)
        parts = (taken[0], w8.data_t, taken[1], w8.scale_t)
        dx = multiply_scaled(*parts, self.recipe, self._dtype, square=True)
        if len(taken) > 4:
            self._compare("dx", dx, compute_dx(taken[4], weight.to(self._dtype)))
        return dx

    def compute_dweight(self, taken: Kept, kept: Kept) -> Tensor:
        if len(taken) == 1:
            return super().compute_dweight(taken, kept)
        dweight = multiply_scaled(taken[2], kept[0], taken[3], kept[1], self.recipe, self._dtype)
        if len(taken) > 4 and len(kept) > 2:
            self._compare("dweight", dweight, compute_dweight(taken[4], kept[2]))
        return dweight

    def _note(self, name: str, value: Tensor) -> None:
        self.seen[name] = value if name not in self.seen else torch.maximum(self.seen[name], value)

    @torch.no_grad()
    def _measure(self, name: str, x: Tensor, x8: Narrow) -> None:
        """The largest magnitude, and the shares of numbers that were clamped and that became zero."""
        largest, scaled = torch.finfo(x8.data.dtype).max, self.recipe == "tensor"
        counts = x8.scale.new_zeros(2)
        for some, data in _split(x, x8.data):
            counts[0] += ((data.float() == 0) & (some != 0)).sum()
            if scaled:
                over = (some.float() * x8.scale.reciprocal()).abs() > largest * 1.01  # more than the division rounds
                counts[1] += over.sum()
        self._note(f"most {name}", most_of(x))
        for what, count in zip(("underflow", "saturated") if scaled else ("underflow",), counts, strict=False):
            self._note(f"{what} {name}", count / max(x.numel(), 1))

    @torch.no_grad()
    def _compare(self, name: str, found: Tensor, exact: Tensor) -> None:
        """1 - cosine; two gradients that are both zero, or not finite, say nothing."""
        sums = torch.zeros(3, dtype=torch.float64, device=found.device)
        for one, other in _split(found, exact):
            a, b = one.float(), other.float()
            sums += torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()])
        product, *squares = sums
        off = 1 - product / (squares[0].sqrt() * squares[1].sqrt())
        self._note(name, torch.nan_to_num(off, nan=0.0).float())


def _split(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Their rows in parts that are small enough to be widened: a look is to take little memory."""
    rows = max(WIDENED // max(matrices[0].shape[1], 1), 1)
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)
