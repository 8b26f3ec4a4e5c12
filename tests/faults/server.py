"""Real processes that start at once: forked from one that has imported everything, which takes tenths of a second.

    python -m tests.faults.server

reads jobs as lines of JSON and answers each with the numbers of its processes, which call the command `stretto` in an
environment like torchrun's; asked about one of them, it answers with its exit code, as `subprocess` has it, or null.
When nobody asks any more, what still runs is killed. The server itself never trains: it stays a process of one thread,
which can be forked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.distributed.processes import find_port
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAUSE_S = 0.02  # between two looks at a process


class Server:
    """The one that asks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
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
    ) -> Group:
        """What they print goes to `log`. `world`: how many processes they are told that there are, if not as many as
        are started. The others are what is planted in them (plants.py)."""
        job = {"arguments": arguments, "log": str(log), "port": find_port(), "processes": processes}
        job |= {"world": world or processes, "planted": {"faults": faults, "off": off, "plants": plants}}
        return Group(self, self.ask(job), log)

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE_S)  # closes its pipes, which ends it


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

    def ends_within(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self.poll():
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True

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
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        sys.argv = ["stretto", *job["arguments"]]

        from stretto.cli import main
        from tests.faults.plants import plant

        plant(**job["planted"])
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
