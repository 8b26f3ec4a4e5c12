"""Ulysses (arXiv 2309.14509): an all-to-all gives each process some heads of all tokens, so that attention is what it
is without a split, and another one gives the tokens back with all heads. What a process sends shrinks with the number
of processes, but that number has to divide the key/value heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.attention import attend
from stretto.batch import Layout
from stretto.parallel.partial import Scores


@dataclass(frozen=True)
class Ulysses:
    group: dist.ProcessGroup
    q_layout: Layout  # of the whole batch
    k_layout: Layout
    q_rows: Tensor  # int64 [T]: where its tokens are among those of all processes
    k_rows: Tensor
    causal: bool
    window: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        size, heads = self.group.size(), q.shape[1]
        whole_q = self.to_heads(q[:, None])[self.q_rows, 0]
        whole_k, whole_v = self.to_heads(torch.stack([k, v], 1))[self.k_rows].unbind(1)
        out = attend(
            whole_q, whole_k, whole_v, self.q_layout, self.k_layout, self.causal, 0.0,
            scale=scores.scale, window=self.window,
        )  # fmt: skip
        # Filler, which is nobody's token, stays 0.
        rows = out.new_zeros(size * len(q), *out.shape[1:]).index_copy(0, self.q_rows, out)
        back = all_to_all(rows.view(size, len(q), heads // size, -1), self.group)
        return back.transpose(0, 1).reshape(q.shape)

    def to_heads(self, x: Tensor) -> Tensor:
        """[T, n, heads, D] here to [P T, n, heads / P, D]: of all processes, one after the other."""
        size = self.group.size()
        parts = x.view(*x.shape[:2], size, -1, x.shape[3]).permute(2, 0, 1, 3, 4)
        return all_to_all(parts, self.group).flatten(0, 1)


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P, ...]: part i goes to process i, and its part comes to place i. The way back is the same."""
    arrived: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return arrived


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        arrived = torch.empty_like(x)
        dist.all_to_all_single(arrived, x, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return all_to_all(dx, ctx.group), None
