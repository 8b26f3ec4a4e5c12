"""How long a run is: updates from passes over the data, and an end before the last one."""

from __future__ import annotations

import math

from stretto.config import TrainConfig
from stretto.data import Data
from stretto.errors import DataError


def count_steps(cfg: TrainConfig, data: Data) -> int:
    """The number of updates, after which every sample was read at least `epochs` times."""
    if not cfg.epochs:
        return cfg.steps
    return max(math.ceil(round(cfg.epochs * _count_updates(cfg, data), 6)), 1)


def _count_updates(cfg: TrainConfig, data: Data) -> float:
    """Updates in one pass over the training data."""
    try:
        return data.batches_per_epoch / cfg.micro_batches
    except ZeroDivisionError as error:
        raise DataError(
            f"train.epochs = {cfg.epochs:g}: a batch of {type(data).__name__} names no `samples`, so that nobody knows"
            " how many batches an epoch has: set its `batches_per_epoch`, or train.steps"
        ) from error


def describe_epochs(cfg: TrainConfig, data: Data) -> list[str]:
    """Lines for the log; none where train.steps says how long the run is."""
    if not cfg.epochs:
        return []
    each = _count_updates(cfg, data)
    samples = f"{data.num_train:,} samples"
    return [f"train.epochs = {cfg.epochs:g}: {cfg.steps:,} updates, {each:,.4g} for each pass over {samples}"]


def is_over(cfg: TrainConfig, step: int, waited: int) -> bool:
    """Whether a run has ended before its last step, after `waited` evaluations without a lower loss."""
    return step < cfg.steps and 0 < cfg.patience <= waited


def explain_early_end(cfg: TrainConfig, step: int, waited: int, best_step: int) -> str:
    return (
        f"stopped early after step {step} of {cfg.steps}: {waited} evaluations in a row have no lower loss than that of"
        f" step {best_step} (train.patience = {cfg.patience}); to go on, raise it, or set it to 0, with --resume"
    )
