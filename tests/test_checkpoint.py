"""Checkpoints: whole or not there, verified before they are believed, and free of code."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stretto import checkpoint
from stretto.checkpoint import Snapshot, drafts, verify
from stretto.config import FusedConfig
from stretto.errors import CheckpointError, DiskFullError, NonFiniteError
from tests.faults.disks import Failing, flip
from tests.trainings import Training


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


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "extend": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "empty": lambda path: path.write_bytes(b""),
    "remove": lambda path: path.unlink(),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_checkpoint_is_passed_over_with_a_message(
    tmp_path: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(tmp_path, shot(10), keep=2)
    checkpoint.save(tmp_path, shot(20), keep=2)
    DAMAGES[damage](tmp_path / "step-00000020" / file)
    newest = checkpoint.find_newest(tmp_path)
    if (file, damage) == ("manifest.json", "extend"):  # a blank behind JSON changes nothing that it says
        assert newest == 20
    else:
        assert newest == 10
        assert "step 20" in capsys.readouterr().err


def test_a_flip_goes_unnoticed_without_the_manifest(tmp_path: Path) -> None:
    """The control of the test above: safetensors alone loads a changed weight without a word."""
    checkpoint.save(tmp_path, shot(10), keep=2)
    path = tmp_path / "step-00000010" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not torch.equal(checkpoint.load(tmp_path, 10).weights["weight"], shot(10).weights["weight"])
    assert checkpoint.find_newest(tmp_path) is None


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


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_damaged_checkpoints_never_push_out_good_ones(tmp_path: Path, keep: int) -> None:
    """A run that fell back over damaged ones saves steps that are older than theirs."""
    for step in (5, 10, 15):
        checkpoint.save(tmp_path, shot(step), keep=3)
    for step in (10, 15):
        flip(tmp_path / f"step-{step:08d}" / "model.safetensors")
    checkpoint.save(tmp_path, shot(7), keep=keep)
    assert checkpoint.find_newest(tmp_path) == 7
    kept = {1: [7, 5], 2: [7, 5], 3: [15, 10, 7, 5]}  # nothing goes before enough verify
    assert checkpoint.steps(tmp_path) == kept[keep]


def test_a_failed_write_leaves_the_old_one_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, shot(1), keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafts, "sync", full)
    with pytest.raises(DiskFullError, match="No space left"):
        checkpoint.save(tmp_path, shot(2), keep=1)
    assert checkpoint.find_newest(tmp_path) == 1
    assert not list(tmp_path.glob(".*"))


def test_what_a_crash_left_is_cleaned_up_and_never_read(tmp_path: Path) -> None:
    left = [tmp_path / name for name in (f".new-step-00000009-{'0a' * 16}", ".gone-step-00000001")]
    own = [tmp_path / name for name in (".anything", ".new-thoughts", ".gone-fishing", ".new-step-00000009-mine")]
    for path in (*left, *own):
        path.mkdir(parents=True)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-00000008").mkdir()  # published name, nothing inside
    checkpoint.save(tmp_path, shot(3), keep=2)
    assert checkpoint.find_newest(tmp_path) == 3
    assert not any(path.exists() for path in left) and all(path.exists() for path in own)
    checkpoint.save(tmp_path, shot(8), keep=2)  # takes the place of the broken one
    assert checkpoint.find_newest(tmp_path) == 8


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    bad = shot(4)
    bad.weights["weight"][0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="weight"):
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
    assert checkpoint.find_newest(tmp_path) is None
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
    path.write_text(json.dumps(manifest | {"seal": verify.seal(manifest)}))
    assert checkpoint.find_damage(tmp_path / "step-00000001") is not None


WAYS: list[FusedConfig | None] = [None]
WAYS += [
    FusedConfig(weights=weights, moments=moments)  # type: ignore[arg-type]
    for weights, moments in product(("fp32", "split", "bf16"), ("fp32", "bf16"))
]


def named(way: FusedConfig | None) -> str:
    return "torch" if way is None else f"{way.weights}-{way.moments}"


def assert_same(one: Snapshot, two: Snapshot) -> None:
    for mine, theirs in ((one.weights, two.weights), (one.moments, two.moments)):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(theirs[name], value), name


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_every_way_to_keep_weights_resumes_exactly(tmp_path: Path, way: FusedConfig | None) -> None:
    whole = Training(way).run(0, 6).shot(6)
    checkpoint.save(tmp_path, Training(way).run(0, 3).shot(3), keep=1)
    saved = checkpoint.load(tmp_path, 3)
    resumed = Training(way).resume(saved).run(3, 6).shot(6)
    assert_same(whole, resumed)
    assert all(value.dtype == torch.float32 for value in saved.weights.values())
    entries = {key.partition("/")[0] for key in saved.moments}
    assert entries == {"exp_avg", "exp_avg_sq", "step"} and saved.moments["step/decoder.norm.weight"] == 3.0
    for part in ("weights", "moments"):  # the controls: something is left out
        broken = Snapshot(**(vars(saved) | {part: {k: v * 0 for k, v in vars(saved)[part].items()}}))
        with pytest.raises(AssertionError):
            assert_same(whole, Training(way).resume(broken).run(3, 6).shot(6))


@pytest.mark.parametrize("old", WAYS, ids=named)
@pytest.mark.parametrize("new", WAYS, ids=named)
def test_a_checkpoint_moves_between_all_ways(old: FusedConfig | None, new: FusedConfig | None) -> None:
    """Exactly, but for what the new way rounds to bf16; and training goes on."""
    saved = Training(old).run(0, 3).shot(3)
    training = Training(new).resume(saved)
    moved = training.shot(3)
    narrow = {
        "weights": new is not None and new.weights == "bf16",
        "moments": new is not None and new.moments == "bf16",
    }
    for part, rounds in narrow.items():
        mine, theirs = vars(saved)[part], vars(moved)[part]
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            kept = value.bfloat16() if rounds and value.ndim > 0 else value
            assert torch.equal(theirs[name].float(), kept.float()), name
    name = "embedding.token.weight"
    later = training.run(3, 4).shot(4).weights[name]
    assert later.isfinite().all() and not torch.equal(later, saved.weights[name])


def test_split_and_fp32_weights_train_alike_from_the_same_first_values() -> None:
    fp32, split = (Training(FusedConfig(weights=kind)).run(0, 5).shot(5) for kind in ("fp32", "split"))
    assert_same(fp32, split)


@pytest.fixture
def two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verify, "PAUSES_S", (0.0, 0.0, 0.0), raising=False)
    checkpoint.save(tmp_path, shot(10), keep=2)
    checkpoint.save(tmp_path, shot(20), keep=2)
    return tmp_path


PASSING = [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE]


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("times", [1, 3])
def test_a_read_that_fails_and_then_works_costs_nothing(
    two_checkpoints: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    newest = two_checkpoints / "step-00000020"
    for find in (checkpoint.find_newest, checkpoint.find_best):
        with monkeypatch.context() as patch:
            calls = Failing(patch, newest, range(0), number)
            assert find(two_checkpoints) == 20
        assert calls.calls >= 4, "every file is looked at"
        for first in range(calls.calls):
            with monkeypatch.context() as patch:
                Failing(patch, newest, range(first, first + times), number)
                assert find(two_checkpoints) == 20, f"the call that failed was number {first}"


@pytest.mark.parametrize("number", PASSING)
def test_what_cannot_be_read_is_neither_passed_over_nor_deleted(
    two_checkpoints: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        Failing(patch, two_checkpoints / "step-00000020", range(1000), number)
        for use in (checkpoint.find_newest, checkpoint.find_best):
            with pytest.raises(CheckpointError, match=r"step-00000020 cannot be read, though it may be whole"):
                use(two_checkpoints)
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.save(two_checkpoints, shot(20), keep=2)
        checkpoint.save(two_checkpoints, shot(17), keep=1)
        assert checkpoint.steps(two_checkpoints) == [20, 17, 10]
        checkpoint.save(two_checkpoints, shot(18), keep=1)
        assert checkpoint.steps(two_checkpoints) == [20, 18, 17]
    assert checkpoint.find_newest(two_checkpoints) == 20


def test_a_newer_checkpoint_that_is_whole_is_never_deleted(two_checkpoints: Path) -> None:
    checkpoint.save(two_checkpoints, shot(15), keep=1)
    checkpoint.save(two_checkpoints, shot(16), keep=1)
    assert checkpoint.steps(two_checkpoints) == [20, 16, 15]


def test_a_list_of_checkpoints_that_cannot_be_read_is_not_an_empty_one(
    two_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        checkpoint.find_newest(two_checkpoints)


def test_a_checkpoint_under_another_name_is_refused_by_name(two_checkpoints: Path) -> None:
    (two_checkpoints / "step-00000020").rename(two_checkpoints / "step-00000021")
    for use in (checkpoint.find_newest, checkpoint.find_best):
        with pytest.raises(CheckpointError, match="step-00000021 is step-00000020 by its manifest"):
            use(two_checkpoints)
    for step in (12, 13):
        checkpoint.save(two_checkpoints, shot(step), keep=1)
    assert checkpoint.steps(two_checkpoints) == [21, 13, 12], "it may be the only copy"


def test_a_manifest_that_is_nested_too_deeply_is_damage(
    two_checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (two_checkpoints / "step-00000020" / "manifest.json").write_text("[" * 100_000)
    assert checkpoint.find_newest(two_checkpoints) == 10
    assert "RecursionError" in capsys.readouterr().err


FIRST = "exp_avg/embedding.token.weight"
MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "all gone": (lambda moments: moments.clear(), f"missing: {FIRST}"),
    "one gone": (lambda moments: moments.pop(FIRST), f"missing: {FIRST}"),
    "unknown": (
        lambda moments: moments.update({"exp_avg/other": torch.zeros(1)}),
        "not in the optimizer: exp_avg/other",
    ),
    "another key": (
        lambda moments: moments.update({"momentum/head": torch.zeros(1)}),
        "not in the optimizer: momentum",
    ),
    "a frozen weight's": (
        lambda moments: moments.update({"step/decoder.norm.bias": torch.zeros(())}),
        "not in the optimizer: step/decoder.norm.bias",
    ),
    "other shape": (lambda moments: moments.update({FIRST: torch.zeros(3, 3)}), rf"{FIRST} is \[3, 3\], the optimizer"),
    "one number": (lambda moments: moments.update({FIRST: torch.zeros(1)}), rf"{FIRST} is \[1\], the optimizer's is"),
    "no number": (lambda moments: moments.update({FIRST: torch.zeros(())}), rf"{FIRST} is \[\], the optimizer's is"),
    "many steps": (
        lambda moments: moments.update({"step/embedding.token.weight": torch.zeros(2)}),
        r"step/embedding.token.weight is \[2\], the optimizer's is \[\]",
    ),
}


@pytest.mark.parametrize("way", [None, FusedConfig(weights="fp32")], ids=named)
@pytest.mark.parametrize("misfit", MISFITS)
def test_moments_that_do_not_fit_are_refused(way: FusedConfig | None, misfit: str) -> None:
    saved = Training(way).run(0, 2).shot(2)
    spoil, words = MISFITS[misfit]
    spoil(saved.moments)
    training = Training(way)
    before = training.shot(0)
    with pytest.raises(CheckpointError, match=f"of another optimizer: .*{words}"):
        checkpoint.restore_moments(training.model, training.optimizer, saved)
    assert_same(training.shot(0), before)


def test_moments_are_complete_before_the_first_gradient() -> None:
    """torch's AdamW has none then; what is restored is what it would have begun with."""
    fresh, restored = Training(None), Training(None)
    assert len(fresh.shot(0).moments) == 3 * sum(p.requires_grad for p in fresh.model.parameters())
    restored.resume(fresh.shot(0))
    assert_same(fresh.run(0, 3).shot(3), restored.run(0, 3).shot(3))
