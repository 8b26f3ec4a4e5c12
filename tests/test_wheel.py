"""What others install: an sdist, and a wheel built of it, hold the whole package, and train far from a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from stretto.version import __version__
from tests.corpora import write_corpus
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[1]
BUILD = "import setuptools.build_meta as b, sys; getattr(b, f'build_{sys.argv[1]}')(sys.argv[2])"  # as `make wheel`


def call(folder: Path, *command: str | Path) -> str:
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: in a checkout, what an earlier build has left would come along."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "stretto", folder / "stretto", ignore=shutil.ignore_patterns("__pycache__"))
    call(folder, sys.executable, "-c", BUILD, "sdist", "dist")
    return folder / "dist" / f"stretto-{__version__}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    call(sdist.parent / f"stretto-{__version__}", sys.executable, "-c", BUILD, "wheel", "..")
    return next(sdist.parent.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "stretto").rglob("*") if path.is_file()}
    wanted = {name for name in there if "__pycache__" not in name}
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == wanted and {"stretto/recipes/demo.toml", "stretto/report/page.js", "stretto/py.typed"} <= held


def test_it_trains_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of these tests, by a .pth file; nothing is downloaded."""
    venv.create(tmp_path / "venv", with_pip=False)
    python, stretto = (tmp_path / "venv" / "bin" / name for name in ("python", "stretto"))
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    call(tmp_path, *pip, "install", "--no-deps", "--no-index", wheel)
    # Behind the wheel. Without the .pth files in that folder, so a checkout that is installed there stays unseen.
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    text = write_corpus(tmp_path / "text")
    code = "import stretto; print(stretto.__file__)"
    assert Path(call(tmp_path, python, "-c", code).strip()).is_relative_to(tmp_path)
    assert __version__ in call(tmp_path, stretto, "--version")
    assert "[techniques]" in call(tmp_path, stretto, "config")
    small = ["train.steps=3", "train.log_every=1", f"data.train={text}", "data.seq_len=32", "run.device=cpu"]
    call(tmp_path, stretto, "train", "demo", *(word for key in small for word in ("--set", key)))
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 10_000
