"""What README and the documents tell people to type is understood by the command line, and the keys that they name
exist. tests/test_docs.py runs it."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
import typer.main

from stretto.bench.workloads import find_workloads
from stretto.cli import app
from stretto.config import Config, load_config
from stretto.errors import ConfigError
from stretto.recipes import find_recipe, list_recipes

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
USAGE_ERROR: Any = typer.BadParameter.__base__  # of click, which newer versions of typer have inside
PLACEHOLDER = re.compile(r"[A-Z]+|\.\.\.")  # NAME, RECIPE


def blocks(path: Path) -> list[list[str]]:
    """The lines of code in fences without a language, or of a shell's, continued ones as one."""
    found = FENCE.findall(path.read_text(encoding="utf-8"))
    return [text.replace("\\\n", " ").splitlines() for language, text in found if language in ("", "sh", "bash")]


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def of_stretto(line: list[str]) -> list[str] | None:
    """The arguments of the command `stretto`, also under torchrun."""
    if line[:1] == ["stretto"]:
        return line[1:]
    if line[:3] == ["srun", "bash", "-c"]:
        return of_stretto(words(line[3]))
    return line[line.index("stretto") + 1 :] if line[:1] in (["torchrun"], ["srun"]) and "stretto" in line else None


def mentioned(path: Path) -> list[list[str]]:
    text = path.read_text(encoding="utf-8")
    code = [line for block in blocks(path) for line in block] + INLINE.findall(FENCE.sub("", text))
    starts = ("stretto ", "torchrun ", "srun ")
    found = [of_stretto(words(line.strip())) for line in code if line.strip().startswith(starts)]
    return [arguments for arguments in found if arguments]


def check(arguments: list[str]) -> None:
    """That the command line understands them, and that the recipe, its keys and the workloads they name are there."""
    name, *rest = arguments
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    values, _, _ = command.make_parser(typer.Context(command, **command.context_settings)).parse_args(list(rest))
    if name == "train":
        recipe = values["recipe"] if values["recipe"] in list_recipes() else "causal-lm"  # another one may say anything
        overrides = values.get("override") or []
        load_config(find_recipe(recipe), [one for one in overrides if not one.startswith("model.init=")])  # not here
    if name == "bench":
        find_workloads([workload for workload in values["workloads"] or [] if not PLACEHOLDER.fullmatch(workload)])


MISTAKEN = ROOT / "docs" / "troubleshooting.md"  # has commands that are not understood, on purpose


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != MISTAKEN], ids=lambda path: path.stem)
def test_commands_in_documents_are_understood(path: Path) -> None:
    for arguments in mentioned(path):
        check(arguments)


def test_commands_are_found_and_mistakes_are_seen() -> None:
    """The control of the test above."""
    assert len(mentioned(ROOT / "README.md")) > 8 and len(mentioned(ROOT / "docs" / "standardize.md")) > 3
    assert ["launch", "-n", "8", "train", "long.toml"] in mentioned(ROOT / "docs" / "sequence.md")
    wrong = ["trian demo", "train demo --sett a.b=1", "train demo --set train.stesp=1", "bench gpt3", "eval --step 1 x"]
    for line in wrong:
        with pytest.raises((KeyError, USAGE_ERROR, ConfigError)):
            check(words(line))


def has_key(section: Any, names: list[str]) -> bool:
    if not names:
        return True
    kinds = [section, *get_args(section)]
    found = next((kind for kind in kinds if is_dataclass(kind)), None)
    known = {} if found is None else get_type_hints(found)
    return names[0] in known and has_key(known[names[0]], names[1:])


def find_keys(path: Path) -> list[str]:
    """Finds `section.key = value` everywhere, and `section.key` in README; elsewhere that may be Python."""
    sections = "|".join(item.name for item in fields(Config))
    value = " ?= ?.*" if path.name != "README.md" else "( ?= ?.*)?"
    key = re.compile(rf"(?:--set )?((?:{sections})(?:\.[a-z_0-9]+)+){value}")
    return [match[1] for code in INLINE.findall(path.read_text(encoding="utf-8")) if (match := key.fullmatch(code))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_keys_in_documents_exist(path: Path) -> None:
    assert [name for name in find_keys(path) if not has_key(Config, name.split("."))] == []


def test_keys_of_readme_are_found() -> None:
    """The control of the test above."""
    assert len(find_keys(ROOT / "README.md")) > 5
