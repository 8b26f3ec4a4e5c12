"""What all kernel files speak: Triton where it is installed, and the few words about tensors that they share.

Without Triton the kernels stay unused text, and the CPU bodies of the ops do the work. With TRITON_INTERPRET=1 in the
environment the CPU bodies run the kernels themselves, in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit: Callable[[Callable[..., Any]], Any] = triton.jit
except ImportError:
    triton = tl = None

    def jit(function: Callable[..., Any]) -> Any:
        return _Missing(function.__name__)


X = TypeVar("X", Tensor, Tensor | None)
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


class _Missing:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError(f"the GPU kernel {self.name} needs Triton: pip install triton")


def next_power_of_2(n: int) -> int:
    """Block sizes: the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, d: int) -> int:
    return -(-n // d)


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to compute and to sum in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def dense_rows(x: X) -> X:
    """The kernels go from row to row in any stride, but through a row one by one."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products with x run in: autocast's precision, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


__all__ = [
    "INTERPRET", "cdiv", "dense_rows", "jit", "next_power_of_2", "num_processors", "product_dtype", "tl", "triton",
    "wide", "wide_dtype",
]  # fmt: skip
