"""A run folder as one page: report.html has headline numbers, charts, a sample, tables and the configuration.

The page stands alone, offline and printed. Its policy forbids the browser to load anything, and to run any script but
page.js, which is in it. Whatever comes from a run is escaped. The same events give the same bytes.
"""

from __future__ import annotations

import math
import statistics
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import torch

from stretto import checkpoint
from stretto.config import Config, dump_config
from stretto.errors import CheckpointError, tell
from stretto.files import write_text
from stretto.generate import sample
from stretto.model import Decoder, build_model
from stretto.report import COUNTS
from stretto.report.ablation import HEAD, describe_way, read_ablation, tabulate
from stretto.report.chart import choose_charts, draw_figure, dump_charts
from stretto.report.history import Event, History, clock, finite, number, read_history, short, show
from stretto.trained import load_run_config, load_trained
from stretto.version import __version__

PAGE = "report.html"
MOST_ROWS = 100  # of the table of evaluations


def write_report(folder: Path, device: torch.device, out: Path | None = None) -> Path:
    """Writes the page of a run, with a sample from the model where there is one that generates text."""
    config, text = load_run_config(folder), ""
    if config.checkpoint.keep and not config.model.own and checkpoint.steps(folder / "checkpoints"):
        trained = load_trained(folder, device)
        writes = isinstance(trained.model, Decoder) and trained.tokenizer is not None
        text = sample(trained, config.train.sample) if writes else ""
        if trained.chat is not None:
            text = f"{config.train.sample}\n\n{text}"
    return write_page(folder, dump_config(config), text, _describe(config), out)


def write_page(
    folder: Path, config_text: str, sample: str = "", facts: dict[str, Any] | None = None, out: Path | None = None
) -> Path:
    """Writes folder/report.html from its events, at any moment of a run, and says where it is."""
    run, facts = read_run(folder), facts or {}
    ablation = _list_ablation(folder)
    start = run.starts[0] if run.starts else {}
    return fill_page(
        out or folder / PAGE, [run],
        title=run.name,
        brief=[facts.get("model"), start.get("device"), show_date(start.get("time")), _explain_end(run)],
        headline=_headline(run),
        sections=_sections(run, facts, config_text, sample, ablation),
    )  # fmt: skip


def read_run(folder: Path) -> History:
    try:
        return read_history(folder)
    except OSError as error:
        tell(f"warning: the report has no curves, since the events cannot be read: {error}")
        return History(folder.resolve().name)


def fill_page(
    path: Path, runs: Sequence[History], title: str, brief: Sequence[Any], headline: str, sections: Iterator[str]
) -> Path:
    """Writes a page of one run or of several: with the same charts and the same way to look at them."""
    charts = choose_charts(runs)
    style, script = "\n" + _read_part("page.css"), "\n" + _read_part("page.js")
    page = Template(_read_part("page.html")).substitute(
        title=escape(title), subtitle=" · ".join(show(part) for part in brief if part), headline=headline,
        charts="\n".join(draw_figure(chart, series, runs) for chart, series in charts), sections="\n".join(sections),
        smoothing="0" if len(runs) == 1 else "60", version=__version__,
        data=dump_charts(charts, runs), style=style, style_hash=_hash(style), script=script, script_hash=_hash(script),
    )  # fmt: skip
    try:
        write_text(path, page)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _read_part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


def _headline(history: History) -> str:
    """Makes the row of numbers at the top, without numbers that the run does not have."""
    tiles: list[tuple[str, str, str]] = []
    training = history.training
    if losses := [number(event, "loss") for event in training if "loss" in event]:
        odd = len(losses) - len(finite(training, "loss"))
        note = f"from {show(losses[0])}" + f", {odd:,} not finite" * bool(odd)
        tiles.append(("Loss", show(losses[-1]), note))
    if best := history.best("eval_loss"):
        counts = " of ".join(show(history.evaluations[-1][key]) for key in COUNTS if key in history.evaluations[-1])
        note = f"at step {best[0]:,.0f}" + f", {counts} batches" * bool(counts)
        tiles.append(("Best eval loss", show(best[3]), note))
    if speeds := finite(training, "tokens_per_s"):
        tiles.append(("Tokens/s", f"{statistics.median(speeds):,.0f}", "median"))
    if used := [value for value in finite(training, "mfu") if value]:
        tiles.append(("MFU", f"{statistics.median(used):.1%}", "median"))
    if memory := max(finite(training, "memory_gib"), default=0.0):
        tiles.append(("Peak memory", f"{memory:.2f} GiB", ""))
    if not math.isnan(history.steps):
        tokens = max(finite(training, "tokens"), default=0.0)
        tiles.append(("Steps", f"{history.steps:,.0f}", f"{short(tokens)} tokens" if tokens else ""))
    if history.seconds:
        tiles.append(("Wall time", clock(history.seconds), ""))
    cells = (f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in tiles)
    return f"<dl>{''.join(cells)}</dl>" if tiles else "<p>No training lines yet.</p>"


