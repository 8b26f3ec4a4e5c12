"""The tests of the other files once more, with the Triton kernels themselves in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stretto.ops.language import INTERPRET, triton
from tests.ops.checks import DEVICE

FAMILIES = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
Done = subprocess.CompletedProcess[str]
OLD = triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def run(family: Path, environment: dict[str, str]) -> Done:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(family)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[Done]]]:
    """As many at a time as there are cores: the interpreter uses one."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen: list[Any] = [
        item.callspec.params["family"] for item in items if item.function is test_kernels_in_the_interpreter
    ]
    environment = dict(os.environ, TRITON_INTERPRET="1")  # copied here: pytest changes it while the threads run
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {family: pool.submit(run, family, environment) for family in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(INTERPRET or DEVICE == "cuda", reason="the kernels run already")
@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.skipif(OLD, reason="the interpreter of Triton before 3.7 cannot loop over rows with today's numpy")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda path: path.stem.removeprefix("test_"))
def test_kernels_in_the_interpreter(family: Path, runs: dict[Path, Future[Done]]) -> None:
    done = runs[family].result()
    assert done.returncode == 0, done.stdout + done.stderr
