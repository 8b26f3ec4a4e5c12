"""stretto.hf.Trainer under `accelerate launch` in two real processes (gloo) learns what it learns in one with batches
twice as large.

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
from stretto.hf import Trainer
from tests.distributed.processes import find_port
from tests.hf.trainers import draw_samples, make
from tests.runs import PATIENCE_S

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parents[2]
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


def main(out: Path) -> None:
    torch.set_num_threads(1)
    for job in JOBS:
        logs = run(job, out, batch=2)
        (out / f"{job}.{os.environ['RANK']}.json").write_text(json.dumps(logs))
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
            assert other["loss"] == pytest.approx(line["loss"], rel=1e-4), line
            assert other["tokens_per_second"] == line["tokens_per_second"]
    steps_of_an_epoch = 3 if job == "accumulation" else 6
    tokens = sum(line["tokens_per_second"] for line in one[:steps_of_an_epoch])
    assert tokens == sum(len(sample["input_ids"]) for sample in draw_samples(JOBS[job][0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
