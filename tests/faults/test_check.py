"""`stretto check`: what it says of a run folder, spoiled or not; and that it writes nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.check import check_run
from stretto.checkpoint.verify import name_step
from stretto.cli import app
from stretto.config import load_config
from stretto.errors import CheckpointError
from stretto.train import train
from tests.faults.configs import config_of
from tests.faults.disks import flip


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def spoil_newest(run: Path) -> None:
    flip(run / "checkpoints" / name_step(4) / "model.safetensors")


def spoil_all(run: Path) -> None:
    for step in (2, 4):
        flip(run / "checkpoints" / name_step(step) / "state.json")


def remove_data(run: Path) -> None:
    config = load_config(run / "config.toml")
    (run / "config.toml").write_text((run / "config.toml").read_text().replace(config.data.train, "/not/there"))


def want_more(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("steps = 4", "steps = 9"))


# What is done to a run that is finished; whether it can still go on, or be used; words that are said then.
CASES: dict[str, tuple[list[Callable[[Path], object]], bool, str]] = {
    "finished": ([], True, "finished: step 4"),
    "unfinished": ([want_more], True, "resumes after step 4 of 9"),
    "damaged": ([want_more, spoil_newest], True, "resumes after step 2 of 9"),
    "all damaged": ([spoil_all], False, "no checkpoint in .* can be used"),
    "none": ([lambda run: shutil.rmtree(run / "checkpoints")], True, "no checkpoint: resumes from the beginning"),
    "renamed": (
        [lambda run: (run / "checkpoints" / name_step(4)).rename(run / "checkpoints" / name_step(3))],
        False,
        "step-00000003 is step-00000004 by its manifest",
    ),
    "link": ([lambda run: (run / "report.html").rename(run / "x"), lambda run: (run / "report.html").symlink_to("x")],
             False, "report.html is a link to x"),
    "no configuration": ([lambda run: (run / "config.toml").unlink()], False, "is not a run folder"),
    "broken configuration": ([lambda run: (run / "config.toml").write_text("[")], False, "config.toml"),
    "data gone, finished": ([remove_data], True, "data: not there any more"),
    "data gone": ([want_more, remove_data], False, "the data are not there: data.train = '/not/there'"),
    "exit.json gone": ([lambda run: (run / "exit.json").unlink()], True, "goes on, or was killed"),
    "exit.json broken": ([lambda run: (run / "exit.json").write_text("[1]")], True, "last attempt: not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_run(run: Path, case: str) -> None:
    changes, usable, words = CASES[case]
    for spoil in changes:
        spoil(run)
    before = read_all(run)
    done = CliRunner().invoke(app, ["check", str(run)])
    said = done.stdout + str(done.exception or "")
    assert usable == (done.exception is None), said
    if not usable:
        assert isinstance(done.exception, CheckpointError) and done.exception.exit_code == 5
    assert re.search(words, said), said
    assert read_all(run) == before, "nothing is written"


def test_every_checkpoint_is_named(run: Path) -> None:
    spoil_newest(run)
    lines = check_run(run).lines
    assert any(line.startswith("step 4: damaged, model.safetensors does not match its SHA-256") for line in lines)
    assert any(line.startswith("step 2: whole, verified: 3 files, ") for line in lines)
    assert "best: step 2" in lines and "last attempt: exit code 0" in lines and "data: there" in lines


def test_what_it_says_is_what_a_resumed_run_does(run: Path) -> None:
    spoil_newest(run)
    want_more(run)
    assert "resumes after step 2 of 9" in check_run(run).lines
    train(config_of(run, steps=9), resume=True)
    assert "finished: step 9" in check_run(run).lines
