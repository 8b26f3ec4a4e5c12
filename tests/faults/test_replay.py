"""A step of a run is executed once more and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from stretto import checkpoint
from stretto.cli import app
from stretto.config import build_config
from stretto.errors import CheckpointError, ConfigError, DifferenceError
from stretto.files import write_text
from stretto.replay import replay
from stretto.report import EVENTS, read_events
from stretto.train import train
from tests.runs import PATIENCE_S, ROOT, base, change, find_port

pytestmark = pytest.mark.usefixtures("one_thread")


def make_run(folder: Path, **changes: Any) -> Path:
    """Twelve steps, saved after each fourth, with dropout."""
    options = {
        "run__dir": str(folder / "run"), "train__steps": 12, "train__micro_batches": 2, "train__eval_every": 0,
        "train__eval_batches": 1, "checkpoint__every": 4, "checkpoint__keep": 5,
    }  # fmt: skip
    return train(build_config(change(base(folder), **(options | changes))))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files with their times: nothing of a run may be touched."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fault("G1")
def test_a_step_is_the_same_again_and_nothing_is_written(run: Path) -> None:
    before = contents(run)
    assert replay(run, 7) == [
        "step 7, from the checkpoint of step 4: the same again, bit for bit", "loss: equal", "grad_norm: equal",
    ]  # fmt: skip
    assert replay(run, 8)[1:] == ["loss: equal", "grad_norm: equal", "weights: equal", "moments: equal"]
    assert replay(run, 1)[0].startswith("step 1, from the beginning: the same")
    assert contents(run) == before


@pytest.mark.control("G1")
def test_what_differs_is_said(run: Path) -> None:
    """A weight that was changed by one bit in the checkpoint before, and a loss that was another in the events."""
    folder = run / "checkpoints" / "step-00000004"
    weights = load_file(folder / "model.safetensors")
    name = "decoder.blocks.0.mlp.up.weight"
    weights[name] = weights[name] * 1.0001
    shot = checkpoint.load(run / "checkpoints", 4)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    checkpoint.save(run / "checkpoints", checkpoint.Snapshot(weights, shot.moments, shot.state), keep=5)
    with pytest.raises(
        DifferenceError, match=r"step 8, from the checkpoint of step 4: not the same again; loss: was 3"
    ):
        replay(run, 8)
    with pytest.raises(DifferenceError, match=r"weights: \d+ of \d+ tensors differ, .* by up to "):
        replay(run, 8)
    events = read_events(run)
    lines = [event | ({"loss": 1.0} if event.get("step") == 10 and "loss" in event else {}) for event in events]
    write_text(run / EVENTS, "".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DifferenceError, match=r"loss: was 1.0, is .*; grad_norm: equal"):
        replay(run, 10)


def test_a_damaged_checkpoint_is_passed_over(run: Path) -> None:
    (run / "checkpoints" / "step-00000008" / "model.safetensors").write_bytes(b"damaged")
    assert replay(run, 9)[0].startswith("step 9, from the checkpoint of step 4: the same")


def test_what_was_made_of_the_data_may_be_gone(run: Path) -> None:
    for path in (run / "data").iterdir():
        path.unlink()
    before = contents(run)
    assert replay(run, 5)[0].endswith("bit for bit")
    assert contents(run) == before


def test_steps_of_which_nothing_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__log_every=5, checkpoint__every=0)
    with pytest.raises(CheckpointError, match="knows nothing of step 7: it was neither logged nor saved"):
        replay(run, 7)
    with pytest.raises(ConfigError, match="--step 13 is not one of the 12 steps"):
        replay(run, 13)


def test_the_command_and_its_exit_code(run: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(run), "--step", "8"])
    assert done.exit_code == 0 and "weights: equal" in done.stdout
    assert DifferenceError.exit_code == 6


@pytest.mark.dist
def test_two_processes_replay_what_two_did(tmp_path: Path, whole: bool) -> None:
    """With split weights. What one process did may have other bits in two: it is said that there are two."""
    if not whole:
        pytest.skip("three launches: a part of `make faults`")
    run, variables = make_run(tmp_path), os.environ | {"OMP_NUM_THREADS": "1"}

    def start(*command: str) -> subprocess.CompletedProcess[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        return subprocess.run(
            [*torchrun, "--master-port", str(find_port()), "-m", "stretto", *command],
            cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip

    done = start("replay", str(run), "--step", "6")
    assert "processes 2 where it was 1: " in done.stdout + done.stderr
    places = ("--set", f"run.dir={json.dumps(str(tmp_path / 'two'))}", "--set", 'parallel.data="shard"')
    done = start("train", str(run / "config.toml"), *places)
    assert done.returncode == 0, done.stderr
    done = start("replay", str(tmp_path / "two"), "--step", "8")
    assert done.returncode == 0 and done.stdout.count("weights: equal") == 1, done.stdout + done.stderr
