"""No exchange is taken on trust: what the trials refuse, what batches keep their padding, and what happens when a model
is changed after it was accelerated."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.models.bert.modeling_bert import BertLayer

import stretto
import stretto.hf
from stretto.hf.acceleration import outermost
from stretto.hf.defer import Pending
from stretto.hf.modules import Parts
from stretto.hf.trial import IndexCheck, Journal, find_stand_ins
from tests.hf.families import CLASSES, VOCAB, Batch, accelerated, build, draw_batch, learn
from tests.hf.observe import count_tokens

_TINY: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 40}


def draw_ids(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(6, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def pad(ids: Tensor, lengths: tuple[int, ...], token: int, left: bool = False) -> Batch:
    real = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if left else real
    return {"input_ids": ids.where(real, token), "attention_mask": real.long()}


def assert_equal(model: nn.Module, batch: Batch, expected: Any, name: str = "logits", bound: float = 1e-5) -> None:
    found, wanted = model(**batch)[name].detach(), expected[name].detach()
    assert float((found - wanted).norm()) <= bound * float(wanted.norm())


# What the trials refuse


def with_outliers(model: nn.Module) -> nn.Module:
    """Trained norms have channels that are far larger than the rest."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data[3] = 5.0
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_of_one_plus_weight_are_known_as_such_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = with_outliers(hf.GemmaForCausalLM(hf.GemmaConfig(**_TINY))).to(dtype).eval()
    expected = model(draw_ids(), use_cache=False)
    stretto.accelerate(model)
    problems = {line.role: line.problem for line in stretto.hf.report(model).lines}
    assert problems["norm"] is None and problems["gated mlp"] is None
    batch: Any = {"input_ids": draw_ids(), "use_cache": False}
    assert_equal(model, batch, expected, bound=8 * torch.finfo(dtype).eps)


def test_rotary_positions_of_pairs_are_not_taken_for_those_of_halves() -> None:
    torch.manual_seed(0)
    model = hf.CohereForCausalLM(hf.CohereConfig(**_TINY, pad_token_id=0)).bfloat16().train()
    plain = copy.deepcopy(model)
    stretto.accelerate(model)
    problems = {line.role: line.problem for line in stretto.hf.report(model).lines}
    assert "other results" in str(problems["rotary"])
    batch = {"input_ids": draw_ids(), "labels": draw_ids()}
    gradients = []
    for each in (model, plain):
        each(**batch).loss.backward()
        gradients.append(next(p.grad for name, p in each.named_parameters() if "q_proj" in name))
    ours, theirs = gradients
    assert ours is not None and theirs is not None and (ours - theirs).norm() < 0.05 * theirs.norm()


class Offset(nn.Module):
    """A norm that subtracts half of the mean: on rows of mean zero it cannot be told from others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x - 0.5 * x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class ZeroAtFirst(nn.Module):
    """What it does besides is multiplied by a weight that is still zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act, self.extra = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8)
        nn.init.zeros_(self.extra.weight)
        nn.init.zeros_(self.extra.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))) + nn.functional.linear(x, self.extra.weight, self.extra.bias)


class ZeroNorm(nn.Module):
    """Its weight is zero at first, as that of Gemma is, and so is its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x.sign() * self.weight


@pytest.mark.parametrize("kind", [Offset, ZeroAtFirst, ZeroNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_hide_a_difference_do_not_help(kind: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.LayerNorm(8)).to(dtype)
    stretto.accelerate(model)
    assert type(model[0]) is kind and type(model[1]) is not nn.LayerNorm


class Inquisitive(hf.models.llama.modeling_llama.LlamaDecoderLayer):
    """A layer that looks at the class of its norm, as no trial of the norm by itself can see."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = type(self.input_layernorm) is hf.models.llama.modeling_llama.LlamaRMSNorm
        return super().forward(hidden_states if plain else 2 * hidden_states, *args, **kwargs)


