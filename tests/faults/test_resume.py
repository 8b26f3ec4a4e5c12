"""Interrupted runs end with the same bits as uninterrupted ones: alone, in two processes with every kind of parallelism
and every technique, and with exact techniques switched on and off in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import (
    Runs,
    Tree,
    count_samples,
    find_differences,
    find_leftovers,
    read_ending,
    write_recipe,
)
from tests.runs import base, change

STEPS = 20
DROP = {"techniques__layer_drop": {"theta": 0.5, "schedule": "constant"}}
FUSED: dict[str, Any] = {"techniques__fused": True}
PIPELINE: dict[str, Any] = {"parallel__pipeline": 2, "model__layers": 4, **FUSED}
WAYS: dict[str, dict[str, Any]] = {  # of two processes to work together
    "shard dropped": {"parallel__data": "shard", **DROP},
    "pipelined": {"parallel__schedule": "pipelined", "train__micro_batches": 1, **PIPELINE},
    "replicate": {},
    "replicate dropped": {**DROP, **FUSED},
    "replicate by sample": {"techniques__layer_drop": {"theta": 0.5, "gate": "sample", "schedule": "constant"}},
    "replicate standardized": {"techniques__standardize": {"warmup": 5, "stride": 3}},
    "replicate fp8": {"techniques__fp8": {"sites": "all"}, "train__precision": "bf16", **FUSED},
    "shard": {"parallel__data": "shard"},
    "shard split weights": {
        "parallel__data": "shard", "techniques__fused": {"weights": "split"}, "train__precision": "bf16",
    },
    "shard lean": {"parallel__data": "shard", "techniques__lean": {"blocks": 1, "qkv": "input"}, **FUSED},
    "shard standardized": {"parallel__data": "shard", "techniques__standardize": {"warmup": 5, "stride": 3}, **FUSED},
    # Blocks are left out from the first step of each piece on, in the first of several passes.
    "shard dropped bf16": {
        "parallel__data": "shard", "techniques__layer_drop": {"theta": 0.1, "schedule": "constant", "index": "text"},
        "train__precision": "bf16", "train__micro_batches": 4, "model__layers": 4,
    },
    "shard fp16": {"parallel__data": "shard", "train__precision": "fp16"},
    "gather": {"parallel__sequence": 2, "parallel__sequence_method": "gather", **FUSED},
    "ring dropped": {"parallel__sequence": 2, "parallel__sequence_method": "ring", **DROP, **FUSED},
    "ulysses shard": {"parallel__sequence": 2, "parallel__sequence_method": "ulysses", "parallel__data": "shard"},
    "hybrid": {"parallel__sequence": 2, "parallel__data": "hybrid", **FUSED},
    "1f1b": PIPELINE,
    "2bw dropped": {"parallel__schedule": "2bw", "train__micro_batches": 3, **DROP, **PIPELINE},
    "ouroboros lean": {
        "parallel__schedule": "ouroboros", "train__micro_batches": 1, "techniques__lean": {"blocks": 2}, **PIPELINE,
    },
}  # fmt: skip
QUICK = ("shard dropped", "pipelined")  # the ways that are tried in the quick part


@pytest.mark.fault("R1")
def test_a_run_in_pieces_is_the_whole_run(runs: Runs, tmp_path: Path) -> None:
    """20 steps, 10 + 10, and 7 + 6 + 7, with dropout, dropped layers, accumulation, warm-up, evaluation, and more than
    one epoch: 281 windows, 16 a step."""
    tree = change(base(tmp_path), train__steps=STEPS, train__micro_batches=2, data__batch_size=8, **DROP)
    endings = {}
    for name, stops in {"whole": (), "halves": (10,), "thirds": (7, 13)}.items():
        recipe, notes = write_recipe(tmp_path, name, tree), f"note samples: {tmp_path / name}.samples"
        for step in stops:
            assert runs.start(recipe, 1, (notes, f"stop after: {step}")).wait() == [75]
        endings[name] = read_ending(runs.run(recipe, 1, notes))
        assert find_differences(tmp_path / name, endings["whole"]) == []
        assert find_leftovers(tmp_path / name) == []
        assert count_samples(tmp_path / f"{name}.samples") == count_samples(tmp_path / "whole.samples")
    read = [sample for step in count_samples(tmp_path / "whole.samples").values() for sample in step.elements()]
    assert len(read) == 320 > len(set(read)), "the run must reach into a second epoch"


def make_pair(folder: Path, way: str) -> Tree:
    tree = change(
        base(folder), train__steps=12, train__micro_batches=2, train__eval_every=6, train__eval_batches=2,
        optim__warmup=5, model__layers=2,
    )  # fmt: skip
    return change(tree, **WAYS[way])


@pytest.mark.fault("R2")
@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_in_pieces_are_the_whole_run(runs: Runs, tmp_path: Path, whole: bool, way: str) -> None:
    """One of them is told to stop, twice."""
    if not whole and way not in QUICK:
        pytest.skip(f"the quick part tries {' and '.join(QUICK)}")
    tree = make_pair(tmp_path, way)
    wanted = read_ending(runs.run(write_recipe(tmp_path, "whole", tree), 2))
    recipe = write_recipe(tmp_path, "pieces", tree)
    for step in (3, 8):
        started = runs.start(recipe, 2, (f"stop after: {step}",))
        assert started.wait() == [75, 75], started.log
    assert find_differences(runs.run(recipe, 2), wanted) == []
    assert find_leftovers(tmp_path / "pieces") == []


@pytest.mark.control("R2")
@pytest.mark.dist
def test_moments_that_two_processes_leave_out_are_missed(runs: Runs, tmp_path: Path) -> None:
    tree = make_pair(tmp_path, "replicate")
    wanted = read_ending(runs.run(write_recipe(tmp_path, "whole", tree), 2))
    recipe = write_recipe(tmp_path, "pieces", tree)
    assert runs.start(recipe, 2, ("stop after: 5",)).wait() == [75, 75]
    differences = find_differences(runs.run(recipe, 2, "forget moments"), wanted)
    assert any(each.startswith("weights") for each in differences), differences


LEAN: dict[str, Any] = {"techniques__fused": True, "techniques__lean": {"qkv": "input", "blocks": 1}}
PLAIN = {"techniques__fused": False}
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # off, and on
    "fused": (PLAIN, FUSED),
    "lean": (FUSED, LEAN),
    "both": (PLAIN, LEAN),
}
# Each differs from plain torch by some roundings of fp32, 6e-8, of numbers near 1, in each of 21 steps: 1.3e-6. Adam
# divides by the root of a second moment, and optim.eps below keeps it from making much more of them.
BOUND = 1e-5


def switch(runs: Runs, folder: Path, tree: Tree, name: str) -> list[str]:
    """Seven steps without the technique, seven with it, seven without it: what is different from 21 without it."""
    off, on = EXACT[name]
    wanted = read_ending(runs.run(write_recipe(folder, "never", tree, **off)))
    for steps, changes in ((7, off), (14, on), (21, off)):
        run = runs.run(write_recipe(folder, "switched", tree, **{"train__steps": steps, **changes}))
    assert find_differences(run, wanted) != [], "it was on"
    return find_differences(run, wanted, BOUND)


def make_calm(folder: Path, dropout: float = 0.0) -> Tree:
    """A run that is the same when it becomes longer."""
    return change(
        base(folder), model__dropout=dropout, optim__eps=1e-4, optim__schedule="constant", train__steps=21,
        train__micro_batches=2, train__eval_every=7,
    )  # fmt: skip


@pytest.mark.fault("R4")
@pytest.mark.parametrize("name", EXACT)
def test_exact_techniques_may_come_and_go(runs: Runs, tmp_path: Path, whole: bool, name: str) -> None:
    if not whole and name != "both":
        pytest.skip("the quick part tries both together")
    assert switch(runs, tmp_path, make_calm(tmp_path), name) == []


@pytest.mark.control("R4")
def test_other_masks_of_dropout_are_more_than_the_bound(runs: Runs, tmp_path: Path) -> None:
    """Kernels draw others than torch."""
    assert switch(runs, tmp_path, make_calm(tmp_path, dropout=0.1), "fused") != []


@pytest.mark.control("R4")
def test_a_technique_that_renames_a_parameter_could_not(runs: Runs, tmp_path: Path) -> None:
    tree = make_calm(tmp_path)
    runs.run(write_recipe(tmp_path, "run", tree, train__steps=7))
    started = runs.start(write_recipe(tmp_path, "run", tree), 1, ("rename a module",))
    assert started.wait() == [5]
    words = started.log
    assert "missing: decoder.blocks.0.renamed." in words and "not in the model: decoder.blocks.0.mlp." in words
