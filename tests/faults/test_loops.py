"""Runs that are started again: in a folder that is in use or was left behind, after a kill, after the same failure."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stretto.train
from stretto import checkpoint
from stretto.ending import MOST_ATTEMPTS
from stretto.errors import CheckpointError, DataError, RepeatedFailure
from stretto.launch import find_first_cause, may_go_better
from stretto.report import EVENTS, read_events
from stretto.report.page import write_page
from stretto.train import train
from tests.faults.configs import config_of
from tests.faults.conftest import Tally
from tests.faults.fleet import Fleet, sets
from tests.runs import PATIENCE_S

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]


# L1: locks and clocks.


def start_waiting(fleet: Fleet, name: str) -> tuple[Path, Any]:
    run, group = fleet.start(name, faults=[("step", "wait", 0, 2)], arguments=sets(train__steps=100))
    group.wait_for("@step 0")
    return run, group


@pytest.mark.fault("L1")
def test_two_runs_in_one_folder_and_the_lock_of_a_killed_one(fleet: Fleet) -> None:
    run, group = start_waiting(fleet, "run")
    owner = f"process {group.pids[0]} on "
    with pytest.raises(CheckpointError, match=f"in use by {owner}"):
        train(config_of(run, steps=8), resume=True)
    group.send(signal.SIGKILL, 0)
    assert group.wait() == [-signal.SIGKILL] and not (run / "exit.json").exists()
    train(config_of(run, steps=8), resume=True)
    (event,) = [event for event in read_events(run) if "taken_over" in event]
    assert event["taken_over"].startswith(owner)
    assert (run / "lock").read_text() == "", "whoever ends in order leaves no owner"
    train(config_of(run, steps=9), resume=True)
    assert len([event for event in read_events(run) if "taken_over" in event]) == 1


@pytest.mark.control("L1")
def test_without_the_lock_two_runs_write_one_folder(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = start_waiting(fleet, "run")
    monkeypatch.setattr("fcntl.flock", lambda *args: None)
    train(config_of(run, steps=8), resume=True)


@pytest.mark.fault("L1")
@pytest.mark.parametrize("years", [10, -1])
def test_a_clock_that_jumps_does_not_spoil_the_report(run: Path, years: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_step, real = stretto.train.run_step, time.time

    def jump(parts: Any, number: int, *rest: Any) -> Any:
        if number == 6:
            monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400)
        return run_step(parts, number, *rest)

    monkeypatch.setattr(stretto.train, "run_step", jump)
    train(config_of(run, steps=8), resume=True)
    assert " days" not in write_page(run, "").read_text()
    times = [event["time"] for event in read_events(run) if "step" in event]
    assert times == sorted(times) and times[-1] - times[0] < 2 * PATIENCE_S


# L2: kills while the log is written.


def kill_while_logging(fleet: Fleet, number: int, *off: str) -> Path:
    run, group = fleet.start(f"run{number}", off=off, arguments=sets(train__steps=100_000, checkpoint__every=0))
    group.wait_for("step 8/")
    time.sleep(random.Random(number).random() / 5)
    group.send(signal.SIGKILL, 0)
    group.wait()
    return run


def log_is_whole(run: Path) -> bool:
    """Whether all lines but the last can be read, and each step is there once."""
    *lines, _ = (run / EVENTS).read_bytes().split(b"\n")
    try:
        events = [json.loads(line) for line in lines]
    except ValueError:
        return False
    steps = [event["step"] for event in events if "loss" in event]
    return steps == list(range(1, len(steps) + 1)) and len(steps) > 4


@pytest.mark.fault("L2")
def test_a_run_is_killed_while_it_writes_its_log(fleet: Fleet, whole: bool, tally: Tally) -> None:
    for number in range(20 if whole else 3):
        run = kill_while_logging(fleet, number)
        assert log_is_whole(run)
        tally("kills", 1)
    train(config_of(run, steps=8), resume=True)
    assert [event["step"] for event in read_events(run) if "loss" in event] == list(range(1, 9))


@pytest.mark.usefixtures("thorough")
@pytest.mark.control("L2")
def test_a_log_that_is_written_anew_each_time_is_torn(fleet: Fleet) -> None:
    run, group = fleet.start("run", off=("one line at a time",), arguments=sets(train__steps=100_000))
    group.wait_for("step 8/")
    size = len(group.log)
    while "@rewriting" not in group.log[size:]:
        time.sleep(0.01)
    group.send(signal.SIGKILL, 0)
    group.wait()
    assert not log_is_whole(run)


# L3: the same failure again and again.


def fail_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> list[int]:
    """Has every run fail after so many steps; the steps that were begun."""
    begun: list[int] = []
    run_step = stretto.train.run_step

    def run(parts: Any, number: int, *rest: Any) -> Any:
        begun.append(number)
        if number == step:
            raise error
        return run_step(parts, number, *rest)

    monkeypatch.setattr(stretto.train, "run_step", run)
    return begun


def attempt(folder: Path, times: int, error: type[Exception], **options: Any) -> None:
    config = config_of(folder, steps=8)
    config = replace(config, **{key: replace(getattr(config, key), **value) for key, value in options.items()})
    for _ in range(times):
        with pytest.raises(error):
            train(config, resume=True)


@pytest.mark.fault("L3")
def test_the_same_failure_three_times_is_enough(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = fail_at(monkeypatch, 5, DataError("a torn file"))
    attempt(run, MOST_ATTEMPTS, DataError)
    assert json.loads((run / "exit.json").read_text())["attempts"] == MOST_ATTEMPTS == 3
    count = len(begun)
    with pytest.raises(RepeatedFailure, match=r"3 attempts .* after step 5: DataError \(code 4\): a torn file"):
        train(config_of(run, steps=8), resume=True)
    attempt(run, 2, RepeatedFailure)  # it stays so
    assert len(begun) == count, "no step was begun"
    attempt(run, 1, DataError, optim={"lr": 1e-2}, run={"timeout_s": 99.0})  # something was changed
    assert json.loads((run / "exit.json").read_text())["attempts"] == 1
    monkeypatch.undo()
    fail_at(monkeypatch, 6, DataError("a torn file"))
    attempt(run, 2, DataError)
    (run / "exit.json").unlink()
    attempt(run, 3, DataError)
    attempt(run, 1, RepeatedFailure)
    (run / "exit.json").unlink()
    monkeypatch.undo()
    train(config_of(run, steps=8), resume=True)


@pytest.mark.fault("L3")
def test_progress_and_stops_are_no_repetition(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (4, 5, 6, 7):
        fail_at(monkeypatch, step, DataError("a torn file"))
        attempt(run, 1, DataError)
        assert json.loads((run / "exit.json").read_text())["attempts"] == 1
        monkeypatch.undo()


@pytest.mark.usefixtures("thorough")
@pytest.mark.dist
@pytest.mark.fault("L3")
def test_the_same_failure_of_another_process_is_counted_too(fleet: Fleet) -> None:
    for attempts in range(MOST_ATTEMPTS + 1):
        _, group = fleet.start("run", processes=2, faults=[("step", "data", 1, 3)], arguments=sets(checkpoint__every=0))
        codes = group.wait()
        # The store is the first process's: when it refuses, the other may be too late to read why.
        assert codes == [4, 4] if attempts < MOST_ATTEMPTS else codes in ([6, 6], [6, 7]), group.log
    assert "3 attempts have ended alike after step 6: DataError" in group.log


@pytest.mark.control("L3")
def test_without_the_count_a_run_fails_for_ever(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.ending.MOST_ATTEMPTS", 10**9)
    begun = fail_at(monkeypatch, 4, DataError("a torn file"))
    attempt(run, 5, DataError)
    assert len(begun) == 5


@pytest.mark.parametrize("text", ["5", "[]", '{"attempts": "x"}', "{", "\xff", "[" * 100_000])
def test_a_record_that_is_damaged_stops_nothing(run: Path, text: str) -> None:
    (run / "exit.json").write_text(text, encoding="latin-1")
    train(config_of(run, steps=6), resume=True)


# The launcher.


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([], 0),
        ([75, 75], 75),
        ([75, -9], 75),
        ([7, 4], 4),
        ([7, -9], 137),
        ([7, -15], 7),
        ([7, 7], 7),
        ([8, 75], 8),
        ([-11, 7], 139),
        ([130, 130], 130),
    ],
)
def test_the_code_of_the_first_cause(codes: list[int], code: int) -> None:
    assert find_first_cause(codes) == code


def test_only_what_may_go_better_is_started_again() -> None:
    again = {code for code in range(1, 256) if may_go_better(code)}
    assert {1, 7, 137, 139, 143} <= again
    assert not again & {2, 3, 4, 5, 6, 8, 9, 75, 130}


def launch(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto", "launch", "-n", "2", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.usefixtures("thorough")
@pytest.mark.dist
@pytest.mark.fault("L3")
def test_a_mistake_is_not_repeated_and_its_code_survives(fleet: Fleet, tmp_path: Path) -> None:
    done = launch("--restarts", 3, "train", fleet.recipe, *sets(run__dir=tmp_path / "run", data__train="nowhere"))
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if "nowhere" in line]) <= 2, "each process says it once"
    assert "start 2" not in done.stderr


@pytest.mark.usefixtures("thorough")
@pytest.mark.dist
@pytest.mark.fault("L3")
def test_what_was_killed_is_started_again(fleet: Fleet, tmp_path: Path) -> None:
    target, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "stretto", "launch", "-n", "2", "--restarts", "1", "train", str(fleet.recipe)]
    with log.open("w") as output:
        command += sets(run__dir=target, train__steps=4000, checkpoint__every=100)
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        while launcher.poll() is None and "step 110/" not in log.read_text():
            time.sleep(0.05)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        assert launcher.wait(PATIENCE_S) == 0, log.read_text()
    assert "start 2 of at most 2" in log.read_text() and checkpoint.steps(target / "checkpoints")[0] == 4000
    starts = [event for event in read_events(target) if "environment" in event]
    assert len(starts) == 2, "the second went on where the first was killed"
