"""Gradients of logits in 8 bits: the bits of the two steps that they stand for."""

from __future__ import annotations

import pytest
import torch

from stretto.ops.cross_entropy import _run_rows, linear_cross_entropy
from stretto.ops.cross_entropy8 import rows8
from stretto.ops.fp8 import FACTORS, Eight
from stretto.ops.round8 import E5M2, quantize
from tests.ops.checks import DEVICE, poisoned_memory, rand
from tests.ops.narrow import HAS_PRODUCTS, bound_of, bounds_of, same

pytestmark = pytest.mark.skipif(not HAS_PRODUCTS, reason="needs a GPU with 8-bit products")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_in_two_steps(dtype: torch.dtype, smoothing: float) -> None:
    """More than a tile of columns and of rows, of which some are ignored."""
    logits = rand(141, 304, dtype=dtype, scale=4.0)
    labels = torch.arange(141, device=DEVICE)
    labels[::5] = -100
    gradient = logits.clone()
    losses = _run_rows(gradient, labels, smoothing, -100, True)
    bounds = bound_of(1.0), bound_of(1.0)
    with poisoned_memory():
        found_losses, found = rows8(logits.clone(), labels, smoothing, -100, bounds[0])
    assert torch.equal(found_losses, losses) and same(found, quantize(gradient, E5M2, bound=bounds[1]))
    assert bounds[0].seen == bounds[1].seen <= 1.0 and not found.data[::5].float().any()
    logits[7, 9] = torch.nan
    found_losses, found = rows8(logits, labels, smoothing, -100, bounds[0])
    assert found_losses[7].isnan() and found.data[7].float().isnan().all() and not bounds[0].seen.isfinite()


@pytest.mark.parametrize("biased", [False, True])
def test_an_output_layer_has_the_same_bits_in_one_step(biased: bool) -> None:
    """In two chunks; with a bias, whose sums want the gradient as it is, or watched, it takes two steps."""
    x, weight, bias = rand(250, 32, dtype=torch.bfloat16), rand(96, 32, seed=1), rand(96, seed=2)
    labels, found = torch.arange(250, device=DEVICE) % 96, []
    for watched in (False, True):
        product = Eight("tensor", bounds_of({"x": 9.0, "dout": 2.0, "weight": 9.0}))
        product.watched = watched
        leaves = [t.clone().requires_grad_() for t in ((x, weight, bias) if biased else (x, weight))]
        own_bias = leaves[2] if biased else None
        loss = linear_cross_entropy(leaves[0], leaves[1], own_bias, labels, chunk=128, product=product)
        gradients = torch.autograd.grad(loss, leaves)
        found.append([loss, *gradients, *(product.bounds[factor].seen for factor in FACTORS)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
