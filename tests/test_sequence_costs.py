"""Formulas against numbers worked out by hand, and the choice of a method against what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.config import ModelConfig
from stretto.parallel import sequence_costs as costs
from stretto.parallel.sequence_costs import Link, Message, Pass, Traffic
from tests.runs import find_imported
from tests.scaling import EQUAL, FAST, GQA, MEASURED, MHA, SLOW, count_messages, read_measured


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
    ],
)
def test_traffic_of_four_ranks(method: str, keep: bool, mha: float, gqa: float, count: int) -> None:
    assert elements(method, MHA, 4, keep) == pytest.approx(mha)
    assert elements(method, GQA, 4, keep) == pytest.approx(gqa)
    assert count_messages(costs.layer_traffic(MHA, method, 4, 4096, keep=keep)) == count
    assert count_messages(costs.layer_traffic(MHA, method, 1, 4096, keep=keep)) == 0


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="'magic' has to be one of gather, ulysses, ring"):
        costs.layer_traffic(MHA, "magic", 2, 64)


def test_sums_of_gradients_travel_in_fp32() -> None:
    assert costs.layer_traffic(MHA, "gather", 2, 1024).size == 2 * 0.5 * 1024 * 1024 * (2 + 4)
    assert costs.layer_traffic(MHA, "ring", 2, 1024).size == 2 * 512 * 1024 * (2 + 2 + 4)


@pytest.mark.parametrize("ranks", [2, 4, 8, 9, 10, 16])
def test_gathering_sends_less_than_ulysses_up_to_one_rank_more_than_the_group(ranks: int) -> None:
    assert (elements("gather", GQA, ranks) <= elements("ulysses", GQA, ranks) * (1 + 1e-9)) == (ranks <= 8 + 1)


@pytest.mark.parametrize(("bandwidth", "tokens"), [(400e9, 187.5), (50e9, 1500)])
def test_when_attention_is_as_long_as_the_gather(bandwidth: float, tokens: float) -> None:
    """At 600 TFLOP/s, 16 bits, 8 query heads to a key head, no mask."""
    ranks = 10**6  # c is 1
    gather = costs.layer_traffic(GQA, "gather", ranks, int(tokens * ranks)).forward
    attention = 4 * tokens * tokens * ranks * GQA.width / 600e12
    assert Link("", bandwidth, 0.0).seconds(gather) == pytest.approx(attention, rel=1e-3)


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


def test_the_choice_says_why() -> None:
    few = costs.choose_method(GQA, 8, 2**16, FAST)
    assert few.method == "gather" and "ulysses cannot: 2 KV heads do not divide by 8 ranks" in few.reason
    heads = costs.choose_method(MHA, 16, 2**13, SLOW)
    assert heads.method == "ulysses" and "gather would take" in heads.reason and "slow" in heads.reason
    many = costs.choose_method(MHA, 64, 2**18, SLOW)
    assert many.method == "ring" and "16 KV heads do not divide by 64" in many.reason
    assert "\n" not in many.reason


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


def test_a_split_that_nobody_can_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="100 tokens do not divide by 8 ranks"):
        costs.choose_method(MHA, 8, 100, FAST)


def test_faster_arithmetic_never_makes_gathering_look_better() -> None:
    """The more there is to wait for, the more there is to gain by another method."""
    chosen = [costs.choose_method(MHA, 8, 2**15, SLOW, flops).method for flops in (1e11, 1e15)]
    assert chosen[0] == "gather" and chosen[1] != "gather"


def test_nothing_heavy_is_imported() -> None:
    assert find_imported("import stretto.parallel.sequence_costs", "torch", "numpy") == []


def test_obstacles() -> None:
    assert costs.find_obstacle(MHA, "gather", 3, 9) == ""
    assert "8 tokens" in costs.find_obstacle(MHA, "ring", 3, 8)
    assert "2 KV heads" in costs.find_obstacle(GQA, "ulysses", 4, 64)
    assert "no window" in costs.find_obstacle(replace(MHA, window=8), "ring", 4, 64)
    assert "no attention probabilities" in costs.find_obstacle(replace(MHA, attention_dropout=0.1), "ulysses", 4, 64)
