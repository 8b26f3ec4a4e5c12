"""Tensors in safetensors files, whole or in pieces. A piece is some rows of a tensor, as FSDP2 deals them out; which
files have which rows is said by an index, and whoever reads takes the rows that it needs, however they were dealt out.

Files are written here and not by the library, which makes them unreadable for others than the owner, and reports errors
of the system as text. While a file is written its hash is computed, of what was meant to be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.errors import CheckpointError
from stretto.files import open_new

FILE = re.compile(r"(model|optimizer|others)(-\d{5}-of-\d{5})?\.safetensors")  # no other name is ever opened
CHUNK = 2**24  # bytes written at once
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
Index = dict[str, Any]  # name -> {"shape": [...], "pieces": [[file, first row, number of rows], ...]}, as JSON


@dataclass(frozen=True)
class Rows:
    """What a process has of a tensor, where that is not all of it."""

    first: int
    shape: tuple[int, ...]  # of the whole tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes a safetensors file that was not there, to the disk. Returns its size and SHA-256."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that every tensor is aligned
    ends = list(accumulate((tensors[name].nbytes for name in names), initial=0))
    header = {
        name: {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": place}
        for name, place in zip(names, pairwise(ends), strict=True)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(open_new(path), "wb") as file:
        for chunk in chain((len(text).to_bytes(8, "little"), text), _list_chunks(tensors[name] for name in names)):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"size": 8 + len(text) + ends[-1], "sha256": digest.hexdigest()}


def _list_chunks(tensors: Iterable[Tensor]) -> Iterator[Any]:
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        yield from (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))


def index_tensors(file: str, tensors: Mapping[str, Tensor], rows: Mapping[str, Rows]) -> Index:
    """Says what of which tensors is in a file that was written from these."""
    return {
        name: {
            "shape": list(rows[name].shape if name in rows else value.shape),
            "pieces": [[file, rows[name].first if name in rows else 0, value.shape[0] if value.ndim else 1]],
        }
        for name, value in tensors.items()
    }


def merge_indices(indices: Iterable[Index]) -> Index:
    """One index of what several processes have written."""
    merged: Index = {}
    for index in indices:
        for name, entry in index.items():
            found = merged.setdefault(name, {"shape": entry["shape"], "pieces": []})
            found["pieces"] = sorted(found["pieces"] + entry["pieces"], key=lambda piece: piece[1])
    return merged


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files, of which nothing was read yet."""

    name: str
    shape: torch.Size
    pieces: tuple[tuple[str, int, int], ...]  # file, first row, number of rows
    folder: OpenFolder

    def read(self) -> Tensor:
        return self.read_rows(0, self.shape[0]) if self.shape else self._open(0)[...]

    def read_rows(self, first: int, number: int) -> Tensor:
        """Reads some rows, from as many files as have them."""
        found = []
        for i, (_, start, count) in enumerate(self.pieces):
            begin, end = max(first, start), min(first + number, start + count)
            if begin < end:
                found.append(self._open(i)[begin - start : end - start])
        if not found:
            return self._open(0)[0:0]
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_part(self, rows: Rows | None, like: Tensor) -> Tensor:
        """Reads what a process has of the tensor, which has the shape of `like`."""
        return self.read() if rows is None else self.read_rows(rows.first, like.shape[0])

    def _open(self, number: int) -> Any:
        """Opens a piece; it has to be what the index says, so that no row is missing."""
        file, _, count = self.pieces[number]
        part = self.folder.open(file).get_slice(self.name)
        if list(part.get_shape()) != [count, *self.shape[1:]][: len(self.shape)]:
            raise CheckpointError(f"{self.folder.path / file} has another shape of {self.name} than the manifest says")
        return part


@dataclass
class OpenFolder:
    """The tensor files of a checkpoint, each opened once and when it is needed."""

    path: Path
    handles: dict[str, Any] = field(default_factory=dict)

    def open(self, file: str) -> Any:
        if file not in self.handles:
            self.handles[file] = safe_open(self.path / file, framework="pt")
        return self.handles[file]

    def find_tensors(self, index: Index) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(name, torch.Size(entry["shape"]), tuple(map(tuple, entry["pieces"])), self)
            for name, entry in index.items()
        }

    def index(self, file: str) -> Index:
        """Says what is in a file that has whole tensors, by its own header."""
        handle = self.open(file)
        shapes = {name: list(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        return {
            name: {"shape": shape, "pieces": [[file, 0, shape[0] if shape else 1]]} for name, shape in shapes.items()
        }


def find_flaw(index: Index, files: Iterable[str]) -> str | None:
    """Says what is wrong with an index from elsewhere: names that it may not have, rows that are missing or doubled."""
    known = {file for file in files if FILE.fullmatch(file)}
    for name, entry in index.items():
        shape, end = entry["shape"], 0
        for file, first, number in entry["pieces"]:
            if file not in known or first != end or number < 0:
                return f"the rows of {name} are not complete"
            end += number
        if not all(isinstance(size, int) and size >= 0 for size in shape) or end != (shape[0] if shape else 1):
            return f"the rows of {name} are not complete"
    return None


READ_ERRORS = (OSError, ValueError, RecursionError, SafetensorError)
