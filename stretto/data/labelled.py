"""Text classification: rows with a text and a label. A text is bos, its ids, eos; the first one is where its label is.

Texts longer than `seq_len` tokens are cut. All are tokenised in memory whenever a run begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from stretto.batch import Batch
from stretto.config import DataConfig
from stretto.data.documents import open_table
from stretto.data.packing import arrange, count, to_tensor
from stretto.data.rows import Row, UnusableError, check_text, take_text
from stretto.data.splits import divide, number_labels
from stretto.data.stream import Data, EpochOrder, Int64s, batch_positions
from stretto.data.tokenizer import Store, Tokenizer, choose_tokenizer, keep_tokenizer

_GROUP = 1000  # texts that are tokenised in one call


def read_labelled(row: Row, column: str, label: str) -> tuple[str, str]:
    """Returns text and label of a row. A label is text, or a whole number."""
    text, found = take_text(row, column), row.get(label)
    if found is None or found == "":
        raise UnusableError(f"it has no {label!r}")
    return text, str(found) if isinstance(found, int) else check_text(found, label)


def sort_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Orders the names of labels: as numbers if all are."""
    names = set(labels)
    are_numbers = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (len(name) * are_numbers, name)))


def encode(texts: Sequence[str], tokenizer: Tokenizer, seq_len: int) -> list[Int64s]:
    """Returns the ids of each text as the model reads them, at most `seq_len`."""
    groups = (texts[i : i + _GROUP] for i in range(0, len(texts), _GROUP))
    encoded = (ids for group in groups for ids in tokenizer.encode_many(group))
    return [np.array([tokenizer.bos, *ids[: seq_len - 2], tokenizer.eos], np.int64) for ids in encoded]


def make_batch(
    parts: Sequence[Int64s], labels: Int64s, tokenizer: Tokenizer, samples: Sequence[int], padded: bool
) -> Batch:
    """Makes a batch of encoded texts, with a label at the first token of each."""
    ids, lengths = np.concatenate(parts), np.array([len(part) for part in parts], np.int64)
    inputs = arrange(ids, lengths, tokenizer.pad, padded=padded)
    counts = count(lengths, inputs.ids.numel(), len(labels))
    return Batch(to_tensor(labels), counts, tuple(samples), inputs, inputs.layout.offsets[:-1].long())


class LabelledData(Data):
    tokenizer: Tokenizer

    def __init__(self, cfg: DataConfig, seed: int, folder: Path, store: Store) -> None:
        self._cfg = cfg
        rows, unused = self._read("data.train")
        others, more = self._read("data.eval") if cfg.eval else ([], "")
        self.labels = sort_labels([label for _, label in rows])
        self.fingerprint = hashlib.sha256(repr(rows).encode()).hexdigest()
        self._train_rows, held_out = divide(seed, len(rows), len(others), cfg.held_out)
        self._eval_rows = held_out + len(rows) if others else held_out
        texts = (rows[i][0] for i in self._train_rows)
        identity = f"{self.fingerprint} {len(held_out)} {seed}"
        self.tokenizer = choose_tokenizer(cfg.tokenizer, cfg.vocab, texts, identity, store)
        keep_tokenizer(self.tokenizer, folder)
        self._parts = encode([text for text, _ in rows + others], self.tokenizer, cfg.seq_len)
        self._classes = number_labels([label for _, label in rows + others], self.labels)
        self.num_train, self._unused = len(self._train_rows), unused + more
        self.num_eval_batches = -(-len(self._eval_rows) // cfg.batch_size)
        self._order = EpochOrder(seed, self.num_train)

    def number_classes(self, names: tuple[str, ...]) -> None:
        """Numbers the labels as these are, which must be among them."""
        self._classes, self.labels = number_labels(self.labels, names)[self._classes], names

    def _read(self, key: Literal["data.train", "data.eval"]) -> tuple[list[tuple[str, str]], str]:
        columns = self._cfg.column, self._cfg.label
        table = open_table(key, self._cfg, columns, all_of_them=True)
        return table.collect(lambda row: read_labelled(row, *columns))

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        chosen = self._order.samples(batch_positions(index, self._cfg.batch_size, part, parts))
        return self._batch(self._train_rows[chosen])

    def eval_batch(self, index: int) -> Batch:
        positions = batch_positions(index, self._cfg.batch_size)
        return self._batch(self._eval_rows[positions.start : positions.stop])

    def _batch(self, rows: Int64s) -> Batch:
        parts = [self._parts[row] for row in rows]
        return make_batch(parts, self._classes[rows], self.tokenizer, rows.tolist(), self._cfg.layout == "padded")

    def describe(self) -> str:
        cut = sum(len(part) == self._cfg.seq_len for part in self._parts)
        return (
            f"{self._cfg.train}: {self.num_train:,} texts with {len(self.labels)} labels; evaluation: "
            f"{len(self._eval_rows):,} texts; {cut:,} have {self._cfg.seq_len} tokens, and may have been cut"
            f"{self._unused}"
        )
