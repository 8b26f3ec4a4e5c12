"""The parts of a pipeline: how a model is cut into modules, what a process holds of a module while micro-batches are
between their two passes, and the channels that messages travel through."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.config import ModelConfig
from stretto.model import Chain, LMHead
from stretto.parallel.schedule import Schedule, balance
from stretto.runtime import Runtime

# Bytes in front of a message: the number of its micro-batch, and whether its update was cancelled. As many as tensors
# are aligned to: on a CPU, matrix products of tensors that begin elsewhere may be rounded otherwise.
HEADER = 64
Weights = dict[str, Tensor]


class Channel:
    """Messages from one process to another, which arrive in the order in which they were sent. Channels have groups of
    their own: NCCL knows no tags, and two processes of a ring are neighbours twice."""

    def __init__(self, source: int, target: int, rt: Runtime, limit: int) -> None:
        """`limit`: how many messages may be under way; the receiver never lags behind by more. Every process has to
        make every channel."""
        self.source, self.target, self.device, self.limit = source, target, rt.device, limit
        self.group = dist.new_group([source, target], timeout=timedelta(seconds=rt.timeout_s))
        self.sent: deque[tuple[Any, Tensor]] = deque()
        self.expected: dict[int, tuple[Any, Tensor, torch.Size, torch.dtype]] = {}

    def send(self, number: int, payload: Tensor, cancelled: Tensor | None = None) -> None:
        buffer = self._allocate(payload.shape, payload.dtype)
        header, body = self._divide(buffer, payload.shape, payload.dtype)
        header[0] = number
        header[1] = 0 if cancelled is None else cancelled
        body.copy_(payload)
        self.sent.append((dist.isend(buffer, self.target, self.group), buffer))
        while len(self.sent) > self.limit:
            self.sent.popleft()[0].wait()

    def expect(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Receives a message while other work goes on."""
        if number not in self.expected:
            buffer = self._allocate(shape, dtype)
            work = dist.irecv(buffer, self.source, self.group)
            self.expected[number] = work, buffer, torch.Size(shape), dtype

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """The message, and whether its update was cancelled behind it."""
        work, buffer, shape, dtype = self.expected.pop(number)
        work.wait()
        header, body = self._divide(buffer, shape, dtype)
        torch._assert_async(header[0] == number, f"a message of another micro-batch than {number} has come")
        return body, header[1]

    def finish(self) -> None:
        while self.sent:
            self.sent.popleft()[0].wait()

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = HEADER + torch.Size(shape).numel() * dtype.itemsize
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    @staticmethod
    def _divide(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return buffer[:HEADER].view(torch.int64), buffer[HEADER:].view(dtype).view(*shape)


@dataclass(frozen=True)
class Flight:
    """A micro-batch between its two passes through a module."""

    given: Tensor | None  # what the module was given, which gets a gradient; None: tokens
    out: Tensor  # what it made: the stream, or the loss


class Stage:
    """A module of the pipeline, in the process that runs it."""

    def __init__(self, number: int, schedule: Schedule, blocks: range, names: Sequence[str], model: Chain) -> None:
        self.number, self.blocks, self.model = number, blocks, model
        self.is_first, self.is_last = number == 0, number == schedule.modules - 1
        self.own = {name: model.get_parameter(name) for name in names}
        self.places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
        self.clock = 0  # updates that are over
        self.before: Weights = {}  # the weights before the last update
        self.used: dict[int, Weights] = {}  # update -> leaves that its passes run on, until its last backward pass
        self.flights: dict[int, Flight] = {}  # by the number of the micro-batch
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}  # gradients that have come already, with their verdicts
        self.norm: Tensor | None = None  # of the gradients of the next update
        self.last_norm = torch.zeros(())
        self.cancelled = torch.zeros((), dtype=torch.int64)  # whether a module behind has cancelled this update
        self.done = {"forward": 0, "backward": 0, "update": 0}  # actions

    def borrow(self, name: str) -> None:
        """Passes use a parameter of another module, too."""
        owner, _, leaf = name.rpartition(".")
        self.places[name] = self.model.get_submodule(owner), leaf

    @contextmanager
    def running_on(self, weights: Weights) -> Iterator[None]:
        """Lets the model compute with these tensors in the place of its parameters."""
        usual = {name: owner._parameters[leaf] for name, (owner, leaf) in self.places.items()}
        try:
            for name, (owner, leaf) in self.places.items():
                owner._parameters[leaf] = weights[name]  # type: ignore[assignment]
            yield
        finally:
            for name, (owner, leaf) in self.places.items():
                owner._parameters[leaf] = usual[name]


def find_names(model: Chain, spans: Sequence[range], module: int) -> list[str]:
    """The parameters of a module."""
    stack = model.stack_name
    starts = [f"{stack}.blocks.{number}." for number in spans[module]]
    starts += ["embedding."] if module == 0 else []
    starts += [f"{stack}.norm.", "head."] if module == len(spans) - 1 else []
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(starts))]


def find_spans(cfg: ModelConfig, schedule: Schedule, cuts: Sequence[int]) -> list[range]:
    """The blocks of each module."""
    if cuts:
        return [range(*ends) for ends in pairwise([0, *cuts, cfg.layers])]
    inner = cfg.mlp_width or 4 * cfg.width
    block = 4 * cfg.width + (3 if cfg.activation == "swiglu" else 2) * inner  # products of a token, by the width
    labels = 1.0 if cfg.kind == "decoder" else 0.15
    return balance([1.0] * cfg.layers, schedule.modules, schedule.ring, last=labels * cfg.vocab / block)


def cut(model: Chain, spans: Sequence[range], mine: Sequence[int]) -> None:
    """Takes out what other processes have, whose names stay free. Blocks that are not here become empty modules."""
    first, last, stack, embedding, head = 0 in mine, len(spans) - 1 in mine, model.stack, model.embedding, model.head
    here = {number for module in mine for number in spans[module]}
    for number in set(range(len(stack.blocks))) - here:
        stack.blocks[number] = nn.Identity()
    if not first:
        embedding.position = embedding.token_type = None
        embedding.norm = nn.Identity()
        if last and model.cfg.tied and embedding.token is not None:
            embedding.token.weight.requires_grad_(False)  # borrowed: module 0 learns for both
        else:
            embedding.token = None
    if not last:
        assert isinstance(head, LMHead)
        stack.norm = nn.Identity()
        head.transform = head.norm = None
        head.weight = head.bias = None
    for number in here:
        stack.blocks[number].by_place = True  # type: ignore[assignment]
