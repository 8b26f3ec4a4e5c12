"""All contestants on all workloads, one after another, each in a process of its own, and their results: a table per
workload, ratios to the best peer of the same run, JSON and a chart. A contestant that fails is reported with its reason
and the rest go on; Ctrl-C keeps what is finished.

A contestant is a recipe: the workload's model, what the contestant adds to it, then the overrides. The folder keeps
it, resolved, next to the log and the numbers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stretto.bench.peers import MODES
from stretto.bench.workloads import WORKLOADS, Workload, fit_to_device
from stretto.config import Config, TechniquesConfig, build_config, dump_config, load_config
from stretto.errors import ConfigError, StrettoError
from stretto.files import make_folder
from stretto.presets import PRESETS
from stretto.report.style import EVAL, INK, STYLE, TRAIN
from stretto.runtime import Runtime, choose_device, describe_environment

LIMIT_S = 1800.0  # a contestant that takes longer is stopped
ACCELERATED = ("stretto hf", "stretto hf fp8")
FUSED = ("stretto", "stretto fp8", *ACCELERATED)
OFF = {section.name: False for section in fields(TechniquesConfig)}
LEARNING_RATE = 1e-4  # low enough for every model to stay finite on random data
NEED_GPU = {
    "stretto fp8": "8-bit products",
    "stretto hf fp8": "8-bit products",
    "hf graphs": "CUDA graphs",
    "hf liger": "Liger's kernels",
}
TINY = "On a CPU: tiny models and batches instead of the named ones. These numbers say nothing about a GPU."

Result = Mapping[str, Any]  # numbers, or {"failed": reason}, or {"skipped": reason}
Results = dict[str, dict[str, Result]]  # workload -> contestant -> result
BREAKDOWN = {"gemm": "GEMM", "attention": "attn", "optimizer": "optim", "rest": "rest", "idle": "idle"}
CAPTION = "ratio: to the best peer; GEMM to idle: ms a step; floor: its share of the step"

_DATA: dict[str, dict[str, Any]] = {
    "decoder": {"task": "causal"},
    "encoder": {"task": "masked"},
    "encoder-decoder": {"task": "translation", "languages": ["en", "de"]},
    "vit": {"task": "images"},
}


@dataclass(frozen=True)
class Job:
    """One contestant on one workload; its files are `stem` with .toml, .log and .json."""

    workload: str
    contestant: str
    stem: Path
    device: torch.device
    obstacle: str  # why it cannot run here; empty if it can


def run_bench(names: Sequence[str], against: Sequence[str], overrides: Sequence[str], steps: int, out: Path) -> Path:
    """Runs it all, prints a table per workload, and saves numbers and chart in `out`; returns the JSON file."""
    contestants = choose_contestants(against)
    # All recipes first: a mistake in an override answers before anything has run.
    jobs = {name: [prepare(name, one, overrides, out) for one in contestants] for name in names}
    device = next(iter(jobs.values()))[0].device
    facts = describe_run(device, steps, overrides)
    console, results, path = Console(highlight=False), Results(), out / "bench.json"
    if facts["note"]:
        say(console, facts["note"])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal
    with Progress(SpinnerColumn(), *columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=len(jobs) * len(contestants))
        for name, some in jobs.items():
            results[name] = {}
            try:
                for job in some:
                    bar.update(task, description=f"{name}: {job.contestant}")
                    result = {"skipped": job.obstacle} if job.obstacle else run_job(job, steps)
                    results[name][job.contestant] = result
                    say(console, f"{name}: {job.contestant}: {describe_result(result)}")
                    bar.advance(task)
            finally:  # what an interrupt leaves is shown and saved, too
                print_table(console, name, results[name])
                save(path, results, facts)
    say(console, f"numbers: {path}; chart: {path.with_suffix('.png')}")
    if not any("tokens_per_s" in result for some in results.values() for result in some.values()):
        raise StrettoError(f"no contestant finished; their logs are in {out}")
    return path


def choose_contestants(against: Sequence[str]) -> list[str]:
    own = {"fp8": "stretto fp8", "hf": "stretto hf", "hf-fp8": "stretto hf fp8", "plain": "stretto plain"}
    names = own | {mode: f"hf {mode}" for mode in MODES}
    unknown = [word for word in against if word not in names]
    if unknown:
        raise ConfigError(f"--against {unknown[0]}: must be some of {', '.join(names)}, with commas between them")
    return ["stretto", *(name for word, name in names.items() if word in against)]


def prepare(name: str, contestant: str, overrides: Sequence[str], out: Path) -> Job:
    """Writes the contestant's recipe."""
    stem = out / name / contestant.replace(" ", "-")
    make_folder("--out", stem.parent)
    # The others use no techniques, and train.graphs is an option of our own training loop alone. Options of 8-bit
    # products are for the contestant that has them.
    foreign = {"stretto": ("techniques.fp8.",), "stretto fp8": (), **dict.fromkeys(ACCELERATED, ("train.graphs",))}.get(
        contestant, ("techniques.", "train.graphs")
    )
    overrides = [override for override in overrides if not override.startswith(foreign)]

    def resolve(workload: Workload, graphs: bool) -> Config:
        path = stem.with_suffix(".toml")
        path.write_text(dump_config(build_config(make_recipe(workload, contestant, graphs))), encoding="utf-8")
        config = load_config(path, overrides)
        path.write_text(dump_config(config), encoding="utf-8")
        return config

    config = resolve(WORKLOADS[name], graphs=False)
    device = choose_device(config.run.device)
    graphs = device.type == "cuda" and config.techniques.fused is not None
    resolve(fit_to_device(WORKLOADS[name], device.type), graphs)
    return Job(name, contestant, stem, device, find_obstacle(WORKLOADS[name], contestant, device))


