"""Projection to heads: parity with the model's own split and rotation, and gradients in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stretto.model import Rotary, rotary_angles, rotate
from stretto.ops import heads as family
from stretto.ops.heads import merge_heads_ref, project_heads, rotate_heads
from stretto.ops.language import INTERPRET
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    RUNS_KERNELS,
    assert_compiles,
    assert_op,
    assert_parity,
    error,
    kept_bytes,
    poisoned_memory,
    rand,
    results,
)

Parts = tuple[int, ...]
# torch.compile itself makes an instance of each autograd function it traces.
traces_function = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")


def angles(rows: int, size: int) -> tuple[Tensor, Tensor]:
    turn = rotary_angles(torch.arange(rows, device=DEVICE) * 37 % 101, size, 10000.0)
    return turn.cos, turn.sin


def project_plainly(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts, rotary: Rotary | None
) -> tuple[Tensor, ...]:
    """With the model's functions: the definition of correct."""
    heads = F.linear(x, weight, bias).unflatten(1, (sum(parts), weight.shape[0] // sum(parts))).split(parts, dim=1)
    return tuple(rotate(part, rotary) if rotary and i < 2 else part for i, part in enumerate(heads))


def build_case(
    parts: Parts, rows: int = 7, size: int = 8, rotary: bool = False, bias: bool = True
) -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]:
    """The op, the same with the model's functions, and the floating-point arguments of both."""
    turn = angles(rows, size) if rotary else None

    def fused(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return project_heads(x, weight, bias, parts, *(turn or (None, None)))

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return project_plainly(x, weight, bias, parts, Rotary(*turn) if turn else None)

    width = sum(parts) * size
    tensors = [rand(rows, 12), rand(width, 12, seed=1, scale=0.3), rand(width, seed=2)]
    return fused, plain, tensors if bias else tensors[:2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"parts": (4, 4, 4)},
        {"parts": (4, 4, 4), "rotary": True},
        {"parts": (6, 2, 2), "rotary": True, "bias": False},
        {"parts": (5, 1, 1), "rotary": True, "rows": 1},
        {"parts": (9, 9, 9), "size": 2, "rotary": True, "rows": 70},
        {"parts": (3, 1, 1), "size": 5},
        {"parts": (2, 2, 2), "size": 20, "rotary": True, "bias": False},
        {"parts": (3,), "size": 1},
        {"parts": (2, 2)},
        {"parts": (2,), "size": 2, "rows": 200},
        {"parts": (2,) * 7, "rows": 3},
        {"parts": (2,) * 5, "rows": 3, "rotary": True},
        {"parts": (2, 2, 2), "rows": 0, "rotary": True},
    ],
    ids=str,
)
def test_parity(options: dict[str, Any], dtype: torch.dtype) -> None:
    fused, plain, tensors = build_case(**options)
    assert_parity(fused, plain, tensors, dtype)


@pytest.mark.skipif(RUNS_KERNELS, reason="kernels compute in fp32")
@pytest.mark.parametrize("rotary", [False, True])
def test_gradients_against_finite_differences(rotary: bool) -> None:
    fused, _, tensors = build_case((2, 1, 1), rows=2, size=4, rotary=rotary)
    torch.autograd.gradcheck(fused, [t.double().requires_grad_() for t in tensors])


def test_parts_are_views_of_one_product() -> None:
    fused, _, tensors = build_case((4, 2, 2), rotary=True)
    q, k, v = fused(*tensors)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert q.stride() == k.stride() == v.stride() == (64, 8, 1)


