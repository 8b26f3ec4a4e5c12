"""Sequence parallelism: one long sequence over several processes, exactly.

The processes are a mesh (data, sequence). Those of one row of it share each sequence: all read the same micro-batch,
and each keeps its own tokens of every sequence (layouts.py). Embedding, projections, norms, MLPs and the loss work
token by token, so they need nothing else. Only attention does: a layout carries a `Segment`, which attends in one of
three ways:

    gather    every process gets the keys and values of all; see gather.py. The LSS Transformer's way
    ring      they go around; see ring.py
    ulysses   every process gets some heads of all tokens; see ulysses.py

Everything about the whole is settled before the split. Labels are already those of the next token, wherever that went.
Positions are those in the whole sequence. The loss is a sum over the process's tokens, divided by the number of labels
in all of the batch; with it, gradients are to be summed over all processes, however the tokens are spread over them. So
data parallelism needs no change (parallel/data.py): its one reduction does what the paper averages twice, over the
sequence and over the data, and learned positions are no special case: a process adds 0 to rows that it never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.batch import IGNORE, Batch, Counts, Layout, Sequences
from stretto.config import Config, ModelConfig, ParallelConfig
from stretto.ops.attention import words_ref
from stretto.ops.dropout import draw_keys
from stretto.parallel.gather import Gather
from stretto.parallel.layouts import Cut, cut, split
from stretto.parallel.partial import Scores
from stretto.parallel.reach import Side, reach_others, reach_own
from stretto.parallel.ring import Ring
from stretto.parallel.sequence_costs import NETWORK, NVLINK, choose_method, list_reasons
from stretto.parallel.ulysses import Ulysses
from stretto.techniques.technique import At, Context, Technique

Method = Callable[[Tensor, Tensor, Tensor, Scores], Tensor]


def choose(cfg: ParallelConfig, model: ModelConfig, tokens: int, world: int) -> tuple[ParallelConfig, str]:
    """The options with a method for sequences of `tokens`, and the reason for it unless the recipe names one."""
    if cfg.sequence_method != "auto":
        return cfg, ""
    # Groups are neighbours: with as many in a machine as torchrun says, none of them spans two.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    link, even = NVLINK if local % cfg.sequence == 0 else NETWORK, -(-tokens // cfg.sequence) * cfg.sequence
    choice = choose_method(model, cfg.sequence, even, link, causal=model.kind != "encoder")
    return replace(cfg, sequence_method=choice.method), choice.reason


@dataclass(frozen=True)
class Segment:
    """What batch.Segment says."""

    tokens: Tensor  # int64 [T]
    own: Method
    memory: Method | None  # of the other side of the batch

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between processes are no part of a graph
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, own: bool, dropout: float, key: Tensor | None, scale: float | None
    ) -> Tensor:
        method = self.own if own else self.memory
        assert method is not None, "the batch has no other side"
        scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale)
        if dropout > 0.0:
            words = words_ref(draw_keys(q, 1)[0] if key is None else key, self.tokens, q.shape[1])
            scores = replace(scores, dropout=dropout, words=words)
        with torch.autocast(q.device.type, enabled=False):
            return method(q, k, v, scores)


@dataclass(frozen=True)
class Splitter:
    """Gives a process its part of each batch."""

    cfg: ParallelConfig
    model: ModelConfig
    group: dist.ProcessGroup  # of those who share a sequence

    def __call__(self, batch: Batch) -> Batch:
        """A micro-batch that the whole group has read, on the CPU."""
        assert batch.inputs is not None
        part, size, counts = self.group.rank(), self.group.size(), batch.counts
        inputs = self.side(batch.inputs)
        source = None if batch.source is None else self.side(batch.source)
        labels, label_at = self.split_labels(batch, inputs.cut)
        counts = Counts(
            tokens=len(inputs.cut.tokens(part)),
            slots=inputs.cut.size,
            labels=int((labels != IGNORE).sum()),
            pairs=_share(counts.pairs, part, size),
            source_tokens=0 if source is None else len(source.cut.tokens(part)),
            source_slots=0 if source is None else source.cut.size,
            source_pairs=_share(counts.source_pairs, part, size),
            cross_pairs=_share(counts.cross_pairs, part, size),
        )
        return replace(
            batch,
            labels=labels,
            label_at=label_at,
            counts=counts,
            inputs=self.split_sequences(batch.inputs, inputs, self.model.kind != "encoder", source),
            source=None if source is None else self.split_sequences(batch.source, source, causal=False),
        )

    def side(self, of: Sequences) -> Side:
        assert of.layout.lengths is None, "padding is not split"
        cuts = cut(of.layout, len(of.ids), self.group.size(), self.cfg.sequence_layout)
        return Side(of.layout, cuts, self.group.rank())

    def split_sequences(
        self, whole: Sequences | None, side: Side, causal: bool, memory: Side | None = None
    ) -> Sequences:
        assert whole is not None
        own, num_filler = side.cut.tokens(side.part), side.num_filler
        # Filler is numbered behind all real tokens: dropout then treats it as something else.
        tokens = np.append(own, len(whole.ids) + side.part * side.cut.size + np.arange(num_filler))
        segment = Segment(
            tokens=torch.from_numpy(tokens),
            own=self.choose_method(side, side, causal),
            memory=None if memory is None else self.choose_method(side, memory, causal=False),
        )
        layout = Layout(
            reach_own(side, causal).q_ends, whole.layout.max_len, num_real=torch.tensor(len(own)), segment=segment
        )
        ids, positions = (split(t, side.cut, side.part, 0) for t in (whole.ids, whole.positions))
        types = None if whole.types is None else split(whole.types, side.cut, side.part, 0)
        return Sequences(ids, positions, layout, types)

    def choose_method(self, queries: Side, keys: Side, causal: bool) -> Method:
        assert self.cfg.sequence_method != "auto", "the method has been chosen before"
        part, parts, owner, window = queries.part, queries.cut.parts, keys.cut.owner, self.model.window
        if self.cfg.sequence_method == "ulysses":
            q_rows, k_rows = (torch.from_numpy(side.cut.row) for side in (queries, keys))
            return Ulysses(self.group, queries.layout, keys.layout, q_rows, k_rows, causal, window)
        if queries is keys:
            own = reach_own(keys, causal)
        else:
            own = reach_others(queries, keys, owner == part, part * keys.cut.size, causal)
        if self.cfg.sequence_method == "ring":
            sources = {hop: (part - hop) % parts for hop in range(1, parts)}
            hops = {
                hop: reach_others(queries, keys, owner == source, source * keys.cut.size, causal)
                for hop, source in sources.items()
            }
            return Ring(self.group, own, hops)
        if causal and window:
            everyone = reach_others(queries, keys, owner >= 0, 0, causal, window)
            return Gather(self.group, None, everyone, self.cfg.sequence_keep, self.cfg.sequence_heads)
        others = reach_others(queries, keys, owner != part, 0, causal)
        return Gather(self.group, own, others, self.cfg.sequence_keep, self.cfg.sequence_heads)

    def split_labels(self, batch: Batch, of: Cut) -> tuple[Tensor, Tensor | None]:
        part = self.group.rank()
        if batch.label_at is None:
            return split(batch.labels, of, part, IGNORE), None
        at = batch.label_at.numpy()
        mine = np.flatnonzero(of.owner[at] == part)
        labels, label_at = batch.labels[torch.from_numpy(mine)], of.row[at[mine]] - part * of.size
        if len(mine) == 0:  # the head needs something to read
            return torch.tensor([IGNORE]), torch.tensor([0])
        return labels, torch.from_numpy(label_at)


class SequenceParallel(Technique):
    """Processes share each sequence: each gets its part of every batch, for training and evaluation."""

    name, exact, splits_sequences = "sequence", True, True
    cfg: ParallelConfig

    def __init__(self, cfg: ParallelConfig, context: Context) -> None:
        assert context.model is not None
        cfg, self.reason = choose(cfg, context.model, context.seq_len, context.mesh.world)
        super().__init__(cfg, context)
        assert context.mesh.grid is not None
        self.split = Splitter(cfg, context.model, context.mesh.grid.get_group(self.name))

    @classmethod
    def find_options(cls, config: Config, device: torch.device) -> ParallelConfig | None:
        return config.parallel if config.parallel.sequence > 1 else None

    @property
    def key(self) -> str:
        return "parallel.sequence"

    def check(self, others: Sequence[Technique]) -> list[str]:
        return list_reasons(self.cfg, self.split.model, self.context.seq_len, self.context.padded)

    def random_keys(self, others: Sequence[Technique]) -> tuple[int, ...]:
        """Where dropout follows a token's place in the whole batch, all processes have the same keys. Torch's kernels
        know no places, so there each part of a sequence draws masks of its own."""
        return () if any(other.drops_by_place for other in others) else (self.split.group.rank(),)

    def find_obstacles(self) -> list[str]:
        return [" sends keys and values in the middle of a pass"]

    def prepare(self, batch: Batch, at: At) -> Batch:
        return self.split(batch)

    def describe(self) -> str:
        cfg = self.cfg
        words = f"sequences over {cfg.sequence} processes ({cfg.sequence_method}, {cfg.sequence_layout})"
        return f"{words}: {self.reason}" if self.reason else words


def _share(total: int, part: int, parts: int) -> int:
    """The share of one process in a number that is counted over all of them."""
    return total * (part + 1) // parts - total * part // parts
