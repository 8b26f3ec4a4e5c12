"""The model by itself: packing and caches change nothing, every option trains, weights begin as they should.

What it computes is compared with other implementations in test_parity.py.
"""

from __future__ import annotations

import math
import pkgutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.attention import attend
from stretto.batch import IGNORE, Batch, Counts, Layout, Sequences
from stretto.config import ModelConfig
from stretto.data.packing import pad, to_tensor
from stretto.model import Decoder, EncoderDecoder, Model, build_model, sites
from tests.models import (
    CONFIGS,
    VOCAB,
    Ints,
    Sample,
    arrange,
    build_on_cpu,
    collate,
    example_batch,
    get_inputs,
    largest_error,
    loss_and_gradients,
    materialise,
)

EXACT = 1e-9  # in float64, whatever the order of summation
TEXT = [name for name in CONFIGS if name != "vit"]
lengths_of_pairs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


@pytest.mark.parametrize("name", TEXT)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(lengths=lengths_of_pairs, empty=st.integers(0, 3), slack=st.integers(0, 2))
def test_packing_changes_nothing(name: str, lengths: list[tuple[int, int]], empty: int, slack: int) -> None:
    model = build_on_cpu(CONFIGS[name], torch.float64)
    samples = [Sample.draw(length, source, seed) for seed, (length, source) in enumerate(lengths)]
    alone = loss_and_gradients(model, *(collate(model.cfg, [sample]) for sample in samples))
    for form in ("packed", "padded"):
        together = loss_and_gradients(model, collate(model.cfg, samples, form, empty, slack))
        assert largest_error(together, alone) < EXACT, form


@pytest.mark.parametrize("name", TEXT)
def test_packing_test_notices_merged_sequences(name: str) -> None:
    model = build_on_cpu(CONFIGS[name], torch.float64)
    batch = example_batch(model.cfg)
    inputs = get_inputs(batch)
    offsets = inputs.layout.offsets[[0, 2, 3, 3]]  # the first two are one now, and an empty one ends the batch
    merged = replace(batch, inputs=replace(inputs, layout=Layout(offsets, 7)))
    if model.cfg.classes:
        merged = replace(merged, labels=batch.labels[[0, 2, 1]])
    assert largest_error(loss_and_gradients(model, merged), loss_and_gradients(model, batch)) > 1e-3


