"""The four kinds of model compute what `transformers` computes from the same weights, and have its sizes.

Theirs reads a padded rectangle with an attention mask; ours reads the same sequences packed, and padded too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from stretto.config import build_config
from stretto.model import Model, build_model
from tests.hf_weights import translate
from tests.models import get_grad
from tests.parity_cases import CASES, COMMON, ROPE_SCALING, build_ours, get_case, measure_error, their_logits

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-5


FORMS = [(name, form) for name in CASES for form in (["dense"] if name == "vit" else ["packed", "padded"])]


@pytest.mark.parametrize("name,form", FORMS)
def test_logits_equal_theirs(name: str, form: str) -> None:
    case = get_case(name)
    assert their_logits(case).std() > 0.3  # or an absolute bound would mean nothing
    assert measure_error(case, build_ours(case), form) < TOLERANCE


@pytest.mark.parametrize("name,form", FORMS)
def test_gradients_equal_theirs(name: str, form: str) -> None:
    case = get_case(name)
    ours = build_ours(case).train()  # no dropout here, but label smoothing
    for tensor in chain(case.theirs.parameters(), case.theirs.buffers()):
        tensor.grad = None
    smoothing = case.cfg.label_smoothing
    theirs = F.cross_entropy(their_logits(case), case.labels, reduction="sum", label_smoothing=smoothing)
    loss = ours(case.batches[form][0])
    theirs.backward()
    loss.backward()
    torch.testing.assert_close(loss, theirs, rtol=TOLERANCE, atol=0)
    wanted = translate(case.theirs, ours, get_grad)
    for key, parameter in ours.named_parameters():
        error, scale = (get_grad(parameter) - wanted[key]).abs().max(), wanted[key].abs().max()
        assert scale > 1e-3, f"{key} hardly matters here"
        assert error < TOLERANCE * max(1.0, float(scale)), key


@pytest.mark.parametrize("name,form", FORMS)
def test_every_parameter_counts(name: str, form: str) -> None:
    """The comparison above would notice the loss of any one of the parameters."""
    case = get_case(name)
    ours = build_ours(case)
    for key, parameter in ours.named_parameters():
        value = parameter.data.clone()
        parameter.data.zero_()
        assert measure_error(case, ours, form) > 10 * TOLERANCE, key
        parameter.data.copy_(value)
    assert measure_error(case, ours, form) < TOLERANCE


@pytest.mark.parametrize(
    "name,key,sizes",
    [
        ("gpt2", "decoder.blocks.1.attention.qkv.weight", (30, 30, 30)),
        ("llama-tied", "decoder.blocks.0.mlp.up.weight", (50, 50)),
        ("bert-masked", "encoder.blocks.1.attention.qkv.bias", (36, 36, 36)),
        ("marian", "decoder.blocks.2.cross.kv.weight", (36, 36)),
        ("vit", "encoder.blocks.0.attention.qkv.weight", (30, 30, 30)),
    ],
)
def test_notices_swapped_parts(name: str, key: str, sizes: tuple[int, ...]) -> None:
    """q and k (gate and up, k and v) in each other's place: shapes still fit, so only the values can tell."""
    case = get_case(name)
    ours = build_ours(case)
    first, second, *rest = ours.get_parameter(key).data.split(sizes)
    ours.get_parameter(key).data = torch.cat([second, first, *rest])
    assert measure_error(case, ours, next(iter(case.batches))) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "name,change",
    [
        ("gpt2", {"norm_eps": 1e-5}),
        ("gpt2", {"activation": "gelu"}),
        ("gpt2", {"heads": 5}),
        ("llama-tied", {"norm_eps": 1e-5}),
        ("llama-tied", {"rope_theta": 10000.0}),
        ("llama-tied", {"heads": 18, "kv_heads": 6}),
        ("llama-scaled", {"rope_scaling": None}),
        ("llama-scaled", {"rope_scaling": replace(ROPE_SCALING, factor=6.0)}),
        ("llama-scaled", {"rope_scaling": replace(ROPE_SCALING, low_freq_factor=1.0)}),
        ("llama-scaled", {"rope_scaling": replace(ROPE_SCALING, high_freq_factor=3.0)}),
        ("llama-scaled", {"rope_scaling": replace(ROPE_SCALING, original_max_position_embeddings=80)}),
        ("bert-masked", {"norm_eps": 1e-12}),
        ("bert-masked", {"activation": "gelu_tanh"}),
        ("marian", {"embed_scale": False}),
        ("marian", {"activation": "gelu"}),
        ("marian", {"norm_eps": 1e-3}),
        ("opus-mt", {"activation": "gelu"}),
        ("bart", {"activation": "gelu_tanh"}),
        ("vit", {"norm_eps": 1e-12}),
        ("vit", {"activation": "relu"}),
    ],
)
def test_notices_a_wrong_option(name: str, change: dict[str, Any]) -> None:
    case = get_case(name)
    ours = build_ours(case, replace(case.cfg, **change))
    assert measure_error(case, ours, next(iter(case.batches))) > 10 * TOLERANCE


def build_preset(preset: str, **data: Any) -> Model:
    return build_model(build_config({"model": {"preset": preset}, "data": data}).model)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    "preset,task,count",
    [
        ("gpt2-small", "causal", 124_439_808),
        ("llama-1b", "causal", 1_235_814_400),
        ("bert-large", "masked", 335_174_458),
        ("vit-base", "images", 86_567_656),
    ],
)
def test_presets_have_the_published_sizes(preset: str, task: str, count: int) -> None:
    model = build_preset(preset, task=task)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert count_parameters(model) == count


def test_transformer_big_has_the_published_size() -> None:
    ours = build_preset("transformer-big", task="translation", languages=["en", "de"])
    with torch.device("meta"):
        theirs = hf.MarianMTModel(
            hf.MarianConfig(
                encoder_layers=6, decoder_layers=6, d_model=1024, encoder_attention_heads=16,
                decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096, vocab_size=37000,
                decoder_vocab_size=37000, max_position_embeddings=16, decoder_start_token_id=0, **COMMON,
            )
        )  # fmt: skip
    assert count_parameters(ours) == count_parameters(theirs)  # its tables of sines are parameters too, but frozen
    assert count_parameters(ours) == pytest.approx(213e6, rel=0.01)  # "Attention Is All You Need", table 3
