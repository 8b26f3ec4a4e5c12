"""One optimizer step: micro-batches, loss, backward, clip, guard, update. Nothing here makes the host wait, but for the
one step that is timed to find out whether it should be a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stretto.batch import Batch
from stretto.graphs import Memory, Recorder, prepare_nothing
from stretto.guard import Guard
from stretto.layers import Pressure
from stretto.model import Model
from stretto.optim import FlatAdamW, clip_gradients
from stretto.parallel.data import StaticGradients, gradient_sync, replicate
from stretto.parallel.sequence import Splitter
from stretto.runtime import Runtime, seed_all
from stretto.techniques.layer_drop import LayerDrop

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMED = 4  # the step after a start that tells whether the host is what steps wait for: kernels are compiled by then
LAUNCH_BOUND = 0.5  # it is, if issuing a step takes the host more than this share of it


@dataclass
class Trainable:
    """All that an update touches, and nothing else."""

    model: nn.Module  # what is called to train: the model, perhaps inside a wrapper that synchronises gradients
    plain: Model  # the model itself
    optimizer: torch.optim.Optimizer
    guard: Guard
    scaler: torch.amp.GradScaler  # does something in fp16 only
    precision: str
    device: torch.device
    clip: float
    seed: int
    layer_drop: LayerDrop | None = None  # what leaves blocks out
    split: Splitter | None = None  # gives a process its part of a micro-batch; None: it works on all of it
    stream: tuple[int, ...] = ()  # what torch's generators depend on besides the seed and the micro-batch
    may_record: bool = False  # steps are replayed from CUDA graphs, or may be: batches then come in few shapes
    gradients: StaticGradients | None = None  # None: as autograd makes them
    recorders: Recorders | None = None  # of CUDA graphs; None: every kernel is launched by the host
    pressure: Pressure | None = None  # of the standardization loss
    factor: Tensor = field(init=False)  # of the loss, on the device: a graph reads it there

    def __post_init__(self) -> None:
        self.factor = torch.ones((), device=self.device)
        if self.pressure is not None:
            self.pressure.factor = torch.zeros((), device=self.device)

    def describe(self) -> str:
        size = sum(p.numel() for p in self.plain.parameters())
        words = [f"{self.plain.cfg.kind} with {size / 1e6:.1f}M parameters", self.precision]
        return ", ".join(words if self.split is None else [*words, self.split.describe()])


def resolve_precision(name: str, device: torch.device) -> str:
    return name if name != "auto" else "bf16" if device.type == "cuda" else "fp32"


def autocast(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=PRECISIONS[precision], enabled=precision != "fp32")


def run_step(parts: Trainable, batches: Sequence[tuple[int, Batch]], num_labels: int, world: int) -> tuple[Tensor, ...]:
    """One update from this process's micro-batches, each with its number in the endless stream. `num_labels` counts
    the predicted positions of all processes, so each token weighs the same however the batch is cut.

    Returns this process's summed loss and the global gradient norm, both still on the device.
    """
    static, recorders = parts.gradients, parts.recorders
    if recorders is not None:
        recorders.prepare_for(batches[0][1])
    # Wrappers average gradients over the processes, and the sum is wanted; static ones are summed.
    copies = world if static is None else 1
    parts.factor.fill_(copies / max(num_labels, 1))
    if parts.pressure is not None:
        _press(parts.pressure, copies / (world * len(batches)), parts.scaler)
    if recorders is not None and static is None:
        ((index, batch),) = batches
        seed_all(parts.seed, index)
        return recorders.step.run(batch)
    loss_sum = torch.zeros((), device=parts.device)
    for index, batch in batches:
        # Dropout depends on (seed, micro-batch), not on what ran before or where.
        seed_all(parts.seed, index, *parts.stream)
        with gradient_sync(parts.model, last=index == batches[-1][0]):
            loss_sum += learn(parts, batch) if recorders is None else recorders.learn.run(batch)[0]
    if static is not None:
        static.sum_over_processes()
    return loss_sum, update(parts) if recorders is None else recorders.update.run()[0]


def _press(pressure: Pressure, share: float, scaler: torch.amp.GradScaler) -> None:
    """Each micro-batch has statistics of its own and the loss is their mean, so it is the same on any number of
    processes, and none waits for another's."""
    assert pressure.factor is not None
    pressure.factor.fill_(pressure.weight * share / pressure.num_channels)
    if scaler.is_enabled():
        pressure.factor.copy_(scaler.scale(pressure.factor))


