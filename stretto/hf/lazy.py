"""Tensors of which only the shape exists, until somebody needs their values.

They note what happens to them as far as they know how (`note`); for anybody else they become ordinary tensors.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_PROPERTIES: list[Any] = [Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.is_cuda, Tensor.layout]


class Lazy(Tensor):
    known: ClassVar[set[Any]] = {p.__get__ for p in _PROPERTIES} | {
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point,
    }  # what a shape without values can answer  # fmt: skip

    @classmethod
    def note(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation, where it can be had without the values."""
        raise TypeError("Lazy is abstract")

    def compute(self) -> Tensor:
        raise TypeError("Lazy is abstract")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in cls.known:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        noted = cls.note(func, args, kwargs)
        if noted is not None:
            return noted
        args, kwargs = tree_map_only(cls, lambda lazy: lazy.compute(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *others: Any) -> Any:
        raise RuntimeError(
            f"{func} met a tensor that was not computed; accelerate with fused=False and loss=False to have all of them"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.compute())
