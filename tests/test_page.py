"""The page of a run: what it says for known events, and that it comes out whole for odd ones."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stretto.page import MOST_POINTS, _curve, _short, _show, write_page
from stretto.report import EVENTS

HOSTILE = """</pre><script>alert("x")</script><img src='http://example.com/a.png'> & $title ${nothing} \ud800"""


def line(step: int, loss: float, **more: Any) -> dict[str, Any]:
    values = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1000.0 * step, "padding": 0.1, "mfu": 0.0}
    return {"time": 100.0 + step, "step": step, "loss": loss, **values, "memory_gib": 0.5, "tokens": 64 * step, **more}


def start(time: float, **more: Any) -> dict[str, Any]:
    return {"time": time, "environment": {"device": "cpu", "torch": "2.13.0", "command": "stretto train", **more}}


KNOWN = [
    start(100.0),
    line(1, 4.0),
    line(2, 3.5, memory_gib=2.25),
    {"time": 102.0, "step": 2, "eval_loss": 3.25, "perplexity": math.exp(3.25)},
    start(9000.0, device="other device"),
    line(3, 3.0, time=9003.0),
    {"time": 9004.0, "step": 3, "eval_loss": 3.75, "bleu": 12.5},
    {"time": 9010.0, "finished": {"seconds": 12.0, "steps": 3, "test_loss": 2.875}},
]


def page_of(folder: Path, events: list[Any], config: str = "layers = 2", sample: str = "") -> str:
    folder.mkdir(exist_ok=True)
    (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    path = write_page(folder, config, sample)
    assert path == folder / "report.html"
    assert sorted(entry.name for entry in folder.iterdir()) == [EVENTS, "report.html"]
    page = path.read_text(encoding="utf-8")
    check_whole(page)
    return page


class Tags(HTMLParser):
    """Follows the open elements, and fails where they do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_whole(page: str) -> None:
    """Four pictures, elements that nest, nothing to run and nothing to load."""
    assert page.count("<svg") == page.count("</svg>") == 4
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert not tags.open
    markup = re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)
    for loads in ("src=", "<script", "<link", "<img", "http", "@import", "DOCTYPE svg"):
        assert loads not in markup
    assert all(reference.startswith("#") for reference in re.findall(r"(?:href=\"|url\()([^\")]*)", markup))
    ids = re.findall(r' id="(.*?)"', markup)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:href=\"|url\()#([^\")]*)", markup)) <= set(ids)


