"""Reading text, plain or gzipped, and the place of files that are made from it.

Every failure a user can cause becomes a `DataError` that names the file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stretto.errors import DataError


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
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as handle:
            yield handle
    except UnicodeDecodeError as error:
        raise NotTextError(f"{path} is not UTF-8 text: convert it, or leave it out") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Store:
    """Where tokenizers and token files are kept: a folder to write to, and one that may have them already."""

    folder: Path
    read_only: Path | None = None

    def find(self, name: str) -> Path:
        """Returns the file of this name if there is one, else where it should be written."""
        own = self.folder / name
        if self.read_only is None or own.exists() or not (self.read_only / name).exists():
            return own
        return self.read_only / name
