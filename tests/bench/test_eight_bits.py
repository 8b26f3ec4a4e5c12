"""The recipe of 2018 through a whole model: emulated products in all layers, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.eight_bits import FIXED, run
from bench.emulated import LOSS_SCALE, Emulated, Momentum, set_products
from stretto.batch import Batch
from stretto.build import build
from stretto.config import Config, load_config
from stretto.data import open_data
from stretto.mesh import Mesh
from stretto.model import sites
from stretto.numerics.formats import IBM8, IBM16, Format
from stretto.ops.products import Product
from stretto.recipes import find_recipe
from stretto.runtime import Runtime
from stretto.train import complete
from tests.corpora import write_corpus

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def text(tmp_path: Path) -> Callable[..., Config]:
    """A GPT of one block and width 32."""
    write_corpus(tmp_path / "text")

    def configure(tokens: int) -> Config:
        changes = [
            f"data.train={tmp_path / 'text'}", "data.suffix=.txt", "data.tokenizer=bytes", "data.seq_len=64",
            f"data.batch_size={tokens // 64}", "model.preset=gpt2-tiny", "model.vocab=0", "model.width=32",
            "model.layers=1",
        ]  # fmt: skip
        return load_config(find_recipe("causal-lm"), [*FIXED, *changes])

    return configure


def end(losses: list[float]) -> float:
    return sum(losses[-4:]) / 4


def test_a_gpt_trains_as_in_fp32(text: Callable[..., Config], tmp_path: Path) -> None:
    exact, narrow = (run(text(128), tmp_path, product, 24, 0.3) for product in (None, Emulated()))
    assert end(exact) < exact[0] - 2 and exact != narrow
    assert abs(end(narrow) - end(exact)) < 0.01 * end(exact)


def test_a_gpt_needs_chunks(text: Callable[..., Config], tmp_path: Path) -> None:
    """In 4 mantissa bits, sums of more than 32 equal terms stop: 512 tokens are 16 times that, as 16,384 are in the 9
    bits of the recipe, too many for a test."""
    config, sums = text(512), Format(6, 4)
    ways = (None, Emulated(sums=sums, chunk=16), Emulated(sums=sums, chunk=0))
    exact, chunked, whole = (end(run(config, tmp_path, product, 9, 0.3)) for product in ways)
    assert abs(chunked - exact) < 0.03 * exact < 0.1 * exact < whole - exact


def test_gradients_of_4096_tokens_need_chunks_in_9_bits(text: Callable[..., Config], tmp_path: Path) -> None:
    """The recipe's own sums at a real length: the bias of a weight's gradient, of the same factors of 8 bits."""
    config = text(4096)
    data = open_data(config.data, seed=0, folder=tmp_path)
    batch, gradients = data.train_batch(0), {}
    for name, product in {"exact": Emulated(sums=Format(10, 40)), "64": Emulated(), "0": Emulated(chunk=0)}.items():
        gradients[name] = learn(complete(config, data, Mesh()), batch, product)
    error = {name: float((g - gradients["exact"]).norm() / gradients["exact"].norm()) for name, g in gradients.items()}
    assert error["64"] < 0.006 and error["0"] > 4 * error["64"]


def learn(config: Config, batch: Batch, product: Emulated) -> torch.Tensor:
    """The gradient of the second product of the MLP alone: others follow from it."""
    model = build(config, Runtime(torch.device("cpu")), Mesh()).model.train()
    for name in sites(model)["block"]:
        model.get_submodule(name).mlp.down.product = product  # type: ignore[union-attr]
    (LOSS_SCALE * model(batch) / batch.counts.labels).backward()
    grad = model.get_parameter("decoder.blocks.0.mlp.down.weight").grad
    assert grad is not None
    return grad


def test_a_vit_trains_as_in_fp32(tmp_path: Path) -> None:
    """Classes are colours."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 128)
    colours = np.array([[220, 40, 40], [40, 220, 40], [40, 40, 220], [200, 200, 200]])[labels][:, None, None]
    images = (colours + random.integers(-40, 36, (128, 32, 32, 3))).astype(np.uint8)
    np.savez(tmp_path / "colours.npz", images=images, labels=labels)
    sizes = ["model.layers=1", "model.width=48", "model.heads=3"]
    changes = [*FIXED, f"data.train={tmp_path / 'colours.npz'}", "data.batch_size=4", *sizes]
    config = load_config(find_recipe("images"), changes)
    exact, narrow = (run(config, tmp_path, product, 16, 0.01) for product in (None, Emulated()))
    assert end(exact) < exact[0] / 2 and exact != narrow
    assert abs(end(narrow) - end(exact)) < 0.05 * exact[0]


def test_who_multiplies_how(text: Callable[..., Config], tmp_path: Path) -> None:
    """All products of blocks have 8 bits, the output layer has 16; weights and moments are numbers of (1,6,9)."""
    config = text(128)
    data = open_data(config.data, seed=0, folder=tmp_path)
    model = build(complete(config, data, Mesh()), Runtime(torch.device("cpu")), Mesh()).model.train()
    product = Emulated()
    set_products(model, sites(model)["block"], product)
    found = {name: layer.product for name, layer in model.named_modules() if hasattr(layer, "product")}
    inside = {f"decoder.blocks.0.{name}" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    assert found.pop("head") == Emulated(IBM16, IBM16) and found == dict.fromkeys(inside, product)
    update = Momentum(0.3).start(model.parameters())
    (LOSS_SCALE * model(data.train_batch(0))).backward()
    update()
    assert all(torch.equal(IBM16.round(p), p.double()) and p.grad is None for p in model.parameters())


def test_an_emulated_product_is_that_of_rounded_factors() -> None:
    """With sums wide enough, all three products are those of rounded factors."""
    torch.manual_seed(0)
    x, weight, bias, dout = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3), torch.randn(5, 3)
    wide, plain = Emulated(sums=Format(10, 40)), Product()
    x8, weight8, dout8 = (IBM8.round(t).double() for t in (x, weight, dout))
    out, kept = wide.multiply(x, weight, bias)
    assert torch.allclose(out, plain.multiply(x8, weight8, bias.double())[0].float())
    found = wide.compute_gradients(dout, kept, weight)
    for one, other in zip(found, plain.compute_gradients(dout8, (x8,), weight8), strict=True):
        assert one is not None and other is not None and torch.allclose(one, other.float())
