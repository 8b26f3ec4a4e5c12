"""Random batches, the same for everyone, in the form that Stretto reads best: rows of one length as a rectangle, others
packed. peers.py pads these and adds a mask. Id 0 is kept for padding and for the start of a translation.
"""

from __future__ import annotations

import numpy as np
import torch

from stretto.batch import IGNORE, Batch, Counts, Sequences, dense_layout
from stretto.bench.workloads import LogNormal, Workload
from stretto.config import ModelConfig
from stretto.data.packing import count, count_positions, pack, to_tensor
from stretto.data.pairs import cut_batches
from stretto.data.stream import Int64s

MASK_SHARE = 0.15
CORPUS = 20_000  # sentence pairs to sort and cut into batches


def draw_batches(workload: Workload, cfg: ModelConfig) -> list[Batch]:
    random, num_batches = np.random.default_rng(0), workload.num_batches
    if cfg.kind == "vit":
        return [_draw_images(workload.rows, cfg, random) for _ in range(num_batches)]
    if cfg.kind == "encoder-decoder":
        sizes = _cut_corpus(workload, random) if workload.budget else [_full_rows(workload)] * num_batches
        return [_draw_pairs(*lengths, cfg.vocab, workload.budget > 0, random) for lengths in sizes]
    return [_draw_text(workload, cfg, random) for _ in range(num_batches)]


def _draw_text(workload: Workload, cfg: ModelConfig, random: np.random.Generator) -> Batch:
    lengths = np.full(workload.rows, workload.length, np.int64)
    if workload.lengths is not None:
        lengths = draw_lengths(workload.lengths, workload.rows, random)
    ids, label_at = random.integers(1, cfg.vocab, lengths.sum()), None
    if cfg.classes:  # read at the first token of each text
        labels, label_at = random.integers(0, cfg.classes, len(lengths)), to_tensor(np.cumsum(lengths) - lengths)
    elif cfg.kind == "decoder":
        labels = np.append(ids[1:], IGNORE)
        labels[np.cumsum(lengths) - 1] = IGNORE  # nothing follows the last token of a row
    else:
        chosen = random.choice(len(ids), round(MASK_SHARE * len(ids)), replace=False)
        order = chosen.argsort()
        labels, label_at = random.integers(1, cfg.vocab, len(chosen))[order], to_tensor(chosen[order])
    counts = count(lengths, len(ids), labels=int((labels != IGNORE).sum()))
    inputs = _arrange(ids, lengths, workload.length, workload.lengths is not None)
    return Batch(to_tensor(labels), counts, (), inputs, label_at)


def _draw_pairs(
    source_lengths: Int64s, target_lengths: Int64s, vocab: int, ragged: bool, random: np.random.Generator
) -> Batch:
    source, target = (random.integers(1, vocab, lengths.sum()) for lengths in (source_lengths, target_lengths))
    read = np.roll(target, 1)
    read[np.cumsum(target_lengths) - target_lengths] = 0  # the start symbol, then what should have been written
    return Batch(
        labels=to_tensor(target),
        counts=count(target_lengths, len(target), len(target), source_lengths, len(source)),
        samples=(),
        inputs=_arrange(read, target_lengths, int(target_lengths.max()), ragged),
        source=_arrange(source, source_lengths, int(source_lengths.max()), ragged),
    )


def _draw_images(rows: int, cfg: ModelConfig, random: np.random.Generator) -> Batch:
    pixels = random.standard_normal((rows, cfg.channels, cfg.image_size, cfg.image_size), dtype=np.float32)
    labels = to_tensor(random.integers(0, cfg.classes, rows))
    return Batch(labels, Counts(rows, rows, rows, pairs=0), (), pixels=torch.from_numpy(pixels))


def _arrange(ids: Int64s, lengths: Int64s, width: int, ragged: bool) -> Sequences:
    if ragged:
        return pack(ids, lengths, max_len=-(-width // 8) * 8)
    return Sequences(to_tensor(ids), to_tensor(count_positions(lengths)), dense_layout(len(lengths), width))


def draw_lengths(shape: LogNormal, size: int, random: np.random.Generator) -> Int64s:
    values = np.rint(random.lognormal(np.log(shape.median), shape.sigma, size))
    return np.clip(values, shape.shortest, shape.longest).astype(np.int64)


def _full_rows(workload: Workload) -> tuple[Int64s, Int64s]:
    source, target = workload.source_length or workload.length, workload.length
    return np.full(workload.rows, source, np.int64), np.full(workload.rows, target, np.int64)


def _cut_corpus(workload: Workload, random: np.random.Generator) -> list[tuple[Int64s, Int64s]]:
    """Draws source and target lengths of batches spread evenly over a corpus that is sorted by length and cut by
    budget."""
    assert workload.lengths is not None
    source = draw_lengths(workload.lengths, CORPUS, random)
    target = np.maximum(np.rint(source * (1 + 0.15 * random.standard_normal(CORPUS))), 1).astype(np.int64)
    order = np.lexsort((target, source))  # by source first, as fairseq does
    source, target = source[order], target[order]
    cuts = list(cut_batches(np.stack([target, source]), workload.budget, padded=True))
    chosen = (np.arange(workload.num_batches) + 0.5) * (len(cuts) - 1) / workload.num_batches
    return [(source[cuts[i] : cuts[i + 1]], target[cuts[i] : cuts[i + 1]]) for i in chosen.astype(np.int64)]
