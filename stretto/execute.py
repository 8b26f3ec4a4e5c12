"""How an update runs. An executor takes the micro-batches of an update to its end: here, one operation after the other,
each launched by the host. graphs.py has those that replay recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.batch import Batch
from stretto.gradients import Gradients
from stretto.runtime import Runtime


class Work(Protocol):
    """What an executor runs: step.Update for Stretto's own models, or the update of a loop of one's own."""

    gradients: Gradients
    device: torch.device

    def seed_for(self, index: int) -> None: ...

    def learn(self, batch: Any) -> Tensor: ...

    def apply(self) -> Tensor: ...


class Executor:
    """Launches every operation by itself."""

    agrees_late = False  # whether a stop is agreed on some updates after a process was asked for it

    def __init__(self, work: Work) -> None:
        self.work = work
        self.notes: list[str] = []  # what the log should say

    @property
    def recording_seconds(self) -> float:
        """The time that recording has taken so far."""
        return 0.0

    def prepare(self, batch: Batch) -> Batch:
        """The batch in a shape that suits this executor, on the host."""
        return batch

    def run(self, batches: Sequence[tuple[int, Any]], key: Hashable = ()) -> tuple[Tensor, Tensor]:
        """One update from this process's micro-batches, each with its number. Updates with another `key` than the last
        one launch other operations; None: this one alone does. Returns the summed loss of these batches, and what
        `apply` gives; both are still on the device."""
        gradients, losses = self.work.gradients, list[Tensor]()
        for index, batch in batches:
            self.work.seed_for(index)
            with gradients.sync(last=index == batches[-1][0]):
                losses.append(self.learn(batch))
        gradients.finish()
        return reduce(torch.add, losses), self.apply()

    def exchange(self, counts: list[int], rt: Runtime) -> list[int]:
        """The sums over all processes of what each counts in this update; the last one is whether to stop."""
        return rt.sum_over_ranks(counts)

    def settle(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Ends what is still under way, so that all processes have made the same updates. Given what `run` has
        returned, gives the loss of that update, as far as it was computed in this process, and its norm."""
        return loss, norm

    def end_updates(self) -> None:
        """The same, when nobody asks for the loss any more."""

    def resume(self, step: int, batches_of: Callable[[int], list[tuple[int, Any]]]) -> None:
        """Before update number `step`, the first of this run. `batches_of` gives the micro-batches of any update."""

    def turn_to(self, key: Hashable) -> None:
        """Before a batch of an update with this `key`, or one (None) that is not like others."""

    def forget(self) -> None:
        """What was run so far launches other operations from now on."""

    def learn(self, batch: Any) -> Tensor:
        return self.work.learn(batch)

    def apply(self) -> Tensor:
        return self.work.apply()

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes
