"""Files that are either whole or not there, and that are never written through a link.

A run folder may come from elsewhere. A link in it could lead any write to a file that is precious, so nothing in it is
written in place: a draft with a name that nobody can foresee takes the place of the old file when it is on the disk.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stretto.errors import CheckpointError, ConfigError

# What a run writes into its folder. Other files there are the user's own.
RUN_FILES = ("lock", "config.toml", "labels.json", "events.jsonl", "report.html", "exit.json")
RUN_FOLDERS = ("checkpoints", "data", "tensorboard")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Writes a file under another name and renames it when it is complete and on the disk.

    Several processes may write the same file at once: each one's rename is whole, and the last one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(open_new(draft), "w+b") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


def open_new(path: Path) -> int:
    """Opens a file that was not there: no file and no link of that name is taken."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_in_place(path: Path) -> int:
    """Opens a file to append to, made if it is not there; an `OSError` where a link has its name."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def make_folder(key: str, folder: Path) -> None:
    """Makes a folder that the user has named by `key`, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key} = {str(folder)!r} cannot be a folder: {error.strerror}") from error


def require_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder: choose another one to export to")


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_links(run: Path) -> None:
    """Raises a `CheckpointError` if anything that a run writes to is a link. The run folder itself may be one."""
    inside = (path for top in RUN_FOLDERS for path in (run / top).rglob("*"))
    try:
        links = [path for path in (*(run / name for name in (*RUN_FILES, *RUN_FOLDERS)), *inside) if path.is_symlink()]
    except OSError as error:
        raise CheckpointError(f"{run} cannot be read, though it may be whole ({error}): try again later") from error
    for path in links:
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, and a run would write through it: put the file itself in its"
            " place, or delete the link"
        )
