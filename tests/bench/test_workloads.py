"""The workloads are what their names say, and every contestant gets the same model, tokens and labels."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stretto.batch import IGNORE, Batch
from stretto.bench import peers
from stretto.bench.batches import CORPUS, draw_batches, draw_lengths
from stretto.bench.contest import make_recipe
from stretto.bench.workloads import WORKLOADS, LogNormal, Workload, find_workloads, fit_to_device
from stretto.buckets import to_bucket
from stretto.config import ModelConfig, build_config
from stretto.errors import ConfigError
from stretto.flops import training_flops
from stretto.model import build_model
from tests.hf_weights import translate

# layers, width, heads, inner width, vocabulary, dropout, attention dropout
GPT2_SMALL = (12, 768, 12, 0, 50304, 0.0, 0.0)
BERT_LARGE = (24, 1024, 16, 0, 30528, 0.1, 0.1)
BIG = (6, 1024, 16, 0, 40960, 0.1, 0.0)
SHAPES: dict[str, tuple[Any, ...]] = {  # the model's; then rows and length of a batch, or the budget
    "gpt2_small_32x1024": (GPT2_SMALL, 32, 1024),
    "gpt2_medium_16x1024": ((24, 1024, 16, 0, 50304, 0.0, 0.0), 16, 1024),
    "llama1b_4x4096": ((16, 2048, 32, 8192, 128256, 0.0, 0.0), 4, 4096),
    "bert_large_256x128": (BERT_LARGE, 256, 128),
    "bert_large_64x512": (BERT_LARGE, 64, 512),
    "bert_large_64x512_padded": (BERT_LARGE, 64, 512),
    "transformer_big_mt_16k": (BIG, 16384),
    "transformer_big_mt_512": (BIG, 512),
    "transformer_big_fixed_512x32": (BIG, 512, 32),
    "transformer_big_fixed_16x32": (BIG, 16, 32),
    "bert_large_8x128": (BERT_LARGE, 8, 128),
    "gpt2_small_1x1024": (GPT2_SMALL, 1, 1024),
    "vit_base_256": ((12, 768, 12, 0, 0, 0.0, 0.0), 256, 0),
    "t5_base_64x512": ((12, 768, 12, 3072, 32128, 0.1, 0.0), 64, 128),
}


def configure(workload: Workload, **changes: Any) -> ModelConfig:
    return replace(build_config(make_recipe(workload, "stretto plain")).model, **changes)


def draw(name: str, **changes: Any) -> tuple[Batch, ...]:
    workload = replace(WORKLOADS[name], **changes)
    return tuple(draw_batches(workload, configure(workload)))


def test_every_model_and_batch_has_its_defined_shape() -> None:
    assert SHAPES.keys() == WORKLOADS.keys()
    for name, (model, *batch) in SHAPES.items():
        workload, cfg = WORKLOADS[name], configure(WORKLOADS[name])
        dropouts = (cfg.dropout, cfg.attention_dropout)
        assert (cfg.layers, cfg.width, cfg.heads, cfg.mlp_width, cfg.vocab, *dropouts) == model, name
        assert ([workload.budget] if workload.budget else [workload.rows, workload.length]) == batch, name
        assert cfg.kv_heads == (8 if name.startswith("llama") else 0)
        assert cfg.label_smoothing == 0.0 and (cfg.kind == "vit" or cfg.tied)
        assert workload.own or cfg.norm_order == ("post" if name.startswith(("bert", "transformer")) else "pre")
        assert workload.bf16_weights == name.startswith("llama")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_t5_has_the_sizes_that_are_counted_for_it(device_type: str) -> None:
    workload = fit_to_device(WORKLOADS["t5_base_64x512"], device_type)
    cfg = configure(workload)
    with torch.device("meta"):
        theirs: Any = peers.build_model(cfg, torch.float32, workload.own)
    shape = theirs.config
    sizes = (shape.num_layers, shape.num_decoder_layers, shape.d_model, shape.num_heads, shape.d_ff, shape.vocab_size)
    assert sizes == (cfg.layers, cfg.layers, cfg.width, cfg.heads, cfg.mlp_width, cfg.vocab)
    assert shape.d_kv * shape.num_heads == shape.d_model and shape.dropout_rate == cfg.dropout
    assert device_type == "cpu" or sum(p.numel() for p in theirs.parameters()) == 222_903_552  # t5-base's


def test_flops_of_t5_are_those_that_torch_counts() -> None:
    workload = fit_to_device(WORKLOADS["t5_base_64x512"], "cpu")
    cfg = configure(workload)
    (some, *_) = draw_batches(workload, cfg)
    theirs = peers.build_model(cfg, torch.float32, workload.own)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs(**peers.to_inputs(some, cfg))
    masked = 4 * cfg.layers * cfg.width * some.counts.pairs // 2  # half of causal attention, which torch counts too
    assert training_flops(cfg, some.counts) == pytest.approx(3 * (counter.get_total_flops() - masked))


@pytest.mark.parametrize(
    "name", ["gpt2_small_1x1024", "bert_large_8x128", "transformer_big_fixed_16x32", "t5_base_64x512"]
)
def test_full_rows_are_dense_and_differ_between_batches(name: str) -> None:
    workload, cfg = WORKLOADS[name], configure(WORKLOADS[name])
    draws = draw(name)
    assert len(draws) == 4 and len({batch.labels.numpy().tobytes() for batch in draws}) == 4
    for batch in draws:
        assert batch.inputs is not None and batch.inputs.layout.dense and batch.inputs.layout.lengths is None
        assert batch.counts.tokens == batch.counts.slots == batch.inputs.ids.numel() == workload.rows * workload.length
        if batch.source is not None:
            read = workload.rows * (512 if workload.own else workload.length)
            assert batch.counts.source_tokens == batch.counts.source_slots == read
        assert "attention_mask" not in peers.to_inputs(batch, cfg)
        assert int(batch.inputs.ids.max()) < cfg.vocab


def test_causal_labels_are_the_next_token() -> None:
    (some, *_) = draw("gpt2_small_32x1024", num_batches=1)
    assert some.inputs is not None
    ids, labels = (values.reshape(32, 1024) for values in (some.inputs.ids, some.labels))
    assert (labels[:, :-1] == ids[:, 1:]).all() and (labels[:, -1] == IGNORE).all()
    assert some.counts.labels == 32 * 1023


@pytest.mark.parametrize("name", ["bert_large_64x512", "bert_large_64x512_padded"])
def test_masked_lm_predicts_15_percent_of_the_real_tokens(name: str) -> None:
    for batch in draw(name):
        assert batch.label_at is not None and batch.inputs is not None
        assert len(batch.labels) == len(batch.label_at) == batch.counts.labels == round(0.15 * batch.counts.tokens)
        assert int(batch.label_at.max()) < batch.inputs.ids.numel() and (batch.labels != IGNORE).all()


def test_padded_bert_has_about_35_percent_real_tokens_and_stretto_packs_them() -> None:
    cfg = configure(WORKLOADS["bert_large_64x512_padded"])
    draws = draw("bert_large_64x512_padded")
    counts = [peers.count(some, cfg) for some in draws]
    assert all(c.slots == 64 * 512 for c in counts)
    assert 0.31 < sum(c.tokens for c in counts) / sum(c.slots for c in counts) < 0.39
    for batch, c in zip(draws, counts, strict=True):
        inputs = peers.to_inputs(batch, cfg)
        assert batch.inputs is not None and not batch.inputs.layout.dense
        lengths = batch.inputs.layout.offsets.diff()
        assert lengths.min() >= 8 and lengths.max() <= 512
        assert batch.inputs.ids.numel() == c.tokens == int(inputs["attention_mask"].sum())
        assert inputs["input_ids"].shape == (64, 512)


def test_lengths_follow_their_distribution() -> None:
    lengths = draw_lengths(LogNormal(140, 0.8, 8, 512), 20_000, np.random.default_rng(1))
    assert np.median(lengths) == pytest.approx(140, rel=0.03)
    assert np.log(lengths[(lengths > 8) & (lengths < 512)] / 140).std() == pytest.approx(0.71, abs=0.03)  # 0.8, cut
    assert (lengths == 512).mean() == pytest.approx(0.0526, abs=0.01)  # P(N > ln(512 / 140) / 0.8)


@pytest.mark.parametrize(("name", "budget"), [("transformer_big_mt_16k", 16384), ("transformer_big_mt_512", 512)])
def test_sentences_fill_their_budget_with_little_padding(name: str, budget: int) -> None:
    cfg, ratios, sources = configure(WORKLOADS[name]), [], []
    draws = draw(name)
    assert len(draws) == 8
    for batch in draws:
        inputs = peers.to_inputs(batch, cfg)
        assert batch.inputs is not None and batch.source is not None
        target, source = (side.layout.offsets.diff() for side in (batch.inputs, batch.source))
        slots = [inputs[key].numel() for key in ("input_ids", "labels")]
        assert 0.7 * budget < max(slots) <= budget
        assert source.min() >= 4 and source.max() <= 200
        assert batch.counts.tokens == batch.counts.labels == int((inputs["labels"] != IGNORE).sum())
        assert batch.counts.source_tokens == batch.source.ids.numel() == int(inputs["attention_mask"].sum())
        ratios += (target / source).tolist()
        sources += source.tolist()
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.1)
    assert budget < 1000 or np.std(ratios) == pytest.approx(0.15, abs=0.04)  # a small batch is a slice of the ratios
    assert 15 < np.median(sources) < 35 and len(sources) < CORPUS


@pytest.mark.parametrize(
    "name", ["transformer_big_mt_16k", "transformer_big_mt_512", "bert_large_64x512_padded", "gpt2_small_1x1024"]
)
def test_what_is_timed_has_little_filler(name: str) -> None:
    """On both sides of a translation; peers have much more of it."""
    cfg, draws = configure(WORKLOADS[name]), draw(name)
    ours, theirs = [to_bucket(some).counts for some in draws], [peers.count(some, cfg) for some in draws]
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    ours_share, peers_share = (sum(c.padding for c in some) / sum(c.all_slots for c in some) for some in (ours, theirs))
    if name.startswith("gpt2"):
        assert ours_share == peers_share == 0
    else:
        assert 0 < ours_share < min(peers_share, 0.03)


def test_the_decoder_reads_the_start_symbol_then_what_it_should_have_written() -> None:
    (some, *_) = draw("transformer_big_fixed_16x32", num_batches=1)
    assert some.inputs is not None
    ids, labels = (values.reshape(16, 32) for values in (some.inputs.ids, some.labels))
    assert (ids[:, 0] == 0).all() and (ids[:, 1:] == labels[:, :-1]).all() and (labels > 0).all()


def test_images() -> None:
    (some, *_) = draw("vit_base_256", num_batches=1, rows=3)
    assert some.pixels is not None and some.pixels.shape == (3, 3, 224, 224) and some.counts.tokens == 3
    assert some.labels.max() < 1000


def test_everyone_draws_the_same() -> None:
    first, second = draw("transformer_big_mt_512"), draw("transformer_big_mt_512")
    assert all((a.labels == b.labels).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", [n for n in WORKLOADS if not n.startswith(("bert_large_8", "gpt2_small_1", "t5"))])
def test_stretto_and_the_peer_compute_the_same_loss_from_the_same_weights(name: str) -> None:
    """Of the tiny version, without dropout. `translate` raises unless every parameter has its counterpart."""
    workload = fit_to_device(WORKLOADS[name], "cpu")
    cfg = configure(workload, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    theirs: Any = peers.build_model(cfg, torch.float32, {})
    assert theirs.config._attn_implementation == "sdpa"
    ours = build_model(cfg, "cpu")
    ours.load_state_dict(translate(theirs, ours, lambda parameter: parameter.data))
    assert theirs.training and ours.training
    for batch in draw_batches(workload, cfg):
        with torch.no_grad():
            loss = theirs(**peers.to_inputs(batch, cfg)).loss
            torch.testing.assert_close(ours(batch) / batch.counts.labels, loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2_small_1x1024",
        "llama1b_4x4096",
        "bert_large_8x128",
        "bert_large_64x512_padded",
        "transformer_big_mt_512",
        "vit_base_256",
        "t5_base_64x512",
    ],
)
def test_the_accelerated_model_trains_as_the_peer_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses, step by step, up to roundings. Without dropout, and without decay: ours spares the vectors."""
    workload, off = fit_to_device(WORKLOADS[name], "cpu"), {"dropout": 0.0, "attention_dropout": 0.0}
    changes = {"model": workload.model | off, "optim": {"lr": 1e-3, "weight_decay": 0.0}}
    config = build_config(make_recipe(workload, "stretto hf") | changes)
    own = workload.own and workload.own | {"dropout_rate": 0.0}
    draws, cpu, losses = draw_batches(workload, config.model), torch.device("cpu"), []
    for accelerated in (False, True):
        torch.manual_seed(0)
        if accelerated:
            contestant = peers.build_accelerated(config, own, draws, cpu)
        else:
            contestant = peers.build_peer(config, own, draws, "eager", cpu, torch.float32)
        losses.append(torch.stack([contestant.step(i) for i in range(4)]))
    assert losses[0][-1] < losses[0][0] - 0.05
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert re.search(r"norm .* yes$", capsys.readouterr().out, re.MULTILINE)  # it is not the peer once more


