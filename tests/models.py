"""Small models of every kind, batches for them, and what they learn from a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_later

from stretto.batch import IGNORE, Batch, Counts, Sequences
from stretto.config import (
    Config,
    Fp8Config,
    FusedConfig,
    LeanConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    TechniquesConfig,
)
from stretto.data.packing import find_slots, pack, pad, spread, to_tensor
from stretto.model import Model, build_model, sites
from stretto.optim import build_optimizer
from stretto.precision import autocast
from stretto.techniques import Techniques, open_techniques
from stretto.techniques.fused import Fused
from stretto.techniques.technique import Context
from stretto.weights import initialise, put

VOCAB, WIDTH, MAX_LEN, CLASSES = 43, 24, 40, 4
SIZES: dict[str, Any] = {"layers": 2, "width": WIDTH, "heads": 4, "mlp_width": 28, "vocab": VOCAB, "max_len": MAX_LEN}
CONFIGS = {
    "decoder": ModelConfig(**SIZES),
    "decoder-rotary": ModelConfig(
        **SIZES, kv_heads=2, positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False
    ),
    "encoder": ModelConfig(
        **SIZES, kind="encoder", norm_order="post", activation="gelu", embed_norm=True, token_types=2
    ),
    "encoder-class": ModelConfig(**SIZES, kind="encoder", classes=CLASSES),
    "encoder-decoder": ModelConfig(
        **SIZES, kind="encoder-decoder", norm_order="post", activation="relu", positions="sinusoidal", embed_scale=True
    ),
    "encoder-decoder-own": ModelConfig(
        **SIZES,
        kind="encoder-decoder",
        norm_order="post",
        activation="silu",
        embed_norm=True,
        embed_shared=False,
        head_bias=True,
    ),
    "vit": ModelConfig(**SIZES, kind="vit", image_size=8, patch=4, channels=2, classes=CLASSES),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = CONFIGS | {
    "encoder-decoder-pre": replace(CONFIGS["encoder-decoder"], norm_order="pre", bias=False, tied=False),
    "decoder-post": replace(CONFIGS["decoder"], norm_order="post", label_smoothing=0.1),
    "decoder-scaled": replace(
        CONFIGS["decoder-rotary"], rope_scaling=RopeScaling(original_max_position_embeddings=MAX_LEN)
    ),
}
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    ids: Ints
    labels: Ints  # for each token; about a third are IGNORE
    source: Ints
    label: int  # of the whole sequence

    @staticmethod
    def draw(length: int, source_length: int, seed: int) -> Sample:
        random = np.random.default_rng(seed)
        labels = np.where(random.random(length) < 0.3, IGNORE, random.integers(0, VOCAB, length))
        ids, source = (random.integers(0, VOCAB, size) for size in (length, source_length))
        return Sample(ids, labels, source, int(random.integers(CLASSES)))


def collate(cfg: ModelConfig, samples: Sequence[Sample], form: str = "packed", empty: int = 0, slack: int = 0) -> Batch:
    """The samples as one batch, and `empty` empty sequences after them, in rows `slack` longer than need be."""
    inputs, slots = arrange([sample.ids for sample in samples], form, empty, slack)
    labels = np.concatenate([sample.labels for sample in samples])
    at = None
    if cfg.classes:
        labels = np.array([sample.label for sample in samples] + [IGNORE] * empty)
    elif cfg.kind == "encoder":
        chosen = np.flatnonzero(labels != IGNORE)
        labels, at = labels[chosen], to_tensor(slots[chosen])
    else:
        labels = spread(labels, slots, len(inputs.ids), IGNORE)
    translation = cfg.kind == "encoder-decoder"
    source = arrange([sample.source for sample in samples], form, empty, slack)[0] if translation else None
    return Batch(to_tensor(labels), Counts(0, 0, 0, 0), (), inputs, at, source)


def arrange(sequences: list[Ints], form: str, empty: int, slack: int) -> tuple[Sequences, Ints]:
    """Sequences in the given form, and the place of each of their tokens."""
    lengths = np.array([len(ids) for ids in sequences] + [0] * empty)
    width, ids = int(lengths.max()) + slack, np.concatenate(sequences)
    if form == "packed":
        return pack(ids, lengths, width), np.arange(len(ids))
    return pad(ids, lengths, width, fill=0), find_slots(lengths, width)


def get_inputs(batch: Batch) -> Sequences:
    """The tokens that a model of text reads."""
    assert batch.inputs is not None
    return batch.inputs


def image_batch() -> Batch:
    random = torch.Generator().manual_seed(0)
    return Batch(torch.arange(3), Counts(0, 0, 0, 0), (), pixels=torch.randn(3, 2, 8, 8, generator=random))


def example_batch(cfg: ModelConfig, form: str = "packed") -> Batch:
    if cfg.kind == "vit":
        return image_batch()
    return collate(cfg, [Sample.draw(5, 3, 0), Sample.draw(1, 4, 1), Sample.draw(7, 1, 2)], form)


def materialise(model: torch.nn.Module, cfg: ModelConfig, seed: int, device: torch.device | str) -> None:
    """Gives a model built on the meta device its memory and its first values."""
    model.to_empty(device=device)
    initialise(model, cfg, seed, put)


def build_on_cpu(cfg: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """A plain model whose biases are not 0 and whose norms are not 1, as after some training."""
    model = build_model(cfg)
    materialise(model, cfg, seed, torch.device("cpu"))
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=random), alpha=0.2)
    return model.to(dtype)


def loss_and_gradients(model: Model, *batches: Batch) -> dict[str, Tensor]:
    """Returns the loss and the gradient of every parameter, summed over the batches."""
    model.zero_grad()
    loss: Any = sum(model(batch) for batch in batches)
    loss.backward()
    return {"loss": loss.detach()} | {name: get_grad(p).clone() for name, p in model.named_parameters()}


def get_grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest entry of each tensor, or to 1 for small tensors."""
    scale = {key: value.abs().max().clamp(min=1) for key, value in wanted.items()}
    return max(float((found[key] - value).abs().max() / scale[key]) for key, value in wanted.items())


