"""Layer dropping in two real processes (gloo): they draw alike, learn what one learns, and send what was used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from tests.corpora import write_pairs
from tests.distributed.processes import launch
from tests.runs import base, change, eval_losses, losses

pytestmark = pytest.mark.dist
STEPS, BLOCKS = 8, 4
NAMES = [f"{gate}-{fused}" for gate in ("batch", "sample") for fused in ("plain", "fused")] + ["translation"]


def trees(folder: Path) -> dict[str, dict[str, Any]]:
    """Two micro-batches for each of two processes, with dropout; blocks are left out from the first step on."""
    plain = change(base(folder), model__layers=BLOCKS, optim__eps=1e-4)
    drop = {"theta": 0.3, "schedule": "constant", "index": "text"}
    found = {
        f"{gate}-{fused}": change(
            plain, techniques__layer_drop=drop | {"gate": gate}, techniques__fused=fused == "fused"
        )
        for gate in ("batch", "sample")
        for fused in ("plain", "fused")
    }
    found["translation"] = change(
        found["batch-fused"], data__task="translation", data__train=str(write_pairs(folder / "pairs")),
        data__languages=["xx", "yy"], data__max_tokens=64, data__held_out=0.2, data__seq_len=64,
        model__kind="encoder-decoder", model__max_len=64,
    )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layer_drop")
    one = trees(folder)
    launch({name: {"config": change(tree)} for name, tree in one.items()}, folder / "one", 1)
    two = {f"{name}-{mode}": change(tree, parallel__data=mode) for name, tree in one.items() for mode in MODES}
    launch({name: {"config": tree} for name, tree in two.items()}, folder / "two", 2)
    return folder


MODES = ("replicate", "shard")


def results(runs: Path, name: str, rank: int = 0) -> Any:
    return json.loads((runs / f"{name}.{rank}.json").read_text())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_learn_what_one_does(runs: Path, name: str, mode: str) -> None:
    one, two = runs / "one" / name, runs / "two" / f"{name}-{mode}"
    assert len(losses(one)) == STEPS and losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert eval_losses(two) == pytest.approx(eval_losses(one), abs=1e-5)
    first, second = (checkpoint.load(folder / "checkpoints", STEPS) for folder in (one, two))
    torch.testing.assert_close(second.moments, first.moments, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("sample")])
def test_blocks_are_the_same_for_all_micro_batches_of_a_step(runs: Path, name: str, mode: str) -> None:
    """Whatever the process, and though each one seeds its generators otherwise after every step."""
    found: dict[int, set[str]] = {}
    for rank in (0, 1):
        for index, blocks in results(runs / "two", f"{name}-{mode}", rank)["blocks"].items():
            found.setdefault(int(index) // 4, set()).add(json.dumps(blocks))
    assert len(found) == STEPS and all(len(patterns) == 1 for patterns in found.values())
    assert len(set.union(*found.values())) > 2
    assert results(runs / "one", name)["blocks"].keys() == {str(i) for i in range(4 * STEPS)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", ["plain", "fused"])
def test_messages_are_those_of_the_blocks_that_worked(runs: Path, fused: str, mode: str) -> None:
    """Each more costs as much as any other; what is left is for the rest of the model."""
    result = results(runs / "two", f"batch-{fused}-{mode}")
    worked = [len(result["blocks"][str(4 * step)][0]) for step in range(STEPS)]
    sizes = {count: {result["sent"][step] for step in range(STEPS) if worked[step] == count} for count in set(worked)}
    assert len(sizes) > 1 and all(len(found) == 1 for found in sizes.values()), sizes
    (fewest, few), (most, many) = ((count, sizes[count].pop()) for count in (min(sizes), max(sizes)))
    weights = checkpoint.load(runs / "one" / f"batch-{fused}" / "checkpoints", STEPS).weights
    block = sum(value.numel() for name, value in weights.items() if name.startswith("decoder.blocks.0."))
    travels = (
        (many - few) / (most - fewest) / block
    )  # gradients once; sharded weights with each pass of two batches too
    assert travels == pytest.approx(1 if mode == "replicate" else 5, rel=0.05)
    full = results(runs / "two", f"sample-{fused}-shard")["sent"]
    assert len(set(full)) == 1
