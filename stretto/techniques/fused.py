"""LightSeq2's fused training: every chain between two matrix products is one kernel.

The plain modules are exchanged for those of layers.py, which keep parameters and names, so a checkpoint moves between
on and off. Mathematically exact; in 16 bits the residual stream is rounded to 16 bits too. The optimizer becomes one
launch over all parameters (optim.py), with the weights kept as `weights` says.
"""

from __future__ import annotations

import torch
from torch import nn

from stretto import layers
from stretto import model as plain
from stretto.config import FusedConfig
from stretto.ops.language import triton

EXACT = True
FUSED: dict[type[nn.Module], type[nn.Module]] = {
    plain.Stack: layers.FusedStack,
    plain.Block: layers.FusedBlock,
    plain.Embedding: layers.FusedEmbedding,
    plain.PatchEmbedding: layers.FusedPatchEmbedding,
    plain.LMHead: layers.FusedLMHead,
}


def check(cfg: FusedConfig, model: nn.Module, device: torch.device, precision: str) -> list[str]:
    reasons = []
    if device.type == "cuda" and triton is None:
        reasons.append("its kernels need Triton: pip install triton")
    if cfg.weights != "fp32" and precision != "bf16":
        reasons.append(
            f"weights = {cfg.weights!r} keeps bf16 weights: set train.precision to 'bf16', not {precision!r}"
        )
    return reasons


def apply(model: nn.Module, cfg: FusedConfig, sites: dict[str, list[str]]) -> None:
    for role in ("stack", "block", "embedding", "head"):
        for name in sites[role]:
            module = model.get_submodule(name)
            if type(module) in FUSED:
                module.__class__ = FUSED[type(module)]
    for name in sites["block"]:
        model.get_submodule(name).recompute = cfg.recompute  # type: ignore[assignment]
    if cfg.weights != "fp32":
        model.to(torch.bfloat16)
