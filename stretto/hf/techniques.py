"""The techniques that change the mathematics of training, in a Hugging Face model.

Layer dropping (techniques/layer_drop.py). A layer that is left out gives back the stream as it got it: none of its
modules is called. Of one that works p of the time, what it adds is multiplied by 1 / p, as a whole:
x + (layer(x) - x) / p. Which layers work in an update is drawn on the host from (seed, update, stack, layer) by the
functions of the technique, and noted at the layers beforehand. It is decided where a layer is called, not inside:
recomputed and compiled layers know nothing of it. Whether a layer only adds something to the stream is found by running
it on a very large one, against which everything that is computed from normalised values is small: what comes out must
be nearly what went in.

The standardization loss (techniques/standardize.py). Norms become affines of the same parameters (AffineNorm in
modules.py), whose backward pass pulls their results towards mean 0 and variance 1. Which tokens count is told to them
before each call of the model around them, by its mask: in packed layers those that the mask keeps, elsewhere all of the
rectangle but padding. Where a decoder that reads an encoder has no mask, positions without a label are padding. Norms
in heads stay: a head is given some of the tokens only, and which of them is up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.batch import IGNORE
from stretto.config import LayerDropConfig, StandardizeConfig
from stretto.hf.defer import compute, current_call
from stretto.hf.find import (
    Site,
    Stack,
    acts_as_norm,
    argument_names,
    find_owners,
    find_sites,
    find_tokens,
    given_arguments,
    quietly,
    replace_argument,
)
from stretto.hf.modules import AffineNorm, Tokens, hands_on
from stretto.hf.trial import Journal, compare_module, kind_of
from stretto.layers import Pressure
from stretto.techniques.layer_drop import POST_NORM, LayerDrop, keep_probabilities, level_at
from stretto.techniques.standardize import weight_at

SAY_STEPS = "stretto.accelerate(model, ..., steps=NUMBER)"
LARGE = 4096.0  # size of the stream on which layers are tried; fp16 holds it
NEAR = 0.1  # largest change of such a stream by a layer that only adds to it, relative


@dataclass(eq=False)
class Gate:
    """What a layer does in this update."""

    names: tuple[str, ...]  # names of the layer's arguments
    others: tuple[str | None, ...] | None  # arguments that it returns besides the stream; None: it returns a tensor
    needed: bool  # whether it makes something that later layers need
    factor: float | None = None  # factor of what it adds to the stream; 0: it is left out; None: nobody has said


class SwitchedLayer(nn.Module):
    """Mixed into the layers of a stack."""

    stretto_gate: Gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate = self.stretto_gate
        if not self.training or not torch.is_grad_enabled() or gate.factor == 1.0:
            return super().__call__(*args, **kwargs)
        if gate.factor is None:
            raise ValueError("layer_drop depends on the step: call stretto.hf.set_step(model, step) before each update")
        given = dict(zip(gate.names, args, strict=False)) | kwargs
        x: Tensor = given["hidden_states"]
        if gate.factor == 0.0:
            x = x if hands_on(self) else compute(x)
            return x if gate.others is None else (x, *(given.get(name or "") for name in gate.others))
        out = super().__call__(*args, **kwargs)
        y = compute(out if gate.others is None else out[0])
        y = torch.lerp(compute(x).to(y.dtype), y, gate.factor)
        return y if gate.others is None else (y, *out[1:])


@dataclass
class Dropping:
    """Which layers of a model work, from update to update."""

    drop: LayerDrop
    gates: dict[str, dict[nn.Module, Gate]]  # gates of layers, by the name of the stack
    theta: float = 1.0

    def set_step(self, step: int, steps: int) -> None:
        cfg = self.drop.cfg
        by_length = cfg.schedule == "raptr" or (cfg.schedule == "decay" and cfg.gamma == 0.0)
        if by_length and steps == 0 and cfg.theta < 1:
            raise ValueError(f"layer_drop.schedule = {cfg.schedule!r} needs the number of updates: {SAY_STEPS}")
        self.theta = level_at(cfg, step, steps)
        for stack, gates in self.gates.items():
            probabilities = keep_probabilities(cfg, self.theta, len(gates))
            works = self.drop.draw_blocks(stack, probabilities, step)
            for number, (gate, p) in enumerate(zip(gates.values(), probabilities, strict=True)):
                gate.factor = 1 / p if number in works else 0.0

    def pattern(self) -> dict[str, dict[int, float | None]]:
        """The factors of all layers: a recorded update is for one such pattern."""
        return {stack: {i: gate.factor for i, gate in enumerate(gates.values())} for stack, gates in self.gates.items()}

    def all_gates(self) -> Iterator[tuple[nn.Module, Gate]]:
        for gates in self.gates.values():
            yield from gates.items()


def plan_drops(
    model: nn.Module,
    tried: Sequence[tuple[Stack, dict[str, Any] | None]],
    cfg: LayerDropConfig,
    seed: int,
    done: list[Site],
) -> Dropping:
    """Finds the layers that can be left out, before anything is changed. With each stack come inputs for its owner."""
    if cfg.scale == "branch":
        raise ValueError("layer_drop.scale = 'branch' is inside of Hugging Face's own layers: set it to 'update'")
    if cfg.gate == "sample":
        raise ValueError("layer_drop.gate = 'sample' would cut all that layers are given: set it to 'batch'")
    names = {module: name for name, module in model.named_modules()}
    gates: dict[str, dict[nn.Module, Gate]] = {}
    problems: dict[str, list[str]] = {}
    for stack, inputs in tried:
        found = find_gates(stack, inputs, cfg)
        if isinstance(found, str):
            problems.setdefault(found, []).append(names[stack.layers])
        else:
            gates[stack.name] = dict(zip(stack.layers, found, strict=True))
        problem = found if isinstance(found, str) else None
        done += [Site(names[layer], "layer_drop", layer, problem=problem) for layer in stack.layers]
    if not gates:
        reasons = [f"{', '.join(where)}: {problem}" for problem, where in problems.items()]
        why = "; ".join(reasons) or "no stack of layers with attention by transformers' AttentionInterface"
        raise ValueError(f"layer_drop does not apply to {type(model).__name__}: {why}")
    sizes = {name: len(of_stack) for name, of_stack in gates.items()}
    return Dropping(LayerDrop(cfg, sizes, seed, total=0, image_tokens=0), gates)


def find_gates(stack: Stack, inputs: dict[str, Any] | None, cfg: LayerDropConfig) -> list[Gate] | str:
    """A gate for each layer of a stack, or why its layers cannot be left out. `inputs` are for the stack's owner."""
    if inputs is None:
        return "it reads neither tokens nor images: its layers cannot be tried"
    if getattr(stack.owner, "layerdrop", 0.0):
        return "it drops layers by itself: set layerdrop to 0 in its configuration"
    gates: list[Gate] = []
    problems: list[str] = []
    normalised: list[Any] = []
    norms = [module for module in stack.layers.modules() if acts_as_norm(module)]
    hooks = [norm.register_forward_hook(lambda _, args, y: normalised.append(y)) for norm in norms]
    for layer in stack.layers:
        hooks.append(layer.register_forward_pre_hook(_enlarge, with_kwargs=True))
        hooks.append(layer.register_forward_hook(partial(_inspect, gates, problems, normalised), with_kwargs=True))
    try:
        with quietly(stack.owner):
            stack.owner(**inputs)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its layers cannot be tried: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    if problems:
        return problems[0]
    if len(gates) != len(stack.layers):
        return f"it called layers {len(gates)} times, and has {len(stack.layers)}"
    lowest = keep_probabilities(cfg, cfg.theta, len(gates))
    if any(gate.needed and p < 1 for gate, p in zip(gates, lowest, strict=True)):
        return "its first layer makes what the others need, and cannot be left out: set layer_drop.index to 'algorithm'"
    return gates


