"""8-bit factors and their products: the definition against float64, the kernel against the definition, gradients
against those of bf16, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.numerics.formats import E4M3 as EMULATED
from stretto.ops import fp8
from stretto.ops.fp8 import Eight, can_multiply
from stretto.ops.heads import project_heads
from stretto.ops.linear import linear
from stretto.ops.mlp import KEEPS, mlp
from stretto.ops.products import multiply_scaled
from stretto.ops.round8 import (
    E4M3,
    E5M2,
    MARGIN,
    RECIPES,
    Bound,
    Bounds,
    Narrow,
    launch_quantize,
    most_of,
    quantize,
    quantize_ref,
    renew_bounds,
    renew_bounds_ref,
)
from stretto.ops.weights8 import Weights
from tests.ops.checks import DEVICE, RUNS_KERNELS, rand
from tests.ops.narrow import HAS_PRODUCTS, bound_of, same

pytestmark = pytest.mark.skipif(not HAS_PRODUCTS, reason="needs a GPU with 8-bit products")


def restore(data: Tensor, scale: Tensor, recipe: str, weight: bool) -> Tensor:
    """What the 8 bits stand for, in float64."""
    if recipe == "block128":
        scale = (scale if weight else scale.t()).repeat_interleave(128 if weight else 1, 0).repeat_interleave(128, 1)
        scale = scale[: data.shape[0], : data.shape[1]]
    return data.double() * scale.double()


def restore_both(narrow: Narrow, recipe: str, weight: bool = False) -> tuple[Tensor, Tensor]:
    one, other = (restore(*narrow[i : i + 2], recipe, weight) for i in (0, 2))
    return one, other.t()


def gradients(x: Tensor, weight: Tensor, dout: Tensor, product: Eight | None) -> tuple[Tensor, ...]:
    """Result, dx and dweight of a linear layer."""
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    out = linear(leaves[0], leaves[1], product=product)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


def difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(1 - 2 * (a * b).sum() / (a.square().sum() + b.square().sum()))


@pytest.mark.parametrize("weight", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(130, 160), (1, 48)], ids=str)
def test_numbers_are_within_half_a_step(shape: tuple[int, int], recipe: str, dtype: torch.dtype, weight: bool) -> None:
    """Both ways, and beyond the end there are zeros."""
    x = rand(*shape, dtype=torch.bfloat16, scale=3.0)
    x[0, 5], x[0, 7] = 100.0, 0.0
    found = quantize(x, dtype, recipe, weight=weight)
    assert found.data.dtype == found.data_t.dtype == dtype and found.data.is_contiguous()
    assert found.data_t.shape[1] % 16 == 0 and not found.data_t[:, len(x) :].float().any()
    step, smallest = (2.0**-4, 2.0**-10) if dtype == E4M3 else (2.0**-3, 2.0**-17)
    for y in restore_both(found, recipe, weight):
        least = 110.0 / torch.finfo(dtype).max * smallest
        assert ((y[: len(x)] - x.double()).abs() <= step * x.double().abs() + least).all()


@pytest.mark.skipif(not RUNS_KERNELS, reason="runs the kernel: needs TRITON_INTERPRET=1 or a GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernel_is_the_definition(recipe: str) -> None:
    """Every bit, for rows that are apart, numbers over the whole range, and a bound."""
    x = (rand(130, 300) * torch.logspace(-8, 3, 300, device=DEVICE)).bfloat16()[:, :144]
    x[:, :2] = 0.0
    for dtype in (E4M3, E5M2):
        for weight in (False, True):
            for most in (None, most_of(x) / 3) if recipe == "tensor" else (None,):
                bound = None if most is None else bound_of(most)
                there = None if most is None else Bound(most.cpu(), torch.zeros(()), known=True)
                found = launch_quantize(x, dtype, recipe, bound, weight)
                exact = quantize_ref(x.cpu(), dtype, recipe, there, weight)  # on a GPU torch divides by a reciprocal
                assert same([each.cpu() for each in found], exact)
                assert all(each is None or each.seen == most_of(x) for each in (bound, there))


def test_the_definition_is_that_of_the_laboratory() -> None:
    x = rand(8, 256).float()
    found = quantize_ref(x, E4M3, "tensor", None, False)
    assert torch.equal(found.data.double(), EMULATED.round(x * found.scale.reciprocal()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_is_that_of_restored_factors(recipe: str) -> None:
    """Sums of 130 and of 48 that are no whole blocks; a block of zeros gives zeros."""
    for inner in (130, 48) if DEVICE == "cpu" else (256, 128):
        x, weight, bias = rand(37, inner, seed=1), rand(48 if DEVICE == "cpu" else 128, inner, seed=2), rand(48, seed=3)
        bias = F.pad(bias, (0, len(weight) - len(bias)))
        x[3] = 0.0
        x8, w8 = quantize(x, E4M3, recipe), quantize(weight, E4M3, recipe, weight=True)
        parts = (x8.data, w8.data, x8.scale, w8.scale, recipe)
        out = multiply_scaled(*parts, torch.float32 if DEVICE == "cpu" else torch.bfloat16, bias, square=True)
        exact = restore_both(x8, recipe)[0] @ restore_both(w8, recipe, True)[0].t() + bias.double()
        assert (out - exact).abs().max() <= (1e-6 if DEVICE == "cpu" else 4e-3) * exact.abs().max()
        assert torch.equal(out[3], bias.to(out.dtype))


@pytest.mark.parametrize(("recipe", "least"), [("tensor", 0.998), ("row", 0.999), ("block128", 0.999)])
def test_gradients_are_those_of_bf16(recipe: str, least: float) -> None:
    """Of a layer of width 512. Gradients of `tensor` have 2 mantissa bits: half as exact."""
    x, weight, dout = (
        rand(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(256, 512), (512, 512), (256, 512)])
    )
    plain, narrow = (gradients(x, weight, dout, product) for product in (None, Eight(recipe)))
    assert cosine(narrow[0], plain[0]) > 0.999
    for one, other in zip(narrow[1:], plain[1:], strict=True):
        assert cosine(one, other) > least and difference(one, other) < 2 * (1 - least)
        assert not torch.equal(one, other)


def test_autocast_rounds_nothing_more() -> None:
    x, weight = rand(48, 64, dtype=torch.bfloat16), rand(32, 64, seed=1)
    out, _ = Eight("tensor").multiply(x, weight)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(Eight("tensor").multiply(x, weight)[0], out)


def test_scales_of_dweight_are_along_tokens() -> None:
    """Another order of tokens makes other blocks of the transposed factor, and leaves the forward product."""
    x, weight = rand(256, 128, dtype=torch.bfloat16), rand(128, 128, dtype=torch.bfloat16, seed=1)
    order, product = torch.randperm(256, generator=torch.Generator().manual_seed(0)), Eight("block128")
    (out, (_, scale)), (mixed, (_, others)) = (product.multiply(t, weight) for t in (x, x[order]))
    assert torch.equal(out[order], mixed) and scale.shape == (2, 128) and not torch.equal(scale, others)


def test_products_of_torch_on_a_cpu() -> None:
    """Equal, but for the order in which a library adds up 64 products."""
    x, weight = rand(48, 64).cpu(), rand(32, 64, seed=1).cpu()
    newer = torch.__version__ >= "2.13"  # earlier ones have scales of rows, and the newer operation, on a GPU only
    for recipe, dtype in (("tensor", E4M3), ("tensor", E5M2), *([("row", E4M3)] if newer else [])):
        a, b = quantize_ref(x, dtype, recipe, None, False), quantize_ref(weight, E4M3, recipe, None, True)
        ours = multiply_scaled(a.data, b.data, a.scale, b.scale, recipe, torch.float32, square=True)
        scales = {"scale_a": a.scale, "scale_b": b.scale.t()}
        theirs = torch._scaled_mm(a.data, b.data.t(), **scales, out_dtype=torch.float32)
        tensor, by_row = F.ScalingType.TensorWise, F.ScalingType.RowWise
        kind = tensor if recipe == "tensor" else by_row
        others = [theirs]
        if newer:
            others.append(F.scaled_mm(a.data, b.data.t(), a.scale, kind, b.scale.t(), kind, output_dtype=torch.float32))
        for other in others:
            torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-5 if recipe == "tensor" else 1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [130, 128])
def test_torch_accepts_what_a_gpu_would_be_given(tokens: int, recipe: str) -> None:
    """Shapes, strides and dtypes of all three products pass the checks of torch's operation for GPUs, which a fake
    tensor runs without one."""
    x, weight, dout = rand(tokens, 256), rand(640, 256), rand(tokens, 640)
    product, bias = Eight(recipe), rand(640)
    parts = (
        quantize(x, E4M3, recipe),
        quantize(weight, E4M3, recipe, weight=True),
        quantize(dout, product.gradients, recipe),
    )
    with FakeTensorMode():
        x8, w8, dout8 = (
            Narrow(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in part))
            for part in parts
        )
        b = torch.empty(bias.shape, device="cuda")
        options = (recipe, torch.bfloat16)
        out = multiply_scaled(x8.data, w8.data, x8.scale, w8.scale, *options, b, square=True)
        dx = multiply_scaled(dout8.data, w8.data_t, dout8.scale, w8.scale_t, *options, square=True)
        dweight = multiply_scaled(dout8.data_t, x8.data_t, dout8.scale_t, x8.scale_t, *options)
    assert [tuple(t.shape) for t in (out, dx, dweight)] == [(tokens, 640), (tokens, 256), (640, 256)]
    assert {t.dtype for t in (out, dx, dweight)} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:invalid value")  # zero times infinity, in the interpreter
@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_numbers_that_are_not_finite(recipe: str) -> None:
    weight, dout = rand(128, 128, dtype=torch.bfloat16), rand(32, 128, dtype=torch.bfloat16, seed=1)
    out, dx, dweight = gradients(torch.zeros_like(dout), weight, dout, Eight(recipe))
    assert not out.any() and not dweight.any() and dx.isfinite().all()
    for wrong in (torch.inf, -torch.inf, torch.nan):
        x = dout.clone()
        x[3, 5] = wrong
        out, _, dweight = gradients(x, weight, dout, Eight(recipe))
        assert not out[3].isfinite().any() and not dweight[:, 5].isfinite().all()
        assert not gradients(dout, weight, x, Eight(recipe))[1][3].isfinite().all()
    huge = gradients(dout * 1e30, weight * 1e-30, dout, Eight(recipe))[0]
    assert cosine(huge, gradients(dout, weight, dout, None)[0]) > 0.998, "a scale is as wide as a float"


def test_a_bound_needs_no_maximum() -> None:
    """What is beyond a bound stays at the largest number, and is seen; what is not finite is seen, too."""
    x = rand(64, 256, scale=7.0)
    wide, narrow = bound_of(2 * x.abs().max()), bound_of(x.abs().max() / 4)
    assert cosine(restore_both(quantize(x, bound=wide), "tensor")[0], x) > 0.999
    found = quantize(x, bound=narrow)
    assert found.data.float().abs().max() == 448 and (found.data.float() == 448).sum() > 1
    assert wide.seen == narrow.seen == x.abs().max() and wide.most == 2 * x.abs().max()
    quantize(x / 8, bound=wide)
    assert wide.seen == x.abs().max(), "the most of all"
    for wrong in (torch.nan, torch.inf, -torch.inf):
        y, bound = x.clone(), bound_of(30.0)
        y[3, 5] = wrong
        found = quantize(y, bound=bound)
        assert not bound.seen.isfinite() and found.data.float().isnan().nonzero().tolist() == [[3, 5]]
        assert found.data_t.float().isnan().nonzero().tolist() == [[5, 3]]


def test_a_bound_that_is_not_known_is_the_maximum() -> None:
    x, bound = rand(64, 256, scale=7.0), bound_of(1e-4, known=False)
    assert same(quantize(x, bound=bound), quantize(x))
    assert bound.seen == x.abs().max()


def test_the_next_bounds() -> None:
    """A margin above what was seen, by the factor's format; nothing of what was not seen, or not finite."""
    bounds = Bounds([E4M3, E5M2, E4M3, E4M3, E5M2], torch.device(DEVICE))
    assert [bound.most.data_ptr() % 16 for bound in bounds.each] == [0] * 5
    bounds.set([1.0, 0.0, 3.0, 4.0, 5.0])
    assert [bound.known for bound in bounds.each] == [True, False, True, True, True]
    for bound, seen in zip(bounds.each, (2.0, 0.3, 0.0, torch.inf, torch.nan), strict=True):
        bound.seen.fill_(seen)
    copies = [t.clone() for t in (bounds.most, bounds.seen, bounds.margins, bounds.over)]
    bounds.renew()
    renew_bounds_ref(*copies)
    for one, other in zip(copies, (bounds.most, bounds.seen, bounds.margins, bounds.over), strict=True):
        assert torch.equal(one, other)
    assert bounds.get() == [2.0 * MARGIN[E4M3], float(torch.tensor(0.3)) * MARGIN[E5M2], 3.0, 4.0, 5.0]
    assert not bounds.seen.any() and bounds.take_over() == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert bounds.take_over() == [0.0] * 5
    renew_bounds(*(torch.zeros(0, device=DEVICE) for _ in range(4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_rounded_at_once(dtype: torch.dtype) -> None:
    """Each as by itself, by its own bound; also where one has moved, and where one is of another dtype."""
    weights = [rand(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(160, 144), (16, 304), (128, 128)])]
    weights.append(rand(32, 48, seed=9))
    bounds = [bound_of(0.0, known=False), bound_of(2.0), bound_of(9.0), bound_of(8.0)]
    products, table = [Eight("tensor") for _ in weights], Weights()
    for turn in range(3):
        if turn == 2:
            weights[2] = weights[2] * 2
        if turn == 1:
            bounds[0].known = True
        for bound in bounds:
            bound.seen.zero_()
        outs = [product.take_room(weight) for product, weight in zip(products, weights, strict=True)]
        table.round(weights, outs, bounds)
        for weight, out, bound in zip(weights, outs, bounds, strict=True):
            exact = quantize(weight, bound=bound_of(bound.most))
            assert same(out, exact)
            assert bound.seen == most_of(weight)
    assert bounds[0].most == most_of(weights[0])
    table.round([], [], [])


def test_a_weight_is_rounded_once_an_update() -> None:
    """It stays where it is, and one that has changed since is rounded anew."""
    weight, x, product = rand(32, 64, dtype=torch.bfloat16), rand(16, 64, dtype=torch.bfloat16, seed=1), Eight("tensor")
    first, _ = product.multiply(x, weight)
    product.renew(weight)
    assert product._weigh(weight) is product._weight and torch.equal(product.multiply(x, weight)[0], first)
    place = product._weight.data.data_ptr()
    weight.mul_(2.0)
    assert torch.equal(product.multiply(x, weight)[0], 2 * first), "not what is out of date"
    product.renew(weight)
    assert product._weight.data.data_ptr() == place and torch.equal(product.multiply(x, weight)[0], 2 * first)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", ["gelu", "relu", "swiglu"])
def test_an_mlp_keeps_bytes(kind: str, keep: str) -> None:
    """As much as is said, all with the same bits; less than in bf16."""
    width, inner, tokens = 32, 64, 48
    up = 2 * inner if kind == "swiglu" else inner
    tensors = [
        rand(*shape, dtype=torch.bfloat16, seed=i)
        for i, shape in enumerate([(tokens, width), (up, width), (up,), (width, inner), (width,)])
    ]

    def run(keep: str, products: tuple[Eight | None, Eight | None]) -> tuple[list[Tensor], int]:
        leaves, sizes = [t.clone().requires_grad_() for t in tensors], dict[int, int]()
        own = {leaf.data_ptr() for leaf in leaves[1:]}

        def pack(t: Tensor) -> Tensor:
            if t.data_ptr() not in own and t.numel() > 2:
                sizes[t.data_ptr()] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = mlp(*leaves, kind, 0.0, None, keep, products)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))], sum(sizes.values())

    both = (Eight("tensor"), Eight("tensor"))
    (first, _), (found, kept), (plain, before) = run("activation", both), run(keep, both), run(keep, (None, None))
    assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    least = 0.97 if kind == "relu" else 0.99  # rounding turns some signs, and with them whole gradients
    assert all(cosine(a, b) > least for a, b in zip(found, plain, strict=True))
    assert kept < before if keep != "input" else kept == before


