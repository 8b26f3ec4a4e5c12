"""Triton where it is installed. Without it the kernels stay unused text, and the CPU bodies of the ops do the work.

With TRITON_INTERPRET=1 in the environment the CPU bodies run the kernels themselves, in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    jit: Callable[[Callable[..., Any]], Any] = triton.jit
except ImportError:
    triton = tl = None

    def jit(function: Callable[..., Any]) -> Any:
        return _Missing(function.__name__)


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


__all__ = ["INTERPRET", "cdiv", "jit", "next_power_of_2", "tl", "triton"]
