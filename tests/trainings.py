"""A small model under each kind of optimizer, to be saved and resumed."""

from __future__ import annotations

import torch

from stretto import checkpoint
from stretto.checkpoint import Snapshot
from stretto.config import FusedConfig, ModelConfig, OptimConfig
from stretto.model import Model, build_model
from stretto.optim import clip_gradients, weight_writer
from stretto.weights import initialise
from tests.models import build_adamw
from tests.ops.checks import DEVICE

MODEL = ModelConfig(vocab=40, width=8, heads=2, layers=1, max_len=8)


class Training:
    """A small model under an optimizer, fed with made-up gradients."""

    def __init__(self, way: FusedConfig | None) -> None:
        narrow = way is not None and way.weights != "fp32"
        self.model: Model = build_model(MODEL).to(torch.bfloat16 if narrow else torch.float32).to_empty(device=DEVICE)
        self.model.get_parameter("decoder.norm.bias").requires_grad_(False)
        self.optimizer = build_adamw(self.model, OptimConfig(lr=1e-2, beta2=0.999), way, seed=4)
        initialise(self.model, MODEL, 0, weight_writer(self.optimizer))

    def run(self, first: int, last: int) -> Training:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for p in self.model.parameters():
                if p.requires_grad:
                    gradient = torch.randn(p.shape, generator=generator).bfloat16()  # the same for every precision
                    p.grad = gradient.to(p.device, p.dtype)
            clip_gradients(self.model, self.optimizer, 1.0)
            self.optimizer.step()
        return self

    def shot(self, step: int) -> Snapshot:
        return checkpoint.snapshot(self.model, self.optimizer, {"step": step, "best_step": 0})

    def resume(self, shot: Snapshot) -> Training:
        checkpoint.restore_weights(self.model, shot, weight_writer(self.optimizer))
        checkpoint.restore_moments(self.model, self.optimizer, shot)
        return self
