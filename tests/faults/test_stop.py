"""Being asked to stop, in all the usual ways; and what is left to read about how a run ended."""

from __future__ import annotations

import json
import os
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
from stretto.config import dump_config
from stretto.errors import DataError, NonFiniteError, PeerLostError, Preempted, StrettoError
from stretto.ending import recording_exit
from stretto.runtime import Runtime, lock_folder
from stretto.train import train
from tests.distributed.processes import find_port
from tests.faults.configs import config_of
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[2]

# Each scenario is a process of its own, forked from one that has imported everything: signals, and pauses before them.
SCENARIOS: dict[str, tuple[list[tuple[int, float]], int]] = {
    "term": ([(signal.SIGTERM, 0)], 75),
    "hup": ([(signal.SIGHUP, 0)], 75),
    "usr1": ([(signal.SIGUSR1, 0)], 75),
    "int": ([(signal.SIGINT, 0)], 75),
    "term soon again": ([(signal.SIGTERM, 0), (signal.SIGTERM, 0.1), (signal.SIGTERM, 0.1)], 75),
    "int soon again": ([(signal.SIGINT, 0), (signal.SIGINT, 0.1)], 75),
    "term, then int": ([(signal.SIGTERM, 0), (signal.SIGINT, 2.5)], 75),
    "term later again": ([(signal.SIGTERM, 0), (signal.SIGTERM, 2.5)], -signal.SIGTERM),
    "hup later again": ([(signal.SIGHUP, 0), (signal.SIGHUP, 2.5)], -signal.SIGHUP),
    "int later again": ([(signal.SIGINT, 0), (signal.SIGINT, 2.5)], 130),
    "term, usr1 later": ([(signal.SIGTERM, 0), (signal.SIGUSR1, 2.5), (signal.SIGTERM, 0)], -signal.SIGTERM),
}
WATCHER = """
import json, os, signal, sys, time
import torch
from stretto import runtime

def scenario(signals, before):
    before()
    rt = runtime.Runtime(torch.device("cpu"))
    try:
        with runtime._signals(rt):
            for number, pause in signals:
                time.sleep(pause)
                os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(75 if rt.stop else 0)

def fork(signals, before=lambda: None):
    pid = os.fork()
    return pid or scenario(signals, before)

runtime.SAME_REQUEST_S = 2.0
pids = {name: fork(signals) for name, signals in json.load(sys.stdin).items()}
pids["nohup"] = fork([(signal.SIGHUP, 0)], lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}))
"""


def test_signals() -> None:
    """The first one asks, and soon after it is the same request; later it ends the process. nohup keeps its word."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHER], input=json.dumps({name: signals for name, (signals, _) in SCENARIOS.items()}),
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: code for name, (_, code) in SCENARIOS.items()} | {"nohup": 0}
    assert "saving after this step" in done.stderr and "the same signal 2 s from now, or later" in done.stderr


def read_exit(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "exit.json").read_text())
    return record


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="children are listed in /proc")
def test_a_signal_to_launcher_and_workers_together_saves_once(run: Path, tmp_path: Path) -> None:
    """As systemd and scancel send it: torchrun then passes it on, so that workers get it twice. All that is left of the
    exit code is in exit.json."""
    config = config_of(run, steps=100_000)
    target, log = tmp_path / "two", tmp_path / "log"
    (tmp_path / "recipe.toml").write_text(dump_config(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(find_port()), "-m", "stretto", "train", str(tmp_path / "recipe.toml")]
    sets = {"run.dir": target, "checkpoint.every": 0, "train.eval_every": 0, "train.micro_batches": 2}
    sets |= {"model.width": 128, "data.batch_size": 64}  # a step takes as long as the signal takes to arrive twice
    command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    with log.open("w") as output:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        while launcher.poll() is None and "step 2/" not in log.read_text():
            time.sleep(0.1)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for pid in (*map(int, children), launcher.pid):
            os.kill(pid, signal.SIGTERM)
        launcher.wait(timeout=PATIENCE_S)
    assert len(children) == 2, log.read_text()
    assert launcher.returncode != 75, "torchrun has its own codes"
    (step,) = checkpoint.steps(target / "checkpoints")
    assert checkpoint.find_damage(target / "checkpoints" / f"step-{step:08d}") is None, log.read_text()
    record = read_exit(target)
    assert (record["code"], record["cause"]) == (75, "Preempted") and f"after step {step} " in record["message"]


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
        (RuntimeError("a bug"), 1, "a bug"),
        (KeyboardInterrupt(), 130, ""),
    ]
    for error, code, message in expected:
        failing(error)
        with pytest.raises((StrettoError, RuntimeError, KeyboardInterrupt)):
            train(config, resume=True)
        record = read_exit(run)
        assert (record["code"], record["rank"]) == (code, 0) and message in record["message"]
    monkeypatch.setattr(stretto.train, "run_step", interrupted)
    with pytest.raises(Preempted):
        train(config, resume=True)
    assert read_exit(run)["code"] == 75
    monkeypatch.setattr(stretto.train, "run_step", run_step)
    train(config, resume=True)
    assert read_exit(run)["code"] == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_cause_is_what_the_first_process_to_fail_says(tmp_path: Path, order: tuple[int, int]) -> None:
    """The others only know that it was lost, and may say so before or after it."""
    errors = (PeerLostError("another process was lost"), DataError("a torn file"))
    records = [recording_exit(tmp_path, Runtime(torch.device("cpu"), rank, 2), 60.0) for rank in range(2)]
    for each in records:
        each.__enter__()
    for rank in order:
        assert not records[rank].__exit__(type(errors[rank]), errors[rank], None), "the error goes on"
    record = read_exit(tmp_path)
    assert (record["code"], record["rank"], record["message"]) == (4, 1, "a torn file")


def test_a_run_that_may_not_have_the_folder_leaves_the_record_alone(run: Path) -> None:
    before = (run / "exit.json").read_text()
    with lock_folder(run), pytest.raises(StrettoError, match="in use by"):
        train(config_of(run, steps=8), resume=True)
    assert (run / "exit.json").read_text() == before
