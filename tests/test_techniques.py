"""The seam that techniques plug into: one order, all reasons at once, nothing touched when refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from stretto import techniques
from stretto.config import ModelConfig, TechniquesConfig
from stretto.errors import ConfigError
from stretto.model import build_model
from stretto.techniques import load_all
from stretto.techniques.technique import Sites, Technique
from tests.models import apply_techniques

CALLS: list[str] = []  # what was applied, to how many blocks


@dataclass(frozen=True)
class Switches(TechniquesConfig):
    first: str | None = None
    second: str | None = None


class Named(Technique):
    exact = True

    def check(self, others: Sequence[Technique]) -> list[str]:
        return [] if self.cfg == "good" else [f"{self.cfg} is no good"]

    def apply(self, model: nn.Module, sites: Sites) -> None:
        CALLS.append(f"{self.name} on {len(sites['block'])} blocks")


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("first", "second"):
        module: Any = ModuleType(name)
        module.technique = type(name, (Named,), {"name": name, "__module__": name})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(techniques, "ORDER", ("second", "first"))
    CALLS.clear()
    return CALLS


def apply(**switches: Any) -> techniques.Techniques:
    return apply_techniques(build_model(ModelConfig(vocab=8)), Switches(**switches))


def test_they_are_applied_in_order_and_only_when_switched_on(applied: list[str]) -> None:
    both, one = apply(first="good", second="good"), apply(first="good")
    assert applied == ["second on 4 blocks", "first on 4 blocks", "first on 4 blocks"]
    assert [each.name for each in both] == ["second", "first"] and [each.name for each in one] == ["first"]


def test_every_reason_is_given_and_nothing_is_changed(applied: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"techniques\.second: bad is no good; techniques\.first: worse is no good"):
        apply(first="worse", second="bad")
    assert applied == []


def test_a_technique_exists_for_each_switch_in_its_order() -> None:
    """Those of parallelism are numbers, in [parallel]."""
    assert [cls.name for cls in load_all()] == [*TechniquesConfig.__dataclass_fields__, "pipeline", "sequence"]
