"""The command line: parse, call, exit code. Options live in recipes; everything heavy is imported when needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from stretto.config import Config
from stretto.errors import CheckpointError, ConfigError, Preempted, StrettoError, tell
from stretto.hardware import choose_hardware, read_hardware
from stretto.signals import stop_early

ABLATE_STEPS = 20
app = typer.Typer(
    help="Trains Transformers faster on the GPUs you have.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
Run = Annotated[Path, typer.Argument(help="a run folder")]
Recipe = Annotated[str, typer.Argument(help="a TOML file, the name of a shipped recipe, or a run folder")]
Override = Annotated[list[str], typer.Option("--set", help="override a key: section.key=value")]


T = TypeVar("T")


def _refuse_path(path: Path | None) -> Path | None:
    """Says at once that a file cannot be written, and not when all is done."""
    if path is not None and not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"{path.parent} is no folder that can be written to")
    return path


def _file(help: str) -> Any:
    """An option that names a file to be written."""
    return typer.Option(help=help, dir_okay=False, writable=True, callback=_refuse_path)


def say_version(wanted: bool) -> None:
    from stretto.version import __version__

    if wanted:
        typer.echo(f"stretto {__version__}")
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", callback=say_version, is_eager=True, help="Say which version this is.")
]


@app.callback()
def begin(version: Version = False) -> None:
    """Options in front of the command; `--version` has been answered by now."""


@app.command()
def train(
    recipe: Recipe,
    override: Override = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint, if any")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="first choose what `stretto plan` would for this machine: the same training")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="then find out what each technique contributes, by short runs without it")
    ] = False,
) -> None:
    """Train what a recipe says; under `stretto launch` or torchrun, on several processes. A run folder goes on with
    `--resume`."""
    from stretto.recipes import load_recipe

    config = load_recipe(recipe, override)  # before torch is imported: mistakes answer at once
    if plan:
        config = _choose_plan(config, resume)
    if ablate and not config.report.ablate:
        config = replace(config, report=replace(config.report, ablate=ABLATE_STEPS))
    if config.report.ablate:
        from stretto.bench.ablate import train_and_ablate as run
    else:
        from stretto.train import train as run
    run(config, resume)


def _choose_plan(config: Config, resume: bool) -> Config:
    """A run that goes on stays as it was planned."""
    from stretto.planning.search import keep_plan, plan_run
    from stretto.recipes import load_recipe
    from stretto.runtime import choose_device

    if resume and (Path(config.run.dir) / "config.toml").exists():
        return keep_plan(config, load_recipe(config.run.dir))
    gpu = choose_device(config.run.device).type == "cuda"
    config, chosen = plan_run(config, int(os.environ.get("WORLD_SIZE", "1")), gpu)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(chosen)
    return config


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    command: Annotated[list[str], typer.Argument(help="what to run, such as: train RECIPE --resume")],
    processes: Annotated[int, typer.Option("-n", "--processes", min=1, help="on this machine: one for each GPU")],
    restarts: Annotated[int, typer.Option(min=0, help="how often to start again what was killed or lost")] = 0,
    machines: Annotated[int, typer.Option(min=1, help="that run this command")] = 1,
    machine: Annotated[int, typer.Option(min=0, help="the number of this one, from 0")] = 0,
    meet: Annotated[str, typer.Option(help="several machines: HOST:PORT of machine 0")] = "",
) -> None:
    """Run a command in several processes; exit with the code of the one that failed first."""
    if machine >= machines:
        raise typer.BadParameter(f"--machines {machines} are numbered from 0 to {machines - 1}", param_hint="--machine")
    from stretto.launch import launch as run

    raise typer.Exit(run(command, processes, restarts, machines, machine, meet))


@app.command("data")
def prepare(
    recipe: Recipe,
    override: Override = [],  # noqa: B006
) -> None:
    """Tokenise the data of a recipe once, into the folder data.cache. After a stop, the same command goes on."""
    from stretto.recipes import load_recipe

    config = load_recipe(recipe, override)
    from stretto.data import prepare_data

    typer.echo(prepare_data(config.data, config.run.seed))
    typer.echo(config.data.cache)


@app.command("eval")
def evaluate_run(
    run: Run,
    data: Annotated[str, typer.Option(help="other data instead of the run's, in any form that data.train has")] = "",
    batches: Annotated[int, typer.Option(min=0, help="most batches to measure the loss on; 0: all")] = 0,
    beam: Annotated[int, typer.Option(min=1, help="translation: beams per sentence")] = 4,
) -> None:
    """Measure a trained run: loss, and BLEU or accuracy where the task has them."""
    from stretto.score import measure

    scores = measure(run, beam, data, batches)
    counts = [scores.pop(name) for name in ("batches", "all_batches", "batches_while_training")]
    trained = "" if data else f"; evaluations while it was trained: over {counts[2]}"
    typer.echo(f"batches: {counts[0]} of {counts[1]}{trained}")
    for name, value in scores.items():
        typer.echo(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")


@app.command()
def generate(
    run: Run,
    prompt: Annotated[
        str, typer.Option(help="what to continue or translate; masked language models: with [MASK] for words to find")
    ] = "",
    input: Annotated[
        Path | None, typer.Option(help="a text file with one prompt a line; an image or a folder of them")
    ] = None,
    max_new: Annotated[int, typer.Option(min=0, help="language models: most new tokens")] = 400,
    temperature: Annotated[float, typer.Option(min=0, help="language models: 0 takes the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="tokens to sample from (40), or labels and words to print (5)")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="language models: of those, the fewest that have this share")
    ] = 1.0,
    beam: Annotated[int, typer.Option(min=1, help="translation: 1 is greedy")] = 4,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
) -> None:
    """Let a trained run write, fill in words, translate or label."""
    from stretto.generate import produce
    from stretto.runtime import choose_device
    from stretto.trained import load_trained

    trained = load_trained(run, choose_device())
    for line in produce(trained, prompt, input, max_new, temperature, top_k, beam, seed, top_p):
        typer.echo(line)


@app.command()
def check(run: Run) -> None:
    """Verify a run folder: its checkpoints, which one a resumed run takes, and how the last attempt ended."""
    from stretto.check import check_run

    found = check_run(run)
    for line in found.lines:
        typer.echo(line)
    if found.obstacles:
        raise CheckpointError("; ".join(found.obstacles))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="a run folder; several are compared on one page")],
    out: Annotated[
        Path | None, _file("where the page goes: RUN/report.html, or comparison.html here for several runs")
    ] = None,
) -> None:
    """Write the page of a run anew, or a page that compares several runs."""
    from stretto.report.ablation import explain_ablation
    from stretto.report.compare import COMPARISON, write_comparison
    from stretto.report.page import write_report
    from stretto.runtime import choose_device

    path = write_report(runs[0], choose_device(), out) if len(runs) == 1 else None
    typer.echo(path or write_comparison(runs, out or Path(COMPARISON)))
    for line in explain_ablation(runs[0]) if path else ():
        typer.echo(line)


@app.command()
def watch(run: Run) -> None:
    """Show in the terminal how a run goes on; Ctrl-C ends the watching, not the run."""
    from stretto.report.watch import watch as follow

    follow(run)


@app.command()
def replay(run: Run, step: Annotated[int, typer.Option("--step", min=1, help="which step, counted from 1")]) -> None:
    """Execute a step of a run once more and compare: loss, norm, and the weights where they were saved."""
    from stretto.replay import replay as replay_step

    for line in replay_step(run, step):
        typer.echo(line)


@app.command()
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="where to: a new folder, or an empty one")],
    to: Annotated[Literal["hf"], typer.Option("--to", help="hf: what `from_pretrained` of transformers loads")] = "hf",
    step: Annotated[int | None, typer.Option(min=1, help="of this checkpoint; without it, of the best one")] = None,
    fold: Annotated[
        bool,
        typer.Option(
            "--fold",
            help="write a run folder instead, for `stretto eval` and `stretto generate`: of a run that was trained to "
            "need no norms, the plain model without them",
        ),
    ] = False,
) -> None:
    """Write a trained run as a Hugging Face folder, tokenizer included; or one without norms, for Stretto itself."""
    import torch

    from stretto.convert.folder import write_folder
    from stretto.trained import load_trained, write_folded

    trained = load_trained(run, torch.device("cpu"), step)
    if fold:
        write_folded(folder, trained)
    else:
        write_folder(folder, trained.model, trained.tokenizer, trained.labels, trained.chat)
    typer.echo(f"{folder}: step {trained.step} of {run}" + f", {trained.weights}" * bool(trained.weights))


@app.command()
def plan(
    recipe: Recipe,
    override: Override = [],  # noqa: B006
    gpu: Annotated[
        str, typer.Option(help="what to plan for, such as h200 or 8xh100, or cpu; without it, this machine's GPUs")
    ] = "",
    approximate: Annotated[
        bool, typer.Option("--approximate", help="allow what changes the mathematics of training, too")
    ] = False,
    out: Annotated[Path | None, _file("write the chosen recipe to this TOML file")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="run the best few here, and rank anew")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="instead: the bytes of a training step, by role")] = False,
    gpu_memory: Annotated[
        str, typer.Option(help="--memory: of a card, such as 16GiB, unless --gpu says it: which batch fits into it")
    ] = "",
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="instead: time and bytes of the model cut over devices")
    ] = False,
) -> None:
    """Say how a recipe trains fastest on given GPUs, without running it: batch, memory, layout and techniques."""
    from stretto.recipes import load_recipe

    config = load_recipe(recipe, override)
    if memory or pipeline or gpu_memory:
        others = {"--approximate": approximate, "--out": out, "--measure": measure}
        _refuse(others, "it does not go with --memory or --pipeline")
        if not memory:
            _refuse({"--gpu-memory": gpu_memory, "--gpu": gpu}, "it is the card of --memory: add that")
        _explain_needs(config, memory, gpu_memory, gpu, pipeline)
        return
    from stretto.planning.search import make_plan
    from stretto.planning.table import show

    found = make_plan(config, _read(gpu, choose_hardware, "--gpu"), approximate)
    if measure:
        from stretto.planning.probe import measure_plan

        found = measure_plan(found)
    show(found, recipe, out)


def _refuse(options: Mapping[str, object], reason: str) -> None:
    for name, value in options.items():
        if value:
            raise typer.BadParameter(reason, param_hint=name)


def _read(text: str, read: Callable[[str], T], option: str) -> T:
    """What an option says; a wrong one is an error of the command line."""
    try:
        return read(text)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _explain_needs(config: Config, memory: bool, gpu_memory: str, gpu: str, pipeline: bool) -> None:
    from stretto.parallel.pipeline_costs import explain_pipeline
    from stretto.plan import explain_memory, for_device
    from stretto.values import read_bytes

    limit = _read(gpu_memory, read_bytes, "--gpu-memory") if gpu_memory else 0
    if gpu:
        card = _read(gpu, read_hardware, "--gpu")
        config, limit = for_device(config, card.is_gpu), limit or card.memory
    for line in (*(explain_memory(config, limit) if memory else ()), *(explain_pipeline(config) if pipeline else ())):
        typer.echo(line)


@app.command()
def numerics(
    recipe: Recipe,
    override: Override = [],  # noqa: B006
    out: Annotated[Path | None, _file("where the picture goes, an SVG file")] = None,
    processes: Annotated[int, typer.Option(min=1, help="that share each step")] = 1,
    probe: Annotated[bool, typer.Option("--probe", help="measure the sums of this machine's 8-bit products")] = False,
) -> None:
    """Say how long the sums of a training step are, and what they would lose in 8 bits."""
    from stretto.numerics.survey import draw_sums, explain_sums, list_sums
    from stretto.recipes import load_recipe

    sums, notes = list_sums(load_recipe(recipe, override), processes)
    for line in (*notes, *explain_sums(sums)):
        typer.echo(line)
    if out is not None:
        from stretto.files import write_text
        from stretto.report.style import EVAL, INK, STYLE, TRAIN

        write_text(out, draw_sums(sums, STYLE, (TRAIN, EVAL, INK)))
        typer.echo(out)
    if probe:
        from stretto.numerics.probe import explain, measure, multiply_on_gpu

        for fast in (False, True):
            typer.echo(f"use_fast_accum={fast}: {explain(measure(multiply_on_gpu(fast)))}")


@app.command()
def bench(
    workloads: Annotated[list[str] | None, typer.Argument(help="names, or all; without any, they are listed")] = None,
    against: Annotated[
        str,
        typer.Option(
            help="fp8: Stretto with products of 8 bits; hf: Hugging Face's model by stretto.accelerate, "
            "hf-fp8: with products of 8 bits, too; plain: Stretto "
            "without techniques, compiled; eager, compile, graphs: Hugging Face's model as it is; liger: with "
            "Liger-Kernel's modules; checkpoint: layers computed again; '': nobody"
        ),
    ] = "hf,plain,eager,compile,graphs,liger",
    out: Annotated[Path, typer.Option(help="where numbers, chart and logs go")] = Path("runs/bench"),
    steps: Annotated[int, typer.Option(min=1, help="to time, after warm-up")] = 40,
    override: Override = [],  # noqa: B006
) -> None:
    """Time training steps next to Hugging Face's, on this machine."""
    from stretto.bench.workloads import WORKLOADS, find_workloads

    if not workloads:
        for name, workload in WORKLOADS.items():
            typer.echo(f"{name:29} {workload.shows}")
        return
    names = find_workloads(workloads)  # before torch is imported
    from stretto.bench.contest import run_bench

    run_bench(names, [mode for mode in against.split(",") if mode], override, steps, out)


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    from stretto.recipes import list_recipes

    for name, line in list_recipes().items():
        typer.echo(f"{name:14} {line}")


