"""What every kernel family is held to.

The tests of this folder run three times: on a CPU, where the ops do their reference maths; on a CPU with
TRITON_INTERPRET=1, where they run the Triton kernels in the interpreter; and on a GPU, where they run them compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stretto.ops.language import INTERPRET

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products complain about `poisoned_memory`
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_KERNELS = INTERPRET or DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16]

Function = Callable[..., Any]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values that bf16 can hold, so that every precision starts from the same numbers."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return value.bfloat16().to(DEVICE, dtype)


def results(function: Function, args: Sequence[Any], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs, then the gradient of every floating-point argument, for fixed gradients of the outputs. `dtype` casts
    the floating-point arguments first."""
    args = [_leaf(a, dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    out = function(*args)
    outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    live = [t for t in outputs if t.requires_grad]
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    gradients = torch.autograd.grad(
        live, leaves, [rand(*t.shape, dtype=t.dtype, seed=100 + i) for i, t in enumerate(live)], allow_unused=True
    )
    return [
        *(t.detach() for t in outputs),
        *(torch.zeros_like(a) if g is None else g for a, g in zip(leaves, gradients, strict=True)),
    ]


def _leaf(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.detach().to(dtype or value.dtype).requires_grad_()


def error(value: Tensor, exact: Tensor) -> float:
    """Relative, in the Euclidean norm; NaN counts as infinite."""
    assert value.shape == exact.shape, f"{list(value.shape)} is not {list(exact.shape)}"
    size = float(exact.double().norm())
    found = float((value.double() - exact.double()).norm())
    return float("inf") if found != found else found / size if size else found


def assert_parity(fused: Function, reference: Function, args: Sequence[Any], dtype: torch.dtype) -> None:
    """Outputs and all gradients of `fused` in `dtype` are at most twice as far from fp64 as plain torch in `dtype`."""
    exact = results(reference, args, torch.float64)
    plain = results(reference, args, dtype)
    with poisoned_memory():
        got = results(fused, args, dtype)
    assert len(got) == len(exact)
    slack = torch.finfo(dtype).eps / 4  # where plain torch happens to be exact
    for i, (g, p, e) in enumerate(zip(got, plain, exact, strict=True)):
        assert error(g, e) <= 2 * error(p, e) + slack, f"result {i}: {error(g, e):.2e}, plain torch {error(p, e):.2e}"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: an element that a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def assert_op(op: Any, args: Sequence[Any]) -> None:
    """torch's own checks of a custom op: schema, fake, autograd, tracing."""
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def assert_compiles(function: Function, args: Sequence[Any]) -> None:
    """Traced whole, forward and backward, it gives what it gives eagerly."""
    eager = results(function, args)
    traced = results(torch.compile(function, fullgraph=True, backend="aot_eager"), args)
    for a, b in zip(eager, traced, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def kept_bytes(run: Function, given: Sequence[Tensor]) -> int:
    """The bytes of the storages that autograd keeps for the backward pass of `run`, without those that were given."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in given}
    count = len(kept)

    def keep(t: Tensor) -> Tensor:
        kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(storage.nbytes() for storage in list(kept.values())[count:])


def strided(x: Tensor) -> Tensor:
    """The same values with a gap after each row."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]
