"""torch's FlopCounterMode counts the products of our ops: as many FLOPs as those that their bodies do."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from stretto.ops import cross_entropy, heads, linear, mlp
from stretto.ops.attention import attention

T, C, INNER, V = 5, 8, 12, 11


def add_product(total: Any, a: Any, b: Any, **others: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def count(function: Any, *args: Any) -> int:
    """torch forgets sums in place."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: add_product}) as counter:
        function(*args)
    return counter.get_total_flops()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, DOUT, UP, DOWN = draw(T, C), draw(T, C), draw(INNER, C), draw(C, INNER)
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (linear._linears, (X, [draw(C, C), draw(3, C)])),
    *((linear._linears_backward, (draw(T, C + 3), X, [draw(C, C), draw(3, C)], need)) for need in (True, False)),
    *((linear._linear_backward, (DOUT, x, w)) for x in (X, None) for w in ([draw(C, C)], [draw(4, C), draw(4, C)], [])),
    (heads._project, (X, [draw(C, C), draw(4, C)], [], 4, 2, None, None)),
    (mlp._mlp, (X, UP, None, DOWN, None, "relu", 0.0, None, "product")),
    (mlp._mlp, (X, draw(2 * INNER, C), None, DOWN, None, "swiglu", 0.0, None, "product")),
    (mlp._activate_linear, (draw(T, INNER), None, DOWN, "gelu", 0.0, None)),
]  # fmt: skip
for some in product((True, False), repeat=5):
    for kept in (draw(T, INNER), None):
        CASES.append((mlp._mlp_backward, (DOUT, X, UP, UP[:, 0], DOWN, kept, None, "gelu", 0.0, None, list(some))))
for some in product((True, False), repeat=3):
    given = (DOUT, draw(T, INNER), DOWN[0], DOWN, None, "gelu", 0.0, None, [some[0] or some[1], *some[1:]])
    CASES.append((mlp._activate_linear_backward, given))
    head = (X, draw(V, C), None, torch.arange(T), 0.0, -100, 128, [*some[:2], False])
    CASES.append((cross_entropy._linear_cross_entropy, head))


def test_formulas_count_the_products_that_are_made() -> None:
    for op, args in CASES:
        found, made = count(op, *args), count(op.bodies["cpu"], *args)
        assert found == made, (op.overload.name(), args[-1], found, made)
    assert sum(count(op, *args) == 0 for op, args in CASES) < len(CASES) / 10


def attend(q: Tensor, offsets: Tensor) -> None:
    attention(q, q, q, offsets, offsets, 4, 4).sum().backward()


def test_attention_counts_as_torchs_does() -> None:
    """By the lengths of the sequences, where they are known."""
    theirs = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    backward = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention_backward]
    dense = draw(3, 2, 4, 8)
    expected = theirs(dense, dense, dense) + backward(dense, dense, dense, dense)
    q = draw(12, 2, 8).requires_grad_()
    assert count(attend, q, torch.tensor([0, 4, 8, 12], dtype=torch.int32)) == expected
    short = theirs(*[draw(1, 2, 1, 8)] * 3) + backward(*[draw(1, 2, 1, 8)] * 4)
    assert count(attend, q[:6].detach().requires_grad_(), torch.tensor([0, 4, 5, 6], dtype=torch.int32)) == (
        expected // 3 + 2 * short
    )
    with FakeTensorMode():
        q = torch.empty(12, 2, 8, requires_grad=True)
        assert count(attend, q, torch.empty(4, dtype=torch.int32)) == expected


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_counts_as_torchs_does(bias: bool) -> None:
    plain = torch.nn.Linear(C, INNER, bias=bias)

    def ours(x: Tensor) -> None:
        linear.linear(x, plain.weight, plain.bias).sum().backward()

    x = X.clone().requires_grad_()
    assert count(ours, x) == count(lambda x: plain(x).sum().backward(), x) == 3 * 2 * T * C * INNER
