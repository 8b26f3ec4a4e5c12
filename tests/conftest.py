"""Fixtures of all tests: a tiny configuration, one thread, and real data where there is some."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.config import Config, build_config
from tests.corpora import write_corpus
from tests.runs import MakeConfig, change

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # `make test` has a worker for each core


def pytest_configure() -> None:
    """Whoever starts the tests in the background may have these signals ignored, and processes would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Lets torch work with one thread: very small models wait for their threads most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A tiny causal run; keyword arguments named section__key change it."""

    def make(**changes: Any) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "data": {"train": str(tmp_path / "text"), "seq_len": 16, "batch_size": 4, "suffix": ".txt"},
            "model": {"layers": 2, "width": 32, "heads": 4, "max_len": 32, "dropout": 0.1},
            "optim": {"lr": 1e-2, "warmup": 5},
            "train": {"steps": 6, "log_every": 1, "eval_batches": 2},
        }
        tree = change(tree, **changes)
        if tree["data"].get("task", "causal") in ("causal", "masked"):
            write_corpus(Path(tree["data"]["train"]))
        return build_config(tree)

    return make


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("STRETTO_DATA")
    if not folder:
        pytest.skip("STRETTO_DATA does not name a folder with multi30k and wikitext2")
    return Path(folder)
