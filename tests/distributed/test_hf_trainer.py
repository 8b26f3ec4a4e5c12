"""stretto.hf.Trainer and Step under `accelerate launch` in two real processes (gloo) learn what they learn in one with
batches twice as large, or twice as many.

This file is also what each process runs:
    accelerate launch --multi_gpu --num_processes 2 -m tests.distributed.test_hf_trainer OUT_FOLDER
It is `--multi_gpu` without GPUs too, where the arguments of the Trainer ask for the CPU: with `--cpu` the launcher
starts one process, unless there is MPI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import stretto.hf.defer
import stretto.report
from stretto.hf import Step, Trainer
from stretto.optim import FlatAdamW
from tests.hf.families import accelerated, draw_batch
from tests.hf.trainers import draw_samples, make
from tests.runs import PATIENCE_S, find_port

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parents[2]
STEPS, LENGTHS = ["bert", "gpt2", "t5"], [(9, 3, 6), None, (2, 9, 4)]
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    # Its loss does not use num_items_in_batch; transformers multiplies it by the number of processes all the same.
    "classes": ("bert-classes", {"average_tokens_across_devices": False}),
    "gpt2": ("gpt2", {}),
    "accumulation": ("gpt2", {"gradient_accumulation_steps": 2}),
    "smoothing": ("gpt2", {"label_smoothing_factor": 0.1}),
}


def run(job: str, folder: Path, batch: int) -> list[dict[str, float]]:
    """The logs, by a clock that ticks once between two of them."""
    family, options = JOBS[job]
    trainer = make(Trainer, family, folder, per_device_train_batch_size=batch, **options)
    compute = stretto.hf.defer.Logits.compute
    with (
        patch.object(stretto.report, "time", SimpleNamespace(perf_counter=count().__next__)),
        patch.object(stretto.hf.defer.Logits, "compute", autospec=True, side_effect=compute) as computed,
    ):
        trainer.train()
    assert not computed.called
    return [line for line in trainer.state.log_history if "loss" in line]


def run_step(family: str, rank: int, world: int, accumulate: int) -> dict[str, list[float]]:
    """The mean losses of updates by 4 batches each, and some of the weights in the end."""
    model = accelerated(family)
    optimizer = FlatAdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)
    step, losses = Step(model, optimizer, clip=0.5, accumulate=accumulate), list[float]()
    for number in range(6):
        batches = [draw_batch(family, LENGTHS[(number + i) % 3], seed=4 * number + i) for i in range(4)]
        losses.append(sum(float(step(batch)) for batch in batches[rank::world]) / accumulate)
    assert step.updates == 6 * 4 // (world * accumulate)
    return {"losses": losses, "weights": [float(p.detach().double().norm()) for p in model.parameters()]}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    for job in JOBS:
        logs = run(job, out, batch=2)
        (out / f"{job}.{os.environ['RANK']}.json").write_text(json.dumps(logs))
    rank = int(os.environ["RANK"])
    for family in STEPS:
        (out / f"step.{family}.{rank}.json").write_text(json.dumps(run_step(family, rank, world=2, accumulate=2)))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trainer")
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", str(find_port())]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "tests.distributed.test_hf_trainer", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("job", JOBS)
def test_two_processes_learn_what_one_learns(folder: Path, job: str) -> None:
    one = run(job, folder, batch=4)
    first, second = (json.loads((folder / f"{job}.{rank}.json").read_text()) for rank in (0, 1))
    assert len(one) == len(first) == 6
    for line, *others in zip(one, first, second, strict=True):
        for other in others:
            assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4), line
            assert other["loss"] == pytest.approx(line["loss"], rel=1e-5), line
            assert other["tokens_per_second"] == line["tokens_per_second"]
    steps_of_an_epoch = 3 if job == "accumulation" else 6
    tokens = sum(line["tokens_per_second"] for line in one[:steps_of_an_epoch])
    assert tokens == sum(len(sample["input_ids"]) for sample in draw_samples(JOBS[job][0]))


@pytest.mark.parametrize("family", STEPS)
def test_step_in_two_processes_makes_the_updates_of_one(folder: Path, family: str) -> None:
    one = run_step(family, 0, world=1, accumulate=4)
    first, second = (json.loads((folder / f"step.{family}.{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"] and one["losses"][-1] < one["losses"][0]
    losses = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert losses == pytest.approx(one["losses"], rel=1e-5)
    assert first["weights"] == pytest.approx(one["weights"], rel=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
