"""What bench/ablate.py found about the techniques of a run, as lines and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stretto.files import read_text, write_text
from stretto.report.history import number

FOLDER, RESULTS, ALL = "ablation", "results.json", "all"
HEAD = ("", "ms a step", "change", "memory", "change", "eval loss", "change")
_MOST_BYTES = 1 << 24


def write_ablation(folder: Path, steps: int, results: Mapping[str, Any]) -> None:
    write_text(folder / FOLDER / RESULTS, json.dumps({"steps": steps, "results": results}))


def read_ablation(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The number of updates of short runs, and their numbers by the technique that was off; none if there are none."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        found = json.loads(read_text(folder / FOLDER / RESULTS, _MOST_BYTES))
        return int(found["steps"]), {str(k): dict(v) for k, v in found["results"].items()}
    return 0, {}


def tabulate(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows of text below `HEAD`: the numbers with all techniques, and without each of them, how far it is from that."""
    whole = dict(results.get(ALL, {}))
    return [_make_row(name, dict(result), whole) for name, result in results.items()]


def _make_row(name: str, result: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    if "step_ms" not in result:
        return [_title(name), *[""] * (len(HEAD) - 2), str(result.get("failed", "no numbers"))]
    step, memory, loss = (number(result, key) for key in ("step_ms", "memory_gib", "eval_loss"))
    cells = [_title(name), f"{step:.2f}", "", f"{memory:.2f} GiB", "", f"{loss:.4f}", ""]
    if name != ALL:
        cells[2] = f"{step / (number(whole, 'step_ms') or math.nan) - 1:+.1%}"
        cells[4] = f"{memory / (number(whole, 'memory_gib') or math.nan) - 1:+.1%}"
        cells[6] = f"{loss - number(whole, 'eval_loss'):+.4f}"
    return cells


def _title(name: str) -> str:
    return "all techniques" if name == ALL else f"without {name}"


def describe_result(name: str, result: dict[str, Any]) -> str:
    known = "step_ms" in result
    return f"{_title(name)}: " + (f"{number(result, 'step_ms'):.2f} ms a step" if known else str(result.get("failed")))


def describe_way(steps: int) -> str:
    return f"What each technique contributes: the first {steps} updates of the run, with all and without each"


def explain_ablation(folder: Path) -> list[str]:
    """The table for a terminal; no lines if there is none."""
    steps, results = read_ablation(folder)
    if not results:
        return []
    rows = [list(HEAD), *tabulate(results)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [describe_way(steps), *(line.rstrip() for line in lines)]
