"""A run folder from elsewhere: nothing is written outside of it, whatever links and settings it has."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stretto.trained
from stretto.config import dump_config, load_config
from stretto.errors import CheckpointError, DataError
from stretto.evaluate import measure
from stretto.files import RUN_FILES, RUN_FOLDERS, replacing, require_empty, write_text
from stretto.report.page import write_report
from stretto.train import train
from stretto.trained import load_trained
from tests.faults.configs import config_of

CPU = torch.device("cpu")
PRECIOUS = "precious\n"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fault("X5")
@pytest.mark.parametrize(
    "name", [*RUN_FILES, *RUN_FOLDERS, "checkpoints/step-00000004", "data/tokenizer.json", "tensorboard/events.x"]
)
def test_a_link_in_the_place_of_a_file_is_refused_by_name(run: Path, tmp_path: Path, name: str) -> None:
    link, outside = run / name, tmp_path / "outside"
    config = config_of(run, steps=6)
    outside.mkdir()
    target = outside / link.name
    if link.exists():
        shutil.move(link, target)
    else:
        target.write_text(PRECIOUS)
    link.symlink_to(target)
    before = contents(outside)
    for use in (
        lambda: train(config, resume=True),
        lambda: write_report(run, CPU),
        lambda: measure(run, 1),
        lambda: load_trained(run, CPU),
    ):
        with pytest.raises(CheckpointError, match=f"{link} is a link to {target}"):
            use()
    assert contents(outside) == before


@pytest.mark.fault("X5")
def test_a_link_that_leads_nowhere_is_refused_too(run: Path, tmp_path: Path) -> None:
    (run / "lock").unlink()
    (run / "lock").symlink_to(tmp_path / "not there")
    with pytest.raises(CheckpointError, match="lock is a link"):
        train(config_of(run, steps=6), resume=True)
    assert not (tmp_path / "not there").exists()


@pytest.mark.fault("X5")
def test_links_with_the_names_of_drafts_are_not_followed(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text(PRECIOUS)
    for name in RUN_FILES:
        (run / f".{name}").symlink_to(precious)
    train(config_of(run, steps=6), resume=True)
    write_report(run, CPU)
    assert precious.read_text() == PRECIOUS


@pytest.mark.fault("X5")
def test_the_run_folder_itself_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    train(config_of(tmp_path / "link", steps=6), resume=True)
    assert (run / "checkpoints" / "step-00000006").exists()


@pytest.mark.fault("X5")
def test_a_file_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "file"
    precious.write_text(PRECIOUS)
    path.symlink_to(precious)
    write_text(path, "new")
    assert (path.read_text(), path.is_symlink(), precious.read_text()) == ("new", False, PRECIOUS)
    os.link(precious, tmp_path / "same")
    write_text(tmp_path / "same", "new")
    assert precious.read_text() == PRECIOUS


@pytest.mark.fault("X5")
def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(DataError), replacing(tmp_path / "file") as file:
        file.write(b"half of the ne")
        raise DataError("stopped")
    assert contents(tmp_path) == {"file": b"old"}


def set_cache(run: Path, cache: Path) -> None:
    config = load_config(run / "config.toml")
    write_text(run / "config.toml", dump_config(replace(config, data=replace(config.data, cache=str(cache)))))


@pytest.mark.fault("X5")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_evaluating_writes_nothing_where_the_configuration_of_a_run_says(
    run: Path, tmp_path: Path, tokenizer: str
) -> None:
    config = config_of(run, steps=2)
    config = replace(config, data=replace(config.data, tokenizer=tokenizer, vocab=280))
    shutil.rmtree(run)
    train(config)
    scores = measure(run, 1)
    set_cache(run, tmp_path / "elsewhere")
    for path in (run / "data").glob("*.tokens"):
        path.unlink()
    assert measure(run, 1) == scores
    write_report(run, CPU)
    assert not (tmp_path / "elsewhere").exists()
    assert list((run / "data").glob("*.tokens"))


@pytest.mark.fault("X5")
def test_evaluating_reads_a_cache_that_was_filled(run: Path, tmp_path: Path) -> None:
    config, cache = config_of(run, steps=2), tmp_path / "cache"
    config = replace(config, data=replace(config.data, cache=str(cache), tokenizer="bpe", vocab=280))
    shutil.rmtree(run)
    train(config)
    before = contents(cache)
    measure(run, 1)
    assert contents(cache) == before and len(before) == 2
    assert [path.name for path in (run / "data").iterdir()] == ["tokenizer.json"]


SECRET = "a-token-that-nobody-may-read"


def find_secret(run: Path) -> list[str]:
    return [name for name, content in contents(run).items() if SECRET.encode() in content]


@pytest.mark.fault("X5")
def test_modes_follow_the_umask_and_the_environment_stays_private(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that a run writes; the tensors of checkpoints are a matter of their own."""
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    for mask in (0o022, 0o077):
        folder = tmp_path / f"{mask:o}"
        before = os.umask(mask)
        try:
            config = config_of(run, steps=2)
            train(replace(config, run=replace(config.run, dir=str(folder))))
        finally:
            os.umask(before)
        paths = [path for path in (folder, *folder.rglob("*")) if path.suffix != ".safetensors"]
        wrong = {str(path): oct(path.stat().st_mode & 0o777) for path in paths if path.stat().st_mode & mask}
        assert wrong == {}
        small = [folder / name for name in RUN_FILES if name not in ("lock", "loggers.json")]
        assert {path.stat().st_mode & 0o777 for path in small} == {0o666 & ~mask}
        assert find_secret(folder) == []


