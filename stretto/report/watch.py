"""`stretto watch`: how a run goes on in another process, in the terminal. It reads its folder and writes nothing."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from stretto.config import load_config
from stretto.ending import EXIT
from stretto.errors import StrettoError
from stretto.report import EVENTS, GAP, Terminal
from stretto.report.history import History, Point, clock, number, read_history, thin

LABEL = 10  # columns left of the curve
WIDEST, HIGHEST_CURVE, OTHER_LINES = 160, 14, 7
RECENT = 20  # logged steps that tell how fast the run is now
PATIENCE_S = 60  # without a new line, before the reader is told
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character: four rows of two


def watch(folder: Path) -> None:
    """Shows a run until it ends, or until Ctrl-C, or until nobody reads the output any more."""
    console, seen, view, pause = Terminal(highlight=False), None, View(folder), 0.5
    with suppress(KeyboardInterrupt, BrokenPipeError), Live(console=console, auto_refresh=False) as live:
        while True:
            if (now := _stamp(folder)) != seen:
                began, seen = time.perf_counter(), now
                view.read()
                pause = max(0.5, 10 * (time.perf_counter() - began))  # a very long log is read less often
            live.update(view.render(console), refresh=True)
            if view.history.end and _stamp(folder) == seen:
                return
            time.sleep(pause)


def _stamp(folder: Path) -> list[tuple[int, int, int] | None]:
    """Returns what changes when the run writes something, or begins anew."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in (EVENTS, EXIT):
        try:
            found = os.stat(folder / name)
            stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return stamps


class View:
    """What is known of a run, and how it is shown."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.history, self.total, self.problem = folder, History(), 0, ""

    def read(self) -> None:
        self.problem = ""
        try:
            self.history = read_history(self.folder)
        except OSError as error:
            self.problem = f"the events cannot be read: {error.strerror}"
        with suppress(StrettoError, OSError):  # there is no configuration yet
            self.total = load_config(self.folder / "config.toml").train.steps

    def render(self, console: Terminal) -> RenderableType:
        width, encoding = console.width, console.encoding
        device = self.history.starts[-1].get("device", "") if self.history.starts else ""
        name = self.folder.resolve().name
        lines: list[RenderableType] = [_line(f"{name}{GAP}{self.explain_state()}{GAP}{device}", encoding)]
        for pieces in (self.list_progress(), self.list_speed()):
            lines += [_line(fit(pieces, width), encoding)] if pieces else []
        if self.total and not math.isnan(self.history.steps):
            bar = ProgressBar(self.total, self.history.steps, min(width, WIDEST))
            lines.append(Padding(bar, 0))  # a bar alone does not end its line
        if encoding.startswith("utf"):
            height = max(3, min(HIGHEST_CURVE, console.height - OTHER_LINES))
            curve, marks = self.history.curve("loss"), self.history.curve("eval_loss")
            lines += draw_curve(curve, marks, min(width, WIDEST) - LABEL, height)
        return Group(*lines)

    def explain_state(self) -> str:
        history, end = self.history, self.history.end
        if self.problem:
            return self.problem
        if end:
            code, message = end.get("code"), end.get("message")
            return (message or "finished") if code == 0 else f"ended with code {code}: {message}"
        if not history.starts and not history.training:
            return "waiting for the run to begin"
        silence = time.time() - history.latest
        return f"nothing new for {clock(silence)}: slow, or killed?" if silence > PATIENCE_S else "running"

    def list_progress(self) -> list[str]:
        history, pieces = self.history, []
        if not math.isnan(history.steps):
            pieces.append(f"step {history.steps:,.0f}" + f"/{self.total:,}" * bool(self.total))
        if history.training:
            pieces.append(f"loss {number(history.training[-1], 'loss'):.4f}")
        if history.evaluations:
            pieces.append(f"eval {number(history.evaluations[-1], 'eval_loss'):.4f}")
        if best := history.best("eval_loss"):
            pieces.append(f"best {best[3]:.4f} at {best[0]:,.0f}")
        if not history.end and math.isfinite(left := self.estimate_left()):
            pieces.append(f"left {clock(left)}")
        return pieces

    def list_speed(self) -> list[str]:
        line: dict[str, Any] = self.history.training[-1] if self.history.training else {}
        kinds = (
            ("tokens_per_s", "{:,.0f} tok/s"), ("mfu", "mfu {:.1%}"), ("memory_gib", "mem {:.2f} GiB"),
            ("lr", "lr {:.2e}"), ("grad_norm", "norm {:.2f}"), ("padding", "pad {:.1%}"),
        )  # fmt: skip
        pieces = [text.format(number(line, key)) for key, text in kinds if number(line, key) > 0]
        return [*pieces, f"time {clock(self.history.seconds)}"] if pieces else []

    def estimate_left(self) -> float:
        """Returns the seconds that the rest takes at the pace of the last lines; nan where it is not known."""
        last = [line["at"] for line in self.history.training[-RECENT:]]
        after = [place for place in last if not self.history.resumed or place[0] > self.history.resumed[-1][0]]
        if not self.total or len(after) < 2 or after[-1][0] <= after[0][0]:
            return math.nan
        return (self.total - after[-1][0]) * (after[-1][2] - after[0][2]) / (after[-1][0] - after[0][0])


def _line(text: str, encoding: str) -> Text:
    """Makes one line that fits: what comes from a run may not steer the terminal, and has to be writable to it."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return Text(plain.encode(encoding, "replace").decode(encoding), no_wrap=True, overflow="ellipsis")


