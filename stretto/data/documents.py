"""Where text comes from: files, plain or gzipped, folders, Python's own library, Hugging Face data sets.

A corpus is a sequence of documents that can be read any number of times. Its fingerprint depends on the content
alone, so that tokens made from it can be kept and found again. Every failure that a user can cause becomes a
`DataError` that names the file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from stretto.capacity import find_machine_memory
from stretto.errors import DataError
from stretto.files import open_regular

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_UNPACKED, _SMALL = 50, 1 << 24  # how many times larger a gzip file may get, or how many bytes in any case
_BUFFER = 1 << 17  # bytes unpacked at a time
_LONGEST_LINE = 1 << 24  # characters of a line that is a document
_NAMED = 5  # how many of the files that are left out


class NotTextError(DataError):
    """The file is not UTF-8: a folder of documents skips it, everything else reports it."""


def find_text_file(key: str, path: Path) -> Path:
    """Returns `path`, or `path` with .gz added; `key` is the setting that the error names if there is neither."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    raise DataError(f"{key}: there is no file {path} (nor {path.name}.gz)")


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Opens the text of a file. Only "\\n" ends a line, whatever other line separators Unicode knows."""
    try:
        with open_regular(path) as file, _unpack(path, file) as data:
            yield io.TextIOWrapper(data, encoding="utf-8-sig", newline="\n")
    except UnicodeDecodeError as error:
        raise NotTextError(f"{path} is not UTF-8 text: convert it, or leave it out") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def _unpack(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yields the bytes of a file, unpacked if its name says that it is packed."""
    if path.suffix != ".gz":
        yield file
        return
    limit = max(_UNPACKED * os.fstat(file.fileno()).st_size, _SMALL)
    with gzip.GzipFile(fileobj=file) as unpacked:
        yield io.BufferedReader(_Limited(path, unpacked, limit), _BUFFER)


class _Limited(io.RawIOBase):
    """The bytes of a gzip file, of which a small one can hold any number: no more than text would have."""

    def __init__(self, path: Path, file: gzip.GzipFile, limit: int) -> None:
        self._path, self._file, self._left = path, file, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise DataError(
                f"{self._path} unpacks to more than {_UNPACKED} times its size, as no text does: unpack it yourself if"
                " it is right"
            )
        buffer[: len(data)] = data
        return len(data)


@dataclass(frozen=True)
class Documents:
    name: str
    read: Callable[[], Iterator[str]]
    fingerprint: str
    count: int
    num_bytes: int
    left_out: Set[str] = frozenset()  # files that are not text

    def __iter__(self) -> Iterator[str]:
        return self.read()


def open_files(name: str, paths: Sequence[Path], *, skip_binary: bool) -> Documents:
    """Opens files of which each is one document."""
    left_out = set[str]()

    def read() -> Iterator[str]:
        for path in paths:
            try:
                _require_room(path)
                with open_text(path) as handle:
                    text = handle.read()
            except NotTextError:
                if not skip_binary:
                    raise
                left_out.add(str(path))
            else:
                yield text

    return replace(_survey(name, read), left_out=left_out)


def _require_room(path: Path) -> None:
    """Refuses a document of which text and bytes cannot be in memory at the same time."""
    with suppress(OSError):  # reading it will say more
        if 2 * path.stat().st_size > find_machine_memory():
            raise DataError(
                f"{path} has {path.stat().st_size:,} bytes and is one document, too large for the memory of this"
                " machine: split it into several files"
            )


def open_lines(path: Path) -> Documents:
    """Opens a file of which each line is one document."""

    def read() -> Iterator[str]:
        with open_text(path) as handle:
            while line := handle.readline(_LONGEST_LINE):
                if len(line) == _LONGEST_LINE:
                    raise DataError(
                        f"{path} has a line of more than {_LONGEST_LINE:,} characters, of which each is read whole"
                    )
                yield line.strip()

    return _survey(str(path), read)


