"""Our parameters under the names and in the shapes of a Hugging Face folder.

One table per class. A row gives their module (or parameter) that one of ours corresponds to: `#` is the number of the
layer, and `{q,k,v}` means that our rows are those of q, then k, then v. Values that are shaped differently: GPT-2 keeps
matrices transposed, BART's positions begin at row 2, and ViT has a convolution where we have a matrix.

The names are those on the disk, which transformers 4 and 5 share. `canonical` brings older and newer names to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from stretto.config import ModelConfig
from stretto.errors import CheckpointError

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
_TRANSLATION_BLOCK = {
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
_LOGITS_BIAS = "final_logits_bias"  # [1, V]
_TRANSLATION = {
    "embedding.token": "model.shared",
    **{f"encoder.{ours}": f"model.encoder.{theirs}" for ours, theirs in _TRANSLATION_BLOCK.items()},
    **{f"decoder.{ours}": f"model.decoder.{theirs}" for ours, theirs in _TRANSLATION_BLOCK.items()},
    "head.bias": _LOGITS_BIAS,
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
        "head": "lm_head",
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
    "BertForSequenceClassification": _BERT | {"head.pooler": "bert.pooler.dense", "head.classifier": "classifier"},
    "MarianMTModel": _TRANSLATION,
    "BartForConditionalGeneration": _TRANSLATION
    | {
        "embedding.position": "model.encoder.embed_positions",
        "embedding.norm": "model.encoder.layernorm_embedding",
        "target_embedding.position": "model.decoder.embed_positions",
        "target_embedding.norm": "model.decoder.layernorm_embedding",
    },
    "ViTForImageClassification": {
        "embedding.patch": "vit.embeddings.patch_embeddings.projection",
        "embedding.class_token": "vit.embeddings.cls_token",
        "embedding.position": "vit.embeddings.position_embeddings",
        "encoder.blocks.#.attention.qkv": "vit.encoder.layer.#.attention.attention.{query,key,value}",
        "encoder.blocks.#.attention.out": "vit.encoder.layer.#.attention.output.dense",
        "encoder.blocks.#.attention_norm": "vit.encoder.layer.#.layernorm_before",
        "encoder.blocks.#.mlp.up": "vit.encoder.layer.#.intermediate.dense",
        "encoder.blocks.#.mlp.down": "vit.encoder.layer.#.output.dense",
        "encoder.blocks.#.mlp_norm": "vit.encoder.layer.#.layernorm_after",
        "encoder.norm": "vit.layernorm",
        "head": "classifier",
    },
}

# Their names for copies of our parameters, which a file may have. Those of the output layer count where it is tied.
_COPIES = {
    "lm_head.weight": "embedding.token.weight",
    "cls.predictions.decoder.weight": "embedding.token.weight",
    "cls.predictions.decoder.bias": "head.bias",
    "model.encoder.embed_tokens.weight": "embedding.token.weight",
    "model.decoder.embed_tokens.weight": "embedding.token.weight",
}
# Names of tensors that can be computed (masks, numbers, angles, sines), and of poolers that the models do not use.
_IDLE = re.compile(
    r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|\.position_ids$|^model\.(en|de)coder\.embed_positions\.weight$"
    r"|^(bert|vit)\.pooler\."
)
_RENAMED = [  # old files, and the modules of ViT in transformers 5
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
    (r"^vit\.layers\.(\d+)\.", r"vit.encoder.layer.\1."),
    (r"^(vit\.encoder\.layer\.\d+)\.attention\.q_proj\.", r"\1.attention.attention.query."),
    (r"^(vit\.encoder\.layer\.\d+)\.attention\.k_proj\.", r"\1.attention.attention.key."),
    (r"^(vit\.encoder\.layer\.\d+)\.attention\.v_proj\.", r"\1.attention.attention.value."),
    (r"^(vit\.encoder\.layer\.\d+)\.attention\.o_proj\.", r"\1.attention.output.dense."),
    (r"^(vit\.encoder\.layer\.\d+)\.mlp\.fc1\.", r"\1.intermediate.dense."),
    (r"^(vit\.encoder\.layer\.\d+)\.mlp\.fc2\.", r"\1.output.dense."),
]
_FIRST_POSITION = 2  # row of BART's table that has position 0
# Parameters that have other shapes there: three of ViT, and the bias of the logits.
_VIEWED = ("embedding.patch.weight", "embedding.class_token", "embedding.position", "head.bias")


@dataclass(frozen=True)
class Match:
    """Which names of a folder make up which of our parameters."""

    places: dict[str, list[str]]  # our names that were found -> the names that `locate` gives
    missing: list[str]  # our names that were not found
    unused: list[str]  # their names that belong to another head
    equal: dict[str, str]  # their names of copies -> our names
    stored: dict[str, str]  # canonical name -> name in the folder


def canonical(names: Iterable[str], base: str) -> dict[str, str]:
    """Names as in our tables -> names as stored. A model without a head is saved without the prefix `base`."""
    names = list(names)
    prefix = "" if any(name.startswith(f"{base}.") for name in names) else f"{base}."
    found = {}
    for stored in names:
        name = prefix + stored
        for old, new in _RENAMED:
            name = re.sub(old, new, name)
        found[name] = stored
    return found


def match(architecture: str, ours: Iterable[str], theirs: Iterable[str]) -> Match:
    """Pairs the names. A `CheckpointError` names what is missing, unless it is the head, and what is not known."""
    base = next(iter(TABLES[architecture].values())).partition(".")[0]
    stored = canonical(theirs, base)
    places = {name: locate(architecture, name) for name in ours}
    wanted = set(chain(*places.values()))
    for copy, name in _COPIES.items():  # a tied weight is stored once, under any of its names
        for part in places.get(name, ()) if copy in stored.keys() - wanted else ():
            if part not in stored:
                stored[part] = stored.pop(copy)
    found = {name: parts for name, parts in places.items() if stored.keys() >= set(parts)}
    missing = [name for name in places if name not in found]
    used = set(chain(*found.values()))
    equal = {name: copy for name, copy in _COPIES.items() if name in stored.keys() - used and copy in found}
    left = [name for name in stored if name not in used | equal.keys() and not _IDLE.search(name)]
    lost = [name for name in missing if not name.startswith("head.")]
    strange = [name for name in left if name.startswith(f"{base}.")]
    if lost:
        first = next(name for name in places[lost[0]] if name not in stored)
        raise CheckpointError(f"{first} is missing, and so are the parts of {len(lost) - 1} more parameters")
    if strange:
        raise CheckpointError(
            f"{strange[0]} and {len(strange) - 1} more have no counterpart in Stretto's {architecture}"
        )
    return Match(found, missing, left, equal, stored)


def locate(architecture: str, ours: str) -> list[str]:
    """Their names for one of our parameters: the parts that make it up."""
    table = TABLES[architecture]
    layer = re.search(r"\.(\d+)\.", ours)
    pattern = re.sub(r"\.\d+\.", ".#.", ours)
    module, _, leaf = pattern.rpartition(".")
    theirs = table[pattern] if pattern in table else f"{table[module]}.{leaf}"
    theirs = theirs.replace("#", layer[1]) if layer else theirs
    before, found, rest = theirs.partition("{")
    inside, _, after = rest.partition("}")
    return [before + choice + after for choice in inside.split(",")] if found else [theirs]


def to_ours(matched: Match, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> Tensor:
    """The value of one of our parameters; `read` gives a tensor of theirs by its stored name."""
    first, *_ = parts = matched.places[name]
    value = torch.cat([_from_theirs(part, read(matched.stored[part])) for part in parts])
    for copy, ours in matched.equal.items():
        if ours == name and not torch.equal(read(matched.stored[copy]), value):
            raise CheckpointError(f"{copy} differs from {first}; Stretto has one tensor for both")
    if value.shape != shape and not (name in _VIEWED and value.numel() == shape.numel()):
        raise CheckpointError(
            f"{first} gives {list(value.shape)}, but {name} is {list(shape)}: config.json is not its own"
        )
    return value.reshape(shape)


def _from_theirs(name: str, value: Tensor) -> Tensor:
    if _is_transposed(name):
        return value.T
    return value[_FIRST_POSITION:] if _is_shifted(name) else value


def to_theirs(architecture: str, cfg: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our whole state under their names."""
    if cfg.kind == "encoder-decoder":  # what both sides share is there twice, and there always is a bias
        sides = {f"target_{name}": value for name, value in ours.items() if name.startswith("embedding.")}
        sides.pop("target_embedding.token.weight")
        ours = {"head.bias": torch.zeros(cfg.vocab), **sides, **ours}
    theirs = {}
    for name, value in ours.items():
        parts = locate(architecture, name)
        sizes = _sizes(len(parts), value.shape[0], cfg.width)
        for part, rows in zip(parts, value.split_with_sizes(sizes), strict=True):
            theirs[part] = _to_theirs(part, rows, cfg).contiguous().clone()
    return theirs


def _sizes(parts: int, rows: int, width: int) -> list[int]:
    """q has as many rows as the model is wide, k and v share the rest; two parts are halves."""
    if parts == 3:
        return [width, (rows - width) // 2, (rows - width) // 2]
    return [rows // parts] * parts


def _to_theirs(name: str, value: Tensor, cfg: ModelConfig) -> Tensor:
    if _is_transposed(name):
        return value.T
    if _is_shifted(name):
        return torch.cat([value.new_zeros(_FIRST_POSITION, cfg.width), value])
    if name.endswith("patch_embeddings.projection.weight"):
        return value.view(-1, cfg.channels, cfg.patch, cfg.patch)
    if name == "vit.embeddings.cls_token":
        return value.view(1, 1, -1)
    return value[None] if name in ("vit.embeddings.position_embeddings", _LOGITS_BIAS) else value


def _is_transposed(name: str) -> bool:
    return re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None


def _is_shifted(name: str) -> bool:
    return name.endswith("coder.embed_positions.weight")
