"""No update that is not finite is ever applied, and all processes decide alike.

The decision is a number on the device: the global gradient norm, which is the same everywhere because gradients were
summed over the processes before it was taken, is finite or not. The optimizer reads that number and leaves
weights and moments untouched. The host looks only when it logs, so a healthy run never waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.errors import NonFiniteError

# How many updates in a row may be cancelled. fp16 finds its loss scale by trying, so it needs some.
LIMITS = {"stop": 0, "skip": 3, "fp16": 20}


class Guard:
    def __init__(self, policy: str, device: torch.device) -> None:
        self.limit = LIMITS[policy]
        self.cancelled = torch.zeros((), device=device)  # in all
        self.streak = torch.zeros((), device=device)  # in a row, up to now
        self.worst = torch.zeros((), device=device)  # the longest such row since the host last looked

    def state_dict(self) -> dict[str, float]:
        return {"cancelled": self.cancelled.item(), "streak": self.streak.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.cancelled.fill_(state["cancelled"])
        self.streak.fill_(state["streak"])

    def judge(self, grad_norm: Tensor) -> Tensor:
        """Returns a tensor on the device: 1.0 if the update must be cancelled, else 0.0."""
        bad = (~torch.isfinite(grad_norm)).float()
        # In place: a recorded step finds these tensors where they were.
        self.cancelled += bad
        self.streak.add_(1).mul_(bad)
        torch.maximum(self.worst, self.streak, out=self.worst)
        return bad

    def check(self, step: int) -> int:
        """Counts cancelled updates; an error if too many came in a row. The host waits for the device here."""
        cancelled, worst = torch.stack([self.cancelled, self.worst]).tolist()
        self.worst.copy_(self.streak)
        if worst > self.limit:
            raise NonFiniteError(
                f"the gradient was not finite in {int(worst)} update(s) in a row, at or before step {step}; none was "
                "applied. Lower optim.lr, lengthen optim.warmup, or look at the data of these steps"
                + ("; train.non_finite = 'skip' goes on over single ones" if self.limit == 0 else "")
            )
        return int(cancelled)