def test_several_first_weights_are_one() -> None:
    """Of an MLP and of heads: the same bits as with one weight that has all rows; frozen ones get no gradient."""
    x, gate, up, down = (
        rand(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate([(48, 32), (64, 32), (64, 32), (32, 64)])
    )

    def run(ups: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x, down, *ups)]
        both = (Eight("tensor"), Eight("tensor"))
        out = mlp(leaves[0], leaves[2:], None, leaves[1], None, "swiglu", 0.0, None, "product", both)
        heads = project_heads(leaves[0], leaves[2:], None, [4, 4], product=Eight("tensor"))
        total = (out.float() * out).sum() + sum((head.float() * head).sum() for head in heads)
        dx, ddown, *dups = torch.autograd.grad(total, leaves)
        return out, *heads, dx, ddown, torch.cat(dups)

    assert all(torch.equal(a, b) for a, b in zip(run([gate, up]), run([torch.cat([gate, up])]), strict=True))
    leaf = x.clone().requires_grad_()
    out = mlp(leaf, [gate, up], None, down, None, "swiglu", 0.0, None, "product", (Eight("tensor"), None))
    kept: Any = out.grad_fn
    assert len(kept.saved_tensors) == 6, "of frozen weights nothing is kept but themselves: two, down and pre"
    assert torch.autograd.grad(out, leaf, torch.ones_like(out))[0].shape == x.shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_may_be_kept_transposed(recipe: str) -> None:
    """As Conv1D keeps it: products are given a view. The bits are those of a weight that lies as usual."""
    x, weight, dout = (
        rand(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(128, 128), (256, 128), (128, 256)])
    )
    usual, other = Eight(recipe), Eight(recipe, transposed=True)
    own = weight.t().contiguous()
    for renewed in (False, True):
        if renewed:
            usual.renew(weight)
            other.renew(own)
        for one, two in zip(gradients(x, weight, dout, usual), gradients(x, own.t(), dout, other), strict=True):
            assert torch.equal(one, two)


