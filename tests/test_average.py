"""The running mean of the weights is what its formula says, is what is measured and loaded, and changes no update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import stretto
from stretto import checkpoint
from stretto.average import Average
from stretto.checkpoint import Snapshot
from stretto.cli import app
from stretto.config import FusedConfig, ModelConfig, OptimConfig, build_config
from stretto.errors import CheckpointError, ConfigError
from stretto.evaluate import measure
from stretto.model import build_model
from stretto.optim import set_learning_rate, weight_reader
from stretto.plan import explain_memory, find_choice, find_needs
from stretto.train import train
from stretto.trained import load_trained
from tests.models import build_adamw
from tests.runs import MakeConfig, eval_losses, losses

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
KINDS: list[dict[str, Any]] = [
    {},
    {"techniques__fused": True},
    {"techniques__fused": {"weights": "split"}, "train__precision": "bf16"},
    {"techniques__fused": {"weights": "bf16", "moments": "bf16"}, "train__precision": "bf16"},
]


def load(folder: Path, step: int) -> Snapshot:
    return checkpoint.load(folder / "checkpoints", step)


def means_of(shot: Snapshot) -> dict[str, Tensor]:
    return {name.removeprefix("mean/"): value for name, value in shot.moments.items() if name.startswith("mean/")}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys() and mine
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_that_of_the_formula(make_config: MakeConfig, tmp_path: Path, kind: dict[str, Any]) -> None:
    """From the weights of each step, as checkpoints have them, in fp64; and updates are those of a run without."""
    every: dict[str, Any] = {"checkpoint__every": 1, "checkpoint__keep": 20, "train__eval_every": 2}
    folder = train(make_config(train__ema=0.3, **every, **kind))
    expected = {name: value.double() for name, value in load(folder, 1).weights.items()}
    assert_equal(means_of(load(folder, 1)), load(folder, 1).weights)
    for step in range(2, 7):
        decay, shot = min(0.3, (step - 1) / (step + 9)), load(folder, step)
        for name, value in shot.weights.items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
            torch.testing.assert_close(means_of(shot)[name].double(), expected[name], rtol=1e-5, atol=1e-7)
    assert min(0.3, 5 / 15) == 0.3 > 4 / 14, "the last step is beyond the ramp"
    without = train(make_config(**every, **kind, run__dir=str(tmp_path / "without")))
    assert_equal(load(folder, 6).weights, load(without, 6).weights)
    assert losses(folder) == losses(without), "evaluations put the weights back, bit for bit"
    assert eval_losses(folder) != eval_losses(without)


def test_the_mean_is_what_is_measured_and_loaded(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(train__ema=0.9, train__eval_batches=0, checkpoint__every=1, checkpoint__keep=20)
    folder = train(config)
    assert "evaluations and samples are of a running mean of the weights" in capsys.readouterr().out
    best = load_trained(folder, CPU)
    assert_equal(dict(best.model.state_dict()), means_of(load(folder, best.step)))
    measured = measure(folder, 1)
    assert measured["eval_loss"] == pytest.approx(eval_losses(folder)[best.step], abs=1e-6)
    words = "weights: their running mean (train.ema = 0.9)\n"
    assert words in CliRunner().invoke(app, ["eval", str(folder)]).output
    written = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "hf"), "--step", "4"])
    assert written.exit_code == 0 and "step 4" in written.output and "running mean" in written.output
    again = stretto.train(
        {
            "model": {"init": str(tmp_path / "hf")},
            "data": {"train": config.data.train, "suffix": ".txt", "seq_len": 16},
        },
        overrides={"run.dir": str(tmp_path / "from"), "run.device": "cpu", "train.steps": 1, "optim.lr": 1e-30},
    )
    table = "embedding.token.weight"
    found, mean = load(again.folder, 1).weights[table], means_of(load(folder, 4))[table]
    assert torch.equal(found[: len(mean)], mean) and not torch.equal(mean, load(folder, 4).weights[table])
    plain = train(make_config(run__dir=str(tmp_path / "plain")))
    assert "running mean" not in CliRunner().invoke(app, ["eval", str(plain)]).output


class StopAt(stretto.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, step: int, numbers: Any) -> bool:
        return step == self.step


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[3]])
def test_it_is_resumed_exactly(make_config: MakeConfig, tmp_path: Path, kind: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"train__ema": 0.8, "train__eval_every": 2, **kind}
    whole = stretto.train(make_config(**changes, run__dir=str(tmp_path / "whole")))
    cut = make_config(**changes)
    for step in (2, 5):
        stretto.train(cut, callbacks=[StopAt(step)], resume=True)
    result = stretto.train(cut, resume=True)
    one, two = load(whole.folder, 6), load(result.folder, 6)
    assert_equal(one.weights, two.weights)
    assert_equal(one.moments, two.moments)
    assert whole.losses == result.losses and whole.eval_losses == result.eval_losses
    again = CliRunner().invoke(app, ["replay", str(result.folder), "--step", "6"])
    assert again.exit_code == 0 and "moments: equal" in again.output


def test_another_decay_is_another_run(make_config: MakeConfig) -> None:
    train(make_config(train__steps=1, optim__warmup=1))
    with pytest.raises(CheckpointError, match=r"train\.ema was 0\.0, is 0\.9"):
        train(make_config(train__steps=2, train__ema=0.9, optim__warmup=1), resume=True)


def test_the_weights_come_back_whatever_happens() -> None:
    model = build_model(ModelConfig(vocab=8, width=8, heads=2, layers=1), "cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = build_adamw(model, OptimConfig(), FusedConfig(weights="split"))
    average, read = Average(optimizer, 0.9), weight_reader(optimizer)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        set_learning_rate(optimizer, 0.1)
        optimizer.step()
        average.begin(step)
        average.update()
    before = {name: read(p).clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="in between"), average.in_place_of_weights(model):
        for name, p in model.named_parameters():
            assert torch.equal(read(p), average.means[p]) and not torch.equal(read(p), before[name])
        raise RuntimeError("in between")
    assert_equal({name: read(p) for name, p in model.named_parameters()}, before)


def test_its_bytes_are_in_the_account(make_config: MakeConfig) -> None:
    with_mean, without = (make_config(techniques__fused=True, model__vocab=64, train__ema=ema) for ema in (0.9, 0.0))
    needs = [find_needs(config) for config in (with_mean, without)]
    one, two = (
        each.predict(find_choice(config, each)) for each, config in zip(needs, (with_mean, without), strict=True)
    )
    size = sum(p.numel() for p in build_model(with_mean.model).parameters())
    assert one.average == one.peak - two.peak == 4 * size and two.average == 0
    assert any(line.startswith("average of weights") for line in explain_memory(with_mean))
    assert not any("average" in line for line in explain_memory(without))


def test_where_it_cannot_be_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.ema follows whole updates"):
        build_config({"train": {"ema": 0.9}, "parallel": {"pipeline": 2}})
    with pytest.raises(ConfigError, match=r"train\.ema = 1\.0 is a decay"):
        build_config({"train": {"ema": 1.0}})
