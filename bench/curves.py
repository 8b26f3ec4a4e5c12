"""Curves of loss against time and FLOPs: read from the events of runs, compared, and shown as tables and a chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.report.style import STYLE

AROUND = 31  # log lines whose median is the speed at one of them

# Columns of the tables: key, title, format.
EQUAL_DATA = {
    "layers": ("layers", ".0f"),
    "loss": ("loss at the end", ".4f"),
    "seconds": ("s in steps", ".1f"),
    "recording_s": ("s recording graphs", ".1f"),
    "wall_s": ("s in all", ".1f"),
    "flops": ("FLOPs", ".3e"),
}
EQUAL_COST = {
    "seconds_loss": ("loss after {seconds_end:.1f} s", ".4f"),
    "seconds_gap": ("difference from plain", "+.4f"),
    "seconds_to": ("s to loss {worst:.3f}", ".1f"),
    "seconds_ratio": ("ratio to plain", ".3f"),
    "flops_loss": ("loss after {flops_end:.3e} FLOPs", ".4f"),
    "flops_gap": ("difference from plain", "+.4f"),
    "flops_to": ("FLOPs to loss {worst:.3f}", ".3e"),
    "flops_ratio": ("ratio to plain", ".3f"),
}
ENDS = ("worst", "seconds_end", "flops_end")

Floats = npt.NDArray[np.float64]
Curve = Mapping[str, Sequence[float]]  # step, seconds, flops and loss at each evaluation
Result = dict[str, Any]  # of a run
Row = dict[str, Any]  # of the tables, for one seed


def read_curve(events: Sequence[Mapping[str, Any]]) -> Result:
    """Seconds, FLOPs and held-out loss at each evaluation."""
    logs = [event for event in events if "tokens_per_s" in event]
    evaluations = [event for event in events if "eval_loss" in event]
    (finished,) = (event["finished"] for event in events if "finished" in event)
    speeds = np.array([event["flops_per_s"] for event in logs])
    times = np.diff([event["tokens"] for event in logs], prepend=0) / [event["tokens_per_s"] for event in logs]
    flops = speeds * times
    steps, at = [0, *(event["step"] for event in logs)], [event["step"] for event in evaluations]

    def until_then(amounts: Floats) -> list[float]:
        return np.interp(at, steps, np.cumsum([0.0, *amounts])).tolist()

    return {
        "recording_s": finished["recording_s"],
        "loop_s": finished["seconds"],  # with what compiling and other accidents took
        "curve": {
            "step": at,
            "seconds": until_then(flops / median_around(speeds)),
            "flops": until_then(flops),
            "loss": [event["eval_loss"] for event in evaluations],
        },
    }


def median_around(values: Floats) -> Floats:
    """Returns for each value the median of the AROUND values nearest to it."""
    size = min(AROUND, len(values))
    begins = np.clip(np.arange(len(values)) - size // 2, 0, len(values) - size)
    return np.median(np.lib.stride_tricks.sliding_window_view(values, size)[begins], axis=1)


def compare(results: Mapping[str, Result]) -> dict[str, Row]:
    """Compares the variants of one seed at equal time and equal FLOPs, those of the variant that is first through all
    the data, and at equal loss, that with which the worst variant ends."""
    curves = {variant: result["curve"] for variant, result in results.items()}
    rows: dict[str, Row] = {
        variant: {key: result[key] for key in ("layers", "recording_s", "wall_s")}
        | {"loss": curves[variant]["loss"][-1]}
        for variant, result in results.items()
    }
    worst = max(row["loss"] for row in rows.values())
    for axis in ("seconds", "flops"):
        end = min(curve[axis][-1] for curve in curves.values())
        plain_loss, plain_cost = loss_at(curves["plain"], axis, end), reach(curves["plain"], axis, worst)
        for variant, curve in curves.items():
            loss, cost = loss_at(curve, axis, end), reach(curve, axis, worst)
            rows[variant] |= {
                axis: curve[axis][-1],
                f"{axis}_end": end,
                f"{axis}_loss": loss,
                f"{axis}_gap": loss - plain_loss,
                f"{axis}_to": cost,
                f"{axis}_ratio": cost / plain_cost,
                "worst": worst,
            }
    return rows


def loss_at(curve: Curve, axis: str, x: float) -> float:
    """Returns the loss at x, in a straight line between two evaluations; nan before the first and after the last."""
    return float(np.interp(x, curve[axis], curve["loss"], left=math.nan, right=math.nan))


def reach(curve: Curve, axis: str, loss: float) -> float:
    """Returns where the curve first reaches the loss, in a straight line between two evaluations; infinite: nowhere."""
    xs, losses = curve[axis], curve["loss"]
    first = next((i for i, value in enumerate(losses) if value <= loss), None)
    if first is None:
        return math.inf
    if first == 0:  # or before: nobody looked
        return xs[0]
    share = (losses[first - 1] - loss) / (losses[first - 1] - losses[first])
    return xs[first - 1] + share * (xs[first] - xs[first - 1])


def make_tables(comparisons: Sequence[Mapping[str, Row]]) -> list[str]:
    """Lines of markdown: what `compare` found for each seed; means, with the standard deviation between seeds."""
    ends = {key: statistics.fmean(rows["plain"][key] for rows in comparisons) for key in ENDS}
    return [*_table(comparisons, EQUAL_DATA, ends), "", *_table(comparisons, EQUAL_COST, ends)]


def _table(comparisons: Sequence[Mapping[str, Row]], columns: Mapping[str, tuple[str, str]], ends: Row) -> list[str]:
    variants = dict.fromkeys(variant for rows in comparisons for variant in rows)
    titles = [title.format(**ends) for title, _ in columns.values()]
    lines = [f"| | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for variant in variants:
        rows = [comparison[variant] for comparison in comparisons if variant in comparison]
        cells = [show([row[key] for row in rows], form) for key, (_, form) in columns.items()]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def show(values: Sequence[float], form: str) -> str:
    if not all(map(math.isfinite, values)):
        return "-"
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(set(values)) == 1 else f"{mean} ± {statistics.stdev(values):{form.removeprefix('+')}}"


def draw_curves(path: Path, curves: Mapping[str, Mapping[str, Sequence[Curve]]]) -> None:
    """A row for each recipe: held-out loss of each variant against seconds and FLOPs; thick: the mean over seeds."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"savefig.facecolor": "white", "font.size": 10}):
        figure = Figure(figsize=(11, 4 * len(curves)), layout="constrained")
        panels = figure.subplots(len(curves), 2, squeeze=False)
        for row, (recipe, variants) in zip(panels, curves.items(), strict=True):
            for axes, axis, label in zip(row, ("seconds", "flops"), ("seconds in steps", "FLOPs"), strict=True):
                _draw(axes, variants, axis)
                axes.set_title(f"{recipe}: held-out loss", loc="left", fontsize=10)
                axes.set_xlabel(label)
        figure.savefig(path, dpi=150)


def _draw(axes: Any, variants: Mapping[str, Sequence[Curve]], axis: str) -> None:
    late = []  # losses after the first fifth, where the differences are: the beginning would take all the height
    for number, (variant, curves) in enumerate(variants.items()):
        if not curves:
            continue
        xs, losses = np.array([curve[axis] for curve in curves]), np.array([curve["loss"] for curve in curves])
        colour = f"C{number}"
        axes.plot(xs.T, losses.T, color=colour, linewidth=0.6, alpha=0.5)
        axes.plot(xs.mean(0), losses.mean(0), color=colour, linewidth=1.8, label=variant)
        late += [losses[:, losses.shape[1] // 5 :].min(), losses[:, losses.shape[1] // 5].max()]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 1.0
        axes.set_ylim(min(late) - margin, max(late) + margin)
        axes.legend(frameon=False)
