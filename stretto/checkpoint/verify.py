"""Which checkpoints of a run can be used: each is compared with its manifest before it is believed.

Three things can be wrong with one. It is damaged if it does not match its manifest: it is passed over, and may be
deleted. It is unreadable if the system fails: after some tries the run stops, since the checkpoint may be whole. It is
foreign if it is of another step than its name says, or of another model or optimizer: the run stops, too. What is
unreadable or foreign is never deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stretto.checkpoint.pieces import FILE, find_flaw
from stretto.errors import CheckpointError, tell
from stretto.files import open_regular, read_text

FORMAT = 2
MOST_BYTES = 2**28  # of a manifest or a state: a million tensors take about as many
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # other errors of the system may pass
PAUSES_S = (0.1, 0.5, 2.0)  # between tries to read; what network file systems and a full table of open files may need
STATE: dict[str, Any] = {
    "step": int, "best_step": int, "evaluated": int, "waited": int, "tokens": int, "best": int | float | None,
    "scaler": dict, "guard": dict, "techniques": dict, "identity": dict,
}  # fmt: skip
_NAME = re.compile(r"step-(\d{8})")
Result = TypeVar("Result")


def name_step(step: int) -> str:
    return f"step-{step:08d}"


def find_damage(checkpoint: Path) -> str | None:
    """Says why this checkpoint must not be loaded; None if it is whole. A `CheckpointError` says that the checkpoint
    cannot be read, or that it is another step's than its name says."""
    return _read_patiently(checkpoint, _find_damage)


def _read_patiently(checkpoint: Path, read: Callable[[Path], Result]) -> Result:
    pauses = iter(PAUSES_S)
    while True:
        try:
            return read(checkpoint)
        except OSError as error:
            if (pause := next(pauses, None)) is None:
                raise CheckpointError(
                    f"{checkpoint} cannot be read, though it may be whole ({error}): try again later, or move it away"
                ) from error
            time.sleep(pause)


def _find_damage(checkpoint: Path) -> str | None:
    if checkpoint.is_symlink() or checkpoint.is_file():
        raise CheckpointError(f"{checkpoint} is not a folder: move it away")
    try:
        manifest = read_manifest(checkpoint)
        if manifest.pop("seal") != seal(manifest):
            return "manifest.json was changed"
        own_name = name_step(manifest["step"])
        if manifest["format"] not in (1, FORMAT):
            raise CheckpointError(f"{checkpoint} is of format {manifest['format']!r}: a newer Stretto may read it")
        flaw = find_manifest_flaw(manifest)  # names in it are looked at before they are used
        if flaw:
            return flaw
        for name, entry in manifest["files"].items():
            if (checkpoint / name).stat().st_size != entry["size"]:
                return f"{name} has the wrong size"
            if _hash(checkpoint / name) != entry["sha256"]:
                return f"{name} does not match its SHA-256"
    except (*MISSING, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if checkpoint.name != own_name:
        raise CheckpointError(f"{checkpoint} is {own_name} by its manifest: give it that name again, or move it away")
    return None


def judge(checkpoint: Path) -> tuple[str, str]:
    """Whether a checkpoint is "whole", "damaged", or "uncertain": unreadable or foreign; and why."""
    try:
        damage = find_damage(checkpoint)
    except CheckpointError as error:
        return "uncertain", str(error)
    return ("whole", "") if damage is None else ("damaged", damage)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads(read_text(checkpoint / "manifest.json", MOST_BYTES))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads the state. What matches its manifest may still be another thing: whoever wrote it has sealed it."""
    try:
        state = json.loads(read_text(checkpoint / "state.json", MOST_BYTES))
        kinds = STATE if "identity" in state else {"step": int, "best_step": int}  # a model alone has not more
        known = {"evaluated": 0, "waited": 0, "techniques": {}} | state  # what older versions did not have
        wrong = [key for key, kind in kinds.items() if not isinstance(known.get(key, ...), kind)]
        if wrong or not all(isinstance(value, int | float) for value in known.get("guard", {}).values()):
            raise ValueError(f"it has no right {wrong[0] if wrong else 'guard'}")
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint / 'state.json'} is not the state of a run: {error}") from error
    return state


def find_manifest_flaw(manifest: dict[str, Any]) -> str | None:
    """Says what is wrong in itself with a manifest. Format 1 had whole tensors in files of fixed names, and no list of
    them."""
    files, version = manifest["files"], manifest["format"]
    needed = {"state.json", "model.safetensors", "optimizer.safetensors"} if version == 1 else {"state.json"}
    odd = [name for name in files if name != "state.json" and not FILE.fullmatch(name)]
    if odd or not needed <= files.keys():
        return f"manifest.json names {odd[0]!r}" if odd else "manifest.json does not name all files"
    indices = manifest["tensors"].values() if version > 1 else ()
    return next(filter(None, (find_flaw(index, files) for index in indices)), None)


def steps(folder: Path) -> list[int]:
    """Lists the published steps, newest first."""
    try:
        names = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted((int(name[1]) for name in names if name), reverse=True)


def find_newest(folder: Path, before: int | None = None) -> int | None:
    """Finds the newest step that verifies, of those before another one if that is given; damaged checkpoints are named
    and passed over."""
    for step in steps(folder):
        if before is not None and step >= before:
            continue
        damage = find_damage(folder / name_step(step))
        if damage is None:
            return step
        tell(f"checkpoint of step {step} is damaged ({damage}): trying the one before")
    return None


def find_best(folder: Path) -> int | None:
    """Finds the step that evaluated best, as the newest checkpoint says; the newest step where that one is gone."""
    newest = find_newest(folder)
    if newest is None:
        return None
    best = int(_read_patiently(folder / name_step(newest), read_state)["best_step"])
    return best if best and find_damage(folder / name_step(best)) is None else newest


def seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
