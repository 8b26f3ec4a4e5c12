"""Every long sum of a training step, found from a recipe: its length, how it is added up, what 8 bits would cost it.

A linear layer x [T, I] -> y [T, O] sums over I in its forward product, over O in that of dx (dgrad), and over T in that
of dweight (wgrad): these are the longest sums, and coherent ones where a channel of x and one of dout both have a mean
(that of dout is the gradient of its bias). Attention adds up as many terms as a query sees keys, coherent where values
of a channel share a sign. Outside of products there are sums over tokens, micro-batches, processes and steps. A sum
that a kernel cuts into parts by the number of processors counts as one, which errs on the safe side.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod, sqrt
from typing import Any, Literal

from stretto.config import Config, ModelConfig
from stretto.memory import GRADIENT_BYTES, Load, chunk_rows, kv_width, list_blocks, mlp_widths
from stretto.numerics.laws import cut_bias, noise, required_mantissa, stall
from stretto.plan import complete_sizes, find_needs, find_way, uses_gpu

FRACTION, PROMOTE = 13, 128  # bits of Hopper's accumulator of FP8 products, and terms after which fp32 takes over
FP8_PRODUCT = 7  # mantissa bits of a product of two E4M3 numbers; with one or two E5M2 numbers, 6 or 5
TOLERANCE = 0.01  # relative error: a quarter of what rounding both factors to E4M3 costs a product anyway (3.8e-2)
FACTOR_BITS = {"fp32": 23, "bf16": 7, "fp16": 10}


@dataclass(frozen=True)
class Sum:
    name: str
    length: int
    term: int  # mantissa bits of what is added
    mantissa: int = 23  # bits of what it is added up in; 23: fp32
    chunk: int = 0  # terms; 0: in one go
    product: bool = True  # could be one of 8-bit factors
    coherent: bool = False  # terms may share a sign
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def error(self, chunk: int = 0) -> float:
        """The error of the sum as it is added up today, relative to its deviation, by the law."""
        return sqrt(noise(self.length, self.mantissa, chunk or self.chunk, self.rounding))

    def fp8_error(self, promote: int = 0) -> float:
        """The relative error by Hopper's cut to 13 bits, toward zero, of a product of 8-bit factors."""
        n = min(self.length, promote or self.chunk or self.length)
        return abs(cut_bias(n, FRACTION, FP8_PRODUCT)) if self.coherent else sqrt(noise(n, FRACTION, rounding="zero"))

    def required(self, chunk: int = 0) -> int:
        """The mantissa bits that the variance retention ratio asks for, of 8-bit factors where it is a product."""
        return required_mantissa(self.length, FP8_PRODUCT if self.product else self.term, chunk)

    def verdict(self) -> str:
        if not self.product:
            stalls = self.coherent and self.rounding == "nearest" and self.length >= stall(self.mantissa)
            return "safe as it is" if self.error() <= TOLERANCE and not stalls else "widen it"
        if abs(cut_bias(self.length, FRACTION, FP8_PRODUCT)) <= TOLERANCE:
            return "safe"
        return "chunk it" if self.coherent or self.fp8_error() > TOLERANCE else "safe if cut toward zero"


def _list_products(cfg: ModelConfig, load: Load, joined: bool) -> Iterator[tuple[str, int, int, int]]:
    """Yields name, rows, inputs and outputs of the linear layers of one block of each stack, and of those outside; a
    layer whose input has no gradient comes with 0 outputs. `joined`: one product makes keys and values of the encoder's
    tokens for all blocks, and sums their gradient over all of them."""
    (up, inner), width, blocks = mlp_widths(cfg), cfg.width, list_blocks(cfg)
    for stack, cross in dict.fromkeys(blocks):
        t = load.count_tokens(cross)
        yield f"{stack} qkv", t, width, width + 2 * kv_width(cfg)
        yield f"{stack} out", t, width, width
        if cross:
            yield f"{stack} cross q", t, width, width
            yield f"{stack} cross kv", load.source, width, 2 * width * (blocks.count((stack, cross)) if joined else 1)
            yield f"{stack} cross out", t, width, width
        yield f"{stack} up", t, width, up
        yield f"{stack} down", t, inner, width
    if cfg.kind == "vit":
        yield "patch", load.tokens - load.labels, cfg.channels * cfg.patch**2, 0
    if cfg.kind == "encoder":
        yield "head transform", load.labels, width, width
    yield "head", load.labels, width, cfg.classes if cfg.kind == "vit" else cfg.vocab


