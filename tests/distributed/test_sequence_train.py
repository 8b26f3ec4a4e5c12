"""`stretto train` with [parallel] sequence: 2 and 4 real processes (gloo) that share sequences do what one does alone,
and a run goes on where another number of them left it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.config import FusedConfig, ParallelConfig, TechniquesConfig
from stretto.mesh import Mesh
from stretto.optim import weight_writer
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.train import build
from stretto.trained import load_run_config
from tests.corpora import write_pairs
from tests.distributed.processes import launch, samples
from tests.runs import base, change, eval_losses, losses
from tests.server import find_server

pytestmark = pytest.mark.dist
STEPS = 4
WAYS: dict[str, dict[str, Any]] = {  # of the run in one process that is named first
    "calm ring": {"parallel__sequence_method": "ring", "parallel__sequence_layout": "contiguous"},
    "calm ulysses": {"parallel__sequence_method": "ulysses", "parallel__data": "shard"},
    "fused gather": {"parallel__sequence_layout": "documents", "parallel__sequence_keep": False},
    "fused shard": {"parallel__data": "shard", "parallel__sequence_heads": 1},
    "masked gather": {},
    "translation gather": {"parallel__data": "shard"},
    "dropped replicate": {},
    "dropped shard": {"parallel__data": "shard"},
    "updates ring": {"parallel__sequence_method": "ring"},
    "standard gather": {},
    "fused auto": {"parallel__sequence_method": "auto"},
}
WAYS_OF_FOUR: dict[str, dict[str, Any]] = {
    "fused hybrid": {"parallel__data": "hybrid"},
    "calm replicate": {"parallel__sequence_layout": "contiguous"},
}


def trees(folder: Path) -> dict[str, dict[str, Any]]:
    plain = change(
        base(folder), train__steps=STEPS, train__micro_batches=2, train__eval_every=3, model__dropout=0.0,
        parallel__sequence_method="gather",
    )  # fmt: skip
    masked = change(
        plain, data__task="masked", model__kind="encoder", model__norm_order="post", model__embed_norm=True,
        techniques__fused={},
    )  # fmt: skip
    translation = change(
        plain, data__task="translation", data__train=str(write_pairs(folder / "pairs")), data__languages=["xx", "yy"],
        data__max_tokens=64, data__held_out=0.2, data__seq_len=64, model__kind="encoder-decoder", model__max_len=64,
        model__positions="sinusoidal", model__dropout=0.1, model__label_smoothing=0.1, techniques__fused={},
    )  # fmt: skip
    fused = change(
        plain, techniques__fused={}, model__dropout=0.1, model__activation_dropout=0.1, model__positions="rotary",
        model__kv_heads=2,
    )  # fmt: skip
    drop = {"theta": 0.3, "schedule": "constant", "index": "text"}
    return {
        "calm": plain,
        "fused": fused,
        "masked": masked,
        "translation": translation,
        "dropped": change(fused, model__layers=4, techniques__layer_drop=drop),
        "updates": change(fused, model__layers=4, techniques__layer_drop=drop | {"scale": "update"}),
        "standard": change(fused, techniques__standardize={"weight": 10.0, "warmup": 0, "stride": 1}),
    }


def grad_norms(folder: Path) -> list[float]:
    return [event["grad_norm"] for event in read_events(folder) if "grad_norm" in event]


def job(tree: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"config": change(tree), **options}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequence")
    one = trees(folder)
    two = {way: change(one[way.split()[0]], parallel__sequence=2, **changes) for way, changes in WAYS.items()}
    jobs = {way: job(tree) for way, tree in two.items()}
    jobs["too few"] = job(change(one["calm"], parallel__sequence=4))
    jobs["left"] = job(two["fused gather"], stop_after=2)
    launch(jobs, folder / "two", 2)
    jobs = {
        way: job(change(one[way.split()[0]], parallel__sequence=2, **changes)) for way, changes in WAYS_OF_FOUR.items()
    }
    jobs["uneven"] = job(change(one["calm"], parallel__sequence=2, train__micro_batches=1, data__batch_size=1))
    launch(jobs, folder / "four", 4)
    jobs = {name: job(tree) for name, tree in one.items()}
    jobs["left"] = job(one["fused"], resume=True, folder=str(folder / "two" / "left"))
    launch(jobs, folder / "one", 1)
    return folder


@pytest.mark.parametrize("way", [*WAYS, *WAYS_OF_FOUR])
def test_processes_that_share_sequences_do_what_one_does(runs: Path, way: str) -> None:
    """With dropout too, where kernels draw masks by a token's place."""
    name, many = way.split()[0], runs / ("two" if way in WAYS else "four")
    assert samples(runs / "one", name, 1) == samples(many, way, 2 if way in WAYS else 4)
    assert len(losses(many / way)) == STEPS and len(eval_losses(many / way)) == 2
    assert losses(many / way) == pytest.approx(losses(runs / "one" / name), abs=1e-5)
    assert grad_norms(many / way) == pytest.approx(grad_norms(runs / "one" / name), rel=1e-4)
    assert eval_losses(many / way) == pytest.approx(eval_losses(runs / "one" / name), abs=1e-5)
    first, second = (checkpoint.load(folder / "checkpoints", STEPS) for folder in (runs / "one" / name, many / way))
    assert first.weights.keys() == second.weights.keys() and first.moments.keys() == second.moments.keys()
    for key, value in first.moments.items():
        torch.testing.assert_close(second.moments[key], value, atol=1e-5, rtol=1e-3)


