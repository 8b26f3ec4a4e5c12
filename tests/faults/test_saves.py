"""Saves that are cut off: by a kill, a power cut, a full disk, or an error in the background."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stretto.train
from stretto import checkpoint, files
from stretto.checkpoint import Snapshot, drafts, pieces, saving
from stretto.checkpoint.saving import Saver
from stretto.config import Config, FusedConfig
from stretto.errors import CheckpointError, DiskFullError, NonFiniteError, StrettoError
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.train import train
from tests.faults.configs import config_of
from tests.faults.conftest import Tally
from tests.faults.crashes import BEST, NEW, OLD, equals, make_shot, make_two, save_whole
from tests.faults.disks import Disk, FullDisk, draw, fast
from tests.runs import PATIENCE_S, MakeConfig
from tests.trainings import Training

ROOT = Path(__file__).parents[2]
CPU = Runtime(torch.device("cpu"))


__all__ = ["fast"]  # a fixture


def crash(folder: Path, row: str, number: int, control: bool = False) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.crashes", str(folder)], cwd=ROOT, capture_output=True, text=True,
        input=json.dumps({"row": row, "number": number, "control": control}), timeout=2 * PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.fault("K1")
def test_a_kill_at_any_line_leaves_the_old_one_or_the_new_one(fast: Path, whole: bool, tally: Tally) -> None:
    number = 8_200 if whole else 150
    found = crash(fast, "K1", number)
    assert found["losses"] == {}
    assert found["tried"] > 0.98 * number, "nearly all were killed before they were done"
    tally("crash points", found["tried"])


@pytest.mark.control("K1")
def test_a_kill_is_noticed_where_files_are_written_in_place(fast: Path) -> None:
    assert len(crash(fast, "K1", 30, control=True)["losses"]) > 3


@pytest.mark.dist
@pytest.mark.fault("K2")
def test_a_kill_of_one_of_two_processes_leaves_the_old_one_or_the_new_one(
    fast: Path, whole: bool, tally: Tally
) -> None:
    found = crash(fast, "K2", 26 if whole else 4)
    assert found["losses"] == {}
    assert set(found["codes"]) == {0, 7}, "the survivor says that the other is lost, unless all was done"
    tally("kills", found["tried"])
    tally("crash points", found["tried"])


@pytest.mark.dist
@pytest.mark.control("K2")
def test_a_kill_is_noticed_where_the_main_process_does_not_wait(fast: Path) -> None:
    assert any("other values" in loss for loss in crash(fast, "K2", 2, control=True)["losses"].values())


def find_power_losses(
    patch: pytest.MonkeyPatch, folder: Path, save: Callable[[Path], None], seeds: int
) -> tuple[int, list[str]]:
    """Cuts the power after each change on the disk, in several ways each time."""
    losses, tried, run = [], 0, folder / "run"
    with patch.context() as recording:
        disk = Disk(recording, run)
        save(run / "checkpoints")
    known = {step: make_shot(step) for step in (OLD, NEW)}
    old = OLD if (run / "checkpoints" / f"step-{OLD:08d}").exists() else None
    for after in range(len(disk.log) + 1):
        for seed in range(seeds):
            target = folder / "later"
            disk.cut_power(after, draw(seed), target)
            newest, tried = checkpoint.find_newest(target / "checkpoints"), tried + 1
            allowed = (NEW,) if after == len(disk.log) else (old, NEW)
            if newest not in allowed:
                losses.append(f"after {after} of {len(disk.log)} changes the newest is {newest}")
            elif newest is not None and not equals(checkpoint.load(target / "checkpoints", newest), known[newest]):
                losses.append(f"after {after} changes step {newest} has other values")
            shutil.rmtree(target)
    return tried, losses


@pytest.mark.fault("K3")
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_power_cut_leaves_the_old_one_or_the_new_one(
    fast: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, tally: Tally, first: bool
) -> None:
    (fast / "run").mkdir()
    if not first:
        make_two(fast / "run" / "checkpoints")
    tried, losses = find_power_losses(monkeypatch, fast, save_whole, seeds=20 if whole else 4)
    assert losses == [] and tried > 80
    tally("power cuts", tried)


@pytest.mark.control("K3")
@pytest.mark.parametrize("forgotten", ["checkpoints", "run", "files"])
def test_a_power_cut_is_noticed_where_something_is_not_flushed(
    fast: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    (fast / "run").mkdir()
    if forgotten == "files":
        monkeypatch.setattr(pieces, "os", SimpleNamespace(fsync=lambda handle: None))
    else:
        monkeypatch.setattr(drafts, "sync", lambda path: None if path.name == forgotten else files.sync(path))
    if forgotten == "checkpoints":
        make_two(fast / "run" / "checkpoints")
    _, losses = find_power_losses(monkeypatch, fast, save_whole, seeds=3)
    assert losses


# D1 and D2: disks that are full, and that will be.


def find_full_disk_loss(folder: Path, patch: pytest.MonkeyPatch, room: float, number: int = errno.ENOSPC) -> str:
    before = {step: checkpoint.load(folder, step) for step in (BEST, OLD)}
    with patch.context() as full:
        FullDisk(full, [pieces, files], room, number)
        try:
            save_whole(folder)
            return "nothing was raised"
        except DiskFullError as error:
            if "could not be saved" not in str(error):
                return f"other words: {error}"
    if {path.name for path in folder.iterdir()} != {f"step-{step:08d}" for step in before}:
        return f"there is {sorted(path.name for path in folder.iterdir())}"
    if any(checkpoint.find_damage(folder / f"step-{step:08d}") for step in before):
        return "an old one is damaged"
    return "" if all(equals(checkpoint.load(folder, step), shot) for step, shot in before.items()) else "other values"


@pytest.mark.fault("D1")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_costs_nothing(fast: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally, number: int) -> None:
    with monkeypatch.context() as patch:
        endless = FullDisk(patch, [pieces, files], float("inf"))
        save_whole(fast / "other")
    folder = make_two(fast / "run")
    for i in range(20):
        assert find_full_disk_loss(folder, monkeypatch, (i + 0.5) / 20 * endless.written, number) == "", i
    tally("full disks", 20)
    save_whole(folder)
    assert checkpoint.steps(folder) == [NEW, OLD, BEST], "there is room again"


@pytest.mark.control("D1")
def test_a_full_disk_is_noticed_where_old_ones_go_first(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_two(fast / "run")
    real = drafts.write_part

    def retire_first(draft: Path, shot: Snapshot, *place: int) -> None:
        drafts._discard(folder / f"step-{BEST:08d}")
        real(draft, shot, *place)

    monkeypatch.setattr(checkpoint, "write_part", retire_first)
    assert "there is" in find_full_disk_loss(folder, monkeypatch, 100)


def mount(folder: Path, size: int) -> bool:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.fault("D1")
def test_a_real_disk_that_is_full(tmp_path: Path, whole: bool, tally: Tally) -> None:
    """A small disk in memory, filled by save after save of tensors that take some pages each."""
    tried = 0
    for size in range(48, 48 + 16 * (20 if whole else 3), 16):
        if not mount(tmp_path / "disk", size):
            pytest.skip("disks can be mounted by root alone")
        try:
            folder, last = tmp_path / "disk" / "run", 0
            for step in range(1, 200):
                shot = make_shot(step)
                shot.weights["large"] = torch.full((1500,), float(step))
                try:
                    checkpoint.save(folder, shot, keep=200)
                except DiskFullError:
                    assert checkpoint.find_newest(folder) == (last or None) and not list(folder.glob(".*"))
                    tried += 1
                    break
                last = step
        finally:
            subprocess.run(["umount", str(tmp_path / "disk")], check=True)
    assert tried == (20 if whole else 3)
    tally("full disks", tried)


@pytest.mark.fault("D1")
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES])
def test_other_errors_of_the_disk_are_said_in_words(fast: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    folder = make_two(fast / "run")
    FullDisk(monkeypatch, [pieces, files], 1000, number)
    with pytest.raises(CheckpointError, match=rf"step {NEW} could not be saved \({os.strerror(number)}: /"):
        save_whole(folder)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in (BEST, OLD)]


def have_free(patch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    patch.setattr(shutil, "disk_usage", lambda path: usage)


def find_size(checkpoint_folder: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint_folder.iterdir())


WAYS = [None, FusedConfig(weights="split"), FusedConfig(weights="split", moments="bf16"), FusedConfig(weights="bf16")]


def find_estimates(folder: Path, count: Callable[..., int]) -> list[float]:
    """Estimates by what checkpoints of a small model really take."""
    found = []
    for i, way in enumerate(WAYS):
        training = Training(way)
        size = count(training.model, training.optimizer)
        found.append(size / find_size(checkpoint.save(folder / str(i), training.run(0, 1).shot(1), keep=2)))
    return found


@pytest.mark.fault("D2")
def test_the_size_of_a_checkpoint_is_known_before(fast: Path) -> None:
    assert find_estimates(fast, checkpoint.count_bytes) == pytest.approx([1.0] * len(WAYS), abs=0.1)


@pytest.mark.control("D2")
def test_an_estimate_without_moments_is_noticed(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = find_estimates(fast, checkpoint.count_bytes)
    monkeypatch.setattr(checkpoint, "MOMENTS", ())
    without = [checkpoint.count_bytes(t.model, t.optimizer) for t in map(Training, WAYS)]
    monkeypatch.undo()
    sizes = [checkpoint.count_bytes(t.model, t.optimizer) for t in map(Training, WAYS)]
    assert all(part / size * estimate < 0.9 for part, size, estimate in zip(without, sizes, estimates, strict=True))


@pytest.mark.fault("D2")
def test_a_disk_that_will_be_too_small_is_refused_before_the_first_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, size = config_of(run, steps=6), find_size(run / "checkpoints" / "step-00000004")
    have_free(monkeypatch, int(0.8 * size))
    with pytest.raises(DiskFullError, match="one checkpoint needs"):  # an old one goes when it is there
        train(config, resume=True)
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    have_free(monkeypatch, int(1.8 * size))
    with pytest.raises(DiskFullError, match=r"has [\d.e-]+ GB free, and two checkpoints need [\d.e-]+ GB: make room"):
        train(config, resume=True)
    assert json.loads((run / "exit.json").read_text())["code"] == 9
    assert checkpoint.steps(run / "checkpoints") == [4]
    train(replace(config, checkpoint=replace(config.checkpoint, keep=0)), resume=True)  # needs no room
    have_free(monkeypatch, int(2.3 * size))
    train(config, resume=True)
    assert checkpoint.find_newest(run / "checkpoints") == 6


# N4: weights that are not finite.


def spoil_weights(patch: pytest.MonkeyPatch, step: int) -> None:
    real = stretto.train.run_step

    def run_step(parts: Any, number: int, *rest: Any) -> Any:
        result = real(parts, number, *rest)
        if number + 1 == step:
            next(iter(parts.model.parameters())).data[0, 0] = torch.nan
        return result

    patch.setattr(stretto.train, "run_step", run_step)


@pytest.mark.fault("N4")
def test_weights_that_are_not_finite_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_weights(monkeypatch, 6)
    with pytest.raises(NonFiniteError, match=r"refusing to save step 6: embedding\.token\.weight and 0 more"):
        train(config_of(run, steps=6), resume=True)
    assert checkpoint.find_newest(run / "checkpoints") == 4 and checkpoint.steps(run / "checkpoints") == [4, 2]
    assert json.loads((run / "exit.json").read_text())["code"] == 6 and not list((run / "checkpoints").glob(".*"))


@pytest.mark.control("N4")
def test_weights_that_are_not_finite_would_be_saved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_weights(monkeypatch, 6)
    monkeypatch.setattr(drafts, "_require_finite", lambda shot: None)
    train(config_of(run, steps=6), resume=True)
    saved = checkpoint.load(run / "checkpoints", 6).weights["embedding.token.weight"]
    assert not saved.isfinite().all()


# C4: in the background.


def hold_writer(patch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written when the event is set."""
    go_on, real = threading.Event(), pieces.write_tensors

    def write(*args: Any) -> Any:
        assert go_on.wait(PATIENCE_S)
        return real(*args)

    patch.setattr(drafts, "write_tensors", write)
    return go_on


