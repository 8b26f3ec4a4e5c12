"""Each operation of ops/ next to the same in plain torch, eager and compiled, in one run.

    python -m bench.kernels [NAMES] --out DIR

NAMES are families, which are files in ops/; without any, all are measured.

Plain torch is what model.py does, with activations in bf16 and parameters in fp32: a parameter is cast to bf16 where it
meets an activation; embeddings and losses are computed in fp32. Arguments, results and gradients have the same types
for all contestants. These passes are timed, as in training, with all tensors in need of a gradient:

    forward   the operation, with whatever it keeps for its backward pass
    both      forward, and backward to all gradients
    update    an optimizer step with clipping

Times are the device's, the median of TIMED. Before each call the device is given a few milliseconds of work, the
overwriting of a tensor much larger than its cache: the host gets ahead, as it does in a whole step, so launches cost
nothing unless there are very many, and what the call reads comes from memory.

A rate is work over time, and the work is the same for all contestants: the FLOPs of matrix products where there are
any, else the fewest bytes. Forward reads its inputs and writes its outputs once, and once what only backward will need;
backward reads that and the gradients of the outputs, and writes the gradients of the inputs. Vectors (biases, norms,
labels, statistics) count as nothing. "peak" is Stretto's rate over that of a large copy, or product, in the same run.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from stretto import model
from stretto.bench.contest import describe_run, say
from stretto.bench.measure import Clock, measure_ceilings
from stretto.bench.worker import explain
from stretto.config import FusedConfig, OptimConfig, build_config
from stretto.errors import ConfigError, StrettoError
from stretto.files import make_folder
from stretto.memory import Keep
from stretto.ops.activation import activate
from stretto.ops.affine import add_affine
from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.dropout import draw_keys, dropout
from stretto.ops.embedding import embed
from stretto.ops.heads import project_heads
from stretto.ops.mlp import mlp
from stretto.ops.norm import add_norm
from stretto.optim import build_optimizer, clip_gradients
from stretto.runtime import choose_device
from stretto.techniques.fused import Fused
from stretto.techniques.technique import Context

WARM_UP, TIMED = 10, 30  # calls
COVER_BYTES, COVERS = 2**31, 4  # what is overwritten before a call, and how often
EPS = 1e-5
CONTESTANTS = ("eager", "compile", "stretto")
Maybe = Tensor | None
Result = dict[str, Any]
CAPTION = "ms; /eager, /compile: Stretto's speed over theirs; rate, and its share of the peak: Stretto's"


@dataclass(frozen=True)
class Problem:
    ours: Callable[..., Any]
    plain: Callable[..., Any]  # takes the same arguments
    args: tuple[Any, ...]
    work: dict[str, float]  # pass -> bytes or FLOPs
    unit: str = "TB/s"
    compiled: bool = True  # whether there is something to compile


@dataclass(frozen=True)
class Case:
    family: str  # the file in ops/
    name: str
    build: Callable[..., Problem]  # takes sizes and options
    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)


def activations(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def parameter(*shape: int) -> Tensor:
    return (0.02 * torch.randn(shape)).requires_grad_()


def key() -> Tensor:
    return draw_keys(torch.empty(0), 1)[0]


def tensors(forward: int, backward: int, elements: int) -> dict[str, float]:
    """The bytes of bf16 tensors with this number of elements, `forward` and `backward` in number."""
    return {"forward": 2.0 * forward * elements, "both": 2.0 * (forward + backward) * elements}


def products(elements: int) -> dict[str, float]:
    """The FLOPs of matrix products with this number of multiplications, and of a backward pass with twice as many."""
    return {"forward": 2.0 * elements, "both": 6.0 * elements}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    if rms:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), eps)


def plain_add_norm(
    branch: Tensor, residual: Tensor, bias: Maybe, weight: Tensor, norm_bias: Maybe,
    eps: float, rms: bool, p: float, _: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    stream = residual + F.dropout(branch if bias is None else branch + bias.to(branch.dtype), p)
    return normalize(stream, weight, norm_bias, eps, rms), stream


def build_add_norm(rows: int, width: int, rms: bool = False, p: float = 0.0, bias: bool = False) -> Problem:
    """Pre-norm. Post-norm moves the same bytes, but in plain torch returns one tensor for two uses, whose gradients a
    function compiled by itself cannot add up inside, as a compiled model does."""
    vectors = parameter(width) if bias else None, parameter(width), None if rms else parameter(width)
    args = (activations(rows, width), activations(rows, width), *vectors, EPS, rms, p, key())
    # branch, residual -> stream, y; then dy, dstream, stream -> dresidual and, where dropout makes it another, dbranch
    return Problem(add_norm, plain_add_norm, args, tensors(4, 5 if p else 4, rows * width))


def plain_add_affine(
    branch: Tensor, residual: Tensor, _: None, weight: Tensor, bias: Tensor, p: float, __: None
) -> tuple[Tensor, Tensor]:
    stream = residual + branch
    return stream * weight.to(stream.dtype) + bias.to(stream.dtype), stream


def build_add_affine(rows: int, width: int) -> Problem:
    """The affine in the place of a norm, without its loss, for which plain torch has no place."""
    args = (activations(rows, width), activations(rows, width), None, parameter(width), parameter(width), 0.0, None)
    return Problem(add_affine, plain_add_affine, args, tensors(4, 4, rows * width))


def plain_activate(x: Tensor, bias: Maybe, kind: str, p: float, _: Any) -> Tensor:
    return F.dropout(model.activate(x if bias is None else x + bias.to(x.dtype), kind), p)


def build_activate(rows: int, inner: int, kind: str, p: float = 0.0, bias: bool = False) -> Problem:
    halves = 2 if kind == "swiglu" else 1
    args = (activations(rows, halves * inner), parameter(halves * inner) if bias else None, kind, p, key())
    # x -> h; then dh, and x or h, -> dx
    return Problem(activate, plain_activate, args, tensors(halves + 1, 2 * halves + 1, rows * inner))


def build_dropout(rows: int, width: int, p: float) -> Problem:
    args = (activations(rows, width), p, key())
    return Problem(dropout, lambda x, p, _: F.dropout(x, p), args, tensors(2, 2, rows * width))


def plain_mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, kind: str, *_: Any) -> Tensor:
    return linear(model.activate(linear(x, up, up_bias), kind), down, down_bias)


def build_mlp(rows: int, width: int, inner: int, kind: str) -> Problem:
    weights = parameter(inner, width), parameter(inner), parameter(width, inner), parameter(width)
    args = (activations(rows, width), *weights, kind, 0.0, None, Keep().mlp)
    return Problem(mlp, plain_mlp, args, products(2 * rows * width * inner), "TF/s")


def plain_heads(x: Tensor, weight: Tensor, bias: Maybe, parts: list[int], *rotary: Tensor) -> tuple[Tensor, ...]:
    q, k, v = torch.split(linear(x, weight, bias).view(x.shape[0], sum(parts), -1), parts, dim=1)
    if not rotary:
        return q, k, v
    angles = model.Rotary(*rotary)
    return model.rotate(q, angles), model.rotate(k, angles), v


def build_heads(rows: int, width: int, parts: list[int], rotary: bool = False) -> Problem:
    size = width // parts[0]
    out = sum(parts) * size
    angles = model.rotary_angles(torch.arange(rows) % 4096, size, 5e5)
    turns = (angles.cos, angles.sin) if rotary else ()
    args = (activations(rows, width), parameter(out, width), None if rotary else parameter(out), parts, *turns)
    return Problem(project_heads, plain_heads, args, products(rows * width * out), "TF/s")


def plain_embed(
    ids: Tensor, token: Tensor, positions: Tensor, position: Tensor, types: Maybe, token_type: Maybe, _: Any,
    weight: Maybe, bias: Maybe, eps: float, rms: bool, p: float, __: Any, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    x = F.embedding(ids, token) + F.embedding(positions, position)
    if types is not None and token_type is not None:
        x = x + F.embedding(types, token_type)
    return F.dropout(x if weight is None else normalize(x, weight, bias, eps, rms), p).to(dtype)


def build_embed(rows: int, width: int, vocab: int, length: int, bert: bool = False, p: float = 0.0) -> Problem:
    ids = torch.randint(vocab, (rows,))
    kind = (torch.randint(2, (rows,)), parameter(2, width)) if bert else (None, None)
    norm = (parameter(width), parameter(width)) if bert else (None, None)
    tables = (ids, parameter(vocab, width), torch.arange(rows) % length, parameter(length, width), *kind)
    # the rows that are looked up -> y; then dy and, through a norm, these rows again -> the gradients of whole tables
    read, y = 4.0 * width * (ids.bincount().count_nonzero().item() + min(length, rows)), 2.0 * width * rows
    forward, backward = read + y, y + bert * read + 4.0 * width * (vocab + length)
    work = {"forward": forward, "both": forward + backward}
    return Problem(embed, plain_embed, (*tables, 1.0, *norm, EPS, False, p, key(), torch.bfloat16), work)


def plain_linear_cross_entropy(x: Tensor, weight: Tensor, bias: Maybe, labels: Tensor, smoothing: float) -> Tensor:
    return model.summed_loss(linear(x, weight, bias), labels, smoothing)


def build_linear_cross_entropy(rows: int, width: int, vocab: int) -> Problem:
    args = (activations(rows, width), parameter(vocab, width), None, torch.randint(vocab, (rows,)), 0.0)
    work = {"both": products(rows * width * vocab)["both"]}  # no forward pass alone: ours has the gradients in it
    return Problem(linear_cross_entropy, plain_linear_cross_entropy, args, work, "TF/s")


def build_adamw(layers: int, width: int, vocab: int, weights: str) -> Problem:
    """The contestant is torch's fused AdamW, in fp32 or, where all tensors of this package are bf16, in bf16. Both
    functions return the parameters."""
    sizes = {"preset": "gpt2-medium", "layers": layers, "width": width, "vocab": vocab}
    ours = model.build_model(build_config({"model": sizes}).model, torch.get_default_device())
    for p in ours.parameters():
        nn.init.normal_(p, std=0.02)
    plain = copy.deepcopy(ours)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    ours.to(torch.float32 if weights == "fp32" else torch.bfloat16)
    plain.to(torch.bfloat16 if weights == "bf16" else torch.float32)
    fused = FusedConfig(weights, "bf16" if weights == "bf16" else "fp32")  # type: ignore[arg-type]
    # Weights, two moments and, where it is split, the lower half, read and written; the gradient, read twice: the norm
    # of all gradients has to be known before the first update.
    each = {"fp32": 8 + 16 + 8, "split": 8 + 16 + 4, "bf16": 4 + 8 + 4}[weights]
    work = {"update": float(each * sum(p.numel() for p in ours.parameters()))}
    return Problem(make_update(ours, fused), make_update(plain, None), (), work, compiled=False)


def make_update(trained: nn.Module, fused: FusedConfig | None) -> Callable[[], tuple[Tensor, ...]]:
    cfg, parameters = OptimConfig(), tuple(trained.parameters())
    context = Context(None, next(trained.parameters()).device, "bf16")
    optimizer = build_optimizer(trained, cfg, None if fused is None else Fused(fused, context).build_optimizer)

    def update() -> tuple[Tensor, ...]:
        clip_gradients(trained, optimizer, cfg.clip)
        optimizer.step()
        return parameters

    return update


TINY = {"rows": 64, "width": 64, "inner": 128, "vocab": 512, "layers": 2}  # at most, on a CPU
_BERT, _GPT2 = {"rows": 32768, "width": 1024}, {"rows": 32768, "width": 768}
_LLAMA, _MEDIUM = {"rows": 16384, "width": 2048}, {"layers": 24, "width": 1024, "vocab": 50304}

CASES = (
    Case("norm", "LayerNorm dropout", build_add_norm, _BERT, {"p": 0.1, "bias": True}),
    Case("norm", "LayerNorm", build_add_norm, _GPT2),
    Case("norm", "RMSNorm", build_add_norm, _LLAMA, {"rms": True}),
    Case("affine", "scale, shift", build_add_affine, _GPT2),
    Case("activation", "gelu, bias", build_activate, {"rows": 32768, "inner": 4096}, {"kind": "gelu", "bias": True}),
    Case("activation", "gelu_tanh", build_activate, {"rows": 32768, "inner": 3072}, {"kind": "gelu_tanh"}),
    Case("activation", "relu, dropout", build_activate, {"rows": 16384, "inner": 4096}, {"kind": "relu", "p": 0.1}),
    Case("activation", "swiglu", build_activate, {"rows": 16384, "inner": 8192}, {"kind": "swiglu"}),
    Case("mlp", "gelu", build_mlp, _BERT | {"inner": 4096}, {"kind": "gelu"}),
    Case("heads", "16+16+16", build_heads, _BERT, {"parts": [16, 16, 16]}),
    Case("heads", "32+8+8, rotary", build_heads, _LLAMA, {"parts": [32, 8, 8], "rotary": True}),
    Case("embedding", "GPT-2", build_embed, _GPT2 | {"vocab": 50304}, {"length": 1024}),
    Case("embedding", "BERT", build_embed, _BERT | {"vocab": 30528}, {"length": 512, "bert": True, "p": 0.1}),
    Case("cross_entropy", "linear", build_linear_cross_entropy, _GPT2 | {"vocab": 50304}),
    Case("cross_entropy", "linear", build_linear_cross_entropy, _LLAMA | {"vocab": 128256}),
    Case("dropout", "dropout", build_dropout, _BERT, {"p": 0.1}),
    *(Case("adamw", weights, build_adamw, _MEDIUM, {"weights": weights}) for weights in ("fp32", "split", "bf16")),
)
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run_kernels(
    names: Annotated[list[str] | None, typer.Argument(help=f"some of {', '.join(FAMILIES)}; without any, all")] = None,
    out: Annotated[Path, typer.Option(help="where the numbers go")] = Path("runs/bench"),
) -> None:
    """Measure single operations next to plain torch's: a table for each family, and the numbers in kernels.json."""
    names = names or []
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ConfigError(f"there is no family of kernels {unknown[0]!r}; there are: {', '.join(FAMILIES)}")
    make_folder("--out", out)
    device, console, path, results = choose_device(), Console(highlight=False), out / "kernels.json", list[Result]()
    facts = describe_run(device, TIMED, [])
    if facts["note"]:
        say(console, facts["note"])
    flops_per_s, bytes_per_s = measure_ceilings(device, torch.bfloat16)
    ceilings = {"TF/s": flops_per_s / 1e12, "TB/s": bytes_per_s / 1e12}
    say(console, f"peak: {', '.join(f'{rate:.3g} {unit}' for unit, rate in ceilings.items())}\n{CAPTION}")
    for family in FAMILIES:
        if not names or family in names:
            some = [measure_case(case, device, ceilings) for case in CASES if case.family == family]
            print_family(console, family, some)
            results += some
            path.write_text(json.dumps(facts | {"peak": ceilings, "cases": results}, indent=1), encoding="utf-8")
    say(console, f"numbers: {path}")
    if not any("stretto" in numbers for result in results for numbers in result["passes"].values()):
        raise StrettoError(f"nothing could be measured; {path} says why")


