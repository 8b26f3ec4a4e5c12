"""Steps as CUDA graphs: recorded once per shape of batch, then launched as one.

A step of a small model is hundreds of kernels, each started by Python; the GPU may finish them faster than the host can
name them. A recorded step replays all of them from one call. What a graph reads must stay where it was: a batch is
copied into the graph's own tensors, learning rate and loss scale are on the device, and random numbers follow torch's
generator, whose seed and offset a replay takes over.

A shape is recorded when it comes for the second time, and there are at most 32 graphs of one kind of work; all else
runs as usual. buckets.py makes shapes few. The graphs share one pool of memory: nothing in it outlives a replay but
results, which are copied out. Before it records, torch gives back what the allocator had kept for the steps until then,
so that a run needs little more memory than without graphs; a step of a new shape still takes its own beside the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.batch import Batch, clone, copy_into, shape_of

TIMES = 2  # the first time, kernels are compiled and loaded
MOST = 32  # graphs
MANY = 1000  # shapes to count


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    batches: list[Batch]
    results: tuple[Tensor, ...]
    kept: object  # what else the graph reads


class Recorder:
    def __init__(
        self,
        work: Callable[..., tuple[Tensor, ...]],
        prepare: Callable[[], AbstractContextManager[object]],
        pool: Any,
    ) -> None:
        """`work` takes batches, or none, must not ask the device anything, and leaves nothing behind that it has made
        but its results. `prepare` is entered around a recording, and gives what has to live as long as it. `pool` is
        torch's name for the memory that graphs share."""
        self.work, self.prepare, self.pool = work, prepare, pool
        self.seen: Counter[object] = Counter()
        self.recordings: dict[object, Recording] = {}

    def run(self, *batches: Batch) -> tuple[Tensor, ...]:
        shape = tuple(map(shape_of, batches))
        if shape not in self.recordings:
            if len(self.recordings) == MOST or not self.comes_again(shape):
                return self.work(*batches)
            self.recordings[shape] = self.record(batches)
        recording = self.recordings[shape]
        for own, batch in zip(recording.batches, batches, strict=True):
            copy_into(own, batch)
        recording.graph.replay()
        return tuple(result.clone() for result in recording.results)

    def comes_again(self, shape: object) -> bool:
        if len(self.seen) == MANY:  # no use in remembering them all
            self.seen.clear()
        self.seen[shape] += 1
        return self.seen[shape] >= TIMES

    def record(self, batches: tuple[Batch, ...]) -> Recording:
        graph, own = torch.cuda.CUDAGraph(), [clone(batch) for batch in batches]
        # Other threads go on meanwhile: one brings the next batches to the device.
        with self.prepare() as kept, torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
            results = self.work(*own)
        return Recording(graph, own, results, kept)
