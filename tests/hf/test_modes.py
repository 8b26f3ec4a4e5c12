"""Accelerated models in the ways models are run: recomputed, compiled, generating, in several processes."""

from __future__ import annotations

import copy
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import stretto
from stretto.hf.loop import Step
from stretto.optim import FlatAdamW
from tests.hf.families import DECODERS, FAMILIES, FLOOR, PAIRS, accelerated, assert_parity, build, draw_batch, learn
from tests.hf.observe import count_tokens

RECOMPUTED = ["bert", "gpt2", "llama", "bart", "marian", "t5", "vit"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", RECOMPUTED)
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    batch = draw_batch(family)
    exact, plain = learn(build(family, torch.float64), batch), learn(build(family), batch)
    model = accelerated(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads() if family != "vit" else None
    with count_tokens() as tokens:
        found = learn(model, batch)
    assert_parity(found, plain, exact, FLOOR)
    attentions = 6 if family in PAIRS else 2
    assert len(tokens) == 2 * attentions, "every layer runs twice"


@pytest.mark.parametrize("family", [*DECODERS, *PAIRS])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation(family: str, beams: int) -> None:
    batch = draw_batch(family)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if family not in PAIRS:  # decoders are padded on the left
        ids, mask = ids.flip(1), mask.flip(1)
    options = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "pad_token_id": 1, "eos_token_id": 2}
    plain, model = build(family).eval(), accelerated(family).eval()
    expected, found = (m.generate(input_ids=ids, attention_mask=mask, **options) for m in (plain, model))
    assert torch.equal(found, expected)
    with torch.no_grad():
        learn(model, batch)  # and a call afterwards is as ever


QUICK = ("bert", "gpt2", "llama", "t5", "vit")
COMPILED = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
    for family in FAMILIES
    # Left out are those that have the layers of others, with other options.
    if family not in ("bert-classes", "roberta", "qwen2", "marian", "marian-swish", "t5-gated")
]


@pytest.mark.parametrize("family", COMPILED)
def test_torch_compile(family: str) -> None:
    batch = draw_batch(family)
    exact, plain = learn(build(family, torch.float64), batch), learn(build(family), batch)
    model = accelerated(family)
    torch._dynamo.reset()
    breaks = ["bart", "gpt2"]  # the graph, in their own code: layerdrop, a warning
    if torch.__version__ < TorchVersion("2.13"):
        breaks.append("t5")  # it copies a configuration, which these versions cannot trace
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=not family.startswith(tuple(breaks)))
    found = learn(compiled, batch)
    found = {name.removeprefix("_orig_mod."): t for name, t in found.items()}
    assert_parity(found, plain, exact, FLOOR)


@pytest.fixture
def replicate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torch.nn.DataParallel calls on several GPUs, as transformers' Trainer does in one process: copies of modules
    over copies of weights. Here they are on the CPU."""
    module: Any = sys.modules["torch.nn.parallel.replicate"]
    copy_all = lambda tensors, devices, detach=False: [[t.clone() for t in tensors] for _ in devices]  # noqa: E731
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copy_all)
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device)
    return module.replicate


@pytest.mark.parametrize("family", ["bert-classes", "gpt2", "t5"])
def test_replicas_of_data_parallel(family: str, replicate: Any) -> None:
    model, batch, expected = accelerated(family), draw_batch(family), learn(build(family), draw_batch(family))
    for replica in replicate(model, [0, 1]):
        model.zero_grad()
        out = replica(**batch)
        assert type(out.loss) is type(out.logits) is Tensor, "what is gathered from the replicas"
        out.loss.backward()
        torch.testing.assert_close(out.loss, expected["loss"], rtol=1e-4, atol=1e-5)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected.get(name), rtol=1e-3, atol=1e-5, msg=f"{name}: {{}}".format)


def test_replicas_see_no_padding(replicate: Any) -> None:
    """Of a model that calls its layers itself, too."""
    batch = draw_batch("bert")
    given, real = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["attention_mask"] != 0
    expected = build("bert").bert(**given).last_hidden_state
    model = stretto.accelerate(build("bert").bert)
    for each in (model, *replicate(model, [0])):
        torch.testing.assert_close(each(**given).last_hidden_state[real], expected[real], rtol=1e-4, atol=1e-4)


TOGETHER = ["bert", "llama", "t5"]


def run_rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for family in TOGETHER:
        model = DistributedDataParallel(accelerated(family))
        model(**draw_batch(family, seed=rank)).loss.backward()
        if rank == 0:
            gradients = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
            torch.save(gradients, Path(folder) / f"{family}.pt")
    with pytest.raises(ValueError, match="the model inside DistributedDataParallel, before it is wrapped"):
        stretto.accelerate(model)
    with pytest.raises(ValueError, match="Step takes the model inside DistributedDataParallel"):
        Step(model, FlatAdamW(model.parameters(), lr=0.1))
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    with pytest.raises(ValueError, match="the processes begin with different weights"):
        Step(model.module, FlatAdamW(model.parameters(), lr=0.1))
    # Gloo's thread may still want the GIL for the last sum; whoever destroys its group with it in hand waits for ever.
    torch.distributed.barrier()
    del model
    torch.distributed.destroy_process_group()


@pytest.mark.dist
def test_two_processes(tmp_path: Path) -> None:
    """Their gradients are the average of both, and what needs to be said before or cannot be done is an error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (port, str(tmp_path)), nprocs=2)
    for family in TOGETHER:
        found = torch.load(tmp_path / f"{family}.pt", weights_only=True)
        plain, exact = average(family, torch.float32), average(family, torch.float64)
        assert found.keys() == plain.keys()
        assert_parity(found, plain, exact, FLOOR)


def average(family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the gradients of two batches."""
    parts = [learn(build(family, dtype), draw_batch(family, seed=rank)) for rank in range(2)]
    return {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0] if name not in ("loss", "logits")}


def test_training_steps_go_the_same_way() -> None:
    """A few steps of AdamW, in which errors could add up."""
    losses: list[list[float]] = []
    for model in (build("bert"), accelerated("bert")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for step in range(12):
            out = model(**draw_batch("bert", seed=step % 3))
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(out.loss.detach()))
    assert losses[0][-1] < losses[0][0] - 0.5
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)


def test_evaluation_inside_training_and_two_models_at_once() -> None:
    batch, model = draw_batch("bart"), stretto.accelerate(build("bart"))
    other = stretto.accelerate(copy.deepcopy(stretto.restore(copy.deepcopy(model))))
    first: nn.Module = model
    expected = learn(build("bart"), batch)
    out, again = first(**batch), other(**batch)
    with torch.no_grad():
        other.eval()(**batch)
    (out.loss + again.loss).backward()
    for each in (first, other):
        for name, p in each.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)
