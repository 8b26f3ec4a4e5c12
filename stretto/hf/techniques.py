"""What techniques can do in a Hugging Face model, from the outside (`Foreign` in techniques/foreign.py).

Switched layers. A layer that is left out gives back the stream as it got it: none of its modules is called. Of one that
works p of the time, what it adds is multiplied by 1 / p, as a whole: x + (layer(x) - x) / p. Which layers work in an
update is noted at the layers beforehand. It is decided where a layer is called, not inside: recomputed and compiled
layers know nothing of it. Whether a layer only adds something to the stream is found by running it on a very large one,
against which everything that is computed from normalised values is small: what comes out must be nearly what went in.

Replaced norms. A norm's parameters stay, under a rule of the technique (RuledNorm in modules.py). Which tokens count is
told to them before each call of the model around them, by its mask: in packed layers those that the mask keeps,
elsewhere all of the rectangle but padding. Where a decoder that reads an encoder has no mask, positions without a label
are padding. Norms in heads stay: a head is given some of the tokens only, and which of them is up to it.

Objects for products. A linear layer that our modules compute asks its attribute `product`; of several layers of one
input, which are one product, all have the same. That the modules ask it rightly is tried with objects that multiply as
usual.

Modules that keep less. Each reads an attribute of its own: a norm `from_output`, which its technique goes on setting
while the model is trained; MLPs and activations `stretto_keep`. WholeGatedMLP keeps no activation in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.batch import IGNORE
from stretto.hf import find, modules
from stretto.hf.defer import compute, current_call
from stretto.hf.find import Site, Stack, acts_as_norm, argument_names, find_owners, given_arguments, quietly
from stretto.hf.modules import SAY_STEP, Recognised, RuledNorm, Tokens, hands_on
from stretto.hf.trial import Journal, judge_kinds, kind_of
from stretto.memory import Keep
from stretto.ops.products import Product
from stretto.techniques.foreign import Layer, R, Switch
from stretto.techniques.technique import POST_NORM

ANOTHER_FUNCTION = ": what save_pretrained writes is another function without it"
LARGE = 4096.0  # size of the stream on which layers are tried; fp16 holds it
NEAR = 0.1  # largest change of such a stream by a layer that only adds to it, relative


@dataclass(eq=False)
class Gate:
    """What a layer does in this update."""

    names: tuple[str, ...]  # names of the layer's arguments
    others: tuple[str | None, ...] | None  # arguments that it returns besides the stream; None: it returns a tensor
    needed: bool  # whether it makes something that later layers need
    technique: str = ""  # name of the technique that decides
    factor: float | None = None  # factor of what it adds to the stream; 0: it is left out; None: nobody has said


class SwitchedLayer(nn.Module):
    """Mixed into the layers of a stack."""

    stretto_gate: Gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate = self.stretto_gate
        if not self.training or not torch.is_grad_enabled() or gate.factor == 1.0:
            return super().__call__(*args, **kwargs)
        if gate.factor is None:
            raise ValueError(f"{gate.technique} {SAY_STEP}")
        given = dict(zip(gate.names, args, strict=False)) | kwargs
        x: Tensor = given["hidden_states"]
        if gate.factor == 0.0:
            x = x if hands_on(self) else compute(x)
            return x if gate.others is None else (x, *(given.get(name or "") for name in gate.others))
        out = super().__call__(*args, **kwargs)
        y = compute(out if gate.others is None else out[0])
        y = torch.lerp(compute(x).to(y.dtype), y, gate.factor)
        return y if gate.others is None else (y, *out[1:])


@dataclass(eq=False)
class Around:
    """The tokens that count for former norms in a model."""

    inner: Tokens  # tokens of the norms in its layers
    outer: Tokens  # tokens of its other norms
    crosses: bool  # whether its layers also attend to an encoder's output


@dataclass(frozen=True)
class Keeping:
    """What modules are to keep for the backward pass."""

    keep: Keep
    activations: str
    tell: Callable[[Mapping[str, nn.Module]], None]  # to be given the norms, by name

    def tell_modules(self, model: nn.Module, journal: Journal) -> None:
        for module in model.modules():
            if isinstance(module, modules.WholeMLP) and not isinstance(module, modules.WholeGatedMLP):
                journal.change(module, "stretto_keep", self.keep.mlp)
            elif isinstance(module, modules.ActivatedLinear | modules.DeferringActivation):
                journal.change(module, "stretto_keep", self.activations)
        norms = find_computed_norms(model)
        for norm in norms.values():
            journal.lend(norm, "from_output", False)
        self.tell(norms)


@dataclass(frozen=True)
class Giving:
    """Objects that layers are to ask for their products."""

    name: str  # of the technique
    choose: Callable[[Mapping[str, Layer]], Mapping[str, Product | str]]


class Handles:
    """What techniques take hold of in one model."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack]) -> None:
        self.model, self.stacks, self.journal = model, stacks, Journal()
        self.done: list[Site] = []  # what became of each site, for the report
        self.kernels = False  # modules compute by the kernels of ops
        self.gates: dict[str, dict[nn.Module, Gate]] = {}  # gates of layers, by the name of the stack
        self.around: dict[PreTrainedModel, Around] = {}  # tokens of former norms, by the model around these
        self.tokens: dict[nn.Module, Tokens] = {}  # tokens of former norms, by the norm
        self.keeping: Keeping | None = None  # what modules are to keep
        self.giving: Giving | None = None  # what layers are to multiply by

    def use_kernels(self) -> None:
        self.kernels = True

    def switch_layers(
        self, name: str, find_problem: Callable[[Sequence[Switch]], str | None]
    ) -> dict[str, list[Switch]]:
        """Finds the layers that can be left out, before anything is changed; `make_all` exchanges them."""
        names = {module: path for path, module in self.model.named_modules()}
        problems: dict[str, list[str]] = {}
        for stack in self.stacks:
            found = find_gates(stack, next(find.draw_stack_batches(stack.owner, stack.crosses), None))
            problem = found if isinstance(found, str) else find_problem(found)
            if problem is None and not isinstance(found, str):
                self.gates[stack.name] = dict(zip(stack.layers, found, strict=True))
            elif problem is not None:
                problems.setdefault(problem, []).append(names[stack.layers])
            self.done += [Site(names[layer], name, layer, problem=problem) for layer in stack.layers]
        if not self.gates:
            reasons = [f"{', '.join(where)}: {problem}" for problem, where in problems.items()]
            why = "; ".join(reasons) or "no stack of layers with attention by transformers' AttentionInterface"
            raise ValueError(f"{name} does not apply to {type(self.model).__name__}: {why}")
        for _, gate in self.all_gates():
            gate.technique = name
        return {stack: list(gates.values()) for stack, gates in self.gates.items()}

    def all_gates(self) -> Iterator[tuple[nn.Module, Gate]]:
        for gates in self.gates.values():
            yield from gates.items()

    def keep_less(self, keep: Keep, activations: str, tell: Callable[[Mapping[str, nn.Module]], None]) -> None:
        """Notes what modules are to keep; `make_all` tells them, when it is known which they are."""
        self.keeping = Keeping(keep, activations, tell)

    def give_products(self, name: str, choose: Callable[[Mapping[str, Layer]], Mapping[str, Product | str]]) -> None:
        """Notes who chooses; `make_all` asks, when it is known which layers our modules compute."""
        self.giving = Giving(name, choose)

    def replace_norms(self, name: str, build: Callable[[int], R]) -> R:
        """Puts a rule in the place of all norms but those of heads, and finds out which tokens count for each."""
        judged = _judge_norms(self.model, name)
        self.done += judged
        norms = [site for site in judged if site.problem is None]
        if not norms:
            why = "; ".join(dict.fromkeys(str(site.problem) for site in judged))
            raise ValueError(f"{name} does not apply to {type(self.model).__name__}: {why or 'it has no norms'}")
        rule = build(sum(next(site.module.parameters()).numel() for site in norms))
        by_owner = {stack.owner: stack for stack in self.stacks}
        for site in norms:
            self.journal.change(site.module, "stretto_rule", rule)
            self.journal.swap(site.module, RuledNorm)
            _, owner = next(find_owners(self.model, site.name))
            stack = by_owner.get(owner)
            crosses = stack is not None and stack.crosses
            here = self.around.setdefault(owner, Around(Tokens(rule, name), Tokens(rule, name), crosses))
            inside = stack is not None and site.module in stack.inside
            self.tokens[site.module] = here.inner if inside else here.outer
        return rule

    def tell_tokens(self) -> None:
        """Tells the former norms which tokens count, behind the hooks of unpad.py."""
        for norm, of_norm in self.tokens.items():
            self.journal.change(norm, "stretto_tokens", of_norm)
        for model, around in self.around.items():
            hook = partial(note_tokens, around=around)
            self.journal.hooks.append(model.register_forward_pre_hook(hook, with_kwargs=True))


