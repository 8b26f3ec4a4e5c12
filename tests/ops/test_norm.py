"""LayerNorm and RMSNorm with bias, dropout and residual add in front: forward, every gradient, and unused results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import norm as family
from stretto.ops.dropout import dropout, hash_ref
from stretto.ops.language import INTERPRET
from stretto.ops.norm import MAX_WIDTH, add_norm, norm, norm_ref
from stretto.ops.residual import LOST_RATIO, LOST_SIZE, add_ref, can_restore, find_tokens
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    assert_compiles,
    assert_op,
    assert_parity,
    error,
    rand,
    results,
    strided,
)

KEY = torch.tensor([0x0FEDCBA987654321, 99], device=DEVICE)
EPS = 1e-5
ALL = (None, None, None)  # no scale, and every token has a row
Call = Callable[..., Any]
lean = partial(add_norm, from_output=True)
in_bf16 = pytest.mark.skipif(INTERPRET, reason="Triton's interpreter rounds to bf16 towards zero, so y is off one way")


def tensors(rows: int, cols: int) -> list[Tensor]:
    """branch, residual, branch_bias, weight, norm_bias"""
    activations = [rand(rows, cols, seed=seed) for seed in (1, 2)]
    return [*activations, *(rand(cols, seed=seed) for seed in (3, 4, 5))]


def near_one(rows: int, cols: int) -> list[Tensor]:
    """The same with a weight of 1 +- 0.1 and a norm_bias of +- 0.1."""
    *rest, weight, shift = tensors(rows, cols)
    return [*rest, (1 + 0.1 * weight).bfloat16().float(), (0.1 * shift).bfloat16().float()]


def add_norm_ref(
    branch: Tensor,
    residual: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    key: Tensor | None,
    scale: Tensor | None = None,
    branch_at: Tensor | None = None,
    y_at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and stream, in steps that autograd can follow."""
    stream = add_ref(branch, residual, branch_bias, p, key, scale, branch_at)
    return norm_ref(stream if y_at is None else stream[find_tokens(y_at)], weight, norm_bias, eps, rms), stream


def call(function: Call, rms: bool, p: float, bias: bool = True, norm_bias: bool = True) -> Call:
    """`function` of the five tensors."""

    def run(branch: Tensor, residual: Tensor, branch_bias: Tensor, weight: Tensor, shift: Tensor) -> Any:
        key = KEY if p > 0 else None
        return function(
            branch, residual, branch_bias if bias else None, weight, shift if norm_bias else None, EPS, rms, p, key
        )

    return run


def only(run: Call, which: int) -> Call:
    """One of its two results."""
    return lambda *args: run(*args)[which]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "p"), [((1, 1), 0.3), ((3, 257), 0.3), ((5, 1100), 0.3), ((33, 768), 0.0), ((0, 8), 0.3)]
)
@pytest.mark.parametrize("rms", [False, True])
def test_parity(rms: bool, shape: tuple[int, int], p: float, dtype: torch.dtype) -> None:
    if INTERPRET and shape == (1, 1) and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bf16 towards zero, where plain torch happens to be exact")
    assert_parity(call(add_norm, rms, p), call(add_norm_ref, rms, p), tensors(*shape), dtype)


