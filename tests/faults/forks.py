"""Real processes that start at once: forked from one that has imported everything.

    python -m tests.faults.forks      reads jobs as lines of JSON, and answers each with the ids of its processes

A job is a command line of `stretto`, the number of its processes, and what is planted in them: a phase of the run in
which a process says `@PHASE RANK` and then waits, sleeps in a library, fails, or leaves out a mechanism.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.distributed.processes import find_port
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[2]
ITERATIONS = 2_000_000_000  # of a call that takes minutes
# phase: the function that is called in it, as module.name
PHASES = {
    "tokenise": "stretto.data.tokens._tokenise",
    "bpe": "stretto.data.tokenizer.train_bpe",
    "hash": "stretto.data.documents._survey",
    "verify": "stretto.checkpoint.find_newest",
    "build": "stretto.train.build",
    "load": "stretto.data.text.TextData.train_batch",
    "step": "stretto.train.run_step",
    "learn": "stretto.step.Update.learn",
    "apply": "stretto.step.Update.apply",
    "evaluate": "stretto.data.text.TextData.eval_batch",
    "save": "stretto.checkpoint.saving.publish",
    "event": "stretto.report.Report.event",
    "report": "stretto.report.page.sample",
}


def do_nothing() -> None:
    pass


def wait_in_python() -> None:
    for _ in range(int(PATIENCE_S / 0.05)):
        time.sleep(0.05)


def pause() -> None:
    time.sleep(0.5)


def wait_in_library() -> None:
    """A call that Python cannot interrupt, and that lets other threads run."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", ITERATIONS)


def fail_in_data() -> None:
    from stretto.errors import DataError

    raise DataError("a torn file")


def fail_as_a_bug() -> None:
    raise ZeroDivisionError("a planted bug")


def fill_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def refuse_to_write() -> None:
    raise OSError(5, "Input/output error", "a file")


def raise_bus_error() -> None:
    """As the system does where a mapped file was cut off."""
    signal.raise_signal(signal.SIGBUS)


def call_another_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(3), 1)


ACTIONS: dict[str, Callable[[], None]] = {
    "say": do_nothing,
    "pause": pause,
    "wait": wait_in_python,
    "hang": wait_in_library,
    "data": fail_in_data,
    "bug": fail_as_a_bug,
    "memory": fill_memory,
    "io": refuse_to_write,
    "bus": raise_bus_error,
    "other": call_another_collective,
}


def plant(phase: str, action: str, rank: int | None, call: int) -> None:
    """Has a process act when the function of a phase is called for the `call`-th time; 0: whenever it is."""
    owner, name = find_function(PHASES[phase])
    real, calls = getattr(owner, name), 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if call in (0, calls) and rank in (None, int(os.environ["RANK"])):
            print(f"@{phase} {os.environ['RANK']}", file=sys.stderr, flush=True)
            ACTIONS[action]()
        return real(*args, **kwargs)

    setattr(owner, name, planted)


def find_function(path: str) -> tuple[Any, str]:
    """The module or class that a function belongs to."""
    *parts, name = path.split(".")
    module = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules)
    owner: Any = sys.modules[".".join(parts[:module])]
    for part in parts[module:]:
        owner = getattr(owner, part)
    return owner, name


def switch_off(mechanism: str) -> None:
    """Leaves out what a row is about, for its negative control."""
    import stretto.ending
    import stretto.execute
    import stretto.runtime
    import stretto.signals
    from stretto.report import Report

    if mechanism == "agreement":  # every process obeys its own flag
        real = stretto.execute.Executor.exchange
        stretto.execute.Executor.exchange = lambda self, counts, rt: [*real(self, counts, rt)[:-1], counts[-1]]  # type: ignore[method-assign]
    elif mechanism == "same request":
        stretto.signals.SAME_REQUEST_S = -1.0
    elif mechanism == "store":
        patch("stretto.runtime.call_roll", lambda *args: (None, [])).start()
    elif mechanism == "announcement":
        stretto.runtime.Runtime.announce = lambda self, error: None  # type: ignore[method-assign]
    elif mechanism == "watch":
        stretto.signals.Watch.look = lambda self: None  # type: ignore[method-assign]
    elif mechanism == "explanation":
        stretto.runtime.explain = lambda error, timeout_s: None
    elif mechanism == "heartbeat":  # a barrier, as any other
        stretto.runtime.Runtime.together = lambda self, work: (work(), self.barrier())[0]  # type: ignore[method-assign]
    elif mechanism == "count":
        stretto.ending.MOST_ATTEMPTS = 10**9
    elif mechanism == "one line at a time":  # the whole log is written again for each event

        def rewrite(self: Report, **values: Any) -> None:
            if self.file is not None:
                known = self.path.read_bytes() + json.dumps(values).encode() + b"\n"
                with self.path.open("wb", buffering=0) as file:
                    print("@rewriting", file=sys.stderr, flush=True)
                    time.sleep(0.5)
                    file.write(known)

        Report.event = rewrite  # type: ignore[method-assign]
    else:
        raise ValueError(mechanism)


def become(job: dict[str, Any], rank: int) -> None:
    """What a forked process does; it never returns."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    code = 1
    try:
        from stretto import cli

        for fault in job["faults"]:
            plant(*fault)
        for mechanism in job["off"]:
            switch_off(mechanism)
        sys.argv = ["stretto", *job["arguments"]]
        cli.main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def serve() -> None:
    import torch

    import stretto.train  # noqa: F401
    from stretto.report import Report  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer: Any = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = []
            for rank in range(request["processes"]):
                pid = os.fork()
                if not pid:
                    become(request, rank)
                answer.append(pid)
        print(json.dumps(answer), flush=True)


class Group:
    """The processes of one job."""

    def __init__(self, server: Server, pids: list[int], log: Path) -> None:
        self.server, self.pids, self.log_path = server, pids, log
        self.codes: dict[int, int] = {}

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def poll(self) -> bool:
        """Whether all have ended."""
        for pid in self.pids:
            if pid not in self.codes and (code := self.server.ask({"wait": pid})) is not None:
                self.codes[pid] = code
        return len(self.codes) == len(self.pids)

    def wait_for(self, text: str) -> None:
        """Waits until the processes have said something."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log:
            assert not self.poll() and time.monotonic() < deadline, f"no {text!r} in:\n{self.log}"
            time.sleep(0.05)

    def wait(self, patience_s: float = PATIENCE_S) -> list[int]:
        """The exit codes, by rank; who is still there after `patience_s` is killed, and the test fails."""
        if not self.ends_within(patience_s):
            self.kill()
            raise AssertionError(f"still there after {patience_s} s:\n{self.log}")
        return [self.codes[pid] for pid in self.pids]

    def ends_within(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self.poll():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            if self.pids[rank] not in self.codes:
                os.kill(self.pids[rank], number)

    def kill(self) -> None:
        while not self.poll():
            self.send(signal.SIGKILL, *range(len(self.pids)))
            time.sleep(0.05)


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forks"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        log: Path,
        *arguments: str,
        processes: int = 1,
        world: int = 0,
        faults: list[tuple[str, str, int | None, int]] | None = None,
        off: tuple[str, ...] = (),
    ) -> Group:
        """`world`: how many processes they are told that there are, if not as many as are started."""
        job = {"arguments": arguments, "processes": processes, "world": world or processes, "faults": faults or []}
        job["off"] = off
        return Group(self, self.ask(job | {"log": str(log), "port": find_port()}), log)

    def close(self) -> None:
        with self.process:  # closes its pipes, which ends it
            pass


if __name__ == "__main__":
    serve()
