"""Being asked to stop, in all the usual ways and in any phase of a run; and what is left to read about how it ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto.train
from stretto import checkpoint
from stretto.ending import recording_exit
from stretto.errors import DataError, NonFiniteError, PeerLostError, Preempted, StrettoError
from stretto.report import read_events
from stretto.runtime import Runtime, lock_folder
from stretto.train import train
from tests.faults.configs import config_of
from tests.faults.conftest import Tally
from tests.faults.fleet import Fleet, sets
from tests.runs import PATIENCE_S, eval_losses
from tests.server import Group

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
STEPS = 10
SOON_S = 60.0  # a stop that is heard takes seconds, also on a machine that others use; what is not broken off, minutes

# Each scenario is a process of its own, forked from one that has imported everything: signals, pauses before them, and
# what the main thread then does.
SCENARIOS: dict[str, tuple[list[tuple[int, float]], str, int]] = {
    "term": ([(signal.SIGTERM, 0)], "", 75),
    "hup": ([(signal.SIGHUP, 0)], "", 75),
    "usr1": ([(signal.SIGUSR1, 0)], "", 75),
    "int": ([(signal.SIGINT, 0)], "", 75),
    "term soon again": ([(signal.SIGTERM, 0), (signal.SIGTERM, 0.1), (signal.SIGTERM, 0.1)], "", 75),
    "int soon again": ([(signal.SIGINT, 0), (signal.SIGINT, 0.1)], "", 75),
    "term, then int": ([(signal.SIGTERM, 0), (signal.SIGINT, 2.5)], "", 75),
    "term later again": ([(signal.SIGTERM, 0), (signal.SIGTERM, 2.5)], "", -signal.SIGTERM),
    "hup later again": ([(signal.SIGHUP, 0), (signal.SIGHUP, 2.5)], "", -signal.SIGHUP),
    "int later again": ([(signal.SIGINT, 0), (signal.SIGINT, 2.5)], "", 130),
    "term, usr1 later": ([(signal.SIGTERM, 0), (signal.SIGUSR1, 2.5), (signal.SIGTERM, 0)], "", -signal.SIGTERM),
    # The main thread is in a call that Python cannot interrupt: the watch ends the process.
    "nothing to lose, in a library": ([(signal.SIGTERM, 0.5)], "hang early", 75),
    "int twice, in a library": ([(signal.SIGINT, 0.5), (signal.SIGINT, 2.5)], "hang", 130),
    "term twice, in a library": ([(signal.SIGTERM, 0.5), (signal.SIGTERM, 2.5)], "hang", 143),
    "once, in a library": ([(signal.SIGTERM, 0.5)], "work", 75),
}
WATCHER = """
import contextlib, json, os, signal, sys, threading, time
import torch
from stretto import runtime, signals
from tests.faults import plants

def send(numbers):
    for number, pause in numbers:
        time.sleep(pause)
        os.kill(os.getpid(), number)

def scenario(numbers, how, before):
    before()
    rt = runtime.Runtime(torch.device("cpu"))
    try:
        early = rt.interruptible() if "early" in how else contextlib.nullcontext()
        with signals.watching(rt, "rank 0", True, 600), early:
            if how:
                threading.Thread(target=send, args=(numbers,), daemon=True).start()
                if "hang" in how:
                    plants.wait_in_library()
                time.sleep(4)
            else:
                send(numbers)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(75 if rt.stop else 0)

def fork(numbers, how="", before=lambda: None):
    pid = os.fork()
    return pid or scenario(numbers, how, before)

signals.SAME_REQUEST_S, signals.GRACE_S = 2.0, 1.0
# changes
pids = {name: fork(*scenario) for name, scenario in json.load(sys.stdin).items()}
pids["nohup"] = fork([(signal.SIGHUP, 0)], "", lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}))
"""


def watch(scenarios: dict[str, Any], changes: str = "") -> tuple[dict[str, int], str]:
    """Exit codes by scenario, and what was said."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHER.replace("# changes", changes)], input=json.dumps(scenarios),
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.fault("S2")
def test_signals() -> None:
    """The first one asks, and soon after it is the same request; later it ends the process, wherever it is. nohup keeps
    its word."""
    codes, errors = watch({name: scenario[:2] for name, scenario in SCENARIOS.items()})
    assert codes == {name: scenario[2] for name, scenario in SCENARIOS.items()} | {"nohup": 0}
    assert "saving before the next step" in errors and "the same signal 2 s from now, or later" in errors


