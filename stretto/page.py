"""A run folder as one page: report.html holds headline numbers, four pictures, a sample, tables and the configuration.

The page stands alone: no scripts, nothing to load, readable offline and printed. Its pictures are SVG inside the HTML,
drawn in the page's own colours, so they follow it from light to dark. The same events give the same bytes.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import torch

from stretto.config import dump_config
from stretto.files import write_text
from stretto.generate import sample
from stretto.model import Decoder
from stretto.report import read_events
from stretto.runtime import tell
from stretto.trained import load_run_config, load_trained

PAGE = "report.html"
MOST_POINTS = 2000

Event = dict[str, Any]
Curve = tuple[list[float], list[float]]

# Matplotlib wants real colours; in the page each becomes a CSS variable, which has a light and a dark value.
INK, RULE, PAPER, TRAIN, EVAL = "#59636e", "#d8dee4", "#fefefe", "#2a6fb0", "#c4560b"
VARIABLES = {INK: "--ink", RULE: "--rule", PAPER: "--paper", TRAIN: "--train", EVAL: "--eval"}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 12, "savefig.bbox": None, "savefig.facecolor": "none", "text.usetex": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.linewidth": 0.8,
    "xtick.major.width": 0.8, "xtick.major.size": 3, "ytick.major.size": 0,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.8, "axes.axisbelow": True,
}  # fmt: skip

TEMPLATE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --text: #1f2328; --ink: #59636e; --rule: #d8dee4; --paper: #ffffff;
  --panel: #f6f8fa; --train: #2a6fb0; --eval: #c4560b; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --ink: #9aa4af; --rule: #30373f; --paper: #14181d;
  --panel: #1c2127; --train: #6cb2f2; --eval: #f2a05e; } }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 60rem; background: var(--paper); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2, summary { margin: 2.5rem 0 .75rem; font-size: 1.1rem; font-weight: 600; }
p, dt, small, span, th { color: var(--ink); font-size: .9rem; font-weight: 400; margin: 0; }
dl, .pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: 1.25rem;
  margin: 2rem 0; }
dl div { border-top: 2px solid var(--rule); padding-top: .3rem; } dl small { display: block; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; line-height: 1.35; white-space: nowrap; }
.pictures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { display: block; width: 100%; stroke-linejoin: round; }
.train::before { content: "— "; color: var(--train); font-weight: 700; margin-left: .75rem; }
.eval::before { content: "● "; color: var(--eval); margin-left: .75rem; }
pre, .table { background: var(--panel); border-radius: 6px; overflow: auto; max-height: 32rem; margin: 0; }
pre { padding: 1rem; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
thead th { position: sticky; top: 0; background: var(--panel); }
tr + tr, thead + tbody { border-top: 1px solid var(--rule); }
.facts th:first-child { width: 1%; white-space: nowrap; } .numbers th, .numbers td { text-align: right; }
</style></head>
<body>
<h1>$title</h1>
$headline
<div class="pictures">$pictures</div>
$sections
</body></html>
""")


def write_report(folder: Path, device: torch.device) -> Path:
    """Writes the page of a trained run, with a sample from the model where it is one that generates text."""
    config = load_run_config(folder)
    if config.checkpoint.keep == 0 or config.model.own:  # there is no model, or none that this could build
        return write_page(folder, dump_config(config))
    trained = load_trained(folder, device)
    writes = isinstance(trained.model, Decoder) and trained.tokenizer is not None
    text = sample(trained, trained.config.train.sample) if writes else ""
    return write_page(folder, dump_config(trained.config), text)


def write_page(folder: Path, config_text: str, sample: str = "") -> Path:
    """Writes folder/report.html from its events, at any moment of a run, and says where it is."""
    try:
        events = read_events(folder)
    except OSError as error:
        tell(f"warning: the report has no curves, since the events cannot be read: {error}")
        events = []
    lines = [event for event in events if math.isfinite(_number(event, "step"))]
    training, evaluations = ([e for e in lines if ("eval_loss" in e) == kind] for kind in (False, True))
    page = TEMPLATE.substitute(
        title=escape(folder.resolve().name),
        headline=_headline(events, training, evaluations),
        pictures="\n".join(_pictures(training, evaluations)),
        sections="\n".join(_sections(events, evaluations, config_text, sample)),
    )
    write_text(folder / PAGE, page)
    return folder / PAGE


