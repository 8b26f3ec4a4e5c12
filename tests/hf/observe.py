"""What accelerated models do while they run: the tokens and sums that they compute, and updates that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import stretto.hf.unpad
from stretto.attention import attend
from stretto.graphs import Recorded
from stretto.hf.defer import Pending
from stretto.hf.loop import Step


@contextmanager
def count_tokens() -> Iterator[list[int]]:
    """The number of queries of every attention that goes through the dispatcher."""
    seen: list[int] = []

    def note(q: Tensor, *others: Any, **options: Any) -> Tensor:
        seen.append(q.shape[0])
        return attend(q, *others, **options)

    with patch.object(stretto.hf.unpad, "attend", note):
        yield seen


@contextmanager
def count_sums() -> Iterator[list[float]]:
    """The sums that a norm has computed, each by its dropout."""
    seen: list[float] = []
    normalise = Pending.normalise

    def note(self: Pending, *args: Any) -> Tensor | None:
        p, y = self.p, normalise(self, *args)
        seen.extend([] if y is None else [p])
        return y

    with patch.object(Pending, "normalise", note):
        yield seen


def replay_and_compare(
    make_step: Callable[[], Step], batches: Sequence[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> list[torch.cuda.CUDAGraph]:
    """The same bits with graphs and without; returns the graphs in the order in which they were replayed."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # for the convolution of ViT
    replays, replay = list[Any](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    found = []
    for recorded in (False, True):
        step, losses = make_step(), []
        assert isinstance(step.update.executor, Recorded)
        step.update.executor = step.update.executor if recorded else step.update.eager
        for i, batch in enumerate(batches):
            torch.manual_seed(i)
            losses.append(step({n: t.bfloat16() if t.is_floating_point() else t for n, t in batch.items()}))
        found.append((torch.stack(losses), [p.clone() for p in step.model.parameters()]))
    assert torch.equal(found[0][0], found[1][0]), (found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    return replays
