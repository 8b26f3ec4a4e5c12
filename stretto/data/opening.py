"""How files of text are opened: plain or gzipped, never a pipe, and with errors that name the file."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stretto.errors import DataError
from stretto.files import open_regular

_UNPACKED, _SMALL = 50, 1 << 24  # how many times larger a gzip file may get, or how many bytes in any case
_BUFFER = 1 << 17  # bytes unpacked at a time


class NotTextError(DataError):
    """The file is not UTF-8: a folder of documents skips it, everything else reports it."""


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file, unpacked if its name ends in .gz."""
    try:
        with open_regular(path) as file, _unpack(path, file) as data:
            yield data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Opens the text of a file. Only "\\n" ends a line, whatever other line separators Unicode knows."""
    try:
        with open_bytes(path) as data:
            yield io.TextIOWrapper(data, encoding="utf-8-sig", newline="\n")
    except UnicodeDecodeError as error:
        raise NotTextError(f"{path} is not UTF-8 text: convert it, or leave it out") from error


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
