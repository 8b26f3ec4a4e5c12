"""What a Python program gives to a run besides its recipe: a model, data, and callbacks.

A callback is told what a run does, on its main process, and may ask it to stop. It sees numbers and no tensors, and a
run draws nothing from the random numbers of its process that a callback could have moved on: with callbacks, a run does
the same as without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stretto.config import Config
from stretto.errors import ConfigError, Preempted, StrettoError

if TYPE_CHECKING:
    from torch import nn

    from stretto.data import Data
    from stretto.runtime import Runtime


class Callback:
    """The base of all callbacks: a class of yours overrides what it needs. A hook that returns True asks the run to
    save and stop, which all processes do together, at most one step later; otherwise it returns nothing."""

    def after_step(self, step: int, numbers: Mapping[str, float]) -> bool | None:
        """After a step that is logged (train.log_every): `loss`, `lr`, `grad_norm`, `tokens_per_s` and others."""
        return None

    def after_evaluation(self, step: int, scores: Mapping[str, float]) -> bool | None:
        """After an evaluation: `eval_loss`, and what else the task measures."""
        return None

    def after_save(self, step: int, checkpoint: Path) -> bool | None:
        """After a save. The checkpoint may still be on its way to the disk: its folder appears when it is whole."""
        return None


class CallbackError(StrettoError):
    """A callback has failed, and with it the run. The error has the callback's own one as its cause."""


class Callbacks:
    """The callbacks of a run. Around the run, a stop that a callback asked for is no error, in any process."""

    def __init__(self, callbacks: Sequence[Callback] = (), rt: Runtime | None = None) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"{callback!r} cannot be a callback: derive its class from stretto.Callback")
        self.given = bool(callbacks)  # in all processes alike
        self.all, self.rt, self.asked = callbacks if rt is None or rt.is_main else (), rt, False

    def __enter__(self) -> Callbacks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return self.asked and isinstance(error, Preempted)

    def agree(self) -> None:
        """Tells all processes, which call this before they stop, whether a callback of the main one asked for it."""
        if self.given and self.rt is not None:
            self.asked = self.rt.sum_over_ranks([self.asked])[0] > 0

    def after_step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._call("after_step", step, MappingProxyType(dict(numbers)))

    def after_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        self._call("after_evaluation", step, MappingProxyType(dict(scores)))

    def after_save(self, step: int, checkpoint: Path) -> None:
        self._call("after_save", step, checkpoint)

    def _call(self, hook: str, step: int, what: Any) -> None:
        for callback in self.all:
            name = f"the callback {type(callback).__qualname__}.{hook}"
            try:
                stops = getattr(callback, hook)(step, what)
            except Exception as error:
                raise CallbackError(f"{name} failed after step {step}: {type(error).__name__}: {error}") from error
            if stops is not None and not isinstance(stops, bool):
                raise CallbackError(f"{name} returned {stops!r}: return True to stop the run, else nothing")
            if stops and self.rt is not None:
                self.rt.stop = self.asked = True


@dataclass(frozen=True)
class Given:
    """What a run was given; the recipe says where nothing was."""

    model: nn.Module | None = None
    data: Data | None = None
    callbacks: Sequence[Callback] = ()

    def complete(self, config: Config) -> Config:
        """Notes in the configuration, and so in the run folder, what only a program can bring again. An error says what
        a given model cannot have, or that something is missing."""
        if self.model is not None:
            config = _prepare_for(self.model, config)
        elif config.model.own:
            raise ConfigError(f"model.own = {config.model.own!r}: train it from Python, by stretto.train(model=...)")
        if self.data is not None:
            return replace(config, data=replace(config.data, own=_name(self.data)))
        if config.data.own:
            raise ConfigError(f"data.own = {config.data.own!r}: train on it from Python, by stretto.train(data=...)")
        return config


def _prepare_for(model: nn.Module, config: Config) -> Config:
    """Refuses what needs a model of Stretto's own, and switches off what would come by itself."""
    chosen, axes = config.techniques, config.parallel.axes()
    wanted = {
        **{f"techniques.{item.name}": is_dataclass(getattr(chosen, item.name)) for item in fields(chosen)},
        **{f"parallel.{name} = {size}": size > 1 for name, size in axes.items()},
        f"parallel.data = {config.parallel.data!r}": config.parallel.data != "replicate",
        "model.init": bool(config.model.init),
    }
    if refused := [key for key, holds in wanted.items() if holds]:
        raise ConfigError(f"model={_name(model)}: a model of your own cannot have {', '.join(refused)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model={_name(model)} has no parameters to train")
    values = model.state_dict(keep_vars=True)
    if any(value.is_meta for value in values.values()):
        raise ConfigError(f"model={_name(model)} is on the meta device, and has no values to begin with")
    places = [value.data_ptr() for value in values.values() if value.numel()]
    if len(set(places)) < len(places):
        raise ConfigError(
            f"model={_name(model)} has one tensor under two names, and a checkpoint holds each name by itself: keep the"
            " tensor in one module, and use it from there, as in F.linear(x, self.embedding.weight)"
        )
    off = {item.name: None for item in fields(chosen)}
    return replace(config, techniques=replace(chosen, **off), model=replace(config.model, own=_name(model)))


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
