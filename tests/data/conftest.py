"""Small corpora, and how to open them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.config import DataConfig
from stretto.data import Data, open_data
from tests.data.corpora import Opener, sentence


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """30 documents of 1 to 30 words."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(f"{i}: {sentence(i, i + 1)}\n")
    return folder


@pytest.fixture
def parallel(tmp_path: Path) -> str:
    """60 pairs of 1 to 12 words, many of equal length."""
    prefix = tmp_path / "train"
    Path(f"{prefix}.en").write_text("".join(f"{sentence(i, i % 12 + 1)}\n" for i in range(60)))
    Path(f"{prefix}.de").write_text("".join(f"{sentence(i + 3, i % 7 + 2)}\n" for i in range(60)))
    return str(prefix)


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Opens data with the given settings, in a run folder of its own each time."""
    count = 0

    def open_with(seed: int = 0, image_size: int = 0, **settings: Any) -> Data:
        nonlocal count
        count += 1
        return open_data(DataConfig(**settings), seed=seed, folder=tmp_path / f"run{count}", image_size=image_size)

    return open_with
