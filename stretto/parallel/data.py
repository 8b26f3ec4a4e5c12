"""Data parallelism: every process works on other samples, or on other tokens of them, and gradients are averaged.

The batch of an update is the same on any number of processes: `deal` says which part of it is a process's.

`shard` splits weights, gradients and moments over the processes and gathers each block just before it is used (FSDP2).
`replicate` keeps a whole copy of the model in each process (DistributedDataParallel). With one process both leave the
model as it is. Where processes share sequences (sequence.py), weights may be split over those of one sequence only,
with a copy for each group of them: gradients are then averaged inside a group and between groups.

`StaticGradients` do what `replicate` does, for a model that stays bare: gradients are summed when the backward passes
are done, so that these passes can be recorded as CUDA graphs. `PresentGradients` do so for a model of which every step
uses a part: what has no gradient is not sent, and stays without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from stretto.config import ParallelConfig

ALIGN = 16  # elements: each gradient begins at a multiple, so that vector loads apply


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
    groups: DeviceMesh | None = None,
) -> bool:
    """Splits a model that is still on the meta device, if asked to; its parameters become DTensors under their old
    names. `groups` is the mesh of processes that share sequences. Says whether it did."""
    if not will_shard(cfg):
        return False
    if cfg.data == "hybrid" and groups is not None:
        mesh = groups  # copies along its first axis, parts along its second
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    # Weights travel in the precision they are used in; gradients are summed in fp32.
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for name in blocks:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "logits")  # evaluation calls it directly
    return True


def replicate(model: nn.Module) -> nn.Module:
    """The wrapper that averages gradients while the backward pass runs; the model inside stays as it is."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


@contextmanager
def gradient_sync(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients travel between processes once a step, with its last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


class StaticGradients:
    """Gradients that stay where they are from step to step: parts of one flat tensor for each dtype, which backward
    passes add into. Processes then need one message for all of them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.flats: list[Tensor] = []

    def settle(self) -> None:
        """After each backward pass. What the very first one has made moves into place; parameters that got nothing then
        are taken to be unused, and never get a place."""
        if self.flats:
            return
        grads: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for p in self.parameters:
            if p.grad is not None:
                grads[p.grad.dtype].append((p, p.grad))
        for members in grads.values():
            sizes = [-(-grad.numel() // ALIGN) * ALIGN for _, grad in members]
            flat = members[0][1].new_zeros(sum(sizes))
            for (p, grad), end, size in zip(members, accumulate(sizes), sizes, strict=True):
                place = flat[end - size :][: grad.numel()].view(grad.shape)
                p.grad = place.copy_(grad)
            self.flats.append(flat)

    def sum_over_processes(self) -> None:
        if dist.is_initialized():
            for flat in self.flats:
                dist.all_reduce(flat)

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def release(self) -> None:
        """Gradients are again what autograd makes of them."""
        for p in self.parameters:
            p.grad = None
        self.flats = []


class PresentGradients(StaticGradients):
    """Gradients of the parameters that a step has used, the same ones in all processes, gathered when it is over."""

    def settle(self) -> None:
        """They stay where autograd has made them until they are summed."""

    def sum_over_processes(self) -> None:
        super().settle()
        super().sum_over_processes()

    def zero(self) -> None:
        self.release()
