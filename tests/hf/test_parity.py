"""Accelerated models against the same models untouched, both compared with fp64."""

from __future__ import annotations

import pytest
import torch

from tests.hf.families import FAMILIES, FLOOR, accelerated, assert_parity, build, draw_batch, learn


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("lengths", [None, (9, 3, 6)], ids=["full", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_the_untouched_model(family: str, lengths: tuple[int, ...] | None, training: bool) -> None:
    batch = draw_batch(family, lengths)
    exact = learn(build(family, torch.float64).train(training), batch)
    plain = learn(build(family).train(training), batch)
    found = learn(accelerated(family).train(training), batch)
    assert_parity(found, plain, exact, FLOOR)


# One input of Marian's relu is 0.0007 among tenths: rounding to bf16 decides whether its gradient counts.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "marian"])
def test_under_autocast_too(family: str) -> None:
    batch = draw_batch(family)
    exact = learn(build(family, torch.float64), batch)
    plain = learn(build(family), batch, autocast=True)
    found = learn(accelerated(family), batch, autocast=True)
    assert_parity(found, plain, exact, 4e-3)
