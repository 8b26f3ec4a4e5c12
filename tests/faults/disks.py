"""Disks that fail: that forget what was not flushed when the power goes, that are full, or fail now and then."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Tree = dict[str, Any]  # name -> a tree, or the number of a file


class Disk:
    """Records what a program does to a folder: each entry is a change of a folder's list, a file's content that was
    flushed, or a folder's list that was. After a power cut a file has the content that was flushed last, and a change
    of a list is certain only if that list was flushed afterwards."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.contents = root, dict[int, bytes]()
        self.before = self._read(root)
        self.live = self._read(root)  # as the program sees it
        self.log: list[tuple[Any, ...]] = []
        for name in ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "fsync", "open"):
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _read(self, folder: Path) -> Tree:
        tree: Tree = {}
        for path in sorted(folder.iterdir()):
            tree[path.name] = self._read(path) if path.is_dir() else self._add(path.read_bytes())
        return tree

    def _add(self, content: bytes) -> int:
        self.contents[len(self.contents)] = content
        return len(self.contents) - 1

    def _find(self, path: Any, folder: int | None = None) -> tuple[str, ...] | None:
        base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
        full = Path(base, os.fspath(path))
        return full.relative_to(self.root).parts if full.is_relative_to(self.root) else None

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            entry = self._describe(name, target, args, kwargs)
            result = real(target, *args, **kwargs)
            if entry is not None:
                self.log.append(entry)
                apply(self.live, entry)
            return result

        return call

    def _describe(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        if name == "fsync":
            path = self._find(os.readlink(f"/proc/self/fd/{target}"))
            found = None if path is None else look_up(self.live, path)
            if isinstance(found, int):
                return "content", found, Path(self.root, *path or ()).read_bytes()
            return None if path is None else ("list", path)
        path = self._find(target, kwargs.get("dir_fd"))
        if path is None:
            return None
        if name == "open":
            is_new = bool(args[0] & os.O_CREAT) and look_up(self.live, path) is None
            return ("create", path, self._add(b"")) if is_new else None
        if name in ("rename", "replace"):
            return "rename", path, self._find(args[0])
        return ("mkdir", path) if name == "mkdir" else ("remove", path)

    def cut_power(self, after: int, persists: Callable[[], bool], target: Path) -> None:
        """Writes what is on the disk if the power goes after so many entries. `persists` says whether a change of a
        list that was not flushed is there nevertheless."""
        log, contents = self.log[:after], dict(self.contents) | dict.fromkeys(self._find_new(), b"")
        tree = copy(self.before)
        for i, entry in enumerate(log):
            if entry[0] == "content":
                contents[entry[1]] = entry[2]
            elif entry[0] != "list":
                certain = any(later[0] == "list" and later[1] in parents(entry) for later in log[i:])
                if certain or persists():
                    apply(tree, entry)
        write(tree, contents, target)

    def _find_new(self) -> list[int]:
        return [entry[2] for entry in self.log if entry[0] == "create"]


def parents(entry: tuple[Any, ...]) -> list[tuple[str, ...]]:
    return [path[:-1] for path in entry[1:] if isinstance(path, tuple)]


def copy(tree: Tree) -> Tree:
    return {name: copy(value) if isinstance(value, dict) else value for name, value in tree.items()}


def look_up(tree: Tree, path: tuple[str, ...]) -> Any:
    found: Any = tree
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def apply(tree: Tree, entry: tuple[Any, ...]) -> None:
    """Changes a tree; what the change needs may be missing after a power cut, and then nothing happens."""
    kind, path = entry[0], entry[1]
    if kind in ("content", "list"):
        return
    place = look_up(tree, path[:-1])
    if not isinstance(place, dict):
        return
    if kind == "create":
        place[path[-1]] = entry[2]
    elif kind == "mkdir":
        place[path[-1]] = {}
    elif kind == "remove":
        place.pop(path[-1], None)
    elif path[-1] in place and isinstance(goal := look_up(tree, entry[2][:-1]), dict):
        goal[entry[2][-1]] = place.pop(path[-1])


def write(tree: Tree, contents: dict[int, bytes], target: Path) -> None:
    target.mkdir()
    for name, value in tree.items():
        if isinstance(value, dict):
            write(value, contents, target / name)
        else:
            (target / name).write_bytes(contents[value])


def draw(seed: int) -> Callable[[], bool]:
    """Whether changes that were not flushed are there: none, all, or some."""
    generator = random.Random(seed)
    return lambda: seed == 1 or (seed > 1 and generator.random() < 0.5)


class FullDisk:
    """The disk has room for some bytes more, in all files that are written; then the system says that it is full."""

    def __init__(self, patch: pytest.MonkeyPatch, modules: list[Any], room: float, number: int = errno.ENOSPC) -> None:
        self.room, self.number, self.written = room, number, 0
        for module in modules:
            patch.setattr(module, "open", self.open, raising=False)

    def open(self, *args: Any, **kwargs: Any) -> Any:
        file = open(*args, **kwargs)  # noqa: SIM115
        return FullFile(file, self) if "w" in args[1] else file


class FullFile:
    def __init__(self, file: Any, disk: FullDisk) -> None:
        self.file, self.disk = file, disk

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> None:
        rest = int(min(len(data), max(self.disk.room - self.disk.written, 0)))
        self.disk.written += len(data)
        self.file.write(data[:rest])
        if rest < len(data):
            raise OSError(self.disk.number, os.strerror(self.disk.number))


class Failing:
    """Some of the next calls that open or stat a file of a folder fail, as a network file system may."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, failing: range, number: int) -> None:
        self.calls = 0
        for module, name in ((io, "open"), (os, "open"), (os, "stat")):
            patch.setattr(module, name, self.wrap(getattr(module, name), str(folder), failing, number))

    def wrap(self, real: Callable[..., Any], folder: str, failing: range, number: int) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | Path) and str(path).startswith(folder):
                self.calls += 1
                if self.calls - 1 in failing:
                    raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        return call


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where flushing costs nothing."""
    shared = Path("/dev/shm")
    folder = shared / f"stretto-{os.getpid()}-{tmp_path.name}" if shared.is_dir() else tmp_path / "fast"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
