"""FLOPs against torch's own counter, and against the figure that anchors MFU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stretto.batch import Batch, Counts, Sequences, dense_layout
from stretto.config import ModelConfig, build_config
from stretto.flops import training_flops
from stretto.model import build_model
from tests.models import materialise

SIZES = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "mlp_width": 96}
ROWS, LENGTH, SOURCE = 3, 16, 24


def rectangle(length: int) -> Sequences:
    ids = torch.randint(0, 64, (ROWS * length,))
    return Sequences(ids, torch.arange(length).repeat(ROWS), dense_layout(ROWS, length))


def make_batch(kind: str) -> Batch:
    if kind == "vit":
        return Batch(
            torch.zeros(ROWS, dtype=torch.long), Counts(ROWS, ROWS, ROWS, 0), (), pixels=torch.randn(ROWS, 3, 16, 16)
        )
    inputs, tokens = rectangle(LENGTH), ROWS * LENGTH
    pairs = {"pairs": ROWS * LENGTH**2}
    if kind == "encoder-decoder":
        pairs |= {
            "source_tokens": ROWS * SOURCE,
            "source_pairs": ROWS * SOURCE**2,
            "cross_pairs": ROWS * SOURCE * LENGTH,
        }
    at = torch.arange(5) if kind == "encoder" else None
    labels = inputs.ids if at is None else inputs.ids[at]
    counts = Counts(tokens, tokens, len(labels), **pairs)
    return Batch(
        labels, counts, (), inputs, label_at=at, source=rectangle(SOURCE) if kind == "encoder-decoder" else None
    )


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("decoder", {}),
        ("decoder", {"kv_heads": 2, "activation": "swiglu", "positions": "rotary"}),
        ("encoder", {}),
        ("encoder-decoder", {"decoder_layers": 3}),
        ("vit", {"image_size": 16, "patch": 4, "classes": 7}),
    ],
)
def test_three_times_the_forward_pass_that_torch_counts(kind: str, extra: dict[str, object]) -> None:
    cfg = ModelConfig(kind=kind, **(SIZES | extra))  # type: ignore[arg-type]
    model = build_model(cfg)
    materialise(model, cfg, 0, torch.device("cpu"))
    batch = make_batch(kind)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(batch)
    counted = counter.get_total_flops()
    if kind in ("decoder", "encoder-decoder"):  # torch counts the masked half of causal attention too
        layers = cfg.decoder_layers or cfg.layers
        counted -= 4 * layers * cfg.width * batch.counts.pairs // 2
    assert training_flops(cfg, batch.counts) == pytest.approx(3 * counted)


def test_gpt2_small_needs_about_0_8_gflop_a_token() -> None:
    cfg = build_config({"model": {"preset": "gpt2-small", "vocab": 50304}}).model
    per_token = training_flops(cfg, Counts(1024, 1024, 1024, 1024**2)) / 1024
    assert per_token == pytest.approx(6 * 123.6e6 + 6 * 12 * 768 * 1024, rel=1e-3)
