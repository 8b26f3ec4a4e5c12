"""A run in progress, and what is kept of it: all that a checkpoint has, and how a run goes on from one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stretto import checkpoint
from stretto.build import Trainable, find_portion
from stretto.checkpoint.saving import Saver
from stretto.checkpoint.verify import name_step
from stretto.config import Config
from stretto.convert.folder import load_weights
from stretto.data import Data
from stretto.errors import CheckpointError
from stretto.given import Callbacks
from stretto.length import is_over
from stretto.mesh import Mesh
from stretto.optim import weight_writer
from stretto.replicas import compare
from stretto.runtime import Runtime
from stretto.techniques import identify


@dataclass
class Run:
    """A run in progress."""

    config: Config
    data: Data
    parts: Trainable
    rt: Runtime
    mesh: Mesh
    step: int = 0  # updates done
    tokens: int = 0  # read by them
    best: float = math.inf  # lowest evaluation loss so far
    best_step: int = 0
    evaluated: int = 0  # the step of the last evaluation
    waited: int = 0  # evaluations since the best one
    callbacks: Callbacks = field(default_factory=Callbacks)
    saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        size = checkpoint.count_bytes(self.parts.model, self.parts.update.optimizer, self.saves, self.means)
        self.saver = Saver(self.checkpoints, self.config.checkpoint.keep, self.rt, size)

    @property
    def means(self) -> checkpoint.Means:
        """Of the weights, if the run keeps them."""
        return self.parts.update.average.means if self.parts.update.average else {}

    def saves(self, name: str) -> bool:
        """Whether this process saves a tensor that it has as a whole."""
        return self.parts.techniques.saves(name, self.rt.is_main)

    @property
    def stopped_early(self) -> bool:
        return is_over(self.config.train, self.step, self.waited)

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.run.dir) / "checkpoints"


def save(run: Run) -> None:
    """Copies the state, which a thread writes while training goes on. An error of the last save is raised here."""
    run.saver.settle()
    look_at_guard(run)
    if not run.config.checkpoint.keep:
        return
    compare_replicas(run)
    state = {
        "step": run.step,
        "tokens": run.tokens,
        "best": run.best if run.best < math.inf else None,
        "best_step": run.best_step,
        "evaluated": run.evaluated,
        "waited": run.waited,
        "scaler": run.parts.update.scaler.state_dict(),
        "guard": run.parts.update.guard.state_dict(),
        "techniques": run.parts.techniques.state_dict(),
        "identity": _identity(run),
    }
    others = run.parts.techniques.dump()
    model, optimizer = run.parts.model, run.parts.update.optimizer
    run.saver.start(checkpoint.snapshot(model, optimizer, state, others, run.saves, run.means))
    run.callbacks.after_save(run.step, run.checkpoints / name_step(run.step))


def load_latest(run: Run, before: int | None = None) -> None:
    """Goes on from the newest checkpoint that verifies, of those before a step if that is given; from the beginning if
    there is none."""
    found = run.rt.while_main(lambda: checkpoint.find_newest(run.checkpoints, before))
    if found is None and before is None and run.rt.is_main and checkpoint.steps(run.checkpoints):
        raise CheckpointError(f"no checkpoint in {run.checkpoints} can be used; move them away to begin anew")
    (step,) = run.rt.sum_over_ranks([found or 0])  # the main process looked; now all know
    if step == 0:
        return
    if step > run.config.train.steps:
        raise CheckpointError(f"{run.checkpoints} is at step {step}, beyond train.steps = {run.config.train.steps}")
    shot = checkpoint.open_stored(run.checkpoints, step)
    if "identity" not in shot.state:
        raise CheckpointError(f"{run.config.run.dir} holds a model alone, by `stretto export --fold`: it cannot go on")
    differences = _differences(_identity(run), shot.state["identity"])
    if differences:
        raise CheckpointError(f"{run.config.run.dir} was made by another configuration: " + "; ".join(differences))
    model, update, shot = run.parts.model, run.parts.update, run.parts.techniques.take_part(shot)
    checkpoint.restore_weights(model, shot, weight_writer(update.optimizer))
    checkpoint.restore_moments(model, update.optimizer, shot, run.means)
    if shot.state["scaler"]:  # empty unless it was fp16 then too
        update.scaler.load_state_dict(shot.state["scaler"])
    update.guard.load_state_dict(shot.state["guard"])
    run.parts.techniques.load_state_dict(shot.state.get("techniques", {}))
    run.step, run.tokens = step, shot.state["tokens"]
    run.rt.advance(step)
    run.best = math.inf if shot.state["best"] is None else shot.state["best"]
    run.best_step, run.evaluated = shot.state["best_step"], shot.state.get("evaluated", step)
    run.waited = shot.state.get("waited", 0)


def start_from_folder(run: Run) -> list[str]:
    """The weights of the Hugging Face folder `model.init` take the place of the first ones; says what came from it."""
    cfg = run.config.model
    return load_weights(Path(cfg.init), run.parts.model, cfg, weight_writer(run.parts.update.optimizer))


def _identity(run: Run) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run; the step then says all else (data position, learning
    rate, random numbers). Lengths, intervals, places and the number of processes may change."""
    config, places = run.config, {"train", "eval", "test", "cache", "tokenizer"}
    return {
        "model": {key: value for key, value in asdict(config.model).items() if key != "init"},
        "optim": asdict(config.optim),
        "data": {key: value for key, value in asdict(config.data).items() if key not in places},
        "run": {"seed": config.run.seed},
        "train": {"micro_batches": config.train.micro_batches, "ema": config.train.ema},
        "techniques": identify(config),
        "content": {"data.train": run.data.fingerprint, "num_train": run.data.num_train},
    }


def _differences(now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    defaults = asdict(Config())  # what an option was that the version of that run did not have
    before = {section: defaults.get(section, {}) | saved.get(section, {}) for section in now}
    return [
        f"{section}.{key} was {before[section].get(key)!r}, is {value!r}"
        for section, values in now.items()
        for key, value in values.items()
        if before[section].get(key) != (list(value) if isinstance(value, tuple) else value)
    ]


def look_at_guard(run: Run) -> dict[str, int]:
    """What it has counted; an error if too many updates in a row were cancelled."""

    def read_samples(step: int, ranks: Sequence[int]) -> dict[int, Sequence[int]]:
        meshes = [replace(run.mesh, rank=rank) for rank in ranks or range(run.rt.world)]
        numbers = {i for mesh in meshes for i in find_portion(run.config, mesh).find_micro_batches(step - 1)}
        return {i: run.data.train_batch(i).samples for i in sorted(numbers)[:4]}

    return run.parts.update.guard.check(run.step, run.rt.gather_over_ranks, read_samples)


def compare_replicas(run: Run) -> None:
    compare(run.parts.model, run.parts.update.optimizer, run.config.parallel, run.mesh, run.rt, run.step)
