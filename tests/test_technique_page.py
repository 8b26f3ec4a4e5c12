"""docs/add-a-technique.md shows a whole technique: it is taken from the page and used."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import stretto.techniques
from stretto.config import Config, build_config
from stretto.errors import ConfigError
from stretto.report import read_events
from stretto.techniques import open_techniques
from stretto.techniques.technique import Context
from stretto.train import train
from tests.runs import MakeConfig

PAGE = Path(__file__).parents[1] / "docs" / "add-a-technique.md"


@pytest.fixture
def page_technique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's technique, with its section beside it, since config.py has none."""
    section, _, technique = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    technique = technique.replace("from stretto.config import TokenNoiseConfig\n", "")
    header = "from dataclasses import dataclass\nfrom stretto.config import _require\n"
    found = "    @classmethod\n    def find_options(cls, *_):\n        return TokenNoiseConfig(OPTIONS['share'])\n"
    (tmp_path / "page_noise.py").write_text(header + "OPTIONS = {'share': 0.5}\n" + section + technique + "\n" + found)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "page_noise", raising=False)
    monkeypatch.setattr(stretto.techniques, "ORDER", (*stretto.techniques.ORDER, "page_noise"))


def losses(config: Config) -> list[float]:
    return [event["loss"] for event in read_events(train(config)) if "loss" in event]


def test_the_technique_of_the_page_works(
    page_technique: None, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = losses(make_config(run__dir=str(tmp_path / "noisy")))
    assert "token noise from 50% down" in capsys.readouterr().out
    sys.modules["page_noise"].OPTIONS["share"] = 0.0
    quiet = losses(make_config(run__dir=str(tmp_path / "quiet")))
    assert noisy != quiet
    sys.modules["page_noise"].OPTIONS["share"] = 0.5
    assert losses(make_config(run__dir=str(tmp_path / "again"))) == noisy


def test_it_says_what_it_cannot_do(page_technique: None) -> None:
    config = build_config({"data": {"task": "images"}, "model": {"preset": "vit-tiny"}})
    with pytest.raises(ConfigError, match=re.escape("techniques.token_noise: images have no tokens to replace")):
        open_techniques(config, Context(config.model, torch.device("cpu"), "fp32"))
