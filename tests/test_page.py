"""The pages of runs: what they say for known events, and that they come out whole for odd ones."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.config import Config, LayerDropConfig, dump_config
from stretto.errors import CheckpointError
from stretto.report import EVENTS
from stretto.report.chart import MOST_POINTS
from stretto.report.compare import write_comparison
from stretto.report.history import gather, reach, short, show, thin
from stretto.report.page import MOST_ROWS, write_page, write_report

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
        assert not any(name.startswith("on") or name == "style" for name, _ in attrs), "the policy forbids these"
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_whole(page: str) -> None:
    """Elements nest, a picture for each chart, two scripts, which are the page's own, and nothing to load."""
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert not tags.open
    markup = re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)
    (style, style_hash), (script, script_hash) = (find_allowed(markup, kind) for kind in ("style", "script"))
    assert (hash_of(style), hash_of(script)) == (style_hash, script_hash)
    assert markup.count("<script") == 2 and markup.count("<style") == 1
    assert "default-src 'none'" in markup and "unsafe" not in markup
    markup = markup.replace(style, "").replace(script, "")
    assert len(data_of(page)["charts"]) == markup.count("<figure") == markup.count("<svg") == markup.count("</svg>") > 0
    for loads in ("src=", "<link", "<img", "http:", "https:", "@import", "url(", "href"):
        assert loads not in markup + style
    assert set(re.findall(r' id="(.*?)"', markup)) == {"controls", "data"}
    assert len(page.encode("utf-8", errors="replace")) < 2e6


def find_allowed(page: str, kind: str) -> tuple[str, str]:
    """The style sheet or script of a page, and the hash that its policy allows."""
    (text,), (allowed,) = (
        re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL),
        re.findall(f"{kind}-src '(.*?)'", page),
    )
    return text, allowed


def hash_of(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


def tiles(page: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", page)
    return {name: (value, note) for name, value, note in found}


def test_headline_numbers(tmp_path: Path) -> None:
    assert tiles(page_of(tmp_path / "run", KNOWN)) == {
        "Loss": ("3.0000", "from 4.0000"),
        "Best eval loss": ("3.2500", "at step 2"),
        "Tokens/s": ("2,000", "median"),
        "Peak memory": ("2.25 GiB", ""),
        "Steps": ("3", "192 tokens"),
        "Wall time": ("0:00:12", ""),  # two starts, of 2 and 10 seconds
    }


def test_an_evaluation_may_say_how_much_it_was_over(tmp_path: Path) -> None:
    page = page_of(
        tmp_path / "run", [{"step": 4, "eval_loss": 2.0, "accuracy": 0.5, "batches": 20, "all_batches": 1234}]
    )
    assert tiles(page)["Best eval loss"] == ("2.0000", "at step 4, 20 of 1,234 batches")
    assert len(data_of(page)["charts"]) == 2, "the loss and the accuracy: counts are no scores"


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
    assert "<tr><th>started</th><td>1 January 1970, 00:01 UTC</td><td>1 January 1970, 02:30 UTC</td></tr>" in page
    assert "<tr><th>at the end</th><td>seconds 12.0, steps 3, test_loss 2.875</td></tr>" in page
    assert "other device" not in page[: page.index("<dl>")] and "· finished</p>" in page
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
    assert "<b>" not in page and "<script>alert" not in page and "<img" not in page
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
        [line(1, 1.0), {"time": 102.0, "ended": {"code": 6, "message": "loss"}}],
        [3, None, "text", [1], {"memory": 1}, {"memory": {}}, {"finished": {}}, {"finished": 1}],
    ],
)
def test_odd_events_still_give_a_page(tmp_path: Path, events: list[Any]) -> None:
    page_of(tmp_path / "run", events)


def test_no_events_file_yet(tmp_path: Path) -> None:
    page = write_page(tmp_path, "").read_text(encoding="utf-8")
    check_whole(page)
    assert "No training lines yet." in page
    assert page.count("no numbers yet</text>") == 1


