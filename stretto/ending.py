"""How a run ended: exit.json, the last line of the log, and the end of a loop of failures.

A run that fails at the same step, of the same cause, three times in a row would do so for ever under a scheduler that
starts it again: the next start refuses, until something is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from stretto.config import Config, dump_config
from stretto.errors import PeerLostError, RepeatedFailure, StrettoError, tell
from stretto.files import open_in_place, open_new, read_text, write_text
from stretto.plan import advise_on_memory
from stretto.runtime import Runtime, describe_end, read_clock, total_memory
from stretto.version import __version__

EXIT, EVENTS = "exit.json", "events.jsonl"
MOST_ATTEMPTS = 3
MOST_BYTES = 2**20  # of exit.json
BEFORE = "stretto/before"  # the key in the store of the processes
NOT_COUNTED = (0, 7, 9, 75, 130)  # no failures, and those that another machine or an empty disk mends


@contextmanager
def recording_exit(folder: Path, rt: Runtime, config: Config) -> Iterator[None]:
    """Writes how the run ended to exit.json and to the log, before the other processes can notice; and refuses to begin
    what has failed too often. While there is no exit.json, the run goes on, or was killed. Every process may write it,
    once the main process holds the lock."""
    path, version = folder / EXIT, _identify(config)
    before = _share(rt, _read(path))
    rt.advise = lambda: advise_on_memory(config, total_memory(rt.device), rt.world)
    if rt.is_main:
        _refuse_repetition(path, before, version)
        with suppress(OSError):
            path.unlink()

    def record(error: BaseException | None) -> None:
        end = getattr(error, "first", None) or describe_end(error, rt.rank, rt.step, rt.reason)
        kind = {key: end[key] for key in ("code", "cause", "step")} | {"version": version}
        attempts = before.get("attempts", 1) + 1 if kind.items() <= before.items() else 1
        _write(path, end | {"attempts": attempts, "version": version, "time": read_clock()}, error)
        if rt.is_main and error is not None:
            _append(folder / EVENTS, {"time": read_clock(), "ended": end})

    rt.record = record
    try:
        yield
    except BaseException as error:
        cause = rt.find_cause(error)
        rt.announce(cause)
        record(cause)
        if cause is error:
            raise
        raise cause from error
    if rt.is_main:
        record(None)


def _share(rt: Runtime, before: dict[str, Any]) -> dict[str, Any]:
    """How the attempt before ended: the main process has read it, and removes it."""
    if rt.store is None:
        return before
    if rt.is_main:
        rt.store.set(BEFORE, json.dumps(before))
    return json.loads(rt.store.get(BEFORE))


def _identify(config: Config) -> str:
    """What has to change for a run to be another attempt."""
    return hashlib.sha256(f"{dump_config(config)} {__version__} {torch.__version__}".encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads(read_text(path, MOST_BYTES))
        if isinstance(record, dict) and isinstance(record.get("attempts", 1), int):
            return record
    return {}


def _refuse_repetition(path: Path, before: dict[str, Any], version: str) -> None:
    repeated = before.get("attempts", 1) >= MOST_ATTEMPTS and before.get("code") not in NOT_COUNTED
    if repeated and before.get("version") == version:
        raise RepeatedFailure(
            f"{before['attempts']} attempts have ended alike after step {before.get('step')}: {before.get('cause')} "
            f"(code {before.get('code')}): {before.get('message')}. Change the recipe, or delete {path} to try again"
        )


def _write(path: Path, record: dict[str, Any], error: BaseException | None) -> None:
    text = json.dumps(record, indent=1) + "\n"
    second = isinstance(error, PeerLostError) or (isinstance(error, StrettoError) and error.first is not None)
    try:
        if second:  # what the first process to fail has written itself, before or after, says more
            with suppress(FileExistsError), open(open_new(path), "w", encoding="utf-8") as file:
                file.write(text)
        else:
            write_text(path, text)
    except OSError as problem:
        tell(f"{path} could not be written: {problem.strerror}")


def _append(path: Path, event: dict[str, Any]) -> None:
    """Adds a line to the log, which may be torn, or not there."""
    try:
        handle = open_in_place(path)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, b"\n" * torn + json.dumps(event).encode() + b"\n")
        finally:
            os.close(handle)
    except OSError as error:
        tell(f"warning: {path} does not say how the run ended: {error.strerror}")
