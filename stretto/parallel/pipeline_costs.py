"""What a pipeline would make of a recipe: seconds and bytes of all orders and placements by number of devices, next to
other ways to share the same update. Torch is not imported.

Every way learns from the same samples in an update. `pipelined` and `ouroboros` take them at once, as one device does;
`1f1b`, `2bw` and zero-bubble in up to 2 K micro-batches. That smaller ones are slower for each token on a GPU is not in
the times, nor are the launches of kernels. Blocks are dealt out by their arithmetic (`balance`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from stretto.config import KERNELS, Config, ModelConfig, ParallelConfig
from stretto.dial import find_problem
from stretto.errors import ConfigError
from stretto.memory import (
    GRADIENT_BYTES,
    MOMENT_BYTES,
    WEIGHT_BYTES,
    count_block_parameters,
    count_parameters,
    head_bytes,
    kept_by_blocks,
    outside_bytes,
)
from stretto.parallel.schedule import Schedule, balance
from stretto.parallel.sequence_costs import NETWORK, NVLINK, Link, Share
from stretto.parallel.simulate import (
    Module,
    Traffic,
    count_held,
    find_data_parallel_period,
    find_periods,
    find_sequential_period,
    find_zero_bubble_period,
    simulate,
)
from stretto.plan import (
    complete_sizes,
    find_choice,
    find_load,
    find_needs,
    find_precision,
    find_size,
    find_way,
    uses_gpu,
)

# Of an H200: gpt2_medium_16x1024 in docs/results.md has an MFU of 50.5% in 74.6 ms, 2.6 ms of them for the update of
# 354.9M parameters (989 TFLOP/s is the chip's peak).
PASSES = 0.505 * 989e12 * 74.6 / (74.6 - 2.6)  # FLOP/s of forward and backward pass
UPDATE = 2.6e-3 / 354.9e6  # seconds for each parameter
LINKS = (NVLINK, NETWORK, Link("PCIe, 12 GB/s", 12e9, 1e-5))
DEVICES = (2, 3, 4, 8, 16)
STEADY = 4  # micro-batches for each module, from which on one more always takes the same time
ORDERS = ("ouroboros", "pipelined", "2bw", "1f1b")


@dataclass(frozen=True)
class Costs:
    """The parts of a model as modules: embedding, blocks, head."""

    config: Config
    rate: float = PASSES  # FLOP/s of both passes
    update: float = UPDATE  # seconds for each parameter

    @cached_property
    def samples(self) -> int:
        """Of an update."""
        return find_size(self.config)[1] * self.config.train.micro_batches

    @cached_property
    def forward(self) -> tuple[float, float]:
        """The seconds of the forward pass of a block and of the head, for all samples of an update."""
        cfg, load = self.config.model, find_load(self.config, self.samples)
        seen = min(load.longest, 2 * cfg.window) if cfg.window else load.longest
        attention = (2 if cfg.kind == "decoder" else 4) * cfg.width * seen
        block = load.tokens * (2 * count_block_parameters(cfg)[0] + attention)
        masked = cfg.kind == "encoder" and not cfg.classes
        head = 2 * load.labels * cfg.width * ((cfg.classes or cfg.vocab) + (cfg.width if masked else 0))
        return block / self.rate, head / self.rate

    def make_module(self, share: float, blocks: int, parameters: int = 0, activations: int = 0) -> Module:
        """Blocks and what is outside of them, for a share of the update's samples."""
        cfg, way, seconds = self.config.model, find_way(self.config), share * blocks * self.forward[0]
        size = blocks * sum(count_block_parameters(cfg)) + parameters
        return Module(
            forward=seconds,
            backward=2 * seconds,
            update=size * self.update,
            weights=size * WEIGHT_BYTES[way.weights],
            version=size * way.element,
            gradients=size * GRADIENT_BYTES[way.weights],
            moments=size * MOMENT_BYTES[way.moments],
            activations=activations,
        )

    def cut(self, micro_batches: int, modules: int, ring: bool, late: int = 0) -> list[Module]:
        """Where a tied table has a second place, passes read it there; gradients of it that are late are kept."""
        cfg, way = self.config.model, find_way(self.config)
        load, parts = find_load(self.config, self.samples // micro_batches), count_parameters(cfg)
        keeps = find_choice(self.config, find_needs(self.config)).keeps
        kept = [sum(found.values()) for found in kept_by_blocks(cfg, load, keeps, way)]
        cuts = balance([self.forward[0]] * cfg.layers, modules, ring, last=self.forward[1])
        found = [self.make_module(1 / micro_batches, len(some), 0, sum(kept[i] for i in some)) for some in cuts]
        front = self.make_module(0.0, 0, parts["embedding"])
        table = cfg.vocab * cfg.width if cfg.tied else 0
        found[0] = add(found[0], replace(front, gradients=front.gradients + late * table * GRADIENT_BYTES[way.weights]))
        head = head_bytes(cfg, load, way)
        there = head.kept + head.forward + sum(outside_bytes(cfg, load, way).values())
        back = self.make_module(0.0, 0, parts["head"] + parts["norms outside of blocks"], there)
        seconds, copy = self.forward[1] / micro_batches, 0 if ring else table * way.element
        back = replace(
            back, forward=seconds, backward=2 * seconds, weights=back.weights + copy, version=back.version + copy
        )
        found[-1] = add(found[-1], back)
        return found

    def traffic(self, micro_batches: int, link: Link) -> Traffic:
        cfg, element = self.config.model, find_way(self.config).element
        stream = find_load(self.config, self.samples // micro_batches).tokens * cfg.width * element
        return Traffic(link, stream, cfg.tied, cfg.vocab * cfg.width * element if cfg.tied else 0)


def add(one: Module, other: Module) -> Module:
    """Two modules as one."""
    return Module(*(getattr(one, name) + getattr(other, name) for name in Module.__dataclass_fields__))


@dataclass(frozen=True)
class Row:
    """One way to share the work, with the seconds of an update by link."""

    devices: int
    way: str
    micro_batches: int
    periods: list[float]
    busy: float  # share of the time with work, at the fastest link
    memory: int  # bytes of the fullest device


def list_rows(costs: Costs) -> Iterator[Row]:
    config, layers = costs.config, costs.config.model.layers
    whole, few = costs.cut(config.train.micro_batches, 1, False)[0], config.train.micro_batches
    work = few * (whole.forward + whole.backward)
    yield Row(1, "one device", few, [work + whole.update] * len(LINKS), 1.0, find_bytes(config, costs.samples // few))
    for devices in DEVICES:
        many = max(size for size in range(1, 2 * devices + 1) if costs.samples % size == 0)
        for order in ORDERS:
            for ring in (False, True):
                size = few if order in ("ouroboros", "pipelined") else many
                if devices + ring <= layers and (order != "2bw" or size >= devices + ring - 1):
                    yield simulate_row(costs, Schedule(order, devices, ring, size))
        if devices <= layers:
            for way, size, find in (
                ("zero-bubble, bound", many, find_zero_bubble_period),
                ("one after another", few, find_sequential_period),
            ):
                modules, schedule = costs.cut(size, devices, False), Schedule("1f1b", devices, False, size)
                periods = [find(modules, costs.traffic(size, link), size) for link in LINKS]
                memory = max(count_held(schedule, modules, process)[2] for process in range(devices))
                yield Row(devices, way, size, periods, (work + whole.update) / devices / periods[0], memory)
        most = -(-costs.samples // devices)
        own = replace(whole, forward=work / 3 * most / costs.samples, backward=work * 2 / 3 * most / costs.samples)
        periods = [find_data_parallel_period(own, devices, link, layers) for link in LINKS]
        busy = (work / devices + whole.update) / periods[0]
        yield Row(devices, "data parallelism", 1, periods, busy, find_bytes(config, most))


def plan_share(config: Config, ranks: int, link: Link, passes: float, update: float) -> Share:
    """Of processes that share the layers by 1F1B, when one that has all of them takes so long for an update."""
    parallel, many, padded = config.parallel, config.train.micro_batches, config.data.layout == "padded"
    ring, by_place = is_ring(parallel, config.model), config.techniques.find_kernels(uses_gpu(config)) is not None
    schedule, sharded = Schedule("1f1b", ranks, ring, many), parallel.data != "replicate"
    facts = find_precision(config), config.train.compile, sharded, padded, by_place
    if reasons := list_reasons(parallel, config.model, schedule, *facts):
        return Share(problem="; ".join(reasons))
    whole = Costs(config).cut(many, 1, False)[0]
    usual = many * (whole.forward + whole.backward)
    costs = Costs(config, PASSES * usual / passes, UPDATE * update / whole.update)
    modules, traffic = costs.cut(many, schedule.modules, ring), costs.traffic(many, link)

    def find(micro_batches: int) -> tuple[float, int]:
        devices = simulate(Schedule("1f1b", ranks, ring, micro_batches), modules, traffic)
        return max(d.period for d in devices), max(d.memory for d in devices)

    few = min(many, STEADY * schedule.modules)
    seconds, memory = find(few)
    if few < many:
        seconds += (many - few) * (seconds - find(few - 1)[0])
    return Share(seconds, memory, ranks)


def is_ring(cfg: ParallelConfig, model: ModelConfig) -> bool:
    fits = model.layers > cfg.pipeline
    return cfg.placement == "ring" or (cfg.placement == "auto" and model.tied and cfg.pipeline > 1 and fits)


def list_reasons(
    cfg: ParallelConfig, model: ModelConfig, schedule: Schedule, precision: str, compiled: bool, sharded: bool,
    padded: bool, drops_by_place: bool,
) -> list[str]:  # fmt: skip
    """Why a model cannot be cut as a recipe says."""
    modules, wanted = schedule.modules, schedule.modules - 1
    drops = model.dropout or model.attention_dropout or model.activation_dropout
    reasons = {
        f"model.kind = {model.kind!r} is not one stack of blocks over tokens: leave out parallel.pipeline": (
            model.kind not in ("decoder", "encoder")
        ),
        f"{modules} parts ({'ring' if schedule.ring else 'linear'}) need as many blocks, and model.layers ="
        f" {model.layers}: lower parallel.pipeline": model.layers < modules,
        f"cuts = {list(cfg.cuts)} has to be {wanted} growing numbers from 1 to {model.layers - 1}": bool(cfg.cuts)
        and (len(cfg.cuts) != wanted or sorted({0, *cfg.cuts, model.layers}) != [0, *cfg.cuts, model.layers]),
        "a classifier's head (model.classes) cannot be cut off: leave out parallel.pipeline": model.classes > 0,
        "placement = 'ring' needs two processes or more": cfg.placement == "ring" and cfg.pipeline < 2,
        "fp16 adjusts its loss scale by updates that are over: set train.precision to 'bf16'": precision == "fp16",
        "torch.compile would compile every version of the weights again: set train.compile to false": compiled,
        "weights are split over processes by layers, and not once more: set parallel.data to 'replicate'": sharded,
        f"torch draws what is dropped in the order in which layers run: set {KERNELS} to true, or all dropout to"
        " 0": bool(drops) and not drops_by_place,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return [*found, problem] if (problem := find_problem(model, padded)) else found


def simulate_row(costs: Costs, schedule: Schedule) -> Row:
    modules = costs.cut(schedule.micro_batches, schedule.modules, schedule.ring, schedule.late)
    first, *others = (costs.traffic(schedule.micro_batches, link) for link in LINKS)
    devices = simulate(schedule, modules, first)
    periods = [max(device.period for device in devices)]
    periods += [max(find_periods(schedule, modules, traffic)) for traffic in others]
    busy = sum(device.utilisation for device in devices) / schedule.processes
    way = f"{schedule.order}, {'ring' if schedule.ring else 'linear'}"
    return Row(schedule.processes, way, schedule.micro_batches, periods, busy, max(device.memory for device in devices))


def find_bytes(config: Config, size: int) -> int:
    """The peak of a device that has the whole model, and so many samples at a time."""
    needs = find_needs(config, size)
    return needs.predict(find_choice(config, needs)).peak


def explain_pipeline(config: Config) -> Iterator[str]:
    """The lines of `stretto plan --pipeline`."""
    config, notes = complete_sizes(config)
    if config.model.kind not in ("decoder", "encoder"):
        raise ConfigError(
            f"model.kind = {config.model.kind!r} cannot be cut into a pipeline: it is not one stack of blocks"
        )
    costs = Costs(config)
    rows = list(list_rows(costs))
    alone = rows[0].periods[0]
    cfg = config.model
    yield f"{cfg.kind}, {cfg.layers} layers, an update of {costs.samples:,} sequences; computed for H200s"
    yield from (*notes, "M: micro-batches of an update; busy: share of the time with work, at 450 GB/s", "")
    columns = f"{'ms at 450, 50, 12 GB/s':>30}{'times one device':>24}{'busy':>7}{'fullest':>12}"
    yield f"{'devices':>7}  {'':20}{'M':>4}{columns}"
    for row in rows:
        times = "".join(f"{1e3 * period:>10.1f}" for period in row.periods)
        faster = "".join(f"{alone / period:>8.2f}" for period in row.periods)
        yield (
            f"{row.devices:>7}  {row.way:20}{row.micro_batches:>4}{times}{faster}{row.busy:>7.0%}"
            f"{row.memory / 2**30:>8.2f} GiB"
        )
