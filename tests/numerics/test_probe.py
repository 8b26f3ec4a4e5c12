"""The probe finds what an emulated unit is made of; a wrong interval does not pass for a right one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.numerics.formats import E4M3, Rounding
from stretto.numerics.probe import explain, measure, multiply_on_gpu
from stretto.numerics.sums import Accumulator

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("fraction", [5, 10, 13, 14, 22])
@pytest.mark.parametrize("cut", ["zero", "down", "nearest"])
@pytest.mark.parametrize("promote", [0, 32, 128, 512])
def test_an_emulated_unit_is_found(fraction: int, cut: Rounding, promote: int) -> None:
    found = measure(Accumulator(fraction, cut, promote).multiply)
    assert (found.fraction, found.cut, found.promote) == (fraction, cut, promote)


@pytest.mark.parametrize("planted", [64, 96, 160, 256])
def test_a_wrong_interval_is_found(planted: int) -> None:
    """A unit that is said to promote after 128 terms."""
    assert measure(Accumulator(promote=planted).multiply).promote == planted != Accumulator().promote


def test_factors_are_numbers_of_8_bits() -> None:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        assert torch.equal(E4M3.round(a), a) and torch.equal(E4M3.round(b), b)
        return unit.multiply(a, b)

    for unit in (Accumulator(), Accumulator(28, "down", 0)):
        assert measure(multiply).fraction == unit.fraction


def test_torch_on_a_cpu_adds_up_in_fp32() -> None:
    one = torch.ones(())

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        left, right = (x.float().to(torch.float8_e4m3fn) for x in (a, b.t().contiguous()))
        return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)

    found = measure(multiply)
    assert found.fraction >= 23 and found.promote == 0


def test_words() -> None:
    assert explain(Accumulator()) == "13 fraction bits, cut toward zero, to fp32 after 128 terms"
    assert explain(Accumulator(23, "nearest", 0)).endswith("rounded to nearest, no promotion in 2,048 terms")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may be able to")
def test_without_a_gpu_there_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="--probe needs a CUDA GPU"):
        multiply_on_gpu(fast=False)


@pytest.mark.gpu
def test_this_gpu() -> None:
    """Whatever its width, sums that are not fast are promoted, or need not be."""
    slow, fast = (measure(multiply_on_gpu(fast=way)) for way in (False, True))
    print(explain(slow), explain(fast), sep="\n")
    assert fast.fraction >= 10 and (slow.fraction >= 22 or 0 < slow.promote <= 512)
