"""Checkpoints: save and load.

    checkpoints/step-00000020/model.safetensors      weights, under their state-dict names
                              optimizer.safetensors  moments, as "exp_avg/NAME", and means of weights, as "mean/NAME"
                              others.safetensors     what techniques want back, where they do
                              state.json             step, which step evaluated best, and what the trainer wants back
                              manifest.json          size and SHA-256 of the others, and which rows of tensors they have

Where processes have different tensors, or rows of them, each writes what it has (model-00001-of-00004.safetensors), so
none ever holds the whole model; whoever resumes reads the rows that it needs, on any number of processes (pieces.py).
There is no pickle: reading a checkpoint cannot run code.

A checkpoint is there as a whole or not at all (drafts.py), is written by a thread in a run (saving.py), and is verified
before it is believed (verify.py).
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.checkpoint.drafts import KINDS, Snapshot, clean, name_draft, publish, write_part
from stretto.checkpoint.pieces import READ_ERRORS, Index, OpenFolder, Rows, StoredTensor
from stretto.checkpoint.verify import find_best, find_damage, find_newest, name_step, read_manifest, read_state, steps
from stretto.errors import CheckpointError
from stretto.optim import FlatAdamW
from stretto.weights import Write, find_first_row, find_local, is_first_copy, put, wrap_rows

__all__ = [
    "MEAN", "Means", "Snapshot", "Stored", "count_bytes", "find_best", "find_damage", "find_newest", "load",
    "open_stored", "restore_moments", "restore_weights", "save", "snapshot", "steps",
]  # fmt: skip
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # the entries that AdamW keeps for each parameter
MEAN = "mean"  # of a weight, over the last updates
Means = Mapping[Tensor, Tensor]  # by the parameter; none where a run keeps none
NO_MEANS: Means = {}
Saves = Callable[[str], bool]  # whether this process saves a tensor that several may have whole, by its name


@dataclass(frozen=True)
class Stored:
    """The state of a run in its files, of which tensors are read when they are asked for."""

    weights: Mapping[str, StoredTensor]
    moments: Mapping[str, StoredTensor]
    state: dict[str, Any]
    others: Mapping[str, StoredTensor]


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    others: dict[str, Tensor] | None = None,
    saves: Saves = lambda name: True,
    means: Means = NO_MEANS,
) -> Snapshot:
    """Copies what this process saves. Training may go on as soon as this function returns."""
    exact = optimizer.weight if isinstance(optimizer, FlatAdamW) else Tensor.detach
    found = _find_tensors(model, optimizer, saves, means)
    rows = {name: Rows(find_first_row(t), tuple(t.shape)) for name, t in found.items() if isinstance(t, DTensor)}
    copies = {name: _copy(find_local(exact(t) if "/" not in name else t)) for name, t in found.items()}
    if any(t.is_cuda for t in found.values()):
        torch.cuda.current_stream().synchronize()  # the copies are complete
    weights = {name: value for name, value in copies.items() if "/" not in name}
    moments = {name: value for name, value in copies.items() if "/" in name}
    return Snapshot(weights, moments, state, others or {}, rows)


def count_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, saves: Saves = lambda name: True, means: Means = NO_MEANS
) -> int:
    """About how large the files are that this process writes: numbers, and what is said of each tensor. Weights of any
    kind are saved in 32 bits."""
    found = _find_tensors(model, optimizer, saves, means, lambda like, **_: like)
    sizes = {name: find_local(t).numel() * max(t.itemsize, 4 * ("/" not in name)) for name, t in found.items()}
    return sum(sizes.values()) + sum(2 * len(name) + 140 for name in sizes)


def _find_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saves: Saves,
    means: Means,
    new: Callable[..., Tensor] = torch.zeros_like,
) -> dict[str, Tensor]:
    """The weights, moments and means that this process saves, as they are; names of all but weights have a slash. `new`
    makes moments that are not there yet."""
    weights = model.state_dict(keep_vars=True)
    found = {name: value for name, value in weights.items() if _is_saved_here(value, saves(name))}
    for name, (parameter, key, _) in _find_moments(model, optimizer, means).items():
        # Torch's AdamW has no moments of a parameter that never had a gradient: they begin with zeros.
        own = means[parameter] if key == MEAN else optimizer.state.get(parameter, {}).get(key)
        like = torch.zeros((), device=parameter.device) if key == "step" else parameter
        moment = new(like, requires_grad=False) if own is None else own
        if _is_saved_here(moment, saves(name.partition("/")[2])):
            found[name] = moment
    return found


def _is_saved_here(tensor: Tensor, whole: bool) -> bool:
    """A sharded tensor is saved by whoever has the first copy of some of its rows; others if `whole` says so."""
    return is_first_copy(tensor) and find_local(tensor).numel() > 0 if isinstance(tensor, DTensor) else whole


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which a GPU may still be writing: into pinned memory, which is several times as fast."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)


def _find_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, means: Means
) -> dict[str, tuple[nn.Parameter, str, torch.Size]]:
    """Returns the parameter, the key in its state and the shape of all moments and means, by name in
    optimizer.safetensors."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {
        f"{key}/{name}": (parameter, key, torch.Size() if key == "step" else parameter.shape)
        for name, parameter in model.named_parameters()
        for key in (*MOMENTS, *([MEAN] if means else []))
        if parameter in trained
    }


