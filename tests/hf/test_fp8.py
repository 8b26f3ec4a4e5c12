"""Products of 8 bits in Hugging Face's models: who asks for them, what they give, and when they are the usual ones."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
import stretto.hf
from stretto.estimate import Rates
from stretto.hf.acceleration import techniques_of
from stretto.hf.loop import Step
from stretto.ops.fp8 import Eight
from stretto.ops.products import Product
from stretto.optim import FlatAdamW
from stretto.techniques import fp8
from stretto.techniques.fp8 import Fp8
from tests.hf.families import FAMILIES, Batch, accelerated, build, draw_batch
from tests.hf.observe import replay_and_compare

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = {"sites": "all"}
BF16 = torch.bfloat16
# What asks in each layer, by the name of the first linear layer of a product.
ASKED = {
    "bert": {"attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"},
    "gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    "llama": {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"},
    "vit": {"attention.q_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2"},
}
PAIRS = ("marian", "t5-gated")


def technique_of(model: nn.Module) -> Fp8:
    (found,) = [each for each in techniques_of(model) if isinstance(each, Fp8)]
    return found


def learn(model: Any, batch: Batch, step: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients."""
    if step is not None:
        stretto.hf.set_step(model, step)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def draw(family: str) -> Batch:
    batch = draw_batch(family)
    return {name: value.to(BF16) if value.is_floating_point() else value for name, value in batch.items()}


def lines_of(model: nn.Module) -> dict[str, str | None]:
    return {line.names: line.problem for line in stretto.hf.report(model).lines if line.role == "fp8"}


@pytest.mark.parametrize("family", [*ASKED, *PAIRS])
def test_layers_ask(family: str) -> None:
    """All linear layers of blocks; gradients turn by as much as rounding turns them, and evaluation is as without."""
    plain, narrow, batch = accelerated(family, BF16), accelerated(family, BF16, fp8=ALL), draw(family)
    found = lines_of(narrow)
    chosen = {name.partition("#.")[2] for name, problem in found.items() if problem is None}
    if family in ASKED:
        assert chosen == ASKED[family]
        assert len(technique_of(narrow).products) == 8
    else:
        assert len(technique_of(narrow).products) == 2 * (4 + 7), "in a decoder also queries, keys and the output"
    (loss, exact), (first, _), (other, rounded) = learn(plain, batch), learn(narrow, batch, 0), learn(narrow, batch, 1)
    assert abs(float(loss - first)) < 0.03 and abs(float(loss - other)) < 0.03
    assert not any(torch.equal(exact[name], rounded[name]) for name in exact if name.endswith("weight"))
    for name, gradient in exact.items():
        if gradient.norm() > 0.02 * max(g.norm() for g in exact.values()):
            assert F.cosine_similarity(gradient.flatten(), rounded[name].flatten(), 0) > 0.95, name
    plain.eval()
    narrow.eval()
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits, narrow(**batch).logits)
    assert narrow.state_dict().keys() == plain.state_dict().keys()
    stretto.restore(narrow)
    assert not any(hasattr(module, "product") for module in narrow.modules())


def test_bounds_are_known_from_the_second_update_on() -> None:
    """`set_step` ends the update before. Without it, every batch takes maxima."""
    model, batch = accelerated("gpt2", BF16, fp8=ALL), draw("gpt2")
    technique = technique_of(model)
    learn(model, batch)
    assert technique.bounds is None
    learn(model, batch, 0)
    assert technique.graph_key(0) is None, "a first update is launched"
    learn(model, batch, 1)
    bounds = technique._list_bounds()
    assert len(bounds) == 3 * 8 and all(bound.known for bound in bounds) and technique.graph_key(1) == (24,)
    for bound in bounds:
        bound.most.mul_(1e-3)
    technique.watched, name = [], "transformer.h.0.mlp.c_fc.weight"
    clamped, healthy = learn(model, batch)[1][name], learn(model, batch, 2)[1][name]
    assert F.cosine_similarity(clamped.flatten(), healthy.flatten(), 0) < 0.99


