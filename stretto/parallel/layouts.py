"""Which process gets which tokens of a batch, when several processes share its sequences.

A unit of tokens is cut into chunks of equal size, up to one token, and a pattern says whose each chunk is:

    contiguous   0 1 2 3                process p has one run of tokens
    zigzag       0 1 2 3 3 2 1 0        an early and a late run: with a causal mask every process has as much to do

The unit is a row of a dense batch, or a packed batch as a whole. `documents` is a zigzag in which each sequence of a
packed batch is a unit, so that the work is even however long they are. Tokens that chunks have more than others go to
the processes with the fewest so far; what is still missing to the same number everywhere is filler, at the end.

Within a process tokens stay in order: what it has of a sequence is a subsequence, and a causal mask over these tokens
alone is the causal mask of the sequence, restricted to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.batch import Layout

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Cut:
    """T tokens over several processes, `size` for each of them."""

    owner: Ints  # [T]
    row: Ints  # [T]: where a token is among those of all processes, one process after the other
    size: int
    parts: int

    def tokens(self, part: int) -> Ints:
        """Which ones a process has, in order; filler follows them."""
        return np.flatnonzero(self.owner == part)


def cut(layout: Layout, num_tokens: int, parts: int, name: str) -> Cut:
    pattern = np.arange(parts) if name == "contiguous" else np.append(np.arange(parts), np.arange(parts)[::-1])
    owner, load = np.empty(num_tokens, np.int64), np.zeros(parts, np.int64)
    ends = layout.offsets.numpy() if layout.dense or name == "documents" else np.array([0, num_tokens])
    for begin, end in pairwise(ends):
        sizes = np.full(len(pattern), (end - begin) // len(pattern))
        sizes[np.argsort(load[pattern], kind="stable")[: (end - begin) % len(pattern)]] += 1
        owner[begin:end] = np.repeat(pattern, sizes)
        load += np.bincount(pattern, sizes, parts).astype(np.int64)
    size = int(load.max())
    row = np.empty(num_tokens, np.int64)
    for part in range(parts):
        row[owner == part] = part * size + np.arange(load[part])
    return Cut(owner, row, size, parts)


def split(x: Tensor, of: Cut, part: int, fill: Any) -> Tensor:
    """[T, ...] to what a process gets, [size, ...]."""
    mine = x.new_full((of.size, *x.shape[1:]), fill)
    tokens = of.tokens(part)
    mine[: len(tokens)] = x[torch.from_numpy(tokens)]
    return mine
