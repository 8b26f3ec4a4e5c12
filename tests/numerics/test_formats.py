"""Emulated numbers against torch's own casts, and the promises of each rounding."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, IBM16, Format, Rounding

CASTS = {
    torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32,
}  # fmt: skip
anything = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40)
near = st.lists(st.floats(-600, 600, width=32), min_size=1, max_size=40)  # where most numbers of 8 bits are
finite = st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20)
formats = st.builds(Format, st.integers(2, 8), st.integers(1, 12), st.sampled_from(["inf", "nan", "saturate"]))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", CASTS, ids=str)
@given(numbers=anything | near)
@settings(max_examples=120, deadline=None)
def test_torchs_casts(dtype: torch.dtype, numbers: list[float]) -> None:
    x, form = torch.tensor(numbers, dtype=torch.float32), CASTS[dtype]
    found, cast = form.round(x), x.to(dtype).double()
    if dtype == torch.float8_e4m3fn and not torch.tensor(1e4).to(dtype).isnan():  # newer versions of torch saturate
        found = torch.where(x.isnan(), x.double(), form.round(x.clamp(-form.largest, form.largest)))
    assert same(found, cast)


OTHERS = {
    "float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "float8_e4m3": Format(4, 3, "inf"), "float8_e3m4": Format(3, 4, "inf"),
    "bfloat16": BF16, "float6_e2m3fn": Format(2, 3), "float6_e3m2fn": Format(3, 2), "float4_e2m1fn": Format(2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@given(numbers=near | finite)
@settings(max_examples=60, deadline=None)
def test_casts_of_ml_dtypes(name: str, numbers: list[float]) -> None:
    """Its casts from fp32, of formats that torch has and of those that it has not."""
    x, form = np.array(numbers, dtype=np.float32), OTHERS[name]
    with np.errstate(over="ignore"):
        cast = torch.from_numpy(x.astype(getattr(ml_dtypes, name)).astype(np.float64))
    assert same(form.round(torch.from_numpy(x)), cast)


@pytest.mark.parametrize("name", OTHERS)
def test_limits_of_ml_dtypes(name: str) -> None:
    found, form = ml_dtypes.finfo(getattr(ml_dtypes, name)), OTHERS[name]
    smallest = float(found.smallest_subnormal)
    assert form.largest == float(found.max)
    assert form.round(torch.tensor([smallest, smallest / 2])).tolist() == [smallest, 0.0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_number_of_8_bits_is_its_own(dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    assert same(CASTS[dtype].round(x), x)
    assert CASTS[dtype].largest == x[x.isfinite()].max() == torch.finfo(dtype).max


def test_beyond_the_largest_number() -> None:
    x = torch.tensor([1e9, -1e9, math.inf], dtype=torch.float64)
    assert E5M2.round(x).tolist() == [math.inf, -math.inf, math.inf]
    assert E4M3.round(x).isnan().all()
    assert Format(4, 3).round(x).tolist() == [480.0, -480.0, 480.0]
    assert E5M2.round(x, "zero").tolist() == [57344.0, -57344.0, math.inf]
    assert E5M2.round(x, "down").tolist() == [57344.0, -math.inf, math.inf]
    assert IBM16.largest == (2 - 2**-9) * 2.0**32, "no exponent is kept for infinity"
    assert IBM16.round(torch.tensor([2.0**-39, 2.0**-40])).tolist() == [2.0**-39, 0.0], "subnormal, and half of one"


@given(form=formats, numbers=finite)
@settings(max_examples=150, deadline=None)
def test_each_rounding_is_one_of_two_neighbours(form: Format, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float64).clamp(-form.largest, form.largest)
    generator = torch.Generator().manual_seed(0)
    below, cut = form.round(x, "down"), form.round(x, "zero")
    above = -form.round(-x, "down")
    assert (below <= x).all() and (x <= above).all() and torch.equal(cut.abs(), torch.minimum(below.abs(), above.abs()))
    others: tuple[Rounding, Rounding] = ("nearest", "stochastic")
    for rounding in others:
        y = form.round(x, rounding, generator)
        assert ((y == below) | (y == above)).all()
        assert torch.equal(form.round(y, rounding, generator), y), "numbers of the format stay"
    assert ((form.round(x) - x).abs() <= (above - below) / 2).all()


def test_stochastic_rounding_is_right_on_average() -> None:
    """100,000 roundings of 1 + 2^-11 to 9 bits, of which a quarter goes up; nearest never does."""
    x = torch.full((100_000,), 1 + 2.0**-11, dtype=torch.float64)
    y = IBM16.round(x, "stochastic", torch.Generator().manual_seed(1))
    assert set(y.unique().tolist()) == {1.0, 1 + 2.0**-9}
    sigma = 2.0**-9 * math.sqrt(0.25 * 0.75 / len(x))
    assert abs(float(y.mean() - x[0])) < 4 * sigma
    assert (IBM16.round(x) == 1).all()


def test_what_is_no_format() -> None:
    with pytest.raises(ValueError, match="mantissa"):
        Format(5, 0)
    with pytest.raises(ValueError, match="generator"):
        E4M3.round(torch.ones(1), "stochastic")
