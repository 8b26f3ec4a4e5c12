"""A run folder as one page: report.html holds headline numbers, four pictures, a sample, tables and the configuration.

The page stands alone: no scripts, nothing to load, readable offline and printed. Its pictures are SVG inside the HTML,
drawn in the page's own colours, so they follow it from light to dark. The same events give the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from stretto.report import EVENTS, read_events

PAGE = "report.html"
MOST_POINTS = 2000

Event = dict[str, Any]
Points = list[tuple[float, float]]

# Matplotlib wants real colours; in the page each becomes a CSS variable, which has a light and a dark value.
INK, RULE, PAPER, TRAIN, EVAL = "#59636e", "#d8dee4", "#fefefe", "#2a6fb0", "#c4560b"
VARIABLES = {INK: "--ink", RULE: "--rule", PAPER: "--paper", TRAIN: "--train", EVAL: "--eval"}

STYLE = {
    "svg.fonttype": "none", "font.size": 12, "axes.unicode_minus": True, "axes.formatter.useoffset": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.linewidth": 0.8,
    "xtick.major.width": 0.8, "xtick.major.size": 3, "ytick.major.size": 0,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.8, "axes.axisbelow": True,
}  # fmt: skip

TEMPLATE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --text: #1f2328; --ink: #59636e; --rule: #d8dee4; --paper: #ffffff;
  --panel: #f6f8fa; --train: #2a6fb0; --eval: #c4560b; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --ink: #9aa4af; --rule: #30373f; --paper: #14181d;
  --panel: #1c2127; --train: #6cb2f2; --eval: #f2a05e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; background: var(--paper); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.1rem; }
p { margin: .3rem 0 0; color: var(--ink); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1.25rem; margin: 1.75rem 0 0; }
dl div { border-top: 2px solid var(--rule); padding-top: .5rem; }
dt, dd small, figcaption span { color: var(--ink); font-size: .85rem; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; line-height: 1.35; font-variant-numeric: tabular-nums; }
dd small { display: block; font-weight: 400; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 2rem;
  margin-top: 2.5rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
figure svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.train, .eval { margin-left: .75rem; font-weight: 400; }
.train::before { content: "— "; color: var(--train); font-weight: 700; }
.eval::before { content: "● "; color: var(--eval); }
pre, .table { background: var(--panel); border-radius: 6px; overflow: auto; max-height: 32rem; }
pre { margin: 0; padding: 1rem; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
thead th { color: var(--ink); font-weight: 500; position: sticky; top: 0; background: var(--panel); }
tbody tr { border-top: 1px solid var(--rule); }
tbody th { font-weight: 500; color: var(--ink); white-space: nowrap; }
.numbers th, .numbers td { text-align: right; }
summary { cursor: pointer; font-size: 1.1rem; font-weight: 600; margin: 2.5rem 0 .75rem; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$state</p>
$headline
<div class="pictures">
$pictures
</div>
$sections
</body>
</html>
""")


def write_page(folder: Path, config_text: str, sample: str = "") -> Path:
    """Writes folder/report.html from its events, at any moment of a run, and says where it is."""
    events = [e for e in read_events(folder) if isinstance(e, dict)] if (folder / EVENTS).exists() else []
    page = TEMPLATE.substitute(
        title=escape(folder.resolve().name),
        state=_state(events),
        headline=_headline(events),
        pictures="\n".join(_pictures(events)),
        sections="\n".join(_sections(events, config_text, sample)),
    )
    path = folder / PAGE
    draft = folder / f".{PAGE}"
    draft.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return draft.replace(path)


def _number(event: Event, key: str) -> float:
    """The number under key; nan where there is none, or one beyond what can be drawn."""
    value = event.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100:
        return float(value)
    return math.nan


def _finite(events: Iterable[Event], key: str) -> list[float]:
    return [value for event in events if math.isfinite(value := _number(event, key))]


def _lines(events: Sequence[Event], evaluation: bool) -> list[Event]:
    """The lines of training steps, or of evaluations."""
    return [e for e in events if ("eval_loss" in e) == evaluation and math.isfinite(_number(e, "step"))]


def _finished(events: Sequence[Event]) -> Event:
    """The numbers of the last line, where the run has come to its end."""
    numbers = events[-1].get("finished") if events else None
    return numbers if isinstance(numbers, dict) else {}


def _wall_time(events: Sequence[Event]) -> float:
    """Seconds at work: the sum over starts, without the pauses between them."""
    spans: list[list[float]] = [[]]
    for event in events:
        if "environment" in event:
            spans.append([])
        spans[-1] += _finite([event], "time")
    return sum(max(span) - min(span) for span in spans if span) or _number(_finished(events), "seconds")


def _state(events: Sequence[Event]) -> str:
    if not _lines(events, evaluation=False):
        return "No training lines yet."
    starts = sum("environment" in event for event in events)
    return ("Finished" if "finished" in events[-1] else "Not finished") + (f", {starts} starts." if starts > 1 else ".")


