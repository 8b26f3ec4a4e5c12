"""The batch of an update belongs to the recipe: with nothing said about processes, 1, 2 and 4 of them (gloo) take the
same samples in every update and reach the same losses, and a run goes on with another number of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.config import build_config
from stretto.data import open_data
from stretto.parallel.data import deal
from tests.corpora import write_images, write_pairs
from tests.distributed.processes import launch
from tests.runs import base, change, eval_losses, losses

pytestmark = pytest.mark.dist
STEPS = 6
WORLDS = (1, 2, 4)
SAME = [
    "causal", "translation", "images", "mixed", "masked", "instruct", "classes", "three", "shard", "fused", "sequence",
]  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples"


def trees(folder: Path) -> dict[str, dict[str, Any]]:
    """Without dropout, whose masks depend on who shares a micro-batch; `three` alone says how many micro-batches."""
    causal = change(base(folder), train__steps=STEPS, model__dropout=0.0, data__batch_size=6, optim__eps=1e-4)
    causal = change(causal, optim__schedule="constant")  # a run that is longer is then the same run
    del causal["train"]["micro_batches"]
    translation = change(
        causal, data__task="translation", data__train=str(write_pairs(folder / "pairs")), data__languages=["xx", "yy"],
        data__max_tokens=100, data__held_out=0.2, data__seq_len=64, model__kind="encoder-decoder", model__max_len=64,
    )  # fmt: skip
    images = change(
        causal, data__task="images", data__train=str(write_images(folder / "images.npz")), data__held_out=0.2,
        model__kind="vit", model__image_size=16, model__patch=4,
    )  # fmt: skip
    drop = {"theta": 0.5, "gate": "sample"}
    return {
        "causal": causal,
        "translation": translation,
        "images": images,
        "mixed": change(
            images,
            data__batch_size=7,  # pairs that are mixed are divided among processes, and among updates
            data__aa="rand-m9-mstd0.5-inc1",
            data__reprob=0.5,
            data__mixup=0.8,
            data__cutmix=1.0,
        ),
        "masked": change(causal, data__task="masked", model__kind="encoder"),
        "instruct": change(
            causal,
            data__task="instruct",
            data__train=str(EXAMPLES / "chat.jsonl"),
            data__held_out=0.2,
            data__seq_len=128,
            model__max_len=128,
        ),
        "classes": change(
            causal,
            data__task="classification",
            data__train=str(EXAMPLES / "questions.csv"),
            data__held_out=0.2,
            model__kind="encoder",
        ),
        "three": change(causal, train__micro_batches=3),
        "shard": change(causal, parallel__data="shard"),
        "fused": change(translation, techniques__fused={}),
        "dropped": change(causal, techniques__layer_drop=drop, model__dropout=0.1),
        "standard": change(causal, techniques__standardize={"stride": 1}),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    found = trees(folder)
    legs = {name: found[name] for name in ("causal", "translation")}
    for processes, end, came_from in ((2, 2, 0), (1, 4, 2), (4, STEPS, 1)):
        jobs: dict[str, dict[str, Any]] = {name: {"config": change(tree)} for name, tree in found.items()}
        sequence = 2 if processes == 4 else 1  # two groups
        jobs["sequence"] = {"config": change(found["causal"], parallel__sequence=sequence)}
        jobs["few"] = {"config": change(found["causal"], data__batch_size=processes - 1 or 1)}
        for name, tree in legs.items():
            where = str(folder / "moving" / name)
            jobs[f"moving-{name}"] = {
                "config": change(tree, train__steps=end), "resume": bool(came_from), "folder": where,
            }  # fmt: skip
        launch(jobs, folder / str(processes), processes)
    return folder


def results(runs: Path, name: str, processes: int) -> list[dict[str, Any]]:
    return [json.loads((runs / str(processes) / f"{name}.{rank}.json").read_text()) for rank in range(processes)]


def samples_of_updates(runs: Path, name: str, processes: int, micro_batches: int = 1) -> dict[int, Counter[int]]:
    """How often each sample was read in each update, over all processes that do not share sequences."""
    found: dict[int, Counter[int]] = {}
    for result in results(runs, name, processes)[:: 2 if name == "sequence" and processes == 4 else 1]:
        for index, samples in result["samples"].items():
            found.setdefault(int(index) // micro_batches, Counter()).update(samples)
    return found


@pytest.mark.parametrize("processes", WORLDS[1:])
@pytest.mark.parametrize("name", SAME)
def test_the_run_is_the_same_on_any_number_of_processes(runs: Path, name: str, processes: int) -> None:
    many, micro_batches = runs / str(processes) / name, 3 if name == "three" else 1
    assert [result["code"] for result in results(runs, name, processes)] == [0] * processes
    wanted = samples_of_updates(runs, name, 1, micro_batches)
    assert len(wanted) == STEPS and samples_of_updates(runs, name, processes, micro_batches) == wanted
    assert list(losses(many)) == [*range(1, STEPS + 1)]
    assert losses(many) == pytest.approx(losses(runs / "1" / name), rel=1e-5)
    assert eval_losses(many) == pytest.approx(eval_losses(runs / "1" / name), rel=1e-5)
    first, second = (checkpoint.load(folder / "checkpoints", STEPS) for folder in (runs / "1" / name, many))
    assert first.state["tokens"] == second.state["tokens"]
    torch.testing.assert_close(second.moments, first.moments, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["causal", "translation"])
def test_a_run_moves_from_two_processes_to_one_and_to_four(runs: Path, name: str) -> None:
    legs = {processes: results(runs, f"moving-{name}", processes) for processes in (2, 1, 4)}
    assert all(result["code"] == 0 for leg in legs.values() for result in leg)
    read = [samples_of_updates(runs, f"moving-{name}", processes) for processes in legs]
    assert [sorted(leg) for leg in read] == [[0, 1], [2, 3], [4, 5]]
    assert read[0] | read[1] | read[2] == samples_of_updates(runs, name, 1), "none lost, none repeated"
    assert losses(runs / "moving" / name) == pytest.approx(losses(runs / "1" / name), rel=1e-5)


@pytest.mark.parametrize("processes", WORLDS[1:])
@pytest.mark.parametrize("name", ["dropped", "standard"])
def test_what_is_drawn_or_measured_by_part_still_trains_on_the_same_samples(
    runs: Path, name: str, processes: int
) -> None:
    """Subsets, dropout and statistics are those of a process's part."""
    assert samples_of_updates(runs, name, processes) == samples_of_updates(runs, name, 1)
    one, many = (losses(runs / str(number) / name) for number in (1, processes))
    assert many == pytest.approx(one, abs=0.2) and many[STEPS] < many[1]
    assert (many[1] == pytest.approx(one[1], rel=1e-6)) == (name == "standard"), "no loss but the task's is shown"