def test_a_batch_with_few_tokens_is_multiplied_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule for its own tokens, without padding; recordings of such batches are not forgotten."""
    monkeypatch.setattr(fp8, "RATES", Rates(1.0, 1e9, 1 / 7.5))
    monkeypatch.setattr(Fp8, "_find_problem", lambda each: "")
    model, plain = (stretto.accelerate(build_deep(), **options) for options in ({"fp8": True}, {}))
    technique = technique_of(model)
    assert set(technique.products) == {f"model.layers.1.{name}" for name in ASKED["llama"]}, (
        "not the first and the last"
    )
    reasons = {line.problem for line in stretto.hf.report(model).lines if line.role == "fp8"}
    assert "the first and the last layer stay in bf16" in reasons
    assert all(10 < product.least < 15 for product in technique.products.values())
    few = {name: value[1:] for name, value in draw("llama").items()}  # 9 tokens
    full = {"input_ids": (ids := draw_batch("llama", None)["input_ids"]), "labels": ids}

    def differ(batch: Batch, step: int) -> float:
        """The gradients of a weight whose layer may have 8 bits."""
        name = "model.layers.1.mlp.down_proj.weight"
        found, exact = (learn(*each)[1][name] for each in ((model, batch, step), (plain, batch)))
        return float((found - exact).norm() / exact.norm())

    assert differ(few, 0) < 0.005, "sums of another order, in bf16"
    assert technique.graph_key(0) is None
    stretto.hf.set_step(model, 1)
    assert technique.graph_key(1) == (2,), "the weights that are rounded beforehand; nothing else is waited for"
    assert differ(full, 2) > 0.02
    stretto.hf.set_step(model, 3)
    assert technique.graph_key(3) == (12,)


def build_deep() -> Any:
    """Three layers, whose kernels are wide enough to have a rule."""
    import transformers as hf

    config: Any = FAMILIES["llama"]().config
    config.num_hidden_layers = 3
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config).bfloat16().train()


def test_without_a_gpu_nothing_is_changed() -> None:
    model, plain, batch = accelerated("bert", BF16, fp8=True), accelerated("bert", BF16), draw("bert")
    assert set(lines_of(model).values()) == {"there is no GPU"} and not technique_of(model).products
    (loss, found), (other, exact) = learn(model, batch, 0), learn(plain, batch)
    assert loss == other and all(torch.equal(found[name], exact[name]) for name in exact)


def test_a_model_in_fp32_multiplies_in_fp32_and_under_autocast_in_8_bits() -> None:
    model, plain, batch = (*(accelerated("bert", fp8=each) for each in (ALL, False)), draw_batch("bert"))
    assert torch.equal(learn(model, batch, 0)[0], learn(plain, batch)[0])
    with torch.autocast("cpu", BF16):
        losses = learn(model, batch, 1)[0], learn(plain, batch)[0]
    assert losses[0] != losses[1] and abs(float(losses[0] - losses[1])) < 0.03


def test_the_output_layer_may_have_it() -> None:
    import transformers as hf

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        config: Any = FAMILIES["llama"]().config
        config.vocab_size = 64
        return stretto.accelerate(hf.LlamaForCausalLM(config).bfloat16().train(), **options)

    model, without, batch = make(fp8=ALL | {"head": True}), make(fp8=ALL), draw("llama")
    assert lines_of(model)["lm_head"] is None and "`head`" in str(lines_of(without)["lm_head"])
    (loss, found), (other, exact) = learn(model, batch, 0), learn(without, batch, 0)
    name = "lm_head.weight"
    assert loss != other and 0.99 < F.cosine_similarity(found[name].flatten(), exact[name].flatten(), 0) < 0.99999


def test_frozen_weights_get_no_gradient() -> None:
    model, batch = accelerated("llama", BF16, fp8=ALL), draw("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    assert set(learn(model, batch, 0)[1]) == {name for name, _ in model.named_parameters() if "norm" in name}


def test_a_module_that_asks_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stage, by objects that multiply as usual."""
    multiply = Product.multiply
    monkeypatch.setattr(Product, "multiply", lambda each, x, weight, bias=None: multiply(each, 1.01 * x, weight, bias))
    model = stretto.accelerate(build("gpt2", BF16), fp8=ALL)
    assert (
        set(lines_of(model).values()) == {"it gives other results (last_hidden_state)"}
        and not technique_of(model).products
    )


