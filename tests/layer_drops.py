"""Small models with layer dropping at the end of a long run, and batches for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from stretto.batch import Batch, Counts
from stretto.config import LayerDropConfig, ModelConfig
from stretto.techniques.layer_drop import LayerDrop
from stretto.techniques.technique import Context
from tests.models import CLASSES, CONFIGS, Sample, collate

BLOCKS, TOTAL = 4, 1000  # blocks of a stack, steps of a run
KINDS = {name: replace(cfg, norm_order="pre", layers=BLOCKS) for name, cfg in CONFIGS.items()}
del KINDS["encoder-decoder-own"]
PAIRS = [(7, 5), (1, 9), (13, 1), (4, 4)]


def make_drop(cfg: LayerDropConfig, model: ModelConfig | None = None, seed: int = 0) -> LayerDrop:
    """Layer dropping for a model of few blocks in a run of TOTAL steps."""
    model = model or KINDS["decoder"]
    stacks = {"decoder": ["decoder"], "encoder-decoder": ["encoder", "decoder"]}.get(model.kind, ["encoder"])
    drop = LayerDrop(cfg, Context(model, torch.device("cpu"), "fp32", seed=seed, steps=TOTAL))
    drop.num_blocks = dict.fromkeys(stacks, model.layers)
    return drop


def make_batches(cfg: ModelConfig, form: str = "packed") -> tuple[Batch, list[Batch]]:
    """Four sequences, together and each by itself."""
    if cfg.kind == "vit":
        pixels = torch.randn(
            4, cfg.channels, cfg.image_size, cfg.image_size, generator=torch.Generator().manual_seed(0)
        )
        rows = [Batch(torch.tensor([i % CLASSES]), Counts(0, 0, 0, 0), (), pixels=pixels[i : i + 1]) for i in range(4)]
        return replace(rows[0], pixels=pixels, labels=torch.arange(4) % CLASSES), rows
    samples = [Sample.draw(*pair, seed=i) for i, pair in enumerate(PAIRS)]
    return collate(cfg, samples, form), [collate(cfg, [sample]) for sample in samples]
