"""The seam that techniques plug into: one order, all reasons at once, nothing touched when refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from stretto import techniques
from stretto.config import ModelConfig, TechniquesConfig
from stretto.errors import ConfigError
from stretto.model import build_model, sites

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Switches(TechniquesConfig):
    first: str | None = None
    second: str | None = None


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for name in ("first", "second"):
        module: Any = ModuleType(name)
        module.check = lambda cfg, model, device, precision: [] if cfg == "good" else [f"{cfg} is no good"]
        module.apply = lambda model, cfg, roles, name=name: calls.append(f"{name} on {len(roles['block'])} blocks")
        monkeypatch.setitem(sys.modules, f"stretto.techniques.{name}", module)
    monkeypatch.setattr(techniques, "ORDER", ("second", "first"))
    return calls


def apply(cfg: TechniquesConfig) -> nn.Module:
    model = build_model(ModelConfig(vocab=8))
    techniques.apply_all(model, cfg, sites(model), CPU, "fp32")
    return model


def test_they_are_applied_in_order_and_only_when_switched_on(applied: list[str]) -> None:
    apply(Switches(first="good", second="good"))
    apply(Switches(first="good"))
    assert applied == ["second on 4 blocks", "first on 4 blocks", "first on 4 blocks"]


def test_every_reason_is_given_and_nothing_is_changed(applied: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"techniques\.second: bad is no good; techniques\.first: worse is no good"):
        apply(Switches(first="worse", second="bad"))
    assert applied == []


def test_a_switch_exists_for_each_technique_in_the_order() -> None:
    assert set(techniques.ORDER) == set(TechniquesConfig.__dataclass_fields__)
