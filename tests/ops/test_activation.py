"""Bias, activation and dropout in one pass: parity of every kind, deterministic bias gradients, h again bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import activation as family
from stretto.ops.activation import GATES, KINDS, activate, activate_ref
from stretto.ops.dropout import hash_ref
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    assert_compiles,
    assert_op,
    assert_parity,
    error,
    poisoned_memory,
    rand,
    results,
    strided,
)

KEY = torch.tensor([0x123456789ABCDEF0, -7], device=DEVICE)
SMOOTH = [kind for kind in KINDS if kind != "relu"]


def width(kind: str, cols: int) -> int:
    return 2 * cols if kind in GATES else cols


# one row, two blocks of columns, several blocks of rows for some programs, nothing at all
@pytest.mark.parametrize("shape", [(1, 200), (3, 1100), (9, 300), (0, 8), (4, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, cols = shape[0], width(kind, shape[1])
    x, bias = rand(rows, cols), rand(cols, seed=1)
    for p in (0.0, 0.3):
        assert_parity(
            lambda x, bias, p=p: activate(x, bias, kind, p, KEY),
            lambda x, bias, p=p: activate_ref(x, bias, kind, p, KEY),
            [x, bias],
            dtype,
        )
    assert_parity(
        lambda x: activate(x, None, kind, 0.0, None), lambda x: activate_ref(x, None, kind, 0.0, None), [x], dtype
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_column(kind: str) -> None:
    """Triton compiles an argument that is 1 into the kernel."""
    args = [rand(50, width(kind, 1)), rand(width(kind, 1), seed=1)]
    got = results(lambda x, bias: activate(x, bias, kind, 0.3, KEY), args)
    exact = results(lambda x, bias: activate_ref(x, bias, kind, 0.3, KEY), args, torch.float64)
    assert all(error(g, e) < 1e-6 for g, e in zip(got, exact, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str) -> None:
    args = [rand(5, width(kind, 20)), rand(width(kind, 20), seed=1)]
    assert_parity(
        lambda x, bias: activate(x, bias, kind, 0.2, KEY),
        lambda x, bias: activate_ref(x, bias, kind, 0.2, KEY),
        args,
        torch.float16,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_bias_may_be_wider_than_the_activations(kind: str) -> None:
    """An fp32 bias is added without rounding it, and its gradient is not rounded to bf16 either."""
    x, bias = rand(40, width(kind, 6), dtype=torch.bfloat16), rand(width(kind, 6), seed=1) + 2**-12
    h, dx, dbias = results(lambda x, bias: activate(x, bias, kind, 0.0, None), [x, bias])
    exact = results(lambda x, bias: activate_ref(x, bias, kind, 0.0, None), [x, bias], torch.float64)
    assert (h.dtype, dx.dtype, dbias.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert error(h, exact[0]) < 2**-8 and error(dx, exact[1]) < 2**-8
    assert error(dbias, exact[2]) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_bias_gets_no_gradient(kind: str) -> None:
    x, bias = rand(5, width(kind, 6)).requires_grad_(), rand(width(kind, 6), seed=1)
    activate(x, bias, kind, 0.0, None).sum().backward()
    assert x.grad is not None and bias.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_bias_gradients_are_deterministic(kind: str) -> None:
    args = [rand(9, width(kind, 300)), rand(width(kind, 300), seed=1)]
    first, second = (results(lambda x, bias: activate(x, bias, kind, 0.1, KEY), args) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SMOOTH)
def test_backward_gives_the_bits_of_h_again(kind: str, dtype: torch.dtype) -> None:
    x, bias = rand(9, width(kind, 300), dtype=dtype, scale=3), rand(width(kind, 300), seed=1)
    for p, key in (0.0, None), (0.3, KEY):
        h = activate(x, bias, kind, p, key)
        with poisoned_memory():
            _, again, _ = family._activate_backward(torch.ones_like(h), x, bias, kind, p, key, True, False)
        assert torch.equal(h, again)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values(kind: str, dtype: torch.dtype) -> None:
    """Saturated gates: finite, and what fp64 gives; -0.0 counts as zero."""
    values = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 5.0, -5.0, 12.0, -12.0, 50.0, -50.0], device=DEVICE, dtype=dtype)
    x = values[None].repeat(2, 1) if kind in GATES else values[None]
    x = torch.cat([x, torch.full_like(x, 1.5)], 1) if kind in GATES else x
    got = results(lambda x: activate(x, None, kind, 0.0, None), [x])
    exact = results(lambda x: activate_ref(x, None, kind, 0.0, None), [x], torch.float64)
    for g, e in zip(got, exact, strict=True):
        assert bool(g.isfinite().all())
        torch.testing.assert_close(g.double(), e, rtol=2 * torch.finfo(dtype).eps, atol=4e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_hidden(kind: str) -> None:
    x = rand(1, width(kind, 4))
    x[0, 1] = float("nan")
    h, dx = results(lambda x: activate(x, None, kind, 0.0, None), [x])
    assert h.isnan().tolist() == [[False, True, False, False]]
    assert bool(dx[0, 1].isnan()) or kind == "relu"  # torch's relu lets the gradient pass there


@pytest.mark.parametrize("kind", SMOOTH)
def test_gates_are_as_good_as_fp32(kind: str) -> None:
    """Each h is within a few units in the last place of x: the polynomial and the sigmoids, over all of their range."""
    x = torch.linspace(-12, 12, 4001, device=DEVICE)[:, None]
    x = torch.cat([x, torch.ones_like(x)], 1) if kind in GATES else x
    h, exact = activate(x, None, kind, 0.0, None), activate_ref(x.double(), None, kind, 0.0, None)
    assert bool(((h - exact).abs() <= 4e-7 * x[:, :1].abs()).all())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_strided(kind: str) -> None:
    x, bias = rand(6, width(kind, 8)), rand(width(kind, 8), seed=1)

    def gradients(x: Tensor, transposed_dh: bool) -> list[Tensor]:
        h = activate(x.requires_grad_(), bias, kind, 0.3, KEY)
        dh = rand(*h.shape, seed=2)
        return [h.detach(), *torch.autograd.grad(h, x, dh.t().contiguous().t() if transposed_dh else dh)]

    expected = gradients(x, False)
    for other in strided(x.detach()), x.detach().t().contiguous().t():
        torch.testing.assert_close(gradients(other, True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_op(kind: str) -> None:
    x, bias = rand(3, width(kind, 10)), rand(width(kind, 10), seed=1)
    dh, want_h = rand(3, 10, seed=2), kind != "relu"
    kept = x if want_h else activate(x, bias, kind, 0.2, KEY)
    assert_op(family._activate.overload, (x.requires_grad_(), bias.requires_grad_(), kind, 0.2, KEY))
    assert_op(family._activate.overload, (rand(width(kind, 10), 3).t().requires_grad_(), None, kind, 0.0, None))
    assert_op(family._activate_backward.overload, (dh, kept.detach(), bias.detach(), kind, 0.2, KEY, want_h, True))
    assert_op(
        family._activate_backward.overload,
        (dh.bfloat16(), kept.detach().bfloat16(), None, kind, 0.0, None, False, False),
    )
    assert_compiles(lambda x, bias: activate(x, bias, kind, 0.2, KEY), [x.detach(), bias.detach()])


@pytest.mark.parametrize("kind", KINDS)
def test_reference_gradients(kind: str) -> None:
    x, bias = (t.double().requires_grad_() for t in (rand(3, width(kind, 4)), rand(width(kind, 4), seed=1)))
    assert torch.autograd.gradcheck(lambda x, bias: activate_ref(x, bias, kind, 0.3, KEY), (x, bias))


def test_shapes_are_checked() -> None:
    kinds = "gelu, gelu_tanh, gelu_quick, relu, silu, swiglu, geglu, geglu_erf"
    with pytest.raises(ValueError, match=f"one of {kinds}, not 'tanh'"):
        activate(rand(2, 4), None, "tanh", 0.0, None)
    with pytest.raises(ValueError, match=r"\[tokens, 2 \* width\], not \[2, 3\]"):
        activate(rand(2, 3), None, "swiglu", 0.0, None)
    with pytest.raises(ValueError, match=r"is \[4\], not \[3\]"):
        activate(rand(2, 4), rand(3), "gelu", 0.0, None)
    with pytest.raises(ValueError, match="needs a key"):
        activate(rand(2, 4), None, "gelu", 0.1, None)
    with pytest.raises(ValueError, match=r"below 1, not 1\.0"):
        activate(rand(2, 4), None, "gelu", 1.0, KEY)


Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def assert_backward(backward: Backward, kind: str) -> None:
    args = [rand(40, width(kind, 9)), rand(width(kind, 9), seed=1)]
    exact = results(lambda x, bias: activate_ref(x, bias, kind, 0.3, KEY), args, torch.float64)
    dh = rand(*exact[0].shape, seed=100)  # the gradient that `results` uses
    kept, want_h = (exact[0].float(), False) if kind == "relu" else (args[0], True)
    dx, h, dbias = backward(dh, kept, args[1], kind, 0.3, KEY, want_h, True)
    for got, expected in zip([h if want_h else kept, dx, dbias], exact, strict=True):
        assert error(got, expected) < 1e-6


def forget_the_bias(dh: Tensor, kept: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return family._activate_backward(dh, kept, torch.zeros_like(bias), *rest)


def take_another_mask(dh: Tensor, kept: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    kind, p, key, *wants = rest
    return family._activate_backward(dh, kept, bias, kind, p, key.flip(0), *wants)


def take_another_slope(dh: Tensor, kept: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    gated = [kind for kind in GATES if kind != rest[0]]
    other = gated[0] if rest[0] in GATES else "gelu" if rest[0] != "gelu" else "gelu_tanh"
    return family._activate_backward(dh, kept, bias, other, *rest[1:])


def lose_the_last_row(dh: Tensor, kept: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, h, _ = family._activate_backward(dh, kept, bias, *rest)
    return dx, h, dx[:-1].sum(0)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_bugs_would_be_seen(kind: str) -> None:
    assert_backward(family._activate_backward, kind)
    planted = [lose_the_last_row]
    if kind != "relu":
        planted += [forget_the_bias, take_another_mask, take_another_slope]
    for bug in planted:
        with pytest.raises(AssertionError):
            assert_backward(bug, kind)


@pytest.mark.parametrize("kind", GATES)
def test_forward_bugs_would_be_seen(kind: str) -> None:
    """A bias one column off; the mask of the key's halves exchanged; gate and value exchanged."""

    def reference(x: Tensor, bias: Tensor) -> Tensor:
        return activate_ref(x, bias, kind, 0.3, KEY)

    for planted in (
        lambda x, bias: activate(x, bias.roll(1), kind, 0.3, KEY),
        lambda x, bias: activate(x, bias, kind, 0.3, KEY.flip(0)),
        lambda x, bias: activate(x.roll(9, 1), bias.roll(9), kind, 0.3, KEY),
    ):
        with pytest.raises(AssertionError):
            assert_parity(planted, reference, [rand(4, 18), rand(18, seed=1)], torch.bfloat16)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """The last rows are right, with their own mask, and every row is in the bias gradient."""
    rows, cols = 2**19 + 1, 4100
    x = torch.full((rows, cols), 0.75, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = last = rand(3, cols, dtype=torch.bfloat16)
    bias = torch.zeros(cols, device=DEVICE, requires_grad=True)
    h = activate(x.requires_grad_(), bias, "gelu", 0.5, KEY)
    dx, dbias = torch.autograd.grad(h, (x, bias), torch.ones_like(h))
    row, col = torch.arange(rows - 3, rows, device=DEVICE)[:, None], torch.arange(cols, device=DEVICE)[None]
    exact = last.double().requires_grad_()
    h_exact = torch.where(hash_ref(KEY, row, col) >= 2**31, 2 * F.gelu(exact), 0.0)
    torch.testing.assert_close(h[-3:].double(), h_exact, rtol=1e-2, atol=1e-6)
    (dx_exact,) = torch.autograd.grad(h_exact.sum(), exact)
    torch.testing.assert_close(dx[-3:].double(), dx_exact, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(dbias, dx.sum(0, dtype=torch.float32), rtol=1e-2, atol=0)

    h = activate(x, bias, "relu", 0.0, None)
    dx, dbias = torch.autograd.grad(h, (x, bias), torch.ones_like(h))
    assert torch.equal(dbias, rows - 3 + (last > 0).sum(0, dtype=torch.float32))
    assert torch.equal(dx[-3:], (last > 0).bfloat16())
