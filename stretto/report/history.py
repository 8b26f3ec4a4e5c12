"""What the events of a run tell: curves against steps, tokens and time, where it went on, and how it ended.

Events may be of an older version, torn or odd. What is no number becomes nan, and nothing here fails for it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from stretto.ending import EXIT
from stretto.report import COUNTS, read_events

NO_SCORES = ("step", "eval_loss", "time", "at", *COUNTS)

Event = dict[str, Any]
Place = tuple[float, float, float]  # where something happened: step, tokens read, seconds at work
Point = tuple[float, float, float, float]  # a place and a value


@dataclass
class History:
    """The events of one run, sorted by kind. Lines of steps have their place under `at`."""

    name: str = ""  # of the run folder
    training: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    starts: list[Event] = field(default_factory=list)  # the environment of each, and its `time`
    resumed: list[Place] = field(default_factory=list)
    memory: Event = field(default_factory=dict)  # {"measured": {role: bytes}, "predicted": ...}
    finished: Event = field(default_factory=dict)
    end: Event = field(default_factory=dict)  # exit.json; empty while the run goes on, or if it was killed
    seconds: float = 0.0  # at work: the sum over starts, without the pauses between them
    latest: float = math.nan  # when the last event was written, in seconds since 1970

    @property
    def steps(self) -> float:
        return max(finite(self.training + self.evaluations, "step"), default=math.nan)

    @property
    def scores(self) -> list[str]:
        """The names of what evaluations measure besides the loss."""
        names = dict.fromkeys(key for event in self.evaluations for key in event if key not in NO_SCORES)
        return [name for name in names if finite(self.evaluations, name)]

    def curve(self, key: str, evaluated: bool = False) -> list[Point]:
        lines = self.evaluations if evaluated or key == "eval_loss" else self.training
        return [(*line["at"], number(line, key)) for line in lines if key in line]

    def best(self, key: str) -> Point | None:
        """Returns the point of the lowest value, the first of them."""
        return min((p for p in self.curve(key) if math.isfinite(p[3])), key=lambda p: p[3], default=None)


def read_history(folder: Path) -> History:
    """Reads a run folder, also one that is not there yet; an `OSError` where its events cannot be read."""
    history = gather(read_events(folder), folder.resolve().name)
    with suppress(OSError, ValueError, RecursionError):
        end = json.loads((folder / EXIT).read_text(encoding="utf-8"))
        history.end = end if isinstance(end, dict) else {}
    return history


def gather(events: Iterable[Event], name: str = "") -> History:
    history, place = History(name), (0.0, 0.0, 0.0)
    began, before = math.nan, 0.0  # of the current start
    for event in events:
        if "environment" in event:
            began, before, history.finished = math.nan, history.seconds, {}
            history.resumed += [place] if place[0] else []
            history.starts += [{"time": event.get("time")} | _mapping(event, "environment")]
        if math.isfinite(time := number(event, "time")):
            began, history.latest = time if math.isnan(began) else began, time
            history.seconds = max(history.seconds, before + time - began)  # clocks may be put back
        if math.isfinite(step := number(event, "step")):
            tokens = number(event, "tokens")  # evaluations have none: the same number per step as before
            place = (step, place[1] * step / (place[0] or 1.0) if math.isnan(tokens) else tokens, history.seconds)
            kind = history.evaluations if "eval_loss" in event else history.training
            kind.append(event | {"at": place})
        history.memory = _mapping(event, "memory") or history.memory
        history.finished = _mapping(event, "finished") or history.finished
    return history


def number(event: Event, key: str) -> float:
    """Returns the number under key; nan where there is none, or where it is too large to be drawn."""
    value = event.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100:
        return float(value)
    return math.nan


def finite(events: Iterable[Event], key: str) -> list[float]:
    return [value for event in events if math.isfinite(value := number(event, key))]


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Returns at most `most` points: the ends, and the extremes of even stretches between them."""
    if len(points) <= most:
        return list(points)
    stretches, inner = (most - 2) // 2, points[1:-1]
    cuts, kept = [k * len(inner) // stretches for k in range(stretches + 1)], [points[0]]
    for start, end in itertools.pairwise(cuts):
        known = [point for point in inner[start:end] if math.isfinite(point[3])] or [inner[start]]
        kept += sorted({min(known, key=lambda p: p[3]), max(known, key=lambda p: p[3])})
    return [*kept, points[-1]]


def reach(points: Iterable[Point], target: float) -> Place | None:
    """Returns where a curve is at the target, or below it, for the first time."""
    return next((point[:3] for point in points if point[3] <= target), None)


def show(value: object) -> str:
    """Writes a value for a reader, escaped: numbers to about four digits, anything else as its text."""
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.4f}" if 0.01 <= size < 100 else f"{value:,.1f}" if 100 <= size < 1e7 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else escape(str(value))


def short(value: float) -> str:
    """Writes a number for an axis: 25k, 1.5M, 0.25, 3e-4."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}" if 0.01 <= abs(value) < 1e3 or not value else re.sub(r"\.?0*e([+-])0?", r"e\1", f"{value:.2e}")


def clock(seconds: float) -> str:
    return str(timedelta(seconds=math.ceil(seconds))) if abs(seconds) < 1e9 else f"{seconds:.4g} s"


def _mapping(event: Event, key: str) -> Event:
    value = event.get(key)
    return value if isinstance(value, dict) else {}
