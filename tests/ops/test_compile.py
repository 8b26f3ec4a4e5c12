"""Every kernel compiles for GPUs, also where there is none."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import stretto.ops
from stretto.ops.language import triton
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[2]
GPUS = {"80": "A100", "90": "H100, H200"}


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_every_kernel_compiles() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", *GPUS],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    modules = [
        importlib.import_module(f"stretto.ops.{each.name}") for each in pkgutil.iter_modules(stretto.ops.__path__)
    ]
    kind = triton.runtime.jit.KernelInterface
    names = {name for module in modules for name, value in vars(module).items() if isinstance(value, kind)}
    kernels = {name for name in names if name.endswith("_kernel")}  # others are called by these
    assert len(kernels) > 20
    found = json.loads(done.stdout)
    # The A100 has no 8-bit numbers.
    later = {"_quantize_kernel", "_round_kernel", "_weights_kernel", "_renew_bounds_kernel"}
    later |= {"_activate8_kernel", "_activate8_backward_kernel", "_merge_heads8_kernel", "_dlogits8_kernel"}
    assert {gpu: set(names) for gpu, names in found.items()} == {"80": kernels - later, "90": kernels}