@pytest.mark.parametrize("rotary", [False, True])
def test_gradients_may_have_any_strides(rotary: bool) -> None:
    """As attention returns them: heads first, or side by side in one tensor, or one number for all."""
    rows, parts, size = 6, (4, 2, 2), 8
    turn = angles(rows, size) if rotary else (None, None)
    whole = [rand(rows, count, size, seed=i) for i, count in enumerate(parts)]
    expected = merge_heads_ref(whole, *turn, torch.float32)
    stacked = torch.cat(whole, 1)
    layouts = [
        [part.transpose(0, 1).contiguous().transpose(0, 1) for part in whole],
        list(stacked.split(parts, 1)),
        [part.transpose(1, 2).contiguous().transpose(1, 2) for part in whole],
    ]
    for layout in layouts:
        with poisoned_memory():
            merged, sums = family._merge(layout, *turn, torch.float32)
        torch.testing.assert_close(merged, expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sums, expected[1], rtol=1e-5, atol=1e-5)
    ones = [torch.ones((), device=DEVICE).expand(rows, count, size) for count in parts]
    merged, sums = family._merge(ones, None, None, torch.float32)
    assert torch.equal(merged, torch.ones(rows, 64, device=DEVICE))
    assert torch.equal(sums, torch.full((64,), 6.0, device=DEVICE))


def test_attention_behind_it() -> None:
    """Permuted on the way there, so the gradients come back permuted."""
    fused, plain, tensors = build_case((4, 2, 2), rows=10, rotary=True)

    def attend(project: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            q, k, v = (t.unflatten(0, (2, 5)).transpose(1, 2) for t in project(*args))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run

    assert_parity(attend(fused), attend(plain), tensors, torch.float32)


def test_unused_parts_have_gradient_zero() -> None:
    fused, plain, tensors = build_case((2, 2, 2), rotary=True)
    assert_parity(lambda *t: fused(*t)[1], lambda *t: plain(*t)[1], tensors, torch.float32)


def test_used_twice() -> None:
    fused, plain, tensors = build_case((2, 1, 1), rotary=True, size=6)

    def twice(project: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            q, k, v = project(x, weight, bias)
            again = project(torch.cat([q.flatten(1)] * 2, 1)[:, :12] + x, weight, bias)
            return q + k + v + sum(again)

        return run

    assert_parity(twice(fused), twice(plain), tensors, torch.float32)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)])
def test_frozen_tensors_get_no_gradient(trained: tuple[int, ...]) -> None:
    fused, _, tensors = build_case((4, 2, 2), rotary=True)
    full = results(fused, tensors)[3:]
    leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate(tensors)]
    outputs = fused(*leaves)
    dout = [rand(*t.shape, seed=100 + i) for i, t in enumerate(outputs)]
    torch.autograd.backward(outputs, dout)
    for i, (leaf, gradient) in enumerate(zip(leaves, full, strict=True)):
        assert leaf.grad is None if i not in trained else leaf.grad is not None and torch.equal(leaf.grad, gradient)


def test_sums_are_made_for_a_trained_bias_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype | None] = []
    true = family._merge
    monkeypatch.setattr(family, "_merge", lambda *args: asked.append(args[-1]) or true(*args))
    fused, _, (x, weight, bias) = build_case((2, 2, 2))
    for given in (bias, bias.clone().requires_grad_()):
        fused(x.requires_grad_(), weight, given)[0].sum().backward()
    assert asked == [None, torch.float32]