def _sections(history: History, facts: dict[str, Any], config_text: str, sample: str, ablation: str) -> Iterator[str]:
    if sample:
        yield make_section("What the model writes", f"<pre>\n{escape(sample)}</pre>")
    if history.evaluations:
        count = len(history.evaluations)
        more = f", the last {MOST_ROWS} of {count:,}" if count > MOST_ROWS else ""
        yield make_section("Evaluations" + more, _list_evaluations(history.evaluations[-MOST_ROWS:]))
    if ablation:
        yield ablation
    if account := account_bytes(history.memory):
        yield make_section("Memory", account)
    if history.finished:
        facts = facts | {"at the end": ", ".join(f"{key} {value}" for key, value in history.finished.items())}
    if facts:
        rows = [[show(cell) for cell in fact] for fact in facts.items()]
        yield make_section("The run", make_table([], rows, "facts"))
    if history.starts:
        yield make_section("Environment", _list_starts(history.starts))
    yield f"<details><summary>Configuration</summary>\n<pre>\n{escape(config_text)}</pre></details>"


def _list_ablation(folder: Path) -> str:
    steps, results = read_ablation(folder)
    rows = [[escape(cell) for cell in row] for row in tabulate(results)]
    return make_section(describe_way(steps), make_table(HEAD, rows)) if results else ""


def _list_evaluations(evaluations: Sequence[Event]) -> str:
    keys = list(dict.fromkeys(["step", *(key for e in evaluations for key in e if key not in ("time", "at"))]))
    rows = [[show(e.get(key, "")) for key in keys] for e in evaluations]
    return make_table([key.replace("_", " ") for key in keys], rows)


def _list_starts(starts: Sequence[Event]) -> str:
    keys = list(dict.fromkeys(key for start in starts for key in start if key != "time"))
    rows = [[show(key), *(show(start.get(key, "")) for start in starts)] for key in keys]
    dates = ["started", *(show_date(start["time"]) for start in starts)]
    return make_table(
        ["", *(f"start {k + 1}" for k in range(len(starts)))] * (len(starts) > 1), [dates, *rows], "facts"
    )


def _describe(config: Config) -> dict[str, Any]:
    """Says in a few words what was trained on what; the configuration says the rest."""
    model, data, micro = config.model, config.data, config.train.micro_batches
    if model.own:
        return {"model": model.own, "data": f"{data.train} ({data.task})"}
    size = sum(weight.numel() for weight in build_model(model).parameters())
    batch = {"translation": f"{data.max_tokens:,} tokens", "images": f"{data.batch_size:,} images"}
    used = [f"{name} (auto)" if value == "auto" else name for name, value in asdict(config.techniques).items() if value]
    return {
        "model": f"{model.kind} with {short(size)} parameters",
        "parameters": size,
        "shape": f"{model.layers} layers, width {model.width:,}, {model.heads} heads",
        "data": f"{data.train} ({data.task})",
        "batch": f"{micro} x " * (micro > 1) + batch.get(data.task, f"{data.batch_size:,} x {data.seq_len:,} tokens"),
        **({"techniques": ", ".join(used)} if used else {}),
    }


def _explain_end(history: History) -> str:
    code = history.end.get("code")
    if history.finished or code == 0:
        return str(history.finished.get("reason") or history.end.get("message") or "finished")
    return "not finished yet" if code is None else f"ended with code {code}: {history.end.get('message', '')}"


def make_section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}"


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """Makes a table of cells that are escaped already, under a head that is not."""
    top = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr></thead>\n" if head else ""
    cells = ((first, "".join(f"<td>{value}</td>" for value in rest)) for first, *rest in rows)
    body = "\n".join(f"<tr><th>{first}</th>{rest}</tr>" for first, rest in cells)
    return f'<div class="table"><table class="{kind}">\n{top}<tbody>\n{body}\n</tbody></table></div>'


def account_bytes(memory: dict[str, Any]) -> str:
    """Makes a table of bytes by role, one column per account, and how far the second of two is from the first."""
    columns = [(name, values) for name, values in memory.items() if values and isinstance(values, dict)]
    keys = list(dict.fromkeys(key for _, values in columns for key in values))
    if not keys:
        return ""
    compared = [name for name, _ in columns] == ["measured", "predicted"]
    rows = []
    for key in keys:
        sizes = [number(values, key) for _, values in columns]
        known = compared and sizes[0] > 0 and math.isfinite(sizes[1])
        gap = f"{sizes[1] / sizes[0] - 1:+.1%}" if known else ""
        rows.append([show(key), *(_bytes(values.get(key, "")) for _, values in columns), *[gap] * compared])
    return make_table(["", *(name for name, _ in columns), *(["difference"] if compared else [])], rows)


def _bytes(value: Any) -> str:
    size = number({"": value}, "")
    if not math.isfinite(size):
        return show(value)
    unit, name = next(((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if size >= unit), (2**10, "KiB"))
    return f'<span title="{size:,.0f} bytes">{size / unit:,.2f} {name}</span>'


def show_date(time: Any) -> str:
    seconds = number({"": time}, "")
    return f"{datetime.fromtimestamp(seconds, UTC):%d %B %Y, %H:%M} UTC".lstrip("0") if 0 <= seconds < 1e11 else ""
