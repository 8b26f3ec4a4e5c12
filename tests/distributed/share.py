"""One rank of a group that computes a layer together, in all ways; writes down how far it is from the whole layer, and
what it sent.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.share OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import share
from bench.rank_costs import find_obstacle
from stretto.batch import Sequences
from stretto.config import ModelConfig, build_config
from stretto.parallel import gather
from stretto.techniques.fused import FusedBlock

CPU, TOKENS = torch.device("cpu"), 64
SENT: dict[str, list[int]] = defaultdict(list)  # bytes of each message


def count_messages() -> None:
    """Around the real ones: what leaves this rank by a bandwidth-optimal algorithm, from the tensors themselves."""
    collect, scatter, exchange, send = gather.all_gather, gather.reduce_scatter, dist.all_to_all_single, dist.P2POp
    ranks = dist.get_world_size()

    def counted_gather(out: Tensor, x: Tensor, **options: Any) -> Any:
        SENT["all-gather"].append(x.nbytes * (ranks - 1))
        return collect(out, x, **options)

    def counted_scatter(out: Tensor, x: Tensor, *rest: Any, **options: Any) -> Any:
        SENT["reduce-scatter"].append(x.nbytes * (ranks - 1) // ranks)
        return scatter(out, x, *rest, **options)

    def counted_exchange(out: Tensor, x: Tensor, **options: Any) -> Any:
        SENT["all-to-all"].append(x.nbytes * (ranks - 1) // ranks)
        return exchange(out, x, **options)

    def counted_send(operation: Any, x: Tensor, **options: Any) -> Any:
        if operation is dist.isend:
            SENT["send"].append(x.nbytes)
        return send(operation, x, **options)

    gather.all_gather, gather.reduce_scatter = counted_gather, counted_scatter
    dist.all_to_all_single, dist.P2POp = counted_exchange, counted_send  # type: ignore[assignment,misc]


def run(cfg: ModelConfig, way: share.Way) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    inputs, gradient = torch.randn(2, TOKENS, cfg.width, generator=generator), torch.randn(TOKENS, cfg.width)
    dist.broadcast(gradient, 0)
    group = share.whole_group()
    whole = share.build_block(cfg, way, None, CPU, torch.float32)
    expected = pass_through(whole, cfg, inputs, gradient, share.take_part(cfg, way, TOKENS, None, CPU), slice(None))
    SENT.clear()
    block, part = share.build_block(cfg, way, group, CPU, torch.float32), share.take_part(cfg, way, TOKENS, group, CPU)
    mine = torch.arange(TOKENS).chunk(group.size())[group.rank()] if way.method == "megatron" else part.positions
    got = pass_through(block, cfg, inputs, gradient, part, mine)
    sent = {kind: [len(sizes), sum(sizes)] for kind, sizes in SENT.items()}
    errors = [relative(a, b[mine]) for a, b in zip(got, expected, strict=True)]
    if way.method != "megatron":
        for name, parameter in block.named_parameters():
            reference = whole.get_parameter(name).grad
            if reference is not None and parameter.grad is not None and "mlp.down.bias" not in name:
                dist.all_reduce(parameter.grad)
                errors.append(relative(parameter.grad, reference))
    return {"error": max(errors), "sent": sent}


def pass_through(
    block: FusedBlock, cfg: ModelConfig, inputs: Tensor, gradient: Tensor, part: Sequences, mine: Tensor | slice
) -> list[Tensor]:
    x, branch = (t[mine].clone().requires_grad_() for t in inputs)
    out = share.run_block(block, x, branch, part.layout, share.angles_of(cfg, part.positions))
    out.backward(gradient[mine])
    assert x.grad is not None and branch.grad is not None
    return [out.detach(), x.grad, branch.grad]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-3))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count_messages()
    results: dict[str, Any] = {}
    for preset in ("gpt2-tiny", "llama-tiny"):
        cfg = build_config({"model": {"preset": preset, "vocab": 512, "positions": "rotary"}}).model
        for method, placement, keep in (
            ("gather", "contiguous", False),
            ("gather", "zigzag", False),
            ("gather", "zigzag", True),
            ("ring", "contiguous", False),
            ("ring", "zigzag", False),
            ("ulysses", "contiguous", False),
            ("megatron", "contiguous", True),
        ):
            if not find_obstacle(cfg, method, dist.get_world_size(), TOKENS):
                results[f"{preset} {method} {placement} {keep}"] = run(cfg, share.Way(method, placement, keep))  # type: ignore[arg-type]
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
