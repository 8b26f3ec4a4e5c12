"""Token files: a corpus, tokenised once and memory-mapped from then on.

    8 bytes    magic
    1016 bytes header: JSON, filled up with spaces
    int64      where each document starts in the tokens, and where the last one ends
    uint16     the tokens (uint32 when the vocabulary needs it); each document is bos, its ids, eos

A file is named after what it was made from, so a changed corpus or tokenizer gets a new file. Nothing in it is
trusted: opening checks every field, the size, the checksum, where documents start and the largest id. While it is
mapped, others may still write to it or cut it short: each batch asks whether it has changed, and checks its own ids.

A large corpus becomes several such files, its shards, each with a run of the documents. A process that was stopped
while it wrote them goes on behind the last one that is whole. Shards that were checked once, and have the size and the
date that they had then, are not read again to be checked when they are opened; what batches check, they still do.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple
from weakref import finalize

import numpy as np
import numpy.typing as npt

from stretto.data.documents import Documents
from stretto.data.packing import count_positions
from stretto.data.progress import Advance, progress
from stretto.data.seen import note, recall, stamp
from stretto.data.stream import Int64s
from stretto.data.tokenizer import Ids, Store, Tokenizer
from stretto.errors import DataError
from stretto.files import open_regular, replacing

_MAGIC = b"stretto\x00"
_VERSION = 1
_HEADER_END = 1024
_CHUNK = 1 << 24  # ids compared at a time
_PIECE = 1 << 20  # characters tokenised at a time
_SHARD = 1 << 28  # bytes of text in a shard
_MOST_SHARDS = 256  # of which each is an open file


class Mapped:
    """A token file that is open and mapped: it knows whether the file is still the one that was checked."""

    def __init__(self, path: Path, file: IO[bytes], size: int, sha256: str) -> None:
        self._path, self.sha256 = path, sha256
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
            if _checksum(file) != self.sha256:
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

    ids: Any  # an array of uint16 or uint32, memory-mapped; or those of several files, `Joined`
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
        if isinstance(self.ids, Joined):
            return self.ids.take(places)
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


class Joined:
    """The ids of several files one after another, or a run of them."""

    def __init__(self, files: Sequence[Tokens], begin: int = 0, end: int | None = None) -> None:
        self._files, self._begin = files, begin
        *self._begins, total = np.cumsum([0, *(len(tokens.ids) for tokens in files)])
        self._end = int(total) if end is None else end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> Joined:
        begin, end, _ = part.indices(len(self))
        return Joined(self._files, self._begin + begin, self._begin + end)

    def take(self, places: Int64s) -> Int64s:
        places = places + self._begin
        ids, files = np.empty(places.shape, np.int64), np.searchsorted(self._begins, places, side="right") - 1
        for number in np.unique(files):
            here = files == number
            ids[here] = self._files[number].take(places[here] - self._begins[number])
        return ids


def open_tokens(documents: Documents, tokenizer: Tokenizer, store: Store) -> Tokens:
    """Opens the tokens of a corpus, from files in `store` if an earlier run left them there."""
    made_from = hashlib.sha256(f"{documents.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()
    shards = _divide(documents, made_from, store)
    if any(not shard.path.exists() for shard in shards):
        _write_missing(documents, shards, tokenizer, store)
    if len(shards) == 1:
        return read_tokens(shards[0].path, tokenizer, made_from)
    return _join([_open_shard(shard, tokenizer, store) for shard in shards])


@dataclass(frozen=True)
class Shard:
    path: Path
    made_from: str
    count: int  # of its documents


def _divide(documents: Documents, made_from: str, store: Store) -> list[Shard]:
    """Cuts a corpus into runs of documents, of about equal numbers: one, unless it is large."""
    number = max(min(-(-documents.num_bytes // _SHARD), _MOST_SHARDS, documents.count), 1)
    if number == 1:
        return [Shard(store.find(f"{made_from[:16]}.tokens"), made_from, documents.count)]
    cuts = [documents.count * i // number for i in range(number + 1)]
    names = [f"{i:03}-of-{number:03}" for i in range(1, number + 1)]
    return [
        Shard(store.find(f"{made_from[:16]}-{name}.tokens"), f"{made_from} {name}", end - begin)
        for name, begin, end in zip(names, cuts, cuts[1:], strict=False)
    ]


def _write_missing(documents: Documents, shards: list[Shard], tokenizer: Tokenizer, store: Store) -> None:
    """Writes the shards that are not there, in one reading of the corpus."""
    texts = iter(documents)
    with progress(f"tokenising {documents.name}", documents.num_bytes) as advance:
        for shard in shards:
            mine = islice(texts, shard.count)
            if shard.path.exists():
                for text in mine:
                    advance(len(text))
            else:
                part = replace(documents, read=partial(iter, mine), count=shard.count)
                checksum = write_tokens(shard.path, part, tokenizer, shard.made_from, advance)
                if len(shards) > 1:  # a single file is read quickly
                    note(store, shard.path.name, stamp([shard.path]), checksum, own=True)


def _open_shard(shard: Shard, tokenizer: Tokenizer, store: Store) -> Tokens:
    known, before = recall(store, shard.path.name, [shard.path]), stamp([shard.path])
    tokens = read_tokens(shard.path, tokenizer, shard.made_from, trusted=known)
    if known is None and tokens.file is not None:
        note(store, shard.path.name, before, tokens.file.sha256)
    return tokens


def _join(files: list[Tokens]) -> Tokens:
    ends = np.cumsum([len(tokens.ids) for tokens in files])
    starts = [tokens.starts[1:] + end - len(tokens.ids) for tokens, end in zip(files, ends, strict=True)]
    return Tokens(Joined(files), np.concatenate([np.zeros(1, np.int64), *starts]))


def write_tokens(
    path: Path, documents: Documents, tokenizer: Tokenizer, made_from: str, advance: Advance = lambda num_bytes: None
) -> str:
    """Writes a token file, and returns its checksum."""
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    starts, length = [np.zeros(1, np.int64)], 0
    with replacing(path) as file:
        file.seek(_HEADER_END + 8 * (documents.count + 1))
        for pieces, encoded in _tokenise(documents, tokenizer):
            lengths = [len(ids) + piece.begins + piece.ends for piece, ids in zip(pieces, encoded, strict=True)]
            ends = length + np.cumsum(lengths)
            starts.append(ends[[piece.ends for piece in pieces]])
            file.write(np.concatenate(_frame(pieces, encoded, tokenizer), dtype=dtype, casting="unsafe").tobytes())
            length = int(ends[-1])
            advance(sum(len(piece.text.encode()) for piece in pieces))
        places = np.concatenate(starts)
        if len(places) != documents.count + 1:
            raise DataError(f"{documents.name} changed while it was read: run again")
        file.seek(_HEADER_END)
        file.write(places.tobytes())
        header = {"version": _VERSION, "dtype": dtype.name, "tokens": length, "documents": documents.count}
        header |= {"sha256": _checksum(file), "made_from": made_from}
        file.seek(0)
        file.write(_MAGIC + json.dumps(header).encode().ljust(_HEADER_END - len(_MAGIC)))
    return str(header["sha256"])


def _frame(pieces: list[_Piece], encoded: list[Ids], tokenizer: Tokenizer) -> list[Ids]:
    """Puts bos and eos where documents begin and end."""
    bos, eos = np.array([tokenizer.bos]), np.array([tokenizer.eos])
    return [
        part
        for piece, ids in zip(pieces, encoded, strict=True)
        for part in (*[bos] * piece.begins, ids, *[eos] * piece.ends)
    ]


def read_tokens(path: Path, tokenizer: Tokenizer, made_from: str, trusted: str | None = None) -> Tokens:
    """Opens a token file. `trusted` is its checksum if it was checked before, and has not changed since."""
    try:
        return _read_tokens(path, tokenizer, made_from, trusted)
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"the token file {path} is damaged: {error}. Delete it; it will be made again") from error


def _read_tokens(path: Path, tokenizer: Tokenizer, made_from: str, trusted: str | None) -> Tokens:
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
        is_known = trusted is not None and header.get("sha256") == trusted
        _check(is_known or header.get("sha256") == _checksum(file), "its checksum is wrong")
        file.seek(_HEADER_END)
        starts = np.fromfile(file, np.int64, num_documents + 1)
        _check_starts(starts, num_tokens)
        mapped = Mapped(path, file, tokenizer.size, header["sha256"])
        if not num_tokens:  # an empty file cannot be mapped
            return Tokens(np.empty(0, dtype), starts, mapped)
        ids = np.memmap(file, dtype, mode="r", offset=ids_at, shape=(num_tokens,))
        for first in range(0, 0 if is_known else num_tokens, _CHUNK):
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


def _tokenise(documents: Documents, tokenizer: Tokenizer) -> Iterator[tuple[list[_Piece], list[Ids]]]:
    """Yields groups of pieces with their ids; the many small pieces of a group are encoded in one call."""
    pieces = (piece for text in documents for piece in _cut(text))
    while group := list(_take(pieces)):
        yield group, tokenizer.encode_arrays([piece.text for piece in group])


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
