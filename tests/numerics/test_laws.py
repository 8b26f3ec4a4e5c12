"""The formulas: their limits, the published widths, and emulation beside the variance retention ratio."""

from __future__ import annotations

from itertools import pairwise
from math import log

import pytest
import torch

from stretto.numerics.formats import Format, power_below, round_to
from stretto.numerics.laws import cut_bias, noise, required_mantissa, retention, stall

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_limits_of_the_variance_retention_ratio() -> None:
    assert retention(1000, 20) == pytest.approx(1, abs=1e-12)
    for n in (576, 4608):
        values = [retention(n, mantissa) for mantissa in range(2, 16)]
        assert all(low < high + 1e-12 for low, high in pairwise(values)) and 0 < min(values) < max(values) < 1 + 1e-12
        for mantissa in range(5, 12):
            assert retention(n, mantissa, chunk=64) >= retention(n, mantissa) - 1e-6, "1 but for a hair, both"
            assert retention(n, mantissa, density=0.5) >= retention(n, mantissa)
    assert retention(4096, 6, chunk=64, density=0.5) >= retention(4096, 6, chunk=64)


@pytest.mark.parametrize(
    ("mantissa", "n", "known"),
    [(5, 576, 0.707), (5, 2304, 0.600), (6, 2304, 0.720), (7, 1152, 0.997), (7, 4608, 0.786), (9, 18432, 0.978)],
)
def test_the_variance_retention_ratio_of_known_sums(mantissa: int, n: int, known: float) -> None:
    assert retention(n, mantissa) == pytest.approx(known, abs=6e-4)


def test_widths() -> None:
    """Published: 7, 8, 8, 9 bits for the blocks of ResNet18 and 15 for its longest sum; in chunks of 64, 5, 5, 5, 6 and
    10. Ours are these or one bit beside them."""
    assert [required_mantissa(n) for n in (576, 1152, 2304, 4608, 3_211_264)] == [7, 7, 8, 9, 15]
    assert [required_mantissa(n, chunk=64) for n in (576, 1152, 2304, 4608, 3_211_264)] == [5, 5, 5, 5, 11]
    for n in (100, 3000, 70_000):
        width = required_mantissa(n)
        assert n * (1 - retention(n, width)) < log(50) <= n * (1 - retention(n, width - 1))


@pytest.mark.parametrize(("mantissa", "knee"), [(5, 133), (6, 380), (7, 1150), (8, 3650), (9, 11_900)])
def test_knees(mantissa: int, knee: int) -> None:
    """The longest sum that a width is enough for, to 3%."""
    assert required_mantissa(round(0.97 * knee)) == mantissa and required_mantissa(round(1.03 * knee)) == mantissa + 1


@pytest.mark.parametrize(("mantissa", "n"), [(5, 576), (5, 2304), (6, 2304), (7, 4608)])
def test_what_the_ratio_is_a_model_of(mantissa: int, n: int) -> None:
    """Beyond its knee it is that of a unit that cuts each product to the last bit of the sum, to 0.1."""
    terms = Format(8, 5).round(torch.randn(2000, n, generator=torch.Generator().manual_seed(0)))
    total = torch.zeros(len(terms), dtype=torch.float64)
    for term in terms.unbind(1):
        step = torch.maximum(power_below(total), power_below(term)) * 2.0**-mantissa
        total = Format(8, mantissa).round(total + round_to(term, step.clamp(min=2.0**-60), "zero"), "zero")
    assert float(total.var() / terms.sum(1).var()) == pytest.approx(retention(n, mantissa), abs=0.1)


def test_small_laws() -> None:
    assert stall(9) == 1024
    assert noise(4096, 7, 64) == pytest.approx(noise(128, 7)) and noise(64, 7, 128) == noise(64, 7)
    assert noise(4096, 7, rounding="stochastic") == pytest.approx(2 * noise(4096, 7))
    assert cut_bias(80, 13, 7) == 0, "no bit of a term is below the step yet"
    assert cut_bias(10**9, 13) == pytest.approx(-1, abs=1e-3) and cut_bias(4096, 13) < cut_bias(4096, 13, 7) < 0
