"""The pages in a real browser: they draw, answer, fit and stay silent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.config import Config, dump_config
from stretto.report import EVENTS
from stretto.report.compare import write_comparison
from stretto.report.page import write_page
from tests.browser import PROGRAM, Browser, start_browser

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium to look at the page with")
POINTS = (
    "[...document.querySelectorAll('figure')].map(f => f.querySelector('path.line').getAttribute('d').length > 100)"
)
CURVE = "document.querySelector('figure path.line:not(.faint)').getAttribute('d')"
LABELS = "[...document.querySelectorAll('figure:first-child svg text')].map(text => text.textContent)"
LONG = "a-name-that-is-far-too-long-for-a-telephone-and-has-no-place-to-break-" * 3


def make_run(folder: Path, pace: float = 1.0, steps: int = 200) -> Path:
    """A run of real length: with a pause, evaluations, a loss that is not finite, and a memory account."""
    lines: list[dict[str, Any]] = [{"time": 0.0, "environment": {"device": "CPU", "command": f"stretto train {LONG}"}}]
    for step in range(1, steps + 1):
        if step == 121:
            lines.append({"time": 5000.0, "environment": {"device": "CPU", "command": "stretto train --resume"}})
        moment = pace * step + 5000.0 * (step > 120)
        loss = None if step == 50 else 2 + 4 * math.exp(-step * pace / 40) + 0.1 * math.sin(7 * step)
        speed = {"tokens_per_s": 1e5 / pace + 1e3 * math.sin(step), "mfu": 0.4, "memory_gib": 12.5, "padding": 0.0}
        values = {"loss": loss, "lr": 1e-3 * (1 - step / steps), "grad_norm": 1 + 20 / step, "tokens": 512 * step}
        lines.append({"time": moment, "step": step, **values, **speed})
        if step % 20 == 0:
            score = 2.2 + 4 * math.exp(-step * pace / 40)
            lines.append({"time": moment, "step": step, "eval_loss": score, "perplexity": math.exp(score)})
    lines.append({"memory": {"measured": {"weights": 2**30}, "predicted": {"weights": 2**30, "activations": 2**31}}})
    folder.mkdir(parents=True)
    (folder / EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(dump_config(Config()))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("one") / "run")
    return write_page(folder, dump_config(Config()), "a sample\n" + LONG, {"model": "decoder", "data": LONG})


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    names = ("fast", "plain", "<script><b>odd", LONG)
    runs = [make_run(folder / f"run{k}", 1 + k / 2) for k in range(len(names))]
    named = [run.rename(folder / name) for run, name in zip(runs, names, strict=True)]
    return write_comparison(named, folder / "comparison.html")


@pytest.fixture
def quiet(browser: Browser) -> Iterator[Browser]:
    """A browser that had nothing to complain about, and asked for nothing but the page itself."""
    yield browser
    assert browser.complaints == []
    assert all(request.startswith("file:") and request.endswith(".html") for request in browser.requests)
    assert len(browser.requests) == 1


def press(browser: Browser, selector: str) -> None:
    browser.value(f"document.querySelector({json.dumps(selector)}).click()")


def set_smoothing(browser: Browser, value: int) -> None:
    script = (
        "const s = document.querySelector('[name=smoothing]'); s.value = {}; s.dispatchEvent(new Event('input', {}))"
    )
    browser.value("{" + script.format(value, "{bubbles: true}") + "}")


def point_at_the_middle(browser: Browser) -> None:
    """Of the steps in the first chart."""
    browser.value("document.querySelector('figure').scrollIntoView()")
    box = "document.querySelector('figure').getBoundingClientRect()"
    left, top, width = (browser.value(f"{box}.{side}") for side in ("left", "top", "width"))
    browser.point(left + 52 + (width - 66) / 2.02, top + 100)


def test_all_charts_are_drawn(quiet: Browser, one: Path) -> None:
    quiet.open(one)
    assert quiet.value(POINTS) == [True] * 7
    assert quiet.value("document.querySelectorAll('path.resumed').length") == 7
    assert quiet.value("document.querySelector('figure svg').viewBox.baseVal.width") == quiet.value(
        "document.querySelector('figure').clientWidth"
    ), "drawn for this width"
    assert quiet.value("document.querySelectorAll('figure:first-child circle').length") == 10, "evaluations"
    assert quiet.value(CURVE).count("M") == 2, "broken where the loss was not finite"
    assert not quiet.value("document.getElementById('controls').hidden")


def test_axes_can_be_switched(quiet: Browser, one: Path) -> None:
    quiet.open(one)
    assert quiet.value(LABELS)[-1] == "step" and "100" in quiet.value(LABELS)
    before = quiet.value(CURVE)
    press(quiet, "[name=axis][value='1']")
    assert quiet.value(LABELS)[-1] == "tokens" and "40k" in quiet.value(LABELS)
    press(quiet, "[name=axis][value='2']")
    assert quiet.value(LABELS)[-1] == "time" and "1:00" in quiet.value(LABELS)
    assert quiet.value(CURVE) != before, "the pause is left out, but the start was slower"
    press(quiet, "[name=axis][value='0']")
    assert quiet.value(CURVE) == before


def test_smoothing_keeps_the_raw_curve_beside_it(quiet: Browser, one: Path) -> None:
    quiet.open(one)
    raw = quiet.value(CURVE)
    set_smoothing(quiet, 90)
    assert quiet.value("document.querySelector('figure path.faint').getAttribute('d')") == raw != quiet.value(CURVE)
    assert quiet.value("document.querySelector('output').textContent") == "0.90"
    assert quiet.value("document.querySelectorAll('path.faint').length") == 4, "loss, norm, throughput and MFU"
    set_smoothing(quiet, 0)
    assert quiet.value(CURVE) == raw and quiet.value("document.querySelectorAll('path.faint').length") == 0


def test_a_log_scale(quiet: Browser, one: Path) -> None:
    quiet.open(one)
    linear, speed = quiet.value(CURVE), "document.querySelectorAll('figure path.line')[5].getAttribute('d')"
    before = quiet.value(speed)
    press(quiet, "[name=log]")
    assert quiet.value(CURVE) != linear
    assert quiet.value(speed) == before, "what begins at 0 stays as it is"
    assert {"2", "5"} <= set(quiet.value(LABELS))


def test_values_under_the_pointer_and_by_keys(quiet: Browser, one: Path) -> None:
    quiet.open(one)
    assert quiet.value("document.querySelectorAll('.tip, .guide').length") == 0
    point_at_the_middle(quiet)
    tip = quiet.value("document.querySelector('.tip').innerText").split("\n")
    assert tip == ["step 100", f"training {2 + 4 * math.exp(-2.5) + 0.1 * math.sin(700):.4f}", "evaluation 2.5283"]
    assert quiet.value("document.querySelectorAll('path.guide').length") == 7, "in all charts"
    quiet.point(5, 5)
    assert quiet.value("document.querySelectorAll('.tip, .guide').length") == 0
    quiet.value("document.querySelector('figure').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        quiet.press(key)
    assert quiet.value("document.querySelector('.tip div').textContent") == "step 2"


def test_runs_are_shown_and_hidden(quiet: Browser, four: Path) -> None:
    quiet.open(four)
    lines = "document.querySelectorAll('figure:first-child path.line:not(.faint)').length"
    assert quiet.value(lines) == 8
    press(quiet, ".legend input[value='2']")
    assert quiet.value(lines) == 6
    for run in (0, 1, 3):
        press(quiet, f".legend input[value='{run}']")
    assert quiet.value(lines) == 0 and "no numbers yet" in quiet.value("document.querySelector('figure').textContent")
    press(quiet, ".legend input[value='0']")
    assert quiet.value(lines) == 2
    assert quiet.value("document.querySelectorAll('b').length") < 8, "only what the page itself marks as the best"
    assert "<script><b>odd" in quiet.value("document.querySelector('.legend').innerText")


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
def test_no_page_is_wider_than_the_screen(quiet: Browser, one: Path, four: Path, width: int) -> None:
    for page in (one, four):
        quiet.open(page, width)
        press(quiet, "summary")
        assert quiet.value("document.documentElement.scrollWidth") == width
        assert quiet.value("document.querySelector('figure').clientWidth") >= min(width, 1000) - 60
        point_at_the_middle(quiet)
        assert quiet.value("document.querySelector('.tip').getBoundingClientRect().width") > 80
        assert quiet.value("document.documentElement.scrollWidth") == width, "also with a long name under the pointer"
        small = "[...document.querySelectorAll('svg text')].every(t => t.getBoundingClientRect().height > 9)"
        assert quiet.value(small), "text is readable"


def test_colours_follow_the_reader(quiet: Browser, one: Path) -> None:
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.line')).stroke]"
    )
    quiet.open(one)
    assert quiet.value(colours) == ["rgb(255, 255, 255)", "rgb(42, 111, 176)"]
    quiet.show("screen", "dark")
    assert quiet.value(colours) == ["rgb(20, 24, 29)", "rgb(108, 178, 242)"]
    quiet.show("print", "dark")
    assert quiet.value(colours) == ["rgb(255, 255, 255)", "rgb(42, 111, 176)"], "paper is white"
    assert quiet.value("getComputedStyle(document.getElementById('controls')).display") == "none"


def test_it_can_be_read_without_javascript(browser: Browser, one: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        one.read_text(encoding="utf-8").replace("script-src 'sha256-", "script-src 'sha256-no"), encoding="utf-8"
    )
    browser.open(page)
    assert browser.value(POINTS) == [True] * 7
    assert browser.value("getComputedStyle(document.getElementById('controls')).display") == "none"
    assert browser.complaints, "the control: a script that the policy does not name is refused, and that is noticed"


def test_the_policy_refuses_what_escaping_would_miss(browser: Browser, one: Path, tmp_path: Path) -> None:
    """The control of everything above: planted markup would be seen as a request, a script or a complaint."""
    page, planted = (
        tmp_path / "page.html",
        "<script>document.title = 'planted'</script><img src='http://127.0.0.1:9/x.png'>",
    )
    page.write_text(one.read_text(encoding="utf-8").replace("<header>", planted + "<header>"), encoding="utf-8")
    browser.open(page)
    assert browser.value("document.title") == "run" and len(browser.complaints) >= 2
    page.write_text(page.read_text(encoding="utf-8").replace("Content-Security-Policy", "no-policy"), encoding="utf-8")
    browser.open(page)
    assert browser.value("document.title") == "planted"
    assert "http://127.0.0.1:9/x.png" in browser.requests


def test_an_empty_run_has_a_page_too(quiet: Browser, tmp_path: Path) -> None:
    quiet.open(write_page(tmp_path, ""))
    assert quiet.value("document.querySelector('figure').textContent").strip() == "Loss\nno numbers yet"
    assert quiet.value("[...document.querySelectorAll('[name=axis]')].map(box => box.disabled)") == [False, True, True]


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 0, "loss": 1.0}],
        [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1e99}, {"step": 3, "loss": 1e-99}],
        [{"step": 3, "loss": -1.0, "lr": 0.0, "time": 1e99, "tokens": 1e99}, {"step": 2, "loss": 0.0, "tokens": 3}],
        [{"step": 1e99, "loss": 1e99}, {"step": 1, "eval_loss": 5.0, "<b>": 1}],
    ],
)
def test_odd_numbers_are_drawn_without_a_complaint(quiet: Browser, tmp_path: Path, lines: list[Any]) -> None:
    (tmp_path / EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    quiet.open(write_page(tmp_path, ""))
    for selector in ("[name=log]", "[name=axis][value='1']", "[name=axis][value='2']"):
        press(quiet, selector)
    assert "NaN" not in quiet.value("document.querySelector('.charts').innerHTML")
