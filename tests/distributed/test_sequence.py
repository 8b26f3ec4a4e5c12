"""Processes that share sequences (gloo, 2 and 4 of them) compute what one computes: logits, gradients, updates; with as
many messages, and as many elements in them, as the formulas say. Mistakes that are planted are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_module

pytestmark = pytest.mark.dist
Found = list[dict[str, Any]]  # by process
LAYERS, TOKENS, WIDTH, HEAD_SIZE = 3, 256, 64, 16  # of the model whose messages are counted; it has P key heads


def run_cases(folder: Path, processes: int) -> Found:
    run_module("tests.distributed.sequence_cases", processes, folder / "log", str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_cases(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_cases(tmp_path_factory.mktemp("four"), 4)


def test_every_mask_layout_and_kind_of_model(two: Found, four: Found) -> None:
    for found, cases in ((two, 5 * 3 * 2 * 2 + 4 * 3 + 5 * 3), (four, 8)):
        for rank in found:
            wrong = {name: errors for name, errors in rank["grid"].items() if max(errors.values()) > 1e-13}
            assert wrong == {} and len(rank["grid"]) == cases


@pytest.mark.parametrize(("dtype", "logits", "gradients"), [("float64", 1e-14, 1e-13), ("float32", 1e-6, 1e-5)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_forward_and_gradients(two: Found, layout: str, dtype: str, logits: float, gradients: float) -> None:
    for rank in two:
        errors = rank["forward_and_gradients"][f"{layout} {dtype}"]
        assert errors["logits"] <= logits and errors["gradients"] <= gradients


def test_what_takes_less_memory_changes_nothing(two: Found) -> None:
    for rank in two:
        assert len(rank["memory_modes"]) == 4
        for errors in rank["memory_modes"].values():
            assert errors["logits"] <= 1e-14 and errors["gradients"] <= 1e-13


@pytest.mark.parametrize("processes", [2, 4])
def test_messages_are_those_of_the_formulas(two: Found, four: Found, processes: int) -> None:
    """Elements that a process sends in a layer, forward and backward, with c = (P - 1) / P."""
    c, heads = (processes - 1) / processes, processes
    keys = TOKENS * heads * HEAD_SIZE  # of one layer, in all processes
    volumes = {
        "gather": 4 * c * keys,
        "again": 6 * c * keys,
        "streamed": 4 * c * keys,
        "ring": 6 * c * keys,
        "ulysses": c * (4 * TOKENS * WIDTH + 4 * keys) / processes,
    }
    numbers = {
        "gather": {"gathers": 1, "scatters": 1},
        "again": {"gathers": 2, "scatters": 1},
        "streamed": {"gathers": heads, "scatters": heads},
        "ring": {"hops": 3 * (processes - 1)},
        "ulysses": {"exchanges": 6},
    }
    for rank in two if processes == 2 else four:
        for way, wanted in numbers.items():
            found = rank["messages"][way]
            assert {key: found.get(key, 0) for key in wanted} == {key: LAYERS * n for key, n in wanted.items()}
            assert sum(n for key, n in found.items() if key.endswith("elements")) == LAYERS * volumes[way], way
            if way != "ring":  # what torch itself has counted, which are no messages between two
                assert found["all messages"] == LAYERS * sum(wanted.values())


def test_weights_may_be_split_too(two: Found, four: Found) -> None:
    """Over all processes; and over those of a sequence, with a copy for each of two groups. Two micro-batches, in one
    group one after the other."""
    for rank in two:
        assert rank["sharded"]["gradients"] <= 1e-14
    for rank in four:
        assert rank["flat"]["gradients"] <= 1e-14 and rank["hybrid"]["gradients"] <= 1e-14


def test_rows_of_learned_positions_have_the_right_scale(two: Found) -> None:
    for rank in two:
        found = rank["positions"]
        assert found["sum"] <= 1e-15 and found["elsewhere"] == 0.0
        assert found["ratio"] == pytest.approx(2.0, rel=1e-12)


def test_labels_may_be_spread_unevenly(two: Found) -> None:
    assert [rank["uneven_labels"]["labels"] for rank in two] == [10, 38]
    for rank in two:
        assert rank["uneven_labels"]["sum"] <= 1e-13
        assert rank["uneven_labels"]["mean of means"] > 0.1, "the control: this is not how to do it"


def test_planted_mistakes_are_seen(two: Found) -> None:
    for rank in two:
        errors = dict(rank["planted_mistakes"])
        assert errors.pop("none") <= 1e-13
        assert len(errors) == 7 and min(errors.values()) > 0.1, errors


@pytest.mark.parametrize(
    ("steps", "bound"),
    [("sgd float64", 1e-14), ("sgd float32", 1e-5), ("adamw float64", 1e-11), ("adamw float32", 1e-4)],
)
def test_twenty_updates(two: Found, steps: str, bound: float) -> None:
    for rank in two:
        assert rank["steps"][steps]["weights"] <= bound
        assert rank["steps"][steps]["moved"] > 0.1


def test_attention_drops_by_place(two: Found) -> None:
    for rank in two:
        assert max(rank["dropped_attention"].values()) <= 1e-13


def test_gradients_of_keys_are_summed_in_fp32(two: Found) -> None:
    for rank in two:
        found = rank["half_precision"]
        assert found["types"] == ["torch.float32"]
        assert found["shared"] <= 2 * found["alone"]
