"""What a run says when it begins, and the mistakes that it warns of."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stretto.notes
from stretto.batch import Counts
from stretto.cli import app
from stretto.config import build_config
from stretto.data import open_data
from stretto.flops import training_flops
from stretto.length import is_over
from stretto.mesh import Mesh
from stretto.notes import explain_start, find_warnings
from stretto.recipes import load_recipe
from stretto.report import read_events
from stretto.techniques import Techniques
from stretto.train import train
from tests.runs import MakeConfig

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_the_log_says_what_runs_and_where_it_resumes(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = make_config(techniques__layer_drop={}, train__steps=2, optim__warmup=1)
    folder = train(config, resume=True)
    first = capsys.readouterr()
    assert "techniques: layer_drop\n" in first.out and "has no checkpoint to resume from" in first.out
    assert "resumed" not in first.out and "compil" not in first.out and "warning" not in first.err
    moved = folder.rename(tmp_path / "moved")
    result = CliRunner().invoke(app, ["train", str(moved), "--resume", "--set", "train.steps=4"])
    assert result.exit_code == 0 and f"resumed at step 2 of 4 from {moved}: 2 steps are left" in result.output
    assert [event["step"] for event in read_events(moved) if "loss" in event] == [1, 2, 3, 4] and not folder.exists()
    again = CliRunner().invoke(app, ["train", str(moved), "--resume"])
    assert "resumed at step 4 of 4" in again.output and "no step is left" in again.output
    assert "techniques: none\n" in capture_start(make_config(run__dir=str(tmp_path / "plain"), train__steps=1), capsys)


def capture_start(config: stretto.Config, capsys: pytest.CaptureFixture[str]) -> str:
    train(config)
    return capsys.readouterr().out


def test_a_run_folder_is_not_trained_anew(make_config: MakeConfig) -> None:
    folder = train(make_config(train__steps=1))
    result = CliRunner().invoke(app, ["train", str(folder)])
    assert "add --resume" in str(result.exception)


def test_the_log_says_that_it_compiles(make_config: MakeConfig) -> None:
    lines = explain_start(make_config(train__compile=True), Mesh(), Techniques(), 0, False)
    assert any("compiling" in line and "first step" in line for line in lines)
    assert not any("compil" in line for line in explain_start(make_config(), Mesh(), Techniques(), 0, False))


def warnings_of(config: stretto.Config, folder: Path) -> list[str]:
    return find_warnings(config, open_data(config.data, seed=0, folder=folder), CPU)


def test_mistakes_are_warned_of(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(make_config(), tmp_path) == []
    (warning,) = warnings_of(make_config(optim__warmup=12), tmp_path)
    assert "optim.warmup = 12" in warning and "train.steps = 6" in warning and "50%" in warning
    assert warnings_of(make_config(optim__warmup=6), tmp_path) == []
    (warning,) = warnings_of(make_config(data__batch_size=256, train__micro_batches=4), tmp_path)
    assert re.search(r"reads 1,024 samples, and the data has \d+:", warning)
    large = make_config(model__preset="gpt2-small", model__max_len=1024, model__layers=12, model__width=768)
    assert warnings_of(large, tmp_path) == [], "six short steps are soon done"
    monkeypatch.setattr(stretto.notes, "measure_cpu", lambda: 1e11)
    long = make_config(
        model__preset="gpt2-small", model__layers=12, model__width=768, train__steps=100_000, checkpoint__every=1000
    )
    (warning,) = warnings_of(long, tmp_path)
    counts = Counts(64, 64, 64, 4 * 16**2)
    seconds = training_flops(long.model, counts) / (0.7 * 1e11)
    said = re.search(r"about ([\d.]+) s, and the run ([\d.]+) hours", warning)
    assert said and float(said[1]) == pytest.approx(seconds, rel=0.1), warning
    assert float(said[2]) == pytest.approx(seconds * 100_000 / 3600, rel=0.1)
    assert find_warnings(long, open_data(long.data, seed=0, folder=tmp_path), torch.device("meta")) == []


@pytest.mark.parametrize(
    ("changes", "harmless", "words"),
    [
        (
            {"optim__schedule": "wsd", "optim__warmup": 5, "optim__decay": 0.5},
            {"optim__schedule": "wsd", "optim__warmup": 3, "optim__decay": 0.5},
            ["no stable phase", "optim.warmup = 5", "0.5, which is 3 steps", "train.steps = 6"],
        ),
        (
            {"train__patience": 2, "train__eval_every": 2},
            {"train__patience": 2, "train__eval_every": 1},
            ["train.patience = 2 cannot end this run", "3 evaluations", "eval_every = 2", "train.steps = 6"],
        ),
        (
            {"train__steps": 5000},
            {"train__steps": 5000, "checkpoint__every": 1000},
            ["nothing is saved before the last of 5,000 steps", "checkpoint.every"],
        ),
        ({"train__steps": 6000}, {"train__steps": 6000, "train__eval_every": 10}, ["nothing is saved"]),
        ({"train__steps": 6000}, {"train__steps": 6000, "checkpoint__keep": 0}, ["nothing is saved"]),
    ],
)
def test_options_that_do_not_go_together_are_warned_of(
    make_config: MakeConfig, tmp_path: Path, changes: dict[str, Any], harmless: dict[str, Any], words: list[str]
) -> None:
    (warning,) = warnings_of(make_config(**changes), tmp_path)
    assert all(part in warning for part in words), warning
    assert warnings_of(make_config(**harmless), tmp_path) == []


def test_patience_that_is_warned_of_could_not_end_a_run(make_config: MakeConfig) -> None:
    """By the rule of the run itself: the earliest end is after the first evaluation and `patience` more."""
    for patience, every, steps in product((1, 2, 3), (1, 2, 5), range(2, 24)):
        cfg = make_config(train__patience=patience, train__eval_every=every, train__steps=steps).train
        ends = [step for step in range(every, steps, every) if is_over(cfg, step, step // every - 1)]
        assert bool(stretto.notes._look_at_patience(cfg)) == (not ends), (patience, every, steps)


def test_a_high_rate_for_trained_weights_is_warned_of(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(optim__lr=1e-3)
    trained = replace(config, model=replace(config.model, init="folder"))
    (warning,) = warnings_of(trained, tmp_path)
    assert "optim.lr = 0.001 is high" in warning
    assert warnings_of(replace(trained, optim=replace(config.optim, lr=1e-4)), tmp_path) == []


def test_gpus_that_do_nothing_are_warned_of(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config, gpu = make_config(), torch.device("cuda")
    data = open_data(config.data, seed=0, folder=tmp_path)
    (warning,) = find_warnings(config, data, gpu)
    assert "has 4 GPUs" in warning and "stretto launch -n 4" in warning
    assert find_warnings(config, data, gpu, world=4) == [] == find_warnings(config, data, CPU)


def test_the_speed_of_a_cpu_is_measured() -> None:
    assert 1e8 < stretto.notes.measure_cpu() < 1e14


def test_warnings_reach_the_user(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_config(optim__warmup=50, train__steps=1))
    assert "stretto: warning: optim.warmup = 50" in capsys.readouterr().err


def test_a_sample_begins_as_the_data_do(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = train(make_config(train__steps=1))
    prompt = load_recipe(folder).train.sample
    text = (tmp_path / "text" / "029.txt").read_text()
    assert prompt and text.startswith(prompt), "the last document is held out"
    assert prompt in (folder / "report.html").read_text()
    assert all("sample" not in path.read_text() for path in Path(stretto.recipes.__path__[0]).glob("*.toml"))
    said = train(make_config(train__steps=1, train__sample="dog", run__dir=str(tmp_path / "said")))
    assert load_recipe(said).train.sample == "dog"


def test_both_losses_say_over_how_many_batches_they_are(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train(make_config(train__steps=1, data__held_out=0.3))
    found = re.search(r"eval_loss [\d.]+  perplexity [\d.]+  \(2 of (\d+) batches\)", capsys.readouterr().out)
    assert found and int(found[1]) > 2
    page = (folder / "report.html").read_text()
    assert f"at step 1, 2 of {found[1]} batches" in page
    output = CliRunner().invoke(app, ["eval", str(folder)]).output
    assert f"batches: {found[1]} of {found[1]}; evaluations while it was trained: over 2\n" in output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("demoo", "did you mean 'demo'?"),
        ("causal_lm", "did you mean 'causal-lm'?"),
        ("translations.toml", "did you mean 'translation'?"),
        ("xyz", "(there are causal-lm, demo"),
    ],
)
def test_the_nearest_recipe_is_named(name: str, words: str) -> None:
    with pytest.raises(stretto.StrettoError, match=re.escape(words)):
        load_recipe(name)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(stretto.StrettoError, match=r"no config\.toml"):
        load_recipe(tmp_path)
    assert build_config({}) == load_recipe({})
