"""A thread that makes the next batches while the device works on this one; and that may hang without holding anyone."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from stretto.errors import DataError

X = TypeVar("X")
DEPTH = 2  # batches that are built ahead: enough to hide one slow batch; more would only hold memory
LOOK_S = 0.2  # how often whoever waits looks whether to go on waiting
CLOSING_S = 5.0  # for the thread to end


class Overdue(DataError):
    """A batch that does not come."""


def prefetch(
    make: Callable[[int], X],
    first: int,
    last: int,
    patience_s: float = math.inf,
    gives_up: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, X | None]]:
    """Yields (i, make(i)) for first <= i < last, in order, and makes the next ones in a thread. `make` must not depend
    on when it is called. A thread that hangs holds nobody: if the caller gives up, it gets None in the place of what is
    not there yet; and after `patience_s`, a `DataError`."""
    made: queue.Queue[tuple[X | None, BaseException | None]] = queue.Queue(DEPTH - 1)  # the thread holds one more
    closed = threading.Event()

    def work() -> None:
        for i in range(first, last):
            try:
                item: tuple[X | None, BaseException | None] = make(i), None
            except BaseException as error:
                item = None, error
            while not closed.is_set():
                with suppress(queue.Full):
                    made.put(item, timeout=LOOK_S)
                    break
            if closed.is_set():
                return

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    patience = CLOSING_S
    try:
        for i in range(first, last):
            result, error = _wait_for(made, i, patience_s, gives_up)
            if error is not None:
                raise error
            yield i, result
    except Overdue:
        patience = 0  # whoever waits for this process should hear of it now
        raise
    finally:
        closed.set()
        thread.join(patience)


def _wait_for(
    made: queue.Queue[tuple[X | None, BaseException | None]],
    number: int,
    patience_s: float,
    gives_up: Callable[[], bool],
) -> tuple[X | None, BaseException | None]:
    begin = time.monotonic()
    while True:
        if gives_up():
            return None, None
        with suppress(queue.Empty):
            return made.get(timeout=LOOK_S)
        if time.monotonic() - begin > patience_s:
            raise Overdue(
                f"the batch of step {number + 1} was not there after {patience_s:.0f} s: the disk or network that data "
                "are read from may hang; raise run.timeout_s if it is slow"
            )
