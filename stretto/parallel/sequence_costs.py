"""What each method of splitting one sequence over P ranks costs, and which method is the fastest.

Each rank has s / P of the s tokens. All that is done token by token needs no other rank; attention does.

    gather    (LSS) keys and values of all ranks are gathered, their gradients reduced and scattered; attention rows of
              local queries are then complete. K/V of a layer stay for the backward pass (keep), or are gathered again.
    ulysses   queries, keys and values change from s / P tokens of all heads to all tokens of heads / P, and back
    ring      blocks of keys and values go from rank to rank, and so do their gradients

A rank sends per layer, forward and backward together, in elements (c = (P - 1) / P, h width, h_kv that of all keys):

    gather    4 c s h_kv              in 2 collectives; gathered again: 6 c s h_kv in 3
    ulysses   c s (4 h + 4 h_kv) / P  in 6: queries, keys with values, and the result
    ring      6 c s h_kv              in 3 (P - 1) messages

These are the volumes of bandwidth-optimal algorithms. Activations take `element` bytes, sums of gradients `reduced`
bytes: fp32, so that adding up many ranks costs no precision. B sequences side by side cost B times as much. Torch is
not imported here: a choice must not wait for it. bench/rank_costs.py adds memory and whole steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from stretto.config import Config, ModelConfig, ParallelConfig
from stretto.memory import count_block_parameters, kv_width, list_blocks

Method = Literal["gather", "ulysses", "ring"]
METHODS: tuple[Method, ...] = get_args(Method)
RATE = 400e12  # FLOP/s of the arithmetic between messages
WORTH = 1.05  # least speed-up for which another method replaces gathering, which knows all masks and head counts

# What attention in blocks costs besides its arithmetic, in both passes, on an H200 (docs/scaling.md).
BLOCK_S = 8.4e-5  # seconds for the small kernels of each block
VALUE_S = 3.5e-11  # seconds for each query value that is merged, and for each gathered key value


@dataclass(frozen=True)
class Link:
    """The connection of a rank to the others. A message pays the latency once for each of its hops."""

    name: str
    bandwidth: float  # bytes/s in each direction
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
    count: int = 1  # number of such messages, one after another


@dataclass(frozen=True)
class Traffic:
    """The messages of one rank in one layer."""

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()

    @property
    def size(self) -> float:
        return sum(m.count * m.size for m in (*self.forward, *self.backward))


def find_obstacle(cfg: ModelConfig, method: str, ranks: int, tokens: int) -> str:
    """Says why this method cannot split this model; empty if it can."""
    kv_heads = cfg.kv_heads or cfg.heads
    if tokens % ranks:
        return f"{tokens} tokens do not divide by {ranks} ranks"
    if method == "ulysses" and kv_heads % ranks:
        return f"{kv_heads} KV heads do not divide by {ranks} ranks"
    if method == "ulysses" and cfg.attention_dropout:
        return "it drops no attention probabilities"
    if method == "ring" and cfg.window:
        return "it knows no window"
    return ""


def layer_traffic(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, element: int = 2, reduced: int = 4, keep: bool = True
) -> Traffic:
    """Lists the messages of one rank in one layer."""
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
    raise ValueError(f"method {method!r} has to be one of {', '.join(METHODS)}")


@dataclass(frozen=True)
class Pass:
    """The seconds of some work in the forward and in the backward pass."""

    forward: float
    backward: float

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> float:
        return self.forward + self.backward


def exposed_seconds(method: str, blocks: Sequence[Pass], traffic: Traffic, link: Link) -> Pass:
    """Returns the seconds that a layer waits for its messages, given the times of its blocks of attention in the order
    in which their keys arrive. `gather` attends to local keys, the first block, while the other ranks' keys arrive, in
    both passes; no work is left while their gradients travel. In a ring the next block of keys travels while one is
    attended to; in the backward pass the gradients of the block before travel at the same time, and those of the last
    block travel alone."""
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
class Choice:
    method: Method
    reason: str


@dataclass(frozen=True)
class Share:
    """What becomes of a step where processes share more than the batch, for a plan (planning/layout.py)."""

    seconds: float = 0.0  # of passes and update
    memory: int = 0  # bytes at the peak; 0: what the account of a process says
    parts: int = 1  # into which the weights are divided
    problem: str = ""  # why it cannot be


def plan_share(config: Config, ranks: int, link: Link, passes: float, update: float) -> Share:
    """Of processes that share sequences, when the passes of one that has them whole take so long. Each block of
    attention costs something besides its arithmetic."""
    cfg, data, many = config.model, config.data, config.train.micro_batches
    if reasons := list_reasons(config.parallel, cfg, data.seq_len, data.layout == "padded"):
        return Share(problem="; ".join(reasons))
    tokens = -(-data.seq_len // ranks) * ranks
    said, causal = config.parallel.sequence_method, cfg.kind != "encoder"
    method = choose_method(cfg, ranks, tokens, link, causal=causal).method if said == "auto" else said
    _, waits = _guess_seconds(cfg, method, ranks, tokens, link, RATE, causal)  # of one layer and sequence
    samples = data.max_tokens / tokens if data.task == "translation" else data.batch_size
    layers, blocks = len(list_blocks(cfg)), {"ring": ranks, "gather": 2, "ulysses": 1}[method]
    return Share(passes / ranks + many * layers * (samples * waits + BLOCK_S * blocks) + update)


def list_reasons(cfg: ParallelConfig, model: ModelConfig, tokens: int, padded: bool) -> list[str]:
    """Why sequences of so many tokens cannot be shared as a recipe says."""
    method, kv_heads = cfg.sequence_method, model.kv_heads or model.heads
    reasons = {
        "an image is a short sequence, and is not split; leave out parallel.sequence": model.kind == "vit",
        "padding would be split too: set data.layout to 'packed'": padded,
        f"less than two tokens of data.seq_len = {tokens} are left to a process: lower parallel.sequence, or raise"
        " data.seq_len": tokens < 2 * cfg.sequence,
        f"sequence_method = 'ulysses' shares key/value heads out, and {cfg.sequence} processes cannot share"
        f" {kv_heads}: make parallel.sequence a divisor of it, or use 'gather'": (
            method == "ulysses" and kv_heads % cfg.sequence > 0
        ),
        "sequence_method = 'ulysses' drops no attention probabilities: set model.attention_dropout to 0, or use"
        " 'gather'": method == "ulysses" and model.attention_dropout > 0.0,
        "sequence_method = 'ring' knows no window (model.window), of which it would send far more than is seen:"
        " use 'gather'": method == "ring" and model.window > 0,
        f"sequence_heads = {cfg.sequence_heads} does not divide the model's {kv_heads} key/value heads": (
            cfg.sequence_heads > 0 and kv_heads % cfg.sequence_heads > 0
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def choose_method(
    cfg: ModelConfig, ranks: int, tokens: int, link: Link, flops: float = RATE, causal: bool = True
) -> Choice:
    """Chooses the fastest method for one layer at this rate of arithmetic, or `gather` if it is nearly as fast."""
    guesses = {method: _guess_seconds(cfg, method, ranks, tokens, link, flops, causal) for method in METHODS}
    times = {method: work + waits for method, (work, waits) in guesses.items()}
    obstacles = {method: find_obstacle(cfg, method, ranks, tokens) for method in METHODS}
    possible = [method for method in METHODS if not obstacles[method]]
    if not possible:
        raise ValueError(f"{tokens} tokens cannot be split over {ranks} ranks: {obstacles['ring']}")
    best = min(possible, key=times.__getitem__)
    if "gather" in possible and times["gather"] <= WORTH * times[best]:
        best = "gather"
    others = [
        f"{method} cannot: {obstacles[method]}"
        if obstacles[method]
        else f"{method} would take {times[method] / times[best]:.2f} times as long"
        for method in METHODS
        if method != best
    ]
    sent = layer_traffic(cfg, best, ranks, tokens, keep=False).size
    waits = guesses[best][1] / times[best]
    reason = f"{best} sends {sent / 1e6:.1f} MB a layer and waits {waits:.0%} of its time on {link.name}"
    return Choice(best, f"{reason}; {'; '.join(others)}")


def _guess_seconds(
    cfg: ModelConfig, method: str, ranks: int, tokens: int, link: Link, flops: float, causal: bool
) -> tuple[float, float]:
    """Estimates the seconds of work and of waiting for messages in one layer, forward and backward, without the
    messages of its weights. All arithmetic runs at one rate, balanced over ranks."""
    own, (products, _) = tokens / ranks, count_block_parameters(cfg)
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
    return sum(blocks, rest).total, exposed_seconds(method, blocks, traffic, link).total
