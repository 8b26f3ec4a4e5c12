"""What accelerate changes, what it leaves, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import stretto
import stretto.hf
from stretto.hf.find import find_activation, find_sites
from stretto.hf.modules import Recognised
from tests.hf.families import FAMILIES, build, draw_batch, learn


def roles_of(model: nn.Module, done: bool = True) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in stretto.hf.report(model).lines:
        if (line.problem is None) == done:
            counts[line.role] = counts.get(line.role, 0) + line.count
    return counts


_LLAMA = {"rotary": 1, "projections": 1, "residual": 1, "norm": 5, "gated mlp": 2, "attention": 2}
_LLAMA |= {"padding": 1, "loss": 1}
EXPECTED = {
    "bert": {
        "projections": 1,
        "norm": 1,
        "dense": 2,
        "residual norm": 4,
        "transform": 1,
        "attention": 2,
        "padding": 1,
        "loss": 1,
    },
    "bert-classes": {"projections": 1, "norm": 1, "dense": 2, "residual norm": 4, "attention": 2, "padding": 1},
    "roberta": {"projections": 1, "norm": 2, "dense": 2, "residual norm": 4, "attention": 2, "padding": 1, "loss": 1},
    "gpt2": {"residual": 1, "norm": 5, "mlp": 2, "attention": 2, "padding": 1, "loss": 1},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"norm": 9},
    "vit": {"projections": 1, "residual": 1, "norm": 5, "mlp": 2, "attention": 2},
    "bart": {"projections": 2, "residual": 2, "norm": 12, "attention": 6, "padding": 2, "loss": 1},
    "marian": {"projections": 2, "residual": 2, "norm": 10, "attention": 6, "padding": 2, "loss": 1},
    "t5": {"projections": 2, "residual": 2, "norm": 12, "mlp": 4, "attention": 6, "padding": 2, "loss": 1},
    "t5-gated": {"projections": 2, "residual": 2, "norm": 12, "gated mlp": 4, "attention": 6, "padding": 2, "loss": 1},
}


EXPECTED["marian-swish"] = EXPECTED["marian"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_role_is_found(family: str) -> None:
    model = stretto.accelerate(build(family))
    assert roles_of(model) == EXPECTED[family]
    recognised = [module for module in model.modules() if isinstance(module, Recognised)]
    assert recognised and all(module.is_intact() for module in recognised), "or they would run as before"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_object_and_its_names_stay_and_restore_undoes_all(family: str) -> None:
    model, batch = build(family).eval(), draw_batch(family)
    before, config = learn(model, batch), copy.deepcopy(model.config.to_dict())
    kinds = {name: type(module) for name, module in model.named_modules()}
    names, parameters = list(model.state_dict()), list(model.parameters())
    implementation = model.config._attn_implementation
    random = torch.random.get_rng_state()

    assert stretto.accelerate(model) is model and type(model) is kinds[""]
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(isinstance(module, kinds[name]) for name, module in model.named_modules())
    assert all(type(module).__name__ == kinds[name].__name__ for name, module in model.named_modules())
    assert torch.equal(torch.random.get_rng_state(), random) and not model.training
    learn(model, batch)

    assert stretto.restore(model) is model
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert model.config._attn_implementation == implementation and model.config.to_dict() == config
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any("stretto" in key for m in model.modules() for key in vars(m))
    after = learn(model, batch)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_needs_nothing_of_ours(family: str, tmp_path: Path) -> None:
    model = stretto.accelerate(build(family))
    model.save_pretrained(tmp_path)
    assert "stretto" not in (tmp_path / "config.json").read_text()
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))
    batch = draw_batch(family)
    expected, found = learn(build(family).eval(), batch), learn(loaded.eval(), batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_copy_is_accelerated_too_and_independent(family: str) -> None:
    batch = draw_batch(family)
    plain, model = learn(build(family).eval(), batch), stretto.accelerate(build(family)).eval()
    other = copy.deepcopy(model)
    stretto.restore(model)
    assert roles_of(other) == EXPECTED[family]
    torch.testing.assert_close(learn(other, batch), plain)
    stretto.restore(other)
    assert all(torch.equal(t, plain[name]) for name, t in learn(other, batch).items())


def test_dropout_of_fused_modules_is_random_and_right_on_average() -> None:
    config = build("bert").config
    config.hidden_dropout_prob = 0.2
    torch.manual_seed(0)
    model, batch = hf.BertForMaskedLM(config), draw_batch("bert")
    plain = copy.deepcopy(model)
    stretto.accelerate(model)
    with torch.no_grad():
        ours, theirs = (torch.stack([m(**batch).loss for _ in range(60)]).double() for m in (model, plain))
    assert ours.std() > 0
    assert abs(float(ours.mean() - theirs.mean())) < 5 * float(((ours.var() + theirs.var()) / 60).sqrt())


_SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40,
}  # fmt: skip
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("kind", "config", "options", "role", "count"),
    [
        ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8}, "norm", 5),  # 1 + weight
        ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 8}, "norm", 13),
        ("CohereForCausalLM", "CohereConfig", {}, "norm", 3),  # LayerNorm without a bias
        ("CohereForCausalLM", "CohereConfig", {}, "loss", 1),  # logits times a number
        ("GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 3.0}, "loss", 1),
        ("CLIPTextModel", "CLIPTextConfig", {}, "mlp", 2),  # quick GELU
        ("ModernBertForMaskedLM", "ModernBertConfig", {"cls_token_id": 1, "sep_token_id": 2}, "mlp", 2),  # exact GEGLU
    ],
)
def test_formulas_of_other_families(kind: str, config: str, options: dict[str, Any], role: str, count: int) -> None:
    """That the results are right is compared in test_families.py."""
    torch.manual_seed(0)
    model = getattr(hf, kind)(getattr(hf, config)(**_SMALL, **_IDS, **options))
    stretto.accelerate(model)
    assert roles_of(model)[role] == count and role not in roles_of(model, done=False)


def test_a_loss_of_scaled_logits_needs_no_logits() -> None:
    torch.manual_seed(0)
    model = hf.GraniteForCausalLM(hf.GraniteConfig(**_SMALL, **_IDS, logits_scaling=3.0))
    ids = torch.randint(3, 61, (2, 7))
    expected = model(input_ids=ids, labels=ids)
    stretto.accelerate(model)
    found = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert type(found.logits).__name__ == "Logits" and not found.logits.recipe.made
    torch.testing.assert_close(found.logits + 0, expected.logits)  # and who reads them, gets them scaled
    with pytest.raises(AssertionError):  # which would be seen: 1 in place of 1 / 3
        torch.testing.assert_close(found.logits * 3, expected.logits)


class Scale(nn.Module):
    """Looks like a norm, but multiplies by 2 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (2 + self.weight)