def fit(pieces: Sequence[str], width: int) -> str:
    """Joins as many of the first pieces as have room."""
    ends = itertools.accumulate(len(piece) + len(GAP) for piece in pieces)
    return GAP.join(piece for piece, end in zip(pieces, ends, strict=True) if end - len(GAP) <= width)


def draw_curve(curve: Sequence[Point], marks: Sequence[Point], width: int, height: int) -> list[Text]:
    """Draws a curve in braille characters, with its evaluations as o, and the ends of both axes beside it."""
    known = [(point[0], point[3]) for point in thin(curve, 8 * width) if math.isfinite(point[3])]
    scored = [(point[0], point[3]) for point in marks if math.isfinite(point[3])]
    if not known:
        return []
    (first, last), values = (
        (known[0][0], max(step for step, _ in known + scored)),
        [value for _, value in known + scored],
    )
    low, high = min(values), max(values)

    def place(step: float, value: float) -> tuple[int, int]:
        """Returns column and row of a dot."""
        across, down = (step - first) / ((last - first) or 1.0), (high - value) / ((high - low) or 1.0)
        return round(min(max(across, 0.0), 1.0) * (2 * width - 1)), round(down * (4 * height - 1))

    cells = [[0] * width for _ in range(height)]
    for column, row in _join(itertools.starmap(place, known)):
        cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    lines = [Text("".join(chr(0x2800 + cell) if cell else " " for cell in row), style="blue") for row in cells]
    for column, row in itertools.starmap(place, scored):
        lines[row // 4].plain = lines[row // 4].plain[: column // 2] + "o" + lines[row // 4].plain[column // 2 + 1 :]
        lines[row // 4].stylize("yellow", column // 2, column // 2 + 1)
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    rows = [Text(f"{labels.get(k, ''):>{LABEL - 2}}  ").append_text(line) for k, line in enumerate(lines)]
    begin, end = f"{first:,.0f}", f"step {last:,.0f}"
    return [*rows, Text(" " * LABEL + begin + end.rjust(width - len(begin)))]


def _join(dots: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Yields the dots, and those on the straight lines between one and the next."""
    before = None
    for dot in dots:
        column, row = before or dot
        length = max(abs(dot[0] - column), abs(dot[1] - row), 1)
        for k in range(length + 1):
            yield column + (dot[0] - column) * k // length, row + (dot[1] - row) * k // length
        before = dot
