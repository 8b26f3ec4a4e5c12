"""Cross entropy fused with the output layer: loss and gradients as the whole matrix of logits gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.ops import cross_entropy as family
from stretto.ops.cross_entropy import chunk_rows, linear_cross_entropy
from stretto.ops.language import INTERPRET, cdiv, wide
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    RUNS_KERNELS,
    Function,
    assert_compiles,
    assert_op,
    error,
    poisoned_memory,
    rand,
    results,
    strided,
)

TERMS = [(0.0, -100), (0.1, -100), (0.0, 0), (0.3, 0)]  # smoothing, ignored label
# All terms at one shape; no smoothing and most of it at the others.
CASES = [((6, 7), terms) for terms in TERMS]
CASES += [(shape, terms) for shape in [(5, 1), (4, 1000), (4, 5003), (0, 7)] for terms in (TERMS[0], TERMS[-1])]


def cross_entropy_ref(logits: Tensor, labels: Tensor, smoothing: float = 0.0, ignore: int = -100) -> Tensor:
    """The definition of correct."""
    kept = labels != ignore
    return F.cross_entropy(wide(logits[kept]), labels[kept], reduction="sum", label_smoothing=smoothing)


def linear_cross_entropy_ref(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *terms: Any) -> Tensor:
    logits = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return cross_entropy_ref(logits, labels, *terms)


@pytest.fixture(autouse=True)
def deterministic_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisoned memory is a deterministic mode of torch, which warns of matmuls without this."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def draw_labels(rows: int, classes: int, ignore: int = -100) -> Tensor:
    """Every third is ignored."""
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(3))
    labels[::3] = ignore
    return labels.to(DEVICE)


def head(rows: int, classes: int, width: int = 24) -> list[Tensor]:
    """x, weight and bias with logits of order 1."""
    return [rand(rows, width), rand(classes, width, seed=1, scale=width**-0.5), rand(classes, seed=2)]


def assert_loss_parity(fused: Function, reference: Function, args: Sequence[Tensor], dtype: torch.dtype) -> None:
    """assert_parity for a function whose only output is a loss. Plain torch may hit a single number by luck, so two
    roundings are granted, and one for the gradients, which the incoming gradient scales last."""
    exact, plain = (results(reference, args, precision) for precision in (torch.float64, dtype))
    with poisoned_memory():
        got = results(fused, args, dtype)
    eps, truncates = torch.finfo(dtype).eps, INTERPRET and dtype == torch.bfloat16  # Triton's interpreter does
    for i, (g, p, e) in enumerate(zip(got, plain, exact, strict=True)):
        bound = 2 * error(p, e) + (eps / 2 if i and not truncates else eps)
        assert error(g, e) <= bound, f"result {i}: {error(g, e):.2e}, plain torch {error(p, e):.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "terms"), CASES)
def test_parity(shape: tuple[int, int], terms: tuple[Any, ...], dtype: torch.dtype) -> None:
    labels = draw_labels(*shape, terms[1])
    assert_loss_parity(
        lambda x, w, b: linear_cross_entropy(x, w, b, labels, *terms),
        lambda x, w, b: linear_cross_entropy_ref(x, w, b, labels, *terms),
        head(*shape),
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_lies_between_the_rows_of_logits_counts_nothing(dtype: torch.dtype) -> None:
    """With 61 classes there are three numbers behind each row, which some CPUs read in a product of 16 bits."""
    labels = draw_labels(40, 61, -100)
    with poisoned_memory():
        got = results(lambda x, w: linear_cross_entropy(x, w, None, labels), [rand(40, 32), rand(61, 32)], dtype)
    assert all(bool(t.isfinite().all()) for t in got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a bias, and where the last chunk is shorter."""
    labels = draw_labels(130, 37)
    whole = results(lambda x, w: linear_cross_entropy(x, w, None, labels, 0.1), head(130, 37)[:2], dtype)
    monkeypatch.setattr(family, "CHUNK_BYTES", 1)
    assert chunk_rows(130, 100) == 128
    assert_loss_parity(
        lambda x, w, b: linear_cross_entropy(x, w, b, labels, 0.1),
        lambda x, w, b: linear_cross_entropy_ref(x, w, b, labels, 0.1),
        head(130, 37),
        dtype,
    )
    parts = results(lambda x, w: linear_cross_entropy(x, w, None, labels, 0.1), head(130, 37)[:2], dtype)
    for a, b in zip(whole, parts, strict=True):
        assert error(a, b) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 32768, 99999])
