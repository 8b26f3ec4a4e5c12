"""What blocks keep for the backward pass: the same numbers from fewer bytes, in every kind of model and composition."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.batch import Batch
from stretto.config import FusedConfig, LayerDropConfig, LeanConfig, ModelConfig, StandardizeConfig, TechniquesConfig
from stretto.errors import ConfigError
from stretto.model import Model, build_model, sites
from stretto.ops.remake import forgetting
from stretto.techniques.lean import LOOK, Lean
from stretto.techniques.technique import At, Context
from tests.models import CONFIGS, DEVICE, KINDS, apply_techniques, build, learn, make_batch, materialise

DROPPING = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
# What is computed again with the same bits: all but the norms' own choice.
AGAIN = {
    "mlp product": {"mlp": "product"},
    "mlp input": {"mlp": "input"},
    "qkv": {"mlp": "activation", "qkv": "input"},
    "both": {"mlp": "input", "qkv": "input"},
    "one block": {"blocks": 1},
    "all blocks": {"blocks": 2},
}


def lean(**options: Any) -> LeanConfig:
    return LeanConfig(**{"norms": "input", "mlp": "activation"} | options)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_computed_again_has_the_same_bits(name: str, way: str, dtype: torch.dtype) -> None:
    cfg = replace(KINDS[name], **DROPPING | ({"attention_dropout": 0.0} if "block" in way else {}))
    batch = make_batch(cfg)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    kept, again = (
        learn(build(cfg, FusedConfig(), dtype, options), batch, precision) for options in (None, lean(**AGAIN[way]))
    )
    assert_equal(again, kept)


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder"])
def test_blocks_that_drop_attention_drop_the_same_again(name: str, form: str) -> None:
    """By a key of their own: two runs of the block within one step give one loss and the gradient of that loss."""
    cfg = replace(KINDS[name], **DROPPING)
    if form == "padded":
        with pytest.raises(ConfigError, match="blocks: with data.layout = 'padded', attention_dropout"):
            chosen = TechniquesConfig(fused=FusedConfig(), lean=lean(blocks=1))
            apply_techniques(build_model(cfg), chosen, DEVICE, padded=True)
        return
    batch = make_batch(cfg)
    model = build(cfg, FusedConfig(), torch.float64, lean(blocks=2))
    found = learn(model, batch)
    weight = model.get_parameter("decoder.blocks.0.mlp.up.weight" if "decoder" in name else "encoder.blocks.0.mlp.up.weight")
    key = next(key for key, value in model.named_parameters() if value is weight)
    with torch.no_grad():
        weight[0, 0] += 1e-5
    moved = learn(model, batch)["loss"]
    with torch.no_grad():
        weight[0, 0] -= 2e-5
    slope = (moved - learn(model, batch)["loss"]) / 2e-5
    assert torch.allclose(slope, found[key][0, 0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", KINDS)
def test_norms_from_their_outputs(name: str) -> None:
    """The loss has the same bits, and so, in fp64, have all gradients but for rounding."""
    cfg, batch = replace(KINDS[name], **DROPPING), make_batch(KINDS[name])
    kept, less = (
        learn(build(cfg, FusedConfig(), torch.float64, options), batch)
        for options in (None, LeanConfig(norms="output"))
    )
    assert torch.equal(kept["loss"], less["loss"])
    for key, wanted in kept.items():
        torch.testing.assert_close(less[key], wanted, rtol=1e-10, atol=1e-10)
