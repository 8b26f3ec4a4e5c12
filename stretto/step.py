"""The pure update: learn from micro-batches, clip, guard, apply. Nothing here makes the host wait for the device.

How the parts of an update are run, one by one or as CUDA graphs, is the executor's matter (execute.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.average import Average
from stretto.batch import Batch
from stretto.gradients import Gradients
from stretto.guard import Guard
from stretto.optim import clip_gradients
from stretto.precision import autocast
from stretto.runtime import seed_all


@dataclass
class Update:
    """All that an update touches, and nothing else."""

    gradients: Gradients  # also knows what is called to train
    optimizer: torch.optim.Optimizer
    guard: Guard
    scaler: torch.amp.GradScaler  # does something in fp16 only
    precision: str
    device: torch.device
    clip: float  # global norm of gradients; 0: no limit
    seed: int
    average: Average | None  # of the weights, after each update
    random_keys: tuple[int, ...] = ()  # what torch's generators depend on besides the seed and the micro-batch
    factor: Tensor = field(init=False)  # of the loss, on the device: a graph reads it there

    def __post_init__(self) -> None:
        self.factor = torch.ones((), device=self.device)

    def begin(self, step: int, num_labels: int) -> None:
        """`num_labels` counts the predicted positions of the update in all processes, so each token weighs the same
        however the batch is divided."""
        if self.average is not None:
            self.average.begin(step)
        self.factor.fill_(self.gradients.copies / max(num_labels, 1))

    def seed_for(self, index: int) -> None:
        """Dropout depends on (seed, number of the micro-batch), not on what ran before or where."""
        seed_all(self.seed, index, *self.random_keys)

    def learn(self, batch: Batch) -> Tensor:
        """The summed loss of a micro-batch; its gradient, times `factor`, is added to what the parameters have."""
        with autocast(self.precision, self.device):
            loss = self.gradients.model(batch)
        self.scaler.scale(loss * (self.factor + self.guard.doubt(loss))).backward()
        self.gradients.settle()
        return loss.detach()

    def apply(self) -> Tensor:
        """The norm of all gradients, which are then gone."""
        optimizer = self.optimizer
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
        own = clip_gradients(self.gradients.model, optimizer, self.clip)
        norm = self.gradients.agree(own)
        cancel = self.guard.judge(norm, own)
        if self.scaler.is_enabled():
            for found in self.scaler._found_inf_per_device(optimizer).values():
                torch.maximum(found, cancel, out=found)  # it has looked at the gradients of this process alone
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.found_inf = cancel  # type: ignore[attr-defined]  # as GradScaler sets it
            optimizer.step()
        if self.average is not None:
            self.average.update()
        self.gradients.zero(optimizer)
        return norm
