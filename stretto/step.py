"""One optimizer step: micro-batches, loss, backward, clip, guard, update. Nothing here makes the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.batch import Batch
from stretto.graphs import Recorder
from stretto.guard import Guard
from stretto.model import Model
from stretto.optim import FlatAdamW, clip_gradients
from stretto.parallel import gradient_sync
from stretto.runtime import seed_all

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    recorder: Recorder | None = None  # of CUDA graphs

    def describe(self) -> str:
        size = sum(p.numel() for p in self.plain.parameters())
        return f"{self.plain.cfg.kind} with {size / 1e6:.1f}M parameters, {self.precision}"


def resolve_precision(name: str, device: torch.device) -> str:
    return name if name != "auto" else "bf16" if device.type == "cuda" else "fp32"


def autocast(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=PRECISIONS[precision], enabled=precision != "fp32")


def run_step(parts: Trainable, batches: Sequence[tuple[int, Batch]], num_labels: int, world: int) -> tuple[Tensor, ...]:
    """One update from this process's micro-batches, each with its number in the endless stream. `num_labels` counts
    the predicted positions of all processes, so each token weighs the same however the batch is cut.

    Returns this process's summed loss and the global gradient norm, both still on the device.
    """
    # Data parallelism averages gradients over processes; the sum is wanted.
    factor = world / max(num_labels, 1)
    if parts.recorder is not None:
        ((index, batch),) = batches
        seed_all(parts.seed, index)
        return parts.recorder.run(batch, factor)
    loss_sum = torch.zeros((), device=parts.device)
    for index, batch in batches:
        seed_all(parts.seed, index)  # dropout depends on (seed, micro-batch), not on what ran before or where
        with gradient_sync(parts.model, last=index == batches[-1][0]):
            loss_sum += learn(parts, batch, factor)
    return loss_sum, update(parts)


def learn(parts: Trainable, batch: Batch, factor: float | Tensor) -> Tensor:
    """The summed loss of a micro-batch; its gradient, times `factor`, is added to what the parameters have."""
    with autocast(parts.precision, parts.device):
        loss = parts.model(batch)
    parts.scaler.scale(loss * factor).backward()
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
    optimizer.zero_grad(set_to_none=True)
    return norm


def record_steps(parts: Trainable) -> None:
    """From now on, steps on batches of a shape that keeps coming are replayed from CUDA graphs."""
    optimizer = parts.optimizer
    assert isinstance(optimizer, FlatAdamW)
    parts.recorder = Recorder(
        lambda batch, factor: (learn(parts, batch, factor), update(parts)), optimizer.recording, parts.device
    )
