"""Training, from a configuration to a report: the file to read first."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stretto import checkpoint, parallel, runtime, techniques
from stretto.batch import Batch
from stretto.config import Config
from stretto.data import Data, open_data
from stretto.data.prefetch import prefetch
from stretto.errors import CheckpointError, ConfigError, Preempted
from stretto.evaluate import evaluate
from stretto.flops import tokens_per_sample, training_flops
from stretto.guard import Guard
from stretto.model import build_model, sites
from stretto.optim import build_optimizer, learning_rate, set_learning_rate
from stretto.page import write_report
from stretto.report import Meter, Report
from stretto.runtime import Runtime
from stretto.step import PRECISIONS, Trainable, resolve_precision, run_step
from stretto.trained import save_run
from stretto.weights import materialise


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0  # updates done
    best: float = math.inf  # lowest evaluation loss so far


def train(config: Config, resume: bool = False) -> Path:
    """Trains what the configuration says and returns the run folder."""
    folder = Path(config.run.dir)
    with runtime.start(config.run) as rt, ExitStack() as cleanup:
        if rt.is_main:
            _prepare_folder(folder, resume)
            cleanup.enter_context(runtime.lock_folder(folder))
        data = _open_data(config, folder, rt)
        config = complete(config, data, rt.world)
        parts = build(config, rt)
        progress = load_latest(config, data, parts, folder, rt) if resume else Progress()
        report = cleanup.enter_context(Report(folder, config.train.steps, progress.step, active=rt.is_main))
        if rt.is_main:
            save_run(folder, config, data.labels)
        report.start(runtime.describe_environment(rt), data.describe(), parts.describe())
        run_loop(config, data, parts, report, folder, progress, rt)
        if rt.is_main:
            report.say(f"report: {write_report(folder)}")
    return folder


def build(config: Config, rt: Runtime) -> Trainable:
    """Model, techniques, parallelism, weights, optimizer: each needs the one before."""
    precision = resolve_precision(config.train.precision, rt.device)
    model = build_model(config.model)
    roles = sites(model)
    techniques.apply_all(model, config.techniques, roles, rt.device)
    sharded = parallel.shard(model, config.parallel, roles["block"], rt.device, PRECISIONS[precision])
    materialise(model, config.model, config.run.seed, rt.device)
    if config.train.compile:
        # One graph for the whole model, or one per block where each block's weights are gathered on their own.
        for module in [model.get_submodule(name) for name in roles["block"]] if sharded else [model]:
            module.compile()
    return Trainable(
        model=model if sharded else parallel.replicate(model),
        plain=model,
        optimizer=build_optimizer(model, config.optim),
        guard=Guard("fp16" if precision == "fp16" else config.train.non_finite, rt.device),
        scaler=torch.amp.GradScaler(rt.device.type, enabled=precision == "fp16"),
        precision=precision,
        device=rt.device,
        clip=config.optim.clip,
        seed=config.run.seed,
    )


def run_loop(
    config: Config, data: Data, parts: Trainable, report: Report, folder: Path, progress: Progress, rt: Runtime
) -> None:
    first, total, micro_batches = progress.step, config.train.steps, config.train.micro_batches
    meter = Meter(rt.device, rt.world)

    def batches_of(step: int) -> list[tuple[int, Batch]]:
        mine = range(step * micro_batches + rt.rank, (step + 1) * micro_batches, rt.world)
        return [(i, data.train_batch(i).to(rt.device)) for i in mine]

    for step, batches in prefetch(batches_of, first, total):
        # The one message between hosts per step: what was read, and whether anyone was asked to stop.
        labels, tokens, slots, flops, stop = rt.sum_over_ranks([*_count(config, batches), int(rt.stop)])
        lr = learning_rate(config.optim, step, total)
        set_learning_rate(parts.optimizer, lr)
        loss_sum, grad_norm = run_step(parts, batches, labels, rt.world)
        meter.add(tokens, slots, flops)
        progress.step = done = step + 1
        report.advance(done)
        if done == 1 or _due(config.train.log_every, done, total):
            cancelled = parts.guard.check(done)
            loss = float(rt.sum_tensor(loss_sum)) / max(labels, 1)
            values = {"step": done, "loss": loss, "lr": lr, "grad_norm": float(grad_norm), "cancelled": cancelled}
            report.train_line(values | meter.read(), meter.seconds_per_step * (total - done))
        elif done == first + 1:
            meter.restart()  # the first step compiles and allocates: its time says nothing about the others
        with meter.paused():
            better = False
            if _due(config.train.eval_every, done, total):
                scores = evaluate(parts.plain, parts.precision, data, config.train.eval_batches, rt)
                report.eval_line(done, scores)
                better = scores["eval_loss"] < progress.best
                progress.best = min(progress.best, scores["eval_loss"])
            if better or stop or _due(config.checkpoint.every, done, total):
                save(config, data, parts, folder, progress, better, rt)
        if stop and done < total:
            raise Preempted(f"stopped after step {done} of {total}; the same command with --resume goes on from there")
    report.event(finished={"steps": total, "seconds": round(meter.total_seconds, 3)})


def complete(config: Config, data: Data, world: int) -> Config:
    """Fills in what only the data and the number of processes can tell, and checks that it fits."""
    model, micro_batches = config.model, config.train.micro_batches or world
    if data.tokenizer is not None:
        size = data.tokenizer.size
        if model.vocab == 0:
            model = replace(model, vocab=-(-size // 64) * 64)
        elif model.vocab < size:
            raise ConfigError(f"model.vocab = {model.vocab} is smaller than the tokenizer's {size}; set it to 0")
    elif model.classes == 0:
        model = replace(model, classes=len(data.labels))
    elif model.classes < len(data.labels):
        raise ConfigError(f"model.classes = {model.classes}, but the data has {len(data.labels)} classes; set it to 0")
    if micro_batches % world:
        raise ConfigError(
            f"train.micro_batches = {micro_batches} cannot be shared by {world} processes: "
            f"make it a multiple of {world}, or use fewer processes"
        )
    return replace(config, model=model, train=replace(config.train, micro_batches=micro_batches))


def load_latest(config: Config, data: Data, parts: Trainable, folder: Path, rt: Runtime) -> Progress:
    """Goes on from the newest checkpoint that verifies, or from the beginning if there is none."""
    checkpoints = folder / "checkpoints"
    found = (checkpoint.find_newest(checkpoints) or 0) if rt.is_main else 0
    (step,) = rt.sum_over_ranks([found])  # the main process looked; now all know
    if step == 0:
        return Progress()
    shot = checkpoint.load(checkpoints, step)
    differences = _differences(_identity(config, data), shot.state["identity"])
    if differences:
        raise CheckpointError(f"{folder} was made by another configuration: " + "; ".join(differences))
    checkpoint.restore_weights(parts.plain, shot)
    checkpoint.restore_moments(parts.plain, parts.optimizer, shot)
    parts.scaler.load_state_dict(shot.state["scaler"])
    return Progress(step, math.inf if shot.state["best"] is None else shot.state["best"])


def save(
    config: Config, data: Data, parts: Trainable, folder: Path, progress: Progress, better: bool, rt: Runtime
) -> None:
    parts.guard.check(progress.step)
    state = {
        "step": progress.step,
        "best": progress.best if progress.best < math.inf else None,
        "scaler": parts.scaler.state_dict(),
        "identity": _identity(config, data),
    }
    shot = checkpoint.snapshot(parts.plain, parts.optimizer, state)
    if rt.is_main:
        checkpoint.save(folder / "checkpoints", shot, config.checkpoint.keep)
        if better:
            checkpoint.write_best(folder / "checkpoints", progress.step, progress.best)
    rt.barrier()


def _identity(config: Config, data: Data) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run; the step then says all else (data position, learning
    rate, random numbers). Lengths, intervals, paths and the number of processes may change."""
    free = {"eval", "test", "cache"}
    return {
        "model": asdict(config.model),
        "optim": asdict(config.optim),
        "data": {key: value for key, value in asdict(config.data).items() if key not in free},
        "run": {"seed": config.run.seed},
        "train": {"micro_batches": config.train.micro_batches},
        "samples": {"train": data.num_train},
    }