def _number(event: Event, key: str) -> float:
    """Returns the number under key; nan where there is none, or where it is too large to be drawn."""
    value = event.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100:
        return float(value)
    return math.nan


def _finite(events: Iterable[Event], key: str) -> list[float]:
    return [value for event in events if math.isfinite(value := _number(event, key))]


def _wall_time(events: Sequence[Event]) -> float:
    """Returns the seconds at work: the sum over starts, without the pauses between them."""
    spans: list[list[float]] = [[]]
    for event in events:
        if "environment" in event:
            spans.append([])
        spans[-1] += _finite([event], "time")
    return sum(max(span) - min(span) for span in spans if span)


def _headline(events: Sequence[Event], training: list[Event], evaluations: list[Event]) -> str:
    """Makes the row of numbers at the top, without numbers that the run does not have."""
    tiles: list[tuple[str, str, str]] = []
    if losses := [_number(event, "loss") for event in training if "loss" in event]:
        odd = len(losses) - len(_finite(training, "loss"))
        note = f"first → last, {odd:,} not finite" if odd else "first → last"
        tiles.append(("Loss", f"{_show(losses[0])} → {_show(losses[-1])}", note))
    if scored := [(_number(e, "eval_loss"), e["step"]) for e in evaluations if _finite([e], "eval_loss")]:
        counts = [_show(evaluations[-1][key]) for key in ("batches", "all_batches") if key in evaluations[-1]]
        over = f", {' of '.join(counts)} batches" if counts else ""
        tiles.append(("Best evaluation loss", _show(min(scored)[0]), f"at step {_show(min(scored)[1])}{over}"))
    if speeds := _finite(training, "tokens_per_s"):
        tiles.append(("Tokens/s", f"{statistics.median(speeds):,.0f}", "median"))
    if used := [value for value in _finite(training, "mfu") if value]:
        tiles.append(("MFU", f"{statistics.median(used):.1%}", "median"))
    if memory := max(_finite(training, "memory_gib"), default=0.0):
        tiles.append(("Peak memory", f"{memory:.2f} GiB", ""))
    if steps := _finite(training + evaluations, "step"):
        tokens = max(_finite(training, "tokens"), default=0.0)
        tiles.append(("Steps", f"{max(steps):,.0f}", f"{_short(tokens)} tokens" if tokens else ""))
    if seconds := _wall_time(events):
        tiles.append(("Wall time", str(timedelta(seconds=math.ceil(seconds))), ""))
    cells = (f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in tiles)
    return f"<dl>{''.join(cells)}</dl>" if tiles else "<p>No training lines yet.</p>"


def _show(value: Any) -> str:
    """Writes a value for a reader, escaped: numbers to about four digits, anything else as its text."""
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.4f}" if 0.01 <= size < 100 else f"{value:,.1f}" if 100 <= size < 1e7 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else escape(str(value))