def test_modules_are_tried_where_they_are_too() -> None:
    model: Any = build("llama")
    for layer in model.model.layers:
        layer.__class__ = Inquisitive
    batch = draw_batch("llama")
    expected = learn(model, batch)
    stretto.accelerate(model)
    problems = {line.role: line.problem for line in stretto.hf.report(model).lines}
    assert "other results" in str(problems["norm"]) and problems["gated mlp"] is None
    torch.testing.assert_close(learn(model, batch), expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_cannot_be_helped_comes_back_untouched() -> None:
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Sequential(nn.Linear(4, 4), nn.GLU()), nn.Softmax(dim=1))
    kinds = [type(module) for module in model.modules()]
    assert stretto.accelerate(model) is model
    assert [type(module) for module in model.modules()] == kinds
    assert not [line for line in stretto.hf.report(model).lines if line.problem is None]
    stretto.restore(model)


def test_a_model_for_which_no_batch_can_be_drawn_is_accelerated_all_the_same() -> None:
    """Its configuration lacks the ids that batches of a pair are made of."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = hf.BertConfig(**sizes, intermediate_size=48)
    decoder = hf.BertConfig(**sizes, intermediate_size=48, is_decoder=True, add_cross_attention=True)
    model = stretto.accelerate(
        hf.EncoderDecoderModel(hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))
    )
    lines = stretto.hf.report(model).lines
    assert any(line.role == "loss" and "cannot be tried" in str(line.problem) for line in lines)
    assert any(line.role == "residual norm" and line.problem is None for line in lines)


def test_an_error_undoes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that nobody expects, in the middle of it."""
    model, batch = build("llama"), draw_batch("llama")
    before = learn(model, batch)
    states = [(type(module), set(vars(module)), len(module._forward_hooks)) for module in model.modules()]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.hf.acceleration.Exchanges._swap_head", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stretto.accelerate(model)
    assert [(type(module), set(vars(module)), len(module._forward_hooks)) for module in model.modules()] == states
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in learn(model, batch).items())


def test_trials_leave_no_trace() -> None:
    """Parameters keep their storage, values, gradients and wishes, in 16 bits too."""
    model = build("bert", torch.bfloat16)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    held = [(p, p.data_ptr(), p.dtype, p.requires_grad, p.detach().clone()) for p in model.parameters()]
    stretto.accelerate(model)
    for (p, place, dtype, wanted, value), now in zip(held, model.parameters(), strict=True):
        assert p is now and (p.data_ptr(), p.dtype, p.requires_grad) == (place, dtype, wanted)
        assert torch.equal(p, value) and p.grad is None


class Remembering(hf.models.bert.modeling_bert.BertLayer):
    """A layer that notes the first batch it sees, as some routers do, and keeps a count in a buffer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first: int | None = None
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.first = hidden_states.shape[1] if self.first is None else self.first
        self.seen = self.seen + 1
        return super().forward(hidden_states, *args, **kwargs)


def test_modules_do_not_remember_the_trial() -> None:
    model: Any = build("bert")
    model.bert.encoder.layer = nn.ModuleList([Remembering(model.config) for _ in range(2)])
    stretto.accelerate(model)
    assert all(layer.first is None and layer.seen == 0 for layer in model.bert.encoder.layer)


def test_of_every_kind_of_layer_one_is_tried() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(6)])
    assert find_stand_ins(layers) == ([0, 0, 0, 0, 0, 1], 2)
    layers[3] = nn.Linear(2, 2, bias=False)
    assert find_stand_ins(layers) == ([0, 0, 0, 3, 0, 4], 5)


def test_t5_in_fp16_whose_sums_are_in_fp32() -> None:
    """Weights of two precisions: a norm gives its weight's, not the stream's."""
    model: Any = build("t5").half()
    for name, module in model.named_modules():
        if name.endswith("wo"):
            module.float()
    batch = draw_batch("t5", None)  # without padding, whose outputs are zero
    expected = model.eval()(**batch).logits
    found = stretto.accelerate(model)(**batch).logits
    assert found.dtype == expected.dtype and (found - expected).norm() < 2e-2 * expected.norm()


# Whoever reads padding gets it


def classifier(kind: str) -> nn.Module:
    torch.manual_seed(0)
    of: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: hf.LlamaForSequenceClassification(
            hf.LlamaConfig(**_TINY, pad_token_id=1, num_labels=CLASSES, use_cache=False)
        ),
        "gpt2": lambda: hf.GPT2ForSequenceClassification(
            hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, pad_token_id=1, num_labels=CLASSES,
                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
        ),
    }  # fmt: skip
    return of[kind]()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("token", [1, 5])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_class_is_read_where_it_always_was(kind: str, token: int, left: bool) -> None:
    """At the last id that is not the configuration's padding: with other padding that is a padding position."""
    model = classifier(kind).train()
    batch = pad(draw_ids(), (9, 3, 6), token, left) | {"labels": torch.tensor([0, 3, 2])}
    expected = model(**batch)
    stretto.accelerate(model)
    with count_tokens() as tokens:
        assert_equal(model, batch, expected)
    reads_padding = token == 5 and not left
    assert set(tokens) == (set() if reads_padding else {18}), "a rectangle has a mask, and transformers' attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_lose_their_padding_where_that_is_the_same(dtype: torch.dtype) -> None:
    model: Any = accelerated("llama", dtype)
    batch = draw_batch("llama")
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    with count_tokens() as tokens:
        model(**batch)
    assert set(tokens) == {18}


