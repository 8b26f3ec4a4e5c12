"""The sizes of well-known models, by name: what `model.preset` stands for. A recipe may override each key."""

from __future__ import annotations

from typing import Any

_GPT2 = {"kind": "decoder", "vocab": 50257, "max_len": 1024}
_LLAMA = {
    "kind": "decoder", "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False,
}  # fmt: skip
_BERT = {
    "kind": "encoder", "vocab": 30522, "max_len": 512, "norm_order": "post", "norm_eps": 1e-12, "activation": "gelu",
    "embed_norm": True, "token_types": 2, "dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
_TRANSFORMER = {
    "kind": "encoder-decoder", "norm_order": "post", "activation": "relu", "positions": "sinusoidal",
    "embed_scale": True, "dropout": 0.1, "label_smoothing": 0.1,
}  # fmt: skip
_VIT = {"kind": "vit", "activation": "gelu", "norm_eps": 1e-12, "classes": 1000}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-small": _GPT2 | {"layers": 12, "width": 768, "heads": 12},
    "gpt2-medium": _GPT2 | {"layers": 24, "width": 1024, "heads": 16},
    "gpt2-large": _GPT2 | {"layers": 36, "width": 1280, "heads": 20},
    "gpt2-xl": _GPT2 | {"layers": 48, "width": 1600, "heads": 25},
    "gpt2-tiny": _GPT2 | {"layers": 2, "width": 64, "heads": 4, "vocab": 0, "max_len": 128},
    "llama-1b": _LLAMA
    | {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "mlp_width": 8192, "vocab": 128256, "rope_theta": 5e5},
    "llama-tiny": _LLAMA | {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 128},
    "bert-base": _BERT | {"layers": 12, "width": 768, "heads": 12},
    "bert-large": _BERT | {"layers": 24, "width": 1024, "heads": 16},
    "bert-tiny": _BERT | {"layers": 2, "width": 64, "heads": 4, "vocab": 0, "max_len": 128},
    "transformer-base": _TRANSFORMER | {"layers": 6, "width": 512, "heads": 8, "vocab": 37000},
    "transformer-big": _TRANSFORMER | {"layers": 6, "width": 1024, "heads": 16, "vocab": 37000},
    "transformer-mini": _TRANSFORMER | {"layers": 4, "width": 256, "heads": 4},
    "transformer-tiny": _TRANSFORMER | {"layers": 2, "width": 64, "heads": 4, "max_len": 128},
    "vit-base": _VIT | {"layers": 12, "width": 768, "heads": 12},
    "vit-large": _VIT | {"layers": 24, "width": 1024, "heads": 16},
    "vit-mini": _VIT | {"layers": 6, "width": 192, "heads": 3, "classes": 0, "image_size": 32, "patch": 4},
    "vit-tiny": _VIT | {"layers": 2, "width": 64, "heads": 4, "classes": 0, "image_size": 32, "patch": 8},
}
