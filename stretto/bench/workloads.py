"""What is trained, by name: a model and the shapes of its batches. Standard library only, so that names and mistakes
answer at once.

On a CPU the same workloads run with tiny models and batches: every line of the benchmark runs, but its numbers say
nothing about a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.errors import ConfigError


@dataclass(frozen=True)
class LogNormal:
    """Lengths exp(N(ln median, sigma)), rounded and clipped."""

    median: float
    sigma: float
    shortest: int
    longest: int


@dataclass(frozen=True)
class Workload:
    shows: str  # one line for the list of names
    model: dict[str, Any]  # its section of a recipe
    rows: int = 0  # sequences or images in a batch; 0: as many as `budget` allows
    length: int = 0  # tokens a row, with padding; 0: as long as the longest sentence
    lengths: LogNormal | None = None  # of the real sequences (translation: of the sources); None: every row is full
    budget: int = 0  # translation: most positions in a batch, with padding, on either side
    num_batches: int = 4  # different ones, used in turn
    bf16_weights: bool = False  # where others are fp32 and cast for each product
    source_length: int = 0  # tokens an encoder reads of each row; 0: `length`
    own: dict[str, Any] = field(default_factory=dict)  # Hugging Face's configuration of a model that Stretto has not:
    # `model` then has the same sizes, and is there to count FLOPs and draw batches


_GPT2 = {"vocab": 50304, "dropout": 0.0, "attention_dropout": 0.0}
_GPT2_SMALL = {"preset": "gpt2-small", **_GPT2}
_BERT_LARGE = {"preset": "bert-large", "vocab": 30528}
_BIG = {"preset": "transformer-big", "vocab": 40960, "label_smoothing": 0.0}
_T5_BASE = _BIG | {"layers": 12, "width": 768, "heads": 12, "mlp_width": 3072, "vocab": 32128}
_SENTENCES = LogNormal(24, 0.6, 4, 200)

WORKLOADS = {
    "gpt2_small_32x1024": Workload("GPT-2 small, 32 x 1024 tokens", _GPT2_SMALL, 32, 1024),
    "gpt2_medium_16x1024": Workload("GPT-2 medium, 16 x 1024", {"preset": "gpt2-medium", **_GPT2}, 16, 1024),
    "llama1b_4x4096": Workload(
        "Llama-3.2-1B's shape, bf16 weights, 4 x 4096",
        {"preset": "llama-1b", "kv_heads": 8, "max_len": 4096}, 4, 4096, bf16_weights=True,
    ),
    "bert_large_256x128": Workload("BERT large, masked LM, 256 x 128", _BERT_LARGE, 256, 128),
    "bert_large_64x512": Workload("BERT large, masked LM, 64 x 512", _BERT_LARGE, 64, 512),
    "bert_large_64x512_padded": Workload(
        "BERT large, 64 sequences of 8 to 512 tokens, about 35% of 64 x 512",
        _BERT_LARGE, 64, 512, LogNormal(140, 0.8, 8, 512), num_batches=8,
    ),
    "transformer_big_mt_16k": Workload(
        "Transformer big, sentences in batches of 16384 positions a side",
        _BIG, lengths=_SENTENCES, budget=16384, num_batches=8,
    ),
    "transformer_big_mt_512": Workload(
        "the same in batches of 512 positions: the host is the limit",
        _BIG, lengths=_SENTENCES, budget=512, num_batches=8,
    ),
    "transformer_big_fixed_512x32": Workload("Transformer big, 512 sentences of 32 tokens", _BIG, 512, 32),
    "transformer_big_fixed_16x32": Workload("the same, 16 sentences: the host is the limit", _BIG, 16, 32),
    "bert_large_8x128": Workload("BERT large, 8 x 128: the host is the limit", _BERT_LARGE, 8, 128),
    "gpt2_small_1x1024": Workload("GPT-2 small, 1 x 1024: the host is the limit", _GPT2_SMALL, 1, 1024),
    "vit_base_256": Workload("ViT-B/16, 256 images of 224 pixels", {"preset": "vit-base"}, 256),
    "t5_base_64x512": Workload(
        "T5-base, 64 pairs of 512 and 128 tokens, by Hugging Face and accelerated",
        _T5_BASE, 64, 128, source_length=512, own={"model_type": "t5", "vocab_size": 32128, "d_model": 768,
        "d_ff": 3072, "num_layers": 12, "num_heads": 12, "use_cache": False, "decoder_start_token_id": 0},
    ),
}  # fmt: skip


def find_workloads(names: Sequence[str]) -> list[str]:
    """Checks these names; `all` stands for every workload."""
    unknown = [name for name in names if name != "all" and name not in WORKLOADS]
    if unknown:
        raise ConfigError(f"there is no workload {unknown[0]!r}; there are: all, {', '.join(WORKLOADS)}")
    return list(WORKLOADS) if "all" in names else list(dict.fromkeys(names))


def fit_to_device(workload: Workload, device_type: str) -> Workload:
    """Returns the workload itself on a GPU, its tiny version on a CPU."""
    if device_type != "cpu":
        return workload
    length, lengths = min(workload.length, 64), workload.lengths
    if lengths is not None and length:
        scale = length / workload.length
        lengths = LogNormal(lengths.median * scale, lengths.sigma, max(round(lengths.shortest * scale), 1), length)
    tiny = {"layers": 2, "width": 64, "heads": 4, "mlp_width": 128, "vocab": 512, "image_size": 32}
    theirs = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
    if "hidden_size" in workload.own:
        theirs = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "vocab_size": 512}  # fmt: skip
    return replace(
        workload,
        model=workload.model | tiny | ({"kv_heads": 2} if "kv_heads" in workload.model else {}),
        rows=min(workload.rows, 8),
        length=length,
        lengths=lengths,
        budget=min(workload.budget, 1024),
        num_batches=2,
        bf16_weights=False,
        source_length=min(workload.source_length, 96),
        own=workload.own and workload.own | theirs,
    )
