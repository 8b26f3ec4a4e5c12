"""Rows of tables: JSON lines, CSV and Parquet files, plain or gzipped, and Hugging Face data sets.

A row that cannot be used is left out, and that is said: `Spoiled` counts such rows and names the first ones by file,
line and reason. More than one in a hundred is an error.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from stretto.data.opening import open_bytes
from stretto.errors import DataError
from stretto.files import open_regular

Row = Mapping[str, Any]
X = TypeVar("X")
LONGEST_LINE = 1 << 24  # bytes of a line, which is read whole
_MOST_SPOILED = 0.01  # of all rows
NAMED = 5  # how many of those that are left out
_SHOWN = 80  # characters of a reason
_LOOKED_AT = 100  # rows of a JSON file, any of which may lack a column that the others have
_GROUP = 1000  # rows of a Parquet file or a data set that are read at a time


def name_some(names: Sequence[str], count: int) -> str:
    """Lists the first of so many names."""
    return ", ".join(names[:NAMED]) + (f" and {count - NAMED:,} more" if count > NAMED else "")


class UnusableError(DataError):
    """Why a row cannot be used."""


@dataclass
class Spoiled:
    """The rows of a corpus that cannot be used: how many, and the first ones by name."""

    rows: int = 0  # of all kinds
    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, place: str, reason: object) -> None:
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append(f"{place} ({str(reason)[:_SHOWN]})")

    def judge(self, where: str) -> None:
        """Raises a `DataError` if more rows are left out than a corpus that is right has."""
        if self.count > _MOST_SPOILED * self.rows:
            raise DataError(f"{where}: too many rows cannot be used{self.describe()}. Correct them, or take them out")

    def describe(self) -> str:
        """Says it behind a sentence."""
        if not self.count:
            return ""
        return f"; left out: {self.count:,} of {self.rows:,} rows, {name_some(self.named, self.count)}"


@dataclass(frozen=True)
class Table:
    """Rows that can be read any number of times: each with its place, or in the place of a row, why there is none."""

    name: str
    read: Callable[[], Iterator[tuple[str, Row | UnusableError]]]

    def convert(self, make: Callable[[Row], X], spoiled: Spoiled) -> Iterator[X]:
        """Yields what `make` makes of each row. It raises an `UnusableError` for one that is to be left out."""
        for place, row in self.read():
            spoiled.rows += 1
            try:
                if isinstance(row, UnusableError):
                    raise row
                made = make(row)
            except UnusableError as error:
                spoiled.add(place, error)
            else:
                yield made

    def collect(self, make: Callable[[Row], X]) -> tuple[list[X], str]:
        """Returns what `make` makes of all rows, and says which cannot be used."""
        spoiled = Spoiled()
        made = list(self.convert(make, spoiled))
        spoiled.judge(self.name)
        if not made:
            raise DataError(f"{self.name} has no rows")
        return made, spoiled.describe()


def is_table(path: Path) -> bool:
    return _kind(path) in _READERS


def _kind(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def open_files(name: str, paths: Sequence[Path], expected: Expected) -> Table:
    """Opens tables one after another."""

    def read() -> Iterator[tuple[str, Row | UnusableError]]:
        for path in paths:
            for number, row in _READERS[_kind(path)](path, expected):
                yield f"{path}:{number}", row

    return Table(name, read)


@dataclass(frozen=True)
class Expected:
    """The columns that are wanted of a table: one of them at least has to be there, or all."""

    key: str  # the setting that names them
    columns: Sequence[str]
    all_of_them: bool = False

    def check(self, where: object, there: Sequence[str]) -> list[str]:
        """Returns those that are there."""
        found = [column for column in self.columns if column in there]
        if not found or (self.all_of_them and len(found) < len(self.columns)):
            wanted = " or ".join(map(repr, [column for column in self.columns if column not in found]))
            raise DataError(f"{self.key}: {where} has no column {wanted}, only {', '.join(map(repr, there))}")
        return found


def _read_lines(path: Path) -> Iterator[bytes]:
    with open_bytes(path) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise DataError(f"{path} has a line of more than {LONGEST_LINE:,} bytes, of which each is read whole")
            yield line


def _read_json(path: Path, expected: Expected) -> Iterator[tuple[int, Row | UnusableError]]:
    rows = ((number, _parse(line)) for number, line in enumerate(_read_lines(path), 1) if line.strip())
    first = list(islice(rows, _LOOKED_AT))
    if names := dict.fromkeys(name for _, row in first if not isinstance(row, UnusableError) for name in row):
        expected.check(path, list(names))
    yield from chain(first, rows)


def _parse(line: bytes) -> Row | UnusableError:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return UnusableError("it is not UTF-8")
    except (ValueError, RecursionError) as error:
        return UnusableError(f"it is not JSON: {error}")
    return row if isinstance(row, dict) else UnusableError("it is not a JSON object")


def _read_csv(path: Path, expected: Expected) -> Iterator[tuple[int, Row | UnusableError]]:
    csv.field_size_limit(LONGEST_LINE)
    with open_bytes(path) as file:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""), strict=True)
        try:
            names = next(reader, [])
        except csv.Error as error:
            raise DataError(f"{path} is not a CSV file: {error}") from error
        expected.check(path, names)
        while (fields := _next_fields(reader)) is not None:
            if isinstance(fields, UnusableError):
                yield reader.line_num, fields
            elif len(fields) == len(names):
                yield reader.line_num, dict(zip(names, fields, strict=True))
            elif fields:  # an empty line is no row
                yield reader.line_num, UnusableError(f"it has {len(fields)} fields instead of {len(names)}")


def _next_fields(reader: Any) -> list[str] | UnusableError | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        return UnusableError(f"it is not CSV: {error}")


def _read_parquet(path: Path, expected: Expected) -> Iterator[tuple[int, Row | UnusableError]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path} needs the pyarrow library: pip install 'stretto[datasets]'") from error
    try:
        with open_regular(path) as file:
            table, number = parquet.ParquetFile(file), 0
            columns = expected.check(path, table.schema_arrow.names)
            for group in table.iter_batches(_GROUP, columns=columns):
                for row in group.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the Parquet file {path}: {error}") from error


_READERS = {".jsonl": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
SUFFIXES = tuple(_READERS)


def take_text(row: Row, column: str) -> str:
    """Returns the text of a column, which every row has to have."""
    if column not in row:
        raise UnusableError(f"it has no column {column!r}")
    return check_text(row[column], column)


def check_text(text: Any, column: str) -> str:
    if not isinstance(text, str):
        raise UnusableError(f"{column!r} is {type(text).__name__}, not text")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError(f"{column!r} is not UTF-8") from error
    return text
