"""Delayed gradients in one process: exactly those that a pipeline would apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from bench.delays import OUTPUT, TABLE, Delayed, Variant, find_speed, main, read_variants
from stretto.batch import Batch
from stretto.build import build, run_step
from stretto.config import Config
from stretto.data import open_data
from stretto.errors import ConfigError
from stretto.mesh import Mesh
from stretto.optim import learning_rate, set_learning_rate
from stretto.runtime import Runtime
from stretto.techniques.technique import At
from stretto.train import complete
from tests.runs import MakeConfig

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = Runtime(torch.device("cpu"))
Batches = list[list[tuple[int, Batch]]]


@pytest.fixture
def setting(make_config: MakeConfig, tmp_path: Path) -> tuple[Config, Batches]:
    config = make_config(model__layers=4, optim__clip=0.0, techniques__fused=False)
    data = open_data(config.data, seed=0, folder=tmp_path, image_size=0)
    return complete(config, data, Mesh()), [[(i, data.train_batch(i))] for i in range(6)]


def run(setting: tuple[Config, Batches], variant: Variant, warmup: int = 0) -> tuple[Delayed, list[dict[str, Any]]]:
    """Training, and the gradients that each update has applied."""
    config, batches = setting
    delayed, applied = Delayed(build(config, CPU, Mesh()), config, variant, warmup), list[dict[str, Any]]()
    step = delayed.optimizer.step

    def record() -> None:
        applied.append({name: p.grad for name, p in delayed.parameters.items()})
        step()

    delayed.optimizer.step = record  # type: ignore[method-assign,assignment]
    for update, some in enumerate(batches):
        delayed.run(update, some)
    return delayed, applied


def test_without_delay_it_is_plain_training(setting: tuple[Config, Batches]) -> None:
    config, batches = setting
    parts = build(config, CPU, Mesh())
    for update, some in enumerate(batches):
        set_learning_rate(parts.update.optimizer, learning_rate(config.optim, update, config.train.steps))
        prepared = [(i, parts.prepare(batch, At(update, i))) for i, batch in some]
        run_step(parts, update, prepared, sum(batch.counts.labels for _, batch in some), world=1)
    for variant, warmup in ((Variant("1f1b", 4), 0), (Variant("pipelined", 4, ("warmup", "predict")), 6)):
        delayed, _ = run(setting, variant, warmup)
        for name, p in parts.model.named_parameters():
            torch.testing.assert_close(delayed.parameters[name], p, atol=2e-4, rtol=0)


@pytest.mark.parametrize("order", ["pipelined", "ouroboros"])
def test_each_module_gets_the_gradient_of_its_delay(
    setting: tuple[Config, Batches], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[dict[str, Tensor]]()
    compute = Delayed._compute_gradients
    monkeypatch.setattr(Delayed, "_compute_gradients", lambda *args: made.append(compute(*args)) or made[-1])
    delayed, applied = run(setting, Variant(order, 3, ("warmup",)), warmup=1)
    late = 1 if order == "pipelined" else 0
    assert delayed.owner["decoder.blocks.0.mlp.up.weight"] == 0 and delayed.owner["decoder.norm.weight"] == 2
    for update, gradients in enumerate(applied):
        for name, found in gradients.items():
            wait = 0 if update == 0 else 2 - delayed.owner[name]
            wanted = [made[update - wait][name]] if update == 0 or update - wait >= 1 else []
            if name == TABLE and (update == 0 or update - late >= 1):
                wanted.append(made[update - (late if update else 0)][OUTPUT])
            assert found is None if not wanted else torch.equal(found, sum(wanted[1:], wanted[0])), (update, name)


def test_2bw_computes_with_older_weights(setting: tuple[Config, Batches]) -> None:
    config, batches = setting
    delayed = Delayed(build(config, CPU, Mesh()), config, Variant("2bw", 2), 0)
    weights, seen = list[Tensor](), list[Tensor]()
    name = "decoder.norm.weight"
    delayed.model.decoder.norm.register_forward_pre_hook(
        lambda *_: seen.append(delayed.parameters[name].detach().clone())
    )
    for update, some in enumerate(batches[:4]):
        weights.append(delayed.parameters[name].detach().clone())
        delayed.run(update, some)
    assert not torch.equal(weights[1], weights[2])
    assert all(torch.equal(seen[update], weights[max(update - 1, 0)]) for update in range(4))


def test_prediction_goes_where_adamw_goes(setting: tuple[Config, Batches]) -> None:
    delayed, _ = run(setting, Variant("pipelined", 4, ("predict",)))
    name = "decoder.blocks.0.mlp.up.weight"
    weight, state = delayed.parameters[name], delayed.optimizer.state[delayed.parameters[name]]
    assert state["step"] == 3, "the first three updates had no gradient for it"
    rate = learning_rate(delayed.config.optim, 5, 6)
    mean, square = state["exp_avg"] / (1 - 0.9**3), state["exp_avg_sq"] / (1 - 0.95**3)
    torch.testing.assert_close(delayed.versions[-1][name], weight - 3 * rate * mean / (square.sqrt() + 1e-8))
    assert torch.equal(delayed.versions[-1]["decoder.norm.weight"], delayed.parameters["decoder.norm.weight"])


def test_speeds_and_names() -> None:
    assert find_speed(Variant("pipelined", 4)) == pytest.approx(4) and find_speed(
        Variant("ouroboros", 4)
    ) == pytest.approx(2)
    assert [variant.name for variant in read_variants("2bw+predict", [2])] == ["1f1b K=2", "2bw K=2+predict"]
    with pytest.raises(ConfigError, match="--variants 2bw\\+magic"):
        read_variants("2bw+magic", [2])


def test_a_small_comparison(make_config: MakeConfig, tmp_path: Path) -> None:
    make_config()
    app, out = typer.Typer(), tmp_path / "out"
    app.command()(main)
    words = ["demo", "--out", str(out), "--modules", "2", "--seeds", "1", "--variants", "2bw", "--warmup", "2"]
    sets = [f"data.train={tmp_path / 'text'}", "data.suffix=.txt", "data.seq_len=16", "data.batch_size=4",
            "model.width=32", "model.layers=2", "train.steps=4", "train.eval_batches=1", "train.sample="]  # fmt: skip
    words += [word for key in sets for word in ("--set", key)]
    first, again = (CliRunner().invoke(app, words, catch_exceptions=False).output for _ in range(2))
    assert "| 2bw K=2 | 2.00 |" in first and first.endswith(again), "the second time nothing is trained"
