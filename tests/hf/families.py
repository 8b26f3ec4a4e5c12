"""Tiny models of every family with random weights, batches for them, and what is compared: logits, loss, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import stretto

VOCAB, CLASSES, WIDTH = 61, 5, 32
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_PAIRS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_VIT: dict[str, Any] = {
    **_NO_DROPOUT,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": CLASSES,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "n_inner": 48,
}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_TEXT, **_NO_DROPOUT)),
    "bert-classes": lambda: hf.BertForSequenceClassification(hf.BertConfig(**_TEXT, **_NO_DROPOUT, num_labels=CLASSES)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**_TEXT, **_NO_DROPOUT)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=4)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA, tie_word_embeddings=True)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**_VIT)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_PAIRS)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**_PAIRS, activation_function="relu")),
    "marian-swish": lambda: hf.MarianMTModel(hf.MarianConfig(**_PAIRS, activation_function="swish")),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "t5-gated": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, feed_forward_proj="gated-gelu")),
}
ENCODERS, PAIRS = ("bert", "bert-classes", "roberta"), ("bart", "marian", "marian-swish", "t5", "t5-gated")
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
FLOOR = 3e-7  # a few roundings of fp32
Batch = dict[str, Tensor]
_ACCELERATED: dict[str, nn.Module] = {}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Values that every precision holds; norms and biases do something."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.05
            parameter.copy_((parameter + noise).bfloat16())
    return model.to(dtype).train()


def accelerated(family: str, dtype: torch.dtype = torch.float32, make: Any = build, **options: Any) -> Any:
    """An accelerated model of the family by itself: a copy of one that is made once, which takes most of the time."""
    key = repr((family, dtype, make.__name__, options))
    if key not in _ACCELERATED:
        _ACCELERATED[key] = stretto.accelerate(make(family, dtype), **options)
    return copy.deepcopy(_ACCELERATED[key])


def draw_batch(family: str, lengths: tuple[int, ...] | None = (9, 3, 6), seed: int = 0) -> Batch:
    """Padded to 9 tokens, with a mask; without lengths all rows are full, and there is none."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest = 3, 9
    if family == "vit":
        pixels = torch.randn(rows, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % CLASSES}
    ids = torch.randint(4, VOCAB, (rows, longest), generator=generator)
    real = torch.ones(rows, longest, dtype=torch.bool)
    if lengths is not None:
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": ids.where(real, torch.tensor(1))}
    if lengths is not None:
        batch["attention_mask"] = real.long()
    if family == "bert-classes":
        return batch | {"labels": torch.arange(rows) % CLASSES}
    if family in PAIRS:
        real = torch.arange(7) < torch.tensor([5, 7, 2])[:, None] if lengths is not None else torch.ones(rows, 7) > 0
        batch["labels"] = torch.randint(4, VOCAB, (rows, 7), generator=generator).where(real, torch.tensor(-100))
        if lengths is not None:
            batch["decoder_attention_mask"] = real.long()
        return batch
    labels = (
        ids if family in DECODERS else ids.where(torch.rand(ids.shape, generator=generator) < 0.4, torch.tensor(-100))
    )
    return batch | {"labels": labels.where(real, torch.tensor(-100))}


def learn(model: nn.Module, batch: Batch, autocast: bool = False, **options: Any) -> dict[str, Tensor]:
    """Logits at real positions, the loss, and in training every gradient."""
    dtype = next(model.parameters()).dtype
    batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        out = model(**batch, **options)
    real = batch.get("decoder_attention_mask", None if "decoder_input_ids" in batch else batch.get("attention_mask"))
    logits = out.logits[real != 0] if real is not None and out.logits.ndim == 3 else out.logits
    found = {"loss": out.loss.detach(), "logits": logits.detach() + 0}
    if model.training:
        out.loss.backward()
        found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative, in the Euclidean norm; a gradient that is nearly zero counts by the size of the largest."""
    assert found.keys() == exact.keys(), found.keys() ^ exact.keys()
    sizes = {name: float(t.double().norm()) for name, t in exact.items()}
    largest = max([size for name, size in sizes.items() if name not in ("loss", "logits")], default=0.0)
    least = {name: 0.0 if name in ("loss", "logits") else 1e-2 * largest for name in sizes}
    return {
        name: float((found[name].double() - exact[name].double()).norm()) / max(sizes[name], least[name], 1e-30)
        for name in exact
    }


def assert_parity(found: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], floor: float) -> None:
    """At most twice as far from fp64 as the untouched model; `floor` is a few roundings of the precision."""
    ours, theirs = errors(found, exact), errors(plain, exact)
    worse = {name: (ours[name], theirs[name]) for name in ours if not ours[name] <= 2 * theirs[name] + floor}
    assert not worse, worse
