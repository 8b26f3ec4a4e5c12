"""The Hugging Face models that Stretto can be, and where their config.json says what our [model] section says.

One `Family` serves both directions: `read_model` fills in a recipe from the folder that `model.init` names, and the
export in folder.py writes a config.json by the same keys. Only the standard library is imported here, as in config.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import ConfigError
from stretto.files import read_text
from stretto.values import show

MOST_BYTES = 1 << 24  # of a config.json; names of classes are in it

# Their names to ours; of two names for one function, the one that is written comes last.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu", "swish": "silu",
    "silu": "silu",
}  # fmt: skip
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
CHOICES = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")  # keys that training may choose


@dataclass(frozen=True)
class Family:
    architecture: str  # name of the class that has our head
    keys: Mapping[str, tuple[str, ...]]  # our key -> their keys, whose values must be equal
    fixed: Mapping[str, Any]  # our keys and values that make a model one of this family
    demands: Mapping[str, Any]  # options that Stretto lacks, and the only value that it can do: their default
    defaults: Mapping[str, Any]  # values of keys that a config.json may leave out
    classifier: str = ""  # name of the class with a classification head
    reads: Mapping[str, Any] = field(default_factory=dict)  # our keys and values where a written model may differ


_PLAIN = {"norm": "layernorm", "bias": True, "embed_scale": False, "embed_norm": False}
_TRANSLATION = {
    "layers": ("encoder_layers",), "decoder_layers": ("decoder_layers",), "width": ("d_model",),
    "heads": ("encoder_attention_heads", "decoder_attention_heads"), "vocab": ("vocab_size",),
    "mlp_width": ("encoder_ffn_dim", "decoder_ffn_dim"), "max_len": ("max_position_embeddings",),
    "activation": ("activation_function",), "embed_scale": ("scale_embedding",), "dropout": ("dropout",),
    "attention_dropout": ("attention_dropout",), "activation_dropout": ("activation_dropout",),
}  # fmt: skip
_ENCODER = {
    "layers": ("num_hidden_layers",), "width": ("hidden_size",), "heads": ("num_attention_heads",),
    "mlp_width": ("intermediate_size",), "norm_eps": ("layer_norm_eps",), "activation": ("hidden_act",),
    "dropout": ("hidden_dropout_prob",), "attention_dropout": ("attention_probs_dropout_prob",),
}  # fmt: skip
_DROPOUT = {"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0}

FAMILIES: dict[str, Family] = {  # by the model_type of config.json
    "gpt2": Family(
        "GPT2LMHeadModel",
        keys={
            "layers": ("n_layer",), "width": ("n_embd",), "heads": ("n_head",), "mlp_width": ("n_inner",),
            "vocab": ("vocab_size",), "max_len": ("n_positions",), "norm_eps": ("layer_norm_epsilon",),
            "activation": ("activation_function",), "tied": ("tie_word_embeddings",),
            "dropout": ("resid_pdrop", "embd_pdrop"), "attention_dropout": ("attn_pdrop",),
        },
        fixed=_PLAIN | {"kind": "decoder", "norm_order": "pre", "positions": "learned", "token_types": 0, "window": 0},
        demands={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        defaults={
            "n_inner": None, "tie_word_embeddings": True, "activation_function": "gelu_new", "resid_pdrop": 0.1,
            "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5,
        },
    ),
    "llama": Family(
        "LlamaForCausalLM",
        keys={
            "layers": ("num_hidden_layers",), "width": ("hidden_size",), "heads": ("num_attention_heads",),
            "kv_heads": ("num_key_value_heads",), "mlp_width": ("intermediate_size",), "vocab": ("vocab_size",),
            "max_len": ("max_position_embeddings",), "norm_eps": ("rms_norm_eps",), "tied": ("tie_word_embeddings",),
            "bias": ("attention_bias", "mlp_bias"), "attention_dropout": ("attention_dropout",),
        },
        fixed={
            "kind": "decoder", "norm": "rmsnorm", "norm_order": "pre", "positions": "rotary", "activation": "swiglu",
            "embed_scale": False, "embed_norm": False, "token_types": 0, "window": 0,
        },
        demands={"hidden_act": "silu"},
        defaults={
            "num_key_value_heads": None, "tie_word_embeddings": False, "attention_bias": False,
            "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
        },
    ),
    "bert": Family(
        "BertForMaskedLM",
        keys=_ENCODER
        | {"vocab": ("vocab_size",), "max_len": ("max_position_embeddings",), "token_types": ("type_vocab_size",)},
        fixed=_PLAIN
        | {"kind": "encoder", "norm_order": "post", "positions": "learned", "embed_norm": True, "tied": True},
        demands={
            "is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
        },
        defaults={
            "layer_norm_eps": 1e-12, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "type_vocab_size": 2,
            "attention_probs_dropout_prob": 0.1,
        },
        classifier="BertForSequenceClassification",
    ),
    "marian": Family(
        "MarianMTModel",
        keys=_TRANSLATION | {"vocab": ("vocab_size", "decoder_vocab_size")},
        fixed=_PLAIN
        | {
            "kind": "encoder-decoder", "norm_order": "post", "norm_eps": 1e-5, "positions": "sinusoidal",
            "token_types": 0, "tied": True, "embed_shared": True,
        },
        demands={"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True, "normalize_before": False},
        defaults={"scale_embedding": False, "activation_function": "gelu"} | _DROPOUT,
        reads={"head_bias": True},
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        keys=_TRANSLATION,
        fixed=_PLAIN
        | {
            "kind": "encoder-decoder", "norm_order": "post", "norm_eps": 1e-5, "positions": "learned",
            "embed_norm": True, "token_types": 0, "tied": True,
        },
        demands={"tie_word_embeddings": True, "normalize_before": False},
        defaults={"scale_embedding": False, "activation_function": "gelu"} | _DROPOUT,
        reads={"head_bias": True, "embed_shared": False},
    ),
    "vit": Family(
        "ViTForImageClassification",
        keys=_ENCODER | {"image_size": ("image_size",), "patch": ("patch_size",), "channels": ("num_channels",)},
        fixed={"kind": "vit", "norm": "layernorm", "norm_order": "pre", "bias": True, "positions": "learned"},
        demands={"qkv_bias": True},
        defaults={
            "layer_norm_eps": 1e-12, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "num_channels": 3,
            "attention_probs_dropout_prob": 0.0,
        },
        classifier="ViTForImageClassification",
    ),
}  # fmt: skip


def read_family(folder: Path) -> tuple[str, dict[str, Any]]:
    """The model_type of a Hugging Face folder, and its config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(read_text(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"model.init: cannot read {path}: {error.strerror}. It must be a folder that `save_pretrained` wrote;"
            " a run that has begun no longer needs it: go on with `stretto train RUN/config.toml --resume`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.init: {path} is not JSON: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in list(FAMILIES):  # it may be of any type
        raise ConfigError(
            f"model.init: {path} has model_type {show(kind)}; Stretto can be one of {', '.join(FAMILIES)}"
        )
    return kind, config


def read_model(folder: Path) -> dict[str, Any]:
    """The keys of our [model] section that make the same model; a `ConfigError` says what has no counterpart."""
    (kind, config), where = read_family(folder), f"model.init: {folder / 'config.json'}"
    try:
        return convert_config(kind, config, where)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:  # nobody has checked the types in it
        raise ConfigError(f"{where} has a value of a wrong type: {error}") from error


def convert_config(kind: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same for the values of a config.json; errors begin with `where`."""
    family = FAMILIES[kind]
    config = {**family.defaults, **config}
    for key, value in family.demands.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{where} has {key} = {config[key]!r}; Stretto's {kind} can only do {value!r}")
    found = {**family.fixed, **family.reads} | {
        key: _read(where, config, key, names) for key, names in family.keys.items()
    }
    if "activation" in family.keys:
        name = found["activation"]
        if name not in ACTIVATIONS:
            raise ConfigError(f"{where} has the activation {name!r}; Stretto has {', '.join(ACTIVATIONS)} here")
        found["activation"] = ACTIVATIONS[name]
    found["mlp_width"] = found["mlp_width"] or 4 * found["width"]
    if kind == "llama":
        found |= _read_rope(where, config)
        found["kv_heads"] = found["kv_heads"] or found["heads"]
        if (config.get("head_dim") or found["width"] / found["heads"]) * found["heads"] != found["width"]:
            raise ConfigError(f"{where} has head_dim = {config['head_dim']}; Stretto's is width / heads")
    if family.classifier in (config.get("architectures") or ()):
        found["classes"] = len(config.get("id2label") or ()) or config.get("num_labels") or 2
    return found


def _read(where: str, config: Mapping[str, Any], key: str, names: tuple[str, ...]) -> Any:
    if names[0] not in config:
        raise ConfigError(f"{where} has no {names[0]}")
    said = {name: config[name] for name in names if config.get(name) is not None}
    if len(set(said.values())) > 1 and key not in CHOICES:
        raise ConfigError(f"{where} has {_list(said)}; Stretto has one model.{key} for both")
    return next(iter(said.values()), None)


def _read_rope(where: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 puts rope_theta into rope_parameters; 4 has it outside, and rope_scaling for everything else."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where} scales its rotary positions ({_list(rope)}); Stretto can only do that of Llama 3")
    scaling = {name: _read(where, rope, name, (name,)) for name in ROPE_SCALING} if kind == "llama3" else None
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def write_rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of rotary positions in transformers 4; version 5 reads them too."""
    scaling = model["rope_scaling"]
    return {"rope_theta": model["rope_theta"], "rope_scaling": scaling and {"rope_type": "llama3"} | scaling}


def describe_size(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our [model] section, in which sizes of 0 are replaced by what they stand for."""
    return dict(model) | {
        "mlp_width": model["mlp_width"] or 4 * model["width"],
        "kv_heads": model["kv_heads"] or model["heads"],
        "decoder_layers": model["decoder_layers"] or model["layers"],
    }


def choose_family(model: Mapping[str, Any]) -> str:
    """The model_type that our [model] section describes; a `ConfigError` says which of its keys none of them has."""
    reasons = {}
    for kind, family in FAMILIES.items():
        if family.fixed["kind"] != model["kind"]:
            continue
        wrong = [
            f"model.{key} = {model[key]!r} where it has {value!r}"
            for key, value in family.fixed.items()
            if key not in family.keys and model[key] != value
        ]
        if "activation" in family.keys and model["activation"] not in ACTIVATIONS.values():
            wrong.append(f"model.activation = {model['activation']!r} where it has no gate")
        if "kv_heads" not in family.keys and (model["kv_heads"] or model["heads"]) != model["heads"]:
            wrong.append(f"model.kv_heads = {model['kv_heads']} where it has as many as heads")
        if "token_types" in family.keys and not model["token_types"]:
            wrong.append("model.token_types = 0 where it has at least 1")
        if not wrong:
            return kind
        reasons[family.architecture] = ", ".join(wrong)
    differences = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ConfigError(f"no Hugging Face model that Stretto can write is like this one ({differences})")


def name_architecture(kind: str, classes: int) -> str:
    family = FAMILIES[kind]
    return family.classifier if classes and family.classifier else family.architecture


def write_model(kind: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the configuration class of this family."""
    family, model = FAMILIES[kind], describe_size(model)
    theirs = {name: model[key] for key, names in family.keys.items() for name in names}
    names = {ours: name for name, ours in ACTIVATIONS.items()}
    for name in family.keys.get("activation", ()):
        theirs[name] = names[model["activation"]]
    return theirs | (write_rope(model) if kind == "llama" else {})


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in values.items())
