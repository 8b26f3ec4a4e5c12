"""How long a run is: epochs become updates, and a run that learns nothing more ends."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stretto
from stretto import checkpoint
from stretto.batch import Batch
from stretto.cli import app
from stretto.config import TrainConfig, build_config
from stretto.data import Data, open_data
from stretto.errors import ConfigError, DataError
from stretto.length import count_steps, describe_epochs
from stretto.report import read_events
from stretto.train import train
from stretto.trained import load_run_config
from tests.corpora import write_images, write_pairs
from tests.runs import MakeConfig, eval_losses, losses

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


def open_task(task: str, make_config: MakeConfig, folder: Path) -> Data:
    tasks: dict[str, dict[str, Any]] = {
        "causal": {},
        "masked": {"model__kind": "encoder"},
        "translation": {
            "data__train": str(write_pairs(folder / "pairs")), "data__languages": ["xx", "yy"],
            "data__max_tokens": 64, "data__seq_len": 32, "model__kind": "encoder-decoder",
        },
        "instruct": {"data__train": str(EXAMPLES / "chat.jsonl"), "data__seq_len": 128, "model__max_len": 128},
        "classification": {"data__train": str(EXAMPLES / "questions.csv"), "model__kind": "encoder"},
        "images": {"data__train": str(write_images(folder / "images.npz")), "model__kind": "vit",
                   "model__image_size": 16, "model__patch": 8, "data__batch_size": 10},
    }  # fmt: skip
    config = make_config(data__task=task, **tasks[task])
    return open_data(config.data, seed=0, folder=folder, image_size=16)


@pytest.mark.parametrize("epochs", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("task", ["causal", "masked", "translation", "instruct", "classification", "images"])
def test_epochs_are_passes_over_the_data(make_config: MakeConfig, tmp_path: Path, task: str, epochs: float) -> None:
    """With so many updates every sample was read as often as asked for, and with one less some was not."""
    data, micro_batches = open_task(task, make_config, tmp_path), 3
    cfg = TrainConfig(epochs=epochs, micro_batches=micro_batches)
    steps = count_steps(cfg, data)
    read = [sample for i in range(steps * micro_batches) for sample in data.train_batch(i).samples]
    last = sum(len(data.train_batch(i).samples) for i in range((steps - 1) * micro_batches, steps * micro_batches))
    if task != "translation" or epochs >= 1:  # batches of as many tokens are not of as many pairs
        assert len(read) >= round(epochs * data.num_train) > len(read) - last
    if epochs >= 1:
        assert len(Counter(read)) == data.num_train and min(Counter(read).values()) >= math.floor(epochs)
    assert describe_epochs(cfg, data) and not describe_epochs(TrainConfig(), data)
    assert count_steps(TrainConfig(steps=7), data) == 7


class Nameless(Data):
    """Batches that do not say which samples they are of, and not how many there are in an epoch."""

    num_train, num_eval_batches, fingerprint = 100, 1, "nameless"

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        return Batch(torch.zeros(1), None, ())  # type: ignore[arg-type]

    def eval_batch(self, index: int) -> Batch:
        return self.train_batch(index)

    def describe(self) -> str:
        return "nameless"


class Counted(Nameless):
    batches_per_epoch = 12.5


def test_data_of_ones_own_may_say_what_an_epoch_is() -> None:
    cfg = TrainConfig(epochs=2, micro_batches=5)
    with pytest.raises(DataError, match="`batches_per_epoch`"):
        count_steps(cfg, Nameless())
    assert count_steps(cfg, Counted()) == 5
    assert count_steps(replace(cfg, epochs=0.001), Counted()) == 1, "a run makes an update"


class StopAt(stretto.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, step: int, numbers: Any) -> bool:
        return step == self.step


def test_a_resumed_run_of_epochs_has_as_many_updates(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"train__epochs": 0.3, "train__micro_batches": 2, "data__batch_size": 8}
    whole = stretto.train(make_config(**changes, run__dir=str(tmp_path / "whole")))
    steps = math.ceil(0.3 * 280 / 16)
    assert whole.step == max(whole.losses) == steps and not whole.stopped
    assert f"train.epochs = 0.3: {steps} updates, 17.5 for each pass over 280 samples" in capsys.readouterr().out
    assert load_run_config(whole.folder).train.steps == steps
    first = stretto.train(make_config(**changes), callbacks=[StopAt(2)])
    assert first.stopped and first.step == 2
    again = stretto.train(first.folder, resume=True)
    assert again.losses == whole.losses and not again.stopped
    longer = stretto.train(first.folder, resume=True, overrides={"train.epochs": 0.4})
    assert longer.step == math.ceil(0.4 * 280 / 16) > steps


DIVERGING = {"optim__lr": 3.0, "optim__warmup": 0, "train__steps": 12, "train__eval_every": 1}


def find_end(found: dict[int, float], patience: int) -> int:
    """The step after which `patience` evaluations in a row were no better than the best one before them."""
    for step in sorted(found):
        earlier = {s: loss for s, loss in found.items() if s <= step}
        best = min(earlier, key=lambda s: earlier[s])
        if step - best >= patience:
            return step
    raise AssertionError("the loss went on falling")


def weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "checkpoints", step).weights


def assert_same_weights(one: Path, two: Path, step: int) -> None:
    mine, theirs = weights_of(one, step), weights_of(two, step)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_that_learns_nothing_more_ends(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(make_config(**DIVERGING, run__dir=str(tmp_path / "whole"), checkpoint__every=1, checkpoint__keep=20))
    end = find_end(eval_losses(whole), 3)
    assert end < 12, "without patience the run went on"
    folder = train(make_config(**DIVERGING, train__patience=3))
    assert max(losses(folder)) == end and checkpoint.steps(folder / "checkpoints")[0] == end
    assert_same_weights(whole, folder, end)
    reason = f"stopped early after step {end} of 12: 3 evaluations in a row have no lower loss than"
    reason += f" that of step {end - 3} (train.patience = 3)"
    assert reason in capsys.readouterr().out and reason in (folder / "report.html").read_text()
    record = json.loads((folder / "exit.json").read_text())
    assert record["code"] == 0 and record["message"].startswith(reason)
    assert [event["finished"]["reason"] for event in read_events(folder) if "finished" in event] == [record["message"]]
    result = stretto.api.read_result(folder, 12)
    assert result.stopped and result.step == end and result.metrics["seconds"] > 0
    assert reason in CliRunner().invoke(app, ["check", str(folder)]).output

    again = CliRunner().invoke(app, ["train", str(folder), "--resume"])
    assert again.exit_code == 0 and reason in again.output and max(losses(folder)) == end
    assert json.loads((folder / "exit.json").read_text())["message"].startswith(reason)
    assert stretto.api.read_result(folder, 12).metrics["seconds"] > 0
    train(make_config(**DIVERGING, train__patience=0), resume=True)
    assert losses(folder) == losses(whole) and eval_losses(folder) == eval_losses(whole)
    assert_same_weights(whole, folder, 12)
    assert json.loads((folder / "exit.json").read_text())["message"] == ""


def test_an_interrupted_run_ends_early_at_the_same_step(make_config: MakeConfig, tmp_path: Path) -> None:
    whole = train(make_config(**DIVERGING, train__patience=3, run__dir=str(tmp_path / "whole")))
    end = max(losses(whole))
    cut = make_config(**DIVERGING, train__patience=3)
    stretto.train(cut, callbacks=[StopAt(end - 1)])
    assert max(losses(Path(cut.run.dir))) == end - 1
    train(cut, resume=True)
    assert losses(Path(cut.run.dir)) == losses(whole)
    assert_same_weights(whole, Path(cut.run.dir), end)


def test_patience_needs_evaluations() -> None:
    with pytest.raises(ConfigError, match=r"train\.patience = 2 .* set train\.eval_every"):
        build_config({"train": {"patience": 2}})