def find_gates(stack: Stack, inputs: dict[str, Any] | None) -> list[Gate] | str:
    """A gate for each layer of a stack, or why its layers cannot be left out. `inputs` are for the stack's owner."""
    if inputs is None:
        return "it reads neither tokens nor images: its layers cannot be tried"
    if getattr(stack.owner, "layerdrop", 0.0):
        return "it drops layers by itself: set layerdrop to 0 in its configuration"
    gates, problems, normalised = list[Gate](), list[str](), list[Any]()
    note = partial(_inspect, gates, problems, normalised)
    try:
        with ExitStack() as hooks, quietly(stack.owner):
            for norm in filter(acts_as_norm, stack.layers.modules()):
                hooks.enter_context(norm.register_forward_hook(lambda _, args, y: normalised.append(y)))
            for layer in stack.layers:
                hooks.enter_context(layer.register_forward_pre_hook(_enlarge, with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
            stack.owner(**inputs)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its layers cannot be tried: {error}"
    if problems:
        return problems[0]
    if len(gates) != len(stack.layers):
        return f"it called layers {len(gates)} times, and has {len(stack.layers)}"
    return gates


def _enlarge(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = given_arguments(layer, args, kwargs)["hidden_states"]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return find.replace_arguments(layer, args, kwargs, hidden_states=(LARGE * noise).to(x.device, x.dtype))


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


def find_computed_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The norms that our kernels compute, by name, but for those of queries and keys: what these give is rotated, and
    kept by nobody, while attention keeps what they are given, next to the values."""
    found = {
        f"{name}.{module.parts.norm}".lstrip("."): module.child(module.parts.norm)
        for name, module in model.named_modules()
        if isinstance(module, Recognised) and module.parts.norm
    }
    kinds = modules.OnePassNorm | RuledNorm
    found |= {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and not modules.norm_parts(module).shifted  # the weight says not what y was
    }
    attention = filter(find.calls_attention_interface, model.modules())
    heads = {inner for module in attention for inner in module.modules()}
    return {name: norm for name, norm in found.items() if norm not in heads}


def _judge_norms(model: nn.Module, name: str) -> list[Site]:
    """All norms, with the reason why one has to stay."""
    sites = [site for site in find.find_sites(model) if site.role == "norm"]
    problems, norms = judge_kinds(sites), []
    for site in sites:
        owner = next((owner for _, owner in find_owners(model, site.name)), None)
        in_head = owner is None or "labels" in argument_names(owner)
        unknown = "it is in a head: which tokens a head is given is not known" if in_head else None
        shifted = "it multiplies by 1 + weight, which is no scale for an affine" if site.parts.shifted else None
        problem = shifted or problems[kind_of(site)] or unknown
        norms.append(replace(site, role=name, problem=problem, remark=ANOTHER_FUNCTION))
    return norms


def note_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around) -> None:
    """A forward pre-hook, behind that of unpad.py."""
    call = None if torch.compiler.is_compiling() else current_call()
    if call is None or not model.training:
        return
    given = given_arguments(model, args, kwargs)
    mask = given.get("attention_mask")
    real = mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None
    tokens, labels = find.find_tokens(given), call.labels
    if mask is None and around.crosses and labels is not None and isinstance(tokens, Tensor):
        real = labels != IGNORE if tokens.shape[:2] == labels.shape else None
    flat = None if real is None else real.flatten()
    around.outer.set_real(flat)
    if flat is not None and call.own is not None and call.own.index is not None:
        flat = flat[call.own.index]
    around.inner.set_real(flat)
