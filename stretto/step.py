"""One optimizer step: micro-batches, loss, backward, clip, guard, update. Nothing here makes the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.batch import Batch
from stretto.guard import Guard
from stretto.model import Model
from stretto.optim import clip_gradients
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

    def describe(self) -> str:
        size = sum(p.numel() for p in self.plain.parameters())
        return f"{self.plain.cfg.kind} with {size / 1e6:.1f}M parameters, {self.precision}"


def resolve_precision(name: str, device: torch.device) -> str:
    return name if name != "auto" else "bf16" if device.type == "cuda" else "fp32"


def autocast(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=PRECISIONS[precision], enabled=precision != "fp32")


def run_step(
    parts: Trainable, batches: Sequence[tuple[int, Batch]], num_labels: int, world: int
) -> tuple[Tensor, Tensor]:
    """One update from this process's micro-batches, each with its number in the endless stream. `num_labels` counts
    the predicted positions of all processes, so each token weighs the same however the batch is cut.

    Returns this process's summed loss and the global gradient norm, both still on the device.
    """
    loss_sum = torch.zeros((), device=parts.device)
    for index, batch in batches:
        seed_all(parts.seed, index)  # dropout depends on (seed, micro-batch), not on what ran before or where
        with gradient_sync(parts.model, last=index == batches[-1][0]):
            with autocast(parts.precision, parts.device):
                loss = parts.model(batch)
            # Data parallelism averages gradients over processes; the sum is wanted.
            parts.scaler.scale(loss * (world / max(num_labels, 1))).backward()
        loss_sum += loss.detach()
    return loss_sum, _update(parts)


def _update(parts: Trainable) -> Tensor:
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
