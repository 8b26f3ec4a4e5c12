"""What `stretto plan` prints and writes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stretto.config import dump_config
from stretto.files import write_text
from stretto.hardware import NODE, Hardware
from stretto.plan import FILLED, find_size
from stretto.planning.layout import Outcome
from stretto.planning.search import BATCH, LAYOUT, OFF, PRECISION, Candidate, Plan, explain
from stretto.planning.times import Times

ROWS = 6
WIDTH = 150  # of the table where the output is no terminal
NUMBERS = ("tokens/s", "ms a step", "GiB", "MFU", "in all", "kWh")
WIDE, FEW = 110, 3  # columns of a terminal, and the numbers that are shown in a narrower one
UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def show(plan: Plan, recipe: str, out: Path | None) -> None:
    """Prints table, reasons and what to do, and writes the chosen recipe."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    console.print(describe(plan), markup=False)
    console.print(make_table(plan, console.width))
    for line in (*plan.notes, *explain_times(plan.best), "", *explain(plan), "", *advise(plan, recipe, out)):
        console.print(line, markup=False)
    if out is not None:
        write_recipe(plan, recipe, out)
        console.print(f"written: {out}", markup=False)


def describe(plan: Plan) -> str:
    cfg, hardware, (key, size) = plan.recipe, plan.hardware, find_size(plan.config)
    measured = (
        f"measured in the first {plan.measured} rows, else computed" if plan.measured else "computed, not measured"
    )
    return (
        f"{cfg.model.preset or cfg.model.kind} on {hardware.describe()}: {key} x micro-batches ="
        f" {size * cfg.train.micro_batches:,} an update, {cfg.train.steps:,} updates; times are {measured}"
    )


def make_table(plan: Plan, width: int) -> Table:
    """Lines of so many columns; the last numbers are left out where there is no room for words."""
    table, numbers = Table(box=SIMPLE_HEAD), NUMBERS if width >= WIDE else NUMBERS[:FEW]
    for name in ("", "layout", "micro-\nbatches", "techniques"):
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(islice(list_distinct(plan), ROWS), 1):
        table.add_row(str(number), *list_cells(one)[: 3 + len(numbers)])
    return table


def list_distinct(plan: Plan) -> Iterator[Candidate]:
    """Candidates of which each differs from all before in time or memory."""
    seen = set[Outcome]()
    for one in plan.candidates:
        if one.outcome not in seen:
            seen.add(one.outcome)
            yield one


def list_cells(one: Candidate) -> list[str]:
    (_, size), hardware = find_size(one.config), one.hardware
    tokens, mfu = one.rates
    names = {key.rpartition(".")[2]: words for key, words in one.words.items() if key.startswith("techniques.")}
    on = [name + words.removeprefix("on") for name, words in names.items() if words != OFF]
    on += [one.words[PRECISION]] if one.words[PRECISION] != "auto" else []
    total = one.seconds * one.config.train.steps
    return [
        one.words[LAYOUT],
        f"{one.words[BATCH]} x {size:,}",
        ", ".join(on) or "none",
        describe_number(tokens),
        f"{1e3 * one.seconds:,.1f}",
        f"{one.outcome.memory / 2**30:.{1 if one.outcome.memory >= 2**30 else 3}f}",
        f"{mfu:.1%}" if hardware.is_gpu else "",  # the peak of a CPU is a guess
        describe_time(total),
        f"{find_energy(hardware, total):,.3f}",
    ]


def find_energy(hardware: Hardware, seconds: float) -> float:
    """The kWh of all boards at the power that they may take."""
    return hardware.watts * hardware.count * seconds / 3.6e6


def describe_number(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def describe_time(seconds: float) -> str:
    unit, size = next((unit for unit in UNITS if seconds >= 2 * unit[1]), UNITS[-1])
    return f"{seconds / size:,.1f} {unit}"


def explain_times(best: Candidate) -> Iterator[str]:
    """The milliseconds of the first row, by part."""
    parts = {field.name: 1e3 * getattr(best.outcome.times, field.name) for field in fields(Times)}
    yield "ms of the first row: " + ", ".join(f"{name} {ms:,.1f}" for name, ms in parts.items() if ms >= 0.05)
    limit = FILLED * best.hardware.memory / 2**30
    yield f"memory: the peak of tensors, of {limit:.1f} GiB that they may take; kWh: at the full power of the boards"


def advise(plan: Plan, recipe: str, out: Path | None) -> Iterator[str]:
    """The command that trains so."""
    train = f"train {out or 'FILE.toml'}"
    if not plan.hardware.is_gpu and not plan.measured:
        yield "these are times of a CPU, and guesses: name a GPU by --gpu, or measure by --measure"
    if out is None:
        yield f"stretto plan {shlex.quote(recipe)} ... --out FILE.toml writes this recipe; then:"
    count = plan.hardware.count
    machines = next(many for many in range(-(-count // NODE), count + 1) if count % many == 0)
    others = f" --machines {machines} --machine 0 --meet HOST:29500" if machines > 1 else ""
    yield f"stretto {train}" if count == 1 else f"stretto launch -n {count // machines}{others} {train}"


def write_recipe(plan: Plan, recipe: str, out: Path) -> None:
    head = f"# Planned for {plan.hardware.describe()}, from {recipe}.\n"
    write_text(out, head + dump_config(plan.write(plan.best)))
