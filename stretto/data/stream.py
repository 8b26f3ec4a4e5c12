"""What every kind of data offers: numbered micro-batches, each a pure function of the seed and its number.

The training stream never ends. Sample position p (micro-batch number times batch size, plus the place in it) belongs
to epoch p // num_train, and each epoch is its own permutation of the samples. Nothing is consumed, so a resumed run,
another number of processes, or a thread that reads ahead all see the same stream. Processes that share a micro-batch
ask for its parts, whose samples together are those of the whole.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stretto.batch import Batch
from stretto.data.tokenizer import Tokenizer
from stretto.errors import DataError

Int64s = npt.NDArray[np.int64]
X = TypeVar("X")
DEPTH = 2  # batches that are built ahead: enough to hide one slow batch; more would only hold memory
LOOK_S = 0.2  # how often whoever waits looks whether to go on waiting
CLOSING_S = 5.0  # for the thread to end


class Data(ABC):
    tokenizer: Tokenizer | None = None  # None for images
    labels: tuple[str, ...] = ()  # class names of images
    num_train: int  # windows, pairs or images in one epoch
    num_eval_batches: int
    fingerprint: str  # of what training reads, wherever it lies: a resumed run must find the same

    @abstractmethod
    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        """Returns micro-batch number `index` of the endless training stream, or one of `parts` shares of it."""

    @abstractmethod
    def eval_batch(self, index: int) -> Batch:
        """Returns evaluation micro-batch 0 <= index < num_eval_batches, the same one each time."""

    @abstractmethod
    def describe(self) -> str:
        """Says in one line how much data there is."""


class Purpose(IntEnum):
    """What a random stream is for, so that no two purposes ever share one."""

    ORDER = 1
    MASK = 2
    EVAL_MASK = 3
    SPLIT = 4


def random_stream(seed: int, purpose: Purpose, number: int = 0) -> np.random.Generator:
    """Returns a generator keyed by the arguments. Philox takes a 128-bit key: other arguments never collide."""
    key = ((seed % 2**64) << 64) | (purpose << 56) | number
    return np.random.Generator(np.random.Philox(key=key))


def random_rows(seed: int, purpose: Purpose, first: int, shape: tuple[int, int, int]) -> npt.NDArray[np.float64]:
    """Draws numbers in [0, 1) for shape[0] positions from `first` on. What a position gets depends on nothing but
    itself: Philox counts, so the one stream of all positions can be entered anywhere."""
    rows, *of_each = shape
    counts = -(-math.prod(of_each) // 4)  # each count gives four numbers
    stream = random_stream(seed, purpose)
    stream.bit_generator.advance(first * counts)  # type: ignore[attr-defined]
    return stream.random((rows, 4 * counts))[:, : math.prod(of_each)].reshape(shape)


class EpochOrder:
    """The order of the samples in each epoch."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self._num_samples = num_samples
        self._draw = lru_cache(1)(lambda epoch: random_stream(seed, Purpose.ORDER, epoch).permutation(num_samples))

    def samples(self, positions: range) -> list[int]:
        """Returns the samples at these positions of the stream, which may reach over the end of an epoch."""
        return [int(self._draw(p // self._num_samples)[p % self._num_samples]) for p in positions]


def batch_positions(index: int, batch_size: int, part: int = 0, parts: int = 1) -> range:
    """Returns the positions of a micro-batch's samples in the stream, or of a share; shares differ by one at most."""
    begin, end = (index * batch_size + batch_size * number // parts for number in (part, part + 1))
    return range(begin, end)


def count_held_out(total: int, share: float) -> int:
    """Counts how many of `total` samples evaluation gets: at least one, and never all."""
    return min(max(round(total * share), 1), total - 1)


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
    try:
        for i in range(first, last):
            result, error = _wait_for(made, i, patience_s, gives_up)
            if error is not None:
                raise error
            yield i, result
    finally:
        closed.set()
        thread.join(CLOSING_S)


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
            raise DataError(
                f"the batch of step {number + 1} was not there after {patience_s:.0f} s: the disk or network that data "
                "are read from may hang; raise run.timeout_s if it is slow"
            )
