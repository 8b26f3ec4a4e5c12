"""Windows, document boundaries, layouts and masking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.batch import IGNORE, Batch
from stretto.data.text import TextData
from stretto.data.tokenizer import ByteTokenizer, load_tokenizer
from stretto.errors import DataError
from tests.data.corpora import Opener, same

T = ByteTokenizer()
L = 16


def sequences(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """(ids, positions, labels) of each sequence that is not empty, whatever the layout."""
    inputs = batch.inputs
    assert inputs is not None
    layout = inputs.layout
    lengths = layout.lengths if layout.lengths is not None else layout.offsets.diff()
    labels = batch.labels
    if batch.label_at is not None:
        labels = torch.full_like(inputs.ids, IGNORE).index_copy(0, batch.label_at, batch.labels)
    parts = []
    for start, length in zip(layout.offsets.tolist(), lengths.tolist(), strict=False):
        part = slice(start, start + length)
        parts.append((inputs.ids[part].tolist(), inputs.positions[part].tolist(), labels[part].tolist()))
    return [part for part in parts if part[0]]


def two_documents(folder: Path) -> str:
    """Stream: bos a*9 eos | bos b*25 eos, so with L = 16 the second document begins at token 11."""
    folder.mkdir()
    (folder / "1.txt").write_text("a" * 9)
    (folder / "2.txt").write_text("b" * 25)
    return str(folder)


def test_document_ends(opened: Opener, tmp_path: Path) -> None:
    corpus = two_documents(tmp_path / "two")
    data = opened(train=corpus, eval=corpus, seq_len=L, batch_size=2)
    batch = data.eval_batch(0)
    a, b = ord("a"), ord("b")
    assert sequences(batch) == [
        ([T.bos] + [a] * 9 + [T.eos], list(range(11)), [a] * 9 + [T.eos, IGNORE]),
        ([T.bos] + [b] * 4, list(range(5)), [b] * 5),
        ([b] * 16, list(range(16)), [b] * 16),
    ]
    assert batch.inputs is not None
    assert batch.inputs.layout.offsets.tolist() == [0, 11, 16, 32, 32], "filled up to four sequences"
    assert batch.inputs.layout.offsets.dtype == torch.int32
    assert batch.inputs.layout.max_len == L
    assert not batch.inputs.layout.dense
    counts = batch.counts
    assert (counts.tokens, counts.slots, counts.labels, counts.pairs) == (32, 32, 31, 11**2 + 5**2 + 16**2)


def test_a_document_that_ends_with_its_window(opened: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "flush"
    folder.mkdir()
    (folder / "1.txt").write_text("a" * (L - 2))
    (folder / "2.txt").write_text("b" * L)
    data = opened(train=str(folder), eval=str(folder), seq_len=L, batch_size=2)
    first, second = sequences(data.eval_batch(0))
    assert first[2][-2:] == [T.eos, IGNORE], "the next window's bos is not this document's to predict"
    assert second[0][0] == T.bos


def test_joined_documents_are_dense(opened: Opener, tmp_path: Path) -> None:
    corpus = two_documents(tmp_path / "two")
    for layout in ("packed", "padded"):
        batch = opened(
            train=corpus, eval=corpus, seq_len=L, batch_size=2, join_documents=True, layout=layout
        ).eval_batch(0)
        assert batch.inputs is not None
        assert batch.inputs.layout.dense
        assert batch.inputs.layout.lengths is None
        assert batch.inputs.layout.num_sequences == 2
        assert batch.inputs.positions.tolist() == [*range(L), *range(L)]
        assert batch.labels[10] == T.bos, "the next document is predicted"
        assert batch.counts.labels == 32
        assert batch.counts.pairs == 2 * L**2


def test_one_document_is_dense(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("abcdefgh" * 50)
    data = opened(train=str(tmp_path / "one.txt"), seq_len=L, batch_size=3, held_out=0.25)
    train, held_out = data.train_batch(0), data.eval_batch(0)
    assert train.inputs is not None
    assert held_out.inputs is not None
    assert train.inputs.layout.dense
    assert held_out.inputs.layout.dense
    assert torch.equal(train.labels.view(3, L)[:, :-1], train.inputs.ids.view(3, L)[:, 1:])
    assert data.num_train == (402 - 100 - 1) // L


def test_windows_cover_the_stream_once(opened: Opener, corpus: Path) -> None:
    data = opened(train=str(corpus), eval=str(corpus), seq_len=L, batch_size=1, join_documents=True)
    batches = [data.eval_batch(i) for i in range(data.num_eval_batches)]
    assert [batch.samples for batch in batches] == [(i,) for i in range(data.num_train)]
    ids = torch.cat([batch.inputs.ids for batch in batches if batch.inputs is not None])
    stream = [i for path in sorted(corpus.iterdir()) for i in (T.bos, *path.read_bytes(), T.eos)]
    assert ids.tolist() == stream[: len(ids)]
    assert len(stream) - len(ids) <= L


def test_held_out_documents_are_whole_and_last(opened: Opener, corpus: Path) -> None:
    data = opened(train=str(corpus), seq_len=L, batch_size=4, held_out=0.1, layout="padded")
    assert isinstance(data, TextData)
    assert (data._train.num_documents, data._held_out.num_documents) == (27, 3)
    first = data.eval_batch(0).inputs
    assert first is not None
    assert T.decode(first.ids[:L].tolist()).startswith("27: ")


def test_held_out_documents_are_kept_from_the_tokenizer(opened: Opener, corpus: Path) -> None:
    last = corpus / "29.txt"
    settings: dict[str, Any] = {"train": str(corpus), "seq_len": L, "tokenizer": "bpe", "vocab": 300, "held_out": 0.1}
    with_words = opened(**settings).tokenizer
    last.write_text("qzqzqzqz" * 1000)
    assert with_words is not None
    assert len(with_words.encode("qzqzqzqz")) == 8
    again = opened(**settings).tokenizer
    assert again is not None
    assert again.fingerprint == with_words.fingerprint


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_padded_and_packed_hold_the_same_sequences(opened: Opener, corpus: Path, task: str) -> None:
    packed = opened(task=task, train=str(corpus), seq_len=L, batch_size=5)
    padded = opened(task=task, train=str(corpus), seq_len=L, batch_size=5, layout="padded")
    for i in range(20):
        a, b = packed.train_batch(i), padded.train_batch(i)
        assert sequences(a) == sequences(b)
        assert (a.counts.tokens, a.counts.labels, a.counts.pairs) == (b.counts.tokens, b.counts.labels, b.counts.pairs)
        assert a.inputs is not None
        assert b.inputs is not None
        assert b.counts.slots == b.inputs.ids.numel() == b.inputs.layout.num_sequences * L
        assert a.inputs.layout.num_sequences.bit_count() == 1
        lengths = b.inputs.layout.lengths
        assert lengths is not None
        padding = torch.arange(L) >= lengths[:, None]
        assert (b.inputs.ids.view(-1, L)[padding] == T.pad).all()
        if task == "causal":
            assert (b.labels.view(-1, L)[padding] == IGNORE).all()


def masked(opened: Opener, corpus: Path, **settings: Any) -> Any:
    return opened(task="masked", train=str(corpus), eval=str(corpus), seq_len=64, batch_size=4, **settings)


def test_masking_statistics(opened: Opener, corpus: Path) -> None:
    data = masked(opened, corpus, join_documents=True, mask_share=0.25)
    plain = opened(train=str(corpus), eval=str(corpus), seq_len=64, batch_size=4, join_documents=True)
    kinds, places, others = {"mask": 0, "random": 0, "kept": 0}, np.zeros(64), set()
    for i in range(120):
        batch, original = data.train_batch(i), plain.train_batch(i)
        assert batch.samples == original.samples
        assert original.inputs is not None and batch.inputs is not None and batch.label_at is not None
        truth, read = original.inputs.ids, batch.inputs.ids
        assert len(batch.label_at) == len(batch.labels) == batch.counts.labels == 4 * 16, "the number never varies"
        assert len(set(batch.label_at.tolist())) == 64
        assert torch.equal(truth[batch.label_at], batch.labels)
        elsewhere = torch.ones(len(read), dtype=torch.bool).index_fill(0, batch.label_at, False)
        assert torch.equal(read[elsewhere], truth[elsewhere])
        assert not any(label in T.special_ids for label in batch.labels.tolist())
        np.add.at(places, batch.label_at.numpy() % 64, 1)
        others |= set(read[batch.label_at].tolist())
        for was, now in zip(batch.labels.tolist(), read[batch.label_at].tolist(), strict=True):
            kinds["mask" if now == T.mask else "kept" if now == was else "random"] += 1
            assert now == T.mask or now < 256
    total = sum(kinds.values())
    assert kinds["mask"] / total == pytest.approx(0.8, abs=0.02)
    assert kinds["random"] / total == pytest.approx(0.1, abs=0.015)
    assert kinds["kept"] / total == pytest.approx(0.1, abs=0.015)
    assert places / 480 == pytest.approx(np.full(64, 0.25), abs=0.09), "every place, with the same chance"
    assert len(others) > 230, "nearly all of 256 bytes, also those that no text has"


def test_each_epoch_masks_differently(opened: Opener, corpus: Path) -> None:
    data = masked(opened, corpus)
    seen: dict[int, set[tuple[int, ...]]] = {}
    for i in range(3 * data.num_train // 4):
        batch = data.train_batch(i)
        rows = batch.label_at.view(4, -1) % 64
        for sample, row in zip(batch.samples, rows, strict=True):
            seen.setdefault(sample, set()).add(tuple(row.tolist()))
    assert all(len(masks) >= 2 for masks in seen.values())


def test_a_sample_is_masked_alike_in_any_batch_size(opened: Opener, corpus: Path) -> None:
    small = opened(task="masked", train=str(corpus), seq_len=L, batch_size=2, layout="padded")
    large = opened(task="masked", train=str(corpus), seq_len=L, batch_size=6, layout="padded")
    parts = [part for i in range(3) for part in sequences(small.train_batch(i))]
    assert parts == sequences(large.train_batch(0))


def test_windows_of_nothing_but_specials(opened: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text("")
    batch = opened(task="masked", train=str(folder), eval=str(folder), seq_len=8, batch_size=2).train_batch(0)
    assert batch.counts.labels == len(batch.labels) == 0


def test_too_little_text(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match=r"data\.train: 6 tokens .*data\.seq_len = 16"):
        opened(train=str(tmp_path / "short.txt"), seq_len=L)
    (tmp_path / "long.txt").write_text("long enough to train on, but not to hold anything out")
    with pytest.raises(DataError, match=r"data\.held_out: "):
        opened(train=str(tmp_path / "long.txt"), seq_len=L)


def test_cache_is_shared_between_runs(opened: Opener, corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train": str(corpus), "seq_len": L, "tokenizer": "bpe", "vocab": 280}
    first = opened(cache=str(tmp_path / "cache"), **settings)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    second = opened(cache=str(tmp_path / "cache"), **settings)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == made
    assert sorted(path.suffix for path in made) == [".json", ".tokens"]
    assert [path.name for path in (tmp_path / "run2").iterdir()] == ["tokenizer.json"]
    assert same(first.train_batch(0), second.train_batch(0))
    assert first.tokenizer is not None
    assert load_tokenizer(tmp_path / "run2").fingerprint == first.tokenizer.fingerprint
