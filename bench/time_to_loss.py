"""Loss against time and against FLOPs: what a technique that changes the mathematics is worth.

    python -m bench.time_to_loss prepare runs/python            text, tokenizer and tokens, without a GPU
    python -m bench.time_to_loss run gpt2-small bert-base --data runs/python --out runs/time-to-loss

Every variant of a recipe is an ordinary run of `stretto.train` on the same batches, with several seeds. All are
compared by their loss on held-out text with every block at work. `smaller` is the plain model with as many layers as
cost what `layer_drop` costs on average: who saves work has to be better than a model that has less to do.

Seconds are those of the steps alone. Between two log lines a run does some FLOPs; their time is FLOPs over speed, and
speed is the median of the log lines around, so that compiling and other accidents do not count. Recording of CUDA
graphs, evaluating and starting do not count either, but are shown. docs/time-to-loss.md says how to read the tables.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import math
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.curves import Curve, Result, Row, compare, draw_curves, make_tables, read_curve
from stretto import files
from stretto.bench.contest import say
from stretto.config import (
    Config,
    Fp8Config,
    LayerDropConfig,
    ModelConfig,
    StandardizeConfig,
    TechniquesConfig,
    dump_config,
    load_config,
)
from stretto.data import Data, open_data
from stretto.errors import ConfigError, Preempted, StrettoError
from stretto.flops import training_flops
from stretto.mesh import Mesh
from stretto.model import build_model, sites
from stretto.recipes import find_recipe
from stretto.report import read_events
from stretto.runtime import Runtime, choose_device, describe_environment
from stretto.techniques import open_techniques
from stretto.techniques.technique import At, Context
from stretto.train import complete, train

RECIPES = Path(__file__).parent / "recipes"
VARIANTS = (
    "plain",  # the recipe without any technique that changes the mathematics
    "layer_drop",  # blocks are left out for whole steps, more and more of them
    "layer_drop_sample",  # the same, for a part of the sequences in each step
    "raptr",  # blocks are left out at first, none at the end
    "smaller",  # plain, with fewer layers: as costly as layer_drop
    "standardize",  # a loss in the place of norms
    "rmsnorm",  # plain, with another norm
    "fp8",  # products of 8 bits, where they pay
)
NUM_LOGS, NUM_EVALS = 150, 20  # in a run
SHARDS = 100  # text files that `prepare` writes
RESULT = "result.json"

Schedule = Literal["constant", "cosine", "linear", "inverse_sqrt"]
app = typer.Typer(
    help="What a technique that changes the mathematics is worth: loss against time and FLOPs.", no_args_is_help=True,
    add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


@app.command()
def prepare(
    folder: Annotated[Path, typer.Argument(help="where to; it is what `run --data` takes")],
    megabytes: Annotated[float, typer.Option(min=0.01, help="of text")] = 32.0,
) -> None:
    """Write text, tokenizer and tokens: Python source of the standard library and the installed packages."""
    write_text(folder / "text", find_sources(), megabytes)
    for path in sorted(RECIPES.glob("*.toml")):
        config = use_data(load_config(path), folder)
        with tempfile.TemporaryDirectory() as elsewhere:  # runs have a copy of the tokenizer, the cache has its own
            print(f"{path.stem}: {open_data(config.data, seed=0, folder=Path(elsewhere)).describe()}", flush=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB")


def find_sources() -> dict[str, bytes]:
    """Finds source files by their hash: no file comes twice, and the order of hashes mixes them well."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = {}
    for root in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}:
        for path in Path(root).rglob("*.py"):
            if skipped.isdisjoint(path.relative_to(root).parts) and 500 <= path.stat().st_size <= 100_000:
                text = path.read_bytes()
                found[hashlib.sha256(text).hexdigest()] = text
    return found


