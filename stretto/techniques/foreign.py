"""What a model of others offers to a technique that changes it from the outside (`Technique.attach`); a Hugging Face
model does so by hf/techniques.py. It is the counterpart of the sites of Stretto's own models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn

from stretto.memory import Keep
from stretto.ops.products import Product

R = TypeVar("R", bound="NormRule")


class Switch(Protocol):
    """A layer that can be left out from the outside."""

    needed: bool  # the layer makes something that later layers need
    factor: float | None  # of what the layer adds to the stream; 0: the layer is left out; None: nobody has said


class NormRule(Protocol):
    """What stands where a norm stood, over the parameters of that norm."""

    keeps_affine: bool  # the scale and shift of the norm stay
    factor: Tensor | None  # set for each update, on the device; None: nobody has said

    def weigh(self, real: Tensor) -> Tensor:
        """The weights of tokens in what is measured, [T], given which are real, bool [T]."""
        ...

    def add(
        self,
        branch: Tensor | None,
        x: Tensor,
        branch_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        p: float,
        key: Tensor | None,
        post: bool,
        rows: Tensor | None,
        from_output: bool,
    ) -> tuple[Tensor, Tensor]:
        """The result, and the stream that goes on, as AddingNorm.add in model.py. `rows` are weights of tokens in a
        training step; None: nothing is measured. `from_output`: the backward pass reads the result."""
        ...


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model of others, or several of one input, which are one product."""

    modules: tuple[nn.Module, ...]  # their weights are the rows of one matrix
    transposed: bool  # a module's weight is [in, out]
    place: Literal["inside", "end", "head"]  # in a stack, in its first or last layer, or the output layer

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix, [out, in]."""
        weights: list[Any] = [module.weight for module in self.modules]
        inner = weights[0].shape[0 if self.transposed else 1]
        return sum(weight.numel() for weight in weights) // inner, inner


class Foreign(Protocol):
    """What a model of others, changed from the outside, offers instead of sites. `name` is that of the technique; where
    nothing can be done, a ValueError says why."""

    def switch_layers(
        self, name: str, find_problem: Callable[[Sequence[Switch]], str | None]
    ) -> Mapping[str, Sequence[Switch]]:
        """Makes the layers of a stack switchable, by its name, unless `find_problem` has a reason against it."""
        ...

    def use_kernels(self) -> None:
        """Lets modules compute what they compute by the kernels of ops."""
        ...

    def keep_less(self, keep: Keep, activations: str, tell: Callable[[Mapping[str, nn.Module]], None]) -> None:
        """Tells modules what to keep for the backward pass, as far as they can: blocks `keep`, activations between
        products that are modules of their own what ops/activation.py calls `activations`. That is done after all other
        changes; then `tell` is called with the norms, by name."""
        ...

    def replace_norms(self, name: str, build: Callable[[int], R]) -> R:
        """Puts one rule in the place of all norms that tokens are known of; `build` is given their channels in all."""
        ...

    def give_products(self, name: str, choose: Callable[[Mapping[str, Layer]], Mapping[str, Product | str]]) -> None:
        """Lets linear layers ask objects for their products while they are trained. That is done after all other
        changes: then `choose` is given the layers that our modules compute, by name, and returns for each an object,
        or the reason why it has none."""
        ...