def _short(value: float) -> str:
    """Writes a number for an axis: 25k, 1.5M, 0.25, 3e-4."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}" if 0.01 <= abs(value) < 1e3 or not value else re.sub(r"\.?0*e([+-])0?", r"e\1", f"{value:.2e}")


def _curve(lines: Sequence[Event], key: str, most: int = MOST_POINTS) -> Curve:
    """Returns steps and values of at most `most` points: the ends, and the extremes of even stretches between them."""
    points = [(_number(line, "step"), _number(line, key)) for line in lines if key in line]
    if len(points) > most:
        stretches, inner = (most - 2) // 2, points[1:-1]
        cuts = [k * len(inner) // stretches for k in range(stretches + 1)]
        kept = points[:1]
        for start, end in itertools.pairwise(cuts):
            known = [(y, x) for x, y in inner[start:end] if math.isfinite(y)] or [inner[start][::-1]]
            kept += sorted({min(known)[::-1], max(known)[::-1]})
        points = kept + points[-1:]
    return [x for x, _ in points], [y for _, y in points]


def _pictures(training: list[Event], evaluations: list[Event]) -> list[str]:
    end = max(_finite(training + evaluations, "step"), default=1.0)
    return [
        _picture("Loss", "loss", end, _curve(training, "loss"), _curve(evaluations, "eval_loss")),
        _picture("Learning rate", "learning rate", end, _curve(training, "lr")),
        _picture("Speed", "tokens/s", end, _curve(training, "tokens_per_s")),
        _picture("Memory", "GiB", end, _curve(training, "memory_gib")),
    ]


def _picture(title: str, unit: str, end: float, train: Curve, evaluation: Curve = ([], [])) -> str:
    """Draws a chart as a <figure>. All charts have one size and range of steps; all but the loss start at 0."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    known = [y for y in train[1] + evaluation[1] if math.isfinite(y)]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(6.4, 3.2))
        axes = figure.add_axes((0.135, 0.165, 0.85, 0.8), facecolor="none", xlabel="step", ylabel=unit)
        axes.plot(*train, color=TRAIN, linewidth=1.5, marker="o" if len(train[0]) < 20 else "", markersize=4)
        axes.plot(*evaluation, color=EVAL, linewidth=0.8, marker="o", markeredgecolor=PAPER)
        axes.set_xlim(0, max(end, 1) * 1.02)
        axes.yaxis.set_label_coords(-0.125, 0.5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=axis is axes.xaxis))
            axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        if not known:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "no numbers yet", transform=axes.transAxes, ha="center")
        elif title != "Loss":
            axes.set_ylim(0, max(known) * 1.08 or 1)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    legend = ' <span class="train">training</span> <span class="eval">evaluation</span>' if evaluation[0] else ""
    return f"<figure><figcaption>{title}{legend}</figcaption>\n{_inline(file.getvalue(), title)}</figure>"


def _inline(svg: str, title: str) -> str:
    """Makes an SVG file a part of the page: with the page's colours and fonts, and ids that do not clash."""
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg.*?(viewBox=".*?").*?>', rf'<svg \1 role="img" aria-label="{title} over steps">', svg, count=1)
    svg = re.sub(r'(?<=<g) id=".*?"|font-family: [^;"]*; |xlink:(?=href)', "", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def _sections(events: Sequence[Event], evaluations: list[Event], config_text: str, sample: str) -> list[str]:
    environments = [e["environment"] for e in events if isinstance(e.get("environment"), dict)]
    parts = [f"<h2>What the model writes</h2>\n<pre>\n{escape(sample)}</pre>"] if sample else []
    if evaluations:
        keys = list(dict.fromkeys(["step", *(key for e in evaluations for key in e if key != "time")]))
        rows = [[e.get(key, "") for key in keys] for e in evaluations]
        parts.append("<h2>Evaluations</h2>\n" + _table([key.replace("_", " ") for key in keys], rows, "numbers"))
    memory: dict[str, Any] = next((e["memory"] for e in reversed(events) if isinstance(e.get("memory"), dict)), {})
    if columns := [(name, values) for name, values in memory.items() if values and isinstance(values, dict)]:
        keys = list(dict.fromkeys(key for _, values in columns for key in values))
        rows = [[key, *(values.get(key, "") for _, values in columns)] for key in keys]
        parts.append("<h2>Memory</h2>\n" + _table(["bytes", *(name for name, _ in columns)], rows, "numbers"))
    finished = events[-1].get("finished") if events else None
    if finished and isinstance(finished, dict):
        parts.append("<h2>At the end</h2>\n" + _table([], [list(pair) for pair in finished.items()]))
    parts.append(f"<details><summary>Configuration</summary>\n<pre>\n{escape(config_text)}</pre></details>")
    if environments:
        keys = list(dict.fromkeys(key for environment in environments for key in environment))
        rows = [[key, *(environment.get(key, "") for environment in environments)] for key in keys]
        head = ["", *(f"start {k + 1}" for k in range(len(environments)))] if len(environments) > 1 else []
        parts.append("<h2>Environment</h2>\n" + _table(head, rows))
    return parts


def _table(head: list[str], rows: list[list[Any]], kind: str = "facts") -> str:
    top = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr></thead>\n" if head else ""
    cells = ((_show(first), "".join(f"<td>{_show(value)}</td>" for value in rest)) for first, *rest in rows)
    body = "\n".join(f"<tr><th>{first}</th>{rest}</tr>" for first, rest in cells)
    return f'<div class="table"><table class="{kind}">\n{top}<tbody>\n{body}\n</tbody></table></div>'
