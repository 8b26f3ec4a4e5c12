"""What one rank of P needs for a step of a decoder whose sequences are split: bytes, messages of weights, seconds.

The messages of a layer are those of stretto/parallel/sequence_costs.py and, to compare with, those of Megatron-LM's
tensor parallelism with sequence-parallel norms: weights are split, and all tokens come together in front of both halves
of a layer. Its inputs stay gathered for the backward pass (keep), or are gathered again. A rank sends 8 c s h elements
in 8 messages per layer; gathered again, 10 c s h in 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from stretto import memory
from stretto.config import ModelConfig
from stretto.memory import Keep, kv_width
from stretto.parallel import sequence_costs
from stretto.parallel.sequence_costs import Link, Message, Pass, Traffic, exposed_seconds

STATE_BYTES = (4, 4, 8)  # of a parameter: weight (fp32, or bf16 and the 16 bits below), gradient, AdamW's moments


def find_obstacle(cfg: ModelConfig, method: str, ranks: int, tokens: int) -> str:
    """Says why this model cannot be split so; empty if it can."""
    if method != "megatron" or tokens % ranks:
        return sequence_costs.find_obstacle(cfg, method, ranks, tokens)
    return f"{cfg.heads} heads do not divide by {ranks} ranks" if cfg.heads % ranks else ""


def layer_traffic(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int = 2, reduced: int = 4, keep: bool = True
) -> Traffic:
    """The messages of one rank in one layer, megatron's too."""
    if method != "megatron" or ranks == 1:
        return sequence_costs.layer_traffic(cfg, method, ranks, tokens, element, reduced, keep)
    size = (ranks - 1) / ranks * tokens * cfg.width * element
    gather = Message("all-gather", size, ranks - 1, count=2)
    scatter = Message("reduce-scatter", size, ranks - 1, count=2)
    return Traffic((gather, scatter), (gather, scatter) if keep else (gather, gather, scatter))


def count_parameters(cfg: ModelConfig) -> tuple[int, int]:
    """Counts the parameters of one block of a decoder, and those outside of its blocks."""
    parts = memory.count_parameters(cfg)
    blocks = parts.pop("decoder blocks")
    return blocks // cfg.layers, sum(parts.values())


