"""Predictions of scale.py against real processes with real collectives, on this machine's CPUs.

    python -m bench.check_scale 2 4        with two processes, then with four

The parts of each method are timed alone, and so are messages between the processes; what they add up to is compared
with one layer of the method itself, run by all processes at once. It exits with 1 where they differ by more than a
factor of two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bench import share
from bench.rank_costs import layer_traffic, sum_passes
from bench.scale import WAYS, Meter, line, make_grid
from bench.share import Way
from stretto.batch import Layout
from stretto.bench.measure import Clock
from stretto.config import ModelConfig, build_config
from stretto.parallel.ring import Ring, wait
from stretto.parallel.sequence import Segment
from stretto.parallel.sequence_costs import Link, Pass, Traffic, exposed_seconds
from stretto.parallel.ulysses import all_to_all
from stretto.techniques.fused import FusedBlock


@dataclass(frozen=True)
class MeasuredLink(Link):
    """A link with a bandwidth and a latency for each kind of message."""

    kinds: tuple[tuple[str, Link], ...] = ()

    def seconds(self, messages: Any) -> float:
        return sum(dict(self.kinds)[message.kind].seconds([message]) for message in messages)


def measure_link(group: dist.ProcessGroup, ring: Ring) -> MeasuredLink:
    """Fits a link to a small and a large message of each kind, between all ranks at once."""
    ranks = group.size()

    def fit(kind: str, send: Callable[[Tensor], Any], sent: float, hops: int) -> Link:
        """Fits one kind of message, of which a rank sends the share `sent` of a tensor."""
        found = []
        for values in (2**8, 2**20):
            x = torch.zeros(ranks, values)
            seconds = largest(statistics.median(wall(partial(send, x)) for _ in range(9)))
            found.append((x.nbytes * sent, seconds))
        (small, fast), (large, slow) = found
        bandwidth = (large - small) / max(slow - fast, 1e-9)
        return Link(kind, bandwidth, max(fast - small / bandwidth, 0.0) / hops)

    c, hops = (ranks - 1) / ranks, ranks - 1
    kinds = {
        "all-gather": fit("all-gather", lambda x: share.gather_rows(x[:1], group), c, hops),
        "reduce-scatter": fit("reduce-scatter", lambda x: share.sum_rows(x, group), c, hops),
        "all-to-all": fit("all-to-all", lambda x: all_to_all(x, group), c, 1),
        "send": fit("send", lambda x: wait(ring.pass_on(x)[1]), 1.0, 1),
    }
    return MeasuredLink("gloo", 0.0, 0.0, tuple(kinds.items()))


def wall(call: Callable[[], Any]) -> float:
    dist.barrier()
    clock = Clock(torch.device("cpu"))
    call()
    clock.tick()
    return clock.read()[0]


def largest(seconds: float) -> float:
    """Returns the largest value over all ranks, which wait for the slowest."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def check_rank(rank: int, ranks: int, folder: str) -> None:
    """Times the parts of each method alone, then the method itself."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    model = {"layers": 1, "width": 256, "heads": 8, "kv_heads": 4, "mlp_width": 256, "vocab": 64, "positions": "rotary"}
    cfg, tokens = build_config({"model": model}).model, 1024
    meter = Meter(cpu, replace(make_grid(cpu), most_flops=1e18, most_rows=2**20))
    alone = {name: check_parts(meter, cfg, way, ranks, rank, tokens) for name, way in WAYS.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    group = share.whole_group()
    segment = share.take_part(cfg, WAYS["ring"], tokens, group, cpu).layout.segment
    assert isinstance(segment, Segment) and isinstance(segment.own, Ring)
    link, lines = measure_link(group, segment.own), []
    for name, parts in alone.items():
        way, method = WAYS[name], WAYS[name].method
        block = share.build_block(cfg, way, group, cpu, torch.float32, recompute=True)
        part = share.take_part(cfg, way, tokens, group, cpu)
        angles = share.angles_of(cfg, part.positions)
        x, branch = (torch.randn(tokens // ranks, cfg.width).requires_grad_() for _ in range(2))
        traffic = layer_traffic(cfg, method, ranks, tokens, element=4, reduced=4, keep=method == "megatron")
        work, hidden = sum_passes(parts).total, exposed_seconds(method, parts[1:], traffic, link).total
        low, high = (largest(work + waits) for waits in (hidden, wait_for_all(traffic, link).total))
        run = partial(run_pass, block, x, branch, part.layout, angles)
        run()
        real = largest(statistics.median(wall(run) for _ in range(5)))
        right = low / 2 <= real <= 2 * high
        lines.append([name, f"{1e3 * low:.1f}", f"{1e3 * high:.1f}", f"{1e3 * real:.1f}", "yes" if right else "NO"])
    if rank == 0:
        head = [f"{ranks} ranks", "predicted, all that can be is hidden", "nothing is hidden", "real, ms", "within 2x"]
        text = "\n".join([line(head), line(["---"] + ["---:"] * 4), *map(line, lines)])
        Path(folder, f"{ranks}.md").write_text(text)
    dist.destroy_process_group()


def run_pass(block: FusedBlock, x: Tensor, branch: Tensor, layout: Layout, angles: Any) -> None:
    share.run_block(block, x, branch, layout, angles).sum().backward()


def wait_for_all(traffic: Traffic, link: Link) -> Pass:
    return Pass(link.seconds(traffic.forward), link.seconds(traffic.backward))


def check_parts(meter: Meter, cfg: ModelConfig, way: Way, ranks: int, rank: int, tokens: int) -> list[Pass]:
    """The rest of the layer, then this rank's own blocks of attention, timed on all ranks at about the same time."""
    if way.method == "megatron":
        heads, kv_heads = cfg.heads // ranks, (cfg.kv_heads or cfg.heads) // ranks
        blocks = [meter.whole(tokens, heads, kv_heads, cfg.width // cfg.heads)]
    else:
        blocks = meter.blocks(cfg, way, ranks, rank, tokens)
    rest = meter.rest(cfg, ranks if way.method == "megatron" else 1, tokens // ranks)
    return [timed.seconds for timed in (rest, *blocks)]


def check(ranks: Sequence[int]) -> bool:
    texts = []
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(check_rank, (count, folder), nprocs=count)
            texts.append(Path(folder, f"{count}.md").read_text())
        print(texts[-1], end="\n\n", flush=True)
    return not any("NO" in text for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="+", help="how many processes")
    sys.exit(0 if check(parser.parse_args().ranks) else 1)


if __name__ == "__main__":
    main()
