"""Files that are either whole or not there, that are never written through a link, and that can be read to an end.

A run folder may come from elsewhere. A link in it could lead any write to a file that is precious, so nothing in it is
written in place: a draft with a name that nobody can foresee takes the place of the old file when it is on the disk. A
file in it could also be a pipe, which never ends, or larger than memory: only regular files of bounded size are read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from stretto.errors import CheckpointError, ConfigError

# What a run writes into its folder. Other files there are the user's own.
RUN_FILES = ("lock", "config.toml", "labels.json", "events.jsonl", "report.html", "exit.json", "loggers.json")
RUN_FOLDERS = ("checkpoints", "data", "tensorboard", "ablation")
# What `replacing` calls the drafts of these, and of tokenizers and token files.
_DRAFT = re.compile(
    rf"\.({'|'.join(map(re.escape, RUN_FILES))}|tokenizer(_config)?\.json|bpe-[0-9a-f]{{16}}\.json"
    r"|[0-9a-f]{16}(-\d+-of-\d+)?\.tokens|[0-9a-f]{16}\.seen)\.[0-9a-f]{32}"
)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Writes a file under another name and renames it when it is complete and on the disk.

    Several processes may write the same file at once: each one's rename is whole, and the last one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, descriptor = _open_draft(path)
    try:
        with open(descriptor, "w+b") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def _open_draft(path: Path) -> tuple[Path, int]:
    """Opens a draft and locks it, which says that its writer lives. One that was taken for stale, in the moment before
    it was locked, is gone: there is another name."""
    while True:
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        descriptor = open_new(draft)
        with suppress(OSError):  # some file systems have no locks: nobody can take the draft for stale there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return draft, descriptor
        os.close(descriptor)


def remove_stale_drafts(folder: Path) -> None:
    """Removes the drafts of writers that were killed: those that nobody holds a lock on. Other processes, also on other
    machines, may be writing to the same folder."""
    for draft in [path for path in folder.glob(".*") if _DRAFT.fullmatch(path.name)]:
        with suppress(OSError), open_regular(draft, os.O_RDWR | os.O_NOFOLLOW) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> IO[bytes]:
    """Opens a file to read. A pipe would make the reader wait for ever, and a device has no end: both are an `OSError`,
    as is a folder."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "r+b" if flags & os.O_RDWR else "rb")


def read_text(path: Path, most: int) -> str:
    """Reads a file of UTF-8 that has at most so many bytes; an `OSError` if it has more."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read(most).decode("utf-8")


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
    if target.resolve() == Path.cwd():  # a new folder takes the place of an empty one, and nobody would be in that
        raise CheckpointError(f"cannot export to the folder that this command runs in: name a new folder in {target}")
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
