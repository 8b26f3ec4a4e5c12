"""Scale without the machines: one rank's real share of the work, and a model of the links, make the step of P ranks.

    python -m bench.scale                  the whole grid; needs a GPU to mean anything, a few minutes on one

check_scale.py compares such predictions with real processes.

Timed on this device, each shape once and then used for every method and link that needs it: a layer without attention
(s / P tokens, or all tokens of 1 / P of its weights), attention in the parts in which a rank of the real thing does it
(parallel/partial.py), what is outside of layers, and the update. bench/share.py has the share,
parallel/sequence_costs.py the messages, bench/rank_costs.py how all of it adds up to a step: weights sharded over all
ranks (FSDP), K/V gathered again in the backward pass, one sequence per step.

A shape that would take too long is timed in part (fewer heads, fewer rows) and scaled: its speed is marked *. Times are
the device's: a step that this machine's host could not launch so fast, kernel by kernel, is marked h. Memory is marked
m where one layer of the share was run whole and its memory measured, else it is by formula; weights and their kin
always are. Contiguous: the step of the slowest rank. Latencies are assumptions, bandwidths the nominal ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from bench import share
from bench.rank_costs import (
    classic_activation_bytes,
    compose_step,
    count_parameters,
    find_obstacle,
    layer_traffic,
    rank_memory,
    sum_passes,
)
from bench.share import Way
from stretto.attention import attend
from stretto.batch import Counts, Sequences, dense_layout
from stretto.bench.contest import describe_run
from stretto.bench.measure import Clock
from stretto.config import ModelConfig, build_config
from stretto.flops import training_flops
from stretto.model import Embedding, build_norm
from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.norm import norm
from stretto.optim import FlatAdamW
from stretto.parallel.gather import Gather
from stretto.parallel.partial import Scores, attend_part, backward_part, merge
from stretto.parallel.reach import Reach
from stretto.parallel.ring import Ring
from stretto.parallel.sequence import Segment
from stretto.parallel.sequence_costs import NETWORK, NVLINK, Link, Pass
from stretto.parallel.ulysses import Ulysses
from stretto.techniques.fused import FusedEmbedding, norm_parts

LINKS = (NVLINK, NETWORK)
WAYS = {
    "gather": Way("gather", "zigzag"),
    "gather, contiguous": Way("gather"),
    "ring": Way("ring", "zigzag"),
    "ulysses": Way("ulysses"),
    "megatron": Way("megatron"),
}
UNDIVIDED, UNREAL = "megatron, undivided", " if heads allowed it"
REPEATS = 3
GIB = 2**30
CYCLES = 2e9  # of a GPU in a second, about


@dataclass(frozen=True)
class Grid:
    """What is simulated, and the most that is timed at once."""

    models: dict[str, ModelConfig]
    lengths: tuple[int, ...]  # strong scaling: these sequences over
    ranks: tuple[int, ...]
    own: int  # tokens of each rank in weak scaling
    weak_ranks: tuple[int, ...]
    paper: tuple[int, tuple[int, ...], int]  # tokens, ranks of the strong scaling, most ranks of megatron
    most_flops: float  # of a forward pass of attention
    most_rows: int


def make_grid(device: torch.device) -> Grid:
    """Learned positions for such lengths would be more parameters than the rest of the model, so all are rotary."""
    medium = {"preset": "gpt2-medium", "vocab": 50304, "positions": "rotary"}
    llama = {"preset": "llama-1b"}
    if device.type == "cpu":
        tiny = {"layers": 2, "width": 64, "heads": 4, "mlp_width": 128, "vocab": 512}
        models = {"gpt2_tiny": medium | tiny, "llama_tiny": llama | tiny | {"kv_heads": 2}}
        sizes: Any = ((64, 256), (1, 2, 4, 8), 16, (1, 4, 16), (288, (1, 12, 36), 4), 4e6, 256)
    else:
        models = {"gpt2_medium": medium, "llama1b": llama}
        lengths, powers = (2**14, 2**16, 2**18, 2**20), tuple(2**i for i in range(7))
        paper = (50112, (1, 4, 16, 36, 144), 16)
        sizes = (lengths, powers, 1024, (1, 4, 16, 64, 256, 1024), paper, 5e12, 2**16)
    return Grid({name: build_config({"model": model}).model for name, model in models.items()}, *sizes)


@dataclass(frozen=True)
class Timed:
    seconds: Pass  # of the device, which never waits for the host
    host: float  # seconds until all kernels are launched
    scaled: bool = False  # from a part

    def times(self, factor: float) -> Timed:
        """Scales to a shape that is `factor` times as large and needs no more launches."""
        seconds = Pass(factor * self.seconds.forward, factor * self.seconds.backward)
        return replace(self, seconds=seconds, scaled=factor != 1)


@dataclass(frozen=True)
class Row:
    table: str
    model: str
    way: str
    tokens: int
    ranks: int
    link: str
    tokens_per_s: float  # of each rank
    tflops: float  # of each rank, useful ones
    step_s: float
    waits: float  # for messages, of layers and of weights: their share of the step
    attention: float  # its share
    host_s: float  # that this machine's host takes to launch the kernels of a step one by one
    memory_gib: float
    memory_measured: bool
    scaled: bool


class Meter:
    """Times on one device; remembers every shape."""

    def __init__(self, device: torch.device, grid: Grid) -> None:
        self.device, self.grid = device, grid
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.whole, self.blocks, self.rest = cache(self._whole), cache(self._blocks), cache(self._rest)
        self.outside, self.update, self.memory = cache(self._outside), cache(self._update), cache(self._memory)

    def _whole(self, tokens: int, heads: int, kv_heads: int, size: int) -> Timed:
        """Causal attention to a sequence that is not split."""
        queries = tokens
        while 2 * queries**2 * heads * size > self.grid.most_flops and queries > 128:
            queries //= 2
        shapes = ((queries, heads, size), (queries, kv_heads, size), (queries, kv_heads, size))
        q, k, v = (self.random(*shape).requires_grad_() for shape in shapes)
        dout = self.random(*shapes[0])
        layout = dense_layout(1, queries, device=self.device)
        timed = self.time(
            lambda: attend(q, k, v, layout, layout, causal=True, dropout=0.0),
            lambda out: torch.autograd.grad(out, (q, k, v), dout),
        )
        return timed.times((tokens / queries) ** 2)

    def _blocks(self, cfg: ModelConfig, way: Way, ranks: int, rank: int, tokens: int) -> list[Timed]:
        """Attention on one rank of several, in the order in which keys are there."""
        size, all_heads, own = cfg.width // cfg.heads, cfg.kv_heads or cfg.heads, tokens // ranks
        kv_heads, least = all_heads, ranks if way.method == "ulysses" else 1
        flops = 2 * own * tokens * cfg.width  # forward
        while kv_heads % (2 * least) == 0 and flops * kv_heads / all_heads > self.grid.most_flops:
            kv_heads //= 2
        heads = (cfg.heads // all_heads * kv_heads, kv_heads, size)
        with share.stand_in(ranks, rank) as group:
            segment = share.take_part(cfg, way, tokens, group, self.device).layout.segment
            assert isinstance(segment, Segment)
            if isinstance(segment.own, Ulysses):
                passes = [self.exchanged(segment.own, own, *heads)]
            elif isinstance(segment.own, Gather):
                assert segment.own.own is not None
                passes = [self.part(segment.own.own, own, own, *heads)]
                passes.append(self.part(segment.own.others, tokens, own, *heads))
            else:
                assert isinstance(segment.own, Ring)
                reaches, known = [segment.own.own, *segment.own.others.values()], dict[Any, Timed]()
                shapes = [(reach.causal, reach.lengths) for reach in reaches]
                for shape, reach in zip(shapes, reaches, strict=True):
                    if shape not in known:
                        known[shape] = self.part(reach, own, own, *heads)
                passes = [known[shape] for shape in shapes]
        return [timed.times(all_heads / kv_heads) for timed in passes]

    def part(self, reach: Reach, rows: int, own: int, heads: int, kv_heads: int, size: int) -> Timed:
        """Times attention of `own` queries to the keys that they reach of `rows`; merged, unless it is the first."""
        q, out, dout = (self.random(own, heads, size) for _ in range(3))
        kv, lse, scores = self.random(rows, 2, kv_heads, size), q.new_zeros(heads, own).float(), Scores(size**-0.5)

        def forward() -> tuple[Tensor, Tensor]:
            found = attend_part(q, kv, reach, scores)
            return found if reach.causal else merge(out, lse, *found)

        return self.time(forward, lambda _: backward_part(dout, q, kv, out, lse, reach, scores))

    def exchanged(self, by: Ulysses, own: int, heads: int, kv_heads: int, size: int) -> Timed:
        q, k, v = (self.random(own, count, size).requires_grad_() for count in (heads, kv_heads, kv_heads))
        dout, scores = self.random(own, heads, size), Scores(size**-0.5)
        return self.time(lambda: by(q, k, v, scores), lambda out: torch.autograd.grad(out, (q, k, v), dout))

    def _rest(self, cfg: ModelConfig, split: int, own: int) -> Timed:
        """Times a layer of `own` tokens without attention; with `split` > 1, megatron's over `split` ranks."""
        rows = min(own, max(self.grid.most_rows // split, 1))
        with share.stand_in(split, 0) as group:
            way, others = (WAYS["megatron"], group) if split > 1 else (WAYS["gather"], None)
            block = share.build_block(cfg, way, others, self.device, self.dtype, recompute=True)
            part = share.leave_out_attention(share.take_part(cfg, way, rows * split, others, self.device))
            x, branch, dout = (self.random(rows, cfg.width) for _ in range(3))
            inputs = [x.requires_grad_(), branch.requires_grad_(), *block.parameters()]
            angles = share.angles_of(cfg, part.positions)
            timed = self.time(
                lambda: share.run_block(block, x, branch, part.layout, angles),
                lambda out: torch.autograd.grad(out, inputs, dout, allow_unused=True),
            )
        return timed.times(own / rows)

    def _outside(self, cfg: ModelConfig, own: int) -> Timed:
        """Embedding, last norm, output layer and loss. Megatron's have all tokens of 1 / P of the vocabulary: the same
        work."""
        rows = min(own, self.grid.most_rows // 4)
        with torch.device(self.device):
            embedding, last = Embedding(cfg), build_norm(cfg)
        embedding.__class__ = FusedEmbedding
        embedding.to(self.dtype), last.to(self.dtype)
        for parameter in embedding.parameters():
            nn.init.normal_(parameter, std=0.02)
        ids = torch.arange(rows, device=self.device) % cfg.vocab
        inputs = Sequences(ids, ids, dense_layout(1, rows, device=self.device))
        table = embedding.table

        def forward() -> Tensor:
            return linear_cross_entropy(norm(embedding(inputs), *norm_parts(last)), table, None, ids)

        return self.time(forward, lambda loss: loss.backward()).times(own / rows)

    def _update(self, parameters: int) -> float:
        most = self.grid.most_rows * 2048
        count = min(parameters, most)
        weight = nn.Parameter(torch.zeros(count, device=self.device, dtype=self.dtype))
        weight.grad = torch.zeros_like(weight)
        optimizer = FlatAdamW([weight], weights="split" if self.device.type == "cuda" else "fp32")
        return self.time(optimizer.step, lambda _: None).seconds.forward * parameters / count

    def _memory(self, cfg: ModelConfig, ranks: int, tokens: int) -> tuple[float, float] | None:
        """Bytes that one layer of the share keeps, gathering K/V, and that its passes need at most; None where that
        cannot be measured or takes too long."""
        own = tokens // ranks
        pairs = own * (own + (ranks - 1) * own) / 2
        if self.device.type != "cuda" or 4 * pairs * cfg.width > 4 * self.grid.most_flops or own > self.grid.most_rows:
            return None
        with share.stand_in(ranks, 0) as group:  # who sees most keys, zig-zag
            way, others = WAYS["gather"], group if ranks > 1 else None
            block = share.build_block(cfg, way, others, self.device, self.dtype, recompute=True)
            part = share.take_part(cfg, way, tokens, others, self.device)
            x, branch, dout = (self.random(own, cfg.width) for _ in range(3))
            angles = share.angles_of(cfg, part.positions)
            inputs = [x.requires_grad_(), branch.requires_grad_(), *block.parameters()]
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = share.run_block(block, x, branch, part.layout, angles)
            kept = torch.cuda.memory_allocated() - before - out.nbytes
            torch.autograd.grad(out, inputs, dout, allow_unused=True)
            return kept, torch.cuda.max_memory_allocated() - before

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def time(self, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Timed:
        """Times kernels that follow one another: the device sleeps while the host launches them."""
        backward(forward())
        clock = Clock(self.device)
        begin = time.perf_counter()
        backward(forward())
        host = time.perf_counter() - begin if self.device.type == "cuda" else 0.0
        for _ in range(REPEATS):
            if host:
                torch.cuda._sleep(int(1.2 * host * CYCLES))
            clock.tick()
            out = forward()
            clock.tick()
            backward(out)
            clock.tick()
            del out
        seconds = clock.read()
        return Timed(Pass(statistics.median(seconds[1::3]), statistics.median(seconds[2::3])), host)


def time_blocks(meter: Meter, cfg: ModelConfig, name: str, ranks: int, tokens: int) -> list[Timed]:
    """Times attention on the slowest rank. Contiguous, that is the last. Zig-zag, all see as many pairs: the first sees
    all keys of others with half of its queries, and the last half of the keys with all of them. All wait for the slower
    of the two; in a ring, somebody does the one and somebody the other at any time."""
    way, kv_heads = WAYS[name], cfg.kv_heads or cfg.heads
    if ranks == 1 or way.method == "megatron":
        return [meter.whole(tokens, cfg.heads // ranks, max(kv_heads // ranks, 1), cfg.width // cfg.heads)]
    candidates = (0, ranks - 1) if way.layout == "zigzag" else (ranks - 1,)
    found = [meter.blocks(cfg, way, ranks, rank, tokens) for rank in candidates]
    return max(found, key=lambda blocks: sum_passes(block.seconds for block in blocks).total)


def simulate(meter: Meter, table: str, model: str, way: str, ranks: int, tokens: int) -> list[Row]:
    """A row for each link; none where the model cannot be split so."""
    cfg, method, zigzag = meter.grid.models[model], WAYS[way].method, WAYS[way].layout == "zigzag"
    if find_obstacle(cfg, method, ranks, tokens) or (zigzag and tokens // ranks % 2 and ranks > 1):
        return []
    blocks = time_blocks(meter, cfg, way, ranks, tokens)
    rest = meter.rest(cfg, ranks if method == "megatron" else 1, tokens // ranks)
    return compose_rows(meter, table, model, way, ranks, tokens, rest, blocks)


def compose_rows(
    meter: Meter, table: str, model: str, way: str, ranks: int, tokens: int, rest: Timed, blocks: Sequence[Timed]
) -> list[Row]:
    cfg, method = meter.grid.models[model], WAYS[way].method
    per_block, alone = count_parameters(cfg)
    outside = meter.outside(cfg, tokens // ranks)
    seconds = outside.seconds.total + meter.update((cfg.layers * per_block + alone) // ranks)
    traffic = layer_traffic(cfg, method, ranks, tokens, keep=False)
    memory = rank_memory(cfg, method, ranks, tokens, recompute=True)
    measured = meter.memory(cfg, ranks, tokens) if method == "gather" else None  # wherever tokens lie
    if measured is not None:
        kept, peak = measured
        gathered = (2 * per_block + alone) * 2 if ranks > 1 else 0  # FSDP's, as in rank_memory
        memory = replace(memory, activations=cfg.layers * kept, gathered=0, working=peak - kept + gathered)
    useful = training_flops(cfg, Counts(tokens, tokens, tokens, tokens**2))
    passes = [block.seconds for block in blocks]

    def compose(link: Link) -> Row:
        step = compose_step(cfg, method, ranks, link, rest.seconds, passes, seconds, traffic)
        case = (table, model, way, tokens, ranks, link.name)
        return Row(
            *case,
            tokens_per_s=tokens / ranks / step.total,
            tflops=useful / ranks / step.total / 1e12,
            step_s=step.total,
            waits=(step.waits + step.weights) / step.total,
            attention=cfg.layers * sum_passes(passes).total / step.total,
            host_s=cfg.layers * sum(timed.host for timed in (rest, *blocks)) + outside.host,
            memory_gib=memory.total / GIB,
            memory_measured=measured is not None,
            scaled=any(timed.scaled for timed in (rest, outside, *blocks)),
        )

    return [compose(link) for link in LINKS]


def simulate_undivided(meter: Meter, table: str, model: str, way: str, ranks: int, tokens: int) -> list[Row]:
    """More ranks than heads, and each of them attends with all heads to all tokens: what tensor parallelism comes to
    where attention cannot be divided further. All else is divided, at the speed of as many tokens."""
    cfg = meter.grid.models[model]
    size, kv_heads = cfg.width // cfg.heads, cfg.kv_heads or cfg.heads
    blocks = [meter.whole(tokens, cfg.heads, kv_heads, size)]
    rest = meter.rest(cfg, 1, tokens // ranks)
    rows = compose_rows(meter, table, model, "megatron", ranks, tokens, rest, blocks)
    whole = (2 * cfg.width + 2 * kv_heads * size) * 2 * tokens * (1 - 1 / ranks) * cfg.layers / GIB  # q, k, v, result
    return [replace(row, way=way, memory_gib=row.memory_gib + whole) for row in rows]


def run_grid(meter: Meter, known: Sequence[Row], console: Console) -> Iterator[list[Row]]:
    """Simulates every case that has no rows yet."""
    grid = meter.grid
    tokens, strong, most = grid.paper
    first = next(iter(grid.models))  # its size is not known; a small GPT it was
    ways = ("gather", "gather, contiguous", "ring")
    jobs = [("paper", first, way, ranks, tokens) for ranks, way in product(strong, ways)]
    jobs += [("paper", first, "megatron", most, tokens), ("paper", first, UNDIVIDED, strong[-1], tokens)]
    jobs += [("paper, weak", first, "gather", ranks, tokens // strong[-1] * ranks) for ranks in strong]
    weak = product(grid.models, grid.weak_ranks, WAYS)
    jobs += [("weak", model, way, ranks, ranks * grid.own) for model, ranks, way in weak]
    everything = product(grid.models, grid.lengths, grid.ranks, WAYS)
    jobs += [("strong", model, way, ranks, tokens) for model, tokens, ranks, way in everything]
    done = {(row.table, row.model, row.way, row.ranks, row.tokens) for row in known}
    left = [job for job in jobs if job not in done]
    for job in track(left, "one rank's share", console=console, transient=True, disable=not console.is_terminal):
        yield simulate_undivided(meter, *job) if UNDIVIDED in job else simulate(meter, *job)


def show(rows: Sequence[Row], grid: Grid) -> str:
    """Markdown: speed of each way, then its memory."""
    parts = []
    for table, column, meaning in (
        ("strong", "tokens_per_s", "tokens/s of each rank"),
        ("weak", "tflops", "TFLOP/s of each rank"),
        ("paper", "tokens_per_s", "tokens/s of each rank"),
        ("paper, weak", "tflops", "TFLOP/s of each rank"),
    ):
        some = [row for row in rows if row.table == table]
        for model, link in dict.fromkeys((row.model, row.link) for row in some):
            here = sorted(
                (row for row in some if (row.model, row.link) == (model, link)), key=lambda r: (r.tokens, r.ranks)
            )
            ways = list(dict.fromkeys(row.way for row in here))
            cells = {(row.tokens, row.ranks, row.way): row for row in here}
            head = ["tokens", "ranks", *ways, *(f"{way}, GiB" for way in ways)]
            lines = [f"### {table}: {model}, {link}; {meaning}", "", line(head), line(["---:"] * len(head))]
            for tokens, ranks in dict.fromkeys((row.tokens, row.ranks) for row in here):
                found = [cells.get((tokens, ranks, way)) for way in ways]
                speeds = ["-" if row is None else figures(getattr(row, column)) + marks(row) for row in found]
                sizes = ["-" if row is None else figures(row.memory_gib) + "m" * row.memory_measured for row in found]
                lines.append(line([f"{tokens:,}", f"{ranks:,}", *speeds, *sizes]))
            parts.append("\n".join(lines))
    return "\n\n".join([*parts, show_classic(grid)]) + "\n"


def show_classic(grid: Grid) -> str:
    """The paper's case as memory was before FlashAttention: by formula alone."""
    tokens, strong, most = grid.paper
    name, cfg = next(iter(grid.models.items()))
    lines = [f"### {name}, {tokens:,} tokens: activations of one layer without fused attention, by formula", ""]
    lines += [line(["way", "GiB"]), line(["---", "---:"])]
    for method, ranks, note in (("gather", strong[-1], ""), ("megatron", most, ""), ("megatron", strong[-1], UNREAL)):
        size = classic_activation_bytes(cfg, method, ranks, tokens)
        lines.append(line([f"{method}, {ranks} ranks{note}", f"{size / GIB:.2f}"]))
    return "\n".join(lines)


def marks(row: Row) -> str:
    return "*" * row.scaled + "h" * (row.host_s > row.step_s)


def figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(path: Path, rows: Sequence[Row], grid: Grid, note: str) -> None:
    """For each model: strong scaling of the longest sequence but one (in the longest, attention hides everything), weak
    scaling, and memory by length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5 * len(grid.models)), layout="constrained")
    figure.suptitle(note, x=0.01, ha="left", fontsize=9)
    panels = figure.subplots(len(grid.models), 3, squeeze=False)
    styles = dict(zip((link.name for link in LINKS), ("-", "--"), strict=True))
    colours = {way: f"C{i}" for i, way in enumerate(WAYS)}
    for (strong, weak, memory), model in zip(panels, grid.models, strict=True):
        mine, long = [row for row in rows if row.model == model], grid.lengths[-2]
        for axes, table, column, title in (
            (strong, "strong", "tokens_per_s", f"{model}, {long:,} tokens: tokens/s of each rank"),
            (weak, "weak", "tflops", f"{model}, {grid.own:,} tokens a rank: TFLOP/s of each rank"),
        ):
            for way, colour in colours.items():
                for link, style in styles.items():
                    picked = [row for row in mine if (row.table, row.way, row.link) == (table, way, link)]
                    picked = [row for row in picked if table == "weak" or row.tokens == long]
                    label = f"{way}; {link}" if style == "-" else None
                    axes.plot([r.ranks for r in picked], [getattr(r, column) for r in picked], style, marker=".",
                              color=colour, label=label)  # fmt: skip
            axes.set(xlabel="ranks", ylim=(0, None))
            axes.set_xscale("log", base=2)
            axes.set_title(title, fontsize=10)
        for i, ranks in enumerate(grid.ranks):
            case = ("strong", "gather", ranks, LINKS[0].name)
            picked = [r for r in mine if (r.table, r.way, r.ranks, r.link) == case]
            sizes = [r.memory_gib for r in picked]
            memory.plot([r.tokens for r in picked], sizes, marker=".", color=f"C{i}", label=f"{ranks}")
        memory.set(xlabel="tokens", xscale="log", yscale="log")
        memory.set_title(f"{model}, gather: GiB of each rank", fontsize=10)
        strong.legend(fontsize=8, title=f"dashed: {LINKS[1].name}")
        memory.legend(fontsize=8, title="ranks")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="folder for scale.json, .md and .png")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, grid = Console(highlight=False), make_grid(device)
    facts = describe_run(device, REPEATS, [])
    meter = Meter(device, grid)
    console.print(describe(facts), markup=False)
    rows = load(arguments.out, facts)
    for more in run_grid(meter, rows, console):
        rows += more
        save(arguments.out, rows, grid, facts | {"links": [asdict(link) for link in LINKS]})
    print((arguments.out / "scale.md").read_text(encoding="utf-8"))
    draw(arguments.out / "scale.png", rows, grid, describe(facts))
    print(f"numbers: {arguments.out / 'scale.json'}; chart: {arguments.out / 'scale.png'}")


def load(out: Path, facts: dict[str, Any]) -> list[Row]:
    """Loads the rows that an interrupted run has left."""
    if not (out / "scale.json").exists():
        return []
    saved = json.loads((out / "scale.json").read_text(encoding="utf-8"))
    if saved["environment"]["device"] != facts["environment"]["device"]:
        sys.exit(f"{out} is of another device, {saved['environment']['device']}: choose another --out, or delete it")
    return [Row(**row) for row in saved["rows"]]


def save(out: Path, rows: Sequence[Row], grid: Grid, facts: dict[str, Any]) -> None:
    """Saves tables after each piece of work, so that an interrupted run can go on."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "scale.md").write_text(f"{describe(facts)}\n\n{show(rows, grid)}", encoding="utf-8")
    tree = facts | {"rows": [asdict(row) for row in rows]}
    (out / "scale.json").write_text(json.dumps(tree, indent=1), encoding="utf-8")


def describe(facts: dict[str, Any]) -> str:
    return f"{facts['environment']['device']}. {facts['note']}"


if __name__ == "__main__":
    main()
