"""Runs in forked processes (server.py), each in a copy of the folder of a small run that was saved at step 4."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from stretto.config import dump_config
from tests.faults.configs import config_of
from tests.server import Group, Server


def sets(**values: Any) -> list[str]:
    """Arguments that change keys, named section__key."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.', 1)}={value}")]


class Fleet:
    def __init__(self, server: Server, folder: Path, trained_run: Path) -> None:
        self.server, self.folder, self.origin, self.recipe = server, folder, trained_run, folder / "recipe.toml"
        self.recipe.write_text(dump_config(config_of(trained_run, steps=10)))
        self.groups: list[Group] = []

    def start(self, name: str, *, fresh: bool = False, **options: Any) -> tuple[Path, Group]:
        """Starts a run, which goes on in the folder of this name if there is one; `fresh`: it begins."""
        run, arguments = self.folder / name, ["--resume", *options.pop("arguments", [])]
        if not run.exists() and not fresh:
            shutil.copytree(self.origin, run)
        command = ["train", str(self.recipe), *sets(run__dir=run), *arguments]
        group = self.server.start(self.folder / f"{name}.{len(self.groups)}.log", *command, **options)
        self.groups.append(group)
        return run, group

    def close(self) -> None:
        for group in self.groups:
            group.kill()
            group.wait()
