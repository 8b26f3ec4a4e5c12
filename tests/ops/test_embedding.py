"""The embedding: every combination of tables, norm and dropout, and table gradients that repeat bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.batch import Sequences, dense_layout
from stretto.config import ModelConfig
from stretto.model import Embedding, sinusoids
from stretto.ops import embedding as family
from stretto.ops.embedding import Forward, add_by_id_ref, embed, embed_ref
from stretto.ops.language import INTERPRET
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    RUNS_KERNELS,
    assert_compiles,
    assert_op,
    assert_parity,
    error,
    poisoned_memory,
    rand,
    results,
)

KEY = torch.tensor([0x123456789ABCDEF0, -7], device=DEVICE)


def random_ids(rows: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(high, (rows,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def build_case(
    rows: int = 21,
    cols: int = 40,
    position: bool = True,
    types: str = "given",  # or "none": a table, but all tokens are of type 0; or "absent"
    norm: str = "layer",  # or "rms", "plain" (LayerNorm without bias), "absent"
    p: float = 0.2,
    scale: float = 3.0,
    dtype: torch.dtype | None = None,
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    """The op, the reference, and the floating-point arguments of both."""
    ids, at = random_ids(rows, 11), random_ids(rows, 7, seed=1)
    kinds = random_ids(rows, 2, seed=2) if types == "given" else None
    shapes: dict[str, tuple[int, ...]] = {"token": (11, cols)}
    if position:
        shapes["position"] = (7, cols)
    if types != "absent":
        shapes["token_type"] = (2, cols)
    if norm != "absent":
        shapes["weight"] = (cols,)
    if norm == "layer":
        shapes["bias"] = (cols,)

    def lookups(given: dict[str, Tensor]) -> Any:
        return ids, given["token"], at if position else None, given.get("position"), kinds, given.get("token_type")

    def fused(*tensors: Tensor) -> Tensor:
        given = dict(zip(shapes, tensors, strict=True))
        parts = given.get("weight"), given.get("bias"), 1e-5, norm == "rms"
        return embed(*lookups(given), scale, *parts, p, KEY, dtype)

    def plain(*tensors: Tensor) -> Tensor:
        given = dict(zip(shapes, tensors, strict=True))
        parts = given.get("weight"), given.get("bias"), KEY if p else None
        wanted = dtype if dtype is not None and tensors[0].dtype != torch.float64 else tensors[0].dtype
        return embed_ref(Forward(*lookups(given), *parts, scale, 1e-5, norm == "rms", p, wanted))

    return fused, plain, [rand(*shape, seed=10 + i) for i, shape in enumerate(shapes.values())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"types": "none"},
        {"types": "absent", "norm": "rms"},
        {"position": False, "types": "absent", "norm": "absent", "p": 0.0, "scale": 1.0},
        {"types": "absent", "norm": "absent"},
        {"position": False, "norm": "plain", "p": 0.0},
        {"types": "none", "norm": "absent", "p": 0.0},
        {"cols": 1, "norm": "rms"},
        {"cols": 33, "rows": 1},
        {"cols": 300, "rows": 3},
        {"rows": 0},
        {"rows": 0, "types": "none", "norm": "absent"},
    ],
    ids=str,
)
def test_parity(options: dict[str, Any], dtype: torch.dtype) -> None:
    if INTERPRET and dtype == torch.bfloat16 and options.get("types") == "none":
        pytest.skip("Triton's interpreter rounds to bf16 towards zero, which adds up over the tokens")
    fused, plain, tensors = build_case(**options)
    assert_parity(fused, plain, tensors, dtype)


@pytest.mark.parametrize("norm", ["layer", "absent"])
def test_fp32_tables_give_bf16_activations(norm: str) -> None:
    """As exact as bf16 tables, and the gradients keep the tables' dtype."""
    fused, plain, tensors = build_case(norm=norm, dtype=torch.bfloat16)
    exact = results(plain, tensors, torch.float64)
    rough = results(plain, tensors, torch.bfloat16)
    with poisoned_memory():
        got = results(fused, tensors)
    assert got[0].dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in got[1:])
    for g, r, e in zip(got, rough, exact, strict=True):
        assert error(g, e) <= 2 * error(r, e) + torch.finfo(torch.bfloat16).eps / 4


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "types": "none"}, {"norm": "absent"}], ids=str)
@pytest.mark.skipif(RUNS_KERNELS, reason="kernels compute in fp32")
def test_gradients_against_finite_differences(options: dict[str, Any]) -> None:
    fused, _, tensors = build_case(rows=5, cols=3, **options)
    torch.autograd.gradcheck(fused, [t.double().requires_grad_() for t in tensors])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_it_is_the_models_embedding(positions: str) -> None:
    cfg = ModelConfig(
        kind="encoder", vocab=11, width=16, heads=2, max_len=9, dropout=0.0, positions=positions,
        token_types=2, embed_norm=True, embed_scale=True, norm="layernorm",
    )  # fmt: skip
    model = Embedding(cfg).to(DEVICE)
    for i, parameter in enumerate(model.parameters()):
        parameter.data = rand(*parameter.shape, seed=i)
    ids, at, kinds = random_ids(18, 11), torch.arange(9, device=DEVICE).repeat(2), random_ids(18, 2)
    expected = model(Sequences(ids, at, dense_layout(2, 9, device=DEVICE), kinds))
    table = None
    if positions == "sinusoidal":
        table = sinusoids(torch.arange(9, device=DEVICE), 16)
    elif model.position is not None:
        table = model.position.weight
    assert model.token_type is not None
    norm: Any = model.norm
    lookups = ids, model.table, None if table is None else at, table, kinds, model.token_type.weight
    y = embed(*lookups, model.scale, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    parameters = list(model.parameters())
    dy = rand(18, 16, seed=9)
    found, wanted = (torch.autograd.grad(out, parameters, dy) for out in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_sinusoids_are_exact_at_any_position() -> None:
    at = torch.tensor([0, 1, 511, 65537, 100_000], device=DEVICE)
    table = sinusoids(torch.arange(100_001, device=DEVICE), 6)
    y = embed(torch.zeros_like(at), torch.zeros(1, 6, device=DEVICE), at, table)
    assert torch.equal(y, sinusoids(at, 6))


def skewed(rows: int, high: int, share: float) -> Tensor:
    ids = random_ids(rows, high)
    ids[rand(rows, seed=5).argsort()[: int(share * rows)]] = high // 2
    return ids


IDS = {
    "any": (random_ids(150, 60), 70),
    "one frequent": (skewed(150, 60, 0.4), 61),
    "all equal": (torch.full((600,), 2, device=DEVICE), 3),  # more pieces than one tile has rows
    "all different": (torch.arange(99, -1, -1, device=DEVICE), 100),
    "equal runs": (torch.arange(6, device=DEVICE).repeat(24), 6),
    "runs that end with a chunk": (torch.arange(9, device=DEVICE).repeat_interleave(16), 9),
    "two": (random_ids(200, 2), 2),
    "one": (torch.zeros(1, dtype=torch.int64, device=DEVICE), 1),
    "none": (torch.zeros(0, dtype=torch.int64, device=DEVICE), 4),
    "more than 2^15 rows": (random_ids(50, 40_000) | 1, 40_001),
}


@pytest.mark.parametrize("ids, rows", IDS.values(), ids=IDS)
def test_table_gradient_is_exact(ids: Tensor, rows: int) -> None:
    """Sums of small integers do not depend on the order, so every bit is known."""
    dx = random_ids(len(ids) * 5, 64, seed=3).view(-1, 5).float() - 32
    with poisoned_memory():
        found = family._add_by_id(dx, ids, rows, 0.5, torch.float32)
    assert torch.equal(found, torch.zeros(rows, 5, device=DEVICE).index_add(0, ids, dx) * 0.5)


def test_table_gradient_is_torchs() -> None:
    ids, rows = IDS["one frequent"]
    table = rand(rows, 33).requires_grad_()
    dy = rand(len(ids), 33, seed=4)
    (wanted,) = torch.autograd.grad(F.embedding(ids, table), table, dy)
    (found,) = torch.autograd.grad(embed(ids, table), table, dy)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_results_repeat_bit_for_bit() -> None:
    fused, _, tensors = build_case(rows=50)
    for first, second in zip(results(fused, tensors), results(fused, tensors), strict=True):
        assert torch.equal(first, second)


def test_bf16_gradients_are_rounded_once() -> None:
    """700 ones: bf16 would stop counting at 256."""
    dx = torch.ones(700, 3, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.zeros(700, dtype=torch.int64, device=DEVICE)
    found = family._add_by_id(dx, ids, 1, 1.0, torch.bfloat16)
    assert torch.equal(found, torch.full((1, 3), 700.0, dtype=torch.bfloat16, device=DEVICE))


def test_a_tied_table_gets_both_gradients() -> None:
    ids, rows = IDS["one frequent"]
    table = rand(rows, 24)

    def logits(look_up: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda token: look_up(ids, token) @ token.t()

    assert_parity(logits(embed), logits(F.embedding), [table], torch.float32)


def test_frozen_tables_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _, tensors = build_case()
    full = results(fused, tensors)[1:]
    summed: list[int] = []
    true = family._add_by_id
    monkeypatch.setattr(
        family, "_add_by_id", lambda dx, ids, rows, *rest: summed.append(rows) or true(dx, ids, rows, *rest)
    )
    leaves = [t.clone().requires_grad_(i in (1, 4)) for i, t in enumerate(tensors)]
    y = fused(*leaves)
    found = torch.autograd.grad(y, [leaves[1], leaves[4]], rand(*y.shape, seed=100))
    assert torch.equal(found[0], full[1]) and torch.equal(found[1], full[4])
    assert summed == [7]


def test_any_strides() -> None:
    fused, _, tensors = build_case(p=0.0)
    turned = [t if t.ndim == 1 else t.t().contiguous().t() for t in tensors]
    for a, b in zip(results(fused, tensors), results(fused, turned), strict=True):
        assert torch.equal(a, b)
    leaves = [t.clone().requires_grad_() for t in tensors]
    expanded = torch.autograd.grad(fused(*leaves).sum(), leaves)
    whole = torch.autograd.grad(fused(*leaves), leaves, torch.ones(21, 40, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(expanded, whole, strict=True))


def test_ops() -> None:
    ids, at, kinds = random_ids(9, 11), random_ids(9, 7), random_ids(9, 2)
    tables = [rand(*shape).requires_grad_() for shape in ((11, 8), (7, 8), (2, 8), (8,), (8,))]
    token, position, token_type, weight, bias = tables
    tail = (2.0, 1e-5, False, 0.2)
    lookups = (ids, token, at, position, kinds, token_type)
    assert_op(family._embed.overload, (*lookups, weight, bias, KEY, *tail, torch.bfloat16))
    bare = (ids, token, None, None, None, token_type, None, None, KEY)
    assert_op(family._embed.overload, (*bare, *tail, torch.float32))
    token, position, token_type, weight, bias = (t.detach() for t in tables)
    lookups = (ids, token, at, position, kinds, token_type)
    assert_op(family._embed_backward.overload, (rand(8, 9).t(), *lookups, weight, KEY, *tail))
    assert_op(family._add_by_id.overload, (rand(8, 9).t(), ids, 11, 2.0, torch.bfloat16))


@pytest.mark.parametrize("options", [{}, {"types": "none", "norm": "absent"}], ids=str)
def test_it_compiles(options: dict[str, Any]) -> None:
    fused, _, tensors = build_case(**options)
    assert_compiles(fused, tensors)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU trusts its ids")
@pytest.mark.parametrize("bad", [-1, 11])
def test_ids_out_of_range(bad: int) -> None:
    ids = torch.tensor([3, bad])
    with pytest.raises(IndexError, match=r"^ids go from .* rows 0 to 10 only"):
        embed(ids, rand(11, 4))
    with pytest.raises(IndexError, match="positions"):
        embed(ids * 0, rand(11, 4), ids, rand(11, 4))


def test_shapes_are_checked() -> None:
    ids, table = random_ids(4, 3), rand(3, 8)
    with pytest.raises(ValueError, match=r"ids \[T\]"):
        embed(ids[None], table)
    with pytest.raises(ValueError, match="positions"):
        embed(ids, table, ids[:2], table)
    with pytest.raises(ValueError, match="need a table"):
        embed(ids, table, types=ids)
    with pytest.raises(ValueError, match="the tokens' positions"):
        embed(ids, table, None, table)
    with pytest.raises(ValueError, match="8 wide"):
        embed(ids, table, ids, rand(3, 7))
    with pytest.raises(ValueError, match="norm_bias"):
        embed(ids, table, norm_bias=rand(8))
    with pytest.raises(ValueError, match="key"):
        embed(ids, table, p=0.1)


@pytest.mark.skipif(not RUNS_KERNELS, reason="runs the kernel: needs TRITON_INTERPRET=1 or a GPU")
def test_a_run_lost_at_the_border_of_a_chunk_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: None

    monkeypatch.setattr(family, "_join_pieces_kernel", Nothing())
    with pytest.raises(AssertionError):
        test_table_gradient_is_exact(*IDS["any"])


def test_another_mask_in_the_backward_pass_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    true = family._embed_backward
    monkeypatch.setattr(family, "_embed_backward", lambda *args: true(*args[:8], KEY + 1, *args[9:]))
    fused, plain, tensors = build_case()
    with pytest.raises(AssertionError):
        assert_parity(fused, plain, tensors, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [768, 1000, 4096])
def test_a_whole_batch(cols: int) -> None:
    rows, vocab = 32768, 50304
    ids = skewed(rows, vocab, 0.05)
    at, kinds = torch.arange(1024, device=DEVICE).repeat(32), random_ids(rows, 2)
    tensors = [
        rand(*shape, seed=i) for i, shape in enumerate([(vocab, cols), (1024, cols), (2, cols), (cols,), (cols,)])
    ]

    def lookups(token: Tensor, position: Tensor, token_type: Tensor) -> Any:
        return ids, token, at, position, kinds, token_type

    assert_parity(
        lambda *t: embed(*lookups(*t[:3]), 2.0, *t[3:], 1e-5, False, 0.1, KEY),
        lambda *t: embed_ref(Forward(*lookups(*t[:3]), *t[3:], KEY, 2.0, 1e-5, False, 0.1, t[0].dtype)),
        tensors,
        torch.bfloat16,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 1024, 50304])
def test_a_gradient_of_many_tokens_is_exact(rows: int) -> None:
    ids = random_ids(32768, rows)
    dx = (random_ids(32768 * 1024, 64, seed=3).view(-1, 1024) - 32).bfloat16()
    found = family._add_by_id(dx, ids, rows, 1.0, torch.float32)
    assert torch.equal(found, add_by_id_ref(dx, ids, rows, 1.0, torch.float32))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, cols = 2**21 + 3, 1024
    table = torch.zeros(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    table[-1] = 1
    table.requires_grad_()
    ids = torch.tensor([rows - 1, 5, rows - 1], device=DEVICE)
    y = embed(ids, table)
    assert torch.equal(y[:, 0].float(), torch.tensor([1.0, 0.0, 1.0], device=DEVICE))
    y.sum().backward()
    assert table.grad is not None
    used = table.grad[:, -1].nonzero().flatten().tolist()
    assert used == [5, rows - 1] and float(table.grad[-1, 7]) == 2.0
