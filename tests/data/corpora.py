"""Sentences to make corpora of, and what it means for two batches to be equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from stretto.data import Data

Opener = Callable[..., Data]  # the `opened` fixture: settings to data

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "small", "red", "bird", "fly", "over", "trees")


def sentence(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(length))


def same(a: Any, b: Any) -> bool:
    """Equal field by field, tensors included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)
