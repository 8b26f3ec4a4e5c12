"""The examples run as a user runs them, and learn."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.runs import PATIENCE_S

EXAMPLES = Path(__file__).parents[1] / "examples"
Run = Callable[..., list[float]]


def numbers(output: str) -> list[float]:
    """The numbers of the last line."""
    return [float(number) for number in re.findall(r"\d+\.\d+", output.strip().splitlines()[-1])]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None) -> Run:
    """Runs one in this process, which has imported the heavy packages already."""

    def start(name: str, *options: str) -> list[float]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return numbers(capsys.readouterr().out)

    monkeypatch.syspath_prepend(str(EXAMPLES))
    return start


def test_bert_on_the_command_line() -> None:
    command = [sys.executable, "examples/finetune_bert.py"]
    done = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    first, *_, last, accuracy = (numbers(line)[0] for line in done.stdout.splitlines())
    assert last < first / 4 and accuracy > 0.95


def test_gpt2_and_again_from_what_it_saved(run: Run, tmp_path: Path) -> None:
    before, after = run("finetune_gpt2", "--out", str(tmp_path / "first"))
    assert after < before / 3
    assert AutoModelForCausalLM.from_pretrained(str(tmp_path / "first")).config.n_layer == 2
    text = tmp_path / "lines.txt"
    text.write_text("the fox is cruel and the fox is cruel\n" * 40)
    model = ["--model", str(tmp_path / "first")]
    before, after = run("finetune_gpt2", *model, "--data", str(text), "--out", str(tmp_path / "second"))
    assert before < 2 and after < before


def test_marian(run: Run, tmp_path: Path) -> None:
    first, last, bleu = run("finetune_marian", "--out", str(tmp_path))
    assert last < first / 2 and bleu > 50


def test_vit_made_and_on_a_file(run: Run, tmp_path: Path) -> None:
    before, after = run("finetune_vit", "--out", str(tmp_path))
    assert before < 0.6 and after > 0.9
    labels = np.arange(200) % 2
    images = np.random.default_rng(0).integers(0, 100, (200, 16, 16, 3)) + 100 * labels[:, None, None, None]
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    _, after = run("finetune_vit", "--data", str(tmp_path / "images.npz"), "--out", str(tmp_path))
    assert after > 0.9
