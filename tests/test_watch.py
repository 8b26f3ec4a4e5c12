"""`stretto watch`: what it shows at any width, and that it follows, ends and writes nothing."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.config import Config, dump_config
from stretto.report import EVENTS, Terminal
from stretto.report.history import gather
from stretto.report.watch import RECENT, View, draw_curve, fit
from tests.runs import PATIENCE_S


def lines_of(steps: int, since: float = 0.0) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"time": since, "environment": {"device": "NVIDIA H200"}}]
    for step in range(1, steps + 1):
        values = {"loss": 2 + 4 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 123_456.0, "mfu": 0.41}
        events.append({"time": since + 2 * step, "step": step, **values, "memory_gib": 120.25, "padding": 0.02})
        if step % 50 == 0:
            events.append({"time": since + 2 * step, "step": step, "eval_loss": 3 - step / 1000, "perplexity": 9.0})
    return events


def fill(folder: Path, events: list[Any], end: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(dump_config(Config()))
    (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    if end is not None:
        (folder / "exit.json").write_text(json.dumps(end))
    return folder


def picture(folder: Path, width: int = 80, height: int = 24, encoding: str = "utf-8") -> list[str]:
    """What a terminal of this size shows."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Terminal(file=file, width=width, height=height, highlight=False)
    view = View(folder)
    view.read()
    console.print(view.render(console))
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [40, 80, 100, 160, 250])
def test_it_fits_the_terminal(tmp_path: Path, width: int) -> None:
    shown = picture(fill(tmp_path / "run", lines_of(400, since=time.time() - 800)), width)
    assert len(shown) == 3 + 1 + 14 + 1 < 24 and max(map(len, shown)) <= width
    assert shown[0].startswith("run  running  NVIDIA H200")
    assert shown[1].startswith("step 400/1,000  loss 2.0100")
    assert shown[2].startswith("123,456 tok/s  mfu 41.0%")
    assert shown[4].startswith("       6  ") and shown[17].startswith("    2.01  ")
    assert shown[18].split() == ["1", "step", "400"] and len(shown[18]) == min(width, 160)
    if width >= 80:
        assert shown[1] == "step 400/1,000  loss 2.0100  eval 2.6000  best 2.6000 at 400  left 0:20:00"
        assert shown[2] == "123,456 tok/s  mfu 41.0%  mem 120.25 GiB  lr 1.00e-03  norm 1.00  pad 2.0%" + (
            "  time 0:13:20" if width > 80 else ""
        )
    assert sum(line.count("o") for line in shown[4:18]) == 8, "evaluations"
    assert len(picture(tmp_path / "run", width, height=12)) < 12


@pytest.mark.parametrize(
    "events",
    [
        [],
        [3, None, {}, {"step": "x"}, {"step": None, "loss": 1.0}],
        [{"environment": 3}],
        [{"step": 1, "loss": None}],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "eval_loss": 2.0}],
        [{"step": 1, "loss": 1e99, "time": 1e99}, {"step": 2, "loss": -1e99, "tokens_per_s": True}],
        [{"step": 5, "loss": 1.0}, {"step": 1, "loss": 1.0}, {"step": 1e99, "loss": 1.0}],
        [{"step": 1, "loss": math.inf}, {"step": 2, "eval_loss": math.nan}],
    ],
)
def test_odd_events_are_shown_somehow(tmp_path: Path, events: list[Any]) -> None:
    ends: list[Any] = [None, [], {"code": "x"}, {"code": 6, "message": "loss is nan"}]
    for end in ends:
        shown = picture(fill(tmp_path / "run", events, end))
        assert shown and max(map(len, shown)) <= 80


def test_states_are_told(tmp_path: Path) -> None:
    assert "waiting for the run to begin" in picture(tmp_path / "not there")[0]
    run, now = tmp_path / "run", time.time()
    assert "waiting" in picture(fill(run, []))[0]
    assert "nothing new for 0:05:" in picture(fill(run, lines_of(1, since=now - 302)))[0]
    assert "finished" in picture(fill(run, lines_of(3), {"code": 0, "message": ""}))[0]
    shown = picture(fill(run, lines_of(3), {"code": 75, "message": "stopped after step 3"}))
    assert "ended with code 75: stopped after step 3" in shown[0] and "left" not in shown[1]
    (run / EVENTS).unlink()
    (run / EVENTS).mkdir()
    assert "the events cannot be read: it is not a regular file" in picture(run)[0]


