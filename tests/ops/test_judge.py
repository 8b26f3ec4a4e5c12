"""The verdict on an update: the kernel's is that of the definition, number for number."""

from __future__ import annotations

import math

import pytest
import torch

from stretto.ops.judge import FIELDS, judge, judge_ref
from tests.ops.checks import DEVICE

ODD = {25: math.nan, 30: math.inf, 31: 0.0, 40: 100.0, 41: 100.0, 60: 1e-30, 61: 1e30, 70: math.nan, 71: 50.0}


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("skip", [False, True])
def test_the_state_of_a_run(skip: bool, watch: bool) -> None:
    norms = (0.3 * torch.randn(120, generator=torch.Generator().manual_seed(0))).exp()
    for place, value in ODD.items():
        norms[place] = value
    expected, found = torch.zeros(len(FIELDS), dtype=torch.float64), torch.zeros(len(FIELDS), dtype=torch.float64)
    found = found.to(DEVICE)
    for norm in norms:
        cancel = judge(found, norm.to(DEVICE), skip, watch)
        assert cancel.dtype == torch.float32 and cancel.item() == judge_ref(expected, norm, skip, watch).item()
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)
    state = dict(zip(FIELDS, expected.tolist(), strict=True))
    assert state["updates"] == 120 and state["last"] == 71
    assert state["spikes"] == (4 if watch else 0) and state["cancelled"] == (7 if skip and watch else 3)
    assert state["worst"] == 1 and state["spike_worst"] == (2 if skip and watch else 0)
    assert state["known"] == ((112 if skip else 116) if watch else 0)
