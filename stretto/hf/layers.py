"""The modules that take the place of those of a Hugging Face model. Each is mixed into the class of the module it
replaces (see swap.py), reads the same parameters and gives the same result up to rounding:

    FusedNorm          LayerNorm and RMSNorm in one pass
    FusedDense         a linear layer and its activation (BERT's "intermediate"): the bias goes into the activation
    FusedTransform     the same and a norm (BERT's head in front of the vocabulary)
    FusedMLP           both linear layers around an activation as one differentiable unit
    FusedGatedMLP      two products of one input side by side in one matrix, SwiGLU or GEGLU between its halves
    FusedResidualNorm  linear layer, dropout, residual add and norm: one product and one pass (BERT's "output")
    FusedLayer         a layer inside which sums wait for the norm behind them (pending.py)
    FusedLinear        a linear layer whose bias is added by what follows: an activation, or that norm
    FusedActivation    an activation that a layer calls by itself, with the bias before it and the dropout behind it
    AffineNorm         an affine instead of a norm, and the standardization loss in its gradient: another result

Activations have any leading shape, [..., C]; the kernels see [T, C]. The precision is that of the original: under
autocast products are in its precision, norms and sums in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stretto.hf.call import current_call
from stretto.hf.pending import Pending, compute, deferring, is_deferring
from stretto.ops.activation import activate
from stretto.ops.affine import add_affine
from stretto.ops.dropout import draw_keys
from stretto.ops.linear import linear, linears
from stretto.ops.mlp import activate_linear, mlp
from stretto.ops.norm import add_norm, norm
from stretto.techniques.standardize import Pressure

WRAPPERS = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "stretto"}  # whose hooks take any shape
CAPTURE = "transformers.utils.output_capturing"  # leaves hooks behind once hidden states were asked for: they sleep


@dataclass(frozen=True)
class Parts:
    """What a module is made of: the names of its children, in the order of their use."""

    linears: tuple[str, ...] = ()
    norm: str | None = None
    dropout: str | None = None
    activation: str | None = None  # a kind of ops/activation.py
    inner_dropout: bool = False  # whether the dropout stands between the two products
    defers: bool = False  # whether the bias of its last product is left to what follows
    children: tuple[tuple[str, Any, str | None], ...] = ()  # all that it uses, as `describe_child` has them


NONE = Parts()


def describe_child(module: nn.Module, name: str) -> tuple[str, Any, str | None]:
    """Name, class and options: a child of another description is another function."""
    child = module._modules[name]
    assert child is not None
    return name, type(child), describe_options(child)


def describe_options(module: nn.Module) -> str | None:
    """Whether a linear layer has a bias; what an activation says of itself."""
    if "weight" in module._parameters:
        return "bias" if module._parameters.get("bias") is not None else ""
    return None if isinstance(module, nn.Dropout) else f"{module.extra_repr()} {len(module._modules)}"


def is_touched(module: nn.Module) -> bool:
    """Whether others look at its calls, or have put their own function in the place of `forward`: hooks of the user, of
    FSDP, of Accelerate's offloading. They must find the module called as it always was."""
    own = module.__dict__
    hooks = (own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"])
    if any(hooks) and any(_origin(hook) != CAPTURE for some in hooks for hook in some.values()):
        return True
    return "forward" in own


def _origin(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def is_watched(module: nn.Module) -> bool:
    """Whether the user looks at what it is given and gives, who then has to find rectangles; wrappers do not care."""
    own = module.__dict__
    if "forward" in own and not own.keys() & {"_hf_hook", "_original_forward"}:  # those are Accelerate's
        return True
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    return any(_origin(hook).partition(".")[0] not in WRAPPERS for hook in hooks)


class Fused(nn.Module):
    """A module whose parts have been found."""

    parts: Parts
    takes = 1  # arguments; with more of them, or with names, it is another function

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor:
        if named or len(inputs) != self.takes or not self.is_intact():
            plain: Tensor = super().forward(*inputs, **named)
            return plain
        return self.run_fused(*inputs)

    def run_fused(self, *inputs: Tensor) -> Tensor:
        raise TypeError("Fused is abstract: roles.py knows its kinds")

    def is_intact(self) -> bool:
        """Whether its children are what they were: adapters take their place, or hook into them."""
        for name, kind, options in self.parts.children:
            child: Any = self._modules.get(name)
            if type(child) is not kind or is_touched(child):
                return False
            if describe_options(child) != options:
                return False
        return True

    def child(self, name: str) -> Any:
        return getattr(self, name)

    def draw(self, x: Tensor) -> tuple[float, Tensor | None]:
        """The probability of the module's dropout, and a key for it."""
        drop = None if self.parts.dropout is None else self.child(self.parts.dropout)
        if drop is None or not drop.training or drop.p == 0.0:
            return 0.0, None
        return drop.p, draw_keys(x, 1)[0]


class FusedNorm(Fused):
    def run_fused(self, x: Tensor) -> Tensor:  # type: ignore[override]
        weight: Tensor = self.child("weight")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
            plain: Tensor = super(Fused, self).forward(compute(x))  # some round to their weight's precision
            return plain
        if isinstance(x, Pending):
            same = norm_dtype(x.dtype, weight) == x.dtype
            y = x.normalise(partial(add_normalised, self)) if same else None
            if y is not None:
                return y
            x = x.compute()
        return normalise(x.flatten(0, -2), self).view(x.shape)


class FusedDense(Fused):
    def run_fused(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = expand(x.flatten(0, -2), self.child(self.parts.linears[0]), self.parts.activation)
        return y.view(*x.shape[:-1], y.shape[-1])


class FusedTransform(Fused):
    def run_fused(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = expand(x.flatten(0, -2), self.child(self.parts.linears[0]), self.parts.activation)
        return normalise(y, self.child(self.parts.norm or "")).view(*x.shape[:-1], y.shape[-1])


class FusedMLP(Fused):
    def run_fused(self, x: Tensor) -> Tensor:  # type: ignore[override]
        up, down = (self.child(name) for name in self.parts.linears)
        p, key = self.draw(x) if self.parts.inner_dropout else (0.0, None)
        assert self.parts.activation is not None
        later = self.parts.defers and is_deferring()
        weights = weight_of(up), up.bias, weight_of(down), None if later else down.bias
        y = mlp(x.flatten(0, -2), *weights, self.parts.activation, p, key, recompute=False)
        y = y.view(*x.shape[:-1], y.shape[-1])
        y = Pending(self, y, down.bias) if later else y
        return self.child(self.parts.dropout)(y) if self.parts.dropout and not self.parts.inner_dropout else y


class FusedGatedMLP(Fused):
    def run_fused(self, x: Tensor) -> Tensor:  # type: ignore[override]
        gate, up, down = (self.child(name) for name in self.parts.linears)
        biases = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        h = linears(x.flatten(0, -2), [weight_of(gate), weight_of(up)])
        assert self.parts.activation is not None
        drop = self.draw(x) if self.parts.inner_dropout else (0.0, None)
        y = activate_linear(h, biases, weight_of(down), self.parts.activation, *drop)
        y = y.view(*x.shape[:-1], y.shape[-1])
        if self.parts.defers and is_deferring():
            y = Pending(self, y, down.bias)
        elif down.bias is not None:
            y = y + down.bias.to(y.dtype)
        return self.child(self.parts.dropout)(y) if self.parts.dropout and not self.parts.inner_dropout else y


class FusedResidualNorm(Fused):
    takes = 2

    def run_fused(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        dense, norm_module = self.child(self.parts.linears[0]), self.child(self.parts.norm or "")
        stream = residual.flatten(0, -2)
        branch = linear(x.flatten(0, -2), weight_of(dense))
        dtype = norm_dtype(torch.promote_types(branch.dtype, stream.dtype), norm_module.weight)
        y, _ = add_normalised(norm_module, branch.to(dtype), stream.to(dtype), dense.bias, *self.draw(x))
        return y.view(residual.shape)


class FusedLayer(nn.Module):
    stretto_inside: tuple[nn.Module, ...]  # all modules in it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if any(map(is_touched, self.stretto_inside)):  # what others look at is a tensor, and has a history
            args, kwargs = tree_map_only(Pending, compute, (args, kwargs))
            return super().forward(*args, **kwargs)
        with deferring():
            out = super().forward(*args, **kwargs)
        if hands_on(self):
            return out
        return compute(out) if isinstance(out, Tensor) else tree_map_only(Pending, compute, out)


def hands_on(layer: nn.Module) -> bool:
    """Whether the next layer of the stack is what reads its result, and nobody else."""
    call = current_call()
    return call is not None and layer in call.chain and not is_touched(layer)


class FusedLinear(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if not is_deferring():
            plain: Tensor = super().forward(x)
            return plain
        x = compute(x)
        y = linear(x.flatten(0, -2), weight_of(self))
        return Pending(self, y.view(*x.shape[:-1], y.shape[-1]), self.bias)


class FusedActivation(nn.Module):
    parts: Parts

    def forward(self, x: Tensor) -> Tensor:
        if not is_deferring():
            plain: Tensor = super().forward(x)
            return plain
        if isinstance(x, Pending) and x.waits_for_activation() and self.parts.activation != "relu":
            assert x.product is not None
            made = Pending(self, x.product, x.bias, self.parts.activation)
            x.note_use()
            made.note_use()
            return made
        return Pending(self, compute(x), None, self.parts.activation)


@dataclass(eq=False)
class Tokens:
    """Which tokens count of those that some former norms are given."""

    pressure: Pressure
    affine: bool  # whether the scale and shift of the norm stay
    real: Tensor | None = None  # bool [T]; None: all of them are
    weights: dict[int, Tensor] = field(default_factory=dict)  # by the number of rows

    def set_real(self, real: Tensor | None) -> None:
        self.real, self.weights = real, {}

    def weigh(self, rows: int, device: torch.device) -> Tensor:
        """[rows], several for each token where heads are normalised: the same for all sites, and computed for one."""
        if torch.compiler.is_compiling():
            return self._compute(rows, device)
        if rows not in self.weights:
            self.weights[rows] = self._compute(rows, device)
        return self.weights[rows]

    def _compute(self, rows: int, device: torch.device) -> Tensor:
        real = torch.ones(rows, dtype=torch.bool, device=device) if self.real is None else self.real
        if rows % len(real):
            raise ValueError(f"standardize: {rows} rows where a norm was, but the mask has {len(real)} tokens")
        return self.pressure.weigh(real.repeat_interleave(rows // len(real)))


class AffineNorm(nn.Module):
    weight: Tensor
    stretto_tokens: Tokens | None = None  # None: it is an affine and nothing else

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x.flatten(0, -2), self).view(x.shape)

    def add(
        self, branch: Tensor | None, x: Tensor, branch_bias: Tensor | None, p: float, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `add_norm`, of rows [T, C]."""
        tokens = self.stretto_tokens
        parts: tuple[Tensor | None, Tensor | None] = (self.weight, getattr(self, "bias", None))
        if tokens is not None and not tokens.affine:
            parts = (None, None)
        if tokens is None or not self.training or not torch.is_grad_enabled():
            return add_affine(branch, x, branch_bias, *parts, p, key)
        of, rows = tokens.pressure, tokens.weigh(len(x), x.device)
        if of.factor is None:
            raise ValueError(
                "standardize depends on the step: call stretto.hf.set_step(model, step) before each update"
            )
        return add_affine(branch, x, branch_bias, *parts, p, key, False, rows, of.factor, of.stride, of.axis)


def expand(x: Tensor, dense: nn.Module, kind: str | None) -> Tensor:
    """act(dense(x)); the bias is added by the activation, but for ReLU, where rounding without it could turn a sign."""
    assert kind is not None
    bias: Tensor | None = dense.bias  # type: ignore[assignment]
    product = project(x, dense) if kind == "relu" else linear(x, weight_of(dense))
    return activate(product, None if kind == "relu" else bias, kind, 0.0, None)


def project(x: Tensor, dense: nn.Module) -> Tensor:
    """dense(x)"""
    bias: Tensor | None = dense.bias  # type: ignore[assignment]
    return linear(x, weight_of(dense), bias)


def normalise(x: Tensor, module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    x = x.to(norm_dtype(x.dtype, weight))
    return module.add(None, x, None, 0.0, None)[0] if isinstance(module, AffineNorm) else norm(x, *norm_parts(module))


def add_normalised(
    module: nn.Module, branch: Tensor, residual: Tensor, branch_bias: Tensor | None, p: float, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The module's result for the sum residual + dropout(branch + branch_bias), and the sum."""
    if isinstance(module, AffineNorm):
        return module.add(branch, residual, branch_bias, p, key)
    return add_norm(branch, residual, branch_bias, *norm_parts(module), p, key)


def norm_dtype(dtype: torch.dtype, weight: Tensor) -> torch.dtype:
    """Of a norm's input and output: fp32 under autocast, otherwise wide enough for both its input and its weight."""
    autocast = torch.is_autocast_enabled(weight.device.type)
    return torch.promote_types(dtype, torch.float32 if autocast else weight.dtype)


def norm_parts(module: nn.Module) -> tuple[Tensor, Tensor | None, float, bool]:
    """Weight, bias, epsilon, and whether it is an RMSNorm."""
    found: dict[str, Any] = {name: getattr(module, name, None) for name in ("variance_epsilon", "eps")}
    eps = next(value for value in found.values() if value is not None)
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight, getattr(module, "bias", None), eps, not isinstance(module, nn.LayerNorm)


def weight_of(dense: nn.Module) -> Tensor:
    """[O, C]. GPT-2's Conv1D keeps it as [C, O]."""
    weight: Tensor = dense.weight  # type: ignore[assignment]
    return weight if isinstance(dense, nn.Linear) else weight.t()