@pytest.mark.parametrize(
    "name",
    ["gpt2_medium_16x1024", "llama1b_4x4096", "bert_large_64x512", "transformer_big_mt_16k", "vit_base_256"],
)
def test_full_sizes_have_equal_numbers_of_parameters(name: str) -> None:
    cfg = configure(WORKLOADS[name])
    with torch.device("meta"):
        theirs = peers.build_model(cfg, torch.float32, {})
    trained = sum(p.numel() for p in theirs.parameters() if p.requires_grad)  # Marian's table of sines is not
    assert trained == sum(p.numel() for p in build_model(cfg).parameters()) > 8e7


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["gpt2_small_1x1024", "bert_large_8x128", "transformer_big_mt_512"])
def test_the_peer_drops_out_as_asked(name: str, dropout: float) -> None:
    workload = fit_to_device(WORKLOADS[name], "cpu")
    cfg = configure(workload, dropout=dropout, attention_dropout=0.0)
    theirs = peers.build_model(cfg, torch.float32, {})
    inputs = peers.to_inputs(draw_batches(workload, cfg)[0], cfg)
    with torch.no_grad():
        assert (theirs(**inputs).loss == theirs(**inputs).loss) == (dropout == 0.0)


def test_names() -> None:
    assert find_workloads(["all"]) == list(WORKLOADS)
    assert find_workloads(["vit_base_256", "vit_base_256"]) == ["vit_base_256"]
    with pytest.raises(ConfigError, match="gpt3"):
        find_workloads(["vit_base_256", "gpt3"])
    assert fit_to_device(WORKLOADS["vit_base_256"], "cuda") is WORKLOADS["vit_base_256"]
