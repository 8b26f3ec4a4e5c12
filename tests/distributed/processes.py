"""Training jobs in several processes of this machine (gloo), and the samples that each process consumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.runs import PATIENCE_S, ROOT, find_port
from tests.server import find_server


def run_module(module: str, processes: int, log: Path, *arguments: str) -> None:
    """Runs `python -m module` in processes that are forked from one that has imported everything."""
    find_server().start(log, *arguments, processes=processes, module=module).expect_success()


def run_module_afresh(module: str, processes: int, variables: dict[str, str], *arguments: str) -> None:
    """The same in processes that share nothing, by torchrun if there are several."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(find_port())]
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), "-m", module, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def launch(
    jobs: dict[str, Any],
    folder: Path,
    processes: int,
    variables: dict[str, str] | None = None,
    module: str = "tests.distributed.jobs",
) -> None:
    """Runs all jobs in one launch, each in its own run folder. `module` is what runs them. With variables of their own
    the processes share nothing."""
    folder.mkdir()
    for name, job in jobs.items():
        job["config"]["run"]["dir"] = str(folder / job.get("folder", name))
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    if variables is None:
        run_module(module, processes, folder / "log", str(path), str(folder))
    else:
        run_module_afresh(module, processes, variables, str(path), str(folder))


def samples(folder: Path, name: str, processes: int) -> dict[str, list[int]]:
    """Micro-batch number -> its samples, over all processes."""
    found: dict[str, list[int]] = {}
    for rank in range(processes):
        found |= json.loads((folder / f"{name}.{rank}.json").read_text())["samples"]
    return found