def learn(parts: Trainable, batch: Batch) -> Tensor:
    """The summed loss of a micro-batch; its gradient, times `factor`, is added to what the parameters have."""
    with autocast(parts.precision, parts.device):
        loss = parts.model(batch)
    parts.scaler.scale(loss * parts.factor).backward()
    if parts.gradients is not None:
        parts.gradients.settle()
    return loss.detach()


def update(parts: Trainable) -> Tensor:
    optimizer = parts.optimizer
    if parts.scaler.is_enabled():
        parts.scaler.unscale_(optimizer)
    norm = clip_gradients(parts.model, optimizer, parts.clip)
    cancel = parts.guard.judge(norm)
    if parts.scaler.is_enabled():
        parts.scaler.step(optimizer)
        parts.scaler.update()
    else:
        optimizer.found_inf = cancel  # type: ignore[attr-defined]  # what GradScaler sets for fused optimizers
        optimizer.step()
    if parts.gradients is None:
        optimizer.zero_grad(set_to_none=True)
    else:
        parts.gradients.zero()
    return norm


class Recorders:
    """A step that is one micro-batch in one process is recorded as a whole. Else there is a graph of the passes over a
    micro-batch, for each shape, and one of the update; between them, outside of any graph, gradients travel."""

    def __init__(self, parts: Trainable) -> None:
        optimizer = parts.optimizer
        assert isinstance(optimizer, FlatAdamW)
        self.memory = Memory()
        self.step = Recorder(lambda batch: (learn(parts, batch), update(parts)), optimizer.recording, self.memory)
        self.learn = Recorder(lambda batch: (learn(parts, batch),), prepare_nothing, self.memory)
        self.update = Recorder(lambda: (update(parts),), optimizer.recording, self.memory)
        self.theta: float | None = None

    def prepare_for(self, batch: Batch) -> None:
        """Another theta: the patterns of blocks that worked under the last one do not come again."""
        theta = next((depth.theta for depth in batch.depths.values()), None)
        if theta != self.theta:
            self.theta = theta
            self.step.forget()
            self.learn.forget()


class GraphChoice:
    """Chooses while a run goes on: CUDA graphs, if a step is over not long after the host has issued it."""

    def __init__(self, parts: Trainable, rt: Runtime, say: Callable[[str], None]) -> None:
        self.parts, self.rt, self.say = parts, rt, say
        self.left = TIMED if parts.may_record and parts.recorders is None else 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around each step. It times one of them, which changes no number in it."""
        self.left -= 1
        if self.left != 0:
            yield
            return
        begin = self._wait()
        yield
        issued = time.perf_counter()
        self._choose(issued - begin, self._wait() - begin)

    def _wait(self) -> float:
        if self.parts.device.type == "cuda":
            torch.cuda.synchronize(self.parts.device)
        return time.perf_counter()

    def _choose(self, host_s: float, whole_s: float) -> None:
        """Of all processes, the one that launching holds up most decides."""
        mine, rank = [round(1e6 * host_s), max(round(1e6 * whole_s), 1)], self.rt.rank
        times = self.rt.sum_over_ranks([0] * 2 * rank + mine + [0] * 2 * (self.rt.world - 1 - rank))
        host, whole = max(zip(times[::2], times[1::2], strict=True), key=lambda pair: pair[0] / pair[1])
        found = f"the host takes {host / 1e3:.1f} ms of a step's {whole / 1e3:.1f} ms"
        if host > LAUNCH_BOUND * whole:
            self.say(f"CUDA graphs: on: {found}")
            self.parts.recorders = Recorders(self.parts)
            return
        self.say(f"CUDA graphs: off: {found}")
        if self.parts.gradients is not None:
            self.parts.gradients.release()
            self.parts.gradients = None
        self.parts.model = replicate(self.parts.plain)
