"""Two processes of this machine's CPU, with one thread each, as a pipeline, against one process with one thread.

    python -m bench.pipeline_speed --out runs/pipeline_speed

Every way trains the same small GPT on the same samples by `stretto train`'s own loop, and is timed between updates that
are neither the first nor the last. Ways take turns. What each action takes is the time that its thread computed:
waiting does not count. From that, `simulate` says how long an update should take; the table has both.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from stretto.config import build_config
from stretto.parallel.schedule import Schedule
from stretto.parallel.simulate import Module, Traffic, find_periods

SAMPLES = 8  # of an update
WARM, TIMED = 6, 24  # updates; the first fill the pipeline
WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls read old books by the river\n"


@dataclass(frozen=True)
class Way:
    name: str
    order: str  # empty: one process, no pipeline
    micro_batches: int

    @property
    def processes(self) -> int:
        return 2 if self.order else 1


WAYS = (
    Way("one process", "", 1),
    Way("ouroboros", "ouroboros", 1),
    Way("pipelined", "pipelined", 1),
    Way("one process, 8 micro-batches", "", 8),
    Way("1f1b", "1f1b", 8),
    Way("2bw", "2bw", 8),
)


def main(
    out: Annotated[Path, typer.Option(help="where runs and results.json go")],
    rounds: Annotated[int, typer.Option(help="how often each way is run")] = 3,
    width: Annotated[int, typer.Option(help="of the model, which has 8 blocks")] = 256,
    way: Annotated[int, typer.Option(hidden=True, help="run this one, in this process")] = -1,
) -> None:
    if way >= 0:
        return run_way(WAYS[way], out, width)
    out.mkdir(parents=True, exist_ok=True)
    (out / "text.txt").write_text(WORDS * 4000)
    turns = [(turn, number) for turn in range(rounds) for number in range(len(WAYS))]
    for turn, number in track(turns, "runs"):
        start(out / f"{turn}-{number}", WAYS[number], number, width)
    rows = [find_row(out, number, rounds) for number in range(len(WAYS))]
    (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(show(rows)))


def start(folder: Path, way: Way, number: int, width: int) -> None:
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.processes)]
    command = [sys.executable, *launcher, "-m", "bench.pipeline_speed", "--out", str(folder), "--way", str(number)]
    done = subprocess.run([*command, "--width", str(width)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way.name} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def run_way(way: Way, folder: Path, width: int) -> None:
    """In each process of a way."""
    import torch

    from stretto.train import train

    torch.set_num_threads(1)
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "data": {"train": str(folder.parent / "text.txt"), "seq_len": 256, "batch_size": SAMPLES // way.micro_batches},
        "model": {"layers": 8, "width": width, "heads": 4, "max_len": 256, "dropout": 0.0},
        "optim": {"lr": 1e-4},
        "train": {
            "steps": WARM + TIMED + 2, "log_every": 1000, "eval_every": 0, "eval_batches": 1,
            "micro_batches": way.micro_batches,
        },
        "checkpoint": {"every": 0},
    }  # fmt: skip
    if way.order:
        tree["parallel"] = {"pipeline": 2, "schedule": way.order, "placement": "linear"}
    with watching() as (ends, actions):
        train(build_config(tree))
    period = (ends[WARM + TIMED - 1] - ends[WARM - 1]) / TIMED
    usual = {name: statistics.median(times[len(times) // 4 :]) for name, times in actions.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rank = int(os.environ["RANK"])
    (folder / f"{rank}.json").write_text(json.dumps({"period": period, "actions": usual, "peak": peak}))


@contextmanager
def watching() -> Iterator[tuple[list[float], dict[str, list[float]]]]:
    """When updates end, and the computing time of each action, by its name and module."""
    from unittest.mock import patch

    import stretto.train
    from stretto.parallel.passes import Pipelined

    ends: list[float] = []
    actions: dict[str, list[float]] = defaultdict(list)

    def note_end(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = real(*args)
            ends.append(time.perf_counter())
            return result

        return run

    def note_time(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Pipelined, module: Any, number: int) -> Any:
            begin = time.thread_time()
            result = real(self, module, number)
            actions[f"{name} {module.number}"].append(time.thread_time() - begin)
            return result

        return run

    names = ("forward", "backward", "update")
    timed: dict[str, Any] = {f"_{name}": note_time(name, getattr(Pipelined, f"_{name}")) for name in names}
    with patch("stretto.train.run_step", note_end(stretto.train.run_step)), patch.multiple(Pipelined, **timed):
        yield ends, actions


def find_row(out: Path, number: int, rounds: int) -> dict[str, Any]:
    """The median over rounds; that of several processes is the one of the slowest."""
    way, periods, predictions, peaks = WAYS[number], [], [], []
    for turn in range(rounds):
        found = [json.loads((out / f"{turn}-{number}" / f"{r}.json").read_text()) for r in range(way.processes)]
        periods.append(max(one["period"] for one in found))
        peaks.append(max(one["peak"] for one in found))
        if way.order:
            schedule = Schedule(way.order, 2, False, way.micro_batches)
            modules = [
                Module(*(one["actions"][f"{name} {k}"] for name in ("forward", "backward", "update")))
                for k, one in enumerate(found)
            ]
            predictions.append(max(find_periods(schedule, modules, Traffic(tied=True))))
    row = {"way": way.name, "seconds": statistics.median(periods), "spread": [min(periods), max(periods)]}
    row |= {"peak": statistics.median(peaks)}
    return row | ({"predicted": statistics.median(predictions)} if predictions else {})


def show(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| way | ms per update | range | times one process | predicted ms | measured / predicted | peak |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        if "predicted" not in row:
            alone = row["seconds"]
        predicted = row.get("predicted")
        low, high = (1e3 * value for value in row["spread"])
        yield (
            f"| {row['way']} | {1e3 * row['seconds']:.0f} | {low:.0f} to {high:.0f} | {alone / row['seconds']:.2f} | "
            + (f"{1e3 * predicted:.0f} | {row['seconds'] / predicted:.2f}" if predicted else "| ")
            + f" | {row['peak'] / 2**20:.0f} MiB |"
        )


if __name__ == "__main__":
    typer.run(main)
