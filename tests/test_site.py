"""The documentation as a site: it builds without a warning, asks for nothing from outside, and is complete."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from stretto.cli import app
from stretto.errors import StrettoError
from stretto.options import explain_config
from stretto.recipes import load_recipe
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")
# Outside of code: what stands there as it was typed has not been understood.
TYPED = re.compile(r"^ *(?:- |\d+\. |\|[- :|]+\|$|```).*|<!-- fill", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_pages_ask_for_nothing_from_outside(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 35
    assert {page.name: found for page in pages if (found := OUTSIDE.findall(read(page)))} == {}
    assert [sheet for sheet in site.rglob("*.css") if re.search(r"url\([\"']?(?:https?:)?//", read(sheet))] == []


def test_lists_and_tables_are_understood(site: Path) -> None:
    for page in site.rglob("*.html"):
        prose = re.sub(r"<(pre|script|style)\b.*?</\1>", "", read(page), flags=re.DOTALL)
        assert TYPED.findall(prose) == [], page.name


def test_what_is_typed_and_what_is_outside_is_found() -> None:
    """The control of the tests above."""
    assert OUTSIDE.findall('<script defer src="https://unpkg.com/x"></script><link href=//fonts.example/a rel=x>')
    assert TYPED.findall("a:\n- one") and TYPED.findall("b\n|---|---:|\n") and not TYPED.findall("a - b | c")


def test_every_page_has_one_place() -> None:
    pages = re.findall(r": (\S+\.md)$", read(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert len(pages) > 30 and sorted(pages) == sorted(set(pages))


def test_every_option_command_and_exit_code_is_there(site: Path) -> None:
    text = {name: html.unescape(read(site / f"{name}.html")) for name in ("options", "commands", "exit-codes")}
    keys, section = [], ""
    for line in explain_config(load_recipe({})).splitlines():
        bare = line.removeprefix("# ")
        section = bare[1:-1] if re.fullmatch(r"\[[\w.]+\]", bare) else section
        if found := re.match(r"(\w+) = .*; default: ", bare):
            keys.append(f"{section}.{found[1]}")
    assert len(keys) > 120 and [key for key in keys if f">{key}<" not in text["options"]] == []
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"stretto {name}</code>" not in text["commands"]] == []
    known = [kind for kind in StrettoError.__subclasses__() if kind.__module__ == StrettoError.__module__]
    codes = {kind.exit_code for kind in known}
    assert [code for code in codes if f"<td>{code}</td>" not in text["exit-codes"]] == []


def test_links_to_sources_lead_to_copies(site: Path) -> None:
    assert "source/stretto/train.py.txt" in read(site / "index.html")
    assert read(site / "source" / "stretto" / "train.py.txt") == read(ROOT / "stretto" / "train.py")
