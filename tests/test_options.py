"""`stretto config`: every option with its meaning, in a form that can be loaded again."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.config import Config, build_config, load_config
from stretto.options import Option, explain_config, list_options, read_meanings
from stretto.presets import PRESETS
from stretto.recipes import list_recipes, load_recipe
from stretto.version import __version__


def walk(section: type[Any], name: str) -> Iterator[tuple[str, Option]]:
    for option in list_options(section):
        yield f"{name}.{option.name}", option
        if option.section is not None:
            yield from walk(option.section, f"{name}.{option.name}")


ALL = [found for name, section in get_type_hints(Config).items() for found in walk(section, name)]


def test_every_option_has_a_meaning() -> None:
    assert len(ALL) > 120
    assert [key for key, option in ALL if not option.meaning.strip()] == []


@dataclass
class Planted:
    known: int = 1  # how many
    # What stands above,
    # over two lines.
    above: Literal["a", "b"] = "a"  # and behind

    unknown: str = "# no comment, though it looks like one"
    ünïcode: str = "é"  # behind more bytes than letters


def test_meanings_are_read_and_their_absence_is_seen() -> None:
    """The control of the test above."""
    assert read_meanings(Planted) == {
        "known": "how many",
        "above": "What stands above, over two lines. and behind",
        "unknown": "",
        "ünïcode": "behind more bytes than letters",
    }


@pytest.mark.parametrize("recipe", ["", *list_recipes()])
def test_what_is_printed_can_be_loaded_and_is_the_same(recipe: str, tmp_path: Path) -> None:
    config = load_recipe(recipe or {}, ["techniques.layer_drop.theta=0.7", "techniques.lean=true"])
    path = tmp_path / "all.toml"
    path.write_text(explain_config(config), encoding="utf-8")
    assert load_config(path) == config


def test_subsections_that_are_off_can_be_switched_on_by_their_lines() -> None:
    """Taking the comment signs from a subsection's lines makes them options, with the values that are the defaults."""
    text = explain_config(Config())
    on = re.sub(r"^# (\[[a-z_.0-9]+\]|[a-z_0-9]+ = .*)$", r"\1", text, flags=re.MULTILINE)
    for key in ("standardize", "fused", "lean", "fp8", "layer_drop", "rope_scaling"):
        on = on.replace(f"\n{key} = ", f"\n# {key} = ")
    assert build_config({"techniques": tomllib.loads(on)["techniques"]}).techniques.layer_drop is not None


def test_kinds_choices_and_changes_are_said() -> None:
    result = CliRunner().invoke(app, ["config", "demo", "--set", "train.steps=7"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "steps = 7  # whole number; default: 1000, changed here" in lines
    assert 'device = "auto"  # one of "auto", "cpu", "cuda"; default: "auto"' in lines
    assert "languages = []  # list, each a text; default: []" in lines
    assert 'fused = "auto"  # "auto", true, false, or a subsection; default: "auto"' in lines
    assert any(line.startswith('preset = ""') and all(name in line for name in PRESETS) for line in lines)
    assert (
        lines[lines.index("steps = 7  # whole number; default: 1000, changed here") - 1] == "# updates of the weights"
    )
    assert CliRunner().invoke(app, ["config"]).output == explain_config(Config())


def test_the_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"stretto {__version__}\n"