def test_few_tokens_and_other_precisions_are_multiplied_as_usual() -> None:
    x, weight, dout = (rand(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(48, 32), (48, 32), (48, 48)]))
    product = Eight("tensor", least=40)
    assert not torch.equal(gradients(x, weight, dout, product)[0], gradients(x, weight, dout, None)[0])
    for few in ((x[:32], weight, dout[:32]), (x.float(), weight.float(), dout.float())):
        for one, two in zip(gradients(*few, product), gradients(*few, None), strict=True):
            assert torch.equal(one, two)


def test_what_is_watched() -> None:
    """A scale that is wrong shows: too small a one saturates, too large a one underflows, and both turn gradients."""
    x, weight, dout = (rand(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(64, 128), (32, 128), (64, 32)]))
    product = Eight("tensor")
    gradients(x, weight, dout, product)
    assert product.seen == {}, "nothing, unless it is asked for"

    def watch(most: Tensor | None) -> dict[str, float]:
        product = Eight("tensor", {} if most is None else {"x": bound_of(most)})
        product.watched = True
        found = gradients(x, weight, dout, product)
        product.watched = False
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(x, weight, dout, product), strict=True))
        return {name: float(value) for name, value in product.seen.items()}

    most = x.abs().max().float()
    good, small, large = watch(None), watch(most / 64), watch(most * 2**16)
    assert good["most x"] == x.abs().max() and good["saturated x"] == 0 and good["underflow x"] < 1e-3
    assert 0 <= good["dx"] < 0.003 and 0 <= good["dweight"] < 0.003
    assert small["saturated x"] > 0.5 and small["dweight"] > 0.05 and small["dx"] == good["dx"]
    assert large["underflow x"] > 0.2 and large["dweight"] > 0.03