def test_embeddings_instead_of_ids_hide_where_padding_is() -> None:
    model = classifier("llama").train()
    stretto.accelerate(plain := copy.deepcopy(model))
    batch: Any = pad(draw_ids(), (9, 3, 6), 1)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()  # type: ignore[operator]
    torch.testing.assert_close(plain(**batch).logits, model(**batch).logits)


def test_a_pooler_may_read_the_last_position() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.SiglipTextConfig(**sizes, intermediate_size=48, max_position_embeddings=9)
    model = hf.SiglipTextModel(config).eval()
    batch = pad(draw_ids(), (9, 3, 6), 1)
    expected = model(**batch)
    assert_equal(stretto.accelerate(model), batch, expected, "pooler_output")


class LastPosition(nn.Module):
    """A module of the user's around a model, which reads what stands last."""

    def __init__(self, inner: nn.Module, where: int) -> None:
        super().__init__()
        self.inner, self.where, self.score = inner, where, nn.Linear(32, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.score(hidden[:, self.where])


@pytest.mark.parametrize(("where", "left", "packs"), [(-1, False, False), (-1, True, True), (0, False, True)])
def test_a_module_around_a_model_may_read_padding(where: int, left: bool, packs: bool) -> None:
    torch.manual_seed(0)
    model = LastPosition(build("bert").bert, where).eval()
    batch = pad(draw_ids(), (9, 3, 6), 1, left)
    expected = model(**batch)
    stretto.accelerate(model)
    with count_tokens() as tokens:
        torch.testing.assert_close(model(**batch), expected, rtol=1e-4, atol=1e-5)
    assert (set(tokens) == {18}) == packs


def test_a_class_of_rows_beside_labels_of_tokens() -> None:
    torch.manual_seed(0)
    model = hf.BertForPreTraining(build("bert").config).eval()
    batch = pad(draw_ids(), (9, 3, 6), 0, left=True)
    labels = draw_ids().where((batch["attention_mask"] != 0) & (batch["attention_mask"].roll(1, 1) != 0), -100)
    batch |= {"labels": labels, "next_sentence_label": torch.tensor([0, 1, 1])}
    expected = model(**batch)
    stretto.accelerate(model)
    assert_equal(model, batch, expected, "seq_relationship_logits")
    assert_equal(model, batch, expected, "loss")


def test_attention_in_chunks() -> None:
    torch.manual_seed(0)
    config = hf.Llama4TextConfig(
        **_TINY, intermediate_size_mlp=48, attention_chunk_size=6, num_local_experts=2, moe_layers=[], pad_token_id=1
    )
    model = hf.Llama4ForCausalLM(config).train()
    batch = pad(draw_ids(), (9, 3, 6), 1)
    labels = batch["input_ids"].where(batch["attention_mask"] != 0, -100)
    expected = model(**batch, labels=labels)
    stretto.accelerate(model)
    assert_equal(model, batch | {"labels": labels}, expected, "loss")
    real = batch["attention_mask"] != 0
    torch.testing.assert_close(model(**batch).logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", ["argument", "configuration", "later"])
def test_routers_losses_count_tokens_with_their_padding(asked: str) -> None:
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**_TINY, num_local_experts=2, sliding_window=None)).train()
    batch: Any = pad(draw_ids(), (9, 3, 6), 1)
    batch["labels"] = batch["input_ids"].where(batch["attention_mask"] != 0, -100)
    plain = copy.deepcopy(model)
    plain.config.output_router_logits = True
    model.config.output_router_logits = asked == "configuration"
    stretto.accelerate(model)
    model.config.output_router_logits = asked != "argument"
    given = {"output_router_logits": True} if asked == "argument" else {}
    assert_equal(model, batch | given, plain(**batch), "loss")


