"""Models of `transformers`, the configurations that make ours equal to them, and how far apart their logits are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from stretto.batch import IGNORE, Batch, Counts
from stretto.config import ModelConfig, RopeScaling
from stretto.data.packing import find_slots, pack, pad, spread, to_tensor
from stretto.model import Model, build_model
from tests.hf_weights import translate
from tests.models import get_inputs

hf: Any = transformers  # whose configurations take more than their signatures say
COUNTS = Counts(0, 0, 0, 0)  # models do not look at them
VOCAB, CLASSES, EPS = 61, 5, 3e-3  # an epsilon so large that a wrong one shows
LENGTHS, SOURCE_LENGTHS = np.array([6, 1, 9]), np.array([4, 11, 2])
COMMON: dict[str, Any] = {"attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Case:
    """A model of theirs, the configuration that makes ours equal to it, and one batch for both."""

    theirs: nn.Module
    cfg: ModelConfig
    inputs: dict[str, Tensor]  # what theirs reads
    their_rows: Tensor  # which rows of their logits, flattened, to compare
    labels: Tensor  # of these rows
    batches: dict[str, tuple[Batch, Tensor]]  # form -> what ours reads, which rows of our logits to compare


def text_case(theirs: nn.Module, cfg: ModelConfig, predict: Literal["tokens", "masked", "class"] = "tokens") -> Case:
    random = np.random.default_rng(1)
    width, slots = int(LENGTHS.max()), find_slots(LENGTHS, LENGTHS.max())
    ids, types = random.integers(1, VOCAB, len(slots)), random.integers(0, cfg.token_types or 1, len(slots))
    label_at = np.arange(0, len(slots), 2) if predict == "masked" else None
    compared = {"tokens": slots, "masked": slots[::2], "class": np.arange(len(LENGTHS))}[predict]
    labels = random.integers(0, CLASSES if predict == "class" else VOCAB, len(compared))
    source = random.integers(1, VOCAB, SOURCE_LENGTHS.sum()) if cfg.kind == "encoder-decoder" else None

    batches = {}
    for form in ("packed", "padded"):
        packed = form == "packed"
        inputs = pack(ids, LENGTHS, width) if packed else pad(ids, LENGTHS, width, fill=0)
        if cfg.token_types:
            inputs = replace(inputs, types=to_tensor(types if packed else spread(types, slots, inputs.ids.numel(), 0)))
        rows = np.arange(len(labels)) if packed or predict != "tokens" else slots
        batch = Batch(
            labels=to_tensor(spread(labels, rows, len(inputs.ids), IGNORE) if predict == "tokens" else labels),
            counts=COUNTS,
            samples=(),
            inputs=inputs,
            label_at=None if label_at is None else to_tensor(label_at if packed else slots[label_at]),
            source=None if source is None else _source(source, packed),
        )
        batches[form] = batch, to_tensor(rows)

    padded = batches["padded"][0]
    inputs = get_inputs(padded)
    if padded.source is None:
        read = _masked(inputs.ids, LENGTHS)
        if inputs.types is not None:
            read["token_type_ids"] = inputs.types.view(len(LENGTHS), -1)
    else:
        target = {f"decoder_{name}": value for name, value in _masked(inputs.ids, LENGTHS).items()}
        read = _masked(padded.source.ids, SOURCE_LENGTHS) | target
    return Case(theirs, cfg, read, to_tensor(compared), to_tensor(labels), batches)


def _source(ids: Any, packed: bool) -> Any:
    width = int(SOURCE_LENGTHS.max())
    return pack(ids, SOURCE_LENGTHS, width) if packed else pad(ids, SOURCE_LENGTHS, width, fill=0)


def _masked(ids: Tensor, lengths: Any) -> dict[str, Tensor]:
    ids = ids.view(len(lengths), -1)
    mask = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def gpt2() -> Case:
    theirs = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=2, n_embd=30, n_head=3, n_inner=44, n_positions=19, vocab_size=VOCAB, layer_norm_epsilon=EPS,
            **COMMON,
        )
    )  # fmt: skip
    cfg = ModelConfig(layers=2, width=30, heads=3, mlp_width=44, max_len=19, vocab=VOCAB, norm_eps=EPS)
    return text_case(theirs, cfg)


# Of the three pairs of channels one stays as it is, one becomes slower, and one is in between.
ROPE_SCALING = RopeScaling(
    factor=8.0, low_freq_factor=0.5, high_freq_factor=4.0, original_max_position_embeddings=64
)  # fmt: skip


def llama(tied: bool, scaling: RopeScaling | None = None) -> Case:
    theirs = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            num_hidden_layers=2, hidden_size=36, num_attention_heads=6, num_key_value_heads=2, intermediate_size=50,
            vocab_size=VOCAB, rms_norm_eps=EPS, rope_theta=700.0,
            rope_scaling=scaling and {"rope_type": "llama3"} | asdict(scaling), tie_word_embeddings=tied, **COMMON,
        )
    )  # fmt: skip
    cfg = ModelConfig(
        layers=2, width=36, heads=6, kv_heads=2, mlp_width=50, vocab=VOCAB, norm="rmsnorm", norm_eps=EPS,
        activation="swiglu", positions="rotary", rope_theta=700.0, rope_scaling=scaling, bias=False, tied=tied,
    )  # fmt: skip
    return text_case(theirs, cfg)


def bert(classes: int) -> Case:
    kind = hf.BertForSequenceClassification if classes else hf.BertForMaskedLM
    theirs = kind(
        hf.BertConfig(
            num_hidden_layers=2, hidden_size=36, num_attention_heads=3, intermediate_size=50, vocab_size=VOCAB,
            max_position_embeddings=19, type_vocab_size=3, layer_norm_eps=EPS, num_labels=classes or 2, **COMMON,
        )
    )  # fmt: skip
    cfg = ModelConfig(
        kind="encoder", layers=2, width=36, heads=3, mlp_width=50, vocab=VOCAB, max_len=19, token_types=3,
        norm_eps=EPS, norm_order="post", activation="gelu", embed_norm=True, classes=classes,
    )  # fmt: skip
    return text_case(theirs, cfg, "class" if classes else "masked")


TRANSLATION: dict[str, Any] = {
    "encoder_layers": 2, "decoder_layers": 3, "d_model": 36, "encoder_attention_heads": 3, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 50, "decoder_ffn_dim": 50, "vocab_size": VOCAB, "max_position_embeddings": 19,
    "decoder_start_token_id": 0,
}  # fmt: skip


def marian(activation: Literal["relu", "silu"]) -> Case:
    """A Marian model; with SiLU it is like the published opus-mt models."""
    theirs = hf.MarianMTModel(
        hf.MarianConfig(
            **TRANSLATION, activation_function={"relu": "relu", "silu": "swish"}[activation], scale_embedding=True,
            **COMMON,
        )
    )  # fmt: skip
    cfg = ModelConfig(
        kind="encoder-decoder", layers=2, decoder_layers=3, width=36, heads=3, mlp_width=50, vocab=VOCAB,
        norm_order="post", activation=activation, positions="sinusoidal", embed_scale=True, label_smoothing=0.1,
        head_bias=True,
    )  # fmt: skip
    return text_case(theirs, cfg)


def bart() -> Case:
    theirs = hf.BartForConditionalGeneration(hf.BartConfig(**TRANSLATION, **COMMON))
    cfg = ModelConfig(
        kind="encoder-decoder", layers=2, decoder_layers=3, width=36, heads=3, mlp_width=50, vocab=VOCAB, max_len=19,
        norm_order="post", activation="gelu", embed_norm=True, embed_shared=False, head_bias=True,
    )  # fmt: skip
    return text_case(theirs, cfg)


def vit() -> Case:
    theirs = hf.ViTForImageClassification(
        hf.ViTConfig(
            num_hidden_layers=2, hidden_size=30, num_attention_heads=5, intermediate_size=44, image_size=12,
            patch_size=4, num_channels=2, layer_norm_eps=EPS, num_labels=CLASSES, attn_implementation="eager",
        )
    )  # fmt: skip
    cfg = ModelConfig(
        kind="vit", layers=2, width=30, heads=5, mlp_width=44, image_size=12, patch=4, channels=2, classes=CLASSES,
        activation="gelu", norm_eps=EPS,
    )  # fmt: skip
    rows = torch.arange(3)
    pixels = torch.randn(3, 2, 12, 12, generator=torch.Generator().manual_seed(2))
    batch = Batch(labels=rows, counts=COUNTS, samples=(), pixels=pixels)
    return Case(theirs, cfg, {"pixel_values": pixels}, rows, rows, {"dense": (batch, rows)})


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama-tied": lambda: llama(tied=True),
    "llama-untied": lambda: llama(tied=False),
    "llama-scaled": lambda: llama(tied=True, scaling=ROPE_SCALING),
    "bert-masked": lambda: bert(classes=0),
    "bert-class": lambda: bert(classes=CLASSES),
    "marian": lambda: marian("relu"),
    "opus-mt": lambda: marian("silu"),
    "bart": bart,
    "vit": vit,
}


@cache
def get_case(name: str) -> Case:
    case = CASES[name]()
    generator = torch.Generator().manual_seed(3)
    for buffer in case.theirs.buffers():
        buffer.requires_grad_(buffer.shape == (1, VOCAB))  # the bias of the logits, which is trained in ours
    for parameter in chain(case.theirs.eval().parameters(), case.theirs.buffers()):
        if parameter.requires_grad:  # fresh biases are 0 and norms 1: without this, forgetting one would go unseen
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return case


def build_ours(case: Case, cfg: ModelConfig | None = None) -> Model:
    ours = build_model(cfg or case.cfg, "cpu").eval()
    ours.load_state_dict(translate(case.theirs, ours, lambda parameter: parameter.data))
    return ours


def their_logits(case: Case) -> Tensor:
    return case.theirs(**case.inputs).logits.flatten(0, -2)[case.their_rows]


@torch.no_grad()
def measure_error(case: Case, ours: Model, form: str) -> float:
    batch, rows = case.batches[form]
    return float((ours.logits(batch)[rows] - their_logits(case)).abs().max())
