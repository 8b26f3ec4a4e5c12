"""What is said to need more memory than there is would really need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto import capacity, hardware
from stretto.capacity import count_kept, require_room
from stretto.config import build_config
from stretto.data import open_data
from stretto.errors import ConfigError
from stretto.hardware import find_machine_memory
from stretto.model import build_model
from tests.corpora import write_corpus, write_images
from tests.models import materialise

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "gated": {"kv_heads": 2, "activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False},
    "relu": {"activation": "relu"},
    "encoder": {"kind": "encoder", "norm_order": "post"},
    "vit": {"kind": "vit", "image_size": 16, "patch": 4, "classes": 4},
}
TASKS = {"encoder": "masked", "vit": "images"}


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_plain_blocks_keep_at_least_what_is_counted(name: str, join: bool, tmp_path: Path) -> None:
    """By the tensors that autograd keeps, other than weights; and it is more than half of them."""
    task = TASKS.get(name, "causal")
    source = write_images(tmp_path / "images.npz") if task == "images" else write_corpus(tmp_path / "text")
    data = {"task": task, "train": str(source), "seq_len": 32, "batch_size": 8, "join_documents": join}
    model = {"layers": 3, "width": 64, "heads": 4, "vocab": 320} | KINDS[name]
    config = build_config({"run": {"device": "cpu"}, "data": data | {"suffix": ".txt"}, "model": model})
    batch = open_data(config.data, seed=0, folder=tmp_path / "data", image_size=16).train_batch(0)
    built = build_model(config.model)
    materialise(built, config.model, 0, CPU)
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        built.train()(batch)
    there = sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights)
    assert there / 2 < 8 * count_kept(config, 4) <= there


def test_a_batch_that_fills_the_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input alone would fit, and a run would be ended by the system in its first step."""
    monkeypatch.setattr(capacity, "find_machine_memory", lambda: 2**35)
    tree: dict[str, Any] = {"data": {"batch_size": 20_000}, "model": {"layers": 4, "width": 128, "vocab": 320}}
    with pytest.raises(ConfigError, match=r"data\.batch_size = 20,000, data\.seq_len = 256: .* the machine has 32\.0"):
        require_room(build_config(tree), 1, 0)
    short = {"data": tree["data"] | {"task": "instruct"}}  # samples need not be full
    others = {"data": {"batch_size": 500}}, {"train": {"compile": True}}, {"techniques": {"layer_drop": True}}
    for fitting in (short, *others):
        require_room(build_config(tree | fitting), 1, 0)
    require_room(build_config(tree), 1, 80 * 2**30)  # a GPU keeps less, and says itself that its memory is full


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (tmp_path / "memory.max", tmp_path / "limit_in_bytes")
    monkeypatch.setattr(hardware, "CONTAINER", limits)
    whole = find_machine_memory()
    limits[0].write_text("max\n")
    assert find_machine_memory() == whole
    limits[1].write_text(f"{2**30}\n")
    assert find_machine_memory() == 2**30
