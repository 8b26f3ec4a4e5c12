"""The command itself, with the same recipe: `stretto launch -n N train recipe.toml` trains on the same samples with the
same losses for N = 1, 2 and 4, and a run goes on with another number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stretto.report import read_events
from tests.corpora import write_corpus
from tests.runs import PATIENCE_S, ROOT, eval_losses, losses

pytestmark = pytest.mark.dist
STEPS = 8
MOST = 1e-5  # that losses differ by

RECIPE = """
[data]
train = "{text}"
seq_len = 16
batch_size = 6

[model]
layers = 2
width = 32
heads = 4

[optim]
lr = 1e-2
warmup = 4
schedule = "constant"

[train]
steps = 8
log_every = 1
eval_every = 4
"""

# Python runs this file in each process before the command: it writes down what each update reads.
WITNESS = """
import os

if "RANK" in os.environ:
    import stretto.train

    run_step = stretto.train.run_step

    def witness(parts, step, batches, *rest):
        for _, batch in batches:
            with open(os.environ["SEEN"], "a") as file:
                file.writelines(f"{step} {sample}\\n" for sample in batch.samples)
        return run_step(parts, step, batches, *rest)

    stretto.train.run_step = witness
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    (folder / "recipe.toml").write_text(RECIPE.format(text=write_corpus(folder / "text")))
    (folder / "sitecustomize.py").write_text(WITNESS)
    for processes in (1, 2, 4):
        train(folder, f"on-{processes}", processes)
    for steps, processes in ((2, 1), (4, 2), (6, 4), (8, 1)):
        train(folder, "moving", processes, "--set", f"train.steps={steps}", "--resume")
    return folder


def train(folder: Path, name: str, processes: int, *more: str) -> None:
    command = [sys.executable, "-m", "stretto", "launch", "-n", str(processes), "train", str(folder / "recipe.toml")]
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    done = subprocess.run(
        [*command, "--set", f"run.dir={folder / name}", *more],
        cwd=folder, env=os.environ | {"PYTHONPATH": paths, "SEEN": str(folder / f"{name}.seen")},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def seen(folder: Path, name: str) -> Counter[tuple[str, str]]:
    """How often each update read each sample."""
    lines = (folder / f"{name}.seen").read_text().splitlines()
    return Counter((step, sample) for step, sample in map(str.split, lines))


@pytest.mark.parametrize("name", ["on-2", "on-4", "moving"])
def test_the_same_recipe_is_the_same_run_on_any_number_of_processes(folder: Path, name: str) -> None:
    wanted = seen(folder, "on-1")
    assert len({step for step, _ in wanted}) == STEPS and sum(wanted.values()) == STEPS * 6
    assert seen(folder, name) == wanted
    many, one = losses(folder / name), losses(folder / "on-1")
    assert list(many) == [*range(1, STEPS + 1)] and one[STEPS] < one[1] - 0.5
    gaps = [abs(many[step] - one[step]) for step in one]
    evaluations = eval_losses(folder / "on-1")
    gaps += [abs(loss - evaluations[step]) for step, loss in eval_losses(folder / name).items() if step in evaluations]
    print(f"{name}: losses differ by {max(gaps):.1e} at most")
    assert max(gaps) <= MOST


def test_the_legs_of_the_run_that_moved_ran_on_what_was_asked_for(folder: Path) -> None:
    worlds = [event["environment"]["processes"] for event in read_events(folder / "moving") if "environment" in event]
    assert worlds == [1, 2, 4, 1]