def define_attention(q: Tensor, k: Tensor, v: Tensor, q_lengths: Ints, k_lengths: Ints, causal: bool) -> Tensor:
    """softmax(q k' / sqrt(D)) v, one sequence after the other."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out = []
    sizes = (q_lengths.tolist(), k_lengths.tolist(), k_lengths.tolist())
    for a, b, c in zip(*(t.split(size) for t, size in zip((q, k, v), sizes, strict=True)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) / math.sqrt(q.shape[2])
        if causal:
            scores = scores.masked_fill(torch.ones(len(a), len(b), device=q.device).triu(1).bool(), -math.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    return torch.cat(out)


ATTENTION = pytest.mark.parametrize(
    "q_lengths,k_lengths,causal,kv_heads",
    [
        ([1, 300, 17, 128, 64], None, True, 4),
        ([1, 300, 17, 128, 64], None, False, 4),
        ([1, 255, 129, 2], [300, 1, 31, 128], False, 4),
        ([1, 300, 17, 128, 64], None, True, 2),
        ([33, 1, 290], None, False, 1),
        ([9, 40, 1, 0, 0, 0], None, True, 2),
        ([9, 40, 1, 0, 0], [1, 7, 100, 0, 0], False, 4),
    ],
    ids=["causal", "full", "cross", "causal-grouped", "full-one-kv-head", "causal-empty", "cross-empty"],
)


def attention_problem(q_lengths: list[int], k_lengths: list[int] | None, kv_heads: int, head_size: int) -> Any:
    """q, k, v and the gradient of the output in float64, flat, and the lengths."""
    random = torch.Generator().manual_seed(0)
    q_sizes, k_sizes = np.array(q_lengths), np.array(k_lengths or q_lengths)
    shapes = [(q_sizes.sum(), 4), (k_sizes.sum(), kv_heads), (k_sizes.sum(), kv_heads), (q_sizes.sum(), 4)]
    # Values that bf16 has too: the same problem in every precision.
    return [torch.randn(*s, head_size, generator=random).bfloat16().double() for s in shapes], q_sizes, k_sizes


def run_attention(tensors: list[Tensor], q_lengths: Ints, k_lengths: Ints, causal: bool, forms: str) -> list[Tensor]:
    """The output of `attend` and the gradients of q, k, v, all flat, whatever the forms of q and k."""
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    layouts, given, slots = [], [], []
    for form, lengths, parts in zip(forms.split("-"), (q_lengths, k_lengths), ((q,), (k, v)), strict=True):
        sequences, places = arrange([np.zeros(n, np.int64) for n in lengths], form, 0, slack=3)
        layout, at = sequences.layout, to_tensor(places).to(q.device)
        moved: dict[str, Any] = {"offsets": layout.offsets.to(q.device)}
        if layout.lengths is not None:
            moved["lengths"] = layout.lengths.to(q.device)
        layouts.append(replace(layout, **moved))
        # The padding holds huge values: to look at it, even a little, is to fail.
        given += [t.new_full((len(sequences.ids), *t.shape[1:]), 1e4).index_copy(0, at, t) for t in parts]
        slots.append(at)
    (q_layout, k_layout), (q_given, k_given, v_given) = layouts, given
    out = attend(q_given, k_given, v_given, q_layout, k_layout, causal, dropout=0.0)[slots[0]]
    return [out, *torch.autograd.grad(out, (q, k, v), tensors[3])]


def run_definition(tensors: list[Tensor], q_lengths: Ints, k_lengths: Ints, causal: bool) -> list[Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    out = define_attention(q, k, v, q_lengths, k_lengths, causal)
    return [out, *torch.autograd.grad(out, (q, k, v), tensors[3])]


@ATTENTION
@pytest.mark.parametrize("forms", ["packed-packed", "padded-padded", "packed-padded", "padded-packed"])
def test_attention_is_its_definition(
    q_lengths: list[int], k_lengths: list[int] | None, causal: bool, kv_heads: int, forms: str
) -> None:
    tensors, q_sizes, k_sizes = attention_problem(q_lengths, k_lengths, kv_heads, head_size=8)
    wanted = run_definition(tensors, q_sizes, k_sizes, causal)
    for found, value in zip(run_attention(tensors, q_sizes, k_sizes, causal, forms), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_is_added_by_distance(causal: bool, form: str) -> None:
    """As T5's relative positions: one number for each head and distance, the same in every sequence."""
    tensors, q_sizes, _ = attention_problem([1, 9, 5], None, 4, head_size=8)
    table = torch.randn(4, 31, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    ids = [np.zeros(n, np.int64) for n in q_sizes]
    sequences, at = arrange(ids, form, 0, slack=0)
    q, k, v = (t.new_zeros(len(sequences.ids), *t.shape[1:]).index_copy(0, to_tensor(at), t) for t in tensors[:3])
    out = attend(q, k, v, sequences.layout, sequences.layout, causal, 0.0, table)[to_tensor(at)]
    wanted, start = [], 0
    for n in q_sizes:
        q, k, v = (t[start : start + n].transpose(0, 1) for t in tensors[:3])
        by_distance = torch.stack([table[:, 15 - i : 15 - i + n] for i in range(n)], 1)
        scores = q @ k.transpose(1, 2) / 8**0.5 + by_distance
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        wanted.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += n
    torch.testing.assert_close(out, torch.cat(wanted), rtol=EXACT, atol=EXACT)
    mine, theirs = (torch.autograd.grad(t, table, tensors[3])[0] for t in (out, torch.cat(wanted)))
    torch.testing.assert_close(mine, theirs, rtol=EXACT, atol=EXACT)


@pytest.mark.gpu
@ATTENTION
@pytest.mark.parametrize("kernel", ["ours", "varlen"])
def test_packed_kernels_are_as_exact_as_the_padded_one(
    q_lengths: list[int],
    k_lengths: list[int] | None,
    causal: bool,
    kv_heads: int,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    place = "stretto.attention." + {"ours": "attention", "varlen": "_attend_packed"}[kernel]
    chosen = pkgutil.resolve_name(place)
    monkeypatch.setattr(place, lambda *args, **options: calls.append(1) or chosen(*args, **options))
    if kernel == "varlen":  # as if these sequences were long
        monkeypatch.setattr("stretto.attention.is_short", lambda *args: False)
        monkeypatch.setattr("stretto.attention.LONG", 0)
    tensors, q_sizes, k_sizes = attention_problem(q_lengths, k_lengths, kv_heads, head_size=64)
    tensors = [t.cuda() for t in tensors]
    wanted = run_definition(tensors, q_sizes, k_sizes, causal)
    low = [t.bfloat16() for t in tensors]
    padded = run_attention(low, q_sizes, k_sizes, causal, "padded-padded")
    assert not calls
    packed = run_attention(low, q_sizes, k_sizes, causal, "packed-packed")
    assert calls
    for name, value, slow, fast in zip(("out", "q", "k", "v"), wanted, padded, packed, strict=True):
        bound = 2 * (slow.double() - value).abs().max()
        assert (fast.double() - value).abs().max() <= bound, name


def whole_logits(model: Model, ids: Tensor, source: Sequences | None = None) -> Tensor:
    """[N, S, V] without a cache."""
    lengths = np.full(len(ids), ids.shape[1])
    inputs = pad(ids.flatten().numpy(), lengths, ids.shape[1], fill=0)
    return model.logits(Batch(ids, Counts(0, 0, 0, 0), (), inputs, source=source)).unflatten(0, ids.shape)


@pytest.mark.parametrize("prompt", [1, 4])
@pytest.mark.parametrize("name", ["decoder", "decoder-rotary"])
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_whole(name: str, prompt: int) -> None:
    model = build_on_cpu(CONFIGS[name], torch.float64).eval()
    assert isinstance(model, Decoder)
    ids = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    wanted = whole_logits(model, ids)
    cache = model.start()
    found = [model.decode(ids[:, :prompt], cache)] + [model.decode(ids[:, i : i + 1], cache) for i in range(prompt, 9)]
    torch.testing.assert_close(torch.stack(found, 1), wanted[:, prompt - 1 :], rtol=EXACT, atol=EXACT)


@torch.no_grad()
def translate_with_cache(prompt: int, swap_at: int | None = None, name: str = "encoder-decoder") -> None:
    """Two continuations of each of three sources. At step `swap_at` each second one becomes a copy of the first."""
    model = build_on_cpu(CONFIGS[name], torch.float64).eval()
    assert isinstance(model, EncoderDecoder)
    sources = [Sample.draw(1, length, length).source for length in (5, 1, 8)]
    ids = torch.randint(VOCAB, (6, 7), generator=torch.Generator().manual_seed(0))
    kept = ids.clone()
    if swap_at is not None:
        kept[1::2, :swap_at] = ids[0::2, :swap_at]
    doubled = arrange([source for source in sources for _ in range(2)], "padded", 0, 0)[0]
    cache = model.start(arrange(sources, "padded", 0, 0)[0], copies=2)
    wanted = whole_logits(model, kept, doubled)
    torch.testing.assert_close(
        model.decode(ids[:, :prompt], cache), whole_logits(model, ids, doubled)[:, prompt - 1], rtol=EXACT, atol=EXACT
    )
    for i in range(prompt, 7):
        if i == swap_at:
            cache.select(torch.tensor([0, 0, 2, 2, 4, 4]))
        found = model.decode(ids[:, i : i + 1], cache)
        if swap_at is None or i >= swap_at:
            torch.testing.assert_close(found, wanted[:, i], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("prompt", [1, 3])
@pytest.mark.parametrize("name", ["encoder-decoder", "encoder-decoder-own"])
def test_translating_with_a_cache_equals_the_whole(name: str, prompt: int) -> None:
    translate_with_cache(prompt, name=name)


def test_a_beam_search_can_reorder_the_cache() -> None:
    translate_with_cache(prompt=1, swap_at=4)


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_a_second_prompt_is_refused(name: str) -> None:
    """The causal mask of several new tokens after a past is not there: refuse rather than be silently wrong."""
    model: Any = build_on_cpu(CONFIGS[name])
    cache = model.start(*[arrange([np.arange(3)] * 2, "padded", 0, 0)[0]] if name == "encoder-decoder" else [])
    model.decode(torch.zeros(2, 3, dtype=torch.int64), cache)
    with pytest.raises((AssertionError, ValueError)):
        model.decode(torch.zeros(2, 2, dtype=torch.int64), cache)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "swiglu"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-class", "encoder-decoder", "vit"])
def test_every_option_trains_every_parameter(name: str, norm_order: str, activation: str, positions: str) -> None:
    options: dict[str, Any] = {"norm_order": norm_order, "activation": activation, "positions": positions}
    cfg = replace(CONFIGS[name], **options, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1)
    torch.manual_seed(0)
    for key, value in loss_and_gradients(build_on_cpu(cfg).train(), example_batch(cfg)).items():
        assert value.isfinite().all() and value.abs().max() > 0, key


def test_dropout_is_for_training_only() -> None:
    for name, cfg in CONFIGS.items():
        model, batch = build_on_cpu(replace(cfg, dropout=0.3)), example_batch(cfg)
        assert torch.equal(model.eval()(batch), build_on_cpu(cfg).eval()(batch)), name
        torch.manual_seed(0)
        assert model.train()(batch) != model(batch), name


@pytest.mark.parametrize("name", CONFIGS)
def test_label_smoothing_is_for_training_only(name: str) -> None:
    cfg, batch = CONFIGS[name], example_batch(CONFIGS[name])
    model, plain = build_on_cpu(replace(cfg, label_smoothing=0.2)), build_on_cpu(cfg)
    log_p = model.logits(batch).log_softmax(-1)[batch.labels != IGNORE]
    labels = batch.labels[batch.labels != IGNORE]
    nll, uniform = -log_p.gather(1, labels[:, None]).sum(), -log_p.mean(-1).sum()
    torch.testing.assert_close(model.train()(batch), 0.8 * nll + 0.2 * uniform)
    torch.testing.assert_close(model.eval()(batch), nll)
    assert torch.equal(model(batch), plain.train()(batch))


@pytest.mark.parametrize("name", CONFIGS)
def test_ignored_labels_contribute_nothing(name: str) -> None:
    model = build_on_cpu(replace(CONFIGS[name], label_smoothing=0.1)).train()
    batch = example_batch(model.cfg)
    silent = loss_and_gradients(model, replace(batch, labels=torch.full_like(batch.labels, IGNORE)))
    assert all(value.eq(0).all() for value in silent.values())
    kept = batch.labels.clone()
    kept[::2] = IGNORE
    rest = batch.labels.clone()
    rest[1::2] = IGNORE
    halves = loss_and_gradients(model, replace(batch, labels=kept), replace(batch, labels=rest))
    assert largest_error(halves, loss_and_gradients(model, batch)) < 1e-5


WIDE: dict[str, Any] = {"layers": 3, "width": 96, "heads": 4, "mlp_width": 160, "vocab": 211, "max_len": 64}
NORMAL, CUT, UNIFORM = 1.0, 0.8796, 1 / math.sqrt(3)  # the standard deviation of N(0, 1), of it cut at 2, of U(-1, 1)
INIT: dict[str, tuple[ModelConfig, dict[str, tuple[float, float]]]] = {
    # kind: the model, and the first match of a name -> which distribution, scaled by what
    "decoder": (
        ModelConfig(**WIDE, tied=False),
        {
            "attention.out": (NORMAL, 0.02 / math.sqrt(6)),
            "mlp.down": (NORMAL, 0.02 / math.sqrt(6)),
            "embedding.position": (NORMAL, 0.01),
            "": (NORMAL, 0.02),
        },
    ),
    "encoder": (ModelConfig(**WIDE, kind="encoder", token_types=50, embed_norm=True), {"": (CUT, 0.02)}),
    "encoder-class": (ModelConfig(**WIDE, kind="encoder", classes=50), {"": (CUT, 0.02)}),
    "vit": (ModelConfig(**WIDE, kind="vit", image_size=56, patch=8, classes=50), {"": (CUT, 0.02)}),
    "encoder-decoder": (
        ModelConfig(**WIDE, kind="encoder-decoder", tied=False),
        {
            "embedding": (NORMAL, 96**-0.5),
            "head": (NORMAL, 96**-0.5),
            "attention.qkv": (UNIFORM, math.sqrt(6 / (4 * 96))),
            "cross.q": (UNIFORM, math.sqrt(6 / (4 * 96))),
            "cross.kv": (UNIFORM, math.sqrt(6 / (4 * 96))),
            "mlp": (UNIFORM, math.sqrt(6 / (96 + 160))),
            "": (UNIFORM, math.sqrt(6 / (96 + 96))),
        },
    ),
}


def initial_weights(cfg: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    model = build_model(cfg)
    materialise(model, cfg, seed, torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", INIT)
def test_weights_begin_as_the_papers_say(name: str) -> None:
    cfg, rules = INIT[name]
    for key, value in initial_weights(cfg).items():
        if key.endswith("bias"):
            assert value.eq(0).all(), key
        elif "norm" in key:
            assert value.eq(1).all(), key
        else:
            shape, scale = next(rule for part, rule in rules.items() if part in key)
            sampling = 5 / math.sqrt(value.numel())  # five standard errors or more: seeds are fixed, so it never flakes
            assert float(value.std()) == pytest.approx(shape * scale, rel=sampling), key
            assert abs(float(value.mean())) < sampling * scale, key
            limit = {NORMAL: math.inf, CUT: 2 * scale, UNIFORM: scale}[shape]
            assert value.abs().max() <= limit, key
            assert shape == NORMAL or value.abs().max() > 0.9 * limit or value.numel() < 200, key


def test_weights_depend_on_seed_and_name_alone() -> None:
    cfg = CONFIGS["encoder"]
    small, large = initial_weights(cfg), initial_weights(replace(cfg, layers=3, vocab=VOCAB + 1, tied=False))
    shared = [key for key in small if small[key].shape == large[key].shape]
    assert len(shared) > 30
    assert all(torch.equal(small[key], large[key]) for key in shared)
    random = [key for key, value in small.items() if value.unique().numel() > 2]
    other = initial_weights(cfg, seed=1)
    assert len(random) == 4 * cfg.layers + 4  # the matrices of each block, three embeddings, the head's
    assert not any(torch.equal(small[key], other[key]) for key in random)
    first, second = (small[f"encoder.blocks.{i}.mlp.up.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inside torch itself
def test_compiled_equals_eager() -> None:
    model = build_on_cpu(replace(CONFIGS["decoder-rotary"], layers=1))
    batch = collate(model.cfg, [Sample.draw(n, 1, n) for n in (5, 1, 7)], empty=1)
    wanted = loss_and_gradients(model, batch)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    loss = compiled(batch)
    loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    assert largest_error(found, wanted) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_autocast_is_close(name: str) -> None:
    model, batch = build_on_cpu(CONFIGS[name]), example_batch(CONFIGS[name])
    wanted = loss_and_gradients(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.logits(batch).dtype == torch.bfloat16
        assert model(batch).dtype == torch.float32
        found = loss_and_gradients(model, batch)
    assert 0 < largest_error(found, wanted) < 0.1


SITES = {
    "decoder": {
        "stack": ["decoder"],
        "block": ["decoder.blocks.0"],
        "attention": ["decoder.blocks.0.attention"],
        "mlp": ["decoder.blocks.0.mlp"],
        "norm": ["decoder.blocks.0.attention_norm", "decoder.blocks.0.mlp_norm", "decoder.norm"],
        "embedding": ["embedding"],
        "head": ["head"],
    },
    "encoder": {
        "stack": ["encoder"],
        "block": ["encoder.blocks.0"],
        "attention": ["encoder.blocks.0.attention"],
        "mlp": ["encoder.blocks.0.mlp"],
        "norm": ["embedding.norm", "encoder.blocks.0.attention_norm", "encoder.blocks.0.mlp_norm", "head.norm"],
        "embedding": ["embedding"],
        "head": ["head"],
    },
    "encoder-class": {
        "stack": ["encoder"],
        "block": ["encoder.blocks.0"],
        "attention": ["encoder.blocks.0.attention"],
        "mlp": ["encoder.blocks.0.mlp"],
        "norm": ["encoder.blocks.0.attention_norm", "encoder.blocks.0.mlp_norm", "encoder.norm"],
        "embedding": ["embedding"],
        "head": ["head"],
    },
    "encoder-decoder": {
        "stack": ["encoder", "decoder"],
        "block": ["encoder.blocks.0", "decoder.blocks.0"],
        "attention": ["encoder.blocks.0.attention", "decoder.blocks.0.attention", "decoder.blocks.0.cross"],
        "mlp": ["encoder.blocks.0.mlp", "decoder.blocks.0.mlp"],
        "norm": [
            "encoder.blocks.0.attention_norm",
            "encoder.blocks.0.mlp_norm",
            "decoder.blocks.0.attention_norm",
            "decoder.blocks.0.cross_norm",
            "decoder.blocks.0.mlp_norm",
        ],
        "embedding": ["embedding"],
        "head": ["head"],
    },
    "vit": {
        "stack": ["encoder"],
        "block": ["encoder.blocks.0"],
        "attention": ["encoder.blocks.0.attention"],
        "mlp": ["encoder.blocks.0.mlp"],
        "norm": ["encoder.blocks.0.attention_norm", "encoder.blocks.0.mlp_norm", "encoder.norm"],
        "embedding": ["embedding"],
        "head": ["head"],
    },
}


@pytest.mark.parametrize("name", SITES)
def test_sites_name_the_modules_of_each_role(name: str) -> None:
    assert sites(build_model(replace(CONFIGS[name], layers=1))) == SITES[name]
