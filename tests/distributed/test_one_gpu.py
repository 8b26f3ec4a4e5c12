"""NCCL, DistributedDataParallel and FSDP2 on a GPU, in a group of one: the same code that many GPUs run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from stretto.report import read_events
from stretto.train import train
from tests.runs import MakeConfig

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(make_config: MakeConfig, folder: Path, **changes: object) -> list[float]:
    config = make_config(
        run__device="cuda",
        train__precision="bf16",
        run__dir=str(folder),
        model__dropout=0.0,
        techniques__fused=False,
        **changes,
    )
    return [event["loss"] for event in read_events(train(config)) if "loss" in event]


@pytest.fixture
def plain(make_config: MakeConfig, tmp_path: Path) -> list[float]:
    """Asked for before the group exists."""
    return losses(make_config, tmp_path / "plain")


@pytest.mark.parametrize("mode", ["replicate", "shard"])
@pytest.mark.parametrize("compiled", [False, True])
def test_wrapped_models_train_like_the_plain_one(
    make_config: MakeConfig, tmp_path: Path, plain: list[float], group: None, mode: str, compiled: bool
) -> None:
    found = losses(make_config, tmp_path / mode, parallel__data=mode, train__compile=compiled)
    assert found == pytest.approx(plain, abs=0.02)  # bf16 noise: sharded weights are rounded before they are used
    assert found[-1] < found[0] - 0.5
