"""What a run shows of itself while it goes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stretto.report import Report

VALUES: dict[str, Any] = {
    "step": 12000, "loss": 3.14159, "lr": 6e-4, "grad_norm": 0.53, "tokens": 10**9, "tokens_per_s": 576123.0,
    "padding": 0.013, "mfu": 0.461, "memory_gib": 11.62,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    monkeypatch.setattr("sys.stdout", Terminal())
    with Report(tmp_path, 100000, 0, active=True) as report:
        assert report.bar is not None
        report.bar.stop()  # what is drawn below is drawn by a console of a known width
        yield report


def draw(report: Report, width: int) -> str:
    console = Console(width=width, file=Terminal(), force_terminal=True, color_system=None, legacy_windows=False)
    assert report.bar is not None
    with console.capture() as captured:
        console.print(report.bar.get_renderable())
    return captured.get()


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (
            200,
            ["12000/100000", "loss 3.1416", "576,123 tok/s", "left", "mfu 46.1%", "mem 11.62 GiB", "norm", "pad"],
            [],
        ),
        (80, ["12000/100000", "loss 3.1416", "576,123 tok/s", "left", "━", "mfu 46.1%"], ["lr", "norm", "pad"]),
        (60, ["12000/100000", "loss 3.1416", "576,123 tok/s", "left"], ["mfu", "mem", "lr", "norm", "pad"]),
        (40, ["12000/100000", "loss 3.1416"], ["left", "mfu", "mem"]),
    ],
)
def test_the_bar_is_one_line_with_what_matters_most(
    report: Report, width: int, shown: list[str], left_out: list[str]
) -> None:
    report.train_line(VALUES, 0.1)
    (line,) = draw(report, width).splitlines()
    assert len(line) <= width and "…" not in line
    assert [text for text in shown if text not in line] == [], line
    assert [text for text in left_out if text in line] == [], line


def test_the_bar_fills_up_and_says_how_long_it_takes(report: Report) -> None:
    before = draw(report, 80)
    assert "0/100000" in before and "left ?" in before
    report.advance(50000)
    report.advance(99000)
    after = draw(report, 80)
    assert "99000/100000" in after and "left 0:0" in after
    assert before.count("━") == 0 and after.count("━") > 30
