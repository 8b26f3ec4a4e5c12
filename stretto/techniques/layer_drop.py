"""Progressive Layer Dropping (Zhang & He, NeurIPS 2020, arXiv 2010.13369): most steps train a shallower network.

A pre-norm block adds something to the stream. A block that is left out adds nothing, and costs nothing: no forward, no
backward, no update, no message. What it adds otherwise is multiplied by 1 / p, p the probability that it works, so that
on average the stream gets what it would have got. With theta the schedule in time, and block l of L, counted from 1:

    decay      theta(t) = (1 - theta) exp(-gamma t) + theta     from 1 down: at first, blocks do different things
    raptr      theta(t) = theta + (1 - theta) t / T             from below up to 1 (after arXiv 2402.05913)
    algorithm  p_l(t) = 1 - (l - 1) / L (1 - theta(t))          the first block always works (the paper's algorithm)
    text       p_l(t) = 1 - l / L (1 - theta(t))                the last block reaches theta(t) (its text)

theta(t) is rounded to one of nine levels, so that a run has few kinds of steps.

`gate = "batch"`: a block works on a step's whole batch, or not at all. All micro-batches of a step share the choice: a
block that is left out then has no gradient at all and nothing to exchange with other processes, and AdamW passes it
over (no decay, no step of its moments). "bernoulli" draws each block by itself. "systematic" draws one number u and
leaves out the blocks at which u + the sum of 1 - p so far passes an integer: the same probabilities, but always as many
blocks, up to one, and at most L + 1 different patterns for one theta, few enough to keep a CUDA graph of each.

`gate = "sample"`: every block works on a random subset of k = round(N p) of a micro-batch's N sequences, and its scale
is N / k. Shapes depend on theta alone where sequences are equally long; every parameter is used in every step.

`scale = "branch"` multiplies each branch of a block, as the paper does: right on average for a branch, given its input.
"update" multiplies the block as a whole, x + (block(x) - x) / p: right on average for the block.

Choices are functions of (seed, step, stack, block), subsets of (seed, number of the micro-batch, stack, block), made on
the host by a hash: the same in all processes, however many there are, and in a resumed run, without touching any
generator. They travel with the batch, so what is evaluated, generated or exported runs all blocks as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.batch import Batch, Depth, Layout, Part, Subset, dense_layout
from stretto.config import LayerDropConfig
from stretto.flops import tokens_per_sample
from stretto.techniques.foreign import Foreign, Switch
from stretto.techniques.technique import POST_NORM, SAY_STEPS, At, Context, Sites, Technique

LEVELS = 8  # steps of theta between 1 and its lowest value


def resolve_scale(cfg: LayerDropConfig, own: bool) -> Literal["branch", "update"]:
    """`own`: the model is Stretto's, whose blocks can scale each branch."""
    if cfg.scale == "auto":
        return "branch" if own else "update"
    return cfg.scale


def level_at(cfg: LayerDropConfig, step: int, total: int) -> float:
    """The level next to theta(t)."""
    if cfg.theta == 1.0:
        return 1.0
    size = (1 - cfg.theta) / LEVELS
    return 1.0 - round((1 - cfg.theta_at(step, total)) / size) * size


def choose_systematically(probabilities: Sequence[float], u: float) -> list[bool]:
    """Which blocks work, for u in [0, 1)."""
    chosen, position = [], u
    for p in probabilities:
        before, position = math.floor(position), position + (1 - p)
        chosen.append(math.floor(position) == before)
    return chosen


def draw_number(*keys: int | str) -> float:
    """In [0, 1), a function of the keys."""
    return (draw_seed(*keys) >> 10) / 2**53


def draw_seed(*keys: int | str) -> int:
    """63 bits."""
    return int.from_bytes(hashlib.sha256(repr(("layer_drop", *keys)).encode()).digest()[:8], "little") >> 1


