"""Runs of one process or several, which tests start, kill and compare."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stretto import checkpoint
from stretto.config import build_config, dump_config
from stretto.report import read_events
from tests.runs import PATIENCE_S, change
from tests.server import Group, Server

EXIT = "exit.json"  # what a run writes when it ends by itself
Tree = dict[str, Any]


class Runs:
    """Runs of recipes, in processes that a server forks."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def start(self, recipe: Path, world: int = 1, plants: tuple[str, ...] = ()) -> Group:
        """Begins a run, or goes on with it; its output goes to a file beside the recipe."""
        log = recipe.with_suffix(".log")
        log.write_text("")
        (recipe.with_suffix("") / EXIT).unlink(missing_ok=True)  # of the run before, else a wait for this one would end
        return self.server.start(log, "train", str(recipe), "--resume", processes=world, plants=plants)

    def run(self, recipe: Path, world: int = 1, *plants: str) -> Path:
        """Runs to the end, which must be a good one, and returns the run folder."""
        started = self.start(recipe, world, plants)
        codes = started.wait()
        assert codes == [0] * world, f"{codes}: {started.log[-4000:]}"
        return recipe.with_suffix("")


def write_recipe(folder: Path, name: str, tree: Tree, **changes: Any) -> Path:
    """A recipe whose run folder has the same name beside it."""
    config = build_config(change(tree, run__dir=str(folder / name), **changes))
    recipe = folder / f"{name}.toml"
    recipe.write_text(dump_config(config))
    return recipe


@dataclass
class Ending:
    """All that a run has to show in the end."""

    losses: list[tuple[int, float]]
    eval_losses: list[tuple[int, float]]
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any] = field(default_factory=dict)


def read_ending(run: Path) -> Ending:
    """What the events say, in their order, and what is in the newest checkpoint."""
    events, newest = read_events(run), checkpoint.find_newest(run / "checkpoints")
    assert newest is not None
    shot = checkpoint.load(run / "checkpoints", newest)
    tensors = {
        f"{kind}/{name}": value
        for kind in ("weights", "moments", "others")
        for name, value in getattr(shot, kind).items()
    }
    return Ending(
        [(event["step"], event["loss"]) for event in events if "loss" in event],
        [(event["step"], event["eval_loss"]) for event in events if "eval_loss" in event],
        tensors,
        {key: shot.state[key] for key in ("step", "tokens", "best", "best_step")},
    )


def find_differences(run: Path, wanted: Ending, bound: float = 0.0) -> list[str]:
    """Says in what a run differs from another that went on undisturbed: in bits, or by more than the bound."""
    found, differences = read_ending(run), []
    rounded = {"best": 0.0} if bound else {}
    if found.state | rounded != wanted.state | rounded:
        differences.append(f"state: {found.state}, not {wanted.state}")
    for name in ("losses", "eval_losses"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        if [step for step, _ in mine] != [step for step, _ in theirs]:
            differences.append(f"{name} of the steps {[step for step, _ in mine]}")
        elif any(abs(one - other) > bound for (_, one), (_, other) in zip(mine, theirs, strict=True)):
            differences.append(f"{name}: {mine}, not {theirs}")
    if found.tensors.keys() != wanted.tensors.keys():
        return [*differences, f"names: {found.tensors.keys() ^ wanted.tensors.keys()}"]
    for name, value in wanted.tensors.items():
        other = found.tensors[name]
        if not (torch.equal(value, other) if bound == 0 else torch.allclose(value, other, rtol=bound, atol=bound)):
            differences.append(f"{name} by {(value - other).abs().max():.3g}")
    return differences


def find_leftovers(run: Path, keep: int = 2) -> list[str]:
    """What a run that ended well has left beside its results: drafts, and checkpoints that it should have retired."""
    drafts = [str(path.relative_to(run)) for path in run.rglob(".*")]
    steps = checkpoint.steps(run / "checkpoints")
    return drafts + ([f"checkpoints of the steps {steps}"] if len(steps) > keep + 1 else [])


def count_samples(path: Path) -> dict[int, Counter[int]]:
    """How often each sample was read in each update, by the notes of all processes."""
    found: dict[int, Counter[int]] = {}
    for file in path.parent.glob(f"{path.name}.*"):
        for line in file.read_text().splitlines():
            step, samples = json.loads(line)
            found.setdefault(step, Counter()).update(samples)
    return found


def last_step(run: Path) -> int:
    """The last step in the log; 0 while there is none."""
    with suppress(OSError):
        return max((event["step"] for event in read_events(run) if "loss" in event), default=0)
    return 0


def wait_for_steps(run: Path, number: int) -> None:
    """Waits until the log has so many steps more than now."""
    goal = last_step(run) + number
    wait_until(run, lambda: last_step(run) >= goal)


def wait_for_checkpoint(run: Path) -> None:
    """Waits until a run has saved something; its log may be ahead of that."""
    wait_until(run, lambda: bool(checkpoint.steps(run / "checkpoints")))


def wait_until(run: Path, holds: Callable[[], bool]) -> None:
    """Waits for something, but not for a run that has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and not (run / EXIT).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def pause(dice: random.Random, shortest: float, longest: float) -> None:
    time.sleep(dice.uniform(shortest, longest))
