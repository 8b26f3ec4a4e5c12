"""torch's FlopCounterMode counts the same for an accelerated model as for the untouched one, without padding. It
looks at the output of every module, so that logits are computed while it counts."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.hf.families import Batch, accelerated, build, draw_batch


def count(model: Any, batch: Batch, train: bool) -> int:
    model.train(train)
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch).loss
        if train:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "t5-gated", "vit", "marian"])
def test_counts_are_those_of_the_untouched_model(family: str, train: bool) -> None:
    """Attention is sdpa in both, which torch does not count on a CPU."""
    batch = draw_batch(family, lengths=None)
    expected = count(build(family), batch, train)
    assert expected > 100_000
    assert count(accelerated(family), batch, train) == expected


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_padding_does_not_count(family: str) -> None:
    batch = draw_batch(family)
    padding = int((batch["attention_mask"] == 0).sum())
    plain = build(family)
    layers = plain.bert.encoder.layer if family == "bert" else plain.transformer.h
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    expected = count(plain, batch, True) - 3 * 2 * padding * weights
    assert count(accelerated(family), batch, True) == expected
