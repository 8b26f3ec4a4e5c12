"""Where text comes from: files, of text or of rows, folders, Python's own library, Hugging Face data sets.

A corpus is a sequence of documents that can be read any number of times. Its fingerprint depends on the content
alone, so that tokens made from it can be kept and found again. Every failure that a user can cause becomes a
`DataError` that names the file.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from stretto.config import DataConfig
from stretto.data import rows
from stretto.data.opening import NotTextError, open_text
from stretto.data.progress import progress
from stretto.data.seen import note, recall, stamp
from stretto.data.tokenizer import Store
from stretto.errors import DataError
from stretto.hardware import find_machine_memory

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_LONGEST_LINE = 1 << 24  # characters of a line that is a document
_WORTH_NOTING = 1 << 26  # bytes of files: it takes about a second to read them
_SAID = 1 << 20  # bytes after which a bar moves on


def find_text_file(key: str, path: Path) -> Path:
    """Returns `path`, or `path` with .gz added; `key` is the setting that the error names if there is neither."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    raise DataError(f"{key}: there is no file {path} (nor {path.name}.gz)")


@dataclass(frozen=True)
class Documents:
    name: str
    read: Callable[[], Iterator[str]]
    fingerprint: str
    count: int
    num_bytes: int
    left_out: Set[str] = frozenset()  # files that are not text
    spoiled: rows.Spoiled = field(default_factory=rows.Spoiled)  # rows that cannot be used

    def __iter__(self) -> Iterator[str]:
        return self.read()


def open_files(
    name: str, paths: Sequence[Path], *, skip_binary: bool, column: str = "text", store: Store | None = None
) -> Documents:
    """Opens files of which each is one document, or a table, of which each row has one in a column. What `store` has
    noted of large ones spares reading them."""
    left_out, spoiled = set[str](), rows.Spoiled()

    def read(spoiled: rows.Spoiled | None = None) -> Iterator[str]:
        for path in paths:
            if rows.is_table(path):
                table = rows.open_files(name, [path], rows.Expected(f"data.column = {column!r}", [column]))
                yield from table.convert(partial(rows.take_text, column=column), spoiled or rows.Spoiled())
                continue
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

    identity, size = repr((column, skip_binary, list(map(str, paths)))), sum(map(_find_size, paths))
    if store is None or size < _WORTH_NOTING:
        found = _survey(name, partial(read, spoiled), size)
        spoiled.judge(name)
        return replace(found, read=read, left_out=left_out, spoiled=spoiled)
    before, known = stamp(paths), recall(store, identity, paths)
    try:
        fingerprint, count, num_bytes, files, bad = known
        return Documents(name, read, str(fingerprint), int(count), int(num_bytes), frozenset(files), rows.Spoiled(*bad))
    except (TypeError, ValueError):  # there is no note, or it is none of ours
        found = open_files(name, paths, skip_binary=skip_binary, column=column)
    facts = found.fingerprint, found.count, found.num_bytes, sorted(found.left_out), astuple(found.spoiled)
    note(store, identity, before, facts)
    return found


def _find_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it will say more


