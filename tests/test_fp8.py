"""Products of 8 bits as a technique: which layers, how a run goes on, what it says, and when it does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
import stretto.build
from stretto import checkpoint, plan
from stretto.batch import Batch, Counts, Sequences, dense_layout
from stretto.config import Config, build_config
from stretto.errors import ConfigError
from stretto.estimate import RATES
from stretto.memory import list_blocks, list_narrow
from stretto.mesh import Mesh
from stretto.ops import round8
from stretto.ops.fp8 import Eight
from stretto.ops.round8 import E4M3, MARGIN, Bounds
from stretto.plan import for_device
from stretto.precision import autocast
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.techniques import fp8, open_techniques
from stretto.techniques.fp8 import LEAST, LOOK, Fp8
from stretto.train import train
from tests.runs import MakeConfig, eval_losses, losses

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
ALL = {"sites": "all"}


@pytest.fixture
def run(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Path]:
    """Trains a tiny model in bf16, three blocks with kernels; returns its folder."""

    def run(name: str, resume: bool = False, **changes: Any) -> Path:
        options: dict[str, Any] = {
            "train__precision": "bf16", "techniques__fused": True, "model__layers": 3, "optim__schedule": "constant",
        }  # fmt: skip
        return train(make_config(**options | changes, run__dir=str(tmp_path / name)), resume)

    return run


def technique_of(config: Config, device: torch.device = CPU) -> Fp8:
    """As it is in a run on such a device, which need not be there."""
    context = stretto.build.describe_context(config, Runtime(device), Mesh())
    (found,) = [each for each in open_techniques(config, context) if isinstance(each, Fp8)]
    model = stretto.build.build_model(config.model)
    found.apply(model, stretto.build.sites(model))
    return found


def configure(**changes: Any) -> Config:
    tree: dict[str, Any] = {"data": {"seq_len": 1024}, "techniques": {"fp8": True, "fused": True}}
    return build_config(tree | changes)


def test_off_is_bit_identical(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU it stays off, and says so."""
    without = run("without")
    capsys.readouterr()
    with_it = run("with", techniques__fp8=True)
    assert "8 bits: off: there is no GPU" in capsys.readouterr().out
    assert losses(with_it) == losses(without) and eval_losses(with_it) == eval_losses(without)
    one, two = (checkpoint.load(folder / "checkpoints", 6) for folder in (with_it, without))
    assert all(torch.equal(one.weights[key], two.weights[key]) for key in two.weights)
    assert not any(key.startswith("fp8") for event in read_events(with_it) for key in event)


