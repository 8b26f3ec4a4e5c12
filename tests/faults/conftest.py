"""One small trained run, of which each test gets a copy to spoil; and the counts of the fault matrix (matrix.py)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto.config import build_config
from stretto.train import train
from tests.corpora import write_corpus
from tests.faults.fleet import Fleet
from tests.faults.runs import Runs
from tests.server import Server, find_server

Tally = Callable[[str, int], None]


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Adds to what the row of this test has counted: `tally("kills", 25)`."""

    def add(what: str, number: int) -> None:
        request.node.user_properties.append((f"tally: {what}", number))

    return add


@pytest.fixture(scope="session")
def whole() -> bool:
    """Whether all cases are tried, as in `make faults`, or a sample, as in `make test`."""
    return bool(os.environ.get("STRETTO_FAULTS"))


@pytest.fixture
def thorough(whole: bool) -> None:
    """Of tests that take longer, or try what a quicker one tries in another place: they run in `make faults` alone."""
    if not whole:
        pytest.skip("in `make faults`")


@pytest.fixture(scope="session")
def server() -> Server:
    """Starts processes in no time."""
    return find_server()


@pytest.fixture(scope="session")
def runs(server: Server) -> Runs:
    return Runs(server)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    tree = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "data": {"train": str(write_corpus(folder / "text")), "seq_len": 16, "batch_size": 4, "suffix": ".txt"},
        "model": {"layers": 1, "width": 16, "heads": 2, "max_len": 32},
        "optim": {"lr": 1e-2, "warmup": 2},
        "train": {"steps": 4, "log_every": 1, "eval_batches": 1},
        "checkpoint": {"every": 2},
    }
    return train(build_config(tree))


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture
def fleet(server: Server, trained_run: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(server, tmp_path, trained_run)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def fleet_of_module(server: Server, trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(server, tmp_path_factory.mktemp("fleet"), trained_run)
    yield fleet
    fleet.close()
