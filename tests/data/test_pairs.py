"""Translation pairs: token budgets, layouts, what is dropped."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.batch import IGNORE, Batch, Sequences
from stretto.data import PairData
from stretto.data.pairs import cut_batches
from stretto.data.tokenizer import ByteTokenizer
from stretto.errors import DataError
from tests.data.corpora import Opener, sentence

T = ByteTokenizer()


def open_pairs(opened: Opener, prefix: str, **settings: Any) -> PairData:
    settings = {"max_tokens": 200, "seq_len": 64, "held_out": 0.2} | settings
    data = opened(task="translation", train=prefix, languages=("en", "de"), **settings)
    assert isinstance(data, PairData)
    return data


def rows(part: Sequences | None) -> list[list[int]]:
    assert part is not None
    lengths = part.layout.lengths if part.layout.lengths is not None else part.layout.offsets.diff()
    starts = part.layout.offsets.tolist()
    return [part.ids[s : s + n].tolist() for s, n in zip(starts, lengths.tolist(), strict=False)]


def epoch(data: PairData) -> list[Batch]:
    batches: list[Batch] = []
    while sum(len(batch.samples) for batch in batches) < data.num_train:
        batches.append(data.train_batch(len(batches)))
    return batches


def test_what_the_model_reads(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "t.en").write_text("hi\nyes\n")
    (tmp_path / "t.de").write_text("hallo\nja\n")
    data = open_pairs(opened, str(tmp_path / "t"), eval=str(tmp_path / "t"))
    batch = data.eval_batch(0)
    assert batch.samples == (1, 0), "by target length"
    assert rows(batch.source) == [[*b"yes", T.eos], [*b"hi", T.eos]]
    assert rows(batch.inputs) == [[T.bos, *b"ja"], [T.bos, *b"hallo"]]
    assert batch.labels.tolist() == [*b"ja", T.eos, *b"hallo", T.eos]
    assert batch.inputs is not None
    assert batch.inputs.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert batch.inputs.layout.max_len == 8
    counts = batch.counts
    assert (counts.tokens, counts.slots, counts.labels, counts.pairs) == (9, 9, 9, 3**2 + 6**2)
    assert (counts.source_tokens, counts.source_pairs, counts.cross_pairs) == (7, 4**2 + 3**2, 3 * 4 + 6 * 3)


def test_an_evaluation_begins_with_pairs_of_any_length(opened: Opener, parallel: str) -> None:
    data = open_pairs(opened, parallel, eval=parallel, max_tokens=96)
    batches = [data.eval_batch(i) for i in range(data.num_eval_batches)]
    assert sorted(sample for batch in batches for sample in batch.samples) == list(range(60))
    sides = [(batch.inputs, batch.source) for batch in batches]
    longest = [max(part.layout.max_len for part in both if part is not None) for both in sides]
    assert len(set(longest)) > 2 and longest != sorted(longest)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_budget_is_kept_and_used(opened: Opener, parallel: str, layout: str) -> None:
    data = open_pairs(opened, parallel, layout=layout)
    batches = epoch(data)
    assert sorted(sample for batch in batches for sample in batch.samples) == list(range(48))
    for batch in batches:
        assert batch.inputs is not None
        assert batch.source is not None
        assert max(batch.inputs.ids.numel(), batch.source.ids.numel()) <= 200
        assert batch.inputs.layout.dense == (layout == "padded")
    if layout == "packed":
        totals = [max(batch.counts.tokens, batch.counts.source_tokens) for batch in batches]
        assert sum(total > 130 for total in totals) >= len(totals) - 2, "batches are much smaller than they may be"
    second = [data.train_batch(len(batches) + i) for i in range(len(batches))]
    assert sorted(sample for batch in second for sample in batch.samples) == list(range(48))
    assert [set(batch.samples) for batch in batches] != [set(batch.samples) for batch in second], "same order"


def test_equally_long_pairs_change_places(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "t.en").write_text("ab\n" * 40)
    (tmp_path / "t.de").write_text("cd\n" * 40)
    data = open_pairs(opened, str(tmp_path / "t"), max_tokens=30)
    first = epoch(data)
    second = [data.train_batch(len(first) + i) for i in range(len(first))]
    assert {frozenset(batch.samples) for batch in first} != {frozenset(batch.samples) for batch in second}


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60),
    budget=st.integers(20, 90),
    padded=st.booleans(),
)
def test_cuts(sizes: list[tuple[int, int]], budget: int, padded: bool) -> None:
    table = np.array(sorted(sizes)).T

    def cost(start: int, end: int) -> int:
        part = table[:, start:end]
        return int(part.max() * part.shape[1] if padded else part.sum(axis=1).max())

    cuts = list(cut_batches(table, budget, padded=padded))
    assert cuts[0] == 0
    assert cuts[-1] == len(sizes)
    for start, end in pairwise(cuts):
        assert start < end
        assert cost(start, end) <= budget
        assert end == len(sizes) or cost(start, end + 1) > budget, "one more pair would have fitted"


def test_padded_and_packed_hold_the_same_pairs(opened: Opener, parallel: str) -> None:
    def by_sample(layout: str) -> dict[int, tuple[list[int], list[int], list[int]]]:
        found = {}
        for batch in epoch(open_pairs(opened, parallel, layout=layout)):
            assert batch.inputs is not None
            labels = batch.labels[batch.labels != IGNORE].split([len(row) for row in rows(batch.inputs)])
            for i, sample in enumerate(batch.samples):
                found[sample] = (rows(batch.source)[i], rows(batch.inputs)[i], labels[i].tolist())
        return found

    packed = by_sample("packed")
    assert packed == by_sample("padded")
    for source, target, labels in packed.values():
        assert target[1:] == labels[:-1]
        assert source[-1] == labels[-1] == T.eos


def test_padding(opened: Opener, parallel: str) -> None:
    for batch in epoch(open_pairs(opened, parallel, layout="padded")):
        for part in (batch.inputs, batch.source):
            assert part is not None
            lengths = part.layout.lengths
            assert lengths is not None
            assert part.layout.max_len == lengths.max()
            padding = torch.arange(part.layout.max_len) >= lengths[:, None]
            assert (part.ids.view(padding.shape)[padding] == T.pad).all()
            if part is batch.inputs:
                assert ((batch.labels.view(padding.shape) == IGNORE) == padding).all()
                assert batch.counts.slots == part.ids.numel()


def test_empty_and_long_sentences_are_dropped_and_counted(opened: Opener, tmp_path: Path) -> None:
    lines = ["good", "", "x" * 64, "x" * 63, "good"]
    (tmp_path / "t.en").write_text("\n".join(lines) + "\n")
    (tmp_path / "t.de").write_text("gut\nda\nda\nda\n\n")
    data = open_pairs(opened, str(tmp_path / "t"), eval=str(tmp_path / "t"))
    assert sorted(data.eval_batch(0).samples) == [0, 3]
    assert data.num_train == 2
    assert "3 dropped" in data.describe()


def test_line_counts_must_match(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "t.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "t.de.gz").write_bytes(gzip.compress(b"eins\nzwei\n"))
    with pytest.raises(DataError, match=r"data\.train: .*t\.en has 3 lines but .*t\.de\.gz has 2"):
        open_pairs(opened, str(tmp_path / "t"))


def test_missing_file(opened: Opener, tmp_path: Path, parallel: str) -> None:
    with pytest.raises(DataError, match=r"data\.train = '.*nothing': there is no file .*nothing\.en"):
        open_pairs(opened, str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"data\.eval = '.*nothing'"):
        open_pairs(opened, parallel, eval=str(tmp_path / "nothing"))


def test_budget_below_one_sentence(opened: Opener, parallel: str) -> None:
    with pytest.raises(DataError, match=r"data\.max_tokens = 20 is too small"):
        open_pairs(opened, parallel, max_tokens=20)


def test_no_pair_fits(opened: Opener, parallel: str) -> None:
    with pytest.raises(DataError, match=r"data\.train: no pair .*data\.seq_len = 2"):
        open_pairs(opened, parallel, seq_len=2)


def test_test_pairs(opened: Opener, parallel: str, tmp_path: Path) -> None:
    (tmp_path / "test.en").write_text("a\nb\n")
    (tmp_path / "test.de").write_text("c\n\n")
    data = open_pairs(opened, parallel, test=str(tmp_path / "test"))
    assert data.load_test_pairs() == [("a", "c"), ("b", "")]
    data = open_pairs(opened, parallel, eval=str(tmp_path / "test"), held_out=0.5)
    assert data.load_test_pairs() == [("a", "c"), ("b", "")]
    held_out = open_pairs(opened, parallel).load_test_pairs()
    assert len(held_out) == 12
    assert held_out[0] == (sentence(48, 1), sentence(51, 8))


def test_joint_bpe(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "t.en").write_text("quick fox\n" * 30)
    (tmp_path / "t.de").write_text("schneller fuchs\n" * 30)
    data = open_pairs(opened, str(tmp_path / "t"), tokenizer="bpe", vocab=300)
    assert len(data.tokenizer.encode("quick")) < 3
    assert len(data.tokenizer.encode("schneller")) < 4
