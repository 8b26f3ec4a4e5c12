"""Steps as CUDA graphs: recorded once per shape of batch, then launched as one.

A step of a small model is hundreds of kernels, each started by Python; the GPU may finish them faster than the host can
name them. A recorded step replays all of them from one call. What a graph reads must stay where it was: a batch is
copied into the graph's own tensors, learning rate and loss scale are on the device, and random numbers follow torch's
generator, whose seed and offset a replay takes over.

An update of one micro-batch in one process is recorded as a whole. Else there is a graph of the passes over a
micro-batch, for each shape, and one of the update; between them, outside of any graph, gradients travel.

A shape is recorded when it comes for the second time, and there are at most 32 graphs of one kind of work, and few
while they are hardly replayed; all else runs as usual. buckets.py makes shapes few. The graphs share one pool of
memory: nothing in it outlives a replay but results, which are copied out. Before it records, torch gives back what the
allocator had kept for the steps until then, and later steps of a new shape, which are not recorded yet, borrow the
pool. So a run needs little more memory than without graphs.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from stretto.batch import Batch, copy_into, pack, shape_of
from stretto.buckets import to_bucket
from stretto.execute import Executor, Work

log = logging.getLogger(__name__)
TIMED = 4  # the step after a start that tells whether the host is what steps wait for: kernels are compiled by then
LAUNCH_BOUND = 0.5  # it is, if issuing a step takes the host more than this share of it
TIMES = 2  # the first time, kernels are compiled and loaded
MOST = 32  # graphs
FEW = 12  # graphs that are recorded before anybody asks whether they are replayed
PAYS = 2  # replays for each graph, on average, that make up for its recording
MANY = 1000  # shapes to count


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    batches: list[Any]
    results: tuple[Tensor, ...]
    kept: object  # what else the graph reads
    written: Sequence[Tensor]  # what a replay changes besides


class Memory:
    """The pool that graphs share, and the stream they are recorded on: torch's allocator gives a block that was freed
    on one stream to that stream only."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.exists = False  # it is made by the first recording
        self.seconds = 0.0  # that recordings have taken

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Around work that is not recorded, and leaves nothing behind but results: it gets its memory from the pool."""
        if not self.exists:
            yield
            return
        usual, device = torch.cuda.current_stream(), torch.cuda.current_device()
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            # By stream, not by thread as torch.cuda.use_mem_pool does: the backward pass has a thread of its own.
            torch._C._cuda_beginAllocateCurrentStreamToPool(device, self.pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(device, self.pool)
                torch._C._cuda_releasePool(device, self.pool)
                usual.wait_stream(self.stream)  # after an error, too: gradients are then zeroed

    @contextmanager
    def recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        torch.cuda.synchronize()  # as the recording would: what it waits for is not its own time
        begin = time.perf_counter()
        # Other threads go on meanwhile: one brings the next batches to the device.
        with no_collection(), torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            yield
        self.seconds += time.perf_counter() - begin
        if not self.exists:
            self.exists = True
            self._keep_pool()

    def _keep_pool(self) -> None:
        """It would go with the last graph that is forgotten, and could not be used again."""
        device = torch.cuda.current_device()
        with torch.cuda.stream(self.stream):  # the default stream has no pools
            torch._C._cuda_beginAllocateCurrentStreamToPool(device, self.pool)  # counts as a user, until it is released
            torch._C._cuda_endAllocateToPool(device, self.pool)
        weakref.finalize(self, torch._C._cuda_releasePool, device, self.pool).atexit = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage waits: graphs of an earlier run may be in it, and to destroy one invalidates what is being recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Prepare = Callable[[], AbstractContextManager[tuple[object, Sequence[Tensor]]]]


def prepare_nothing() -> AbstractContextManager[tuple[object, Sequence[Tensor]]]:
    """What is entered around work that reads its batches and what never moves, and leaves results and gradients."""
    return nullcontext((None, ()))


class Recorder:
    def __init__(
        self,
        work: Callable[..., tuple[Tensor, ...]],
        prepare: Prepare,
        memory: Memory,
    ) -> None:
        """`work` takes batches, dataclasses with tensors in them, or none. It must not ask the device anything, and
        leaves nothing behind that it has made but its results. `prepare` is entered around a recording, and gives what
        has to live as long as it, and the tensors that each replay changes: autograd has to hear of that."""
        self.work, self.prepare, self.memory = work, prepare, memory
        self.replays, self.said = 0, False
        self.seen: Counter[object] = Counter()
        self.recordings: dict[object, Recording] = {}

    def run(self, *batches: Any, launched: bool = False) -> tuple[Tensor, ...]:
        """`launched`: nothing is recorded or replayed, whatever the shape."""
        recording = None if launched else self.find(batches)
        if recording is None:
            with self.memory.borrowed():
                results = self.work(*batches)
            return tuple(result.clone() for result in results)
        for own, batch in zip(recording.batches, batches, strict=True):
            copy_into(own, batch)
        recording.graph.replay()
        self.replays += 1
        increment_version(recording.written)
        return tuple(result.clone() for result in recording.results)

    def find(self, batches: tuple[Any, ...]) -> Recording | None:
        """The recording for batches of this shape, which may be made here; None: they are to be launched."""
        shape = tuple(map(shape_of, batches))
        if shape not in self.recordings:
            if not self.comes_again(shape) or len(self.recordings) == MOST or not self.pays():
                return None
            self.recordings[shape] = self.record(batches)
        return self.recordings[shape]

    def forget(self) -> None:
        """What is recorded will not come again: other shapes get its place."""
        if self.recordings:
            torch.cuda.synchronize()  # a replay may still be at work
        self.recordings.clear()
        self.seen.clear()
        self.replays = 0

    def pays(self) -> bool:
        """Whether what is recorded is replayed often enough to record more."""
        graphs = len(self.recordings)
        if graphs < FEW or self.replays >= PAYS * graphs:
            return True
        if not self.said:
            log.info("CUDA graphs: no more for now: %d of them were replayed %d times", graphs, self.replays)
        self.said = True
        return False

    def comes_again(self, shape: object) -> bool:
        if len(self.seen) == MANY:  # no use in remembering them all
            self.seen.clear()
        self.seen[shape] += 1
        return self.seen[shape] >= TIMES

    def record(self, batches: tuple[Any, ...]) -> Recording:
        graph, own = torch.cuda.CUDAGraph(), [pack(batch) for batch in batches]
        with self.prepare() as (kept, written), self.memory.recorded(graph):
            results = self.work(*own)
        return Recording(graph, own, results, kept, written)


class Recorded(Executor):
    """Replays what it has recorded. The optimizer must be one that can be recorded (`optimizer.recording`)."""

    def __init__(self, work: Work, optimizer: Any) -> None:
        super().__init__(work)
        self.memory = Memory()
        self.whole = Recorder(lambda batch: (work.learn(batch), work.apply()), optimizer.recording, self.memory)
        self.passes = Recorder(lambda batch: (work.learn(batch),), prepare_nothing, self.memory)
        self.update = Recorder(lambda: (work.apply(),), optimizer.recording, self.memory)
        self.key: Hashable = None
        self.launched = False  # the update that runs is launched; what is recorded stays

    @property
    def recording_seconds(self) -> float:
        return self.memory.seconds

    def prepare(self, batch: Batch) -> Batch:
        return to_bucket(batch)

    def run(self, batches: Sequence[tuple[int, Any]], key: Hashable = ()) -> tuple[Tensor, Tensor]:
        self.turn_to(key)
        if self.work.gradients.stay:
            return super().run(batches)
        ((index, batch),) = batches
        self.work.seed_for(index)
        loss, norm = self.whole.run(batch, launched=self.launched)
        return loss, norm

    def turn_to(self, key: Hashable) -> None:
        self.launched = key is None
        if not self.launched and key != self.key:
            self.key = key
            self.whole.forget()
            self.passes.forget()

    def forget(self) -> None:
        for recorder in (self.whole, self.passes, self.update):
            recorder.forget()

    def learn(self, batch: Any) -> Tensor:
        return self.passes.run(batch, launched=self.launched)[0]

    def apply(self) -> Tensor:
        return self.update.run(launched=self.launched)[0]


class Auto(Executor):
    """Chooses while a run goes on: CUDA graphs, if a step is over not long after the host has issued it. One step is
    timed for it, which changes no number in it."""

    def __init__(
        self, work: Work, optimizer: Any, agree: Callable[[list[int]], list[list[int]]], give_up: Callable[[], None]
    ) -> None:
        """`agree` gives the numbers of all processes for those of this one. `give_up` prepares for steps that will not
        be recorded."""
        super().__init__(work)
        self.optimizer, self.agree, self.give_up = optimizer, agree, give_up
        self.chosen: Executor = Executor(work)
        self.left = TIMED

    @property
    def recording_seconds(self) -> float:
        return self.chosen.recording_seconds

    def prepare(self, batch: Batch) -> Batch:
        return to_bucket(batch)

    def run(self, batches: Sequence[tuple[int, Any]], key: Hashable = ()) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left != 0:
            return self.chosen.run(batches, key)
        begin = self._wait()
        results = self.chosen.run(batches, key)
        issued = time.perf_counter()
        self._choose(issued - begin, self._wait() - begin)
        return results

    def _wait(self) -> float:
        if self.work.device.type == "cuda":
            torch.cuda.synchronize(self.work.device)
        return time.perf_counter()

    def _choose(self, host_s: float, whole_s: float) -> None:
        """The process that launching holds up most decides for all."""
        times = self.agree([round(1e6 * host_s), max(round(1e6 * whole_s), 1)])
        host, whole = max(times, key=lambda pair: pair[0] / pair[1])
        found = f"the host takes {host / 1e3:.1f} ms of a step's {whole / 1e3:.1f} ms"
        if host > LAUNCH_BOUND * whole:
            self.notes.append(f"CUDA graphs: on: {found}")
            self.chosen = Recorded(self.work, self.optimizer)
        else:
            self.notes.append(f"CUDA graphs: off: {found}")
            self.give_up()
