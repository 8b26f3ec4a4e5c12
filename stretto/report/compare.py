"""Several runs on one page: their curves in the same charts, their results, and what differs between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

from stretto.config import Config
from stretto.report.chart import COLOURS
from stretto.report.history import History, clock, finite, reach, short, show
from stretto.report.page import account_bytes, fill_page, make_section, make_table, read_run, show_date
from stretto.trained import load_run_config

COMPARISON = "comparison.html"
OWN = ("run.dir", "time", "command")  # what is different in any case
Choose = Callable[[list[float]], float]  # min or max
# A name, the value of each run, how it is written, and which one is the best.
Column = tuple[str, list[float], Callable[[float], str], Choose | None]


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    configs, runs = [load_run_config(folder) for folder in folders], [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    starts = [start for run in runs for start in run.starts]
    devices = dict.fromkeys(str(start.get("device", "")) for start in starts)
    columns = _columns(runs)
    marks = (f'<i class="s{k % COLOURS}">■</i>{escape(run.name)}' for k, run in enumerate(runs))
    results = make_table(["", *columns], list(zip(marks, *columns.values(), strict=True)))
    return fill_page(
        out, runs,
        title=f"{len(runs)} runs",
        brief=[*devices, show_date(min(finite(starts, "time"), default=math.nan))],
        headline=f'<div class="results">{results}</div>\n{_legend(runs)}',
        sections=_compare(runs, configs),
    )  # fmt: skip


def _legend(runs: Sequence[History]) -> str:
    boxes = (
        f'<label class="s{k % COLOURS}"><input type="checkbox" value="{k}" checked> <span>{escape(run.name)}</span>'
        for k, run in enumerate(runs)
    )
    return f'<div class="legend">{"".join(box + "</label>" for box in boxes)}</div>'


def _columns(runs: Sequence[History]) -> dict[str, list[str]]:
    """Returns the cells of the table of results, by column; the best of a column is bold."""

    def each(choose: Choose, key: str) -> list[float]:
        return [choose([value for value in finite(run.training, key) if value] or [math.nan]) for run in runs]

    def lowest(key: str) -> list[float]:
        return [best[3] if (best := run.best(key)) else math.nan for run in runs]

    key = "eval_loss" if all(run.best("eval_loss") for run in runs) else "loss"
    target = max(filter(math.isfinite, lowest(key)), default=math.nan)  # the best loss that all have reached
    times = [(reach(run.curve(key), target) or (math.nan,) * 3)[2] for run in runs]
    kinds: list[Column] = [
        ("Final loss", each(lambda losses: losses[-1], "loss"), show, min),
        ("Best loss", lowest("loss"), show, min),
        ("Best eval loss", lowest("eval_loss"), show, min),
        (f"Time to {'eval ' * (key == 'eval_loss')}loss {show(target)}", times, clock, min),
        ("Tokens/s", each(statistics.median, "tokens_per_s"), lambda value: f"{value:,.0f}", max),
        ("MFU", each(statistics.median, "mfu"), lambda value: f"{value:.1%}", max),
        ("Peak GiB", each(max, "memory_gib"), show, min),
        ("Steps", [run.steps for run in runs], lambda value: f"{value:,.0f}", None),
        ("Tokens", each(max, "tokens"), short, None),
        ("Wall time", [run.seconds or math.nan for run in runs], clock, None),
    ]
    return {name: _mark(values, write, best) for name, values, write, best in kinds if any(map(math.isfinite, values))}


def _mark(values: list[float], write: Callable[[float], str], best: Choose | None) -> list[str]:
    known = [value for value in values if math.isfinite(value)]
    first = best(known) if best and len(set(known)) > 1 else None
    texts = [write(value) if math.isfinite(value) else "" for value in values]
    return [f"<b>{text}</b>" if value == first else text for value, text in zip(values, texts, strict=True)]


def _compare(runs: Sequence[History], configs: Sequence[Config]) -> Iterator[str]:
    names = [run.name for run in runs]
    if differences := _differences(runs, configs):
        yield make_section("What differs", make_table(["", *names], differences, "facts"))
    if account := account_bytes({run.name: run.memory.get("measured") for run in runs}):
        yield make_section("Memory, measured", account)
    commands = [f"{run.name}: {start['command']}" for run in runs for start in run.starts if "command" in start]
    if commands:
        text = escape("\n".join(commands))
        yield f"<details><summary>Commands</summary>\n<pre>\n{text}</pre></details>"


def _differences(runs: Sequence[History], configs: Sequence[Config]) -> list[list[str]]:
    """Returns the options, and what the environments say, that are not the same for all runs."""
    last = [run.starts[-1] if run.starts else {} for run in runs]
    known = [dict(_flatten("", asdict(config))) | start for config, start in zip(configs, last, strict=True)]
    keys = [key for key in dict.fromkeys(key for one in known for key in one) if key not in OWN]
    rows = [[escape(key), *(escape(str(one.get(key, ""))) for one in known)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flatten(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from [(prefix + key, "on")] * bool(prefix)
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield prefix + key, "off" if value is None or value is False else "on" if value is True else value
