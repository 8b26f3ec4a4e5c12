"""One rank's share on one device: what it keeps, what is timed of it, and the simulator's script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import scale, share
from bench.rank_costs import gathered_bytes, kept_bytes
from stretto.batch import Sequences
from stretto.config import ModelConfig, build_config
from stretto.parallel.reach import Reach
from stretto.parallel.sequence import Segment
from stretto.parallel.sequence_costs import Pass
from stretto.parallel.ulysses import Ulysses
from stretto.techniques.fused import FusedBlock
from tests.runs import PATIENCE_S

ROOT, CPU, TOKENS = Path(__file__).parents[2], torch.device("cpu"), 64
PRESETS = ("gpt2-tiny", "llama-tiny")


def tiny(preset: str) -> ModelConfig:
    return build_config({"model": {"preset": preset, "vocab": 512, "positions": "rotary"}}).model


def saved_bytes(block: FusedBlock, cfg: ModelConfig, part: Sequences, rows: int) -> int:
    """All that autograd keeps of one pass, other than weights and what all layers share: angles, and where tokens are.
    Views of one tensor count once."""
    angles, segment = share.angles_of(cfg, part.positions), part.layout.segment
    assert angles is not None
    shared = [*block.parameters(), angles.cos, angles.sin]
    if isinstance(segment, Segment) and isinstance(segment.own, Ulysses):
        shared += [segment.own.q_rows, segment.own.k_rows]
    known = {t.untyped_storage().data_ptr() for t in shared}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    x, branch = (torch.randn(rows, cfg.width, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = share.run_block(block, x, branch, part.layout, angles)
    out.sum().backward()
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
    cfg, way = tiny(preset), share.Way(method, keep=keep)
    with share.stand_in(ranks, ranks - 1) as group:
        others = group if ranks > 1 else None
        block = share.build_block(cfg, way, others, CPU, torch.float32, recompute)
        part = share.take_part(cfg, way, TOKENS, others, CPU)
        expected = kept_bytes(cfg, method, ranks, TOKENS, 4, recompute)
        expected += gathered_bytes(cfg, method, ranks, TOKENS, 4) if keep else 0
        if method == "megatron" and block.attention.kv_heads * ranks > (cfg.kv_heads or cfg.heads):
            extra = block.attention.kv_heads * ranks - (cfg.kv_heads or cfg.heads)  # KV heads that are on several ranks
            expected += 2 * extra * block.attention.head_size * TOKENS // ranks * 4
        assert saved_bytes(block, cfg, part, TOKENS // ranks) == expected


def test_shapes_are_timed_once_and_large_ones_in_part() -> None:
    meter = scale.Meter(CPU, scale.make_grid(CPU))
    cfg, way = meter.grid.models["llama_tiny"], scale.WAYS["gather"]
    small = meter.blocks(cfg, way, 4, 3, 64)
    assert len(small) == 2 and meter.blocks(cfg, way, 4, 3, 64) is small
    assert all(not timed.scaled and timed.seconds.forward > 0 for timed in small)
    meter.grid = replace(meter.grid, most_flops=1e3)
    assert all(timed.scaled for timed in meter.blocks(cfg, way, 4, 3, 128))
    assert meter.whole(256, 4, 2, 16).scaled


def test_the_slowest_rank_of_each_way() -> None:
    """By the number of pairs that the real thing attends to, at a second for each."""
    meter = scale.Meter(CPU, scale.make_grid(CPU))
    cfg = meter.grid.models["gpt2_tiny"]

    def count(reach: Reach, *shape: int) -> Any:
        pairs = float((reach.q_ends.diff() * reach.k_ends.diff()).sum()) / (2 if reach.causal else 1)
        return scale.Timed(Pass(pairs, pairs), 0.0)

    meter.part = count  # type: ignore[assignment, method-assign]
    work = {
        way: sum(timed.seconds.forward for timed in scale.time_blocks(meter, cfg, way, 4, 64)) / (64 * 64 / 2)
        for way in ("gather", "gather, contiguous", "ring")
    }
    even = pytest.approx(1 / 4)
    assert work == {"gather": even, "gather, contiguous": pytest.approx((2 * 4 - 1) / 4**2), "ring": even}


@pytest.mark.slow
def test_the_script_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.scale", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, cwd=ROOT)
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