def make_recipe(workload: Workload, contestant: str, graphs: bool = False) -> dict[str, Any]:
    """Makes a contestant's recipe. Without techniques the model is compiled; with techniques it has its own kernels,
    launched by CUDA graphs, and fp32 weights in two halves: exact, and not cast for each product."""
    data = _DATA[PRESETS[workload.model["preset"]]["kind"]]
    recipe = {"model": workload.model, "data": data, "optim": {"lr": LEARNING_RATE}, "train": {"compile": True}}
    recipe["techniques"] = dict(OFF)
    if contestant in FUSED:
        recipe["techniques"] |= {"fused": {"weights": "split" if graphs else "fp32"}}  # a CPU computes in fp32
        if workload.bf16_weights:
            # Weights and moments in 16 bits, as the others then have them; and where those count, so do activations.
            small = {"weights": "bf16", "moments": "bf16"}
            recipe["techniques"] |= {"fused": small, "lean": {"norms": "input"}}
        if contestant == "stretto fp8":
            recipe["techniques"] |= {"fp8": True}
        recipe["train"] = {"graphs": "on" if graphs and contestant not in ACCELERATED else "off"}
    return recipe


def find_obstacle(workload: Workload, contestant: str, device: torch.device) -> str:
    """Says why a contestant cannot run here; empty if it can."""
    if workload.own and "hf" not in contestant:
        return f"Stretto has no {workload.own['model_type']} of its own"
    if "hf" in contestant and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers"
    if contestant == "hf liger" and importlib.util.find_spec("liger_kernel") is None:
        return "Liger is not installed: pip install liger-kernel"
    if contestant in NEED_GPU and device.type == "cpu":
        return f"{NEED_GPU[contestant]} need a GPU"
    return ""


def run_job(job: Job, steps: int) -> dict[str, Any]:
    arguments = [job.workload, job.contestant, str(steps), str(job.stem.with_suffix(".toml"))]
    return run_apart("stretto.bench.worker", arguments, job.stem)


def run_apart(module: str, arguments: Sequence[str], stem: Path) -> dict[str, Any]:
    """Runs a module in a process of its own; returns what it writes to the file that is its last argument."""
    log, result = (stem.with_suffix(suffix) for suffix in (".log", ".json"))
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, *arguments, str(result)]
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT_S:.0f} s; see {log}"}
    if not result.exists():
        return {"failed": f"the process ended with code {done.returncode}; see {log}"}
    numbers: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return numbers


