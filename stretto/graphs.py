"""Whole steps as CUDA graphs: recorded once per shape of batch, then launched as one.

A step of a small model is hundreds of kernels, each started by Python; the GPU may finish them faster than the host can
name them. A recorded step replays all of them from one call. What a graph reads must stay where it was: a batch is
copied into the graph's own tensors, learning rate and loss scale are on the device, and random numbers follow torch's
generator, whose seed and offset a replay takes over.

A shape is recorded when it comes for the fifth time, and there are at most eight graphs; all other steps run as usual.
The graphs share their memory: nothing in it outlives a step but the results, which are copied out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.batch import Batch, clone, copy_into, shape_of

TIMES = 5  # before that, kernels are compiled and tuned, and memory settles
MOST = 8  # graphs
MANY = 1000  # shapes to count

Step = Callable[[Batch, Tensor], tuple[Tensor, ...]]


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    results: tuple[Tensor, ...]
    kept: object  # what else the graph reads


class Recorder:
    def __init__(self, step: Step, prepare: Callable[[], AbstractContextManager[object]], device: torch.device) -> None:
        """`step` takes a batch and a factor for its loss, and must not ask the device anything. `prepare` is entered
        around a recording, and gives what has to live as long as it."""
        self.step, self.prepare = step, prepare
        self.factor = torch.ones((), device=device)
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: Counter[object] = Counter()
        self.recordings: dict[object, Recording] = {}

    def run(self, batch: Batch, factor: float) -> tuple[Tensor, ...]:
        self.factor.fill_(factor)
        shape = shape_of(batch)
        if shape not in self.recordings:
            if len(self.recordings) == MOST or not self.comes_again(shape):
                return self.step(batch, self.factor)
            self.recordings[shape] = self.record(batch)
        recording = self.recordings[shape]
        copy_into(recording.batch, batch)
        recording.graph.replay()
        return tuple(result.clone() for result in recording.results)

    def comes_again(self, shape: object) -> bool:
        if len(self.seen) == MANY:  # no use in remembering them all
            self.seen.clear()
        self.seen[shape] += 1
        return self.seen[shape] >= TIMES

    def record(self, batch: Batch) -> Recording:
        graph, own = torch.cuda.CUDAGraph(), clone(batch)
        # Other threads go on meanwhile: one brings the next batches to the device.
        with self.prepare() as kept, torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
            results = self.step(own, self.factor)
        return Recording(graph, own, results, kept)