def list_sums(config: Config, processes: int = 1) -> tuple[list[Sum], list[str]]:
    """The sums of a step in one of so many processes, those of blocks once for each stack; and what was assumed where
    only the data would tell."""
    config, notes = complete_sizes(config)
    cfg, way = config.model, find_way(config)
    kernels = config.techniques.find_kernels(uses_gpu(config)) is not None
    world = max(processes // prod(config.parallel.axes().values()), 1)
    groups = gcd(config.train.micro_batches, world)  # as parallel/data.py deals micro-batches
    load = find_needs(config, parts=world // groups).load
    factor = FACTOR_BITS["fp32" if way.element == 4 else "fp16" if config.train.precision == "fp16" else "bf16"]
    term, found = 2 * factor + 1, list[Sum]()  # bits of an exact product
    for name, rows, inputs, outputs in _list_products(cfg, load, kernels and config.parallel.data == "replicate"):
        own_head = name == "head" and cfg.kind != "vit" and kernels
        chunk = chunk_rows(rows, -(-cfg.vocab // 64) * 64 * way.element) if own_head else 0
        found += [Sum(f"{name}, forward", inputs, term), Sum(f"{name}, dgrad", outputs, term)]
        found.append(Sum(f"{name}, wgrad", rows, term, chunk=chunk if chunk < rows else 0, coherent=True))
    seen = load.tokens // load.labels if cfg.kind == "vit" else min(config.data.seq_len, cfg.window or 2**62)
    queries = seen * cfg.heads // (cfg.kv_heads or cfg.heads)  # that share a key
    attention = {"P V": seen, "dK and dV": queries}
    found += [Sum(f"attention, {name}", length, term, coherent=True) for name, length in attention.items()]
    gradient = FACTOR_BITS["fp32" if GRADIENT_BYTES[way.weights] == 4 else "bf16"]
    travels = gradient if config.parallel.data == "replicate" else 23  # as parallel/data.py sums what is sharded
    moment, wide = FACTOR_BITS[way.moments], 23 if kernels else factor
    rounding: Literal["nearest", "stochastic"] = "stochastic" if moment < 23 else "nearest"  # as in ops/adamw.py
    tokens, text = load.tokens + load.source, cfg.kind != "vit"
    steps = [round(1 / (1 - beta)) for beta in (config.optim.beta1, config.optim.beta2)]
    found += [
        Sum("biases and norms, over tokens", tokens, wide, product=False, coherent=True),
        Sum("a row of the token table, at most", tokens * text, factor, product=False, coherent=True),
        Sum("gradients, over micro-batches", config.train.micro_batches // groups, gradient, gradient, 0, False, True),
        Sum("gradients, over processes", processes, travels, travels, 0, False, True),
        Sum("first moment, over steps", steps[0], gradient, moment, 0, False, True, rounding),
        Sum("second moment, over steps", steps[1], gradient, moment, 0, False, True, rounding),
    ]
    return [one for one in found if one.length > 1], notes


def explain_sums(sums: list[Sum]) -> Iterator[str]:
    """The lines of the table."""
    by = f"by {PROMOTE}"
    first = f"{'sum':35}{'terms':>9}{'bits':>6}{'in':>5}{'chunk':>8}{'error':>10}{by:>9}"
    yield f"{first}{'VRR':>6}{by:>8}{'fp8':>10}{by:>9}  fp8 on Hopper"
    for one in sums:
        fp8 = [f"{one.fp8_error(promote):.1e}" if one.product else "-" for promote in (0, PROMOTE)]
        first = f"{one.name:35}{one.length:>9,}{one.term:>6}{one.mantissa:>5}{one.chunk or '-':>8}{one.error():>10.1e}"
        second = f"{one.error(PROMOTE):>9.1e}{one.required():>6}{one.required(PROMOTE):>8}{fp8[0]:>10}{fp8[1]:>9}"
        yield f"{first}{second}  {one.verdict()}"


def draw_sums(sums: list[Sum], style: dict[Any, Any], colours: tuple[str, str, str]) -> str:
    """The picture as SVG: error against length of 8-bit products on Hopper, with the recipe's sums marked, in colours
    for sums of mean zero, for sums of one sign, and for all the rest."""
    import matplotlib
    from matplotlib.figure import Figure

    lengths = [2.0 ** (k / 4) for k in range(20, 77)]
    with matplotlib.rc_context(style | {"svg.hashsalt": "numerics", "savefig.facecolor": "white", "font.size": 10}):
        figure = Figure(figsize=(9, 5.4))
        axes = figure.add_axes((0.09, 0.1, 0.88, 0.87), xlabel="terms", ylabel="relative error")
        for coherent, kind in enumerate(("mean zero", "one sign")):
            for promote, line, way in ((0, "-", "in one go"), (PROMOTE, "--", f"in chunks of {PROMOTE}")):
                errors = [Sum("", round(n), 0, coherent=bool(coherent)).fp8_error(promote) for n in lengths]
                axes.loglog(lengths, errors, line, color=colours[coherent], label=f"fp8, terms of {kind}, {way}")
            marked: dict[tuple[int, float], list[str]] = {}
            for one in sums:
                if one.product and one.coherent == coherent:
                    marked.setdefault((one.length, one.fp8_error()), []).append(one.name)
            for place, (name, *others) in marked.items():
                axes.plot(*place, "o", color=colours[coherent])
                text = f"{name} and {len(others)} more" if others else name
                offset, side = ((-6, 4), "right") if coherent else ((4, -8), "left")
                label = axes.annotate(text, place, offset, textcoords="offset points", ha=side, fontsize=7)
                label.set(rotation=0 if coherent else -20, rotation_mode="anchor")
        axes.loglog(lengths, [sqrt(noise(n, 23)) for n in lengths], ":", color=colours[2], label="16-bit factors, fp32")
        axes.axhline(TOLERANCE, color=colours[2], linewidth=0.6)
        axes.set(xlim=(lengths[0], lengths[-1]), ylim=(1e-6, 1))
        axes.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.4))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return file.getvalue()
