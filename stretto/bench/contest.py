"""All contestants on all workloads, one after another, each in a process of its own. One that fails is reported with
its reason and the rest go on; Ctrl-C keeps what is finished.

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
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from stretto.bench.peers import MODES
from stretto.bench.show import Results, describe_result, draw_chart, print_table, say, with_ratios
from stretto.bench.workloads import WORKLOADS, Workload, fit_to_device
from stretto.config import PRESETS, Config, TechniquesConfig, build_config, dump_config, load_config
from stretto.errors import ConfigError, StrettoError
from stretto.runtime import Runtime, choose_device, describe_environment

LIMIT_S = 1800.0  # a contestant that takes longer is stopped
FUSED = ("stretto", "stretto hf")
OFF = {section.name: False for section in fields(TechniquesConfig)}
LEARNING_RATE = 1e-4  # low enough for every model to stay finite on random data
TINY = "On a CPU: tiny models and batches instead of the named ones. These numbers say nothing about a GPU."

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
    names = {word: f"stretto {word}" for word in ("hf", "plain")} | {mode: f"hf {mode}" for mode in MODES}
    unknown = [word for word in against if word not in names]
    if unknown:
        raise ConfigError(f"--against {unknown[0]}: must be some of {', '.join(names)}, with commas between them")
    return ["stretto", *(name for word, name in names.items() if word in against)]


def prepare(name: str, contestant: str, overrides: Sequence[str], out: Path) -> Job:
    """Writes the contestant's recipe."""
    stem = out / name / contestant.replace(" ", "-")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be a folder: {error.strerror}") from error
    # The others use no techniques, and train.graphs is an option of our own training loop alone.
    foreign = {"stretto": (), "stretto hf": ("train.graphs",)}.get(contestant, ("techniques.", "train.graphs"))
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
        # Weights and moments in 16 bits, as the others then have them; and where those count, so do activations.
        lean = {"weights": "bf16", "moments": "bf16", "recompute": True}
        exact = {"weights": "split" if graphs else "fp32"}  # a CPU computes in fp32
        recipe["techniques"] |= {"fused": lean if workload.bf16_weights else exact}
        recipe["train"] = {"graphs": "on" if graphs and contestant == "stretto" else "off"}
    return recipe


def find_obstacle(workload: Workload, contestant: str, device: torch.device) -> str:
    """Says why a contestant cannot run here; empty if it can."""
    if workload.own and "hf" not in contestant:
        return f"Stretto has no {workload.own['model_type']} of its own"
    if "hf" in contestant and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers"
    if contestant == "hf graphs" and device.type == "cpu":
        return "CUDA graphs need a GPU"
    return ""


def run_job(job: Job, steps: int) -> dict[str, Any]:
    recipe, log, result = (job.stem.with_suffix(suffix) for suffix in (".toml", ".log", ".json"))
    result.unlink(missing_ok=True)
    arguments = [job.workload, job.contestant, str(steps), str(recipe), str(result)]
    command = [sys.executable, "-m", "stretto.bench.worker", *arguments]
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
