"""Saving while training goes on. The loop waits for a copy to host memory; a thread writes, publishes and retires.

Every process has such a thread, for what it saves itself. The thread of the main process waits for the lists of the
others to appear in the draft: threads send no messages, which would get between those of training. An error is kept
until the loop asks: `failed` tells it to stop, and `settle`, by which every save begins, raises in all
processes what went wrong in one.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from pathlib import Path

from stretto.checkpoint.drafts import LEAST, Snapshot, clean, name_draft, name_part, publish, retire, write_part
from stretto.checkpoint.verify import steps
from stretto.errors import CheckpointError, DiskFullError, PeerLostError, StrettoError, tell
from stretto.runtime import SHARED_CAUSES, Runtime

POLL_S = 0.05  # between looks for what other processes have written
GRACE_S = 3.0  # for other processes to complete a save when the run has failed already


class Saver:
    """The saves of a run, one after the other. Every process has to make one and to call the same methods."""

    def __init__(self, folder: Path, keep: int, rt: Runtime, size: int) -> None:
        """`size`: about how many bytes this process writes in each save."""
        self.folder, self.keep, self.rt = folder, keep, rt
        self.sizes = [size for (size,) in rt.gather_over_ranks([size])]
        writers = [rank for rank, size in enumerate(self.sizes) if size]
        self.parts, self.number = len(writers), writers.index(rt.rank) if rt.rank in writers else None
        token = secrets.randbits(62) if rt.is_main else 0
        self.token = f"{rt.sum_over_ranks([token])[0]:032x}"  # no draft of another run has it
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.draft = folder
        self.deadline = 0.0
        self.cut_off = threading.Event()

    def __enter__(self) -> Saver:
        if self.keep:
            if self.rt.is_main:
                clean(self.folder)
            self._require_space()
        return self

    def _require_space(self) -> None:
        """The disk has to have room for two checkpoints, since one is written before an old one is deleted; for one, if
        there are as many old ones as ever stay."""
        free = shutil.disk_usage(self.folder.parent).free if self.rt.is_main else 0
        there = len(steps(self.folder)) if self.rt.is_main else 0
        free, there = self.rt.sum_over_ranks([free, there])
        number = 1 if there >= max(self.keep, 2) else 2
        needed, what = number * sum(self.sizes), ("one checkpoint needs", "two checkpoints need")[number - 1]
        if free < needed:
            raise DiskFullError(
                f"{self.folder.parent} has {free / 1e9:.3g} GB free, and {what} {needed / 1e9:.3g} GB: "
                "make room, set run.dir to a larger disk, or checkpoint.keep to 0, which saves nothing"
            )

    @property
    def failed(self) -> bool:
        """Whether the last save of this process has failed, as far as is known by now."""
        return self.error is not None

    def retire(self, step: int, best_step: int) -> None:
        """When a run goes on from `step`: deletes the old ones that a save would have, had it not been killed before. A
        run that is done saves nothing more."""

        def finish() -> None:
            if self.keep and step and len(steps(self.folder)) > max(self.keep, LEAST) + 1:  # the best may be one more
                retire(self.folder, step, self.keep, best_step)

        self.rt.while_main(finish)

    def start(self, shot: Snapshot) -> None:
        """Saves a snapshot in the background. The last save must have been settled."""
        self.draft = name_draft(self.folder, shot.state["step"], self.token)
        self.deadline = time.monotonic() + self.rt.timeout_s
        self.thread = threading.Thread(target=self._work, args=(shot,), name="stretto-save")
        self.thread.start()

    def _work(self, shot: Snapshot) -> None:
        try:
            if self.number is not None:
                write_part(self.draft, shot, self.number, self.parts)
            if self.rt.is_main:
                self._wait_for_parts()
                publish(self.draft, shot.state, self.keep, self.parts)
        except BaseException as error:  # the loop raises it
            self.error = error

    def _wait_for_parts(self) -> None:
        missing = set(range(self.parts))
        while missing := {number for number in missing if not name_part(self.draft, number).exists()}:
            if time.monotonic() > self.deadline or self.cut_off.is_set():
                raise PeerLostError(
                    f"{len(missing)} of {self.parts} processes did not write their parts of {self.draft.name} in time "
                    f"(run.timeout_s = {self.rt.timeout_s:g}); earlier checkpoints are whole"
                )
            self.cut_off.wait(POLL_S)

    def settle(self) -> None:
        """Waits for the save under way, if there is one; an error of any process is raised in all of them."""
        if self.thread is None:
            return
        if not self.rt.is_main:
            self.thread.join()
        codes = self._gather_codes()  # whether all parts are there, so that the main process waits for nobody
        if not any(codes):
            self.thread.join()
            codes = self._gather_codes()
        own = self._finish()
        if any(codes):
            raise own if codes[self.rt.rank] and own is not None else _describe(codes)

    def _gather_codes(self) -> list[int]:
        code = 0 if self.error is None else getattr(self.error, "exit_code", 1)
        return [code for (code,) in self.rt.gather_over_ranks([code])]

    def _finish(self) -> BaseException | None:
        """Ends the thread. What a failed save has written is removed."""
        assert self.thread is not None
        self.cut_off.set()
        self.thread.join()
        self.thread, error, self.error = None, self.error, None
        self.cut_off.clear()
        if error is not None and self.rt.is_main:
            shutil.rmtree(self.draft, ignore_errors=True)
        return error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """A run that ends well has settled its last save. One that fails completes it if others do their part soon."""
        if self.thread is None:
            return
        self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
        if isinstance(error, Exception):
            self.thread.join()
        failure = self._finish()
        if failure is not None and failure is not error:
            tell(f"the save under way was not completed: {failure}")


def _describe(codes: list[int]) -> StrettoError:
    """The error in processes whose own part was saved, with the exit code of the one that failed."""
    rank = next(rank for rank, code in enumerate(codes) if code)
    kind = SHARED_CAUSES.get(codes[rank], CheckpointError)
    error = kind(f"process {rank} could not save its part: its own message says why")
    error.first = {}  # what that process says counts
    return error
