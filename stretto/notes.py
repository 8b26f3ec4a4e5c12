"""What a run says when it begins: what is switched on, where it goes on, what takes long, what looks like a mistake."""

from __future__ import annotations

import time

import torch

from stretto.build import find_portion
from stretto.config import Config, OptimConfig, TrainConfig
from stretto.data import Data
from stretto.flops import training_flops
from stretto.mesh import Mesh
from stretto.techniques import Techniques

PATIENCE_S = 3600.0  # a longer run on a CPU is worth a warning
REACHED = 0.7  # of the speed of one large product, which training reaches on a CPU
WORTH_TIMING = 1e13  # FLOPs: about a minute of a slow CPU
HIGH_RATE = 5e-4  # of weights that are trained already
MANY_STEPS = 5000  # that nobody wants to lose


def explain_start(config: Config, mesh: Mesh, techniques: Techniques, first: int, resume: bool) -> list[str]:
    """Lines for the log. `first`: the number of steps that the run has behind it."""
    total, names = config.train.steps, [technique.name for technique in techniques]
    lines = [f"techniques: {', '.join(names) or 'none'}", *_explain_parts(config, mesh)]
    if config.train.compile:
        lines.append("compiling (train.compile): the first step of each shape of batch takes up to some minutes")
    if config.train.ema:
        lines.append(f"train.ema = {config.train.ema:g}: evaluations and samples are of a running mean of the weights")
    if first:
        left = f"{total - first:,} steps are left" if first < total else "no step is left"
        lines.append(f"resumed at step {first} of {total} from {config.run.dir}: {left}")
    elif resume:
        lines.append(f"{config.run.dir} has no checkpoint to resume from: the run begins with step 1 of {total}")
    return lines


def _explain_parts(config: Config, mesh: Mesh) -> list[str]:
    """A line where a process has only a part of each micro-batch that it works on."""
    parts, key = find_portion(config, mesh).parts, "max_tokens" if config.data.task == "translation" else "batch_size"
    if parts == 1:
        return []
    size = getattr(config.data, key)
    return [f"batch: {parts} {mesh.describe_teams()} share each micro-batch of data.{key} = {size:,}"]


def find_warnings(config: Config, data: Data, device: torch.device, world: int = 1) -> list[str]:
    """Says what a run of so many processes can do, and hardly anyone wants."""
    batch = data.train_batch(0)
    found = [
        _look_at_warmup(config.optim, config.train),
        _look_at_rate(config),
        _look_at_patience(config.train),
        _look_at_saves(config),
        _look_at_samples(len(batch.samples) * config.train.micro_batches, data.num_train),
        _look_at_devices(device, world),
        _look_at_time(config, training_flops(config.model, batch.counts) * config.train.micro_batches, device),
    ]
    return [warning for warning in found if warning]


def _look_at_warmup(optim: OptimConfig, train: TrainConfig) -> str:
    steps, decay = train.steps, round(optim.decay * train.steps) if optim.schedule == "wsd" else 0
    if optim.warmup > steps:
        return (
            f"optim.warmup = {optim.warmup} is longer than the run: after train.steps = {steps} the learning"
            f" rate is at {steps / optim.warmup:.0%} of optim.lr"
        )
    if optim.warmup + decay > steps:
        return (
            f"optim.schedule = 'wsd' has no stable phase: optim.warmup = {optim.warmup} and optim.decay ="
            f" {optim.decay:g}, which is {decay} steps, are more than train.steps = {steps}"
        )
    return ""


def _look_at_rate(config: Config) -> str:
    if not config.model.init or config.optim.lr <= HIGH_RATE:
        return ""
    return (
        f"optim.lr = {config.optim.lr:g} is high for weights that are trained already (model.init): they may be lost in"
        " the first steps; 1e-5 to 1e-4 is usual"
    )


def _look_at_patience(cfg: TrainConfig) -> str:
    if not cfg.patience or (cfg.patience + 1) * cfg.eval_every < cfg.steps:  # the first evaluation is the best so far
        return ""
    return (
        f"train.patience = {cfg.patience} cannot end this run: {cfg.patience + 1} evaluations, one every"
        f" train.eval_every = {cfg.eval_every} steps, are not over before train.steps = {cfg.steps}"
    )


def _look_at_saves(config: Config) -> str:
    often = config.checkpoint.every or config.train.eval_every  # a better model is saved, too
    if not config.checkpoint.keep or often or config.train.steps < MANY_STEPS:
        return ""
    return (
        f"nothing is saved before the last of {config.train.steps:,} steps, unless the run is asked to stop: a crash"
        " loses all of it; set checkpoint.every"
    )


def _look_at_samples(read: int, there: int) -> str:
    if read <= there:
        return ""
    return (
        f"a step reads {read:,} samples, and the data has {there:,}: it reads some of them more than once; lower the"
        " batch, or give more data"
    )


def _look_at_devices(device: torch.device, world: int) -> str:
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if world > 1 or gpus < 2:
        return ""
    return f"this machine has {gpus} GPUs, and the run uses one: `stretto launch -n {gpus} train ...` uses all"


def _look_at_time(config: Config, flops: float, device: torch.device) -> str:
    steps = config.train.steps
    if device.type != "cpu" or flops * steps <= WORTH_TIMING:
        return ""
    seconds = flops / (REACHED * measure_cpu())
    if seconds * steps <= PATIENCE_S:
        return ""
    return (
        f"on this CPU a step should take about {_say(seconds)}, and the run {_say(seconds * steps)}: use a GPU,"
        " a smaller model (model.preset), a smaller batch, or fewer train.steps"
    )


def measure_cpu() -> float:
    """Measures the FLOP/s of a matrix product: tens of milliseconds, whatever the CPU."""
    matrix, times = torch.ones(512, 512), []
    for _ in range(5):
        begin = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - begin)
    return 2 * 512**3 / min(times)


def _say(seconds: float) -> str:
    for limit, size, unit in ((100, 1, "s"), (6000, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds / 86_400:,.0f} days"