def _headline(events: Sequence[Event]) -> str:
    """The row of numbers at the top; one that the run does not have is left out."""
    training, evaluations = _lines(events, evaluation=False), _lines(events, evaluation=True)
    tiles: list[tuple[str, str, str]] = []
    losses = [_number(event, "loss") for event in training if "loss" in event]
    if losses:
        odd = len(losses) - len(_finite(training, "loss"))
        note = f"first → last, {odd:,} not finite" if odd else "first → last"
        tiles.append(("Loss", f"{_show(losses[0])} → {_show(losses[-1])}", note))
    scored = [event for event in evaluations if math.isfinite(_number(event, "eval_loss"))]
    if scored:
        best = min(scored, key=lambda event: _number(event, "eval_loss"))
        tiles.append(("Best evaluation loss", _show(best["eval_loss"]), f"at step {_show(best['step'])}"))
    if speeds := _finite(training, "tokens_per_s"):
        tiles.append(("Tokens/s", f"{statistics.median(speeds):,.0f}", "median"))
    if used := [value for value in _finite(training, "mfu") if value]:
        tiles.append(("MFU", f"{statistics.median(used):.1%}", "median"))
    if memory := max(_finite(training, "memory_gib"), default=0.0):
        tiles.append(("Peak memory", f"{memory:.2f} GiB", ""))
    if steps := _finite(training + evaluations, "step"):
        tokens = max(_finite(training, "tokens"), default=0.0)
        tiles.append(("Steps", f"{max(steps):,.0f}", f"{_short(tokens)} tokens" if tokens else ""))
    if math.isfinite(seconds := _wall_time(events)):
        tiles.append(("Wall time", _duration(seconds), ""))
    cells = (f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in tiles)
    return f"<dl>{''.join(cells)}</dl>" if tiles else ""


def _show(value: Any) -> str:
    """A value for a reader: numbers to four places or four digits, anything else as its text, escaped."""
    if isinstance(value, float):
        return f"{value:,.4f}" if 0.01 <= abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else escape(str(value))


def _short(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {int(seconds) % 60} s"


def _thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: the first, the last, and the lowest and highest of even stretches, so no spike is lost."""
    if len(points) <= most:
        return points
    stretches, inner = (most - 2) // 2, points[1:-1]
    kept = points[:1]
    for k in range(stretches):
        part = inner[k * len(inner) // stretches : (k + 1) * len(inner) // stretches]
        known = [point for point in part if math.isfinite(point[1])] or part[:1]
        kept += sorted({min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])})
    return kept + points[-1:]


def _points(events: Iterable[Event], key: str) -> Points:
    return _thin([(_number(event, "step"), _number(event, key)) for event in events if key in event])


def _pictures(events: Sequence[Event]) -> list[str]:
    training, evaluations = _lines(events, evaluation=False), _lines(events, evaluation=True)
    end = max(_finite(training + evaluations, "step"), default=0.0)
    return [
        _picture("Loss", "loss", end, _points(training, "loss"), _points(evaluations, "eval_loss")),
        _picture("Learning rate", "learning rate", end, _points(training, "lr")),
        _picture("Speed", "tokens/s", end, _points(training, "tokens_per_s")),
        _picture("Memory", "GiB", end, _points(training, "memory_gib")),
    ]


def _picture(title: str, unit: str, end: float, train: Points, evaluation: Points | None = None) -> str:
    """One chart as a <figure>; all charts share their size, margins and range of steps."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    known = [y for _, y in train + (evaluation or []) if math.isfinite(y)]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(6.4, 3.2), facecolor="none")
        axes = figure.add_axes((0.14, 0.165, 0.845, 0.8), facecolor="none", xlabel="step", ylabel=unit)
        axes.plot(*_columns(train), color=TRAIN, linewidth=1.5, marker="o" if len(train) < 20 else "", markersize=4)
        if evaluation:
            axes.plot(*_columns(evaluation), color=EVAL, linewidth=0.8, marker="o", markersize=6, markeredgecolor=PAPER)
        axes.set_xlim(0, max(end, 1) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(x)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _short(y)))
        if not known:
            axes.text(0.5, 0.5, "no numbers yet", transform=axes.transAxes, ha="center", va="center")
            axes.set_yticks([])
        elif evaluation is None:
            axes.set_ylim(0, max(max(known) * 1.08, 1e-9))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    legend = ' <span class="train">training</span> <span class="eval">evaluation</span>' if evaluation else ""
    return f"<figure><figcaption>{title}{legend}</figcaption>\n{_inline(file.getvalue(), title)}</figure>"


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _inline(svg: str, title: str) -> str:
    """An SVG file as a part of the page: its colours and fonts are the page's, and its ids do not clash."""
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg.*?(viewBox=".*?").*?>', rf'<svg \1 role="img" aria-label="{title} over steps">', svg, count=1)
    svg = re.sub(r'(?<=<g) id=".*?"|font-family: [^;"]*; |xlink:(?=href)', "", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def _sections(events: Sequence[Event], config_text: str, sample: str) -> list[str]:
    evaluations = _lines(events, evaluation=True)
    environments = [e["environment"] for e in events if isinstance(e.get("environment"), dict)]
    parts = []
    if sample:
        parts.append(f'<h2>What the model writes</h2>\n<pre class="sample">\n{escape(sample)}</pre>')
    if evaluations:
        keys = list(dict.fromkeys(["step", *(key for e in evaluations for key in e if key != "time")]))
        rows = [[e.get(key, "") for key in keys] for e in evaluations]
        parts.append("<h2>Evaluations</h2>\n" + _table([key.replace("_", " ") for key in keys], rows, "numbers"))
    if finished := _finished(events):
        parts.append("<h2>At the end</h2>\n" + _table([], [list(pair) for pair in finished.items()]))
    parts.append(f"<details><summary>Configuration</summary>\n<pre>\n{escape(config_text)}</pre></details>")
    if environments:
        keys = list(dict.fromkeys(key for environment in environments for key in environment))
        rows = [[key, *(environment.get(key, "") for environment in environments)] for key in keys]
        head = ["", *(f"start {k + 1}" for k in range(len(environments)))] if len(environments) > 1 else []
        parts.append("<h2>Environment</h2>\n" + _table(head, rows))
    return parts


def _table(head: list[str], rows: list[list[Any]], kind: str = "facts") -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join(
        f"<tr><th>{_show(first)}</th>{''.join(f'<td>{_show(value)}</td>' for value in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="table"><table class="{kind}">\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
