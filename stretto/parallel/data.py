"""Data parallelism: every process works on other samples, or on other tokens of them, and gradients are averaged.

The batch of an update is the same on any number of processes: `deal` says which part of it is a process's.

`shard` splits weights, gradients and moments over the processes and gathers each block just before it is used (FSDP2);
otherwise each process keeps a whole copy of the model. How gradients become one is in gradients.py. Where processes
work on the same samples together (mesh.py), weights may be split over such a team only, with a copy for each team:
gradients are then averaged inside a team and between teams.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stretto.config import ParallelConfig
from stretto.mesh import Mesh


@dataclass(frozen=True)
class Portion:
    """What a process takes of each update: some of its micro-batches, and of each of them one part."""

    micro_batches: int  # of an update, over all processes
    first: int  # of those that this process takes
    stride: int
    part: int
    parts: int  # processes that share a micro-batch; 1: each takes whole ones

    def find_micro_batches(self, step: int) -> range:
        begin = step * self.micro_batches
        return range(begin + self.first, begin + self.micro_batches, self.stride)


def deal(micro_batches: int, rank: int, world: int) -> Portion:
    """Whole micro-batches where they go round, else as few parts of each as will do: six micro-batches and four
    processes make two groups of two, and each group shares three micro-batches."""
    groups = gcd(micro_batches, world)
    size = world // groups
    return Portion(micro_batches, first=rank // size, stride=groups, part=rank % size, parts=size)


def will_shard(cfg: ParallelConfig) -> bool:
    return cfg.data != "replicate" and dist.is_initialized()


def shard(
    model: nn.Module,
    cfg: ParallelConfig,
    blocks: list[str],
    device: torch.device,
    precision: torch.dtype,
    mesh: Mesh,
) -> bool:
    """Splits a model that is still on the meta device, if asked to; its parameters become DTensors under their old
    names. Says whether it did."""
    if not will_shard(cfg):
        return False
    grid = mesh.grid  # copies along its first axis, parts along its second
    if cfg.data != "hybrid" or grid is None:
        grid = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    # Weights travel in the precision they are used in; gradients are summed in fp32.
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for name in blocks:
        fully_shard(model.get_submodule(name), mesh=grid, mp_policy=policy)
    fully_shard(model, mesh=grid, mp_policy=policy)
    return True
