"""From numpy arrays to `Sequences`: packed (no padding) or padded (a rectangle).

Both forms take the ids of all sequences as one flat run, and the length of each sequence. T: number of real tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.batch import Counts, Layout, Sequences, dense_layout
from stretto.buckets import round_to_power
from stretto.data.stream import Int64s

Ints = npt.NDArray[Any]


def to_tensor(values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))


def count(lengths: Int64s, slots: int, labels: int, source: Int64s | None = None, source_slots: int = 0) -> Counts:
    """Counts what speed and MFU are measured in, given the lengths of all sequences."""
    own = int(lengths.sum()), slots, labels, int((lengths**2).sum())
    if source is None:
        return Counts(*own)
    return Counts(*own, int(source.sum()), source_slots, int((source**2).sum()), int((lengths * source).sum()))


def count_positions(lengths: Int64s) -> Int64s:
    """Returns the place of each of the T tokens in its own sequence."""
    begins = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(begins, lengths)


def pack(ids: Ints, lengths: Int64s, max_len: int, num_sequences: int = 0) -> Sequences:
    """Packs sequences without padding. Empty sequences are added at the end up to `num_sequences`."""
    offsets = np.full(max(len(lengths), num_sequences) + 1, len(ids), np.int32)
    offsets[0] = 0
    offsets[1 : len(lengths) + 1] = np.cumsum(lengths)
    return Sequences(to_tensor(ids), to_tensor(count_positions(lengths)), Layout(torch.from_numpy(offsets), max_len))


def pad(ids: Ints, lengths: Int64s, width: int, fill: int) -> Sequences:
    """Makes one row of each sequence, filled up to `width`."""
    rows = len(lengths)
    layout = dense_layout(rows, width, torch.from_numpy(lengths.astype(np.int32)))
    filled = spread(ids, find_slots(lengths, width), rows * width, fill)
    return Sequences(to_tensor(filled), to_tensor(np.tile(np.arange(width), rows)), layout)


def arrange(ids: Ints, lengths: Int64s, fill: int, *, padded: bool) -> Sequences:
    """Packs sequences, or pads them to the longest."""
    longest = int(lengths.max())
    if padded:
        return pad(ids, lengths, longest, fill)
    return pack(ids, lengths, max_len=-(-longest // 8) * 8)  # a multiple of 8: fewer shapes to compile


def pack_windows(ids: Ints, lengths: Int64s, seq_len: int) -> Sequences:
    """Packs sequences of at most `seq_len` tokens. Powers of two bound them, so that compiled code sees few shapes."""
    longest = min(seq_len, round_to_power(int(lengths.max()), least=1))
    return pack(ids, lengths, longest, num_sequences=round_to_power(len(lengths), least=1))


def find_slots(lengths: Int64s, width: int) -> Int64s:
    """Finds the place of each of the T tokens in the flat rectangle that `pad` makes."""
    return np.repeat(np.arange(len(lengths)) * width, lengths) + count_positions(lengths)


def spread(values: Ints, slots: Int64s, size: int, fill: int) -> Int64s:
    spread_out = np.full(size, fill, np.int64)
    spread_out[slots] = values
    return spread_out
