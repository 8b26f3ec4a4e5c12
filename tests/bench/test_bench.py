"""`stretto bench` as a user meets it."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from stretto.bench import contest
from stretto.bench.contest import describe_result, draw_chart, print_table, with_ratios
from stretto.bench.worker import explain
from stretto.bench.workloads import WORKLOADS
from stretto.config import Config, FusedConfig, load_config
from stretto.errors import ConfigError, OutOfMemoryError, StrettoError
from tests.runs import PATIENCE_S

NAME, T5 = "gpt2_small_32x1024", "t5_base_64x512"
CONTESTANTS = ["stretto", "stretto hf", "stretto plain", "hf eager", "hf compile", "hf graphs", "hf liger"]
CPU = torch.device("cpu")
CPU_ONLY = ["run.device=cpu", "train.compile=false"]


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    sets = [part for override in CPU_ONLY for part in ("--set", override)]
    command = [sys.executable, "-m", "stretto", "bench", NAME, "--steps", "2", "--out", str(out), *sets, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_names_are_listed_without_importing_anything_heavy() -> None:
    code = (
        "import sys, stretto.cli as cli; from typer.testing import CliRunner\n"
        "results = [CliRunner().invoke(cli.app, ['bench', *more]) for more in ([], ['--help'], ['no-such-name'])]\n"
        "print(results[0].output, [r.exit_code for r in results], results[2].exception)\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    *listed, outcome, heavy = done.stdout.strip().splitlines()
    assert [line.split()[0] for line in listed if line] == list(WORKLOADS), done.stdout + done.stderr
    assert "[0, 0, 1] there is no workload 'no-such-name'" in outcome and heavy == "[]"


@pytest.mark.slow
def test_a_whole_run_on_a_cpu(tmp_path: Path) -> None:
    process = start(tmp_path, "--against", "hf,plain,eager,graphs,liger")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert contest.TINY in output and "ratio" in output and "graphs need a GPU" in output
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["note"] == contest.TINY and saved["steps"] == 2 and saved["overrides"] == CPU_ONLY
    environment = saved["environment"]
    assert environment["torch"] == torch.__version__ and f"bench {NAME}" in environment["command"]
    assert environment["transformers"] and environment["date"].startswith("20") and "commit" in environment
    results = saved["workloads"][NAME]["contestants"]
    assert list(results) == [name for name in CONTESTANTS if name != "hf compile"]
    assert results.pop("hf graphs") == {"skipped": "CUDA graphs need a GPU"}
    assert "Liger" in results.pop("hf liger")["skipped"]
    best = results["hf eager"]["tokens_per_s"]
    for name, result in results.items():
        assert result["tokens_per_s"] == pytest.approx(8 * 64 / (result["step_ms"] / 1e3)), (name, result)
        assert result["first_loss"] == pytest.approx(6.24, abs=0.1)  # ln 512: all train the same tiny model
        assert result["filler"] == (None if name == "stretto hf" else 0)  # every row is full
        assert result["parameters"] == results["hf eager"]["parameters"]
        assert result["ratio_to_best_peer"] == pytest.approx(result["tokens_per_s"] / best)
        assert load_config(tmp_path / NAME / f"{name.replace(' ', '-')}.toml").train.compile is False
    assert "lm_head" in (tmp_path / NAME / "stretto-hf.log").read_text()  # the report says what was accelerated
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
    output, _ = process.communicate(timeout=PATIENCE_S)
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
    with pytest.raises(StrettoError, match="no contestant finished"):
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


def test_contestants_have_one_order() -> None:
    assert contest.choose_contestants([]) == ["stretto"]
    assert contest.choose_contestants(["eager", "hf"]) == ["stretto", "stretto hf", "hf eager"]
    assert contest.choose_contestants(["liger", "graphs", "compile", "eager", "plain", "hf"]) == CONTESTANTS


def resolve(name: str, overrides: list[str], out: Path) -> Config:
    return load_config(contest.prepare(NAME, name, [*CPU_ONLY, *overrides], out).stem.with_suffix(".toml"))


@pytest.mark.parametrize("name", CONTESTANTS)
def test_techniques_are_for_those_who_have_them(name: str, tmp_path: Path) -> None:
    config = resolve(name, ["techniques.fused.moments=bf16", "model.layers=3"], tmp_path)
    assert config.model.layers == 3 and config.model.width == 64
    fused = config.techniques.fused
    ours = name in ("stretto", "stretto hf")
    assert isinstance(fused, FusedConfig) and fused.moments == "bf16" if ours else fused is None


def test_options_of_8_bit_products_are_for_their_contestant(tmp_path: Path) -> None:
    plain, eight = (resolve(name, ["techniques.fp8.head=true"], tmp_path) for name in ("stretto", "stretto fp8"))
    assert plain.techniques.fp8 is None and eight.techniques.fp8 is not None and eight.techniques.fp8.head


def test_only_stretto_asks_for_graphs_and_only_on_a_gpu(tmp_path: Path) -> None:
    for name in CONTESTANTS:
        asked = [contest.make_recipe(WORKLOADS[NAME], name, graphs)["train"].get("graphs") for graphs in (True, False)]
        chosen = [resolve(name, overrides, tmp_path).train.graphs for overrides in ([], ["train.graphs=on"])]
        assert ("on" in asked) == ("on" in chosen) == (name == "stretto")
        assert asked[1] != "on" and chosen[0] != "on"


@pytest.mark.parametrize("name", ["stretto", "stretto hf"])
def test_bf16_weights_are_asked_for_in_each_ones_way(name: str) -> None:
    recipe = contest.make_recipe(WORKLOADS["llama1b_4x4096"], name)
    assert recipe["techniques"]["fused"] == {"weights": "bf16", "moments": "bf16"}
    assert recipe["techniques"]["lean"] == {"norms": "input"}
    for graphs, weights in ((True, "split"), (False, "fp32")):
        assert contest.make_recipe(WORKLOADS[NAME], name, graphs)["techniques"]["fused"] == {"weights": weights}


def find_obstacles(workload: str, device: torch.device = CPU) -> dict[str, str]:
    found = {name: contest.find_obstacle(WORKLOADS[workload], name, device) for name in CONTESTANTS}
    return {name: obstacle for name, obstacle in found.items() if obstacle}


def test_what_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert find_obstacles(NAME) == {"hf graphs": "CUDA graphs need a GPU", "hf liger": "Liger's kernels need a GPU"}
    assert find_obstacles(NAME, torch.device("cuda")) == {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "transformers" else None)
    assert find_obstacles(NAME, torch.device("cuda")) == {
        "hf liger": "Liger is not installed: pip install liger-kernel"
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = find_obstacles(NAME)
    assert list(missing) == [name for name in CONTESTANTS if "hf" in name]
    assert all("pip install transformers" in obstacle for obstacle in missing.values())


def test_a_model_that_stretto_has_not_is_for_hugging_faces_contestants(tmp_path: Path) -> None:
    none = "Stretto has no t5 of its own"
    obstacles = find_obstacles(T5, torch.device("cuda"))
    assert {name for name, obstacle in obstacles.items() if obstacle == none} == {"stretto", "stretto plain"}
    with pytest.raises(StrettoError, match="no contestant finished"):
        contest.run_bench([T5], ["plain"], CPU_ONLY, 2, tmp_path)
    results = json.loads((tmp_path / "bench.json").read_text())["workloads"][T5]["contestants"]
    assert results == {"stretto": {"skipped": none}, "stretto plain": {"skipped": none}}


def test_the_accelerated_one_runs_where_stretto_has_no_model(tmp_path: Path) -> None:
    job = contest.prepare(T5, "stretto hf", CPU_ONLY, tmp_path)
    result = contest.run_job(job, steps=2)
    assert result["tokens_per_s"] == pytest.approx(8 * 64 / (result["step_ms"] / 1e3)), result
    assert "decoder.final_layer_norm" in job.stem.with_suffix(".log").read_text()


def test_reasons_are_one_line() -> None:
    assert explain(OutOfMemoryError("memory is full: lower data.batch_size")) == "out of memory"
    assert explain(ValueError("first\nsecond")) == "ValueError: first" and explain(KeyError()) == "KeyError"


def numbers(speed: float) -> dict[str, Any]:
    parts = {"gemm": 40.123, "attention": 8.5, "optimizer": 1.25, "rest": 12.0, "idle": 0.0}
    return {"tokens_per_s": speed, "mfu": 0.4321, "memory_gib": 20.04, "breakdown_ms": parts, "floor_share": 0.871}


RESULTS: dict[str, Mapping[str, Any]] = {
    "stretto": numbers(600e3),
    "stretto hf": numbers(500e3),
    "stretto plain": numbers(300e3),
    "hf eager": numbers(200e3),
    "hf compile": numbers(400e3),
    "hf graphs": {"failed": "out of memory"},
}


def test_ratios_are_to_the_best_peer_of_this_run() -> None:
    ratios = {name: result.get("ratio_to_best_peer") for name, result in with_ratios(RESULTS).items()}
    ours = {"stretto": 1.5, "stretto hf": 1.25, "stretto plain": 0.75}  # none of them is a peer
    assert ratios == ours | {"hf eager": 0.5, "hf compile": 1.0, "hf graphs": None}
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


def test_the_chart_tells_ours_from_peers_by_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, save = list[Figure](), Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_chart(tmp_path / "chart.png", {NAME: RESULTS}, [])
    ((axes,),) = (figure.axes for figure in figures)
    colours = {name: bar.get_facecolor() for name, bar in zip(RESULTS, axes.patches, strict=True)}
    assert colours["hf eager"] == colours["hf compile"] == colours["hf graphs"]
    assert len({colours[name] for name in ("stretto", "stretto hf", "hf eager")}) == 3
