"""`stretto launch`: a command in several processes of this machine, and an exit code that says why it ended.

torchrun turns every exit code into 1, and starts again what was told to stop. Here the code of the first cause is the
code of the launcher, signals are passed on, and only what may go better next time is started again. The processes are
torch.distributed.elastic's; they meet at a store in the launcher, or in that of the first machine.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from stretto.errors import ConfigError, PeerLostError, Preempted, tell
from stretto.signals import GRACE_S, LAUNCHER, SAME_REQUEST_S, handling

LOOK_S = 0.1
MEETING_S = 900  # for the other machines to come
KILLED = 128  # and the number of the signal
# How the others end when one process fails: it was lost, or they were told to stop.
CONSEQUENCES = (PeerLostError.exit_code, Preempted.exit_code, -signal.SIGTERM)


class Launcher:
    """The processes of one attempt, and the signals that came for them."""

    def __init__(self) -> None:
        self.asked: dict[int, float] = {}
        self.kill_at = float("inf")
        self.processes: PContext | None = None

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if now - self.asked.setdefault(number, now) > SAME_REQUEST_S:  # they end at once; who does not is killed
            self.kill_at = min(self.kill_at, now + 2 * GRACE_S)
        for pid in self.processes.pids().values() if self.processes is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def run(self, arguments: Sequence[str], variables: Mapping[int, dict[str, str]]) -> int:
        """The exit code of the first process that failed; 0 if none did."""
        everyone = dict.fromkeys(variables, ("-m", "stretto", *arguments))
        logs = DefaultLogsSpecs(log_dir=os.devnull)  # they write where the launcher writes
        self.processes = start_processes("stretto", sys.executable, everyone, dict(variables), logs)
        for number in tuple(self.asked):  # while they were being started
            self.pass_on(number)
        try:
            while (result := self.processes.wait(0)) is None:
                if time.monotonic() > self.kill_at:
                    self.processes.close(signal.SIGKILL)
                time.sleep(LOOK_S)
            return find_first_cause([failure.exitcode for failure in result.failures.values()])
        finally:
            self.processes.close(signal.SIGKILL)
            self.processes = None


def find_first_cause(codes: Sequence[int]) -> int:
    """The code that says why the processes ended, of theirs in the order in which they ended."""
    if not codes or codes[0] == Preempted.exit_code:
        return codes[0] if codes else 0
    code = next((code for code in codes if code not in CONSEQUENCES), codes[0])
    return code if code >= 0 else KILLED - code


def may_go_better(code: int) -> bool:
    """Whether to start again: a process was killed or lost, or failed in a way that nobody has foreseen. Mistakes in
    recipes, damaged data and full disks stay what they are."""
    return code in (1, PeerLostError.exit_code) or (code > KILLED and code != KILLED + signal.SIGINT)


def launch(
    arguments: Sequence[str], processes: int, restarts: int, machines: int = 1, machine: int = 0, meet: str = ""
) -> int:
    """Runs `stretto` with these arguments, in so many processes on each machine; the exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes speak for themselves
    host, port = _read_address(meet, machines)
    launcher = Launcher()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are handled here
    with handling(launcher.pass_on):
        store = _open_store(host, port) if machine == 0 else None
        place = {"MASTER_ADDR": host, "MASTER_PORT": str(store.port if store is not None else port)}
        for attempt in range(restarts + 1):
            code = launcher.run(arguments, _describe_processes(processes, machines, machine, attempt, place))
            if attempt == restarts or launcher.asked or not may_go_better(code):
                break
            tell(f"launch: the processes ended with code {code}; start {attempt + 2} of at most {restarts + 1}")
            if arguments[0] == "train" and "--resume" not in arguments:
                arguments = [*arguments, "--resume"]
    return code


def _describe_processes(
    processes: int, machines: int, machine: int, attempt: int, place: dict[str, str]
) -> dict[int, dict[str, str]]:
    """The variables by which torch's processes know each other, for each of this machine."""
    shared = place | {
        "WORLD_SIZE": str(processes * machines),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not theirs
        "TORCHELASTIC_RESTART_COUNT": str(attempt),  # a part of their keys in it
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        LAUNCHER: str(os.getpid()),
    }
    ranks = range(machine * processes, (machine + 1) * processes)
    return {local: shared | {"RANK": str(rank), "LOCAL_RANK": str(local)} for local, rank in enumerate(ranks)}


def _read_address(meet: str, machines: int) -> tuple[str, int]:
    host, _, port = meet.rpartition(":")
    if machines == 1 and not meet:
        return "127.0.0.1", 0
    if not host or not port.isdigit():
        raise ConfigError(f"--meet {meet!r}: several machines need one as HOST:PORT, that of --machine 0")
    return host, int(port)


def _open_store(host: str, port: int) -> TCPStore:
    try:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEETING_S)
        )  # with port 0, one that is free
    except RuntimeError as error:
        raise ConfigError(f"--meet: {host}:{port} cannot be opened: {str(error).partition(chr(10))[0]}") from error