def save_and_change(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Snapshot, Snapshot]:
    """What was to be saved, and what was, if weights and moments change while a thread is about to write."""
    training = Training(None).run(0, 2)
    go_on, expected = hold_writer(patch), Training(None).run(0, 2).shot(OLD)
    with Saver(folder, 2, CPU, 1) as saver:
        saver.start(training.shot(OLD))
        assert checkpoint.steps(folder) == [], "nothing is published before it is on the disk"
        training.run(2, 4)
        go_on.set()
        saver.settle()
    return expected, checkpoint.load(folder, OLD)


@pytest.mark.fault("C4")
def test_what_is_saved_is_what_was_there_when_the_save_began(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, saved = save_and_change(fast, monkeypatch)
    assert equals(expected, saved)


@pytest.mark.control("C4")
def test_without_a_copy_something_else_is_saved(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_copy", lambda tensor: tensor.detach())
    expected, saved = save_and_change(fast, monkeypatch)
    assert not equals(expected, saved)


FAILURES: dict[str, tuple[Exception, type[StrettoError], int]] = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), DiskFullError, 9),
    "lost": (OSError(errno.EIO, "Input/output error"), CheckpointError, 5),
}


def fail_at_save(patch: pytest.MonkeyPatch, step: int, error: Exception) -> None:
    real = drafts.write_part

    def write_part(draft: Path, shot: Snapshot, *place: int) -> None:
        with drafts._explaining_failures(draft, step):
            if shot.state["step"] == step:
                raise error
        real(draft, shot, *place)

    patch.setattr(saving, "write_part", write_part)


