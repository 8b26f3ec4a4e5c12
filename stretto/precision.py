"""The number formats that a model is trained in."""

from __future__ import annotations

import torch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(name: str, device: torch.device) -> str:
    return name if name != "auto" else "bf16" if device.type == "cuda" else "fp32"


def autocast(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=PRECISIONS[precision], enabled=precision != "fp32")
