"""The whole MLP as one operation: parity, what it keeps, which products it computes, and recomputation bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from stretto.ops import activation
from stretto.ops import mlp as family
from stretto.ops.activation import GATES, KINDS, activate_ref
from stretto.ops.mlp import KEEPS, activate_linear, mlp
from tests.ops.checks import DEVICE, DTYPES, assert_compiles, assert_op, assert_parity, error, rand, results, strided

KEY = torch.tensor([0x123456789ABCDEF0, -7], device=DEVICE)
NAMES = ["x", "up_weight", "up_bias", "down_weight", "down_bias"]

# poisoned memory comes with torch's deterministic mode, which has a word to say about cuBLAS
pytestmark = pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled")


def arguments(kind: str, tokens: int = 7, width: int = 12, inner: int = 20, **options: Any) -> list[Tensor]:
    """x, up_weight, up_bias, down_weight, down_bias"""
    rows = 2 * inner if kind in GATES else inner
    shapes = [(tokens, width), (rows, width), (rows,), (width, inner), (width,)]
    return [rand(*shape, seed=i, scale=1.0 if i == 0 else 0.5, **options) for i, shape in enumerate(shapes)]


def mlp_ref(
    x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, *activation: Any
) -> Tensor:
    """The definition of correct."""
    return F.linear(activate_ref(F.linear(x, up, up_bias), None, *activation), down, down_bias)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind: str, dtype: torch.dtype, keep: str) -> None:
    for tokens, p in (37, 0.0), (37, 0.3), (0, 0.3):
        assert_parity(
            lambda *args, p=p: mlp(*args, kind, p, KEY, keep),
            lambda *args, p=p: mlp_ref(*args, kind, p, KEY),
            arguments(kind, tokens, 33, 55),
            dtype,
        )


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parity_without_biases(kind: str, dtype: torch.dtype, keep: str) -> None:
    x, up_weight, _, down_weight, _ = arguments(kind, 19)
    assert_parity(
        lambda x, up, down: mlp(x, up, None, down, None, kind, 0.2, KEY, keep),
        lambda x, up, down: mlp_ref(x, up, None, down, None, kind, 0.2, KEY),
        [x, up_weight, down_weight],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    for p in (0.0, 0.3):
        kept, *others = (
            results(lambda *args, p=p, keep=keep: mlp(*args, kind, p, KEY, keep), arguments(kind, dtype=dtype))
            for keep in KEEPS
        )
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(kept, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_wider_than_the_activations(kind: str) -> None:
    """fp32 parameters under bf16 activations: as near to fp64 as bf16 parameters, gradients in fp32."""
    args = arguments(kind)
    assert_parity(
        lambda x, *parameters: mlp(x, *(t.float() for t in parameters), kind, 0.2, KEY, "product"),
        lambda *args: mlp_ref(*args, kind, 0.2, KEY),
        args,
        torch.bfloat16,
    )
    out, dx, *gradients = results(
        lambda x, *parameters: mlp(x, *parameters, kind, 0.2, KEY, "product"), [args[0].bfloat16(), *args[1:]]
    )
    assert (out.dtype, dx.dtype) == (torch.bfloat16, torch.bfloat16)
    assert {g.dtype for g in gradients} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_rules_as_it_does_for_linear(kind: str) -> None:
    x, *parameters = arguments(kind)

    def under_autocast(*args: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return mlp(*args, kind, 0.0, None, "input")

    got = results(under_autocast, [x, *parameters])
    out, dx, *gradients = results(lambda *args: mlp(*args, kind, 0.0, None, "input"), [x.bfloat16(), *parameters])
    assert got[0].dtype == torch.bfloat16 and {t.dtype for t in got[1:]} == {torch.float32}
    for a, b in zip(got, [out, dx.float(), *gradients], strict=True):
        assert torch.equal(a, b)


# bytes per token and inner width in bf16, by what is kept: the first product and h, the first product, neither
KEPT_BYTES = dict.fromkeys(KINDS, (4, 2, 0)) | dict.fromkeys(GATES, (6, 4, 0)) | {"relu": (2, 2, 0)}


def saved_bytes(function: Callable[..., Tensor], args: list[Tensor]) -> dict[int, int]:
    """The bytes that autograd keeps, by the address of a tensor."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        assert function(*args).requires_grad
    return saved