@pytest.mark.parametrize("norm_bias", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("rms", [False, True])
def test_what_may_be_left_out(rms: bool, p: float, bias: bool, norm_bias: bool) -> None:
    fused, plain = (call(function, rms, p, bias, norm_bias) for function in (add_norm, add_norm_ref))
    assert_parity(fused, plain, tensors(5, 40), torch.float32)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("which", [0, 1])
def test_one_result_may_stay_unused(which: int, p: float) -> None:
    for rms in (False, True):
        fused, plain = (only(call(function, rms, p), which) for function in (add_norm, add_norm_ref))
        assert_parity(fused, plain, tensors(5, 40), torch.float32)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own doing
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_post_norm_gets_y_twice(used: tuple[int, ...]) -> None:
    """Each y with a gradient of its own."""

    def fused(*args: Tensor) -> tuple[Tensor, ...]:
        both = add_norm(*args, EPS, False, 0.3, KEY, True)
        return tuple(both[i] for i in used)

    def plain(*args: Tensor) -> tuple[Tensor, ...]:
        y, _ = add_norm_ref(*args, EPS, False, 0.3, KEY)
        return tuple(y.clone() for _ in used)

    for dtype in DTYPES:
        assert_parity(fused, plain, tensors(5, 40), dtype)
    if len(used) == 2:
        assert_compiles(fused, tensors(3, 20))


def places(tokens: list[int] | None) -> Tensor | None:
    """The row of each of 7 tokens; None: all have one."""
    if tokens is None:
        return None
    at = torch.full((7,), -1, dtype=torch.int32, device=DEVICE)
    at[tokens] = torch.arange(len(tokens), dtype=torch.int32, device=DEVICE)
    return at


@pytest.mark.parametrize(
    ("branch", "y"), [(None, [0, 2, 6]), ([1, 4], None), ([1, 4, 5], [1, 4, 5]), ([0, 3, 6], [2, 3, 4]), ([2, 5], [0])]
)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_branches_and_results_of_some_tokens(branch: list[int] | None, y: list[int] | None, p: float) -> None:
    some = {"scale": torch.tensor(1.7, device=DEVICE), "branch_at": places(branch), "y_at": places(y)}
    given = tensors(7, 40)
    given[0] = given[0] if branch is None else given[0][: len(branch)]
    for rms in (False, True):
        fused = call(partial(add_norm, **some, y_rows=0 if y is None else len(y)), rms, p, norm_bias=not rms)
        plain = call(partial(add_norm_ref, **some), rms, p, norm_bias=not rms)
        for dtype in DTYPES:
            assert_parity(fused, plain, given, dtype)
        for which in (0, 1):
            assert_parity(only(fused, which), only(plain, which), given, torch.float32)
        if branch == [0, 3, 6] and p > 0:
            assert_compiles(fused, given)
    if y is not None:  # nothing is added yet
        x, weight, shift = given[1], *given[3:]
        got, stream = add_norm(None, x, None, weight, shift, EPS, False, p, KEY, y_at=some["y_at"], y_rows=len(y))
        assert stream is x
        torch.testing.assert_close(got, norm(x[y], weight, shift, EPS, False))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=in_bf16)])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("rms", [False, True])
def test_from_output(rms: bool, p: float, dtype: torch.dtype) -> None:
    for shape in ((1, 33), (3, 257), (5, 1100), (33, 768), (0, 8)):
        assert_parity(call(lean, rms, p), call(add_norm_ref, rms, p), near_one(*shape), dtype)
    args = near_one(7, 40)
    for bias, shift in ((True, False), (False, True)):
        assert_parity(call(lean, rms, p, bias, shift), call(add_norm_ref, rms, p, bias, shift), args, dtype)
    for which in (0, 1):
        assert_parity(only(call(lean, rms, p), which), only(call(add_norm_ref, rms, p), which), args, dtype)
    twice = call(lambda *given: (add_norm_ref(*given)[0].clone(), add_norm_ref(*given)[0].clone()), rms, p)
    assert_parity(call(partial(lean, post=True), rms, p), twice, args, dtype)
    alone = [args[i] for i in (1, 3, 4)]
    assert_parity(lambda *a: norm(*a, EPS, rms, True), lambda *a: norm_ref(*a, EPS, rms), alone, dtype)
    for branch, y in (([0, 3, 6], [2, 3, 4]), ([2, 5], [0]), ([1], [])):
        some = {"scale": torch.tensor(1.7, device=DEVICE), "branch_at": places(branch), "y_at": places(y)}
        given = [args[0][: len(branch)], *args[1:]]
        fused = call(partial(lean, **some, y_rows=len(y)), rms, p)
        assert_parity(fused, call(partial(add_norm_ref, **some), rms, p), given, dtype)


