"""Query, key and value as one product, and rotary positions by one kernel."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from torch import Tensor

import stretto
import stretto.hf
import stretto.hf.modules
from stretto.hf.modules import find_rotary, rotate_both
from stretto.hf.unpad import Packing
from stretto.ops.heads import project_heads, rotate_heads
from tests.hf.families import FLOOR, WIDTH, accelerated, assert_parity, build, draw_batch, learn

# Products of queries, keys and values together; of keys and values where queries come from another stack
TOGETHER = {"bert": [3] * 2, "roberta": [3] * 2, "llama": [3] * 2, "qwen2": [3] * 2, "vit": [3] * 2}
TOGETHER |= {"bart": [3, 3, 3, 2, 3, 2], "t5": [3, 3, 3, 2, 3, 2]}


@pytest.mark.parametrize("family", TOGETHER)
def test_linear_layers_that_are_given_one_input_make_one_product(family: str) -> None:
    model, batch, seen = accelerated(family), draw_batch(family), list[int]()

    def note(x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[int], **options: Any) -> tuple[Tensor, ...]:
        seen.append(len(parts))
        return project_heads(x, weight, bias, parts, **options)

    with patch.object(stretto.hf.modules, "project_heads", note):
        learn(model, batch)
        assert seen == TOGETHER[family]
        with torch.no_grad():
            learn(model.eval(), batch)
        assert seen == TOGETHER[family], "only while gradients are recorded"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("lengths", [None, (9, 3, 6)], ids=["full", "padded"])
def test_rotary_positions_are_ours(family: str, lengths: tuple[int, ...] | None) -> None:
    batch, seen = draw_batch(family, lengths), list[Tensor]()
    exact, plain = learn(build(family, torch.float64), batch), learn(build(family), batch)
    model = accelerated(family)

    def note(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(cos)
        return rotate_heads(q, k, cos, sin)

    with patch.object(stretto.hf.modules, "rotate_heads", note):
        found = learn(model, batch)
    assert len(seen) == 2 and seen[0] is seen[1], "the angles are prepared once"
    assert_parity(found, plain, exact, FLOOR)
    assert find_rotary(hf.models.llama.modeling_llama.LlamaAttention.forward) == "apply_rotary_pos_emb"
    assert find_rotary(hf.models.gpt2.modeling_gpt2.GPT2Attention.forward) is None


def test_what_was_rotated_is_not_kept_as_it_was_before() -> None:
    """Queries, keys and values are one product, which the values alone would keep for the backward pass."""
    model, kept = accelerated("llama"), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(**draw_batch("llama", None)).loss.backward()
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    widths = [len(layer.weight) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    tokens, sizes = draw_batch("llama", None)["input_ids"].numel(), {t.untyped_storage().nbytes() for t in kept}
    assert tokens * sum(widths) * 4 not in sizes and tokens * widths[2] * 4 in sizes


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_weights_are_neither_joined_nor_cast_for_the_backward_pass(family: str) -> None:
    """Of fp32 weights under autocast attention keeps nothing but the parameters themselves."""
    model, kept = accelerated(family), list[Tensor]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model(**draw_batch(family)).loss.backward()
    theirs = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {t.untyped_storage().nbytes() for t in kept if t.untyped_storage().data_ptr() not in theirs}
    assert not sizes & {layers * WIDTH**2 * size for layers in (1, 2, 3) for size in (2, 4)}


def test_what_our_rotation_does_not_cover_is_theirs() -> None:
    calls: list[Any] = []

    def theirs(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(options)
        return args[0], args[1]

    q, k, cos = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 3, 8), torch.randn(2, 3, 8)
    rotate_both(theirs, q, k, cos, cos)
    assert not calls
    rotate_both(theirs, q, k, cos[..., :4], cos[..., :4])
    rotate_both(theirs, q, k, cos, cos, unsqueeze_dim=1)
    assert calls == [{}, {"unsqueeze_dim": 1}]


def test_the_modelling_file_is_untouched() -> None:
    module = hf.models.llama.modeling_llama
    before = module.apply_rotary_pos_emb
    stretto.accelerate(build("llama"))
    assert module.apply_rotary_pos_emb is before
    assert inspect.unwrap(module.LlamaAttention.forward).__globals__["apply_rotary_pos_emb"] is before


@pytest.mark.parametrize(("family", "packs"), [("llama", 3), ("bart", 3), ("t5", 3), ("bert", 1)])
def test_what_all_layers_are_given_is_packed_once(family: str, packs: int) -> None:
    model, batch, seen = accelerated(family), draw_batch(family), list[Any]()
    pack = Packing.pack

    def note(packing: Packing, x: Tensor) -> Tensor:
        seen.append(x.shape)
        return pack(packing, x)

    with patch.object(Packing, "pack", note):
        learn(model, batch)
    assert len(seen) == packs + (family == "llama"), seen
