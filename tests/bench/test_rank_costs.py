"""The memory and the step of one rank: numbers worked out by hand, a real model, and what was measured."""

from __future__ import annotations

import pytest

from bench import rank_costs
from stretto.config import ModelConfig, build_config
from stretto.model import build_model
from stretto.parallel.sequence_costs import METHODS, Link, Pass, Traffic
from tests.scaling import EQUAL, FAST, GQA, MEASURED, MHA, count_messages, model, read_measured


def elements(method: str, cfg: ModelConfig, ranks: int, keep: bool = True) -> float:
    """Sent per layer, in units of s h."""
    return rank_costs.layer_traffic(cfg, method, ranks, 4096, keep=keep, **EQUAL).size / 2 / (4096 * cfg.width)


def test_a_million_tokens_of_keys_and_values_take_4_gib() -> None:
    assert rank_costs.gathered_bytes(MHA, "gather", 64, 2**20) == 4 * 2**30
    assert rank_costs.gathered_bytes(MHA, "gather", 1, 2**20) == rank_costs.gathered_bytes(MHA, "ring", 64, 2**20) == 0
    kept, again = (rank_costs.rank_memory(MHA, "gather", 64, 2**20, keep=keep) for keep in (True, False))
    assert kept.gathered == MHA.layers * 4 * 2**30 and again.gathered == 0
    assert kept.total - again.total == (MHA.layers - 1) * 4 * 2**30


@pytest.mark.parametrize("preset", ["gpt2-medium", "llama-1b"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(preset: str, tied: bool) -> None:
    cfg = build_config({"model": {"preset": preset, "vocab": 512, "tied": tied}}).model
    block, outside = rank_costs.count_parameters(cfg)
    assert cfg.layers * block + outside == sum(p.numel() for p in build_model(cfg).parameters())


def test_states_take_16_bytes_a_parameter_and_are_divided_where_sharded() -> None:
    block, outside = rank_costs.count_parameters(MHA)
    parameters = MHA.layers * block + outside
    for method, sharded, split in (("gather", False, 1), ("gather", True, 8), ("megatron", False, 8)):
        memory = rank_costs.rank_memory(MHA, method, 8, 4096, sharded)
        assert memory.weights + memory.gradients + memory.moments == 16 * parameters / split
    assert memory.total == sum(vars(memory).values())


def test_memory_before_flash_attention() -> None:
    """34 s h + 5 n s^2 bytes over the ranks; the seed's case with 16 heads of 64."""
    s = 50112
    megatron = rank_costs.classic_activation_bytes(MHA, "megatron", 144, s)
    assert megatron == pytest.approx((34 * s * 1024 + 80 * s**2) / 144)
    assert rank_costs.classic_activation_bytes(MHA, "gather", 144, s) - megatron == 4 * s * 1024


@pytest.mark.parametrize("method", [*METHODS, "megatron"])
def test_more_ranks_need_less_memory_and_longer_sequences_more(method: str) -> None:
    by_ranks = [rank_costs.rank_memory(MHA, method, ranks, 2**16).total for ranks in (1, 2, 4, 8, 16)]
    assert by_ranks == sorted(by_ranks, reverse=True) and len(set(by_ranks)) == 5
    by_length = [rank_costs.rank_memory(MHA, method, 8, length).total for length in (2**12, 2**14, 2**16)]
    assert by_length == sorted(by_length) and len(set(by_length)) == 3


def test_weights_travel_once_a_step() -> None:
    assert rank_costs.weight_traffic(1000, 4, sharded=False).size == 2 * 0.75 * 1000 * 4
    sharded = rank_costs.weight_traffic(1000, 4, sharded=True)
    assert sharded.size == 0.75 * 1000 * (2 + 2 + 4) and count_messages(sharded) == 3
    assert rank_costs.weight_traffic(1000, 1, sharded=True) == Traffic()


def test_a_step_adds_up() -> None:
    cfg = model(layers=3)
    block, outside = rank_costs.count_parameters(cfg)
    traffic = rank_costs.layer_traffic(cfg, "gather", 2, 1024)
    step = rank_costs.compose_step(cfg, "gather", 2, FAST, Pass(1, 2), [Pass(3, 4), Pass(5, 6)], 7.0, traffic)
    assert step.layers == 3 * 21 and step.outside == 7.0
    assert step.waits == pytest.approx(3 * FAST.seconds(traffic.backward))  # forward, 3 seconds hide it
    # The blocks' weights hide behind the work; those outside of blocks are gathered first, and reduced last.
    assert step.weights == pytest.approx(outside / 2 * (2 + 4) / 450e9 + 2 * 2e-6)
    assert step.total == step.layers + step.outside + step.waits + step.weights
    idle = rank_costs.compose_step(cfg, "gather", 2, FAST, Pass(0, 0), [Pass(0, 0)] * 2, 0.0, traffic)
    everything = [*traffic.forward, *traffic.backward]
    weights = rank_costs.weight_traffic(block, 2, True)
    sent = FAST.seconds([*everything, *weights.forward, *weights.backward])
    assert idle.total == pytest.approx(3 * sent + step.weights)  # without work nothing hides
    assert rank_costs.compose_step(cfg, "megatron", 2, FAST, Pass(1, 2), [Pass(3, 4)], 0.0, traffic).weights == 0


@pytest.mark.parametrize("method", [*METHODS, "megatron"])
def test_slower_links_never_make_a_step_faster(method: str) -> None:
    traffic = rank_costs.layer_traffic(MHA, method, 8, 8192)
    blocks = [Pass(1e-4, 2e-4)] * (8 if method == "ring" else 2)
    totals = [
        rank_costs.compose_step(MHA, method, 8, Link("", bandwidth, 1e-6), Pass(1e-3, 2e-3), blocks, 0.0, traffic).total
        for bandwidth in (1e9, 1e10, 1e11, 1e12)
    ]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]


def test_memory_is_what_was_measured() -> None:
    ratios = []
    for row in read_measured():
        if row["memory_measured"] == "True":
            cfg, ranks, tokens = MEASURED[row["model"]], int(row["ranks"]), int(row["tokens"])
            formula = rank_costs.rank_memory(cfg, "gather", ranks, tokens, recompute=True).total
            ratios.append(float(row["memory_gib"]) * 2**30 / formula)
    assert len(ratios) > 100 and min(ratios) > 0.98 and max(ratios) < 1.05


@pytest.mark.parametrize(("cfg", "ratio"), [(MHA, 2), (GQA, 16)])
def test_gathering_sends_two_groups_less_than_megatron(cfg: ModelConfig, ratio: int) -> None:
    assert elements("megatron", cfg, 8) / elements("gather", cfg, 8) == pytest.approx(ratio)


def test_messages_and_obstacles_of_megatron() -> None:
    for cfg in (MHA, GQA):
        assert elements("megatron", cfg, 4) == pytest.approx(8 * 0.75)
        assert elements("megatron", cfg, 4, keep=False) == pytest.approx(10 * 0.75)
    counts = [
        count_messages(rank_costs.layer_traffic(MHA, "megatron", ranks, 4096, keep=keep))
        for ranks, keep in ((4, True), (4, False), (1, True))
    ]
    assert counts == [8, 10, 0]
    assert rank_costs.find_obstacle(GQA, "megatron", 16, 64) == ""  # a KV head may be on several ranks
    assert "16 heads" in rank_costs.find_obstacle(GQA, "megatron", 32, 64)
    assert "9 tokens" in rank_costs.find_obstacle(GQA, "megatron", 2, 9)
    assert "2 KV heads" in rank_costs.find_obstacle(GQA, "ulysses", 4, 64)
