"""The LSS Transformer's attention (arXiv 2311.02382): each process keeps its own queries and sees the keys and values
of all, which travel together in one all-gather; their gradients come back in one reduce-scatter.

    forward     the gather starts; the process's own keys are attended to meanwhile; then those of the others
    backward    gradients of the keys of others are computed for all of them, in fp32, and each process gets the sum of
                what everyone found for its own. A sum, not a mean: each of them is a term of the chain rule

What arrives is as long as the whole sequence. `keep` holds it until the backward pass, else it is gathered again then;
`heads` is the number of key/value heads that arrive at a time, while those before are attended to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.language import wide
from stretto.parallel.partial import Scores, attend_part, backward_part, merge
from stretto.parallel.reach import Reach

# Their names since torch 2.13, and before.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Gather:
    group: dist.ProcessGroup
    own: Reach | None  # among the process's own keys; None: those of all say everything
    others: Reach  # among the gathered keys
    keep: bool
    heads: int  # key/value heads at a time; 0: all

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        out: Tensor = _Gather.apply(q, k, v, self, scores)  # type: ignore[no-untyped-call]
        return out

    def slices(self, q: Tensor, kv: Tensor) -> list[tuple[slice, slice]]:
        """Key/value heads that travel together, and the query heads that share them."""
        num_heads, group = kv.shape[2], q.shape[1] // kv.shape[2]
        step = self.heads or num_heads
        starts = range(0, num_heads, step)
        return [(slice(i, i + step), slice(i * group, (i + step) * group)) for i in starts]

    def gather(self, kv: Tensor, heads: list[slice]) -> Iterator[Tensor]:
        """Those of all processes, [P T, 2, heads, D], for some heads after the other: the next are already on their way
        when one is given out. The first begin when this is called."""
        messages = [self.start(kv, heads[0])]

        def arrive() -> Iterator[Tensor]:
            for number in range(len(heads)):
                full, work = messages.pop()
                work.wait()
                if number + 1 < len(heads):
                    messages.append(self.start(kv, heads[number + 1]))
                yield full

        return arrive()

    def start(self, kv: Tensor, heads: slice) -> tuple[Tensor, Any]:
        mine = kv[:, :, heads].contiguous()
        full = mine.new_empty(self.group.size() * len(mine), *mine.shape[1:])
        return full, all_gather(full, mine, group=self.group, async_op=True)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, by: Gather, scores: Scores) -> Tensor:
        kv = torch.stack([k, v], 1)
        slices = by.slices(q, kv)
        arriving, kept, parts = by.gather(kv, [keys for keys, _ in slices]), [], []
        mine = None if by.own is None else attend_part(q, kv, by.own, scores)
        for full, (_, heads) in zip(arriving, slices, strict=True):
            part = attend_part(q[:, heads], full, by.others, scores.of_heads(heads))
            parts.append(part if mine is None else merge(mine[0][:, heads], mine[1][heads], *part))
            kept += [full] if by.keep else []
        out, lse = torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts])
        ctx.by, ctx.scores = by, scores
        ctx.save_for_backward(q, kv, out, lse, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        by, scores = ctx.by, ctx.scores
        q, kv, out, lse, *kept = ctx.saved_tensors
        dout = dout.contiguous()
        slices = by.slices(q, kv)
        arriving = iter(kept) if by.keep else by.gather(kv, [keys for keys, _ in slices])
        dq, dkv = torch.zeros_like(wide(q)), torch.zeros_like(wide(kv))
        if by.own is not None:
            found, dkv = backward_part(dout, q, kv, out, lse, by.own, scores)
            dq += found
        messages = []
        for full, (keys, heads) in zip(arriving, slices, strict=True):
            args = (dout[:, heads], q[:, heads], full, out[:, heads], lse[heads])
            found, dfull = backward_part(*args, by.others, scores.of_heads(heads))
            dq[:, heads] += found
            mine = dfull.new_empty(len(kv), *dfull.shape[1:])
            work = reduce_scatter(mine, dfull, dist.ReduceOp.SUM, group=by.group, async_op=True)
            messages.append((keys, mine, work))
        for keys, mine, work in messages:
            work.wait()
            dkv[:, :, keys] += mine
        dk, dv = dkv.to(kv.dtype).unbind(1)
        return dq.to(q.dtype), dk, dv, None, None
