"""Small real things to train on, made on the spot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.config import Config, ModelConfig, build_config
from stretto.weights import initialise, put

torch.set_num_threads(2)
NOUNS, VERBS = ["cat", "dog", "bird", "house", "tree", "river"], ["sees", "hears", "likes"]
WORDS = [*NOUNS, *VERBS, "the", "a", "big", "small", "red", "blue", "quickly", "slowly", "and", "or", "but"]


def materialise(model: torch.nn.Module, cfg: ModelConfig, seed: int, device: torch.device | str) -> None:
    """Gives a model built on the meta device its memory and its first values."""
    model.to_empty(device=device)
    initialise(model, cfg, seed, put)


def write_corpus(folder: Path, documents: int = 30, words: int = 60) -> Path:
    """A folder of short text files with a simple grammar, so that a model has something to learn."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        text = " ".join(random.choice(WORDS, size=int(random.integers(5, words))))
        (folder / f"{i:03d}.txt").write_text(text + ".\n")
    return folder


def write_pairs(prefix: Path, count: int = 60) -> Path:
    """Sentences and the same words backwards: a language pair without a dictionary."""
    random = np.random.default_rng(1)
    lines = [random.choice(WORDS, size=int(random.integers(2, 9))).tolist() for _ in range(count)]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".xx").write_text("\n".join(" ".join(line) for line in lines) + "\n")
    prefix.with_suffix(".yy").write_text("\n".join(" ".join(line[::-1]) for line in lines) + "\n")
    return prefix


def write_images(path: Path, count: int = 96, size: int = 16) -> Path:
    """Four classes: where the bright bar is."""
    random = np.random.default_rng(2)
    labels = random.integers(0, 4, count)
    images = random.integers(0, 80, (count, size, size), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[size // 4 * label : size // 4 * (label + 1)] += 150
    np.savez(path, images=images, labels=labels)
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that they wait for their threads most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A tiny causal run; keyword arguments named section__key change it."""

    def make(**changes: Any) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "data": {"train": str(tmp_path / "text"), "seq_len": 16, "batch_size": 4, "suffix": ".txt"},
            "model": {"layers": 2, "width": 32, "heads": 4, "max_len": 32, "dropout": 0.1},
            "optim": {"lr": 1e-2, "warmup": 5},
            "train": {"steps": 6, "log_every": 1, "eval_batches": 2},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            tree.setdefault(section, {})[name] = value
        if tree["data"].get("task", "causal") in ("causal", "masked"):
            write_corpus(Path(tree["data"]["train"]))
        return build_config(tree)

    return make


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("STRETTO_DATA")
    if not folder:
        pytest.skip("STRETTO_DATA does not name a folder with multi30k and wikitext2")
    return Path(folder)