@pytest.mark.parametrize("row_bytes", [128, 100608, 256512, 2**28])
def test_chunks_are_few_and_equal(tokens: int, row_bytes: int) -> None:
    rows = chunk_rows(tokens, row_bytes)
    chunks, fewest = (
        cdiv(tokens, rows),
        cdiv(tokens, max(min(family.CHUNK_BYTES // row_bytes, family.CHUNK_ROWS) // 128 * 128, 128)),
    )
    assert rows % 128 == 0 and chunks <= fewest
    assert rows == 128 or rows * row_bytes <= family.CHUNK_BYTES
    assert rows - (tokens - (chunks - 1) * rows) < 128 * max(chunks, 1)  # the last one lacks less than 128 for each


def test_reference_and_op_pass_gradcheck() -> None:
    x, weight, bias = (t.double().requires_grad_() for t in head(5, 7, 3))
    for terms in TERMS[1], TERMS[-1]:
        labels = draw_labels(5, 7, terms[1])
        for function in (linear_cross_entropy_ref, linear_cross_entropy):
            assert torch.autograd.gradcheck(lambda *a: function(*a, labels, *terms), (x, weight, bias))  # noqa: B023


def of_logits(z: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The loss of these logits: of a product with the identity."""
    return linear_cross_entropy(z, torch.eye(z.shape[1], dtype=z.dtype, device=z.device), None, labels, smoothing)


def test_extreme_logits() -> None:
    """An offset of 1e4 that all logits share costs no precision, and gaps of 1e4 do not overflow."""
    labels = draw_labels(6, 700)
    near = (rand(6, 700).double() * 64).round() / 64  # fp32 holds them with the offset, too
    same = results(lambda z: of_logits(z, labels, 0.1), [near.float()])
    moved = results(lambda z: of_logits(z, labels, 0.1), [(near + 1e4).float()])
    for a, b in zip(same, moved, strict=True):
        assert error(a, b) < 1e-6
    assert_loss_parity(
        lambda z: of_logits(z, labels, 0.1),
        lambda z: cross_entropy_ref(z, labels, 0.1),
        [rand(6, 700, scale=1e4)],
        torch.float32,
    )
    flat = of_logits(torch.full((2, 50), 1e4, device=DEVICE), torch.tensor([0, 7], device=DEVICE), 0.1)
    assert float(flat.detach()) == pytest.approx(2 * torch.tensor(50.0).log().item(), rel=1e-6)


def test_all_labels_ignored() -> None:
    labels = torch.full((5,), -100, device=DEVICE)
    for value in results(lambda x, w, b: linear_cross_entropy(x, w, b, labels, 0.1), head(5, 9)):
        assert not value.any()


def test_ignored_rows_may_hold_anything() -> None:
    labels, z = draw_labels(6, 7), rand(6, 7)
    spoiled = z.clone()
    spoiled[::3] = torch.nan
    found = [(family._run_rows(t, labels, 0.1, -100, True), t) for t in (z, spoiled)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_rows_may_be_strided() -> None:
    labels = draw_labels(6, 33)
    args = head(6, 33)
    for a, b in zip(
        results(lambda x, w, b: linear_cross_entropy(x, w, b, labels), args),
        results(lambda x, w, b: linear_cross_entropy(strided(x), strided(w), b, labels), args),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_gradient_follows_the_scale_of_the_loss() -> None:
    """Also in 16 bits, where 0.37 itself would be rounded. Triton's interpreter cuts bf16 off instead of rounding."""
    labels = draw_labels(9, 11)
    for dtype in (torch.float32, torch.float16 if INTERPRET else torch.bfloat16):
        args = [t.to(dtype).requires_grad_() for t in head(9, 11)]
        one = torch.autograd.grad(linear_cross_entropy(*args, labels), args)
        scaled = torch.autograd.grad(linear_cross_entropy(*args, labels) * 0.37, args)
        assert torch.equal(scaled[0], (one[0].double() * torch.tensor(0.37).double()).to(dtype))
        for a, b in zip(one, scaled, strict=True):
            assert b.dtype == dtype and error(b, a.double() * 0.37) < torch.finfo(dtype).eps


def test_only_needed_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, asked = draw_labels(9, 11), []
    op = family._linear_cross_entropy

    def record(*args: Any) -> Any:
        asked.append((args[7], [t.numel() for t in op(*args)[1:]]))
        return op(*args)

    monkeypatch.setattr(family, "_linear_cross_entropy", record)
    args = [t.requires_grad_() for t in head(9, 11)]
    every = torch.autograd.grad(linear_cross_entropy(*args, labels), args)
    with torch.no_grad():
        silent = linear_cross_entropy(*args, labels)
    assert not silent.requires_grad and torch.equal(silent, linear_cross_entropy(*args, labels))
    asked.clear()
    with torch.no_grad():
        linear_cross_entropy(*args, labels)
    assert asked == [([False] * 3, [0, 0, 0])]
    for frozen in range(3):
        some = [t.detach() if i == frozen else t for i, t in enumerate(args)]
        asked.clear()
        linear_cross_entropy(*some, labels).backward()
        assert asked[0] == (
            [i != frozen for i in range(3)],
            [t.numel() * (i != frozen) for i, t in enumerate(args)],
        )
        for i, (tensor, gradient) in enumerate(zip(args, every, strict=True)):
            assert tensor.grad is None if i == frozen else torch.equal(tensor.grad, gradient)
            tensor.grad = None


def mixed(rows: int, classes: int) -> list[Tensor]:
    """x in bf16; weight and bias in fp32, with more bits than bf16 holds."""
    x, weight, bias = head(rows, classes, 64)
    return [x.bfloat16(), weight * 1.001, bias * 1.001]


def test_fp32_weight_of_bf16_activations() -> None:
    """dweight comes from an fp32 sum: nearer to the exact one than autocast's, which passes through bf16."""
    labels, args = draw_labels(60, 50), mixed(60, 50)
    exact = results(
        lambda x, w, b: cross_entropy_ref(F.linear(x, w.bfloat16().to(w), b.bfloat16().to(b)), labels),
        args,
        torch.float64,
    )
    got = results(lambda x, w, b: linear_cross_entropy(x, w, b, labels), args)
    with torch.autocast(DEVICE, torch.bfloat16):
        plain = results(lambda x, w, b: cross_entropy_ref(F.linear(x, w, b), labels), args)
        under = results(lambda x, w, b: linear_cross_entropy(x, w, b, labels), args)
        wider = results(lambda x, w, b: linear_cross_entropy(x, w, b, labels), [args[0].float(), *args[1:]])
    assert [t.dtype for t in got[1:]] == [torch.bfloat16, torch.float32, torch.float32]
    if not INTERPRET:  # where dlogits are truncated
        assert error(got[1], exact[1]) < 2 * error(plain[1], exact[1])
        assert error(got[2], exact[2]) < 0.9 * error(plain[2], exact[2])
    assert (got[2].bfloat16() != got[2]).any()
    for a, b, c in zip(got, under, wider, strict=True):  # autocast changes nothing, but casts an x that is not yet cast
        assert torch.equal(a, b) and torch.equal(a, c.to(a.dtype))
    assert wider[1].dtype == torch.float32


def test_ops() -> None:
    labels = draw_labels(5, 7)
    z = rand(5, 7)
    assert_op(family._scale_gradient.overload, (z, z.sum(), torch.bfloat16))
    x, weight, bias = (t.requires_grad_() for t in head(5, 7))
    op = family._linear_cross_entropy.overload
    assert_op(op, (x, weight, bias, labels, 0.1, -100, 0, [True] * 3))
    assert_op(op, (x, weight.detach(), None, labels, 0.1, -100, 128, [True, False, False]))


def test_compiles() -> None:
    labels = draw_labels(5, 7)
    assert_compiles(lambda x, w, b: linear_cross_entropy(x, w, b, labels, 0.1), head(5, 7))

    def cast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return linear_cross_entropy(x, weight, bias, labels)

    assert_compiles(cast, head(5, 7))


class Sizes(TorchDispatchMode):
    """Remembers the largest result, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.nbytes)
        return out


def test_all_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "CHUNK_BYTES", 1)
    labels, (x, weight, bias) = draw_labels(200, 64), head(200, 64)
    with Sizes() as plain:
        linear_cross_entropy_ref(x, weight, bias, labels)
    assert plain.largest == 200 * 64 * 4  # the measure sees the logits
    with Sizes() as sizes:
        family.run_chunks(x, weight, bias, labels, 0.1, -100, 0, [True] * 3)
    assert sizes.largest == 128 * 64 * 4


@pytest.mark.parametrize(("chunk", "rows"), [(1, 128), (128, 128), (300, 256), (383, 256), (1001, 512)])
def test_the_caller_may_say_how_many_rows(chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 400 of them, spread evenly over as few chunks as it takes; more rows than the limits is a choice too."""
    monkeypatch.setattr(family, "launch_rows", family.rows_ref)  # a kernel sees single rows; interpreted, slowly
    assert chunk_rows(400, 64 * 4, chunk) == rows == chunk_rows(400, family.CHUNK_BYTES, chunk)
    labels, args = draw_labels(400, 61), head(400, 61, 8)
    with Sizes() as sizes:
        family.run_chunks(*args, labels, 0.1, -100, chunk, [True] * 3)
    assert sizes.largest == min(rows, 400) * 64 * 4  # the buffer, whose rows are aligned
    whole = results(lambda x, w, b: linear_cross_entropy(x, w, b, labels, 0.1), args)
    parts = results(lambda x, w, b: linear_cross_entropy(x, w, b, labels, 0.1, chunk=chunk), args)
    for found, expected in zip(parts, whole, strict=True):
        assert error(found, expected) < 1e-6


def test_mistakes_are_named() -> None:
    labels, (x, weight, bias) = draw_labels(4, 5), head(4, 5)
    shapes = r"bias \[V\] or None and labels \[T\], not \[4, 24\], \[5, 24\], "
    with pytest.raises(ValueError, match=shapes + r"\[4\], \[4\]"):
        linear_cross_entropy(x, weight, bias[:4], labels)
    with pytest.raises(ValueError, match=shapes + r"None, \[3\]"):
        linear_cross_entropy(x, weight, None, labels[:3])
    with pytest.raises(ValueError, match="weight"):
        linear_cross_entropy(x, weight[:, :5], None, labels)
    with pytest.raises(ValueError, match=r"\[0, 1\), not 1\.5"):
        linear_cross_entropy(x, weight, bias, labels, 1.5)
    with pytest.raises(ValueError, match="more rows, not -1"):
        linear_cross_entropy(x, weight, bias, labels, chunk=-1)
    with pytest.raises(ValueError, match="one class"):
        linear_cross_entropy(x, weight[:0], None, labels)


def test_labels_that_do_not_exist() -> None:
    """An error where looking is free; on a GPU a NaN, which the guard of the training loop sees."""
    args = [t.requires_grad_() for t in head(4, 5)]
    for wrong in (5, -1):
        labels = torch.tensor([0, wrong, 2, -100], device=DEVICE)
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match=f"label {wrong} is not one of 5 classes"):
                linear_cross_entropy(*args, labels)
        else:
            loss = linear_cross_entropy(*args, labels)
            assert loss.isnan() and all(g.isnan().any() for g in torch.autograd.grad(loss, args))


def test_wrong_maths_would_be_seen() -> None:
    """Each of these is a mistake that somebody has made."""
    labels = draw_labels(9, 11)
    leaking = labels.where(labels != -100, 0)
    mistakes = {
        "mass on the wrong classes only": lambda x, w, b: linear_cross_entropy(x, w, b, labels, 0.1 * 11 / 10),
        "no smoothing": lambda x, w, b: linear_cross_entropy(x, w, b, labels),
        "ignored rows leak": lambda x, w, b: linear_cross_entropy(x, w, b, leaking, 0.1),
        "bias forgotten": lambda x, w, b: linear_cross_entropy(x, w, None, labels, 0.1),
    }
    for name, mistake in mistakes.items():
        with pytest.raises(AssertionError, match="result"):
            assert_loss_parity(
                mistake,
                lambda x, w, b: linear_cross_entropy_ref(x, w, b, labels, 0.1),
                head(9, 11),
                torch.float32,
            )
            pytest.fail(f"not seen: {name}")


def test_a_sum_that_forgets_a_chunk_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = draw_labels(130, 7)
    monkeypatch.setattr(family, "CHUNK_BYTES", 1)
    right = vars(family)["add_dweight"]
    monkeypatch.setattr(family, "add_dweight", lambda total, dout, x, beta: right(total, dout, x, beta=0.0))
    with pytest.raises(AssertionError, match="result 2"):
        assert_loss_parity(
            lambda x, w, b: linear_cross_entropy(x, w, b, labels),
            lambda x, w, b: linear_cross_entropy_ref(x, w, b, labels),
            head(130, 7),
            torch.float32,
        )


@pytest.mark.skipif(not RUNS_KERNELS, reason="runs the kernel: needs TRITON_INTERPRET=1 or a GPU")
def test_kernel_and_reference_agree() -> None:
    """Losses and the gradient in place, for rows of several blocks and a rest; a column that is not written shows."""
    cols = 2 * 256 * 16 + 37
    logits, labels = rand(3, cols), torch.tensor([cols - 1, -100, 4000], device=DEVICE)
    expected, found = logits.clone(), strided(logits)
    losses = family.rows_ref(expected, labels, 0.1, -100, gradient=True)
    torch.testing.assert_close(family.launch_rows(found, labels, 0.1, -100, gradient=True), losses)
    assert error(found, expected) < 1e-6
    found[2, 4096] += 1e-3
    assert error(found, expected) > 1e-6


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, cols = 2**14 + 1, 2**17 + 8
    z = torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    labels = draw_labels(rows, cols)
    labels[-1] = cols - 1
    gradient = z.clone()
    losses = family.launch_rows(gradient, labels, 0.1, -100, gradient=True)
    total = 0.0
    for start in range(0, rows, 2048):  # the last chunk is the row beyond 2^31 elements
        part = z[start : start + 2048].requires_grad_()
        exact = cross_entropy_ref(part, labels[start : start + 2048], 0.1)
        total += float(exact.detach())
        (expected,) = torch.autograd.grad(exact, part)
        assert error(gradient[start : start + 2048], expected) < 2**-8
    assert float(losses.sum()) == pytest.approx(total, rel=1e-5)


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """Far less than the logits, although every chunk has its matmuls and its kernel."""
    rows, cols, width = 65536, 50257, 64
    x, weight, bias = (t.bfloat16().requires_grad_() for t in head(rows, cols, width))
    labels = draw_labels(rows, cols)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, bias, labels).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.25 * family.CHUNK_BYTES < rows * cols * 2 / 2
