"""The account of memory: equal, to the byte, to what autograd keeps; parameters; the peak; the plan; the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

import stretto.attention
from stretto import cli, memory, plan
from stretto.batch import Batch, Sequences, dense_layout
from stretto.config import (
    Fp8Config,
    FusedConfig,
    LeanConfig,
    ModelConfig,
    OptimConfig,
    build_config,
    build_model_config,
)
from stretto.memory import FP32, Keep, Load, Way, count_parameters, kept_by_blocks, list_blocks, predict
from stretto.model import build_model
from stretto.ops import cross_entropy
from stretto.ops.attention import is_short
from stretto.optim import count_state
from stretto.precision import autocast
from stretto.presets import PRESETS
from stretto.report import read_events
from stretto.techniques.fused import FusedBlock
from stretto.train import train
from stretto.values import read_bytes
from tests.models import KINDS, Sample, build, build_adamw, collate, image_batch
from tests.runs import MakeConfig, find_imported

ROWS, LENGTH, SOURCE = 3, 8, 6  # sequences, and their tokens on both sides
CPU = torch.device("cpu")
MODELS = {name: cfg for name, cfg in KINDS.items() if name != "encoder-class"}  # no recipe trains a text classifier


@dataclass(frozen=True)
class Setting:
    """A choice of what to keep, and the options that make blocks keep it."""

    keep: Keep
    options: LeanConfig | None = None
    hooked: bool = False  # blocks have hooks for saved tensors of their own, behind which others see nothing


def list_settings() -> dict[str, Setting]:
    found = {"everything": Setting(Keep())}
    for norms, mlp, qkv in product(("input", "output"), ("activation", "product", "input"), ("product", "input")):
        keep: Any = {"norms": norms, "mlp": mlp, "qkv": qkv}
        found[f"norms {norms}, mlp {mlp}, qkv {qkv}"] = Setting(Keep(**keep), LeanConfig(**keep), qkv == "input")
    whole = Setting(Keep("output", block="input"), LeanConfig(blocks=100), hooked=True)
    return found | {"inputs of blocks": whole}


SETTINGS = list_settings()
DROPS: dict[str, dict[str, Any]] = {
    "no dropout": {},
    "dropout": {"dropout": 0.1},
    "MLP dropout": {"activation_dropout": 0.1},
    "own attention": {"attention_dropout": 0.1},
    "all dropout": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
}


def dense_batch(cfg: ModelConfig) -> tuple[Batch, Load]:
    """Full rows, and what they bring."""
    if cfg.kind == "vit":
        batch = image_batch()
        return batch, Load(len(batch.labels) * 5, len(batch.labels))
    batch = collate(cfg, [Sample.draw(LENGTH, SOURCE, seed) for seed in range(ROWS)], "padded")

    def fill(side: Sequences | None, length: int) -> Sequences | None:
        return None if side is None else replace(side, layout=dense_layout(ROWS, length))

    pairs = cfg.kind == "encoder-decoder"
    load = Load(ROWS * LENGTH, len(batch.labels), ROWS * SOURCE if pairs else 0, LENGTH + SOURCE if pairs else LENGTH)
    return replace(batch, inputs=fill(batch.inputs, LENGTH), source=fill(batch.source, SOURCE)), load


def find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "__dict__"):
        for part in vars(value).values():
            yield from find_tensors(part)


def count_left(
    cfg: ModelConfig, options: LeanConfig | None, precision: str, batch: Batch, fp8: Fp8Config | None = None
) -> int:
    """The bytes that a forward pass has taken from the allocator and not given back."""
    model = build(cfg, FusedConfig(weights="fp32"), lean=options, fp8=fp8)
    with autocast(precision, CPU):
        model(batch)  # once before: what is made in a first pass alone is not kept for a backward pass
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            loss = model(batch)
    assert loss.requires_grad
    results: Any = profiler.profiler
    return sum(event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]")


def count_saved(
    cfg: ModelConfig, options: LeanConfig | None, precision: str, batch: Batch, fp8: Fp8Config | None = None
) -> int:
    """All that autograd keeps of one pass, other than parameters and the batch. Views of one tensor count once."""
    model = build(cfg, FusedConfig(weights="fp32"), lean=options, fp8=fp8)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *find_tensors(batch))}
    found: dict[int, tuple[int, Tensor]] = {}  # the tensors, too: the memory of one that is gone would be used again

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(precision, CPU):
        model(batch)
    return sum(size for size, _ in found.values())


def count_difference(
    cfg: ModelConfig, setting: Setting, precision: str, key: str, fp8: Fp8Config | None = None
) -> tuple[int, int]:
    """What one more layer adds, counted and by the formula: at autograd's hooks, and at the allocator where these do
    not see everything."""
    batch, load = dense_batch(cfg)
    if cfg.attention_dropout:
        load = replace(load, attention="own")
    way = Way(2 if precision == "bf16" else 4, "fp32", narrow="all" if fp8 else "")
    counted, predicted = [], []
    count = count_left if setting.hooked else count_saved
    for layers in (2, 3):
        sizes: dict[str, Any] = {"layers": 2, key: layers}
        deep = replace(cfg, **sizes)
        keeps = [setting.keep] * len(list_blocks(deep))
        counted.append(count(deep, setting.options, precision, batch, fp8))
        predicted.append(sum(sum(block.values()) for block in kept_by_blocks(deep, load, keeps, way)))
    return counted[1] - counted[0], predicted[1] - predicted[0]


@pytest.fixture
def own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own attention also where torch's would be taken: it keeps on a CPU what it keeps on a GPU."""
    monkeypatch.setattr(stretto.attention, "_fits_kernels", lambda q: True)


