"""Checkpoints that are not what they should be: changed, torn, rotten, of another run, or hard to read."""

from __future__ import annotations

import errno
import json
import random
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto.run
import stretto.train
from stretto import checkpoint
from stretto.checkpoint import Snapshot, drafts, verify
from stretto.checkpoint.verify import name_step
from stretto.config import Config
from stretto.errors import CheckpointError, NonFiniteError, StrettoError
from stretto.train import train
from tests.faults.configs import config_of
from tests.faults.conftest import Tally
from tests.faults.crashes import BEST, NEW, OLD, equals, make_shot, make_two, save_parts, save_whole
from tests.faults.disks import Failing, fast

__all__ = ["fast"]  # a fixture


# C1: changed files.


def write_format_1(folder: Path) -> None:
    """As versions before wrote it: no list of tensors in the manifest."""
    save_whole(folder)
    path = folder / name_step(NEW)
    manifest = verify.read_manifest(path)
    manifest = {key: manifest[key] for key in ("step", "torch", "files")} | {"format": 1}
    (path / "manifest.json").write_text(json.dumps(manifest | {"seal": verify.seal(manifest)}))


KINDS: dict[str, Callable[[Path], None]] = {"whole": save_whole, "parts": save_parts, "format 1": write_format_1}


def change(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """One of the ways in which a file can be wrong."""
    place = draw.randrange(len(data))
    flipped = bytearray(data)
    flipped[place] ^= 1 << draw.randrange(8)
    length = draw.randrange(1, 64)
    ways = [
        bytes(flipped),
        bytes(flipped),
        data[:place],
        data + draw.randbytes(length).replace(b" ", b"x").replace(b"\n", b"x") + b"x",
        b"",
        data[:place] + bytes(length) + data[place + length :],
        data[:place] + data[place + length :],
        draw.choice(others),
        draw.randbytes(len(data)),
        b"[" * 50_000,
    ]
    return draw.choice([way for way in ways if way != data])


def find_unnoticed(folder: Path, number: int, seed: int) -> tuple[int, list[str]]:
    """Changes the files of the newest checkpoint, one at a time; says which changes did not lead to the one before."""
    draw, unnoticed, tried = random.Random(seed), [], 0
    for kind, save in KINDS.items():
        shutil.rmtree(folder, ignore_errors=True)
        make_two(folder)
        save(folder)
        assert checkpoint.find_newest(folder) == NEW and equals(checkpoint.load(folder, NEW), make_shot(NEW))
        files = {path: path.read_bytes() for path in sorted((folder / name_step(NEW)).iterdir())}
        for i in range(-(-number // len(KINDS))):
            path = list(files)[i % len(files)]
            path.write_bytes(change(files[path], [data for data in files.values() if data != files[path]], draw))
            if checkpoint.find_newest(folder) != OLD:
                unnoticed.append(f"{kind}: {path.name}, change {i}")
            path.write_bytes(files[path])
            tried += 1
    return tried, unnoticed


@pytest.mark.fault("C1")
def test_every_change_of_a_file_is_noticed(
    fast: Path, whole: bool, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    tried, unnoticed = find_unnoticed(fast / "run", 1_950 if whole else 100, seed=1)
    assert unnoticed == []
    assert capsys.readouterr().err.count(f"step {NEW} is damaged") == tried
    tally("mutations", tried)


@pytest.mark.control("C1")
def test_changes_go_unnoticed_without_hashes(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Equal(str):
        __hash__ = None  # type: ignore[assignment]

        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(verify, "_hash", lambda path: Equal())
    _, unnoticed = find_unnoticed(fast / "run", 60, seed=1)
    assert any("model" in words for words in unnoticed)


@pytest.mark.fault("C1")
@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "model.pt", "", "model-1-of-2.safetensors"])
def test_names_in_a_manifest_are_no_paths(fast: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its seal is right, as a stranger can make it: nothing of that name is even looked at."""
    make_two(fast)
    save_whole(fast)
    path = fast / name_step(NEW)
    manifest = verify.read_manifest(path)
    manifest.pop("seal")
    manifest["files"][name] = manifest["files"]["model.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"seal": verify.seal(manifest)}))
    monkeypatch.setattr(verify, "_hash", lambda path: pytest.fail("no file is read"))
    assert checkpoint.find_damage(path) == f"manifest.json names {name!r}"


GAPS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a piece is missing": lambda entry: entry["pieces"].pop(),
    "a piece is there twice": lambda entry: entry["pieces"].append(entry["pieces"][0]),
    "rows are missing": lambda entry: entry["shape"].__setitem__(0, 5),
    "rows overlap": lambda entry: entry["pieces"][1].__setitem__(1, 2),
    "rows are negative": lambda entry: entry["pieces"].append([entry["pieces"][0][0], 4, -1]),
    "another file": lambda entry: entry["pieces"][1].__setitem__(0, "others.safetensors"),
    "no number": lambda entry: entry["shape"].__setitem__(0, "4"),
    "another shape": lambda entry: entry["shape"].__setitem__(1, 30),
}


@pytest.mark.fault("C1")
@pytest.mark.parametrize("gap", GAPS)
def test_a_sealed_manifest_whose_rows_are_not_complete_is_refused(fast: Path, gap: str) -> None:
    make_two(fast)
    save_parts(fast)
    path = fast / name_step(NEW)
    manifest = verify.read_manifest(path)
    manifest.pop("seal")
    GAPS[gap](manifest["tensors"]["model"]["embedding"])
    (path / "manifest.json").write_text(json.dumps(manifest | {"seal": verify.seal(manifest)}))
    if gap == "another shape":
        with pytest.raises(CheckpointError, match="has another shape of embedding than the manifest says"):
            checkpoint.load(fast, NEW)
    else:
        assert checkpoint.find_newest(fast) == OLD


# C2: random sequences.


def rot(folder: Path, step: int, draw: random.Random) -> None:
    path = draw.choice(sorted((folder / name_step(step)).iterdir()))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def count_verified(folder: Path) -> set[int]:
    return {step for step in checkpoint.steps(folder) if verify.judge(folder / name_step(step))[0] == "whole"}


def save_something(folder: Path, kind: str, shot: Snapshot, keep: int) -> None:
    """A save that goes well, is torn, or is refused."""
    if kind == "torn":
        drafts.write_part(drafts.name_draft(folder, shot.state["step"], uuid.uuid4().hex), shot)
    elif kind == "NaN":
        shot.weights["norm"][0] = torch.nan
        with pytest.raises(NonFiniteError):
            checkpoint.save(folder, shot, keep)
    else:
        checkpoint.save(folder, shot, keep)


def live(folder: Path, seed: int) -> list[str]:
    """A life of a run folder: saves, crashes, files that go bad, resumed runs. Says what was lost by saving."""
    draw, losses, step = random.Random(seed), list[str](), 0
    keep = draw.choice([1, 2, 3])
    for _ in range(draw.randrange(4, 10)):
        kind = draw.choice(["good", "good", "good", "torn", "NaN", "rot", "resume"])
        before, known = count_verified(folder), checkpoint.steps(folder)
        if kind == "rot" and known:
            rot(folder, draw.choice(known), draw)
        elif kind == "resume":
            step = checkpoint.find_newest(folder) or 0
        elif kind != "rot":
            step += draw.choice([1, 2])
            save_something(folder, kind, replace(make_shot(step), state={"step": step, "best_step": 0}), keep)
            saved = {step} if kind == "good" else set()
            if len(count_verified(folder)) < min(len(before | saved), max(keep, 2)):
                losses.append(f"{kind} save of step {step}: {sorted(before)} became {sorted(count_verified(folder))}")
            if kind == "good" and not equals(checkpoint.load(folder, step), _shot(step)):
                losses.append(f"step {step} has other values")
            if len(checkpoint.steps(folder)) > max(keep, 2) + len(known):
                losses.append("nothing is retired")
    return losses


def _shot(step: int) -> Snapshot:
    return replace(make_shot(step), state={"step": step, "best_step": 0})


def live_often(folder: Path, number: int) -> list[str]:
    losses = []
    for seed in range(number):
        (folder / "life").mkdir()
        losses += [f"seed {seed}: {loss}" for loss in live(folder / "life", seed)]
        shutil.rmtree(folder / "life")
    return losses


@pytest.mark.fault("C2")
def test_retention_never_costs_what_verifies(fast: Path, whole: bool, tally: Tally) -> None:
    number = 3_000 if whole else 100
    assert live_often(fast, number) == []
    tally("retention sequences", number)


@pytest.mark.control("C2")
def test_retention_by_name_costs_what_verifies(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "judge", lambda path: ("whole", ""))
    assert live_often(fast, 60)


@pytest.mark.fault("C2")
def test_a_checkpoint_that_goes_bad_does_not_push_out_a_good_one(fast: Path) -> None:
    make_two(fast)
    rot(fast, OLD, random.Random(0))
    checkpoint.save(fast, _shot(NEW), keep=2)
    assert count_verified(fast) == {NEW, BEST}


# C3: of another run.

OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "run.seed was 0, is 5": {"run": {"seed": 5}},
    "model.width was 16, is 32": {"model": {"width": 32}},
    "optim.lr was 0.01, is 0.5": {"optim": {"lr": 0.5}},
    "data.batch_size was 4, is 8": {"data": {"batch_size": 8}},
    "train.micro_batches was 1, is 2": {"train": {"micro_batches": 2}},
}
ALLOWED: list[dict[str, dict[str, Any]]] = [
    {"train": {"log_every": 3, "eval_every": 5}, "checkpoint": {"every": 1, "keep": 3}},
    {"run": {"timeout_s": 77.0}, "train": {"eval_batches": 2}},
]


def differ(config: Config, sections: dict[str, dict[str, Any]]) -> Config:
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})


def find_accepted(run: Path) -> list[str]:
    """Runs that are not this one, and are taken for it nevertheless."""
    accepted = []
    for words, sections in OTHERS.items():
        try:
            train(differ(config_of(run, steps=6), sections), resume=True)
            accepted.append(words)
        except StrettoError as error:
            if not isinstance(error, CheckpointError) or words not in str(error):
                accepted.append(f"{words}: {error!r}")
    return accepted


@pytest.mark.fault("C3")
def test_a_run_with_another_configuration_is_refused_by_key(run: Path) -> None:
    assert find_accepted(run) == []
    every = {name: keys for sections in OTHERS.values() for name, keys in sections.items()}
    with pytest.raises(CheckpointError) as caught:
        train(differ(config_of(run, steps=6), every), resume=True)
    assert all(words in str(caught.value) for words in OTHERS)
    for number, sections in enumerate(ALLOWED, 5):
        train(differ(config_of(run, steps=number), sections), resume=True)


@pytest.mark.control("C3")
def test_another_configuration_would_be_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretto.run, "_differences", lambda now, saved: [])
    assert "run.seed was 0, is 5" in find_accepted(run)


# C5: errors that pass, and other names.


def find_costs(folder: Path, patch: pytest.MonkeyPatch, number: int, times: int) -> list[str]:
    """Fails each look at the newest checkpoint in turn; then a run that went on from the one before saves."""
    costs, newest = [], folder / name_step(OLD)
    with patch.context() as counting:
        calls = Failing(counting, newest, range(0), number)
        assert checkpoint.find_newest(folder) == OLD
    for first in range(calls.calls):
        with patch.context() as failing:
            Failing(failing, newest, range(first, first + times), number)
            found = checkpoint.find_newest(folder)
        if found != OLD:
            costs.append(f"look {first}: went on from {found}")
    with patch.context() as failing:
        Failing(failing, newest, range(10_000), number)
        for step in (12, 13, 14):
            checkpoint.save(folder, _shot(step), keep=2)
    if OLD not in checkpoint.steps(folder):
        costs.append(f"step {OLD} was deleted")
    return costs


@pytest.mark.fault("C5")
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("times", [1, 3])
def test_an_error_that_passes_costs_nothing(
    fast: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    monkeypatch.setattr(verify, "PAUSES_S", (0.0, 0.0, 0.0))
    assert find_costs(make_two(fast), monkeypatch, number, times) == []


@pytest.mark.control("C5")
def test_an_error_that_passes_would_cost_a_checkpoint(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(verify, "MISSING", (OSError,))
    assert len(find_costs(make_two(fast), monkeypatch, errno.EIO, 1)) > 3


@pytest.mark.fault("C5")
def test_an_error_that_stays_ends_the_run_and_deletes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "PAUSES_S", (0.0, 0.0, 0.0))
    with monkeypatch.context() as patch:
        Failing(patch, run / "checkpoints" / name_step(4) / "manifest.json", range(10_000), errno.EIO)
        with pytest.raises(CheckpointError, match="cannot be read, though it may be whole"):
            train(config_of(run, steps=6), resume=True)
    assert checkpoint.steps(run / "checkpoints") == [4, 2]
    (run / "checkpoints" / name_step(4)).rename(run / "checkpoints" / name_step(5))
    with pytest.raises(CheckpointError, match="step-00000005 is step-00000004 by its manifest"):
        train(config_of(run, steps=6), resume=True)
    assert checkpoint.steps(run / "checkpoints") == [5, 2]


@pytest.mark.fault("C5")
def test_a_file_with_the_name_of_a_checkpoint_is_left_alone(fast: Path) -> None:
    make_two(fast)
    (fast / name_step(25)).write_text("mine")
    with pytest.raises(CheckpointError, match="step-00000025 is not a folder: move it away"):
        checkpoint.find_newest(fast)
    for step in (26, 27):
        checkpoint.save(fast, _shot(step), keep=1)
    assert checkpoint.steps(fast) == [27, 26, 25] and (fast / name_step(25)).read_text() == "mine"


def test_a_newer_format_is_not_damage(fast: Path) -> None:
    make_two(fast)
    path = fast / name_step(OLD)
    manifest = verify.read_manifest(path)
    manifest.pop("seal")
    manifest["format"] = 3
    (path / "manifest.json").write_text(json.dumps(manifest | {"seal": verify.seal(manifest)}))
    with pytest.raises(CheckpointError, match="is of format 3: a newer Stretto may read it"):
        checkpoint.find_newest(fast)


def test_a_checkpoint_of_format_1_goes_on(run: Path) -> None:
    """Whole tensors in files of fixed names, as every version until then wrote them."""
    whole = train(config_of(run, steps=6), resume=True)
    expected = checkpoint.load(whole / "checkpoints", 6)
    shutil.rmtree(run / "checkpoints" / name_step(6))
    path = run / "checkpoints" / name_step(4)
    manifest = verify.read_manifest(path)
    manifest = {key: manifest[key] for key in ("step", "torch", "files")} | {"format": 1}
    (path / "manifest.json").write_text(json.dumps(manifest | {"seal": verify.seal(manifest)}))
    train(config_of(run, steps=6), resume=True)
    found = checkpoint.load(run / "checkpoints", 6)
    assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())
    assert all(torch.equal(found.moments[name], value) for name, value in expected.moments.items())
