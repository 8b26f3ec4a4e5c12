"""Runs that are killed at random times and resumed until they are done end as if nothing had happened."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from stretto import checkpoint
from tests.faults.conftest import Tally
from tests.faults.runs import (
    Ending,
    Runs,
    Tree,
    find_differences,
    find_leftovers,
    pause,
    read_ending,
    wait_for_checkpoint,
    wait_for_steps,
    write_recipe,
)  # fmt: skip
from tests.runs import PATIENCE_S, ROOT, base, change

KILLS = 100  # of each kind of run, if all are tried
WAYS: dict[str, dict[str, Any]] = {
    "dropped": {
        "techniques__layer_drop": {"theta": 0.5, "schedule": "constant"}, "techniques__fused": True,
        "train__micro_batches": 2,
    },
    "plain": {},
    "lean": {"techniques__fused": True, "techniques__lean": {"blocks": 1, "qkv": "input"}},
    "standardized": {"techniques__standardize": {"warmup": 20, "stride": 3}},
    "fp8": {"techniques__fused": True, "techniques__fp8": {"sites": "all"}, "train__precision": "bf16"},
}  # fmt: skip


def make_tree(folder: Path, way: str, steps: int) -> Tree:
    tree = change(
        base(folder), train__steps=steps, train__micro_batches=1, train__eval_every=10, train__eval_batches=1,
        checkpoint__every=2,
    )  # fmt: skip
    return change(tree, **WAYS[way])


def assert_undisturbed(run: Path, wanted: Ending) -> None:
    assert find_differences(run, wanted) == []
    assert [step for step, _ in wanted.losses] == [*range(1, wanted.state["step"] + 1)], "each step once"
    assert find_leftovers(run) == []


@pytest.mark.fault("K4")
@pytest.mark.parametrize("way", WAYS)
def test_runs_killed_again_and_again_end_with_the_same_bits(
    runs: Runs, tmp_path: Path, whole: bool, tally: Tally, way: str
) -> None:
    """A run that is done before there were enough kills is followed by another one. On a busy machine a run needs more
    time to get anywhere: about two kills of three come after something new was saved."""
    if not whole and way != "dropped":
        pytest.skip("one kind of run is killed in the quick part")
    tree, dice = make_tree(tmp_path, way, 200 if whole else 50), random.Random(way)
    wanted = read_ending(runs.run(write_recipe(tmp_path, "undisturbed", tree)))
    kills, goal, places, longest = 0, KILLS if whole else 15, set(), 1.5
    for number in count():
        recipe, code = write_recipe(tmp_path, f"run-{number}", tree), -9
        newest: int | None = None
        while code == -9 and kills < goal:
            started = runs.start(recipe)
            pause(dice, 0.02, longest)
            started.kill()
            (code,) = started.wait()
            kills += code == -9
            before, newest = newest, checkpoint.find_newest(tmp_path / f"run-{number}" / "checkpoints")
            longest = max(1.5, longest * (1.2 if newest == before else 0.9))
            places.add(newest)
        assert code in (0, -9), started.log
        assert_undisturbed(runs.run(recipe), wanted)
        if kills == goal:
            break
    assert len(places) > 3, "hardly anything was saved before a kill"
    tally("kills", kills)


@pytest.mark.fault("K4")
def test_so_do_runs_that_were_not_forked(runs: Runs, tmp_path: Path, whole: bool, tally: Tally) -> None:
    """A new interpreter each time; it is killed after some steps and a bit, or while it starts."""
    if not whole:
        pytest.skip("a new interpreter takes seconds")
    tree, dice, kills = make_tree(tmp_path, "dropped", 300), random.Random(0), 10
    wanted = read_ending(runs.run(write_recipe(tmp_path, "undisturbed", tree)))
    recipe = write_recipe(tmp_path, "run", tree)
    for number in range(kills):
        with recipe.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "stretto", "train", str(recipe), "--resume"], cwd=ROOT, stdout=log, stderr=log
            )
            try:
                if number % 4 < 3:
                    wait_for_steps(tmp_path / "run", dice.randrange(1, 12))
                pause(dice, 0.0, 0.3)
            finally:
                process.kill()
            assert process.wait(PATIENCE_S) == -9, recipe.with_suffix(".log").read_text()
    assert_undisturbed(runs.run(recipe), wanted)
    tally("kills", kills)


@pytest.mark.control("K4")
@pytest.mark.parametrize(("plant", "words"), [("forget moments", "weights"), ("forget a step", "losses")])
def test_a_resume_that_leaves_something_out_is_seen(runs: Runs, tmp_path: Path, plant: str, words: str) -> None:
    tree = make_tree(tmp_path, "plain", 50)
    wanted = read_ending(runs.run(write_recipe(tmp_path, "undisturbed", tree)))
    recipe = write_recipe(tmp_path, "run", tree)
    started = runs.start(recipe)
    wait_for_checkpoint(tmp_path / "run")
    started.kill()
    assert started.wait() == [-9]
    differences = find_differences(runs.run(recipe, 1, plant), wanted)
    assert any(each.startswith(words) for each in differences), differences
