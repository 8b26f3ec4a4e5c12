"""What tests plant in a process before it trains: stops after a given step, notes of what it read, and sabotage."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.mesh import Mesh
from stretto.parallel.data import Portion

RANK = "RANK"
TRAIN: Any = import_module("stretto.train")


def after_step(act: Callable[[int, Any], None]) -> None:
    """Has a function called after each update, with the number of updates done and the batches of this process."""
    run_step = TRAIN.run_step

    def watched(parts: Any, step: int, batches: Any, *rest: Any) -> Any:
        result = run_step(parts, step, batches, *rest)
        act(step + 1, batches)
        return result

    TRAIN.run_step = watched


def after_load(act: Callable[[Any], None]) -> None:
    """Has a function called with a run that was loaded from a checkpoint."""
    load_latest = TRAIN.load_latest

    def watched(run: Any, before: int | None = None) -> None:
        load_latest(run, before)
        if run.step:
            act(run)

    TRAIN.load_latest = watched


def stop_after(step: str) -> None:
    """The last process is asked to stop when so many updates are done; all agree to, at once or after one more."""
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1

    def ask(done: int, batches: Any) -> None:
        if done == int(step) and int(os.environ.get(RANK, "0")) == last:
            os.kill(os.getpid(), signal.SIGTERM)

    after_step(ask)


def note_samples(path: str) -> None:
    """A line of JSON for each update: its number, and the samples that this process read."""

    def note(done: int, batches: Any) -> None:
        line = json.dumps([done, sorted(sample for _, batch in batches for sample in batch.samples)])
        with Path(f"{path}.{os.environ.get(RANK, '0')}").open("a") as file:
            file.write(line + "\n")

    after_step(note)


def forget_moments(_: str) -> None:
    """A resumed run begins with the moments of a new one."""

    def forget(run: Any) -> None:
        for state in run.parts.update.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].zero_()

    after_load(forget)


def forget_a_step(_: str) -> None:
    """A resumed run takes its checkpoint for the one of the step before."""

    def forget(run: Any) -> None:
        run.step -= 1

    after_load(forget)


def share_by_own_numbers(_: str) -> None:
    """Each process counts its micro-batches by itself, so that some are read twice and others never."""

    def find_micro_batches(self: Portion, step: int) -> range:
        begin = step * self.micro_batches // self.stride
        return range(begin, begin + self.micro_batches // self.stride)

    Portion.find_micro_batches = find_micro_batches  # type: ignore[method-assign]


def ask_nothing(_: str) -> None:
    """Nobody asks whether the batch can be shared by so many processes."""
    complete = TRAIN.complete
    TRAIN.complete = lambda config, data, mesh: complete(config, data, Mesh())


def rename_a_module(_: str) -> None:
    """The model gives other names to some of its parameters."""
    build = TRAIN.build

    def rename(*arguments: Any) -> Any:
        parts = build(*arguments)
        block = parts.model.get_submodule("decoder.blocks.0")
        block.renamed = block.mlp
        del block.mlp
        return parts

    TRAIN.build = rename


PLANTS: dict[str, Callable[[str], None]] = {
    "stop after": stop_after,
    "note samples": note_samples,
    "forget moments": forget_moments,
    "forget a step": forget_a_step,
    "share by own numbers": share_by_own_numbers,
    "ask nothing": ask_nothing,
    "rename a module": rename_a_module,
}
