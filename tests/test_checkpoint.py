"""Checkpoints: whole or not there, verified before they are believed, and free of code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stretto import checkpoint
from stretto.checkpoint import Snapshot
from stretto.errors import CheckpointError


def shot(step: int, best_step: int = 0) -> Snapshot:
    tensor = torch.full((3, 4), 1.0 + step)
    moments = {"exp_avg/weight": tensor * 2, "step/weight": torch.tensor(float(step))}
    return Snapshot({"weight": tensor}, moments, {"step": step, "best_step": best_step})


def test_round_trip(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, shot(5), keep=2)
    loaded = checkpoint.load(tmp_path, 5)
    assert torch.equal(loaded.weights["weight"], shot(5).weights["weight"])
    assert torch.equal(loaded.moments["exp_avg/weight"], shot(5).moments["exp_avg/weight"])
    assert loaded.state == {"step": 5, "best_step": 0}


FILES = (*checkpoint.FILES, "manifest.json")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "extend": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "empty": lambda path: path.write_bytes(b""),
    "remove": lambda path: path.unlink(),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path: Path, file: str, damage: str) -> None:
    checkpoint.save(tmp_path, shot(10), keep=2)
    checkpoint.save(tmp_path, shot(20), keep=2)
    DAMAGES[damage](tmp_path / "step-00000020" / file)
    said: list[str] = []
    newest = checkpoint.find_newest(tmp_path, said.append)
    if (file, damage) == ("manifest.json", "extend"):  # a blank behind JSON changes nothing that it says
        assert newest == 20
    else:
        assert newest == 10
        assert "step 20" in said[0]


def test_a_flip_goes_unnoticed_without_the_manifest(tmp_path: Path) -> None:
    """The control of the test above: safetensors alone loads a changed weight without a word."""
    checkpoint.save(tmp_path, shot(10), keep=2)
    path = tmp_path / "step-00000010" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not torch.equal(checkpoint.load(tmp_path, 10).weights["weight"], shot(10).weights["weight"])
    assert checkpoint.find_newest(tmp_path, lambda _: None) is None


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(tmp_path, shot(step, best_step=min(step, 2)), keep=2)
    assert checkpoint.steps(tmp_path) == [5, 4, 2]
    assert checkpoint.find_best(tmp_path) == 2
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_best_falls_back_to_the_newest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, shot(1, best_step=1), keep=2)
    checkpoint.save(tmp_path, shot(2, best_step=1), keep=2)
    flip(tmp_path / "step-00000001" / "model.safetensors")
    assert checkpoint.find_best(tmp_path) == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_never_push_out_good_ones(tmp_path: Path, keep: int) -> None:
    """A run that fell back over damaged ones saves steps that are older than theirs."""
    for step in (5, 10, 15):
        checkpoint.save(tmp_path, shot(step), keep=3)
    for step in (10, 15):
        flip(tmp_path / f"step-{step:08d}" / "model.safetensors")
    checkpoint.save(tmp_path, shot(7), keep=keep)
    assert checkpoint.find_newest(tmp_path) == 7
    assert checkpoint.steps(tmp_path) == [7, 5][:keep]


def test_a_failed_write_leaves_the_old_one_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, shot(1), keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, shot(2), keep=1)
    assert checkpoint.find_newest(tmp_path) == 1
    assert not list(tmp_path.glob(".*"))


def test_what_a_crash_left_is_cleaned_up_and_never_read(tmp_path: Path) -> None:
    (tmp_path / ".new-step-00000009").mkdir(parents=True)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-00000008").mkdir()  # published name, nothing inside
    checkpoint.save(tmp_path, shot(3), keep=2)
    assert checkpoint.find_newest(tmp_path, lambda _: None) == 3
    assert not (tmp_path / ".new-step-00000009").exists()
    checkpoint.save(tmp_path, shot(8), keep=2)  # takes the place of the broken one
    assert checkpoint.find_newest(tmp_path) == 8


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    bad = shot(4)
    bad.weights["weight"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="weight"):
        checkpoint.save(tmp_path, bad, keep=2)
    assert checkpoint.steps(tmp_path) == []


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    other = Snapshot({"weight": torch.zeros(2, 2), "extra": torch.zeros(1)}, {}, {"step": 1})
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore_weights(nn.Linear(4, 3), other)
    for words in ("missing: bias", "not in the model: extra", "weight is [2, 2], the model's is [3, 4]"):
        assert words in str(error.value)


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, ("BOOM", "w"))


@pytest.mark.parametrize("file", FILES)
def test_a_pickle_in_the_place_of_a_file_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path, shot(1), keep=2)
    (tmp_path / "step-00000001" / file).write_bytes(pickle.dumps(Bomb()))
    assert checkpoint.find_newest(tmp_path, lambda _: None) is None
    if file != "manifest.json":
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path, 1)
    assert not Path("BOOM").exists()


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, shot(1), keep=2)
    path = tmp_path / "step-00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["seal"]
    manifest["files"] = {"../../secret": manifest["files"]["state.json"]}
    path.write_text(json.dumps(manifest | {"seal": checkpoint._seal(manifest)}))
    assert checkpoint.find_damage(tmp_path / "step-00000001") is not None