def test_what_is_added_between_layers_keeps_the_rectangle() -> None:
    """Features of images that a decoder adds to its hidden states by a mask [N, S]."""
    torch.manual_seed(0)
    config = hf.models.qwen3_vl.Qwen3VLTextConfig(
        **_TINY, rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]}
    )
    model = hf.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel(config).train()
    batch: Any = pad(draw_ids(), (9, 3, 6), 1)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    seen = torch.zeros(3, 9, dtype=torch.bool)
    seen[:, 1] = True
    batch |= {"visual_pos_masks": seen, "deepstack_visual_embeds": [torch.ones(3, 32)]}
    expected = model(**batch).last_hidden_state
    found = stretto.accelerate(model)(**batch).last_hidden_state
    real = batch["attention_mask"] != 0
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


def test_a_mask_that_stays_is_in_the_report() -> None:
    text = str(stretto.hf.report(accelerated("bert-classes")))
    assert "yes; padding at the beginning of rows stays" in text


# What comes afterwards


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_functions_in_the_place_of_forward_are_called(family: str) -> None:
    """As Accelerate puts them there, which moves weights to the device for the time of a call."""
    model, batch = accelerated(family), draw_batch(family)
    plain, calls = build(family), []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | hf.pytorch_utils.Conv1D) and "head" not in name:
            forward = module.forward

            def note(x: Tensor, name: str = name, forward: Any = forward) -> Tensor:
                calls.append(name)
                return 2 * forward(x)

            module.forward = note  # type: ignore[method-assign]
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear | hf.pytorch_utils.Conv1D) and "head" not in name:
            module.register_forward_hook(lambda _, args, out: 2 * out)
    torch.testing.assert_close(learn(model, batch), learn(plain, batch), rtol=1e-3, atol=1e-5)
    assert set(calls) >= {name for name, m in plain.named_modules() if m._forward_hooks}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_weights_may_be_offloaded(family: str) -> None:
    """Accelerate's hooks fetch the weights of each module when it is called, and leave nothing behind."""
    batch = draw_batch(family)
    plain, model = build(family).eval(), accelerated(family).eval()
    real = batch.get("decoder_attention_mask", batch["attention_mask"]) != 0
    with torch.no_grad():
        expected = plain(**batch).logits[real]
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(model(**batch).logits[real], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "t5", "bert", "gpt2"])
def test_parts_that_are_replaced_count(family: str) -> None:
    model, plain, batch = accelerated(family), build(family), draw_batch(family)
    for each in (model, plain):
        for module in list(each.modules()):
            for name, child in list(module.named_children()):
                if "act" in name and not list(child.children()):
                    setattr(module, name, nn.GELU("tanh") if family == "bert" else nn.Tanh())
                if (
                    isinstance(child, nn.Dropout | nn.LayerNorm)
                    and family in ("bert", "t5")
                    and not hasattr(module, "query")
                ):
                    setattr(module, name, nn.Identity())
    torch.testing.assert_close(learn(model, batch), learn(plain, batch), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "t5", "bart", "vit"])
def test_hooks_on_every_module_are_called_as_they_were(family: str) -> None:
    """Forward hooks, and full backward hooks, which wrap what a module is given and gives."""
    counts: list[list[str]] = []
    results = []
    for model in (build(family), accelerated(family)):
        seen: list[str] = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList | nn.Embedding | hf.PreTrainedModel):
                module.register_forward_hook(lambda _, args, out, name=name, seen=seen: seen.append(f"{name} forward"))
                if name.endswith(("_proj", "mlp", "norm", "lm_head", "dense", "c_proj", "wo", "fc2")):
                    note = partial_note(seen, f"{name} backward")
                    module.register_full_backward_hook(note)
        results.append(learn(model, draw_batch(family)))
        counts.append(sorted(seen))
    assert counts[0] == counts[1]
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


def partial_note(seen: list[str], name: str) -> Callable[..., None]:
    return lambda *args: seen.append(name)