def save(folder: Path, shot: Snapshot, keep: int) -> Path:
    """Publishes the state of a whole run as `folder/step-N` and retires old ones."""
    draft = name_draft(folder, shot.state["step"], uuid.uuid4().hex)
    try:
        clean(folder)
        write_part(draft, shot)
        return publish(draft, shot.state, keep)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def open_stored(folder: Path, step: int) -> Stored:
    """Opens a checkpoint that `find_newest` or `find_best` has verified."""
    checkpoint = folder / name_step(step)
    try:
        manifest, files = read_manifest(checkpoint), OpenFolder(checkpoint)
        if "tensors" in manifest:
            index: dict[str, Index] = manifest["tensors"]
        else:
            index = {kind: files.index(name) for kind in KINDS if (name := f"{kind}.safetensors") in manifest["files"]}
        tensors = [files.find_tensors(index.get(kind, {})) for kind in KINDS]
        return Stored(tensors[0], tensors[1], read_state(checkpoint), tensors[2])
    except READ_ERRORS as error:
        raise CheckpointError(f"cannot read {checkpoint}: {error}") from error


def load(folder: Path, step: int) -> Snapshot:
    """Reads all of a checkpoint that `find_newest` or `find_best` has verified."""
    stored = open_stored(folder, step)
    kinds = (stored.weights, stored.moments, stored.others)
    try:
        weights, moments, others = ({name: value.read() for name, value in kind.items()} for kind in kinds)
    except READ_ERRORS as error:
        raise CheckpointError(f"cannot read {folder / name_step(step)}: {error}") from error
    return Snapshot(weights, moments, stored.state, others)


def restore_weights(model: nn.Module, shot: Snapshot | Stored, write: Write = put) -> None:
    """Loads the weights. `write` puts an fp32 value into a parameter; in training, the optimizer knows how."""
    current = model.state_dict(keep_vars=True)
    _check_shapes("model", {name: value.shape for name, value in current.items()}, shot.weights)
    for name, value in current.items():
        write(value, _fit(shot.weights[name], value))


def _fit(source: Tensor | StoredTensor, target: Tensor) -> Tensor:
    """The value for this tensor. Of one that is in files and sharded here, this process's rows alone are read."""
    if isinstance(source, Tensor):
        return source
    try:
        if not isinstance(target, DTensor):
            return source.read()
        local = find_local(target)
        return wrap_rows(target, source.read_rows(find_first_row(target), local.shape[0]).to(local.device))
    except READ_ERRORS as error:
        raise CheckpointError(f"cannot read {source.folder.path}: {error}") from error


def _check_shapes(kind: str, expected: dict[str, torch.Size], found: Mapping[str, Tensor | StoredTensor]) -> None:
    differences = [f"missing: {name}" for name in expected.keys() - found.keys()]
    differences += [f"not in the {kind}: {name}" for name in found.keys() - expected.keys()]
    differences += [
        f"{name} is {list(found[name].shape)}, the {kind}'s is {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if differences:
        raise CheckpointError(f"the checkpoint is of another {kind}: " + "; ".join(sorted(differences)))


def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, shot: Snapshot | Stored, means: Means = NO_MEANS
) -> None:
    entries = _find_moments(model, optimizer, means)
    _check_shapes("optimizer", {name: shape for name, (*_, shape) in entries.items()}, shot.moments)
    for name, (parameter, key, _) in entries.items():
        state: dict[str, Tensor] = {MEAN: means[parameter]} if key == MEAN else optimizer.state[parameter]
        if key not in state:  # torch's AdamW makes its state in its first step
            like = parameter if key != "step" else torch.zeros((), device=parameter.device)
            state[key] = torch.empty_like(like, requires_grad=False)
        put(state[key], _fit(shot.moments[name], state[key]))
