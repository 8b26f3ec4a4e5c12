"""Executes a step of a run once more and compares: was it a fault of the machine, or does it come again?

It begins at the newest checkpoint before the step that verifies, makes the steps in between, too, and writes nothing
into the run folder. Batches, learning rates and random numbers are functions of the step, so on the same hardware and
number of processes all bits are the same. A run of several processes is replayed under the same launcher.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from stretto import checkpoint, runtime
from stretto.build import build
from stretto.checkpoint.verify import name_step
from stretto.config import Config
from stretto.errors import CheckpointError, ConfigError, DifferenceError
from stretto.given import Given
from stretto.mesh import build_mesh
from stretto.report import read_events
from stretto.run import Run, load_latest, look_at_guard, start_from_folder
from stretto.runtime import Runtime
from stretto.train import complete, count_together, read_batches, take_step
from stretto.trained import load_run_config, open_run_data


def replay(folder: Path, step: int) -> list[str]:
    """What was compared, in words of the main process; an error in each if anything differs."""
    config = Given().complete(load_run_config(folder))
    config = replace(config, run=replace(config.run, dir=str(folder)))
    if not 1 <= step <= config.train.steps:
        raise ConfigError(f"--step {step} is not one of the {config.train.steps} steps of {folder}")
    with TemporaryDirectory() as scratch, runtime.start(config.run) as rt, rt.interruptible():
        return _replay(config, folder, step, rt, Path(scratch))


def _replay(config: Config, folder: Path, step: int, rt: Runtime, scratch: Path) -> list[str]:
    """A function of its own, so that no model is left when the process group is destroyed, as in train.py."""
    logged, saved = _find_event(folder, step), _find_checkpoint(folder, step)
    if logged is None and saved is None:
        raise CheckpointError(f"{folder} knows nothing of step {step}: it was neither logged nor saved")
    mesh = build_mesh(config.parallel, rt.device, rt.rank, rt.world)
    data = open_run_data(config, folder, scratch)
    config = complete(config, data, mesh)
    run = Run(config, data, build(config, rt, mesh), rt, mesh)
    load_latest(run, before=step)
    if config.model.init and run.step == 0:
        start_from_folder(run)
    begin = run.step
    values = _run_until(run, step)
    pairs = {key: (logged[key], values[key]) for key in values if logged is not None and key in logged}
    lines = [f"{key}: {_compare_numbers(*pair)}" for key, pair in pairs.items()]
    if saved is not None:
        lines += _compare_tensors(run, saved)
    origin = f"step {step}, from {'the beginning' if begin == 0 else f'the checkpoint of step {begin}'}"
    origin += _describe_machine(folder, rt)
    if any(not line.endswith(": equal") for line in lines):
        raise DifferenceError("; ".join([f"{origin}: not the same again", *lines]))
    return [f"{origin}: the same again, bit for bit", *lines] if rt.is_main else []


def _run_until(run: Run, last: int) -> dict[str, float | None]:
    """Loss and norm of the last step, as events have them."""
    first, executor = run.step, run.parts.executor
    executor.resume(first, lambda step: read_batches(run, step))
    for step in range(first, last):
        batches = read_batches(run, step)
        labels, *_ = counts = count_together(run, batches)
        _, loss_sum, norm = take_step(run, step, batches, counts)
    loss_sum, norm = executor.settle(loss_sum, norm)
    look_at_guard(run)
    values = {"loss": float(run.rt.sum_tensor(loss_sum)) / max(labels, 1), "grad_norm": float(norm)}
    return {key: value if torch.tensor(value).isfinite() else None for key, value in values.items()}


def _find_event(folder: Path, step: int) -> dict[str, Any] | None:
    found = [event for event in read_events(folder) if event.get("step") == step and "loss" in event]
    return found[-1] if found else None


def _find_checkpoint(folder: Path, step: int) -> checkpoint.Stored | None:
    checkpoints = folder / "checkpoints"
    if step not in checkpoint.steps(checkpoints):
        return None
    path = checkpoints / name_step(step)
    return checkpoint.open_stored(checkpoints, step) if checkpoint.find_damage(path) is None else None


def _describe_machine(folder: Path, rt: Runtime) -> str:
    """Says where this machine differs from that of the run: other devices and numbers of threads round otherwise."""
    started = [event["environment"] for event in read_events(folder) if isinstance(event.get("environment"), dict)]
    now = runtime.describe_environment(rt)
    keys = ("device", "processes", "torch") if started else ()
    found = [
        f"{key} {now[key]!r} where it was {started[-1].get(key)!r}" for key in keys if started[-1].get(key) != now[key]
    ]
    return f", with {', '.join(found)}" if found else ""


def _compare_numbers(before: float | None, now: float | None) -> str:
    if before == now:
        return "equal"
    return f"was {before!r}, is {now!r}"


def _compare_tensors(run: Run, saved: checkpoint.Stored) -> list[str]:
    """Weights and moments against those of a checkpoint; each process compares what it would save."""
    model, optimizer = run.parts.model, run.parts.update.optimizer
    shot = checkpoint.snapshot(model, optimizer, {}, saves=run.saves, means=run.means)
    lines = []
    for kind, mine, stored in (("weights", shot.weights, saved.weights), ("moments", shot.moments, saved.moments)):
        before = {name: stored[name].read_part(shot.rows.get(name), value) for name, value in mine.items()}
        odd = [name for name, value in mine.items() if not _same(before[name], value)]
        gaps = {name: float((before[name] - mine[name]).abs().max()) for name in odd}
        (count,) = run.rt.sum_over_ranks([len(gaps)])
        worst = max(gaps, key=lambda name: gaps[name], default="")
        words = f"{count} of {len(stored)} tensors differ" + (f", {worst} by up to {gaps[worst]:.3g}" if worst else "")
        lines.append(f"{kind}: {words if count else 'equal'}")
    return lines


def _same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), two.flatten().view(torch.uint8))
