"""Checkpoints: save, verify, publish, load, retire.

    checkpoints/step-00000020/model.safetensors      weights, whole tensors under their state-dict names
                              optimizer.safetensors  moments, as "exp_avg/NAME"
                              others.safetensors     what techniques want back, where they do
                              state.json             step, which step evaluated best, and what the trainer wants back
                              manifest.json          size and SHA-256 of the others

A checkpoint is written into a temporary folder, flushed to the disk and renamed in one instant, so a crash leaves the
previous one or the new one, whole. There is no pickle: reading a checkpoint cannot run code. Tensors are stored whole,
so a run may resume on another number of processes.

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
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stretto.errors import CheckpointError
from stretto.files import sync
from stretto.optim import FlatAdamW
from stretto.runtime import tell
from stretto.weights import Write, put, take

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
OTHERS = "others.safetensors"  # not in every checkpoint: the manifest says whether
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # the entries that AdamW keeps for each parameter
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # other errors of the system may pass
PAUSES_S = (0.1, 0.5, 2.0)  # between tries to read; what network file systems and a full table of open files may need
_NAME = re.compile(r"step-(\d{8})")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run as whole tensors on the CPU."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    state: dict[str, Any]  # JSON; `step`, and `best_step`: 0 while nothing was evaluated
    others: dict[str, Tensor] = field(default_factory=dict)  # what techniques want back besides


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Snapshot:
    """Takes the state of a run. Every process must call this function: sharded tensors are gathered."""
    exact = optimizer.weight if isinstance(optimizer, FlatAdamW) else Tensor.detach
    weights = {name: take(exact(value)) for name, value in model.state_dict(keep_vars=True).items()}
    moments = {}
    for name, (parameter, key, shape) in _find_moments(model, optimizer).items():
        # Torch's AdamW has no moments of a parameter that never had a gradient: they begin with zeros.
        known = optimizer.state.get(parameter, {}).get(key)
        moments[name] = torch.zeros(shape) if known is None else take(known)
    return Snapshot(weights, moments, state)


def _find_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[nn.Parameter, str, torch.Size]]:
    """Returns the parameter, the key in its state and the shape of all moments, by name in optimizer.safetensors."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {
        f"{key}/{name}": (parameter, key, torch.Size() if key == "step" else parameter.shape)
        for name, parameter in model.named_parameters()
        for key in MOMENTS
        if parameter in trained
    }


def save(folder: Path, shot: Snapshot, keep: int) -> Path:
    """Publishes a snapshot as `folder/step-N` and retires old ones. Only the main process calls it."""
    step = int(shot.state["step"])
    bad = [name for name, value in shot.weights.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise CheckpointError(f"refusing to save step {step}: {bad[0]} and {len(bad) - 1} more are not finite")
    target = folder / f"step-{step:08d}"
    if step in steps(folder):
        if find_damage(target) is None:
            return target  # a stop right after a regular save
        _discard(target)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob(".new-*"), *folder.glob(".gone-*")):
        shutil.rmtree(stale, ignore_errors=True)  # what a crash left behind
    draft = folder / f".new-{target.name}-{uuid.uuid4().hex}"
    try:
        _write(draft, shot)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(folder)
    _retire(folder, step, keep, shot.state["best_step"])
    return target


