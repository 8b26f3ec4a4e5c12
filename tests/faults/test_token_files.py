"""Token files that are damaged, forged or change while they are read; drafts of killed writers; every sample once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stretto.train
from stretto.config import Config, DataConfig
from stretto.data import Data, open_data
from stretto.data.tokens import Mapped, Tokens
from stretto.errors import DataError
from stretto.files import remove_stale_drafts, write_text
from stretto.train import train
from tests.corpora import write_corpus, write_images, write_pairs
from tests.faults.configs import config_of
from tests.runs import PATIENCE_S

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
HEADER = 1024


def find_tokens(run: Path) -> Path:
    (path,) = (run / "data").glob("*.tokens")
    return path


def forge(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes where documents start, and writes the checksum that fits."""
    content = path.read_bytes()
    header = json.loads(content[8:HEADER])
    end = HEADER + 8 * (header["documents"] + 1)
    starts = np.frombuffer(content[HEADER:end], np.int64).copy()
    change(starts)
    body = starts.tobytes() + content[end:]
    header["sha256"] = hashlib.sha256(body).hexdigest()
    path.write_bytes(content[:8] + json.dumps(header).encode().ljust(HEADER - 8) + body)


def swap(starts: Any) -> None:
    starts[[2, 3]] = starts[[3, 2]]


def put(at: int, value: int) -> Callable[[Any], None]:
    return lambda starts: starts.__setitem__(at, value)


FORGERIES: dict[str, Callable[[Any], None]] = {
    "out of order": swap,
    "late begin": put(0, 5),
    "negative": put(1, -4),
    "beyond the end": put(2, 10**15),
    "early end": put(-1, 1000),
    "later end": put(-1, 10**12),
}


def assert_refused(config: Config, path: Path) -> None:
    with pytest.raises(DataError, match=rf"the token file {path} is damaged: .*document.*Delete it"):
        train(config, resume=True)


@pytest.mark.fault("T1")
@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_table_of_documents_is_refused(run: Path, change: Callable[[Any], None]) -> None:
    forge(find_tokens(run), change)
    assert_refused(config_of(run, steps=6), find_tokens(run))


@pytest.mark.control("T1")
def test_without_that_check_a_forged_table_would_be_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(find_tokens(run), swap)
    monkeypatch.setattr("stretto.data.tokens._check_starts", lambda starts, count: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_refused(config_of(run, steps=6), find_tokens(run))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path, value: int = 65535) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell() - HEADER - 8 * 40
        file.seek(-size, os.SEEK_END)
        file.write(np.full(size // 2, value, np.uint16).tobytes())


SPOILS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, r"ends at byte \d"),
    "emptied": (lambda path: os.truncate(path, 0), "ends at byte 0"),
    "extended": (lambda path: os.truncate(path, path.stat().st_size + 2), r"ends at byte \d"),
    "other ids": (lambda path: overwrite(path, 1), "was overwritten"),
    "impossible ids": (overwrite, "was overwritten"),
}


