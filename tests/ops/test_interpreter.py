"""The tests of the other files once more, with the Triton kernels themselves in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stretto.ops.language import INTERPRET, triton
from tests.ops.checks import DEVICE
from tests.runs import ROOT

# Those of files that run no kernel are the same there.
NO_KERNELS = {Path(__file__).stem, "test_compile", "test_flops", "test_linear", "test_op", "test_products"}
FAMILIES = sorted({path.stem for path in Path(__file__).parent.glob("test_*.py")} - NO_KERNELS)
OLD = triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
Outcome = tuple[int, list[str]]  # of a file: how many tests ran, and what those say that failed


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of all files, which share processes, one for each core: the interpreter uses one, and imports take seconds."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen: list[Any] = [
        item.callspec.params["family"] for item in items if item.function is test_kernels_in_the_interpreter
    ]
    path = tmp_path_factory.mktemp("interpreter") / "outcomes.xml"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        str(min(os.cpu_count() or 1, len(chosen))),
        "--dist",
        "loadfile",
        f"--junitxml={path}",
    ]
    files = [f"tests/ops/{family}.py" for family in chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert path.exists(), done.stdout + done.stderr
    return {family: read_outcome(path, family) for family in chosen}


def read_outcome(path: Path, family: str) -> Outcome:
    """A file that cannot be read is a case of its own, by its name."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    mine = [case for case in cases if f"tests.ops.{family}" in (case.get("classname"), case.get("name"))]
    failures = [bad.text or "" for case in mine for kind in ("failure", "error") for bad in case.iter(kind)]
    return sum(case.find("skipped") is None for case in mine), failures


@pytest.mark.skipif(INTERPRET or DEVICE == "cuda", reason="the kernels run already")
@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.skipif(OLD, reason="the interpreter of Triton before 3.7 cannot loop over rows with today's numpy")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda name: name.removeprefix("test_"))
def test_kernels_in_the_interpreter(family: str, outcomes: dict[str, Outcome]) -> None:
    ran, failures = outcomes[family]
    assert ran > 0 and not failures, "\n".join(failures)