class Noisy(nn.Module):
    """An MLP with a dropout that is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.act(self.up(x)), 0.1, self.training))


class Backwards(nn.Module):
    """Two linear layers with an activation, and something else that no child shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x - self.down(self.act(self.up(x)))


class Same(nn.Module):
    """An MLP as wide inside as outside, whose dropout could stand anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.act(self.up(x))))


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(Scale, "other results"), (Noisy, "random in training"), (Backwards, "other results"), (Same, "cannot be seen")],
)
def test_an_unknown_model_is_accelerated_where_it_is_understood(kind: type[nn.Module], problem: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Known(), kind(), nn.LayerNorm(8))
    x = torch.randn(3, 8)
    expected = model.eval()(x)
    stretto.accelerate(model)
    torch.testing.assert_close(model(x), expected)
    assert roles_of(model) == {"mlp": 1, "norm": 1}
    assert problem in str(stretto.hf.report(model)) and type(model[1]) is kind


class Adapter(nn.Module):
    """What low-rank adapters put in the place of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x.sum(-1, keepdim=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_adapters_and_hooks_that_come_later_count(family: str) -> None:
    batch = draw_batch(family)
    plain, model = build(family).eval(), stretto.accelerate(build(family)).eval()
    before = learn(plain, batch)["logits"]
    for each in (plain, model):
        for name, module in list(each.named_modules()):
            if name.endswith(("down_proj", "mlp.c_fc", "attention.output.dense", "DenseReluDense.wi", "k_proj", ".o")):
                module.register_forward_hook(lambda _, args, out: out * 1.5)
            if name.endswith(("gate_proj", "intermediate.dense", "DenseReluDense.wo", "o_proj", "query", ".v")):
                parent, _, child = name.rpartition(".")
                setattr(each.get_submodule(parent), child, Adapter(module))
    expected, found = learn(plain, batch)["logits"], learn(model, batch)["logits"]
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_report_is_a_table() -> None:
    config = build("t5-gated").config
    config.dense_act_fn = "relu"
    text = str(stretto.hf.report(stretto.accelerate(hf.T5ForConditionalGeneration(config))))
    assert "encoder.block.#.layer.#.DenseReluDense" in text and "a gate by ReLU(): no kernel" in text
    assert len({line.index("x ") for line in text.splitlines()[1:]}) >= 1


def test_roles_are_found_without_changing_anything() -> None:
    model = build("llama")
    kinds = [type(module) for module in model.modules()]
    assert {site.role for site in find_sites(model)} == {"norm", "gated mlp", "attention"}
    assert [type(module) for module in model.modules()] == kinds


def test_activations_are_known_by_their_values() -> None:
    known = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "quick_gelu": "gelu_quick",
    }
    for name, kind in known.items():
        assert find_activation(hf.activations.ACT2FN[name]) == kind
    assert find_activation(hf.activations.ACT2FN["mish"]) is None


def test_models_that_cannot_be_accelerated_are_refused() -> None:
    with torch.device("meta"):
        empty = FAMILIES["bert"]()
    with pytest.raises(ValueError, match="meta device"):
        stretto.accelerate(empty)
    model = stretto.accelerate(build("bert"))
    with pytest.raises(ValueError, match="accelerated already"):
        stretto.accelerate(model)
    with pytest.raises(ValueError, match="accelerated already"):
        stretto.accelerate(nn.Sequential(model))
    with pytest.raises(ValueError, match="not accelerated"):
        stretto.restore(build("bert"))
    quantised = build("bert")
    quantised.is_quantized = True
    with pytest.raises(ValueError, match="quantised"):
        stretto.accelerate(quantised)
    eight_bits = build("bert")
    eight_bits.bert.pooler = nn.Module()
    eight_bits.bert.pooler.weight = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"bert.pooler.weight is Parameter torch.int8"):
        stretto.accelerate(eight_bits)


@pytest.mark.gpu
def test_a_model_beside_the_current_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches its kernels on the current device, wherever their tensors are."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ValueError, match=r"is on cuda:0, .* which is cuda:1: call torch\.cuda\.set_device\(0\) before"):
        stretto.accelerate(build("bert").to("cuda:0"))


def test_other_attention_is_left_alone() -> None:
    model, batch = build("bert"), draw_batch("bert")
    model.set_attn_implementation("eager")
    expected = model.eval()(**batch, output_attentions=True).attentions
    stretto.accelerate(model)
    assert "its attention is 'eager'" in str(stretto.hf.report(model))
    torch.testing.assert_close(model(**batch, output_attentions=True).attentions, expected)
