"""What a device does with sums of 8-bit products, measured by products whose exact result is known.

A row holds three products, and zeros besides: large, small, -large. Their sum is the small one, unless its bits were
cut off while the large one was there.

    width       all three side by side: the small one survives up to large / small = 2^F, F fraction bits
    cut         with a step of 2^-F of the large one, 3/4 of a step becomes 0 or 1 step: cut, or rounded to nearest;
                -3/4 of a step becomes 0 or -1 step: cut toward zero, or downward
    promotion   large at the first place, -large at the last, 2^-23 of it at place p in between. If sums move to fp32
                after c terms, it survives from p = c on, since it then meets the large one in fp32 alone

Factors are E4M3 numbers, 2^-6 to 2^8 and 3/4 of these: products are up to 28 bits apart. What is measured, `multiply`,
takes float64 matrices a [M, K] and b [K, N], and may be a device or an emulated unit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import ConfigError
from stretto.numerics.formats import Rounding
from stretto.numerics.sums import Accumulator

Multiply = Callable[[Tensor, Tensor], Tensor]
TERMS, PLACES = 4096, 16  # of the longest product, and the distance of places that are tried in it
FP32_FRACTION, MOST = 23, 28  # bits of fp32, and those that products of E4M3 can be apart


def _multiply_rows(multiply: Multiply, gap: int, small: float, places: list[int], last: int, terms: int) -> Tensor:
    """Returns the results of rows with the small product at each of the places, in units of 2^-gap of the large one."""
    low, high = max(8 - gap, -6), max(gap - 20, -6)  # exponents of the first factors: high + 8 - (low - 6) = gap
    a, b = torch.zeros(len(places), terms, dtype=torch.float64), torch.full((terms, 16), 2.0**-6, dtype=torch.float64)
    a[:, 0], a[:, last] = 2.0**high, -(2.0**high)
    b[[0, last]] = 2.0**8
    for row, place in enumerate(places):
        a[row, place] = small * 2.0**low
    return multiply(a, b)[:, 0].double() / 2.0 ** (low - 6)


def measure(multiply: Multiply) -> Accumulator:
    """Finds fraction bits, cut and promotion interval, which is 0 where none was seen within TERMS / 2, and for a unit
    of fp32's width, which has nothing to promote. The group is not measured."""

    def near(gap: int, small: float) -> float:
        return float(_multiply_rows(multiply, gap, small, [1], 2, 32)[0])

    fraction = next((gap for gap in range(MOST) if near(gap + 1, 1.0) != 1.0), MOST)
    cut: Rounding = "nearest" if near(fraction, 0.75) == 1.0 else "down" if near(fraction, -0.75) == -1.0 else "zero"
    if fraction >= FP32_FRACTION:
        return Accumulator(fraction, cut, 0)
    places = list(range(PLACES, TERMS // 2 + 1, PLACES))
    results = _multiply_rows(multiply, FP32_FRACTION, 1.0, places, TERMS - 1, TERMS).tolist()
    first = next((place for place, result in zip(places, results, strict=True) if result == 1.0), 0)
    return Accumulator(fraction, cut, first, PLACES)


def multiply_on_gpu(fast: bool) -> Multiply:
    """torch._scaled_mm with E4M3 factors and an fp32 result; `fast` lets it leave out the promotion."""
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        raise ConfigError("--probe needs a CUDA GPU that multiplies 8-bit numbers (compute capability 8.9 or later)")
    one = torch.ones((), device="cuda")

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        rows = F.pad(a, (0, 0, 0, -len(a) % 16))
        left, right = (x.to("cuda", torch.float32).to(torch.float8_e4m3fn) for x in (rows, b.t().contiguous()))
        done = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
        return done[: len(a)].cpu().double()

    return multiply


def explain(unit: Accumulator) -> str:
    cut = {"zero": "cut toward zero", "down": "cut downward", "nearest": "rounded to nearest"}.get(unit.cut, unit.cut)
    promoted = f"to fp32 after {unit.promote} terms" if unit.promote else f"no promotion in {TERMS // 2:,} terms"
    return f"{unit.fraction} fraction bits, {cut}, {promoted}"