def test_a_layer_that_turns_too_far_goes_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fp8, "GROUPS", 1)
    monkeypatch.setattr(fp8, "LOOK", 2)
    model, batch = accelerated("bert", BF16, fp8=ALL), draw("bert")
    for step in range(2):
        learn(model, batch, step)
    stretto.hf.set_step(model, 2)
    technique_of(model).products["bert.encoder.layer.1.output.dense"].bounds["x"].most.mul_(1e-4)
    with caplog.at_level(logging.WARNING):
        learn(model, batch)
        stretto.hf.set_step(model, 3)
    assert technique_of(model).find_lost() == ["bert.encoder.layer.1.output.dense"]
    assert "bert.encoder.layer.1.output.dense multiplies in bf16 from step 3 on" in caplog.text


def test_a_loop_learns_as_in_bf16() -> None:
    def train(**options: Any) -> float:
        model = accelerated("gpt2", BF16, **options)
        step = Step(model, FlatAdamW(model.parameters(), lr=3e-3, weights="split"), clip=1.0)
        losses = [float(step(draw("gpt2"))) for _ in range(24)]
        assert losses[-1] < losses[0] - 1
        return losses[-1]

    plain, narrow = train(), train(fp8=ALL)
    assert plain != narrow and abs(plain - narrow) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphs_give_the_same_bits(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through updates that are watched, which are launched among the others; recordings stay."""
    monkeypatch.setattr(fp8, "LOOK", 8)

    def make_step() -> Step:
        model = stretto.accelerate(build("gpt2", BF16).to("cuda"), fp8=ALL)
        optimizer = FlatAdamW(model.parameters(), lr=3e-3, weights="split")
        return Step(model, optimizer, clip=1.0, accumulate=accumulate)

    replays = replay_and_compare(make_step, [draw("gpt2")] * (24 * accumulate), monkeypatch)
    assert len(replays) > 10 and len(set(replays)) <= 2 * accumulate, "before and after bounds are known, at the most"


def test_kernels_are_needed() -> None:
    with pytest.raises(ValueError, match=r"fp8: plain modules multiply as torch does: set techniques\.fused to true"):
        stretto.accelerate(build("gpt2"), fp8=True, fused=False)


def test_no_weight_is_rounded_more_often_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that is one weight: in the update, not in its passes; also Conv1D's, which is kept transposed."""
    rounded: list[bool] = []
    weigh = Eight._weigh

    def note(product: Eight, weight: Tensor) -> Any:
        rounded.append(product._weight is not None and product._version == weight._version)
        return weigh(product, weight)

    model, batch = accelerated("gpt2", BF16, fp8=ALL), draw("gpt2")
    monkeypatch.setattr(Eight, "_weigh", note)
    learn(model, batch, 0)
    assert len(rounded) == 2 * 8 and all(rounded)


def test_with_layers_that_are_left_out() -> None:
    """What the trial of products runs is in training, where a layer that may be left out asks for the step."""
    alone = stretto.accelerate(build("gpt2", BF16), fp8=ALL)
    both = stretto.accelerate(build("gpt2", BF16), fp8=ALL, layer_drop={"theta": 1.0})
    with pytest.raises(ValueError, match="layer_drop depends on the step"):
        both(**draw("gpt2"))
    wanted, found = (learn(model.train(), draw("gpt2"), step=0)[0] for model in (alone, both))
    assert lines_of(both) == lines_of(alone) and torch.equal(found, wanted)
