"""The calls of an accelerated model that have not returned yet: what hooks on its outside decide for its inside."""

from __future__ import annotations

from collections.abc import Collection
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
    headless: bool  # there is another row of which it does not keep the first token
    tailless: bool  # and one of which it does not keep the last one
    holes: bool  # there is a row of which it keeps several pieces
    ids: str  # at padding: "own", the configuration's; "other" ones; "none" are known

    def sides(self) -> list[str]:
        """Where padding is, in the words of draw.py."""
        found = {"right": self.tailless, "left": self.headless, "holes": self.holes, "empty": self.empty}
        return [side for side, there in found.items() if there]


@dataclass(frozen=True, eq=False)
class Known:
    """What the host knows of a batch."""

    masks: tuple[tuple[Tensor, Facts], ...] = ()
    labels: int = 0  # how many are not ignored, or a few more,
    positions: int = 0  # of so many
    labels_on_padding: bool = False
    fillers: int = 0  # sequences behind those of the rows, for tokens that the mask does not keep


NOTHING = Known()


@dataclass(frozen=True)
class Tried:
    """The batches with which a model, as the one that is called, gave the same results without padding. Whatever it
    does with what its layers give, it was seen to do then."""

    kinds: frozenset[tuple[str, str]] = frozenset()  # where padding is, and its ids, or "positions" if given
    names: frozenset[str] = frozenset()  # of the arguments that it was given
    labels: str = ""  # of what they were: "tokens", "rows"; empty: of nothing
    options: frozenset[str] = frozenset()  # the outputs that were asked for

    def covers(self, facts: Facts, given: Collection[str]) -> bool:
        """Whether a batch with such a mask, and arguments of these names, is of a kind that was tried."""
        forms = [facts.ids] + (["positions"] if "position_ids" in given else [])
        return all((side, form) in self.kinds for side in facts.sides() for form in forms)


UNTRIED = Tried()


@dataclass
class Call:
    """A call of a model that has not returned yet."""

    model: nn.Module | None  # None: a piece of work on behalf of the outer one
    outer: Call | None  # of a model around it
    rectangle: bool  # whether padding must stay
    lazy: bool  # whether logits are wanted for a loss alone (loss.py)
    labels: Tensor | None = None
    known: Known = NOTHING
    trial: bool = False  # whether padding is left out of batches that were not tried: they are, now
    tried: Tried = UNTRIED  # of the outermost model
    given: frozenset[str] = frozenset()  # the names of its arguments
    ids: Tensor | None = None  # and its tokens
    as_tuple: bool = False  # whether it returns a tuple, in which a cache has its place
    chain: tuple[nn.Module, ...] = ()  # layers whose result the next layer alone reads
    stack: Stack | None = None
    own: Packing | None = None
    memory: Packing | None = None  # of the encoder's output
    packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # what all layers get, and it without padding
    angles: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # cosines as they were given, and what the kernel reads
    counted: bool = False  # whether a loss was computed for as many labels as are known
    ran_packed: bool = False  # whether layers inside of it ran without padding
    before: Call | None = None  # what goes on when it has returned: it may be a call of a model that is no part of it


known_batch: ContextVar[Known | None] = ContextVar("stretto_known_batch", default=None)  # by who calls the model
_call: ContextVar[Call | None] = ContextVar("stretto_call", default=None)


def current_call() -> Call | None:
    return _call.get()


def set_call(call: Call | None) -> None:
    _call.set(call)
