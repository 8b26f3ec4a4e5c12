"""Runs a list of training jobs in this process, and writes down what each consumed and produced.

The tests start this file once, alone and under torchrun, with all jobs they need: a launch costs seconds.
    python -m tests.distributed.jobs JOBS.json OUT_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import stretto.build
import stretto.train
from stretto import graphs
from stretto.config import build_config
from stretto.errors import StrettoError
from stretto.parallel.passes import Pipelined
from stretto.step import Update
from stretto.train import train
from tests.distributed.delays import define
from tests.runs import PATIENCE_S

FORMS = ("into_tensor", "tensor", "single")


def run_job(tree: dict[str, Any], resume: bool, stop_after: int) -> dict[str, Any]:
    samples: dict[int, list[tuple[int, ...]]] = {}
    blocks: dict[int, list[list[int]]] = {}  # that work on a micro-batch, where some do not
    sent: list[int] = []  # elements of the messages of each step
    run_step = stretto.train.run_step
    steps = 0

    def watched(parts: Any, step: int, batches: Any, *rest: Any) -> Any:
        nonlocal steps
        steps += 1
        samples.update({index: batch.samples for index, batch in batches})
        blocks.update({index: [list(d.parts) for d in batch.depths.values()] for index, batch in batches})
        with count_messages() as messages:
            result = run_step(parts, step, batches, *rest)
        sent.append(sum(messages))
        torch.manual_seed(steps * int(os.environ.get("RANK", "0")))  # no choice that all must share comes from here
        if steps == stop_after and os.environ.get("RANK", "0") == "1":
            os.kill(os.getpid(), 15)  # one process alone is told: all must agree
        return result

    try:
        with patch("stretto.train.run_step", watched):
            train(build_config(tree), resume)
        code = 0
    except StrettoError as error:
        code = error.exit_code
    return {"samples": samples, "code": code, "blocks": blocks, "sent": sent}


@contextmanager
def count_messages() -> Iterator[list[int]]:
    """Collects the size of each tensor that is summed, gathered or scattered."""
    sizes: list[int] = []
    # FSDP2 calls the ones or the others, by the version of torch.
    names = ["all_reduce"] + [f"{what}_{how}" for what in ("all_gather", "reduce_scatter") for how in FORMS]
    known = {name: getattr(torch.distributed, name) for name in names if hasattr(torch.distributed, name)}

    def count(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            sizes.append(max(tensor.numel() for tensor in tensors))
            return known[name](*args, **kwargs)

        return call

    try:
        for name in known:
            setattr(torch.distributed, name, count(name))
        yield sizes
    finally:
        for name, function in known.items():
            setattr(torch.distributed, name, function)


def put_off_graphs(until: int) -> None:
    """Makes graphs look possible everywhere, but not worth it, which a run finds out after step number `until`."""
    stretto.build._find_obstacles = lambda *args: []
    graphs.TIMED, graphs.LAUNCH_BOUND = until, 2.0


def learn_from_another_update() -> AbstractContextManager[Any]:
    """Gradients are applied one update later than they should be."""
    real = Pipelined._gather_gradients

    def gather(self: Pipelined, module: Any, update: int) -> None:
        wait = self.schedule.find_wait(module.number)
        other = module.used.get(update - wait + 1)
        if other is not None and module.is_first:
            module.used[update - wait] = other
        real(self, module, update)

    return patch.object(Pipelined, "_gather_gradients", gather)


def drop_otherwise() -> AbstractContextManager[Any]:
    """Every process has keys of its own."""
    real = Update.seed_for
    return patch.object(Update, "seed_for", lambda self, index: real(self, index + 1000 * dist.get_rank()))


FAULTS = {"another update": learn_from_another_update, "other keys": drop_otherwise}


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank = os.environ.get("RANK", "0")
    if "RANK" in os.environ:  # one group for all jobs: torchrun's store serves only one
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    os.environ["LOCAL_RANK"] = "0"  # all on one GPU, where there is one
    known = stretto.build._find_obstacles, graphs.TIMED, graphs.LAUNCH_BOUND
    for name, job in jobs.items():
        stretto.build._find_obstacles, graphs.TIMED, graphs.LAUNCH_BOUND = known
        if "put_off" in job:
            put_off_graphs(job["put_off"])
        with FAULTS[job["plant"]]() if "plant" in job else nullcontext():
            result = run_job(job["config"], job.get("resume", False), job.get("stop_after", 0))
        (out / f"{name}.{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, job in jobs.items():
        if job.get("define") and rank == "0":  # alone: there is no group any more
            save_file(define(job["config"], out / f"{name}-alone").result(), out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