def apply_techniques(
    model: Model, chosen: TechniquesConfig, device: torch.device = DEVICE, precision: str = "fp32", **context: Any
) -> Techniques:
    """Changes a model that is on the meta device; `context` is what else the techniques know of the run."""
    techniques = open_techniques(Config(techniques=chosen), Context(model.cfg, device, precision, **context))
    techniques.apply(model, sites(model))
    return techniques


def build(
    cfg: ModelConfig,
    fused: FusedConfig | None = None,
    dtype: torch.dtype = torch.float32,
    lean: LeanConfig | None = None,
    fp8: Fp8Config | None = None,
) -> Model:
    """A model with or without these techniques, whose weights every precision holds exactly."""
    model, precision = build_model(cfg), "bf16" if dtype == torch.bfloat16 or fp8 else "fp32"
    apply_techniques(model, TechniquesConfig(fused=fused, lean=lean, fp8=fp8), DEVICE, precision)
    materialise(model, cfg, 0, DEVICE)
    with torch.no_grad():  # norms that are not 1 and biases that are not 0
        for i, p in enumerate(model.parameters()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.05
            p.copy_((p.cpu() + noise).bfloat16())
    return model.to(dtype).train()


def build_adamw(
    model: torch.nn.Module, cfg: OptimConfig, way: FusedConfig | None, seed: int = 0
) -> torch.optim.Optimizer:
    """Torch's AdamW, or that of the `fused` technique, over weights that are kept in this way."""
    fused = None if way is None else Fused(way, Context(None, DEVICE, "fp32", seed=seed))
    return build_optimizer(model, cfg, None if fused is None else fused.build_optimizer)


def make_batch(cfg: ModelConfig, form: str = "packed", seed: int = 0) -> Batch:
    if cfg.kind == "vit":
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(5, cfg.channels, cfg.image_size, cfg.image_size, generator=generator)
        return Batch(torch.arange(5) % CLASSES, Counts(0, 0, 0, 0), (), pixels=pixels).to(DEVICE)
    lengths = [(7, 5), (1, 9), (13, 1), (4, 4)]
    return collate(cfg, [Sample.draw(*pair, seed=seed + i) for i, pair in enumerate(lengths)], form).to(DEVICE)


def learn(model: Model, batch: Batch, precision: str = "fp32", seed: int = 0) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter."""
    dtype = next(model.parameters()).dtype
    if batch.pixels is not None:
        batch = replace(batch, pixels=batch.pixels.to(dtype))
    torch.manual_seed(seed)
    with autocast(precision, DEVICE):
        loss = model(batch)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"loss": loss.detach()} | {n: g for n, g in zip(names, gradients, strict=True) if g is not None}


def recompute_blocks(model: Model) -> Model:
    """The same model, which keeps only what goes into its blocks for the backward pass."""
    for name in sites(model)["block"]:
        block = model.get_submodule(name)
        block.forward = partial(recompute_later, block.forward, use_reentrant=False)
    return model