@pytest.mark.parametrize("recipe", ["tensor", "row", "block128"])
def test_it_learns_as_bf16_does(run: Callable[..., Path], recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = {"model__width": 128, "model__heads": 2} if recipe == "block128" else {}
    plain = run("plain", **size)
    narrow = run("narrow", techniques__fp8=ALL | {"recipe": recipe, "head": recipe == "row"}, **size)
    words = "12 layers: 3 attention.qkv, 3 attention.out, 3 mlp.up, 3 mlp.down"
    words = words.replace("12", "13") + ", 1 head" if recipe == "row" else words
    assert f"products of 8 bits ({recipe}) in {words}" in capsys.readouterr().out
    one, other = losses(plain), losses(narrow)
    assert one != other and all(abs(one[step] - other[step]) < 0.02 for step in one)
    line = [event for event in read_events(narrow) if "eval_loss" in event][-1]
    assert line["fp8_layers"] == 12 + (recipe == "row") and line["fp8_cosine"] > 0.997
    assert line["fp8_saturated_x"] == 0 and line["fp8_underflow_dout"] < 0.02 < line["fp8_most_x"]


COMBINED: dict[str, dict[str, Any]] = {
    "lean": {"techniques__lean": {"mlp": "product", "qkv": "input"}},
    "blocks": {"techniques__lean": {"blocks": 2, "mlp": "input"}},
    "layer_drop": {"techniques__layer_drop": {"theta": 0.5, "gate": "sample"}},
    "standardize": {"techniques__standardize": True},
    "post": {"model__norm_order": "post", "model__activation": "relu"},
}


@pytest.mark.parametrize("name", COMBINED)
def test_with_others(run: Callable[..., Path], name: str) -> None:
    plain, narrow = run("plain", **COMBINED[name]), run("narrow", **COMBINED[name], techniques__fp8=ALL)
    one, other = losses(plain), losses(narrow)
    assert one != other and all(abs(one[step] - other[step]) < 0.05 for step in one)


def test_what_is_computed_again_has_the_same_bits(run: Callable[..., Path]) -> None:
    kept = run("kept", techniques__fp8=ALL)
    again = run("again", techniques__fp8=ALL, techniques__lean={"norms": "input", "mlp": "input", "qkv": "input"})
    assert losses(kept) == losses(again)


def test_a_resumed_run_is_the_same_run(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that is looked at in step 4 (of looks every 2) is planted a wrong scale, and goes back to bf16."""
    monkeypatch.setattr(fp8, "LOOK", 2)
    monkeypatch.setattr(fp8, "GROUPS", 3)
    take_room = Eight.take_room

    def plant(product: Eight, weight: torch.Tensor) -> Any:
        if weight.shape == (32, 128):  # the second product of an MLP
            product.bounds["x"].most.fill_(1e-4)
            product.bounds["x"].known = True
        return take_room(product, weight)

    monkeypatch.setattr(Eight, "take_room", plant)
    options = {"techniques__fp8": ALL, "train__eval_every": 2}
    whole = run("whole", **options, train__steps=8)
    out = capsys.readouterr().out
    assert out.count("multiplies in bf16 from step") == 3 and "saturated and" in out
    assert "8 bits: decoder.blocks.0.mlp.down multiplies in bf16 from step 1 on" in out
    run("parts", **options, train__steps=4)
    parts = run("parts", **options, train__steps=8, resume=True)
    assert losses(parts) == losses(whole)
    one, two = (checkpoint.load(folder / "checkpoints", 8) for folder in (parts, whole))
    assert all(torch.equal(one.weights[key], two.weights[key]) for key in two.weights)
    state = two.state["techniques"]["fp8"]
    assert state == one.state["techniques"]["fp8"] and state["lost"] == [
        f"decoder.blocks.{i}.mlp.down" for i in range(3)
    ]
    assert len(state["layers"]) == 12
    lines = [event for event in read_events(whole) if "eval_loss" in event]
    assert lines[0]["fp8_cosine"] < LEAST and lines[0]["fp8_saturated_x"] > 0.5 and lines[-1]["fp8_layers"] == 9


def bounds_of(folder: Path, step: int) -> list[float]:
    bounds: list[float] = checkpoint.load(folder / "checkpoints", step).state["techniques"]["fp8"]["bounds"]
    return bounds


def test_the_first_update_alone_takes_maxima(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is launched, not replayed; a resumed run has its bounds from its state, and without them goes on otherwise."""
    maxima, keys, find, graph_key = [0], list[Any](), round8.find_most, Fp8.graph_key

    def note(technique: Fp8, step: int) -> Any:
        technique.watched = []
        keys.append(graph_key(technique, step))
        maxima.append(0)  # the weights of the next update are with this one
        return keys[-1]

    def count(x: torch.Tensor, bound: Any) -> torch.Tensor:
        maxima[-1] += bound is None or not bound.known
        return find(x, bound)

    monkeypatch.setattr(Fp8, "graph_key", note)
    monkeypatch.setattr(round8, "find_most", count)
    whole = run("whole", techniques__fp8=ALL, train__steps=4)
    assert keys == [None, (36,), (36,), (36,)] and maxima[1] > 0 and not any(maxima[2:])
    run("parts", techniques__fp8=ALL, train__steps=2)
    keys.clear()
    parts = run("parts", True, techniques__fp8=ALL, train__steps=4)
    assert keys == [(36,), (36,)] and losses(parts) == losses(whole) and bounds_of(parts, 4) == bounds_of(whole, 4)
    run("lost", techniques__fp8=ALL, train__steps=2)
    monkeypatch.setattr(Bounds, "set", lambda *_: None)
    assert losses(run("lost", True, techniques__fp8=ALL, train__steps=4)) != losses(whole)


def test_bounds_are_those_of_all_micro_batches(run: Callable[..., Path]) -> None:
    """However an update is divided: nearly the same maxima, and what is beyond a bound is not lost on the way."""
    options = {"techniques__fp8": ALL, "model__dropout": 0.0, "train__steps": 2}
    one, two = (run(str(n), **options, train__micro_batches=n, data__batch_size=8 // n) for n in (1, 2))
    for a, b in zip(bounds_of(one, 2), bounds_of(two, 2), strict=True):
        assert a > 0 and abs(a - b) < 0.15 * a


def test_a_cancelled_update_leaves_bounds(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinity in the input of each product of one update."""
    steps, begin, multiply = list[int](), Fp8.begin, Eight.multiply

    def spoil(product: Eight, x: torch.Tensor, *rest: Any) -> Any:
        x = x.clone()
        x.view(-1)[0] = torch.inf if len(steps) == 3 else x.view(-1)[0]
        return multiply(product, x, *rest)

    monkeypatch.setattr(Eight, "multiply", spoil)
    monkeypatch.setattr(Fp8, "begin", lambda each, step, *rest: steps.append(step) or begin(each, step, *rest))
    folder = run("run", techniques__fp8=ALL, train__non_finite="skip")
    assert all(0 < bound < 1e4 for bound in bounds_of(folder, 6)) and losses(folder)[6] < losses(folder)[1]


def test_what_was_clamped_is_told(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a margin below 1 the largest numbers are beyond their bounds, all the time."""
    monkeypatch.setattr(fp8, "LOOK", 2)
    lines = []
    for name, margin in (("wide", 4.0), ("narrow", 0.5)):
        monkeypatch.setitem(MARGIN, E4M3, margin)
        folder = run(name, techniques__fp8=ALL, optim__lr=1e-4)
        lines.append([event for event in read_events(folder) if "eval_loss" in event][-1])
        out = capsys.readouterr().out
        assert ("factors 24 had numbers beyond their bounds since the last look, which were clamped" in out) == (
            name == "narrow"
        )
    assert lines[0]["fp8_over_x"] < 1 < lines[1]["fp8_over_x"] and lines[0]["fp8_saturated_x"] == 0
    assert lines[1]["fp8_saturated_x"] > 0 and lines[1]["fp8_over_dout"] < 1 < lines[1]["fp8_over_weight"]


def test_the_rule() -> None:
    """As the seed has it: more than about 370 of MNK / (MN + MK + NK) pays."""
    assert RATES.find_least(2304, 768) < RATES.find_least(768, 768) < 32768 and RATES.find_least(512, 512) > 16384
    assert RATES.find_least(256, 256) == inf, "with any number of tokens"
    for tokens, out, inner in ((16384, 768, 768), (512, 4096, 4096), (400, 4096, 16384), (8192, 1024, 1024)):
        ratio = 1 / (1 / tokens + 1 / out + 1 / inner)
        assert (tokens > RATES.find_least(out, inner)) == (ratio > 374)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fp8]:
    """What would be chosen on a GPU."""

    def choose(capability: tuple[int, int] = (9, 0), **changes: Any) -> Fp8:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        return technique_of(configure(**changes), GPU)

    return choose


def test_which_layers_pay(on_gpu: Callable[..., Fp8]) -> None:
    large = {"data": {"seq_len": 1024, "batch_size": 32}, "model": {"preset": "gpt2-small"}}
    found = on_gpu(**large)
    assert len(found.products) == 10 * 4, "not the first block, and not the last"
    assert found.describe() == (
        "products of 8 bits (tensor) in 40 layers: 10 attention.qkv, 10 attention.out, 10 mlp.up, 10 mlp.down"
    )
    assert "decoder.blocks.0.mlp.up" not in found.products and "decoder.blocks.1.mlp.up" in found.products
    few = on_gpu(data={"seq_len": 512, "batch_size": 1}, model={"preset": "gpt2-small"})
    assert not few.products and few.describe() == (
        "8 bits: off: no product is large enough to gain by it, with 512 tokens"
    )
    small = on_gpu(data={"seq_len": 1024, "batch_size": 64}, model={"width": 256, "heads": 4, "layers": 12})
    assert not small.products and small.state_dict() == {"layers": [], "lost": []} and small.metrics(0) == {}
    old = on_gpu((8, 0), **large)
    assert not old.products and old.describe() == "8 bits: off: this GPU has no 8-bit products"
    pairs = on_gpu(
        data={"task": "translation", "languages": ["en", "de"], "max_tokens": 16384},
        model={"preset": "transformer-big"},
    )
    places = {name.split(".", 3)[3] for name in pairs.products}
    assert "mlp.up" in places and "cross.kv" not in places
    assert {name.split(".")[0] for name in pairs.products} == {"encoder", "decoder"}
    sites = {name.split(".")[2] for name in pairs.products}
    assert sites == {"1", "2", "3", "4"}


NAMES = {"attention.qkv": "qkv", "attention.out": "out", "mlp.up": "up", "mlp.down": "down"}
NAMES |= {"cross.q": "cross query", "cross.out": "cross out"}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"seq_len": 1024, "batch_size": 32}, "model": {"preset": "gpt2-small", "vocab": 512}},
        {"data": {"seq_len": 512, "batch_size": 8}, "model": {"preset": "gpt2-medium", "vocab": 512}},
        {
            "data": {"task": "translation", "languages": ["en", "de"], "max_tokens": 16384},
            "model": {"preset": "transformer-big", "vocab": 512},
        },
    ],
    ids=["small", "medium, few tokens", "pairs"],
)
def test_the_account_of_memory_knows_the_layers(changes: dict[str, Any], on_gpu: Callable[..., Fp8]) -> None:
    found = on_gpu(**changes)
    assert found.model is not None and found.products
    needs = plan.find_needs(for_device(configure(**changes), gpu=True))
    blocks = zip(list_blocks(needs.model), list_narrow(needs.model, needs.load, needs.way), strict=True)
    numbers = Counter[str]()
    expected = set()
    for (stack, _), names in blocks:
        expected |= {(stack, numbers[stack], name) for name in names}
        numbers[stack] += 1
    chosen = {(stack, int(i), NAMES[rest]) for stack, _, i, rest in (name.split(".", 3) for name in found.products)}
    assert chosen == expected
    layers: list[Any] = [found.model.get_submodule(name) for name in found.products]
    weights = sum(layer.weight.numel() for layer in layers)
    account = needs.predict(plan.find_choice(configure(**changes), needs))
    assert account.narrow == 2 * weights
    without = replace(needs, way=replace(needs.way, narrow="")).predict(plan.find_choice(configure(**changes), needs))
    assert without.narrow == 0 and sum(account.kept) < sum(without.kept)