class Widest(TorchDispatchMode):
    """Notes the most fp32 numbers of a tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple) else (out,):
            if isinstance(t, Tensor) and t.dtype == torch.float32:
                self.most = max(self.most, t.numel())
        return out


def test_to_watch_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dout = rand(64, 128, dtype=torch.bfloat16), rand(64, 32, dtype=torch.bfloat16, seed=1)
    found = []
    for most in (2**20, 256):
        monkeypatch.setattr(fp8, "WIDENED", most)
        product = Eight("tensor")
        x8, dx8 = (quantize(t, E4M3) for t in (x, dout))
        with Widest() as widest:
            product._measure("x", x, x8)
            product._compare("dx", dx8.data.bfloat16(), dout)
        assert widest.most == min(most, x.numel())
        found.append(product.seen)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def test_it_can_be_switched_off_and_has_no_tokens() -> None:
    x, weight, dout = (rand(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(16, 32), (48, 32), (16, 48)]))
    product = Eight("tensor")
    product.on = False
    for one, other in zip(gradients(x, weight, dout, product), gradients(x, weight, dout, None), strict=True):
        assert torch.equal(one, other)
    product.on = True
    assert [t.shape for t in gradients(x[:0], weight, dout[:0], product)] == [(0, 48), (0, 32), (48, 32)]
    with pytest.raises(ValueError, match="a recipe is one of"):
        quantize(x, E4M3, "tile")
    with pytest.raises(ValueError, match="at least one row"):
        quantize(x[:0])
    assert (
        can_multiply("tensor", 48, 32) and not can_multiply("tensor", 50, 32) and not can_multiply("block128", 128, 64)
    )
