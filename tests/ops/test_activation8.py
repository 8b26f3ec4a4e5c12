"""Activations that write 8 bits: the same bits as the two steps that they stand for, in kernels and in an MLP."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.ops.activation import GATES, KINDS, Activation, run_activate, run_activate_backward
from stretto.ops.activation8 import activate8, activate8_backward
from stretto.ops.fp8 import Eight
from stretto.ops.mlp import mlp
from stretto.ops.round8 import E4M3, E5M2, quantize
from tests.ops.checks import poisoned_memory, rand, strided
from tests.ops.narrow import HAS_PRODUCTS, bound_of, bounds_of, same

pytestmark = pytest.mark.skipif(not HAS_PRODUCTS, reason="needs a GPU with 8-bit products")
DTYPES = [torch.float32, torch.bfloat16]


def make(kind: str, bias: bool, p: float, dtype: torch.dtype, rows: int = 77) -> tuple[Tensor, Tensor, Activation]:
    """Two tiles of columns, the second one not full, and of rows; each with a gap after its rows."""
    cols = 176
    width = 2 * cols if kind in GATES else cols
    key = torch.tensor([5, 7], device=rand(1).device)
    pre, dh = strided(rand(rows, width, dtype=dtype)), strided(rand(rows, cols, dtype=dtype, seed=1, scale=1e-4))
    return pre, dh, Activation(kind, rand(width, seed=2) if bias else None, p, key if p else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bias", "p"), [(True, 0.25), (False, 0.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_in_two_steps(kind: str, bias: bool, p: float, dtype: torch.dtype) -> None:
    """With a bound that is too small for some; the bytes beyond the last row are zeros, also where a bias is added."""
    pre, dh, activation = make(kind, bias, p, dtype)
    h = run_activate(pre, activation)
    most, dmost = h.abs().max().float() / 2, dh.abs().max().float() * 4
    bound, exact_bound = bound_of(most), bound_of(most)
    with poisoned_memory():
        found = activate8(pre, activation, bound)
    assert same(found, quantize(h, E4M3, bound=exact_bound))
    assert bound.seen == exact_bound.seen == h.abs().max() and not found.data_t[:, len(pre) :].float().any()
    relu = kind == "relu"
    dpre, again, dbias = run_activate_backward(dh.clone(), h if relu else pre, activation, not relu, True)
    bounds = bound_of(dmost), bound_of(dmost)
    with poisoned_memory():
        dpre8, h8, sums = activate8_backward(dh, pre, activation, bounds[0], bound_of(most), True)
    assert same(dpre8, quantize(dpre, E5M2, bound=bounds[1])) and bounds[0].seen == bounds[1].seen
    assert same(h8, found[2:]) and (relu or torch.equal(again, h))
    assert sums.dtype == dbias.dtype and torch.allclose(sums, dbias, rtol=1e-4, atol=1e-8)
    dpre8, none, sums = activate8_backward(dh, pre, activation, bounds[0], None, False)
    assert same(dpre8, quantize(dpre, E5M2, bound=bounds[1])) and none == () and sums.shape == (0,)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_what_is_not_finite_is_seen(kind: str, wrong: float) -> None:
    pre, dh, activation = make(kind, True, 0.0, torch.bfloat16)
    spoiled, dspoiled = pre.clone(), dh.clone()
    spoiled[3, 5] = dspoiled[4, 6] = wrong
    bound = bound_of(8.0)
    found = activate8(spoiled, activation, bound)
    assert not bound.seen.isfinite() and found.data[3, 5].float().isnan() and found.data_t[5, 3].float().isnan()
    assert found.data.float().isnan().sum() == 1
    for args in ((dspoiled, pre), (dh, spoiled)):
        bound = bound_of(8.0)
        found, _, sums = activate8_backward(*args, activation, bound, bound_of(8.0), True)
        assert found.data.float().isnan().any() and found.data_t.float().isnan().any()
        assert not bound.seen.isfinite() and not sums.isfinite().all()


@pytest.mark.parametrize("keep", ["activation", "product", "input"])
@pytest.mark.parametrize(("kind", "p"), [("gelu", 0.0), ("swiglu", 0.0), ("relu", 0.0), ("relu", 0.2)])
def test_an_mlp_has_the_same_bits_in_one_step(kind: str, p: float, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether activations write 8 bits, both products are watched, which takes two steps, or one of them does not
    round at all."""
    width, inner, tokens = 32, 64, 40
    up = 2 * inner if kind == "swiglu" else inner
    shapes = [(tokens, width), (up, width), (up,), (width, inner), (width,)]
    tensors = [rand(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(shapes)]
    key = torch.tensor([5, 7], device=tensors[0].device) if p else None

    def run(on: tuple[bool, bool], watched: bool) -> tuple[list[Tensor], list[float]]:
        products = tuple(Eight("tensor", bounds_of({"x": 300.0, "dout": 2000.0, "weight": 6.0})) for _ in range(2))
        for product, each in zip(products, on, strict=True):
            product.on, product.watched = each, watched
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = mlp(*leaves, kind, p, key, keep, (products[0], products[1]))
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        return [out.detach(), *gradients], [float(b.seen) for product in products for b in product.bounds.values()]

    for on in ((True, True), (True, False), (False, True)):
        (found, seen), (exact, exact_seen) = run(on, False), run(on, True)
        for i, (one, other) in enumerate(zip(found, exact, strict=True)):  # sums for the bias: in another order
            assert torch.allclose(one, other, rtol=0.02) if i == 3 else torch.equal(one, other), i
        assert seen == exact_seen

    calls: list[str] = []
    for name in ("activate8", "activate8_backward"):
        real = globals()[name]
        monkeypatch.setattr(f"stretto.ops.fp8.{name}", lambda *a, f=real, n=name: calls.append(n) or f(*a))
    run((True, True), False)
    assert calls == ["activate8", "activate8_backward"]
