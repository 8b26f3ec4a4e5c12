"""The code of docs/python.md runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stretto.api import Result
from tests.corpora import write_corpus

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    write_corpus(tmp_path / "texts", documents=40)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert isinstance(names["result"], Result)
    steps = {name: len(list((tmp_path / "runs" / name / "checkpoints").iterdir())) for name in ("demo", "steps", "own")}
    assert all(steps.values()), steps