@in_bf16
@pytest.mark.parametrize(("spread", "shift", "bound"), [(0.1, 0.1, 3e-3), (0.4, 0.5, 6e-3)])
def test_what_from_output_costs_in_bf16(spread: float, shift: float, bound: float) -> None:
    """dx has the error of its own rounding, as it has from the input; dweight, in fp32, that of the rounding of y."""
    x, dy = (rand(512, 1024, seed=seed) for seed in (1, 2))
    weight = (1 + spread * rand(1024, seed=4)).clamp(min=0.05)
    norm_bias = shift * rand(1024, seed=5)

    def gradients(dtype: torch.dtype, function: Call, wide: torch.dtype = torch.float32) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in (x.to(dtype), weight.to(wide), norm_bias.to(wide))]
        return list(torch.autograd.grad(function(*leaves), leaves, dy.to(dtype)))

    from_input, from_output = (partial(norm, eps=EPS, rms=False, from_output=given) for given in (False, True))
    exact = gradients(torch.float64, lambda *args: F.layer_norm(args[0], (1024,), *args[1:], EPS), torch.float64)
    before, after = (gradients(torch.bfloat16, way) for way in (from_input, from_output))
    assert error(after[0], exact[0]) <= min(1.05 * error(before[0], exact[0]), 1.75e-3)
    assert error(before[1], exact[1]) < 1e-6 < error(after[1], exact[1]) <= bound
    assert torch.equal(before[2], after[2])
    assert error(gradients(torch.float32, from_output)[0], exact[0]) < 1e-6


@pytest.mark.parametrize("rms", [False, True])
def test_lost_channels(rms: bool) -> None:
    """A channel whose weight is 0 or tiny learns no weight, spoils nothing, and leaves the others' gradients right."""
    args = near_one(9, 40)
    weight, shift = args[3:]
    weight[3], weight[7], weight[11] = 0.0, LOST_RATIO * shift[7], LOST_SIZE / 2
    shift[11] = 0.0
    lost = [3, 7, 11]
    kept = [i for i in range(40) if i not in lost]
    names = ("y", "stream", "branch", "residual", "branch_bias", "weight", "norm_bias")
    before, after = (dict(zip(names, results(call(f, rms, 0.3), args), strict=True)) for f in (add_norm, lean))
    assert not after["weight"][lost].any() and before["weight"][lost].all()
    for name in names:
        assert after[name].isfinite().all()
        same = slice(None) if name in ("y", "stream", "norm_bias") else kept
        # through mean(g * xhat) the channel of the second weight, 2^-10 of its bias, has a share in all others
        torch.testing.assert_close(after[name][..., same], before[name][..., same], rtol=2e-3, atol=2e-3)
    weight[7] = 1.01 * LOST_RATIO * shift[7]  # not lost
    torch.testing.assert_close(
        results(call(lean, rms, 0.0), args)[5][7], results(call(add_norm, rms, 0.0), args)[5][7], rtol=1e-3, atol=1e-3
    )


def test_can_restore() -> None:
    weight, bias = 1 + 0.1 * rand(40), rand(40, seed=1)
    bias[0] = 16 * weight[0]
    for given in (
        (weight, None),
        (weight, bias),
        (-weight, bias),
        (weight.bfloat16(), bias / 2),
        (bias * 0 + 1e-3, None),
    ):
        good = can_restore(*given)
        assert good.shape == () and good.dtype == torch.bool and good
    weak, strong, zero = weight.clone(), bias.clone(), weight.clone()
    weak[3], strong[3], zero[3] = 9e-4, -16.1 * weight[3], 0.0
    for given in ((weak, None), (weak, bias * 0), (weight, strong), (zero, None), (weight * float("nan"), None)):
        assert not can_restore(*given)


