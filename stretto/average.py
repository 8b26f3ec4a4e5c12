"""A running mean of the weights, which is evaluated, and used after training, in their place (train.ema).

After update number t, counted from 0, the mean m of a weight w becomes

    m + (1 - d) (w - m),      d = min(ema, t / (t + 10)),

so that the first values, which are random, are not in it, and a short run has a mean over its last tenth. It is kept in
fp32 whatever weights are kept in; a weight in two halves counts with both. Like an optimizer's update it goes from
tensor to tensor where these are, in each process for the rows that it has, and asks the host nothing: it may be
recorded as a part of the step. Only d comes from the host, before each step. An update that is cancelled counts: the
mean then moves towards weights that have not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stretto.optim import weight_reader, weight_writer
from stretto.weights import find_local

RAMP = 10  # one over the share of a short run that its mean is over


class Average:
    def __init__(self, optimizer: torch.optim.Optimizer, ema: float) -> None:
        self.ema, self.read, self.write = ema, weight_reader(optimizer), weight_writer(optimizer)
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        self.means = {p: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in weights}
        self.share = torch.zeros((), device=weights[0].device)  # 1 - d

    def begin(self, step: int) -> None:
        """Before update number `step`."""
        self.share.fill_(1 - min(self.ema, step / (step + RAMP)))

    @torch.no_grad()
    def update(self) -> None:
        for weight, mean in self.means.items():
            find_local(mean).lerp_(find_local(self.read(weight)), self.share)

    def count_bytes(self) -> int:
        return sum(find_local(mean).nbytes for mean in self.means.values())

    @contextmanager
    def in_place_of_weights(self, model: nn.Module) -> Iterator[None]:
        """The model computes with the means. Afterwards its weights are back, bit for bit."""
        before = {weight: self.read(weight).clone() for weight in self.means}
        self._put(model, self.means)
        try:
            yield
        finally:
            self._put(model, before)

    @torch.no_grad()
    def _put(self, model: nn.Module, values: Mapping[Tensor, Tensor]) -> None:
        for weight, value in values.items():
            self.write(weight, value)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what it has gathered in a pass without a backward pass may still be there


def use_means(average: Average | None, model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext() if average is None else average.in_place_of_weights(model)
