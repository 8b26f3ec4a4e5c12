"""Writes docs/faults.md: what `make faults` did to runs, row by row, with counts; and fails if anything is missing.

    pytest -p tests.faults.page --faults-page docs/faults.md -m "fault or control"

Each test carries the rows that it covers in its report, as a worker of pytest-xdist sends it; the main process adds the
reports up. A row passes if one test and one control of it passed at least, none failed, and what was counted is not
less than the matrix asks for (matrix.py).
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.faults.matrix import FIRST, MINIMA, ROWS

Kind = Literal["fault", "control"]
KINDS: tuple[Kind, ...] = ("fault", "control")
TALLY = "tally: "
INTRODUCTION = """# What runs survive

A run of Stretto can be killed, frozen or starved at any moment, its files can be damaged or forged, and the numbers
that it computes can go bad. This page says what was done to runs to find out whether they survive, and how it ended.
It is written by the tests themselves: `make faults` runs all of them and writes it anew; `make test` runs a sample.

What is promised:

1. After a crash at any instruction, the newest checkpoint that verifies is the previous one or the new one, whole.
2. A damaged checkpoint is never loaded: the run falls back to the one before and says so.
3. With the same configuration, hardware and number of processes, an interrupted run ends with the same bits as an
   uninterrupted one, however often it was interrupted.
4. When the number of processes changes, no sample is lost or repeated; if they cannot share the batch, the run is
   refused before its first step.
5. No update that is not finite is applied or saved, and all processes decide that together.
6. SIGTERM to any process gives one checkpoint that all agree on, and exit code 75, in bounded time.
7. No process waits for ever for another.
8. Reading a checkpoint, a configuration, data or a Hugging Face folder never runs code from it, and nothing is written
   outside of the run folder.
9. A full disk never costs a checkpoint that was there.
10. Saving, logging and evaluating do not change the numbers.