def write_text(folder: Path, sources: Mapping[str, bytes], megabytes: float) -> None:
    """Files are dealt out to shards; the last of these are what evaluation holds out."""
    shards: list[list[bytes]] = [[] for _ in range(SHARDS)]
    size = 0
    for number, name in enumerate(sorted(sources)):
        shards[number % SHARDS].append(sources[name])
        size += len(sources[name])
        if size >= 1e6 * megabytes:
            break
    folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(shards):
        text = b"\n".join(texts).decode(errors="replace").encode()
        (folder / f"{number:03d}.py.gz").write_bytes(gzip.compress(text, mtime=0))


@app.command("run")
def run_all(
    recipes: Annotated[list[str], typer.Argument(help="gpt2-small, bert-base, a TOML file or a shipped recipe")],
    data: Annotated[Path | None, typer.Option(help="what `prepare` wrote; without it, what the recipe says")] = None,
    out: Annotated[Path, typer.Option(help="for tables, curves, chart and runs")] = Path("runs/time-to-loss"),
    variants: Annotated[
        str, typer.Option(help=f"some of {', '.join(VARIANTS)}")
    ] = "plain,layer_drop,layer_drop_sample,raptr,smaller",
    seeds: Annotated[int, typer.Option(min=1, help="how many")] = 3,
    budget_steps: Annotated[int, typer.Option(min=0, help="of each run; 0: what the recipe says")] = 0,
    schedule: Annotated[
        Schedule,
        typer.Option(
            help="of the learning rate: only under a constant one, the middle of a run is a shorter run's end"
        ),
    ] = "constant",
    override: Annotated[list[str], typer.Option("--set", help="override a key: section.key=value")] = [],  # noqa: B006
) -> None:
    """Train each variant with each seed, one after another. Runs that are finished in `out` are not repeated."""
    chosen = choose_variants(variants)
    studies = []
    for name in recipes:
        path = RECIPES / f"{name}.toml"
        config = load_config(path if path.exists() else find_recipe(name), override)
        studies.append(plan(Path(name).stem, set_up(config, budget_steps, schedule, data), chosen, seeds, out))
    run_studies(studies, out)


