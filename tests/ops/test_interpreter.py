"""The tests of the other files once more, with the Triton kernels themselves in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.ops.language import INTERPRET, triton
from tests.ops.checks import DEVICE

FAMILIES = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))


@pytest.mark.skipif(INTERPRET or DEVICE == "cuda", reason="the kernels run already")
@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda path: path.stem.removeprefix("test_"))
def test_kernels_in_the_interpreter(family: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(family)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
