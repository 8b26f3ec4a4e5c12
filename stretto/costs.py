"""What it costs to split one sequence over ranks: bytes sent, memory of a rank, time; and which way to do it.

Each rank has s / P of the s tokens. All that is done token by token needs nobody else; attention does.

    gather    (LSS) keys and values of all ranks are gathered, their gradients reduced and scattered; attention rows of
              local queries are then complete. K/V of a layer stay for the backward pass (keep), or are gathered again.
    ulysses   queries, keys and values change from s / P tokens of all heads to all tokens of heads / P, and back
    ring      blocks of keys and values go from rank to rank, and so do their gradients
    megatron  not a way to split a sequence, but what these are compared with: tensor parallelism, in which weights are
              split and all tokens come together in front of both halves of a layer (Megatron-LM with sequence parallel
              norms). Its inputs stay gathered for the backward pass (keep), or are gathered again.

A rank sends per layer, forward and backward together, in elements (c = (P - 1) / P, h width, h_kv that of all keys):

    gather    4 c s h_kv              in 2 collectives; gathered again: 6 c s h_kv in 3
    ulysses   c s (4 h + 4 h_kv) / P  in 6: queries, keys with values, and the result
    ring      6 c s h_kv              in 3 (P - 1) messages
    megatron  8 c s h                 in 8; gathered again: 10 c s h in 10

These are the volumes of bandwidth-optimal algorithms. Activations and weights take `element` bytes, sums of gradients
`reduced` bytes: fp32, so that adding up many ranks costs no precision. Several sequences side by side cost as many
times as much. Nothing is imported here but the configuration: a choice must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from stretto.config import ModelConfig

Method = Literal["gather", "ulysses", "ring"]
METHODS: tuple[Method, ...] = get_args(Method)
STATE_BYTES = (4, 4, 8)  # of a parameter: weight (fp32, or bf16 and the 16 bits below), gradient, AdamW's moments
WORTH = 1.05  # another method has to be so many times faster than gathering, which knows all masks and head counts

# What attention in blocks costs besides its arithmetic, in both passes, on an H200 (docs/results.md).
BLOCK_S = 8.4e-5  # of each block: small kernels that follow one another
VALUE_S = 3.5e-11  # of each value of queries that is merged with what was known, and of all keys if they are gathered


@dataclass(frozen=True)
class Link:
    """What a rank sends through. Latency is that of each of the hops that a message takes one after another."""

    name: str
    bandwidth: float  # bytes/s that a rank sends, while it receives as many
    latency: float  # s

    def seconds(self, messages: Iterable[Message]) -> float:
        return sum(m.count * (m.size / self.bandwidth + m.hops * self.latency) for m in messages)


# Latencies are assumptions, bandwidths the nominal ones.
NVLINK = Link("NVLink, 450 GB/s", 450e9, 2e-6)
NETWORK = Link("network, 50 GB/s", 50e9, 5e-6)


@dataclass(frozen=True)
class Message:
    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all or send
    size: float  # bytes that each rank sends
    hops: int  # a ring of P ranks has P - 1
    count: int = 1  # so many, one after another


@dataclass(frozen=True)
class Traffic:
    """What one rank takes part in, per layer."""

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()

    @property
    def size(self) -> float:
        return sum(m.count * m.size for m in (*self.forward, *self.backward))

    @property
    def count(self) -> int:
        return sum(m.count for m in (*self.forward, *self.backward))


def kv_width(cfg: ModelConfig) -> int:
    """Channels of all keys of a token, or of all its values."""
    return cfg.width // cfg.heads * (cfg.kv_heads or cfg.heads)


def mlp_widths(cfg: ModelConfig) -> tuple[int, int]:
    """What comes out of the first product, and what goes into the second."""
    inner = cfg.mlp_width or 4 * cfg.width
    return (2 * inner if cfg.activation == "swiglu" else inner), inner


def count_parameters(cfg: ModelConfig) -> tuple[int, int]:
    """Of a decoder: those of one block, and those outside of the blocks."""
    up, inner = mlp_widths(cfg)
    h, kv = cfg.width, kv_width(cfg)
    norm = h * (2 if cfg.norm == "layernorm" and cfg.bias else 1)
    products = h * (h + 2 * kv) + h * h + h * up + inner * h
    biases = (h + 2 * kv) + h + up + h if cfg.bias else 0
    tables = cfg.vocab * (1 if cfg.tied else 2) + (cfg.max_len if cfg.positions == "learned" else 0)
    return products + biases + 2 * norm, tables * h + (norm if cfg.norm_order == "pre" else 0)


def find_obstacle(cfg: ModelConfig, method: str, ranks: int, tokens: int) -> str:
    """Why this model cannot be split so; empty if it can."""
    kv_heads = cfg.kv_heads or cfg.heads
    if tokens % ranks:
        return f"{tokens} tokens do not divide by {ranks} ranks"
    if method == "ulysses" and kv_heads % ranks:
        return f"{kv_heads} KV heads do not divide by {ranks} ranks"
    if method == "ulysses" and cfg.attention_dropout:
        return "it drops no attention probabilities"
    if method == "ring" and cfg.window:
        return "it knows no window"
    if method == "megatron" and cfg.heads % ranks:
        return f"{cfg.heads} heads do not divide by {ranks} ranks"
    return ""


def layer_traffic(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int = 2, reduced: int = 4, keep: bool = True
) -> Traffic:
    if ranks == 1:
        return Traffic()
    c, hops, kv = (ranks - 1) / ranks, ranks - 1, kv_width(cfg)
    if method == "gather":
        gather = Message("all-gather", 2 * c * tokens * kv * element, hops)
        scatter = Message("reduce-scatter", 2 * c * tokens * kv * reduced, hops)
        return Traffic((gather,), (scatter,) if keep else (gather, scatter))
    if method == "ulysses":  # all pairs of ranks talk at the same time
        wide = Message("all-to-all", c * tokens / ranks * cfg.width * element, 1, count=2)  # queries and results
        narrow = Message("all-to-all", 2 * c * tokens / ranks * kv * element, 1)  # keys and values
        return Traffic((wide, narrow), (wide, narrow))
    block = 2 * tokens / ranks * kv
    if method == "ring":
        pass_on = Message("send", block * element, 1, count=ranks - 1)
        # The sum of a block's gradients begins at the next rank and comes home, where the rank's own are added.
        return Traffic((pass_on,), (pass_on, Message("send", block * reduced, 1, count=ranks - 1)))
    if method == "megatron":
        gather = Message("all-gather", c * tokens * cfg.width * element, hops, count=2)
        scatter = Message("reduce-scatter", c * tokens * cfg.width * element, hops, count=2)
        return Traffic((gather, scatter), (gather, scatter) if keep else (gather, gather, scatter))
    raise ValueError(f"method {method!r} has to be one of {', '.join((*METHODS, 'megatron'))}")


def weight_traffic(parameters: int, ranks: int, sharded: bool, element: int = 2, reduced: int = 4) -> Traffic:
    """Of these parameters, once a step. Ranks with other tokens add up their gradients; where weights are sharded
    (FSDP), each use of them begins by gathering them."""
    if ranks == 1:
        return Traffic()
    c, hops = (ranks - 1) / ranks, ranks - 1
    if not sharded:
        return Traffic((), (Message("all-reduce", 2 * c * parameters * reduced, 2 * hops),))
    gather = Message("all-gather", c * parameters * element, hops)
    return Traffic((gather,), (gather, Message("reduce-scatter", c * parameters * reduced, hops)))


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    moments: float
    activations: float  # kept by all layers for the backward pass
    gathered: float  # K/V of all tokens (megatron: inputs), in all layers that keep them
    working: float  # what the backward pass of one layer needs besides

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def kept_bytes(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int = 2, recompute: bool = False
) -> int:
    """What one fused pre-norm layer keeps on a rank, other than weights and gathered tensors. Per token: the stream and
    the normalised stream, twice; queries, keys, values and the result; both inner values of the MLP, or one if the
    other is computed again; and in fp32 the statistics of both norms and the logarithms of attention's sums."""
    up, inner = mlp_widths(cfg)
    width = 5 * cfg.width + cfg.width + 2 * kv_width(cfg) + up + (0 if recompute else inner)
    if method == "ulysses" and ranks > 1:
        width += cfg.width  # the result as all tokens of some heads, and as some tokens of all heads
    if method in ("gather", "ring") and ranks > 1:
        width += 2 * kv_width(cfg)  # keys and values once more, side by side as they are sent
    statistics = 2 * (1 if cfg.norm == "rmsnorm" else 2) + cfg.heads
    return tokens // ranks * (width * element + statistics * 4)


