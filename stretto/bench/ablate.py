"""What each technique of a run contributes: short runs with all of them, and without each in turn.

A short run is a process of its own, with the recipe, the data and the first weights of the run. It makes the first
updates of the run and is evaluated; then it goes on with some of these batches, timed by measure.py. What it leaves is
in the folder `ablation` of the run; nothing else there is written to.

    python -m stretto.bench.ablate RUN STEPS WITHOUT RESULT
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from stretto import runtime
from stretto.average import use_means
from stretto.bench.contest import run_apart
from stretto.bench.measure import Contestant, Work, measure
from stretto.bench.worker import answer
from stretto.build import build
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.evaluate import evaluate
from stretto.execute import Executor
from stretto.files import make_folder, refuse_links
from stretto.given import Given
from stretto.mesh import build_mesh
from stretto.precision import PRECISIONS
from stretto.report.ablation import ALL, FOLDER, describe_result, explain_ablation, write_ablation
from stretto.report.page import write_report
from stretto.run import Run, start_from_folder
from stretto.runtime import Runtime
from stretto.techniques import load_all
from stretto.train import NOTHING, count_together, prepare_batches, take_step, train
from stretto.trained import load_run_config, open_run_data

TIMED = 4  # updates whose batches are timed, again and again


def train_and_ablate(config: Config, resume: bool = False, given: Given = NOTHING) -> Path:
    """Trains as stretto.train does, and then finds out what each technique contributed."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if given.model is not None or given.data is not None:
        raise ConfigError("report.ablate makes short runs by the recipe alone, which has no model= and data= of Python")
    if world > 1:
        raise ConfigError(
            f"report.ablate makes short runs of one process, and here are {world}: leave it out, and when the run is"
            " done call `stretto train RUN --resume --ablate` in one process"
        )
    folder = train(config, resume, given)
    ablate(folder)
    return folder


def ablate(folder: Path) -> None:
    """Makes the short runs of a run that is done, says what they found and writes it onto the page of the run."""
    config = load_run_config(folder)
    refuse_links(folder)
    place, steps, results = folder / FOLDER, config.report.ablate, dict[str, Any]()
    make_folder("run.dir", place)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what this process still keeps is not there for the others
    with runtime.start(config.run) as rt, rt.interruptible():
        for name in (ALL, *find_techniques(config, rt.device)):
            results[name] = run_apart("stretto.bench.ablate", [str(folder), str(steps), name], place / name)
            print(describe_result(name, results[name]), flush=True)
            write_ablation(folder, steps, results)
        print("\n".join(explain_ablation(folder)), flush=True)
        write_report(folder, rt.device)


def find_techniques(config: Config, device: torch.device) -> list[str]:
    """The names of the techniques that are on and can be off."""
    kinds = [cls for cls in load_all() if hasattr(config.techniques, cls.name)]
    return [cls.name for cls in kinds if cls.find_options(config, device) is not None]


def switch_off(config: Config, name: str) -> Config:
    return replace(config, techniques=replace(config.techniques, **{name: None})) if name != ALL else config


def run_shortly(folder: Path, steps: int, name: str) -> dict[str, Any]:
    """The numbers of a short run without this technique."""
    config = switch_off(load_run_config(folder), name)
    with TemporaryDirectory(prefix="stretto-") as scratch, runtime.start(config.run) as rt, rt.interruptible():
        return _learn_and_time(config, folder, steps, rt, Path(scratch))


def _learn_and_time(config: Config, folder: Path, steps: int, rt: Runtime, scratch: Path) -> dict[str, Any]:
    mesh = build_mesh(config.parallel, rt.device, rt.rank, rt.world)
    parts = build(config, rt, mesh)
    run = Run(config, open_run_data(config, folder, scratch), parts, rt, mesh)
    if config.model.init:
        start_from_folder(run)
    parts.executor.resume(0, lambda step: prepare_batches(run, step))
    updates = [prepare_batches(run, step) for step in range(steps)]
    counts = [count_together(run, batches) for batches in updates]
    timed = min(TIMED, steps)

    def learn(number: int) -> Tensor:
        batches = [(at, batch.to(rt.device)) for at, batch in updates[number]]
        _, loss_sum, _ = take_step(run, number, batches, counts[number])
        return loss_sum / counts[number][0]

    for number in range(steps):
        learn(number)
    precision, some = parts.update.precision, config.train.eval_batches
    with use_means(parts.update.average, parts.model):
        scores = evaluate(parts.model, precision, run.data, some, rt, mesh, parts.techniques)
    weights = [p for p in parts.model.parameters() if p.requires_grad]
    contestant = Contestant(lambda i: learn(i % timed), weights, records=type(parts.executor) is not Executor)
    work = Work(timed, sum(one[1] for one in counts[:timed]), sum(one[4] for one in counts[:timed]))
    return measure(contestant, work, steps, rt.device, PRECISIONS[precision]) | {"eval_loss": scores["eval_loss"]}


def main(folder: str, steps: str, name: str, result: str) -> None:
    answer(result, lambda: run_shortly(Path(folder), int(steps), name))


if __name__ == "__main__":
    main(*sys.argv[1:])