def choose_variants(text: str) -> list[str]:
    chosen = [name for name in text.split(",") if name]
    unknown = [name for name in chosen if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--variants {unknown[0]}: must be some of {', '.join(VARIANTS)}, with commas between them")
    return [name for name in VARIANTS if name == "plain" or name in chosen]  # nothing is compared without a baseline


def set_up(config: Config, steps: int, schedule: Schedule, data: Path | None) -> Config:
    """Makes the configuration that all variants share."""
    steps = steps or config.train.steps
    log_every, eval_every = (max(steps // number, 1) for number in (NUM_LOGS, NUM_EVALS))
    config = replace(
        config,
        optim=replace(config.optim, schedule=schedule),
        train=replace(config.train, steps=steps, log_every=log_every, eval_every=eval_every),
        # One at each better evaluation would take longer than the steps between two of them.
        checkpoint=replace(config.checkpoint, every=0, keep=0),
    )
    return config if data is None else use_data(config, data)


def use_data(config: Config, folder: Path) -> Config:
    return replace(config, data=replace(config.data, train=str(folder / "text"), suffix=".py", cache=str(folder)))


@dataclass(frozen=True)
class Job:
    variant: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


@dataclass(frozen=True)
class Study:
    """One recipe in all its variants."""

    recipe: str
    note: str  # what is compared
    jobs: list[Job]
    results: dict[tuple[str, int], Result] = field(default_factory=dict)  # by variant and seed

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(job.variant for job in self.jobs))

    def curves(self) -> dict[str, list[Curve]]:
        """Returns the curves of all seeds, by variant."""
        finished = {key: result["curve"] for key, result in sorted(self.results.items()) if "curve" in result}
        return {name: [curve for (v, _), curve in finished.items() if v == name] for name in self.variants}

    def comparisons(self) -> list[dict[str, Row]]:
        """One for each seed with which every variant has been tried; without those that failed."""
        found = []
        for seed in sorted({job.seed for job in self.jobs}):
            tried = {v: self.results[v, seed] for v in self.variants if (v, seed) in self.results}
            finished = {v: result for v, result in tried.items() if "curve" in result}
            if len(tried) == len(self.variants) and "plain" in finished:
                found.append(compare(finished))
        return found


def plan(recipe: str, config: Config, variants: Sequence[str], num_seeds: int, out: Path) -> Study:
    """All runs of a recipe, with the results that are in `out` already."""
    store = out / recipe / "data"
    if not config.data.cache:
        config = replace(config, data=replace(config.data, cache=str(store)))
    data = open_data(config.data, seed=config.run.seed, folder=store, image_size=config.model.image_size)
    config = complete(config, data, Mesh())
    varied = {variant: vary(config, variant, data) for variant in variants}
    jobs = []
    for seed in range(num_seeds):
        for variant, one in varied.items():
            run = replace(one.run, seed=seed, dir=str(out / recipe / f"{variant}-{seed}"))
            jobs.append(Job(variant, seed, replace(one, run=run)))
    study = Study(recipe, describe(varied, data), jobs)
    study.results.update({(job.variant, job.seed): result for job in jobs if (result := find_result(job))})
    return study


def vary(config: Config, variant: str, data: Data) -> Config:
    """The recipe as this variant trains it; how much is dropped, how norms are replaced, and
    which products have 8 bits, it may say itself."""
    drop, standard = config.techniques.layer_drop or LayerDropConfig(), config.techniques.standardize
    exact = replace(config.techniques, layer_drop=None, standardize=None, fp8=None)
    changes: dict[str, TechniquesConfig] = {
        "layer_drop": replace(exact, layer_drop=replace(drop, schedule="decay", gate="batch")),
        "layer_drop_sample": replace(exact, layer_drop=replace(drop, schedule="decay", gate="sample")),
        "raptr": replace(exact, layer_drop=replace(drop, schedule="raptr", gate="batch")),
        "standardize": replace(exact, standardize=standard or StandardizeConfig(warmup=config.optim.warmup)),
        "fp8": replace(exact, fp8=config.techniques.fp8 or Fp8Config()),
    }
    model = config.model
    if variant == "smaller":
        model = shrink(config, data)
    elif variant == "rmsnorm":
        model = replace(model, norm="rmsnorm")
    return replace(config, model=model, techniques=changes.get(variant, exact))


def shrink(config: Config, data: Data) -> ModelConfig:
    """Takes the number of layers whose cost is nearest to that of layer_drop."""
    wanted, model = mean_flops(vary(config, "layer_drop", data), data), config.model
    plain = vary(config, "plain", data)
    ratio = model.decoder_layers / model.layers  # 0: as many as there are
    sizes = [replace(model, layers=n, decoder_layers=math.ceil(ratio * n)) for n in range(1, model.layers + 1)]
    return min(sizes, key=lambda size: abs(mean_flops(replace(plain, model=size), data) - wanted))


def mean_flops(config: Config, data: Data) -> float:
    """Returns the mean FLOPs of a micro-batch like the first one, with the blocks that the run will choose."""
    batch, model, steps = data.train_batch(0), build_model(config.model), config.train.steps
    context = Context(config.model, torch.device("cpu"), "fp32", seed=config.run.seed, steps=steps)
    techniques = open_techniques(config, context)
    techniques.apply(model, sites(model))
    depths = (techniques.prepare(batch, At(step, step)).depths for step in range(steps))
    return statistics.fmean(training_flops(config.model, batch.counts, one) for one in depths)


def describe(varied: Mapping[str, Config], data: Data) -> str:
    """What is equal, and how nearly the smaller model is."""
    config = varied["plain"]
    whole, shares = mean_flops(config, data), dict[str, float]()
    for name, one in varied.items():
        with suppress(ConfigError):  # a variant that cannot run says why when its turn comes
            shares[name] = mean_flops(one, data) / whole
    costs = ", ".join(f"{name} {share:.3f} ({varied[name].model.layers} layers)" for name, share in shares.items())
    return f"{config.train.steps:,} steps, {config.optim.schedule} learning rate. FLOPs of a step on average: {costs}."


def find_result(job: Job) -> Result | None:
    path = job.folder / RESULT
    if not path.exists():
        return None
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    if result["config"] != dump_config(job.config):
        raise ConfigError(f"{job.folder} is a run of another configuration: choose another --out, or delete it")
    return result


def run_studies(studies: Sequence[Study], out: Path) -> None:
    # This file, also while another one takes the place of sys.stdout.
    console = Console(file=sys.stdout, highlight=False)
    for study in studies:
        say(console, f"{study.recipe}: {study.note}")
    # A seed of all recipes before the next seed: whenever it is stopped, whole comparisons are there.
    jobs = sorted(((study, job) for study in studies for job in study.jobs), key=lambda pair: pair[1].seed)
    left = [(study, job) for study, job in jobs if (job.variant, job.seed) not in study.results]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as bar:
            task = bar.add_task("", total=len(jobs), completed=len(jobs) - len(left))
            for number, (study, job) in enumerate(left, len(jobs) - len(left) + 1):
                name = f"{study.recipe}, seed {job.seed}, {job.variant}"
                bar.update(task, description=name)
                study.results[job.variant, job.seed] = result = run_job(job)
                save(out, studies)
                bar.advance(task)
                say(console, f"{number}/{len(jobs)}  {name}: {describe_result(result)}")
    finally:  # what an interrupt leaves is saved and shown, too
        save(out, studies)
        print("\n".join(map(to_markdown, studies)))
        draw_curves(out / "time_to_loss.png", {study.recipe: study.curves() for study in studies})
        say(console, f"{out}: time_to_loss.json has the curves, .md these tables, .png the chart")


def run_job(job: Job) -> Result:
    """An ordinary run; what it prints goes to log.txt. One that fails has its reason for a result, and can be tried
    again."""
    shutil.rmtree(job.folder, ignore_errors=True)  # an interrupted run cannot be resumed
    job.folder.mkdir(parents=True)
    begin = time.perf_counter()
    try:
        with (job.folder / "log.txt").open("w", encoding="utf-8") as log, redirect_stdout(log):
            train(job.config)
    except Preempted:
        raise
    except StrettoError as error:
        return {"failed": str(error)}
    finally:
        gc.collect()  # models and the graphs that know them refer to each other: the next run needs their memory
    wall_s = time.perf_counter() - begin
    result = {"config": dump_config(job.config), "layers": job.config.model.layers, "wall_s": wall_s}
    result |= read_curve(read_events(job.folder))
    files.write_text(job.folder / RESULT, json.dumps(result))
    return result


def describe_result(result: Result) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    curve = result["curve"]
    return (
        f"loss {curve['loss'][-1]:.4f}; {curve['seconds'][-1]:.1f} s in steps, {result['recording_s']:.1f} s recording"
        f" graphs, {result['wall_s']:.1f} s in all"
    )


def to_markdown(study: Study) -> str:
    comparisons = study.comparisons()
    tables = ["", f"Finished seeds: {len(comparisons)}.", "", *make_tables(comparisons)] if comparisons else []
    failures = [f"{v}, seed {seed}: {describe_result(r)}" for (v, seed), r in study.results.items() if "failed" in r]
    return "\n".join([f"## {study.recipe}", study.note, *tables, "", *failures])


def save(out: Path, studies: Sequence[Study]) -> None:
    """Writes the file whole at any time: the process may be killed."""
    config = studies[0].jobs[0].config
    tree = {
        "environment": describe_environment(Runtime(choose_device(config.run.device))),
        "recipes": {
            study.recipe: {
                "note": study.note,
                "runs": [{"variant": v, "seed": seed} | result for (v, seed), result in study.results.items()],
                "tables": to_markdown(study).splitlines(),
            }
            for study in studies
        },
    }
    files.write_text(out / "time_to_loss.json", json.dumps(tree, indent=1))
    files.write_text(out / "time_to_loss.md", "\n".join(map(to_markdown, studies)))


def main() -> None:
    try:
        app()
    except StrettoError as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
