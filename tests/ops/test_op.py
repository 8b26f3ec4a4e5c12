"""An op can be called in two ways, directly and through torch's dispatcher, with the same results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import stretto.ops.op
from stretto.ops.norm import _add_norm, norm
from stretto.ops.op import hash_sources
from tests.ops.checks import DEVICE, rand


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls by torch's way."""
    seen, overload = list[Any](), _add_norm.overload

    def note(*args: Any) -> Any:
        seen.append(args)
        return overload(*args)

    monkeypatch.setattr(_add_norm, "overload", note)
    return seen


def run(x: Tensor) -> list[Tensor]:
    weight = torch.linspace(1, 2, x.shape[1], device=x.device, requires_grad=True)
    y = norm(x, weight, None, 1e-5, rms=True)
    return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), [x, weight])]


def test_both_ways_give_the_same_bits(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = rand(6, 32).requires_grad_()
    short = run(x)
    assert not calls
    monkeypatch.setattr("stretto.ops.op.is_watched", lambda: True)
    for a, b in zip(short, run(x), strict=True):
        assert torch.equal(a, b)
    assert calls


def test_who_looks_on_sees_the_op(calls: list[Any]) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names, x = list[str](), rand(6, 32).requires_grad_()
    with Watch():
        run(x)
    assert calls and {"stretto::add_norm", "stretto::norm_backward"} <= set(names)


def test_fake_tensors_need_no_kernel() -> None:
    with FakeTensorMode():
        y, dx, dweight = run(torch.empty(6, 32, device=DEVICE, requires_grad=True))
    assert y.shape == dx.shape == (6, 32) and dweight.shape == (32,)


def test_a_device_without_a_body_has_torch_to_look_for_one(calls: list[Any]) -> None:
    y = norm(torch.empty(6, 32, device="meta"), torch.empty(32, device="meta"), None, 1e-5, True)
    assert y.is_meta and y.shape == (6, 32) and calls


def test_what_is_compiled_knows_the_formulas_it_has_inside(tmp_path: Path) -> None:
    """torch finds compiled code by the names of ops: without a tag, an op with another gradient gets the old one."""
    package = Path(stretto.ops.op.__file__).parent
    assert f"stretto {hash_sources(package)}" in torch.compiler.config.cache_key_tag
    shutil.copytree(package, tmp_path / "ops")
    assert hash_sources(tmp_path / "ops") == hash_sources(package)
    with (tmp_path / "ops" / "norm.py").open("a") as file:
        file.write("# another formula\n")
    assert hash_sources(tmp_path / "ops") != hash_sources(package)
