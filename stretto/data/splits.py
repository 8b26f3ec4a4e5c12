"""What training and evaluation have of the data: which samples are held out, and that classes have the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.data.rows import name_some
from stretto.data.stream import Int64s, Purpose, random_stream
from stretto.errors import DataError


def count_held_out(total: int, share: float) -> int:
    """Counts how many of `total` samples evaluation gets: at least one, and never all."""
    return min(max(round(total * share), 1), total - 1)


def divide(seed: int, num_train: int, num_eval: int, share: float) -> tuple[Int64s, Int64s]:
    """Returns the numbers of the samples to train on, and of those to evaluate on: a share of the former, or others in
    a random order, since files are often sorted by class, and an evaluation during training reads the first alone."""
    random = random_stream(seed, Purpose.SPLIT)
    if num_eval:
        return np.arange(num_train), random.permutation(num_eval)
    if num_train < 2:
        raise DataError("data.train has only one sample: none can be held out for evaluation")
    train, held_out = np.split(random.permutation(num_train), [-count_held_out(num_train, share)])
    return train, held_out


def number_labels(labels: Sequence[str], names: Sequence[str]) -> Int64s:
    """Returns the places of labels among the names of classes, which come from the training data."""
    places = {name: place for place, name in enumerate(names)}
    if unknown := sorted(set(labels) - places.keys()):
        raise DataError(f"data.eval has labels that data.train has not: {name_some(unknown, len(unknown))}")
    return np.array([places[label] for label in labels], np.int64)
