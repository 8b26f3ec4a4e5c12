"""The running mean of the weights over two real processes (gloo), whole in each or sharded: as in one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.checkpoint import Snapshot
from tests.distributed.processes import launch
from tests.runs import base, change, eval_losses, losses

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist-average")
    plain = change(base(folder), train__ema=0.9, train__eval_every=2, train__steps=6)
    launch({"one": {"config": copy.deepcopy(plain)}}, folder / "one", 1)
    kinds = {
        "replicate": plain,
        "shard": change(plain, parallel__data="shard"),
        "split": change(
            plain, parallel__data="shard", techniques__fused={"weights": "split"}, train__precision="bf16"
        ),
    }  # fmt: skip
    jobs: dict[str, Any] = {name: {"config": copy.deepcopy(tree)} for name, tree in kinds.items()}
    for name, tree in kinds.items():
        jobs[f"{name}-without"] = {"config": change(tree, train__ema=0.0)}
        jobs[f"{name}-stop"] = {"config": copy.deepcopy(tree), "stop_after": 3}
        jobs[f"{name}-go-on"] = {"config": copy.deepcopy(tree), "resume": True, "folder": f"{name}-stop"}
    quiet = change(kinds["shard"], checkpoint__keep=0)  # a save has all weights put back into rows
    jobs |= {"quiet": {"config": quiet}, "quiet-without": {"config": change(quiet, train__ema=0.0)}}
    launch(jobs, folder / "two", 2)
    return folder


def load(folder: Path) -> Snapshot:
    return checkpoint.load(folder / "checkpoints", 6)


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_two_processes_have_the_mean_of_one(runs: Path, kind: str) -> None:
    one, two = load(runs / "one" / "one"), load(runs / "two" / kind)
    means = [name for name in one.moments if name.startswith("mean/")]
    assert len(means) == len(one.weights) and one.moments.keys() == two.moments.keys()
    assert eval_losses(runs / "two" / kind) == pytest.approx(eval_losses(runs / "one" / "one"), abs=1e-5)
    close = [torch.allclose(one.moments[name], two.moments[name], atol=1e-3) for name in means]
    assert all(close) and not all(torch.allclose(two.weights[n[5:]], two.moments[n], atol=1e-3) for n in means)


def test_weights_that_were_gathered_to_evaluate_the_mean_train_nothing(runs: Path) -> None:
    """FSDP2 keeps what the last pass has gathered outside of blocks, until a backward pass or a save."""
    with_mean, without = runs / "two" / "quiet", runs / "two" / "quiet-without"
    assert losses(with_mean) == losses(without) and eval_losses(with_mean) != eval_losses(without)


@pytest.mark.parametrize("kind", ["replicate", "shard", "split"])
def test_evaluating_the_mean_changes_no_update(runs: Path, kind: str) -> None:
    with_mean, without = runs / "two" / kind, runs / "two" / f"{kind}-without"
    assert losses(with_mean) == losses(without) and eval_losses(with_mean) != eval_losses(without)
    one, two = load(with_mean).weights, load(without).weights
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", ["replicate", "shard", "split"])
def test_it_is_resumed_exactly(runs: Path, kind: str) -> None:
    whole, cut = runs / "two" / kind, runs / "two" / f"{kind}-stop"
    assert losses(cut) == losses(whole) and eval_losses(cut) == eval_losses(whole)
    one, two = load(whole), load(cut)
    assert one.moments.keys() == two.moments.keys()
    assert all(torch.equal(value, two.moments[name]) for name, value in one.moments.items())