def _require_room(path: Path) -> None:
    """Refuses a document of which text and bytes cannot be in memory at the same time."""
    if 2 * (size := _find_size(path)) > find_machine_memory():
        raise DataError(
            f"{path} has {size:,} bytes and is one document, too large for the memory of this machine: split it into"
            " several files, or into the rows of a .jsonl file"
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


def _survey(name: str, read: Callable[[], Iterator[str]], size: int = 0) -> Documents:
    """Reads everything once, about `size` bytes, to learn what it is: cheap next to tokenising, and it notices any
    change."""
    digest, count, num_bytes, unsaid = hashlib.sha256(), 0, 0, 0
    with progress(f"reading {name}", size, known=False) as advance:
        for text in read():
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little"))  # else ["ab", "c"] and ["a", "bc"] would look the same
            digest.update(data)
            count, num_bytes, unsaid = count + 1, num_bytes + len(data), unsaid + len(data)
            if unsaid >= _SAID:
                advance(unsaid)
                unsaid = 0
    return Documents(name, read, digest.hexdigest(), count, num_bytes)


def open_column(name: str, dataset: Any, column: str = "text", *, streaming: bool = False) -> Documents:
    """Opens a column of a Hugging Face data set, whose own fingerprint spares reading all of it; one that streams has
    none."""

    def read() -> Iterator[str]:
        for group in dataset.select_columns(column).iter(batch_size=1000):
            yield from (rows.check_text(text or "", f"{name}: {column}") for text in group[column])

    if streaming:
        return _survey(name, read)
    identity = dataset._fingerprint + (f" {column}" if column != "text" else "")
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()
    return Documents(name, read, fingerprint, len(dataset), dataset.data.nbytes)


def open_documents(
    key: str, source: str, suffix: str, column: str = "text", *, streaming: bool = False, store: Store | None = None
) -> Documents:
    """Opens the corpus that `source` names; `key` is the setting that `source` came from ("data.train"). `store` is
    where notes of large files are."""
    if source.startswith("hf:"):
        name, dataset = load_split(key, source, streaming)
        rows.Expected(f"{key} = {source!r}", [column]).check("the data set", dataset.column_names or [column])
        return open_column(name, dataset, column, streaming=streaming)
    if source == "python-stdlib":
        return open_files(source, _find_library_files(), skip_binary=True)
    path, paths = Path(source), find_sources(key, source, suffix)
    documents = open_files(path.name, paths, skip_binary=not path.is_file(), column=column, store=store)
    if not documents.count:
        raise DataError(
            f"{key} = {source!r}: no row in it, and no text file that ends in one of data.suffix = {suffix!r}"
            + describe_left_out(documents.left_out)
        )
    return documents


def open_corpus(key: Literal["data.train", "data.eval"], cfg: DataConfig, store: Store) -> Documents:
    source = cfg.train if key == "data.train" else cfg.eval
    return open_documents(key, source, cfg.suffix, cfg.column, streaming=cfg.streaming, store=store)


def open_table(
    key: Literal["data.train", "data.eval"], cfg: DataConfig, columns: Sequence[str], *, all_of_them: bool = False
) -> rows.Table:
    """Opens the rows that `data.train` or `data.eval` names, which have some of these columns, or all."""
    source = cfg.train if key == "data.train" else cfg.eval
    expected = rows.Expected(f"{key} = {source!r}", columns, all_of_them)
    if source.startswith("hf:"):
        name, dataset = load_split(key, source, cfg.streaming)
        expected.check("the data set", dataset.column_names or columns)
        return rows.Table(name, lambda: ((f"{name}:{number}", row) for number, row in enumerate(dataset, 1)))
    paths = [path for path in find_sources(key, source, ",".join(rows.SUFFIXES)) if rows.is_table(path)]
    if not paths:
        raise DataError(f"{key} = {source!r}: it needs rows, in files that end in {', '.join(rows.SUFFIXES)}")
    return rows.open_files(source, paths, expected)


def find_sources(key: str, source: str, suffix: str) -> list[Path]:
    """Finds the files that `source` names: itself, those of a pattern, or those of a folder with one of the suffixes,
    which are tables where there are none."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = tuple(part.strip() for part in suffix.split(",") if part.strip())
        return _find_files(path, suffixes) or _find_files(path, rows.SUFFIXES)
    found = sorted(Path(name) for name in glob.glob(source, recursive=True) if Path(name).is_file())
    if not found:
        raise DataError(
            f"{key} = {source!r}: there is no such file or folder, and no file of such a pattern (nor is it"
            ' "python-stdlib" or "hf:...")'
        )
    return found


def describe_unused(*corpora: Documents) -> str:
    """Says behind a sentence which files and rows of these are not used."""
    files = frozenset[str]().union(*(documents.left_out for documents in corpora))
    return describe_left_out(files) + "".join(documents.spoiled.describe() for documents in corpora)


def describe_left_out(files: Set[str], kind: str = "UTF-8 text") -> str:
    """Says behind a sentence how many files of a folder are not of a kind, and names a few of them."""
    if not files:
        return ""
    names = rows.name_some(list(map(repr, sorted(files))), len(files))
    return f"; not {kind}, and left out: {len(files):,} file{'s' if len(files) > 1 else ''}, {names}"


def _find_files(folder: Path, suffixes: tuple[str, ...], skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Finds the files below `folder` with these suffixes, without looking into folders with `skipped` names."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - skipped  # os.walk goes on into what is left in this list
        found += (Path(parent, name) for name in names if name.removesuffix(".gz").endswith(suffixes))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _find_library_files() -> list[Path]:
    return _find_files(Path(sysconfig.get_path("stdlib")), (".py",), _NOT_LIBRARY)


def load_split(key: str, source: str, streaming: bool) -> tuple[str, Any]:
    """Loads the part of a Hugging Face data set that a setting needs, and returns its name, too."""
    splits = ("train",) if key == "data.train" else ("validation", "test")
    dataset = _load_hub(key, source, streaming)
    for split in splits:
        if split in dataset:
            return f"{source} ({split})", dataset[split]
    raise DataError(f"{key} = {source!r}: no split {' or '.join(splits)}, only {', '.join(dataset)}")


def _load_hub(key: str, source: str, streaming: bool) -> Any:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"{key} = {source!r} needs the datasets library: pip install 'stretto[datasets]'") from error

    failure: Exception | None = None  # of the first reading
    for arguments in _readings(source.removeprefix("hf:")):
        try:
            return load_dataset(*arguments, streaming=streaming)
        except (DatasetsError, OSError, ValueError, RuntimeError) as error:
            failure = failure or error
    raise DataError(f"{key} = {source!r} cannot be loaded: {failure}") from failure


def _readings(name: str) -> list[tuple[str, ...]]:
    """Lists what NAME[/CONFIG] may mean: names may hold a slash ("owner/set"), and folders any number."""
    head, slash, config = name.rpartition("/")
    if Path(name).is_dir() or not slash:
        return [(name,)]
    return [(head, config)] if "/" in head else [(name,), (head, config)]