def test_what_it_cannot_work_with() -> None:
    def reasons(device: torch.device = CPU, **changes: Any) -> str:
        tree = {"techniques": {"fp8": ALL, "fused": True}, "train": {"precision": "bf16"}} | changes
        config = build_config(tree)
        with pytest.raises(ConfigError) as caught:
            open_techniques(config, stretto.build.describe_context(config, Runtime(device), Mesh()))
        return str(caught.value)

    assert "set techniques.fused to true" in reasons(techniques={"fp8": ALL})
    assert "set train.precision to 'bf16', not 'fp32'" in reasons(train={"precision": "fp32"})
    assert "set train.compile to false" in reasons(train={"precision": "bf16", "compile": True})
    with pytest.raises(ConfigError, match=r"techniques\.fp8\.recipe = 'tile' must be one of"):
        build_config({"techniques": {"fp8": {"recipe": "tile"}}})


def test_odd_shapes_stay_in_bf16() -> None:
    changes = {"model": {"width": 40, "heads": 2, "mlp_width": 64}, "train": {"precision": "bf16"}}
    tree = {"techniques": {"fp8": ALL | {"head": True}, "fused": True}, "data": {"seq_len": 16}} | changes
    found = technique_of(build_config(tree))
    assert not found.products, "40 is no multiple of 16"
    found = technique_of(build_config(tree | {"model": {"width": 48, "heads": 2, "mlp_width": 72, "vocab": 50}}))
    assert {name.split(".", 3)[3] for name in found.products} == {"attention.qkv", "attention.out"}