def _enlarge(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = given_arguments(layer, args, kwargs)["hidden_states"]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return replace_argument(layer, args, kwargs, "hidden_states", (LARGE * noise).to(x.device, x.dtype))


def _inspect(
    gates: list[Gate],
    problems: list[str],
    normalised: Sequence[Any],
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> None:
    given = given_arguments(layer, args, kwargs)
    x, y = given["hidden_states"], out if isinstance(out, Tensor) else out[0]
    if any(y is other for other in normalised):
        problems.append(POST_NORM)
    elif y.shape != x.shape or not (y.float() - x.float()).norm() < NEAR * x.float().norm():
        problems.append("its layers do more than add something to the stream: leaving one out would change its scale")
    others = () if isinstance(out, Tensor) else out[1:]
    names = {id(value): name for name, value in given.items() if value is not None}
    passed = tuple(names.get(id(other)) for other in others)
    needed = any(name is None and other is not None for name, other in zip(passed, others, strict=True))
    gates.append(Gate(argument_names(layer), None if isinstance(out, Tensor) else passed, needed))


@dataclass(eq=False)
class Around:
    """A model around former norms."""

    model: PreTrainedModel
    inner: Tokens  # tokens of the norms in its layers
    outer: Tokens  # tokens of its other norms
    crosses: bool  # whether its layers also attend to an encoder's output


@dataclass
class Pulling:
    """How strongly the former norms of a model are pulled, from update to update."""

    cfg: StandardizeConfig
    pressure: Pressure
    around: list[Around]

    def set_step(
        self, step: int, steps: int, share: float, scaler: torch.amp.GradScaler | None, device: torch.device
    ) -> None:
        of = self.pressure
        if self.cfg.final < 1 and steps == 0:
            raise ValueError(f"standardize.final = {self.cfg.final} needs the number of updates: {SAY_STEPS}")
        of.weight = weight_at(self.cfg, step, steps)
        if of.factor is None or of.factor.device != device:
            of.factor = torch.zeros((), device=device)
        of.factor.fill_(of.weight * share / of.num_channels)
        if scaler is not None:
            of.factor.copy_(scaler.scale(of.factor))


def plan_pulls(
    model: nn.Module, stacks: Sequence[Stack], cfg: StandardizeConfig, journal: Journal, done: list[Site]
) -> tuple[Pulling, dict[nn.Module, Tokens]]:
    """Puts affines in the place of all norms but those of heads, and finds out which tokens count for each of them."""
    norms = [site for site in _judge_norms(model, done) if site.problem is None]
    if not norms:
        why = "; ".join(dict.fromkeys(str(site.problem) for site in done if site.role == "standardize"))
        raise ValueError(f"standardize does not apply to {type(model).__name__}: {why or 'it has no norms'}")
    for site in norms:
        journal.swap(site.module, AffineNorm)
    sizes = [next(site.module.parameters()).numel() for site in norms]
    pressure = Pressure(cfg.weight, sum(sizes), cfg.axis, cfg.stride)
    by_owner = {id(stack.owner): stack for stack in stacks}
    around: dict[int, Around] = {}
    tokens: dict[nn.Module, Tokens] = {}
    for site in norms:
        _, owner = next(find_owners(model, site.name))
        stack = by_owner.get(id(owner))
        pair = Tokens(pressure, cfg.affine), Tokens(pressure, cfg.affine)
        here = around.setdefault(id(owner), Around(owner, *pair, stack is not None and stack.crosses))
        tokens[site.module] = here.inner if stack is not None and site.module in stack.inside else here.outer
    return Pulling(cfg, pressure, list(around.values())), tokens


def _judge_norms(model: nn.Module, done: list[Site]) -> list[Site]:
    """All norms, with the reason why one has to stay."""
    problems: dict[Any, str | None] = {}
    norms = []
    for site in (site for site in find_sites(model) if site.role == "norm"):
        key = kind_of(site)
        if key not in problems:
            problems[key] = site.problem or compare_module(site)
        owner = next((owner for _, owner in find_owners(model, site.name)), None)
        in_head = owner is None or "labels" in argument_names(owner)
        unknown = "it is in a head: which tokens a head is given is not known" if in_head else None
        norms.append(replace(site, role="standardize", problem=problems[key] or unknown))
    done += norms
    return norms


def add_pulls(pulling: Pulling, tokens: dict[nn.Module, Tokens], journal: Journal) -> None:
    """Tells the former norms which tokens count, behind the hooks of unpad.py."""
    for norm, of_norm in tokens.items():
        journal.change(norm, "stretto_tokens", of_norm)
    for around in pulling.around:
        hook = partial(note_tokens, around=around)
        journal.hooks.append(around.model.register_forward_pre_hook(hook, with_kwargs=True))


def note_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around) -> None:
    """A forward pre-hook, behind that of unpad.py."""
    call = None if torch.compiler.is_compiling() else current_call()
    if call is None or not model.training:
        return
    given = given_arguments(model, args, kwargs)
    mask = given.get("attention_mask")
    real = mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None
    tokens, labels = find_tokens(given), call.labels
    if mask is None and around.crosses and labels is not None and isinstance(tokens, Tensor):
        real = labels != IGNORE if tokens.shape[:2] == labels.shape else None
    flat = None if real is None else real.flatten()
    around.outer.set_real(flat)
    if flat is not None and call.own is not None and call.own.index is not None:
        flat = flat[call.own.index]
    around.inner.set_real(flat)
