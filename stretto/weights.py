"""The values of parameters: how they begin, and how whole tensors go into and come out of a model that may be sharded.

Each parameter is drawn on the CPU from its own generator, keyed by the seed and its name. So a model starts from the
same values on any device, with any number of processes, whole or sharded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stretto.config import ModelConfig

Write = Callable[[Tensor, Tensor], None]
Adjust = Callable[[str, Tensor], Tensor]


def initialise(model: nn.Module, cfg: ModelConfig, seed: int, write: Write, adjust: Adjust | None = None) -> None:
    """Gives all parameters their first values; `write` puts a whole fp32 value into one, as `put` does. `adjust` may
    change a value, given the name of its parameter."""
    for name, parameter in model.named_parameters():
        key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
        generator = torch.Generator().manual_seed(key)
        value = initial_value(cfg, name, parameter.shape, generator)
        write(parameter, value if adjust is None else adjust(name, value))


def initial_value(cfg: ModelConfig, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    value = torch.zeros(shape)
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return value
    if module.endswith("norm"):
        return value.fill_(1.0)
    if cfg.kind == "decoder":
        # As GPT-2: what adds to the residual stream does so 2 * layers times.
        adds = module.endswith(("attention.out", "mlp.down"))
        std = 0.02 / math.sqrt(2 * cfg.layers) if adds else 0.01 if module.endswith("position") else 0.02
        return value.normal_(0.0, std, generator=generator)
    if cfg.kind == "encoder-decoder":
        return _init_translation(cfg, value, module, generator)
    # BERT and the ViT line: normal, cut at two standard deviations.
    return nn.init.trunc_normal_(value, 0.0, 0.02, -0.04, 0.04, generator=generator)


def _init_translation(cfg: ModelConfig, value: Tensor, module: str, generator: torch.Generator) -> Tensor:
    """Draws as fairseq does: Xavier, with the three input projections of attention counted as one matrix."""
    if module.startswith(("embedding", "target_embedding", "head")):
        return value.normal_(0.0, cfg.width**-0.5, generator=generator)
    if module.endswith(("attention.qkv", "cross.q", "cross.kv")):
        bound = math.sqrt(6 / (4 * cfg.width))
        return value.uniform_(-bound, bound, generator=generator)
    return nn.init.xavier_uniform_(value, generator=generator)


@torch.no_grad()
def put(parameter: Tensor, value: Tensor) -> None:
    """Copies a tensor into a parameter or a moment, without communication. A sharded one takes its own part of a whole
    tensor, or a tensor that is sharded as it is (`wrap_rows`)."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        value = value.to(parameter.device)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def take(tensor: Tensor) -> Tensor:
    """Returns the whole tensor, on the CPU. Every process must call this function: a sharded tensor is gathered."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().contiguous()


def find_local(tensor: Tensor) -> Tensor:
    """This process's part. Not `to_local()`, which builds a node for autograd: it is called for every gradient."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def find_start(tensor: DTensor) -> tuple[int, ...]:
    """Where this process's part begins, along each dimension."""
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start)


def find_first_row(tensor: DTensor) -> int:
    """Where this process's part begins: FSDP2 splits tensors by rows."""
    first, *others = find_start(tensor)
    assert not any(others), "rows are whole"
    return first


def is_first_copy(tensor: DTensor) -> bool:
    """Whether no process of a lower place has the same rows."""
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "a process of the mesh"
    return not any(at for at, way in zip(place, tensor.placements, strict=True) if way.is_replicate())


def wrap_rows(like: Tensor, rows: Tensor) -> Tensor:
    """This process's part of a tensor that is sharded as the other is."""
    if not isinstance(like, DTensor):
        return rows
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
