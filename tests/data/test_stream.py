"""The contract of every kind of data: micro-batches are pure, and each epoch holds each sample once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.batch import IGNORE
from stretto.data import Data
from stretto.data.splits import count_held_out
from stretto.data.stream import EpochOrder, Purpose, random_rows, random_stream
from tests.data.corpora import Opener, same


@pytest.fixture(params=["causal", "masked", "padded", "translation", "images"])
def settings(request: pytest.FixtureRequest, corpus: Path, parallel: str, tmp_path: Path) -> dict[str, Any]:
    text = {"train": str(corpus), "seq_len": 16, "batch_size": 6, "held_out": 0.2}
    if request.param == "images":
        np.savez(
            tmp_path / "images.npz",
            images=np.arange(22 * 16, dtype=np.uint8).reshape(22, 4, 4),
            labels=np.arange(22) % 3,
        )
        return {"task": "images", "train": str(tmp_path / "images.npz"), "batch_size": 6, "image_size": 4}
    if request.param == "translation":
        return {"task": "translation", "train": parallel, "languages": ("en", "de"), "max_tokens": 200, "held_out": 0.2}
    if request.param == "padded":
        return text | {"layout": "padded"}
    return text | {"task": request.param}


def test_batches_do_not_depend_on_what_was_asked_before(opened: Opener, settings: dict[str, Any]) -> None:
    data = opened(**settings)
    expected = [data.train_batch(i) for i in range(30)]
    fresh = opened(**settings)
    assert all(same(fresh.train_batch(i), expected[i]) for i in reversed(range(30)))
    with ThreadPoolExecutor(4) as threads:
        order = [i * 7 % 30 for i in range(30)]
        assert all(
            same(batch, expected[i]) for i, batch in zip(order, threads.map(data.train_batch, order), strict=True)
        )


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_hold_what_the_whole_holds(opened: Opener, settings: dict[str, Any], parts: int) -> None:
    """Each sample once, with the same masks: the same labels, and as many tokens."""
    data = opened(**settings)
    for index in range(12):
        whole, shares = data.train_batch(index), [data.train_batch(index, part, parts) for part in range(parts)]
        assert sorted(sample for share in shares for sample in share.samples) == sorted(whole.samples)
        sizes = [len(share.samples) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        labels = [torch.cat([batch.labels for batch in batches]) for batches in ([whole], shares)]
        one, several = (found[found != IGNORE].sort().values for found in labels)
        assert torch.equal(one, several)
        for key in ("tokens", "labels", "pairs", "source_tokens"):
            assert sum(getattr(share.counts, key) for share in shares) == getattr(whole.counts, key)


def test_evaluation_is_always_the_same(opened: Opener, settings: dict[str, Any]) -> None:
    data = opened(**settings)
    expected = [data.eval_batch(i) for i in range(data.num_eval_batches)]
    data.train_batch(3)
    fresh = opened(**settings)
    assert all(same(fresh.eval_batch(i), batch) for i, batch in enumerate(expected))
    samples = [sample for batch in expected for sample in batch.samples]
    assert len(set(samples)) == len(samples) > 0


def test_each_epoch_holds_each_sample_once(opened: Opener, settings: dict[str, Any]) -> None:
    data = opened(**settings)
    samples: list[int] = []
    for i in range(1000):
        samples += data.train_batch(i).samples
        if len(samples) >= 3 * data.num_train:
            break
    epochs = [samples[i * data.num_train : (i + 1) * data.num_train] for i in range(3)]
    assert all(len(set(epoch)) == data.num_train for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    if "batch_size" in settings:
        assert data.num_train % settings["batch_size"], "the test wants micro-batches over the end of an epoch"


def test_seeds_differ(opened: Opener, settings: dict[str, Any]) -> None:
    assert opened(seed=1, **settings).train_batch(0).samples != opened(seed=2, **settings).train_batch(0).samples


def test_description_is_one_line(opened: Opener, settings: dict[str, Any]) -> None:
    data: Data = opened(**settings)
    assert f"{data.num_train:,}" in data.describe()
    assert "evaluation" in data.describe()
    assert "\n" not in data.describe()


def test_micro_batch_larger_than_an_epoch() -> None:
    counts = Counter(EpochOrder(0, 3).samples(range(0, 12)))
    assert counts == {0: 4, 1: 4, 2: 4}


def test_random_streams_differ_by_every_argument() -> None:
    keys = [(s, p, n) for s in (0, 1, -1) for p in Purpose for n in (0, 1, 2**40)]
    assert len({random_stream(*key).integers(2**62) for key in keys}) == len(keys)


@pytest.mark.parametrize("shape", [(9, 3, 5), (9, 1, 1), (9, 2, 4)])
def test_random_rows_depend_on_their_position_alone(shape: tuple[int, int, int]) -> None:
    rows = random_rows(1, Purpose.MASK, 0, shape)
    assert rows.shape == shape and rows.min() >= 0 and rows.max() < 1
    assert len(np.unique(rows)) == rows.size, "no number comes twice"
    for first in range(8):
        assert np.array_equal(random_rows(1, Purpose.MASK, first, (2, *shape[1:])), rows[first : first + 2])
    for seed, purpose in ((2, Purpose.MASK), (1, Purpose.EVAL_MASK)):
        assert not np.isin(random_rows(seed, purpose, 0, shape), rows).any()


@pytest.mark.parametrize(("total", "share", "expected"), [(100, 0.02, 2), (10, 0.01, 1), (10, 0.99, 9), (2, 0.5, 1)])
def test_held_out_is_never_nothing_nor_everything(total: int, share: float, expected: int) -> None:
    assert count_held_out(total, share) == expected
