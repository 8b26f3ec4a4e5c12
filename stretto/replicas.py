"""Processes that have the same weights must have the same bits. Each takes a hash of every tensor on its device, and
they compare: at each save, and every `train.compare_every` steps.

The hash of n elements, their bits read as integers b, is a sum with odd weights, in rows of WIDE elements:

    row r:  h[r] = sum over i of (b[r, i] * w[i] mod 2^32),      tensor:  sum over r of h[r] * v[r]  mod 2^64

An odd weight has an inverse, so one changed element always changes the hash, whatever bit it is; and weights that
depend on the place tell elements that were exchanged. Integer sums do not depend on their order.

What it costs: 12 bytes of traffic for a weight of 4 (read, product written and read), and about eight launches for each
tensor. GPT-2 small has 124 million weights in 148 tensors: 1.5 GB, or 0.4 ms at 4.2 TB/s, and 1200 launches, or 5 ms of
a host that takes 4 us for each. Every 500 steps of 4.4 ms, which is what an H200 takes for 1 x 1024 tokens, that is
0.25% at most. One process has nobody to compare with, and does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.config import ParallelConfig
from stretto.errors import DifferenceError
from stretto.mesh import Mesh
from stretto.runtime import Runtime
from stretto.weights import find_local

WIDE = 1 << 16
ROWS = 1 << 8  # that are multiplied at once: 64 MB
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def find_copies(cfg: ParallelConfig, mesh: Mesh) -> dist.ProcessGroup | None:
    """The processes that have the same weights, or parts of them, as this one; None: nobody has."""
    if mesh.world == 1 or cfg.data == "shard":
        return None
    group = mesh.peers or dist.group.WORLD
    if cfg.data == "hybrid":  # parts along its second axis
        assert mesh.grid is not None
        group = mesh.grid.get_group("data")
    return group if group is not None and group.size() > 1 else None


def compare(
    model: nn.Module, optimizer: torch.optim.Optimizer, cfg: ParallelConfig, mesh: Mesh, rt: Runtime, step: int
) -> None:
    """An error in every process, if any has other bits than its copies. The host waits for the device here."""
    group = find_copies(cfg, mesh)
    if group is None:
        return
    names, hashes = hash_weights(model, optimizer)
    found = [torch.empty_like(hashes) for _ in range(group.size())]
    dist.all_gather(found, hashes, group=group)
    ranks = dist.get_process_group_ranks(group)
    differences = [
        f"{name} ({words})"
        for name, values in zip(names, zip(*(row.tolist() for row in found), strict=True), strict=True)
        if (words := describe_difference(dict(zip(ranks, values, strict=True))))
    ]
    if any(rt.sum_over_ranks([len(differences)])):
        what = f"{len(differences)} of {len(names)} tensors: {', '.join(differences[:3])}" if differences else "others"
        raise DifferenceError(
            f"at step {step} processes that must have the same weights have not: {what}; nothing is saved. A device or "
            "a link may be faulty: go on elsewhere from the last checkpoint, by --resume"
        )


def describe_difference(hashes: dict[int, int]) -> str:
    """Which ranks have another hash than most have, or who differs where there is no majority; empty if all agree."""
    (most, count), *others = Counter(hashes.values()).most_common()
    if not others:
        return ""
    odd = [rank for rank, value in hashes.items() if value != most]
    if 2 * count > len(hashes):
        return f"rank {', '.join(map(str, odd))} differs from the others"
    return f"ranks {', '.join(map(str, hashes))} differ"


def hash_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[str], Tensor]:
    """The names of all weights, and the hashes of what this process has of them, on the device."""
    named = dict(_list_tensors(model, optimizer))
    return list(named), torch.stack([hash_bits(tensor) for tensor in named.values()])


def _list_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict(keep_vars=True).items():
        yield name, value
        low = optimizer.state.get(value, {}).get("low")  # the other half of weights that are kept in two
        if low is not None:
            yield f"the lower half of {name}", low


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """A number in int64, on the tensor's device."""
    local = find_local(tensor).detach()
    bits = local.contiguous().flatten().view(INTEGERS[local.element_size()])
    bits = bits.view(torch.int32) if bits.dtype == torch.int64 else bits
    weights = make_weights(min(bits.numel(), WIDE), torch.int32, bits.device)
    whole = bits.numel() // WIDE * WIDE
    parts = torch.split(bits[:whole].view(-1, WIDE), ROWS) if whole else ()
    rows = [(part * weights).sum(1) for part in parts]
    rows.append((bits[whole:] * weights[: bits.numel() - whole]).sum().view(1))
    found = torch.cat(rows)
    return (found * make_weights(len(found), torch.int64, bits.device)).sum()


def make_weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Odd numbers without a pattern, the same everywhere: places multiplied by odd constants, and mixed."""
    place = torch.arange(1, count + 1, device=device)
    mixed = place * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    mixed = mixed ^ (mixed >> 32)
    return (mixed | 1).to(dtype)
