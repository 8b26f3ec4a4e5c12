"""Token files: made once, checked whenever they are opened."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stretto.data import tokens
from stretto.data.documents import Documents, open_files
from stretto.data.tokenizer import ByteTokenizer, Store
from stretto.data.tokens import open_tokens, read_tokens, write_tokens
from stretto.errors import DataError

BYTES = ByteTokenizer()
TEXTS = ["first\n", "", "third, which is longer\n"]


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    paths = [tmp_path / f"{i}.txt" for i in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_text(text)
    return open_files("three", paths, skip_binary=False)


@pytest.fixture
def path(documents: Documents, tmp_path: Path) -> Path:
    """A token file that is whole."""
    path = tmp_path / "made.tokens"
    write_tokens(path, documents, BYTES, "origin")
    return path


def test_documents_come_back(path: Path) -> None:
    stored = read_tokens(path, BYTES, "origin")
    assert stored.num_documents == 3
    for i, text in enumerate(TEXTS):
        ids = stored.ids[stored.starts[i] : stored.starts[i + 1]].tolist()
        assert ids == [BYTES.bos, *text.encode(), BYTES.eos]
    assert stored.ids.dtype == np.uint16


def test_large_vocabularies_take_four_bytes(path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    small = read_tokens(path, BYTES, "origin")
    monkeypatch.setattr(BYTES, "size", 70_000)
    write_tokens(path, documents, BYTES, "origin")
    large = read_tokens(path, BYTES, "origin")
    assert large.ids.dtype == np.uint32
    assert np.array_equal(small.ids, large.ids)


def test_long_documents_are_encoded_in_pieces(
    documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_tokens(documents, BYTES, Store(tmp_path / "whole"))
    monkeypatch.setattr(tokens, "_PIECE", 5)
    pieces = open_tokens(documents, BYTES, Store(tmp_path / "pieces"))
    assert np.array_equal(whole.ids, pieces.ids)
    assert np.array_equal(whole.starts, pieces.starts)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (0, "does not begin as a token file"),
        (1024, "checksum"),  # the first document's start
        (1024 + 8 * 4, "checksum"),  # the first token
        (-1, "checksum"),
    ],
)
def test_flipped_bit(path: Path, at: int, reason: str) -> None:
    flip(path, at)
    with pytest.raises(DataError, match=rf"made\.tokens is damaged: .*{reason}.*Delete it"):
        read_tokens(path, BYTES, "origin")


def test_no_bit_of_the_header_can_flip_unnoticed(path: Path) -> None:
    header = path.read_bytes()[:1024].rstrip()
    for at in range(len(header)):
        flip(path, at)
        with pytest.raises(DataError, match=r"made\.tokens is damaged"):
            read_tokens(path, BYTES, "origin")
        flip(path, at)
    read_tokens(path, BYTES, "origin")


@pytest.mark.parametrize("keep", [0, 4, 500, 1024, 1060, -1])
def test_truncated(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"made\.tokens is damaged"):
        read_tokens(path, BYTES, "origin")


def test_a_header_that_is_nested_too_deeply(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"[" * 1016 + content[1024:])
    with pytest.raises(DataError, match=r"made\.tokens is damaged"):
        read_tokens(path, BYTES, "origin")


def test_id_beyond_the_vocabulary(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BYTES, "size", 258)
    with pytest.raises(
        DataError, match=r"made\.tokens is damaged: it holds id 258 at byte 1070, but the tokenizer has only 258"
    ):
        read_tokens(path, BYTES, "origin")


def test_made_from_something_else(path: Path) -> None:
    with pytest.raises(DataError, match=r"made\.tokens .*another corpus or tokenizer"):
        read_tokens(path, BYTES, "elsewhere")


def test_reused_until_the_text_changes(documents: Documents, tmp_path: Path) -> None:
    store = tmp_path / "store"
    open_tokens(documents, BYTES, Store(store))
    (made,) = store.iterdir()
    os.utime(made, (1, 1))
    open_tokens(documents, BYTES, Store(store))
    assert made.stat().st_mtime == 1, "it was written again"
    (tmp_path / "0.txt").write_text("changed\n")
    changed = open_files("three", [tmp_path / f"{i}.txt" for i in range(3)], skip_binary=False)
    assert open_tokens(changed, BYTES, Store(store)).ids[1] == ord("c")
    assert len(list(store.iterdir())) == 2


def test_a_failure_leaves_nothing_behind(documents: Documents, tmp_path: Path) -> None:
    (tmp_path / "2.txt").unlink()
    with pytest.raises(DataError, match=r"2\.txt"):
        open_tokens(documents, BYTES, Store(tmp_path / "store"))
    assert list((tmp_path / "store").iterdir()) == []
