"""The calls of an accelerated model that have not returned yet: what hooks on its outside decide for its inside."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from stretto.hf.packing import Packing
    from stretto.hf.roles import Stack


@dataclass(frozen=True)
class Facts:
    """What the host knows of a mask."""

    tokens: int  # that layers run on: those it keeps, or a few more
    longest: int  # no row keeps more
    whole: bool  # it keeps everything
    empty: bool  # there is a row of which it keeps nothing
    headless: bool  # there is a row of which it does not keep the first token
    holes: bool  # there is a row of which it keeps several pieces


@dataclass(frozen=True, eq=False)
class Known:
    """What the host knows of a batch."""

    masks: tuple[tuple[Tensor, Facts], ...] = ()
    labels: int = 0  # how many are not ignored, or a few more,
    positions: int = 0  # of so many
    labels_on_padding: bool = False
    fillers: int = 0  # sequences behind those of the rows, for tokens that the mask does not keep


NOTHING = Known()


@dataclass
class Call:
    """A call of a model that has not returned yet."""

    model: nn.Module | None  # None: a piece of work on behalf of the outer one
    outer: Call | None
    rectangle: bool  # whether padding must stay
    lazy: bool  # whether logits are wanted for a loss alone (loss.py)
    labels: Tensor | None = None
    known: Known = NOTHING
    chain: tuple[nn.Module, ...] = ()  # layers whose result the next layer alone reads
    stack: Stack | None = None
    own: Packing | None = None
    memory: Packing | None = None  # of the encoder's output
    packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # what all layers get, and it without padding
    angles: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # cosines as they were given, and what the kernel reads


known_batch: ContextVar[Known | None] = ContextVar("stretto_known_batch", default=None)  # by who calls the model
_call: ContextVar[Call | None] = ContextVar("stretto_call", default=None)


def current_call() -> Call | None:
    return _call.get()


def set_call(call: Call | None) -> None:
    _call.set(call)
