"""Token files: a corpus, tokenised once and memory-mapped from then on.

    8 bytes    magic
    1016 bytes header: JSON, filled up with spaces
    int64      where each document starts in the tokens, and where the last one ends
    uint16     the tokens (uint32 when the vocabulary needs it); each document is bos, its ids, eos

A file is named after what it was made from, so a changed corpus or tokenizer gets a new file. Nothing in it is
trusted: opening checks every field, the size, the checksum, where documents start and the largest id. While it is
mapped, others may still write to it or cut it short: each batch asks whether it has changed, and checks its own ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple
from weakref import finalize

import numpy as np
import numpy.typing as npt

from stretto.data.documents import Documents
from stretto.data.packing import count_positions
from stretto.data.stream import Int64s
from stretto.data.tokenizer import Store, Tokenizer
from stretto.errors import DataError
from stretto.files import open_regular, replacing

_MAGIC = b"stretto\x00"
_VERSION = 1
_HEADER_END = 1024
_CHUNK = 1 << 24  # ids compared at a time
_PIECE = 1 << 20  # characters tokenised at a time
_SHOW_PROGRESS = 5_000_000  # bytes of text worth a progress bar


class Mapped:
    """A token file that is open and mapped: it knows whether the file is still the one that was checked."""

    def __init__(self, path: Path, file: IO[bytes], size: int, sha256: str) -> None:
        self._path, self._sha256 = path, sha256
        self.size = size  # of the vocabulary
        self._descriptor = os.dup(file.fileno())
        finalize(self, os.close, self._descriptor)
        self._seen = self._look()

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raises a `DataError` if the file has changed. A new date alone, which `touch` gives, is no change."""
        now = self._look()
        if now == self._seen:
            return
        if now[0] != self._seen[0]:
            raise DataError(
                f"the token file {self._path} was changed while it was read: it had {self._seen[0]:,} bytes, and ends"
                f" at byte {now[0]:,} now. Delete it; it will be made again"
            )
        with open(os.dup(self._descriptor), "rb") as file:
            if _checksum(file) != self._sha256:
                raise DataError(
                    f"the token file {self._path} was overwritten while it was read. Delete it; it will be made again"
                )
        self._seen = now

    def refuse(self, id: int, from_end: int) -> DataError:
        """Explains an id that is not in the vocabulary, at so many bytes from the end of the file."""
        return DataError(
            f"the token file {self._path} holds id {id} at byte {self._seen[0] - from_end:,}, but the tokenizer has"
            f" only {self.size}: it was overwritten while it was read. Delete it; it will be made again"
        )


@dataclass(frozen=True)
class Tokens:
    """Documents one after another; document i is ids[starts[i] : starts[i + 1]]."""

    ids: npt.NDArray[Any]  # uint16 or uint32, memory-mapped
    starts: npt.NDArray[np.int64]  # [number of documents + 1]
    file: Mapped | None = None  # none of those that were made in memory
    after: int = 0  # tokens of the file behind these

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    def cut(self, at: int) -> tuple[Tokens, Tokens]:
        """Returns the tokens before a place, and those from there on."""
        before, after = self.starts[self.starts < at], self.starts[self.starts > at] - at
        return (
            Tokens(self.ids[:at], np.append(before, at), self.file, self.after + len(self.ids) - at),
            Tokens(self.ids[at:], np.insert(after, 0, 0), self.file, self.after),
        )

    def take(self, places: Int64s) -> Int64s:
        """Reads the ids at these places. What is not in the vocabulary would end a GPU's process without a reason."""
        if self.file is not None:
            self.file.check()
        ids: Int64s = self.ids[places].astype(np.int64)
        if self.file is not None and ids.size and ids.max() >= self.file.size:
            wrong = int(ids.argmax())
            behind = self.after + len(self.ids) - int(places.flat[wrong])
            raise self.file.refuse(int(ids.flat[wrong]), behind * self.ids.itemsize)
        return ids

    def read(self, starts: Int64s, lengths: Int64s) -> Int64s:
        """Reads stretches from anywhere, one after another, all at once: a loop over the sentences of a batch takes
        thirty times as long, about what a GPU takes to learn from them."""
        return self.take(np.repeat(starts, lengths) + count_positions(lengths))


