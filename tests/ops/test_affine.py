"""The affine that takes a norm's place, and the standardization loss in its backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.ops import affine as family
from stretto.ops.affine import AXES, EPS, add_affine, affine_ref, standardization_loss
from stretto.ops.language import INTERPRET
from stretto.ops.residual import add_ref
from tests.ops.checks import DEVICE, DTYPES, assert_compiles, assert_op, assert_parity, error, rand, results, strided

KEY = torch.tensor([0x0FEDCBA987654321, 99], device=DEVICE)
FACTOR = torch.tensor(0.7, device=DEVICE)
STRIDE = 3
Call = Callable[..., Any]
in_bf16 = pytest.mark.skipif(INTERPRET, reason="Triton's interpreter rounds to bf16 towards zero, so y is off one way")


def tensors(rows: int, cols: int) -> list[Tensor]:
    """branch, residual, branch_bias, weight, bias"""
    activations = [rand(rows, cols, seed=seed) for seed in (1, 2)]
    scale = rand(cols, seed=4).abs() + 0.5  # channels of little variance would magnify rounding
    return [*activations, rand(cols, seed=3), scale, rand(cols, seed=5)]


def add_affine_ref(
    branch: Tensor,
    residual: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    key: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and stream, in steps that autograd can follow."""
    stream = add_ref(branch, residual, branch_bias, p, key)
    return affine_ref(stream, weight, bias).to(stream.dtype), stream


def weights(rows: int) -> Tensor:
    """Of every third row, but for one."""
    counts = (torch.arange(rows, device=DEVICE) % STRIDE == 0) & (torch.arange(rows, device=DEVICE) != 3)
    return counts / counts.sum().clamp(min=1)


def fused(axis: str | None, p: float, post: bool = False, from_output: bool = False) -> Call:
    """`add_affine` of the five tensors; without an axis nothing is pulled."""

    def run(branch: Tensor, residual: Tensor, branch_bias: Tensor, weight: Tensor, bias: Tensor) -> Any:
        pull = {} if axis is None else {"rows": weights(len(branch)), "factor": FACTOR, "stride": STRIDE, "axis": axis}
        options = {"post": post, "from_output": from_output}
        return add_affine(branch, residual, branch_bias, weight, bias, p, KEY if p else None, **options, **pull)

    return run


def plain(axis: str | None, p: float) -> Call:
    """The same by autograd. Its loss goes into y, whose value it leaves alone."""

    def run(*args: Tensor) -> tuple[Tensor, Tensor]:
        y, stream = add_affine_ref(*args, p, KEY if p else None)
        if axis is not None:
            rows = weights(len(y)).to(torch.promote_types(y.dtype, torch.float32))
            y = Join.apply(y, standardization_loss(y, rows, axis))
        return y, stream

    return run


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, FACTOR.to(torch.promote_types(dy.dtype, torch.float32))


@pytest.mark.parametrize("axis", AXES)
def test_the_formula(axis: str) -> None:
    """Mean 1 and variance 4 in each token and each channel: 1/2 (1 + 4 - ln 4 - 1) per channel."""
    y = torch.tensor([[3.0, -1.0], [-1.0, 3.0]], dtype=torch.float64).repeat(4, 3)
    rows = torch.full((8,), 1 / 8, dtype=torch.float64)
    kl = standardization_loss(y, rows, axis, eps=0.0) / y.shape[1]
    assert float(kl) == pytest.approx(0.5 * (4 - math.log(4)), abs=1e-12) == pytest.approx(1.3068528194400546)
    assert abs(float(standardization_loss((y - 1) / 2, rows, axis, eps=0.0))) < 1e-12
    for seed in range(100):
        value = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * (seed + 1) / 10
        assert float(standardization_loss(value, rows, axis, eps=0.0)) >= 0


