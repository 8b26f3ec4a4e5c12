"""How a module is exchanged, and how that is undone.

A module is exchanged by its class alone: it becomes an instance of a class made of one of ours and its own, under its
own name, and keeps its parameters, children, hooks and attributes. So checkpoints, optimizers, `isinstance` and
everything that looks for modules by class name go on as before. Made classes can be pickled: they are written as what
they are made of.

Every change of a model is noted in a `Journal`, which undoes them from the last one back to any mark.
"""

from __future__ import annotations

import copyreg
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from stretto.hf.layers import NONE, Parts


class Missing:
    """Stands for the value of an attribute that was not there."""


class Mixed(type):
    """The type of made classes."""


@cache
def mix(ours: Any, theirs: Any, parts: Parts) -> Any:
    own = {"parts": parts} if parts != NONE or not hasattr(theirs, "parts") else {}  # a second one of ours keeps them
    made = Mixed(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__, "made_of": (ours, theirs, parts)} | own)
    made.__qualname__ = theirs.__qualname__
    return made


def original(kind: Any) -> Any:
    """The class that ours were mixed into."""
    while hasattr(kind, "made_of"):
        kind = kind.made_of[1]
    return kind


def _take_apart(made: Any) -> Any:
    if "made_of" not in vars(made):  # a class that somebody derived from a made one
        return f"{made.__module__}.{made.__qualname__}"
    return mix, made.made_of


copyreg.pickle(Mixed, _take_apart)


def _read(thing: Any, name: str) -> Any:
    return type(thing) if name == "__class__" else vars(thing).get(name, Missing)


@dataclass
class Journal:
    """The changes of a model, in order."""

    changes: list[tuple[Any, str, Any, Any]] = field(default_factory=list)  # object, attribute, values before and since
    hooks: list[RemovableHandle] = field(default_factory=list)

    def change(self, thing: Any, name: str, value: Any) -> None:
        self.changes.append((thing, name, _read(thing, name), value))
        setattr(thing, name, value)

    def swap(self, module: nn.Module, ours: type[nn.Module], parts: Parts = NONE) -> None:
        kinds: tuple[Any, Any] = (ours, type(module))
        self.change(module, "__class__", mix(*kinds, parts))

    def mark(self) -> int:
        return len(self.changes)

    def undo(self, mark: int = 0) -> None:
        """Every change since the mark, but what others have changed meanwhile: a class that torch has derived from ours
        for a parametrization, for instance, which goes on working."""
        while len(self.changes) > mark:
            thing, name, before, since = self.changes.pop()
            if _read(thing, name) is not since:
                continue
            if before is Missing:
                delattr(thing, name)
            else:
                setattr(thing, name, before)

    def undo_all(self) -> None:
        self.undo()
        while self.hooks:
            self.hooks.pop().remove()
