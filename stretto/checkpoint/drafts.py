"""From a snapshot to a published checkpoint: write, publish, retire.

Every process writes what it has into one draft folder, flushed to the disk, and at last a file that lists it all. When
all lists are there, the main process makes one manifest of them and renames the folder, in one instant: a crash leaves
the previous checkpoint or the new one, whole. Only then are old ones retired, and only as many as others verify.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.checkpoint.pieces import Rows, index_tensors, merge_indices, write_tensors
from stretto.checkpoint.verify import FORMAT, find_damage, find_manifest_flaw, judge, name_step, seal, steps
from stretto.errors import CheckpointError, DiskFullError, NonFiniteError, tell
from stretto.files import sync, write_text
from stretto.runtime import FULL

KINDS = ("model", "optimizer", "others")  # of tensors: a file for each, the last one only where it is needed
LEAST = 2  # verified checkpoints that stay at least
_LEFT = re.compile(r"\.(new-step-\d{8}-[0-9a-f]{32}|gone-step-\d{8})")  # all else with a dot is the user's own


@dataclass(frozen=True)
class Snapshot:
    """The state of a run on the CPU: all of it, or what this process saves of it."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    state: dict[str, Any]  # JSON; `step`, and `best_step`: 0 while nothing was evaluated
    others: dict[str, Tensor] = field(default_factory=dict)  # what techniques want back besides
    rows: dict[str, Rows] = field(default_factory=dict)  # of tensors that are not here as a whole


def name_draft(folder: Path, step: int, token: str) -> Path:
    return folder / f".new-{name_step(step)}-{token}"


def clean(folder: Path) -> None:
    """Removes what a crash left behind. No process may be saving."""
    for name in os.listdir(folder) if folder.exists() else ():
        if _LEFT.fullmatch(name):
            shutil.rmtree(folder / name, ignore_errors=True)


def write_part(draft: Path, shot: Snapshot, number: int = 0, parts: int = 1) -> None:
    """Writes what one process saves into a draft, to the disk. A file that lists it all is the last to appear."""
    step = int(shot.state["step"])
    _require_finite(shot)
    with _explaining_failures(draft, step):
        _make_folder(draft.parent)
        draft.mkdir(exist_ok=True)
        files, tensors = {}, {}
        for kind, values in zip(KINDS, (shot.weights, shot.moments, shot.others), strict=True):
            name = f"{kind}.safetensors" if parts == 1 else f"{kind}-{number + 1:05d}-of-{parts:05d}.safetensors"
            if values or kind != "others":
                files[name] = write_tensors(draft / name, values)
                tensors[kind] = index_tensors(name, values, shot.rows)
        if number == 0:
            text = json.dumps(shot.state, indent=1)
            write_text(draft / "state.json", text)
            files["state.json"] = {"size": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        write_text(name_part(draft, number), json.dumps({"files": files, "tensors": tensors}))


def _require_finite(shot: Snapshot) -> None:
    bad = [name for name, value in shot.weights.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise NonFiniteError(
            f"refusing to save step {shot.state['step']}: {bad[0]} and {len(bad) - 1} more weights are not finite. "
            "Earlier checkpoints are whole: lower optim.lr, and begin anew from one"
        )


def name_part(draft: Path, number: int) -> Path:
    return draft / f"part-{number + 1:05d}.json"


def publish(draft: Path, state: dict[str, Any], keep: int, parts: int = 1) -> Path:
    """Makes a checkpoint of a draft in which all parts are complete, and retires old ones."""
    folder, step = draft.parent, int(state["step"])
    target = folder / name_step(step)
    with _explaining_failures(draft, step):
        _write_manifest(draft, step, parts)
        if step not in steps(folder):
            _rename(draft, target)
        elif find_damage(target) is None:
            shutil.rmtree(draft)  # it was saved before
        else:
            _discard(target)
            _rename(draft, target)
    retire(folder, step, keep, state["best_step"])
    return target


def _rename(draft: Path, target: Path) -> None:
    draft.rename(target)
    sync(target.parent)


def _write_manifest(draft: Path, step: int, parts: int) -> None:
    lists = [name_part(draft, number) for number in range(parts)]
    found = [json.loads(path.read_text()) for path in lists]
    manifest = {
        "format": FORMAT,
        "step": step,
        "torch": torch.__version__,
        "files": {name: entry for part in found for name, entry in part["files"].items()},
        "tensors": {kind: merge_indices(part["tensors"].get(kind, {}) for part in found) for kind in KINDS},
    }
    flaw = find_manifest_flaw(manifest)
    if flaw:
        raise CheckpointError(f"refusing to save step {step}: {flaw}")
    write_text(draft / "manifest.json", json.dumps(manifest | {"seal": seal(manifest)}))
    for path in lists:
        path.unlink()
    sync(draft)


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)


@contextmanager
def _explaining_failures(draft: Path, step: int) -> Iterator[None]:
    """Puts errors of the system into the user's words."""
    try:
        yield
    except OSError as error:
        words = f"step {step} could not be saved ({error.strerror}: {error.filename or draft}); earlier checkpoints are"
        if error.errno in FULL:
            raise DiskFullError(f"{words} whole. Make room, and go on with --resume") from error
        raise CheckpointError(f"{words} as they were. See to the disk, and go on with --resume") from error


def retire(folder: Path, step: int, keep: int, best_step: int) -> None:
    """Keeps the best, and the newest `keep` that verify, but at least two: until there are as many, nothing is deleted.
    Runs only after `step` is safely there. Newer ones were damaged when the run was resumed, and go if they still are.
    """
    try:
        known = steps(folder)
        verdicts = {other: "whole" if other == step else judge(folder / name_step(other))[0] for other in known}
        whole = [other for other in known if other <= step and verdicts[other] == "whole"]
        if len(whole) < max(keep, LEAST):
            return
        for other in known:
            old = verdicts[other] == "damaged" or other in whole[max(keep, LEAST) :]
            if old and other != best_step:
                _discard(folder / name_step(other))
    except OSError as error:
        tell(f"old checkpoints in {folder} could not be deleted: {error}")


def _discard(checkpoint: Path) -> None:
    gone = checkpoint.with_name(f".gone-{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)  # in one instant: a half-deleted folder must never look like a checkpoint
    shutil.rmtree(gone)