@pytest.mark.parametrize("axis", AXES)
def test_the_gradient_is_that_of_the_formula(axis: str) -> None:
    y = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rows = weights(9).cpu().double()
    assert torch.autograd.gradcheck(lambda y: standardization_loss(y, rows, axis), y)
    (by_autograd,) = torch.autograd.grad(standardization_loss(y, rows, axis), y)
    mean, variance = family.moments_ref(y.detach(), rows, axis)
    stats = torch.empty(2, 0) if axis == "token" else torch.stack([mean.expand(5), variance.expand(5)])
    torch.testing.assert_close(family.pull_ref(y.detach(), rows, stats), by_autograd, atol=1e-12, rtol=0)
    wrong = family.pull_ref(y.detach(), rows, stats + 1 if stats.numel() else torch.ones(2, 5))
    assert float((wrong - by_autograd).abs().max()) > 1e-3


def test_twice_the_same_tokens_is_the_same_loss_and_half_the_gradient_each() -> None:
    y = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for axis in AXES:
        once, twice = (t.clone().requires_grad_() for t in (y, torch.cat([y, y])))
        losses = [standardization_loss(t, torch.full((len(t),), 1 / len(t)).double(), axis) for t in (once, twice)]
        first, second = (torch.autograd.grad(loss, t)[0] for loss, t in zip(losses, (once, twice), strict=True))
        torch.testing.assert_close(losses[1], losses[0], atol=1e-7, rtol=0)
        torch.testing.assert_close(second[:6], first / 2, atol=1e-7, rtol=0)


@pytest.mark.skipif(INTERPRET, reason="hundreds of steps")
def test_the_pull_alone_standardises_a_linear_layer() -> None:
    """Nothing but the backward pass of the affine teaches it."""
    random = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(256, 12, generator=random) + 1).double()
    layer = nn.Linear(12, 6).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.02)
    rows, one = torch.full((256,), 1 / 256), torch.ones(())
    for _ in range(400):
        optimizer.zero_grad()
        y, _ = add_affine(None, layer(x), None, None, None, 0.0, None, rows=rows, factor=one, axis="channel")
        (0.0 * y).sum().backward()
        optimizer.step()
    y = layer(x).detach()
    assert float(y.mean(0).abs().max()) < 1e-6 and float((y.var(0, correction=0) + EPS - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "p"), [((1, 33), 0.3), ((7, 257), 0.3), ((5, 1100), 0.0), ((0, 8), 0.3)])
@pytest.mark.parametrize("axis", [*AXES, None])
def test_parity(axis: str | None, shape: tuple[int, int], p: float, dtype: torch.dtype) -> None:
    if INTERPRET and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bf16 towards zero, which shifts all sums one way")
    if shape[0] and axis in ("channel", "layer"):
        shape = (
            6 * shape[0] + 20,
            shape[1],
        )  # the variance of a few tokens may be near 0, where 1 / x magnifies rounding
    assert_parity(fused(axis, p), plain(axis, p), tensors(*shape), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=in_bf16)])