@pytest.mark.parametrize("way", ["hook", "forward"])
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_whoever_looks_into_layers_finds_rectangles(family: str, way: str) -> None:
    """A padded batch, and a probe that keeps what each layer and each part of it gives."""
    batch, seen = draw_batch(family), []
    for model in (build(family), accelerated(family)):
        shapes: dict[str, torch.Size] = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ("1", "mlp", "intermediate", "DenseReluDense"):
                probe(name, module, way, shapes)
        learn(model, batch)
        seen.append(shapes)
    assert seen[0] and seen[1] == seen[0]


def probe(name: str, module: nn.Module, way: str, shapes: dict[str, torch.Size]) -> None:
    def note(out: Any) -> Any:
        shapes[name] = (out if isinstance(out, Tensor) else out[0]).shape
        return out

    if way == "hook":
        module.register_forward_hook(lambda _, args, out: note(out))
    else:
        forward = module.forward
        module.forward = lambda *args, **kwargs: note(forward(*args, **kwargs))


@pytest.mark.parametrize("where", ["layer", "inside", "head"])
def test_full_backward_hooks(where: str) -> None:
    model, plain, batch = accelerated("llama"), build("llama"), draw_batch("llama")
    names = {"layer": "model.layers.1", "inside": "model.layers.0.self_attn.o_proj", "head": "lm_head"}
    seen: list[Tensor] = []
    for each in (model, plain):
        each.get_submodule(names[where]).register_full_backward_hook(lambda _, grads, out: seen.append(out[0]))
    torch.testing.assert_close(learn(model, batch), learn(plain, batch), rtol=1e-4, atol=1e-5)
    assert len(seen) == 2
    real = batch["attention_mask"] != 0
    ours, theirs = (grad[real] if grad.shape[:2] == real.shape else grad.flatten(0, 1) for grad in seen)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_may_be_chosen_afterwards(implementation: str) -> None:
    for family in ("llama", "bert", "t5"):
        model, batch = accelerated(family), draw_batch(family)
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(learn(model, batch), learn(build(family), batch), rtol=1e-3, atol=1e-5)


def test_layers_may_be_taken_away_afterwards() -> None:
    batch = draw_batch("llama")
    results = []
    for change in ("slice", "configuration", "delete"):
        for model in (build("llama"), accelerated("llama")):
            inner: Any = model.model
            if change == "slice":
                inner.layers = inner.layers[:1]
            elif change == "configuration":
                model.config.num_hidden_layers = 1
            else:
                del inner.layers[1]
            found = learn(model, batch)
            results.append({name: value for name, value in found.items() if ".layers.1." not in name})
    for ours, theirs in zip(results[1::2], results[::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5", "bart", "vit"])
def test_a_model_can_be_pickled(family: str) -> None:
    model, batch = accelerated(family), draw_batch(family)
    expected = learn(model, batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert {type(m) for m in other.modules()} == {type(m) for m in model.modules()}
        found = learn(other, batch)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        stretto.restore(other)
        assert not any(hasattr(type(m), "made_of") for m in other.modules())
    assert any(hasattr(type(m), "made_of") for m in model.modules()), "and the first one stays as it was"


@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "t5", "bart"])
def test_a_batch_without_a_single_label(family: str) -> None:
    batch = draw_batch(family)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model, plain = accelerated(family), build(family)
    assert model(**batch).loss.isnan() and plain(**batch).loss.isnan()
    options = {"num_items_in_batch": torch.tensor(4)} if family in ("llama",) else {}
    if options:
        found, expected = (each(**batch, **options).loss.detach() for each in (model, plain))
        assert float(found) == float(expected) == 0.0


def test_a_norm_is_given_a_gate() -> None:
    """What is called with more than a module was tried with is the module's own."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            x = x if gate is None else x * torch.sigmoid(gate)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    model, x = Gated(), torch.randn(3, 8)
    expected = model(x), model(x, x), model(x, gate=x)
    stretto.accelerate(model)
    torch.testing.assert_close((model(x), model(x, x), model(x, gate=x)), expected)


def test_a_journal_undoes_in_order() -> None:
    module, journal = nn.Linear(2, 2), Journal()
    journal.change(module, "note", 1)
    mark = journal.mark()
    journal.change(module, "note", 2)
    journal.swap(module, nn.Identity, Parts(linears=("",)))
    journal.undo(mark)
    assert type(module) is nn.Linear and module.note == 1
    journal.undo_all()
    assert not hasattr(module, "note")


def test_nothing_that_waits_is_seen_by_a_hook() -> None:
    model = accelerated("gpt2")
    seen: list[Any] = []
    for module in model.modules():
        module.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    model(**draw_batch("gpt2", None))
    flat = [value for args, out in seen for value in (*args, out)]
    assert flat and not any(isinstance(value, Pending) for value in flat)


# What heads of the user's read, and what is changed around layers


class Odd(hf.BertPreTrainedModel):
    """A model of the user's, with a head that reads what no model of transformers reads."""

    def __init__(self, config: Any, reads: Callable[..., Tensor]) -> None:
        super().__init__(config)
        self.bert, self.reads, self.norm = hf.BertModel(config, add_pooling_layer=False), reads, nn.BatchNorm1d(32)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, index: Tensor | None = None, pooling: str = "first"
    ) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"result": self.reads(self, hidden, index, pooling)}


