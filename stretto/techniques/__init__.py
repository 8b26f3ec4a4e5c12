"""The techniques, one file each, and the one order in which they are applied.

A technique is a module of this package with
    EXACT                                   whether it leaves the mathematics as it is
    check(cfg, model, device, precision)    reasons why it cannot apply; an empty list if it can
    apply(model, cfg, sites)                changes the model, keeping every state-dict key
and a section in `TechniquesConfig` under its own name, None while it is off.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from stretto.config import TechniquesConfig
from stretto.errors import ConfigError

ORDER: tuple[str, ...] = ("standardize", "fused", "layer_drop")


def apply_all(
    model: nn.Module, cfg: TechniquesConfig, sites: dict[str, list[str]], device: torch.device, precision: str
) -> None:
    """Applies what the recipe switches on; all reasons against it come out in one error, before anything is changed."""
    chosen = [name for name in ORDER if getattr(cfg, name) is not None]
    modules = {name: import_module(f"{__name__}.{name}") for name in chosen}
    reasons = [
        f"techniques.{name}: {reason}"
        for name in chosen
        for reason in modules[name].check(getattr(cfg, name), model, device, precision)
    ]
    if reasons:
        raise ConfigError("; ".join(reasons))
    for name in chosen:
        modules[name].apply(model, getattr(cfg, name), sites)
