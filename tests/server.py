"""Real processes that start at once: forked from one that has imported everything, which takes tenths of a second.

    python -m tests.server

reads jobs as lines of JSON and answers each with the numbers of its processes, which call the command `stretto`, or run
a module, in an environment like torchrun's; asked about one of them, it answers with its exit code, as `subprocess` has
it, or null. When nobody asks any more, what still runs is killed. The server itself never trains: it stays a process of
one thread, which can be forked.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.runs import PATIENCE_S, ROOT, find_port

PAUSE_S = 0.02  # between two looks at a process


class Server:
    """The one that asks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lock = threading.Lock()

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self.lock:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        assert answer, "the server has died"
        return json.loads(answer)

    def start(
        self,
        log: Path,
        *arguments: str,
        processes: int = 1,
        world: int = 0,
        faults: Sequence[tuple[str, str, int | None, int]] = (),
        off: Sequence[str] = (),
        plants: Sequence[str] = (),
        module: str = "",
    ) -> Group:
        """What they print goes to `log`. `world`: how many processes they are told that there are, if not as many as
        are started. `module`: what they run in place of the command. The others are what is planted in them
        (faults/plants.py)."""
        job = {"arguments": arguments, "log": str(log), "port": find_port(), "processes": processes, "module": module}
        job |= {"world": world or processes, "planted": {"faults": faults, "off": off, "plants": plants}}
        return Group(self, self.ask(job), log)

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE_S)  # closes its pipes, which ends it


@cache
def find_server() -> Server:
    """One for all tests of this process; it ends with them."""
    server = Server()
    atexit.register(server.close)
    return server


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
            if pid not in self.codes and (code := self.server.ask({"code of": pid})) is not None:
                self.codes[pid] = code
        return len(self.codes) == len(self.pids)

    def wait_for(self, text: str) -> None:
        """Waits until the processes have said something."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log:
            assert not self.poll() and time.monotonic() < deadline, f"no {text!r} in:\n{self.log}"
            time.sleep(PAUSE_S)

    def wait(self, patience_s: float = PATIENCE_S) -> list[int]:
        """The exit codes, by rank; who is still there after `patience_s` is killed, and the test fails."""
        if not self.ends_within(patience_s):
            self.kill()
            raise AssertionError(f"still there after {patience_s} s:\n{self.log}")
        return [self.codes[pid] for pid in self.pids]

    def wait_for_end(self, rank: int) -> int:
        """The exit code of one of them."""
        deadline = time.monotonic() + PATIENCE_S
        while self.pids[rank] not in self.codes and time.monotonic() < deadline:
            self.poll()
            time.sleep(PAUSE_S)
        return self.codes[self.pids[rank]]

    def ends_within(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self.poll():
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True

    def expect_success(self) -> None:
        """Waits for all; if one fails, the others are killed, and so does the test."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.poll() and time.monotonic() < deadline and not any(self.codes.values()):
            time.sleep(PAUSE_S)
        if len(self.codes) < len(self.pids):
            self.kill()
        assert self.wait() == [0] * len(self.pids), self.log[-6000:]

    def send(self, number: int, *ranks: int) -> None:
        """Sends a signal to these, or to all of them. No other process can have their numbers before their exit codes
        have been asked for, even if they have ended."""
        for rank in ranks or range(len(self.pids)):
            if self.pids[rank] not in self.codes:
                os.kill(self.pids[rank], number)

    def kill(self, *ranks: int) -> None:
        self.send(signal.SIGKILL, *ranks)


def serve() -> None:
    _import_all()
    running: set[int] = set()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            answer: Any = _look_at(request["code of"]) if "code of" in request else _fork(request)
            running = running | {*answer} if isinstance(answer, list) else running
            if isinstance(answer, int):
                running.remove(request["code of"])
            print(json.dumps(answer), flush=True)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def _import_all() -> None:
    """What a run imports when it needs it."""
    import matplotlib.figure  # noqa: F401
    import torch
    import torch.distributed.fsdp
    import torch.utils.tensorboard

    import stretto.cli
    import stretto.report.page
    import stretto.techniques
    import stretto.train
    import tests.faults.plants  # noqa: F401

    torch.set_num_threads(1)
    stretto.techniques.load_all()


def _look_at(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _fork(job: dict[str, Any]) -> list[int]:
    """One process for each rank."""
    return [os.fork() or _work(job, rank) for rank in range(job["processes"])]


def _work(job: dict[str, Any], rank: int) -> int:
    """The life of a forked process: it never returns."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(source, stream)
        if job["world"] > 1 or not job["module"]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world"])}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        sys.argv = [job["module"] or "stretto", *job["arguments"]]
        if job["module"]:
            runpy.run_module(job["module"], run_name="__main__")
        else:
            _run_command(job["planted"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_command(planted: dict[str, Any]) -> None:
    from stretto.cli import main
    from tests.faults.plants import plant

    plant(**planted)
    main()


if __name__ == "__main__":
    serve()
