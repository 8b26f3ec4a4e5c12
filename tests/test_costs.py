"""Formulas against numbers worked out by hand, and against a real model."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto import costs
from stretto.config import ModelConfig, build_config
from stretto.costs import Link, Message, Pass, Traffic
from stretto.model import build_model

FAST, SLOW = Link("fast", 450e9, 2e-6), Link("slow", 50e9, 5e-6)
EQUAL: dict[str, Any] = {"element": 2, "reduced": 2}


def model(**changes: Any) -> ModelConfig:
    return build_config({"model": {"preset": "llama-1b", **changes}}).model


MHA, GQA = model(width=1024, heads=16, kv_heads=16), model(width=1024, heads=16, kv_heads=2)


def elements(method: str, cfg: ModelConfig, ranks: int, keep: bool = True) -> float:
    """Sent per layer, in units of s h."""
    return costs.layer_traffic(cfg, method, ranks, 4096, keep=keep, **EQUAL).size / 2 / (4096 * cfg.width)


@pytest.mark.parametrize(
    ("method", "keep", "mha", "gqa", "count"),
    [
        ("gather", True, 4 * 0.75, 4 * 0.75 / 8, 2),
        ("gather", False, 6 * 0.75, 6 * 0.75 / 8, 3),
        ("ulysses", True, 8 * 0.75 / 4, 4.5 * 0.75 / 4, 6),
        ("ring", True, 6 * 0.75, 6 * 0.75 / 8, 9),
        ("megatron", True, 8 * 0.75, 8 * 0.75, 8),
        ("megatron", False, 10 * 0.75, 10 * 0.75, 10),
    ],
)
def test_traffic_of_four_ranks(method: str, keep: bool, mha: float, gqa: float, count: int) -> None:
    assert elements(method, MHA, 4, keep) == pytest.approx(mha)
    assert elements(method, GQA, 4, keep) == pytest.approx(gqa)
    assert costs.layer_traffic(MHA, method, 4, 4096, keep=keep).count == count
    assert costs.layer_traffic(MHA, method, 1, 4096, keep=keep).count == 0


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="'magic' has to be one of gather, ulysses, ring, megatron"):
        costs.layer_traffic(MHA, "magic", 2, 64)


def test_sums_of_gradients_travel_in_fp32() -> None:
    assert costs.layer_traffic(MHA, "gather", 2, 1024).size == 2 * 0.5 * 1024 * 1024 * (2 + 4)
    assert costs.layer_traffic(MHA, "ring", 2, 1024).size == 2 * 512 * 1024 * (2 + 2 + 4)


@pytest.mark.parametrize("ranks", [2, 4, 8, 9, 10, 16])
def test_gathering_sends_less_than_ulysses_up_to_one_rank_more_than_the_group(ranks: int) -> None:
    assert (elements("gather", GQA, ranks) <= elements("ulysses", GQA, ranks) * (1 + 1e-9)) == (ranks <= 8 + 1)


@pytest.mark.parametrize(("cfg", "ratio"), [(MHA, 2), (GQA, 16)])
def test_gathering_sends_two_groups_less_than_megatron(cfg: ModelConfig, ratio: int) -> None:
    assert elements("megatron", cfg, 8) / elements("gather", cfg, 8) == pytest.approx(ratio)


def test_a_million_tokens_of_keys_and_values_take_4_gib() -> None:
    assert costs.gathered_bytes(MHA, "gather", 64, 2**20) == 4 * 2**30
    assert costs.gathered_bytes(MHA, "gather", 1, 2**20) == costs.gathered_bytes(MHA, "ring", 64, 2**20) == 0
    kept, again = (costs.rank_memory(MHA, "gather", 64, 2**20, keep=keep) for keep in (True, False))
    assert kept.gathered == MHA.layers * 4 * 2**30 and again.gathered == 0
    assert kept.total - again.total == (MHA.layers - 1) * 4 * 2**30


@pytest.mark.parametrize(("bandwidth", "tokens"), [(400e9, 187.5), (50e9, 1500)])
def test_when_attention_is_as_long_as_the_gather(bandwidth: float, tokens: float) -> None:
    """At 600 TFLOP/s, 16 bits, 8 query heads to a key head, no mask."""
    ranks = 10**6  # c is 1
    gather = costs.layer_traffic(GQA, "gather", ranks, int(tokens * ranks)).forward
    attention = 4 * tokens * tokens * ranks * GQA.width / 600e12
    assert Link("", bandwidth, 0.0).seconds(gather) == pytest.approx(attention, rel=1e-3)


@pytest.mark.parametrize("preset", ["gpt2-medium", "llama-1b"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(preset: str, tied: bool) -> None:
    cfg = build_config({"model": {"preset": preset, "vocab": 512, "tied": tied}}).model
    block, outside = costs.count_parameters(cfg)
    assert cfg.layers * block + outside == sum(p.numel() for p in build_model(cfg).parameters())


def test_states_take_16_bytes_a_parameter_and_are_divided_where_sharded() -> None:
    block, outside = costs.count_parameters(MHA)
    parameters = MHA.layers * block + outside
    for method, sharded, split in (("gather", False, 1), ("gather", True, 8), ("megatron", False, 8)):
        memory = costs.rank_memory(MHA, method, 8, 4096, sharded)
        assert memory.weights + memory.gradients + memory.moments == 16 * parameters / split
    assert memory.total == sum(vars(memory).values())


def test_memory_before_flash_attention() -> None:
    """34 s h + 5 n s^2 bytes over the ranks; the seed's case with 16 heads of 64."""
    s = 50112
    megatron = costs.classic_activation_bytes(MHA, "megatron", 144, s)
    assert megatron == pytest.approx((34 * s * 1024 + 80 * s**2) / 144)
    assert costs.classic_activation_bytes(MHA, "gather", 144, s) - megatron == 4 * s * 1024


