"""The standardization loss: networks that learn to be normalised, and so have no norms once they are trained.

Every LayerNorm or RMSNorm gives way to a learned affine, which costs no sum over channels, and training asks for what
the norm would have enforced: a loss pulls the affine's result towards mean 0 and variance 1. The formula is in
ops/affine.py; it is that of Collins, Ballé and Shlens (arXiv 1903.00925), who had no Transformers. Three things are
ours: statistics of a token over its channels, which couple no examples and see no future; the affine in front, which
can rescale a residual stream that grows by design; and a weight that is a mean over sites and channels, so that it
means the same in models of other sizes. Branches begin small (`depth_init`): deep stacks then start near variance 1.

The loss acts in the backward pass alone: logs and evaluation show the loss of the task. Padding and filler do not
count. Parameters keep the names they have in norms, so checkpoints of one model do load into the other, but it is not
the same function: a run with norms is not resumed without.

It changes the mathematics, and is no substitute for norms where these are cheap: it is a safety net that lets networks
without norms train where they would diverge. What is gained is at inference: `fold` moves what is left into the linear
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.batch import IGNORE, Layout
from stretto.config import StandardizeConfig
from stretto.layers import Affine, Pressure
from stretto.ops.language import triton

EXACT = False
Find = Callable[..., tuple[Layout, Tensor]]
# Role -> the layout that its call is about, and a tensor with a row for each token, among the arguments.
TOKENS: dict[str, Find] = {
    "block": lambda x, layout, *rest: (layout, x),
    "stack": lambda x, positions, layout, *rest: (layout, x),
    "embedding": lambda inputs, *rest: (inputs.layout, inputs.ids),
}


def check(cfg: StandardizeConfig, model: nn.Module, device: torch.device, precision: str) -> list[str]:
    if device.type == "cuda" and triton is None:
        return ["its kernels need Triton: pip install triton"]
    return []


def apply(model: nn.Module, cfg: StandardizeConfig, sites: dict[str, list[str]]) -> None:
    norms: list[Any] = [model.get_submodule(name) for name in sites["norm"]]
    pressure = Pressure(cfg.weight, sum(norm.weight.numel() for norm in norms), cfg.axis, cfg.stride)
    for name, norm in zip(sites["norm"], norms, strict=True):
        weight, bias = (getattr(norm, key, None) if cfg.affine else None for key in ("weight", "bias"))
        model.set_submodule(name, Affine(weight, bias, pressure))
    for role, find in TOKENS.items():
        for module in map(model.get_submodule, sites[role]):
            if _sites_of(module):
                module.register_forward_pre_hook(partial(_note_tokens, find))
    if any(map(_sites_of, map(model.get_submodule, sites["head"]))):
        model.register_forward_pre_hook(_note_labels)


def find_pressure(model: nn.Module) -> Pressure | None:
    return next((module.pressure for module in model.modules() if isinstance(module, Affine)), None)


def weight_at(cfg: StandardizeConfig, step: int, total: int) -> float:
    """The weight of the loss in update number `step`, counted from 0, in a run of `total` steps."""
    if step < cfg.warmup:
        return cfg.weight * (step + 1) / cfg.warmup
    done = min((step - cfg.warmup) / max(total - cfg.warmup, 1), 1.0)
    return cfg.weight * (1 - done * (1 - cfg.final))


def _sites_of(module: nn.Module) -> list[Affine]:
    return [child for child in module.children() if isinstance(child, Affine)]


def _note_tokens(find: Find, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Tells sites, before each call, which tokens count. Per block: one may get other sequences than the last."""
    layout, tokens = find(*args)
    for site in _sites_of(module):
        site.rows = site.pressure.weigh_layout(layout, len(tokens)) if module.training else None


def _note_labels(model: nn.Module, args: tuple[Any, ...]) -> None:
    """A language model's head reads the positions that are predicted, and filler."""
    (batch,) = args
    for site in _sites_of(model.get_submodule("head")):
        site.rows = site.pressure.weigh(batch.labels != IGNORE) if model.training else None
