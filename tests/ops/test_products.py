"""All products with weights are in one file, which is found by reading the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stretto.ops
from stretto.ops.products import (
    add_dweight,
    add_dx,
    compute_dweight,
    compute_dx,
    compute_gradients,
    multiply,
    multiply_into,
    multiply_scaled,
)
from tests.ops.checks import DTYPES, error, rand

FILES = sorted(Path(stretto.ops.__file__).parent.glob("*.py"))
METHODS = {"mm", "matmul", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "einsum", "tensordot", "chain_matmul"}
METHODS |= {"_scaled_mm", "_scaled_mm_v2", "scaled_mm"}
FUNCTIONS = METHODS | {"linear", "bilinear", "inner", "dot", "vdot"}  # linear is a family of ops/ too
# Products without a weight: attention's reference multiplies activations, the standardization loss takes means.
ALLOWED = {
    "attention.py": {"_scores_ref", "attention_ref", "attention_backward_ref"},
    "affine.py": {"moments_ref"},
    "products.py": {function.__name__ for function in (multiply, multiply_into, compute_dx, add_dx)}
    | {function.__name__ for function in (compute_dweight, add_dweight, compute_gradients, multiply_scaled)},
}


def find_products(source: str) -> Iterator[tuple[str, str]]:
    """The function, or "" outside of one, and the text of each matrix product."""
    tree = ast.parse(source)
    owner = dict.fromkeys(ast.walk(tree), "")
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            owner |= dict.fromkeys(ast.walk(function), function.name)
    for node, name in owner.items():
        if is_product(node):
            yield name, ast.unparse(node)


def is_product(node: ast.AST) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return isinstance(node.op, ast.MatMult)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("torch") and any(alias.name in FUNCTIONS for alias in node.names)
    if not isinstance(node, ast.Attribute):  # whether it is called or passed on
        return False
    name, of = node.attr.removesuffix("_"), ast.unparse(node.value)
    return name in METHODS or (name in FUNCTIONS and of.split(".")[0] in ("torch", "F", "aten"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_products_are_where_they_belong(path: Path) -> None:
    found = list(find_products(path.read_text(encoding="utf-8")))
    assert [product for function, product in found if function not in ALLOWED.get(path.name, ())] == []
    assert {function for function, _ in found} == ALLOWED.get(path.name, set()), "a product was expected and is gone"


@pytest.mark.parametrize(
    "planted",
    [
        "dx = dout @ weight",
        "dx @= weight",
        "torch.mm(a, b, out=c)",
        "total.addmm_(a, b)",
        "F.linear(x, weight)",
        "torch.nn.functional.linear(x, weight)",
        "partial(torch.matmul, weight)",
        "from torch.nn.functional import linear",
        "torch.ops.aten.mm(a, b)",
        "def f(x):\n    def g(y):\n        return torch.einsum('ij,jk->ik', x, y)",
    ],
)
def test_a_planted_product_is_found(planted: str) -> None:
    assert list(find_products(planted))


@pytest.mark.parametrize("other", ["tl.dot(q, k)", "linear(x, weight)", "from stretto.ops.linear import linear"])
def test_other_things_are_no_products(other: str) -> None:
    assert not list(find_products(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_roles(dtype: torch.dtype) -> None:
    """Each role by its formula, in all its forms."""
    x, weight, bias, dout = args = [rand(*shape, dtype=dtype) for shape in ((7, 24), (40, 24), (40,), (7, 40))]
    wide_x, wide_weight, wide_bias, wide_dout = (t.double() for t in args)
    y, dx, dweight = wide_x @ wide_weight.t(), wide_dout @ wide_weight, wide_dout.t() @ wide_x

    bare, biased, given, twice = torch.empty_like(dout), torch.empty_like(dout), torch.empty_like(x), dx.to(dtype)
    sums = torch.zeros_like(weight, dtype=torch.float32)
    multiply_into(bare, x, weight)
    multiply_into(biased, x, weight, bias)
    compute_dx(dout, weight, out=given)
    add_dx(twice, dout, weight)
    for beta in (0.0, 1.0):
        add_dweight(sums, dout, x, beta)
    found = [(multiply(x, weight), y), (multiply(x, weight, bias), y + wide_bias), (bare, y), (biased, y + wide_bias)]
    found += [(compute_dx(dout, weight), dx), (given, dx), (twice, 2 * dx)]
    found += [(compute_dweight(dout, x), dweight), (sums, 2 * dweight)]
    found += zip(compute_gradients(dout, x, weight), (dx, dweight), strict=True)
    for value, exact in found:
        assert error(value, exact) < torch.finfo(value.dtype).eps