@pytest.mark.parametrize("method", [*costs.METHODS, "megatron"])
def test_more_ranks_need_less_memory_and_longer_sequences_more(method: str) -> None:
    by_ranks = [costs.rank_memory(MHA, method, ranks, 2**16).total for ranks in (1, 2, 4, 8, 16)]
    assert by_ranks == sorted(by_ranks, reverse=True) and len(set(by_ranks)) == 5
    by_length = [costs.rank_memory(MHA, method, 8, length).total for length in (2**12, 2**14, 2**16)]
    assert by_length == sorted(by_length) and len(set(by_length)) == 3


def test_weights_travel_once_a_step() -> None:
    assert costs.weight_traffic(1000, 4, sharded=False).size == 2 * 0.75 * 1000 * 4
    sharded = costs.weight_traffic(1000, 4, sharded=True)
    assert sharded.size == 0.75 * 1000 * (2 + 2 + 4) and sharded.count == 3
    assert costs.weight_traffic(1000, 1, sharded=True) == Traffic()


def test_links() -> None:
    link = Link("", 100.0, 0.5)
    assert link.seconds([Message("send", 200.0, 3), Message("send", 100.0, 1, count=2)]) == 2 + 1.5 + 2 * (1 + 0.5)
    assert link.seconds([]) == 0


LINK = Link("", 1.0, 0.0)  # a byte a second


def test_a_gather_hides_behind_the_local_block() -> None:
    gather, scatter = Message("all-gather", 5.0, 1), Message("reduce-scatter", 3.0, 1)
    traffic, again = Traffic((gather,), (scatter,)), Traffic((gather,), (gather, scatter))
    for own, wait in ((2.0, 3.0), (5.0, 0.0), (9.0, 0.0)):
        assert costs.exposed_seconds("gather", [Pass(own, 0), Pass(9, 9)], traffic, LINK) == Pass(wait, 3.0)
        assert costs.exposed_seconds("gather", [Pass(0, own), Pass(9, 9)], again, LINK) == Pass(5.0, wait + 3.0)
    assert costs.exposed_seconds("ulysses", [Pass(9, 9)], traffic, LINK) == Pass(5.0, 3.0)


def test_a_ring_hides_each_hop_behind_a_block() -> None:
    hop = Message("send", 4.0, 1, count=2)
    traffic = Traffic((hop,), (hop, Message("send", 6.0, 1, count=2)))
    blocks = [Pass(1, 3), Pass(3, 8), Pass(100, 100)]
    # Forward 4 - 1 and 4 - 3; backward 4 - 3, then 4 + 6 - 8, and 6 for the way home.
    assert costs.exposed_seconds("ring", blocks, traffic, LINK) == Pass(4.0, 9.0)
    assert costs.exposed_seconds("ring", [Pass(50, 50)] * 3, traffic, LINK) == Pass(0.0, 6.0)


def test_a_step_adds_up() -> None:
    cfg = model(layers=3)
    block, outside = costs.count_parameters(cfg)
    traffic = costs.layer_traffic(cfg, "gather", 2, 1024)
    step = costs.compose_step(cfg, "gather", 2, FAST, Pass(1, 2), [Pass(3, 4), Pass(5, 6)], 7.0, traffic)
    assert step.layers == 3 * 21 and step.outside == 7.0
    assert step.waits == pytest.approx(3 * FAST.seconds(traffic.backward))  # forward, 3 seconds hide it
    # The blocks' weights hide behind the work; those outside of blocks are gathered first, and reduced last.
    assert step.weights == pytest.approx(outside / 2 * (2 + 4) / 450e9 + 2 * 2e-6)
    assert step.total == step.layers + step.outside + step.waits + step.weights
    idle = costs.compose_step(cfg, "gather", 2, FAST, Pass(0, 0), [Pass(0, 0)] * 2, 0.0, traffic)
    everything = [*traffic.forward, *traffic.backward]
    weights = costs.weight_traffic(block, 2, True)
    sent = FAST.seconds([*everything, *weights.forward, *weights.backward])
    assert idle.total == pytest.approx(3 * sent + step.weights)  # without work nothing hides
    assert costs.compose_step(cfg, "megatron", 2, FAST, Pass(1, 2), [Pass(3, 4)], 0.0, traffic).weights == 0