@pytest.mark.parametrize("parameters", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(kind: str, parameters: torch.dtype) -> None:
    """Parameters are kept themselves, also where a cast of them is multiplied."""
    tokens, width, inner = 5, 8, 64
    x, *others = (t.requires_grad_() for t in arguments(kind, tokens, width, inner, dtype=parameters))
    args = [x.detach().bfloat16().requires_grad_(), *others]
    for keep, size in zip(KEEPS, KEPT_BYTES[kind], strict=True):
        saved = saved_bytes(lambda *args, keep=keep: mlp(*args, kind, 0.1, KEY, keep), args)
        for parameter in (*others, KEY):
            saved.pop(parameter.data_ptr())
        assert sum(saved.values()) == tokens * (2 * width + size * inner)


def count_products(*, kind: str = "gelu", keep: str = "product", frozen: tuple[str, ...] = ()) -> int:
    """Matrix products of a backward pass; the gradients that it does give are checked."""
    args = arguments(kind)
    exact = dict(zip(["out", *NAMES], results(lambda *args: mlp_ref(*args, kind, 0.3, KEY), args), strict=True))
    leaves = [t.requires_grad_(name not in frozen) for name, t in zip(NAMES, args, strict=True)]
    out = mlp(*leaves, kind, 0.3, KEY, keep)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        out.backward(rand(*out.shape, seed=100))  # the gradient that `results` uses
    for name, leaf in zip(NAMES, leaves, strict=True):
        assert (leaf.grad is None) == (name in frozen)
        assert leaf.grad is None or error(leaf.grad, exact[name]) < 2e-6
    counts = {event.key: event.count for event in record.key_averages()}
    assert "aten::zeros" not in counts  # no made-up gradients for the outputs that only this pass reads
    return counts.get("aten::mm", 0)


@pytest.mark.parametrize(
    ("kind", "keep"), [("gelu", "activation"), ("gelu", "product"), ("gelu", "input"), ("relu", "product")]
)
def test_only_needed_gradients_are_computed(kind: str, keep: str) -> None:
    """A backward pass computes only those of its four products whose results are needed, and the first product of the
    forward pass again only if something needs it."""
    options: dict[str, Any] = {"kind": kind, "keep": keep}
    again = int(keep == "input")
    assert count_products(**options) == 4 + again
    assert count_products(**options, frozen=("up_weight",)) == 3 + again
    assert count_products(**options, frozen=("down_weight", "down_bias")) == 3 + again
    assert count_products(**options, frozen=("x",)) == 3 + again
    assert count_products(**options, frozen=("up_bias", "down_bias")) == 4 + again
    assert count_products(**options, frozen=("x", "up_weight", "up_bias")) == 1 + again  # h again without a gradient
    assert count_products(**options, frozen=("x", "up_weight", "up_bias", "down_weight")) == 0


def test_x_may_be_strided() -> None:
    args = arguments("gelu")
    expected = mlp(*args, "gelu", 0.3, KEY, "product")
    for x in strided(args[0]), args[0].t().contiguous().t():
        torch.testing.assert_close(mlp(x, *args[1:], "gelu", 0.3, KEY, "product"), expected)


@pytest.mark.parametrize("kind", ["gelu", "relu", "swiglu"])
def test_op(kind: str) -> None:
    args = arguments(kind)
    for keep in KEEPS:
        leaves = [t.clone().requires_grad_() for t in args]
        assert_op(family._mlp.overload, (*leaves, kind, 0.2, KEY, keep))
    kept = family._mlp(*args, kind, 0.2, KEY, "product")[1]
    for given in kept, None:
        backward = (rand(7, 12, seed=100), *args[:4], given, None, kind, 0.2, KEY)
        assert_op(family._mlp_backward.overload, (*backward, [True] * 5))
        assert_op(family._mlp_backward.overload, (*backward, [True, False, False, False, False]))
        assert_op(family._mlp_backward.overload, (*backward, [False, False, False, True, True]))


@pytest.mark.parametrize("keep", KEEPS)
def test_compiles(keep: str) -> None:
    assert_compiles(lambda *args: mlp(*args, "gelu", 0.2, KEY, keep), arguments("gelu"))


def test_compiles_under_autocast() -> None:
    def under_autocast(*args: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return mlp(*args, "swiglu", 0.2, KEY, "product")

    assert_compiles(under_autocast, arguments("swiglu"))


@pytest.mark.parametrize("kind", KINDS)
def test_reference_gradients(kind: str) -> None:
    args = [t.double().requires_grad_() for t in arguments(kind, 3, 4, 5)]
    assert torch.autograd.gradcheck(lambda *args: mlp_ref(*args, kind, 0.3, KEY), args)


SMOOTH = [kind for kind in KINDS if kind != "relu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SMOOTH)
def test_the_second_half_alone(kind: str, dtype: torch.dtype) -> None:
    x, up_weight, up_bias, down_weight, _ = arguments(kind)
    pre = x @ up_weight.t()

    def exact(pre: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        return F.linear(activate_ref(pre, bias, kind, 0.3, KEY), weight)

    assert_parity(
        lambda pre, bias, weight: activate_linear(pre, bias, weight, kind, 0.3, KEY),
        exact,
        [pre, up_bias, down_weight],
        dtype,
    )


def test_the_second_half_is_an_op_that_keeps_its_input_alone() -> None:
    x, up_weight, up_bias, down_weight, _ = arguments("swiglu")
    leaves = [t.requires_grad_() for t in (x @ up_weight.t(), up_bias, down_weight)]
    assert_op(family._activate_linear.overload, (*leaves, "swiglu", 0.2, KEY))
    plain = [t.detach() for t in leaves]
    for needed in ([True] * 3, [True, False, False], [False, False, True]):
        assert_op(family._activate_linear_backward.overload, (rand(7, 12), *plain, None, "swiglu", 0.2, KEY, needed))
    assert_compiles(lambda *args: activate_linear(*args, "swiglu", 0.2, KEY), plain)
    for pre in leaves[0], leaves[0].detach().bfloat16():  # with a weight as wide, and with one that is cast
        saved = saved_bytes(lambda *args: activate_linear(*args, "swiglu", 0.2, KEY), [pre, *leaves[1:]])
        assert set(saved) == {t.data_ptr() for t in (pre, *leaves[1:], KEY)}
    _, *gradients = results(lambda *args: activate_linear(*args, "swiglu", 0.2, KEY), [pre, *plain[1:]])
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, torch.float32]
    with pytest.raises(ValueError, match=r"swiglu of \[7, 40\] and a weight \[out, 20\], not \[12, 19\]"):
        activate_linear(plain[0], None, plain[2][:, 1:], "swiglu", 0.0, None)
    with pytest.raises(ValueError, match="no relu"):
        activate_linear(plain[0], None, plain[2], "relu", 0.0, None)


def test_shapes_are_checked() -> None:
    x, up_weight, up_bias, down_weight, down_bias = arguments("gelu")
    with pytest.raises(ValueError, match=r"up \[2 \* inner, width\].*not \[7, 12\], \[20, 12\], \[12, 20\]"):
        mlp(x, up_weight, up_bias, down_weight, down_bias, "swiglu", 0.0, None, "product")
    with pytest.raises(ValueError, match=r"the up bias is \[20\], not \[12\]"):
        mlp(x, up_weight, down_bias, down_weight, down_bias, "gelu", 0.0, None, "product")
    with pytest.raises(ValueError, match="one of activation, product, input, not 'h'"):
        mlp(x, up_weight, up_bias, down_weight, down_bias, "gelu", 0.0, None, "h")
    with pytest.raises(ValueError, match="needs a key"):
        mlp(x, up_weight, up_bias, down_weight, down_bias, "gelu", 0.1, None, "product")


def test_a_wrong_recomputation_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward kernel gives h without its dropout: the gradient of down_weight is wrong, and only if h is used."""

    def parity(keep: str) -> None:
        assert_parity(
            lambda *args: mlp(*args, "gelu", 0.3, KEY, keep),
            lambda *args: mlp_ref(*args, "gelu", 0.3, KEY),
            arguments("gelu"),
            torch.float32,
        )

    parity("product")
    for name in ("launch_activate_backward", "activate_backward_ref"):
        right = getattr(activation, name)

        def wrong(dh: Tensor, *given: Any, right: Any = right, **named: Any) -> Any:
            dx, h, dbias = right(dh, *given, **named)
            kept, bias, kind = given[:3]
            undropped = activation.Activation(kind, bias, 0.0, None)
            return dx, activation.run_activate(kept, undropped) if h.numel() else h, dbias

        monkeypatch.setattr(activation, name, wrong)
    parity("activation")
    with pytest.raises(AssertionError, match="result 4"):
        parity("product")