def save(path: Path, results: Results, facts: dict[str, Any]) -> None:
    workloads = {name: {"shows": WORKLOADS[name].shows, "contestants": with_ratios(results[name])} for name in results}
    path.write_text(json.dumps(facts | {"workloads": workloads}, indent=1), encoding="utf-8")
    draw_chart(path.with_suffix(".png"), results, [facts["environment"]["device"], facts["note"]])


def describe_run(device: torch.device, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    environment = describe_environment(Runtime(device)) | {name: _version(name) for name in ("triton", "transformers")}
    environment |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit()}
    note = TINY if device.type == "cpu" else ""
    return {"environment": environment, "note": note, "steps": steps, "overrides": list(overrides)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of this code, if this code is a checkout and git is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def with_ratios(results: Mapping[str, Result]) -> dict[str, Result]:
    """Adds to the results of one workload each speed over that of the best peer."""
    speeds = {name: result["tokens_per_s"] for name, result in results.items() if "tokens_per_s" in result}
    best = max((speed for name, speed in speeds.items() if is_peer(name)), default=None)
    ratios = {} if best is None else {name: {"ratio_to_best_peer": speed / best} for name, speed in speeds.items()}
    return {name: {**result, **ratios.get(name, {})} for name, result in results.items()}


def is_peer(name: str) -> bool:
    return name.startswith("hf ")


def describe_result(result: Result) -> str:
    if "tokens_per_s" in result:
        return f"{result['tokens_per_s']:,.0f} tokens/s, {result['memory_gib']:.1f} GiB"
    return next(f"{kind}: {reason}" for kind, reason in result.items())


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def print_table(console: Console, workload: str, results: Mapping[str, Result]) -> None:
    """Prints a table that fits 80 columns. A contestant without numbers has its reason below the table."""
    finished = {name: result for name, result in with_ratios(results).items() if "tokens_per_s" in result}
    if finished:
        say(console, f"\n{workload} ({CAPTION})")
        table = Table("", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("tokens/s", "MFU", "GiB", "ratio", *BREAKDOWN.values(), "floor"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, result in finished.items():
            times = result.get("breakdown_ms", {})
            table.add_row(
                name,
                f"{result['tokens_per_s']:,.0f}",
                _show(result["mfu"], ".3f"),
                _show(result["memory_gib"], ".1f"),
                _show(result.get("ratio_to_best_peer"), ".2f"),
                *(_show(ms, ".1f" if ms and ms >= 10 else ".2f") for ms in map(times.get, BREAKDOWN)),
                _show(result["floor_share"], ".2f"),
            )
        console.print(table)
    for name, result in results.items():
        if name not in finished:
            say(console, f"{name}: {describe_result(result)}")


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def draw_chart(path: Path, results: Results, notes: Sequence[str]) -> None:
    """Draws a panel per workload: a bar per contestant, with its speed or the reason why it has none."""
    import matplotlib
    from matplotlib.figure import Figure

    bars = [len(some) for some in results.values()]
    style = STYLE | {"savefig.facecolor": "white", "axes.grid": False, "axes.spines.bottom": False, "font.size": 10}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 0.5 + sum(0.28 * count + 0.6 for count in bars)), layout="constrained")
        figure.suptitle("\n".join(note for note in notes if note), x=0.01, ha="left", fontsize=9)
        panels = figure.subplots(len(bars), squeeze=False, height_ratios=[count + 1 for count in bars])[:, 0]
        for axes, (workload, some) in zip(panels, results.items(), strict=True):
            speeds = [result.get("tokens_per_s", 0.0) for result in some.values()]
            colours = [INK if is_peer(name) else TRAIN if name == "stretto" else EVAL for name in some]
            drawn = axes.barh(list(some), speeds, color=colours)
            axes.bar_label(drawn, [describe_result(result) for result in some.values()], padding=4)
            axes.set_xlim(0, max([*speeds, 1e-9]) * 1.5)
            axes.set_xticks([])
            axes.invert_yaxis()
            axes.set_title(workload, loc="left", fontsize=10, fontweight="bold")
        figure.savefig(path, dpi=150)
