"""AdamW with its decay groups, and learning-rate schedules that are pure functions of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from stretto.config import OptimConfig


def learning_rate(cfg: OptimConfig, step: int, total: int) -> float:
    """The rate of update number `step`, counted from 0, in a run of `total` steps."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "inverse_sqrt":
        return cfg.lr * math.sqrt(max(cfg.warmup, 1) / (step + 1))
    done = min((step - cfg.warmup) / max(total - cfg.warmup, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if cfg.schedule == "cosine" else 1 - done
    return cfg.lr * (cfg.min_lr + (1 - cfg.min_lr) * left)


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """Matrices decay; vectors (biases, norms) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # The fused kernel also takes `found_inf`, by which guard.py cancels an update without asking the host.
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