@app.command("config")
def show_config(
    recipe: Annotated[str, typer.Argument(help="as for `stretto train`; without it, the defaults")] = "",
    override: Override = [],  # noqa: B006
) -> None:
    """Print every option with its meaning, its choices and its default, as a recipe that can be loaded."""
    from stretto.options import explain_config
    from stretto.recipes import load_recipe

    typer.echo(explain_config(load_recipe(recipe or {}, override)), nl=False)


def main() -> None:
    _replace_closed_streams()
    if sys.argv[1:2] == ["train"]:
        stop_early()
    try:
        _refuse_bytes(sys.argv)
        app()
    except StrettoError as error:
        # A mistake in a recipe is the same in all processes, and so is a stop: one on each machine says it.
        is_common = isinstance(error, ConfigError | Preempted) and os.environ.get("LOCAL_RANK", "0") != "0"
        if not error.told and not is_common:
            tell(str(error))
        sys.exit(error.exit_code)
    finally:
        _drop_unwritten_output()


def _refuse_bytes(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{argument!a} in the command line is not UTF-8") from error


def _replace_closed_streams() -> None:
    """Gives a command that was started with `>&-`, and has no stdout at all, one that goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _drop_unwritten_output() -> None:
    """Drops what could not be written, since the reader is gone or the disk is full: it would fail again when Python
    ends, and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
