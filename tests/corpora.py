"""Small corpora, pairs and images to train on, written on the spot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NOUNS, VERBS = ["cat", "dog", "bird", "house", "tree", "river"], ["sees", "hears", "likes"]
WORDS = [*NOUNS, *VERBS, "the", "a", "big", "small", "red", "blue", "quickly", "slowly", "and", "or", "but"]


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
