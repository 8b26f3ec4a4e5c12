"""What is computed again in two real processes (gloo): the same bits with sharded weights, split sequences and DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from tests.distributed.processes import launch
from tests.runs import base, change, losses

pytestmark = pytest.mark.dist
AGAIN = {"norms": "input", "mlp": "input", "qkv": "input", "blocks": 1}
WAYS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "shard": {"parallel__data": "shard"},
    "drop": {"techniques__layer_drop": {"theta": 0.3, "schedule": "constant"}},
    "gather": {"parallel__sequence": 2, "parallel__sequence_method": "gather"},
    "ring": {"parallel__sequence": 2, "parallel__sequence_method": "ring"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lean")
    plain = change(base(folder), train__steps=4, model__layers=3, techniques__fused=True)
    jobs = {}
    for name, changes in WAYS.items():
        jobs[name] = change(plain, **changes)
        jobs[f"{name}-again"] = change(plain, **changes, techniques__lean=AGAIN)
        jobs[f"{name}-less"] = change(plain, **changes, techniques__lean=True)
    launch({name: {"config": tree} for name, tree in jobs.items()}, folder / "two", 2)
    return folder / "two"


@pytest.mark.parametrize("name", WAYS)
def test_two_processes_compute_again_what_they_had(runs: Path, name: str) -> None:
    kept, again = (runs / which for which in (name, f"{name}-again"))
    assert len(losses(kept)) == 4 and losses(again) == losses(kept)
    one, two = (checkpoint.load(folder / "checkpoints", 4).weights for folder in (kept, again))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", WAYS)
def test_norms_from_their_outputs_learn_the_same(runs: Path, name: str) -> None:
    found, wanted = losses(runs / f"{name}-less"), losses(runs / name)
    assert found.keys() == wanted.keys()
    assert all(abs(found[step] - wanted[step]) < 1e-5 for step in wanted)
