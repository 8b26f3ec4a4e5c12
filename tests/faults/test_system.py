"""Errors of the system that a user can cause: clear words and the right code, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto import checkpoint
from stretto.checkpoint import drafts
from stretto.errors import CheckpointError, ConfigError, DiskFullError, StrettoError
from stretto.train import train
from tests.faults.configs import config_of
from tests.faults.fleet import Fleet, sets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("number", "kind"), [(5, CheckpointError), (27, DiskFullError), (28, DiskFullError), (30, CheckpointError),
                         (116, CheckpointError), (122, DiskFullError)],
)  # fmt: skip
def test_a_save_that_the_system_refuses(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StrettoError]
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number), "a file")

    monkeypatch.setattr(drafts, "sync", refuse)
    with pytest.raises(kind, match=r"earlier checkpoints are (whole|as they were)"):
        train(config_of(run, steps=6), resume=True)
    monkeypatch.undo()
    assert checkpoint.find_newest(run / "checkpoints") == 4


def test_a_lock_that_is_a_folder(run: Path) -> None:
    (run / "lock").unlink()
    (run / "lock").mkdir()
    with pytest.raises(CheckpointError, match="lock cannot be opened for writing"):
        train(config_of(run, steps=6), resume=True)


def test_a_record_that_cannot_be_written_stops_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "exit.json").unlink()
    (run / "exit.json").mkdir()
    train(config_of(run, steps=6), resume=True)
    assert "exit.json could not be written" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_only_be_read(run: Path) -> None:
    run.chmod(0o500)
    with pytest.raises(CheckpointError):
        train(config_of(run, steps=6), resume=True)
    run.chmod(0o700)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    command: list[str | bytes] = [sys.executable, "-m", "stretto", "train", "demo", "--set"]
    command.append(b"run.dir=" + bytes(tmp_path) + b"/\xff")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == ConfigError.exit_code and "not UTF-8" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("thorough")
@pytest.mark.fault("H1")
def test_the_group_cannot_be_made(fleet: Fleet) -> None:
    """The other process does not come: the same clear error as for one that is lost later."""
    _, group = fleet.start("run", processes=1, world=2, arguments=sets(run__timeout_s=2))
    assert group.wait() == [7] and "did not find each other" in group.log and "Traceback" not in group.log