class LayerDrop(Technique):
    """Draws for the batches of a run."""

    name, exact, by_block = "layer_drop", False, True
    cfg: LayerDropConfig
    num_blocks: dict[str, int]  # by the name of the stack
    switches: Mapping[str, Sequence[Switch]] = MappingProxyType({})  # of a model of others, by the name of the stack

    def __init__(self, cfg: LayerDropConfig, context: Context) -> None:
        super().__init__(replace(cfg, scale=resolve_scale(cfg, own=context.model is not None)), context)

    @classmethod
    def identity(cls, cfg: LayerDropConfig | None) -> dict[str, Any] | None:
        return super().identity(None if cfg is None else replace(cfg, scale=resolve_scale(cfg, own=True)))

    def why_not_by_module(self) -> str:
        if self.cfg.gate == "batch":
            return ""
        return "gate = 'sample' hands a part of the batch from block to block: set it to 'batch'"

    @property
    def gaps(self) -> bool:
        return self.cfg.gate == "batch"

    @property
    def num_kinds(self) -> int:
        """The number of patterns that systematic draws give under one theta."""
        return 1 + max(self.num_blocks.values()) if self.gaps else 1

    def check(self, others: Sequence[Technique]) -> list[str]:
        model, reasons = self.context.model, []
        if model is not None and model.norm_order == "post":
            reasons.append(f"{POST_NORM}: use model.norm_order = 'pre'")
        if model is None and self.cfg.scale == "branch":
            reasons.append("scale = 'branch' is inside of Hugging Face's own layers: set it to 'update'")
        if model is None and self.cfg.gate == "sample":
            reasons.append("gate = 'sample' would cut all that layers are given: set it to 'batch'")
        if self.cfg.gate == "sample" and any(other.splits_sequences for other in others):
            reasons.append("gate = 'sample' would need other sequences for each block, split anew: set it to 'batch'")
        return reasons

    def apply(self, model: nn.Module, sites: Sites) -> None:
        """There is nothing to exchange: every stack leaves out the blocks that a batch does not name."""
        self.num_blocks = {name: len(model.get_submodule(name).blocks) for name in sites["stack"]}  # type: ignore[arg-type]

    def attach(self, model: Foreign) -> None:
        self.switches = model.switch_layers(self.name, self._find_problem)
        self.num_blocks = {name: len(switches) for name, switches in self.switches.items()}

    def _find_problem(self, switches: Sequence[Switch]) -> str | None:
        lowest = self.cfg.keep_probabilities(self.cfg.theta, len(switches))
        if any(switch.needed and p < 1 for switch, p in zip(switches, lowest, strict=True)):
            way = f"set {self.name}.index to 'algorithm'"
            return f"its first layer makes what the others need, and cannot be left out: {way}"
        return None

    def begin(self, step: int, share: float, scaler: torch.amp.GradScaler | None) -> None:
        """Batches of ours bring the choice along; layers of others are told."""
        for stack, switches in self.switches.items():
            probabilities = self.cfg.keep_probabilities(self.theta(step), len(switches))
            works = self.draw_blocks(stack, probabilities, step)
            for number, (switch, p) in enumerate(zip(switches, probabilities, strict=True)):
                switch.factor = 1 / p if number in works else 0.0

    def pattern(self) -> dict[str, Any]:
        return {stack: {i: s.factor for i, s in enumerate(switches)} for stack, switches in self.switches.items()}

    def prepare(self, batch: Batch, at: At) -> Batch:
        """A batch on the CPU, with what each block does with it."""
        theta = self.theta(at.step)
        if theta == 1.0 or not at.training:
            return batch
        depths = {}
        for stack, size in self.num_blocks.items():
            probabilities = self.cfg.keep_probabilities(theta, size)
            if self.cfg.gate == "batch":
                parts, scales = self.draw_blocks(stack, probabilities, at.step), [1 / p for p in probabilities]
                work = float(len(parts))
            else:
                parts, scales = self.draw_subsets(stack, probabilities, at.index, batch)
                work = sum(1 / scale for scale in scales)
            depths[stack] = Depth(torch.tensor(scales), parts, self.cfg.scale == "update", work)
        return replace(batch, depths=depths)

    def find_obstacles(self) -> list[str]:
        if not self.gaps:
            return []
        reasons = []
        if self.cfg.sampling == "bernoulli":
            reasons.append(".sampling = 'bernoulli' has too many patterns to record: set it to 'systematic'")
        if max(self.context.mesh.world, self.context.micro_batches) > 1:
            reasons.append(
                " leaves blocks without gradients, which several micro-batches or processes would have to keep in"
                " place: set its gate to 'sample'"
            )
        return reasons

    def graph_key(self, step: int) -> float:
        """The patterns of blocks that work under one theta do not come again under another."""
        return self.theta(step)

    def theta(self, step: int) -> float:
        cfg = self.cfg
        by_length = cfg.schedule == "raptr" or (cfg.schedule == "decay" and cfg.gamma == 0.0)
        if by_length and cfg.theta < 1 and self.context.steps == 0:
            raise ValueError(f"{self.name}.schedule = {cfg.schedule!r} needs the number of updates: {SAY_STEPS}")
        return level_at(self.cfg, step, self.context.steps)

    def draw_blocks(self, stack: str, probabilities: Sequence[float], step: int) -> dict[int, Part]:
        if self.cfg.sampling == "systematic":
            chosen = choose_systematically(probabilities, draw_number(self.context.seed, step, stack))
        else:
            chosen = [draw_number(self.context.seed, step, stack, i) < p for i, p in enumerate(probabilities)]
        return {i: Part() for i, works in enumerate(chosen) if works}

    def draw_subsets(
        self, stack: str, probabilities: Sequence[float], index: int, batch: Batch
    ) -> tuple[dict[int, Part], list[float]]:
        """The parts, and what they have to be multiplied by."""
        own, seen = self.find_layouts(batch, stack)
        real = own.offsets.diff().nonzero().flatten()  # packed batches may end in empty sequences
        parts, scales = {}, []
        for i, p in enumerate(probabilities):
            count = max(1, round(p * len(real)))
            random = torch.Generator().manual_seed(draw_seed(self.context.seed, index, *self.context.part, stack, i))
            rows = real[torch.randperm(len(real), generator=random)[:count].sort().values]
            subset = Part(select(own, rows), None if seen is None else select(seen, rows))
            parts[i] = subset if count < len(real) else Part()
            scales.append(max(1.0, len(real) / count))
        return parts, scales

    def find_layouts(self, batch: Batch, stack: str) -> tuple[Layout, Layout | None]:
        """The layouts of what the stack reads and of what its cross attention sees."""
        if batch.pixels is not None:
            assert self.context.model is not None
            return dense_layout(len(batch.pixels), tokens_per_sample(self.context.model)), None
        assert batch.inputs is not None
        if batch.source is None:
            return batch.inputs.layout, None
        return (batch.source.layout, None) if stack == "encoder" else (batch.inputs.layout, batch.source.layout)


def select(layout: Layout, rows: Tensor) -> Subset:
    """These sequences, in this order."""
    begins, lengths = layout.offsets[:-1][rows], layout.offsets.diff()[rows]
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = torch.repeat_interleave(begins - offsets[:-1], lengths) + torch.arange(int(offsets[-1]))
    places = torch.full((int(layout.offsets[-1]),), -1, dtype=torch.int32)
    places[tokens] = torch.arange(len(tokens), dtype=torch.int32)
    if layout.dense:
        real = None if layout.lengths is None else layout.lengths[rows]
        return Subset(tokens, places, dense_layout(len(rows), layout.max_len, real))
    num_real = None if layout.num_real is None else (tokens < layout.num_real).sum()
    return Subset(tokens, places, replace(layout, offsets=offsets, num_real=num_real))
