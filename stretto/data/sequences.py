"""Token sequences that a Python program has: a list, or a torch Dataset, for causal language modelling.

Each sequence is a document. From there on it is as with text (text.py): the documents lie one after another, and
windows of data.seq_len tokens are cut from them. Nothing is added: whoever wants tokens at the ends puts them there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stretto.config import DataConfig
from stretto.data.stream import Int64s
from stretto.data.text import TextData, hold_out
from stretto.data.tokenizer import Store, choose_tokenizer
from stretto.data.tokens import Tokens
from stretto.errors import DataError


class SequenceData(TextData):
    def __init__(self, cfg: DataConfig, seed: int, sequences: Any) -> None:
        """`sequences` has a length and numbered items: token ids, or a mapping with these under `input_ids`. The
        tokenizer that made them is the file that data.tokenizer names, if any; without, a run writes no text."""
        if cfg.task != "causal" or cfg.layout != "packed":
            raise DataError(
                f"data=: token sequences are for data.task = 'causal' and data.layout = 'packed', not {cfg.task!r} and"
                f" {cfg.layout!r}; a class of your own can be derived from stretto.data.Data"
            )
        self._cfg, self._seed, self._left_out, self._name = cfg, seed, "", type(sequences).__name__
        if cfg.tokenizer not in ("bytes", "bpe"):
            self.tokenizer = choose_tokenizer(cfg.tokenizer, cfg.vocab, (), "", Store(Path()))
        else:
            self.tokenizer = None  # type: ignore[assignment]  # it is needed for masks and padding alone
        parts = list(_read(sequences))
        ids = np.concatenate([np.empty(0, np.int64), *parts])
        self.largest = int(ids.max(initial=0))  # id
        dtype = np.uint16 if self.largest < 1 << 16 else np.uint32
        tokens = Tokens(ids.astype(dtype), np.cumsum([0, *map(len, parts)]))
        digest = hashlib.sha256(tokens.starts.astype("<i8").tobytes())
        digest.update(tokens.ids.astype("<u4").tobytes())
        self.fingerprint = digest.hexdigest()
        if len(tokens.ids) < 2:
            raise DataError("data=: there are fewer than two tokens in it")
        self._cut_windows(*hold_out(tokens, cfg.held_out))


def _read(sequences: Any) -> Iterator[Int64s]:
    numbered = hasattr(sequences, "__len__") and hasattr(sequences, "__getitem__")
    if not numbered or isinstance(sequences, str | bytes | Mapping):
        raise DataError(
            f"data={type(sequences).__name__}: give an object of a class derived from stretto.data.Data, or a list or a"
            " torch Dataset of token sequences; what has no length and no numbered items cannot be shuffled"
        )
    for number in range(len(sequences)):
        item = sequences[number]
        yield _check(number, item["input_ids"] if isinstance(item, Mapping) and "input_ids" in item else item)


def _check(number: int, item: Any) -> Int64s:
    try:
        ids = np.asarray(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data=: item {number} is not a sequence of token ids: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(f"data=: item {number} is not a sequence of token ids, but {ids.dtype} of shape {ids.shape}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 32:
        raise DataError(f"data=: item {number} has ids from {ids.min()} to {ids.max()}")
    return ids.astype(np.int64)
