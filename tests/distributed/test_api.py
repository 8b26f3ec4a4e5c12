"""The front door on two processes: a given model begins alike everywhere, and a callback of one process stops both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import PATIENCE_S, losses

PROGRAM = """
import os, sys
import torch, stretto
from stretto.api import read_result
from tests.given import TINY, Bigrams, Steps

class Stop(stretto.Callback):
    def after_step(self, step, numbers):
        assert os.environ["RANK"] == "0", "callbacks are the main process's"
        return step == 2

def run(folder, **options):
    model = Bigrams()
    with torch.no_grad():
        model.table.weight += int(os.environ["RANK"])  # the main process's values count
    overrides = {"run.dir": folder, "train.micro_batches": 2}
    return stretto.train(TINY, model=model, data=Steps(), overrides=overrides, **options), model

torch.distributed.init_process_group("gloo")  # one group for all runs
whole, model = run(sys.argv[1] + "/whole")
sums = [torch.zeros(()) for _ in range(2)]
torch.distributed.all_gather(sums, model.table.weight.detach().double().sum().float())
assert sums[0] == sums[1], sums
first, _ = run(sys.argv[1] + "/parts", callbacks=[Stop()])
assert first.stopped and 2 <= first.step <= 3
second, _ = run(sys.argv[1] + "/parts", resume=True)
assert not second.stopped and second.step == 4
torch.distributed.destroy_process_group()
"""


@pytest.mark.dist
def test_a_stop_of_one_process_is_one_of_all(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "program.py"), str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "parts")) == 4
