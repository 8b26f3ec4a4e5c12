"""The shipped recipes, and all that may stand for a recipe: a file, the name of a shipped one, a run folder, and in
Python a configuration or its tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any

from stretto.config import Config, apply_overrides, build_config, load_config, to_toml
from stretto.errors import ConfigError
from stretto.files import refuse_links

FOLDER = Path(__file__).parent
Recipe = str | Path | Config | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]  # "section.key=value", or {"section.key": value}


def load_recipe(recipe: Recipe, overrides: Overrides = ()) -> Config:
    """Reads a recipe and applies overrides. Of a run folder it is the config.toml, and the run is the one in that
    folder, wherever it was when it began."""
    changes = list(_list_overrides(overrides) if isinstance(overrides, Mapping) else _check_strings(overrides))
    if isinstance(recipe, Config | Mapping):
        tree = _copy_tree(asdict(recipe) if isinstance(recipe, Config) else recipe)
        return build_config(apply_overrides(tree, changes))
    path = find_recipe(recipe)
    if not path.is_dir():
        return load_config(path, changes)
    refuse_links(path)
    if not (path / "config.toml").exists():
        raise ConfigError(f"{path} is a folder, but not a run folder: it has no config.toml")
    return load_config(path / "config.toml", [f"run.dir={to_toml(str(path))}", *changes])


def _copy_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the mappings of a tree, with paths as strings, which is what a TOML file could hold."""
    return {
        key: _copy_tree(value) if isinstance(value, Mapping) else str(value) if isinstance(value, PurePath) else value
        for key, value in tree.items()
    }


def _list_overrides(values: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for name, value in _copy_tree(values).items():
        if isinstance(value, Mapping) and value:
            yield from _list_overrides(value, f"{section}{name}.")
        else:
            yield f"{section}{name}={to_toml(True if value == {} else value)}"  # an empty subsection has its defaults


def _check_strings(overrides: Sequence[str]) -> Sequence[str]:
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise ConfigError(f'overrides = {overrides!r}: write ["train.steps=100"] or {{"train.steps": 100}}')
    return overrides


def find_recipe(name: str | Path) -> Path:
    """A file or folder if there is one of that name, else the shipped recipe."""
    path, shipped = Path(name), FOLDER / f"{name}.toml"
    if path.exists() or shipped.exists():
        return path if path.exists() else shipped
    names = list_recipes()
    close = get_close_matches(path.stem, names, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"there is no file {str(name)!r} and no shipped recipe of that name (there are {', '.join(names)}){meant}"
    )


def list_recipes() -> dict[str, str]:
    """Name -> what it shows."""
    paths = sorted(FOLDER.glob("*.toml"))
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in paths}
