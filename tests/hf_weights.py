"""The parameters of `transformers` models under our names and in our shapes, for tests that compare the two.

One table per model. A row gives the transformers module (or parameter) that one of ours corresponds to: `#` is the
number of the layer, and `{q,k,v}` means that our rows are those of q, then k, then v. GPT-2's Conv1D keeps its weights
transposed; a shape that differs otherwise (ViT's convolution and class token) is only another view of the same values.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_BERT = {
    "embedding.token": "bert.embeddings.word_embeddings",
    "embedding.position": "bert.embeddings.position_embeddings",
    "embedding.token_type": "bert.embeddings.token_type_embeddings",
    "embedding.norm": "bert.embeddings.LayerNorm",
    "encoder.blocks.#.attention.qkv": "bert.encoder.layer.#.attention.self.{query,key,value}",
    "encoder.blocks.#.attention.out": "bert.encoder.layer.#.attention.output.dense",
    "encoder.blocks.#.attention_norm": "bert.encoder.layer.#.attention.output.LayerNorm",
    "encoder.blocks.#.mlp.up": "bert.encoder.layer.#.intermediate.dense",
    "encoder.blocks.#.mlp.down": "bert.encoder.layer.#.output.dense",
    "encoder.blocks.#.mlp_norm": "bert.encoder.layer.#.output.LayerNorm",
}

_MARIAN_BLOCK = {
    "blocks.#.attention.qkv": "layers.#.self_attn.{q,k,v}_proj",
    "blocks.#.attention.out": "layers.#.self_attn.out_proj",
    "blocks.#.attention_norm": "layers.#.self_attn_layer_norm",
    "blocks.#.cross.q": "layers.#.encoder_attn.q_proj",
    "blocks.#.cross.kv": "layers.#.encoder_attn.{k,v}_proj",
    "blocks.#.cross.out": "layers.#.encoder_attn.out_proj",
    "blocks.#.cross_norm": "layers.#.encoder_attn_layer_norm",
    "blocks.#.mlp.up": "layers.#.fc1",
    "blocks.#.mlp.down": "layers.#.fc2",
    "blocks.#.mlp_norm": "layers.#.final_layer_norm",
}

TABLES: dict[str, dict[str, str]] = {
    "GPT2LMHeadModel": {
        "embedding.token": "transformer.wte",
        "embedding.position": "transformer.wpe",
        "decoder.blocks.#.attention.qkv": "transformer.h.#.attn.c_attn",
        "decoder.blocks.#.attention.out": "transformer.h.#.attn.c_proj",
        "decoder.blocks.#.attention_norm": "transformer.h.#.ln_1",
        "decoder.blocks.#.mlp.up": "transformer.h.#.mlp.c_fc",
        "decoder.blocks.#.mlp.down": "transformer.h.#.mlp.c_proj",
        "decoder.blocks.#.mlp_norm": "transformer.h.#.ln_2",
        "decoder.norm": "transformer.ln_f",
    },
    "LlamaForCausalLM": {
        "embedding.token": "model.embed_tokens",
        "decoder.blocks.#.attention.qkv": "model.layers.#.self_attn.{q,k,v}_proj",
        "decoder.blocks.#.attention.out": "model.layers.#.self_attn.o_proj",
        "decoder.blocks.#.attention_norm": "model.layers.#.input_layernorm",
        "decoder.blocks.#.mlp.up": "model.layers.#.mlp.{gate,up}_proj",
        "decoder.blocks.#.mlp.down": "model.layers.#.mlp.down_proj",
        "decoder.blocks.#.mlp_norm": "model.layers.#.post_attention_layernorm",
        "decoder.norm": "model.norm",
        "head": "lm_head",
    },
    "BertForMaskedLM": _BERT
    | {
        "head.transform": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions",  # only a bias: the weight is the embedding
    },
    "BertForSequenceClassification": _BERT
    | {
        "head.pooler": "bert.pooler.dense",
        "head.classifier": "classifier",
    },
    "MarianMTModel": {
        "embedding.token": "model.shared",
        **{f"encoder.{ours}": f"model.encoder.{theirs}" for ours, theirs in _MARIAN_BLOCK.items()},
        **{f"decoder.{ours}": f"model.decoder.{theirs}" for ours, theirs in _MARIAN_BLOCK.items()},
    },
    "ViTForImageClassification": {
        "embedding.patch": "vit.embeddings.patch_embeddings.projection",
        "embedding.class_token": "vit.embeddings.cls_token",
        "embedding.position": "vit.embeddings.position_embeddings",
        "encoder.blocks.#.attention.qkv": "vit.layers.#.attention.{q,k,v}_proj",
        "encoder.blocks.#.attention.out": "vit.layers.#.attention.o_proj",
        "encoder.blocks.#.attention_norm": "vit.layers.#.layernorm_before",
        "encoder.blocks.#.mlp.up": "vit.layers.#.mlp.fc1",
        "encoder.blocks.#.mlp.down": "vit.layers.#.mlp.fc2",
        "encoder.blocks.#.mlp_norm": "vit.layers.#.layernorm_after",
        "encoder.norm": "vit.layernorm",
        "head": "classifier",
    },
}


def translate(theirs: nn.Module, ours: nn.Module, read: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """`read` of each of their parameters (its value, its gradient) by our names: what `ours.load_state_dict` takes.

    Raises unless every parameter of ours is found and every trainable one of theirs is used.
    """
    table = TABLES[type(theirs).__name__]
    left = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    conv1d = {f"{name}.weight" for name, module in theirs.named_modules() if isinstance(module, Conv1D)}
    found = {}
    for name, parameter in ours.named_parameters():
        names = _their_names(table, name)
        parts = [read(left.pop(part)) for part in names]
        parts = [part.T if their_name in conv1d else part for part, their_name in zip(parts, names, strict=True)]
        found[name] = torch.cat(parts).reshape(parameter.shape)
    if left:
        raise KeyError(f"not in the table of {type(theirs).__name__}: {', '.join(left)}")
    return found


def _their_names(table: dict[str, str], name: str) -> list[str]:
    layer = re.search(r"\.(\d+)\.", name)
    pattern = re.sub(r"\.\d+\.", ".#.", name)
    module, _, leaf = pattern.rpartition(".")
    theirs = table[pattern] if pattern in table else f"{table[module]}.{leaf}"
    if layer:
        theirs = theirs.replace("#", layer[1])
    choices = re.search(r"{(.*)}", theirs)
    return [theirs.replace(choices[0], choice) for choice in choices[1].split(",")] if choices else [theirs]
