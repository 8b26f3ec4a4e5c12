"""What the modules of a Hugging Face model do, found by running them.

A release of transformers renames and rewrites classes; what a module computes stays. So a module is recognised by its
children (linear layers, norms, activations, dropouts) and by the order in which it calls them with a few random rows:

    calls    arguments    role
    LA       1            dense           L linear, A activation, N norm, D dropout (may be missing)
    LAN      1            transform
    LAL      1            mlp             with D before or behind the second L
    LALL     1            gated mlp
    LDN      2            residual norm

That is a guess; what decides is that the module that takes its place gives the same result (swap.py).
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stretto.hf.layers import (
    NONE,
    AffineNorm,
    Fused,
    FusedDense,
    FusedGatedMLP,
    FusedMLP,
    FusedNorm,
    FusedResidualNorm,
    FusedTransform,
    Parts,
    describe_child,
    weight_of,
)
from stretto.ops.activation import GATES
from stretto.ops.norm import MAX_WIDTH

log = logging.getLogger(__name__)
NAME = "stretto"  # of our attention, in transformers' interface
ROWS = 64  # enough that a dropout nobody told us of drops something
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
ROLES: list[tuple[str, int, str, type[Fused]]] = [  # calls, arguments, role, what takes its place
    ("LA", 1, "dense", FusedDense),
    ("LAN", 1, "transform", FusedTransform),
    ("LAD?LD?", 1, "mlp", FusedMLP),
    ("LALD?LD?", 1, "gated mlp", FusedGatedMLP),
    ("LD?N", 2, "residual norm", FusedResidualNorm),
]


@dataclass(frozen=True)
class Site:
    """A module that plays a role, or looks as if it did: then `problem` says why it stays as it is."""

    name: str
    role: str
    module: nn.Module
    fused: type[nn.Module] | None = None
    parts: Parts = NONE
    problem: str | None = None
    remark: str = ""  # what a report says besides, where there is no problem


@dataclass(frozen=True, eq=False)
class Stack:
    """A list of layers, and the model that calls them one after the other and knows the attention mask."""

    name: str
    owner: PreTrainedModel
    layers: nn.ModuleList
    causal: bool
    crosses: bool  # whether its layers also attend to an encoder's output
    relative: bool  # whether attention takes a bias by distance, as T5's does
    path: str  # of the layers, in the owner
    attention: nn.Module  # one of theirs
    depth: Any  # what the owner's configuration says of their number
    inside: tuple[nn.Module, ...]  # the layers and all modules in them
    members: tuple[nn.Module, ...]  # the layers
    windows: set[int] = field(default_factory=set)  # beyond which tokens do not see each other
    problem: str | None = None

    def is_whole(self) -> bool:
        """Whether the owner still has these layers, all of them, and they the attention that was chosen for them."""
        same = self.owner.get_submodule(self.path) is self.layers and _depth(self.owner) == self.depth
        same = same and len(self.layers) <= len(self.members)
        same = same and all(now is then for now, then in zip(self.layers, self.members, strict=False))
        causal = bool(getattr(self.attention, "is_causal", True)) == self.causal
        return same and causal and self.attention.config._attn_implementation == NAME  # type: ignore[union-attr]

    def exceeds_window(self, longest: int) -> bool:
        """Whether some tokens of such a row do not see each other. The configuration's window may be another by now."""
        return any(longest > window for window in (*self.windows, *_windows(self.owner.config)))


def sites(model: nn.Module) -> list[Site]:
    """Every module that has a role, in the order of the model."""
    found: list[Site] = []
    kinds: dict[Any, Site] = {}  # modules of one class and shape are looked at once
    for name, module in model.named_modules():
        key = _kind(module)
        if key not in kinds:
            try:
                kinds[key] = _find_role(name, module)
            except Exception as error:  # a module that cannot be looked at is left alone
                log.debug("%s: %s", name, error)
                kinds[key] = Site(name, "", module)
        if kinds[key].role:
            like = kinds[key]
            found.append(Site(name, like.role, module, like.fused, like.parts, like.problem))
    return found


def _kind(module: nn.Module) -> Any:
    children = tuple((name, type(child), _shape(child), repr(child)) for name, child in module.named_children())
    return type(module), _shape(module), children if len(children) < 8 else id(module)


def _shape(module: nn.Module) -> Any:
    return tuple((name, p.shape, p.dtype) for name, p in module.named_parameters(recurse=False))