@pytest.mark.parametrize("rms", [False, True])
def test_norm_alone(rms: bool) -> None:
    args = [tensors(6, 40)[i] for i in (0, 3, 4)]
    for dtype in (*DTYPES, torch.float16):
        assert_parity(lambda *a: norm(*a, EPS, rms), lambda *a: norm_ref(*a, EPS, rms), args, dtype)
    x, weight, shift = args
    y, stream = add_norm(None, x, None, weight, shift, EPS, rms, 0.5, KEY)
    assert stream is x and torch.equal(y, norm(x, weight, shift, EPS, rms))


def test_the_reference_is_torchs_norm() -> None:
    x, _, _, weight, shift = (t.double() for t in tensors(5, 33))
    torch.testing.assert_close(norm_ref(x, weight, shift, EPS, False), F.layer_norm(x, (33,), weight, shift, EPS))
    torch.testing.assert_close(norm_ref(x, weight, None, EPS, True), F.rms_norm(x, (33,), weight, EPS))
    for rms in (False, True):
        args = [t.double().requires_grad_() for t in tensors(3, 5)]
        assert torch.autograd.gradcheck(call(add_norm_ref, rms, 0.3), args)


@pytest.mark.parametrize("rms", [False, True])
def test_parameters_may_be_wider_than_activations(rms: bool) -> None:
    """fp32 parameters over bf16 activations, and gradients in the dtype of what they belong to."""

    def run(function: Call) -> Call:
        return lambda branch, residual, *parameters: call(function, rms, 0.3)(
            branch, residual, *(t.float() if t.dtype == torch.bfloat16 else t for t in parameters)
        )

    args = tensors(9, 40)
    assert_parity(run(add_norm), run(add_norm_ref), args, torch.bfloat16)
    leaves = [t.to(d).requires_grad_() for t, d in zip(args, [torch.bfloat16] * 3 + [torch.float32] * 2, strict=True)]
    y, stream = call(add_norm, rms, 0.3)(*leaves)
    assert y.dtype == stream.dtype == torch.bfloat16
    torch.autograd.backward([y, stream], [y.detach(), stream.detach()])
    assert [t.grad.dtype for t in leaves if t.grad is not None] == [t.dtype for t in leaves]


def test_frozen_parameters_cost_no_sums() -> None:
    """Every subset of the parameters in training gets the gradients it gets when all are."""
    args = tensors(5, 24)
    run = only(call(add_norm, False, 0.3), 0)
    every = results(run, args)[1:]
    for trained in range(8):
        leaves = [t.clone().requires_grad_(i < 2 or bool(trained >> i - 2 & 1)) for i, t in enumerate(args)]
        run(*leaves).backward(rand(5, 24, seed=100))
        for leaf, gradient in zip(leaves, every, strict=True):
            assert leaf.requires_grad == (leaf.grad is not None)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, gradient)


def test_rows_may_be_strided() -> None:
    branch, residual, *parameters = tensors(5, 33)
    run = call(add_norm, False, 0.3)
    expected = results(run, [branch, residual, *parameters])

    def seen_through(view: Call) -> list[Tensor]:
        """Arguments and output gradients as `view` lays them out."""
        return results(
            lambda b, r, *ps: tuple(view(t) for t in run(view(b), view(r), *ps)), [branch, residual, *parameters]
        )

    for view in (strided, lambda t: t.t().contiguous().t()):
        for got, exact in zip(seen_through(view), expected, strict=True):
            torch.testing.assert_close(got, exact)
    spread = [torch.stack([t, t], 1)[:, 0] for t in parameters]
    torch.testing.assert_close(run(branch, residual, *spread)[0], expected[0])


