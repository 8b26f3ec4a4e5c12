"""Sums and products in narrow numbers: one rounding after every addition, as hardware does, vectorised over results.

    one level     s = 0;  s = round(s + t_k)                                    for k = 1 .. n
    two levels    the same inside of chunks of c terms, then over the n / c chunks

Terms are exact. float64 holds s + t exactly while their exponents are less than 52 - P apart, P the bits of t.
Hopper's FP8 matrix unit is modelled as public measurements describe it: 32 products and the accumulator are shifted to
the largest exponent among them, everything below 13 fraction bits is cut off, and they are added exactly. A promoted
sum moves to an fp32 register every 128 terms and begins anew: two levels, with c = 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.numerics.formats import E4M3, FP32, Format, Rounding, power_below, round_to


def _fold(terms: Iterable[Tensor], add: Callable[[Tensor], Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        total = add(total + term)
    return total


def multiply(
    a: Tensor, b: Tensor, form: Format, chunk: int = 0, rounding: Rounding = "nearest",
    generator: torch.Generator | None = None, outer: Format | None = None,
) -> Tensor:  # fmt: skip
    """Returns a b in float64, for a [M, K] and b [K, N], summed over k in order in numbers of `form`. With a chunk,
    sums of that many products are added up in numbers of `outer`, or of `form`; the last chunk may be shorter."""
    length = a.shape[1]
    size = chunk if 0 < chunk < length else length
    count, rest = -(-length // size), -length % size  # zeros behind the end change no sum
    a = F.pad(a.double(), (0, rest)).t().reshape(count, size, -1)
    b = F.pad(b.double(), (0, 0, 0, rest)).view(count, size, -1)
    products = (a[:, k, :, None] * b[:, k, None] for k in range(size))  # [count, M, N]
    sums = _fold(products, lambda x: form.round(x, rounding, generator))
    return _fold(sums, lambda x: (outer or form).round(x, rounding, generator)) if count > 1 else sums[0]


def accumulate(
    terms: Tensor, form: Format, chunk: int = 0, rounding: Rounding = "nearest",
    generator: torch.Generator | None = None, outer: Format | None = None,
) -> Tensor:  # fmt: skip
    """Returns the sums [T] of terms [T, n], added up as `multiply` adds up its products."""
    return multiply(terms, torch.ones(terms.shape[1], 1), form, chunk, rounding, generator, outer)[:, 0]


@dataclass(frozen=True)
class Accumulator:
    """A matrix unit that aligns a group of products and its accumulator, and cuts what is below."""

    fraction: int = 13  # bits that are kept below the largest exponent
    cut: Rounding = "zero"
    promote: int = 128  # products, after which the sum moves to fp32; 0: never
    group: int = 32  # products that are added in one go

    def __post_init__(self) -> None:
        if self.promote % self.group:
            raise ValueError(f"a sum is promoted after whole groups, not after {self.promote} of {self.group}")

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns a b in float64, for a [M, K] and b [K, N]."""
        total = part = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
        for start in range(0, a.shape[1], self.group):
            if self.promote and start % self.promote == 0:
                total, part = FP32.round(total + part), torch.zeros_like(part)
            here = slice(start, start + self.group)
            products = a[:, here, None].double() * b[None, here].double()
            aligned = torch.cat([part[:, None], products], 1)
            step = power_below(aligned.abs().amax(1, keepdim=True)).clamp(min=2.0**-126) * 2.0**-self.fraction
            part = round_to(aligned, step, self.cut).sum(1)
            part = Format(8, self.fraction).round(part, self.cut)  # it may have carried into a higher exponent
        return FP32.round(total + part)


def quantize(x: Tensor, form: Format = E4M3, block: tuple[int, int] = (1, 128)) -> tuple[Tensor, Tensor]:
    """Returns x [M, K] divided by a scale for each block and rounded to `form`, and the scales, of x's shape: their
    product is what the format makes of x. A scale is the largest magnitude of its block over the largest number of the
    format; a block of zeros has scale 1. Size 0 means the whole dim: (1, 0) scales rows, (0, 0) the tensor."""
    x, (height, width) = x.double(), x.shape
    rows, cols = block[0] or height, block[1] or width
    padded = F.pad(x, (0, -width % cols, 0, -height % rows))
    most = padded.view(len(padded) // rows, rows, -1, cols).abs().amax((1, 3))
    scale = torch.where(most > 0, most / form.largest, 1.0)
    scale = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:height, :width]
    return form.round((x / scale).clamp(-form.largest, form.largest)), scale  # the division rounds, perhaps up
