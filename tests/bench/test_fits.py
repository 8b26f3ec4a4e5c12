"""`python -m bench.fits`: its search, its three tables on a CPU, and its mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench import fits
from bench.fits import CONTESTANTS, FULL, SETTINGS, app, compare, find_most, make_job, ran_out
from stretto.bench import measure
from stretto.bench.contest import TINY, describe_run
from stretto.bench.workloads import WORKLOADS
from stretto.config import build_config
from stretto.errors import ConfigError, OutOfMemoryError
from stretto.plan import LADDER, find_choice, find_needs

BERT, GPT2, ROBERTA = fits.SEARCHED


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Runs jobs in this process, which has imported everything, and notes what they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where cores are busy
    monkeypatch.setattr(measure, "MOST_WARM_UP_PASSES", 3)
    monkeypatch.setattr(fits, "choose_device", lambda: torch.device("cpu"))
    jobs = list[dict[str, Any]]()

    def run_here(module: str, arguments: Sequence[str], stem: Path) -> dict[str, Any]:
        assert module == "bench.fits" and arguments[0] == "worker"
        jobs.append(json.loads(Path(arguments[1]).read_text())["job"])
        fits.worker(Path(arguments[1]), stem.with_suffix(".json"))
        return json.loads(stem.with_suffix(".json").read_text())

    monkeypatch.setattr(fits, "run_apart", run_here)
    yield jobs
    torch.set_num_threads(threads)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("most", [0, 1, 2, 7, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("start", [0, 1, 8, 33, 100, 640])
def test_the_search_finds_the_largest_that_fits(most: int, start: int) -> None:
    tried = list[int]()
    assert find_most(lambda rows: tried.append(rows) or rows <= most, start) == most
    assert len(tried) == len(set(tried)) <= 24 and min(tried) > 0
    assert most == 0 or most in tried  # what is reported has been measured
    if start and abs(most - start) <= 1:
        assert len(tried) <= 6


def test_batches_on_a_cpu(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    chosen = "stretto,stretto lean,stretto dial,hf eager,hf checkpoint"
    output = run("batches", GPT2, "--caps", "2,3", "--contestants", chosen, "--steps", "1", "--out", str(tmp_path))
    saved = json.loads((tmp_path / "batches.json").read_text())
    assert TINY in output and saved["environment"]["date"] and "commit" in saved["environment"]
    assert [(row["cap_gib"], row["contestant"]) for row in saved["rows"]] == [
        (cap, name) for cap in (2, 3) for name in chosen.split(",")
    ]
    for row in saved["rows"]:
        assert row["rows"] == row["cap_gib"] and row["tokens"] == 64 * row["rows"], row
        assert row["probes"][str(row["rows"] + 1)] == FULL and row["tokens_per_s"] > 0
        assert f"| {row['cap_gib']:g} | {row['contestant']} | {row['rows']} |" in output
    dial = next(job for job in asked if job["contestant"] == "stretto dial")
    assert dial["recipe"]["techniques"]["lean"]["memory"] == "1.900GiB"


def test_a_model_of_hugging_face_alone(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    output = run("batches", ROBERTA, "--caps", "1", "--contestants", "stretto,hf eager", "--out", str(tmp_path))
    ours, theirs = json.loads((tmp_path / "batches.json").read_text())["rows"]
    assert ours["failed"] == "Stretto has no roberta of its own" and ours["failed"] in output
    assert theirs["rows"] == 1 and {job["contestant"] for job in asked} == {"hf eager"}


def test_a_failure_that_is_not_memory_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "choose_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(fits, "run_apart", lambda *_: {"failed": "ValueError: no"})
    output = run("batches", BERT, "--caps", "4", "--contestants", "stretto hf lean", "--out", str(tmp_path))
    assert "4 GiB, stretto hf lean: ValueError: no" in output


def test_settings_on_a_cpu(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    output = run("settings", "transformer_big_fixed_16x32", "--steps", "1", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "settings.json").read_text())["rows"]
    names = list(SETTINGS)
    assert [row["setting"] for row in rows] == names and len(names) == len(LADDER) and "memory x" in output
    order = [job["contestant"].removeprefix("stretto, ") for job in asked]
    assert order == names + names[::-1]
    kept = [row["kept"] for row in rows]
    assert kept == sorted(kept, reverse=True) and kept[-1] < kept[0] / 4
    assert rows[0]["speed_ratio"] == rows[0]["memory_ratio"] == 1.0 and len(rows[1]["speeds"]) == 2


def test_long_on_a_cpu(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    arguments = ("long", "--model", "gpt2-medium", "--tokens", "64,128", "--out", str(tmp_path))
    assert "| 128 |" in run(*arguments)
    rows = json.loads((tmp_path / "long-gpt2-medium.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [64, 128]
    assert all(keep["block"] == "input" for row in rows for keep in row["choice"])


def test_what_is_measured_is_not_measured_again(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("long", "--model", "llama-1b", "--tokens", "64", "--out", str(tmp_path))
    for commit, runs in (("a", 1), ("a", 1), ("b", 2), ("b-dirty", 3), ("b-dirty", 4)):

        def describe(*given: Any, commit: str = commit) -> dict[str, Any]:
            found = describe_run(*given)
            return found | {"environment": found["environment"] | {"commit": commit}}

        monkeypatch.setattr(fits, "describe_run", describe)
        run(*arguments)
        assert len(asked) == runs, commit


@pytest.mark.slow
def test_a_measurement_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "choose_device", lambda: torch.device("cpu"))
    run("long", "--tokens", "64", "--out", str(tmp_path))
    assert "warm-up pass 1" in (tmp_path / "long-gpt2-medium" / "gpt2-medium-stretto-1-64-1-0-0.log").read_text()


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if not workload.own])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_knows_the_batch(name: str, device: str) -> None:
    config = build_config(make_job(name, "stretto", device, None).recipe)
    needs, workload = find_needs(config), fits.shape(name, device, {})
    assert needs.predict(find_choice(config, needs)).peak > 0
    assert config.run.device == device and config.techniques.lean is None
    if workload.rows and workload.length:
        assert needs.load.tokens == workload.rows * workload.length
    if workload.lengths is None and name.startswith("bert_large_64"):
        assert device == "cpu" or needs.load.attention == "dense"


def test_long_sequences_are_as_lean_as_can_be() -> None:
    job = make_job("gpt2-medium", "stretto", "cuda", {"blocks": 24}, sizes={"rows": 1, "length": 65536})
    config = build_config(job.recipe)
    needs = find_needs(config)
    assert config.model.positions == "rotary" and needs.load.tokens == config.model.max_len == 65536
    assert (needs.way.weights, needs.way.moments) == ("bf16", "bf16") and config.train.graphs == "off"
    assert needs.predict(find_choice(config, needs)).peak < 60 * 2**30


def test_ratios_need_numbers() -> None:
    numbers = {"tokens_per_s": 2.0, "allocated_gib": 3.0}
    turns = [dict.fromkeys(SETTINGS, numbers) | {"fused alone": {"failed": FULL}}] * 2
    first, second, *_ = compare(GPT2, turns)
    assert first["failed"] == FULL and second["tokens_per_s"] == 2.0 and "speed_ratio" not in second


def test_memory_is_the_cause_also_behind_another_error() -> None:
    hidden = RuntimeError("operation failed due to a previous error during capture")
    assert not ran_out(hidden) and ran_out(OutOfMemoryError("full"))
    hidden.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert ran_out(hidden)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batches", "bert"], "no workload with rows to search 'bert'; there are: gpt2_small_32x1024"),
        (["batches", "transformer_big_mt_16k"], "no workload with rows to search"),
        (["batches", "--contestants", "stretto,jit"], f"no contestant 'jit'; there are: {', '.join(CONTESTANTS)}"),
        (["batches", "--caps", "6,x"], "--caps 6,x: must be positive numbers"),
        (["settings", "bert"], "there is no workload 'bert'"),
        (["settings", "t5_base_64x512"], "Stretto has no t5 of its own"),
        (["long", "--model", "bert-large"], "no model for long sequences 'bert-large'; there are: gpt2-medium"),
        (["long", "--tokens", "0"], "--tokens 0: must be positive"),
    ],
)
def test_mistakes_answer_before_anything_runs(arguments: list[str], said: str, tmp_path: Path) -> None:
    error = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")]).exception
    assert isinstance(error, ConfigError) and said in str(error)
    assert not (tmp_path / "out").exists()