@pytest.mark.fault("C4")
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("every", [2, 3])
def test_an_error_in_the_background_is_raised_by_the_next_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, failure: str, every: int
) -> None:
    error, kind, code = FAILURES[failure]
    config = make_config(checkpoint__every=every, train__steps=40, train__eval_every=0)
    fail_at_save(monkeypatch, 6, error)
    with pytest.raises(kind, match="step 6 could not be saved"):
        train(config)
    folder = Path(config.run.dir)
    done = max(event["step"] for event in read_events(folder) if "loss" in event)
    assert done in (6, 7, 8), "as soon as the thread has failed: its error may come while a step is under way"
    assert checkpoint.find_newest(folder / "checkpoints") == 6 - every
    assert json.loads((folder / "exit.json").read_text())["code"] == code
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.control("C4")
def test_an_error_that_nobody_asks_for_is_lost(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(checkpoint__every=6, train__steps=8, train__eval_every=0)
    fail_at_save(monkeypatch, 6, FAILURES["full"][0])
    monkeypatch.setattr(Saver, "failed", False)
    monkeypatch.setattr(Saver, "settle", lambda saver: saver.thread and saver.thread.join())
    train(config)
    assert checkpoint.steps(Path(config.run.dir) / "checkpoints") == [8]


@pytest.mark.dist
@pytest.mark.fault("C4")
def test_an_error_in_one_of_two_processes_ends_both_with_its_code(fast: Path) -> None:
    for codes in crash(fast, "C4", 2).values():
        assert codes[:4] == [9, 9, OLD, []]
        assert codes[4] < 30, "nobody waits for the part that does not come"


@pytest.mark.dist
@pytest.mark.control("C4")
def test_an_error_that_is_not_agreed_on_stays_where_it_is(fast: Path) -> None:
    assert crash(fast, "C4", 1, control=True)["0"][:2] != [9, 9]


@pytest.mark.fault("C4")
def test_a_second_save_and_the_end_wait_for_the_first(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_write, real_start = drafts.write_part, Saver.start

    def write_part(draft: Path, shot: Snapshot, *place: int) -> None:
        real_write(draft, shot, *place)
        order.append(f"wrote {shot.state['step']}")

    def start(saver: Saver, shot: Snapshot) -> None:
        order.append(f"began {shot.state['step']}")
        real_start(saver, shot)

    monkeypatch.setattr(saving, "write_part", write_part)
    monkeypatch.setattr(Saver, "start", start)
    config = make_config(checkpoint__every=1, train__steps=4)
    train(config)
    assert order == [f"{word} {step}" for step in range(1, 5) for word in ("began", "wrote")]
    assert threading.active_count() == 1 or not any(t.name == "stretto-save" for t in threading.enumerate())


def read_modes(folder: Path) -> set[str]:
    return {oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*") if path.is_file()}


def test_files_have_the_modes_that_the_user_wants(fast: Path) -> None:
    usual = os.umask(0o027)
    try:
        checkpoint.save(fast / "shared", make_shot(1), keep=2)
        os.umask(0o077)
        checkpoint.save(fast / "private", make_shot(1), keep=2)
    finally:
        os.umask(usual)
    assert read_modes(fast / "shared") == {"0o640"} and read_modes(fast / "private") == {"0o600"}


def test_a_start_cleans_what_a_crash_left_and_nothing_else(run: Path) -> None:
    folder = run / "checkpoints"
    left = [drafts.name_draft(folder, 6, "a" * 32), folder / ".gone-step-00000001"]
    own = [folder / ".anything", folder / ".new-ideas"]
    for path in (*left, *own):
        path.mkdir()
    config: Config = config_of(run, steps=4)
    train(config, resume=True)  # it is finished: nothing is saved any more
    assert not any(path.exists() for path in left) and all(path.exists() for path in own)


@pytest.mark.fault("K1")
def test_old_ones_go_where_the_last_save_was_killed_before(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_config(run__dir=str(tmp_path / "run"), train__steps=8, train__eval_every=0, checkpoint__every=2)
    with monkeypatch.context() as patch:
        patch.setattr(drafts, "retire", lambda *options: None)
        folder = train(config) / "checkpoints"
    assert checkpoint.steps(folder) == [8, 6, 4, 2]
    train(config, resume=True)  # it is done: nothing is saved any more
    assert checkpoint.steps(folder) == [8, 6]
