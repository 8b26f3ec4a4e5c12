"""Triton, where it is installed, and the few functions on tensors that all kernel files share.

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


EMULATE = tl.constexpr(triton.knobs.runtime.interpret) if tl else None  # in the interpreter no PTX runs


@jit
def exp2(x):
    """2^x; zero where that is less than the least normal number, which takes four instructions otherwise."""
    if EMULATE:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def reciprocal(x):
    """1 / x to one unit in the last place, for x of ordinary size: one instruction."""
    if EMULATE:
        return 1 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def rounded(x, TYPE: tl.constexpr):
    """x [fp32] as a number of that type, in fp32 again. The instruction that rounds one number alone to bf16 is eight
    times as slow as the one that rounds two, which compilers do not find here."""
    if EMULATE or tl.bfloat16 != TYPE:
        return x.to(TYPE).to(tl.float32)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
        "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels run on the device of x."""
    return x.is_cuda or INTERPRET


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for block sizes."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, d: int) -> int:
    return -(-n // d)


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and of sums: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def dense_rows(x: X) -> X:
    """Returns x with dense rows: the kernels take any stride from row to row, but 1 inside of a row."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with x: that of an enclosing autocast, or that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


__all__ = [
    "EMULATE", "INTERPRET", "cdiv", "dense_rows", "exp2", "jit", "next_power_of_2", "num_processors", "product_dtype",
    "reciprocal", "rounded", "runs_kernels", "tl", "triton", "wide", "wide_dtype",
]  # fmt: skip
