"""Models with the `fused` technique learn in two real processes (gloo) what they learn in one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.config import FusedConfig, TechniquesConfig
from stretto.mesh import Mesh
from stretto.optim import weight_writer
from stretto.runtime import Runtime
from stretto.train import build
from stretto.trained import load_run_config
from tests.corpora import write_images, write_pairs
from tests.distributed.processes import launch, samples
from tests.runs import base, change, eval_losses, losses

pytestmark = pytest.mark.dist
STEPS = 8
TASKS = ("causal", "translation", "masked", "images")
BF16 = 1e-2  # how far losses may be apart where bf16 rounds sums of another order, or the residual stream too


def trees(folder: Path) -> dict[str, dict[str, Any]]:
    """A pre-norm decoder, an encoder-decoder, a post-norm encoder and a ViT; and another decoder with bf16 weights."""
    causal = change(
        base(folder), model__activation_dropout=0.1, techniques__fused={},
        optim__eps=1e-4,  # else Adam blows up rounding where the true gradient is 0 (the bias of a key)
    )  # fmt: skip
    translation = change(
        causal, data__task="translation", data__train=str(write_pairs(folder / "pairs")), data__languages=["xx", "yy"],
        data__max_tokens=64, data__held_out=0.2, data__seq_len=64, model__kind="encoder-decoder", model__max_len=64,
        model__positions="sinusoidal", model__embed_scale=True, model__label_smoothing=0.1,
    )  # fmt: skip
    masked = change(
        causal, data__task="masked", model__kind="encoder", model__norm_order="post", model__embed_norm=True,
        model__token_types=2, model__attention_dropout=0.1, techniques__lean=True,
    )  # fmt: skip
    images = change(
        causal, data__task="images", data__train=str(write_images(folder / "images.npz")), data__held_out=0.2,
        model__kind="vit", model__image_size=16, model__patch=4,
    )  # fmt: skip
    split = change(
        causal, train__precision="bf16", techniques__fused={"weights": "split"}, model__positions="rotary",
        model__norm="rmsnorm", model__activation="swiglu", model__bias=False, model__kv_heads=2,
        model__dropout=0.0, model__activation_dropout=0.0,  # off and on drop other elements
    )  # fmt: skip
    return {"causal": causal, "translation": translation, "masked": masked, "images": images, "split": split}


def off(tree: dict[str, Any]) -> dict[str, Any]:
    return change(tree, techniques__fused=False)


def job(tree: dict[str, Any], **how: Any) -> dict[str, Any]:
    return {"config": change(tree), **how}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused")
    one = trees(folder)
    two = {f"{task}-{mode}": change(one[task], parallel__data=mode) for task in one for mode in ("replicate", "shard")}
    jobs = {name: job(tree) for name, tree in two.items()}
    # Images all have one shape, so there is little to compile.
    jobs["images-shard-compiled"] = job(change(two["images-shard"], train__compile=True))
    split = two["split-shard"]
    for name in ("same", "swapped", "alone", "alone-off"):  # it stops one step later, when all have heard of it
        jobs[name] = job(split, stop_after=3)
    jobs["same-on"] = job(split, resume=True, folder="same")
    jobs["swapped-off"] = job(off(split), resume=True, folder="swapped", stop_after=1)
    jobs["swapped-on"] = job(split, resume=True, folder="swapped")
    launch(jobs, folder / "two", 2)

    jobs = {name: job(tree) for name, tree in (one | {"off": off(one["causal"])}).items()}
    jobs["alone-on"] = job(split, resume=True, folder=str(folder / "two" / "alone"))
    jobs["alone-off"] = job(off(split), resume=True, folder=str(folder / "two" / "alone-off"))
    launch(jobs, folder / "one", 1)
    return folder


def code(runs: Path, name: str, rank: int = 0) -> int:
    return int(json.loads((runs / f"{name}.{rank}.json").read_text())["code"])


@pytest.mark.parametrize(
    ("task", "mode"),
    [*((task, mode) for task in TASKS for mode in ("replicate", "shard")), ("images", "shard-compiled")],
)
def test_two_processes_equal_one(runs: Path, task: str, mode: str) -> None:
    """With dropout too, compiled or not: its masks depend on the micro-batch alone."""
    one, two, name = runs / "one", runs / "two", f"{task}-{mode}"
    assert samples(one, task, 1) == samples(two, name, 2)
    assert len(losses(one / task)) == STEPS and len(eval_losses(one / task)) == 2
    assert losses(two / name) == pytest.approx(losses(one / task), abs=1e-5)
    assert eval_losses(two / name) == pytest.approx(eval_losses(one / task), abs=1e-5)
    first, second = (checkpoint.load(folder / "checkpoints", STEPS) for folder in (one / task, two / name))
    torch.testing.assert_close(second.weights, first.weights, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second.moments, first.moments, atol=1e-6, rtol=1e-4)


def test_it_was_on(runs: Path) -> None:
    """The control of the test above: the plain model draws other masks."""
    on, off = losses(runs / "one" / "causal"), losses(runs / "one" / "off")
    assert abs(on[1] - off[1]) > 1e-4


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_split_weights_learn_alike(runs: Path, mode: str) -> None:
    one, two = runs / "one" / "split", runs / "two" / f"split-{mode}"
    assert samples(runs / "one", "split", 1) == samples(runs / "two", f"split-{mode}", 2)
    assert losses(two) == pytest.approx(losses(one), abs=BF16)
    assert eval_losses(two) == pytest.approx(eval_losses(one), abs=BF16)


def test_split_weights_resume_exactly(runs: Path) -> None:
    assert [code(runs / "two", name, rank) for name in ("same", "same-on") for rank in (0, 1)] == [75, 75, 0, 0]
    whole, resumed = runs / "two" / "split-shard", runs / "two" / "same"
    assert losses(resumed) == losses(whole) and eval_losses(resumed) == eval_losses(whole)
    one, two = (checkpoint.load(folder / "checkpoints", STEPS) for folder in (whole, resumed))
    torch.testing.assert_close(two.weights, one.weights, atol=0, rtol=0)
    torch.testing.assert_close(two.moments, one.moments, atol=0, rtol=0)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in one.weights.values())


@pytest.mark.parametrize(
    ("folder", "legs"),
    [
        ("swapped", {"two/swapped": 75, "two/swapped-off": 75, "two/swapped-on": 0}),
        ("alone", {"two/alone": 75, "one/alone-on": 0}),
        ("alone-off", {"two/alone-off": 75, "one/alone-off": 0}),
    ],
    ids=["swapped", "alone", "alone-off"],
)
def test_split_weights_go_on_elsewhere(runs: Path, folder: str, legs: dict[str, int]) -> None:
    """With the technique off and on again, in one process, and there with it off."""
    assert {leg: code(runs / Path(leg).parent, Path(leg).name) for leg in legs} == legs
    found, whole = losses(runs / "two" / folder), losses(runs / "two" / "split-shard")
    assert found == pytest.approx(whole, abs=BF16)
    assert [found[step] for step in range(1, 4)] == [whole[step] for step in range(1, 4)]  # before the first stop


@pytest.mark.parametrize("fused", [FusedConfig(weights="split"), FusedConfig(), None], ids=["split", "fp32", "off"])
def test_split_weights_are_loaded_exactly_in_one_process(runs: Path, fused: FusedConfig | None) -> None:
    folder = runs / "two" / "split-shard"
    config = replace(load_run_config(folder), techniques=TechniquesConfig(fused=fused))
    parts = build(config, Runtime(torch.device("cpu")), Mesh())
    shot = checkpoint.load(folder / "checkpoints", STEPS)
    checkpoint.restore_weights(parts.model, shot, weight_writer(parts.update.optimizer))
    checkpoint.restore_moments(parts.model, parts.update.optimizer, shot)
    again = checkpoint.snapshot(parts.model, parts.update.optimizer, shot.state)
    torch.testing.assert_close(again.weights, shot.weights, atol=0, rtol=0)
    torch.testing.assert_close(again.moments, shot.moments, atol=0, rtol=0)
