"""Which keys the queries of a process see, as problems that a kernel for packed sequences can solve.

Queries are taken in groups, one after the other; group i sees a list of rows of some buffer of keys, which may be the
process's own, another's, or those of all. With a causal mask a group is a run of neighbouring tokens [a, b) of one
sequence, and its keys are of two kinds:

    its own process's up to itself    a causal mask over the process's tokens of the sequence, as if they were all
    other processes' before a         no mask at all: none of them lies between a and b

So no kernel has to know positions. Only a sliding window has to see all keys from a - window + 1 to b at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.batch import Layout
from stretto.parallel.layouts import Bools, Cut, Ints

Run = tuple[int, int]  # tokens from, to


@dataclass(frozen=True)
class Reach:
    """Group i, queries q_ends[i] to q_ends[i + 1], sees keys k_ends[i] to k_ends[i + 1] of those in `rows`."""

    q_ends: Tensor  # int32 [N + 1]
    k_ends: Tensor  # int32 [N + 1]
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each group, for the host
    rows: Tensor | slice  # int64 [M], or a run of them: where the keys are in the buffer
    places: Tensor  # int64 [M]: where they are in their sequences
    dense: bool  # lengths are the same in every batch
    causal: bool = False  # the last query of a group sees all its keys, the one before all but the last, ...
    window: int = 0  # number of keys that a query sees, the last ones; 0: all

    @property
    def num_keys(self) -> int:
        return self.places.shape[0]

    @property
    def q_max(self) -> int:
        return max(queries for queries, _ in self.lengths)

    @property
    def k_max(self) -> int:
        return max(keys for _, keys in self.lengths)

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Queries of each that sees something, and its keys."""
        begin = low = 0
        for queries, keys in self.lengths:
            if keys:
                yield slice(begin, begin + queries), slice(low, low + keys)
            begin, low = begin + queries, low + keys


@dataclass(frozen=True)
class Side:
    """The sequences of a batch, cut, as seen by one process."""

    layout: Layout  # of the whole batch, on the CPU
    cut: Cut
    part: int

    def runs(self, whole: bool) -> list[tuple[int, Run, int]]:
        """The process's tokens in groups: number of the sequence, from which token to which, and how many of these are
        the process's. A group is a run of neighbours, or with `whole` all that it has of a sequence."""
        tokens, ends = self.cut.tokens(self.part), self.layout.offsets.numpy()
        number = np.searchsorted(ends, tokens, side="right") - 1
        breaks = np.diff(number) != 0
        if not whole:
            breaks |= np.diff(tokens) != 1
        starts = np.append(0, np.flatnonzero(breaks) + 1) if len(tokens) else np.empty(0, np.int64)
        stops = np.append(starts[1:], len(tokens))
        return [
            (int(number[i]), (int(tokens[i]), int(tokens[j - 1]) + 1), int(j - i))
            for i, j in zip(starts, stops, strict=True)
        ]

    @property
    def num_filler(self) -> int:
        return self.cut.size - int((self.cut.owner == self.part).sum())


def reach_own(side: Side, causal: bool) -> Reach:
    """A process's tokens among themselves. Filler is a sequence of its own."""
    lengths = [length for _, _, length in side.runs(whole=True)]
    if side.num_filler:
        lengths.append(side.num_filler)
    places = np.zeros(side.cut.size, np.int64)
    tokens = side.cut.tokens(side.part)
    places[: len(tokens)] = _places(side.layout, tokens)
    rows, found = slice(0, side.cut.size), torch.from_numpy(places)
    return Reach(*_count(lengths, lengths), rows, found, side.layout.dense, causal)


def reach_others(queries: Side, keys: Side, visible: Bools, first_row: int, causal: bool, window: int = 0) -> Reach:
    """The keys among tokens that are marked `visible` [T'], in a buffer that begins with row `first_row` of all."""
    ends, lengths, found = keys.layout.offsets.numpy(), [], []
    for number, (begin, end), length in queries.runs(whole=not causal):
        low, high = int(ends[number]), int(ends[number + 1])
        if window:
            low, high = max(low, begin - window + 1), end
        elif causal:
            high = begin
        lengths.append(length)
        found.append(np.flatnonzero(visible[low:high]) + low)
    if queries.num_filler:
        lengths.append(queries.num_filler)
        found.append(np.empty(0, np.int64))
    counts = [len(tokens) for tokens in found]
    tokens = np.concatenate(found)
    rows, places = keys.cut.row[tokens] - first_row, torch.from_numpy(_places(keys.layout, tokens))
    dense = queries.layout.dense and keys.layout.dense
    return Reach(*_count(lengths, counts), _as_run(rows), places, dense, window > 0, window)


def _count(queries: list[int], keys: list[int]) -> tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]:
    """Where groups end, and how long they are, given both lengths of each."""
    return _ends(queries), _ends(keys), tuple(zip(queries, keys, strict=True))


def _places(layout: Layout, tokens: Ints) -> Ints:
    ends = layout.offsets.numpy().astype(np.int64)
    return tokens - ends[np.searchsorted(ends, tokens, side="right") - 1]


def _ends(lengths: list[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def _as_run(rows: Ints) -> Tensor | slice:
    """Rows that follow one another need not be copied together."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