def test_a_run_cannot_steer_the_terminal(tmp_path: Path) -> None:
    bad = "\x1b]0;owned\x07\x1b[2J[bold]\r\n"
    shown = picture(
        fill(tmp_path / "\x1b[31mrun", [{"time": 0, "environment": {"device": bad}}], {"code": 1, "message": bad})
    )
    assert "\x1b" not in "".join(shown) and "\x07" not in "".join(shown) and len(shown) == 1
    assert "[bold]" in shown[0]


def test_a_terminal_without_unicode_has_no_curve(tmp_path: Path) -> None:
    shown = picture(fill(tmp_path / "rün", lines_of(100)), encoding="ascii")
    assert len(shown) == 4 and shown[0].startswith("r?n")


def test_the_rest_is_estimated_from_this_start_alone(tmp_path: Path) -> None:
    slow, fast = lines_of(40), [event for event in lines_of(80, since=1e6) if event.get("step", 99) > 40]
    fill(tmp_path / "run", [*slow, *fast])
    view = View(tmp_path / "run")
    view.read()
    assert view.total == 1000 and view.estimate_left() == (1000 - 80) * 2
    view.history = gather([*slow, *fast[:2]])
    assert math.isnan(view.estimate_left()) and len(view.history.training) > RECENT


def test_a_curve_in_braille() -> None:
    rows = [row.plain for row in draw_curve([(1, 0, 0, 3.0), (5, 0, 0, 1.0)], [(5, 0, 0, 2.0)], 4, 2)]
    assert rows == ["       3  ⠑⢄  ", "       1    ⠑o", "          1step 5"]
    assert draw_curve([], [], 4, 2) == []
    flat = [row.plain for row in draw_curve([(1, 0, 0, 2.0)], [], 4, 2)]
    assert flat[0].endswith("⠁   ")


def test_pieces_that_fit() -> None:
    assert fit(["abc", "def", "g"], 8) == "abc  def" and fit(["abc", "def"], 7) == "abc" and fit(["abc"], 2) == ""


class Watcher:
    """`stretto watch` in a terminal of its own."""

    def __init__(self, folder: Path, columns: int) -> None:
        self.screen, ours = pty.openpty()
        self.text = ""
        env = os.environ | {"COLUMNS": str(columns), "LINES": "24", "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        command = [sys.executable, "-m", "stretto", "watch", str(folder)]
        self.process = subprocess.Popen(command, stdin=ours, stdout=ours, stderr=ours, env=env, start_new_session=True)
        os.close(ours)

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self.read() or self.process.poll() is None, self.text

    def read(self) -> bool:
        if not select.select([self.screen], [], [], 0.2)[0]:
            return False
        try:
            part = os.read(self.screen, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.text += part.decode("utf-8", errors="replace")
        return bool(part)

    def end(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()  # a full terminal would hold it up
        while self.read():
            pass
        self.process.kill()
        os.close(self.screen)
        return self.process.wait()


def test_it_follows_a_run_until_its_end_and_writes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    watchers = [Watcher(run, columns) for columns in (80, 160)]
    try:
        watchers[0].wait_for("waiting for the run to begin")
        assert not run.exists(), "it makes no folder"
        watchers[1].wait_for("waiting for the run to begin")
        os.killpg(watchers[1].process.pid, signal.SIGINT)
        assert watchers[1].end() == 0 and "Traceback" not in watchers[1].text
        fill(run, lines_of(60, since=time.time() - 120))
        watchers[0].wait_for("step 60/1,000")
        with (run / EVENTS).open("a") as file:
            file.write(json.dumps({"time": time.time(), "step": 61, "loss": 1.5}) + "\n")
        watchers[0].wait_for("step 61/1,000")
        before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
        draft = run / "draft"
        draft.write_text(json.dumps({"code": 75, "message": "stopped after step 61"}))
        draft.rename(run / "exit.json")
        assert watchers[0].end() == 0
        assert "ended with code 75: stopped after step 61" in watchers[0].text and "Traceback" not in watchers[0].text
        assert {path: path.stat().st_mtime_ns for path in run.iterdir() if path.name != "exit.json"} == before
    finally:
        for watcher in watchers:
            watcher.process.kill()
            watcher.process.wait()


def test_nobody_has_to_read_it(tmp_path: Path) -> None:
    """Without a terminal the last picture is printed; a reader that has gone is no error."""
    run = fill(tmp_path / "run", lines_of(60), {"code": 0})
    command, shown = f"{sys.executable} -m stretto watch {run}", tmp_path / "shown"
    script = f"set -o pipefail; {command} > {shown} & {command} | true && wait $!"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert shown.read_text(encoding="utf-8").startswith("run  finished")
