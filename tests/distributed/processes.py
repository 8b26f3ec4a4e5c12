"""Training jobs in several processes of this machine (gloo), and the samples that each process consumed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[2]


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launch(
    jobs: dict[str, Any],
    folder: Path,
    processes: int,
    variables: dict[str, str] | None = None,
    module: str = "tests.distributed.jobs",
) -> None:
    """Runs all jobs in one launch, each in its own run folder. `module` is what runs them."""
    folder.mkdir()
    for name, job in jobs.items():
        job["config"]["run"]["dir"] = str(folder / job.get("folder", name))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(find_port())]
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", module]
    done = subprocess.run(
        [*command, str(folder / "jobs.json"), str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | (variables or {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def samples(folder: Path, name: str, processes: int) -> dict[str, list[int]]:
    """Micro-batch number -> its samples, over all processes."""
    found: dict[str, list[int]] = {}
    for rank in range(processes):
        found |= json.loads((folder / f"{name}.{rank}.json").read_text())["samples"]
    return found