def test_gradients_may_be_expanded() -> None:
    """The gradient of a sum has stride 0."""
    args = [t.requires_grad_() for t in tensors(5, 33)]
    got, plain = (
        torch.autograd.grad(sum(t.sum() for t in call(f, False, 0.3)(*args)), args) for f in (add_norm, add_norm_ref)
    )
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rms", "p"), [(False, 0.2), (True, 0.0)])
def test_op(rms: bool, p: float) -> None:
    key, kind = KEY if p > 0 else None, (EPS, rms)
    branch, residual, branch_bias, weight, shift = (t.requires_grad_() for t in tensors(3, 20))
    for post, from_output in ((False, False), (True, False), (True, True)):
        given = (branch, residual, branch_bias, weight, shift, p, key, post, from_output)
        assert_op(family._add_norm.overload, (*given, *kind, *ALL, 3))
    turned = [rand(20, 3, seed=seed).t().requires_grad_() for seed in (1, 2)]
    assert_op(family._add_norm.overload, (*turned, None, weight, None, p, key, *(False,) * 2, *kind, *ALL, 3))
    for from_output in (False, True):
        alone = (None, residual, None, weight, shift, 0.0, None, False, from_output)
        assert_op(family._add_norm.overload, (*alone, *kind, *ALL, 3))
    first, second = (of for of in (places([0, 2]), places([1])) if of is not None)
    some = (torch.tensor(2.0, device=DEVICE), first[:3], second[:3])
    for from_output in (False, True):
        parts = (branch.detach()[:2].requires_grad_(), residual, branch_bias, weight, shift, p, key, False)
        assert_op(family._add_norm.overload, (*parts, from_output, *kind, *some, 1))
    _, stream, stats = (
        t.detach() for t in family._add_norm(*turned, None, weight, None, p, key, *(False,) * 2, *kind, *ALL, 3)
    )
    saved, dtypes = (stream, stats, weight.detach(), None, key), (torch.float32, torch.bfloat16, None)
    for dy, dstream in ((stream, stream.t().contiguous().t()), (stream, None), (None, stream)):
        assert_op(
            family._norm_backward.overload,
            (
                dy,
                dstream,
                *saved,
                p,
                False,
                False,
                3,
                3 if p else None,
                *(dtypes if dy is not None else (None,) * 3),
                *ALL,
                rms,
            ),
        )


def test_compiles() -> None:
    for p in (0.0, 0.2):
        assert_compiles(call(add_norm, False, p), tensors(3, 20))
        assert_compiles(call(lean, False, p), tensors(3, 20))
    assert_compiles(only(call(add_norm, True, 0.2), 0), tensors(3, 20))
    assert_compiles(lambda x, weight: norm(x, weight, None, EPS, True), [rand(3, 20), rand(20)])


def test_keeps_one_activation_for_backward() -> None:
    """The stream; statistics; and what exists anyway: the weight and the key."""
    kept: list[Tensor] = []
    args = [t.requires_grad_() for t in tensors(6, 40)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, stream = call(add_norm, False, 0.3)(*args)
    assert [(t.shape, t.dtype) for t in kept] == [
        ((6, 40), torch.float32),
        ((2, 6), torch.float32),
        ((40,), torch.float32),
        ((2,), torch.int64),
    ]
    assert kept[0].data_ptr() == stream.data_ptr()


@pytest.mark.parametrize("rms", [False, True])
def test_from_output_keeps_what_the_next_product_keeps(rms: bool) -> None:
    """Besides that, rstd."""
    args = [t.requires_grad_() for t in tensors(6, 40)]
    matrix = rand(8, 40).requires_grad_()

    def count(function: Call) -> int:
        """Bytes of distinct memory, but for the parameters."""
        known = {t.data_ptr() for t in (*args, matrix)}
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.data_ptr(), t.untyped_storage().nbytes()) and t, lambda t: t
        ):
            function(*args)
        return sum(size for place, size in kept.items() if place not in known)

    y_bytes = 6 * 40 * 4
    for function, size in ((lean, y_bytes + 6 * 4), (add_norm, 2 * y_bytes + (1 if rms else 2) * 6 * 4)):
        assert count(lambda *a, f=function: F.linear(call(f, rms, 0.0)(*a)[0], matrix)) == size