Each row has tests, and negative controls: the same comparison with the mechanism switched off, or with the fault
planted. A control passes only if the comparison then fails, so a comparison that sees nothing is found out. What is
done in detail can be read in the tests that are marked with the name of the row, as in `@pytest.mark.fault("K1")`.
"""


@dataclass
class Case:
    """One test of one row, in all its phases."""

    outcome: str = "not run"
    reason: str = ""  # why it was skipped

    def add(self, report: pytest.TestReport) -> None:
        if report.failed or (report.when == "call" and self.outcome != "failed"):
            self.outcome = report.outcome
        if report.skipped:
            self.outcome = "skipped"
            words = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.reason = str(words).removeprefix("Skipped: ")


@dataclass
class Row:
    cases: dict[Kind, dict[str, Case]] = field(default_factory=lambda: {kind: {} for kind in KINDS})  # by their names
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def judge(self) -> str:
        """`pass`, or what is wrong; `not run` says that nothing is, but that the tests could not run here."""
        names = (name for cases in self.cases.values() for name, case in cases.items() if case.outcome == "failed")
        failed = [*dict.fromkeys(names)]
        if failed:
            others = f" and {len(failed) - 1} more" if failed[1:] else ""
            return f"**fails**: {failed[0].rpartition('::')[2]}{others}"
        for kind, name in zip(KINDS, ("test", "control"), strict=True):
            cases = self.cases[kind].values()
            if not any(case.outcome == "passed" for case in cases):
                reasons = [case.reason for case in cases if case.reason]
                return f"not run: {reasons[0]}" if reasons else f"**no {name}**"
        return "pass"


class Record:
    """What the tests of a session have reported."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {name: Row() for name in ROWS}
        self.began = time.time()

    def add(self, report: pytest.TestReport) -> None:
        """Takes in one phase of one test: its setup, its call or its teardown."""
        marks = [(kind, str(name)) for kind in KINDS for key, name in report.user_properties if key == kind]
        for kind, name in marks:
            self.rows[name].cases[kind].setdefault(report.nodeid, Case()).add(report)
        if marks:  # what a test of several rows counts, and takes, is the first row's
            self._count(self.rows[marks[0][1]], report)

    def _count(self, row: Row, report: pytest.TestReport) -> None:
        row.seconds += report.duration
        for key, value in report.user_properties:
            if key.startswith(TALLY) and report.when == "call" and report.passed:
                row.counts[key.removeprefix(TALLY)] += int(str(value))

    @property
    def totals(self) -> Counter[str]:
        return sum((row.counts for row in self.rows.values()), Counter[str]())

    def find_faults(self) -> list[str]:
        """Says what is missing or has failed, a line each."""
        verdicts = {name: row.judge() for name, row in self.rows.items()}
        bad = [f"{name}: {verdict.replace('*', '')}" for name, verdict in verdicts.items() if "**" in verdict]
        few = {what: self.totals[what] for what, least in MINIMA.items() if self.totals[what] < least}
        return bad + [f"{what}: {number:,} of {MINIMA[what]:,}" for what, number in few.items()]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([INTRODUCTION, *self._summarise(), "", *self._tabulate(), ""]))

    def _summarise(self) -> list[str]:
        verdicts = [row.judge() for row in self.rows.values()]
        passed, idle = verdicts.count("pass"), sum(verdict.startswith("not run") for verdict in verdicts)
        words = f"**{passed} of {len(verdicts)} rows pass**" + (f", {idle} could not run here" if idle else "")
        counts = [
            f"| {what} | {number:,} | {f'{MINIMA[what]:,}' if what in MINIMA else ''} |"
            for what, number in {**dict.fromkeys(MINIMA, 0), **self.totals}.items()
        ]
        return [
            f"## {datetime.now(UTC):%Y-%m-%d}, commit {describe_commit()}", "",
            f"{words}, in {time.time() - self.began:,.0f} seconds on {describe_machine()}.", "",
            "| counted | number | at least |", "|---|---|---|", *counts,
        ]  # fmt: skip

    def _tabulate(self) -> list[str]:
        lines = ["| row | what is done to a run | tests | controls | counts | seconds | verdict |",
                 "|---|---|---|---|---|---|---|"]  # fmt: skip
        for name, row in self.rows.items():
            tests, controls = (describe_cases(row, kind) for kind in KINDS)
            counts = ", ".join(f"{number:,} {what}" for what, number in sorted(row.counts.items()))
            cells = (name, ROWS[name], tests, controls, counts, f"{row.seconds:.0f}", row.judge().replace("|", "/"))
            lines.append(f"| {' | '.join(cells)} |")
        return lines


def describe_cases(row: Row, kind: Kind) -> str:
    """How many passed, and what became of the others."""
    found = Counter(case.outcome for case in row.cases[kind].values())
    others = ", ".join(f"{number} {outcome}" for outcome, number in sorted(found.items()) if outcome != "passed")
    return f"{found['passed']}" + (f" ({others})" if others else "")


def describe_commit() -> str:
    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = [line for line in ask("status", "--porcelain").splitlines() if not line.endswith("docs/faults.md")]
    return (ask("rev-parse", "--short", "HEAD") or "unknown") + (" and changes to it" if changed else "")


def describe_machine() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()} {platform.release()}), {versions}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-page", default="", help="where the page on the fault matrix is written")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says in the reports of each test which rows it covers. What takes long comes first, so that no worker is left
    with it in the end."""
    long: dict[Path, bool] = defaultdict(bool)
    for item in items:
        rows = [(mark.name, str(name)) for kind in KINDS for mark in item.iter_markers(kind) for name in mark.args]
        unknown = {name for _, name in rows} - ROWS.keys()
        if unknown:
            raise pytest.UsageError(f"{item.nodeid}: {', '.join(sorted(unknown))} is no row of the fault matrix")
        item.user_properties += rows
        long[item.path] |= any(row in FIRST for row in rows)
    items.sort(key=lambda item: not long[item.path])  # the order is else as it was


class Writer:
    """The plugin of the main process, which all reports come to."""

    def __init__(self, path: Path) -> None:
        self.path, self.record = path, Record()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.record.add(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # it was interrupted: the page of an earlier run says more
        self.record.write(self.path)
        if self.record.find_faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"fault matrix ({self.path})")
        for line in self.record.find_faults():
            terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--faults-page") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(config.getoption("--faults-page"))))
