"""The loss of a language model without its logits.

A Hugging Face model computes logits [N, S, V], and from them the loss. Both are the model's own code, and stay; but in
training, when labels are given, the output layer gives `Logits`, a tensor of which only the shape exists. The few
things that are done to logits on their way to the loss (another view, another precision, a bias) are noted. Cross
entropy is then computed from the hidden states, for labelled positions only (ops/cross_entropy.py). For anybody else
who uses them they become an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from stretto.batch import IGNORE
from stretto.hf.call import Call, current_call, set_call
from stretto.hf.layers import Parts, is_touched
from stretto.hf.lazy import Lazy
from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.language import product_dtype

_GRAD_FN: Any = Tensor.grad_fn
_computed: ContextVar[list[bool] | None] = ContextVar("stretto_computed", default=None)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to compute logits: head(hidden) + bias."""

    head: nn.Module
    plain: Callable[[Tensor], Tensor]  # what the head does without us
    hidden: Tensor  # [T, C]
    versions: list[int]  # of the head's parameters when it was called
    autocast: torch.dtype | None
    bias: Tensor | None = None  # [V]
    made: list[Tensor] = field(default_factory=list)  # the logits [T, V], once somebody wanted them; views share them
    stale: list[bool] = field(default_factory=list)  # an entry once an optimizer has changed the head's weights

    def __post_init__(self) -> None:
        _waiting.add(self)


_waiting: WeakSet[Recipe] = WeakSet()


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Behind every step of any optimizer: those of torch that are fused change weights without a new version."""
    if _waiting:
        written = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for recipe in _waiting:
            if any(id(p) in written for p in recipe.head.parameters()):
                recipe.stale.append(True)


register_optimizer_step_post_hook(_note_step)


class Logits(Lazy):
    known = Lazy.known | {_GRAD_FN.__get__}  # None: there is no history yet, and DistributedDataParallel asks for it
    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> Logits:
        made: Logits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=recipe.hidden.device)
        made.recipe = recipe
        return made

    @classmethod
    def note(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        return args[0]._keep(func, args[1:], kwargs) if args and isinstance(args[0], Logits) else None

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result, where it can be had without the logits. Those that were computed may have been changed since."""
        if self.recipe.made:
            return None
        if func in (Tensor.view, Tensor.reshape) and not kwargs:
            return self._view(args)
        if func is Tensor.contiguous and not args:
            return self
        if func is Tensor.clone and not args and not kwargs:  # DistributedDataParallel does, to every output
            return self._copy(self.dtype)
        if func is Tensor.float and not args:
            return self._cast(torch.float32)
        if func in (Tensor.to, Tensor.type) and not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype):
            return self._cast(args[0])
        if func in (Tensor.add, Tensor.__add__, torch.add) and not kwargs and len(args) == 1:
            return self._add(args[0])
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        return None

    def _copy(self, dtype: torch.dtype) -> Logits:
        return Logits(replace(self.recipe, made=[]), self.shape, dtype)

    def _cast(self, dtype: torch.dtype) -> Logits:
        return self if dtype == self.dtype else self._copy(dtype)

    def _view(self, args: tuple[Any, ...]) -> Logits | None:
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        if not all(isinstance(size, int) for size in shape) or shape[-1] != self.shape[-1]:
            return None
        return Logits(self.recipe, torch.empty(self.shape, device="meta").view(*shape).shape, self.dtype)

    def _add(self, other: Any) -> Logits | None:
        """A bias that is the same for every token."""
        classes = self.shape[-1]
        if not isinstance(other, Tensor) or other.numel() != classes or other.shape[-1] != classes:
            return None
        bias = other.flatten() if self.recipe.bias is None else self.recipe.bias + other.flatten()
        dtype = torch.promote_types(self.dtype, other.dtype)
        return Logits(replace(self.recipe, bias=bias, made=[]), self.shape, dtype)

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
        if not plain or self.ndim != 2 or target.ndim != 1 or target.is_floating_point():
            return None
        labelled = target != ignore_index
        call, count = current_call(), labelled.sum()
        is_known = call is not None and ignore_index == IGNORE and target.numel() == call.known.positions
        room = call.known.labels if call is not None and is_known and not call.counted else int(count)
        if call is not None:
            call.counted = True  # a second loss may have other labels
        # Not `nonzero`, for which the host would wait. Where there is room for more, labels that are ignored follow.
        rows = (~labelled).byte().argsort(stable=True)[:room]
        loss = self._sum_losses(rows, target[rows], label_smoothing, ignore_index)
        return loss if reduction == "sum" else loss / count

    def _sum_losses(self, rows: Tensor, labels: Tensor, smoothing: float, ignore: int) -> Tensor:
        head, bias = self.recipe.head, self.recipe.bias
        x = self.recipe.hidden[rows]
        if not isinstance(head, nn.Linear):  # layers in front of the vocabulary: these rows go through them
            with logits_wanted_for_loss(True):
                inner = self.recipe.plain(x)
            if not isinstance(inner, Logits):
                inner = inner if bias is None else inner + bias
                return F.cross_entropy(inner.float(), labels, None, None, ignore, None, "sum", smoothing)
            x, head, inner_bias = inner.recipe.hidden, inner.recipe.head, inner.recipe.bias
            bias = bias if inner_bias is None else inner_bias if bias is None else bias + inner_bias
        own: Tensor | None = head.bias  # type: ignore[assignment]
        bias = bias if own is None else own if bias is None else bias + own
        weight: Tensor = head.weight  # type: ignore[assignment]
        return linear_cross_entropy(x, weight, bias, labels, smoothing, ignore=ignore)

    def compute(self) -> Tensor:
        recipe, noted = self.recipe, _computed.get()
        if not recipe.made:
            if noted is not None:
                noted.append(True)
            versions = [parameter._version for parameter in recipe.head.parameters()]
            if recipe.stale or versions != recipe.versions:
                raise RuntimeError(
                    "the logits of an accelerated model are computed when they are used, and its weights have changed "
                    "since: read them before the optimizer's step, or accelerate with loss=False"
                )
            precision = torch.autocast(recipe.hidden.device.type, recipe.autocast, enabled=recipe.autocast is not None)
            with logits_wanted_for_loss(False), torch.enable_grad(), precision:
                logits = recipe.plain(recipe.hidden)
                recipe.made.append((logits if recipe.bias is None else logits + recipe.bias).to(self.dtype))
        return recipe.made[0].view(self.shape)


@contextmanager
def note_computed() -> Iterator[list[bool]]:
    """An entry for each time that logits had to be computed."""
    found: list[bool] = []
    before = _computed.set(found)
    try:
        yield found
    finally:
        _computed.reset(before)


@contextmanager
def logits_wanted_for_loss(lazy: bool, rectangle: bool = True) -> Iterator[None]:
    before = current_call()
    set_call(Call(None, before, rectangle, lazy))
    try:
        yield
    finally:
        set_call(before)


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
        """Nobody looks at the output layer's call, and its weights stay: FSDP may take them away behind the model."""
        while call.outer is not None and call.outer.model is not None:
            call = call.outer
        return not any(map(is_touched, self.modules())) and not (call.model is not None and _lets_go(call.model))


def _lets_go(model: nn.Module) -> bool:
    """Whether FSDP shards the model's own weights again at the end of its forward pass."""
    if not hasattr(model, "_get_fsdp_state"):
        return False
    group = getattr(model._get_fsdp_state(), "_fsdp_param_group", None)  # type: ignore[operator]
    return group is not None and getattr(group, "post_forward_mesh_info", group) is not None