@pytest.mark.parametrize("axis", [*AXES, None])
def test_from_output(axis: str | None, dtype: torch.dtype) -> None:
    for shape, p in (((31, 257), 0.3), ((26, 1100), 0.0), ((0, 8), 0.3)):
        args = tensors(*shape)
        args[4] = args[4] / 8  # a bias as large as the weight doubles the rounding
        assert_parity(fused(axis, p, from_output=True), plain(axis, p), args, dtype)
        for left_out in (3, 4):
            given = [None if i == left_out else arg for i, arg in enumerate(args)]
            assert_parity(fused(axis, p, from_output=True), plain(axis, p), given, dtype)

    def twice(*args: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = plain("token", 0.3)(*args)
        return y.clone(), y.clone()

    args = tensors(7, 40)
    args[4] = args[4] / 8
    assert_parity(fused("token", 0.3, post=True, from_output=True), twice, args, dtype)


def test_lost_channels() -> None:
    """A weight of 0 learns nothing, and every other gradient is what it is from the stream."""
    args = tensors(7, 40)
    args[3][5] = 0.0
    before, after = (results(fused("token", 0.3, from_output=from_output), args) for from_output in (False, True))
    assert after[5][5] == 0 != before[5][5]
    before[5][5] = 0.0
    for got, expected in zip(after, before, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_from_output_keeps_y() -> None:
    args = [t.requires_grad_() for t in tensors(6, 40)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, _ = fused(None, 0.0, from_output=True)(*args)
    assert [t.shape for t in kept] == [(6, 40), (2, 0), (40,), (40,)] and kept[0].data_ptr() == y.data_ptr()


@pytest.mark.parametrize("left_out", ["branch_bias", "weight", "bias", "stream", "y"])
def test_what_may_be_left_out(left_out: str) -> None:
    names = ["branch", "residual", "branch_bias", "weight", "bias"]

    def without(run: Call) -> Call:
        def call(*args: Tensor) -> Any:
            both = run(*(None if name == left_out else arg for name, arg in zip(names, args, strict=True)))
            return both[0] if left_out == "stream" else both[1] if left_out == "y" else both

        return call

    for p in (0.0, 0.5):
        assert_parity(without(fused("token", p)), without(plain("token", p)), tensors(7, 40), torch.float32)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
def test_post_norm_gets_y_twice() -> None:
    def twice(*args: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = plain("token", 0.3)(*args)
        return y.clone(), y.clone()

    assert_parity(fused("token", 0.3, post=True), twice, tensors(7, 40), torch.float32)
    assert_compiles(fused("token", 0.3, post=True), tensors(7, 20))


def test_without_a_branch_the_residual_is_the_stream() -> None:
    _, x, _, weight, bias = tensors(7, 40)
    y, stream = add_affine(None, x, None, weight, bias, 0.5, None)
    assert stream is x
    torch.testing.assert_close(y, x * weight + bias)


@pytest.mark.parametrize("axis", AXES)
def test_it_compiles(axis: str) -> None:
    for from_output in (False, True):
        assert_compiles(fused(axis, 0.3, from_output=from_output), tensors(7, 20))


@pytest.mark.parametrize("axis", AXES)
def test_ops(axis: str) -> None:
    branch, residual, *rest = tensors(7, 20)
    leaves = [t.requires_grad_() for t in (strided(branch), residual, *rest)]
    pull = (weights(7), FACTOR, STRIDE, axis)
    for from_output in (False, True):
        assert_op(family._add_affine.definition, (*leaves, 0.3, KEY, False, from_output, *pull))
    assert_op(family._add_affine.definition, (None, residual, None, *leaves[3:], 0.0, None, False, True, *pull))


def test_a_row_that_does_not_count_is_not_pulled() -> None:
    args = tensors(7, 20)
    pulled, free = (results(fused(axis, 0.0), args)[3] for axis in ("token", None))  # the gradient of the residual
    differs = (pulled - free).abs().amax(1) > 1e-6
    assert differs.tolist() == (weights(7) > 0).tolist() == [True, False, False, False, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.ones(3, device=DEVICE)}, "rows"),
        ({"rows": torch.ones(4, device=DEVICE), "factor": FACTOR}, "rows"),
        ({"axis": "batch"}, "axis"),
        ({"p": 0.5}, "key"),
        ({"branch": rand(7, 19)}, "branch and residual"),
        ({"weight": rand(19)}, "parameters"),
        ({"branch": None}, "branch_bias"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], message: str) -> None:
    names = ["branch", "residual", "branch_bias", "weight", "bias"]
    arguments = dict(zip(names, tensors(7, 20), strict=True)) | {"p": 0.0, "key": None} | change
    with pytest.raises(ValueError, match=message):
        add_affine(**arguments)


def test_a_backward_that_forgets_the_bias_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = family._affine_backward
    monkeypatch.setattr(family, "_affine_backward", lambda *args: right(*args[:5], None, *args[6:]))
    with pytest.raises(AssertionError, match="result 5"):  # the gradient of the weight
        assert_parity(fused("token", 0.3, from_output=True), plain("token", 0.3), tensors(7, 40), torch.float32)


def test_a_planted_error_shows() -> None:
    """The mean's part of the gradient left out."""
    y, rows = rand(7, 20) + 1, weights(7)
    stats = torch.empty(2, 0, device=DEVICE)
    right = family.pull_ref(y, rows, stats)
    planted = right - rows[:, None] * y.mean(1, keepdim=True)
    assert error(planted, right) > 1e-2
