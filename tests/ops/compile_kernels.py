"""Compiles every kernel of ops for a GPU that need not be there, and prints how many versions of each there are.

    python -m tests.ops.compile_kernels 80 90        compute capabilities of NVIDIA GPUs

A kernel that the interpreter runs may still be none that the compiler takes. So the ops are called with tensors of a
CPU, their kernels are compiled down to machine code for a stated GPU, and nothing is launched: results stay as they
were allocated.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

triton.knobs.runtime.interpret = False
os.environ["TRITON_INTERPRET"] = "1"  # ops then run kernels on a CPU, which Triton, imported before, does not interpret

from stretto.ops.activation import GATES, KINDS, Activation, activate
from stretto.ops.activation8 import launch_activate8, launch_activate8_backward
from stretto.ops.affine import AXES, add_affine
from stretto.ops.attention import attention
from stretto.ops.coded_activation import MINIMA
from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.cross_entropy8 import launch_rows8
from stretto.ops.dropout import dropout
from stretto.ops.embedding import embed
from stretto.ops.fp8 import Eight
from stretto.ops.heads import project_heads, rotate_heads
from stretto.ops.heads8 import launch_merge_heads8
from stretto.ops.judge import FIELDS, launch_judge
from stretto.ops.mlp import activate_linear, mlp
from stretto.ops.norm import add_norm
from stretto.ops.round8 import E4M3, E5M2, RECIPES, Bounds, launch_quantize
from stretto.ops.weights8 import Weights
from stretto.optim import FlatAdamW

T, C, D = 48, 64, 16
KEY = torch.tensor([1, 2])


class Driver:
    """Stands in for that of a machine with such a GPU."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling:
    """Takes the place of what starts kernels."""

    def __init__(self) -> None:
        self.start: Any = JITFunction.run
        self.found = Counter[str]()
        self.seen = set[str]()
        JITFunction.run = lambda kernel, *args, **options: self.compile(kernel, *args, **options)

    def compile(self, kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        compiled = self.start(kernel, *args, warmup=True, **options)
        assert compiled.asm["cubin"], "machine code"
        self.found[kernel.fn.__name__] += compiled.hash not in self.seen
        self.seen.add(compiled.hash)


def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def parameter(*shape: int) -> Tensor:
    return make(*shape, dtype=torch.float32)


def call_norms() -> list[Tensor]:
    row, scale = parameter(C), torch.ones(())
    places = torch.arange(T, dtype=torch.int32)
    found: list[Any] = []
    for rms in (False, True):
        shift = None if rms else row
        found += add_norm(make(T, C), make(T, C), row, row, shift, 1e-5, rms, 0.1, KEY)
        found += add_norm(make(T, C), make(T, C), None, row, shift, 1e-5, rms, 0.0, None, True)
        found += add_norm(make(T, C), make(T, C), row, row, shift, 1e-5, rms, 0.1, KEY, from_output=True)
    some = (scale, places, places, T)
    for from_output in (False, True):
        found += add_norm(make(T, C), make(T, C), row, row, row, 1e-5, False, 0.1, KEY, False, *some, from_output)
    weights = torch.ones(T) / T
    for axis in AXES:
        for from_output in (False, True):
            pull = (weights, scale, 1, axis, from_output)
            found += add_affine(make(T, C), make(T, C), row, row, row, 0.1, KEY, False, *pull)
    return found


def call_products() -> list[Tensor]:
    up, down, gate = parameter(2 * C, C), parameter(C, 2 * C), parameter(4 * C, C)
    found = []
    for kind in KINDS:
        inner = gate if kind in GATES else up
        for p in (0.0, 0.1):
            found.append(mlp(make(T, C), inner, parameter(len(inner)), down, None, kind, p, KEY, "product"))
    for kind in MINIMA:
        for keep in ("code8", "bit"):
            found += [activate(make(T, C), parameter(C), kind, p, KEY, keep) for p in (0.0, 0.1)]
    found.append(activate_linear(make(T, 2 * C), parameter(2 * C), down, "gelu", 0.1, KEY))
    angles = torch.zeros(T, D // 2)
    heads = C // D
    for positions in ((), (angles, angles)):
        found += project_heads(make(T, C), parameter(3 * C, C), parameter(3 * C), [heads] * 3, *positions)
    found += rotate_heads(make(T, heads, D), make(T, heads, D), angles, angles)
    labels = torch.zeros(T, dtype=torch.int64)
    found += [linear_cross_entropy(make(T, C), parameter(96, C), parameter(96), labels, s) for s in (0.0, 0.1)]
    return found


def call_embeddings() -> list[Tensor]:
    ids, row = torch.zeros(T, dtype=torch.int64), parameter(C)
    tables = (ids, parameter(32, C), ids, parameter(T, C), ids, parameter(2, C), 2.0)
    whole = embed(*tables, row, row, 1e-5, False, 0.1, KEY, torch.bfloat16)
    return [whole, embed(ids, parameter(32, C), dtype=torch.bfloat16), dropout(make(T, C), 0.1, KEY)]


def call_attention() -> list[Tensor]:
    found = []
    for length in (T, 1024):  # all keys in one tile, and more
        ends = torch.tensor([0, length], dtype=torch.int32)
        for causal, bias, p in ((False, False, 0.0), (True, False, 0.1), (False, True, 0.0)):
            q, k, v = (make(length, 4, D, dtype=torch.float16) for _ in "qkv")  # not bf16: that is kept from a CPU
            given = parameter(4, 2 * length - 1) if bias else None
            found.append(attention(q, k, v, ends, ends, length, length, causal, None, given, p, KEY if p else None))
    return found


def call_quantisers() -> None:
    for recipe in RECIPES:
        for dtype in (E4M3, E5M2):
            for weight in (False, True):
                launch_quantize(make(T, C), dtype, recipe, None, weight)
    bounds = Bounds([E4M3, E5M2], torch.device("cpu"))
    for bound, dtype in zip(bounds.each, (E4M3, E5M2), strict=True):
        bound.known = True
        launch_quantize(make(T, C), dtype, "tensor", bound, False)
    bounds.renew()
    one, other = bounds.each
    for smoothing in (0.0, 0.1):
        launch_rows8(make(T, C), torch.zeros(T, dtype=torch.int64), smoothing, -100, other)
    angles, parts = torch.zeros(T, D // 2), [make(T, C // D, D)] * 3
    for sums, positions in ((torch.float32, (None, None)), (None, (angles, angles))):
        launch_merge_heads8(parts, *positions, sums, other)
    for kind in KINDS:
        pre = make(T, 2 * C if kind in GATES else C)
        for some in (Activation(kind, parameter(pre.shape[1]), 0.1, KEY), Activation(kind, None, 0.0, None)):
            if kind != "relu":
                launch_activate8(pre, some, one)
                launch_activate8_backward(make(T, C), pre, some, other, one, some.bias is not None)
                launch_activate8_backward(make(T, C), pre, some, other, None, some.bias is not None)
    for matrix in (make(T, C), parameter(T, C)):
        Weights().round([matrix], [Eight("tensor").take_room(matrix)], bounds.each[:1])


def call_updates() -> None:
    for weights, dtype in (("fp32", torch.float32), ("split", torch.bfloat16), ("bf16", torch.bfloat16)):
        matrix = make(T, C, dtype=dtype)
        matrix.grad = torch.zeros_like(matrix)
        optimizer = FlatAdamW([matrix], weights=weights)
        optimizer.clip(1.0)
        optimizer.step()


def call_verdicts() -> None:
    for skip, watch in ((False, True), (True, True), (False, False)):
        launch_judge(torch.zeros(len(FIELDS), dtype=torch.float64), torch.ones(()), skip, watch)


def main(capabilities: list[str]) -> None:
    compiling, found = Compiling(), {}
    for capability in capabilities:
        triton.runtime.driver.set_active(Driver(int(capability)))
        found[capability] = compiling.found = Counter[str]()
        for results in (call_norms(), call_products(), call_embeddings(), call_attention()):
            live = [result for result in results if result.requires_grad]
            torch.autograd.backward(live, [torch.zeros_like(result) for result in live])
        call_updates()
        call_verdicts()
        if int(capability) >= 89:  # earlier ones have no 8-bit numbers
            call_quantisers()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
