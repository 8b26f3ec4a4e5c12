"""Ring attention: keys and values go from process to process, and no process ever holds more than two parts of them.

forward     P - 1 hops; the next part is on its way while this one is attended to
backward    the same hops again, and behind each part a sum of its gradients, in fp32, to which every process adds
            before it sends it on; after P - 1 hops it arrives where the part is from
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


@dataclass(frozen=True)
class Ring:
    group: dist.ProcessGroup
    own: Reach
    others: dict[int, Reach]  # by the distance 1, 2, ... to the process whose keys are meant, backwards in the ring

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        out: Tensor = _Ring.apply(q, k, v, self, scores)  # type: ignore[no-untyped-call]
        return out

    def pass_on(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """To the next process, and from the one before: what will have arrived, and what to wait for."""
        rank, size, arriving = self.group.rank(), self.group.size(), torch.empty_like(x)
        send = dist.P2POp(dist.isend, x, group=self.group, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=(rank - 1) % size)
        return arriving, dist.batch_isend_irecv([send, receive])

    def rotate(self, kv: Tensor) -> Iterator[Tensor]:
        """The parts of the others, the nearest first; the first hop begins when this is called."""
        messages = [self.pass_on(kv)] if self.others else []

        def arrive() -> Iterator[Tensor]:
            for number in range(len(self.others)):
                part, works = messages.pop()
                wait(works)
                if number + 1 < len(self.others):
                    messages.append(self.pass_on(part))
                yield part

        return arrive()


def wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, by: Ring, scores: Scores) -> Tensor:
        kv = torch.stack([k, v], 1)
        arriving = by.rotate(kv)
        out, lse = attend_part(q, kv, by.own, scores)
        for part, reach in zip(arriving, by.others.values(), strict=True):
            out, lse = merge(out, lse, *attend_part(q, part, reach, scores))
        ctx.by, ctx.scores = by, scores
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        by, scores = ctx.by, ctx.scores
        q, kv, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        arriving = by.rotate(kv)
        found, dkv = backward_part(dout, q, kv, out, lse, by.own, scores)
        dq = wide(found)
        gone: tuple[Tensor, list[Any]] | None = None  # the sums for the part that comes next
        for part, reach in zip(arriving, by.others.values(), strict=True):
            found, dpart = backward_part(dout, q, part, out, lse, reach, scores)
            dq = dq + found
            if gone is not None:
                sums, works = gone
                wait(works)
                dpart += sums
            gone = by.pass_on(dpart)
        if gone is not None:
            sums, works = gone
            wait(works)
            dkv += sums
        dk, dv = dkv.to(kv.dtype).unbind(1)
        return dq.to(q.dtype), dk, dv, None, None
