"""The standardization loss pulls in two real processes (gloo) as it does in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto import checkpoint
from stretto.report import read_events
from tests.distributed.processes import launch, samples
from tests.runs import base, change, losses

pytestmark = pytest.mark.dist
STEPS = 8
MODES = ("replicate", "shard", "fused-replicate", "fused-shard")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standardize")
    on = {"weight": 10.0, "warmup": 3, "stride": 3}
    tree = change(base(folder), techniques__standardize=on, optim__eps=1e-4)
    fused = change(tree, techniques__fused={})
    one = {"plain": tree, "fused": fused, "off": change(tree, techniques__standardize=on | {"weight": 0.0})}
    two = {mode: change(fused if "fused" in mode else tree, parallel__data=mode.split("-")[-1]) for mode in MODES}
    launch({name: {"config": change(tree)} for name, tree in two.items()}, folder / "two", 2)
    launch({name: {"config": change(tree)} for name, tree in one.items()}, folder / "one", 1)
    return folder


def logged(run: Path) -> list[float]:
    """The values of the loss, one for each evaluation."""
    return [event["standardization_loss"] for event in read_events(run) if "eval_loss" in event]


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_equal_one(runs: Path, mode: str) -> None:
    name = "fused" if "fused" in mode else "plain"
    one, two = runs / "one", runs / "two"
    assert samples(one, name, 1) == samples(two, mode, 2)
    assert losses(two / mode) == pytest.approx(losses(one / name), abs=1e-5)
    assert logged(two / mode) == pytest.approx(logged(one / name), rel=1e-4), "of three batches, so one repeats a batch"
    step = checkpoint.steps(one / name / "checkpoints")[0]
    first, second = (checkpoint.load(folder / "checkpoints", step) for folder in (one / name, two / mode))
    torch.testing.assert_close(second.weights, first.weights, atol=2e-5, rtol=2e-5)


def test_it_was_on(runs: Path) -> None:
    on, off = losses(runs / "one" / "plain"), losses(runs / "one" / "off")
    assert on != pytest.approx(off, abs=1e-4)
