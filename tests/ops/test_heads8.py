"""Gradients of heads that are merged into 8 bits: the bits of the two steps that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.ops.fp8 import FACTORS, Eight
from stretto.ops.heads import _merge, project_heads
from stretto.ops.heads8 import merge_heads8
from stretto.ops.round8 import E5M2, quantize
from tests.ops.checks import DEVICE, poisoned_memory, rand
from tests.ops.narrow import HAS_PRODUCTS, bound_of, bounds_of, same

pytestmark = pytest.mark.skipif(not HAS_PRODUCTS, reason="needs a GPU with 8-bit products")


def angles_of(rows: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows, device=DEVICE)[:, None] * torch.linspace(1, 0.1, size // 2, device=DEVICE)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("heads", "size"), [((3, 3, 3), 16), ((10, 2, 2), 48), ((3,), 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_in_two_steps(dtype: torch.dtype, heads: tuple[int, ...], size: int, rotary: bool) -> None:
    """More than a tile of columns and of rows; parts that are strided, as attention returns them."""
    rows = 77
    parts = [rand(n, rows, size, dtype=dtype, seed=i).transpose(0, 1) for i, n in enumerate(heads)]
    cos, sin = angles_of(rows, size) if rotary else (None, None)
    merged, total = _merge(parts, cos, sin, torch.float32)
    bounds = bound_of(2.0), bound_of(2.0)
    with poisoned_memory():
        found, sums = merge_heads8(parts, cos, sin, torch.float32, bounds[0])
    exact = quantize(merged, E5M2, bound=bounds[1])
    assert same(found, exact) and bounds[0].seen == bounds[1].seen == merged.abs().max()
    assert torch.allclose(sums, total, rtol=1e-4, atol=1e-4) and sums.dtype == total.dtype
    assert not found.data_t[:, rows:].float().any()
    found, sums = merge_heads8(parts, cos, sin, None, bounds[0])
    assert same(found, exact) and sums.shape == (0,)
    spoiled = [*parts[:-1], parts[-1].clone()]
    spoiled[-1][5, 1, 3] = torch.nan
    found, _ = merge_heads8(spoiled, cos, sin, None, bounds[0])
    assert not bounds[0].seen.isfinite() and found.data[5].float().isnan().any() and found.data_t.float().isnan().any()


@pytest.mark.parametrize("rotary", [False, True])
def test_a_projection_has_the_same_bits_in_one_step(rotary: bool) -> None:
    """Watched, it takes two."""
    x, weight, bias = rand(40, 32, dtype=torch.bfloat16), rand(96, 32, seed=1), rand(96, seed=2)
    cos, sin = angles_of(40, 16) if rotary else (None, None)
    found = []
    for watched in (False, True):
        product = Eight("tensor", bounds_of({"x": 9.0, "dout": 40.0, "weight": 9.0}))
        product.watched = watched
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        parts = project_heads(*leaves, [2, 2, 2], cos, sin, product)
        doubled = [rand(*part.shape, dtype=part.dtype, seed=5 + i) for i, part in enumerate(parts)]
        gradients = torch.autograd.grad(parts, leaves, doubled)
        found.append([*parts, *gradients, *(product.bounds[factor].seen for factor in FACTORS)])
    for i, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.allclose(one, other, rtol=1e-3) if i == 5 else torch.equal(one, other), i
