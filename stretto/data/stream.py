"""What every kind of data offers: numbered micro-batches, each a pure function of the seed and its number.

The training stream never ends. Sample position p (micro-batch number times batch size, plus the place in it) belongs
to epoch p // num_train, and each epoch is its own permutation of the samples. Nothing is consumed, so a resumed run,
another number of processes, or a thread that reads ahead all see the same stream. Processes that share a micro-batch
ask for its parts, whose samples together are those of the whole.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from stretto.batch import Batch
from stretto.data.tokenizer import Tokenizer

Int64s = npt.NDArray[np.int64]


class Data(ABC):
    tokenizer: Tokenizer | None = None  # None for images
    labels: tuple[str, ...] = ()  # class names of images and texts
    prompt = ""  # of the evaluation data, which a sample in the report begins with; empty: their first tokens
    num_train: int  # windows, pairs or images in one epoch
    num_eval_batches: int
    fingerprint: str  # of what training reads, wherever it lies: a resumed run must find the same

    @property
    def batches_per_epoch(self) -> float:
        """Micro-batches in one pass over the training data, where all have as many samples as the first one."""
        return self.num_train / len(self.train_batch(0).samples)

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
    AUGMENT = 5
    OPERATIONS = 6
    ERASE = 7
    MIX = 8


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
