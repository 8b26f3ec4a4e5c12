"""Floating-point numbers of any width, emulated in float64.

With E exponent bits, M mantissa bits and the bias 2^(E-1) - 1, the neighbours around x are one step apart, subnormal
numbers included: step(x) = 2^(max(floor(log2 |x|), 1 - bias) - M). To round is to choose one of these two:

    nearest      the closer one, of two as close the one with an even last bit: an error of at most step / 2
    stochastic   the upper one with probability (x - lower) / step: right on average, at most one step off
    zero, down   the one closer to zero, or the lower one: what cutting off low bits does to a magnitude and a sign, or
                 in two's complement

Beyond the largest number, `inf` has infinities, for which and for NaN it keeps the largest exponent (IEEE 754); `nan`
has NaN alone, as the largest code (E4M3FN); `saturate` has neither, and stays at the largest number.

A float64 holds every number of formats up to (10, 52), and scaling by powers of two is exact: so is every result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "zero", "down"]
EXPONENT_BITS = 0x7FF0000000000000  # of a float64; alone, they are the power of two at or below its magnitude


def power_below(x: Tensor) -> Tensor:
    """Returns 2^floor(log2 |x|) of float64 numbers; 0 for 0 and for subnormal ones."""
    return (x.view(torch.int64) & EXPONENT_BITS).view(torch.float64)


def round_to(x: Tensor, step: Tensor, rounding: Rounding, generator: torch.Generator | None = None) -> Tensor:
    """Rounds to multiples of `step`, powers of two. Random numbers come from the given generator alone."""
    y = x / step
    if rounding == "stochastic":
        if generator is None:
            raise ValueError("stochastic rounding needs a generator")
        lower = y.floor()
        draw = torch.rand(y.shape, dtype=torch.float64, device=y.device, generator=generator)
        return (lower + (draw < y - lower)) * step
    return {"nearest": torch.round, "zero": torch.trunc, "down": torch.floor}[rounding](y) * step


@dataclass(frozen=True)
class Format:
    exponent: int  # bits
    mantissa: int  # bits, without the leading one
    overflow: Literal["inf", "nan", "saturate"] = "saturate"

    def __post_init__(self) -> None:
        if not (2 <= self.exponent <= 10 and 1 <= self.mantissa <= 52):
            raise ValueError(f"a format has 2 to 10 exponent bits and 1 to 52 mantissa bits, not {self}")

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top = 2 ** (self.exponent - 1) - (1 if self.overflow == "inf" else 0)
        return (2.0 - 2.0 ** -(self.mantissa - (self.overflow == "nan"))) * 2.0**top

    def round(self, x: Tensor, rounding: Rounding = "nearest", generator: torch.Generator | None = None) -> Tensor:
        """Returns the numbers of this format, as float64, that x rounds to. NaN stays NaN. An infinity is beyond the
        largest number; a finite number that is cut toward zero is not."""
        x = x.double()
        lowest = 2 - 2 ** (self.exponent - 1)  # exponent of normal numbers
        step = power_below(x).clamp(min=2.0**lowest) * 2.0**-self.mantissa
        y = torch.where(x.isfinite(), round_to(x, step, rounding, generator), x)
        beyond = torch.full_like(y, {"inf": torch.inf, "nan": torch.nan, "saturate": self.largest}[self.overflow])
        if rounding in ("zero", "down"):
            beyond[x.isfinite() & ((x > 0) | (rounding == "zero"))] = self.largest
        return torch.where(y.abs() > self.largest, beyond.copysign(x), y)


E4M3, E5M2 = Format(4, 3, "nan"), Format(5, 2, "inf")  # torch's float8_e4m3fn and float8_e5m2
BF16, FP16, FP32 = Format(8, 7, "inf"), Format(5, 10, "inf"), Format(8, 23, "inf")
IBM8, IBM16 = Format(5, 2), Format(6, 9)  # of Wang et al. 2018: factors, and everything else
