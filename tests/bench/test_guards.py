"""`python -m bench.guards`: one contestant judges its updates, the other applies them all."""

from __future__ import annotations

import pytest
import torch

from bench.guards import NoGuard, compare
from stretto.guard import Guard
from stretto.runtime import Runtime

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "verdict"), [(Guard, 1.0), (NoGuard, 0.0)])
def test_only_one_has_guards(kind: type[Guard], verdict: float) -> None:
    guard = kind("stop", CPU)
    guard.doubt(torch.tensor(torch.nan))
    assert float(guard.judge(torch.tensor(torch.nan))) == verdict


def test_both_are_timed_in_each_round() -> None:
    found = compare("gpt2_small_1x1024", 2, 2, Runtime(CPU))
    assert {word: len(times) for word, times in found.items()} == {"guards": 2, "none": 2}