def test_constant_rows() -> None:
    """Variance 0: y is the bias, and the gradients are finite."""
    args = tensors(4, 32)
    args[0], args[1], args[2] = torch.zeros_like(args[0]), torch.full_like(args[1], 3.0), torch.zeros_like(args[2])
    fused = call(add_norm, False, 0.0)
    torch.testing.assert_close(fused(*args)[0], args[4].expand(4, 32))
    assert_parity(fused, call(add_norm_ref, False, 0.0), args, torch.float32)


def test_large_mean() -> None:
    """A thousand times the deviation: what is left of the variance by E[x^2] - mean^2 does not pass."""
    args = tensors(9, 257)
    args[1] = args[1] + 1000.0
    reference = call(add_norm_ref, False, 0.3)
    assert_parity(call(add_norm, False, 0.3), reference, args, torch.float32)

    def one_pass(*args: Any) -> tuple[Tensor, Tensor]:
        _, stream = add_norm_ref(*args)
        weight, shift, eps = args[3:6]
        mean = stream.mean(1, keepdim=True)
        variance = stream.square().mean(1, keepdim=True) - mean.square()
        return (stream - mean) * (variance + eps).rsqrt() * weight + shift, stream

    with pytest.raises(AssertionError, match="plain torch"):
        assert_parity(call(one_pass, False, 0.3), reference, args, torch.float32)


def test_a_weight_of_zero_learns() -> None:
    args = tensors(7, 40)
    args[3] = torch.zeros_like(args[3])
    fused = call(add_norm, False, 0.3)
    assert_parity(fused, call(add_norm_ref, False, 0.3), args, torch.float32)
    dweight = results(fused, args)[2 + 3]
    assert (dweight != 0).all()


def test_widest_row() -> None:
    args = [rand(2, MAX_WIDTH, seed=1), rand(MAX_WIDTH, seed=4)]
    assert_parity(lambda *a: norm(*a, None, EPS, False), lambda *a: norm_ref(*a, None, EPS, False), args, torch.float32)


def test_arguments_are_checked() -> None:
    branch, residual, branch_bias, weight, shift = tensors(3, 8)
    with pytest.raises(ValueError, match=r"one shape and dtype, not \[3, 8\] torch.bfloat16"):
        add_norm(branch.bfloat16(), residual, None, weight, None, EPS, False, 0.0, None)
    with pytest.raises(ValueError, match=r"one shape"):
        add_norm(branch[:2], residual, None, weight, None, EPS, False, 0.0, None)
    with pytest.raises(ValueError, match=r"key \[2\] with p > 0, not p = 0.1"):
        add_norm(branch, residual, None, weight, None, EPS, False, 0.1, None)
    with pytest.raises(ValueError, match=r"0 <= p < 1"):
        add_norm(branch, residual, None, weight, None, EPS, False, 1.0, KEY)
    with pytest.raises(ValueError, match=r"only with a branch"):
        add_norm(None, residual, branch_bias, weight, shift, EPS, False, 0.0, None)
    with pytest.raises(ValueError, match=r"parameters \[8\], not \[7\]"):
        norm(residual, weight[1:], None, EPS, False)
    with pytest.raises(ValueError, match=f"1 to {MAX_WIDTH} channels"):
        norm(torch.empty(1, MAX_WIDTH + 1), torch.empty(MAX_WIDTH + 1), None, EPS, False)
    with pytest.raises(ValueError, match=r"\[tokens, channels\]"):
        norm(residual[None], weight, None, EPS, False)


def drop_dstream(dy: Tensor, dstream: Tensor, *rest: Any) -> tuple[Any, ...]:
    return dy, None, *rest


def drop_other_elements(*args: Any) -> tuple[Any, ...]:
    key = args[6]
    return *args[:6], key.flip(0), *args[7:]


