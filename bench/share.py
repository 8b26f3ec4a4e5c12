"""One layer as one rank of many computes it: alone on one device, in a group in which nothing is sent, or among real
ranks.

    gather, ring, ulysses  the layer gets this rank's part of a sequence, as training does (parallel/sequence.py)
    megatron               what these are compared with: all tokens of heads / P and of a share of the MLP, and s / P
                           tokens of the norms
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.batch import Batch, Counts, Layout, Sequences, dense_layout
from stretto.config import ModelConfig, ParallelConfig
from stretto.memory import Keep
from stretto.model import Block, Rotary, rotary_angles
from stretto.parallel import gather
from stretto.parallel.sequence import Splitter
from stretto.techniques.fused import Branch, FusedBlock


@contextmanager
def stand_in(ranks: int, rank: int) -> Iterator[dist.ProcessGroup]:
    """A group of torch's in which a rank is alone: what comes is a copy of what it has, or whatever is in memory. So
    shapes, memory and work are real, and results are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # not everyone who trains needs it

    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield whole_group()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # each group would put its rank in front of every line of a traceback


def whole_group() -> dist.ProcessGroup:
    """Returns the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@dataclass(frozen=True)
class Way:
    """How a sequence is split: by one of sequence_costs.METHODS, or megatron."""

    method: str
    layout: Literal["contiguous", "zigzag"] = "contiguous"
    keep: bool = False  # gathered tensors, until the backward pass


def take_part(
    cfg: ModelConfig, way: Way, tokens: int, group: dist.ProcessGroup | None, device: torch.device
) -> Sequences:
    """Returns this rank's part of a sequence; all of the sequence without a group, and for megatron's attention."""
    numbers, counts = torch.arange(tokens), Counts(tokens, tokens, tokens, tokens**2)
    batch = Batch(numbers, counts, (), Sequences(numbers, numbers, dense_layout(1, tokens)))
    if group is not None and way.method != "megatron":
        options = ParallelConfig(
            sequence=group.size(),
            sequence_method=way.method,  # type: ignore[arg-type]  # not megatron, here
            sequence_layout=way.layout,
            sequence_keep=way.keep,
        )
        batch = Splitter(options, cfg, group)(batch)
    part = batch.to(device).inputs
    assert part is not None
    return part


def leave_out_attention(part: Sequences) -> Sequences:
    """Returns the same tokens without attention, to time all the rest of a layer."""
    return replace(part, layout=replace(part.layout, segment=Absent(part.ids)))


@dataclass(frozen=True)
class Absent:
    """Stands in the place of attention (see batch.Segment)."""

    tokens: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        return _Absent.apply(q, k, v)


class _Absent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k, v)
        return q.contiguous()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return dout, *(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in ctx.saved_tensors)


class GatherRows(torch.autograd.Function):
    """[T, C] of each rank to [P T, C]; its adjoint sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return sum_rows(dout, ctx.group), None


class SumRows(torch.autograd.Function):
    """The adjoint of the above: parts of sums, [P T, C], to the sums of this rank's rows, [T, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_rows(x, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return gather_rows(dout, ctx.group), None


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * len(x), *x.shape[1:])
    gather.all_gather(out, x.contiguous(), group=group)
    return out


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    gather.reduce_scatter(out, x.contiguous(), dist.ReduceOp.SUM, group=group)
    return out


class MegatronBlock(FusedBlock):
    """A block of which this rank has some rows and columns: [s / P, C] to [s / P, C]."""

    group: dist.ProcessGroup

    def attend_self(self, h: Tensor, layout: Layout, rotary: Rotary | None, key: Tensor | None) -> Branch:
        return self.sum_up(super().attend_self(GatherRows.apply(h, self.group), layout, rotary, key))

    def expand(self, h: Tensor, key: Tensor | None, layout: Layout) -> Branch:
        return self.sum_up(super().expand(GatherRows.apply(h, self.group), key, layout))

    def sum_up(self, branch: Branch) -> Branch:
        return branch._replace(out=SumRows.apply(branch.out, self.group))


def build_block(
    cfg: ModelConfig, way: Way, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype,
    recompute: bool = False,
) -> FusedBlock:  # fmt: skip
    """Builds a block with this rank's weights: all, or megatron's rows and columns of a block that all ranks share."""
    torch.manual_seed(0)
    with device:
        block = Block(cfg, causal=True, cross=False)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    for norm in (block.attention_norm, block.mlp_norm):
        nn.init.ones_(norm.weight)  # type: ignore[arg-type]
    block.__class__ = MegatronBlock if way.method == "megatron" and group is not None else FusedBlock
    assert isinstance(block, FusedBlock)
    block.keep = Keep(mlp="product" if recompute else "activation")
    if isinstance(block, MegatronBlock) and group is not None:
        block.group = group
        _split_weights(block, cfg)
    return block.to(dtype)


def _split_weights(block: MegatronBlock, cfg: ModelConfig) -> None:
    """Query heads and the MLP's inner values are divided; a KV head that several ranks need is on each of them."""
    at, ranks, rank = block.attention, block.group.size(), block.group.rank()
    kv_heads = max(at.kv_heads // ranks, 1)
    first = rank * at.kv_heads // ranks
    q, k, v = torch.arange(at.qkv.out_features).view(-1, at.head_size).split([at.heads, at.kv_heads, at.kv_heads])
    q, k, v = q.chunk(ranks)[rank], k[first : first + kv_heads], v[first : first + kv_heads]
    ups = 2 if cfg.activation == "swiglu" else 1
    inner = torch.arange(block.mlp.up.out_features).view(ups, ranks, -1)[:, rank].flatten()
    _take(at.qkv, rows=torch.cat([q, k, v]).flatten())
    _take(at.out, columns=q.flatten())
    _take(block.mlp.up, rows=inner)
    _take(block.mlp.down, columns=inner[: len(inner) // ups])
    at.heads, at.kv_heads = at.heads // ranks, kv_heads


def _take(layer: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """The bias of a layer of which columns are taken is added once, by the norm behind the sum."""
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(weight[rows].clone() if columns is None else weight[:, columns].clone())
    if layer.bias is not None and rows is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[rows].clone())


def angles_of(cfg: ModelConfig, positions: Tensor) -> Rotary | None:
    size = cfg.width // cfg.heads
    return rotary_angles(positions, size, cfg.rope_theta, cfg.rope_scaling) if cfg.positions == "rotary" else None


def run_block(block: FusedBlock, x: Tensor, branch: Tensor, layout: Layout, rotary: Rotary | None) -> Tensor:
    """In the middle of a stack: the branch of the block before is still to be added, and its own is added by the norm
    that follows, which is not of this block. Gives both as one, so that both have gradients."""
    stream, pending = block(x, layout, rotary, pending=Branch(branch))
    return stream + pending.out
