"""Batches of few shapes and little padding, as many on every process, with every sample in each epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stretto.batch import IGNORE
from stretto.hf.loop import DataCollator, TokenBudgetSampler, bucket_length


def draw_lengths(count: int) -> list[int]:
    random = np.random.default_rng(0)
    lengths: list[int] = np.clip(np.rint(random.lognormal(np.log(60), 0.7, count)), 1, 500).astype(int).tolist()
    return lengths


def test_lengths_of_buckets() -> None:
    wanted = {1: 8, 8: 8, 9: 16, 63: 64, 64: 64, 65: 72, 128: 128, 129: 144, 500: 512}
    assert {length: bucket_length(length) for length in wanted} == wanted
    assert all(bucket_length(n) - n <= max(n / 8, 7) for n in range(1, 3000))


@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch(world: int) -> None:
    lengths = draw_lengths(2000)
    samplers = [TokenBudgetSampler(lengths, 2048, rank=rank, world=world) for rank in range(world)]
    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = [list(sampler) for sampler in samplers]
        assert {len(rank) for rank in ranks} == {len(samplers[0])}
        batches = [batch for rank in ranks for batch in rank]
        assert {i for batch in batches for i in batch} == set(range(len(lengths)))
        assert sum(map(len, batches)) - len(lengths) <= (world - 1) * max(map(len, batches)), "few are repeated"
        widths = [bucket_length(max(lengths[i] for i in batch)) for batch in batches]
        assert all(len(batch) * width <= 2048 for batch, width in zip(batches, widths, strict=True))
        shapes = {(len(batch), width) for batch, width in zip(batches, widths, strict=True)}
        assert len(shapes) <= len({bucket_length(n) for n in lengths}) + 1
        slots = sum(len(batch) * width for batch, width in zip(batches, widths, strict=True))
        assert sum(lengths[i] for batch in batches for i in batch) / slots > 0.88
        assert [list(sampler) for sampler in samplers] == ranks, "an epoch repeats"
        epochs.append(ranks)
    assert epochs[0] != epochs[1]


def test_what_cannot_be_sampled() -> None:
    with pytest.raises(ValueError, match="max_tokens = 64 is too small: a sample has 65 tokens, 72 with padding"):
        TokenBudgetSampler([3, 65], 64)
    with pytest.raises(ValueError, match="empty"):
        TokenBudgetSampler([], 64)


def test_padded_rows() -> None:
    samples = [
        {"input_ids": [5, 6, 7], "token_type_ids": [0, 1, 1], "labels": [1, 2], "weight": 0.5},
        {"input_ids": list(range(10)), "token_type_ids": [1] * 10, "labels": [3], "weight": 2.0},
    ]
    batch = DataCollator(pad_token_id=9)(samples)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "attention_mask": (2, 16), "input_ids": (2, 16), "token_type_ids": (2, 16), "labels": (2, 8), "weight": (2,)
    }  # fmt: skip
    assert batch["attention_mask"].sum(1).tolist() == [3, 10]
    assert batch["input_ids"][0].tolist() == [5, 6, 7] + [9] * 13
    assert batch["token_type_ids"][1].tolist() == [1] * 10 + [0] * 6
    assert batch["labels"].tolist() == [[1, 2, *[IGNORE] * 6], [3, *[IGNORE] * 7]]
    assert batch["weight"].tolist() == [0.5, 2.0]


def test_packed_documents() -> None:
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": list(range(20, 30))}]
    batch = DataCollator(pad_token_id=9, packed=True)(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 7, *range(20, 30), 9, 9, 9]]
    assert batch["labels"].tolist() == [[IGNORE, 6, 7, IGNORE, *range(21, 30), *[IGNORE] * 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, *range(10), 0, 1, 2]]
    labelled = DataCollator(9, packed=True)([{"input_ids": [1, 2, 3], "labels": [IGNORE, IGNORE, 3]}])
    assert labelled["labels"][0, :3].tolist() == [IGNORE, IGNORE, 3] and labelled["input_ids"].shape == (1, 8)


def test_what_cannot_be_collated() -> None:
    with pytest.raises(ValueError, match="no pad token"):
        DataCollator(None)
    with pytest.raises(ValueError, match="labels has not one element"):
        DataCollator(0, packed=True)([{"input_ids": [1, 2, 3], "labels": torch.tensor([1, 2])}])
