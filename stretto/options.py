"""Every option there is, as a recipe that can be loaded again: what `stretto config` prints.

config.py documents each option by a comment, above its field, behind it, or both. The comments are read from the source
of that file, so an option is described in one place, and a test sees that none goes without.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stretto.config import Config, to_toml
from stretto.presets import PRESETS
from stretto.version import __version__

WIDTH = 100  # of a line of comment
KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


@dataclass(frozen=True)
class Option:
    name: str
    meaning: str
    kind: str  # what values it takes, in words
    default: Any
    section: type[Any] | None  # where it is a subsection that can be off: its class


def list_options(section: type[Any]) -> list[Option]:
    """Lists the options of a section of the configuration, in their order."""
    meanings, hints, plain = read_meanings(section), get_type_hints(section), section()
    return [
        Option(
            item.name,
            meanings.get(item.name, ""),
            describe_kind(Literal[("", *PRESETS)] if item.name == "preset" else hints[item.name]),
            getattr(plain, item.name),
            next((part for part in get_args(hints[item.name]) if isinstance(part, type) and is_dataclass(part)), None),
        )
        for item in fields(section)
    ]


def read_meanings(section: type[Any]) -> dict[str, str]:
    """Reads the comments of a section's fields, by the names of the fields."""
    source = textwrap.dedent(inspect.getsource(section))
    lines, body = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: " ".join([*_read_above(lines, node.lineno - 1), *_read_behind(lines, node)])
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _read_above(lines: list[str], at: int) -> list[str]:
    first = at
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    return [line.strip().removeprefix("#").strip() for line in lines[first:at]]


def _read_behind(lines: list[str], node: ast.AnnAssign) -> list[str]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()  # ast counts bytes
    return [rest.removeprefix("#").strip()] if rest.startswith("#") else []


def describe_kind(hint: Any) -> str:
    """Says in words what values a field takes."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(to_toml, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list, each a {KINDS[get_args(hint)[0]]}"
    if get_origin(hint) in (UnionType, Union):
        words = [to_toml(word) for part in get_args(hint) if get_origin(part) is Literal for word in get_args(part)]
        return ", ".join([*words, "true", "false, or a subsection"])
    return KINDS[hint]


def explain_config(config: Config) -> str:
    """Writes a configuration with the meaning, the kind and the default of every option; loading it gives the same."""
    lines = [
        f"# All options of Stretto {__version__}. A recipe of your own needs those alone that it changes; the others",
        "# have their defaults. Subsections that are off are comments.",
    ]
    for name, section in get_type_hints(Config).items():
        lines += ["", *_explain_section(name, section, getattr(config, name))]
    return "\n".join(lines) + "\n"


def _explain_section(name: str, section: type[Any], values: Any) -> Iterator[str]:
    """TOML wants the plain keys of a section before its subsections."""
    options = list_options(section)
    yield f"[{name}]"
    for option in options:
        if not is_dataclass(getattr(values, option.name)):
            yield from _explain_option(option, getattr(values, option.name))
    for option in options:
        if option.section is None:
            continue
        value, key = getattr(values, option.name), f"{name}.{option.name}"
        yield ""
        if is_dataclass(value):
            yield from _comment(option.meaning)
            yield from _explain_section(key, option.section, value)
        else:
            off = _explain_section(key, option.section, option.section())
            yield from (f"# {line}".rstrip() for line in off)


def _explain_option(option: Option, value: Any) -> Iterator[str]:
    changed = "" if value == option.default else ", changed here"
    yield from _comment(option.meaning)
    yield f"{option.name} = {to_toml(value)}  # {option.kind}; default: {to_toml(option.default)}{changed}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
