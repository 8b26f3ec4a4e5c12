"""What accelerated models keep for the backward pass: fewer bytes, counted, and the gradients that come of them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import stretto
import stretto.hf
from stretto.config import LeanConfig
from stretto.errors import ConfigError
from stretto.hf.acceleration import techniques_of
from stretto.hf.loop import Step
from stretto.hf.trainer import Trainer
from stretto.optim import FlatAdamW
from stretto.techniques.lean import LOOK, Lean
from stretto.techniques.technique import Context
from tests.hf.families import (
    FAMILIES,
    FLOOR,
    WIDTH,
    Batch,
    accelerated,
    assert_parity,
    build,
    draw_batch,
    errors,
    learn,
)  # fmt: skip
from tests.hf.trainers import make
from tests.models import KINDS

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

KEPT = ("bert", "roberta", "gpt2", "llama", "bart", "marian", "marian-swish", "t5", "t5-gated", "vit")
NORMS = {"mlp": "activation"}  # nothing but norms keeps less
EXACT = {"activations": "input"}  # besides these, MLPs compute their activation again, with the same bits
HEADS = 4


def norms_of(model: nn.Module) -> dict[str, bool]:
    """By name, whether each reads its output."""
    return {name: vars(m)["from_output"] for name, m in model.named_modules() if "from_output" in vars(m)}


def lost(model: nn.Module) -> list[str]:
    found: list[str] = techniques_of(model).state_dict().get("lean", {}).get("lost", [])
    return found


# The numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", KEPT)
def test_norms_and_mlps_have_the_gradients_of_the_untouched_model(family: str, dtype: torch.dtype) -> None:
    batch = draw_batch(family)
    exact, plain = (learn(build(family, each), batch) for each in (torch.float64, dtype))
    model = accelerated(family, dtype, lean=EXACT)
    assert all(norms_of(model).values()) and len(norms_of(model)) >= 5
    found = learn(model, batch)
    assert_parity(found, plain, exact, FLOOR if dtype == torch.float32 else 2**-8)
    assert torch.equal(found["loss"], learn(accelerated(family, dtype), batch)["loss"])


@pytest.mark.parametrize("activations, bound", [("code8", 5e-3), ("bit", 5e-4)])
@pytest.mark.parametrize("family", KEPT)
def test_coded_activations_have_gradients_within_their_bound(family: str, activations: str, bound: float) -> None:
    """The code is off by at most 2.5e-3, and the slope of what is nearly 0, as much is in such small models, is 0.5."""
    batch = draw_batch(family)
    found = learn(accelerated(family, lean={"activations": activations}), batch)
    kept = learn(accelerated(family), batch)
    off = errors(found, learn(build(family, torch.float64), batch))
    assert torch.equal(found["loss"], kept["loss"]) and max(off.values()) < bound
    coded = family in ("bert", "roberta", "bart", "marian-swish")
    assert coded == any(error > 1e-5 for error in off.values()), off


@pytest.mark.parametrize("activations", ["code8", "bit"])
@pytest.mark.parametrize("family", ["bert", "bart"])
def test_coded_activations_in_16_bits_are_as_near_as_the_untouched_model(family: str, activations: str) -> None:
    batch = draw_batch(family)
    exact, plain = (learn(build(family, each), batch) for each in (torch.float64, torch.bfloat16))
    found = learn(accelerated(family, torch.bfloat16, lean={"activations": activations}), batch)
    assert_parity(found, plain, exact, 2**-7)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bart", "t5"])
def test_under_autocast_gradients_are_those_of_the_untouched_model(family: str) -> None:
    batch = draw_batch(family)
    exact = learn(build(family, torch.float64), batch)
    found, plain = (learn(m, batch, autocast=True) for m in (accelerated(family, lean=True), build(family)))
    assert_parity(found, plain, exact, 2**-7)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bart", "t5"])
def test_recomputed_layers_have_the_same_gradients(family: str) -> None:
    batch, model = draw_batch(family), accelerated(family, lean=True)
    kept = learn(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = learn(model, batch)
    assert kept.keys() == again.keys()
    for name, value in kept.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "family, options", [("gpt2", {"layer_drop": {"schedule": "constant"}}), ("llama", {"standardize": True})]
)
def test_with_another_technique_the_gradients_are_those_of_that_alone(family: str, options: dict[str, Any]) -> None:
    batch, results = draw_batch(family), []
    for more in ({}, {"lean": EXACT}):
        model = accelerated(family, torch.float64, steps=10, **options, **more)
        stretto.hf.set_step(model, 3)
        results.append(learn(model, batch))
    assert all(norms_of(model).values())
    assert torch.equal(results[0]["loss"], results[1]["loss"]) and max(errors(*results).values()) < 1e-6


# The bytes


def build_layers(family: str, layers: int) -> Any:
    """Of so many layers, with an MLP four times as wide as the stream."""
    config: Any = copy.deepcopy(FAMILIES[family]().config)
    config.num_hidden_layers, config.layer_types = layers, None
    setattr(config, "n_inner" if family == "gpt2" else "intermediate_size", 4 * WIDTH)
    return type(FAMILIES[family]())(config).train()


def count_kept(model: nn.Module, batch: Batch, autocast: bool) -> int:
    """The bytes of all storages that the backward pass needs, but for those of parameters."""
    parameters, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, Tensor]()

    def keep(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in parameters:
            found[value.untyped_storage().data_ptr()] = value  # which stays, so that nobody else gets its address
        return value

    dtype = next(model.parameters()).dtype
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(), saved_tensors_hooks(keep, lambda t: t):
        out = model(**given)
    assert out.loss.requires_grad
    return sum(value.untyped_storage().nbytes() for value in found.values())


def bytes_of_a_layer(family: str, dtype: torch.dtype, autocast: bool = False, **options: Any) -> float:
    """For each token: what three layers keep more than two."""
    batch = draw_batch(family, None)
    models = (stretto.accelerate(build_layers(family, number).to(dtype), **options) for number in (2, 3))
    sizes = [count_kept(model, batch, autocast) for model in models]
    return (sizes[1] - sizes[0]) / (3 * (17 if family == "vit" else 9))


# In elements of 16 bits, C channels: the norms' outputs 2 C, the attention's output C, queries, keys and values 3 C
# (Llama: 2 C), and 4 C each of what an MLP makes: its product (Llama: of the gate, and of the value), its activation.
SEPARATE = {False: 16, "norms": 14, "code8": 14 - 2, "bit": 14 - 4 + 4 / 16}
WHOLE = {False: 16, "norms": 14, "product": 14 - 4, "input": 14 - 8}
GATED = {False: 15, "norms": 13, "product": 13, "input": 13}
WAYS = {
    "norms": NORMS, "code8": True, "bit": {"activations": "bit"}, "product": True, "input": {"mlp": "input"},
}  # fmt: skip


@pytest.mark.parametrize(
    "family, elements",
    [("bert", SEPARATE), ("roberta", SEPARATE), ("gpt2", WHOLE), ("vit", WHOLE), ("llama", GATED)],
)
def test_bytes_of_a_layer_are_counted(family: str, elements: dict[Any, float]) -> None:
    for way, number in elements.items():
        statistics = 1 if family == "llama" or way else 2  # of a norm; an output says what the mean was
        wanted = 2 * number * WIDTH + 4 * (2 * statistics + HEADS)
        assert bytes_of_a_layer(family, torch.bfloat16, lean=WAYS.get(way, False)) == wanted, way


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_under_autocast_norms_keep_as_much_as_before(family: str) -> None:
    """In fp32, while products keep copies in 16 bits: what becomes less is one number for each norm, the mean. MLPs and
    activations keep less as ever."""
    kept, norms, less = (
        bytes_of_a_layer(family, torch.float32, autocast=True, lean=options) for options in (False, NORMS, True)
    )
    assert kept - norms == 2 * 4
    assert norms - less == 4 * WIDTH * (1 if family == "bert" else 2)


def test_norms_of_queries_and_keys_keep_their_input() -> None:
    """Their output is rotated and kept by nobody; their input is a part of the product that the values are in."""
    found = norms_of(accelerated("qwen3", lean=True))
    assert len(found) == 5 and not any("q_norm" in name or "k_norm" in name for name in found)


# When it is not possible


def test_a_norm_with_a_lost_channel_keeps_its_input() -> None:
    batch, name = draw_batch("bert"), "bert.encoder.layer.1.output.LayerNorm"
    models = {}
    for dtype in (torch.float64, torch.float32):
        models[dtype] = build("bert", dtype)
        with torch.no_grad():
            models[dtype].get_submodule(name).weight[3] = 0.0
    exact, plain = (learn(model, batch) for model in models.values())
    model = stretto.accelerate(models[torch.float32], lean=EXACT)
    assert lost(model) == [name] and [norm for norm, good in norms_of(model).items() if not good] == [name]
    assert techniques_of(model).metrics(1) == {"norms_keeping_input": 1.0}
    assert_parity(learn(model, batch), plain, exact, FLOOR)


def test_weights_are_looked_at_again_while_a_model_is_trained() -> None:
    model, name = accelerated("gpt2", lean=True), "transformer.h.1.ln_1"
    other = copy.deepcopy(model)
    stretto.hf.set_step(model, 0)
    with torch.no_grad():
        model.get_submodule(name).weight[3] = 0.0
    stretto.hf.set_step(model, LOOK - 1)
    assert lost(model) == []
    stretto.hf.set_step(model, LOOK)
    assert lost(model) == [name] and techniques_of(model).graph_key(LOOK) != techniques_of(other).graph_key(LOOK)
    stretto.hf.set_step(other, LOOK)  # a copy has norms of its own
    assert lost(other) == [] and all(norms_of(other).values())


def test_a_model_that_writes_into_what_a_norm_gave_keeps_what_it_kept() -> None:
    def double(norm: nn.Module, args: Any, y: Tensor) -> None:
        y.mul_(2.0)

    plain, batch = build("gpt2"), draw_batch("gpt2")
    plain.transformer.h[0].ln_1.register_forward_hook(double)
    model = stretto.accelerate(copy.deepcopy(plain), lean=True)
    [line] = [line for line in stretto.hf.report(model).lines if line.role == "kept"]
    assert "modified by an inplace operation" in str(line.problem) and norms_of(model) == {} and lost(model) == []
    assert max(errors(learn(model, batch), learn(plain, batch)).values()) < 1e-4


def test_restore_gives_the_model_back() -> None:
    for family in ("bert", "gpt2", "bart"):
        plain, batch = build(family), draw_batch(family)
        model = stretto.accelerate(copy.deepcopy(plain), lean=True)
        [line] = [line for line in stretto.hf.report(model).lines if line.role == "kept"]
        assert line.problem is None
        next(m for m in model.modules() if "from_output" in vars(m)).from_output = False  # as a look may set it
        learn(model, batch)
        stretto.restore(model)
        for theirs, ours in zip(plain.modules(), model.modules(), strict=True):
            assert type(ours) is type(theirs) and vars(ours).keys() == vars(theirs).keys()
        found, wanted = learn(model, batch), learn(plain, batch)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"lean": {"memory": "16GiB"}}, r"memory: for Stretto's own models; use gradient_checkpointing_enable\(\)"),
        ({"lean": {"qkv": "input", "blocks": 1}}, "qkv, blocks: for Stretto's own models"),
        ({"lean": {"activations": "code4"}}, "techniques.lean.activations = 'code4' must be one of"),
        ({"lean": True, "fused": False}, "plain modules keep what torch keeps: set techniques.fused to true"),
    ],
)
def test_what_cannot_be_done_is_an_error_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=reason):
        stretto.accelerate(build("gpt2"), **options)


def test_the_option_for_their_activations_is_refused_in_our_own_models() -> None:
    context = Context(KINDS["decoder"], torch.device("cpu"), "fp32")
    reasons = Lean(LeanConfig(activations="bit"), context).check([])
    assert [reason for reason in reasons if reason.startswith("activations: for Hugging Face's models")]


# Loops


def test_steps_and_the_trainer_train_the_same_model(tmp_path: Path) -> None:
    """The loss of the first update has the same bits; the others are near."""
    losses, logged = list[list[float]](), list[list[float]]()
    for option in (False, True):
        model = accelerated("gpt2", lean=option)
        step = Step(model, FlatAdamW(model.parameters(), lr=1e-3), clip=1.0)
        losses.append([float(step(draw_batch("gpt2", seed=seed))) for seed in range(4)])
        trainer = make(Trainer, accelerated("bert-classes", lean=option), tmp_path / str(option), "bert-classes")
        trainer.train()
        logged.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0][0] == losses[1][0] and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(logged[0]) == 6 and logged[0] == pytest.approx(logged[1], rel=1e-2)