def tiles(page: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", page)
    return {name: (value, note) for name, value, note in found}


def test_headline_numbers(tmp_path: Path) -> None:
    assert tiles(page_of(tmp_path / "run", KNOWN)) == {
        "Loss": ("4.0000 → 3.0000", "first → last"),
        "Best evaluation loss": ("3.2500", "at step 2"),
        "Tokens/s": ("2,000", "median"),
        "Peak memory": ("2.25 GiB", ""),
        "Steps": ("3", "192 tokens"),
        "Wall time": ("0:00:12", ""),  # two starts, of 2 and 10 seconds
    }


def test_mfu_is_shown_where_it_is_known(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", [line(step, 1.0, mfu=0.1 * step) for step in (1, 2, 3)])
    assert tiles(page)["MFU"] == ("20.0%", "median")


def test_tables_and_sample(tmp_path: Path) -> None:
    page = page_of(tmp_path / "my run", KNOWN, "[model]\nlayers = 2", "Once upon\na time")
    assert "<h1>my run</h1>" in page
    assert "<pre>\nOnce upon\na time</pre>" in page
    assert "<pre>\n[model]\nlayers = 2</pre></details>" in page
    assert "<th>step</th><th>eval loss</th><th>perplexity</th><th>bleu</th>" in page
    assert "<tr><th>3</th><td>3.7500</td><td></td><td>12.5000</td></tr>" in page
    assert "<tr><th>device</th><td>cpu</td><td>other device</td></tr>" in page
    assert "<tr><th>test_loss</th><td>2.8750</td></tr>" in page
    assert "What the model writes" not in page_of(tmp_path / "my run", KNOWN)


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    evaluation = {"step": 1, "eval_loss": 1.0, "<b>key": "<b>value"}
    events = [
        start(0.0, note="<b>note", **{"<b>name": {"<b>": 1}}),
        line(1, 1.0),
        evaluation,
        {"memory": {"<b>": {"<b>": "<b>"}, "measured": 3}},
        {"finished": {"<b>": "<b>"}},
    ]
    page = page_of(tmp_path / "<b>run & co", events, HOSTILE, HOSTILE)
    assert "<b>" not in page and "<script" not in page and "<img" not in page
    assert "<h1>&lt;b&gt;run &amp; co</h1>" in page
    assert page.count("&lt;/pre&gt;&lt;script&gt;") == 2
    assert page.count("$title ${nothing} ?") == 2


@pytest.mark.parametrize(
    "events",
    [
        [],
        [start(0.0)],
        [line(1, 2.0)],
        [line(0, 2.0)],
        [{"step": 1, "eval_loss": 2.0}],
        [{"step": 1, "eval_loss": math.nan}, {"step": 2, "eval_loss": None}],
        [{"step": 1}, {"step": 2, "loss": 3.0}, {"loss": 1.0}, {"step": None, "loss": 1.0}, {}],
        [{"step": 1, "loss": "high", "lr": None, "tokens_per_s": True, "memory_gib": []}, {"environment": 3}],
        [line(1, math.nan), line(2, math.inf), line(3, -math.inf), line(4, 1e308), line(5, 10**400)],
        [line(1, 1.0), line(2, 1e99, lr=0.0, tokens_per_s=0, memory_gib=0), line(3, 1e-99, lr=1e-99)],
        [3, None, "text", [1], {"memory": 1}, {"memory": {}}, {"finished": {}}, {"finished": 1}],
    ],
)
def test_odd_events_still_give_a_page(tmp_path: Path, events: list[Any]) -> None:
    page_of(tmp_path / "run", events)


def test_no_events_file_yet(tmp_path: Path) -> None:
    page = write_page(tmp_path, "").read_text(encoding="utf-8")
    check_whole(page)
    assert "No training lines yet." in page
    assert page.count("no numbers yet") == 4


def test_losses_that_are_not_finite_are_told(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", [line(1, 4.0), line(2, math.nan), line(3, math.inf)])
    assert tiles(page)["Loss"] == ("4.0000 → nan", "first → last, 2 not finite")


def test_same_events_same_bytes(tmp_path: Path) -> None:
    first = page_of(tmp_path / "run", KNOWN, sample="words")
    assert page_of(tmp_path / "run", KNOWN, sample="words") == first
    (tmp_path / "again").mkdir()
    assert page_of(tmp_path / "again" / "run", KNOWN, sample="words") == first


def test_long_curves_are_thinned() -> None:
    lines = [{"step": step, "loss": math.sin(step)} for step in range(1, 123_457)]
    lines[77_777]["loss"], lines[5]["loss"] = 50.0, math.nan
    steps, losses = _curve(lines, "loss")
    assert MOST_POINTS // 2 < len(steps) == len(losses) <= MOST_POINTS
    assert (steps[0], steps[-1]) == (1, 123_456)
    assert (losses[0], losses[-1]) == (math.sin(1), math.sin(123_456))
    assert steps == sorted(set(steps))
    assert losses[steps.index(77_778)] == 50.0


def test_short_curves_are_kept() -> None:
    lines = [{"step": step, "lr": 1.0 / (step + 1)} for step in range(MOST_POINTS)]
    assert _curve(lines, "lr") == (list(range(MOST_POINTS)), [entry["lr"] for entry in lines])
    steps, values = _curve([{"step": step, "lr": math.nan} for step in range(50)], "lr", most=10)
    assert (steps[0], steps[-1]) == (0, 49) and len(steps) <= 10 and all(map(math.isnan, values))


def test_numbers_for_readers() -> None:
    assert [_short(value) for value in (0, 0.25, 500, 25_000, 1.5e6, 3e-4, 2.5e-4, 1e-10, 1e20, -2e3)] == [
        "0", "0.25", "500", "25k", "1.5M", "3e-4", "2.5e-4", "1e-10", "1e+20", "-2k",
    ]  # fmt: skip
    assert [_show(value) for value in (1234, 0.0, 2.0, 1234.56, 1e-5, True, "a<b")] == [
        "1,234", "0", "2.0000", "1,234.6", "1e-05", "True", "a&lt;b",
    ]  # fmt: skip


def test_importing_the_page_does_not_import_matplotlib() -> None:
    code = "import sys, stretto.page; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
