"""Pipelines of real processes (gloo) against the definition of training with old gradients (delays.py), bit for bit."""

from __future__ import annotations

import json
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.config import build_config
from stretto.parallel.pipeline import is_ring
from stretto.parallel.schedule import Schedule
from stretto.report import read_events
from tests.distributed.delays import Delayed
from tests.distributed.processes import launch
from tests.runs import base, change, eval_losses, losses

pytestmark = pytest.mark.dist
STEPS = 7
ORDERS = ("1f1b", "2bw", "pipelined", "ouroboros")
DROPS = {"model__dropout": 0.1, "model__attention_dropout": 0.1, "techniques__fused": True}
Trees = dict[str, dict[str, Any]]


def make(folder: Path, **changes: Any) -> dict[str, Any]:
    """Four blocks, without pauses but the one in the middle, so that updates overlap as they do in real runs."""
    tree = change(
        base(folder), model__layers=4, model__width=16, model__dropout=0.0, optim__eps=1e-6, train__steps=STEPS,
        train__log_every=5, train__eval_every=0, train__eval_batches=2, parallel__pipeline=2, data__batch_size=2,
    )  # fmt: skip
    order = changes.get("parallel__schedule", "1f1b")
    return change(tree, **{"train__micro_batches": 4 if order in ("1f1b", "2bw") else 1} | changes)


def make_two(folder: Path) -> Trees:
    """The jobs of two processes."""
    found = {
        f"{order}-{place}": make(folder, parallel__schedule=order, parallel__placement=place, **DROPS)
        for order in ORDERS
        for place in ("linear", "ring")
    }
    return found | {
        "plain": make(folder, parallel__schedule="pipelined"),
        "untied": make(folder, parallel__schedule="ouroboros", model__tied=False, train__micro_batches=2),
        "untied-pipelined": make(folder, parallel__schedule="pipelined", model__tied=False, train__micro_batches=2),
        "rows": make(folder, parallel__schedule="pipelined", data__layout="padded", **DROPS | {"model__attention_dropout": 0.0}),
        "post": make(folder, parallel__schedule="2bw", model__norm_order="post", **DROPS),
        "masked": make(
            folder, parallel__schedule="2bw", data__task="masked", model__kind="encoder", model__embed_norm=True, **DROPS
        ),
        "llama": make(
            folder, parallel__schedule="pipelined", model__norm="rmsnorm", model__activation="swiglu",
            model__positions="rotary", model__bias=False, model__kv_heads=2, techniques__fused=True,
        ),
        "bf16": make(
            folder, parallel__schedule="2bw", train__precision="bf16",
            **DROPS | {"techniques__fused": {"weights": "split"}},
        ),
        "lean": make(folder, parallel__schedule="pipelined", techniques__lean={"blocks": 2, "qkv": "input"}, **DROPS),
        "dropped": make(
            folder, parallel__schedule="pipelined", techniques__layer_drop={"theta": 0.5, "schedule": "constant"},
            **DROPS,
        ),
        "warm-2bw": make(folder, parallel__schedule="2bw", parallel__sync_steps=3, **DROPS),
        "warm-pipelined": make(folder, parallel__schedule="pipelined", parallel__sync_steps=3, **DROPS),
        "predict-2bw": make(folder, parallel__schedule="2bw", parallel__predict=True, **DROPS),
        "predict": make(
            folder, parallel__schedule="pipelined", parallel__predict=True, parallel__sync_steps=2,
            parallel__late_lr=0.5, **DROPS,
        ),
        "mean": make(folder, parallel__schedule="ouroboros", parallel__tied_gradient="mean", **DROPS),
        "cuts": make(folder, parallel__schedule="pipelined", parallel__placement="linear", parallel__cuts=[3], **DROPS),
    }  # fmt: skip


def make_four(folder: Path) -> Trees:
    """The jobs of four processes."""
    many: dict[str, Any] = {"parallel__pipeline": 4, "model__layers": 5, **DROPS}
    return {
        "four-1f1b": make(folder, **many),
        "four-2bw": make(folder, parallel__schedule="2bw", **many, train__micro_batches=5),
        "four-pipelined": make(folder, parallel__schedule="pipelined", parallel__placement="linear", **many),
        "four-ouroboros": make(folder, parallel__schedule="ouroboros", **many),
    }


def define(tree: dict[str, Any], folder: Path) -> Delayed:
    """What a run should have computed."""
    config = build_config(change(tree, parallel__pipeline=1, run__dir=str(folder)))
    cfg = build_config(tree).parallel
    schedule = Schedule(
        cfg.schedule, cfg.pipeline, is_ring(cfg, config.model), config.train.micro_batches, cfg.sync_steps
    )
    found = Delayed(config, schedule)
    found.train(STEPS)
    return found


def load(run: Path) -> checkpoint.Snapshot:
    return checkpoint.load(run / "checkpoints", STEPS)


def find_differences(run: Path, wanted: Delayed) -> list[str]:
    weights = load(run).weights
    assert weights.keys() == wanted.result().keys()
    return [name for name, value in wanted.result().items() if not torch.equal(value, weights[name])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    jobs: dict[str, Any] = {name: {"config": tree} for name, tree in make_two(folder).items()}
    for name in RESUMED:  # one process is told to stop; all agree on when
        tree = change(make_two(folder)[name])
        jobs[f"{name}-stopped"] = {"config": change(tree), "stop_after": 2}
        jobs[f"{name}-resumed"] = {"config": change(tree), "resume": True, "folder": f"{name}-stopped"}
    launch(jobs, folder / "two", 2)
    return folder / "two"


@pytest.fixture(scope="module")
def four(folder: Path) -> Path:
    jobs = make_four(folder) | make_mixed(folder)
    launch({name: {"config": tree} for name, tree in jobs.items()}, folder / "four", 4)
    return folder / "four"


RESUMED = ("1f1b-ring", "2bw-linear", "pipelined-ring", "ouroboros-linear", "predict-2bw", "warm-pipelined")


@pytest.mark.parametrize("name", [
    *(f"{order}-{place}" for order in ORDERS for place in ("linear", "ring")), "plain", "untied", "untied-pipelined",
    "rows", "post", "masked", "llama", "bf16", "lean", "dropped", "warm-2bw", "warm-pipelined", "predict-2bw", "predict",
    "mean", "cuts",
])  # fmt: skip
def test_two_processes_compute_what_the_definition_says(two: Path, folder: Path, name: str) -> None:
    wanted = define(make_two(folder)[name], folder / "one" / name)
    assert find_differences(two / name, wanted) == []
    found = losses(two / name)
    assert found.keys() == {1, 5, STEPS}
    assert list(found.values()) == pytest.approx([wanted.losses[step - 1] for step in found], abs=1e-5)


def make_mixed(folder: Path) -> Trees:
    return {}
