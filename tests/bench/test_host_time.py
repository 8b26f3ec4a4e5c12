"""bench/host_time.py runs launchers with empty kernels, which changes the process: it has one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import PATIENCE_S

PROGRAM = """
import sys
import bench.host_time as script
script.FEW, script.MANY, script.ROUNDS = 1, 2, 2
sys.argv[1:] = ["vit"]
script.main()
"""


def test_a_row_for_a_family() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    name, *numbers = done.stdout.splitlines()[-1].replace("+", " ").split()
    *_, theirs, ours, kernels = map(float, numbers)
    assert name == "vit" and kernels > 5 and ours < theirs
