"""Guards in two processes: a fault in one of them is answered alike by both; replicas that differ are found; the same
run twice, and layers that are dropped, are the same everywhere."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.ops.language import triton
from stretto.replicas import describe_difference, hash_bits
from stretto.report import read_events
from tests.distributed.processes import launch
from tests.faults.conftest import Tally
from tests.runs import base, change

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_thread")]
MODULE = "tests.faults.guard_jobs"
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
MODES: dict[str, dict[str, Any]] = {
    "replicate": {},
    "shard": {"parallel__data": "shard"},
    "sequence": {"parallel__sequence": 2},
}
KINDS = ("loss", "gradient", "after the sum")
BAD = 3  # the update with the fault, counted from 0
STATIC = {"techniques__fused": True}


def list_cases(whole: bool) -> list[tuple[str, str, str]]:
    """Kind of parallelism, kind of fault, value; each pair at least once."""
    every = [(mode, kind, value) for mode in MODES for kind in KINDS for value in VALUES]
    return every if whole else [case for i, case in enumerate(every) if i % 3 == i // 3 % 3]


def plain_tree(folder: Path) -> dict[str, Any]:
    return change(
        base(folder), train__steps=6, train__micro_batches=2, train__eval_every=0, train__eval_batches=1,
        train__non_finite="skip", checkpoint__keep=0,
    )  # fmt: skip


def list_jobs(folder: Path, whole: bool) -> dict[str, Any]:
    plain = plain_tree(folder)
    drop = change(
        plain, model__layers=4, train__micro_batches=4,
        techniques__layer_drop={"theta": 0.3, "schedule": "constant", "index": "text"},
    )  # fmt: skip
    stop = change(plain, train__non_finite="stop", train__log_every=5)
    jobs: dict[str, Any] = {
        f"{mode} {kind} {value}": {
            "config": change(plain, **MODES[mode]),
            "faults": [(kind, 1, [BAD], VALUES[value])],
        }
        for mode, kind, value in list_cases(whole)
    }
    after, loss = [("after the sum", 1, [BAD], math.nan)], [("loss", 1, [BAD], math.nan)]
    static: dict[str, Any] = {
        "config": change(plain, **STATIC),
        "static": True,
        "faults": [("after the static sum", 1, [BAD], math.inf)],
    }
    jobs |= {
        "static": static,
        "pipeline": {
            "config": change(plain, parallel__pipeline=2, model__layers=4, model__dropout=0.0),
            "faults": [("pipeline loss", rank, [BAD], math.nan) for rank in (0, 1)],
        },
        "healthy": {"config": change(plain)},
        "static, healthy": {"config": change(plain, **STATIC), "static": True},
        "fused, healthy": {"config": change(plain, **STATIC)},
        "stop loss": {"config": change(stop), "faults": loss},
        "stop after the sum": {"config": change(stop), "faults": after},
        "each for itself": {"config": change(plain), "faults": after, "off": ["agreement"]},
        "static, each for itself": static | {"config": change(plain, **STATIC), "off": ["static agreement"]},
        "no doubt": {"config": change(plain), "faults": loss, "off": ["doubt"]},
        "bit, compared": {"config": change(plain, train__compare_every=2), "faults": [("bit", 1, [BAD], 0.0)]},
        "bit, saved": {
            "config": change(plain, train__compare_every=0, checkpoint__keep=2, checkpoint__every=2),
            "faults": [("bit", 1, [BAD], 0.0)],
        },
        "bit, unseen": {"config": change(plain, train__compare_every=0), "faults": [("bit", 1, [BAD], 0.0)]},
        "drop": {"config": change(drop)},
        "drop by rank": {"config": change(drop), "off": ["common choice", "sum"]},
    }
    return jobs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> Path:
    folder = tmp_path_factory.mktemp("guards")
    launch(list_jobs(folder, whole), folder / "two", 2, module=MODULE)
    return folder / "two"


def results(runs: Path, name: str, processes: int = 2) -> list[dict[str, Any]]:
    return [json.loads((runs / f"{name}.{rank}.json").read_text()) for rank in range(processes)]


def unchanged(runs: Path, name: str) -> list[list[int]]:
    """The steps that left every bit of weights and moments as it was, by process."""
    return [[i for i, (old, new) in enumerate(each["states"]) if old == new] for each in results(runs, name)]


def cancelled(runs: Path, name: str) -> list[int]:
    return [event["cancelled"] for event in read_events(runs / name) if "loss" in event]


@pytest.mark.fault("N1")
def test_no_process_applies_what_is_not_finite_in_one(runs: Path, whole: bool, tally: Tally) -> None:
    for name in [" ".join(case) for case in list_cases(whole)] + ["static", "pipeline"]:
        assert unchanged(runs, name) == [[BAD], [BAD]], name
        assert [each["code"] for each in results(runs, name)] == [0, 0], name
        assert cancelled(runs, name) == [0, 0, 0, 1, 1, 1], name
        tally("faults in one of two processes", 1)


@pytest.mark.control("N1")
@pytest.mark.parametrize("name", ["each for itself", "static, each for itself"])
def test_processes_that_judge_alone_part(runs: Path, name: str) -> None:
    assert unchanged(runs, name) == [[], [BAD]]


@pytest.mark.control("N1")
def test_a_loss_that_nobody_doubts_is_applied(runs: Path) -> None:
    assert unchanged(runs, "no doubt") == [[], []]


@pytest.mark.fault("N1")
def test_the_error_names_rank_step_and_samples(runs: Path) -> None:
    for name, what in (("stop loss", "loss"), ("stop after the sum", "gradient")):
        for each in results(runs, name):
            assert each["code"] == 6
            assert f"the {what} of rank 1 was not finite" in each["message"]
            assert f"the last at step {BAD + 1} (micro-batch {2 * BAD + 1}: samples " in each["message"]
        assert unchanged(runs, name) == [[BAD], [BAD]]


@pytest.mark.fault("N1")
def test_a_healthy_run_is_not_changed_by_what_is_looked_at_in_between(runs: Path) -> None:
    """Where gradients stay in place, what is exchanged adds nothing to them; and replicas keep the same bits."""
    for name in ("healthy", "static, healthy"):
        one, two = results(runs, name)
        assert unchanged(runs, name) == [[], []] and one["states"] == two["states"]
    before, after = results(runs, "fused, healthy")[0], results(runs, "static, healthy")[0]
    assert before["states"][0] == after["states"][0]


# Replicas.


@pytest.mark.fault("N6")
def test_one_changed_bit_is_found(runs: Path) -> None:
    name = "decoder.blocks.1."
    for job, step in (("bit, compared", 4), ("bit, saved", 4)):
        for each in results(runs, job):
            assert each["code"] == 6
            assert f"at step {step} processes that must have the same weights have not: 1 of " in each["message"]
            assert name in each["message"] and "(ranks 0, 1 differ)" in each["message"]
    assert checkpoint.steps(runs / "bit, saved" / "checkpoints") == [2]


@pytest.mark.control("N6")
def test_without_comparison_nobody_notices(runs: Path) -> None:
    one, two = results(runs, "bit, unseen")
    assert (one["code"], two["code"]) == (0, 0) and one["states"][BAD + 1] != two["states"][BAD + 1]


@pytest.mark.fault("N6")
def test_the_majority_is_believed() -> None:
    assert describe_difference({0: 7, 1: 7, 2: 7}) == ""
    assert describe_difference({0: 7, 1: 8, 2: 7}) == "rank 1 differs from the others"
    assert describe_difference({0: 7, 2: 8}) == "ranks 0, 2 differ"


@pytest.mark.fault("N6")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("size", [1, 5, 65536, 70001, 200000])
def test_the_hash_tells_every_bit_and_every_place(dtype: torch.dtype, size: int, whole: bool, tally: Tally) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    tensor = (values > 0) if dtype == torch.bool else values.to(dtype)
    known, seen = int(hash_bits(tensor)), set()
    bits = 1 if dtype == torch.bool else 8 * tensor.element_size()
    for i in range(200 if whole else 20):
        place = i * 7919 % size
        changed = tensor.clone()
        byte = changed.view(torch.uint8)[place * tensor.element_size() + i % bits // 8 :][:1]
        byte ^= 1 << (i % bits % 8)
        seen.add(int(hash_bits(changed)))
        assert int(hash_bits(changed)) != known
        other = (place + 1 + i) % size
        swapped = tensor.clone()
        swapped[place], swapped[other] = tensor[other], tensor[place]
        assert (int(hash_bits(swapped)) == known) == torch.equal(swapped, tensor)
        tally("bits changed and elements exchanged", 2)
    assert len(seen) > 1 or size == 1 or dtype == torch.bool
    assert int(hash_bits(tensor.clone())) == known and int(hash_bits(tensor[:0])) == 0


@pytest.mark.control("N6")
def test_a_plain_sum_tells_no_places() -> None:
    tensor = torch.randn(100)
    assert tensor.view(torch.int32).sum() == tensor.flip(0).view(torch.int32).sum()
    assert hash_bits(tensor) != hash_bits(tensor.flip(0))


# Layers that are dropped.


def compare_blocks(runs: Path, name: str) -> bool:
    """Whether all micro-batches of a step, of both processes, were worked on by the same blocks, as planned."""
    same = True
    for one, two in zip(
        *(zip(each["planned"], each["worked"], strict=True) for each in results(runs, name)), strict=True
    ):
        plans = [plan for planned, _ in (one, two) for plan in planned]
        same &= all(plan == plans[0] for plan in plans)
        same &= all(worked == [block for plan in planned for block in plan] for planned, worked in (one, two))
    return same


@pytest.mark.fault("G2")
def test_layers_are_dropped_alike_in_all_processes(runs: Path) -> None:
    one = results(runs, "drop")[0]
    assert compare_blocks(runs, "drop") and len({str(plan) for plan in one["planned"]}) > 1
    assert any(len(worked) < 4 * 2 for worked in one["worked"])


@pytest.mark.control("G2")
def test_layers_chosen_by_rank_are_others(runs: Path) -> None:
    assert not compare_blocks(runs, "drop by rank")


# The same run twice, in fresh processes.


def list_twins(folder: Path, fused: bool) -> dict[str, Any]:
    tree = change(plain_tree(folder), techniques__fused=fused, train__steps=4)
    if fused:  # in the interpreter each program takes milliseconds
        tree = change(
            tree, train__steps=2, train__micro_batches=1, data__seq_len=8, data__batch_size=2, model__layers=1,
            model__width=16, model__heads=1,
        )  # fmt: skip
    return {"run": {"config": tree}, "by chance": {"config": change(tree), "off": ["seeds"]}}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> dict[str, list[Path]]:
    """Pairs of launches: one process; two; and one with kernels, in Triton's interpreter where there is Triton."""
    folder = tmp_path_factory.mktemp("twins")
    interpreter = {"TRITON_INTERPRET": "1"} if triton is not None else {}
    ways = {"one": (1, False, {}), "two": (2, False, {}), "kernels": (1, True, interpreter)}
    base(folder)  # the corpus, before anyone reads it

    def start(name: str, number: int) -> Path:
        processes, fused, variables = ways[name]
        path = folder / f"{name}-{number}"
        launch(list_twins(folder, fused), path, processes, variables, MODULE)
        return path

    chosen = list(ways) if whole else ["one"]
    with ThreadPoolExecutor(2) as pool:
        started = {name: [pool.submit(start, name, number) for number in (1, 2)] for name in chosen}
        return {name: [each.result() for each in pair] for name, pair in started.items()}


@pytest.mark.fault("G1")
def test_the_same_run_twice_has_the_same_bits(twins: dict[str, list[Path]]) -> None:
    for name, (one, two) in twins.items():
        processes = 2 if name == "two" else 1
        assert results(one, "run", processes) == results(two, "run", processes), name
        losses = [[e["loss"] for e in read_events(folder / "run") if "loss" in e] for folder in (one, two)]
        assert losses[0] == losses[1] and len(losses[0]) >= 2


@pytest.mark.control("G1")
def test_dropout_without_a_seed_is_another_run(twins: dict[str, list[Path]]) -> None:
    for one, two in twins.values():
        assert results(one, "by chance", 1)[0]["states"] != results(two, "by chance", 1)[0]["states"]
