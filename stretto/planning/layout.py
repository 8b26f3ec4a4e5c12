"""What sharing the work over several GPUs does to the time and memory of a step: data parallelism, with weights in
every process or sharded over all of them, and one other axis at a time, whose costs are in ../parallel/AXIS_costs.py.

Links reach REACHED of the vendors' figures, which is a guess: nothing here was measured on several GPUs. Up to 8 GPUs
are one machine; more of them are joined by a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from math import gcd, prod
from typing import Any, TypeVar

from stretto.config import KERNELS, Config, ParallelConfig
from stretto.dial import Choice, Needs, find_problem
from stretto.estimate import find_estimate
from stretto.hardware import NETWORK, NODE, Hardware
from stretto.memory import GRADIENT_BYTES, count_block_parameters, count_parameters, list_blocks
from stretto.parallel.sequence_costs import Link, Share
from stretto.plan import find_choice, find_needs, find_precision, find_size, uses_gpu
from stretto.planning.times import Times, find_step, find_work, uses_graphs

REACHED = 0.75  # of a link
HOP, HOP_NETWORK = 3e-6, 1e-5  # seconds of a message to the next GPU
PLAIN_KEPT, PLAIN_LOGITS = 2.0, 8  # plain modules: activations, as often as ours; bytes of a logit, kept as a whole
COMPILED_KEPT, COMPILED_LOGITS = 1.0, 2  # with torch.compile
COSTS: dict[str, Any] = {axis: import_module(f"stretto.parallel.{axis}_costs") for axis in ParallelConfig().axes()}


NONE = Times()
S = TypeVar("S")


@dataclass(frozen=True)
class Outcome:
    """What is expected of a recipe on some GPUs."""

    times: Times = NONE
    memory: int = 0  # bytes at the peak, on the fullest GPU
    problem: str = ""  # why it cannot be

    def scaled(self, ratio: float) -> Outcome:
        """The same with all times so much longer."""
        return replace(self, times=Times(**{name: ratio * seconds for name, seconds in vars(self.times).items()}))


def change(section: S, **values: Any) -> S:
    """A section of a configuration with other values, by keys that are known only here."""
    return replace(section, **values)  # type: ignore[type-var]


def list_parallel(base: ParallelConfig, hardware: Hardware) -> Iterator[ParallelConfig]:
    """The ways to share work over several GPUs, the recipe's own one first and then the simplest. On CPUs that is the
    recipe's."""
    count = hardware.count
    if count > 1 and not hardware.is_gpu:
        yield base
        return
    alone = change(base, data="replicate", schedule="1f1b", cuts=(), **dict.fromkeys(base.axes(), 1))
    found, plain = list(list_others(alone, count)), change(base, schedule="1f1b", cuts=())
    yield from ([base] if plain in found else [])
    yield from (one for one in found if one != plain)


def list_others(alone: ParallelConfig, count: int) -> Iterator[ParallelConfig]:
    yield alone
    if count > 1:
        yield replace(alone, data="shard")
    for axis in alone.axes():
        for size in (size for size in range(2, min(count, NODE) + 1) if count % size == 0):
            yield change(alone, **{axis: size})
            if axis not in alone.find_repeated():  # those share weights out already
                yield change(alone, data="shard", **{axis: size})


def find_link(hardware: Hardware, processes: int) -> Link:
    if processes > NODE:
        return Link("network", REACHED * NETWORK, HOP_NETWORK)
    return Link("links of one machine", REACHED * hardware.link, HOP)