def test_recomputed() -> None:
    fused, _, tensors = build_case((4, 2, 2), rotary=True)
    plain = results(fused, tensors)
    again = results(lambda *t: checkpoint(fused, *t, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_fp32_parameters_and_bf16_activations() -> None:
    """The bias's gradient, a sum in fp32, is not rounded."""
    rows = 40
    fused, plain, (x, weight, bias) = build_case((4, 2, 2), rows=rows, rotary=True)
    exact = results(plain, [x, weight, bias], torch.float64)
    rough = results(plain, [x, weight, bias], torch.bfloat16)
    got = results(fused, [x.bfloat16(), weight, bias])
    assert [t.dtype for t in got] == [torch.bfloat16] * 4 + [torch.float32] * 2
    slack = torch.finfo(torch.bfloat16).eps / 4
    for g, r, e in zip(got, rough, exact, strict=True):
        assert error(g, e) <= 2 * error(r, e) + slack
    assert error(got[-1], exact[-1]) < 1e-6


def test_autocast() -> None:
    fused, plain, tensors = build_case((4, 2, 2), rotary=True)

    def cast(project: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                return project(*args)

        return run

    got, wanted = results(cast(fused), tensors), results(cast(plain), tensors)
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)


def test_results_repeat_bit_for_bit() -> None:
    fused, _, tensors = build_case((4, 2, 2), rows=70, rotary=True)
    for first, second in zip(results(fused, tensors), results(fused, tensors), strict=True):
        assert torch.equal(first, second)


def test_ops() -> None:
    cos, sin = angles(5, 8)
    assert_op(family._project.overload, (rand(5, 12), [rand(32, 12)], [rand(32)], 8, 3, cos, sin))
    assert_op(family._project.overload, (rand(12, 5).t(), [rand(12, 32).t()], [], 8, 3, None, None))
    several = [rand(16, 12), rand(16, 12).bfloat16()], [rand(16), rand(16)]
    assert_op(family._project.overload, (rand(5, 12), *several, 8, 3, None, None))
    parts = [rand(2, 5, 8).transpose(0, 1), rand(5, 1, 8), rand(5, 1, 8)]
    assert_op(family._merge.overload, (parts, cos, sin, torch.float32))
    assert_op(family._merge.overload, (parts, None, None, None))


@traces_function
@pytest.mark.parametrize("rotary", [False, True])
def test_it_compiles(rotary: bool) -> None:
    fused, _, tensors = build_case((4, 2, 2), rotary=rotary)
    assert_compiles(fused, tensors)
    assert_compiles(lambda x, weight: project_heads(x, weight, tensors[2], (8,))[0], tensors[:2])


@traces_function
@pytest.mark.skipif(INTERPRET, reason="the graph is the same: only the bodies of the ops differ")
def test_inductor_compiles_it() -> None:
    fused, _, tensors = build_case((4, 2, 2), rotary=True)

    def run(*args: Tensor) -> Tensor:
        q, k, v = fused(*args)
        return (q.unflatten(1, (2, 2)) * k[:, :, None]).sin().flatten(1, 2) + v.sum(1, keepdim=True)

    compiled = torch.compile(run, fullgraph=True)
    for a, b in zip(results(run, tensors), results(compiled, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


ROWS = (32, 16, 16)  # of the weights of queries, keys and values


def wide_parameters(rotary: bool = False) -> tuple[list[Tensor], Callable[..., Any], Callable[..., Any]]:
    """x in bf16 with fp32 weights and biases of three layers; the projection that is given the parameters, and the same
    with parameters that autograd joins and casts, and whose copies it keeps."""
    turn = angles(7, 8) if rotary else (None, None)

    def given(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return project_heads(x, parameters[:3], parameters[3:] or None, (4, 2, 2), *turn)

    def joined(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        bias = torch.cat(parameters[3:]) if parameters[3:] else None
        return project_heads(x, torch.cat(parameters[:3]).to(x.dtype), bias, (4, 2, 2), *turn)

    weights = [rand(rows, 12, seed=i, scale=0.3) * 1.001 for i, rows in enumerate(ROWS)]
    biases = [rand(rows, seed=5 + i) for i, rows in enumerate(ROWS)]
    return [rand(7, 12, dtype=torch.bfloat16), *weights, *biases], given, joined


@traces_function
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"bias": False}], ids=str)
def test_weights_of_several_layers(options: dict[str, bool], dtype: torch.dtype) -> None:
    args, given, joined = wide_parameters(options.get("rotary", False))
    args = [args[0], *(t.to(dtype) for t in args[1:])][: 7 if options.get("bias", True) else 4]
    for found, bits in zip(results(given, args), results(joined, args), strict=True):
        assert found.dtype == bits.dtype and torch.equal(found, bits)
    assert_compiles(given, args)
    args = [t.requires_grad_() for t in args]
    assert kept_bytes(lambda: given(*args), args) == (2 * 7 * 4 * 4 if options.get("rotary") else 0)  # the angles
    assert kept_bytes(lambda: joined(*args), args) >= sum(ROWS) * 12 * 2


def test_one_wide_weight_is_not_kept_as_a_copy() -> None:
    (x, weight, *_), *_ = wide_parameters()
    args = [x.requires_grad_(), weight.requires_grad_()]
    assert kept_bytes(lambda: project_heads(*args, None, (2, 2)), args) == 0
    assert kept_bytes(lambda: project_heads(x, weight.bfloat16(), None, (2, 2)), args) == weight.numel() * 2


@pytest.mark.parametrize("trained", [(0,), (2,), (1, 3, 5), (4,), (0, 6)])
def test_frozen_layers_among_several(trained: tuple[int, ...]) -> None:
    """A gradient keeps no rows alive of layers that have none."""
    args, given, joined = wide_parameters()
    full = results(joined, args)[3:]
    leaves = [t.requires_grad_(i in trained) for i, t in enumerate(args)]
    outputs = given(*leaves)
    torch.autograd.backward(outputs, [rand(*t.shape, dtype=t.dtype, seed=100 + i) for i, t in enumerate(outputs)])
    for i, (leaf, gradient) in enumerate(zip(leaves, full, strict=True)):
        assert (leaf.grad is not None) == (i in trained)
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, gradient) and leaf.grad.untyped_storage().nbytes() == leaf.grad.nbytes


def test_gradients_of_several_layers_accumulate_and_may_be_changed_in_place() -> None:
    """They may be views of one matrix: what is done to one does not reach the others."""
    args, given, joined = wide_parameters()
    leaves = [t.bfloat16().requires_grad_() for t in args]
    twice = [2 * gradient for gradient in results(joined, leaves)[3:]]
    for _ in range(2):
        outputs = given(*leaves)
        torch.autograd.backward(outputs, [rand(*t.shape, dtype=t.dtype, seed=100 + i) for i, t in enumerate(outputs)])
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    found[1].zero_()
    torch._foreach_mul_(found[2:], 2.0)
    for gradient, expected, factor in zip(found, twice, (1, 0, *[2] * 5), strict=True):
        assert torch.equal(gradient, factor * expected)


def test_one_layer_given_twice_and_a_layer_that_changes() -> None:
    (x, weight, *_), *_ = wide_parameters()

    def twice(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return project_heads(x, [weight, weight], None, (4, 4))

    def joined(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return project_heads(x, torch.cat([weight, weight]).to(x.dtype), None, (4, 4))

    for found, bits in zip(results(twice, [x, weight]), results(joined, [x, weight]), strict=True):
        assert torch.equal(found, bits)
    q, _ = twice(x.requires_grad_(), weight.requires_grad_())
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


def test_shapes_are_checked() -> None:
    x, weight = rand(5, 12), rand(32, 12)
    with pytest.raises(ValueError, match=r"\[5, 11\].* 4 heads"):
        project_heads(x[:, :11], weight, None, (2, 1, 1))
    with pytest.raises(ValueError, match="3 heads"):
        project_heads(x, weight, None, (1, 1, 1))
    with pytest.raises(ValueError, match="bias"):
        project_heads(x, weight, rand(31), (2, 1, 1))
    with pytest.raises(ValueError, match=r"weights \[\[32, 12\], \[32, 11\]\]"):
        project_heads(x, [weight, weight[:, 1:]], None, (4, 4))
    with pytest.raises(ValueError, match=r"biases \[\[32\]\]"):
        project_heads(x, [weight, weight], [rand(32)], (4, 4))
    with pytest.raises(ValueError, match="cos and sin"):
        project_heads(x, weight, None, (2, 1, 1), *angles(4, 8))
    with pytest.raises(ValueError, match="cos and sin"):
        project_heads(x, weight, None, (2, 1, 1), angles(5, 8)[0])


def test_rotating_back_the_wrong_way_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain, tensors = build_case((4, 2, 2), rotary=True)
    true = family._merge
    monkeypatch.setattr(family, "_merge", lambda parts, cos, sin, sums: true(parts, cos, -sin, sums))
    with pytest.raises(AssertionError):
        assert_parity(fused, plain, tensors, torch.float32)


@pytest.mark.skipif(not RUNS_KERNELS, reason="runs the kernel: needs TRITON_INTERPRET=1 or a GPU")
def test_a_wrong_column_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain, tensors = build_case((4, 2, 2))
    true = family.launch_turn
    monkeypatch.setattr(family, "launch_turn", lambda parts, *rest: true([parts[0], parts[2], parts[1]], *rest))
    with pytest.raises(AssertionError):
        assert_parity(fused, plain, tensors, torch.float32)


def turn_both(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return rotate_heads(q, k, *angles(q.shape[0], q.shape[2]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "heads"), [(7, 8, (4, 2)), (1, 2, (1, 1)), (37, 64, (3, 3)), (0, 8, (4, 2))])
def test_rotation_alone(rows: int, size: int, heads: Parts, dtype: torch.dtype) -> None:
    turn = angles(rows, size)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return rotate(q, Rotary(*turn)), rotate(k, Rotary(*turn))

    assert_parity(turn_both, plain, [rand(rows, n, size, seed=n) for n in heads], dtype)


def test_rotation_alone_of_any_strides() -> None:
    q, k = rand(7, 4, 8), rand(7, 2, 8, seed=1)
    wide = torch.cat([q, k], dim=1)
    for given in ([wide[:, :4], wide[:, 4:]], [q.transpose(0, 1).contiguous().transpose(0, 1), k]):
        for found, expected in zip(results(turn_both, given), results(turn_both, [q, k]), strict=True):
            assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"\[T, heads, D\]"):
        rotate_heads(q, k[:3], *angles(7, 8))
    with pytest.raises(ValueError, match=r"have to be \[7, 4\]"):
        rotate_heads(q, k, *angles(6, 8))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "parts, size, rotary",
    [((12, 12, 12), 64, False), ((16, 16, 16), 64, True), ((32, 8, 8), 64, True), ((8, 1, 1), 128, True)],
)
def test_a_whole_batch(parts: Parts, size: int, rotary: bool) -> None:
    rows = 16384
    turn = angles(rows, size) if rotary else (None, None)
    whole = [rand(rows, count, size, seed=i, dtype=torch.bfloat16) for i, count in enumerate(parts)]
    merged, sums = family._merge([p.transpose(0, 1).contiguous().transpose(0, 1) for p in whole], *turn, torch.float32)
    exact = merge_heads_ref([part.double() for part in whole], *turn, torch.float64)
    assert error(merged, exact[0]) < torch.finfo(torch.bfloat16).eps / 2
    assert error(sums, exact[1]) < 1e-5
    fused, plain, tensors = build_case(parts, rows, size, rotary)
    assert_parity(fused, plain, tensors, torch.bfloat16)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, parts, size = 2**20 - 5, (16, 8, 8), 64
    whole = [torch.ones(rows, count, size, dtype=torch.bfloat16, device=DEVICE) for count in parts]
    whole[2][-1] = 3
    merged, sums = family._merge([*whole, whole[0][:, :4]], None, None, torch.float32)
    assert torch.equal(merged[-1, 24 * 64 : 32 * 64].float(), torch.full((512,), 3.0, device=DEVICE))
    assert torch.equal(merged[-1, 32 * 64 :].float(), torch.ones(256, device=DEVICE))
    assert float(merged.float().sum(0, dtype=torch.float64)[0]) == float(sums[0]) == rows
    assert float(sums[24 * 64]) == rows + 2


@pytest.mark.gpu
def test_more_tiles_than_a_grid_reaches() -> None:
    rows, parts = 600_000, (8, 8, 8)
    x, weight = rand(rows, 8, dtype=torch.bfloat16), rand(24 * 64, 8, dtype=torch.bfloat16)
    turn = angles(rows, 64)
    last = slice(rows - 9, rows)
    wanted = project_plainly(x[last], weight, None, parts, Rotary(*(t[last] for t in turn)))
    for found, part in zip(project_heads(x, weight, None, parts, *turn), wanted, strict=True):
        torch.testing.assert_close(found[last], part, rtol=2e-2, atol=2e-2)
