"""What a run says when it begins: what is switched on, where it goes on, what takes long, what looks like a mistake."""

from __future__ import annotations

import time

import torch

from stretto.build import find_portion
from stretto.config import Config
from stretto.data import Data
from stretto.flops import training_flops
from stretto.mesh import Mesh
from stretto.techniques import Techniques

PATIENCE_S = 3600.0  # a longer run on a CPU is worth a warning
REACHED = 0.7  # of the speed of one large product, which training reaches on a CPU
WORTH_TIMING = 1e13  # FLOPs: about a minute of a slow CPU


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


def find_warnings(config: Config, data: Data, device: torch.device) -> list[str]:
    """Says what a run can do, and hardly anyone wants."""
    warnings, steps, batch = [], config.train.steps, data.train_batch(0)
    if config.optim.warmup > steps:
        warnings.append(
            f"optim.warmup = {config.optim.warmup} is longer than the run: after train.steps = {steps} the learning"
            f" rate is at {steps / config.optim.warmup:.0%} of optim.lr"
        )
    samples = len(batch.samples) * config.train.micro_batches
    if samples > data.num_train:
        warnings.append(
            f"a step reads {samples:,} samples, and the data has {data.num_train:,}: it reads some of them more than"
            " once; lower the batch, or give more data"
        )
    flops = training_flops(config.model, batch.counts) * config.train.micro_batches
    if device.type == "cpu" and flops * steps > WORTH_TIMING:
        seconds = flops / (REACHED * measure_cpu())
        if seconds * steps > PATIENCE_S:
            warnings.append(
                f"on this CPU a step should take about {_say(seconds)}, and the run {_say(seconds * steps)}: use a GPU,"
                " a smaller model (model.preset), a smaller batch, or fewer train.steps"
            )
    return warnings


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