def _find_role(name: str, module: nn.Module) -> Site:
    if is_norm(module):
        width = next(module.parameters()).shape[0]
        problem = f"{width} channels: more than {MAX_WIDTH}" if width > MAX_WIDTH else None
        return Site(name, "norm", module, FusedNorm, problem=problem)
    if calls_attention_interface(module):
        return Site(name, "attention", module)
    letters = {child: _letter(part) for child, part in module.named_children()}
    arity = _arity(module)
    if not letters or None in letters.values() or "L" not in letters.values() or arity not in (1, 2):
        return Site(name, "", module)
    calls = _trace(module, arity)
    if calls is None:
        return Site(name, "", module)
    word = "".join(str(letters[child]) for child, _ in calls)
    for pattern, arguments, role, fused in ROLES:
        if arity == arguments and re.fullmatch(pattern, word):
            parts, problem = _find_parts(module, calls, letters)
            return Site(name, role, module, fused, parts, problem)
    return Site(name, "", module)


def is_norm(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(module, AffineNorm):
        return True
    if isinstance(module, nn.LayerNorm):
        return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and "weight" in names
    has_eps = any(isinstance(getattr(module, eps, None), float) for eps in ("variance_epsilon", "eps"))
    return names == ["weight"] and next(module.parameters()).ndim == 1 and has_eps and not list(module.children())


def _letter(module: nn.Module) -> str | None:
    if type(module) in (nn.Linear, Conv1D):
        return "L"
    if isinstance(module, nn.Dropout):
        return "D"
    if is_norm(module):
        return "N"
    return "A" if is_activation(module) else None


def is_activation(module: nn.Module) -> bool:
    """Whether it may be one: it has nothing of its own."""
    leaf = not list(module.children()) and not list(module.parameters()) and not list(module.buffers())
    return leaf and not isinstance(module, nn.Identity | nn.Dropout) and "forward" in _names_of_methods(type(module))


def _names_of_methods(kind: type[nn.Module]) -> set[str]:
    return {name for base in kind.__mro__ if base is not nn.Module for name in vars(base)}


def _arity(module: nn.Module) -> int:
    """How many arguments `forward` has to be given."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("stretto.")


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether attention goes through the functions that are registered with transformers."""
    kinds = (kind for kind in type(module).__mro__ if "forward" in vars(kind) and not is_ours(kind))
    forward = inspect.unwrap(vars(next(kinds))["forward"])
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def _trace(module: nn.Module, arity: int) -> list[tuple[str, int]] | None:
    """The children that are called, in order, and the width of what each is given."""
    dense = [child for child in module.children() if _letter(child) == "L"]
    for width in dict.fromkeys(weight_of(child).shape[1] for child in dense):
        calls: list[tuple[str, int]] = []

        def note(name: str, calls: list[tuple[str, int]] = calls) -> Any:
            return lambda _, args: calls.append((name, args[0].shape[-1]))

        handles = [child.register_forward_pre_hook(note(name)) for name, child in module.named_children()]
        try:
            with quietly(module):
                module(*draw_inputs(module, arity, width))
            return calls
        except Exception:
            continue  # of another width, or not a function of plain rows
        finally:
            for handle in handles:
                handle.remove()
    return None


def _find_parts(
    module: nn.Module, calls: list[tuple[str, int]], letters: dict[str, str | None]
) -> tuple[Parts, str | None]:
    by_letter: dict[str, list[str]] = {letter: [] for letter in "LNDA"}
    for child, _ in calls:
        by_letter[str(letters[child])].append(child)
    dense, norms, drops, acts = by_letter.values()
    unused = [child for child in letters if child not in dict(calls)]
    kind = find_activation(module.get_submodule(acts[0])) if acts else None
    inner = weight_of(module.get_submodule(dense[-1])).shape[1]
    outer = dict(calls)[dense[0]]
    in_one = len(dense) == 2 and weight_of(module.get_submodule(dense[0])).shape[0] == 2 * inner  # gate and value
    gated = in_one or len(dense) == 3
    if gated:
        kind = next((gate for gate, function in GATES.items() if function == kind), None)
    problem = None
    if acts and kind is None:
        problem = f"{'a gate by' if gated else 'activation'} {module.get_submodule(acts[0])}: no kernel"
    elif len(drops) > 1 or unused:
        problem = f"more children than its role has: {', '.join(drops[1:] + unused)}"
    elif drops and len(dense) > 1 and inner == outer:
        problem = "where its dropout stands cannot be seen: both widths are equal"
    elif gated and len({module.get_submodule(child).bias is None for child in dense[:2]}) > 1:
        problem = "only one of gate and value has a bias"
    inside = bool(drops) and dict(calls)[drops[0]] == inner and len(dense) > 1
    used = tuple(describe_child(module, child) for child in dict(calls))
    return Parts(tuple(dense), next(iter(norms), None), next(iter(drops), None), kind, inside, children=used), problem


def find_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """Its kind, by its values."""
    x = torch.linspace(-6, 6, 49, dtype=torch.float64)
    try:
        y = function(x)
    except Exception:  # what is no function of numbers is none
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    close = [kind for kind, exact in ACTIVATIONS.items() if (y - exact(x)).abs().max() < 1e-6]
    return close[0] if close else None


def draw_inputs(module: nn.Module, arity: int, width: int) -> list[Tensor]:
    """Random rows [1, ROWS, width] of all sizes, half of them with a mean that is not zero; the second argument, a
    residual, is as wide as the output."""
    like = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    dense = [child for child in module.children() if _letter(child) == "L"]
    widths = [width, weight_of(dense[-1]).shape[0]] if arity == 2 else [width]
    size = torch.logspace(-2, 1, ROWS)[:, None]
    mean = torch.arange(ROWS)[:, None] % 2
    rows = [size * (torch.randn(1, ROWS, w, generator=generator) + mean) for w in widths]
    return [each.to(like.device, like.dtype) for each in rows]


@contextmanager
def quietly(module: nn.Module, training: bool = False) -> Iterator[None]:
    """In eval mode, or in training mode without the dropout of its children; nothing is recorded, and the state of
    random generators stays."""
    modes = [(m, m.training) for m in module.modules()]
    rates = [(m, m.p) for m in module.modules() if isinstance(m, nn.Dropout)]
    devices = [torch.device(p.device) for p in module.parameters() if p.is_cuda][:1]
    try:
        module.train(training)
        for drop, _ in rates:
            drop.p = 0.0
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for m, mode in modes:
            m.training = mode
        for drop, p in rates:
            drop.p = p


def stacks(model: nn.Module) -> list[Stack]:
    """Every list of layers with attention in them."""
    found = []
    modules = dict(model.named_modules())
    for name, layers in modules.items():
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        inside = [[m for m in layer.modules() if calls_attention_interface(m)] for layer in layers]
        if not all(inside) or len({type(layer) for layer in layers}) > 1:
            continue
        owner_name, owner = _owner(name, modules)
        if owner is not None:
            path = name[len(owner_name) :].lstrip(".")
            found.append(_describe(owner_name, owner, path, layers, inside[0]))
    owners = [stack.owner for stack in found]
    return [stack for stack in found if owners.count(stack.owner) == 1]


def _describe(
    name: str, owner: PreTrainedModel, path: str, layers: nn.ModuleList, attentions: list[nn.Module]
) -> Stack:
    causal = bool(getattr(attentions[0], "is_causal", True))
    parameters = inspect.signature(type(layers[0]).forward).parameters
    relative = any("position_bias" in inspect.signature(type(m).forward).parameters for m in attentions)
    problem = None if "attention_mask" in parameters else "its layers take no attention_mask"
    windows = {w for thing in (owner.config, *layers.modules()) for w in _windows(thing)}
    inside, members = tuple(layers.modules())[1:], tuple(layers)
    of = (name, owner, layers, causal, len(attentions) > 1, relative, path, attentions[0], _depth(owner))
    return Stack(*of, inside, members, windows, problem)


def _windows(thing: Any) -> list[int]:
    """Sizes of windows and chunks of tokens that a configuration or a module speaks of."""
    named = [value for name, value in vars(thing).items() if re.search(r"(window|chunk)(_size)?$", name)]
    return [value for value in named if isinstance(value, int) and value > 0]


def _depth(owner: PreTrainedModel) -> Any:
    return getattr(owner.config, "num_hidden_layers", None)


def _owner(name: str, modules: dict[str, nn.Module]) -> tuple[str, PreTrainedModel | None]:
    while name:
        name = name.rpartition(".")[0]
        module = modules[name]
        if isinstance(module, PreTrainedModel):
            return name, module
    return "", None