def measure_case(case: Case, device: torch.device, ceilings: dict[str, float]) -> Result:
    """Returns the case; milliseconds, rate and share of the peak by pass and contestant; reasons of failures."""
    result: Result = {"family": case.family, "name": case.name, "sizes": fit_to_device(case, device)}
    result |= {"options": case.options, "passes": {}, "failed": {}}
    try:
        problem = build_problem(case, device)
    except Exception as error:
        return result | {"failed": {"inputs": explain(error)}}
    contestants = {"eager": problem.plain, "stretto": problem.ours}
    if problem.compiled:
        torch.compiler.reset()
        contestants["compile"] = torch.compile(problem.plain, fullgraph=True, dynamic=False)
    result |= {"unit": problem.unit, "passes": {kind: {"work": work} for kind, work in problem.work.items()}}
    for name, function in contestants.items():
        try:
            for kind, numbers in result["passes"].items():
                ms = time_pass(function, problem.args, kind == "both", device)
                rate = numbers["work"] / ms / 1e9
                numbers[name] = {"ms": ms, "rate": rate, "share": rate / ceilings[problem.unit]}
        except Exception as error:
            result["failed"][name] = explain(error)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for numbers in result["passes"].values():
        for peer in ("eager", "compile"):
            if "stretto" in numbers and peer in numbers:
                numbers["stretto"][f"over_{peer}"] = numbers[peer]["ms"] / numbers["stretto"]["ms"]
    return result


