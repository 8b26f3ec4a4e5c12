"""Sums that wait for the norm behind them: fewer passes over the activations, and the same numbers for everybody."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import stretto
import stretto.hf
import stretto.hf.defer
from stretto.hf.defer import Pending
from stretto.hf.modules import DeferringActivation, DeferringLinear
from stretto.ops.norm import add_norm
from tests.hf.families import FAMILIES, accelerated, build, draw_batch, learn
from tests.hf.observe import count_sums

# Of two layers each: all sums but the one that ends a stack, and in a stack with norms behind its sums, all of them.
SUMS = {"gpt2": 3, "llama": 3, "mistral": 3, "qwen2": 3, "qwen3": 3, "vit": 3}
SUMS |= {"bart": 10, "marian": 10, "t5": 8, "t5-gated": 8}


@pytest.mark.parametrize("family", SUMS)
def test_norms_compute_the_sums_before_them(family: str) -> None:
    model, batch = accelerated(family), draw_batch(family)
    with count_sums() as sums:
        learn(model, batch)
    assert len(sums) == SUMS[family]
    learn(model, batch, output_hidden_states=True)  # after which transformers leaves hooks behind
    with count_sums() as sums:
        learn(model, batch)
    assert len(sums) == SUMS[family]
    with count_sums() as sums, torch.no_grad():
        learn(model.eval(), batch)
    assert not sums, "only while gradients are recorded"


def make(**options: Any) -> tuple[Pending, Tensor, list[Tensor]]:
    """A product that waits, what it is added to, and the inputs."""
    torch.manual_seed(0)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 8), (8,), (2, 3, 8))]
    return Pending(nn.Identity(), inputs[0], inputs[1], **options), inputs[2], inputs


@pytest.mark.parametrize("residual_first", [True, False])
def test_a_sum_is_an_ordinary_tensor_for_anybody_else(residual_first: bool) -> None:
    branch, residual, inputs = make()
    total = residual + branch if residual_first else branch + residual
    assert isinstance(total, Pending) and total.shape == (2, 3, 8) and total.dtype == torch.float64
    expected = inputs[0] + inputs[1] + residual
    assert repr(total) == repr(expected)
    for use in (torch.relu, lambda x: x[:, 0], lambda x: torch.cat([x, x]), lambda x: x.to(torch.float32)):
        assert torch.equal(use(total), use(expected)) and not isinstance(use(total), Pending)
    found = torch.autograd.grad(total.square().sum(), inputs)
    assert all(map(torch.allclose, found, torch.autograd.grad(expected.square().sum(), inputs)))


def test_what_is_no_sum_of_a_branch_is_computed() -> None:
    branch, residual, inputs = make()
    value = inputs[0] + inputs[1]
    for found, expected in (
        (branch + 1, value + 1),
        (branch + residual[:1], value + residual[:1]),
        (branch + residual.float(), value + residual.float()),
        (torch.add(branch, residual, alpha=2), value + 2 * residual),
        (residual - branch, residual - value),
    ):
        assert not isinstance(found, Pending)
        torch.testing.assert_close(found, expected)
    total = residual + make()[0]
    torch.testing.assert_close(torch.relu(total + total), torch.relu(2 * (residual + value)))


def test_the_norm_of_a_sum_and_the_sum_afterwards() -> None:
    branch, residual, inputs = make()
    weight, bias = (torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    total = residual + branch
    assert isinstance(total, Pending)
    y = total.normalise(lambda *sum: add_norm(*sum[:3], weight, bias, 1e-5, False, *sum[3:]))
    assert y is not None and total.product is None, "the product is not kept longer than needed"
    stream = inputs[0] + inputs[1] + inputs[2]
    expected = F.layer_norm(stream, (8,), weight, bias, 1e-5) + stream.sin()
    found = y + total.sin()
    torch.testing.assert_close(found, expected)
    inputs += [weight, bias]
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_dropout_drops_the_same_elements_for_everybody() -> None:
    branch, residual, inputs = make()
    dropped = F.dropout(branch, 0.5, True)
    assert isinstance(dropped, Pending)
    total = dropped + residual
    assert isinstance(total, Pending)
    ones = torch.ones(8, dtype=torch.float64)
    total.normalise(lambda *sum: add_norm(*sum[:3], ones, None, 1e-5, True, *sum[3:]))
    torch.testing.assert_close(total.compute() - residual, dropped.compute())
    kept = dropped.compute() != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(dropped.compute()[kept], 2 * (inputs[0] + inputs[1])[kept])
    assert F.dropout(branch, 0.5, False) is branch and not isinstance(F.dropout(branch, 1.0, True), Pending)


@pytest.mark.parametrize(("function", "kind"), [(F.relu, "relu"), (F.gelu, "gelu")])
def test_an_activation_takes_the_bias_before_it_and_the_dropout_behind_it(function: Any, kind: str) -> None:
    waiting, _, inputs = make(activation=kind)
    expected = function(inputs[0] + inputs[1])
    torch.testing.assert_close(waiting + 0, expected)
    dropped = F.dropout(make(activation=kind)[0], 0.5, True)
    assert isinstance(dropped, Pending)
    kept = dropped.compute() != 0
    torch.testing.assert_close(dropped.compute()[kept], 2 * expected[kept])


@pytest.mark.parametrize(("family", "runs"), [("gpt2", 30), ("marian", 1)])
def test_dropout_between_sums_is_right_on_average(family: str, runs: int) -> None:
    config, batch = build(family).config, draw_batch(family)
    for name in ("resid_pdrop", "dropout", "activation_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.2)
    torch.manual_seed(0)
    plain: Any = type(build(family))(config)
    model = stretto.accelerate(copy.deepcopy(plain))
    with count_sums() as sums:
        ours, theirs = (torch.stack([m(**batch).loss.detach() for _ in range(runs)]).double() for m in (model, plain))
    assert set(sums) == {0.2}
    if runs > 1:
        assert ours.std() > 0
        assert abs(float(ours.mean() - theirs.mean())) < 5 * float(((ours.var() + theirs.var()) / runs).sqrt())


@pytest.mark.parametrize("family", ["gpt2", "llama", "bart", "vit"])
def test_what_leaves_a_model_or_a_layer_on_its_own_is_a_plain_tensor(family: str) -> None:
    model, batch = accelerated(family), draw_batch(family, None)
    plain = build(family)(**batch, output_hidden_states=True)
    out = model(**batch, output_hidden_states=True)
    names = [name for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states") if name in plain]
    assert names
    for name in names:
        assert all(type(state) is Tensor for state in out[name])
        torch.testing.assert_close(out[name], plain[name], rtol=1e-4, atol=1e-5)
    seen: list[Any] = []
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layer in layers:
        layer.register_forward_hook(lambda _, args, out: seen.append(out))
    model(**batch)
    assert len(seen) == 2 and not any(isinstance(out, Pending) for out in seen)


def test_without_fused_and_where_nothing_is_summed_layers_stay() -> None:
    for model in (accelerated("llama", fused=False), accelerated("bert")):
        assert not any(isinstance(module, DeferringLinear | DeferringActivation) for module in model.modules())


class Watchful(hf.models.llama.modeling_llama.LlamaDecoderLayer):
    """A layer that does something else when its sum waits."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(hidden_states, *args, **kwargs)
        return out if isinstance(out, Pending) else out + 1


def test_a_stack_that_gives_other_results_is_left_alone() -> None:
    model: Any = FAMILIES["llama"]()
    for layer in model.model.layers:
        layer.__class__ = Watchful
    batch = draw_batch("llama", None)
    expected = learn(model, batch)
    stretto.accelerate(model)
    assert "gives other results" in str(stretto.hf.report(model))
    assert not any(isinstance(module, DeferringLinear) for module in model.modules())
    torch.testing.assert_close(learn(model, batch), expected, rtol=1e-4, atol=1e-5)
