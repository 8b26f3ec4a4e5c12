"""The number of processes changes while a run is interrupted: it goes on with the same samples, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import Runs, Tree, count_samples, find_differences, read_ending, write_recipe
from tests.runs import base, change

pytestmark = pytest.mark.dist


def make_tree(folder: Path, micro_batches: int) -> Tree:
    """A run that is the same when it becomes longer. Masks of dropout and the choice of layers depend on the
    micro-batch, of which processes take whole ones."""
    return change(
        base(folder), train__micro_batches=micro_batches, train__steps=12, train__eval_every=3, train__eval_batches=2,
        optim__eps=1e-4, optim__schedule="constant", techniques__layer_drop={"theta": 0.5, "schedule": "constant"},
    )  # fmt: skip


def move(runs: Runs, folder: Path, tree: Tree, worlds: tuple[int, ...], *plants: str) -> Path:
    """Takes three steps on each of these numbers of processes, and notes what they read."""
    for leg, world in enumerate(worlds, 1):
        recipe = write_recipe(folder, "moved", tree, train__steps=3 * leg)
        run = runs.run(recipe, world, f"note samples: {folder / 'moved.samples'}", *plants)
    return run


def stay(runs: Runs, folder: Path, tree: Tree, steps: int) -> Path:
    """Does the same in one process and without a break."""
    recipe = write_recipe(folder, "stayed", tree, train__steps=steps)
    return runs.run(recipe, 1, f"note samples: {folder / 'stayed.samples'}")


@pytest.mark.fault("E1")
def test_two_one_and_two_processes_end_with_the_bits_of_one(runs: Runs, tmp_path: Path) -> None:
    """Two micro-batches have one sum, whoever adds them up."""
    tree = make_tree(tmp_path, micro_batches=2)
    wanted = read_ending(stay(runs, tmp_path, tree, 9))
    assert find_differences(move(runs, tmp_path, tree, (2, 1, 2)), wanted) == []
    assert count_samples(tmp_path / "moved.samples") == count_samples(tmp_path / "stayed.samples")


@pytest.mark.fault("E1")
@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_a_run_moves_from_two_processes_to_one_to_two_to_four(
    runs: Runs, tmp_path: Path, whole: bool, mode: str
) -> None:
    """Four micro-batches are added up in another order, so losses, weights and moments differ by roundings of fp32."""
    if not whole:
        pytest.skip("four processes take long on few cores")
    tree = change(make_tree(tmp_path, micro_batches=4), parallel__data=mode)
    wanted = read_ending(stay(runs, tmp_path, tree, 12))
    assert find_differences(move(runs, tmp_path, tree, (2, 1, 2, 4)), wanted, bound=1e-6) == []
    assert count_samples(tmp_path / "moved.samples") == count_samples(tmp_path / "stayed.samples")
    assert sum(count_samples(tmp_path / "moved.samples")[1].values()) == 16


@pytest.mark.control("E1")
def test_processes_that_count_by_themselves_read_other_samples(runs: Runs, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, micro_batches=2)
    wanted = read_ending(stay(runs, tmp_path, tree, 6))
    assert find_differences(move(runs, tmp_path, tree, (2, 1), "share by own numbers"), wanted, bound=1e-6) != []
    assert count_samples(tmp_path / "moved.samples") != count_samples(tmp_path / "stayed.samples")


# Processes, what they are told, and the words of the refusal with both numbers.
MISFITS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "few samples": (2, {"data__batch_size": 1}, ("data.batch_size = 1 ", "by 2 ")),
    "long sequence": (2, {"parallel__sequence": 4}, ("parallel.sequence = 4 ", "there are 2:")),
    "long pipeline": (2, {"parallel__pipeline": 4, "model__layers": 8}, ("parallel.pipeline = 4 ", "there are 2:")),
    "odd group": (3, {"parallel__pipeline": 2}, ("parallel.pipeline = 2 ", "there are 3:")),
    "few layers": (
        2,
        {"parallel__pipeline": 2, "model__layers": 1, "techniques__fused": True},
        ("2 parts ", "model.layers = 1:"),
    ),
}


def is_refused(runs: Runs, folder: Path, name: str, *plants: str) -> bool:
    """Whether all processes end with exit code 3 before they read a sample, and say both numbers. The run has begun in
    one process, and stays as it is."""
    world, changes, words = MISFITS[name]
    tree = change(base(folder), train__micro_batches=1, train__steps=4, **changes)
    alone = {"train__steps": 2, "parallel__sequence": 1, "parallel__pipeline": 1}
    run = runs.run(write_recipe(folder, "run", tree, **alone))
    before = read_ending(run)
    started = runs.start(write_recipe(folder, "run", tree), world, (f"note samples: {folder / 'samples'}", *plants))
    codes, said = started.wait(), started.log
    return (
        codes == [3] * world
        and all(word in said for word in words)
        and "Traceback" not in said
        and not count_samples(folder / "samples")
        and find_differences(run, before) == []
    )


@pytest.mark.fault("E2")
@pytest.mark.parametrize("name", MISFITS)
def test_numbers_that_do_not_fit_are_refused_before_step_one(runs: Runs, tmp_path: Path, name: str) -> None:
    assert is_refused(runs, tmp_path, name), (tmp_path / "run.log").read_text()


@pytest.mark.control("E2")
def test_without_the_question_such_a_run_begins(runs: Runs, tmp_path: Path) -> None:
    assert not is_refused(runs, tmp_path, "few samples", "ask nothing")
    assert "cannot be shared" not in (tmp_path / "run.log").read_text()
