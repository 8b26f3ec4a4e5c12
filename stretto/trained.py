"""A run that has been trained, loaded from its folder: for evaluating, generating and the report."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from stretto import checkpoint
from stretto.capacity import require_room_for_weights
from stretto.checkpoint.verify import name_step
from stretto.config import Config, dump_config, load_config
from stretto.data import Data, Tokenizer, keep_tokenizer, load_tokenizer, open_data
from stretto.data.chat import Chat, keep_chat, open_chat
from stretto.errors import CheckpointError, ConfigError
from stretto.files import read_text, refuse_links, require_empty, write_text
from stretto.model import Model, build_model, sites
from stretto.runtime import total_memory
from stretto.techniques import find_changes, load_all
from stretto.weights import take

_MOST_BYTES = 1 << 27  # of labels.json


@dataclass(frozen=True)
class Trained:
    config: Config
    model: Model  # in evaluation mode, with the best weights there are, or their means, unless a step was asked for
    step: int  # where these weights are from
    tokenizer: Tokenizer | None
    labels: tuple[str, ...]
    device: torch.device
    chat: Chat | None = None  # how prompts are written, for a model that was trained to answer

    @property
    def weights(self) -> str:
        """Says which weights these are, if not those of the step itself."""
        return f"their running mean (train.ema = {self.config.train.ema:g})" if self.config.train.ema else ""


def save_run(folder: Path, config: Config, labels: tuple[str, ...]) -> None:
    """Writes what `load_trained` needs besides a checkpoint and the tokenizer, which the data has put there."""
    write_text(folder / "config.toml", dump_config(config))
    write_text(folder / "labels.json", json.dumps(labels))


def load_run_config(folder: Path) -> Config:
    refuse_links(folder)
    if not (folder / "config.toml").exists():
        raise CheckpointError(f"{folder} is not a run folder: it has no config.toml")
    return load_config(folder / "config.toml")


def open_run_data(config: Config, folder: Path, scratch: Path) -> Data:
    """Opens the data of a run as it was, with its own copy of the tokenizer, and what else it has made of them. What is
    gone is made again in the folder `scratch`, and not where the configuration of someone else's run says."""
    cfg = replace(config.data, cache=config.data.cache or str(folder / "data"))
    if cfg.tokenizer not in ("bytes", "bpe"):
        cfg = replace(cfg, tokenizer=str(folder / "data"))
    return open_data(cfg, seed=config.run.seed, folder=scratch, image_size=config.model.image_size, fill_cache=False)


def load_trained(folder: Path, device: torch.device, step: int | None = None, own: nn.Module | None = None) -> Trained:
    """Loads a run. One that was given its model needs `own`, such a model again, whose values it replaces."""
    config = load_run_config(folder)
    if own is None and config.model.own:
        raise CheckpointError(
            f"{folder} has a model that was given in Python, {config.model.own}: only Python can load it, by"
            " stretto.load(run, model=...)"
        )
    checkpoints, wanted = folder / "checkpoints", step
    step = _find_step(checkpoints, wanted)
    require_room_for_weights(config.model, total_memory(device))
    model = build_model(config.model) if own is None else cast(Model, own)
    for technique in find_changes(config, device):
        technique.apply(model, sites(model))
    model = (model.to_empty(device=device) if own is None else model.to(device)).eval()
    while not _restore(model, checkpoints, step):
        step = _find_step(checkpoints, wanted)
    without = config.data.task == "images" or (config.data.own and not (folder / "data" / "tokenizer.json").exists())
    tokenizer = None if without else load_tokenizer(folder / "data")
    chat = open_chat(folder / "data") if config.data.task == "instruct" else None
    return Trained(config, model, step, tokenizer, _load_labels(folder / "labels.json"), device, chat)


def _restore(model: Model, checkpoints: Path, step: int) -> bool:
    """Whether the weights are those of that step: a run that goes on may have deleted its checkpoint meanwhile."""
    try:
        checkpoint.restore_weights(model, _use_means(checkpoint.open_stored(checkpoints, step)))
    except CheckpointError:
        if (checkpoints / name_step(step)).exists():
            raise
        return False
    return True


def _use_means(stored: checkpoint.Stored) -> checkpoint.Stored:
    """With the weights that were evaluated: their means, where a run has kept them."""
    prefix = f"{checkpoint.MEAN}/"
    means = {name.removeprefix(prefix): mean for name, mean in stored.moments.items() if name.startswith(prefix)}
    return replace(stored, weights={**stored.weights, **means})


def _load_labels(path: Path) -> tuple[str, ...]:
    try:
        labels = json.loads(read_text(path, _MOST_BYTES))
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("it holds something else")
        return tuple(labels)
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise CheckpointError(f"{path} is not a list of class names: {error}") from error


def write_folded(target: Path, trained: Trained) -> None:
    """Writes a run folder with this model alone, as a plain model that computes the same."""
    require_empty(target)
    config = trained.config
    changes = find_changes(config, trained.device)
    if not changes:
        names = " or ".join(f"[techniques.{cls.name}]" for cls in load_all() if cls.changes_function)
        raise ConfigError(f"--fold is for runs with {names}: the model of this one is plain already")
    model: Any = trained.model
    for technique in changes:
        model = technique.fold(model)
    weights = {name: take(value) for name, value in model.state_dict().items()}
    shot = checkpoint.Snapshot(weights, {}, {"step": trained.step, "best_step": trained.step})
    checkpoint.save(target / "checkpoints", shot, keep=1)
    keep_tokenizer(trained.tokenizer, target / "data")
    keep_chat(trained.chat or Chat(), target / "data")
    off = {technique.name: None for technique in changes if hasattr(config.techniques, technique.name)}
    techniques = replace(config.techniques, **off)
    run = replace(config.run, dir=str(target))
    save_run(target, replace(config, run=run, model=model.cfg, techniques=techniques), trained.labels)


def _find_step(checkpoints: Path, wanted: int | None) -> int:
    if wanted is None:
        best = checkpoint.find_best(checkpoints)
        if best is None:
            raise CheckpointError(f"{checkpoints.parent} has no checkpoint that can be used")
        return best
    damage = checkpoint.find_damage(checkpoints / name_step(wanted))
    if damage is not None:
        known = ", ".join(map(str, checkpoint.steps(checkpoints))) or "none"
        raise CheckpointError(f"step {wanted} of {checkpoints.parent} cannot be used ({damage}); it has: {known}")
    return wanted
