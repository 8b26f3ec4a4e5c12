"""The calls of an accelerated model that have not returned yet: what hooks on its outside decide for its inside."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from stretto.hf.packing import Packing
    from stretto.hf.roles import Stack


@dataclass
class Call:
    """A call of a model that has not returned yet."""

    model: nn.Module | None  # None: a piece of work on behalf of the outer one
    outer: Call | None
    rectangle: bool  # whether padding must stay
    lazy: bool  # whether logits are wanted for a loss alone (loss.py)
    masks: Sequence[tuple[Tensor, list[int]]] = ()  # what is known of masks (packing.py)
    chain: tuple[nn.Module, ...] = ()  # layers whose result the next layer alone reads
    stack: Stack | None = None
    own: Packing | None = None
    memory: Packing | None = None  # of the encoder's output
    packed: list[tuple[Tensor, Tensor]] = field(
        default_factory=list
    )  # what all layers are given, and it without padding
    angles: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # cosines as they were given, and what the kernel reads


_call: ContextVar[Call | None] = ContextVar("stretto_call", default=None)


def current_call() -> Call | None:
    return _call.get()


def set_call(call: Call | None) -> None:
    _call.set(call)
