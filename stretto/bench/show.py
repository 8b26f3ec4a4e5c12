"""The results: a table per workload, ratios to the best peer of the same run, and a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stretto.page import EVAL, INK, STYLE, TRAIN

Result = Mapping[str, Any]  # numbers, or {"failed": reason}, or {"skipped": reason}
Results = dict[str, dict[str, Result]]  # workload -> contestant -> result
BREAKDOWN = {"gemm": "GEMM", "attention": "attn", "optimizer": "optim", "rest": "rest", "idle": "idle"}
CAPTION = "ratio: to the best peer; GEMM to idle: ms a step; floor: its share of the step"


def with_ratios(results: Mapping[str, Result]) -> dict[str, Result]:
    """Adds to the results of one workload each speed over that of the best peer."""
    speeds = {name: result["tokens_per_s"] for name, result in results.items() if "tokens_per_s" in result}
    best = max((speed for name, speed in speeds.items() if is_peer(name)), default=None)
    ratios = {} if best is None else {name: {"ratio_to_best_peer": speed / best} for name, speed in speeds.items()}
    return {name: {**result, **ratios.get(name, {})} for name, result in results.items()}


def is_peer(name: str) -> bool:
    return name.startswith("hf ")


def describe_result(result: Result) -> str:
    if "tokens_per_s" in result:
        return f"{result['tokens_per_s']:,.0f} tokens/s, {result['memory_gib']:.1f} GiB"
    return next(f"{kind}: {reason}" for kind, reason in result.items())


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def print_table(console: Console, workload: str, results: Mapping[str, Result]) -> None:
    """Prints a table that fits 80 columns. A contestant without numbers has its reason below the table."""
    finished = {name: result for name, result in with_ratios(results).items() if "tokens_per_s" in result}
    if finished:
        say(console, f"\n{workload} ({CAPTION})")
        table = Table("", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("tokens/s", "MFU", "GiB", "ratio", *BREAKDOWN.values(), "floor"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, result in finished.items():
            times = result.get("breakdown_ms", {})
            table.add_row(
                name,
                f"{result['tokens_per_s']:,.0f}",
                _show(result["mfu"], ".3f"),
                _show(result["memory_gib"], ".1f"),
                _show(result.get("ratio_to_best_peer"), ".2f"),
                *(_show(ms, ".1f" if ms and ms >= 10 else ".2f") for ms in map(times.get, BREAKDOWN)),
                _show(result["floor_share"], ".2f"),
            )
        console.print(table)
    for name, result in results.items():
        if name not in finished:
            say(console, f"{name}: {describe_result(result)}")


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def draw_chart(path: Path, results: Results, notes: Sequence[str]) -> None:
    """Draws a panel per workload: a bar per contestant, with its speed or the reason why it has none."""
    import matplotlib
    from matplotlib.figure import Figure

    bars = [len(some) for some in results.values()]
    style = STYLE | {"savefig.facecolor": "white", "axes.grid": False, "axes.spines.bottom": False, "font.size": 10}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 0.5 + sum(0.28 * count + 0.6 for count in bars)), layout="constrained")
        figure.suptitle("\n".join(note for note in notes if note), x=0.01, ha="left", fontsize=9)
        panels = figure.subplots(len(bars), squeeze=False, height_ratios=[count + 1 for count in bars])[:, 0]
        for axes, (workload, some) in zip(panels, results.items(), strict=True):
            speeds = [result.get("tokens_per_s", 0.0) for result in some.values()]
            colours = [INK if is_peer(name) else TRAIN if name == "stretto" else EVAL for name in some]
            drawn = axes.barh(list(some), speeds, color=colours)
            axes.bar_label(drawn, [describe_result(result) for result in some.values()], padding=4)
            axes.set_xlim(0, max([*speeds, 1e-9]) * 1.5)
            axes.set_xticks([])
            axes.invert_yaxis()
            axes.set_title(workload, loc="left", fontsize=10, fontweight="bold")
        figure.savefig(path, dpi=150)
