"""`stretto train --ablate`: what each technique contributes, by short runs that leave the run alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stretto
from stretto.bench.ablate import train_and_ablate
from stretto.cli import app
from stretto.errors import ConfigError
from stretto.report.ablation import read_ablation
from stretto.train import train
from tests.runs import PATIENCE_S, MakeConfig, eval_losses

ON = {"techniques__fused": {}, "techniques__lean": {}, "techniques__layer_drop": {"theta": 0.5}}


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "ablation" not in path.parts]
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in files}


def test_each_technique_is_left_out_in_turn(make_config: MakeConfig, tmp_path: Path) -> None:
    """The short run with all of them is the beginning of the run; without one, that of a run without it."""
    same = {"train__eval_every": 3, "report__ablate": 3}
    folder = train(make_config(**same, **ON))
    before = hashes(folder / "checkpoints")
    outcome = CliRunner().invoke(app, ["train", str(folder), "--resume"])
    assert outcome.exit_code == 0, outcome.output
    assert hashes(folder / "checkpoints") == before
    steps, found = read_ablation(folder)
    assert steps == 3 and list(found) == ["all", "fused", "lean", "layer_drop"]
    assert found["all"]["eval_loss"] == eval_losses(folder)[3]
    without = train(make_config(**same, **ON | {"techniques__layer_drop": False}, run__dir=str(tmp_path / "without")))
    assert found["layer_drop"]["eval_loss"] == eval_losses(without)[3] != eval_losses(folder)[3]
    for name in ("all", "lean", "layer_drop"):
        assert found[name]["step_ms"] > 0 and found[name]["memory_gib"] > 0.1
    assert "techniques.lean" in found["fused"]["failed"], "it needs the other one, so that cannot be off alone"

    again = CliRunner().invoke(app, ["report", str(folder)])
    page = (folder / "report.html").read_text()
    for text in (outcome.output, again.output, page):
        assert "without layer_drop" in text and f"{found['layer_drop']['eval_loss']:.4f}" in text
        assert "without fused" in text and found["fused"]["failed"].split(":")[0] in text


def test_a_stop_ends_it_at_once_and_the_run_is_whole(make_config: MakeConfig) -> None:
    folder = train(make_config(report__ablate=10_000, checkpoint__keep=1, **ON))
    before = hashes(folder / "checkpoints")
    command = [sys.executable, "-m", "stretto", "train", str(folder), "--resume"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = folder / "ablation" / "all.log"
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and not log.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    (worker,) = map(int, find_children(process.pid))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75 and "Traceback" not in output, output
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert hashes(folder / "checkpoints") == before and json.loads((folder / "exit.json").read_text())["code"] == 0


def find_children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_what_short_runs_cannot_do_is_said_before_the_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(report__ablate=3)
    with pytest.raises(ConfigError, match=r"no model= and data="):
        stretto.train(config, data=[list(range(60))] * 40)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--resume --ablate"):
        train_and_ablate(config)
    assert not Path(config.run.dir).exists()
