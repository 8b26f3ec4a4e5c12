"""One contestant on one workload, in a process of its own: memory, compiled code and the allocator begin fresh.

    python -m stretto.bench.worker WORKLOAD CONTESTANT STEPS RECIPE RESULT

RECIPE is the configuration that the contestant trains with; RESULT is the JSON file to write, with the numbers or with
the reason why there are none. What is printed goes to a log.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from stretto import graphs, runtime
from stretto.batch import Batch, Counts
from stretto.bench import peers
from stretto.bench.batches import draw_batches
from stretto.bench.measure import Contestant, Work, measure
from stretto.bench.workloads import WORKLOADS, Workload, fit_to_device
from stretto.buckets import to_bucket
from stretto.build import build, describe_context, run_step
from stretto.config import Config, load_config
from stretto.errors import OutOfMemoryError, Preempted
from stretto.files import write_text
from stretto.flops import tokens_per_sample, training_flops
from stretto.mesh import build_mesh
from stretto.model import build_model, sites
from stretto.precision import PRECISIONS, resolve_precision
from stretto.runtime import Runtime
from stretto.techniques import open_techniques
from stretto.techniques.technique import At

DRAWN = 32  # number of steps whose blocks represent a whole run


def run(workload_name: str, name: str, steps: int, recipe: Path) -> dict[str, Any]:
    config = load_config(recipe)
    with runtime.start(config.run) as rt:
        workload = fit_to_device(WORKLOADS[workload_name], rt.device.type)
        precision = PRECISIONS[resolve_precision(config.train.precision, rt.device)]
        draws = draw_batches(workload, config.model)
        contestant = build_contestant(name, config, workload, draws, rt)
        counts: list[Counts] = []  # of "stretto hf" none: it has all padding outside of layers, hardly any inside
        if name.startswith("hf "):
            counts = [peers.count(draw, config.model) for draw in draws]
        elif not name.startswith("stretto hf"):
            counts = [form(draw, config).counts for draw in draws]
        filler = sum(c.padding for c in counts) / sum(c.all_slots for c in counts) if counts else None
        return measure(contestant, count_work(config, draws, rt), steps, rt.device, precision) | {"filler": filler}


def build_contestant(name: str, config: Config, workload: Workload, draws: Sequence[Batch], rt: Runtime) -> Contestant:
    weights = torch.bfloat16 if workload.bf16_weights else torch.float32
    if name.startswith("hf "):
        return peers.build_peer(config, workload.own, draws, name.removeprefix("hf "), rt.device, weights)
    if name.startswith("stretto hf"):
        techniques = dict.fromkeys(name.split()[2:], True)  # "stretto hf NAME" has that technique, too
        return peers.build_accelerated(config, workload.own, draws, rt.device, **techniques)
    return build_ours(config, draws, rt, weights)


def build_ours(config: Config, draws: Sequence[Batch], rt: Runtime, weights: torch.dtype) -> Contestant:
    mesh = build_mesh(config.parallel, rt.device, rt.rank, rt.world)
    techniques = open_techniques(config, describe_context(config, rt, mesh))
    # Plain parameters are born in that type; an optimizer of a technique has its own way to keep them.
    with _default_dtype(torch.float32 if techniques.has_optimizer else weights):
        parts = build(config, rt, mesh)
    forms = [form(draw, config) for draw in draws]
    batches = [batch.to(rt.device) for batch in forms]

    def step(i: int) -> Tensor:
        usual = forms[i % len(batches)]
        prepared = parts.techniques.prepare(usual, At(i, i))
        batch = batches[i % len(batches)] if prepared is usual else prepared.to(rt.device)
        loss_sum, _ = run_step(parts, i, [(i, batch)], batch.counts.labels, rt.world)
        return loss_sum / batch.counts.labels

    records = isinstance(parts.executor, graphs.Recorded)
    # Each batch may have a shape of its own, and each kind of step has a graph.
    passes = graphs.TIMES + 2 * parts.techniques.num_kinds if records else 3
    return Contestant(step, [p for p in parts.model.parameters() if p.requires_grad], passes, records)


def form(draw: Batch, config: Config) -> Batch:
    """Makes the batch that training would read."""
    return to_bucket(draw) if config.train.graphs == "on" else draw


def count_work(config: Config, draws: Sequence[Batch], rt: Runtime) -> Work:
    """Counts the work of all batches. Techniques may leave out other parts in every step: the mean counts."""
    model, mesh = build_model(config.model), build_mesh(config.parallel, rt.device, rt.rank, rt.world)
    techniques = open_techniques(config, describe_context(config, rt, mesh))
    techniques.apply(model, sites(model))
    depths = [techniques.prepare(form(draws[0], config), At(step, step)).depths for step in range(DRAWN)]
    counts = [draw.counts for draw in draws]
    flops = [fmean(training_flops(config.model, c, one) for one in depths) for c in counts]
    tokens = sum(c.tokens for c in counts) * tokens_per_sample(config.model)
    return Work(num_batches=len(draws), tokens=tokens, flops=sum(flops))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def explain(error: BaseException) -> str:
    """Says in one line for the table why a contestant failed."""
    if isinstance(error, OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def answer(result: str, work: Callable[[], dict[str, Any]]) -> None:
    """Writes what the work gives, or why it failed, for the process that waits for it (contest.run_apart)."""
    try:
        numbers = work()
    except Preempted:
        raise
    except Exception as error:
        traceback.print_exc()
        numbers = {"failed": explain(error)}
    write_text(Path(result), json.dumps(numbers))


def main(workload: str, name: str, steps: str, recipe: str, result: str) -> None:
    answer(result, lambda: run(workload, name, int(steps), Path(recipe)))


if __name__ == "__main__":
    main(*sys.argv[1:])
