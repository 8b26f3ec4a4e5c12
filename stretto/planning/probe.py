"""`stretto plan --measure`: the best few candidates train for some seconds each on this machine, on random batches of
the recipe's shape, and the plan is ranked anew by what was measured.

Each runs in a process of its own, as contestants of the bench do, so that memory and compiled code begin fresh:

    python -m stretto.planning.probe RECIPE RESULT
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from stretto import graphs, runtime
from stretto.batch import Batch
from stretto.bench.batches import draw_batches
from stretto.bench.contest import run_apart
from stretto.bench.measure import Contestant, time_passes, warm_up
from stretto.bench.worker import answer, form
from stretto.bench.workloads import Workload
from stretto.build import build, run_step
from stretto.config import Config, dump_config, load_config
from stretto.errors import ConfigError
from stretto.hardware import Hardware
from stretto.mesh import Mesh
from stretto.plan import find_size
from stretto.planning.layout import Outcome, change
from stretto.planning.search import CLOSE, Candidate, Plan
from stretto.planning.table import list_distinct
from stretto.planning.times import uses_graphs
from stretto.runtime import Runtime, choose_device

TRIED = 3  # candidates
STEPS = 8  # that are timed, after warm-up
DIFFERENT = 2  # batches


def measure_plan(plan: Plan) -> Plan:
    """The plan with the measured times of its best candidates; those that were not measured come behind."""
    if plan.hardware.count > 1:
        raise ConfigError("--measure runs on one device, and the plan is for several: leave it out, or name one GPU")
    device = choose_device(plan.recipe.run.device)
    if (device.type == "cuda") != plan.hardware.is_gpu:
        raise ConfigError(f"--measure: the plan is for {plan.hardware.name}, and this machine has {device.type}")
    tried, ratios, notes, failed = list[Candidate](), list[float](), list[str](), set[Outcome]()
    for number, one in enumerate(list(list_distinct(plan))[:TRIED], 1):
        found = run_candidate(one.config, plan.hardware)
        computed = f"{number}. computed {1e3 * one.seconds:,.1f} ms, {one.outcome.memory / 2**30:.2f} GiB"
        if "failed" in found:
            failed.add(one.outcome)
            notes.append(f"{computed}; it failed: {found['failed']}")
            continue
        notes.append(f"{computed}; measured {found['step_ms']:,.1f} ms, {found['memory_gib']:.2f} GiB")
        ratios.append(found["step_ms"] / 1e3 / one.seconds)
        outcome = one.outcome.scaled(ratios[-1])
        if plan.hardware.is_gpu:  # of a CPU, what a process takes says little about tensors
            outcome = replace(outcome, memory=int(found["memory_gib"] * 2**30))
        tried.append(replace(one, outcome=outcome))
    if not tried:
        raise ConfigError("--measure: none of the best candidates can be run here: " + "; ".join(notes))
    fastest = min(one.seconds for one in tried)
    tried.sort(key=lambda one: (one.seconds > fastest * (1 + CLOSE), -one.own, one.seconds))
    scale = median(ratios)
    known = [one.words for one in tried]
    rest = [one for one in plan.candidates if one.words not in known and one.outcome not in failed]
    rest = [replace(one, outcome=one.outcome.scaled(scale)) for one in rest]
    notes.append(f"all other times are computed ones, {scale:.2f} times")
    return replace(plan, candidates=[*tried, *rest], notes=[*plan.notes, *notes], measured=len(tried), scale=scale)


def run_candidate(config: Config, hardware: Hardware) -> dict[str, Any]:
    """Numbers, or the reason why there are none. What a run would choose after some steps is chosen at once."""
    graphs = "on" if uses_graphs(config, hardware, shared=False) else "off"
    config = replace(config, train=change(config.train, graphs=graphs))
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "probe"
        stem.with_suffix(".toml").write_text(dump_config(config), encoding="utf-8")
        return run_apart("stretto.planning.probe", [str(stem.with_suffix(".toml"))], stem)


def probe(config: Config) -> dict[str, Any]:
    with runtime.start(config.run) as rt:
        draws = draw_batches(make_workload(config), config.model)
        contestant = build_contestant(config, draws, rt)
        warm_up(contestant, DIFFERENT, rt.device)
        passes, loss = time_passes(contestant, DIFFERENT, STEPS // DIFFERENT, rt.device)
        return {
            "step_ms": 1e3 * median(passes) / DIFFERENT,
            "memory_gib": runtime.memory_gib(rt.device),
            "loss": loss,
        }


def make_workload(config: Config) -> Workload:
    """Batches as the recipe has them, of full rows."""
    data, (_, size) = config.data, find_size(config)
    if data.task == "translation":
        length = max(data.seq_len // 4, 1)
        return Workload("", {}, max(size // length, 1), length, num_batches=DIFFERENT)
    return Workload("", {}, size, data.seq_len, num_batches=DIFFERENT)


def build_contestant(config: Config, draws: Sequence[Batch], rt: Runtime) -> Contestant:
    """Steps of several micro-batches, which are one batch again and again."""
    parts, many = build(config, rt, Mesh()), config.train.micro_batches
    batches = [form(draw, config).to(rt.device) for draw in draws]

    def step(i: int) -> Tensor:
        batch = batches[i % len(batches)]
        labels = many * batch.counts.labels
        loss_sum, _ = run_step(parts, i, [(i * many + j, batch) for j in range(many)], labels, rt.world)
        return loss_sum / labels

    weights = [p for p in parts.model.parameters() if p.requires_grad]
    records = isinstance(parts.executor, graphs.Recorded)
    return Contestant(step, weights, graphs.TIMES + 2 * parts.techniques.num_kinds if records else 3, records)


def main(recipe: str, result: str) -> None:
    answer(result, lambda: probe(load_config(recipe)))


if __name__ == "__main__":
    main(*sys.argv[1:])
