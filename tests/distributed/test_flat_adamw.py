"""The flat AdamW over weights that are split between two real processes (gloo, FSDP2) is the one of a single process,
bit for bit: both processes see the same data, so that averaged gradients are exactly those of one.

This file is also what each process runs:
    python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.test_flat_adamw OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stretto import checkpoint
from stretto.checkpoint import drafts
from stretto.config import FusedConfig, OptimConfig
from stretto.optim import clip_gradients, weight_writer
from tests.distributed.processes import run_module
from tests.models import build_adamw
from tests.runs import PATIENCE_S

pytestmark = pytest.mark.dist
WAYS = {
    f"{weights}-{moments}": FusedConfig(weights=weights, moments=moments)  # type: ignore[arg-type]
    for weights, moments in product(("fp32", "split", "bf16"), ("fp32", "bf16"))
}
SHAPES = {"even": (40, 6), "uneven": (41, 5), "row": (1, 7), "vector": (3,)}  # the second process has no part of `row`


def noise(step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    seed = 100 * step + list(SHAPES).index(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


class Net(nn.Module):
    """Its loss is linear: the gradients of step i are noise(i)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))

    def forward(self, step: int, spoil: bool) -> Tensor:
        factors = {name: noise(step, name, shape) for name, shape in SHAPES.items()}
        if spoil:
            factors["uneven"][40, 3] = torch.inf  # the second process's part
        return torch.stack([(p.float() * factors[name]).sum() for name, p in self.named_parameters()]).sum()


def versions(model: nn.Module) -> list[int]:
    """The versions of the parameters, and of the shards that this process has."""
    parameters = list(model.parameters())
    return [p._version for p in (*parameters, *(p._local_tensor for p in parameters if isinstance(p, DTensor)))]


class Training:
    def __init__(self, way: FusedConfig) -> None:
        self.model: Any = Net(torch.float32 if way.weights == "fp32" else torch.bfloat16)
        if dist.is_initialized():
            fully_shard(self.model)
        self.model.to_empty(device="cpu")
        self.optimizer: Any = build_adamw(self.model, OptimConfig(lr=1e-2), way, seed=4)
        write = weight_writer(self.optimizer)
        for name, parameter in self.model.named_parameters():
            write(parameter, noise(99, name, SHAPES[name]) * 0.1234567)

    def run(self, first: int, last: int, spoil: int = -1) -> Training:
        for step in range(first, last):
            self.model(step, step == spoil).backward()
            norm = clip_gradients(self.model, self.optimizer, 1.0)
            assert bool(norm.isfinite()) == (step != spoil)
            before = versions(self.model)
            self.optimizer.step()
            assert versions(self.model) == [version + 1 for version in before], "autograd has heard of it"
            self.optimizer.zero_grad()
        return self

    def shot(self, step: int) -> checkpoint.Snapshot:
        state, is_main = {"step": step, "best_step": 0}, not dist.is_initialized() or dist.get_rank() == 0
        return checkpoint.snapshot(self.model, self.optimizer, state, saves=lambda name: is_main)

    def resume(self, shot: checkpoint.Stored) -> Training:
        checkpoint.restore_weights(self.model, shot, weight_writer(self.optimizer))
        checkpoint.restore_moments(self.model, self.optimizer, shot)
        return self


def save_together(folder: Path, shot: checkpoint.Snapshot) -> None:
    """Every process writes its own rows; the main process publishes."""
    draft, parts = drafts.name_draft(folder, shot.state["step"], "0" * 32), dist.get_world_size()
    drafts.write_part(draft, shot, dist.get_rank(), parts)
    dist.barrier()
    if dist.get_rank() == 0:
        drafts.publish(draft, shot.state, keep=1, parts=parts)


def deal_out_again(out: Path) -> None:
    """Loads what other processes have saved, and saves it, as many as there are now."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    for name, way in WAYS.items():
        stored = checkpoint.open_stored(out / "whole" / name, 6)
        save_together(out / f"dealt to {dist.get_world_size()}" / name, Training(way).resume(stored).shot(6))
    dist.destroy_process_group()


def main(out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    sizes = {}
    for name, way in WAYS.items():
        training = Training(way)
        sizes = {key: p.to_local().numel() for key, p in training.model.named_parameters()}
        shots = {
            "whole": training.run(0, 6, spoil=2).shot(6),
            "resumed": Training(way).resume(checkpoint.open_stored(out / "one" / name, 3)).run(3, 6).shot(6),
        }
        for kind, shot in shots.items():
            save_together(out / kind / name, shot)
    (out / f"sizes.{dist.get_rank()}.json").write_text(json.dumps(sizes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat")
    for name, way in WAYS.items():
        checkpoint.save(folder / "one" / name, Training(way).run(0, 3, spoil=2).shot(3), keep=1)
    for processes, action in ((2, "main"), (4, "deal_out_again")):
        run_module("tests.distributed.test_flat_adamw", processes, folder / f"{action}.log", action, str(folder))
    return folder


@pytest.mark.parametrize("kind", ["whole", "resumed"])
@pytest.mark.parametrize("name", WAYS)
def test_two_processes_equal_one(runs: Path, name: str, kind: str) -> None:
    """Through an update that is cancelled because of one process's part; and from a checkpoint of a single process."""
    one, two = Training(WAYS[name]).run(0, 6, spoil=2).shot(6), checkpoint.load(runs / kind / name, 6)
    for mine, theirs in ((one.weights, two.weights), (one.moments, two.moments)):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(theirs[key], value), key
    assert one.moments["step/row"] == 5.0
    other = Training(WAYS[name]).run(0, 6).shot(6)  # the control: nothing was cancelled
    assert not torch.equal(other.weights["even"], two.weights["even"])


def test_parts_are_uneven_and_one_is_empty(runs: Path) -> None:
    sizes = [json.loads((runs / f"sizes.{rank}.json").read_text()) for rank in (0, 1)]
    assert [size["uneven"] for size in sizes] == [105, 100] and [size["row"] for size in sizes] == [7, 0]


@pytest.mark.parametrize("name", WAYS)
def test_what_two_processes_saved_is_dealt_out_to_one_and_to_four(runs: Path, name: str) -> None:
    """Bit for bit, and in each process only what it needs: of two that saved, and of four, each has a part."""
    two, four = runs / "whole" / name, runs / "dealt to 4" / name
    saved = checkpoint.load(two, 6)
    alone = Training(WAYS[name]).resume(checkpoint.open_stored(two, 6)).shot(6)
    for found in (
        checkpoint.load(four, 6),
        alone,
        Training(WAYS[name]).resume(checkpoint.open_stored(four, 6)).shot(6),
    ):
        for mine, theirs in ((saved.weights, found.weights), (saved.moments, found.moments)):
            assert mine.keys() == theirs.keys() and all(torch.equal(theirs[key], mine[key]) for key in mine)
    for folder, parts in ((two, 2), (four, 4)):
        files = sorted(path.name for path in (folder / "step-00000006").glob("model*"))
        assert files == [f"model-{i:05d}-of-{parts:05d}.safetensors" for i in range(1, parts + 1)]
        sizes = [path.stat().st_size for path in (folder / "step-00000006").glob("optimizer*")]
        assert max(sizes) < 0.8 * sum(sizes), "nobody has it all"


if __name__ == "__main__":
    {"main": main, "deal_out_again": deal_out_again}[sys.argv[1]](Path(sys.argv[2]))
