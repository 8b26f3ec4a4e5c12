"""What attention does in front of attention: query, key and value of one input, and rotary positions.

Attention modules call their linear layers one by one: q_proj(x), k_proj(x), v_proj(x). Inside a layer whose gradients
are recorded, the first of those that are given the same tensor computes all of them as one product (ops/heads.py), and
the others find their part. Backward, one kernel puts the gradients of the parts together and sums up those of the
biases, and two products remain of six.

Rotary positions are a function of the modelling file, which attention calls by its name. The attention module gets a
second `forward` of the same code, which finds our function under that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from math import gcd
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from stretto.hf.call import current_call
from stretto.hf.journal import original
from stretto.hf.layers import Parts, is_touched
from stretto.hf.pending import compute, is_deferring
from stretto.ops.heads import project_heads, rotate_heads
from stretto.ops.language import wide

HEAD = 128  # the largest head size that the kernel behind the products likes; any that divides the widths will do


@dataclass(eq=False)
class Together:
    """Linear layers that are given one input, and the results that have not been asked for yet."""

    layers: list[nn.Module]
    input: Tensor | None = None
    results: dict[nn.Module, Tensor] = field(default_factory=dict)

    def project(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        if layer not in self.layers:
            return None
        if self.input is not x or layer not in self.results:
            self.input, self.results = x, dict(zip(self.layers, project_all(x, self.layers), strict=True))
        return self.results.pop(layer)


_together: ContextVar[Together | None] = ContextVar("stretto_together", default=None)


def project_all(x: Tensor, layers: list[Any]) -> list[Tensor]:
    """The results of several linear layers, views of one product."""
    widths = [len(layer.weight) for layer in layers]
    size = gcd(*widths)
    while size > HEAD and size % 2 == 0:
        size //= 2
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    rows = compute(x).flatten(0, -2)
    heads = project_heads(rows, torch.cat([layer.weight for layer in layers]), bias, [w // size for w in widths])
    return [part.flatten(1).view(*x.shape[:-1], width) for part, width in zip(heads, widths, strict=True)]


class FusedAttention(nn.Module):
    """Attention with linear layers that are given one input: its parts."""

    parts: Parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layers: list[Any] = [getattr(self, name) for name in self.parts.linears] if is_deferring() else []
        if (
            not layers
            or not all(isinstance(layer, FusedProjection) and layer.is_intact() for layer in layers)
            or len({layer.bias is None for layer in layers}) > 1
        ):
            return super().forward(*args, **kwargs)
        before = _together.set(Together(layers))
        try:
            return super().forward(*args, **kwargs)
        finally:
            _together.reset(before)


class FusedProjection(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        together = _together.get() if is_deferring() else None
        result: Tensor | None = None if together is None else together.project(self, x)
        return super().forward(x) if result is None else result

    def is_intact(self) -> bool:
        return not is_touched(self)


def find_groups(calls: list[tuple[str, nn.Module, Tensor]]) -> list[tuple[str, ...]]:
    """The linear layers of one attention module that were given the same tensor, all with a bias or all without."""
    groups: dict[tuple[int, bool], list[str]] = {}
    for name, layer, x in calls:
        groups.setdefault((id(x), layer.bias is None), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1 and len(set(names)) == len(names)]


class Rotated(nn.Module):
    """Mixed into attention with rotary positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not is_deferring():
            return super().forward(*args, **kwargs)
        return rotated_forward(original(type(self)))(self, *args, **kwargs)


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


@cache
def rotated_forward(theirs: Any) -> Any:
    """The code of a class's `forward`, with our function for rotary positions; None where it has none."""
    name = find_rotary(theirs.forward)
    if name is None:
        return None
    code, around = theirs.forward, theirs.forward.__globals__
    ours = {**around, name: partial(rotate, around[name])}
    forward = FunctionType(code.__code__, ours, code.__name__, code.__defaults__, code.__closure__)
    forward.__kwdefaults__ = code.__kwdefaults__
    return forward


def rotate(
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
