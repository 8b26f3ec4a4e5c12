"""CUDA graphs in two real processes (gloo): static gradients, summed between graphs, are what DistributedDataParallel
makes of them, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from tests.corpora import write_pairs
from tests.distributed.processes import launch
from tests.runs import base, change, eval_losses, losses

pytestmark = pytest.mark.dist
STEPS, NEVER = 8, 10**9


def trees(folder: Path) -> dict[str, dict[str, Any]]:
    """One and two micro-batches a process, of one shape; bf16 weights; and sentences, in batches of many shapes."""
    one = change(
        base(folder), techniques__fused={}, data__join_documents=True, train__micro_batches=2, train__eval_every=3,
        model__activation_dropout=0.1, train__graphs="off", run__deterministic=True,
    )  # fmt: skip
    translation = change(
        one, data__task="translation", data__train=str(write_pairs(folder / "pairs")), data__languages=["xx", "yy"],
        data__max_tokens=64, data__held_out=0.2, data__seq_len=64, model__kind="encoder-decoder", model__max_len=64,
        data__join_documents=False, train__micro_batches=4,
    )  # fmt: skip
    return {
        "one": one,
        "two": change(one, train__micro_batches=4),
        "split": change(one, train__precision="bf16", techniques__fused={"weights": "split"}),
        "translation": translation,
    }


def assert_equal(first: Path, second: Path, steps: int) -> None:
    assert len(losses(first)) == steps and losses(first) == losses(second)
    assert len(eval_losses(first)) > 1 and eval_losses(first) == eval_losses(second)
    one, two = (checkpoint.load(folder / "checkpoints", steps) for folder in (first, second))
    for mine, theirs in ((one.weights, two.weights), (one.moments, two.moments)):
        assert mine.keys() == theirs.keys() and all(torch.equal(theirs[name], value) for name, value in mine.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    jobs: dict[str, Any] = {}
    for name, tree in trees(folder).items():
        jobs[f"{name}-off"] = {"config": change(tree)}
        jobs[f"{name}-static"] = {"config": change(tree, train__graphs="auto"), "put_off": NEVER}
    jobs["two-chosen"] = {"config": change(trees(folder)["two"], train__graphs="auto"), "put_off": 4}
    jobs["translation-chosen"] = {"config": change(trees(folder)["translation"], train__graphs="auto"), "put_off": 4}
    launch(jobs, folder / "runs", 2)
    return folder / "runs"


@pytest.mark.parametrize("name", ["one", "two", "split"])
def test_static_gradients_are_those_of_data_parallelism(runs: Path, name: str) -> None:
    assert_equal(runs / f"{name}-off", runs / f"{name}-static", STEPS)


def test_the_choice_against_graphs_goes_back_to_data_parallelism(runs: Path) -> None:
    """In the middle of a run. Batches keep their buckets, or a resumed run could not be the same."""
    assert_equal(runs / "two-off", runs / "two-chosen", STEPS)
    assert_equal(runs / "translation-static", runs / "translation-chosen", STEPS)


def test_buckets_were_in_use(runs: Path) -> None:
    """The control of the test above: they change a translation's numbers a little."""
    plain, bucketed = losses(runs / "translation-off"), losses(runs / "translation-static")
    assert bucketed == pytest.approx(plain, abs=0.2) and bucketed != plain


@pytest.mark.gpu
def test_two_processes_replay_what_they_would_launch(tmp_path: Path) -> None:
    """On one GPU, which gloo serves too."""
    steps = 50
    jobs: dict[str, Any] = {}
    for name, tree in trees(tmp_path).items():
        tree = change(tree, run__device="cuda", train__steps=steps, train__eval_every=20)
        jobs[f"{name}-on"] = {"config": change(tree, train__graphs="on")}
        if name == "translation":
            jobs[f"{name}-off"] = {"config": change(tree, train__graphs="auto"), "put_off": NEVER}
        else:
            jobs[f"{name}-off"] = {"config": change(tree)}
    launch(jobs, tmp_path / "runs", 2)
    for name in trees(tmp_path):
        assert_equal(tmp_path / "runs" / f"{name}-off", tmp_path / "runs" / f"{name}-on", steps)