def open_tokens(documents: Documents, tokenizer: Tokenizer, store: Store) -> Tokens:
    """Opens the tokens of a corpus, from the file in `store` if an earlier run left one there."""
    made_from = hashlib.sha256(f"{documents.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()
    path = store.find(f"{made_from[:16]}.tokens")
    if not path.exists():
        write_tokens(path, documents, tokenizer, made_from)
    return read_tokens(path, tokenizer, made_from)


def write_tokens(path: Path, documents: Documents, tokenizer: Tokenizer, made_from: str) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    starts = [0]
    with replacing(path) as file, _progress(documents) as advance:
        file.seek(_HEADER_END + 8 * (documents.count + 1))
        length = 0
        for piece, ids in _tokenise(documents, tokenizer):
            ids = [tokenizer.bos] * piece.begins + ids + [tokenizer.eos] * piece.ends
            file.write(np.asarray(ids, dtype).tobytes())
            length += len(ids)
            if piece.ends:
                starts.append(length)
            advance(len(piece.text.encode()))
        if len(starts) != documents.count + 1:
            raise DataError(f"{documents.name} changed while it was read: run again")
        file.seek(_HEADER_END)
        file.write(np.asarray(starts, np.int64).tobytes())
        header = {"version": _VERSION, "dtype": dtype.name, "tokens": length, "documents": documents.count}
        header |= {"sha256": _checksum(file), "made_from": made_from}
        file.seek(0)
        file.write(_MAGIC + json.dumps(header).encode().ljust(_HEADER_END - len(_MAGIC)))


def read_tokens(path: Path, tokenizer: Tokenizer, made_from: str) -> Tokens:
    try:
        return _read_tokens(path, tokenizer, made_from)
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"the token file {path} is damaged: {error}. Delete it; it will be made again") from error


def _read_tokens(path: Path, tokenizer: Tokenizer, made_from: str) -> Tokens:
    with open_regular(path) as file:
        start = file.read(_HEADER_END)
        _check(start.startswith(_MAGIC), "it does not begin as a token file does")
        header = json.loads(start[len(_MAGIC) :])
        _check(isinstance(header, dict) and header.get("version") == _VERSION, f"its version is not {_VERSION}")
        _check(header.get("made_from") == made_from, "it was made from another corpus or tokenizer")
        _check(header.get("dtype") in ("uint16", "uint32"), "its dtype is neither uint16 nor uint32")
        counts = header.get("tokens"), header.get("documents")
        _check(all(type(count) is int and count >= 0 for count in counts), "its counts are not numbers")
        num_tokens, num_documents = counts
        dtype = np.dtype(header["dtype"])
        ids_at = _HEADER_END + 8 * (num_documents + 1)
        expected, size = ids_at + dtype.itemsize * num_tokens, os.fstat(file.fileno()).st_size
        _check(size == expected, f"it has {size} bytes instead of {expected}")
        _check(_checksum(file) == header.get("sha256"), "its checksum is wrong")
        file.seek(_HEADER_END)
        starts = np.fromfile(file, np.int64, num_documents + 1)
        _check_starts(starts, num_tokens)
        mapped = Mapped(path, file, tokenizer.size, header["sha256"])
        if not num_tokens:  # an empty file cannot be mapped
            return Tokens(np.empty(0, dtype), starts, mapped)
        ids = np.memmap(file, dtype, mode="r", offset=ids_at, shape=(num_tokens,))
        for first in range(0, num_tokens, _CHUNK):
            part = ids[first : first + _CHUNK]
            if (largest := int(part.max())) >= tokenizer.size:
                at = ids_at + dtype.itemsize * (first + int(part.argmax()))
                raise ValueError(f"it holds id {largest} at byte {at}, but the tokenizer has only {tokenizer.size}")
        return Tokens(ids, starts, mapped)


def _check_starts(starts: Int64s, num_tokens: int) -> None:
    """Documents begin with the first token, end with the last one, and each begins where the one before it ends."""
    _check(starts[0] == 0 and starts[-1] == num_tokens, f"its documents are not from 0 to {num_tokens}")
    backwards = np.flatnonzero(np.diff(starts) < 0)
    if len(backwards):
        raise ValueError(f"a document ends before it begins, by byte {_HEADER_END + 8 * (int(backwards[0]) + 1)}")


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)


def _checksum(file: IO[bytes]) -> str:
    """Returns the checksum of everything after the header."""
    file.seek(_HEADER_END)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


class _Piece(NamedTuple):
    """Part of a document: a library encodes 1 GB of text badly in one call, and well in a thousand."""

    text: str
    begins: bool  # its document begins with it
    ends: bool


def _tokenise(documents: Documents, tokenizer: Tokenizer) -> Iterator[tuple[_Piece, list[int]]]:
    """Yields every piece with its ids; many small pieces are encoded in one call."""
    pieces = (piece for text in documents for piece in _cut(text))
    while group := list(_take(pieces)):
        yield from zip(group, tokenizer.encode_many([piece.text for piece in group]), strict=True)


def _cut(text: str) -> Iterator[_Piece]:
    """Cuts after the end of a line where possible: few tokens would have crossed it."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield _Piece(text[start:end], start == 0, False)
        start = end
    yield _Piece(text[start:], start == 0, True)


def _take(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    weight = 0
    for piece in pieces:
        yield piece
        weight += len(piece.text)
        if weight >= _PIECE:
            return


@contextmanager
def _progress(documents: Documents) -> Iterator[Any]:
    """Yields a function to call with the number of bytes done; it draws a bar if someone is there to see the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = documents.num_bytes < _SHOW_PROGRESS or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        yield partial(bar.advance, bar.add_task(f"tokenising {documents.name}", total=documents.num_bytes))
