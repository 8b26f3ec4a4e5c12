"""Two processes with sharded weights (FSDP2) and every technique are killed, one of them or both, and end as if nothing
had happened; and what they saved is loaded by one process and by four."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Tally
from tests.faults.runs import (
    Ending,
    Runs,
    Tree,
    find_differences,
    find_leftovers,
    pause,
    read_ending,
    wait_for_steps,
    write_recipe,
)
from tests.runs import base, change

pytestmark = pytest.mark.dist
FUSED: dict[str, Any] = {"techniques__fused": True}
LEAN: dict[str, Any] = {"techniques__lean": {"blocks": 1, "qkv": "input"}, **FUSED}
DROP: dict[str, Any] = {"techniques__layer_drop": {"theta": 0.5, "schedule": "constant"}}
EVEN: dict[str, Any] = {"techniques__standardize": {"warmup": 10, "stride": 3}}
FP8: dict[str, Any] = {"techniques__fp8": {"sites": "all"}, "train__precision": "bf16", **FUSED}
SEQUENCE: dict[str, Any] = {"parallel__sequence": 2, "parallel__sequence_method": "gather"}
EVERY: dict[str, Any] = {**LEAN, **DROP, **EVEN, **FP8}
WAYS: dict[str, dict[str, Any]] = {
    "every technique": EVERY,
    "plain": {},
    "fused, split weights, dropped": {**DROP, "techniques__fused": {"weights": "split"}, "train__precision": "bf16"},
    "fused, lean, dropped": {**LEAN, **DROP},
    "standardized": EVEN,
    "every technique, sequence": {**SEQUENCE, **EVERY},
    "every technique, hybrid": {**SEQUENCE, "parallel__data": "hybrid", **EVERY},
}
KILLS = 3  # of each way, if all are tried


def make_tree(folder: Path, way: str, steps: int) -> Tree:
    tree = change(
        base(folder), parallel__data="shard", train__steps=steps, train__micro_batches=2, train__eval_every=10,
        train__eval_batches=2, checkpoint__every=2, optim__schedule="constant",
    )  # fmt: skip
    return change(tree, **WAYS[way])


def run_and_kill(runs: Runs, recipe: Path, dice: random.Random, kills: int) -> Path:
    """Kills one process or both after some steps and a bit, or both while they start; then lets the run end."""
    for number in range(kills):
        started = runs.start(recipe, 2)
        if number % 3 < 2:
            wait_for_steps(recipe.with_suffix(""), dice.randrange(1, 6))
        pause(dice, 0.0, 0.3)
        victims = dice.choice([(0,), (1,), (0, 1)]) if number % 3 < 2 else (0, 1)
        started.kill(*victims)
        codes = started.wait()  # those that were not killed must end by themselves
        assert all(codes[rank] == -9 for rank in victims) and 0 not in codes, started.log
    return runs.run(recipe, 2)


@pytest.mark.fault("K4")
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_killed_at_random_end_with_the_same_bits(
    runs: Runs, tmp_path: Path, whole: bool, tally: Tally, way: str
) -> None:
    if not whole and way != "every technique":
        pytest.skip("the quick part kills two processes with every technique")
    kills, tree = KILLS if whole else 2, make_tree(tmp_path, way, 80 if whole else 50)
    wanted = read_ending(runs.run(write_recipe(tmp_path, "undisturbed", tree), 2))
    run = run_and_kill(runs, write_recipe(tmp_path, "killed", tree), random.Random(way), kills)
    assert find_differences(run, wanted) == []
    assert find_leftovers(run) == []
    tally("kills of two processes", kills)


def go_on(runs: Runs, folder: Path, tree: Tree, world: int, *plants: str) -> Ending:
    """Takes two steps more than the checkpoint that two processes left, on this number of processes."""
    name = f"{world} {' '.join(plants)}"
    shutil.copytree(folder / "two", folder / name)
    return read_ending(runs.run(write_recipe(folder, name, tree, train__steps=8), world, *plants))


def is_near(folder: Path, wanted: Ending) -> bool:
    """Sums of four micro-batches have another order on another number of processes: roundings of fp32."""
    return find_differences(folder, wanted, bound=1e-5) == []


@pytest.mark.fault("E1")
def test_what_two_processes_saved_is_loaded_by_one_and_by_four(runs: Runs, tmp_path: Path) -> None:
    tree = change(make_tree(tmp_path, "fused, lean, dropped", 6), train__micro_batches=4, optim__eps=1e-4)
    runs.run(write_recipe(tmp_path, "two", tree), 2)
    wanted = go_on(runs, tmp_path, tree, 2)
    for world in (1, 4):
        go_on(runs, tmp_path, tree, world)
        assert is_near(tmp_path / f"{world} ", wanted)


@pytest.mark.control("E1")
def test_moments_that_one_process_did_not_load_are_missed(runs: Runs, tmp_path: Path) -> None:
    tree = change(make_tree(tmp_path, "plain", 6), optim__eps=1e-4)
    runs.run(write_recipe(tmp_path, "two", tree), 2)
    wanted = go_on(runs, tmp_path, tree, 2)
    go_on(runs, tmp_path, tree, 1, "forget moments")
    assert not is_near(tmp_path / "1 forget moments", wanted)
