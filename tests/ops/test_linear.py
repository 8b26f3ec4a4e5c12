"""The linear layer: torch's own products, whichever are needed, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import linear as family
from stretto.ops import products
from stretto.ops.linear import linear, linears
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    assert_compiles,
    assert_op,
    assert_parity,
    kept_bytes,
    rand,
    results,
    strided,
)

# poisoned memory comes with torch's deterministic mode, which has a word to say about cuBLAS
pytestmark = pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled")


def arguments(tokens: int = 7) -> list[Tensor]:
    return [rand(tokens, 24), rand(40, 24, seed=1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37, products.FEW, products.FEW + 1])
def test_parity(tokens: int, dtype: torch.dtype) -> None:
    assert_parity(linear, F.linear, arguments(tokens), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_with_a_bias(dtype: torch.dtype) -> None:
    assert_parity(linear, F.linear, [*arguments(), rand(40, seed=2)], dtype)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_is_needed(frozen: int) -> None:
    """The other factor is not even kept."""
    args = [t.requires_grad_(i != frozen) for i, t in enumerate(arguments())]
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = linear(*args)
    assert [t.data_ptr() for t in kept] == [args[frozen].data_ptr()]
    dout = rand(*out.shape)
    (gradient,) = torch.autograd.grad(out, args[1 - frozen], dout)
    expected = dout @ args[1] if frozen == 1 else dout.t() @ args[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_any_strides() -> None:
    x, weight = arguments()
    expected = results(linear, [x, weight])
    for given in ([strided(x), weight], [x, weight.t().contiguous().t()]):
        for a, b in zip(results(linear, given), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_op_and_compilation() -> None:
    x, weight = arguments()
    for given in ((x, [weight]), (x, []), (None, [weight]), (x, [weight[:16], weight[16:].bfloat16()])):
        assert_op(family._linear_backward.overload, (rand(7, 40, seed=2), *given))
    assert_compiles(linear, [x, weight])
    assert_compiles(linear, [x, weight, rand(40, seed=3)])

    def cast(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return linear(x, weight)

    assert_compiles(cast, [x, weight])
    assert cast(x, weight).dtype == torch.bfloat16


@pytest.mark.gpu
def test_side_by_side_changes_no_bit() -> None:
    """Many times in a row, with memory that is used again at once: a product that another one overtakes would show."""
    weights = [rand(512, 512, dtype=torch.bfloat16, seed=i, scale=0.05).requires_grad_() for i in range(20)]
    x = rand(300, 512, dtype=torch.bfloat16, seed=99).requires_grad_()

    def run() -> tuple[Any, ...]:
        out = x
        for weight in weights:
            out = linear(out, weight)
        return torch.autograd.grad(out, [x, *weights], torch.ones_like(out))

    launched, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(recorded, launched, strict=True))


def side_by_side(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return linears(x, [first, second])


def side_by_side_ref(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([F.linear(x, first), F.linear(x, second)], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_several_products_of_one_input(tokens: int, dtype: torch.dtype) -> None:
    args = [rand(tokens, 24), rand(40, 24, seed=1), rand(16, 24, seed=2)]
    assert_parity(side_by_side, side_by_side_ref, args, dtype)


def test_several_products_as_an_op() -> None:
    args = [rand(7, 24), rand(40, 24, seed=1), rand(16, 24, seed=2)]
    assert_op(family._linears.overload, (args[0], args[1:]))
    assert_compiles(side_by_side, args)


def wide_arguments() -> list[Tensor]:
    """x in bf16, and fp32 weights with more bits than bf16 holds."""
    weights = [rand(rows, 24, seed=i) * 1.001 for i, rows in enumerate((40, 16, 40))]
    return [rand(7, 24, dtype=torch.bfloat16), *weights]


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, weight, *_: linear(x, weight),
    "linears": lambda x, *weights: linears(x, list(weights)),
}


def cast_before(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product with weights that autograd casts, and whose copies it keeps: the same bits for more bytes."""
    return lambda x, *weights: product(x, *(weight.to(x.dtype) for weight in weights))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_wide_weight_is_cast_twice_and_its_copy_is_not_kept(name: str) -> None:
    product, args = PRODUCTS[name], wide_arguments()
    for found, bits in zip(results(product, args), results(cast_before(product), args), strict=True):
        assert found.dtype == bits.dtype and torch.equal(found, bits)
    args = [t.requires_grad_() for t in args]
    assert kept_bytes(lambda: product(*args), args) == 0 < kept_bytes(lambda: cast_before(product)(*args), args)
    assert_compiles(product, args)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_wide_weight_may_be_used_twice(name: str) -> None:
    x, weight, *_ = wide_arguments()

    def twice(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: product(product(x, weight, weight)[:, :24], weight, weight)

    args, product = [x, weight], PRODUCTS[name]
    for found, bits in zip(results(twice(product), args), results(twice(cast_before(product)), args), strict=True):
        torch.testing.assert_close(found, bits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_weight_that_changes_before_the_backward_pass_is_noticed(name: str) -> None:
    x, weight, *others = [t.requires_grad_() for t in wide_arguments()]
    out = PRODUCTS[name](x, weight, *others)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
