"""Packed batches in few shapes, so that a CUDA graph of each can be kept.

A packed batch has as many tokens as its sequences happen to have, and hardly any two are alike. `to_bucket` rounds
everything up that work is laid out by:

    tokens of a side, labels    to a multiple of 1/32 of the power of two below: at most 1/32 is filler, half on average
    sequences                   to a power of two, by empty ones
    longest sequence            to a power of two, the same on both sides: it is only a bound

Filler tokens are sequences of their own behind the real ones, so neither sees the other, and their labels are ignored:
loss and gradients stay what they were, up to the order of sums. The real ones are put in order, the longest first: the
attention kernels begin with the first, and end together if they end with short ones. A dense batch comes back as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.batch import IGNORE, Batch, Layout, Sequences

PARTS = 32  # buckets between two powers of two
LEAST = 8  # of anything


def to_bucket(batch: Batch) -> Batch:
    """Rounds a batch up, on the CPU, before the batch moves to its device."""
    if not _sides(batch) or any(side.layout.dense for side in _sides(batch)):
        return batch
    batch = _longest_first(batch)
    sides = _sides(batch)
    fillers = [_find_fillers(side) for side in sides]
    # Sequence i of one side belongs to sequence i of the other: those of filler begin behind all real ones of both.
    real = max(int((side.layout.offsets < len(side.ids)).sum()) for side in sides)
    num_sequences = round_to_power(real + max(map(len, fillers)))
    max_len = round_to_power(max(side.layout.max_len for side in sides))
    filled = [_fill(side, lengths, real, num_sequences, max_len) for side, lengths in zip(sides, fillers, strict=True)]
    inputs, source = filled[0], filled[1] if len(filled) > 1 else None
    labels, label_at = _fill_labels(batch, len(inputs.ids))
    slots = {"slots": len(inputs.ids), "source_slots": 0 if source is None else len(source.ids)}
    return replace(
        batch, inputs=inputs, source=source, labels=labels, label_at=label_at, counts=replace(batch.counts, **slots)
    )


def round_to_bucket(count: int, parts: int = PARTS) -> int:
    step = max(2 ** (max(count, 1).bit_length() - 1) // parts, LEAST)  # less than one is added
    return max(-(-count // step) * step, LEAST)


def round_to_power(count: int, least: int = LEAST) -> int:
    return 1 << (max(count, least) - 1).bit_length()


def _sides(batch: Batch) -> list[Sequences]:
    return [side for side in (batch.inputs, batch.source) if side is not None]


def _longest_first(batch: Batch) -> Batch:
    lengths = torch.stack([side.layout.offsets.diff() for side in _sides(batch)]).sum(0)
    order = lengths.argsort(descending=True, stable=True)
    (inputs, came_from), *others = [_reorder(side, order) for side in _sides(batch)]
    labels, label_at = batch.labels, batch.label_at
    if label_at is None:
        labels = labels[came_from]
    else:
        label_at = came_from.argsort()[label_at]
    return replace(batch, inputs=inputs, source=others[0][0] if others else None, labels=labels, label_at=label_at)


def _reorder(side: Sequences, order: Tensor) -> tuple[Sequences, Tensor]:
    """Puts the sequences in another order, and returns which token came from where."""
    begins, lengths = side.layout.offsets[:-1][order], side.layout.offsets.diff()[order]
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    came_from = torch.repeat_interleave(begins - offsets[:-1], lengths) + torch.arange(len(side.ids))
    types = None if side.types is None else side.types[came_from]
    layout = replace(side.layout, offsets=offsets)
    return Sequences(side.ids[came_from], side.positions[came_from], layout, types), came_from


def _find_fillers(side: Sequences) -> list[int]:
    """Returns the lengths of the filler sequences: none is longer than the longest real one, so positions are known."""
    longest, count = max(int(side.layout.offsets.diff().max()), 1), round_to_bucket(len(side.ids)) - len(side.ids)
    return [longest] * (count // longest) + [count % longest] * (count % longest > 0)


def _fill(side: Sequences, fillers: list[int], real: int, num_sequences: int, max_len: int) -> Sequences:
    count, empty = sum(fillers), num_sequences - real - len(fillers)
    lengths = torch.tensor([*fillers, *[0] * empty], dtype=torch.int32)
    offsets = side.layout.offsets[: real + 1]
    offsets = torch.cat([offsets, offsets[-1] + lengths.cumsum(0, dtype=torch.int32)])
    positions = torch.cat([side.positions, *(torch.arange(length) for length in fillers)])
    types = None if side.types is None else F.pad(side.types, (0, count))
    layout = Layout(offsets, max_len, num_real=torch.tensor(len(side.ids)))
    return Sequences(F.pad(side.ids, (0, count)), positions, layout, types)


def _fill_labels(batch: Batch, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    if batch.label_at is None:
        assert batch.inputs is not None and len(batch.labels) == len(batch.inputs.ids), "a label for each token"
        return F.pad(batch.labels, (0, num_tokens - len(batch.labels)), value=IGNORE), None
    count = round_to_bucket(len(batch.labels)) - len(batch.labels)
    # Of the last tokens, filler first; what is ignored there has a gradient of exactly 0.
    at = num_tokens - 1 - torch.arange(count)
    return F.pad(batch.labels, (0, count), value=IGNORE), torch.cat([batch.label_at, at])