def test_losses_that_are_not_finite_are_told(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", [line(1, 4.0), line(2, math.nan), line(3, math.inf)])
    assert tiles(page)["Loss"] == ("nan", "from 4.0000, 2 not finite")


def test_same_events_same_bytes(tmp_path: Path) -> None:
    first = page_of(tmp_path / "run", KNOWN, sample="words")
    assert page_of(tmp_path / "run", KNOWN, sample="words") == first
    (tmp_path / "again").mkdir()
    assert page_of(tmp_path / "again" / "run", KNOWN, sample="words") == first


def test_long_curves_are_thinned() -> None:
    lines = [{"step": step, "loss": math.sin(step)} for step in range(1, 123_457)]
    lines[77_777]["loss"], lines[5]["loss"] = 50.0, math.nan
    points = thin(gather(lines).curve("loss"), MOST_POINTS)
    steps, losses = [point[0] for point in points], [point[3] for point in points]
    assert MOST_POINTS // 2 < len(points) <= MOST_POINTS
    assert (steps[0], steps[-1]) == (1, 123_456)
    assert (losses[0], losses[-1]) == (math.sin(1), math.sin(123_456))
    assert steps == sorted(set(steps))
    assert losses[steps.index(77_778)] == 50.0


def test_short_curves_are_kept() -> None:
    curve = gather({"step": step, "lr": 1.0 / (step + 1)} for step in range(MOST_POINTS)).curve("lr")
    assert thin(curve, MOST_POINTS) == curve and [point[3] for point in curve[:2]] == [1.0, 0.5]
    curve = thin(gather({"step": step, "lr": math.nan} for step in range(50)).curve("lr"), 10)
    assert (curve[0][0], curve[-1][0]) == (0, 49) and len(curve) <= 10 and all(math.isnan(point[3]) for point in curve)


def test_a_long_run_gives_a_page_below_two_megabytes(tmp_path: Path) -> None:
    events = [
        event for step in range(1, 5001) for event in (line(step, 1 / step), {"step": step, "eval_loss": 1 / step})
    ]
    page = page_of(tmp_path / "run", events)
    assert len(page) < 1e6
    assert f"the last {MOST_ROWS} of 5,000" in page and page.count("<tr><th>5,000</th>") == 1
    assert "<tr><th>4,901</th>" in page and "<tr><th>4,900</th>" not in page


def test_points_know_steps_tokens_and_seconds_at_work() -> None:
    history = gather(KNOWN)
    assert history.curve("loss") == [(1, 64, 1, 4.0), (2, 128, 2, 3.5), (3, 192, 5, 3.0)]
    assert history.curve("eval_loss") == [(2, 128, 2, 3.25), (3, 192, 6, 3.75)]
    assert (history.scores, history.curve("bleu", evaluated=True)) == (["perplexity", "bleu"], [(3, 192, 6, 12.5)])
    assert history.resumed == [(2, 128, 2)] and history.seconds == 12
    assert reach(history.curve("loss"), 3.5) == (2, 128, 2) and reach(history.curve("loss"), 1.0) is None


def test_evaluations_between_logged_steps_have_tokens_too() -> None:
    history = gather([{"step": 4, "tokens": 400, "loss": 1.0}, {"step": 5, "eval_loss": 1.0}])
    assert history.curve("eval_loss") == [(5, 500, 0, 1.0)]


def test_a_score_with_the_name_of_a_training_value_stays_a_score(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", [line(1, 4.0), {"step": 1, "eval_loss": 3.0, "loss": 2.0}])
    first, _, third = data_of(page)["charts"][:3]
    assert [one["points"][0][3] for one in first["series"]] == [4, 3] and third["series"][0]["points"][0][3] == 2


def test_a_clock_that_is_put_back_costs_no_time() -> None:
    assert [p[2] for p in gather([line(1, 1.0), line(5, 1.0), line(2, 1.0), line(6, 1.0)]).curve("loss")] == [
        0,
        4,
        4,
        5,
    ]


def test_charts_of_a_run(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", [*KNOWN[:-1], line(4, 2.5, mfu=0.25)])
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert [caption.partition(" <small")[0] for caption in captions] == [
        "Loss", "Gradient norm", "Perplexity", "Bleu", "Learning rate", "Throughput, tokens/s", "MFU, %", "Memory, GiB",
    ]  # fmt: skip
    assert ">resumed</small>" in captions[0] and data_of(page)["resumed"] == [[0, "resumed", 2, 128, 2]]
    loss, mfu = data_of(page)["charts"][0]["series"], data_of(page)["charts"][6]["series"]
    assert [(one["name"], one["colour"], one["dots"]) for one in loss] == [
        ("training", 0, False),
        ("evaluation", 1, True),
    ]
    assert mfu[0]["points"][-1][3] == 25


def test_the_account_of_memory(tmp_path: Path) -> None:
    memory = {
        "measured": {"weights": 3 * 2**20, "peak": 2**31},
        "predicted": {"weights": 3 * 2**20, "peak": 2**30, "x": 512},
    }
    page = page_of(tmp_path / "run", [*KNOWN, {"memory": memory}])
    table = page[page.index("<h2>Memory</h2>") :]
    assert re.findall(r">([0-9.]+ .iB)<|<td>([+-].*?)</td>", table) == [
        ("3.00 MiB", ""), ("3.00 MiB", ""), ("", "+0.0%"), ("2.00 GiB", ""), ("1.00 GiB", ""), ("", "-50.0%"),
        ("0.50 KiB", ""),
    ]  # fmt: skip
    assert 'title="3,145,728 bytes"' in table


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (None, "not finished yet"),
        ({"code": 0}, "finished"),
        ({"code": 75, "message": "<b>stopped"}, "ended with code 75: &lt;b&gt;stopped"),
        ([], "not finished yet"),
    ],
)
def test_how_the_run_ended(tmp_path: Path, end: Any, words: str) -> None:
    (tmp_path / EVENTS).write_text(json.dumps(line(1, 1.0)))
    if end is not None:
        (tmp_path / "exit.json").write_text(json.dumps(end))
    assert f"<p>{words}</p>" in write_page(tmp_path, "").read_text(encoding="utf-8")


def run_folder(folder: Path, events: list[Any], config: Config = Config()) -> Path:  # noqa: B008
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(config))
    (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_run_that_has_not_saved_yet_has_a_page_without_a_sample(tmp_path: Path) -> None:
    small = replace(Config().model, vocab=64, width=32)
    folder = run_folder(tmp_path / "run", KNOWN[:3], replace(Config(), model=small))
    page = write_report(folder, torch.device("cpu"), tmp_path / "out.html").read_text()
    check_whole(page)
    assert "What the model writes" not in page and "<th>parameters</th>" in page and "<th>data</th>" in page
    assert not (folder / "report.html").exists()


def compare(tmp_path: Path, *histories: list[Any], **changes: Any) -> str:
    configs = [Config(), replace(Config(), optim=replace(Config().optim, lr=0.5), **changes)]
    folders = [run_folder(tmp_path / f"run{k}", events, configs[k % 2]) for k, events in enumerate(histories)]
    page = write_comparison(folders, tmp_path / "out.html").read_text(encoding="utf-8")
    check_whole(page)
    return page


def rows_of(page: str, title: str) -> list[list[str]]:
    table = page[page.index(title) :].partition("</table>")[0]
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table)]


