"""The techniques, one file each, in the one order in which they are applied and called. `open_techniques` makes those
that a recipe switches on and checks them, before anything is built; `Techniques` passes each hook on to all of them.

technique.py says what a technique is, and docs/add-a-technique.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from stretto.batch import Batch
from stretto.checkpoint import Stored
from stretto.config import Config, OptimConfig, ParallelConfig, TechniquesConfig
from stretto.errors import ConfigError
from stretto.execute import Executor
from stretto.model import Model
from stretto.runtime import Runtime
from stretto.step import Update
from stretto.techniques.technique import At, Context, Sites, Technique

# Modules, each with one technique: the sections of a recipe and their order in config.py say which there are.
ORDER = (
    *(f"stretto.techniques.{section.name}" for section in fields(TechniquesConfig)),
    *(f"stretto.parallel.{axis}" for axis in ParallelConfig().axes()),
)


def load_all() -> list[type[Technique]]:
    modules = [import_module(path) for path in ORDER]
    return [next(filter(partial(_is_technique_of, module.__name__), vars(module).values())) for module in modules]


def _is_technique_of(module: str, value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Technique) and value.__module__ == module


def open_techniques(config: Config, context: Context) -> Techniques:
    """All reasons against what the recipe switches on are in one error."""
    options = {cls: cls.find_options(config, context.device) for cls in load_all()}
    active = Techniques(tuple(cls(cfg, context) for cls, cfg in options.items() if cfg is not None))
    reasons = [f"{each.key}: {reason}" for each in active for reason in each.check(active.others(each))]
    if reasons:
        raise ConfigError("; ".join(reasons))
    return active


def identify(config: Config) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run, of all techniques that are not exact."""
    kinds = [cls for cls in load_all() if not cls.exact]
    return {cls.name: cls.identity(cls.find_options(config, torch.device("cpu"))) for cls in kinds}


def find_optimizers() -> list[str]:
    """The sections of techniques that bring an optimizer."""
    return [f"techniques.{cls.name}" for cls in load_all() if cls.build_optimizer is not Technique.build_optimizer]


def open_outside(given: Mapping[str, Any], context: Context) -> Techniques:
    """The techniques of a model of others, by their names; those that such models have by default unless told
    otherwise."""
    kinds = {cls.name: cls for cls in load_all()}
    for name in given.keys() - kinds.keys():
        raise TypeError(f"there is no technique {name!r}; there are: {', '.join(kinds)}")
    values = {cls: given.get(name, cls.default_outside) for name, cls in kinds.items()}
    active = Techniques(tuple(cls(cls.read_options(value), context) for cls, value in values.items() if value))
    reasons = [f"{each.name}: {reason}" for each in active for reason in each.check(active.others(each))]
    if reasons:
        raise ValueError("; ".join(reasons))
    return active


def find_changes(config: Config, device: torch.device) -> list[Technique]:
    """The techniques of a run that have made another function of its model."""
    context = Context(config.model, device, "fp32", steps=config.train.steps)
    options = {cls: cls.find_options(config, device) for cls in load_all() if cls.changes_function}
    return [cls(cfg, context) for cls, cfg in options.items() if cfg is not None]


@dataclass(frozen=True)
class Techniques:
    """The techniques of a run."""

    active: tuple[Technique, ...] = ()

    def set_context(self, **changes: Any) -> None:
        """What was not known when they were opened: the length of a run, a model that has moved."""
        for technique in self:
            technique.context = replace(technique.context, **changes)

    def __iter__(self) -> Iterator[Technique]:
        return iter(self.active)

    @property
    def gaps(self) -> bool:
        return any(technique.gaps for technique in self)

    @property
    def has_optimizer(self) -> bool:
        return any(type(technique).build_optimizer is not Technique.build_optimizer for technique in self)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The type that parameters are kept in."""
        return next((technique.parameter_dtype for technique in self if technique.parameter_dtype), torch.float32)

    @property
    def by_block(self) -> bool:
        return any(technique.by_block for technique in self)

    @property
    def num_kinds(self) -> int:
        return prod(technique.num_kinds for technique in self)

    def apply(self, model: nn.Module, sites: Sites) -> None:
        for technique in self:
            technique.apply(model, sites)

    def start_value(self, name: str, value: Tensor) -> Tensor:
        for technique in self:
            value = technique.start_value(name, value)
        return value

    def build_optimizer(self, groups: list[dict[str, Any]], cfg: OptimConfig) -> torch.optim.Optimizer | None:
        found = (technique.build_optimizer(groups, cfg) for technique in self)
        return next((optimizer for optimizer in found if optimizer is not None), None)

    @property
    def has_executor(self) -> bool:
        return any(technique.has_executor for technique in self)

    def build_executor(self, model: Model, update: Update, rt: Runtime, optim: OptimConfig) -> Executor | None:
        found = (technique.build_executor(model, update, rt, optim) for technique in self)
        return next((executor for executor in found if executor is not None), None)

    def prepare(self, batch: Batch, at: At) -> Batch:
        for technique in self:
            batch = technique.prepare(batch, at)
        return batch

    def random_keys(self) -> tuple[int, ...]:
        return tuple(key for technique in self for key in technique.random_keys(self.others(technique)))

    def begin(self, step: int, share: float, scaler: torch.amp.GradScaler | None) -> None:
        for technique in self:
            technique.begin(step, share, scaler)

    def end(self, step: int) -> None:
        for technique in self:
            technique.end(step)

    def pattern(self) -> dict[str, Any]:
        return {technique.name: pattern for technique in self if (pattern := technique.pattern())}

    def find_obstacles(self) -> list[str]:
        return [f"{technique.key}{reason}" for technique in self for reason in technique.find_obstacles()]

    def graph_key(self, step: int) -> Hashable:
        keys = tuple(technique.graph_key(step) for technique in self)
        return None if None in keys else keys

    def metrics(self, num_batches: int) -> dict[str, float]:
        return {name: value for technique in self for name, value in technique.metrics(num_batches).items()}

    def take_notes(self) -> list[str]:
        return [note for technique in self for note in technique.take_notes()]

    def state_dict(self) -> dict[str, Any]:
        return {technique.name: state for technique in self if (state := technique.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for technique in self:
            technique.load_state_dict(state.get(technique.name, {}))

    def saves(self, name: str, is_main: bool) -> bool:
        found = (technique.saves(name) for technique in self)
        return next((verdict for verdict in found if verdict is not None), is_main)

    def dump(self) -> dict[str, Tensor]:
        return {name: value for technique in self for name, value in technique.dump().items()}

    def take_part(self, stored: Stored) -> Stored:
        for technique in self:
            stored = technique.take_part(stored)
        return stored

    def describe(self) -> list[str]:
        return [words for technique in self if (words := technique.describe())]

    def others(self, technique: Technique) -> Sequence[Technique]:
        return [other for other in self if other is not technique]
