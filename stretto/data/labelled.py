"""Text classification: rows with a text and a label. A text is bos, its ids, eos; the first one is where its label is.

Texts longer than `seq_len` tokens are cut. All are tokenised in memory whenever a run begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from stretto.batch import Batch, Sequences
from stretto.config import DataConfig
from stretto.data.documents import open_table
from stretto.data.packing import count, pack, pad, to_tensor
from stretto.data.rows import Row, Spoiled, UnusableError, take_text
from stretto.data.stream import Data, EpochOrder, Int64s, Purpose, batch_positions, count_held_out, random_stream
from stretto.data.tokenizer import Store, Tokenizer, choose_tokenizer, keep_tokenizer
from stretto.errors import DataError

_GROUP = 1000  # texts that are tokenised in one call


def read_labelled(row: Row, column: str, label: str) -> tuple[str, str]:
    """Returns text and label of a row. A label is text, or a whole number."""
    text, found = take_text(row, column), row.get(label)
    if not isinstance(found, str | int) or found == "":
        raise UnusableError(f"it has no {label!r}" if found in (None, "") else f"{label!r} is {type(found).__name__}")
    return text, str(found)


def sort_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Orders the names of labels: as numbers if all are."""
    names = set(labels)
    return tuple(sorted(names, key=int if all(name.isdecimal() for name in names) else None))


def encode(texts: Sequence[str], tokenizer: Tokenizer, seq_len: int) -> list[Int64s]:
    """Returns the ids of each text as the model reads them, at most `seq_len`."""
    parts, rest = list[Int64s](), iter(texts)
    while group := list(islice(rest, _GROUP)):
        for ids in tokenizer.encode_many(group):
            parts.append(np.array([tokenizer.bos, *ids[: seq_len - 2], tokenizer.eos], np.int64))
    return parts


def arrange(
    parts: Sequence[Int64s], labels: Int64s, tokenizer: Tokenizer, samples: Sequence[int], padded: bool
) -> Batch:
    """Makes a batch of encoded texts, with a label at the first token of each."""
    ids, lengths = np.concatenate(parts), np.array([len(part) for part in parts], np.int64)
    longest = -(-int(lengths.max()) // 8) * 8  # a multiple of 8: fewer shapes to compile
    inputs: Sequences = pad(ids, lengths, longest, tokenizer.pad) if padded else pack(ids, lengths, longest)
    counts = count(lengths, inputs.ids.numel(), len(labels))
    return Batch(to_tensor(labels), counts, tuple(samples), inputs, inputs.layout.offsets[:-1].long())


class LabelledData(Data):
    tokenizer: Tokenizer

    def __init__(self, cfg: DataConfig, seed: int, folder: Path, store: Store) -> None:
        self._cfg = cfg
        rows, unused = self._read("data.train")
        self.labels = sort_labels([label for _, label in rows])
        self.fingerprint = hashlib.sha256(repr(rows).encode()).hexdigest()
        if cfg.eval:
            others, more = self._read("data.eval")
            self._refuse_unknown({label for _, label in others}, self.labels)
            order, number = np.arange(len(rows) + len(others)), len(others)
            rows, unused = rows + others, unused + more
        elif len(rows) < 2:
            raise DataError(f"data.train = {cfg.train!r} has only one text: none can be held out for evaluation")
        else:  # rows are often in the order of their labels
            order = random_stream(seed, Purpose.SPLIT).permutation(len(rows))
            number = count_held_out(len(rows), cfg.held_out)
        self._train_rows, self._eval_rows = np.split(order, [len(order) - number])
        texts = (rows[i][0] for i in self._train_rows)
        self.tokenizer = choose_tokenizer(cfg.tokenizer, cfg.vocab, texts, f"{self.fingerprint} {number} {seed}", store)
        keep_tokenizer(self.tokenizer, folder)
        self._parts = encode([text for text, _ in rows], self.tokenizer, cfg.seq_len)
        places = {label: place for place, label in enumerate(self.labels)}
        self._classes = np.array([places[label] for _, label in rows], np.int64)
        self.num_train, self._unused = len(self._train_rows), unused
        self.num_eval_batches = -(-len(self._eval_rows) // cfg.batch_size)
        self._order = EpochOrder(seed, self.num_train)

    def _refuse_unknown(self, labels: set[str], known: Sequence[str]) -> None:
        if unknown := sorted(labels - set(known)):
            raise DataError(f"data.eval has labels that data.train has not: {', '.join(unknown)}")

    def number_classes(self, names: tuple[str, ...]) -> None:
        """Numbers the labels as these are, which must be among them."""
        self._refuse_unknown(set(self.labels), names)
        self._classes = np.array([names.index(label) for label in self.labels], np.int64)[self._classes]
        self.labels = names

    def _read(self, key: Literal["data.train", "data.eval"]) -> tuple[list[tuple[str, str]], str]:
        """Reads all rows, and says which cannot be used."""
        cfg = self._cfg
        table, spoiled = open_table(key, cfg, (cfg.column, cfg.label), all_of_them=True), Spoiled()
        rows = list(table.convert(partial(read_labelled, column=cfg.column, label=cfg.label), spoiled))
        spoiled.judge(table.name)
        if not rows:
            raise DataError(f"{key}: {table.name} has no rows")
        return rows, spoiled.describe()

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        chosen = self._order.samples(batch_positions(index, self._cfg.batch_size, part, parts))
        return self._batch(self._train_rows[chosen])

    def eval_batch(self, index: int) -> Batch:
        positions = batch_positions(index, self._cfg.batch_size)
        return self._batch(self._eval_rows[positions.start : positions.stop])

    def _batch(self, rows: Int64s) -> Batch:
        parts = [self._parts[row] for row in rows]
        return arrange(parts, self._classes[rows], self.tokenizer, rows.tolist(), self._cfg.layout == "padded")

    def describe(self) -> str:
        cut = sum(len(part) == self._cfg.seq_len for part in self._parts)
        return (
            f"{self._cfg.train}: {self.num_train:,} texts with {len(self.labels)} labels; evaluation: "
            f"{len(self._eval_rows):,} texts; {cut:,} have {self._cfg.seq_len} tokens, and may have been cut"
            f"{self._unused}"
        )
