"""Causal and masked language modelling on windows of a token stream.

The documents lie one after another, each as bos, ids, eos. Window w covers L = seq_len tokens from w * L on, and one
more as the last label. A document that ends inside a window ends a sequence there: attention, positions and labels do
not cross it, unless `join_documents` says so. Windows of one document only are full rows, and the batch is dense;
this is decided once for the whole data set, so that compiled code sees one form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from stretto.batch import IGNORE, Batch, Sequences, dense_layout
from stretto.config import DataConfig
from stretto.data.documents import Documents, describe_unused, open_corpus
from stretto.data.packing import count, find_slots, pack_windows, pad, spread, to_tensor
from stretto.data.splits import count_held_out
from stretto.data.stream import Data, EpochOrder, Int64s, Purpose, batch_positions, random_rows
from stretto.data.tokenizer import Store, Tokenizer, choose_tokenizer, keep_tokenizer
from stretto.data.tokens import Tokens, open_tokens
from stretto.errors import DataError

_ENOUGH_BYTES = 1 << 28  # of text to train a tokenizer on; more takes time and memory, and changes little
_ENOUGH_DOCUMENTS = 20  # from here on, evaluation holds out whole documents


def _count_train_documents(count: int, share: float) -> int:
    return count - count_held_out(count, share) if count >= _ENOUGH_DOCUMENTS else count


def pick_texts(documents: Documents, count: int) -> Iterator[str]:
    """Of the first `count` documents, all or every so many: as much text as a tokenizer is trained on."""
    return islice(documents, 0, count, max(-(-documents.num_bytes // _ENOUGH_BYTES), 1))


def hold_out(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    """Cuts off the last share of the documents, or of the tokens where documents are few."""
    num_documents = _count_train_documents(tokens.num_documents, share)
    if num_documents < tokens.num_documents:
        cut = int(tokens.starts[num_documents])
    else:
        cut = len(tokens.ids) - count_held_out(len(tokens.ids), share)
    return tokens.cut(cut)


class TextData(Data):
    tokenizer: Tokenizer

    def __init__(self, cfg: DataConfig, seed: int, folder: Path, store: Store) -> None:
        self._cfg, self._seed, documents = cfg, seed, open_corpus("data.train", cfg, store)
        # Held-out documents are kept from the tokenizer too.
        num_documents = documents.count if cfg.eval else _count_train_documents(documents.count, cfg.held_out)
        identity, texts = f"{documents.fingerprint} {num_documents}", pick_texts(documents, num_documents)
        tokenizer = self.tokenizer = choose_tokenizer(cfg.tokenizer, cfg.vocab, texts, identity, store)
        keep_tokenizer(tokenizer, folder)
        train, corpora = open_tokens(documents, tokenizer, store), [documents]
        if cfg.eval:
            corpora.append(others := open_corpus("data.eval", cfg, store))
            held_out = open_tokens(others, tokenizer, store)
        else:
            train, held_out = hold_out(train, cfg.held_out)
        self._name, self.fingerprint = documents.name, documents.fingerprint
        self._left_out = describe_unused(*corpora)
        self._cut_windows(train, held_out)
        if cfg.task == "masked":
            special = tokenizer.special_ids | {tokenizer.bos, tokenizer.eos, tokenizer.mask}
            self._is_special = np.isin(np.arange(tokenizer.size), sorted(special))
            self._ordinary = np.flatnonzero(~self._is_special)

    def _cut_windows(self, train: Tokens, held_out: Tokens) -> None:
        cfg, self._train, self._held_out = self._cfg, train, held_out
        self._dense = cfg.join_documents or train.num_documents == held_out.num_documents == 1
        self.num_train = self._count_windows("data.train", train)
        self._num_eval = self._count_windows("data.eval" if cfg.eval else "data.held_out", held_out)
        self.num_eval_batches = -(-self._num_eval // cfg.batch_size)
        self._order = EpochOrder(self._seed, self.num_train)

    def _count_windows(self, key: str, tokens: Tokens) -> int:
        count = (len(tokens.ids) - 1) // self._cfg.seq_len
        if count < 1:
            raise DataError(
                f"{key}: {len(tokens.ids)} tokens are too few for one window of data.seq_len = {self._cfg.seq_len};"
                " give more text, or lower data.seq_len"
            )
        return count

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        positions = batch_positions(index, self._cfg.batch_size, part, parts)
        return self._batch(self._train, self._order.samples(positions), Purpose.MASK, positions.start)

    def eval_batch(self, index: int) -> Batch:
        windows = [w for w in batch_positions(index, self._cfg.batch_size) if w < self._num_eval]
        return self._batch(self._held_out, windows, Purpose.EVAL_MASK, windows[0])

    def describe(self) -> str:
        train, held_out = self._train, self._held_out
        return (
            f"{self._name}: {len(train.ids):,} tokens, {train.num_documents:,} documents, "
            f"{self.num_train:,} windows of {self._cfg.seq_len}; evaluation: {len(held_out.ids):,} tokens, "
            f"{held_out.num_documents:,} documents, {self._num_eval:,} windows{self._left_out}"
        )

    def _batch(self, tokens: Tokens, windows: Sequence[int], purpose: Purpose, position: int) -> Batch:
        """Makes a batch of windows. Masks are drawn by `position`, the place of the first window in its stream."""
        length = self._cfg.seq_len
        rows = tokens.take(np.array(windows)[:, None] * length + np.arange(length + 1))
        begins = self._find_begins(tokens, windows)
        ids = rows[:, :-1]
        if self._cfg.task == "causal":
            labels, label_at = np.where(begins[:, 1:], IGNORE, rows[:, 1:]).reshape(-1), None
        else:
            random = random_rows(self._seed, purpose, position, (len(windows), 3, length))
            ids, labels, label_at = self._mask(ids, random)
        begins[:, 0] = True
        lengths = np.diff(np.flatnonzero(begins[:, :-1]), append=ids.size)
        return self._arrange(ids.reshape(-1), lengths, labels, label_at, windows)

    def _find_begins(self, tokens: Tokens, windows: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Finds which of the L + 1 tokens of each window begin another document."""
        length = self._cfg.seq_len
        begins = np.zeros((len(windows), length + 1), np.bool_)
        if not self._dense:
            for row, window in zip(begins, windows, strict=True):
                low, high = np.searchsorted(tokens.starts, (window * length, (window + 1) * length + 1))
                row[tokens.starts[low:high] - window * length] = True
        return begins

    def _mask(self, ids: Int64s, random: npt.NDArray[np.float64]) -> tuple[Int64s, Int64s, Int64s]:
        """Returns what the model reads instead of `ids` [windows, L], the tokens it has to predict, and their places in
        the flat `ids`. In each window these are the places that draw the lowest numbers.

        As in BERT, 80% of these places read <mask>, 10% any ordinary token, 10% their own token.
        """
        draws = np.where(self._is_special[ids], 1.0, random[:, 0])
        count = max(round(self._cfg.mask_share * ids.shape[1]), 1)
        highest = np.partition(draws, count - 1, axis=1)[:, [count - 1]]
        at = np.flatnonzero((draws <= highest) & (draws < 1.0))
        dice, other = (numbers.reshape(-1)[at] for numbers in (random[:, 1], random[:, 2]))
        labels = ids.reshape(-1)[at]
        any_token = self._ordinary[(other * len(self._ordinary)).astype(np.int64)]
        read = ids.copy()
        read.reshape(-1)[at] = np.select([dice < 0.8, dice < 0.9], [self.tokenizer.mask, any_token], labels)
        return read, labels, at

    def _arrange(
        self, ids: Int64s, lengths: Int64s, labels: Int64s, label_at: Int64s | None, windows: Sequence[int]
    ) -> Batch:
        width = self._cfg.seq_len
        num_labels = int((labels != IGNORE).sum())
        if self._dense:
            positions = torch.arange(width).repeat(len(windows))
            inputs = Sequences(to_tensor(ids), positions, dense_layout(len(windows), width))
        elif self._cfg.layout == "packed":
            inputs = pack_windows(ids, lengths, width)
        else:
            inputs = pad(ids, lengths, width, self.tokenizer.pad)
            slots = find_slots(lengths, width)
            if label_at is None:
                labels = spread(labels, slots, inputs.ids.numel(), IGNORE)
            else:
                label_at = slots[label_at]
        counts = count(lengths, inputs.ids.numel(), num_labels)
        places = None if label_at is None else to_tensor(label_at)
        return Batch(to_tensor(labels), counts, tuple(windows), inputs, places)
