"""`stretto bench` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stretto.bench import contest
from stretto.bench.show import describe_result, draw_chart, print_table, with_ratios
from stretto.bench.worker import explain
from stretto.bench.workloads import WORKLOADS
from stretto.config import load_config
from stretto.errors import ConfigError, OutOfMemoryError

NAME = "gpt2_small_32x1024"
CPU_ONLY = ["run.device=cpu", "train.compile=false"]


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    sets = [part for override in CPU_ONLY for part in ("--set", override)]
    command = [sys.executable, "-m", "stretto", "bench", NAME, "--steps", "2", "--out", str(out), *sets, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_names_are_listed_without_importing_anything_heavy() -> None:
    code = (
        "import sys, stretto.cli as cli; from typer.testing import CliRunner\n"
        "results = [CliRunner().invoke(cli.app, ['bench', *more]) for more in ([], ['--help'], ['no-such-name'])]\n"
        "print(results[0].output, [r.exit_code for r in results], results[2].exception)\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *listed, outcome, heavy = done.stdout.strip().splitlines()
    assert [line.split()[0] for line in listed if line] == list(WORKLOADS), done.stdout + done.stderr
    assert "[0, 0, 1] there is no workload 'no-such-name'" in outcome and heavy == "[]"


@pytest.mark.slow
def test_a_whole_run_on_a_cpu(tmp_path: Path) -> None:
    process = start(tmp_path, "--against", "plain,eager,graphs")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert contest.TINY in output and "ratio" in output and "graphs need a GPU" in output
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["note"] == contest.TINY and saved["steps"] == 2 and saved["overrides"] == CPU_ONLY
    environment = saved["environment"]
    assert environment["torch"] == torch.__version__ and f"bench {NAME}" in environment["command"]
    assert environment["transformers"] and environment["date"].startswith("20") and "commit" in environment
    results = saved["workloads"][NAME]["contestants"]
    assert list(results) == ["stretto", "stretto plain", "hf eager", "hf graphs"]
    assert results.pop("hf graphs") == {"skipped": "CUDA graphs need a GPU"}
    best = results["hf eager"]["tokens_per_s"]
    for name, result in results.items():
        assert result["tokens_per_s"] == pytest.approx(8 * 64 / (result["step_ms"] / 1e3)), (name, result)
        assert result["first_loss"] == pytest.approx(6.24, abs=0.1)  # ln 512: all train the same tiny model
        assert result["filler"] == 0  # every row is full
        assert result["parameters"] == results["hf eager"]["parameters"]
        assert result["ratio_to_best_peer"] == pytest.approx(result["tokens_per_s"] / best)
        assert load_config(tmp_path / NAME / f"{name.replace(' ', '-')}.toml").train.compile is False
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    process = start(tmp_path, "--against", "plain")
    assert process.stdout is not None
    lines = list[str]()
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"{NAME}: stretto:"):
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in output, "".join(lines) + output
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert list(saved["workloads"][NAME]["contestants"]) == ["stretto"]
    assert "tokens/s" in output and (tmp_path / "bench.png").exists()


def test_a_contestant_that_fails_says_why(tmp_path: Path) -> None:
    overrides = [*CPU_ONLY, "model.embed_norm=true"]  # which GPT-2 does not have
    job = contest.prepare(NAME, "hf eager", overrides, tmp_path)
    result = contest.run_job(job, steps=2)
    assert "model.embed_norm = True where it has False" in result["failed"] and "\n" not in result["failed"]
    assert "Traceback" in job.stem.with_suffix(".log").read_text()


def test_a_process_that_ends_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = contest.prepare(NAME, "stretto plain", CPU_ONLY, tmp_path)
    job.stem.with_suffix(".json").write_text('{"tokens_per_s": 1}')  # of an earlier run
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ended with code 1" in contest.run_job(job, steps=2)["failed"]
    monkeypatch.undo()
    monkeypatch.setattr(contest, "LIMIT_S", 0.05)
    assert "not done after" in contest.run_job(job, steps=2)["failed"]


def test_all_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(contest.StrettoError, match="no contestant finished"):
        contest.run_bench([NAME], [], CPU_ONLY, 2, tmp_path)
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert all("failed" in result for result in saved["workloads"][NAME]["contestants"].values())


def test_mistakes_answer_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.widht"):
        contest.run_bench([NAME], [], ["model.widht=3"], 2, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"techniques\.fused\.magic"):
        contest.run_bench([NAME], [], ["techniques.fused.magic=true"], 2, tmp_path / "b")
    with pytest.raises(ConfigError, match="--against jit"):
        contest.run_bench([NAME], ["eager", "jit"], [], 2, tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        contest.run_bench([NAME], [], [], 2, tmp_path / "file")


def test_only_stretto_takes_techniques(tmp_path: Path) -> None:
    overrides = [*CPU_ONLY, "techniques.fused.recompute=true", "model.layers=3"]
    for name in ("stretto", "stretto plain", "hf eager"):
        config = load_config(contest.prepare(NAME, name, overrides, tmp_path).stem.with_suffix(".toml"))
        assert config.model.layers == 3 and config.model.width == 64
        assert (config.techniques.fused is None) == (name != "stretto")
        assert config.techniques.fused is None or config.techniques.fused.recompute is True


def test_stretto_asks_for_graphs_on_a_gpu(tmp_path: Path) -> None:
    for graphs, word in ((True, "on"), (False, "off")):
        assert contest.make_recipe(WORKLOADS[NAME], "stretto", graphs)["train"] == {"graphs": word}
    config = load_config(contest.prepare(NAME, "stretto", CPU_ONLY, tmp_path).stem.with_suffix(".toml"))
    assert config.train.graphs == "off"


def test_bf16_weights_are_asked_for_in_each_ones_way() -> None:
    recipe = contest.make_recipe(WORKLOADS["llama1b_4x4096"], "stretto")
    assert recipe["techniques"]["fused"] == {"weights": "bf16", "moments": "bf16", "recompute": True}
    for graphs, weights in ((True, "split"), (False, "fp32")):
        assert contest.make_recipe(WORKLOADS[NAME], "stretto", graphs)["techniques"]["fused"] == {"weights": weights}


def test_missing_transformers_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert contest.find_obstacle("hf eager", cpu) == "" and "GPU" in contest.find_obstacle("hf graphs", cpu)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(contest.importlib.util, "find_spec", lambda name: None)
    assert "pip install" in contest.find_obstacle("hf eager", cpu)
    assert contest.find_obstacle("stretto", cpu) == ""


def test_reasons_are_one_line() -> None:
    assert explain(OutOfMemoryError("memory is full: lower data.batch_size")) == "out of memory"
    assert explain(ValueError("first\nsecond")) == "ValueError: first" and explain(KeyError()) == "KeyError"


def numbers(speed: float) -> dict[str, object]:
    parts = {"gemm": 40.123, "attention": 8.5, "optimizer": 1.25, "rest": 12.0, "idle": 0.0}
    return {"tokens_per_s": speed, "mfu": 0.4321, "memory_gib": 20.04, "breakdown_ms": parts, "floor_share": 0.871}


RESULTS = {
    "stretto": numbers(600e3),
    "hf eager": numbers(200e3),
    "hf compile": numbers(400e3),
    "hf graphs": {"failed": "out of memory"},
}


def test_ratios_are_to_the_best_peer_of_this_run() -> None:
    ratios = {name: result.get("ratio_to_best_peer") for name, result in with_ratios(RESULTS).items()}
    assert ratios == {"stretto": 1.5, "hf eager": 0.5, "hf compile": 1.0, "hf graphs": None}
    assert "ratio_to_best_peer" not in with_ratios({"stretto": numbers(1.0)})["stretto"]


def test_the_table_fits_80_columns() -> None:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        print_table(console, NAME, RESULTS)
    text = capture.get()
    assert "…" not in text
    row = next(line for line in text.splitlines() if line.strip().startswith("stretto "))
    assert row.split() == [
        "stretto",
        "600,000",
        "0.432",
        "20.0",
        "1.50",
        "40.1",
        "8.50",
        "1.25",
        "12.0",
        "0.00",
        "0.87",
    ]
    assert "hf graphs: failed: out of memory" in text


def test_the_chart_shows_those_without_numbers_too(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    draw_chart(path, {NAME: RESULTS, "vit_base_256": {"stretto": {"failed": "out of memory"}}}, ["a GPU", ""])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert describe_result(RESULTS["stretto"]) == "600,000 tokens/s, 20.0 GiB"
