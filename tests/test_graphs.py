"""Whole steps as CUDA graphs: the same numbers, and a clear answer where they cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint, graphs
from stretto.batch import clone, copy_into, shape_of
from stretto.config import Config
from stretto.errors import ConfigError, NonFiniteError
from stretto.report import read_events
from stretto.train import train
from tests.conftest import MakeConfig, write_images, write_pairs
from tests.test_fused import KINDS, make_batch

Run = Callable[..., tuple[list[float], checkpoint.Snapshot]]


@pytest.fixture
def run(make_config: MakeConfig, tmp_path: Path) -> Run:
    """Losses and the last checkpoint of a run with dropout everywhere."""

    def run(name: str, resume: bool = False, **changes: Any) -> tuple[list[float], checkpoint.Snapshot]:
        folder = tmp_path / name
        defaults: dict[str, Any] = {
            "run__dir": str(folder), "run__device": "cuda", "train__steps": 50, "techniques__fused": {},
            "data__join_documents": True, "model__attention_dropout": 0.1, "model__activation_dropout": 0.1,
            "run__deterministic": True,
        }  # fmt: skip
        config: Config = make_config(**(defaults | changes))
        train(config, resume)
        losses = [event["loss"] for event in read_events(folder) if "loss" in event]
        return losses, checkpoint.load(folder / "checkpoints", config.train.steps)

    return run


def assert_equal(one: tuple[list[float], checkpoint.Snapshot], two: tuple[list[float], checkpoint.Snapshot]) -> None:
    assert one[0] == two[0]
    for mine, theirs in ((one[1].weights, two[1].weights), (one[1].moments, two[1].moments)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["fp32", "split", "bf16"])
def test_a_language_model_trains_bit_for_bit_as_without(run: Run, weights: str) -> None:
    fused = {"weights": weights, "moments": "bf16" if weights == "bf16" else "fp32"}
    extra: dict[str, Any] = {"techniques__fused": fused, "train__eval_every": 20}
    assert_equal(run("off", **extra), run("on", **extra, train__graphs=True))


@pytest.mark.gpu
def test_images_train_bit_for_bit_as_without(run: Run, tmp_path: Path) -> None:
    data: dict[str, Any] = {"data__task": "images", "data__train": str(write_images(tmp_path / "images.npz"))}
    data |= {"model__kind": "vit", "model__image_size": 16, "model__patch": 8, "data__join_documents": False}
    assert_equal(run("off", **data), run("on", **data, train__graphs=True))


@pytest.mark.gpu
def test_shapes_that_keep_changing_are_not_all_recorded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Translation in packed batches: some shapes come back, most do not, and there may be few graphs."""
    monkeypatch.setattr(graphs, "MOST", 2)
    monkeypatch.setattr(graphs, "TIMES", 2)
    prefix = str(write_pairs(tmp_path / "pairs"))
    data: dict[str, Any] = {"data__task": "translation", "data__train": prefix, "data__eval": prefix}
    data |= {"data__languages": ["xx", "yy"], "model__kind": "encoder-decoder", "data__max_tokens": 64}
    data |= {"data__join_documents": False, "model__attention_dropout": 0.0}
    assert_equal(run("off", **data), run("on", **data, train__graphs=True))


@pytest.mark.gpu
def test_a_resumed_run_records_at_another_step_and_ends_with_the_same_bits(
    run: Run, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "TIMES", 3)
    options: dict[str, Any] = {"train__graphs": True, "optim__schedule": "constant", "train__steps": 12}
    whole = run("whole", **options)
    run("parts", **(options | {"train__steps": 7}))
    parts = run("parts", **options, resume=True)
    assert_equal(whole, parts)


@pytest.mark.gpu
def test_a_cancelled_update_is_cancelled_in_a_graph_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update ruins the weights; the second step is recorded, and its gradient is not finite."""
    monkeypatch.setattr(graphs, "TIMES", 2)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    with pytest.raises(NonFiniteError, match="none was applied"):
        run("on", train__graphs=True, optim__lr=1e30, optim__clip=0.0)
    assert len(replays) == 1


def test_they_say_why_they_cannot_be_used(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.graphs: they need a GPU; .*techniques\.fused.*; .*micro_batches"):
        train(make_config(train__graphs=True, train__micro_batches=2))


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder", "vit"])
def test_batches_of_one_shape(name: str) -> None:
    one, other = (make_batch(KINDS[name], seed=seed) for seed in (0, 50))
    if name == "encoder":
        assert shape_of(one) != shape_of(other)  # another number of labels
        return
    assert shape_of(one) == shape_of(other)
    assert name == "vit" or shape_of(one) != shape_of(make_batch(KINDS[name], "padded"))
    own = clone(one)
    copy_into(own, other)
    for role in ("labels", "pixels"):
        mine, wanted, first = (getattr(batch, role) for batch in (own, other, one))
        assert wanted is None or (torch.equal(mine, wanted) and mine is not first)
    if own.inputs is not None and other.inputs is not None:
        assert torch.equal(own.inputs.ids, other.inputs.ids) and not torch.equal(own.inputs.ids, one.inputs.ids)  # type: ignore[union-attr]
