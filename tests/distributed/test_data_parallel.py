"""Two real processes (gloo) do what one does: the same samples, the same losses, the same weights."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.report import read_events
from tests.corpora import write_images, write_pairs
from tests.distributed.processes import launch, samples
from tests.runs import PATIENCE_S, ROOT, base, change, eval_losses, find_port, losses

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    plain = base(folder)
    pairs, images = str(write_pairs(folder / "pairs")), str(write_images(folder / "images.npz"))
    translation = change(
        plain, data__task="translation", data__train=pairs, data__languages=["xx", "yy"], data__max_tokens=64,
        data__held_out=0.2, model__kind="encoder-decoder", data__seq_len=64, model__max_len=64,
    )  # fmt: skip
    vit = change(
        plain, data__task="images", data__train=images, model__kind="vit", model__image_size=16, model__patch=4,
        data__held_out=0.2,
    )  # fmt: skip
    calm = change(plain, model__dropout=0.0)  # compiled code draws other random numbers
    single = {"plain": plain, "translation": translation, "vit": vit, "calm": calm}
    double = single | {f"{name}-shard": change(tree, parallel__data="shard") for name, tree in single.items()}
    half = change(calm, train__precision="fp16")
    alone = {name: {"config": copy.deepcopy(tree)} for name, tree in (single | {"half": half}).items()}
    launch(alone, folder / "one", 1)
    jobs: dict[str, Any] = {name: {"config": copy.deepcopy(tree)} for name, tree in double.items()}
    jobs["half-shard"] = {"config": change(half, parallel__data="shard")}
    for mode in ("replicate", "shard"):
        tree = change(plain, parallel__data=mode)
        jobs[f"stop-{mode}"] = {"config": copy.deepcopy(tree), "stop_after": 3}
        jobs[f"go-on-{mode}"] = {"config": copy.deepcopy(tree), "resume": True, "folder": f"stop-{mode}"}
    jobs["calm-shard-compiled"] = {"config": change(calm, parallel__data="shard", train__compile=True)}
    launch(jobs, folder / "two", 2, {})  # by torchrun: what depends on a process's own hashes would show
    return folder


@pytest.mark.parametrize(
    ("job", "mode"),
    [
        *((job, mode) for job in ("plain", "translation", "vit") for mode in ("", "-shard")),
        ("calm", "-shard-compiled"),
    ],
)
def test_two_processes_equal_one(runs: Path, job: str, mode: str) -> None:
    one, two = runs / "one", runs / "two"
    assert samples(one, job, 1) == samples(two, job + mode, 2)
    mine, theirs = losses(one / job), losses(two / f"{job}{mode}")
    assert mine.keys() == theirs.keys() and len(mine) == 8
    for step, loss in mine.items():
        assert theirs[step] == pytest.approx(loss, abs=1e-5)
    for step, loss in eval_losses(one / job).items():
        assert eval_losses(two / f"{job}{mode}")[step] == pytest.approx(loss, abs=1e-5)
    first, second = (checkpoint.load(folder / "checkpoints", 8) for folder in (one / job, two / f"{job}{mode}"))
    assert first.weights.keys() == second.weights.keys() and first.moments.keys() == second.moments.keys()
    # Averaged gradients, not weights: Adam blows up rounding where the true gradient is 0 (the bias of a key).
    for name, value in first.moments.items():
        torch.testing.assert_close(second.moments[name], value, atol=1e-5, rtol=1e-3)


def test_fp16_finds_the_same_loss_scale_when_sharded(runs: Path) -> None:
    """Only some shards of a gradient overflow while the scale is sought, yet all processes must skip alike."""
    one, two = runs / "one" / "half", runs / "two" / "half-shard"
    skipped = [[e["cancelled"] for e in read_events(folder) if "loss" in e] for folder in (one, two)]
    assert skipped[0] == skipped[1]
    assert losses(two) == pytest.approx(losses(one), abs=0.05)
    states = [checkpoint.load(folder / "checkpoints", 8).state["scaler"] for folder in (one, two)]
    assert states[0] == states[1]


def test_each_process_gets_its_own_share(runs: Path) -> None:
    """The control of the test above: were both given everything, the union would be equal too."""
    shares = [json.loads((runs / "two" / f"plain.{rank}.json").read_text())["samples"].keys() for rank in (0, 1)]
    assert shares[0].isdisjoint(shares[1]) and len(shares[0]) == len(shares[1]) == 16


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_exactly(runs: Path, mode: str) -> None:
    codes = {
        name: [json.loads((runs / "two" / f"{name}-{mode}.{rank}.json").read_text())["code"] for rank in (0, 1)]
        for name in ("stop", "go-on")
    }
    assert codes == {"stop": [75, 75], "go-on": [0, 0]}
    whole = runs / "two" / ("plain" if mode == "replicate" else "plain-shard")
    assert losses(runs / "two" / f"stop-{mode}") == losses(whole)
    one, two = (checkpoint.load(f / "checkpoints", 8) for f in (whole, runs / "two" / f"stop-{mode}"))
    for mine, theirs in ((one.weights, two.weights), (one.moments, two.moments)):
        assert all(torch.equal(theirs[name], value) for name, value in mine.items())


def test_the_command_itself_under_torchrun(runs: Path) -> None:
    corpus, run = runs / "text", runs / "command"
    sets = [f"run.dir={run}", f"data.train={corpus}", "data.seq_len=32", "train.steps=5", "train.log_every=1"]
    options = [part for override in sets for part in ("--set", override)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.command", "train", "demo", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(losses(run)) == [1, 2, 3, 4, 5]
    assert (run / "report.html").exists() and done.stdout.count("step 5/5") == 1, "one process speaks"
    assert done.stdout.count("models that hold the group: 0") == 2, done.stdout


def test_the_loss_of_a_process_ends_the_other_with_a_clear_message(runs: Path) -> None:
    """Started by hand: torchrun would end the survivor before it could speak."""
    run = runs / "lost"
    sets = [
        f"run.dir={run}",
        f"data.train={runs / 'text'}",
        "data.seq_len=32",
        "train.steps=100000",
        "run.timeout_s=60",
    ]
    options = [part for override in sets for part in ("--set", override)]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.command", "train", "demo", *options],
            cwd=ROOT, env=os.environ | group | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not ((run / "events.jsonl").exists() and losses(run)):
        time.sleep(0.1)
    second.kill()
    output, message = first.communicate(timeout=PATIENCE_S)
    second.communicate()
    assert first.returncode == 7 and "rank 1 was lost without a word" in message, message
    assert "models that hold the group: 0" in output, output
