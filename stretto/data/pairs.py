"""Translation: sentence pairs in batches of a token budget.

Pairs are put in order of length and cut into batches of at most `max_tokens` on either side. The lengths alone decide
order and cuts, so every epoch has the same number of batches; what an epoch draws anew is which of the equally long
pairs go where, and the order of the batches. Sentence lengths within a batch are then nearly equal on both sides, which
padding needs. Packed batches rather need few shapes: there only the longer sides are nearly equal, and the shorter ones
are mixed so that they add up to nearly the same share in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np

from stretto.batch import IGNORE, Batch, silence
from stretto.config import DataConfig
from stretto.data.documents import Documents, find_text_file, open_lines
from stretto.data.packing import arrange, count, find_slots, spread, to_tensor
from stretto.data.splits import count_held_out
from stretto.data.stream import Data, Int64s, Purpose, random_stream
from stretto.data.tokenizer import Store, Tokenizer, choose_tokenizer, keep_tokenizer
from stretto.data.tokens import Tokens, open_tokens
from stretto.errors import DataError

GOLDEN = (5**0.5 - 1) / 2


def open_pair_data(cfg: DataConfig, seed: int, folder: Path, store: Store) -> PairData:
    train = source, target = open_pairs("data.train", cfg.train, cfg.languages)
    num_train = source.count if cfg.eval else source.count - count_held_out(source.count, cfg.held_out)
    texts = chain(islice(source, num_train), islice(target, num_train))
    identity = f"{source.fingerprint} {target.fingerprint} {num_train}"
    tokenizer = choose_tokenizer(cfg.tokenizer, cfg.vocab, texts, identity, store)
    keep_tokenizer(tokenizer, folder)
    tokens = [open_tokens(side, tokenizer, store) for side in train]
    sized = SizedPairs("data.train", tokens, range(num_train), cfg)
    if cfg.eval:
        others = open_pairs("data.eval", cfg.eval, cfg.languages)
        tokens = [open_tokens(side, tokenizer, store) for side in others]
        held_out = SizedPairs("data.eval", tokens, range(others[0].count), cfg)
    else:
        held_out = SizedPairs("data.held_out", tokens, range(num_train, source.count), cfg)
    return PairData(cfg, seed, identity, tokenizer, sized, held_out)


def open_pairs(key: str, prefix: str, languages: tuple[str, ...]) -> tuple[Documents, Documents]:
    """Opens two files; line n of one translates line n of the other."""
    paths = [find_text_file(f"{key} = {prefix!r}", Path(f"{prefix}.{language}")) for language in languages]
    source, target = (open_lines(path) for path in paths)
    if source.count != target.count:
        raise DataError(
            f"{key}: {paths[0]} has {source.count:,} lines but {paths[1]} has {target.count:,};"
            " line n of one must translate line n of the other"
        )
    if not source.count:
        raise DataError(f"{key}: {paths[0]} is empty")
    return source, target


class SizedPairs:
    """The pairs of a range that are fit for use, in order of length and cut into batches."""

    def __init__(self, key: str, sides: Sequence[Tokens], chosen: range, cfg: DataConfig) -> None:
        self._source, self._target = source, target = sides
        # A stored sentence is bos, ids, eos; the model reads all but one of these.
        lengths = np.stack([np.diff(target.starts), np.diff(source.starts)]) - 1
        self._target_lengths, self._source_lengths = lengths
        usable = (lengths.min(axis=0) > 1) & (lengths.max(axis=0) <= cfg.seq_len)
        pairs = chosen.start + np.flatnonzero(usable[chosen.start : chosen.stop])
        self.pairs = self._sort(pairs) if cfg.layout == "padded" else pairs[mix_by_longest(lengths[:, pairs])]
        self.num_dropped = len(chosen) - len(self.pairs)
        if not len(self.pairs):
            raise DataError(f"{key}: no pair has two sentences of 1 to data.seq_len = {cfg.seq_len} tokens")
        sizes = lengths[:, self.pairs]
        if sizes.max() > cfg.max_tokens:
            raise DataError(
                f"data.max_tokens = {cfg.max_tokens} is too small for a sentence of {sizes.max()} tokens in {key};"
                " raise it, or lower data.seq_len"
            )
        self._cuts = list(cut_batches(sizes, cfg.max_tokens, padded=cfg.layout == "padded"))
        self.num_batches = len(self._cuts) - 1

    def shuffle(self, random: np.random.Generator) -> tuple[Int64s, Int64s]:
        """Draws an epoch: the pairs, of which those of equal lengths have changed places, and the order of batches."""
        pairs = np.empty_like(self.pairs)
        pairs[self._find_order(self.pairs)] = self._sort(random.permutation(self.pairs))
        return pairs, random.permutation(self.num_batches)

    def members(self, pairs: Int64s, batch: int) -> Int64s:
        return pairs[self._cuts[batch] : self._cuts[batch + 1]]

    def sources(self, pairs: Int64s) -> tuple[Int64s, Int64s]:
        """Returns what the encoder reads, all but bos, as one flat run; and the length of each sentence."""
        lengths = self._source_lengths[pairs]
        return self._source.read(self._source.starts[pairs] + 1, lengths), lengths

    def targets(self, pairs: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Returns what the decoder reads, all but eos; what it predicts, all but bos; and the sentences' lengths."""
        starts, lengths = self._target.starts[pairs], self._target_lengths[pairs]
        return self._target.read(starts, lengths), self._target.read(starts + 1, lengths), lengths

    def _sort(self, pairs: Int64s) -> Int64s:
        return pairs[self._find_order(pairs)]

    def _find_order(self, pairs: Int64s) -> Int64s:
        """Orders pairs by target length, then by source length."""
        return np.lexsort((self._source_lengths[pairs], self._target_lengths[pairs]))


