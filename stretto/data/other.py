"""Data that a run was not trained on, read as its own are: by its tokenizer, in its windows, with its classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stretto.config import DataConfig
from stretto.data import open_data
from stretto.data.images import ImageData
from stretto.data.stream import Data
from stretto.errors import DataError


def open_other_data(
    cfg: DataConfig, source: str, tokenizer: Path, labels: Sequence[str], scratch: Path, seed: int, image_size: int
) -> Data:
    """Opens what `source` names, in any form that data.train has, all of it for evaluation. What is made of it, such
    as token files, goes into the folder `scratch`."""
    cfg = replace(cfg, train=source, eval=source, test="", tokenizer=str(tokenizer), cache="", streaming=False)
    try:
        data = open_data(cfg, seed=seed, folder=scratch, image_size=image_size)
        if isinstance(data, ImageData):
            data.number_classes(tuple(labels))
    except DataError as error:
        raise DataError(
            f"--data {source} cannot be read as data of this run, whose data.task is {cfg.task!r}: {error}"
        ) from error
    return data
