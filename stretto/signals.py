"""Being asked to stop, and standing still: what signals do to a run, and a watch that says where a process stands.

Where nothing can be lost, a stop is at once: it is raised where the signal arrives. In the loop it is a flag, on which
all processes agree before they save (train.py). Code that Python cannot interrupt, such as a call of a library, must
not keep a process alive: a thread watches, and ends the process if the main thread does not react.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from stretto.errors import Preempted, StrettoError, tell

# The usual ways to be asked to stop: Ctrl-C, schedulers, a terminal that was closed, Slurm's --signal=USR1.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAME_REQUEST_S = 5.0  # a control group signals all processes, and a launcher then passes the signal on to its workers
GRACE_S = 5.0  # for the main thread to react
LAUNCHER = "STRETTO_LAUNCHER"  # the variable with the process that has started this one (launch.py)
PR_SET_PDEATHSIG = 1  # of prctl(2)
NOTHING_LOST = "stopped by a signal: nothing is lost, and the same command begins or goes on (with --resume)"


def stop_early() -> None:
    """Handles signals while the program is still being loaded: there is nothing to do but to leave."""

    def leave(number: int, frame: FrameType | None) -> None:
        tell(NOTHING_LOST)
        os._exit(Preempted.exit_code)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, leave)


def end_with_launcher() -> None:
    """Asks the system for a signal when the launcher dies: no process stays behind that nobody can stop."""
    launcher = os.environ.pop(LAUNCHER, "")
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(launcher):  # it has died before
            os.kill(os.getpid(), signal.SIGTERM)


def raise_preempted() -> None:
    raise Preempted(NOTHING_LOST)


@dataclass(kw_only=True)
class Stoppable:
    """What a process knows about being asked to stop, and when it was last seen to make progress."""

    stop: bool = False  # a signal asked for it
    on_stop: Callable[[], None] | None = None  # what is done besides, where nothing can be lost
    verdict: StrettoError | None = None  # what another thread has the main thread raise
    record: Callable[[BaseException], None] = lambda error: None  # writes down how the process ends
    listens: bool = False  # signals are handled here
    progress: float = field(default_factory=time.monotonic)

    @contextmanager
    def interruptible(self, on_stop: Callable[[], None] = raise_preempted) -> Iterator[None]:
        """Nothing is lost if the process ends in here: a stop does not wait."""
        before, self.on_stop = self.on_stop, on_stop
        try:
            if self.stop:
                on_stop()
            yield
        except Exception as error:
            if self.stop and on_stop is raise_preempted and not isinstance(error, Preempted):
                raise Preempted(NOTHING_LOST) from error  # a library has taken the stop for a failure of its own
            raise
        finally:
            self.on_stop = before
            self.note_progress()

    def interrupt(self, verdict: StrettoError) -> None:
        """Has the main thread raise an error, wherever it is; called by another thread."""
        if self.listens:
            self.verdict = verdict
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def note_progress(self) -> None:
        self.progress = time.monotonic()


@contextmanager
def handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Gives the signals that ask to stop to a handler. nohup lets a run outlive its terminal by having SIGHUP ignored,
    and so it stays."""
    watched = [s for s in STOP_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in watched}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


@contextmanager
def watching(state: Stoppable, name: str, speaks: bool, timeout_s: float) -> Iterator[None]:
    """Handles signals, and keeps watch. The first signal asks to stop. The same one soon after is the same request;
    later, it ends the process at once."""
    asked: dict[int, float] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        if state.verdict is not None:
            verdict, state.verdict = state.verdict, None
            raise verdict
        if number in asked and time.monotonic() - asked[number] > SAME_REQUEST_S:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if speaks and not asked:
            what = "stopping" if state.on_stop else "saving before the next step, then stopping"
            tell(f"{what}; the same signal {SAME_REQUEST_S:g} s from now, or later, stops at once")
        asked.setdefault(number, time.monotonic())
        state.stop = True
        if state.on_stop is not None:
            state.on_stop()

    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers: the caller keeps its own
        yield
        return
    with _fatal_errors_shown(), Watch(state, name, timeout_s), handling(ask):
        state.listens = True
        end_with_launcher()
        try:
            yield
        finally:
            state.listens = False


class Watch(threading.Thread):
    """Sees signals although the main thread may be in a library, and notices when there is no progress."""

    def __init__(self, state: Stoppable, name: str, timeout_s: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.state, self.process, self.patience = state, name, 0.75 * timeout_s
        self.heard: dict[int, float] = {}  # when each signal came first, also if the main thread has not heard it yet
        self.end_at, self.end_code = float("inf"), 0
        self.reported = 0.0  # the progress after which it was said that there is none

    def __enter__(self) -> Watch:
        self.inbox, outbox = os.pipe()
        os.set_blocking(outbox, False)
        self.outbox, self.before = outbox, signal.set_wakeup_fd(outbox, warn_on_full_buffer=False)
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self.before, warn_on_full_buffer=False)
        os.close(self.outbox)  # which ends the thread
        self.join()
        os.close(self.inbox)

    def run(self) -> None:
        while True:
            if select.select([self.inbox], [], [], 0.5)[0]:
                numbers = os.read(self.inbox, 64)
                if not numbers:
                    return
                self.note(numbers)
            self.look()

    def note(self, numbers: bytes) -> None:
        now = time.monotonic()
        for number in numbers:
            if number not in STOP_SIGNALS or self.state.verdict is not None:
                continue
            self.state.stop = True  # the main thread may be waiting for another process that could hear of it
            if self.state.on_stop not in (None, raise_preempted):
                self.state.on_stop()
            if now - self.heard.setdefault(number, now) > SAME_REQUEST_S:
                self.end_at, self.end_code = min(self.end_at, now + GRACE_S), 128 + number
            elif self.state.on_stop is not None and not self.end_code:
                self.end_at = min(self.end_at, now + GRACE_S)

    def look(self) -> None:
        now = time.monotonic()
        if now > self.end_at:
            if self.end_code or self.state.on_stop is not None:
                self.end_process()
            self.end_at = float("inf")  # the main thread has heard it
        is_late = now - self.state.progress > self.patience and self.reported != self.state.progress
        if is_late and self.state.on_stop is None:  # before the first step nobody waits in vain
            self.reported = self.state.progress
            tell(f"{self.process} has made no progress for {now - self.reported:.0f} s; it stands here:")
            with suppress(Exception):
                faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def end_process(self) -> None:
        """Ends a process whose main thread is in a call that Python cannot interrupt."""
        error = self.state.verdict or Preempted(NOTHING_LOST)
        if not self.end_code:
            tell(f"{self.process}: {error}")
            self.state.record(error)
        os._exit(self.end_code or error.exit_code)


@contextmanager
def _fatal_errors_shown() -> Iterator[None]:
    """Where a process stood when the system ends it, say by SIGBUS for a file that was cut off while it was read."""
    if faulthandler.is_enabled():
        yield
        return
    with suppress(Exception):  # stderr may be no file
        faulthandler.enable()
    try:
        yield
    finally:
        faulthandler.disable()
