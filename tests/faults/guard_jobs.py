"""Runs a list of training jobs in this process, each with a fault in one rank and step, and writes down what became of
the weights in every step, what was raised, and which blocks worked.

    python -m tests.faults.guard_jobs JOBS.json OUT_FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import stretto.build
import stretto.train
from stretto import gradients, graphs
from stretto.build import Trainable
from stretto.config import build_config
from stretto.errors import StrettoError
from stretto.gradients import Present, Static
from stretto.guard import Guard
from stretto.optim import clip_gradients
from stretto.parallel.passes import Pipelined
from stretto.step import Update
from stretto.train import train
from tests.runs import PATIENCE_S

RANK = int(os.environ.get("RANK", "0"))
Fault = Callable[[Trainable, float], AbstractContextManager[Any]]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def hash_state(parts: Trainable) -> str:
    """Of all bits that this process has of weights and moments."""
    digest, optimizer = hashlib.sha256(), parts.update.optimizer
    for p in parts.model.parameters():
        for tensor in (p, *optimizer.state.get(p, {}).values()):
            digest.update(local(tensor.detach()).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Faults, around one step of one rank.


@contextmanager
def loss(parts: Trainable, value: float) -> Iterator[None]:
    """The loss has another value, and its usual gradient."""

    def spoil(module: Any, args: Any, out: Tensor) -> Tensor:
        return out + (torch.full_like(out, value) - out).detach()

    handle = parts.model.register_forward_hook(spoil)
    yield
    handle.remove()


def pipeline_loss(parts: Trainable, value: float) -> AbstractContextManager[Any]:
    """The same in the process that has the last module."""
    real = Pipelined._compute

    def compute(self: Pipelined, module: Any, *rest: Any) -> Tensor:
        out = real(self, module, *rest)
        return out + (torch.full_like(out, value) - out).detach() if module.is_last else out

    return patch.object(Pipelined, "_compute", compute)


@contextmanager
def gradient(parts: Trainable, value: float) -> Iterator[None]:
    """One element of a gradient in the middle of the backward pass."""

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = value
        return grad

    def watch(module: Any, args: Any, out: Tensor) -> None:
        out.register_hook(spoil)

    handle = parts.model.get_submodule("decoder.blocks.0").register_forward_hook(watch)
    yield
    handle.remove()


def after_sum(parts: Trainable, value: float) -> AbstractContextManager[Any]:
    """One element of a gradient that has been summed over processes."""

    def clip(model: Any, *rest: Any) -> Tensor:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        local(grads[0]).view(-1)[0] = value
        return clip_gradients(model, *rest)

    return patch("stretto.step.clip_gradients", clip)


def after_static_sum(parts: Trainable, value: float) -> AbstractContextManager[Any]:
    """The same where gradients stay in place, for CUDA graphs."""
    real = Static.sum

    def spoil(self: Static) -> None:
        real(self)
        self.flats[0][3] = value

    return patch.object(Static, "sum", spoil)


@contextmanager
def times(parts: Trainable, value: float) -> Iterator[None]:
    """The loss is multiplied."""
    handle = parts.model.register_forward_hook(lambda module, args, out: out * value)
    yield
    handle.remove()


@contextmanager
def bit(parts: Trainable, value: float) -> Iterator[None]:
    """The lowest bit of one weight is another one after the step."""
    yield
    with torch.no_grad():
        weight = local(next(iter(parts.model.get_submodule("decoder.blocks.1").parameters()))).view(-1)
        weight[1:2].view(torch.int32).bitwise_xor_(1)


FAULTS: dict[str, Fault] = {
    "loss": loss, "pipeline loss": pipeline_loss, "gradient": gradient, "after the sum": after_sum,
    "after the static sum": after_static_sum,
    "times": times, "bit": bit,
}  # fmt: skip


# What is switched off, for a whole job.


def judge_alone() -> AbstractContextManager[Any]:
    """No process asks another."""
    return patch.object(gradients, "take_largest", lambda norm, group=None: norm)


def judge_static_alone() -> AbstractContextManager[Any]:
    return patch.object(Static, "share_doubts", lambda self: None)


def trust_losses() -> AbstractContextManager[Any]:
    return patch.object(Guard, "doubt", lambda self, loss: torch.zeros_like(loss))


def drop_by_chance() -> AbstractContextManager[Any]:
    """What is dropped is not a function of the seed."""
    return patch.object(Update, "seed_for", lambda self, index: torch.manual_seed(int.from_bytes(os.urandom(7), "big")))


def choose_by_rank() -> AbstractContextManager[Any]:
    """Techniques draw from a seed that each process has for itself."""
    real = stretto.build.describe_context

    def describe(*args: Any) -> Any:
        context = real(*args)
        return replace(context, seed=context.seed + RANK)

    return patch.object(stretto.build, "describe_context", describe)


def exchange_nothing() -> AbstractContextManager[Any]:
    """Gradients stay where they are: messages of different sizes would end the processes."""
    return patch.object(Present, "finish", lambda self: None)


OFF = {
    "agreement": judge_alone, "static agreement": judge_static_alone, "doubt": trust_losses,
    "seeds": drop_by_chance, "common choice": choose_by_rank, "sum": exchange_nothing,
}  # fmt: skip


def keep_in_place() -> AbstractContextManager[Any]:
    """Gradients stay in place, as they do where steps may be recorded; the choice comes after the last step."""
    return patch.multiple(graphs, TIMED=1000)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    states: list[tuple[str, str]] = []  # before and after each step
    planned: list[list[list[int]]] = []  # the blocks that a step's micro-batches are to be worked on by
    worked: list[list[int]] = []  # the blocks that did
    real = stretto.train.run_step

    def watched(parts: Trainable, step: int, batches: Any, *rest: Any) -> Any:
        before = hash_state(parts)
        active: list[int] = []
        hooks = [
            block.register_forward_pre_hook(lambda module, args, number=i: active.append(number))
            for i, block in enumerate(parts.model.get_submodule("decoder.blocks").children())
        ]
        with ExitStack() as stack:
            for kind, rank, steps, value in job.get("faults", ()):
                if rank == RANK and step in steps:
                    stack.enter_context(FAULTS[kind](parts, value))
            results = real(parts, step, batches, *rest)
        for hook in hooks:
            hook.remove()
        states.append((before, hash_state(parts)))
        planned.append([list(depth.parts) for _, batch in batches for depth in batch.depths.values()])
        worked.append(active)
        return results

    code, message = 0, ""
    with ExitStack() as stack:
        stack.enter_context(patch("stretto.train.run_step", watched))
        if job.get("static"):
            stack.enter_context(patch.object(stretto.build, "_find_obstacles", lambda *args: []))
            stack.enter_context(keep_in_place())
        for name in job.get("off", ()):
            stack.enter_context(OFF[name]())
        try:
            train(build_config(job["config"]), job.get("resume", False))
        except StrettoError as error:
            code, message = error.exit_code, str(error)
    return {"code": code, "message": message, "states": states, "planned": planned, "worked": worked}


def main() -> None:
    torch.set_num_threads(1)
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if "RANK" in os.environ:  # one group for all jobs
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    for name, job in jobs.items():
        (out / f"{name}.{RANK}.json").write_text(json.dumps(run_job(job)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
