"""How much arithmetic a batch needs, for MFU: matrix products and attention on real tokens, nothing else.

A training step is counted as three forward passes. Padding counts as nothing, causal attention as half a square, and
BERT's output layer only where a token is predicted: MFU then says how much of the chip did useful work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stretto.config import ModelConfig
from stretto.memory import count_block_parameters


class Counted(Protocol):
    """What is counted of a batch: `Counts` of batch.py, or what a plan expects. Nothing here waits for torch."""

    @property
    def tokens(self) -> int: ...
    @property
    def labels(self) -> int: ...
    @property
    def pairs(self) -> int: ...
    @property
    def source_tokens(self) -> int: ...
    @property
    def source_pairs(self) -> int: ...
    @property
    def cross_pairs(self) -> int: ...


class Working(Protocol):
    """Of a stack: the number of blocks that would do as much work on a whole batch (`Depth` of batch.py)."""

    @property
    def work(self) -> float: ...


def tokens_per_sample(cfg: ModelConfig) -> int:
    """Returns the tokens that one counted unit of a batch becomes: for an image, its patches and the class token."""
    return (cfg.image_size // cfg.patch) ** 2 + 1 if cfg.kind == "vit" else 1


def training_flops(cfg: ModelConfig, counts: Counted, depths: Mapping[str, Working] | None = None) -> float:
    """Counts the FLOPs of both passes over one batch, by all blocks, or by as many as `depths` says; 0 for a model that
    the configuration does not describe."""
    if cfg.own:
        return 0.0
    num_blocks: dict[str, float] = {"encoder": cfg.layers, "decoder": cfg.decoder_layers or cfg.layers}
    num_blocks |= {name: depth.work for name, depth in (depths or {}).items()}
    layers, decoder_layers = num_blocks["encoder"], num_blocks["decoder"]
    width, (block, _) = cfg.width, count_block_parameters(cfg)
    if cfg.kind == "vit":
        images, length = counts.tokens, tokens_per_sample(cfg)
        products = images * ((length - 1) * cfg.channels * cfg.patch**2 * width + length * layers * block)
        return 6 * (products + images * width * cfg.classes) + 12 * layers * width * images * length**2
    if cfg.kind == "encoder":
        products = counts.tokens * layers * block + counts.labels * width * (width + (cfg.classes or cfg.vocab))
        return 6 * products + 12 * layers * width * counts.pairs
    products = counts.tokens * width * cfg.vocab
    if cfg.kind == "decoder":
        seen = min(counts.pairs, 2 * cfg.window * counts.tokens) if cfg.window else counts.pairs
        return 6 * (products + counts.tokens * decoder_layers * block) + 6 * decoder_layers * width * seen
    products += counts.source_tokens * (layers * block + decoder_layers * 2 * width * width)
    products += counts.tokens * decoder_layers * (block + 2 * width * width)
    pairs = layers * counts.source_pairs + decoder_layers * (counts.pairs / 2 + counts.cross_pairs)
    return 6 * products + 12 * width * pairs
