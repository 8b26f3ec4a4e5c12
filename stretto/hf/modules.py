"""The modules that take the place of those of a Hugging Face model.

A module is exchanged by its class alone: it becomes an instance of a class made of one from here and its own, under its
own name, and keeps its parameters, children, hooks and attributes. So checkpoints, optimizers, `isinstance` and
everything that looks for modules by class name go on as before. Made classes can be pickled: they are written as what
they are made of. Each reads the same parameters and gives the same result up to rounding:

    OnePassNorm          LayerNorm and RMSNorm in one pass
    ActivatedLinear      a linear layer and its activation (BERT's "intermediate"): the bias goes into the activation; a
                         norm may follow (BERT's head in front of the vocabulary)
    WholeMLP             both linear layers around an activation as one differentiable unit
    WholeGatedMLP        two products of one input side by side in one matrix, SwiGLU or GEGLU between its halves
    ResidualNorm         linear layer, dropout, residual add and norm: one product and one pass (BERT's "output")
    DeferringLayer       a layer inside which sums wait for the norm behind them (defer.py)
    DeferringLinear      a linear layer whose bias is added by what follows: an activation, or that norm
    AskingLinear         a linear layer that asks an object for its products, and else stays what it is
    DeferringActivation  an activation that a layer calls by itself, with the bias before it and the dropout behind it
    JoiningAttention     attention whose query, key and value (JoinedProjection) of one input are one product
    Rotated              attention whose rotary positions are one kernel
    LazyHead             an output layer that gives `Logits`
    RuledNorm            what a technique puts in the place of a norm: another result

Activations have any leading shape, [..., C]; the kernels see [T, C]. The precision is that of the original: under
autocast products are in its precision, norms and sums in fp32.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from math import gcd
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stretto.hf.defer import Call, Logits, Pending, Recipe, compute, current_call, current_layer, inside_layer
from stretto.ops.activation import activate
from stretto.ops.dropout import draw_keys
from stretto.ops.heads import project_heads, rotate_heads
from stretto.ops.language import product_dtype, wide
from stretto.ops.linear import linear, linears
from stretto.ops.mlp import activate_linear, mlp, place_bias
from stretto.ops.norm import add_norm, norm
from stretto.ops.products import Product, find_product
from stretto.techniques.foreign import NormRule

WRAPPERS = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "stretto"}  # whose hooks take any shape
CAPTURE = "transformers.utils.output_capturing"  # leaves hooks behind once hidden states were asked for: they sleep
SAY_STEP = "depends on the step: call stretto.hf.set_step(model, step) before each update"
LARGEST_HEAD = 128  # head size that the kernel behind joint products likes; any that divides the widths will do


# Made classes


@dataclass(frozen=True)
class Parts:
    """What a module is made of: the names of its children, in the order of their use."""

    linears: tuple[str, ...] = ()
    norm: str | None = None
    dropout: str | None = None
    activation: str = ""  # kind of ops/activation.py, if there is an activation
    inner_dropout: bool = False  # whether the dropout stands between the two products
    shifted: bool = False  # whether a norm multiplies by 1 + weight, as those of Gemma do
    centred: bool = False  # whether a norm without a bias subtracts the mean, as those of Cohere do
    defers: bool = False  # whether the bias of its last product is left to what follows
    children: tuple[tuple[str, Any], ...] = ()  # names of all children in use, and what `describe` gives for them


NONE = Parts()


class Mixed(type):
    """The type of made classes."""


@cache
def mix(ours: Any, theirs: Any, parts: Parts) -> Any:
    own = {"parts": parts} if parts != NONE or not hasattr(theirs, "parts") else {}  # a second one of ours keeps them
    made = Mixed(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__, "made_of": (ours, theirs, parts)} | own)
    made.__qualname__ = theirs.__qualname__
    return made


def original(kind: Any) -> Any:
    """The class that ours were mixed into."""
    while hasattr(kind, "made_of"):
        kind = kind.made_of[1]
    return kind


def _take_apart(made: Any) -> Any:
    if "made_of" not in vars(made):  # a class that somebody derived from a made one
        return f"{made.__module__}.{made.__qualname__}"
    return mix, made.made_of


copyreg.pickle(Mixed, _take_apart)


# Who looks at a module


def is_touched(module: nn.Module) -> bool:
    """Whether others look at its calls, or have put their own function in the place of `forward`: hooks of the user, of
    FSDP, of Accelerate's offloading. They must find the module called as it always was."""
    own = module.__dict__
    if "forward" in own:
        return True
    # Every module of a layer is asked in every step.
    if not (own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]):
        return False
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(_origin(hook) != CAPTURE for name in names for hook in own[name].values())