@pytest.mark.control("X5")
def test_a_secret_of_the_environment_would_be_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    write_text(run / "events.jsonl", str(dict(os.environ)))
    assert find_secret(run) == ["events.jsonl"]


@pytest.mark.fault("X5")
def test_a_folder_that_others_can_write_to(run: Path, tmp_path: Path) -> None:
    """Someone else has put links under the names that drafts could have, and under those of what is exported."""
    precious = tmp_path / "precious"
    precious.write_text(PRECIOUS)
    run.chmod(0o777)
    for name in (*RUN_FILES, "config.toml.tmp", "config.toml~", "#config.toml#"):
        (run / f".{name}").symlink_to(precious)
        (run / f".new-{name}").symlink_to(precious)
    train(config_of(run, steps=6), resume=True)
    assert precious.read_text() == PRECIOUS


def cut_power(monkeypatch: pytest.MonkeyPatch, flushes: bool) -> None:
    """From here on, a file that was not flushed before it was renamed is empty, as after a power cut; so it is with
    every file if nothing is flushed."""
    flushed, fsync, rename = set[int](), os.fsync, os.replace

    def flush(handle: int) -> None:
        if flushes:
            flushed.add(os.fstat(handle).st_ino)
        fsync(handle)

    def move(source: Path, target: Path) -> None:
        if os.stat(source).st_ino not in flushed:
            os.truncate(source, 0)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", move)


def check_after_power_cut(run: Path, monkeypatch: pytest.MonkeyPatch, flushes: bool) -> None:
    config = config_of(run, steps=6)
    cut_power(monkeypatch, flushes)
    train(config, resume=True)
    assert load_config(run / "config.toml") == replace(config, model=load_config(run / "config.toml").model)
    assert (run / "labels.json").read_text() == "[]" and b"</html>" in (run / "report.html").read_bytes()


@pytest.mark.fault("X5")
def test_small_files_are_whole_after_a_power_cut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_after_power_cut(run, monkeypatch, flushes=True)


@pytest.mark.control("X5")
def test_without_flushing_they_would_be_empty(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ValueError)):  # an empty file is no JSON
        check_after_power_cut(run, monkeypatch, flushes=False)


@pytest.mark.fault("K4")
def test_a_start_removes_what_killed_ones_left_in_the_run_folder(run: Path) -> None:
    """Drafts of small files; what is not named like one is the user's."""
    left, own = run / f".labels.json.{'0' * 32}", run / ".notes"
    left.write_text("[")
    own.write_text("mine")
    train(config_of(run, steps=5), resume=True)
    assert not left.exists() and own.read_text() == "mine"


@pytest.mark.fault("X5")
def test_exporting_to_the_current_folder_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "", str(tmp_path / "here")):
        with pytest.raises(CheckpointError, match="name a new folder"):
            require_empty(Path(name))


@pytest.mark.fault("X5")
@pytest.mark.parametrize("content", ["", "5", "{}", '["a", 5]', "[" * 100_000, "\xff"])
def test_damaged_names_of_classes_are_an_error(run: Path, content: str) -> None:
    (run / "labels.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"labels\.json is not a list of class names"):
        load_trained(run, CPU)


@pytest.mark.fault("X5")
def test_a_checkpoint_that_goes_before_it_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on deletes what retention no longer wants; what it has kept is taken then."""
    choices, find = iter([9]), stretto.trained._find_step
    monkeypatch.setattr(stretto.trained, "_find_step", lambda *args: next(choices, 0) or find(*args))
    assert load_trained(run, CPU).step == find(run / "checkpoints", None)
    choices = iter([9])
    with pytest.raises(CheckpointError, match=r"step 9 of .* cannot be used"):
        load_trained(run, CPU, step=9)
