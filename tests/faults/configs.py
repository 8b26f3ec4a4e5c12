"""The configuration with which a spoiled run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stretto.config import Config, load_config


def config_of(run: Path, steps: int) -> Config:
    """The configuration to go on with in this folder, up to `steps`."""
    config = load_config(run / "config.toml")
    return replace(config, run=replace(config.run, dir=str(run)), train=replace(config.train, steps=steps))
