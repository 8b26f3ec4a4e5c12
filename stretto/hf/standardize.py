"""The standardization loss (techniques/standardize.py) in a Hugging Face model.

Norms become affines of the same parameters (AffineNorm in layers.py), whose backward pass pulls their results towards
mean 0 and variance 1. Which tokens count is told to them before each call of the model around them, by its mask: in
packed layers those that the mask keeps, elsewhere all of the rectangle but padding. Where a decoder that reads an
encoder has no mask, positions without a label are padding.

Norms in heads stay: a head is given some of the tokens only, and which of them is up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.batch import IGNORE
from stretto.config import StandardizeConfig
from stretto.hf.call import current_call
from stretto.hf.layer_drop import SAY_STEPS
from stretto.hf.layers import Tokens
from stretto.hf.packing import argument_names, given_arguments
from stretto.hf.roles import Site, Stack
from stretto.techniques.standardize import Pressure, weight_at


@dataclass(eq=False)
class Around:
    """A model around former norms."""

    model: PreTrainedModel
    inner: Tokens  # what those in its layers are given
    outer: Tokens  # and all others
    crosses: bool  # its layers also attend to an encoder's output


@dataclass
class Pulling:
    """How strongly the former norms of a model are pulled, from update to update."""

    cfg: StandardizeConfig
    pressure: Pressure
    around: list[Around]

    def set_step(
        self, step: int, steps: int, share: float, scaler: torch.amp.GradScaler | None, device: torch.device
    ) -> None:
        if self.cfg.final < 1 and steps == 0:
            raise ValueError(f"standardize.final = {self.cfg.final} needs the number of updates: {SAY_STEPS}")
        self.pressure.press(weight_at(self.cfg, step, steps) * share, device, scaler)


def find_problem(model: nn.Module, site: Site) -> str | None:
    """Why a norm has to stay where it is."""
    owner = find_owner(model, site.name)
    if owner is None or "labels" in argument_names(owner):
        return "it is in a head: which tokens a head is given is not known"
    return None


def find_owner(model: nn.Module, name: str) -> PreTrainedModel | None:
    """The innermost model around a module."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if isinstance(module, PreTrainedModel):
            return module
    return None


def plan_pulls(
    model: nn.Module, norms: Sequence[Site], found: Sequence[Stack], cfg: StandardizeConfig
) -> tuple[Pulling, dict[nn.Module, Tokens]]:
    """For these norms."""
    sizes = [next(site.module.parameters()).numel() for site in norms]
    pressure = Pressure(sum(sizes), cfg.axis, cfg.stride)
    stacks = {id(stack.owner): stack for stack in found}
    around: dict[int, Around] = {}
    tokens: dict[nn.Module, Tokens] = {}
    for site in norms:
        owner = find_owner(model, site.name)
        assert owner is not None
        stack = stacks.get(id(owner))
        pair = Tokens(pressure, cfg.affine), Tokens(pressure, cfg.affine)
        here = around.setdefault(id(owner), Around(owner, *pair, stack is not None and stack.crosses))
        inside = stack is not None and any(site.module is module for module in stack.layers.modules())
        tokens[site.module] = here.inner if inside else here.outer
    return Pulling(cfg, pressure, list(around.values())), tokens


def note_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around) -> None:
    """A forward pre-hook, behind that of packing.py."""
    call = None if torch.compiler.is_compiling() else current_call()
    if call is None or not model.training:
        return
    given = given_arguments(model, args, kwargs)
    mask = given.get("attention_mask")
    real = mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if mask is None and around.crosses and call.labels is not None and _has_shape_of(given, call.labels):
        real = call.labels != IGNORE
    flat = None if real is None else real.flatten()
    around.outer.set_real(flat)
    if flat is not None and call.own is not None and call.own.index is not None:
        flat = flat[call.own.index]
    around.inner.set_real(flat)


def _has_shape_of(given: dict[str, Any], labels: Tensor) -> bool:
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    return isinstance(tokens, Tensor) and tokens.shape[:2] == labels.shape
