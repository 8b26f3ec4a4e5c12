"""The charts of a report: which there are, their curves as SVG, to be read and printed without JavaScript, and the same
points as JSON, from which page.js draws them anew.

Colours are classes, `s0` to `s7`, to which page.css gives a light and a dark value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from stretto.report.history import History, Place, Point, short, thin

COLOURS = 8
WIDE, NARROW = 950, 300  # pixels, before page.js fits charts to the screen
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 8, 24
FEW, MOST = 20, 600  # points of a picture: so few are marked one by one, and more cannot be told apart
MOST_POINTS, ALL_POINTS = 2000, 20_000  # of a curve and of a page, for page.js: a page stays far below 2 MB


@dataclass(frozen=True)
class Chart:
    title: str
    key: str
    second: str = ""  # of evaluations, in the same picture
    from_zero: bool = True  # else the range is that of the values, and a log scale is possible
    noisy: bool = False  # worth smoothing
    wide: bool = False
    factor: float = 1.0  # from the unit of events to that of the title


@dataclass(frozen=True)
class Series:
    name: str
    run: int
    colour: int
    points: list[Point]
    dots: bool = False  # an evaluation


Drawn = tuple[Chart, list[Series]]

CHARTS = (
    Chart("Loss", "loss", "eval_loss", from_zero=False, noisy=True, wide=True),
    Chart("Gradient norm", "grad_norm", from_zero=False, noisy=True),
    Chart("Learning rate", "lr"),
    Chart("Throughput, tokens/s", "tokens_per_s", noisy=True),
    Chart("MFU, %", "mfu", noisy=True, factor=100.0),
    Chart("Memory, GiB", "memory_gib"),
)


def choose_charts(runs: Sequence[History]) -> list[Drawn]:
    """Returns the loss, and every other chart for which there are numbers, with its curves."""
    scores = dict.fromkeys(name for run in runs for name in run.scores)
    extra = [Chart(name.replace("_", " ").capitalize(), "", name, from_zero=False) for name in list(scores)[:3]]
    charts = [(chart, _find_series(chart, runs)) for chart in (*CHARTS[:2], *extra, *CHARTS[2:])]
    return [(chart, series) for chart, series in charts if chart.wide or _has_numbers(series)]


def _has_numbers(series: Sequence[Series]) -> bool:
    return any(math.isfinite(point[3]) and point[3] for one in series for point in one.points)


def _find_series(chart: Chart, runs: Sequence[History]) -> list[Series]:
    """Returns the curves of all runs. A run alone has a colour for training and one for evaluations."""
    found = []
    for k, run in enumerate(runs):
        for key, dots, kind in ((chart.key, False, "training"), (chart.second, True, "evaluation")):
            points = [(*point[:3], point[3] * chart.factor) for point in run.curve(key, dots)] if key else []
            alone = kind if chart.key == "loss" else ""
            name = alone if len(runs) == 1 else f"{run.name}, {kind}" if dots else run.name
            if points:
                found.append(Series(name, k, int(dots) if len(runs) == 1 else k % COLOURS, points, dots))
    return found


def _find_pauses(runs: Sequence[History]) -> list[tuple[int, str, Place]]:
    """Returns where runs went on after a pause: number of the run, class of the mark, place."""
    kinds = [f"resumed s{k % COLOURS}" if len(runs) > 1 else "resumed" for k in range(len(runs))]
    return [(k, kinds[k], place) for k, run in enumerate(runs) for place in run.resumed]


def draw_figure(chart: Chart, series: Sequence[Series], runs: Sequence[History]) -> str:
    pauses, keys = [(kind, place) for _, kind, place in _find_pauses(runs)], []
    if chart.wide and any(one.dots for one in series):
        keys += [("fit", "evaluations")] if len(runs) > 1 else [("train", "training"), ("eval", "evaluation")]
    if chart.wide and pauses:
        keys += [("pause", "resumed")]
    caption = escape(chart.title) + "".join(f' <small class="{kind}">{name}</small>' for kind, name in keys)
    picture = draw(series, pauses, chart.from_zero, WIDE if chart.wide else NARROW)
    kind = "wide" if chart.wide else "narrow"
    return f'<figure class="{kind}" tabindex="0"><figcaption>{caption}</figcaption>\n{picture}</figure>'


def dump_charts(charts: Sequence[Drawn], runs: Sequence[History]) -> str:
    """Returns what page.js draws, as JSON that no parser of HTML can take for markup."""
    most = min(MOST_POINTS, max(ALL_POINTS // max(sum(len(series) for _, series in charts), 1), 20))
    pictures = [
        {"zero": chart.from_zero, "noisy": chart.noisy, "series": [_dump_series(one, most) for one in series]}
        for chart, series in charts
    ]
    pauses = [[k, kind, *map(_round, place)] for k, kind, place in _find_pauses(runs)]
    values = {"charts": pictures, "resumed": pauses}
    return json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _dump_series(series: Series, most: int) -> dict[str, object]:
    points = [[_round(value) for value in point] for point in thin(series.points, most)]
    return {"name": series.name, "run": series.run, "colour": series.colour, "dots": series.dots, "points": points}


def _round(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")


def draw(series: Sequence[Series], resumed: Iterable[tuple[str, Place]], from_zero: bool, width: int) -> str:
    """Draws curves over steps, and where runs were resumed, with the class of that mark."""
    height, most = max(200, round(0.36 * width)), max(50, MOST // max(len(series), 1))
    known = [point for one in series for point in one.points if math.isfinite(point[3])]
    if not known:
        return _svg(width, height, [f'<text class="none" x="{width // 2}" y="{height // 2}">no numbers yet</text>'])
    low, high = _range([point[3] for point in known], from_zero)
    end = max(max(point[0] for point in known), 1.0) * 1.01

    def x(step: float) -> float:
        return LEFT + (width - LEFT - RIGHT) * step / end

    def y(value: float) -> float:
        return height - BOTTOM - (height - TOP - BOTTOM) * (value - low) / (high - low)

    parts = []
    for tick in find_ticks(low, high):
        parts.append(f'<path class="rule" d="M{LEFT} {y(tick):.1f}H{width - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{y(tick) + 4:.1f}">{short(tick)}</text>')
    ticks = [tick for tick in find_ticks(0, end, min(8, width // 70)) if tick % 1 == 0 and x(tick) < width - 70]
    parts += [f'<text x="{x(tick):.1f}" y="{height - 6}">{short(tick)}</text>' for tick in ticks]
    parts.append(f'<text class="x" x="{width - RIGHT}" y="{height - 6}">step</text>')
    parts += [f'<path class="{kind}" d="M{x(place[0]):.1f} {TOP}V{height - BOTTOM}"/>' for kind, place in resumed]
    for one in series:
        points = thin(one.points, most)
        places = [(x(p[0]), y(p[3])) if math.isfinite(p[3]) else None for p in points]
        kind = " thin" * one.dots + " dash" * (one.run >= COLOURS)
        parts.append(f'<path class="line s{one.colour}{kind}" d="{_path(places)}"/>')
        if one.dots or len(points) < FEW:
            parts += [f'<circle class="s{one.colour}" cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="3"/>' for p in places if p]
    return _svg(width, height, parts)


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{"".join(parts)}</svg>'


def _range(values: list[float], from_zero: bool) -> tuple[float, float]:
    """Returns the ends of the axis, with some air; two different numbers also where all values are the same."""
    low, high = min(values), max(values)
    low, high = (min(low, 0.0), max(high, 0.0)) if from_zero else (low, high)
    air = 0.06 * (high - low) or abs(high) or 1.0
    return (low if from_zero and low == 0 else low - air), high + air


def find_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round numbers in a range: multiples of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * k for k in (1, 2, 5, 10) if (high - low) / (size * k) <= most)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _path(places: Iterable[tuple[float, float] | None]) -> str:
    """Returns the commands of a path, which is broken where there is no number."""
    commands, pen = [], "M"
    for place in places:
        if place is not None:
            commands.append(f"{pen}{place[0]:.1f} {place[1]:.1f}")
        pen = "M" if place is None else "L"
    return "".join(commands)