def test_a_batch_that_leaves_a_process_without_samples_is_refused_before_step_one(runs: Path) -> None:
    for processes in WORLDS[1:]:
        assert [(r["samples"], r["code"]) for r in results(runs, "few", processes)] == [({}, 3)] * processes
    assert results(runs, "few", 1)[0]["code"] == 0


def test_each_process_has_its_own_part(runs: Path) -> None:
    """The control of the first test: were all given everything, each sample would be read more often, and were one
    given everything, the others would have nothing."""
    parts = [[len(samples) for samples in result["samples"].values()] for result in results(runs, "causal", 4)]
    assert parts == [[size] * STEPS for size in (1, 2, 1, 2)]


@pytest.mark.parametrize("micro_batches", range(1, 9))
@pytest.mark.parametrize("world", range(1, 9))
def test_every_part_of_every_micro_batch_is_dealt_once(micro_batches: int, world: int) -> None:
    portions = [deal(micro_batches, rank, world) for rank in range(world)]
    dealt = [(i, portion.part) for portion in portions for i in portion.find_micro_batches(5)]
    numbers, parts = range(5 * micro_batches, 6 * micro_batches), portions[0].parts
    assert sorted(dealt) == [(i, part) for i in numbers for part in range(parts)]
    assert len({len(portion.find_micro_batches(5)) for portion in portions}) == 1, "all work at the same time"
    if micro_batches % world == 0:
        assert [(p.parts, p.find_micro_batches(0)) for p in portions] == [
            (1, range(rank, micro_batches, world)) for rank in range(world)
        ]


def test_a_process_without_a_pair_works_and_adds_nothing(tmp_path: Path) -> None:
    """The last sentences may make a batch of fewer pairs than there are processes."""
    tree = change(trees(tmp_path)["translation"], data__max_tokens=64)
    data = open_data(build_config(tree).data, seed=0, folder=tmp_path / "data")
    whole = data.train_batch(0)
    parts = [data.train_batch(0, part, len(whole.samples) + 1) for part in range(len(whole.samples) + 1)]
    assert [len(part.samples) for part in parts] == [1] * len(whole.samples) + [0]
    assert sorted(sample for part in parts for sample in part.samples) == sorted(whole.samples)
    for key in ("tokens", "labels", "pairs", "source_tokens", "source_pairs", "cross_pairs"):
        assert sum(getattr(part.counts, key) for part in parts) == getattr(whole.counts, key), key
    idle = parts[-1]
    assert bool((idle.labels == -100).all()) and idle.counts.padding == idle.counts.all_slots > 0