ODD: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "fourth": (lambda self, hidden, index, pooling: hidden[:, 3], {}),
    "first four": (lambda self, hidden, index, pooling: hidden[:, :4].mean(1), {}),
    "third from the end": (lambda self, hidden, index, pooling: hidden[:, -3], {}),
    "an argument's": (
        lambda self, hidden, index, pooling: hidden[:, 0] if index is None else hidden[torch.arange(3), index],
        {"index": torch.tensor([8, 8, 8])},
    ),
    "an option's": (
        lambda self, hidden, index, pooling: hidden.mean(1) if pooling == "mean" else hidden[:, 0],
        {"pooling": "mean"},
    ),
    "statistics": (lambda self, hidden, index, pooling: self.norm(hidden.flatten(0, 1)).view(hidden.shape)[:, 0], {}),
    "in training": (lambda self, hidden, index, pooling: hidden.mean(1) if self.training else hidden[:, 0], {}),
}


@pytest.mark.parametrize("what", ODD)
def test_whatever_a_head_reads(what: str) -> None:
    reads, options = ODD[what]
    torch.manual_seed(0)
    model = Odd(build("bert").config, reads).train()
    plain = copy.deepcopy(model)
    stretto.accelerate(model)
    batch = pad(draw_ids(), (9, 2, 5), 1)
    torch.testing.assert_close(model(**batch, **options), plain(**batch, **options), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, rtol=1e-4, atol=1e-5)


def mean_instead(model: Any) -> None:
    model.bert.pooler.forward = lambda hidden: hidden.mean(1)


def hook_instead(model: Any) -> None:
    model.bert.pooler.register_forward_hook(lambda _, args, out: args[0].mean(1))


def other_pooler(model: Any) -> None:
    class Mean(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.mean(1)

    model.bert.pooler = Mean()


@pytest.mark.parametrize("change", [mean_instead, hook_instead, other_pooler])
def test_heads_that_read_padding_later(change: Callable[[Any], None]) -> None:
    plain, model = build("bert-classes").eval(), accelerated("bert-classes").eval()
    change(plain)
    change(model)
    batch = draw_batch("bert-classes")
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-5)


