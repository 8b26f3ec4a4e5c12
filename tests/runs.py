"""Tiny runs: their configurations as trees, and what they left in their folders."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import stretto.build
from stretto.config import Config
from stretto.graphs import Auto
from stretto.mesh import Mesh
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.techniques import open_techniques
from tests.corpora import write_corpus

MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parents[1]
PATIENCE_S = 600  # for another process: on a machine that others use too, it can be many times slower than alone


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def find_imported(code: str, *names: str) -> list[str]:
    """Those of these modules that Python has imported when it has run the code, in a process of its own."""
    code += f"\nimport sys; print(*[name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def base(folder: Path) -> dict[str, Any]:
    """A tiny causal run whose corpus lies in the folder."""
    return {
        "run": {"dir": "", "device": "cpu", "timeout_s": PATIENCE_S},
        "data": {"train": str(write_corpus(folder / "text")), "seq_len": 16, "batch_size": 4, "suffix": ".txt"},
        "model": {"layers": 2, "width": 32, "heads": 4, "max_len": 32, "dropout": 0.1},
        "optim": {"lr": 1e-2, "warmup": 5},
        "train": {"steps": 8, "log_every": 1, "micro_batches": 4, "eval_batches": 3, "eval_every": 4},
        "parallel": {"data": "replicate"},
    }


def change(tree: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of the tree; keyword arguments named section__key change it."""
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return tree


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss."""
    return {event["step"]: event["loss"] for event in read_events(folder) if "loss" in event}


def eval_losses(folder: Path) -> dict[int, float]:
    """Step -> loss on held-out data."""
    return {event["step"]: event["eval_loss"] for event in read_events(folder) if "eval_loss" in event}


def explain_graphs(config: Config) -> list[str]:
    """What the log of a run on a GPU would say about CUDA graphs."""
    gpu, update = Runtime(torch.device("cuda")), SimpleNamespace(optimizer=None)
    context = stretto.build.describe_context(config, gpu, Mesh())
    obstacles = stretto.build._find_obstacles(config, context, open_techniques(config, context))
    executor = stretto.build._choose_executor(config.train.graphs, update, None, obstacles, gpu)  # type: ignore[arg-type]
    assert isinstance(executor, Auto) == (config.train.graphs == "auto" and not obstacles)
    return executor.take_notes()
