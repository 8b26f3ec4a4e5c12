"""Sources of text."""

from __future__ import annotations

import gzip
import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from stretto.data.documents import _find_library_files, _readings, open_documents, open_lines
from stretto.errors import DataError
from tests.data.corpora import Opener


def read(source: Path | str, suffix: str = ".txt,.md") -> list[str]:
    return list(open_documents("data.train", str(source), suffix))


def test_file_plain_or_gzipped(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes("naïve\r\ncafé\u2028x".encode())
    (tmp_path / "a.gz").write_bytes(gzip.compress((tmp_path / "a.log").read_bytes()))
    assert read(tmp_path / "a.log") == read(tmp_path / "a.gz") == ["naïve\r\ncafé\u2028x"]


def test_folder_in_order_without_other_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"two"))
    (tmp_path / "c.md").write_text("four")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.log").write_text("1,2")
    assert read(tmp_path) == ["one", "two", "three", "four"]
    assert read(tmp_path, ".log") == ["1,2"]


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def fingerprint(*texts: str) -> str:
        folder = tmp_path / "-".join(texts)
        folder.mkdir(exist_ok=True)
        for i, text in enumerate(texts):
            (folder / f"{i}.txt").write_text(text)
        return open_documents("data.train", str(folder), ".txt").fingerprint

    assert fingerprint("ab", "c") == fingerprint("ab", "c") != fingerprint("a", "bc")


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes("one\u2028still one\r\n\ntwo\x0bstill two".encode())
    assert list(open_lines(tmp_path / "x")) == ["one\u2028still one", "", "two\x0bstill two"]


def test_python_library() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.relative_to(root).as_posix() for path in _find_library_files()]
    assert {"argparse.py", "json/decoder.py"} < set(found)
    assert found == sorted(found)
    assert not any(path.startswith(("test/", "site-packages/")) or "/tests/" in path for path in found)


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_missing(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match=rf"{key} = '.*nothing'"):
        open_documents(key, str(tmp_path / "nothing"), ".txt")


def test_files_that_are_not_text_are_counted_and_named(tmp_path: Path, opened: Opener) -> None:
    """In the log of a run, those of training and of evaluation; and in the error if there is nothing else."""
    for name in ("train", "eval"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("a text that is long enough for a window of tokens\n" * 10)
    assert "left out" not in opened(train=str(tmp_path / "train"), eval=str(tmp_path / "eval"), seq_len=16).describe()
    bad = [tmp_path / "train" / f"{i}.txt" for i in range(7)] + [tmp_path / "eval" / "0\n.txt"]
    for path in bad:
        path.write_bytes(b"caf\xe9")
    data = opened(train=str(tmp_path / "train"), eval=str(tmp_path / "eval"), seq_len=16)
    names = sorted(repr(str(path)) for path in bad)
    assert data.describe().endswith(f"; not UTF-8 text, and left out: 8 files, {', '.join(names[:5])} and 3 more")
    (tmp_path / "train" / "text.txt").unlink()
    with pytest.raises(DataError, match=r"data\.suffix = '\.txt'; .* left out: 7 files, '.*0\.txt', .* and 2 more"):
        read(tmp_path / "train", ".txt")


def test_folder_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.suffix = '\.txt'"):
        read(tmp_path, ".txt")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="binary is not UTF-8"):
        read(tmp_path / "binary")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"hello" * 100)[:-9])
    with pytest.raises(DataError, match=r"cut\.gz is not a whole gzip file"):
        read(tmp_path / "cut.gz")
    (tmp_path / "no.gz").write_bytes(b"plain")
    with pytest.raises(DataError, match=r"no\.gz is not a whole gzip file"):
        read(tmp_path / "no.gz")


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, texts in {"train": ["a", "b", "c"], "validation": ["d"]}.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in texts))
    return folder


def test_hub_from_a_local_folder(hub_folder: Path) -> None:
    documents = open_documents("data.train", f"hf:{hub_folder}", "")
    assert documents.name == f"hf:{hub_folder} (train)"
    assert list(documents) == list(documents) == ["a", "b", "c"]
    assert documents.count == 3
    held_out = open_documents("data.eval", f"hf:{hub_folder}", "")
    assert list(held_out) == ["d"]
    assert documents.fingerprint != held_out.fingerprint
    assert documents.fingerprint == open_documents("data.train", f"hf:{hub_folder}", "").fingerprint


def test_hub_without_text(hub_folder: Path) -> None:
    (hub_folder / "train.jsonl").write_text('{"body": "a"}\n')
    (hub_folder / "validation.jsonl").unlink()
    with pytest.raises(DataError, match=r"data\.train = 'hf:.*no column 'text', only 'body'"):
        open_documents("data.train", f"hf:{hub_folder}", "")
    with pytest.raises(DataError, match=r"data\.eval = 'hf:.*no split validation or test, only train"):
        open_documents("data.eval", f"hf:{hub_folder}", "")


@pytest.mark.parametrize(
    ("name", "readings"),
    [
        ("set", [("set",)]),
        ("a/b", [("a/b",), ("a", "b")]),
        ("owner/set/config", [("owner/set", "config")]),
    ],
)
def test_names_with_slashes(name: str, readings: list[tuple[str, ...]]) -> None:
    assert _readings(name) == readings


def test_hub_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(DataError, match=r"data\.train = 'hf:some/set' needs .*stretto\[datasets\]"):
        open_documents("data.train", "hf:some/set", ".txt")


def test_a_packed_file_may_not_unpack_to_anything(tmp_path: Path) -> None:
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(b"abc\n" * 10**7))
    with pytest.raises(DataError, match=r"x\.txt\.gz unpacks to more than 50 times its size"):
        open_documents("data.train", str(path), ".txt")
    with pytest.raises(DataError, match="unpacks to more than"):
        open_lines(path)
    path.write_bytes(gzip.compress(b"abc\n" * 10**6))
    assert open_lines(path).count == 10**6, "what is small in any case"


def test_a_document_larger_than_memory_is_refused_by_name(tmp_path: Path) -> None:
    with (tmp_path / "x.txt").open("wb") as file:
        file.truncate(1 << 43)  # zeros that take no room on the disk
    with pytest.raises(DataError, match=r"x\.txt has .* too large for the memory of this machine: split it"):
        open_documents("data.train", str(tmp_path / "x.txt"), ".txt")


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.data.documents._LONGEST_LINE", 100)
    (tmp_path / "x.txt").write_text("short\n" + "x" * 200 + "\n")
    with pytest.raises(DataError, match=r"x\.txt has a line of more than 100 characters"):
        open_lines(tmp_path / "x.txt")


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
def test_a_pipe_is_refused_by_name(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=r"x\.txt|no such file"):
            open_documents("data.train", str(source), ".txt")