def fit_to_device(case: Case, device: torch.device) -> dict[str, int]:
    return case.sizes if device.type != "cpu" else {key: min(size, TINY[key]) for key, size in case.sizes.items()}


def build_problem(case: Case, device: torch.device) -> Problem:
    with torch.device(device):
        torch.manual_seed(0)
        return case.build(**fit_to_device(case, device), **case.options)


def time_pass(function: Callable[..., Any], args: tuple[Any, ...], backward: bool, device: torch.device) -> float:
    """Returns the median time in milliseconds."""
    gradients = [torch.randn_like(output) for output in call(function, args)] if backward else None
    for _ in range(WARM_UP):
        call(function, args, gradients)
    cover = torch.empty(COVER_BYTES // 4 if device.type == "cuda" else 0, device=device)
    clock = Clock(device)
    for _ in range(TIMED):
        for _ in range(COVERS):
            cover.zero_()
        clock.tick()
        call(function, args, gradients)
        clock.tick()
    return 1e3 * statistics.median(clock.read()[1::2])  # the times between are the cover's


def call(function: Callable[..., Any], args: tuple[Any, ...], gradients: list[Tensor] | None = None) -> list[Tensor]:
    """Returns the outputs or, given gradients of the outputs, the gradients of all tensors that need one."""
    out = function(*args)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    if gradients is None:
        return outputs
    inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return list(torch.autograd.grad(outputs, inputs, gradients))


def print_family(console: Console, family: str, results: Sequence[Result]) -> None:
    """Prints a table of 80 columns, and below it why contestants have no numbers."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for i, column in enumerate((family, "", *CONTESTANTS, "/eager", "/compile", "rate", "peak")):
        table.add_column(column, justify="right" if i > 1 else "left", no_wrap=True)
    for result in results:
        labels = [result["name"], "x".join(map(str, result["sizes"].values()))]
        passes = [*result["passes"].items(), ("", {}), ("", {})][:2]  # a line for each label
        for label, (kind, numbers) in zip(labels, passes, strict=True):
            ours = numbers.get("stretto", {})
            cells = [f"{numbers[name]['ms']:.3g}" if name in numbers else "" for name in CONTESTANTS]
            cells += [f"{ours[ratio]:.2f}" if ratio in ours else "" for ratio in ("over_eager", "over_compile")]
            if ours:
                cells += [f"{ours['rate']:.{2 if ours['rate'] < 10 else 0}f} {result['unit']}", f"{ours['share']:.0%}"]
            table.add_row(label, kind, *cells)
    say(console, "")
    console.print(table)
    for result in results:
        for name, reason in result["failed"].items():
            say(console, f"{result['name']}: {name}: failed: {reason}")


def main() -> None:
    try:
        app()
    except StrettoError as error:
        print(f"kernels: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
