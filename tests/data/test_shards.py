"""Corpora that become several token files: the same batches, work that goes on after a kill, notes of what was read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.big_corpus import measure
from stretto.cli import app
from stretto.config import DataConfig, dump_config
from stretto.data import Data, documents, open_data, tokens
from stretto.errors import DataError
from stretto.train import train
from tests.data.corpora import same, sentence
from tests.runs import MakeConfig, losses


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """40 rows, as if written a minute ago."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": sentence(i, i + 5)}) + "\n" for i in range(40)))
    os.utime(path, (time.time() - 60,) * 2)
    return path


@pytest.fixture
def in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corpora of any size are notable, and 700 bytes are a shard."""
    monkeypatch.setattr(documents, "_WORTH_NOTING", 1)
    monkeypatch.setattr(tokens, "_SHARD", 700)


Open = Callable[..., Data]


@pytest.fixture
def reopen(rows: Path, tmp_path: Path) -> Open:
    settings: dict[str, Any] = {"train": str(rows), "seq_len": 16, "batch_size": 8}

    def open_it(cache: str = "cache", **others: Any) -> Data:
        cfg = DataConfig(**{**settings, "cache": str(tmp_path / cache), **others})
        return open_data(cfg, seed=1, folder=tmp_path / "run")

    return open_it


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-of-*.tokens"))


def assert_same(one: Data, other: Data) -> None:
    assert one.describe() == other.describe()
    assert all(same(one.train_batch(i), other.train_batch(i)) for i in range(2 * one.num_train // 8))
    assert all(same(one.eval_batch(i), other.eval_batch(i)) for i in range(one.num_eval_batches))


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_batches_are_those_of_one_file(reopen: Open, tmp_path: Path, request: pytest.FixtureRequest, task: str) -> None:
    whole = reopen("one", task=task)
    request.getfixturevalue("in_shards")
    assert not shards(tmp_path / "one")
    cut = reopen(task=task)
    assert len(shards(tmp_path / "cache")) > 5
    assert_same(whole, cut)


@pytest.mark.usefixtures("in_shards")
def test_work_goes_on_behind_the_last_whole_shard(
    reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, write, written = reopen("other"), tokens.write_tokens, list[str]()

    def stopping(path: Path, *args: Any) -> str:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens, "write_tokens", stopping)
        reopen()
    dates = {path: path.stat().st_mtime_ns for path in shards(tmp_path / "cache")}
    assert len(dates) == 3
    assert_same(whole, reopen())
    assert all(path.stat().st_mtime_ns == date for path, date in dates.items())
    assert len(shards(tmp_path / "cache")) == len(shards(tmp_path / "other"))


@pytest.mark.usefixtures("in_shards")
def test_nothing_is_read_again_until_it_changes(reopen: Open, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = reopen()
    with monkeypatch.context() as patch:
        patch.setattr(documents, "_survey", None)
        patch.setattr(tokens, "_checksum", None)
        assert_same(first, reopen())
    changed = rows.read_text().replace("cat", "dog")
    rows.write_text(changed)
    second = reopen()
    assert second.fingerprint != first.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(documents, "_survey", None)
        with pytest.raises(TypeError):
            reopen()  # what was written just now may change without a new date: it gets no note


@pytest.mark.usefixtures("in_shards")
def test_a_shard_that_has_changed_is_checked(reopen: Open, tmp_path: Path) -> None:
    reopen()
    path = shards(tmp_path / "cache")[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path.name} is damaged: its checksum is wrong. Delete it"):
        reopen()
    path.unlink()
    reopen()


@pytest.mark.usefixtures("in_shards")
def test_notes_that_are_not_ours_are_passed_over(reopen: Open, tmp_path: Path) -> None:
    first = reopen()
    for path in (tmp_path / "cache").glob("*.seen"):
        note = json.loads(path.read_text())
        path.write_text(json.dumps(note | {"facts": {"no": "note"}}))
    assert_same(first, reopen())
    for path in (tmp_path / "cache").glob("*.seen"):
        path.write_text("[" * 10**5)
    assert_same(first, reopen())


@pytest.mark.usefixtures("in_shards")
def test_an_impossible_id_in_a_shard_is_named(reopen: Open, tmp_path: Path) -> None:
    """By the batch that reads it, in a shard which had been checked before."""
    data = reopen()
    path = shards(tmp_path / "cache")[0]
    with path.open("r+b") as file:
        file.seek(-600, os.SEEK_END)
        file.write(np.full(300, 9999, np.uint16).tobytes())
    with pytest.raises(DataError, match=rf"{path.name} was overwritten while it was read"):
        for i in range(30):
            data.train_batch(i)


@pytest.mark.usefixtures("in_shards")
def test_the_command_prepares_what_a_run_reads(rows: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config()
    config = replace(config, data=replace(config.data, train=str(rows), cache=str(tmp_path / "cache")))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_config(config))
    result = CliRunner().invoke(app, ["data", str(recipe)], catch_exceptions=False)
    assert result.exit_code == 0 and "40 documents" not in result.output and "documents" in result.output
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(made) > 5 and not Path(config.run.dir).exists()
    assert len(losses(train(config))) == 6
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == made
    result = CliRunner().invoke(app, ["data", str(recipe), "--set", "data.cache="])
    assert result.exit_code != 0 and "name the folder" in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_big_corpus(tmp_path: Path, tokenizer: str) -> None:
    """As bench/big_corpus.py does it: killed, gone on with, and opened again."""
    size = 100_000_000 if tokenizer == "bytes" else 20_000_000
    found = measure(tmp_path, size, tokenizer, size // 10)
    assert 1 <= found["shards_then"] < found["shards"]
    assert found["restart_s"] < 0.5 * found["rest_s"]
    assert found["rest_peak_rss_mib"] - found["restart_peak_rss_mib"] < 300, "a shard and its tokens would be more"