def predict(config: Config, hardware: Hardware) -> Outcome:
    """Times and memory of a configuration whose sizes are all known."""
    count, many, data = hardware.count, config.train.micro_batches, config.data
    team, size = prod(config.parallel.axes().values()), find_size(config)[1]
    groups = gcd(many, count // team)  # as parallel/data.py deals them out
    parts = count // team // groups
    samples = size // data.seq_len if data.task == "translation" else size
    if count % team or samples < parts:
        return Outcome(problem=f"{many} x {samples} samples cannot be dealt out to {count} GPUs, {team} for each")
    own = replace(config, train=replace(config.train, micro_batches=many // groups))
    return predict_process(own, hardware, parts, team)


def predict_process(config: Config, hardware: Hardware, parts: int, team: int) -> Outcome:
    """Of one of the processes, which has one of `parts` of each micro-batch, in a team that shares more than those."""
    cfg, size, sharded = config.model, find_size(config)[1], config.parallel.data == "shard" and hardware.count > 1
    shared = team > 1 or sharded
    if problem := find_obstacle(config, hardware, shared):
        return Outcome(problem=problem)
    shards = hardware.count if sharded else 1
    whole = replace(config, parallel=change(config.parallel, **dict.fromkeys(config.parallel.axes(), 1)))
    alone, needs = (find_needs(one, size, parts, shards, hardware.fp8 > 0) for one in (whole, config))
    choice = find_choice(config, needs, hardware.memory)
    again = any(keep.block == "input" for keep in choice.keeps)
    if again and (problem := find_problem(cfg, config.data.layout == "padded")):
        return Outcome(problem=problem)
    times = find_step(config, hardware, find_work(config, size, parts), alone, choice, shared)
    share = find_share(config, hardware, parts, times) if team > 1 else Share()
    if share.problem:
        return Outcome(problem=share.problem)
    if team > 1:
        times = times.shared(share.seconds, share.parts)
    graphs = uses_graphs(config, hardware, shared)
    waits = find_waits(config, hardware, times, needs, share.parts, graphs)
    return Outcome(replace(times, waits=waits), share.memory or find_memory(config, needs, choice))


def find_obstacle(config: Config, hardware: Hardware, shared: bool) -> str:
    """Why what is on cannot work with what else is; empty: all can."""
    kernels, estimate = config.techniques.find_kernels(uses_gpu(config)), find_estimate(config)
    if config.train.graphs == "on" and not uses_graphs(config, hardware, shared):
        return "train.graphs = 'on' cannot be: 'auto' uses them where it can"
    halves = kernels is not None and kernels.weights in ("split", "bf16")
    eight = estimate.narrow == "all" or (estimate.narrow and hardware.fp8 > 0)
    if (halves or eight) and (precision := find_precision(config)) != "bf16":
        return f"a technique needs train.precision = 'bf16', and it is {precision!r}"
    if kernels and not config.train.compile:
        return ""
    needs = f"{KERNELS}, which is off" if not kernels else "train.compile = false"
    found = [f"techniques.{name}" for name, one in vars(config.techniques).items() if getattr(one, "on_kernels", False)]
    return f"{' and '.join(found)} needs {needs}" if found else ""


def find_share(config: Config, hardware: Hardware, parts: int, times: Times) -> Share:
    """By the axis along which more than the batch is shared."""
    taken = [(axis, ranks) for axis, ranks in config.parallel.axes().items() if ranks > 1]
    if len(taken) > 1:
        return Share(problem="only one axis besides data is planned")
    (axis, ranks), (key, size) = taken[0], find_size(config)
    own = replace(config, data=change(config.data, **{key: -(-size // parts)}))
    share: Share = COSTS[axis].plan_share(own, ranks, find_link(hardware, ranks), times.passes, times.update)
    estimate = find_estimate(config)
    if share.parts > 1 and not estimate.by_module:
        return Share(problem="a technique needs all blocks in one process")
    if axis not in config.parallel.find_repeated() and not estimate.by_token:
        return Share(problem="a technique needs whole sequences in one process")
    return share


def find_waits(config: Config, hardware: Hardware, times: Times, needs: Needs, parts: int, graphs: bool) -> float:
    """Seconds for weights and gradients that travel, and that nothing hides. Gradients of a step that is a CUDA graph
    are summed behind it; else while the backward pass goes on, but for those of the last block."""
    world = hardware.count // parts
    if world == 1:
        return 0.0
    cfg, blocks, link = config.model, len(list_blocks(config.model)), find_link(hardware, hardware.count)
    size = sum(count_parameters(cfg).values()) / parts
    hops, few = world - 1, config.train.micro_batches
    if needs.way.shards == 1:
        gradients = size * GRADIENT_BYTES[needs.way.weights]
        summing = 2 * hops / world * gradients / link.bandwidth + 2 * hops * link.latency
        backward = times.passes * 2 / 3 / few
        return summing if graphs else max(summing - backward * (1 - 1 / blocks), summing / blocks)
    each_block = [sum(count_block_parameters(cfg, cross)) for _, cross in list_blocks(cfg)]
    block, outside = max(each_block), size - sum(each_block)

    def travel(numbers: float, element: int) -> float:
        return hops / world * numbers * element / link.bandwidth + hops * link.latency

    gather, scatter = travel(block, needs.way.element), travel(block, 4)
    forward, backward = times.passes / few / blocks / 3, times.passes / few / blocks * 2 / 3
    each = max(gather - forward, 0.0) + max(gather - backward, 0.0)
    last = max(gather + scatter - backward, 0.0) - max(gather - backward, 0.0)  # gradients travel once a step
    return blocks * (few * each + last) + few * travel(outside, needs.way.element) + travel(outside, 4)


def find_memory(config: Config, needs: Needs, choice: Choice) -> int:
    """The peak by memory.py; of plain modules, which keep what torch keeps, a rough guess by it."""
    account = needs.predict(choice)
    if config.techniques.find_kernels(uses_gpu(config)) is not None:
        return account.peak
    compiled, cfg, load = config.train.compile, config.model, needs.load
    kept = (COMPILED_KEPT if compiled else PLAIN_KEPT) * sum(account.activations.values())
    logits = load.labels * (cfg.classes or cfg.vocab) * (COMPILED_LOGITS if compiled else PLAIN_LOGITS)
    return int(account.weights + account.gradients + account.moments + kept + logits)
