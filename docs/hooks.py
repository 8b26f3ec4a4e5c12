"""What mkdocs does for the site besides turning docs/*.md into pages (mkdocs.yml names this file).

The documents are written for a reader of the repository, and their links work there. Here the files beside docs become
pages, links to sources lead to copies of these, so that the site needs no network, and pages that list what the code
says are filled from the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any, get_type_hints

import typer.cli
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from stretto import errors
from stretto.cli import app
from stretto.config import Config, to_toml
from stretto.options import list_options

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {"index.md": "README.md"} | {name.lower(): name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")
FILL = re.compile(r"^<!-- fill: (\w+) -->$", re.MULTILINE)
ITEM = re.compile(r" *(?:-|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for uri, name in BESIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    folder = (ROOT / BESIDE[here] if here in BESIDE else ROOT / "docs" / here).parent

    def lead(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        return f"]({relpath(find_place(target, config, files), dirname(here) or '.')}{match[2] or ''})"

    return FILL.sub(lambda match: FILLS[match[1]](), LINK.sub(lead, adapt_lists(markdown)))


def adapt_lists(markdown: str) -> str:
    """GitHub needs no empty line in front of a list or a table, and reads lists in lists from two spaces on;
    python-markdown needs a line, and four spaces."""
    lines, fenced, before = [""], False, ""
    for line in markdown.splitlines():
        fenced ^= (fence := line.startswith("```"))
        kind = "" if fenced or fence else "table" if line.startswith("|") else "list" if ITEM.match(line) else ""
        if kind and kind != before and lines[-1]:
            lines.append("")
        lines.append(re.sub(r"^ {2,3}(?=- )", "    ", line) if kind else line)
        before = before if line.startswith(" ") and not kind else kind
    return "\n".join(lines[1:])


def find_place(target: Path, config: MkDocsConfig, files: Files) -> str:
    """Where the site has a file of the repository; sources come into it by being asked for."""
    name = target.relative_to(ROOT).as_posix()
    beside = next((uri for uri, source in BESIDE.items() if source == name), "")
    if beside or name.startswith("docs/"):
        return beside or name.removeprefix("docs/")
    uri = f"source/{name}.txt"  # browsers show it
    if uri not in files.src_uris:
        files.append(File.generated(config, uri, abs_src_path=str(target)))
    return uri


def list_all_options() -> str:
    parts = [part for name, section in get_type_hints(Config).items() for part in _list_section(name, section)]
    return "\n\n".join(parts)


def _list_section(name: str, section: type[Any]) -> list[str]:
    options = list_options(section)
    parts = [f"## [{name}]"]
    for option in options:
        parts += [
            f"### {name}.{option.name}",
            f"`{to_toml(option.default)}` by default; {option.kind.replace('*', '')}",
            option.meaning.replace("<", "&lt;"),
        ]
    inner = [option for option in options if option.section is not None]
    return parts + [part for option in inner for part in _list_section(f"{name}.{option.name}", option.section)]  # type: ignore[arg-type]


def list_commands() -> str:
    command = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="stretto")
    return text[text.index("## ") :]


def list_exit_codes() -> str:
    return (errors.__doc__ or "").partition("\n\n")[2]


FILLS = {"options": list_all_options, "commands": list_commands, "codes": list_exit_codes}
