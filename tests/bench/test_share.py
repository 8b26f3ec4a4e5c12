"""One rank's share on one device: what it keeps, what it sees, and the simulator's script."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.bench import share
from stretto.config import ModelConfig, build_config
from stretto.costs import Pass, gathered_bytes, kept_bytes

ROOT, CPU, TOKENS = Path(__file__).parents[2], torch.device("cpu"), 64
PRESETS = ("gpt2-tiny", "llama-tiny")


def tiny(preset: str) -> ModelConfig:
    return build_config({"model": {"preset": preset, "vocab": 512, "positions": "rotary"}}).model


def saved_bytes(block: share.RankBlock, cfg: ModelConfig, positions: Tensor, rows: int) -> int:
    """All that autograd keeps of one pass, other than weights and angles; views of one tensor count once."""
    angles = share.angles_of(cfg, positions)
    assert angles is not None
    known = {t.untyped_storage().data_ptr() for t in (*block.parameters(), angles.cos, angles.sin)}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    x, branch = (torch.randn(rows, cfg.width, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = share.run_block(block, x, branch, angles)
    out.sum().backward()  # type: ignore[no-untyped-call]
    return sum(found.values())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("method", "ranks", "keep"),
    [
        ("gather", 1, False), ("gather", 4, False), ("gather", 4, True), ("ring", 4, False), ("ulysses", 2, False),
        ("megatron", 2, True), ("megatron", 4, True),
    ],
)  # fmt: skip
def test_a_layer_keeps_what_the_formula_says(method: str, ranks: int, keep: bool, recompute: bool, preset: str) -> None:
    cfg, peers = tiny(preset), share.Peers(ranks, ranks - 1)
    block = share.build_block(cfg, method, peers, CPU, torch.float32, keep=keep, recompute=recompute)
    positions = torch.arange(TOKENS) if method == "megatron" else share.own_positions("contiguous", 0, ranks, TOKENS)
    expected = kept_bytes(cfg, method, ranks, TOKENS, 4, recompute)
    expected += gathered_bytes(cfg, method, ranks, TOKENS, 4) if keep else 0
    if method == "megatron" and block.attention.kv_heads * ranks > (cfg.kv_heads or cfg.heads):
        extra = block.attention.kv_heads * ranks - (cfg.kv_heads or cfg.heads)  # KV heads that are on several ranks
        expected += 2 * extra * block.attention.head_size * TOKENS // ranks * 4
    assert saved_bytes(block, cfg, positions, TOKENS // ranks) == expected


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_spans_cover_every_pair_once(ranks: int, placement: str) -> None:
    own = 4
    tokens, work = ranks * own, []
    for rank in range(ranks):
        positions = share.own_positions(placement, rank, ranks, tokens)
        seen = torch.zeros(own, tokens, dtype=torch.int64)
        seen[:, positions] += torch.ones(own, own, dtype=torch.int64).tril()
        for span in share.find_spans(placement, rank, ranks, own):
            seen[span.queries, span.keys] += 1
        around = torch.zeros_like(seen)
        around[:, positions] += torch.ones(own, own, dtype=torch.int64).tril()
        for source in set(range(ranks)) - {rank}:
            keys = share.own_positions(placement, source, ranks, tokens)
            found = share.find_ring_span(placement, rank, source, own)
            if found is not None:
                around[found.queries, keys[found.keys]] += 1
        causal = (positions[:, None] >= torch.arange(tokens)).long()
        assert seen.equal(causal) and around.equal(causal)
        work.append(int(causal.sum()))
    assert placement == "contiguous" or len(set(work)) == 1  # balanced
    assert placement == "zigzag" or work == sorted(work)


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_the_order_of_ranks_and_of_the_sequence(placement: str) -> None:
    positions = torch.stack([share.own_positions(placement, rank, 4, 32) for rank in range(4)])
    x = torch.stack([positions, -positions], 1)  # [P, 2, T]
    in_order = share.to_sequence(x, placement)
    assert in_order[0].equal(torch.arange(32)) and in_order[1].equal(-torch.arange(32))
    assert share.to_ranks(in_order, placement, 4).equal(x)


def test_a_wrong_delta_would_be_noticed() -> None:
    """The backward pass of a block needs the result of all keys: with the block's own it is another."""
    q, dout = torch.randn(2, 8, 4, 16)
    kv, kernel = torch.randn(2, 2, 8, 2, 16), share.KERNELS["plain"]
    merged = share.Merged(kernel, q, kv[0])
    alone = merged.out.clone()
    merged.add(share.ALL, kv[1])
    right, wrong = (kernel.backward(dout, q, *kv[0], out, merged.lse, True)[1] for out in (merged.out, alone))
    assert (right - wrong).norm() > 0.1 * right.norm()


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_scale", ROOT / "bench" / "scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_scale"] = module
    spec.loader.exec_module(module)
    return module


def test_shapes_are_timed_once_and_large_ones_in_part(scale: ModuleType) -> None:
    meter = scale.Meter(CPU, scale.make_grid(CPU), "flash")
    small = meter.attention(16, 32, 4, 2, 16, "other")
    assert not small.scaled and meter.attention(16, 32, 4, 2, 16, "other") is small
    assert meter.attention(256, 1024, 4, 2, 16, "other").scaled and small.seconds.forward > 0


def test_the_slowest_rank_of_each_way(scale: ModuleType) -> None:
    """By the number of pairs, at a second for each."""
    meter = scale.Meter(CPU, scale.make_grid(CPU), "flash")
    cfg = meter.grid.models["gpt2_tiny"]

    def count(queries: int, keys: int, heads: int, kv_heads: int, size: int, kind: str) -> Any:
        pairs = queries * keys * heads / cfg.heads / (1 if kind == "other" else 2)
        return scale.Timed(Pass(pairs, pairs), False)

    meter.attention = count
    work = {
        way: sum(timed.seconds.forward for timed in scale.time_blocks(meter, cfg, way, 4, 64)) / (64 * 64 / 2)
        for way in scale.WAYS
    }
    even = pytest.approx(1 / 4)
    assert work == {
        "gather": even,
        "gather, contiguous": pytest.approx((2 * 4 - 1) / 4**2),
        "ring": even,
        "ulysses": even,
        "megatron": even,
    }


@pytest.mark.slow
def test_the_script_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert "say nothing about a GPU" in done.stdout and "### weak: llama_tiny" in done.stdout
    saved = json.loads((tmp_path / "scale.json").read_text())
    rows = saved["rows"]
    assert {row["table"] for row in rows} == {"strong", "weak", "paper", "paper, weak"}
    assert all(row["tokens_per_s"] > 0 and not row["memory_measured"] for row in rows)
    pairs = zip(rows[::2], rows[1::2], strict=True)  # the fast link, then the slow one
    assert all(fast["step_s"] <= slow["step_s"] and fast["way"] == slow["way"] for fast, slow in pairs)
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "scale.md").read_text() in done.stdout