def list_cases() -> list[tuple[str, str, str]]:
    """Both precisions; where the allocator has to be asked, which takes a fifth of a second, one or the other."""
    return [
        (name, setting, precision)
        for (i, name), (j, setting), (k, precision) in product(
            list(enumerate(MODELS)), list(enumerate(SETTINGS)), list(enumerate(("fp32", "bf16")))
        )
        if not SETTINGS[setting].hooked or (i + j + k) % 2 == 0
    ]


@pytest.mark.parametrize(("name", "setting", "precision"), list_cases())
def test_one_more_layer_keeps_what_the_formula_says(name: str, setting: str, precision: str) -> None:
    cfg = MODELS[name]
    keys = ["layers", "decoder_layers"] if cfg.kind == "encoder-decoder" else ["layers"]
    for key in keys:
        cfg = replace(cfg, decoder_layers=2) if cfg.kind == "encoder-decoder" else cfg
        counted, predicted = count_difference(cfg, SETTINGS[setting], precision, key)
        assert counted == predicted > 0, key


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])  # whose 15 tokens would be filled up
def test_one_more_layer_with_products_of_8_bits(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for scales, of four bytes a product; tokens are a multiple of 16, to which factors are filled up."""
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 16)
    cfg = replace(MODELS[name], width=32, mlp_width=48)
    key = "decoder_layers" if cfg.kind == "encoder-decoder" else "layers"
    counted, predicted = count_difference(cfg, SETTINGS[setting], "bf16", key, Fp8Config(sites="all"))
    assert 0 <= counted - predicted <= 6 * FP32
    assert all(memory.list_narrow(cfg, dense_batch(cfg)[1], Way(narrow="all")))


@pytest.mark.parametrize("name", MODELS)
def test_the_allocator_counts_what_the_hooks_count(name: str) -> None:
    batch, _ = dense_batch(MODELS[name])
    deep = [replace(MODELS[name], layers=layers) for layers in (2, 3)]
    hooks, allocator = (
        [count(cfg, LeanConfig(), "bf16", batch) for cfg in deep] for count in (count_saved, count_left)
    )
    assert hooks[1] - hooks[0] == allocator[1] - allocator[0] > 0


@pytest.mark.usefixtures("own_attention")
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder", "vit"])
def test_dropout_keeps_keys_and_words(name: str, drop: str) -> None:
    cfg = replace(MODELS[name], **DROPS[drop])
    key = "decoder_layers" if cfg.kind == "encoder-decoder" else "layers"
    counted, predicted = count_difference(cfg, SETTINGS["everything"], "bf16", key)
    assert counted == predicted


def test_blocks_that_drop_attention_again_keep_keys() -> None:
    cfg = replace(MODELS["decoder"], attention_dropout=0.1)
    counted, predicted = count_difference(cfg, SETTINGS["inputs of blocks"], "bf16", "layers")
    assert counted == predicted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_the_whole_model_keeps_what_the_account_says(name: str, dropout: float, precision: str) -> None:
    cfg = replace(MODELS[name], dropout=dropout)
    batch, load = dense_batch(cfg)
    account = predict(cfg, load, [Keep()] * len(list_blocks(cfg)), Way(2 if precision == "bf16" else 4, "fp32"))
    counted = count_saved(cfg, None, precision, batch)
    if cfg.kind == "vit" and dropout:  # on a CPU torch keeps the mask behind the embedding in 4 bytes, on a GPU in 1
        counted -= 3 * load.tokens * cfg.width
    assert counted == sum(account.activations.values()) + account.head.kept


@pytest.mark.parametrize("role", ["inputs of norms", "queries, keys, values", "MLP activations", "statistics"])
def test_a_planted_error_is_found(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = memory.block_bytes

    def wrong(*arguments: Any) -> dict[str, int]:
        found = right(*arguments)
        return found | {role: found[role] + 1}

    monkeypatch.setattr(memory, "block_bytes", wrong)
    counted, predicted = count_difference(MODELS["decoder"], SETTINGS["everything"], "fp32", "layers")
    assert predicted - counted == ROWS * LENGTH


def test_numbers_worked_out_by_hand() -> None:
    """Bytes per token and layer in 16 bits: 32 C and statistics, 24 C without activations; Llama 37 C and 29 C."""
    bert, llama = (build_model_config({"preset": name}) for name in ("bert-large", "llama-1b"))

    def per_token(cfg: ModelConfig, **keep: Any) -> int:
        return sum(memory.block_bytes(cfg, Keep(**keep)).values())

    assert per_token(bert) == 32 * 1024 + 16 + 4 * 16 and per_token(bert, mlp="product") == 24 * 1024 + 80
    assert per_token(llama) == 37 * 2048 + 8 + 4 * 32 and per_token(llama, mlp="product") == 29 * 2048 + 136
    assert per_token(bert, norms="output", mlp="product") == 20 * 1024 + 8 + 64
    assert per_token(bert, norms="output", mlp="product", qkv="input") == 14 * 1024 + 72
    assert per_token(bert, norms="output", mlp="input", qkv="input") == 6 * 1024 + 72
    assert per_token(bert, block="input") == 2 * 1024 and per_token(llama, block="input") == 2 * 2048 + 4


@pytest.mark.parametrize("name", [*PRESETS, *KINDS])
def test_parameters_are_those_of_the_model(name: str) -> None:
    cfg = KINDS[name] if name in KINDS else build_model_config({"preset": name})
    cfg = replace(cfg, vocab=cfg.vocab or 320, classes=cfg.classes or (10 if cfg.kind == "vit" else 0))
    for each in (cfg, replace(cfg, decoder_layers=3, tied=not cfg.tied)):
        assert sum(count_parameters(each).values()) == sum(p.numel() for p in build_model(each).parameters())


def test_chunks_are_those_of_the_kernel() -> None:
    assert (memory.CHUNK_ROWS, memory.CHUNK_BYTES) == (cross_entropy.CHUNK_ROWS, cross_entropy.CHUNK_BYTES)
    for tokens in (0, 1, 129, 8192, 8193, 100_000):
        for row_bytes in (2 * 64, 2 * 50_304, 4 * 128_256, 2**31):
            assert memory.chunk_rows(tokens, row_bytes) == cross_entropy.chunk_rows(tokens, row_bytes)


def test_kernels_of_attention_change_where_the_plan_says() -> None:
    assert plan.LONG == stretto.attention.LONG and memory.BLOCK_KEYS == FusedBlock.KEYS
    for size, limit in ((64, plan.SHORT), (128, plan.SHORT_WIDE)):
        q = torch.empty(1, 1, size, dtype=torch.bfloat16)
        assert [is_short(q, length) for length in (limit, limit + 1)] == [True, False]


@pytest.mark.parametrize("weights", ["fp32", "split", "bf16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_state_is_what_the_optimizer_holds(weights: Any, moments: Any) -> None:
    cfg, way = MODELS["decoder"], Way(2, weights, moments)
    model = build(cfg, None, torch.float32 if weights == "fp32" else torch.bfloat16)
    optimizer = build_adamw(model, OptimConfig(), FusedConfig(weights=weights, moments=moments))
    account = predict(cfg, Load(8, 8), [Keep()] * 2, way)
    state = {"weights": account.weights, "gradients": account.gradients, "moments": account.moments}
    assert count_state(optimizer) == state


def test_the_peak_moves_with_what_there_is_most_of() -> None:
    cfg = build_model_config({"preset": "bert-large"})

    def peak_at(tokens: int, keep: Keep, **changes: Any) -> str:
        return predict(replace(cfg, **changes), Load(tokens, tokens // 7), [keep] * 24, Way()).peak_at

    assert peak_at(64, Keep()) == "end of the backward pass"
    assert peak_at(2**15, Keep(), vocab=2**18) == "forward pass of the head"
    assert peak_at(2**15, Keep(block="input")) == "backward pass of a block"
    one, several = (predict(cfg, Load(2**12, 512), [Keep()] * 24, Way(micro_batches=n)).times for n in (1, 2))
    added = {time: several[time] - there for time, there in one.items()}
    gradients, table = 2 * sum(count_parameters(cfg).values()), 2 * cfg.vocab * cfg.width
    assert added["forward pass of the head"] == gradients and added["update"] == 0
    assert added["end of the backward pass"] == table
    peaks = [predict(cfg, Load(2**15, 5000), [keep] * 24, Way()).peak for keep in plan.LADDER.values()]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    some = predict(cfg, Load(2**15, 5000), [Keep(block="input")] * 12 + [Keep()] * 12, Way())
    assert peaks[-1] < some.peak < peaks[0]


@pytest.mark.parametrize(
    ("model", "load", "way", "keep", "gib"),
    [
        ({"preset": "gpt2-small", "vocab": 50304}, Load(2**15, 2**15), Way(), Keep(), 11.6),
        ({"preset": "gpt2-medium", "vocab": 50304}, Load(2**14, 2**14), Way(), Keep(), 17.2),
        ({"preset": "llama-1b"}, Load(2**14, 2**14), Way(2, "bf16", "bf16"), Keep(mlp="product"), 25.2),
        ({"preset": "bert-large", "vocab": 30528}, Load(2**15, 64 * 77), Way(), Keep(), 28.7),
        ({"preset": "transformer-big", "vocab": 40960}, Load(2**14, 2**14, 2**14, 64, "own"), Way(), Keep(), 9.5),
        ({"preset": "vit-base"}, Load(256 * 197, 256), Way(), Keep(), 16.4),
    ],
)
def test_the_peak_is_near_the_reserved_memory_that_was_measured(
    model: dict[str, Any], load: Load, way: Way, keep: Keep, gib: float
) -> None:
    """docs/results.md, "Training steps": what the allocator has reserved is somewhat more than tensors take."""
    cfg = build_model_config(model)
    peak = predict(cfg, load, [keep] * len(list_blocks(cfg)), way).peak / 2**30
    assert 0.94 * gib < peak < gib


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["plan", *arguments])
    return result.exit_code, str(result.exception) if result.exit_code == 1 else result.output


@pytest.mark.parametrize("recipe", ["demo", "causal-lm", "masked-lm", "translation", "images"])
def test_a_plan_of_every_recipe(recipe: str) -> None:
    code, text = invoke(recipe, "--memory", "--set", "run.device=cuda", "--gpu-memory", "16 GiB")
    assert code == 0 and "GiB" in text and "peak, at the" in text
    assert "is assumed" in text or "are assumed" in text or recipe == "causal-lm"
    largest = [int(line.split()[-1].replace(",", "")) for line in text.splitlines()[-len(plan.LADDER) :]]
    *parts, whole = (
        largest  # a block that is computed again as a whole is there as a whole: of few blocks, that is much
    )
    assert parts == sorted(parts) and 0 < parts[0] < whole


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    limit, tree = 2 * 2**30, {"preset": "gpt2-small", "max_len": 64}
    config = build_config({"model": tree, "data": {"seq_len": 64}, "run": {"device": "cuda"}})
    choice = plan.find_choice(config, plan.find_needs(config))
    largest = plan.find_largest(config, choice, limit)
    peaks = [plan.find_needs(config, size).predict(choice).peak for size in (largest, largest + 1)]
    assert peaks[0] <= limit < peaks[1]
    assert plan.find_largest(config, choice, 2**20) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["demo", "--memory", "--gpu-memory", "16 parsecs"], 2, "--gpu-memory"),
        (["demo", "--memory", "--set", "data.tokenizer=other.json"], 1, "set model.vocab"),
        (["demo", "--memory", "--set", "techniques.fused=false"], 1, "set techniques.fused=true"),
        (["demo", "--memory", "--set", "model.widht=3"], 1, "model.widht"),
    ],
)
def test_errors_of_a_plan_name_the_key(arguments: list[str], code: int, words: str) -> None:
    found, text = invoke(*arguments)
    assert found == code and words in text


def test_a_plan_says_what_it_leaves_out() -> None:
    assert "parallel.data is left out" in invoke("demo", "--memory", "--set", "parallel.data=shard")[1]
    assert "parallel" not in invoke("demo", "--memory")[1]
    whole, cut = (invoke("demo", "--memory", "--set", f"parallel.pipeline={size}")[1] for size in (1, 4))
    assert "parallel.pipeline is left out" in cut and whole.splitlines()[-9:] == cut.splitlines()[-9:]


def test_a_plan_reads_the_recipe() -> None:
    tree = {"run": {"device": "cuda"}, "data": {"seq_len": 64}, "techniques": {"lean": {"blocks": 1}}}
    config = build_config(tree)
    needs = plan.find_needs(config)
    assert needs == plan.find_needs(config, config.data.batch_size) != plan.find_needs(config, parts=2)
    keeps = plan.find_choice(config, needs).keeps
    assert keeps == (Keep("output", block="input"), *[Keep("output", "product")] * 3)
    two = build_config(tree | {"parallel": {"sequence": 2}})
    assert 2 * plan.find_needs(two).load.tokens == needs.load.tokens
    assert plan.find_way(config) == Way(2, "split", "fp32")
    assert plan.find_way(build_config(tree | {"train": {"precision": "fp32"}})) == Way(4, "fp32", "fp32")
    assert plan.find_attention(config, 4096) == "variable" and plan.find_attention(config, 64) == "own"
    joined = build_config(tree | {"data": {"join_documents": True}})
    assert plan.find_attention(joined, 4096) == "dense"
    assert [read_bytes(text) for text in ("16GiB", "1.5 mb", "80GB")] == [2**34, 1_500_000, 80 * 10**9]


@pytest.mark.parametrize("shards", [1, 8])
def test_gradients_that_come_into_being_take_no_more_than_those_that_are_there(shards: int) -> None:
    """Of a sharded model a process keeps its share of each block's gradients, and not all of them."""
    cfg, load = build_model_config({"preset": "gpt2-xl", "vocab": 50304}), Load(64, 64)
    one, two = (predict(cfg, load, [Keep()] * 48, Way(shards=shards, micro_batches=many)).peak for many in (1, 2))
    assert one <= two


def test_a_plan_imports_nothing_heavy() -> None:
    code = (
        "import stretto.cli as cli; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(cli.app, ['plan', 'demo', '--memory']).exit_code == 0"
    )
    assert find_imported(code, "torch", "numpy", "tokenizers") == []


@pytest.mark.parametrize("kernels", [False, True])
def test_a_run_reports_what_it_holds_beside_the_prediction(make_config: MakeConfig, kernels: bool) -> None:
    config = make_config(train__steps=2, techniques__fused=kernels)
    folder = train(config)
    (event,) = [event["memory"] for event in read_events(folder) if "memory" in event]
    measured, predicted = event["measured"], event["predicted"]
    assert {key: predicted[key] for key in measured} == measured and measured["moments"] == 2 * measured["weights"]
    assert ("peak" in predicted) == kernels
    page = (folder / "report.html").read_text()
    assert "<h2>Memory</h2>" in page and page.count(f'title="{measured["weights"]:,} bytes"') >= 2
