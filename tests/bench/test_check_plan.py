"""The planner's predictions next to the figures of docs/results.md."""

from __future__ import annotations

import pytest

from bench import check_plan
from bench.check_plan import CALIBRATION, RESULTS, STEPS, Row, list_rows, read_number, summarise
from stretto.planning import times


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(list_rows(RESULTS.read_text(encoding="utf-8")))


def test_every_figure_is_compared_and_most_are_held_out(rows: list[Row]) -> None:
    places = {(row.section, row.workload) for row in rows}
    assert len(places) == len(rows) >= 20 and places >= CALIBRATION
    assert sum(row.section == STEPS for row in rows) >= 13
    assert sum(row.kind == "held out" for row in rows) >= 14
    assert all(row.measured_ms > 0 and row.predicted_ms > 0 for row in rows)


def test_predictions_are_near_what_was_measured(rows: list[Row]) -> None:
    """Not one is out by more than a third, and most by less than a tenth."""
    held_out = sorted(abs(row.errors[0]) for row in rows if row.kind == "held out")
    assert held_out[len(held_out) // 2] < 0.05 and held_out[-2] < 0.11 and held_out[-1] < 0.33
    assert all(abs(row.errors[1]) < 0.1 for row in rows if row.errors[1] is not None)
    assert "17 times: median" in summarise([row for row in rows if row.kind == "held out"])


def test_a_wrong_constant_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "PRODUCTS", times.PRODUCTS / 1.5)
    ms, _, tokens = check_plan.predict("bert_large_64x512")
    assert ms > 1.2 * 1e3 * tokens / 234e3


def test_numbers_of_the_tables_are_read() -> None:
    assert [read_number(cell) for cell in ("570.8k", "24.66 (24.57)", "1.095", "")] == [570800.0, 24.66, 1.095, 0.0]
