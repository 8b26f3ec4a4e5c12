"""Random batches: drawn once as numpy arrays, then put into the form that each contestant reads best.

Everyone trains on the same ids, lengths and labels. Stretto reads rows of one length as they are and others packed;
peers.py pads them and adds a mask. Id 0 is kept for padding and for the start of a translation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from stretto.batch import IGNORE, Batch, Counts, Sequences, dense_layout
from stretto.bench.workloads import LogNormal, Workload
from stretto.config import ModelConfig
from stretto.data.packing import count_positions, pack, to_tensor
from stretto.data.pairs import cut_batches
from stretto.data.stream import Int64s

MASK_SHARE = 0.15
CORPUS = 20_000  # sentence pairs to sort and cut into batches


@dataclass(frozen=True)
class Text:
    ids: Int64s  # [T], one sequence after another
    lengths: Int64s  # [N]
    width: int  # tokens of each row where contestants pad


@dataclass(frozen=True)
class Draw:
    """One batch before it takes anyone's form."""

    labels: Int64s  # [T], IGNORE where nothing is predicted; for images the classes, [N]
    ragged: bool = False  # lengths differ
    inputs: Text | None = None
    source: Text | None = None  # translation
    pixels: npt.NDArray[np.float32] | None = None  # [N, channels, height, width]


def draw_batches(workload: Workload, cfg: ModelConfig, seed: int = 0) -> list[Draw]:
    random, count = np.random.default_rng(seed), workload.num_batches
    if cfg.kind == "vit":
        return [_draw_images(workload.rows, cfg, random) for _ in range(count)]
    if cfg.kind == "encoder-decoder":
        sizes = _cut_corpus(workload, random) if workload.budget else [_full_rows(workload)] * count
        return [_draw_pairs(*lengths, cfg.vocab, workload.budget > 0, random) for lengths in sizes]
    return [_draw_text(workload, cfg, random) for _ in range(count)]


def to_batch(draw: Draw, cfg: ModelConfig) -> Batch:
    """Makes the batch that Stretto reads, without padding."""
    label_at, labels = None, draw.labels
    if cfg.kind == "encoder":
        label_at = np.flatnonzero(labels != IGNORE)
        labels = labels[label_at]
    counts = count(draw)
    return Batch(
        labels=to_tensor(labels),
        counts=replace(counts, slots=counts.tokens, source_slots=counts.source_tokens),
        samples=(),
        inputs=None if draw.inputs is None else _arrange(draw.inputs, draw.ragged),
        label_at=None if label_at is None else to_tensor(label_at),
        source=None if draw.source is None else _arrange(draw.source, draw.ragged),
        pixels=None if draw.pixels is None else torch.from_numpy(draw.pixels),
    )


def count(draw: Draw) -> Counts:
    """Counts what speed and MFU are measured in; `slots` are those of a peer, which pads."""
    num_labels = int((draw.labels != IGNORE).sum())
    if draw.inputs is None:
        return Counts(tokens=num_labels, slots=num_labels, labels=num_labels, pairs=0)
    own, other = draw.inputs.lengths, np.zeros(0, np.int64) if draw.source is None else draw.source.lengths
    return Counts(
        tokens=int(own.sum()),
        slots=len(own) * draw.inputs.width,
        labels=num_labels,
        pairs=int((own**2).sum()),
        source_tokens=int(other.sum()),
        source_slots=0 if draw.source is None else len(other) * draw.source.width,
        source_pairs=int((other**2).sum()),
        cross_pairs=0 if draw.source is None else int((own * other).sum()),
    )


def _arrange(text: Text, ragged: bool) -> Sequences:
    if ragged:
        return pack(text.ids, text.lengths, max_len=-(-text.width // 8) * 8)
    positions = to_tensor(count_positions(text.lengths))
    return Sequences(to_tensor(text.ids), positions, dense_layout(len(text.lengths), text.width))


def _draw_text(workload: Workload, cfg: ModelConfig, random: np.random.Generator) -> Draw:
    lengths = np.full(workload.rows, workload.length, np.int64)
    if workload.lengths is not None:
        lengths = draw_lengths(workload.lengths, workload.rows, random)
    ids = random.integers(1, cfg.vocab, lengths.sum())
    if cfg.kind == "decoder":
        labels = np.append(ids[1:], IGNORE)
        labels[np.cumsum(lengths) - 1] = IGNORE  # nothing follows the last token of a row
    else:
        labels = np.full(len(ids), IGNORE)
        chosen = random.choice(len(ids), round(MASK_SHARE * len(ids)), replace=False)
        labels[chosen] = random.integers(1, cfg.vocab, len(chosen))
    return Draw(labels, workload.lengths is not None, Text(ids, lengths, workload.length))


def _draw_pairs(
    source_lengths: Int64s, target_lengths: Int64s, vocab: int, ragged: bool, random: np.random.Generator
) -> Draw:
    source, target = (random.integers(1, vocab, lengths.sum()) for lengths in (source_lengths, target_lengths))
    begins = np.cumsum(target_lengths) - target_lengths
    read = np.roll(target, 1)
    read[begins] = 0  # the decoder reads the start symbol, then what it should have written
    return Draw(
        labels=target,
        ragged=ragged,
        inputs=Text(read, target_lengths, int(target_lengths.max())),
        source=Text(source, source_lengths, int(source_lengths.max())),
    )


def _draw_images(rows: int, cfg: ModelConfig, random: np.random.Generator) -> Draw:
    pixels = random.standard_normal((rows, cfg.channels, cfg.image_size, cfg.image_size), dtype=np.float32)
    return Draw(random.integers(0, cfg.classes, rows), pixels=pixels)


def draw_lengths(shape: LogNormal, size: int, random: np.random.Generator) -> Int64s:
    values = np.rint(random.lognormal(np.log(shape.median), shape.sigma, size))
    return np.clip(values, shape.shortest, shape.longest).astype(np.int64)


def _full_rows(workload: Workload) -> tuple[Int64s, Int64s]:
    source, target = workload.source_length or workload.length, workload.length
    return np.full(workload.rows, source, np.int64), np.full(workload.rows, target, np.int64)


def _cut_corpus(workload: Workload, random: np.random.Generator) -> list[tuple[Int64s, Int64s]]:
    """Source and target lengths of batches spread evenly over a corpus that is sorted by length and cut by budget."""
    assert workload.lengths is not None
    source = draw_lengths(workload.lengths, CORPUS, random)
    target = np.maximum(np.rint(source * (1 + 0.15 * random.standard_normal(CORPUS))), 1).astype(np.int64)
    order = np.lexsort((target, source))  # by source first, as fairseq does
    source, target = source[order], target[order]
    cuts = list(cut_batches(np.stack([target, source]), workload.budget, padded=True))
    chosen = (np.arange(workload.num_batches) + 0.5) * (len(cuts) - 1) / workload.num_batches
    return [(source[cuts[i] : cuts[i + 1]], target[cuts[i] : cuts[i + 1]]) for i in chosen.astype(np.int64)]