def _write(draft: Path, shot: Snapshot) -> None:
    draft.mkdir()
    save_file(shot.weights, draft / "model.safetensors")
    save_file(shot.moments, draft / "optimizer.safetensors")
    if shot.others:
        save_file(shot.others, draft / OTHERS)
    names = (*FILES, OTHERS) if shot.others else FILES
    (draft / "state.json").write_text(json.dumps(shot.state, indent=1))
    files = {name: {"size": (draft / name).stat().st_size, "sha256": _hash(draft / name)} for name in names}
    manifest = {"format": 1, "step": shot.state["step"], "torch": torch.__version__, "files": files}
    (draft / "manifest.json").write_text(json.dumps(manifest | {"seal": _seal(manifest)}, indent=1))
    for name in (*names, "manifest.json"):
        sync(draft / name)
    sync(draft)


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
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if manifest.pop("seal") != _seal(manifest):
            return "manifest.json was changed"
        own_name = f"step-{manifest['step']:08d}"
        names = (*FILES, OTHERS) if OTHERS in manifest["files"] else FILES
        for name in names:  # names come from here, never from the file: it cannot point elsewhere
            entry = manifest["files"][name]
            if (checkpoint / name).stat().st_size != entry["size"]:
                return f"{name} has the wrong size"
            if _hash(checkpoint / name) != entry["sha256"]:
                return f"{name} does not match its SHA-256"
    except (*MISSING, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if checkpoint.name != own_name:
        raise CheckpointError(f"{checkpoint} is {own_name} by its manifest: give it that name again, or move it away")
    return None


def steps(folder: Path) -> list[int]:
    """Lists the published steps, newest first."""
    try:
        names = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted((int(name[1]) for name in names if name), reverse=True)


def find_newest(folder: Path) -> int | None:
    """Finds the newest step that verifies; damaged checkpoints are named and passed over."""
    for step in steps(folder):
        damage = find_damage(folder / f"step-{step:08d}")
        if damage is None:
            return step
        tell(f"checkpoint of step {step} is damaged ({damage}): trying the one before")
    return None


def find_best(folder: Path) -> int | None:
    """Finds the step that evaluated best, as the newest checkpoint says; the newest step where that one is gone."""
    newest = find_newest(folder)
    if newest is None:
        return None
    best = int(_read_patiently(folder / f"step-{newest:08d}", _read_state)["best_step"])
    return best if best and find_damage(folder / f"step-{best:08d}") is None else newest


def load(folder: Path, step: int, moments: bool = True) -> Snapshot:
    """Reads a checkpoint that `find_newest` or `find_best` has verified."""
    checkpoint = folder / f"step-{step:08d}"
    try:
        weights = load_file(checkpoint / "model.safetensors")
        kept = load_file(checkpoint / "optimizer.safetensors") if moments else {}
        others = load_file(checkpoint / OTHERS) if moments and (checkpoint / OTHERS).exists() else {}
        return Snapshot(weights, kept, _read_state(checkpoint), others)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {checkpoint}: {error}") from error


def _read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads the state. What matches its manifest may still be another thing: whoever wrote it has sealed it."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        kinds = {"step": int, "best_step": int, "tokens": int, "scaler": dict, "guard": dict, "identity": dict}
        wrong = [key for key, kind in kinds.items() if key in state and not isinstance(state[key], kind)]
        if wrong or not isinstance(state, dict) or not {"step", "best_step"} <= state.keys():
            raise ValueError(f"it has no right {wrong[0] if wrong else 'step'}")
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint / 'state.json'} is not the state of a run: {error}") from error
    return state


def restore_weights(model: nn.Module, shot: Snapshot, write: Write = put) -> None:
    """Loads the weights. `write` puts a whole fp32 value into a parameter; in training, the optimizer knows how."""
    current = model.state_dict(keep_vars=True)
    _check_shapes("model", {name: value.shape for name, value in current.items()}, shot.weights)
    for name, value in current.items():
        write(value, shot.weights[name])


def _check_shapes(kind: str, expected: dict[str, torch.Size], found: dict[str, Tensor]) -> None:
    differences = [f"missing: {name}" for name in expected.keys() - found.keys()]
    differences += [f"not in the {kind}: {name}" for name in found.keys() - expected.keys()]
    differences += [
        f"{name} is {list(found[name].shape)}, the {kind}'s is {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if differences:
        raise CheckpointError(f"the checkpoint is of another {kind}: " + "; ".join(sorted(differences)))


def restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, shot: Snapshot) -> None:
    entries = _find_moments(model, optimizer)
    _check_shapes("optimizer", {name: shape for name, (*_, shape) in entries.items()}, shot.moments)
    for name, (parameter, key, _) in entries.items():
        state = optimizer.state[parameter]
        if key not in state:  # torch's AdamW makes its state in its first step
            like = parameter if key != "step" else torch.zeros((), device=parameter.device)
            state[key] = torch.empty_like(like, requires_grad=False)
        put(state[key], shot.moments[name])


def _retire(folder: Path, step: int, keep: int, best_step: int) -> None:
    """Keeps the newest `keep` and the best. Runs only after `step` is safely there; those beyond it were damaged when
    the run was resumed, and must not count as the newest. They go if they still are."""
    known = steps(folder)
    newest = [other for other in known if other <= step][:keep]
    for other in known:
        path = folder / f"step-{other:08d}"
        if other not in (*newest, best_step) and (other < step or _is_damaged(path)):
            _discard(path)


def _is_damaged(checkpoint: Path) -> bool:
    try:
        return find_damage(checkpoint) is not None
    except CheckpointError:
        return False  # nobody knows: it stays


def _discard(checkpoint: Path) -> None:
    gone = checkpoint.with_name(f".gone-{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)  # in one instant: a half-deleted folder must never look like a checkpoint
    shutil.rmtree(gone)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