@pytest.mark.parametrize("method", [*costs.METHODS, "megatron"])
def test_slower_links_never_make_a_step_faster(method: str) -> None:
    traffic = costs.layer_traffic(MHA, method, 8, 8192)
    blocks = [Pass(1e-4, 2e-4)] * (8 if method == "ring" else 2)
    totals = [
        costs.compose_step(MHA, method, 8, Link("", bandwidth, 1e-6), Pass(1e-3, 2e-3), blocks, 0.0, traffic).total
        for bandwidth in (1e9, 1e10, 1e11, 1e12)
    ]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]


def test_the_choice_says_why() -> None:
    few = costs.choose_method(GQA, 8, 2**16, FAST)
    assert few.method == "gather" and "ulysses cannot: 2 KV heads do not divide by 8 ranks" in few.reason
    heads = costs.choose_method(MHA, 16, 2**13, SLOW)
    assert heads.method == "ulysses" and "gather would take" in heads.reason and "slow" in heads.reason
    many = costs.choose_method(MHA, 64, 2**18, SLOW)
    assert many.method == "ring" and "16 KV heads do not divide by 64" in many.reason
    assert "\n" not in many.reason


MEASURED = {
    "gpt2_medium": build_config({"model": {"preset": "gpt2-medium", "vocab": 50304, "positions": "rotary"}}).model,
    "llama1b": build_config({"model": {"preset": "llama-1b"}}).model,
}


def read_measured() -> list[dict[str, str]]:
    """What bench/scale.py found on an H200."""
    with (Path(__file__).parents[1] / "docs" / "data" / "scale-h200.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def lost_by_choosing() -> list[float]:
    """How many times as long as the fastest method the chosen one takes, wherever all that are possible were run."""
    cases: dict[tuple[str, int, int, str], dict[str, float]] = {}
    for row in read_measured():
        if row["way"] in costs.METHODS and row["ranks"] != "1" and row["table"] != "paper":
            case = (row["model"], int(row["tokens"]), int(row["ranks"]), row["link"])
            cases.setdefault(case, {})[row["way"]] = float(row["step_s"])
    links, lost = {link.name: link for link in (costs.NVLINK, costs.NETWORK)}, []
    for (name, tokens, ranks, link), seconds in cases.items():
        cfg = MEASURED[name]
        if all(method in seconds or costs.find_obstacle(cfg, method, ranks, tokens) for method in costs.METHODS):
            chosen = costs.choose_method(cfg, ranks, tokens, links[link]).method
            lost.append(seconds[chosen] / min(seconds.values()))
    return lost


def test_the_choice_is_near_the_best_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = lost_by_choosing()
    assert len(lost) > 90 and max(lost) < 1.2 and sum(one < 1.1 for one in lost) > 0.95 * len(lost)
    monkeypatch.setattr(costs, "BLOCK_S", 0.0)
    monkeypatch.setattr(costs, "VALUE_S", 0.0)
    assert max(lost_by_choosing()) > 2  # arithmetic and messages are not all


def test_memory_is_what_was_measured() -> None:
    ratios = []
    for row in read_measured():
        if row["memory_measured"] == "True":
            cfg, ranks, tokens = MEASURED[row["model"]], int(row["ranks"]), int(row["tokens"])
            formula = costs.rank_memory(cfg, "gather", ranks, tokens, recompute=True).total
            ratios.append(float(row["memory_gib"]) * 2**30 / formula)
    assert len(ratios) > 100 and min(ratios) > 0.98 and max(ratios) < 1.05


def test_a_split_that_nobody_can_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="100 tokens do not divide by 8 ranks"):
        costs.choose_method(MHA, 8, 100, FAST)


def test_faster_arithmetic_never_makes_gathering_look_better() -> None:
    """The more there is to wait for, the more there is to gain by another method."""
    chosen = [costs.choose_method(MHA, 8, 2**15, SLOW, flops).method for flops in (1e11, 1e15)]
    assert chosen[0] == "gather" and chosen[1] != "gather"


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, stretto.costs; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_obstacles() -> None:
    assert costs.find_obstacle(MHA, "gather", 3, 9) == ""
    assert "8 tokens" in costs.find_obstacle(MHA, "ring", 3, 8)
    assert "2 KV heads" in costs.find_obstacle(GQA, "ulysses", 4, 64)
    assert costs.find_obstacle(GQA, "megatron", 16, 64) == ""  # a KV head may be on several ranks
    assert "16 heads" in costs.find_obstacle(GQA, "megatron", 32, 64)
    assert "no window" in costs.find_obstacle(replace(MHA, window=8), "ring", 4, 64)
    assert "no attention probabilities" in costs.find_obstacle(replace(MHA, attention_dropout=0.1), "ulysses", 4, 64)