def weight_traffic(parameters: int, ranks: int, sharded: bool, element: int = 2, reduced: int = 4) -> Traffic:
    """The messages of these parameters in a step. Ranks with other tokens add up their gradients; where weights are
    sharded (FSDP), each use of a weight begins by gathering it."""
    if ranks == 1:
        return Traffic()
    c, hops = (ranks - 1) / ranks, ranks - 1
    if not sharded:
        return Traffic((), (Message("all-reduce", 2 * c * parameters * reduced, 2 * hops),))
    gather = Message("all-gather", c * parameters * element, hops)
    return Traffic((gather,), (gather, Message("reduce-scatter", c * parameters * reduced, hops)))


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank, by cause."""

    weights: float
    gradients: float
    moments: float
    activations: float  # kept by all layers for the backward pass
    gathered: float  # K/V of all tokens (megatron: inputs), in all layers that keep them
    working: float  # what the backward pass of one layer needs besides

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def choose_keep(recompute: bool) -> Keep:
    return Keep(mlp="product" if recompute else "activation")


def kept_bytes(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int = 2, recompute: bool = False
) -> int:
    """What one layer keeps on a rank, other than weights and gathered tensors."""
    extra = 0
    if method == "ulysses" and ranks > 1:
        extra = cfg.width  # the result as all tokens of some heads, and as some tokens of all heads
    if method in ("gather", "ring") and ranks > 1:
        extra = 2 * kv_width(cfg)  # keys and values once more, side by side as they are sent
    kept = memory.block_bytes(cfg, choose_keep(recompute), element)
    return tokens // ranks * (sum(kept.values()) + extra * element)


def gathered_bytes(cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int = 2) -> int:
    """The bytes of gathered tensors of one layer, besides kept_bytes: these are not divided by the number of ranks.
    Megatron's two gathered inputs take the place of the local ones."""
    if ranks == 1 or method not in ("gather", "megatron"):
        return 0
    return 2 * (tokens * kv_width(cfg) if method == "gather" else (tokens - tokens // ranks) * cfg.width) * element


def rank_memory(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, sharded: bool = True, element: int = 2, reduced: int = 4,
    keep: bool = False, recompute: bool = False,
) -> Memory:  # fmt: skip
    """Computes the memory of one rank of a decoder. `sharded`: weights, gradients and moments are divided among the
    ranks (FSDP), as megatron's are in any case."""
    block, outside = count_parameters(cfg)
    parameters, split = cfg.layers * block + outside, ranks if sharded or method == "megatron" else 1
    weights, gradients, moments = (parameters * size / split for size in STATE_BYTES)
    one = gathered_bytes(cfg, method, ranks, tokens, element)
    return Memory(
        weights,
        gradients,
        moments,
        activations=cfg.layers * kept_bytes(cfg, method, ranks, tokens, element, recompute),
        gathered=cfg.layers * one if keep else 0,
        working=_working_bytes(cfg, method, ranks, tokens, element, reduced, recompute)
        + (0 if keep else one)
        # FSDP has this block's weights, those of the one before, and those outside of blocks.
        + ((2 * block + outside) * element if sharded and ranks > 1 and method != "megatron" else 0),
    )


def _working_bytes(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int, reduced: int, recompute: bool
) -> float:
    """What the layer needs on one rank or, if that is more, its attention with messages, where `gather` has gradients
    of all keys, and in a ring there are a block that comes, a block that goes, and the gradients of both. Besides, keys
    that are seen are copied together, and their gradients are there as they are found before they are added up."""
    own, kv = tokens // ranks, kv_width(cfg)
    alone, attention = (
        own * memory.work_bytes(cfg, choose_keep(recompute), element),
        own * 2 * (cfg.width + kv) * element,
    )
    if method == "gather" and ranks > 1:
        attention += 2 * tokens * kv * reduced + _found_bytes(cfg, tokens, element, reduced)
    if method == "ring" and ranks > 1:
        attention += 2 * 2 * own * kv * (element + reduced) + _found_bytes(cfg, own, element, reduced)
    return max(alone, attention)


def _found_bytes(cfg: ModelConfig, tokens: int, element: int, reduced: int) -> int:
    """Keys and values side by side, the gradients of both, and one of them as it is added. Kernels find gradients for
    each query head before they add up those of heads that share a key."""
    kv = kv_width(cfg)
    return tokens * (kv * (4 * element + reduced) + (2 * cfg.width * element if kv < cfg.width else 0))


def classic_activation_bytes(cfg: ModelConfig, method: str, ranks: int, tokens: int) -> float:
    """The activations of one layer in 16 bits without fused kernels, where attention keeps its scores: 34 s h + 5 n s^2
    (Korthikanti et al. 2022) over the ranks and, for `gather`, the gathered K/V, as before FlashAttention."""
    split = (34 * tokens * cfg.width + 5 * cfg.heads * tokens**2) / ranks
    return split + (gathered_bytes(cfg, "gather", ranks, tokens) if method == "gather" else 0)


def sum_passes(passes: Iterable[Pass]) -> Pass:
    return sum(passes, Pass(0.0, 0.0))


@dataclass(frozen=True)
class StepTime:
    """The seconds of one optimizer step, by cause."""

    layers: float  # work in all layers
    outside: float  # embedding, output layer, loss and update
    waits: float  # for messages of layers
    weights: float  # for weights and their gradients

    @property
    def total(self) -> float:
        return self.layers + self.outside + self.waits + self.weights


def compose_step(
    cfg: ModelConfig, method: str, ranks: int, link: Link, rest: Pass, blocks: Sequence[Pass], outside: float,
    traffic: Traffic, sharded: bool = True, element: int = 2, reduced: int = 4,
) -> StepTime:  # fmt: skip
    """Composes a step from the times of one layer's work (`rest` and blocks of attention) and of the work outside of
    layers. Messages of weights hide behind work that hides no other message; weights outside of blocks are gathered
    before everything else, and their gradients reduced after it."""
    work, waits = rest + sum_passes(blocks), exposed_seconds(method, blocks, traffic, link)
    hidden_forward = link.seconds(traffic.forward) - waits.forward
    hidden_backward = link.seconds(traffic.backward) - waits.backward
    per_block, alone = count_parameters(cfg)
    weights = 0.0
    if method != "megatron":
        block = weight_traffic(per_block, ranks, sharded, element, reduced)
        forward = max(link.seconds(block.forward) - (work.forward - hidden_forward), 0.0)
        backward = max(link.seconds(block.backward) - (work.backward - hidden_backward), 0.0)
        first = weight_traffic(alone, ranks, sharded, element, reduced)
        weights = cfg.layers * (forward + backward) + link.seconds([*first.forward, *first.backward[-1:]])
    return StepTime(cfg.layers * work.total, outside, cfg.layers * waits.total, weights)
