"""Two kinds of decoder, two links, and the table of what bench/scale.py measured: for tests of costs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from stretto.config import ModelConfig, build_config
from stretto.parallel.sequence_costs import Link, Traffic

FAST, SLOW = Link("fast", 450e9, 2e-6), Link("slow", 50e9, 5e-6)
EQUAL: dict[str, Any] = {"element": 2, "reduced": 2}


def model(**changes: Any) -> ModelConfig:
    return build_config({"model": {"preset": "llama-1b", **changes}}).model


MHA, GQA = model(width=1024, heads=16, kv_heads=16), model(width=1024, heads=16, kv_heads=2)


MEASURED = {
    "gpt2_medium": build_config({"model": {"preset": "gpt2-medium", "vocab": 50304, "positions": "rotary"}}).model,
    "llama1b": build_config({"model": {"preset": "llama-1b"}}).model,
}


def count_messages(traffic: Traffic) -> int:
    return sum(message.count for message in (*traffic.forward, *traffic.backward))


def read_measured() -> list[dict[str, str]]:
    """What bench/scale.py found on an H200."""
    with (Path(__file__).parents[1] / "docs" / "data" / "scale-h200.csv").open(newline="") as file:
        return list(csv.DictReader(file))
