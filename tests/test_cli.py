"""The command line as a user meets it: help at once, errors in one line, exit codes by kind, nothing lost on Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto import cli
from stretto.report import read_events
from tests.corpora import write_corpus, write_pairs
from tests.runs import PATIENCE_S, find_imported

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "matplotlib", "tensorboard", "datasets")


def test_help_and_recipes_import_nothing_heavy() -> None:
    code = (
        "import stretto, stretto.cli as cli; from typer.testing import CliRunner\n"
        "for arguments in (['--help'], ['train', '--help'], ['export', '--help'], ['recipes']):\n"
        "    assert CliRunner().invoke(cli.app, arguments).exit_code == 0"
    )
    assert find_imported(code, *HEAVY) == []


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["stretto", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "nowhere.toml"], 3, "nowhere.toml"),
        (["train", "demo", "--set", "train.stepz=3"], 3, "train.stepz"),
        (["train", "demo", "--set", "data.train=/no/such/corpus"], 4, "/no/such/corpus"),
        (["train", "translation", "--set", "data.train=/no/such/pair"], 4, "/no/such/pair"),
        (["train", "images", "--set", "data.train=/no/such/images"], 4, "/no/such/images"),
        (["eval", "no-run"], 5, "no-run"),
        (["generate", "no-run"], 5, "no-run"),
        (["report", "no-run"], 5, "no-run"),
        (["report", "no-run", "other-run"], 5, "no-run"),
        (["export", "no-run", "out"], 5, "no-run"),
        (["export", "no-run", "out", "--to", "onnx"], 2, "--to"),
        (["train", "demo", "--set", "model.init=/no/such/model"], 3, "/no/such/model"),
        (["train"], 2, "recipe"),
        (["launch", "-n", "2", "--machines", "2", "--machine", "2", "--meet", "HOST:1", "train", "demo"], 2, "0 to 1"),
        (["eval", "no-run", "--beam", "0"], 2, "--beam"),
        (["generate", "no-run", "--top-k", "-1"], 2, "--top-k"),
    ],
)
def test_one_clear_line_and_an_exit_code_by_kind(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *arguments) == code
    output = capsys.readouterr().err
    assert words.lower() in output.lower() and "Traceback" not in output


def start(recipe: str, folder: Path, *overrides: str, resume: bool = False) -> subprocess.Popen[str]:
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "stretto", "train", recipe, "--set", f"run.dir={folder}", *sets]
    return subprocess.Popen(
        command + ["--resume"] * resume, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "events.jsonl").exists() and any(e.get("step", 0) >= step for e in read_events(folder)):
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"the run did not reach step {step}: {process.communicate()[0]}")


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path) -> None:
    corpus = f"data.train={write_corpus(tmp_path / 'text')}"
    small = [corpus, "model.layers=1", "data.seq_len=32", "train.steps=300", "train.log_every=5", "train.eval_every=0"]
    small += ["model.dropout=0.1"]
    run, undisturbed = tmp_path / "run", start("demo", tmp_path / "whole", *small)
    first = start("demo", run, *small)
    wait_for_step(run, 10, first)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 75 and "--resume" in output and "Traceback" not in output
    stopped = max(event.get("step", 0) for event in read_events(run))
    second = start("demo", run, *small, resume=True)
    output, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, output
    output, _ = undisturbed.communicate(timeout=PATIENCE_S)
    assert undisturbed.returncode == 0, output
    losses = [
        {event["step"]: event["loss"] for event in read_events(folder) if "loss" in event}
        for folder in (run, tmp_path / "whole")
    ]
    assert list(losses[0]) == [1, *range(5, 301, 5)] and stopped < 300
    assert losses[0] == losses[1], "bit for bit, in new processes"


def test_a_run_is_exported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"data.train={write_corpus(tmp_path / 'text')}", f"run.dir={tmp_path / 'run'}", "run.device=cpu"]
    sets += ["model.layers=1", "model.positions=learned", "data.seq_len=32", "train.steps=4", "checkpoint.every=2"]
    assert exit_code(monkeypatch, "train", "demo", *(part for key in sets for part in ("--set", key))) == 0
    export = ("export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "out"))
    assert exit_code(monkeypatch, *export, "--step", "2") == 0
    assert f"{tmp_path / 'out'}: step 2 of" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert exit_code(monkeypatch, *export) == 5
    assert "not an empty folder" in capsys.readouterr().err
    assert exit_code(monkeypatch, *export, "--step", "3") == 5
    assert "step 3" in capsys.readouterr().err


def test_translation_files_of_unequal_length_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_pairs(tmp_path / "pairs")
    with (tmp_path / "pairs.yy").open("a") as file:
        file.write("one more\n")
    arguments = ["train", "translation", "--set", f"data.train={prefix}", "--set", 'data.languages=["xx", "yy"]']
    assert exit_code(monkeypatch, *arguments, "--set", f"run.dir={tmp_path / 'run'}") == 4
    output = capsys.readouterr().err
    assert "pairs.xx" in output and "pairs.yy" in output and "61" in output
