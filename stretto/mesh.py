"""The processes of a run as a grid. One axis shares the batch out (data); processes along the others work on the same
samples together. The grid is made once, from `[parallel]`, and never changes.

Neighbouring ranks lie along the last axis, since they have the faster links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.config import ParallelConfig
from stretto.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    rank: int = 0
    world: int = 1  # processes
    axes: tuple[tuple[str, int], ...] = ()  # name and size of each axis besides data
    grid: DeviceMesh | None = None  # (data, *axes); None: data is the only axis
    peers: dist.ProcessGroup | None = None  # those who together have all tokens of a batch, each once; None: all

    @property
    def team(self) -> int:
        """The number of processes that read the same samples."""
        return prod(size for _, size in self.axes)

    @property
    def data_rank(self) -> int:
        """The place along the data axis."""
        return self.rank // self.team

    @property
    def data_world(self) -> int:
        """The size of the data axis."""
        return self.world // self.team

    def describe_teams(self) -> str:
        """The words for what shares the batch out."""
        if self.team == 1:
            return "processes"
        return f"groups of {' x '.join(f'parallel.{name} = {size}' for name, size in self.axes)} processes"


def build_mesh(cfg: ParallelConfig, device: torch.device, rank: int, world: int) -> Mesh:
    axes = tuple((name, size) for name, size in cfg.axes().items() if size > 1)
    mesh = Mesh(rank, world, axes)
    if world % mesh.team:
        keys = " x ".join(f"parallel.{name} = {size}" for name, size in axes)
        raise ConfigError(
            f"{keys} needs a multiple of {mesh.team} processes, and there "
            f"{'is 1' if world == 1 else f'are {world}'}: start them by `stretto launch -n {mesh.team} ...`, or "
            f"lower parallel.{axes[0][0]}"
        )
    if not axes:
        return mesh
    names, sizes = ("data", *(name for name, _ in axes)), (mesh.data_world, *(size for _, size in axes))
    grid = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return Mesh(rank, world, axes, grid, _find_peers(grid, names, cfg.find_repeated(), rank))


def _find_peers(grid: DeviceMesh, names: Sequence[str], repeated: Sequence[str], rank: int) -> dist.ProcessGroup | None:
    if not set(names) & set(repeated):
        return None
    others = [axis for axis, name in enumerate(names) if name not in repeated]
    ranks = grid.mesh.permute(*(axis for axis in range(len(names)) if axis not in others), *others)
    rows = ranks.reshape(-1, prod(ranks.shape[-len(others) :])).tolist()
    groups = [dist.new_group(row) for row in rows]  # every process has to make all of them
    return next(group for group, row in zip(groups, rows, strict=True) if rank in row)
