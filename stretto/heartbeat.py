"""Work that does not count as waiting, and how the processes learn who failed first.

Before the first step one process may be at work for an hour, tokenising, while the others wait for it. So each process
runs what it has to do while a thread of its own tells the others every second that it is alive, whether it was asked to
stop, and whether it is done. A stop that any process hears is thus heard by all, and a lost one is noticed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.errors import PeerLostError, Preempted, StrettoError
from stretto.signals import NOTHING_LOST, Stoppable

PAUSE_S = 1.0  # between two messages of a process that is at work
ROLL_CALL_S = 2.0  # for the others to answer
FIRST, HERE = "stretto/first", "stretto/here/"  # keys in the store: the first failure; who is still there
X = TypeVar("X")


class Heartbeat(threading.Thread):
    """The thread of a process that is at work; all processes have one at the same time."""

    def __init__(self, state: Stoppable, group: dist.ProcessGroup) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.state, self.group = state, group
        self.hurry, self.lock = threading.Event(), threading.Lock()
        self.at_work, self.failed = True, False
        self.verdict: StrettoError | None = None  # why all processes leave

    def run(self) -> None:
        try:
            while self.verdict is None and self._beat() < self.group.size():
                self.state.note_progress()
        except Exception as error:  # gloo has no narrower kind
            self._decide(PeerLostError(str(error)))

    def _beat(self) -> int:
        """One message; the number of processes that are done."""
        self.hurry.wait(PAUSE_S if self.at_work else 0)
        self.hurry.clear()
        sums = torch.tensor([int(self.state.stop), int(self.failed), int(not self.at_work)])
        dist.all_reduce(sums, group=self.group)
        stops, failures, done = sums.tolist()
        if failures:
            self._decide(PeerLostError("it failed at work that all were waiting for"))
        elif stops:
            self._decide(Preempted(NOTHING_LOST))
        return int(done)

    def _decide(self, verdict: StrettoError) -> None:
        with self.lock:
            self.verdict = verdict
            if self.at_work:
                self.state.interrupt(verdict)

    def end(self, failed: bool) -> None:
        with self.lock:
            self.at_work, self.failed = False, failed
        self.hurry.set()
        self.join()


def work_together(
    state: Stoppable, group: dist.ProcessGroup, work: Callable[[], X], announce: Callable[[BaseException], None]
) -> X:
    """Does the work of this process, and returns when all have done theirs. If one fails or is to stop, all end."""
    beat = Heartbeat(state, group)
    beat.start()
    with state.interruptible(beat.hurry.set):
        try:
            result = work()
        except BaseException as error:
            if beat.verdict is None:
                announce(error)  # before the others can say that this process was lost
            beat.end(failed=True)
            raise (beat.verdict if isinstance(beat.verdict, Preempted) else error) from None
        beat.end(failed=False)
    if beat.verdict is not None:
        raise beat.verdict
    return result


def note_failure(store: dist.Store, record: dict[str, Any]) -> None:
    """Writes down a failure for the others, unless there was one before."""
    _try_for(ROLL_CALL_S, lambda: store.compare_set(FIRST, "", json.dumps(record)))


def call_roll(store: dist.Store, rank: int, world: int) -> tuple[dict[str, Any] | None, list[int]]:
    """What the first process that failed has said, if it has; and who does not answer."""
    missing, heard = {r for r in range(world) if r != rank}, list[dict[str, Any]]()

    def ask() -> None:
        deadline = time.monotonic() + ROLL_CALL_S
        while missing and not heard and time.monotonic() < deadline:
            if store.check([FIRST]):
                heard.append(json.loads(store.get(FIRST)))
            store.set(f"{HERE}{rank}", "")  # not before: whoever holds the store may go when all have answered
            missing.difference_update([r for r in missing if store.check([f"{HERE}{r}"])])
            time.sleep(0.05)

    _try_for(2 * ROLL_CALL_S, ask)
    return heard[0] if heard else None, sorted(missing)


def wait_for_others(store: dist.Store, others: list[int]) -> None:
    """Lets the others read the store, which this process may hold, before it goes."""

    def wait() -> None:
        deadline = time.monotonic() + ROLL_CALL_S
        while time.monotonic() < deadline and not all(store.check([f"{HERE}{r}"]) for r in others):
            time.sleep(0.05)

    _try_for(2 * ROLL_CALL_S, wait)


def _try_for(seconds: float, work: Callable[[], object]) -> None:
    """Does something with the store. Whoever has it may be gone, which is an error, or frozen, which has no end."""

    def attempt() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=attempt, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
