"""Images with two labels: the loss is that of soft labels, and runs with them are resumed exactly and learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import stretto
from stretto import checkpoint
from stretto.batch import Batch, Mix, copy_into, pack, shape_of
from stretto.cli import app
from stretto.config import FusedConfig
from stretto.data import open_data
from stretto.train import train
from tests.corpora import write_images
from tests.models import CLASSES, KINDS, build, build_on_cpu, loss_and_gradients, make_batch
from tests.runs import MakeConfig, eval_losses, losses

pytestmark = pytest.mark.usefixtures("one_thread")
VIT = replace(KINDS["vit"], label_smoothing=0.1)
MIXED: dict[str, Any] = {
    "data__aa": "rand-m9-mstd0.5-inc1", "data__reprob": 0.25, "data__mixup": 0.8, "data__cutmix": 1.0,
    "model__label_smoothing": 0.1,
}  # fmt: skip
MODEL: dict[str, Any] = {"data__task": "images", "model__kind": "vit", "model__image_size": 16, "model__patch": 4}


def make_mixed(shares: list[float]) -> tuple[Batch, Batch]:
    """A batch with a second label for each image, and the same without."""
    batch = make_batch(VIT)
    mix = Mix(batch.labels.roll(2), torch.tensor(shares, device=batch.labels.device))
    return replace(batch, mix=mix), batch


def test_the_loss_and_its_gradients_are_those_of_soft_labels() -> None:
    batch = make_mixed([0.3, 0.0, 1.0, 0.75, 0.5])[0].to(torch.device("cpu"))
    assert batch.pixels is not None and batch.mix is not None
    model, mix = build_on_cpu(VIT, torch.float64), batch.mix
    batch = replace(batch, pixels=batch.pixels.double())
    found = loss_and_gradients(model, batch)
    own, other = (F.one_hot(labels, CLASSES) for labels in (batch.labels, mix.labels))
    soft = mix.shares[:, None].double() * own + (1 - mix.shares[:, None]).double() * other
    model.zero_grad()
    loss = F.cross_entropy(model.logits(batch), soft, reduction="sum", label_smoothing=0.1)
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
    assert not torch.allclose(found["loss"], model(replace(batch, mix=None)))
    torch.testing.assert_close(model.eval()(batch, with_logits=True)[1], model.logits(batch))


@pytest.mark.parametrize("fused", [None, FusedConfig()])
def test_a_share_of_all_is_the_loss_of_one_label(fused: FusedConfig | None) -> None:
    batch, plain = make_mixed([1.0] * 5)
    model = build(VIT, fused)
    found, wanted = loss_and_gradients(model, batch), loss_and_gradients(model, plain)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_batches_have_one_shape_and_one_buffer(tmp_path: Path) -> None:
    """As CUDA graphs need them."""
    config = stretto.config.build_config(
        {"data": {"task": "images", "train": str(write_images(tmp_path / "x.npz")), "batch_size": 6, "mixup": 0.8,
                  "cutmix": 1.0, "mixup_prob": 0.5}, "model": {"kind": "vit", "image_size": 16}}
    )  # fmt: skip
    data = open_data(config.data, seed=0, folder=tmp_path, image_size=16)
    batches = [pack(data.train_batch(i)) for i in range(4)]
    assert len({str(shape_of(batch)) for batch in batches}) == 1
    copy_into(batches[0], batches[3])
    one, two = batches[0].mix, data.train_batch(3).mix
    assert one is not None and two is not None
    assert torch.equal(one.labels, two.labels) and torch.equal(one.shares, two.shares)
    assert data.eval_batch(0).mix is None


class StopAt(stretto.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, step: int, numbers: Any) -> bool:
        return step == self.step


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__micro_batches": 3, "train__ema": 0.8, "data__batch_size": 3},
        {"techniques__fused": {"weights": "split"}, "train__precision": "bf16"},
        {"techniques__layer_drop": {"gate": "sample"}, "techniques__fused": {}},
        {"techniques__standardize": {"stride": 1}},
        {"techniques__lean": {}, "techniques__fused": {}},
    ],
)
def test_runs_are_resumed_exactly(make_config: MakeConfig, tmp_path: Path, changes: dict[str, Any]) -> None:
    images = str(write_images(tmp_path / "images.npz"))
    changes = {**MODEL, "data__train": images, "data__augment": True, "data__batch_size": 5, **MIXED, **changes}
    whole = stretto.train(make_config(**changes, run__dir=str(tmp_path / "whole")))
    cut = make_config(**changes)
    for step in (2, 5):
        stretto.train(cut, callbacks=[StopAt(step)], resume=True)
    result = stretto.train(cut, resume=True)
    one, two = (checkpoint.load(run.folder / "checkpoints", 6) for run in (whole, result))
    assert [name for name in one.weights if not torch.equal(one.weights[name], two.weights[name])] == []
    assert whole.losses == result.losses and whole.eval_losses == result.eval_losses
    again = CliRunner().invoke(app, ["replay", str(result.folder), "--step", "6"])
    assert again.exit_code == 0 and "weights: equal" in again.output


def test_micro_batches_share_out_the_same_images(make_config: MakeConfig, tmp_path: Path) -> None:
    changes = {**MODEL, "data__train": str(write_images(tmp_path / "images.npz")), "model__dropout": 0.0, **MIXED}
    found = [
        losses(train(make_config(**changes, data__batch_size=size, train__micro_batches=15 // size, run__dir=folder)))
        for size, folder in ((15, str(tmp_path / "once")), (5, str(tmp_path / "three")))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def write_stripes(path: Path, count: int = 240, size: int = 16) -> Path:
    """Three classes, whatever part of an image is seen in which colours: lines across, lines down, and both."""
    random = np.random.default_rng(0)
    labels, images = np.arange(count) % 3, random.integers(0, 60, (count, size, size, 3), np.uint8)
    at, starts = np.arange(size), random.integers(0, 4, (count, 2))
    for image, label, (first, second) in zip(images, labels, starts, strict=True):
        across, down = ((at + first) % 4 < 2)[:, None], ((at + second) % 4 < 2)[None, :]
        image += (190 * (across if label == 0 else down if label == 1 else across ^ down)[..., None]).astype(np.uint8)
    np.savez(path, images=images, labels=labels)
    return path


def test_a_tiny_model_learns_from_mixed_images(make_config: MakeConfig, tmp_path: Path) -> None:
    changes = {**MODEL, "data__train": str(write_stripes(tmp_path / "stripes.npz")), "data__held_out": 0.25, **MIXED}
    config = make_config(
        **changes, data__augment=True, data__crop_scale=0.4, data__batch_size=32, model__dropout=0.0, optim__lr=3e-3,
        optim__warmup=20, train__steps=250, train__eval_batches=0, train__log_every=10,
    )  # fmt: skip
    result = stretto.train(config)
    assert result.metrics["accuracy"] > 0.8
    learned, measured = losses(result.folder), eval_losses(result.folder)
    assert min(learned.values()) > min(measured.values()), "of two labels and smoothed, and of one"
    assert np.mean(list(learned.values())[-5:]) < np.mean(list(learned.values())[:5]) - 0.1
