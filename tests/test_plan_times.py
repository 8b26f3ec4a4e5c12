"""The time of a step, as a plan computes it: what it grows with, and by how much."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.config import Config, TechniquesConfig, build_config
from stretto.estimate import Section, find_estimate
from stretto.hardware import Hardware, read_hardware
from stretto.parallel import pipeline_costs
from stretto.parallel.sequence_costs import NVLINK
from stretto.plan import complete_sizes, find_choice, find_needs
from stretto.planning.layout import Outcome, change, predict
from stretto.planning.search import SECTIONS
from stretto.planning.times import PASSES, Device, Times, find_step, find_work, uses_graphs
from stretto.techniques import load_all
from stretto.techniques.technique import Context
from tests.runs import explain_graphs

H200 = read_hardware("h200")


def make(preset: str = "gpt2-small", **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"device": "cuda"},
        "data": {"seq_len": 1024, "batch_size": 16, "join_documents": True},
        "model": {"preset": preset, "vocab": 50304},
    }
    return complete_sizes(build_config({k: tree.get(k, {}) | sections.get(k, {}) for k in tree | sections}))[0]


def find_times(config: Config, hardware: Hardware = H200) -> Times:
    needs = find_needs(config)
    return find_step(
        config, hardware, find_work(config, config.data.batch_size), needs, find_choice(config, needs), False
    )


def test_each_part_grows_with_what_it_is_made_of() -> None:
    one = find_times(make())
    twice = find_times(make(model={"preset": "gpt2-small", "vocab": 50304, "layers": 24}))
    assert twice.products == pytest.approx(2 * one.products) and twice.attention == pytest.approx(2 * one.attention)
    assert twice.head == one.head and one.update < twice.update < 2 * one.update
    longer = find_times(make(data={"seq_len": 2048, "batch_size": 8}, model={"max_len": 2048}))
    assert longer.products == pytest.approx(one.products) and 1.4 < longer.attention / one.attention < 2
    vocab = find_times(make(model={"vocab": 100608}))
    assert vocab.head > 1.8 * one.head and vocab.products == one.products
    half = find_times(make(data={"batch_size": 8}, train={"micro_batches": 2}))
    assert half.passes > one.passes and half.update == one.update, "smaller products are slower, the update is the same"
    assert half.products / one.products < 1.2


def test_products_are_between_no_time_and_the_peak() -> None:
    device = Device(H200, 2)
    for rows, out, inner in ((128, 768, 768), (32768, 4096, 1024), (65536, 16384, 16384)):
        seconds, flops = device.multiply(rows, out, inner), 6.0 * rows * out * inner
        assert 0.02 < flops / seconds / H200.flops < 0.77
    wide, narrow = (device.multiply(32768, 4096, 1024, eight) for eight in (False, True))
    assert 1.2 < wide / narrow < 2
    assert device.multiply(128, 256, 256, True) <= device.multiply(128, 256, 256), "bf16 where 8 bits gain nothing"
    old = Device(read_hardware("a100"), 2)
    assert old.multiply(32768, 4096, 1024, True) == old.multiply(32768, 4096, 1024), "it has no 8-bit products"


@pytest.mark.parametrize("preset", ["bert-base", "llama-1b", "transformer-base", "vit-base"])
def test_all_kinds_of_models_have_times(preset: str) -> None:
    task = {"bert-base": "masked", "transformer-base": "translation", "vit-base": "images"}.get(preset, "causal")
    data = {"task": task, "seq_len": 256, "batch_size": 32, "languages": ["en", "de"], "max_tokens": 8192}
    times = find_times(make(model={"preset": preset, "vocab": 0 if task == "images" else 32000}, data=data))
    assert all(getattr(times, part) > 0 for part in (*PASSES[:4], "update")) and times.again == times.host == 0


def test_the_host_is_waited_for_where_no_graph_replays_a_step() -> None:
    small: dict[str, Any] = {"data": {"batch_size": 1}}
    assert find_times(make(**small)).host == 0
    launched = find_times(make(train={"graphs": "off"}, **small))
    assert launched.host > launched.passes and launched.total > 20e-3
    assert find_times(make(train={"graphs": "off"}, data={"batch_size": 64})).host == 0


def test_what_is_not_kept_is_made_again() -> None:
    techniques: dict[str, Any] = {"lean": {"mlp": "input", "qkv": "input"}}
    again = find_times(make(techniques=techniques)).again
    assert 0 < again < find_times(make(techniques={"lean": {"blocks": 12}})).again
    assert find_times(make(), read_hardware("l4")).total > 5 * find_times(make()).total


def test_only_exact_techniques_are_tried_unless_others_are_allowed() -> None:
    """What a section offers a plan agrees with what its technique says of itself."""
    kinds, model = {cls.name: cls for cls in load_all()}, make().model
    assert set(SECTIONS) == {field.name for field in fields(TechniquesConfig)}
    for name, section in SECTIONS.items():
        exact, others = section.list_choices(False, model), section.list_choices(True, model)
        assert kinds[name].exact or not exact, name
        assert all(one in others for one in exact) and all(isinstance(one, Section) for one in others)
    assert SECTIONS["layer_drop"].list_choices(True, replace(model, norm_order="post")) == []


def test_several_gpus_wait_for_links() -> None:
    config, eight = make(data={"batch_size": 32}), replace(read_hardware("h100"), count=8)
    one, many = predict(config, read_hardware("h100")), predict(config, eight)
    assert many.times.waits > 0 == one.times.waits and one.times.total / 8 < many.times.total < one.times.total
    slow = predict(config, replace(eight, link=eight.link / 10))
    assert slow.times.waits == pytest.approx(10 * many.times.waits, rel=0.1) and slow.times.passes == many.times.passes
    machines = predict(make(data={"batch_size": 64}), replace(eight, count=16))
    assert machines.times.waits > 3 * many.times.waits, "a network joins machines"


def test_layouts_share_memory_and_time() -> None:
    config, four = make("gpt2-medium", data={"batch_size": 32}), replace(read_hardware("h100"), count=4)

    def try_layout(**parallel: Any) -> Outcome:
        return predict(replace(config, parallel=replace(config.parallel, **parallel)), four)

    whole, sharded = try_layout(), try_layout(data="shard")
    axes = [try_layout(**{axis: 4}) for axis in config.parallel.axes()]
    assert sharded.memory < whole.memory - 2.5 * 2**30 and sharded.times.total > whole.times.total
    assert all(not found.problem and found.times.total > whole.times.total / 2 for found in axes)
    assert all(found.memory < predict(config, replace(four, count=1)).memory for found in axes)
    assert "only one axis" in try_layout(**dict.fromkeys(config.parallel.axes(), 2)).problem
    assert "cannot be dealt out" in predict(make(data={"batch_size": 1}), four).problem


def test_a_technique_that_needs_kernels_is_not_planned_without_them() -> None:
    without = make(techniques={"fused": False, "lean": True})
    assert predict(without, H200).problem == "techniques.lean needs techniques.fused, which is off"
    compiled = make(techniques={"lean": True}, train={"compile": True})
    assert "train.compile = false" in predict(compiled, H200).problem and not predict(make(), H200).problem
    recorded = make(train={"graphs": "on"}, parallel={"data": "shard"})
    assert not predict(recorded, H200).problem
    assert "train.graphs" in predict(recorded, replace(H200, count=2)).problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"precision": "fp16"}},
        {"train": {"precision": "fp32"}},
        {"train": {"graphs": "off"}},
        {"techniques": {"fused": False}},
        {"techniques": {"layer_drop": {"schedule": "constant"}}},
        {"techniques": {"layer_drop": {"schedule": "constant", "sampling": "bernoulli"}}},
        {"techniques": {"layer_drop": {"schedule": "constant"}}, "train": {"micro_batches": 2}},
        {"techniques": {"layer_drop": {"gate": "sample"}}, "train": {"micro_batches": 2}},
    ],
    ids=str,
)
def test_graphs_are_counted_with_where_a_run_may_record_them(changes: dict[str, Any]) -> None:
    config = make(**changes)
    refused = any("CUDA graphs: off" in note for note in explain_graphs(config)) or config.train.graphs == "off"
    assert uses_graphs(config, H200, shared=False) == (not refused)


@pytest.mark.parametrize(
    "techniques",
    [
        {"fused": True},
        {"lean": True},
        {"fp8": True},
        {"layer_drop": True},
        {"layer_drop": {"gate": "sample"}},
        {"standardize": True},
        {"standardize": {"axis": "channel"}},
    ],
    ids=str,
)
def test_a_plan_knows_where_a_technique_cannot_be(techniques: dict[str, Any]) -> None:
    """It says what the technique itself would say of a pipeline, and of sequences that processes share."""
    config, estimate = make(techniques=techniques), find_estimate(make(techniques=techniques))
    (name,) = techniques
    kind = next(cls for cls in load_all() if cls.name == name)
    technique: Any = kind(getattr(config.techniques, name), Context(config.model, torch.device("cpu"), "bf16"))
    assert estimate.by_module == (not technique.why_not_by_module())
    shared: Any = SimpleNamespace(splits_sequences=True, asks_products=True, keeps_as_told=True)
    assert estimate.by_token == (not technique.check([shared]))
    assert predict(config, replace(H200, count=2)).problem == ""
    for axis, knows in (("pipeline", estimate.by_module), ("sequence", estimate.by_token)):
        found = predict(replace(config, parallel=change(config.parallel, **{axis: 2})), replace(H200, count=2))
        assert bool(found.problem) == (not knows), found.problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"precision": "fp16"}}, "fp16 adjusts its loss scale"),
        ({"techniques": {"fused": False}, "train": {"compile": True}}, "set train.compile to false"),
        ({"techniques": {"fused": False}, "model": {"dropout": 0.1}}, "torch draws what is dropped"),
        ({"parallel": {"cuts": [3, 2]}}, "growing numbers"),
        (
            {"model": {"preset": "bert-base", "classes": 4}, "data": {"task": "classification", "seq_len": 128}},
            "a classifier's head",
        ),
        ({"model": {"attention_dropout": 0.1, "window": 64}}, "cannot be drawn again"),
    ],
)
def test_a_pipeline_that_a_run_would_refuse_is_not_planned(changes: dict[str, Any], words: str) -> None:
    config = make(**changes)
    cut = replace(config, parallel=replace(config.parallel, pipeline=2))
    assert words in predict(cut, replace(H200, count=2)).problem


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pipeline_of_many_micro_batches_is_not_walked_through(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the same time and memory as if each of them were."""
    config = make(data={"batch_size": 2}, train={"micro_batches": 60}, parallel={"pipeline": ranks})
    found = pipeline_costs.plan_share(config, ranks, NVLINK, 1.0, 0.01)
    monkeypatch.setattr(pipeline_costs, "STEADY", 60)
    walked = pipeline_costs.plan_share(config, ranks, NVLINK, 1.0, 0.01)
    assert found.seconds == pytest.approx(walked.seconds, rel=1e-6) and found.memory == walked.memory
