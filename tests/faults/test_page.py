"""The page on the fault matrix: what it says, and that nothing can be missing without notice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults import page
from tests.faults.matrix import FIRST, MINIMA, ROWS

pytest_plugins = ["pytester"]
GOOD = """
    import pytest

    @pytest.mark.fault("A1")
    @pytest.mark.parametrize("number", [2, 3])
    def test_one(record_property, number):
        record_property("tally: kills", number)

    @pytest.mark.control("A1")
    def test_two():
        pass

    @pytest.mark.fault("B1")
    @pytest.mark.control("B1")
    def test_three():
        pass

    def test_of_something_else():
        pass
"""


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "ROWS", {"A1": "killed", "B1": "frozen"})
    monkeypatch.setattr(page, "MINIMA", {"kills": 5})
    monkeypatch.setattr(page, "describe_commit", lambda: "0123456")


def run(pytester: pytest.Pytester, text: str, *options: str) -> tuple[int, str, str]:
    """The exit code, the page, and what was printed about the matrix."""
    pytester.makepyfile(text)
    pytester.makeini("[pytest]\nmarkers =\n  fault(row)\n  control(row)\n")
    done = pytester.runpytest_inprocess(
        "-p", "tests.faults.page", "--faults-page", "docs/faults.md", "-m", "fault or control", *options
    )
    written = pytester.path / "docs/faults.md"
    text = written.read_text() if written.exists() else ""
    return int(done.ret), text, str(done.stdout).partition("fault matrix")[2]


def find_row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.usefixtures("matrix")
def test_all_is_well(pytester: pytest.Pytester) -> None:
    code, text, _ = run(pytester, GOOD)
    assert code == 0 and "**2 of 2 rows pass**" in text
    assert find_row(text, "A1") == ["A1", "killed", "2", "1", "5 kills", "0", "pass"]
    assert find_row(text, "B1") == ["B1", "frozen", "1", "1", "", "0", "pass"]
    assert find_row(text, "kills") == ["kills", "5", "5"]


@pytest.mark.usefixtures("matrix")
@pytest.mark.parametrize(
    ("old", "new", "row", "words"),
    [
        ('@pytest.mark.control("A1")\n', "\n", "A1", "no control"),
        ('@pytest.mark.control("B1")\n', "\n", "B1", "no control"),
        ('@pytest.mark.fault("B1")\n', "\n", "B1", "no test"),
        ("test_two():\n        pass", "test_two():\n        assert False", "A1", "fails: test_two"),
        ('record_property("tally: kills", number)', "assert number == 2", "A1", "fails: test_one[3]"),
        ("test_three():", "test_three(a_fixture_that_is_not_there):", "B1", "fails: test_three"),
    ],
)
def test_a_row_without_a_test_or_a_control_that_passes_fails(
    pytester: pytest.Pytester, old: str, new: str, row: str, words: str
) -> None:
    assert old in GOOD
    code, text, printed = run(pytester, GOOD.replace(old, new))
    assert code == 1 and f"{row}: {words}" in printed
    assert find_row(text, row)[-1].replace("*", "") == words


@pytest.mark.usefixtures("matrix")
def test_a_count_that_drops_fails(pytester: pytest.Pytester) -> None:
    code, text, printed = run(pytester, GOOD.replace("[2, 3]", "[2, 2]"))
    assert code == 1 and "kills: 4 of 5" in printed and find_row(text, "kills") == ["kills", "4", "5"]


@pytest.mark.usefixtures("matrix")
def test_what_a_test_counted_before_it_failed_does_not_count(pytester: pytest.Pytester) -> None:
    text = GOOD.replace('record_property("tally: kills", number)', 'record_property("tally: kills", 9); assert False')
    code, text, _ = run(pytester, text)
    assert code == 1 and find_row(text, "kills") == ["kills", "0", "5"]


@pytest.mark.usefixtures("matrix")
def test_a_row_that_cannot_run_here_is_no_failure_and_does_not_pass(pytester: pytest.Pytester) -> None:
    code, text, _ = run(
        pytester, GOOD.replace("test_three():\n        pass", 'test_three():\n        pytest.skip("no root")')
    )
    assert code == 0 and "**1 of 2 rows pass**, 1 could not run here" in text
    assert find_row(text, "B1")[-1] == "not run: no root" and find_row(text, "B1")[2] == "0 (1 skipped)"


@pytest.mark.usefixtures("matrix")
def test_a_name_that_is_no_row_is_refused(pytester: pytest.Pytester) -> None:
    code, text, _ = run(pytester, GOOD.replace('control("A1")', 'control("A2")'))
    assert code == pytest.ExitCode.USAGE_ERROR and not text


@pytest.mark.usefixtures("matrix")
def test_an_interrupted_run_leaves_the_page_as_it_was(pytester: pytest.Pytester) -> None:
    pytester.mkdir("docs").joinpath("faults.md").write_text("of an earlier run")
    code, text, _ = run(pytester, GOOD.replace("test_two():\n        pass", "test_two():\n        pytest.exit('now')"))
    assert code == pytest.ExitCode.INTERRUPTED and text == "of an earlier run"


@pytest.mark.usefixtures("matrix")
def test_what_takes_long_comes_first(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "FIRST", (("fault", "B1"),))
    one, two = "@pytest.mark.fault({!r})\n@pytest.mark.control({!r})\ndef test_it(): pass", "import pytest\n"
    pytester.makepyfile(test_a=two + one.format("A1", "A1"), test_b=two + one.format("B1", "B1"))
    done = pytester.runpytest_inprocess("-p", "tests.faults.page", "--collect-only", "-q", "-W", "ignore")
    assert [line for line in done.outlines if "::" in line] == ["test_b.py::test_it", "test_a.py::test_it"]


def test_workers_report_to_the_main_process(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(page.__file__).parents[2]), *sys.path]))
    skipped = '\n    @pytest.mark.fault("K2")\n    def test_four():\n        pytest.skip("no root")\n'
    code, text, printed = run(pytester, GOOD.replace("A1", "K1").replace("B1", "K4") + skipped, "-n", "1")
    assert code == 1 and "K3: no test" in printed and "kills: 5 of 500" in printed
    assert find_row(text, "K2")[-1] == "not run: no root"
    assert f"**2 of {len(ROWS)} rows pass**" in text and find_row(text, "K1")[2:5] == ["2", "1", "5 kills"]


def test_the_matrix_has_all_rows() -> None:
    assert len(ROWS) == 44 and all(name in ROWS for _, name in FIRST)
    assert MINIMA["kills"] >= 500 and MINIMA["crash points"] >= 8_000