def test_both_processes_read_all_samples_and_predict_other_tokens(runs: Path) -> None:
    """The control of the test above: were each given its own samples, or all of the tokens, losses would differ."""
    read = [json.loads((runs / "two" / f"fused gather.{rank}.json").read_text())["samples"] for rank in (0, 1)]
    assert read[0] == read[1] and len(read[0]) == 2 * STEPS
    read = [json.loads((runs / "four" / f"fused hybrid.{rank}.json").read_text())["samples"] for rank in range(4)]
    assert read[0] == read[1] and read[2] == read[3] and read[0].keys().isdisjoint(read[2].keys())


def test_a_run_of_two_processes_goes_on_in_one_without_the_technique(runs: Path) -> None:
    codes = [json.loads((runs / place).read_text())["code"] for place in ("two/left.0.json", "one/left.0.json")]
    assert codes == [75, 0]
    assert losses(runs / "two" / "left") == pytest.approx(losses(runs / "one" / "fused"), abs=1e-5)


@pytest.mark.parametrize("way", ["dropped replicate", "dropped shard", "updates ring"])
def test_all_leave_out_the_same_blocks(runs: Path, way: str) -> None:
    first, second = (json.loads((runs / "two" / f"{way}.{rank}.json").read_text())["blocks"] for rank in (0, 1))
    assert first == second and len({json.dumps(blocks) for blocks in first.values()}) > 1
    assert all(len(blocks) < 4 for (blocks,) in first.values())


@pytest.mark.parametrize("fused", [FusedConfig(), None], ids=["fused", "plain"])
def test_weights_of_many_processes_are_loaded_exactly_in_one(runs: Path, fused: FusedConfig | None) -> None:
    folder = runs / "four" / "fused hybrid"
    config = replace(load_run_config(folder), techniques=TechniquesConfig(fused=fused), parallel=ParallelConfig())
    parts, shot = build(config, Runtime(torch.device("cpu")), Mesh()), checkpoint.load(folder / "checkpoints", STEPS)
    checkpoint.restore_weights(parts.model, shot, weight_writer(parts.update.optimizer))
    checkpoint.restore_moments(parts.model, parts.update.optimizer, shot)
    again = checkpoint.snapshot(parts.model, parts.update.optimizer, shot.state)
    torch.testing.assert_close(again.weights, shot.weights, atol=0, rtol=0)
    torch.testing.assert_close(again.moments, shot.moments, atol=0, rtol=0)


@pytest.mark.slow
def test_compiled_models_share_sequences_too(runs: Path, tmp_path: Path) -> None:
    ways = {"calm": {}, "fused": {"parallel__data": "shard"}}
    jobs = {
        name: job(change(trees(tmp_path)[name], parallel__sequence=2, train__compile=True, **changes))
        for name, changes in ways.items()
    }
    launch(jobs, tmp_path / "compiled", 2, {})  # a compiler has processes of its own
    for name in ways:
        assert losses(tmp_path / "compiled" / name) == pytest.approx(losses(runs / "one" / name), abs=1e-5)


@pytest.mark.parametrize(("place", "ranks"), [("two/too few", 2), ("four/uneven", 4)])
def test_what_does_not_fit_is_refused_before_step_one(runs: Path, place: str, ranks: int) -> None:
    for rank in range(ranks):
        result = json.loads((runs / f"{place}.{rank}.json").read_text())
        assert (result["samples"], result["code"]) == ({}, 3)


def test_a_process_that_dies_during_a_gather_ends_the_others_with_a_clear_message(runs: Path) -> None:
    """Nobody but the others ends the survivor, as torchrun would before it could speak. The second process ends itself,
    without a word, when it should send keys and values for the tenth time."""
    sets = [
        f"run.dir={runs / 'lost'}", f"data.train={runs / 'text'}", "data.seq_len=32", "train.steps=100000",
        "run.timeout_s=60", "parallel.sequence=2", "parallel.sequence_method=gather",
    ]  # fmt: skip
    options = [part for override in sets for part in ("--set", override)]
    command = ("killed in a gather", "train", "demo", *options)
    group = find_server().start(runs / "lost.log", *command, processes=2, module="tests.distributed.failing")
    assert group.wait() == [7, -9]
    assert "rank 1 was lost without a word" in group.log, group.log
