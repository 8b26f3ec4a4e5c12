"""The benchmark of what is approximate: its arithmetic, and whole comparisons of tiny models on a CPU."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import stretto.train
from bench import time_to_loss
from bench.curves import AROUND, compare, loss_at, make_tables, median_around, reach, read_curve, show
from bench.time_to_loss import app, choose_variants, mean_flops, set_up, vary
from stretto.config import Config, LayerDropConfig, build_config, load_config
from stretto.data import Data, open_data
from stretto.errors import ConfigError, Preempted
from stretto.flops import training_flops
from stretto.mesh import Mesh
from stretto.report import read_events
from stretto.techniques.layer_drop import level_at
from stretto.train import complete, train
from tests.corpora import write_corpus

pytestmark = pytest.mark.usefixtures("one_thread")
CURVE: dict[str, list[float]] = {
    "step": [1, 2, 3, 4],
    "seconds": [2.0, 4.0, 6.0, 8.0],
    "flops": [1.0, 2.0, 3.0, 4.0],
    "loss": [5.0, 4.0, 4.5, 3.0],
}
RECIPE = """
[run]
device = "cpu"
[data]
train = "{text}"
suffix = ".txt"
seq_len = 16
batch_size = 4
join_documents = true
[model]
layers = 6
width = 32
heads = 4
max_len = 32
norm_order = "{order}"
[optim]
lr = 1e-2
warmup = 2
[train]
eval_batches = 2
[techniques.fused]
"""


def write_recipe(folder: Path, order: str = "pre") -> Path:
    path = folder / "tiny.toml"
    path.write_text(RECIPE.format(text=write_corpus(folder / "text"), order=order))
    return path


def start(recipe: Path, out: Path, *options: str, steps: int = 10) -> Any:
    arguments = ["run", str(recipe), "--out", str(out), "--budget-steps", str(steps), *options]
    return CliRunner().invoke(app, arguments)


def test_a_straight_line_between_evaluations() -> None:
    assert loss_at(CURVE, "seconds", 3.0) == 4.5 and loss_at(CURVE, "flops", 3.5) == 3.75
    assert loss_at(CURVE, "seconds", 8.0) == 3.0
    assert math.isnan(loss_at(CURVE, "seconds", 1.0)) and math.isnan(loss_at(CURVE, "seconds", 8.1))
    assert reach(CURVE, "seconds", 4.25) == 3.5  # the first time, though it is higher again later
    assert reach(CURVE, "flops", 3.5) == pytest.approx(3 + 1 / 1.5)
    assert reach(CURVE, "seconds", 4.0) == 4.0 and reach(CURVE, "seconds", 6.0) == 2.0
    assert reach(CURVE, "seconds", 2.9) == math.inf


def test_comparison_of_hand_made_curves() -> None:
    def result(seconds: list[float], flops: list[float], loss: list[float]) -> dict[str, Any]:
        return {
            "layers": 2, "recording_s": 0.5, "wall_s": 20.0,
            "curve": {"step": [1, 2], "seconds": seconds, "flops": flops, "loss": loss},
        }  # fmt: skip

    plain, quick = result([5.0, 10.0], [50.0, 100.0], [4.0, 3.0]), result([4.0, 8.0], [30.0, 60.0], [4.2, 3.2])
    rows = compare({"plain": plain, "quick": quick})
    assert rows["plain"]["seconds_end"] == 8.0 and rows["plain"]["worst"] == 3.2
    assert rows["plain"]["seconds_loss"] == pytest.approx(3.4) and rows["quick"]["seconds_loss"] == 3.2
    assert rows["quick"]["seconds_gap"] == pytest.approx(-0.2) and rows["plain"]["seconds_gap"] == 0.0
    assert rows["plain"]["seconds_to"] == pytest.approx(9.0) and rows["quick"]["seconds_to"] == 8.0
    assert rows["quick"]["seconds_ratio"] == pytest.approx(8 / 9)
    assert rows["plain"]["flops_loss"] == pytest.approx(3.8) and rows["quick"]["flops_gap"] == pytest.approx(-0.6)
    assert rows["quick"]["flops_ratio"] == pytest.approx(60 / 90)
    slower = compare({"plain": plain, "quick": result([4.0, 8.4], [30.0, 60.0], [4.2, 3.2])})
    text = "\n".join(make_tables([rows, slower]))
    assert "loss after 8.2 s" in text and "s to loss 3.200" in text and "| 8.2 ± 0.3 |" in text
    assert text.count("| plain |") == text.count("| quick |") == 2


def test_cells() -> None:
    assert show([1.0, 3.0], ".1f") == "2.0 ± 1.4" and show([-1.0, -3.0], "+.1f") == "-2.0 ± 1.4"
    assert show([2.0], ".2f") == show([2.0, 2.0], ".2f") == "2.00"
    assert show([1.0, math.inf], ".1f") == show([math.nan], ".1f") == "-"


def test_accidents_do_not_count_as_time_of_steps() -> None:
    """100 log lines of 10 steps. The first compiles, another one waits for something; half-way, work halves."""
    events: list[dict[str, Any]] = []
    for number in range(100):
        flops, seconds = (1000.0, 2.0) if number < 50 else (500.0, 1.0)
        taken = {0: 60.0, 30: 10.0, 31: 10.0}.get(number, seconds)
        log = {"step": 10 * number + 10, "tokens": 80 * (number + 1)}
        events.append(log | {"tokens_per_s": 80 / taken, "flops_per_s": flops / taken})
        if number % 25 == 24:
            events.append({"step": 10 * number + 10, "eval_loss": 5.0 - number / 100})
    events.append({"finished": {"steps": 1000, "seconds": 224.0, "recording_s": 3.0}})
    found = read_curve(events)
    assert found["curve"]["step"] == [250, 500, 750, 1000]
    assert found["curve"]["seconds"] == pytest.approx([50.0, 100.0, 125.0, 150.0])
    assert found["curve"]["flops"] == pytest.approx([25000.0, 50000.0, 62500.0, 75000.0])
    assert found["recording_s"] == 3.0 and found["loop_s"] == 224.0


def test_the_median_is_of_the_nearest() -> None:
    values = np.arange(100.0)
    found = median_around(values)
    assert found[50] == 50.0 and found[0] == found[3] == AROUND // 2 and found[-1] == 99 - AROUND // 2
    assert median_around(np.array([3.0, 1.0, 2.0])).tolist() == [2.0] * 3


@pytest.fixture(scope="module")
def twelve_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Data]:
    folder = tmp_path_factory.mktemp("twelve")
    tree = {
        "data": {"train": str(write_corpus(folder / "text")), "suffix": ".txt", "seq_len": 16},
        "model": {"layers": 12, "width": 32},
    }
    config = set_up(build_config(tree), 400, "constant", None)
    data = open_data(config.data, seed=0, folder=folder / "data")
    return complete(config, data, Mesh()), data


@pytest.mark.parametrize("theta", [0.25, 0.5, 0.9])
def test_the_smaller_model_costs_what_dropping_costs(twelve_layers: tuple[Config, Data], theta: float) -> None:
    config, data = twelve_layers
    config = replace(config, techniques=replace(config.techniques, layer_drop=LayerDropConfig(theta=theta)))
    dropped, smaller = vary(config, "layer_drop", data), vary(config, "smaller", data)
    drop = dropped.techniques.layer_drop
    assert drop is not None and drop.theta == theta and smaller.techniques.layer_drop is None
    depths = [sum(drop.keep_probabilities(level_at(drop, step, 400), 12)) for step in range(400)]
    assert abs(smaller.model.layers - np.mean(depths)) < 0.6 and smaller.model.layers < 12
    counts = data.train_batch(0).counts
    layer = training_flops(config.model, counts) - training_flops(replace(config.model, layers=11), counts)
    assert abs(mean_flops(smaller, data) - mean_flops(dropped, data)) <= 0.5 * layer
    assert replace(smaller.model, layers=12) == config.model


def test_variants_differ_in_what_they_say_alone(twelve_layers: tuple[Config, Data]) -> None:
    config, data = twelve_layers
    plain = vary(config, "plain", data)
    assert plain == config and choose_variants("raptr,layer_drop") == ["plain", "layer_drop", "raptr"]
    for variant in choose_variants(",".join(time_to_loss.VARIANTS))[1:]:
        varied = vary(config, variant, data)
        assert varied != plain, variant
        same = replace(varied, model=plain.model, techniques=plain.techniques)
        assert same == plain and (varied.model == plain.model) == (variant not in ("smaller", "rmsnorm")), variant
    with pytest.raises(ConfigError, match="--variants drop: must be some of plain"):
        choose_variants("plain,drop")


Watch = Callable[[], list[list[tuple[Any, ...]]]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """What every run has read, in order."""
    runs: list[list[tuple[Any, ...]]] = []
    run_step = stretto.train.run_step

    def watched_train(config: Config) -> Path:
        runs.append([])
        return train(config)

    def watched_step(parts: Any, step: int, batches: Any, *rest: Any) -> Any:
        runs[-1] += [(index, batch.samples, batch.inputs.ids.tolist()) for index, batch in batches]
        return run_step(parts, step, batches, *rest)

    monkeypatch.setattr(time_to_loss, "train", watched_train)
    monkeypatch.setattr(stretto.train, "run_step", watched_step)
    return lambda: runs


def test_a_whole_comparison_interrupted_and_resumed(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out, names = write_recipe(tmp_path), tmp_path / "out", ["plain", "layer_drop", "smaller"]
    options = ["--variants", ",".join(names), "--seeds", "2"]

    def stop_in_the_fifth_run(*arguments: Any) -> Any:
        if len(watch()) == 5 and len(watch()[-1]) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    with monkeypatch.context() as patch:
        step = stretto.train.run_step
        patch.setattr(stretto.train, "run_step", stop_in_the_fifth_run)
        outcome = start(recipe, out, *options)
    assert isinstance(outcome.exception, Preempted), outcome.output
    assert "Finished seeds: 1." in outcome.output  # the first one; of the second, one run is there
    saved = json.loads((out / "time_to_loss.json").read_text())["recipes"]["tiny"]["runs"]
    assert [(run["variant"], run["seed"]) for run in saved] == [*((name, 0) for name in names), ("plain", 1)]

    outcome = start(recipe, out, *options)
    assert outcome.exit_code == 0, outcome.output
    assert len(watch()) == 7  # four, the interrupted one, and the two that were missing
    saved = json.loads((out / "time_to_loss.json").read_text())
    runs = {(run["variant"], run["seed"]): run for run in saved["recipes"]["tiny"]["runs"]}
    assert len(runs) == 6 and saved["environment"]["device"].startswith("CPU")
    read = dict(zip(runs, [*watch()[:4], *watch()[5:]], strict=True))
    for seed in (0, 1):
        assert read["plain", seed] == read["layer_drop", seed] == read["smaller", seed]
        assert len(read["plain", seed]) == 10
    assert read["plain", 0] != read["plain", 1]
    for (variant, seed), run in runs.items():
        curve = run["curve"]
        assert curve["step"] == list(range(1, 11)) and np.all(np.diff(curve["seconds"]) > 0), variant
        assert curve["loss"][-1] < curve["loss"][0] and run["wall_s"] > curve["seconds"][-1]
        events = read_events(out / "tiny" / f"{variant}-{seed}")
        assert curve["loss"] == [event["eval_loss"] for event in events if "eval_loss" in event]
        assert not (out / "tiny" / f"{variant}-{seed}" / "checkpoints").exists()
    work = {key: run["curve"]["flops"][-1] / runs["plain", key[1]]["curve"]["flops"][-1] for key, run in runs.items()}
    assert f"layer_drop {work['layer_drop', 0]:.3f} (6 layers), smaller {work['smaller', 0]:.3f}" in outcome.output
    assert runs["smaller", 0]["layers"] == 5 and work["layer_drop", 1] < 0.95
    assert "Finished seeds: 2." in (out / "time_to_loss.md").read_text() and "±" in outcome.output
    assert (out / "time_to_loss.png").read_bytes().startswith(b"\x89PNG")

    again = start(recipe, out, *options)
    assert len(watch()) == 7 and again.output.splitlines()[1:] == [
        line for line in outcome.output.splitlines()[1:] if not line.startswith(("5/6", "6/6"))
    ]
    other = start(recipe, out, *options, steps=12)
    assert isinstance(other.exception, ConfigError) and "another configuration" in str(other.exception)


def test_one_that_fails_has_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    options = ["--variants", "layer_drop,rmsnorm", "--seeds", "1"]
    outcome = start(write_recipe(tmp_path, order="post"), tmp_path / "out", *options, steps=2)
    assert outcome.exit_code == 0, outcome.output
    assert "layer_drop, seed 0: failed: " in outcome.output and "norm_order" in outcome.output
    assert outcome.output.count("| rmsnorm |") == 2 and "| layer_drop |" not in outcome.output
    assert not (tmp_path / "out" / "tiny" / "layer_drop-0" / "result.json").exists()


def test_prepared_data_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {path.name: path.read_bytes() for path in Path(os.__file__).parent.glob("*.py")}
    monkeypatch.setattr(time_to_loss, "find_sources", lambda: sources)
    outcome = CliRunner().invoke(app, ["prepare", str(tmp_path / "data"), "--megabytes", "3"])
    assert outcome.exit_code == 0 and outcome.output.count("98 documents") == 2, outcome.output
    files = sorted((tmp_path / "data").rglob("*"))
    assert [path.suffix for path in files].count(".tokens") == 2  # the recipes have other vocabularies
    for recipe in ("gpt2-small", "bert-base"):
        config = set_up(load_config(time_to_loss.RECIPES / f"{recipe}.toml"), 0, "constant", tmp_path / "data")
        data = open_data(config.data, seed=0, folder=tmp_path / recipe)
        assert len(data.train_batch(0).samples) == config.data.batch_size
        assert config.train.graphs == "on" and config.techniques.fused is not None
    assert sorted((tmp_path / "data").rglob("*")) == files