def count_kept(config: Config, layers: int) -> int:
    """The bytes of what autograd keeps of a pass, parameters left out."""
    config = replace(config, model=replace(config.model, layers=layers, vocab=64))
    parts = stretto.build.build(config, Runtime(CPU), Mesh())
    own = {p.untyped_storage().data_ptr() for p in parts.model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own and t.dim() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    layout, ids = dense_layout(4, 16), torch.arange(64)
    batch = Batch(ids, Counts(64, 64, 64, 4 * 16 * 16), (), inputs=Sequences(ids, ids % 16, layout))
    parts.techniques.begin(1, 1.0, None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast("bf16", CPU):
        parts.model.train()(batch)
    return sum(kept.values())


def test_a_block_keeps_fewer_bytes(make_config: MakeConfig) -> None:
    """27 bytes a token and unit of width in place of 32: of the inputs of products one byte each, in place of two; but
    attention keeps its output, too."""
    for recipe, wanted in ((None, 32), ("tensor", 27)):
        options = {"techniques__fp8": False if recipe is None else ALL | {"recipe": recipe}, "model__dropout": 0.0}
        config = make_config(techniques__fused=True, train__precision="bf16", **options)
        block = count_kept(config, 3) - count_kept(config, 2)
        statistics = 2 * 8 + 4 * config.model.heads  # of norms and attention, a token
        assert 0 <= block - (wanted * config.model.width + statistics) * 64 <= 4 * 4, "and the scale of a layer's input"


def test_an_update_that_is_watched_has_no_key() -> None:
    """Whoever replays graphs launches it, and forgets nothing (tests/test_graphs.py)."""
    found = technique_of(build_config({"techniques": {"fp8": ALL, "fused": True}, "train": {"precision": "bf16"}}))
    found.watched = ["decoder.blocks.0.mlp.up"]
    assert found.graph_key(0) is None and LOOK > 1
    found.watched = []
    assert found.graph_key(0) == (0,)
