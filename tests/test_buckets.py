"""Packed batches in few shapes: the same loss and gradients, little filler, and few shapes indeed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batch import IGNORE, Batch, Sequences, shape_of
from stretto.buckets import LEAST, PARTS, round_to_bucket, round_to_power, to_bucket
from stretto.config import DataConfig
from stretto.data import open_data
from stretto.data.pairs import PairData, SizedPairs
from stretto.data.tokenizer import ByteTokenizer
from stretto.data.tokens import Tokens
from stretto.graphs import MOST
from tests.data.corpora import same, sentence
from tests.models import (
    CONFIGS,
    MAX_LEN,
    Sample,
    build_on_cpu,
    collate,
    example_batch,
    largest_error,
    loss_and_gradients,
)

EXACT = 1e-12  # of float64: only the order of sums may change
NAMES = ["decoder", "decoder-rotary", "encoder", "encoder-decoder"]


def draw(name: str, lengths: list[tuple[int, int]], empty: int = 0) -> Batch:
    samples = [Sample.draw(length, source, seed) for seed, (length, source) in enumerate(lengths)]
    return collate(CONFIGS[name], samples, empty=empty)


def check_structure(batch: Batch, bucket: Batch) -> None:
    """The real sequences come first, the longest in front; every other token belongs to a sequence of its own kind
    behind them."""
    assert batch.inputs is not None and bucket.inputs is not None
    sides = [(batch.inputs, bucket.inputs)]
    if batch.source is not None and bucket.source is not None:
        sides.append((batch.source, bucket.source))
    lengths = [side.layout.offsets.diff().tolist() for side, _ in sides]
    order = sorted(range(len(lengths[0])), key=lambda i: -sum(some[i] for some in lengths))
    real = sum(map(any, zip(*lengths, strict=True)))  # sequences with tokens on either side; empty ones are at the end
    moved = []
    for (side, filled), some in zip(sides, lengths, strict=True):
        count, offsets, begins = len(side.ids), filled.layout.offsets, side.layout.offsets.tolist()
        came_from = torch.tensor([j for i in order for j in range(begins[i], begins[i + 1])])
        moved.append(came_from)
        assert torch.equal(filled.ids[:count], side.ids[came_from])
        assert offsets.diff().tolist()[:real] == [some[i] for i in order[:real]]
        assert offsets.dtype == torch.int32 and (offsets.diff() >= 0).all() and offsets[-1] == len(filled.ids)
        assert int(offsets.diff().max()) == max(some) <= filled.layout.max_len
        starts = torch.repeat_interleave(offsets[:-1].long(), offsets.diff().long())
        assert torch.equal(filled.positions, torch.arange(len(filled.ids)) - starts)
        assert len(filled.ids) == round_to_bucket(count) == round_to_bucket(len(filled.ids))
        assert filled.layout.num_sequences == round_to_power(filled.layout.num_sequences)
        assert filled.layout.max_len == round_to_power(filled.layout.max_len)
    assert len({filled.layout.num_sequences for _, filled in sides}) == 1
    count = len(batch.labels)
    assert (bucket.labels[count:] == IGNORE).all()
    if batch.label_at is None or bucket.label_at is None:
        assert torch.equal(bucket.labels[:count], batch.labels[moved[0]])
    else:
        assert torch.equal(bucket.labels[:count], batch.labels)
        assert torch.equal(moved[0][bucket.label_at[:count]], batch.label_at)
        assert len(bucket.label_at) == len(bucket.labels) == round_to_bucket(len(bucket.labels))
        assert int(bucket.label_at.min()) >= 0 and int(bucket.label_at.max()) < len(bucket.inputs.ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12),
    empty=st.integers(0, 3),
)
def test_loss_and_gradients_stay(name: str, lengths: list[tuple[int, int]], empty: int) -> None:
    model, batch = build_on_cpu(CONFIGS[name], torch.float64), draw(name, lengths, empty)
    bucket = to_bucket(batch)
    check_structure(batch, bucket)
    assert largest_error(loss_and_gradients(model, bucket), loss_and_gradients(model, batch)) < EXACT


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],  # more filler than real tokens, in many sequences
        [(2, 3)],
        [(MAX_LEN, MAX_LEN), (MAX_LEN - 1, 1)],  # no position is left above
        [(8, 8), (8, 8)],  # nothing to fill
        [(8, 5), (8, 8)],  # filler on one side alone
        [(5, 8), (8, 8)],
        [(4, 4)] * 8,  # sequences are at the edge, without and with those of filler
        [(5, 4)] * 8,
        [(5, 7)] * 7,
    ],
)
def test_edges(name: str, lengths: list[tuple[int, int]]) -> None:
    model, batch = build_on_cpu(CONFIGS[name], torch.float64), draw(name, lengths)
    bucket = to_bucket(batch)
    check_structure(batch, bucket)
    found, wanted = loss_and_gradients(model, bucket), loss_and_gradients(model, batch)
    assert largest_error(found, wanted) < EXACT
    assert all(torch.isfinite(value).all() for value in found.values())


def test_filler_that_is_seen_is_noticed() -> None:
    """The control of the tests above: were filler a part of the last sequence, an encoder would look at it."""
    model, batch = build_on_cpu(CONFIGS["encoder"], torch.float64), draw("encoder", [(7, 1), (6, 1)])
    bucket = to_bucket(batch)
    assert bucket.inputs is not None
    offsets = bucket.inputs.layout.offsets.clone()
    offsets[2:] = offsets[-1]
    joined = replace(bucket.inputs, layout=replace(bucket.inputs.layout, offsets=offsets))
    found = loss_and_gradients(model, replace(bucket, inputs=joined))
    assert largest_error(found, loss_and_gradients(model, batch)) > 1e-4


def test_counts_cover_both_sides() -> None:
    batch = draw("encoder-decoder", [(5, 9), (6, 8)])
    batch = replace(batch, counts=replace(batch.counts, tokens=11, slots=11, source_tokens=17, source_slots=17))
    assert batch.counts.padding == 0
    counts = to_bucket(batch).counts
    assert (counts.slots, counts.source_slots, counts.all_slots, counts.padding) == (16, 24, 40, 12)
    assert (counts.tokens, counts.source_tokens) == (11, 17)


def test_token_types_are_filled_too() -> None:
    batch = draw("encoder", [(7, 1), (6, 1)])
    assert batch.inputs is not None
    batch = replace(batch, inputs=replace(batch.inputs, types=torch.arange(13) % 2))
    model, bucket = build_on_cpu(CONFIGS["encoder"], torch.float64), to_bucket(batch)
    assert bucket.inputs is not None and bucket.inputs.types is not None and len(bucket.inputs.types) == 16
    assert largest_error(loss_and_gradients(model, bucket), loss_and_gradients(model, batch)) < EXACT


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "vit"])
def test_dense_batches_come_back_as_they_are(name: str) -> None:
    batch = example_batch(CONFIGS[name], "padded")
    assert to_bucket(batch) is batch


def test_rounding() -> None:
    for count in [*range(1, 3000), 4096, 16383, 16384, 16385]:
        bucket = round_to_bucket(count)
        assert bucket >= count and bucket % LEAST == 0 and (bucket - count) * PARTS <= max(count, LEAST * PARTS)
        assert round_to_bucket(bucket) == bucket
        assert round_to_power(count) >= LEAST and count <= round_to_power(count) < max(2 * count, LEAST + 1)
    buckets = {round_to_bucket(count) for count in range(8192, 16385)}
    assert len(buckets) == PARTS + 1


def sentences(random: np.random.Generator, lengths: np.ndarray) -> Tokens:
    """Documents of these lengths, begin and end not counted."""
    starts = np.concatenate([[0], np.cumsum(lengths + 2)])
    return Tokens(random.integers(0, 256, starts[-1]).astype(np.uint16), starts)


def translation(max_tokens: int, pairs: int) -> PairData:
    random = np.random.default_rng(0)
    source = np.clip(np.rint(random.lognormal(np.log(24), 0.6, pairs)), 4, 200).astype(np.int64)
    target = np.maximum(np.rint(source * (1 + 0.15 * random.standard_normal(pairs))), 1).astype(np.int64)
    cfg = DataConfig(task="translation", languages=("a", "b"), max_tokens=max_tokens, seq_len=400)
    sides = sentences(random, source), sentences(random, target)
    split = SizedPairs("data.train", sides, range(pairs), cfg)
    return PairData(cfg, 0, "", ByteTokenizer(), split, split)


def count_shapes(batches: Iterable[Batch]) -> tuple[Counter[object], float]:
    """And the share of filler."""
    shapes, slots, padding = Counter[object](), 0, 0
    for batch in batches:
        bucket = to_bucket(batch)
        shapes[shape_of(bucket)] += 1
        slots, padding = slots + bucket.counts.all_slots, padding + bucket.counts.padding
    return shapes, padding / slots


@pytest.mark.parametrize(("max_tokens", "pairs"), [(4096, 20_000), (16384, 60_000)])
def test_translation_has_few_shapes_and_little_filler(max_tokens: int, pairs: int) -> None:
    data = translation(max_tokens, pairs)
    num_batches = data._train.num_batches
    plain = {shape_of(data.train_batch(i)) for i in range(num_batches)}
    shapes, filler = count_shapes(data.train_batch(i) for i in range(2 * num_batches))
    assert len(plain) > 0.9 * num_batches, "the control: without buckets hardly any two are alike"
    assert len(shapes) <= MOST and 0 < filler < 0.03
    assert min(shapes.values()) >= 2, "the second epoch has the shapes of the first"


def test_masked_documents_have_few_shapes_and_little_filler(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}.txt").write_text(sentence(i, 5 + i * 37 % 90))
    cfg = DataConfig(task="masked", train=str(tmp_path), suffix=".txt", seq_len=100, batch_size=7)
    data = open_data(cfg, seed=0, folder=tmp_path / "run")
    batches = [data.train_batch(i) for i in range(2 * -(-data.num_train // 7))]
    assert batches[0].inputs is not None and not batches[0].inputs.layout.dense
    shapes, filler = count_shapes(batches)
    assert len(shapes) <= 4 and 0 < filler < 0.03


def test_packed_pairs_of_one_length_change_places_only_among_themselves() -> None:
    data = translation(4096, 3000)
    first, second = (data._train.shuffle(np.random.default_rng(seed))[0] for seed in (1, 2))
    assert not np.array_equal(first, second)
    for lengths in (data._train._source_lengths, data._train._target_lengths):
        assert np.array_equal(lengths[first], lengths[second])
        assert np.array_equal(lengths[first], lengths[data._train.pairs])


def test_a_bucket_is_a_function_of_the_batch() -> None:
    data = translation(4096, 3000)
    batch = data.train_batch(3)
    assert same(to_bucket(batch), to_bucket(batch)) and isinstance(batch.source, Sequences)
