"""Padded batches and packed documents: the layers run on real tokens alone, and nothing else changes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
import stretto.hf
import stretto.hf.unpad
from tests.hf.families import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    FLOOR,
    PAIRS,
    VOCAB,
    Batch,
    accelerated,
    assert_parity,
    build,
    draw_batch,
    learn,
)
from tests.hf.observe import count_tokens

PACKABLE = [family for family in FAMILIES if family not in ("mistral", "vit")]
MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] * 8 + [1]],
    "holes": [[1, 1, 0, 0, 1, 1, 1, 0, 1], [1, 0, 1, 0, 1, 0, 1, 0, 1], [1] * 9],
    "empty row": [[1] * 9, [0] * 9, [1, 1, 1, 1, 0, 0, 0, 0, 0]],
    "nothing at all": [[0] * 9] * 3,
    "full": [[1] * 9] * 3,
}


def compare(family: str, batch: Batch, training: bool = True) -> list[int]:
    exact = learn(build(family, torch.float64).train(training), batch)
    plain = learn(build(family).train(training), batch)
    with count_tokens() as tokens:
        model = accelerated(family).train(training)
        tokens.clear()
        found = learn(model, batch)
    assert_parity(found, plain, exact, FLOOR)
    return tokens


@pytest.mark.parametrize("family", PACKABLE)
def test_layers_see_real_tokens_only(family: str) -> None:
    tokens = compare(family, draw_batch(family))
    assert set(tokens) == ({18, 14} if family in PAIRS else {18})


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_whoever_evaluates_a_loss_keeps_no_cache(family: str) -> None:
    """By its configuration a decoder keeps a cache, and with it its padding, unless labels are given."""
    batch = draw_batch(family)
    plain, model = build(family).eval(), accelerated(family).eval()
    assert model.config.use_cache
    with torch.no_grad(), count_tokens() as tokens:
        found, expected = model(**batch), plain(**batch)
        assert set(tokens) == ({18, 14} if family in PAIRS else {18}) and found.get("past_key_values") is None
        ours, theirs = (each(**batch, use_cache=True).get("past_key_values") for each in (model, plain))
        assert (ours is None) == (theirs is None) == (family == "bart"), "which keeps none beside labels"
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", ["bert", "bert-classes", "roberta", "llama", "gpt2", "bart", "t5"])
def test_any_mask_gives_the_result_of_the_untouched_model(family: str, mask: str) -> None:
    batch = draw_batch(family)
    real = torch.tensor(MASKS[mask])
    batch["attention_mask"] = real
    if batch["labels"].shape == real.shape:
        batch["labels"] = batch["input_ids"].where((real != 0) | ~real.any(), torch.tensor(-100))
    if family in ("bert", "roberta"):  # no label at the first real token: a causal model would predict it from padding
        batch["labels"][:, 1:] = batch["labels"][:, 1:].where(real[:, :-1] != 0, torch.tensor(-100))
    tokens = compare(family, batch)
    if mask == "holes" and family == "t5":
        assert set(tokens) == {14}  # distances count the hole: the encoder keeps its rectangle
    elif mask == "left" and family == "bert-classes":
        assert tokens == []  # the class is read at padding
    elif mask in ("left", "holes") and family in ENCODERS:
        assert set(tokens) == {int(real.sum())}


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_an_empty_row_does_not_make_nan(family: str) -> None:
    batch = draw_batch(family)
    batch["attention_mask"] = torch.tensor(MASKS["empty row"])
    model = accelerated(family)
    if "labels" in batch and family == "bert":
        batch["labels"] = batch["labels"].where(batch["attention_mask"] != 0, torch.tensor(-100))
    found = learn(model, batch)
    assert all(bool(t.isfinite().all()) for t in found.values())


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_labels_on_padding_count_as_they_did(family: str) -> None:
    batch = draw_batch(family)
    batch["labels"] = batch["input_ids"]
    tokens = compare(family, batch)
    assert 18 not in tokens


def test_hidden_states_that_are_asked_for_are_rectangles() -> None:
    batch = draw_batch("bert")
    plain, fast = build("bert").eval(), accelerated("bert").eval()
    ours, theirs = (model(**batch, output_hidden_states=True).hidden_states for model in (fast, plain))
    real = batch["attention_mask"] != 0
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[real], other[real])


def test_question_answering_compares_with_padding_as_before() -> None:
    torch.manual_seed(0)
    model = hf.BertForQuestionAnswering(build("bert").config).eval()
    batch = {name: draw_batch("bert")[name] for name in ("input_ids", "attention_mask")}
    expected = model(**batch).start_logits
    torch.testing.assert_close(stretto.accelerate(model)(**batch).start_logits, expected)


def test_outputs_at_padding_are_zero() -> None:
    batch = {name: draw_batch("bert")[name] for name in ("input_ids", "attention_mask")}
    out = stretto.accelerate(build("bert").bert).eval()(**batch).last_hidden_state
    assert out.shape == (3, 9, 32) and out[batch["attention_mask"] == 0].eq(0).all()


@pytest.mark.parametrize("family", ["bert", "bart", "t5", "llama"])
def test_without_unpadding_the_rectangle_stays(family: str) -> None:
    model = accelerated(family, unpad=False)
    with count_tokens() as tokens:
        learn(model, draw_batch(family))
    assert 18 not in tokens


def documents() -> tuple[Batch, list[Tensor]]:
    """Two rows with documents of 4, 1 and 4, and of 2 and 7 tokens."""
    ids = torch.randint(4, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    parts = [ids[0, :4], ids[0, 4:5], ids[0, 5:], ids[1, :2], ids[1, 2:]]
    positions = torch.cat([torch.arange(len(part)) for part in parts]).view(2, 9)
    return {"input_ids": ids, "position_ids": positions}, parts


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", DECODERS)
def test_documents_in_a_row_do_not_see_each_other(family: str, training: bool) -> None:
    batch, parts = documents()
    plain, model = build(family).train(training), accelerated(family, packed=True).train(training)
    expected = torch.cat([plain(part[None]).logits[0] for part in parts])
    with count_tokens() as tokens:
        found = model(**batch, use_cache=False).logits.flatten(0, 1)
    torch.testing.assert_close(found, expected)
    assert set(tokens) == (set() if family == "mistral" else {18})  # a window of 4 is shorter than a document


def test_documents_by_offsets() -> None:
    batch, parts = documents()
    flat = {name: t.view(1, -1) for name, t in batch.items()}
    offsets = torch.tensor([0, 4, 5, 9, 11, 18], dtype=torch.int32)
    model = accelerated("llama", packed=True)
    expected = torch.cat([build("llama")(part[None]).logits[0] for part in parts])
    found = model(**flat, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=7, max_length_k=7).logits[0]
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="cu_seq_lens_q ends at 18, but the batch is"):
        model(**batch, cu_seq_lens_q=offsets)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_documents_without_ends_are_an_error(family: str) -> None:
    batch, _ = documents()
    model = accelerated(family, packed=True)
    with pytest.raises(ValueError, match="needs the ends of documents"):
        model(input_ids=batch["input_ids"])
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**batch, use_cache=True)
    numbered = torch.tensor([[1] * 4 + [2] * 5, [1] * 2 + [2] * 7])
    unpacked = accelerated(family)
    with pytest.raises(ValueError, match="a mask is 0 or 1"):
        unpacked(input_ids=batch["input_ids"], attention_mask=numbered)
    learn(unpacked, draw_batch(family))  # an error leaves nothing behind


def test_a_model_that_cannot_keep_documents_apart_says_so_at_once() -> None:
    for options in ({"fused": False}, {}):
        model = build("bert" if not options else "llama")
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match="cannot keep packed documents apart"):
            stretto.accelerate(model, packed=True, **options)
        assert [type(module) for module in model.modules()] == kinds


class Mixing(hf.BertForMaskedLM):
    """A model whose layers look at neighbours outside attention, which packing would mix."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        layers: Any = self.bert.encoder.layer
        for layer in layers:
            layer.intermediate.dense.register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(1, 1),))


def test_layers_that_mix_tokens_keep_their_padding() -> None:
    torch.manual_seed(0)
    plain: nn.Module = Mixing(build("bert").config).eval()
    batch = draw_batch("bert")
    expected = plain(**batch).logits
    model = stretto.accelerate(plain, fused=True)
    problems = {line.role: line.problem for line in stretto.hf.report(model).lines}
    assert "other results" in str(problems["padding"])
    torch.testing.assert_close(model(**batch).logits, expected)


class CountWaits(TorchDispatchMode):
    """What makes the host wait for a GPU, besides the one read of what the masks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::equal"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_the_host_waits_once_for_masks_and_labels(family: str) -> None:
    model, batch = accelerated(family), draw_batch(family)
    with CountWaits() as waits, patch.object(stretto.hf.unpad, "_measure", wraps=stretto.hf.unpad._measure) as read:
        model(**batch).loss.backward()
    assert waits.names == [], "but for that reading"
    assert read.call_count == (2 if family == "t5" else 1), "each mask is looked at once"
