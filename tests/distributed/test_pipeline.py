"""Pipelines of real processes (gloo) against the definition of training with old gradients (delays.py), bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stretto import checkpoint
from stretto.build import _find_obstacles, describe_context
from stretto.config import build_config
from stretto.errors import ConfigError
from stretto.mesh import Mesh
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.techniques import open_techniques
from tests.corpora import write_corpus
from tests.distributed.delays import Delayed, define
from tests.distributed.jobs import FAULTS
from tests.distributed.processes import launch
from tests.runs import base, change, eval_losses, losses
from tests.server import Group, find_server

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_thread")]  # sums in the order of one thread
STEPS = 7
RESUMED = ("1f1b-ring", "2bw-linear", "pipelined-ring", "ouroboros-linear", "predict-2bw", "warm-pipelined")
ORDERS = ("1f1b", "2bw", "pipelined", "ouroboros")
DROPS = {"model__dropout": 0.1, "model__attention_dropout": 0.1, "techniques__fused": True}
DROPS_TOKENS = DROPS | {"model__attention_dropout": 0.0}
Trees = dict[str, dict[str, Any]]
TWO = [
    *(f"{order}-{place}" for order in ORDERS for place in ("linear", "ring")), "exact", "plain", "untied",
    "untied-pipelined",
    "rows", "post", "masked", "llama", "bf16", "lean", "dropped", "warm-2bw", "warm-pipelined", "predict-2bw",
    "predict", "mean", "cuts",
]  # fmt: skip


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
        "exact": make(folder, **DROPS_TOKENS),
        "plain": make(folder, parallel__schedule="pipelined"),
        "untied": make(folder, parallel__schedule="ouroboros", model__tied=False, train__micro_batches=2),
        "untied-pipelined": make(folder, parallel__schedule="pipelined", model__tied=False, train__micro_batches=2),
        "rows": make(folder, parallel__schedule="pipelined", data__layout="padded", **DROPS_TOKENS),
        "post": make(folder, parallel__schedule="2bw", model__norm_order="post", **DROPS),
        "masked": make(
            folder, parallel__schedule="2bw", data__task="masked", model__kind="encoder", model__embed_norm=True,
            **DROPS,
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
    shared: dict[str, Any] = {"train__micro_batches": 8, "data__batch_size": 2}
    return {
        "data-2bw": make(folder, parallel__schedule="2bw", **shared),
        "data-pipelined": make(folder, parallel__schedule="pipelined", train__micro_batches=2, techniques__fused=True),
        "sequence-2bw": make(folder, parallel__schedule="2bw", parallel__sequence=2, train__micro_batches=3, **DROPS),
        "four-1f1b": make(folder, **many),
        "four-2bw": make(folder, parallel__schedule="2bw", **many, train__micro_batches=5),
        "four-pipelined": make(folder, parallel__schedule="pipelined", parallel__placement="linear", **many),
        "four-ouroboros": make(folder, parallel__schedule="ouroboros", **many),
    }


def load(run: Path) -> checkpoint.Snapshot:
    return checkpoint.load(run / "checkpoints", STEPS)


def find_differences(run: Path, wanted: dict[str, Tensor]) -> list[str]:
    weights = load(run).weights
    assert weights.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not torch.equal(value, weights[name])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write_corpus(folder / "text")
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    trees = make_two(folder)
    jobs: dict[str, Any] = {name: {"config": tree} for name, tree in trees.items()}
    for name in RESUMED:  # one process is told to stop; all agree on when
        jobs[f"{name}-stopped"] = {"config": change(trees[name]), "stop_after": 2}
        jobs[f"{name}-resumed"] = {"config": change(trees[name]), "resume": True, "folder": f"{name}-stopped"}
    for fault in FAULTS:
        jobs[fault] = {"config": change(trees["pipelined-linear"]), "plant": fault}
    jobs["cut"] = {"config": change(trees["exact"], parallel__placement="linear"), "stop_after": 2}
    jobs["cut again"] = {"config": change(trees["exact"]), "resume": True, "folder": "cut"}
    launch(jobs, folder / "two", 2)
    return folder / "two"


@pytest.fixture(scope="module")
def definition(folder: Path) -> Callable[[str], Delayed]:
    """What a job of two processes has to compute, by its name; each is computed once."""
    return cache(lambda name: define(make_two(folder)[name], folder / "one" / name))


@pytest.fixture(scope="module")
def four(folder: Path) -> Path:
    launch({name: {"config": tree} for name, tree in make_four(folder).items()}, folder / "four", 4)
    return folder / "four"


@pytest.mark.parametrize("name", TWO)
def test_two_processes_compute_what_the_definition_says(
    two: Path, definition: Callable[[str], Delayed], name: str
) -> None:
    wanted = definition(name)
    assert find_differences(two / name, wanted.result()) == []
    found = losses(two / name)
    assert found.keys() == {1, 5, STEPS}
    assert list(found.values()) == pytest.approx([wanted.losses[step - 1] for step in found], abs=1e-5)


@pytest.mark.parametrize("name", ["four-1f1b", "four-2bw", "four-pipelined", "four-ouroboros"])
def test_so_do_four(four: Path, folder: Path, name: str) -> None:
    wanted = define(make_four(folder)[name], folder / "one" / name)
    assert find_differences(four / name, wanted.result()) == []


@pytest.mark.parametrize("name", ["data-2bw", "data-pipelined", "sequence-2bw"])
def test_pipelines_share_batches_and_sequences(four: Path, folder: Path, name: str) -> None:
    """The order of sums is another one, so bits are not the same."""
    plain = {"parallel__sequence": 1, "parallel__sequence_method": "auto"}
    wanted = define(change(make_four(folder)[name], **plain), folder / "one" / name)
    found = losses(four / name)
    assert list(found.values()) == pytest.approx([wanted.losses[step - 1] for step in found], abs=2e-5)
    for key, value in wanted.result().items():
        torch.testing.assert_close(load(four / name).weights[key], value, atol=2e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    tree = change(make_two(folder)["exact"], parallel__pipeline=1)
    launch({"plain": {"config": tree}}, folder / "alone", 1)
    return folder / "alone" / "plain"


@pytest.mark.parametrize("name", ["exact", "cut"])
def test_the_exact_order_is_plain_training(two: Path, alone: Path, name: str) -> None:
    """With the same dropout: keys depend on the seed and the micro-batch, in every cut, and the cut may change when a
    run goes on. (Without a pipeline, dropout in attention draws from torch's generator.)"""
    losses_here = losses(two / name)
    assert losses_here == pytest.approx({step: losses(alone)[step] for step in losses_here}, abs=1e-5)
    assert eval_losses(two / name)[STEPS] == pytest.approx(eval_losses(alone)[STEPS], abs=1e-5)
    found, wanted = load(two / name), load(alone)
    torch.testing.assert_close(found.weights, wanted.weights, atol=1e-5, rtol=1e-4)
    assert found.moments.keys() == wanted.moments.keys()  # so a plain run may go on from it, and the other way round
    assert found.state["identity"] == wanted.state["identity"] and found.state["tokens"] == wanted.state["tokens"]


@pytest.mark.parametrize("name", RESUMED)
def test_an_interrupted_run_ends_with_the_same_bits(two: Path, name: str) -> None:
    stopped = json.loads((two / f"{name}-stopped.0.json").read_text())
    assert stopped["code"] == 75 and 2 <= len(stopped["samples"]) < 4 * STEPS
    whole, resumed = load(two / name), load(two / f"{name}-stopped")
    for part in ("weights", "moments", "others"):
        one, other = getattr(whole, part), getattr(resumed, part)
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert bool(whole.others) == (not name.startswith("1f1b"))
    assert eval_losses(two / name).items() <= eval_losses(two / f"{name}-stopped").items()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(two: Path, definition: Callable[[str], Delayed], fault: str) -> None:
    assert len(find_differences(two / fault, definition("pipelined-linear").result())) > 20


def test_old_gradients_are_measured(two: Path) -> None:
    for name in ("2bw-ring", "ouroboros-linear"):
        events = [event for event in read_events(two / name) if "weight_drift" in event]
        assert events and 0 < events[-1]["weight_drift"] < 1
    assert not any("weight_drift" in event for event in read_events(two / "1f1b-ring"))


def test_kernels_compute_it_too(folder: Path) -> None:
    """In Triton's interpreter: what writes weights by their addresses has to leave old ones alone."""
    tiny = {
        "model__layers": 2, "model__width": 8, "model__heads": 1, "data__seq_len": 4, "data__batch_size": 1,
        "train__steps": 3, "train__eval_batches": 1, "parallel__placement": "linear",
    }  # fmt: skip
    sizes = {"1f1b": 2, "2bw": 2, "pipelined": 1, "ouroboros": 1}
    trees = {
        order: make(folder, parallel__schedule=order, **tiny, **DROPS, train__micro_batches=size)
        for order, size in sizes.items()
    }
    jobs = {name: {"config": tree, "define": True} for name, tree in trees.items()}
    launch(jobs, folder / "kernels", 2, {"TRITON_INTERPRET": "1"})
    for name in trees:
        found = checkpoint.load(folder / "kernels" / name / "checkpoints", 3).weights
        wanted = load_file(folder / "kernels" / f"{name}.safetensors")
        assert [key for key, value in wanted.items() if not torch.equal(value, found[key])] == [], name


def start(folder: Path, run: str, how: str, *more: str) -> Group:
    """Two processes, of which the second one fails if `how` says so (failing.py)."""
    sets = [
        f"run.dir={folder / run}", f"data.train={folder / 'text'}", "data.suffix=.txt", "data.seq_len=16",
        "data.batch_size=2", "model.layers=2", "model.width=16", "model.heads=2", "model.max_len=32", "train.steps=24",
        "train.log_every=50", "train.micro_batches=2", "train.eval_batches=1", "checkpoint.every=8",
        "checkpoint.keep=9", "run.timeout_s=8", "parallel.pipeline=2", "parallel.schedule=2bw",
        "parallel.placement=linear",
    ]  # fmt: skip
    options = [part for override in sets for part in ("--set", override)]
    log, module = folder / f"{run}{'-'.join(more)}.log", "tests.distributed.failing"
    return find_server().start(log, how, "train", "demo", *options, *more, processes=2, module=module)


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Tensor]:
    """The weights of a run that nothing happened to."""
    start(folder, "whole", "").expect_success()
    return checkpoint.load(folder / "whole" / "checkpoints", 24).weights