@pytest.mark.usefixtures("thorough")
@pytest.mark.control("S2")
def test_without_the_watch_a_library_keeps_the_process_alive() -> None:
    """The call is one that ends by itself: only then Python hears of the signals, and takes them for one."""
    name = "int twice, in a library"
    off = "signals.Watch.look = lambda self: None; plants.ITERATIONS = 2 * 10**7"
    codes, _ = watch({name: SCENARIOS[name][:2]}, off)
    assert codes[name] != SCENARIOS[name][2]


def read_exit(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "exit.json").read_text())
    return record


def newest(run: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint, but for the manifest and the state, which have versions and times."""
    folder = run / "checkpoints" / f"step-{checkpoint.steps(run / 'checkpoints')[0]:08d}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


# phase: who is delayed there, in which of its calls, and who is told to stop
PHASES: dict[str, tuple[str, int | None, int, int]] = {
    "hash": ("wait", 0, 1, 1),
    "tokenise": ("wait", 0, 1, 1),
    "verify": ("wait", 0, 1, 1),
    "build": ("wait", 0, 1, 1),
    "step": ("say", 1, 2, 1),
    "load": ("wait", 1, 4, 1),
    "evaluate": ("pause", None, 0, 1),
    "save": ("pause", 0, 1, 1),
}
QUICK = ("tokenise", "step", "evaluate")


def stop_in(fleet: Fleet, phase: str, name: str, *off: str) -> tuple[Path, Group]:
    """Two processes, one of which is told to stop in a phase; they end with code 75 and one checkpoint."""
    action, rank, call, told = PHASES[phase]
    arguments = sets(train__steps=STEPS, train__eval_every=3, train__eval_batches=0, checkpoint__every=4)
    shutil.copytree(fleet.origin, fleet.folder / name)
    if phase == "tokenise":
        shutil.rmtree(fleet.folder / name / "data")
    run, group = fleet.start(name, processes=2, faults=[(phase, action, rank, call)], off=off, arguments=arguments)
    group.wait_for(f"@{phase}")
    group.send(signal.SIGTERM, told)
    return run, group


@pytest.fixture(scope="module")
def undisturbed(fleet_of_module: Fleet) -> Path:
    arguments = sets(train__steps=STEPS, train__eval_every=3, train__eval_batches=0, checkpoint__every=4)
    run, group = fleet_of_module.start("undisturbed", processes=2, arguments=arguments)
    assert group.wait() == [0, 0], group.log
    return run


@pytest.mark.dist
@pytest.mark.fault("S1")
@pytest.mark.parametrize("phase", PHASES)
def test_one_process_is_told_to_stop(fleet: Fleet, undisturbed: Path, phase: str, whole: bool, tally: Tally) -> None:
    """In any phase all processes end with code 75, after one checkpoint; the resumed run has the bits of another."""
    if phase not in QUICK and not whole:
        pytest.skip("in `make faults`")
    run, group = stop_in(fleet, phase, "run")
    assert group.wait(SOON_S) == [75, 75], group.log
    record = read_exit(run)
    steps = checkpoint.steps(run / "checkpoints")
    assert (record["code"], record["cause"]) == (75, "Preempted")
    assert record["step"] in (steps[0], 0), "0: none was loaded yet"
    assert checkpoint.find_newest(run / "checkpoints") == steps[0]
    assert read_events(run)[-1]["ended"]["code"] == 75
    assert not list((run / "checkpoints").glob(".*")) and not list((run / "data").glob(".*"))
    arguments = sets(train__steps=STEPS, train__eval_every=3, train__eval_batches=0, checkpoint__every=4)
    _, group = fleet.start("run", processes=2, arguments=arguments)
    assert group.wait() == [0, 0], group.log
    assert newest(run) == newest(undisturbed)
    assert eval_losses(run) == eval_losses(undisturbed), "an evaluation that was left out is made up for"
    tally("stops", 1)


@pytest.mark.usefixtures("thorough")
@pytest.mark.dist
@pytest.mark.control("S1")
def test_processes_that_obey_their_own_flag_alone_lose_each_other(fleet: Fleet) -> None:
    """One has left, and the other fails or waits for it."""
    _, group = stop_in(fleet, "step", "run", "agreement")
    together = group.ends_within(SOON_S) and set(group.codes.values()) == {75}
    group.kill()
    assert not together, group.log


@pytest.mark.fault("S1")
@pytest.mark.parametrize("phase", ["bpe", "hash", "load", "report"])
def test_a_process_alone_hears_a_stop_everywhere(fleet: Fleet, phase: str) -> None:
    """While a tokenizer is trained, in a call that Python cannot interrupt; while files are hashed; with a loader that
    hangs; and when all is done but the report."""
    action, call = {"bpe": ("hang", 1), "load": ("hang", 4)}.get(phase, ("wait", 1))
    arguments = sets(train__steps=STEPS, **({"data__tokenizer": "bpe", "data__vocab": 270} if phase == "bpe" else {}))
    run, group = fleet.start("run", fresh=True, faults=[(phase, action, 0, call)], arguments=arguments)
    group.wait_for(f"@{phase}")
    if phase == "load":
        group.wait_for("step 2/")  # batches are made ahead
    group.send(signal.SIGTERM, 0)
    assert group.wait(SOON_S) == [0 if phase == "report" else 75], group.log
    assert read_exit(run)["code"] == (0 if phase == "report" else 75), group.log
    assert checkpoint.steps(run / "checkpoints")[:1] == {"load": [2], "report": [STEPS]}.get(phase, [])


@pytest.mark.fault("S2")
def test_a_signal_before_the_run_has_begun(tmp_path: Path) -> None:
    """While Python still imports what it needs, nothing is made."""
    command = [sys.executable, "-X", "importtime", "-m", "stretto", "train", "demo", *sets(run__dir=tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.endswith(" numpy\n"):
            process.terminate()
            break
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75 and not (tmp_path / "run").exists(), errors


def run_launched(run: Path, recipe: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "stretto", "launch", "-n", "2", "train", str(recipe), "--resume"]
    with log.open("w") as output:
        return subprocess.Popen(
            [*command, *sets(run__dir=run, train__steps=100_000, checkpoint__every=0)],
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )


def find_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(log: Path, text: str, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while text not in log.read_text():
        assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="children are listed in /proc")
@pytest.mark.fault("S3")
def test_a_signal_to_launcher_and_workers_together_saves_once(
    fleet: Fleet, tmp_path: Path, whole: bool, tally: Tally
) -> None:
    """As systemd and scancel send it: the launcher then passes it on, so that workers get it twice."""
    for number in range(10 if whole else 1):
        target, log = tmp_path / f"run{number}", tmp_path / f"log{number}"
        shutil.copytree(fleet.origin, target)
        launcher = run_launched(target, fleet.recipe, log)
        wait_for(log, f"step {6 + number}/", launcher)
        children = find_children(launcher.pid)
        for pid in (*children, launcher.pid)[:: 1 if number % 2 else -1]:
            os.kill(pid, signal.SIGTERM)
        assert launcher.wait(PATIENCE_S) == 75, log.read_text()
        step = checkpoint.steps(target / "checkpoints")[0]
        assert len(children) == 2 and step > 5 and "Traceback" not in log.read_text(), log.read_text()
        assert checkpoint.find_damage(target / "checkpoints" / f"step-{step:08d}") is None
        assert (read_exit(target)["code"], read_exit(target)["step"]) == (75, step)
        assert not any(Path(f"/proc/{pid}").exists() for pid in children), "nobody is left"
        tally("rounds", 1)


@pytest.mark.usefixtures("thorough")
@pytest.mark.dist
@pytest.mark.control("S3")
def test_a_second_signal_that_is_another_request_loses_the_save(fleet: Fleet) -> None:
    faults: list[tuple[str, str, int | None, int]] = [("step", "pause", None, 2)]
    run, group = fleet.start("run", processes=2, faults=faults, off=("same request",))
    group.wait_for("@step 0")
    group.wait_for("@step 1")
    for _ in range(2):
        group.send(signal.SIGTERM, 0, 1)
        time.sleep(0.05)
    assert group.wait(SOON_S) != [75, 75] and checkpoint.steps(run / "checkpoints")[0] == 4, group.log


@pytest.mark.usefixtures("thorough")
@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="the system tells children that their parent died")
@pytest.mark.fault("S3")
def test_workers_save_and_end_when_their_launcher_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    target, log = tmp_path / "run", tmp_path / "log"
    launcher = run_launched(target, fleet.recipe, log)
    wait_for(log, "step 3/", launcher)
    children = find_children(launcher.pid)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + SOON_S
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children), log.read_text()
    assert read_exit(target)["code"] == 75 and checkpoint.steps(target / "checkpoints")


def test_the_end_of_a_run_is_recorded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_exit(run)["code"] == 0
    config, run_step = config_of(run, steps=8), stretto.train.run_step

    def failing(error: BaseException) -> None:
        def fail(*args: Any) -> Any:
            assert not (run / "exit.json").exists(), "while it runs there is none"
            raise error

        monkeypatch.setattr(stretto.train, "run_step", fail)

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return run_step(*args)

    expected: list[tuple[BaseException, int, str]] = [
        (NonFiniteError("a gradient"), 6, "a gradient"),
        (OSError(28, "No space left on device"), 9, "disk is full"),
        (OSError(30, "Read-only file system"), 5, "the system refuses"),
        (torch.OutOfMemoryError("Tried to allocate"), 8, "Peak: "),
        (RuntimeError("a bug"), 1, "a bug"),
        (KeyboardInterrupt(), 130, ""),
    ]
    for error, code, message in expected:
        failing(error)
        with pytest.raises((StrettoError, RuntimeError, KeyboardInterrupt)):
            train(config, resume=True)
        record = read_exit(run)
        assert (record["code"], record["rank"], record["step"]) == (code, 0, 4) and message in record["message"]
        ended = read_events(run)[-1]["ended"]
        assert ended == {key: record[key] for key in ("code", "cause", "message", "rank", "step")}
    monkeypatch.setattr(stretto.train, "run_step", interrupted)
    with pytest.raises(Preempted, match="after step 5 of 8"):
        train(config, resume=True)
    assert (read_exit(run)["code"], read_exit(run)["step"]) == (75, 5)
    monkeypatch.setattr(stretto.train, "run_step", run_step)
    train(config, resume=True)
    assert (read_exit(run)["code"], read_exit(run)["step"]) == (0, 8)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_cause_is_what_the_first_process_to_fail_says(run: Path, order: tuple[int, int]) -> None:
    """The others only know that it was lost, and may say so before or after it."""
    errors, config = (PeerLostError("another process was lost"), DataError("a torn file")), config_of(run, 8)
    records = [recording_exit(run, Runtime(torch.device("cpu"), rank, 2), config) for rank in range(2)]
    for each in records:
        each.__enter__()
    for rank in order:
        assert not records[rank].__exit__(type(errors[rank]), errors[rank], None), "the error goes on"
    record = read_exit(run)
    assert (record["code"], record["rank"], record["message"]) == (4, 1, "a torn file")


def test_a_run_that_may_not_have_the_folder_leaves_the_record_alone(run: Path) -> None:
    before = (run / "exit.json").read_text()
    with lock_folder(run), pytest.raises(StrettoError, match="in use by"):
        train(config_of(run, steps=8), resume=True)
    assert (run / "exit.json").read_text() == before
