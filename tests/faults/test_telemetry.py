"""What a run says about itself may be lost in any way: training goes on, and ends with the same weights."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto.train
from stretto import checkpoint
from stretto.config import dump_config
from stretto.errors import CheckpointError
from stretto.report import EVENTS, Report, read_events
from stretto.report.page import write_report
from stretto.train import train
from tests.faults.configs import config_of
from tests.runs import PATIENCE_S

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
STEPS = 8
ODD_LINES = {
    "a byte that is no UTF-8": b"\xff\n",
    "a number": b"5\n",
    "a text": b'"step"\n',
    "a list": b"[1]\n",
    "no step": b'{"step": null}\n',
    "a step in words": b'{"step": "two", "loss": 1.0}\n',
    "a step with parts": b'{"step": {"of": 3}}\n',
    "a step that is not a number": b'{"step": NaN}\n',
    "too deep": b"[" * 100_000 + b"\n",
    "too many digits": b'{"step": ' + b"1" * 5000 + b"}\n",
    "a torn line": b'{"step": 4, "lo\n',
    "zeros": bytes(64) + b"\n",
}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / "checkpoints", STEPS).weights


def assert_same_weights(one: Path, two: Path) -> None:
    mine, theirs = weights(one), weights(two)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def undisturbed(one_thread: None, trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("undisturbed") / "run"))
    return train(config_of(run, STEPS), resume=True)


@pytest.mark.fault("L4")
@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES.keys())
def test_a_log_with_an_odd_line_stops_neither_a_report_nor_a_resumed_run(run: Path, line: bytes) -> None:
    before = (run / EVENTS).read_bytes()
    (run / EVENTS).write_bytes(line + before + line)
    write_report(run, torch.device("cpu"))
    with Report(run, STEPS, resume_at=3, active=True) as report:
        report.event(step=4, loss=1.5)
    steps = [event["step"] for event in read_events(run) if isinstance(event.get("step"), int) and "loss" in event]
    assert steps == [1, 2, 3, 4], "the whole lines are there, and later ones are forgotten"


@pytest.mark.fault("L4")
def test_any_flipped_bit_costs_at_most_two_lines(run: Path) -> None:
    whole, choose = (run / EVENTS).read_bytes(), random.Random(0)
    count = len(read_events(run))
    for _ in range(200):
        spoiled = bytearray(whole)
        spoiled[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        (run / EVENTS).write_bytes(spoiled)
        assert len(read_events(run)) >= count - 2


@pytest.mark.fault("L4")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the thread that writes there
def test_a_spoiled_log_and_lost_folders_do_not_stop_a_resumed_run(
    run: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / EVENTS).open("ab") as file:
        file.writelines(ODD_LINES.values())
    run_step, count = stretto.train.run_step, 0

    def losing(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            (run / "tensorboard").rename(run / "lost")  # at once: a thread may be writing there
        return run_step(*args)

    monkeypatch.setattr(stretto.train, "run_step", losing)
    train(config_of(run, STEPS), resume=True)
    assert_same_weights(run, undisturbed)
    assert capsys.readouterr().err.count("warning: tensorboard failed") == 1
    assert [event["step"] for event in read_events(run) if "loss" in event][-4:] == [5, 6, 7, 8]


@pytest.mark.fault("L4")
def test_files_of_the_wrong_kind_cost_what_would_be_in_them(
    run: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("not a folder")
    for name in (EVENTS, "report.html"):
        (run / name).unlink()
        (run / name).mkdir()
    train(config_of(run, STEPS), resume=True)
    assert_same_weights(run, undisturbed)
    errors = capsys.readouterr().err
    assert all(errors.count(f"warning: {name} failed") == 1 for name in (EVENTS, "tensorboard", "report.html")), errors


@pytest.mark.fault("L4")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_nobody_has_to_read_the_output(trained_run: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Its reader goes away after two lines, the disk is full, or there is no output at all."""
    endings = {"head": "| head -n 2", "full": "> /dev/full", "closed": ">&- 2>&-"}
    runs: dict[str, subprocess.Popen[str]] = {}
    for name, ending in endings.items():
        folder = Path(shutil.copytree(trained_run, tmp_path / name))
        (tmp_path / f"{name}.toml").write_text(dump_config(config_of(folder, STEPS)))
        command = f"{sys.executable} -m stretto train {tmp_path / name}.toml --resume"
        runs[name] = subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {command} {ending}"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    for name, process in runs.items():
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{name}: {errors}"
        assert errors.count("warning: the output failed") == (name in ("head", "full")), f"{name}: {errors}"
        assert "Traceback" not in errors and "Exception ignored" not in errors
        assert_same_weights(tmp_path / name, undisturbed)


@pytest.mark.control("L4")
def test_a_report_that_raises_would_stop_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / EVENTS).unlink()
    (run / EVENTS).mkdir()
    monkeypatch.setattr(Report, "attempt", lambda self, sink, write: write())
    with pytest.raises((CheckpointError, OSError)):
        train(config_of(run, STEPS), resume=True)
