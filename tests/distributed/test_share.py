"""What the simulator runs is exact among real ranks, and they send what the formulas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.rank_costs import layer_traffic
from stretto.config import build_config
from tests.distributed.processes import run_module

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    ranks, folder = request.param, tmp_path_factory.mktemp("share")
    run_module("tests.distributed.share", ranks, folder / "log", str(folder))
    return ranks, [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def test_every_way_is_exact(results: tuple[int, list[Any]]) -> None:
    ranks, found = results
    assert len(found[0]) == (14 if ranks == 2 else 13)  # two KV heads do not divide by four ranks
    wrong = {
        (rank, name): r["error"] for rank, some in enumerate(found) for name, r in some.items() if r["error"] > 1e-5
    }
    assert not wrong


def test_bytes_are_those_of_the_formulas(results: tuple[int, list[Any]]) -> None:
    ranks, found = results
    for some in found:
        for name, result in some.items():
            preset, method, _, keep = name.split()
            cfg = build_config({"model": {"preset": preset, "vocab": 512, "positions": "rotary"}}).model
            traffic = layer_traffic(cfg, method, ranks, 64, element=4, reduced=4, keep=keep == "True")
            expected: dict[str, list[float]] = {}
            for message in (*traffic.forward, *traffic.backward):
                count, size = expected.get(message.kind, [0, 0.0])
                expected[message.kind] = [count + message.count, size + message.count * message.size]
            assert result["sent"] == expected, name
