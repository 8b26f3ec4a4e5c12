"""Layer dropping (techniques/layer_drop.py) in a Hugging Face model.

A layer that is left out gives back the stream as it got it: none of its modules is called. Of one that works p of the
time, what it adds is multiplied by 1 / p, as a whole: x + (layer(x) - x) / p. Which layers work in an update is drawn
on the host from (seed, update, stack, layer) by the functions of the technique, and noted at the layers beforehand.
It is decided where a layer is called, not inside: recomputed and compiled layers know nothing of it.

Whether a layer only adds something to the stream is found by running it on a very large one, against which everything
that is computed from normalised values is small: what comes out must be nearly what went in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.config import LayerDropConfig
from stretto.hf.layers import hands_on
from stretto.hf.packing import argument_names, given_arguments, replace_argument
from stretto.hf.pending import compute
from stretto.hf.roles import Site, Stack, is_norm, quietly
from stretto.techniques.layer_drop import POST_NORM, LayerDrop, keep_probabilities, level_at
from stretto.techniques.technique import Context

SAY_STEPS = "stretto.accelerate(model, ..., steps=NUMBER)"
LOUD = 4096.0  # the size of that stream; fp16 holds it
NEAR = 0.1


@dataclass(eq=False)
class Gate:
    """What a layer does in this update."""

    names: tuple[str, ...]  # of the layer's arguments
    others: tuple[str | None, ...] | None  # of those that it gives back besides the stream; None: it gives a tensor
    needed: bool  # it makes something that later layers need
    factor: float | None = None  # of what it adds to the stream; 0: it is left out; None: nobody has said


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
    gates: dict[str, dict[nn.Module, Gate]]  # of the layers of a stack, by its name
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
        """What a recorded update depends on."""
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
    """The layers that can be left out, before anything is changed. With each stack come inputs for its owner."""
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
    device = next(model.parameters()).device
    return Dropping(LayerDrop(cfg, Context(None, device, "fp32", seed=seed)), gates)


def find_gates(stack: Stack, inputs: dict[str, Any] | None, cfg: LayerDropConfig) -> list[Gate] | str:
    """A gate for each layer of a stack, or why its layers cannot be left out. `inputs` are for the stack's owner."""
    if inputs is None:
        return "it reads neither tokens nor images: its layers cannot be tried"
    if getattr(stack.owner, "layerdrop", 0.0):
        return "it drops layers by itself: set layerdrop to 0 in its configuration"
    gates: list[Gate] = []
    problems: list[str] = []
    normalised: list[Any] = []
    norms = [module for module in stack.layers.modules() if is_norm(module)]
    hooks = [norm.register_forward_hook(lambda _, args, y: normalised.append(y)) for norm in norms]
    for layer in stack.layers:
        hooks.append(layer.register_forward_pre_hook(_drown, with_kwargs=True))
        hooks.append(layer.register_forward_hook(partial(_look, gates, problems, normalised), with_kwargs=True))
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


def _drown(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = given_arguments(layer, args, kwargs)["hidden_states"]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return replace_argument(layer, args, kwargs, "hidden_states", (LOUD * noise).to(x.device, x.dtype))


def _look(
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
