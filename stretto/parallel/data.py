"""Data parallelism: every process works on other samples and gradients are averaged.

`shard` splits weights, gradients and moments over the processes and gathers each block just before it is used (FSDP2).
`replicate` keeps a whole copy of the model in each process (DistributedDataParallel). With one process both leave the
model as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from stretto.config import ParallelConfig


def shard(
    model: nn.Module, cfg: ParallelConfig, blocks: list[str], device: torch.device, precision: torch.dtype
) -> bool:
    """Splits a model that is still on the meta device, if asked to; its parameters become DTensors under their old
    names. Says whether it did."""
    if cfg.data != "shard" or not dist.is_initialized():
        return False
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