def _differences(now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{key} was {saved.get(section, {}).get(key)!r}, is {value!r}"
        for section, values in now.items()
        for key, value in values.items()
        if saved.get(section, {}).get(key) != (list(value) if isinstance(value, tuple) else value)
    ]


def _due(every: int, done: int, total: int) -> bool:
    return done == total or (every > 0 and done % every == 0)


def _count(config: Config, batches: list[tuple[int, Batch]]) -> list[int]:
    """Labels, tokens, slots and floating-point operations of these micro-batches."""
    counts, unit = [batch.counts for _, batch in batches], tokens_per_sample(config.model)
    flops = sum(training_flops(config.model, c) for c in counts)
    return [
        sum(c.labels for c in counts),
        sum(c.tokens for c in counts) * unit,
        sum(c.slots for c in counts) * unit,
        round(flops),
    ]


def _prepare_folder(folder: Path, resume: bool) -> None:
    if not resume and (folder / "checkpoints").exists():
        raise CheckpointError(f"{folder} already holds a run: add --resume to go on with it, or set another run.dir")
    folder.mkdir(parents=True, exist_ok=True)


def _open_data(config: Config, folder: Path, rt: Runtime) -> Data:
    """The main process first: it may have to tokenise, and the others then find its files."""

    def open_it() -> Data:
        return open_data(config.data, seed=config.run.seed, folder=folder / "data", image_size=config.model.image_size)

    data = open_it() if rt.is_main else None
    rt.barrier()
    return data or open_it()