def test_runs_are_compared(tmp_path: Path) -> None:
    slower = [event | {"time": 2 * event["time"]} for event in KNOWN]
    slower[3] = slower[3] | {"eval_loss": 3.5}
    slower[6] = slower[6] | {"eval_loss": 3.25}
    page = compare(tmp_path, KNOWN, slower)
    head, first, second = rows_of(page, 'class="results"')
    assert [re.sub("<.*?>", "", cell) for cell in first][:5] == ["■run0", "3.0000", "3.0000", "3.2500", "0:00:02"]
    assert [re.sub("<.*?>", "", cell) for cell in second][:5] == ["■run1", "3.0000", "3.0000", "3.2500", "0:00:12"]
    assert head[4] == "Time to eval loss 3.2500" and first[4] == "<b>0:00:02</b>" and "<b>" not in second[4]
    assert rows_of(page, "What differs") == [["", "run0", "run1"], ["optim.lr", "0.001", "0.5"]]
    assert [(one["name"], one["colour"]) for one in data_of(page)["charts"][0]["series"]] == [
        ("run0", 0), ("run0, evaluation", 0), ("run1", 1), ("run1, evaluation", 1),
    ]  # fmt: skip
    assert [pause[:2] for pause in data_of(page)["resumed"]] == [[0, "resumed s0"], [1, "resumed s1"]]
    assert page.count('type="checkbox" value=') == 2