def train_and_spoil(run: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoils the token file in the midst of a run."""
    run_step, path = stretto.train.run_step, find_tokens(run)

    def spoiling(*args: Any) -> Any:
        if not spoiled:
            spoiled.append(spoil(path))
        return run_step(*args)

    spoiled: list[None] = []
    monkeypatch.setattr(stretto.train, "run_step", spoiling)
    train(config_of(run, steps=20), resume=True)


@pytest.mark.fault("T1")
@pytest.mark.parametrize(("spoil", "words"), SPOILS.values(), ids=SPOILS.keys())
def test_a_file_that_changes_while_it_is_mapped_stops_the_run(
    run: Path, spoil: Callable[[Path], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=rf"the token file {find_tokens(run)} .*{words}"):
        train_and_spoil(run, spoil, monkeypatch)
    assert json.loads((run / "exit.json").read_text())["code"] == 4


@pytest.mark.fault("T1")
def test_ids_beyond_the_vocabulary_do_not_reach_the_device(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody could see that the file has changed."""
    monkeypatch.setattr(Mapped, "check", lambda self: None)
    with pytest.raises(DataError, match=r"holds id 65535 at byte [\d,]+, but the tokenizer has only 260"):
        train_and_spoil(run, overwrite, monkeypatch)


@pytest.mark.control("T1")
def test_without_these_checks_it_would_be_an_error_of_the_device(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokens, "take", lambda self, places: self.ids[places].astype(np.int64))
    with pytest.raises(IndexError):
        train_and_spoil(run, overwrite, monkeypatch)


def test_a_new_date_changes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_and_spoil(run, lambda path: os.utime(path, (1, 1)), monkeypatch)


def test_another_file_of_the_same_name_changes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that share a cache may write the same file at the same time: each keeps the one that it has mapped."""
    train_and_spoil(run, lambda path: write_text(path, "another"), monkeypatch)


WRITER = """
import sys, time
from pathlib import Path
from stretto.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half"); file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
    return writer


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.fault("T1")
def test_drafts_of_killed_writers_go_and_those_of_living_ones_stay(run: Path) -> None:
    config = config_of(run, steps=6)
    folder, name = run / "data", f"{'0' * 16}.tokens"
    before = list_names(folder)
    with start_writer(folder / name) as killed, start_writer(folder / name) as living:
        killed.kill()
        killed.wait(timeout=PATIENCE_S)
        for other in (f".{name}.{'0' * 31}", f".mine.{'0' * 32}", f"{name}.{'0' * 32}"):
            (folder / other).write_text("of the user")
        assert len(list_names(folder)) == len(before) + 5
        train(config, resume=True)
        drafts = [
            found for found in list_names(folder) if found.startswith(f".{name}.") and len(found) == len(name) + 34
        ]
        assert len(drafts) == 1 and len(list_names(folder)) == len(before) + 4
        living.communicate(timeout=PATIENCE_S)
    assert (folder / name).read_text() == "half" and len(list_names(folder)) == len(before) + 4


def test_a_draft_that_was_taken_for_stale_before_it_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, count = fcntl.flock, 0

    def late(file: Any, operation: int) -> None:
        nonlocal count
        count += 1
        if count == 1:
            remove_stale_drafts(tmp_path)  # in the moment between opening and locking; it locks by itself
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write_text(tmp_path / "config.toml", "whole")
    assert (list_names(tmp_path), (tmp_path / "config.toml").read_text()) == (["config.toml"], "whole")
    assert count == 3


BATCH, EPOCHS = 5, 3


@pytest.fixture(scope="module", params=["causal", "masked", "images", "translation"])
def reopen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Data]:
    """Opens the same data again, as a process does that begins or goes on."""
    folder, kind = tmp_path_factory.mktemp("once"), str(request.param)
    settings: dict[str, Any] = {"task": kind, "batch_size": BATCH, "seq_len": 48, "held_out": 0.1}
    if kind == "images":
        settings |= {"train": str(write_images(folder / "images.npz", count=37, size=4))}
    elif kind == "translation":
        pairs = {"train": str(write_pairs(folder / "pairs", 45)), "languages": ("xx", "yy"), "max_tokens": 150}
        settings |= pairs | {"seq_len": 64}
    else:
        settings |= {"train": str(write_corpus(folder / "text", documents=29)), "suffix": ".txt"}
    return lambda: open_data(DataConfig(**settings), seed=3, folder=folder / "data", image_size=4)


def read_epochs(reopen: Callable[[], Data], processes: int) -> Iterator[Counter[int]]:
    """What the processes read in each epoch, when every one of them is started anew for every step."""
    seen: list[int] = []
    for step in range(10_000):
        for rank in range(processes):
            data = reopen()
            batch = data.train_batch(step, rank, processes)
            seen += batch.samples if int(batch.counts.labels) else ()
        while len(seen) >= data.num_train:
            yield Counter(seen[: data.num_train])
            seen = seen[data.num_train :]


def assert_each_once(reopen: Callable[[], Data], processes: int = 2) -> None:
    first, *others = (epoch for epoch, _ in zip(read_epochs(reopen, processes), range(EPOCHS), strict=False))
    assert len(first) == reopen().num_train and set(first.values()) == {1}
    assert all(epoch == first for epoch in others) and len(others) == EPOCHS - 1


@pytest.mark.fault("T2")
def test_every_sample_once_an_epoch_in_two_processes_that_are_resumed_at_every_step(reopen: Callable[[], Data]) -> None:
    assert reopen().num_train % BATCH, "sizes that do not go into each other"
    assert_each_once(reopen)


@pytest.mark.control("T2")
def test_an_order_from_a_global_generator_would_be_noticed(
    reopen: Callable[[], Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = np.random.default_rng(0)
    for module in ("stream", "pairs"):
        monkeypatch.setattr(f"stretto.data.{module}.random_stream", lambda seed, purpose, number=0: everyone)
    with pytest.raises(AssertionError):
        assert_each_once(reopen)