def _survey(name: str, read: Callable[[], Iterator[str]]) -> Documents:
    """Reads everything once to learn what it is: cheap next to tokenising, and it notices any change."""
    digest, count, num_bytes = hashlib.sha256(), 0, 0
    for text in read():
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))  # else ["ab", "c"] and ["a", "bc"] would look the same
        digest.update(data)
        count, num_bytes = count + 1, num_bytes + len(data)
    return Documents(name, read, digest.hexdigest(), count, num_bytes)


def open_column(name: str, dataset: Any) -> Documents:
    """Opens the `text` column of a Hugging Face data set, whose own fingerprint spares reading all of it."""

    def read() -> Iterator[str]:
        for rows in dataset.select_columns("text").iter(batch_size=1000):
            yield from (text or "" for text in rows["text"])

    fingerprint = hashlib.sha256(dataset._fingerprint.encode()).hexdigest()
    return Documents(name, read, fingerprint, len(dataset), dataset.data.nbytes)


def open_documents(key: str, source: str, suffix: str) -> Documents:
    """Opens the corpus that `source` names; `key` is the setting that `source` came from ("data.train")."""
    if source.startswith("hf:"):
        return _open_hub(key, source)
    if source == "python-stdlib":
        return open_files(source, _find_library_files(), skip_binary=True)
    path = Path(source)
    if path.is_file():
        return open_files(path.name, [path], skip_binary=False)
    if not path.is_dir():
        raise DataError(f'{key} = {source!r}: there is no such file or folder (nor is it "python-stdlib" or "hf:...")')
    paths = _find_files(path, tuple(part.strip() for part in suffix.split(",") if part.strip()))
    documents = open_files(path.name, paths, skip_binary=True)
    if not documents.count:
        raise DataError(
            f"{key} = {source!r}: no text file in it ends in one of data.suffix = {suffix!r}"
            + describe_left_out(documents.left_out)
        )
    return documents


def describe_left_out(files: Set[str], kind: str = "UTF-8 text") -> str:
    """Says behind a sentence how many files of a folder are not of a kind, and names a few of them."""
    if not files:
        return ""
    names = ", ".join(map(repr, sorted(files)[:_NAMED]))
    more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
    return f"; not {kind}, and left out: {len(files):,} file{'s' if len(files) > 1 else ''}, {names}{more}"


def _find_files(folder: Path, suffixes: tuple[str, ...], skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Finds the files below `folder` with these suffixes, without looking into folders with `skipped` names."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - skipped  # os.walk goes on into what is left in this list
        found += (Path(parent, name) for name in names if name.removesuffix(".gz").endswith(suffixes))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _find_library_files() -> list[Path]:
    return _find_files(Path(sysconfig.get_path("stdlib")), (".py",), _NOT_LIBRARY)


def _open_hub(key: str, source: str) -> Documents:
    splits = ("train",) if key == "data.train" else ("validation", "test")
    dataset = _load_hub(key, source)
    for split in splits:
        if split in dataset:
            if "text" not in dataset[split].column_names:
                columns = ", ".join(dataset[split].column_names)
                raise DataError(f"{key} = {source!r}: the data set has no column 'text', only {columns}")
            return open_column(f"{source} ({split})", dataset[split])
    raise DataError(f"{key} = {source!r}: no split {' or '.join(splits)}, only {', '.join(dataset)}")


def _load_hub(key: str, source: str) -> Any:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"{key} = {source!r} needs the datasets library: pip install 'stretto[datasets]'") from error

    failure: Exception | None = None  # of the first reading
    for arguments in _readings(source.removeprefix("hf:")):
        try:
            return load_dataset(*arguments)
        except (DatasetsError, OSError, ValueError, RuntimeError) as error:
            failure = failure or error
    raise DataError(f"{key} = {source!r} cannot be loaded: {failure}") from failure


def _readings(name: str) -> list[tuple[str, ...]]:
    """Lists what NAME[/CONFIG] may mean: names may hold a slash ("owner/set"), and folders any number."""
    head, slash, config = name.rpartition("/")
    if Path(name).is_dir() or not slash:
        return [(name,)]
    return [(head, config)] if "/" in head else [(name,), (head, config)]
