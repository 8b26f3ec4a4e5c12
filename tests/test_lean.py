"""What blocks keep for the backward pass: the same numbers from fewer bytes, in every kind of model and composition."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.config import FusedConfig, LayerDropConfig, LeanConfig, StandardizeConfig, TechniquesConfig
from stretto.errors import ConfigError
from stretto.model import Model, build_model, sites
from stretto.ops.remake import forgetting
from stretto.techniques.lean import LOOK, Lean
from stretto.techniques.technique import At, Context
from tests.models import (
    CONFIGS,
    DEVICE,
    KINDS,
    Sample,
    apply_techniques,
    build,
    collate,
    learn,
    make_batch,
    materialise,
)

DROPPING: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
# What is computed again with the same bits: all but the norms' own choice.
AGAIN: dict[str, dict[str, Any]] = {
    "mlp product": {"mlp": "product"},
    "mlp input": {"mlp": "input"},
    "qkv": {"mlp": "activation", "qkv": "input"},
    "both": {"mlp": "input", "qkv": "input"},
    "one block": {"blocks": 1},
    "all blocks": {"blocks": 2},
}


def lean(**options: Any) -> LeanConfig:
    return LeanConfig(**{"norms": "input", "mlp": "activation"} | options)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_computed_again_has_the_same_bits(name: str, way: str) -> None:
    """Each kind in fp32 with half of the ways, and in bf16 with the other half."""
    dtype = torch.float32 if (list(KINDS).index(name) + list(AGAIN).index(way)) % 2 else torch.bfloat16
    cfg = replace(KINDS[name], **DROPPING | ({"attention_dropout": 0.0} if "block" in way else {}))
    batch = make_batch(cfg)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    kept, again = (
        learn(build(cfg, FusedConfig(), dtype, options), batch, precision) for options in (None, lean(**AGAIN[way]))
    )
    assert_equal(again, kept)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder"])
def test_blocks_that_drop_attention_drop_the_same_again(name: str, form: str, alone: bool) -> None:
    """By a key of their own: two runs of the block within one step give one loss and the gradient of that loss.
    `alone`: nothing else is dropped, so that without these blocks there would be no keys."""
    cfg = replace(KINDS[name], **{"attention_dropout": 0.1} if alone else DROPPING)
    if form == "padded":
        with pytest.raises(ConfigError, match=r"blocks: with data\.layout = 'padded', attention_dropout"):
            chosen = TechniquesConfig(fused=FusedConfig(), lean=lean(blocks=1))
            apply_techniques(build_model(cfg), chosen, DEVICE, padded=True)
        return
    batch = make_batch(cfg)
    model = build(cfg, FusedConfig(), torch.float64, lean(blocks=2))
    found = learn(model, batch)
    key = f"{name.rpartition('-')[2]}.blocks.0.mlp.up.weight"
    weight = model.get_parameter(key)
    with torch.no_grad():
        weight[0, 0] += 1e-5
    moved = learn(model, batch)["loss"]
    with torch.no_grad():
        weight[0, 0] -= 2e-5
    slope = (moved - learn(model, batch)["loss"]) / 2e-5
    assert torch.allclose(slope, found[key][0, 0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", KINDS)
def test_norms_from_their_outputs(name: str) -> None:
    """The loss has the same bits, and so, in fp64, have all gradients but for rounding."""
    cfg, batch = replace(KINDS[name], **DROPPING), make_batch(KINDS[name])
    kept, less = (
        learn(build(cfg, FusedConfig(), torch.float64, options), batch)
        for options in (None, LeanConfig(norms="output"))
    )
    assert torch.equal(kept["loss"], less["loss"])
    for key, wanted in kept.items():
        torch.testing.assert_close(less[key], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gate", ["batch", "sample"])
@pytest.mark.parametrize("scale", ["branch", "update"])
@pytest.mark.parametrize("standardize", [None, StandardizeConfig()], ids=["norms", "affines"])
def test_with_dropped_blocks_and_affines(gate: Any, scale: Any, standardize: StandardizeConfig | None) -> None:
    cfg = replace(CONFIGS["decoder"], dropout=0.2, layers=3)
    drop = LayerDropConfig(gate=gate, theta=0.3, schedule="constant", scale=scale)
    results = []
    for options in (None, lean(mlp="input", qkv="input", blocks=2)):
        model = build_model(cfg)
        chosen = TechniquesConfig(standardize, FusedConfig(), options, layer_drop=drop)
        techniques = apply_techniques(model, chosen, DEVICE, steps=10)
        materialise(model, cfg, 0, DEVICE)
        techniques.begin(1, 1.0, None)
        batch = techniques.prepare(make_batch(cfg).to(torch.device("cpu")), At(1, 1)).to(DEVICE)
        assert batch.depths["decoder"].work < 3
        results.append(learn(model.train(), batch))
    assert_equal(*results)


@pytest.mark.parametrize("affine", [False, True])
def test_affines_from_their_outputs(affine: bool) -> None:
    cfg, results = replace(CONFIGS["decoder"], dropout=0.2), []
    for options in (None, LeanConfig()):
        model = build_model(cfg)
        chosen = TechniquesConfig(StandardizeConfig(affine=affine), FusedConfig(), options)
        techniques = apply_techniques(model, chosen, DEVICE, steps=10)
        materialise(model, cfg, 0, DEVICE)
        techniques.begin(1, 1.0, None)
        results.append(learn(model.double().train(), make_batch(cfg)))
    assert torch.equal(results[0]["loss"], results[1]["loss"])
    for key, wanted in results[0].items():
        torch.testing.assert_close(results[1][key], wanted, rtol=1e-9, atol=1e-9)


def test_weights_that_change_before_the_backward_pass_are_noticed() -> None:
    model = build(CONFIGS["decoder"], FusedConfig(), lean=lean(qkv="input"))
    loss = model(make_batch(CONFIGS["decoder"]))
    with torch.no_grad():
        model.get_parameter("decoder.blocks.1.attention.qkv.weight").add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_is_made_again_once_for_each_backward_pass() -> None:
    x, calls = torch.randn(3, 4, requires_grad=True), []

    def make() -> Tensor:
        calls.append(1)
        return x.detach() * 2

    def run(again: Any = make) -> Tensor:
        y = x * 2
        with forgetting(y, again):
            return (y[:2] * y[1:]).exp().sum()

    wanted = torch.autograd.grad(run(), x)[0]
    (x[:2] * 2 * (x[1:] * 2)).exp().sum().backward()
    assert torch.equal(wanted, x.grad) and len(calls) == 1  # type: ignore[arg-type]
    loss = run()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
    assert len(calls) == 3
    assert not torch.equal(torch.autograd.grad(run(lambda: x.detach() * 3), x)[0], wanted), "the control"


def test_a_forward_pass_without_a_backward_pass_leaves_nothing() -> None:
    x, kept = torch.randn(3, 4, requires_grad=True), []

    def run() -> None:
        y = x * 2
        with forgetting(y, lambda: x.detach() * 2):
            out = y.exp().exp()  # each of which keeps its result
        kept.append(weakref.ref(out))

    run()
    assert kept[0]() is None


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_a_batch_without_tokens(name: str) -> None:
    cfg = KINDS[name]
    batch = collate(cfg, [Sample.draw(0, 0, 0)]).to(DEVICE)
    found = learn(build(cfg, FusedConfig(), lean=lean(mlp="input", qkv="input", blocks=1)), batch)
    assert_equal(found, learn(build(cfg, FusedConfig()), batch))


# Norms whose output has lost their input.


def open_lean(model: Model, **options: Any) -> Lean:
    chosen = TechniquesConfig(fused=FusedConfig(), lean=LeanConfig(**options))
    techniques = apply_techniques(model, chosen, DEVICE)
    materialise(model, model.cfg, 0, DEVICE)
    return next(technique for technique in techniques if isinstance(technique, Lean))


def test_a_norm_with_a_weight_near_zero_keeps_its_input() -> None:
    cfg = CONFIGS["decoder"]
    model = build_model(cfg).train()
    technique, name = open_lean(model), "decoder.blocks.0.mlp_norm"
    norm: Any = model.get_submodule(name)
    technique.begin(0, 1.0, None)
    before = technique.graph_key(0)
    assert norm.from_output and technique.find_lost() == [] and technique.metrics(1) == {}
    with torch.no_grad():
        norm.weight[3] = 0.0
    for step in range(1, LOOK):
        technique.begin(step, 1.0, None)
    assert norm.from_output, "nobody has looked yet"
    technique.begin(LOOK, 1.0, None)
    assert not norm.from_output and technique.find_lost() == [name]
    assert technique.graph_key(LOOK) != before and technique.metrics(1) == {"norms_keeping_input": 1.0}
    untouched = [m for m in model.modules() if isinstance(m, nn.LayerNorm) and m is not norm]
    assert sum(getattr(m, "from_output", False) for m in untouched) == 2 * cfg.layers - 1
    again = build_model(cfg)
    resumed = open_lean(again)
    resumed.load_state_dict(technique.state_dict())
    resumed.begin(LOOK + 1, 1.0, None)
    assert resumed.find_lost() == [name], "a resumed run does not look again until the next time"
    open_lean(build_model(cfg), norms="input").load_state_dict(technique.state_dict())
    with torch.no_grad():
        norm.weight[3] = 1.0
    technique.begin(2 * LOOK, 1.0, None)
    assert norm.from_output and technique.graph_key(0) == before


def test_a_run_that_goes_on_with_norms_from_outputs_looks_at_them_first() -> None:
    before = open_lean(build_model(CONFIGS["decoder"]), norms="input")
    before.begin(LOOK, 1.0, None)
    model = build_model(CONFIGS["decoder"])
    resumed, name = open_lean(model), "decoder.blocks.0.mlp_norm"
    nn.init.zeros_(model.get_parameter(f"{name}.weight"))
    resumed.load_state_dict(before.state_dict())
    resumed.begin(LOOK + 1, 1.0, None)
    assert resumed.find_lost() == [name]


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_weights_of_zero_train(name: str) -> None:
    """A norm whose weights are all 0 at first, as some models begin, learns as it does without the technique."""
    cfg, batch, results = CONFIGS[name], make_batch(CONFIGS[name]), []
    for options in (None, LeanConfig()):
        model = build_model(cfg)
        techniques = apply_techniques(model, TechniquesConfig(fused=FusedConfig(), lean=options), DEVICE)
        materialise(model, cfg, 0, DEVICE)
        norm = model.get_submodule(next(name for name in sites(model)["norm"] if "mlp_norm" in name))
        nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            techniques.begin(step, 1.0, None)
            model.train()(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(norm.weight.detach().clone())  # type: ignore[operator]
    assert results[0].abs().min() > 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


# What is refused.


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        ({}, {"fused": None}, "techniques.lean: plain modules keep what torch keeps: set techniques.fused to true"),
        ({"memory": "80%"}, {}, "memory = '80%' is a share of a GPU's memory, and there is none: name GiB"),
        ({"blocks": 1}, {"window": 8}, "blocks: with model.window, attention_dropout draws random numbers"),
        ({"qkv": "input"}, {"compiled": True}, "qkv: torch.compile cannot compute again: set train.compile to false"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(options: dict[str, Any], context: dict[str, Any], message: str) -> None:
    cfg = replace(CONFIGS["decoder"], attention_dropout=0.1, window=context.pop("window", 0))
    chosen = TechniquesConfig(fused=context.pop("fused", FusedConfig()), lean=LeanConfig(**options))
    if DEVICE.type == "cuda" and "%" in message:
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        apply_techniques(build_model(cfg), chosen, DEVICE, **context)


def test_compiled_models_may_keep_less() -> None:
    chosen = TechniquesConfig(fused=FusedConfig(), lean=LeanConfig())
    apply_techniques(build_model(CONFIGS["decoder"]), chosen, DEVICE, compiled=True)


def test_other_models_are_told_what_to_use_instead() -> None:
    technique = Lean(LeanConfig(memory="4GiB", blocks=2), Context(None, DEVICE, "fp32"))
    without_kernels, reason = technique.check([])
    assert "plain modules keep what torch keeps" in without_kernels
    assert "memory, blocks: for Stretto's own models; use gradient_checkpointing_enable()" in reason
