"""Instruction fine-tuning: conversations, of which the answers are learned (chat.py).

Conversations are packed whole: each sample is some of them that together have at most `seq_len` tokens. Which ones
depends on their lengths alone, so an epoch draws nothing but the order of the samples.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from stretto.batch import IGNORE, Batch
from stretto.config import DataConfig
from stretto.data.chat import COLUMNS, Chat, Message, Segment, keep_chat, open_chat, read_messages
from stretto.data.documents import open_table
from stretto.data.packing import count, pack_windows, to_tensor
from stretto.data.rows import Row
from stretto.data.splits import count_held_out
from stretto.data.stream import Data, EpochOrder, Int64s, Purpose, batch_positions, random_stream
from stretto.data.tokenizer import Store, Tokenizer, choose_tokenizer, keep_tokenizer, load_tokenizer
from stretto.errors import DataError

_GROUP = 1000  # conversations that are tokenised in one call


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    segments: list[Segment]


class InstructData(Data):
    tokenizer: Tokenizer

    def __init__(self, cfg: DataConfig, seed: int, folder: Path, store: Store) -> None:
        if cfg.layout == "padded":
            raise DataError("data.layout = 'padded' is not for data.task = 'instruct': its samples are packed")
        self._cfg = cfg
        from_folder = cfg.tokenizer not in ("bytes", "bpe")
        chat = open_chat(cfg.tokenizer) if from_folder else Chat()
        known = load_tokenizer(Path(cfg.tokenizer)) if chat.template else None
        train, unused = self._read("data.train", chat, known)
        if cfg.eval:
            held_out, others = self._read("data.eval", chat, known)
            unused += others
        elif len(train) < 2:
            raise DataError("data.train has only one conversation: none can be held out for evaluation")
        else:
            number = count_held_out(len(train), cfg.held_out)
            train, held_out = train[:-number], train[-number:]
        self.fingerprint = hashlib.sha256(repr([train, held_out if not cfg.eval else ()]).encode()).hexdigest()
        texts = (segment.text for one in train for segment in one.segments)
        self.tokenizer = known or choose_tokenizer(cfg.tokenizer, cfg.vocab, texts, self.fingerprint, store)
        keep_tokenizer(self.tokenizer, folder)
        keep_chat(chat, folder)
        self.prompt = next((m.content for m in held_out[0].messages if m.role == "user"), "")
        key, how = "data.eval" if cfg.eval else "data.held_out", (chat, self.tokenizer, cfg.seq_len)
        self._train, self._held_out = Packed("data.train", train, *how), Packed(key, held_out, *how)
        self.num_train = len(self._train.packs)
        self._eval_order = random_stream(seed, Purpose.SPLIT).permutation(len(self._held_out.packs))
        self.num_eval_batches = -(-len(self._eval_order) // cfg.batch_size)
        self._order, self._unused = EpochOrder(seed, self.num_train), unused

    def _read(
        self, key: Literal["data.train", "data.eval"], chat: Chat, tokenizer: Tokenizer | None
    ) -> tuple[list[Conversation], str]:
        """Reads all conversations, and says which rows cannot be used."""

        def make(row: Row) -> Conversation:
            messages = read_messages(row)
            if tokenizer is not None:
                chat.check(messages, tokenizer)
            return Conversation(messages, chat.divide(messages))

        return open_table(key, self._cfg, COLUMNS).collect(make)

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        return self._batch(self._train, self._order.samples(batch_positions(index, self._cfg.batch_size, part, parts)))

    def eval_batch(self, index: int) -> Batch:
        places = batch_positions(index, self._cfg.batch_size)
        return self._batch(self._held_out, self._eval_order[places.start : places.stop].tolist())

    def describe(self) -> str:
        train, held_out = self._train, self._held_out
        return (
            f"{self._cfg.train}: {train.describe()} in samples of at most {self._cfg.seq_len}; evaluation: "
            f"{held_out.describe()}{self._unused}"
        )

    def _batch(self, split: Packed, samples: Sequence[int]) -> Batch:
        chosen = np.concatenate([split.packs[sample] for sample in samples])
        ids, labels, lengths = split.take(chosen)
        inputs = pack_windows(ids, lengths, self._cfg.seq_len)
        counts = count(lengths, len(ids), int((labels != IGNORE).sum()))
        return Batch(to_tensor(labels), counts, tuple(samples), inputs)


class Packed:
    """Tokenised conversations, and which of them are together in a sample."""

    def __init__(
        self, key: str, conversations: list[Conversation], chat: Chat, tokenizer: Tokenizer, seq_len: int
    ) -> None:
        parts, answers = list[Int64s](), list[Int64s]()
        rest = iter(conversations)
        while group := list(islice(rest, _GROUP)):
            encoded = chat.encode([one.segments for one in group], tokenizer)
            for one, pieces in zip(group, encoded, strict=True):
                learned = [segment.is_answer for segment in one.segments]
                parts.append(np.concatenate([np.asarray(piece, np.int64) for piece in pieces]))
                answers.append(np.repeat(learned, [len(piece) for piece in pieces]))
        # The model reads all but the last token of a conversation.
        self._lengths = np.array([len(part) - 1 for part in parts], np.int64)
        self._starts = np.cumsum([0, *map(len, parts)])
        self._ids = np.concatenate(parts).astype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
        self._answers = np.concatenate(answers)
        learned_from = np.array([bool(answer[1:].any()) for answer in answers])
        usable = np.flatnonzero((self._lengths <= seq_len) & (self._lengths > 0) & learned_from)
        if not len(usable):
            raise DataError(f"{key}: no conversation has at most data.seq_len = {seq_len} tokens, and an answer")
        self.packs = fill(self._lengths, usable, seq_len)
        self._used, self._all = len(usable), len(parts)

    def take(self, chosen: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Returns what is read, what is to be predicted, and the lengths."""
        runs = [slice(self._starts[i], self._starts[i + 1]) for i in chosen]
        ids = np.concatenate([self._ids[run][:-1] for run in runs]).astype(np.int64)
        following = np.concatenate([self._ids[run][1:] for run in runs]).astype(np.int64)
        learned = np.concatenate([self._answers[run][1:] for run in runs])
        return ids, np.where(learned, following, IGNORE), self._lengths[chosen]

    def describe(self) -> str:
        dropped = f", {self._all - self._used:,} dropped (too long, or no answer)" if self._all > self._used else ""
        return f"{self._used:,} conversations, {len(self.packs):,} samples{dropped}"


def fill(lengths: Int64s, chosen: Int64s, size: int) -> list[Int64s]:
    """Puts sequences together into packs of at most `size` tokens: the longest first, each where the least room is left
    that suffices."""
    packs, rooms = list[list[int]](), list[tuple[int, int]]()  # (room, pack), in order
    for number in chosen[np.argsort(-lengths[chosen], kind="stable")].tolist():
        at = bisect_left(rooms, (int(lengths[number]), -1))
        room, pack = rooms.pop(at) if at < len(rooms) else (size, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(number)
        insort(rooms, (room - int(lengths[number]), pack))
    return [np.array(pack, np.int64) for pack in packs]