def test_a_section_that_only_one_run_has_is_a_difference(tmp_path: Path) -> None:
    page = compare(tmp_path, KNOWN, KNOWN, techniques=replace(Config().techniques, layer_drop=LayerDropConfig()))
    found = {row[0]: row[1:] for row in rows_of(page, "What differs")}
    assert found["techniques.layer_drop"] == ["off", "on"] and found["techniques.layer_drop.theta"] == ["", "0.5"]


def test_odd_runs_are_compared_too(tmp_path: Path) -> None:
    odd = [start(0.0, **{"<b>x": "<b>y"}), {"step": 1, "eval_loss": None}, {"memory": {"measured": {"<b>": "<b>"}}}]
    page = compare(tmp_path, KNOWN, [], [line(1, math.nan)], odd, [3, None, {"step": "x"}])
    assert "<b>x" not in page and "<b>y" not in page and "Time to loss 3.0000" in page
    assert [row[0][-4:] for row in rows_of(page, 'class="results"')] == ["", "run0", "run1", "run2", "run3", "run4"]
    compare(tmp_path / "empty", [], [])


def test_runs_of_one_name_are_told_apart_and_many_stay_small(tmp_path: Path) -> None:
    events = [line(step, 1 / step) for step in range(1, 2000)]
    folders = [run_folder(tmp_path / f"{k}" / "<b>run", events) for k in range(20)]
    page = write_comparison(folders, tmp_path / "out.html").read_text(encoding="utf-8")
    check_whole(page)
    assert f"{tmp_path}/7/&lt;b&gt;run" in page and "<b>run" not in page
    assert len(re.findall('class="line s0"', page)) == len(re.findall('class="line s0 dash"', page)) // 2 > 0


def test_what_cannot_be_compared_or_written_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", KNOWN)
    with pytest.raises(CheckpointError, match="nowhere is not a run folder"):
        write_comparison([folder, tmp_path / "nowhere"], tmp_path / "out.html")
    with pytest.raises(CheckpointError, match="run cannot be written: Is a directory"):
        write_comparison([folder, folder], folder)


def test_numbers_for_readers() -> None:
    assert [short(value) for value in (0, 0.25, 500, 25_000, 1.5e6, 3e-4, 2.5e-4, 1e-10, 1e20, -2e3)] == [
        "0", "0.25", "500", "25k", "1.5M", "3e-4", "2.5e-4", "1e-10", "1e+20", "-2k",
    ]  # fmt: skip
    assert [show(value) for value in (1234, 0.0, 2.0, 1234.56, 1e-5, True, "a<b")] == [
        "1,234", "0", "2.0000", "1,234.6", "1e-05", "True", "a&lt;b",
    ]  # fmt: skip


def test_importing_the_page_does_not_import_matplotlib() -> None:
    code = "import sys, stretto.report.page; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