def mix_by_longest(sizes: Int64s) -> Int64s:
    """Orders pairs by their longer side; sizes [2, n] are the lengths of both sides. Pairs that are equally long there
    are mixed as evenly as can be, by steps of the golden ratio through their order by the difference of the sides."""
    target, source = sizes
    longest = sizes.max(axis=0)
    order = np.lexsort((target - source, longest))
    return order[np.lexsort((np.arange(len(order)) * GOLDEN % 1, longest[order]))]


def cut_batches(sizes: Int64s, max_tokens: int, *, padded: bool) -> Iterator[int]:
    """Yields where batches of at most `max_tokens` begin and end; sizes [2, n] are the lengths of both sides."""
    start, totals, longest = 0, (0, 0), 0
    yield start
    for end, (target, source) in enumerate(sizes.T.tolist()):
        totals = totals[0] + target, totals[1] + source
        longest = max(longest, target, source)
        cost = (end + 1 - start) * longest if padded else max(totals)
        if cost > max_tokens:
            yield end
            start, totals, longest = end, (target, source), max(target, source)
    yield sizes.shape[1]


class PairData(Data):
    tokenizer: Tokenizer

    def __init__(
        self, cfg: DataConfig, seed: int, fingerprint: str, tokenizer: Tokenizer, train: SizedPairs,
        held_out: SizedPairs,
    ) -> None:  # fmt: skip
        self._cfg, self.fingerprint, self.tokenizer = cfg, fingerprint, tokenizer
        self._train, self._held_out = train, held_out
        self.num_train, self.num_eval_batches = len(train.pairs), held_out.num_batches
        self._eval_order = random_stream(seed, Purpose.SPLIT).permutation(held_out.num_batches)
        self._shuffle = lru_cache(1)(lambda epoch: train.shuffle(random_stream(seed, Purpose.ORDER, epoch)))

    @property
    def batches_per_epoch(self) -> float:
        return self._train.num_batches

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        epoch, place = divmod(index, self._train.num_batches)
        shuffled, order = self._shuffle(epoch)
        pairs = self._train.members(shuffled, int(order[place]))
        mine = pairs[part::parts]  # not one run of them: they are in order of length, and all parts are to be as long
        return self._batch(self._train, mine) if len(mine) else silence(self._batch(self._train, pairs[:1]))

    def eval_batch(self, index: int) -> Batch:
        return self._batch(self._held_out, self._held_out.members(self._held_out.pairs, int(self._eval_order[index])))

    def load_test_pairs(self) -> list[tuple[str, str]]:
        """Reads the pairs (source, reference) of data.test, or else of the evaluation data, as text; drops none."""
        cfg = self._cfg
        name = "test" if cfg.test else "eval" if cfg.eval else "train"
        source, target = open_pairs(f"data.{name}", getattr(cfg, name), cfg.languages)
        skipped = source.count - count_held_out(source.count, cfg.held_out) if name == "train" else 0
        return list(islice(zip(source, target, strict=True), skipped, None))

    def describe(self) -> str:
        train, held_out = self._train, self._held_out
        return (
            f"{self._cfg.train} ({' to '.join(self._cfg.languages)}): {self.num_train:,} pairs in "
            f"{train.num_batches:,} batches of at most {self._cfg.max_tokens:,} tokens, {train.num_dropped:,} dropped "
            f"(empty, or longer than {self._cfg.seq_len}); evaluation: {len(held_out.pairs):,} pairs in "
            f"{held_out.num_batches:,} batches, {held_out.num_dropped:,} dropped"
        )

    def _batch(self, split: SizedPairs, pairs: Int64s) -> Batch:
        source, source_lengths = split.sources(pairs)
        target, labels, target_lengths = split.targets(pairs)
        padded, fill = self._cfg.layout == "padded", self.tokenizer.pad
        inputs = arrange(target, target_lengths, fill, padded=padded)
        source_inputs = arrange(source, source_lengths, fill, padded=padded)
        slots, source_slots = inputs.ids.numel(), source_inputs.ids.numel()
        counts = count(target_lengths, slots, len(labels), source_lengths, source_slots)
        if padded:
            labels = spread(labels, find_slots(target_lengths, inputs.layout.max_len), slots, IGNORE)
        return Batch(to_tensor(labels), counts, tuple(pairs.tolist()), inputs, source=source_inputs)
