"""Products of 8 bits in two real processes (gloo): copies, sharded weights and shared sequences learn as one process
does, and what one process measures counts for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto import checkpoint
from stretto.config import build_config
from stretto.report import read_events
from stretto.train import train
from tests.distributed.processes import launch
from tests.runs import base, change, losses

pytestmark = pytest.mark.dist
WAYS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "shard": {"parallel__data": "shard"},
    "sequence": {"parallel__sequence": 2, "parallel__sequence_method": "gather"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    tree = change(base(folder), train__steps=3, train__precision="bf16", techniques__fused=True, model__dropout=0.0)
    narrow = {"techniques__fp8": {"sites": "all"}}
    jobs = {name: change(tree, **changes, **narrow) for name, changes in WAYS.items()}
    launch({name: {"config": each} for name, each in jobs.items()}, folder / "two", 2)
    train(build_config(change(tree, **narrow, run__dir=str(folder / "one"))))
    return folder


@pytest.mark.parametrize("name", WAYS)
def test_two_processes_learn_as_one(runs: Path, name: str) -> None:
    one, two = losses(runs / "one"), losses(runs / "two" / name)
    assert one.keys() == two.keys() and all(abs(one[step] - two[step]) < 0.01 for step in one)
    state = checkpoint.load(runs / "two" / name / "checkpoints", 3).state["techniques"]["fp8"]
    assert len(state["layers"]) == 8 and state["lost"] == []
    (line,) = [event for event in read_events(runs / "two" / name) if "eval_loss" in event]
    assert line["fp8_layers"] == 8 and line["fp8_cosine"] > 0.997
    alone = checkpoint.load(runs / "one" / "checkpoints", 3).state["techniques"]["fp8"]["bounds"]
    for i, (own, shared) in enumerate(zip(alone, state["bounds"], strict=True)):  # the largest of both processes
        shared /= 2 if i % 3 == 1 else 1  # the loss is multiplied by what an average divides by
        assert own > 0 and abs(own - shared) < 0.05 * own
