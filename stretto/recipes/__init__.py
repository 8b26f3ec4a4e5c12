"""The shipped recipes. The first line of each says what it shows."""

from __future__ import annotations

from pathlib import Path

from stretto.errors import ConfigError

FOLDER = Path(__file__).parent


def find_recipe(name: str) -> Path:
    """A file if there is one of that name, else the shipped recipe."""
    path, shipped = Path(name), FOLDER / f"{name}.toml"
    if path.exists() or not shipped.exists():
        if not path.exists():
            names = ", ".join(list_recipes())
            raise ConfigError(f"there is no file {name!r} and no shipped recipe of that name; shipped: {names}")
        return path
    return shipped


def list_recipes() -> dict[str, str]:
    """Name -> what it shows."""
    paths = sorted(FOLDER.glob("*.toml"))
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in paths}