@pytest.mark.parametrize("how", ["killed", "frozen", "confused"])
def test_a_process_that_fails_ends_the_others_with_a_clear_message(
    folder: Path, whole: dict[str, Tensor], how: str
) -> None:
    """Nobody but the others ends the survivor, as torchrun would before it could speak. The second process fails in the
    middle of an update; with --resume the run then ends with the same bits as one that nothing happened to."""
    failing = start(folder, how, how)
    code = failing.wait_for_end(0)
    if how == "frozen":
        failing.kill(1)
    failing.wait()
    if how == "confused":  # the one who received it says so, the other one lost its partner
        assert "a message of another micro-batch" in failing.log and "rank 0 has failed" in failing.log, failing.log
    else:
        assert code == 7 and "rank 1 was lost without a word" in failing.log, failing.log
    start(folder, how, "", "--resume").expect_success()
    found = checkpoint.load(folder / how / "checkpoints", 24).weights
    assert [key for key, value in whole.items() if not torch.equal(value, found[key])] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__pipeline": 8}, "need as many blocks"),
        ({"parallel__schedule": "2bw", "train__micro_batches": 1}, "raise train.micro_batches"),
        ({"model__dropout": 0.1}, "set techniques.fused to true"),
        ({"train__compile": True}, "set train.compile to false"),
        ({"parallel__data": "shard"}, "set parallel.data to 'replicate'"),
        ({"train__precision": "fp16"}, "set train.precision to 'bf16'"),
        ({"parallel__cuts": [3, 2]}, "growing numbers"),
        ({"model__kind": "encoder", "model__classes": 3, "data__task": "classification"}, "a classifier's head"),
        ({"techniques__standardize": True}, "norms of the whole model"),
        ({"techniques__layer_drop": {"gate": "sample"}}, "set it to 'batch'"),
        ({"train__graphs": "on"}, "messages in the middle of an update"),
    ],
)
def test_what_cannot_work_is_said(folder: Path, changes: dict[str, Any], words: str) -> None:
    config = build_config(make(folder, **changes))
    group = SimpleNamespace(rank=lambda: 0)
    grid = SimpleNamespace(get_group=lambda name: group)
    size = config.parallel.pipeline
    mesh = Mesh(0, size, (("pipeline", size),), grid)  # type: ignore[arg-type]
    context = describe_context(config, Runtime(torch.device("cpu")), mesh)
    context = replace(context, sharded=config.parallel.data == "shard")
    with pytest.raises(ConfigError, match=re.escape(words)):
        _find_obstacles(config, context, open_techniques(config, context))