def test_an_interrupt_inside_a_call_is_forgotten() -> None:
    model: Any = accelerated("bert")
    other = accelerated("bert-classes")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.bert.encoder.layer[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**draw_batch("bert"))
    hook.remove()
    for each, family in ((other, "bert-classes"), (model, "bert")):
        expected = learn(build(family), draw_batch(family))
        torch.testing.assert_close(learn(each, draw_batch(family)), expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_inside_of_a_student() -> None:
    """A model that is called in the forward pass of another is not a part of it."""
    teacher = accelerated("llama").train()
    student: Any = accelerated("llama").train()
    batch, seen = draw_batch("llama"), []

    def ask(*args: Any) -> None:
        with torch.no_grad():
            seen.append(teacher(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits)

    student.model.norm.register_forward_hook(ask)
    expected = learn(build("llama"), batch)
    torch.testing.assert_close(learn(student, batch), expected, rtol=1e-3, atol=1e-5)
    assert type(seen[0]) is Tensor and not seen[0].requires_grad
    assert all(p.grad is None for p in teacher.parameters())
    torch.testing.assert_close(seen[0][batch["attention_mask"] != 0], expected["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["wrap", "replace"])
def test_layers_that_are_wrapped_or_replaced(change: str) -> None:
    found = []
    for model in (build("bert"), accelerated("bert")):
        inner: Any = model
        if change == "wrap":
            apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, BertLayer))
        else:
            torch.manual_seed(0)
            inner.bert.encoder.layer[0] = BertLayer(inner.config)
        result = learn(model, draw_batch("bert"))
        found.append({name.replace("_checkpoint_wrapped_module.", ""): value for name, value in result.items()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_a_bias_that_comes_later() -> None:
    models: Any = [build("llama"), accelerated("llama")]
    for model in models:
        for layer in model.model.layers:
            layer.mlp.up_proj.bias = nn.Parameter(torch.full((48,), 0.3))
            layer.self_attn.q_proj.bias = nn.Parameter(torch.full((32,), 0.3))
    found = [learn(model, draw_batch("llama")) for model in models]
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_logits_are_not_read_behind_a_fused_step() -> None:
    """Torch's fused optimizers change weights without a new version."""
    model = accelerated("llama")
    out = model(**draw_batch("llama"))
    out.loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    with pytest.raises(RuntimeError, match="its weights have changed"):
        out.logits.sum()


class Weighed(hf.LlamaForCausalLM):
    """A second loss of the same logits, with more labels."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        flat = out.logits.view(-1, out.logits.shape[-1])
        out.loss = out.loss + nn.functional.cross_entropy(flat.float(), input_ids.flatten())
        return out


def test_two_losses_of_one_tensor() -> None:
    losses = []
    for fast in (False, True):
        model: Any = build("llama")
        model.__class__ = Weighed
        batch = draw_batch("llama", None)
        batch["labels"] = batch["labels"].where(torch.arange(9) > 5, -100)
        losses.append((stretto.accelerate(model) if fast else model)(**batch).loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


def test_restore_leaves_what_others_have_changed() -> None:
    model: Any = accelerated("llama")
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    expected = learn(model, draw_batch("llama"))
    found = learn(stretto.restore(model), draw_batch("llama"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_tuples_have_their_places() -> None:
    for family in ("llama", "t5"):
        ours, theirs = (m(**draw_batch(family), return_dict=False) for m in (accelerated(family), build(family)))
        assert len(ours) == len(theirs)


SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}
BAD_INDICES = {
    "gather": lambda: torch.ones(2, 3).gather(1, torch.tensor([[-1], [0]])),
    "scatter": lambda: torch.zeros(2, 3).scatter(1, torch.tensor([[3], [0]]), 1.0),
    "index_select": lambda: torch.ones(2, 3).index_select(0, torch.tensor([2])),
    "index": lambda: torch.ones(2, 3)[torch.tensor([True, False]), torch.tensor([3])],
    "index_put": lambda: torch.ones(2, 3).index_put_((torch.tensor([-3]),), torch.ones(())),
    "embedding": lambda: torch.nn.functional.embedding(torch.tensor([4]), torch.ones(4, 2)),
    "cross_entropy": lambda: torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([-100, 3])),
    "binary_cross_entropy": lambda: torch.nn.functional.binary_cross_entropy(torch.tensor([1.5]), torch.tensor([1.0])),
    "assert": lambda: torch._assert_async(torch.tensor(False)),
}


@pytest.mark.parametrize("operation", BAD_INDICES)
def test_what_would_end_a_gpu_is_an_error_before(operation: str) -> None:
    """The check's own error, not torch's, which a CPU raises as well."""
    with IndexCheck(), pytest.raises((IndexError, ValueError), match=r"range for size|between 0 and 1|assertion"):
        BAD_INDICES[operation]()


def build_mbart() -> nn.Module:
    sizes: dict[str, Any] = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    config = hf.MBartConfig(vocab_size=VOCAB, d_model=32, max_position_embeddings=32, **sizes)
    return hf.MBartForConditionalGeneration(config)


def test_a_model_that_fails_without_labels_loses_its_padding_with_them() -> None:
    """mBART looks for the last label of each row."""
    model = stretto.accelerate(build_mbart())
    tried = outermost(model)[1]
    assert tried.labels == "tokens" and {("right", "own"), ("left", "own")} <= tried.kinds


@pytest.mark.gpu
def test_a_batch_that_a_model_cannot_read_does_not_end_the_gpu() -> None:
    model = stretto.accelerate(build_mbart().to("cuda"))
    assert model(**{name: value.to("cuda") for name, value in draw_batch("bart").items()}).loss.isfinite()