def is_watched(module: nn.Module) -> bool:
    """Whether the user looks at what it is given and gives, and has to find rectangles there; wrappers do not care."""
    own = module.__dict__
    if "forward" in own and not own.keys() & {"_hf_hook", "_original_forward"}:  # those are Accelerate's
        code = getattr(own["forward"], "__func__", own["forward"])
        if not getattr(code, "__globals__", {}).get("__name__", "").startswith("trl."):  # reads labelled positions
            return True
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    return any(_origin(hook).partition(".")[0] not in WRAPPERS for hook in hooks)


def _origin(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def hands_on(layer: nn.Module) -> bool:
    """Whether the next layer of the stack is what reads its result, and nobody else."""
    call = current_call()
    return call is not None and layer in call.chain and not is_touched(layer)


# Modules with parts


def describe(module: nn.Module) -> tuple[Any, str | None]:
    """The class and the options of a child, with others of which it is another function: whether a linear layer has a
    bias, what an activation says of itself."""
    if "weight" in module._parameters:
        return type(module), "bias" if module._parameters.get("bias") is not None else ""
    return type(module), None if isinstance(module, nn.Dropout) else f"{module.extra_repr()} {len(module._modules)}"


class Recognised(nn.Module):
    """A module whose parts have been found."""

    parts: Parts
    takes = 1  # number of arguments; with more of them, or with names, it is another function

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor:
        if named or len(inputs) != self.takes or not self.is_intact():
            return super().forward(*inputs, **named)
        return self.run_parts(*inputs)

    def run_parts(self, *inputs: Tensor) -> Tensor:
        raise TypeError("Recognised is abstract: find.py knows its kinds")

    def is_intact(self) -> bool:
        """Whether its children are what they were: adapters take their place, or hook into them."""
        for name, description in self.parts.children:
            child = self._modules.get(name)
            if child is None or is_touched(child) or describe(child) != description:
                return False
        return True

    def child(self, name: str | None) -> Any:
        return self._modules[name or ""]

    def draw(self, x: Tensor) -> tuple[float, Tensor | None]:
        """The probability of the module's dropout, and a key for it."""
        drop = None if self.parts.dropout is None else self.child(self.parts.dropout)
        if drop is None or not drop.training or drop.p == 0.0:
            return 0.0, None
        return drop.p, draw_keys(x, 1)[0]


class OnePassNorm(Recognised):
    weight: Tensor

    def run_parts(self, x: Tensor) -> Tensor:  # type: ignore[override]
        weight: Tensor = self.weight
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
            return super(Recognised, self).forward(compute(x))  # some round to their weight's precision
        if isinstance(x, Pending):
            same = norm_dtype(x.dtype, weight) == x.dtype
            y = x.normalise(partial(add_normalised, self)) if same else None
            if y is not None:
                return y
            x = x.compute()
        return normalise(x.flatten(0, -2), self).view(x.shape)


class ActivatedLinear(Recognised):
    stretto_keep = "input"  # what stays of the activation for the backward pass (ops/activation.py)

    def run_parts(self, x: Tensor) -> Tensor:  # type: ignore[override]
        dense, kind = self.child(self.parts.linears[0]), self.parts.activation
        early, late = place_bias(kind, dense.bias)
        pre = linear(x.flatten(0, -2), weight_of(dense), early, product_of(dense))
        y = activate(pre, late, kind, 0.0, None, self.stretto_keep)
        y = normalise(y, self.child(self.parts.norm)) if self.parts.norm else y
        return y.view(*x.shape[:-1], y.shape[-1])


class WholeMLP(Recognised):
    stretto_keep = "activation"  # what stays for the backward pass (ops/mlp.py)

    def run_parts(self, x: Tensor) -> Tensor:  # type: ignore[override]
        parts, bias = self.parts, self.child(self.parts.linears[-1]).bias
        puts_off = parts.defers and current_layer() is not None  # the last bias is added by what follows
        drop = self.draw(x) if parts.inner_dropout else (0.0, None)
        y = self.multiply(x.flatten(0, -2), None if puts_off else bias, *drop)
        y = y.view(*x.shape[:-1], y.shape[-1])
        y = Pending(self, y, bias) if puts_off else y
        return self.child(parts.dropout)(y) if parts.dropout and not parts.inner_dropout else y

    def multiply(self, x: Tensor, bias: Tensor | None, p: float, key: Tensor | None) -> Tensor:
        up, down = (self.child(name) for name in self.parts.linears)
        weights, products = (weight_of(up), up.bias, weight_of(down), bias), (product_of(up), product_of(down))
        return mlp(x, *weights, self.parts.activation, p, key, self.stretto_keep, products)


class WholeGatedMLP(WholeMLP):
    def multiply(self, x: Tensor, bias: Tensor | None, p: float, key: Tensor | None) -> Tensor:
        gate, up, down = (self.child(name) for name in self.parts.linears)
        biases = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        weights, products = [weight_of(gate), weight_of(up)], (product_of(gate), product_of(down))
        if products != (None, None):
            return mlp(x, weights, biases, weight_of(down), bias, self.parts.activation, p, key, "product", products)
        h = linears(x, weights)
        y = activate_linear(h, biases, weight_of(down), self.parts.activation, p, key)
        return y if bias is None else y + bias.to(y.dtype)


class ResidualNorm(Recognised):
    takes = 2

    def run_parts(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        dense, norm_module = self.child(self.parts.linears[0]), self.child(self.parts.norm)
        stream = residual.flatten(0, -2)
        branch = linear(x.flatten(0, -2), weight_of(dense), None, product_of(dense))
        dtype = norm_dtype(torch.promote_types(branch.dtype, stream.dtype), norm_module.weight)
        y, _ = add_normalised(norm_module, branch.to(dtype), stream.to(dtype), dense.bias, *self.draw(x))
        return y.view(residual.shape)


# Layers, and what waits inside


class DeferringLayer(nn.Module):
    stretto_inside: tuple[nn.Module, ...]  # all modules in it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if any(map(is_touched, self.stretto_inside)):  # what others look at is a tensor, and has a history
            args, kwargs = tree_map_only(Pending, compute, (args, kwargs))
            return super().forward(*args, **kwargs)
        with inside_layer():
            out = super().forward(*args, **kwargs)
        if hands_on(self):
            return out
        return compute(out) if isinstance(out, Tensor) else tree_map_only(Pending, compute, out)


class DeferringLinear(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if current_layer() is None:
            return super().forward(x)
        x = compute(x)
        y = linear(x.flatten(0, -2), weight_of(self), None, product_of(self))
        return Pending(self, y.view(*x.shape[:-1], y.shape[-1]), self.bias)


class AskingLinear(nn.Module):
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        product = product_of(self)
        if product is None:
            return super().forward(x)
        x = compute(x)
        y = linear(x.flatten(0, -2), weight_of(self), self.bias, product)
        return y.view(*x.shape[:-1], y.shape[-1])


class DeferringActivation(nn.Module):
    parts: Parts
    stretto_keep = "input"  # what stays for the backward pass (ops/activation.py)

    def forward(self, x: Tensor) -> Tensor:
        if current_layer() is None:
            return super().forward(x)
        if isinstance(x, Pending) and x.waits_for_activation() and self.parts.activation != "relu":
            assert x.product is not None
            made = Pending(self, x.product, x.bias, self.parts.activation)
            x.note_use()
            made.note_use()
            return made
        return Pending(self, compute(x), None, self.parts.activation)


# In front of attention


@dataclass(eq=False)
class Together:
    """Linear layers that are given one input, and the results that have not been asked for yet. Attention calls
    q_proj(x), k_proj(x), v_proj(x): the first call computes all of them as one product (ops/heads.py). Backward, one
    kernel puts the gradients of the parts together and sums up those of the biases, and two products remain of six."""

    layers: list[nn.Module]
    input: Tensor | None = None
    results: dict[nn.Module, Tensor] = field(default_factory=dict)

    def project(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.input is not x or layer not in self.results:
            self.input, self.results = x, dict(zip(self.layers, project_all(x, self.layers), strict=True))
        return self.results.pop(layer)


def project_all(x: Tensor, layers: list[Any]) -> list[Tensor]:
    """The results of several linear layers, views of one product."""
    widths = [layer.weight.shape[0] for layer in layers]
    size = gcd(*widths)
    while size > LARGEST_HEAD and size % 2 == 0:
        size //= 2
    weights, biases = ([getattr(layer, name) for layer in layers] for name in ("weight", "bias"))
    rows = compute(x).flatten(0, -2)
    parts, product = [width // size for width in widths], product_of(layers[0])
    heads = project_heads(rows, weights, None if biases[0] is None else biases, parts, product=product)
    return [part.flatten(1).view(*x.shape[:-1], width) for part, width in zip(heads, widths, strict=True)]


class JoiningAttention(nn.Module):
    """Attention with linear layers that are given one input: its parts."""

    parts: Parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = current_layer()
        projections: list[Any] = [] if inside is None else [getattr(self, name) for name in self.parts.linears]
        intact = all(isinstance(each, JoinedProjection) and not is_touched(each) for each in projections)
        if inside is None or not intact or len({each.bias is None for each in projections}) > 1:
            return super().forward(*args, **kwargs)
        before, inside.together = inside.together, Together(projections)
        try:
            return super().forward(*args, **kwargs)
        finally:
            inside.together = before


class JoinedProjection(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inside = current_layer()
        if inside is None or inside.together is None or self not in inside.together.layers:
            return super().forward(x)
        return inside.together.project(self, x)


class Rotated(nn.Module):
    """Mixed into attention with rotary positions, a function of the modelling file that is called by its name: inside a
    layer `forward` is the same code, which finds our function under that name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if current_layer() is None:
            return super().forward(*args, **kwargs)
        return rotated_forward(original(type(self)))(self, *args, **kwargs)


@cache
def rotated_forward(theirs: Any) -> Any:
    """The code of a class's `forward`, with our function for rotary positions; None where it has none."""
    name = find_rotary(theirs.forward)
    if name is None:
        return None
    code, around = theirs.forward, theirs.forward.__globals__
    ours = {**around, name: partial(rotate_both, around[name])}
    forward = FunctionType(code.__code__, ours, code.__name__, code.__defaults__, code.__closure__)
    forward.__kwdefaults__ = code.__kwdefaults__
    return forward


def find_rotary(forward: Any) -> str | None:
    """The name under which a function's code calls one that rotates queries and keys [N, heads, S, D]."""
    if not isinstance(forward, FunctionType):
        return None
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if not callable(function) or isinstance(function, type):
            continue
        parameters = inspect.signature(function).parameters
        dim = parameters.get("unsqueeze_dim")
        if list(parameters)[:4] == ["q", "k", "cos", "sin"] and dim is not None and dim.default == 1:
            return name
    return None


def rotate_both(
    theirs: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """q [N, H, S, D] and k [N, K, S, D] by angles [N, S, D], whose second half repeats the first."""
    rows, _, length, size = q.shape
    fits = cos.shape == sin.shape and cos.shape[1:] == (length, size) and cos.shape[0] in (1, rows)
    if options or not fits or k.shape[::2] != (rows, length) or k.shape[3] != size:
        return theirs(q, k, cos, sin, **options)
    queries, keys = (t.transpose(1, 2).flatten(0, 1) for t in (q, k))
    queries, keys = rotate_heads(queries, keys, *_halve(cos, sin, rows))
    return queries.view(rows, length, -1, size).transpose(1, 2), keys.view(rows, length, -1, size).transpose(1, 2)


def _halve(cos: Tensor, sin: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """[T, D/2], at least fp32; the same for all layers of a call."""
    call = current_call()
    if call is not None and call.angles is not None and call.angles[0] is cos:
        return call.angles[1]
    half = cos.shape[-1] // 2
    first, second = (wide(t[..., :half]).expand(rows, -1, -1).flatten(0, 1).contiguous() for t in (cos, sin))
    if call is not None:
        call.angles = cos, (first, second)
    return first, second


# The output layer


class LazyHead(nn.Module):
    """Mixed into the output layer of a language model, and into a module around it that begins with hidden states."""

    parts: Parts  # its only linear layer is the output layer; without a name it is the module itself

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain, call = super().forward, None if torch.compiler.is_compiling() else current_call()
        if call is None or not call.lazy or args or kwargs or not self._may_wait(call):
            return plain(hidden, *args, **kwargs)
        shape = torch.Size([*hidden.shape[:-1], len(self.get_submodule(self.parts.linears[0]).weight)])  # type: ignore
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        versions = [parameter._version for parameter in self.parameters()]
        recipe = Recipe(self, plain, hidden.flatten(0, -2), versions, autocast)
        return Logits(recipe, shape, product_dtype(hidden))

    def _may_wait(self, call: Call) -> bool:
        """Whether nobody looks at the output layer's call, and its weights stay: FSDP may shard the own weights
        of the outermost model again at the end of its forward pass."""
        while call.outer is not None and call.outer.model is not None:
            call = call.outer
        find_state: Any = getattr(call.model, "_get_fsdp_state", None)
        group = None if find_state is None else getattr(find_state(), "_fsdp_param_group", None)
        stay = group is None or getattr(group, "post_forward_mesh_info", group) is None
        return stay and not any(map(is_touched, self.modules()))


# Affines where norms were (techniques.py)


@dataclass(eq=False)
class Tokens:
    """Which tokens count, of those that some former norms are given."""

    rule: NormRule
    technique: str  # name of the technique that the rule is of
    real: Tensor | None = None  # bool [T]; None: all tokens are real
    weights: dict[int, Tensor] = field(default_factory=dict)  # by the number of rows

    def set_real(self, real: Tensor | None) -> None:
        self.real, self.weights = real, {}

    def weigh(self, rows: int, device: torch.device) -> Tensor:
        """[rows], several for each token where heads are normalised: the same for all sites, and computed for one."""
        if self.rule.factor is None:
            raise ValueError(f"{self.technique} {SAY_STEP}")
        if rows in self.weights and not torch.compiler.is_compiling():
            return self.weights[rows]
        real = torch.ones(rows, dtype=torch.bool, device=device) if self.real is None else self.real
        if rows % len(real):
            raise ValueError(f"{self.technique}: {rows} rows where a norm was, but the mask has {len(real)} tokens")
        weights = self.rule.weigh(real.repeat_interleave(rows // len(real)))
        if not torch.compiler.is_compiling():
            self.weights[rows] = weights
        return weights


class RuledNorm(nn.Module):
    """A norm's parameters under the rule of a technique."""

    weight: Tensor
    stretto_rule: NormRule
    stretto_tokens: Tokens | None = None  # None: nothing is measured

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x.flatten(0, -2), self).view(x.shape)

    def add(
        self, branch: Tensor | None, x: Tensor, branch_bias: Tensor | None, p: float, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The rule's result for rows [T, C] and their sum with a branch, by the arguments of `add_norm`."""
        rule, tokens = self.stretto_rule, self.stretto_tokens
        weight, bias = (self.weight, getattr(self, "bias", None)) if rule.keeps_affine else (None, None)
        measured = tokens is not None and self.training and torch.is_grad_enabled()
        rows = tokens.weigh(len(x), x.device) if tokens is not None and measured else None
        return rule.add(branch, x, branch_bias, weight, bias, p, key, False, rows, reads_output(self))


# What several of them compute


def normalise(x: Tensor, module: Any) -> Tensor:
    x = x.to(norm_dtype(x.dtype, module.weight))
    if isinstance(module, RuledNorm):
        return module.add(None, x, None, 0.0, None)[0]
    return norm(x, *_read_norm(module), from_output=reads_output(module))


def add_normalised(
    module: nn.Module, branch: Tensor, residual: Tensor, branch_bias: Tensor | None, p: float, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The module's result for the sum residual + dropout(branch + branch_bias), and the sum."""
    if isinstance(module, RuledNorm):
        return module.add(branch, residual, branch_bias, p, key)
    return add_norm(branch, residual, branch_bias, *_read_norm(module), p, key, from_output=reads_output(module))


def reads_output(norm_module: nn.Module) -> bool:
    """Whether the backward pass of a norm reads what the norm gave. It may be any norm, of a class of ours or not: a
    part of another module stays what it is."""
    return bool(getattr(norm_module, "from_output", False))


def norm_dtype(dtype: torch.dtype, weight: Tensor) -> torch.dtype:
    """The precision of a norm's input and output: fp32 under autocast, otherwise wide enough for input and weight."""
    autocast = torch.is_autocast_enabled(weight.device.type)
    return torch.promote_types(dtype, torch.float32 if autocast else weight.dtype)


def _read_norm(module: Any) -> tuple[Tensor, Tensor | None, float, bool]:
    """Weight, bias, epsilon, and whether it is an RMSNorm."""
    eps = getattr(module, "variance_epsilon", None)
    eps = module.eps if eps is None else eps
    parts = norm_parts(module)
    weight = wide(module.weight) + 1 if parts.shifted else module.weight
    return weight, getattr(module, "bias", None), eps, not (isinstance(module, nn.LayerNorm) or parts.centred)


def norm_parts(module: nn.Module) -> Parts:
    """How a norm computes, where that has been found out."""
    return module.parts if isinstance(module, OnePassNorm) else NONE


def product_of(dense: nn.Module) -> Product | None:
    """How a linear layer multiplies; None: as usual, and as compiled code does."""
    return None if torch.compiler.is_compiling() else find_product(dense)


def find_layers(module: nn.Module) -> list[tuple[nn.Module, ...]]:
    """The linear layers that a module of ours computes, those together that are one product."""
    if isinstance(module, DeferringLinear):
        return [(module,)]
    if not isinstance(module, Recognised | JoiningAttention):
        return []
    layers = [module.get_submodule(name) for name in module.parts.linears]
    joined = {WholeGatedMLP: 2, JoiningAttention: len(layers)}
    count = next((count for kind, count in joined.items() if isinstance(module, kind)), 1)
    return [tuple(layers[:count]), *((layer,) for layer in layers[count:])] if layers else []


def weight_of(dense: Any) -> Tensor:
    """[O, C]. GPT-2's Conv1D keeps it as [C, O]."""
    return dense.weight if isinstance(dense, nn.Linear) else dense.weight.t()
