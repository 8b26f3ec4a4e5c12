"""Sums that wait for the norm behind them.

A layer of a Hugging Face model adds each branch to the stream, and the next norm, or the next layer's, reads the sum:

    x = x + dropout(linear(h))
    h = norm(x)

One kernel can do all of it but the product (ops/norm.py), but the sum is written in the model's own code, between the
modules we know. So inside a layer, while gradients are recorded, a linear layer gives a `Pending`: a tensor of which
only the shape exists. It notes what happens to it,

    residual + dropout(product + bias)        or        dropout(activation(product + bias))

and a norm that is given such a sum computes it on the way. For anybody else who uses it, it becomes an ordinary tensor,
which is also what every layer returns; only from one layer to the next of a stack a sum may wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.hf.lazy import Lazy
from stretto.ops.activation import activate
from stretto.ops.dropout import draw_keys, dropout

_ADDS = (Tensor.add, torch.add)
_keys: ContextVar[list[Tensor] | None] = ContextVar("stretto_keys", default=None)  # for dropout, inside a layer
_useful: ContextVar[set[nn.Module] | None] = ContextVar("stretto_useful", default=None)


class Pending(Lazy):
    maker: nn.Module  # whose product it is
    product: Tensor | None  # [..., C]; None once the whole is made
    bias: Tensor | None  # [C]
    activation: str | None
    p: float  # of dropout
    key: Tensor | None
    residual: Tensor | None  # [..., C]
    made: Tensor | None

    @staticmethod
    def __new__(
        cls,
        maker: nn.Module,
        product: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
        p: float = 0.0,
        key: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Pending:
        made: Pending = Tensor._make_wrapper_subclass(cls, product.shape, dtype=product.dtype, device=product.device)
        made.maker, made.product, made.bias, made.activation = maker, product, bias, activation
        made.p, made.key, made.residual, made.made = p, key, residual, None
        return made

    @classmethod
    def note(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if func in _ADDS and len(args) == 2 and not kwargs:
            return _note_sum(*args)
        if func is F.dropout and isinstance(args[0], Pending):
            return args[0]._note_dropout(*args[1:], **kwargs)
        return None

    def _note_dropout(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Pending | None:
        if self.activation is not None:
            self.note_use()
        if not training or p == 0.0:
            return self
        if self.product is None or self.key is not None or self.residual is not None or not 0.0 < p < 1.0 or inplace:
            return None
        return Pending(self.maker, self.product, self.bias, self.activation, p, _draw_key(self.product))

    def note_use(self) -> None:
        useful = _useful.get()
        if useful is not None:
            useful.add(self.maker)

    def waits_for_activation(self) -> bool:
        """Whether it is product + bias, and nothing else."""
        return self.product is not None and self.residual is None and self.key is None and self.activation is None

    def normalise(self, add_normalised: Callable[..., tuple[Tensor, Tensor]]) -> Tensor | None:
        """The norm of a sum, which is thereby computed; None where one kernel cannot do both."""
        if self.product is None or self.residual is None:
            return None
        self.note_use()
        rows, stream = self.product.flatten(0, -2), self.residual.flatten(0, -2)
        y, stream = add_normalised(rows, stream, self.bias, self.p, self.key)
        self._keep(stream.view(self.shape))
        return y.view(self.shape)

    def compute(self) -> Tensor:
        if self.product is not None:
            x = self.product.flatten(0, -2)
            if self.activation is not None:
                x = activate(x, self.bias, self.activation, self.p, self.key)
            else:
                x = x if self.bias is None else x + self.bias.to(x.dtype)
                x = x if self.key is None else dropout(x, self.p, self.key)
            x = x.view(self.product.shape)
            self._keep(x if self.residual is None else self.residual + x)
        assert self.made is not None
        return self.made

    def _keep(self, made: Tensor) -> None:
        self.made = made
        self.product = self.bias = self.key = self.residual = None


def _note_sum(first: Any, second: Any) -> Pending | None:
    """Of a branch and the stream, in either order."""
    for branch, residual in ((first, second), (second, first)):
        if not isinstance(branch, Pending) or branch.product is None:
            continue
        if branch.residual is None and branch.activation is None and isinstance(residual, Tensor):
            residual = compute(residual)
            if residual.shape == branch.product.shape and residual.dtype == branch.product.dtype:
                return Pending(branch.maker, branch.product, branch.bias, None, branch.p, branch.key, residual)
    return None


def compute(x: Tensor) -> Tensor:
    return x.compute() if isinstance(x, Pending) else x


def is_deferring() -> bool:
    """Whether a module may give a Pending: inside a layer."""
    return not torch.compiler.is_compiling() and _keys.get() is not None


@contextmanager
def deferring() -> Iterator[None]:
    before = _keys.set([])
    try:
        yield
    finally:
        _keys.reset(before)


def _draw_key(like: Tensor) -> Tensor:
    """Keys are drawn for several places of a layer at once."""
    keys = _keys.get()
    if not keys:
        keys = [] if keys is None else keys
        keys += draw_keys(like, 4).unbind()
    return keys.pop()


@contextmanager
def note_useful() -> Iterator[set[nn.Module]]:
    """The modules whose products were used by a norm or an activation that does more than read them."""
    before = _useful.set(set())
    try:
        found = _useful.get()
        assert found is not None
        yield found
    finally:
        _useful.reset(before)
