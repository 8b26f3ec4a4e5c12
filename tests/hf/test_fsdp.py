"""FSDP2 around accelerated models, in all the usual ways: units are layers, or parts of them, the head, the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from stretto.hf import set_step
from tests.hf.families import accelerated, build, draw_batch

PARTS = ("self_attn", "mlp", "attn", "encoder_attn", "intermediate", "output", "fc2", "SelfAttention", "DenseReluDense")
pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP's own, about a group of one


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def shard(model: Any, units: str) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (1,))
    parts: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        *path, last = name.split(".")
        nested = any(name.startswith(f"{outer}.") for outer, _ in parts)
        if units == "parts" and last in PARTS and any(map(str.isdigit, path)) and not nested:
            parts.append((name, module))
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and not any(part.isdigit() for part in name.split(".")[:-1])
    ]
    head = [("head", model.get_output_embeddings())] if units == "head" else []
    for _, module in (*parts, *layers, *head):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True if units == "root" else None)
    return model


def learn(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    out = model(**batch)
    out.loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore
    return found | {"loss": out.loss.detach()}


@pytest.mark.parametrize("units", ["layers", "parts", "root", "head"])
@pytest.mark.parametrize("family", ["t5", "gpt2", "bart", "llama", "bert", "vit"])
def test_gradients_are_those_of_the_untouched_model(family: str, units: str) -> None:
    if units == "head" and family != "llama":
        pytest.skip("its head is its embedding, or it has none")
    batch = draw_batch(family)
    expected = learn(shard(build(family), units), batch)
    found = learn(shard(accelerated(family), units), batch)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_weights_of_norms_are_looked_at_as_a_whole(family: str) -> None:
    batch = draw_batch(family)
    expected = learn(shard(build(family), "layers"), batch)
    model = accelerated(family, lean={"activations": "input"})
    norms = [module for module in model.modules() if "from_output" in vars(module)]
    shard(model, "layers")
    set_step(model, 0)
    torch.testing.assert_close(learn(model, batch), expected, rtol=1e-3, atol=1e-5)
    torch.nn.init.zeros_(norms[1].weight)
    set_step(model, 64)
    assert [norm.from_output for norm in norms] == [True, False, *[True] * (len(norms) - 2)]


@pytest.mark.parametrize("units", ["layers", "root", "head"])
def test_logits_can_be_read_afterwards(units: str) -> None:
    batch = draw_batch("llama")
    expected, found = (shard(m, units)(**batch).logits for m in (build("llama"), accelerated("llama")))
    real = batch["attention_mask"] != 0
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
