"""How long a training step takes on one process: a roofline for each part.

    products     FLOPs at PRODUCTS of the peak, and what moving their factors adds; each begins with START seconds
    attention    FLOPs at rates by kernel, less for short sequences
    the rest     bytes of norms, activations, heads and embeddings at BYTES of the memory's bandwidth
    head         the product with the vocabulary, and three passes over the logits
    update       weights, gradients and moments, read and written once, and the norm of the gradients
    again        what is computed a second time where less is kept, by the rule of dial.py
    host         seconds to launch a step, where no CUDA graph replays it; the GPU waits if it is faster

The constants are shares of the vendors' peaks (hardware.py). They are of one H200: docs/plan.md says which figures
they were set by, and how far the times of other workloads are off. On other GPUs the same shares are taken for granted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from stretto.config import Config, ModelConfig
from stretto.dial import Choice, Needs, seconds_again
from stretto.estimate import find_estimate
from stretto.flops import tokens_per_sample
from stretto.hardware import Hardware
from stretto.memory import (
    GRADIENT_BYTES,
    MOMENT_BYTES,
    WEIGHT_BYTES,
    Attention,
    Way,
    count_parameters,
    kv_width,
    list_blocks,
    mlp_widths,
)
from stretto.plan import find_load, find_precision, find_way, uses_gpu

PRODUCTS, PRODUCTS8 = 0.77, 0.61  # of the peak in 16 bits, and of that in 8 bits
FACTORS = 0.3  # share of the bytes of a product's factors whose time is not hidden behind its arithmetic
START, START_SMALL = 4e-6, 3e-6  # seconds: a product, and another kernel, before and after it is busy
BYTES, UPDATE = 0.77, 0.81  # of the memory's bandwidth
EMBEDDING = 20  # passes over the rows of an embedding, both ways: its gradient is sorted
LOGITS = 3  # passes over the logits
SMALL_KERNELS = 10  # of a block in both passes, besides products and attention
ROUNDED = 3  # bytes moved for each number that is rounded to 8 bits, beyond what the kernel that makes it moves anyway
# Attention: the length at which the rate has halved, and the rate of long sequences as a share of the peak, forward and
# backward, for heads of 64 channels; and the share of that rate that is left where probabilities are dropped.
RATES: dict[Attention, tuple[float, float, float, float]] = {
    "dense": (130, 0.496, 455, 0.535),
    "own": (126, 0.42, 115, 0.317),
    "variable": (126, 0.30, 115, 0.25),
}
DROPPED: dict[Attention, tuple[float, float]] = {"dense": (0.42, 0.82), "own": (0.70, 0.73), "variable": (0.70, 0.73)}
CAUSAL = 1 / 3  # a causal mask makes sequences count as if they had this share of their length
# Plain modules instead of our own kernels: passes over the same tensors, by torch.compile or not, as often.
PLAIN, PLAIN_COMPILED = 3.8, 1.5
PLAIN_UPDATE = 2.0  # torch's AdamW and clipping, as often as ours
HOST, HOST_PLAIN, HOST_COMPILED = 3.3e-3, 2.4e-3, 1.6e-3  # seconds of the host for a block of a micro-batch
RULED = 989e12  # the peak of the GPU that dial.py reckons with
CPU_SHARE = 0.5  # of a CPU's figures, which are guesses


@dataclass(frozen=True)
class Work:
    """What a process computes on in one micro-batch, as `Counts` of batch.py counts it."""

    tokens: int  # of the only stack or of the decoder; images
    labels: int
    pairs: int
    source_tokens: int = 0
    source_pairs: int = 0
    cross_pairs: int = 0
    attention: Attention = "dense"


def find_work(config: Config, size: int, parts: int = 1) -> Work:
    """Of a micro-batch of `size` that `parts` processes share. Sentences of a translation are taken to be a quarter of
    the longest that the recipe lets in."""
    size, data = -(-size // parts), config.data
    load = find_load(config, size)
    if data.task == "images":
        return Work(size, size, 0, attention=load.attention)
    if data.task == "translation":
        pairs = size * max(data.seq_len // 4, 1)
        return Work(size, size, pairs, size, pairs, pairs, load.attention)
    return Work(load.tokens, load.labels, load.tokens * data.seq_len, attention=load.attention)


PASSES = ("products", "attention", "rest", "head", "again")


@dataclass(frozen=True)
class Times:
    """Seconds of a step on one process, by part. Passes are those of all its micro-batches."""

    products: float = 0.0
    attention: float = 0.0
    rest: float = 0.0
    head: float = 0.0
    again: float = 0.0
    update: float = 0.0
    host: float = 0.0  # what the GPU waits for the host
    waits: float = 0.0  # for other processes

    @property
    def passes(self) -> float:
        return sum(getattr(self, part) for part in PASSES)

    @property
    def total(self) -> float:
        return self.passes + self.update + self.host + self.waits

    def shared(self, seconds: float, parts: int) -> Times:
        """Where processes share more than the batch: passes and update take so many seconds, and weights are divided
        into so many parts."""
        update = self.update / parts
        ratio = (seconds - update) / self.passes
        passes = {part: ratio * getattr(self, part) for part in PASSES}
        return replace(self, **passes, update=update)


@dataclass(frozen=True)
class Device:
    """What a GPU reaches."""

    hardware: Hardware
    element: int  # bytes of an activation

    @property
    def flops(self) -> float:
        """Products in fp32 are a quarter as fast on the GPUs of the table, roughly."""
        if not self.hardware.is_gpu:
            return CPU_SHARE * self.hardware.flops
        return PRODUCTS * self.hardware.flops / (4 if self.element == 4 else 1)

    @property
    def bytes(self) -> float:
        return (BYTES if self.hardware.is_gpu else CPU_SHARE) * self.hardware.bandwidth

    @property
    def start(self) -> float:
        """Of three kernels."""
        return 3 * START if self.hardware.is_gpu else 0.0

    def multiply(self, rows: int, out: int, inner: int, narrow: bool = False) -> float:
        """The three products of a linear layer: forward, and both gradients."""
        factors = (rows * inner + rows * out + inner * out) * self.element
        flops = 6.0 * rows * out * inner
        wide = flops / self.flops + 3 * FACTORS * factors / self.bytes + self.start
        if not narrow or not self.hardware.fp8 or self.element == 4:
            return wide
        rounded = ROUNDED * (rows * inner + rows * out + inner * out) / self.bytes
        return min(wide, flops / (PRODUCTS8 * self.hardware.fp8) + 3 * FACTORS * factors / 2 / self.bytes + rounded)

    def move(self, size: float, kernels: float = 0) -> float:
        return size / self.bytes + (kernels * START_SMALL if self.hardware.is_gpu else 0.0)

    def attend(self, pairs: float, length: float, width: int, kind: Attention, causal: bool, dropped: bool) -> float:
        """Both passes over so many pairs of tokens that see each other, of sequences so long."""
        half_forward, forward, half_backward, backward = RATES[kind]
        if not self.hardware.is_gpu:
            return 14 * pairs * width / self.flops
        seen = max(length * (CAUSAL if causal else 1.0), 1.0)
        peak = self.hardware.flops / (4 if self.element == 4 else 1)
        left, left_backward = DROPPED[kind] if dropped else (1.0, 1.0)
        times = 4 * (1 + half_forward / seen) / (forward * left)
        times += 10 * (1 + half_backward / seen) / (backward * left_backward)
        return pairs * width * times / peak + self.start


def find_passes(config: Config, hardware: Hardware, work: Work) -> Times:
    """The passes over one micro-batch, of a process that has all blocks."""
    cfg, device, estimate = config.model, Device(hardware, find_way(config).element), find_estimate(config)
    blocks, samples = list_blocks(cfg), tokens_per_sample(cfg)
    stacks = [stack for stack, _ in blocks]
    ends = {i for stack in set(stacks) for i in (stacks.index(stack), len(stacks) - 1 - stacks[::-1].index(stack))}
    narrow = [estimate.narrow == "all" or (estimate.narrow == "inside" and i not in ends) for i in range(len(blocks))]
    kinds = Counter((cross, eight) for (_, cross), eight in zip(blocks, narrow, strict=True))
    each = [[many * t for t in find_block(cfg, device, work, *kind)] for kind, many in kinds.items()]
    products, attention, rest = (estimate.work * sum(times) for times in zip(*each, strict=True))
    tokens = samples * work.tokens + work.source_tokens
    rest += device.move(EMBEDDING * tokens * cfg.width * device.element, 8)
    if cfg.kind == "vit":
        products += device.multiply(tokens, cfg.width, cfg.channels * cfg.patch**2)
    factor = 1.0
    if config.techniques.find_kernels(uses_gpu(config)) is None:
        factor = PLAIN_COMPILED if config.train.compile else PLAIN
    return Times(products, attention, factor * rest, find_head(cfg, device, work.labels, factor))


def find_block(cfg: ModelConfig, device: Device, work: Work, cross: bool, narrow: bool) -> tuple[float, float, float]:
    """Products, attention and all else of one block."""
    (up, inner), width, samples = mlp_widths(cfg), cfg.width, tokens_per_sample(cfg)
    decodes = cross or not work.source_tokens
    rows = samples * work.tokens if decodes else work.source_tokens
    pairs = work.tokens * samples**2 if cfg.kind == "vit" else work.pairs if decodes else work.source_pairs
    shapes = [(width + 2 * kv_width(cfg), width), (width, width), (up, width), (width, inner)]
    products = sum(device.multiply(rows, *shape, narrow) for shape in shapes)
    length, causal, drops = pairs / max(rows, 1), cross or cfg.kind == "decoder", cfg.attention_dropout > 0
    if 0 < cfg.window < length:
        pairs, causal, length = rows * cfg.window, False, cfg.window
    attention = device.attend(pairs / (2 if causal else 1), length, width, work.attention, causal, drops)
    if cross:  # its keys and values are one product for all blocks
        products += 2 * device.multiply(rows, width, width) + device.multiply(work.source_tokens, 2 * width, width)
        products -= device.start
        seen = work.cross_pairs / max(rows, 1)
        attention += device.attend(work.cross_pairs, seen, width, work.attention, False, drops)
    kernels = SMALL_KERNELS + (4 if cross else 0)
    return products, attention, device.move(rows * count_moved(cfg, cross) * device.element, kernels)


def count_moved(cfg: ModelConfig, cross: bool) -> int:
    """The elements that a block's kernels read and write for each token in both passes, products and attention not
    counted: a norm with what is added in front of it four and five times its width, an activation its input and output
    twice and the gradients of both, heads as they are turned and as their gradients become one matrix."""
    (up, inner), width = mlp_widths(cfg), cfg.width
    norms, heads = (3 if cross else 2) * 9 * width, 2 * (width + 2 * kv_width(cfg)) + 2 * width
    turned = 2 * (width + kv_width(cfg)) if cfg.positions == "rotary" else 0
    return norms + 3 * up + 2 * inner + heads + turned + (4 * width if cross else 0)


def find_head(cfg: ModelConfig, device: Device, labels: int, factor: float) -> float:
    """The output layer and its loss."""
    if cfg.classes:
        return device.multiply(labels, cfg.classes, cfg.width)
    size, sums = LOGITS * labels * cfg.vocab * device.element, 4 * 4 * cfg.vocab * cfg.width
    extra = device.multiply(labels, cfg.width, cfg.width) if cfg.kind == "encoder" else 0.0
    return device.multiply(labels, cfg.vocab, cfg.width) + extra + device.move(factor * size + sums, 6)


def find_update(config: Config, hardware: Hardware, way: Way) -> float:
    """Weights and moments are read and written, gradients read for their norm and for the update."""
    size = sum(count_parameters(config.model).values()) / way.shards
    each = 2 * (WEIGHT_BYTES[way.weights] + MOMENT_BYTES[way.moments] + GRADIENT_BYTES[way.weights])
    factor = PLAIN_UPDATE if config.techniques.find_kernels(uses_gpu(config)) is None else 1.0
    return factor * size * each / ((UPDATE if hardware.is_gpu else CPU_SHARE) * hardware.bandwidth)


def find_again(needs: Needs, choice: Choice, hardware: Hardware) -> float:
    """Seconds to make again what a micro-batch does not keep. dial.py reckons with one GPU, an H200."""
    load, cfg = needs.load, needs.model
    kinds = Counter((cross, keep) for (_, cross), keep in zip(list_blocks(cfg), choice.keeps, strict=True))
    sums = (
        many * load.count_tokens(cross) * seconds_again(cfg, keep, cross, load.longest)
        for (cross, keep), many in kinds.items()
    )
    return (choice.seconds or sum(sums)) * RULED / hardware.flops


def uses_graphs(config: Config, hardware: Hardware, shared: bool) -> bool:
    """Whether CUDA graphs launch a step. `shared`: passes send messages in the middle. build.py has the reasons."""
    kernels = config.techniques.find_kernels(uses_gpu(config)) is not None
    few = max(hardware.count, config.train.micro_batches) <= find_estimate(config).passes
    allowed = config.train.graphs != "off" and find_precision(config) != "fp16"
    return hardware.is_gpu and kernels and allowed and few and not shared


def find_host(config: Config) -> float:
    """Seconds in which the host launches the passes over one micro-batch."""
    each = HOST
    if config.techniques.find_kernels(uses_gpu(config)) is None:
        each = HOST_COMPILED if config.train.compile else HOST_PLAIN
    return len(list_blocks(config.model)) * each


def find_step(config: Config, hardware: Hardware, work: Work, needs: Needs, choice: Choice, shared: bool) -> Times:
    """A step of a process that has so much work in each of needs.way.micro_batches micro-batches, before it waits for
    others."""
    few = needs.way.micro_batches
    one = replace(find_passes(config, hardware, work), again=find_again(needs, choice, hardware))
    passes = {part: few * getattr(one, part) for part in PASSES}
    times = Times(**passes, update=find_update(config, hardware, needs.way))
    if not hardware.is_gpu or uses_graphs(config, hardware, shared):
        return times
    return replace(times, host=max(few * find_host(config) - times.passes - times.update, 0.0))