def ignore_the_mean(*args: Any) -> tuple[Any, ...]:
    return *args[:-1], True  # as an RMSNorm does


@pytest.mark.parametrize("bug", [drop_dstream, drop_other_elements, ignore_the_mean])
def test_a_wrong_backward_would_be_seen(bug: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    right = family._norm_backward
    monkeypatch.setattr(family, "_norm_backward", lambda *args: right(*bug(*args)))
    with pytest.raises(AssertionError, match="result 2"):  # the first gradient; the outputs are right
        assert_parity(call(add_norm, False, 0.3), call(add_norm_ref, False, 0.3), tensors(8, 8), torch.bfloat16)


def forget_the_bias(*args: Any) -> tuple[Any, ...]:
    return *args[:5], None, *args[6:]


def take_y_for_the_stream(*args: Any) -> tuple[Any, ...]:
    *first, from_output = args[:10]
    assert from_output
    return *first[:3], torch.cat([args[3], torch.zeros_like(args[3])]), *first[4:], False, *args[10:]


@pytest.mark.parametrize("bug", [drop_dstream, forget_the_bias, take_y_for_the_stream])
def test_a_wrong_backward_from_the_output_would_be_seen(bug: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    right = family._norm_backward
    monkeypatch.setattr(family, "_norm_backward", lambda *args: right(*bug(*args)))
    with pytest.raises(AssertionError, match="result 2"):
        assert_parity(call(lean, False, 0.3), call(add_norm_ref, False, 0.3), near_one(8, 8), torch.float32)


def test_a_transposed_mask_would_be_seen() -> None:
    def wrong(branch: Tensor, residual: Tensor, _: None, *options: Any) -> tuple[Tensor, Tensor]:
        *rest, p, key = options
        return add_norm(dropout(branch.t(), p, key).t(), residual, None, *rest, 0.0, None)

    with pytest.raises(AssertionError, match="result 0"):
        assert_parity(
            call(wrong, False, 0.3, bias=False),
            call(add_norm_ref, False, 0.3, bias=False),
            tensors(8, 8),
            torch.bfloat16,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [64, 768, 1000, 1024, 2048, 4096, 8192, MAX_WIDTH])
@pytest.mark.parametrize("rms", [False, True])
def test_large_shapes(rms: bool, cols: int, dtype: torch.dtype) -> None:
    """More rows than programs, at every width that has a launch of its own; and the same bits each time."""
    for function, args in ((add_norm, tensors(1201, cols)), (lean, near_one(1201, cols))):
        fused = call(function, rms, 0.1)
        assert_parity(fused, call(add_norm_ref, rms, 0.1), args, dtype)
        for first, second in zip(results(fused, args, dtype), results(fused, args, dtype), strict=True):
            assert torch.equal(first, second)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, cols, last = 2**17 + 2, MAX_WIDTH, 3
    branch, residual = (torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE).requires_grad_() for _ in range(2))
    weight, shift = rand(cols, seed=4), rand(cols, seed=5)
    y, stream = add_norm(branch, residual, None, weight, shift, EPS, False, 0.5, KEY)
    gradients = torch.autograd.grad([y, stream], [branch, residual], [residual.detach(), branch.detach()])
    got = [t.detach()[-last:] for t in (y, stream, *gradients)]

    row = torch.arange(rows - last, rows, device=DEVICE)[:, None]
    keep = hash_ref(KEY, row, torch.arange(cols, device=DEVICE)[None]) >= 2**31
    b, r = (t.detach()[-last:].double().requires_grad_() for t in (branch, residual))
    y, stream = add_norm_ref(torch.where(keep, 2 * b, 0.0), r, None, weight, shift, EPS, False, 0.0, None)
    exact = [y.detach(), stream.detach(), *torch.autograd.grad([y, stream], [b, r], [r.detach(), b.detach()])]
    for a, e in zip(got, exact, strict=True):
        assert error(a, e) < 0.01
