"""What the guards of an update cost: steps as CUDA graphs with them and without, by turns in one process.

    python -m bench.guards [WORKLOAD] [--rounds 8] [--steps 100]

Without them, no loss is doubted and no norm is judged; clipping stays. The host must not wait for the device in any
timed step: torch raises an error where it would. Of what guards do, one process on its own compares no weights with
others and sends no heartbeats; that is of several processes only.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
from torch import Tensor

import stretto.build
from stretto import runtime
from stretto.bench.batches import draw_batches
from stretto.bench.contest import make_recipe
from stretto.bench.measure import Contestant, time_passes, warm_up
from stretto.bench.worker import build_ours
from stretto.bench.workloads import WORKLOADS, find_workloads, fit_to_device
from stretto.config import build_config
from stretto.guard import Guard
from stretto.runtime import Runtime


class NoGuard(Guard):
    """Applies every update."""

    def doubt(self, loss: Tensor) -> Tensor:
        return self.own[0]  # 0: nothing was ever added

    def judge(self, norm: Tensor, own: Tensor | None = None, watch: bool = True) -> Tensor:
        return self.own[1]


def build(name: str, kind: type[Guard], rt: Runtime) -> tuple[Contestant, int]:
    """A contestant whose updates have such a guard, and the number of its batches."""
    workload = fit_to_device(WORKLOADS[name], rt.device.type)
    config = build_config(make_recipe(workload, "stretto", graphs=rt.device.type == "cuda"))
    draws, usual = draw_batches(workload, config.model), stretto.build.Guard
    stretto.build.Guard = kind  # type: ignore[misc]
    try:
        return build_ours(config, draws, rt, torch.float32), len(draws)
    finally:
        stretto.build.Guard = usual  # type: ignore[misc]


def compare(name: str, rounds: int, steps: int, rt: Runtime) -> dict[str, list[float]]:
    """Milliseconds of a step in each round, with guards and without."""
    kinds = {"guards": Guard, "none": NoGuard}
    built, found = {word: build(name, kind, rt) for word, kind in kinds.items()}, dict[str, list[float]]()
    for contestant, num_batches in built.values():
        warm_up(contestant, num_batches, rt.device)
    for turn in range(rounds):
        for word in list(kinds)[:: 1 if turn % 2 else -1]:
            found.setdefault(word, []).append(time_steps(*built[word], steps, rt.device))
    return found


def time_steps(contestant: Contestant, num_batches: int, steps: int, device: torch.device) -> float:
    """Milliseconds of a step, in none of which the host may wait."""

    def step(i: int) -> Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return contestant.step(i)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    timed = replace(contestant, step=step) if device.type == "cuda" else contestant
    seconds, _ = time_passes(timed, num_batches, -(-steps // num_batches), device)
    return 1e3 * statistics.median(seconds) / num_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt2_small_1x1024")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    (name,) = find_workloads([args.workload])
    with runtime.start(build_config({}).run) as rt:
        found = compare(name, args.rounds, args.steps, rt)
        print(f"{name}, {runtime.describe_environment(rt)['device']}, torch {torch.__version__}; ms a step by round")
    for word, times in found.items():
        print(f"{word:8} {statistics.median(times):.4f}   {' '.join(f'{ms:.4f}' for ms in times)}")
    share = statistics.median(a / b - 1 for a, b in zip(found["guards"], found["none"], strict=True))
    print(f"guards take {share:+.2%} of a step (the median of rounds)")


if __name__ == "__main__":
    main()