def gathered_bytes(cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int = 2) -> int:
    """Of one layer, besides what is counted in kept_bytes: not divided by the number of ranks. Megatron's two inputs
    take the place of the local ones."""
    if ranks == 1 or method not in ("gather", "megatron"):
        return 0
    return 2 * (tokens * kv_width(cfg) if method == "gather" else (tokens - tokens // ranks) * cfg.width) * element


def rank_memory(
    cfg: ModelConfig,
    method: str,
    ranks: int,
    tokens: int,
    sharded: bool = True,
    element: int = 2,
    reduced: int = 4,
    keep: bool = False,
    recompute: bool = False,
) -> Memory:
    """Of a decoder; `sharded`: weights, gradients and moments are split over the ranks (FSDP), as megatron's are in any
    case."""
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
    """At the worse of two times in a layer's backward pass: gradients of the MLP's inner values and, if these are
    computed again, one of them; or those of queries, keys and values, where `gather` has those of all keys, and in a
    ring there are a block that comes, a block that goes, and the gradients of both. Besides, keys that are seen are
    copied together, and their gradients are there as they are found before they are added up."""
    own, (up, inner), kv = tokens // ranks, mlp_widths(cfg), kv_width(cfg)
    mlp = own * (up + inner + (inner if recompute else 0)) * element
    attention = own * (2 * cfg.width + 2 * kv) * element
    if method == "gather" and ranks > 1:
        attention += 2 * tokens * kv * reduced + _found_bytes(cfg, tokens, element, reduced)
    if method == "ring" and ranks > 1:
        attention += 2 * 2 * own * kv * (element + reduced) + _found_bytes(cfg, own, element, reduced)
    return max(mlp, attention)


def _found_bytes(cfg: ModelConfig, tokens: int, element: int, reduced: int) -> int:
    """Keys and values side by side, the gradients of both, and one of them as it is added. Kernels find gradients for
    each query head before they add up those of heads that share a key."""
    kv = kv_width(cfg)
    return tokens * (kv * (4 * element + reduced) + (2 * cfg.width * element if kv < cfg.width else 0))


def classic_activation_bytes(cfg: ModelConfig, method: str, ranks: int, tokens: int) -> float:
    """Of one layer in 16 bits without fused kernels, where attention keeps its scores: 34 s h + 5 n s^2 (Korthikanti et
    al. 2022) over the ranks and, for `gather`, the gathered K/V. Memory as it was counted before FlashAttention."""
    split = (34 * tokens * cfg.width + 5 * cfg.heads * tokens**2) / ranks
    return split + (gathered_bytes(cfg, "gather", ranks, tokens) if method == "gather" else 0)


@dataclass(frozen=True)
class Pass:
    """Seconds of some work, forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> Pass:
        return Pass(times * self.forward, times * self.backward)

    @property
    def total(self) -> float:
        return self.forward + self.backward


def sum_passes(passes: Iterable[Pass]) -> Pass:
    return sum(passes, Pass(0.0, 0.0))


def exposed_seconds(method: str, blocks: Sequence[Pass], traffic: Traffic, link: Link) -> Pass:
    """What a layer waits for its messages, given the times of its blocks of attention in the order in which their keys
    are there. `gather` attends to local keys, the first block, while the others' come, in both passes; nothing is left
    to do while their gradients travel. A ring's next block comes while one is attended to; backward, the sums for the
    block before go on meanwhile, and those for the last one still have to go home."""
    if method == "gather" and traffic.forward:
        *again, scatter = traffic.backward  # K/V that were not kept are gathered again
        forward = max(link.seconds(traffic.forward) - blocks[0].forward, 0.0)
        return Pass(forward, max(link.seconds(again) - blocks[0].backward, 0.0) + link.seconds([scatter]))
    if method == "ring" and traffic.forward:
        come, go = (link.seconds([replace(message, count=1)]) for message in traffic.backward)
        forward = sum(max(come - block.forward, 0.0) for block in blocks[:-1])
        # Beside the own block there are no sums yet.
        backward = sum(max(come + (go if i else 0.0) - b.backward, 0.0) for i, b in enumerate(blocks[:-1]))
        return Pass(forward, backward + go)
    return Pass(link.seconds(traffic.forward), link.seconds(traffic.backward))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and what they go into."""

    layers: float  # work in all layers
    outside: float  # embedding, output layer, loss and update
    waits: float  # for messages of layers
    weights: float  # for weights and their gradients

    @property
    def total(self) -> float:
        return self.layers + self.outside + self.waits + self.weights


def compose_step(
    cfg: ModelConfig,
    method: str,
    ranks: int,
    link: Link,
    rest: Pass,
    blocks: Sequence[Pass],
    outside: float,
    traffic: Traffic,
    sharded: bool = True,
    element: int = 2,
    reduced: int = 4,
) -> StepTime:
    """From the times of one layer's work, `rest` and its blocks of attention, and of the work outside of layers.
    Weights travel while layers work, as far as these do not hide other messages; those outside of blocks come before
    and go after everything else."""
    work, waits = rest + sum_passes(blocks), exposed_seconds(method, blocks, traffic, link)
    hidden = Pass(link.seconds(traffic.forward), link.seconds(traffic.backward)) + waits * -1
    per_block, alone = count_parameters(cfg)
    weights = 0.0
    if method != "megatron":
        block = weight_traffic(per_block, ranks, sharded, element, reduced)
        forward = max(link.seconds(block.forward) - (work.forward - hidden.forward), 0.0)
        backward = max(link.seconds(block.backward) - (work.backward - hidden.backward), 0.0)
        first = weight_traffic(alone, ranks, sharded, element, reduced)
        weights = cfg.layers * (forward + backward) + link.seconds([*first.forward, *first.backward[-1:]])
    return StepTime(cfg.layers * work.total, outside, cfg.layers * waits.total, weights)


@dataclass(frozen=True)
class Choice:
    method: Method
    reason: str


def choose_method(
    cfg: ModelConfig, ranks: int, tokens: int, link: Link, flops: float = 400e12, causal: bool = True
) -> Choice:
    """The fastest of METHODS for one layer at this rate of arithmetic, or `gather` if that is nearly as fast."""
    times = {method: _guess_seconds(cfg, method, ranks, tokens, link, flops, causal) for method in METHODS}
    obstacles = {method: find_obstacle(cfg, method, ranks, tokens) for method in METHODS}
    possible = [method for method in METHODS if not obstacles[method]]
    if not possible:
        raise ValueError(f"{tokens} tokens cannot be split over {ranks} ranks: {obstacles['ring']}")
    best = min(possible, key=lambda method: times[method].total)
    if "gather" in possible and times["gather"].total <= WORTH * times[best].total:
        best = "gather"
    others = [_compare(method, best, times, obstacles) for method in METHODS if method != best]
    sent = layer_traffic(cfg, best, ranks, tokens, keep=False).size
    waits = times[best].waits / times[best].total
    reason = f"{best} sends {sent / 1e6:.1f} MB a layer and waits {waits:.0%} of its time on {link.name}"
    return Choice(best, f"{reason}; {'; '.join(others)}")


def _compare(method: Method, best: Method, times: dict[Method, StepTime], obstacles: dict[Method, str]) -> str:
    if obstacles[method]:
        return f"{method} cannot: {obstacles[method]}"
    return f"{method} would take {times[method].total / times[best].total:.2f} times as long"


def _guess_seconds(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, link: Link, flops: float, causal: bool
) -> StepTime:
    """Of one layer without its weights' traffic, with all arithmetic at the same rate and balanced over the ranks."""
    own, (up, inner) = tokens / ranks, mlp_widths(cfg)
    products = cfg.width * (2 * cfg.width + 2 * kv_width(cfg) + up + inner)
    rest = Pass(2 * own * products / flops, 4 * own * products / flops)

    def block(keys: float, merged: bool, copied: float = 0.0) -> Pass:
        arithmetic = 4 * own * keys * cfg.width * (0.5 if causal else 1.0) / flops
        besides = BLOCK_S + VALUE_S * (own * cfg.width * merged + copied)
        return Pass(arithmetic + besides / 3, 2.5 * arithmetic + besides * 2 / 3)

    if method == "ring":
        blocks = [block(own, merged=i > 0) for i in range(ranks)]
    elif method == "gather":
        blocks = [block(own, False), block(tokens - own, True, copied=tokens * kv_width(cfg))]
    else:
        blocks = [block(tokens, False)]
    traffic = layer_traffic(cfg, method, ranks, tokens, keep=False)
    waits = exposed_seconds(method, blocks, traffic, link)
    return StepTime((rest + sum_passes(blocks)).total, 0.0, waits.total, 0.0)
