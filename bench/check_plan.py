"""How far the planner is from what docs/results.md has of one H200: times and memory, workload by workload.

    python -m bench.check_plan

CALIBRATION names the figures that the constants of planning/times.py were set by, besides the tables of single kernels;
the errors of all others are the test. Nothing is measured here, and no GPU is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from stretto.bench.batches import draw_batches
from stretto.bench.contest import make_recipe
from stretto.bench.workloads import WORKLOADS, Workload
from stretto.config import Config, build_config
from stretto.flops import tokens_per_sample
from stretto.hardware import read_hardware
from stretto.plan import find_choice, find_needs
from stretto.planning.layout import find_memory
from stretto.planning.times import Work, find_step
from stretto.recipes import load_recipe

RESULTS = Path(__file__).parents[1] / "docs" / "results.md"
HARDWARE = read_hardware("h200")
STEPS, LESS, EIGHT, DROPPED = "Training steps", "Less memory: `lean`", "Products of 8 bits: `fp8`", "Steps with blocks"
WITHOUT_HEAD = 6  # columns; the table of runs whose output layer has 8 bits, too, has fewer
CALIBRATION = {
    (STEPS, "gpt2_medium_16x1024"), (STEPS, "llama1b_4x4096"), (STEPS, "bert_large_8x128"),
    (EIGHT, "gpt2_medium_16x1024"), ("plain, compiled", "gpt2_small_32x1024"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    section: str  # of docs/results.md
    workload: str
    predicted_ms: float
    measured_ms: float
    predicted_gib: float = 0.0  # tensors at the peak
    measured_gib: float = 0.0  # reserved memory in STEPS, which is more; else tensors. 0: it was not measured

    @property
    def errors(self) -> tuple[float, float | None]:
        memory = self.predicted_gib / self.measured_gib - 1 if self.measured_gib else None
        return self.predicted_ms / self.measured_ms - 1, memory

    @property
    def kind(self) -> str:
        """A step of a workload that the constants were set by, in another way, is no test of them."""
        if (self.section, self.workload) in CALIBRATION:
            return "calibration"
        return "the same workload" if (STEPS, self.workload) in CALIBRATION else "held out"


def read_section(text: str, title: str) -> list[list[str]]:
    """The cells of all rows of tables in a section."""
    body = text[text.index(f"## {title}") :].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def read_number(cell: str) -> float:
    found = re.match(r"([\d.]+)(k?)", cell)
    return float(found[1]) * (1e3 if found[2] else 1.0) if found else 0.0


def find_workload(cell: str) -> str:
    name = re.match(r"\w+", cell)
    return name[0] if name and name[0] in WORKLOADS else ""


def describe(workload: Workload, techniques: dict[str, Any], model: dict[str, Any]) -> Config:
    """The recipe of the bench on a GPU, with the shape of its batches."""
    recipe = make_recipe(workload, "stretto", graphs=True)
    length = workload.length or 200
    data = {"seq_len": length, "batch_size": max(workload.rows, 1), "join_documents": workload.lengths is None}
    largest = max(workload.budget, workload.rows * length)
    changes = {
        "data": recipe["data"] | data | {"max_tokens": largest},
        "model": {"max_len": max(length, 1024)} | workload.model | model,
        "techniques": recipe["techniques"] | techniques,
        "run": {"device": "cuda"},
    }
    return build_config(recipe | changes)


def predict(name: str, techniques: dict[str, Any] | None = None, **model: Any) -> tuple[float, float, float]:
    """Milliseconds of a step, GiB, and real tokens of a step."""
    workload = WORKLOADS[name]
    config = describe(workload, techniques or {}, model)
    counts = [batch.counts for batch in draw_batches(workload, config.model)]
    needs = find_needs(config)
    choice, load = find_choice(config, needs), needs.load
    slots = max(count.slots for count in counts) if config.model.kind != "vit" else load.tokens
    load = replace(load, tokens=slots, source=max(count.source_slots for count in counts))
    load = replace(load, labels=max(count.labels for count in counts))
    needs = replace(needs, load=load)
    works = [
        Work(c.tokens, c.labels, c.pairs, c.source_tokens, c.source_pairs, c.cross_pairs, load.attention)
        for c in counts
    ]
    steps = [find_step(config, HARDWARE, work, needs, choice, shared=False).total for work in works]
    tokens = fmean(count.tokens for count in counts) * tokens_per_sample(config.model)
    return 1e3 * fmean(steps), find_memory(config, needs, choice) / 2**30, tokens


def list_rows(text: str) -> Iterator[Row]:
    for cells in read_section(text, STEPS):
        if name := find_workload(cells[0]):
            ms, gib, tokens = predict(name)
            yield Row(STEPS, name, ms, 1e3 * tokens / read_number(cells[1]), gib, read_number(cells[3]))
    plain = re.search(r"compiled, GPT-2 small does ([\d.]+k) tokens/s, MFU [\d.]+%, in ([\d.]+) GiB", text)
    assert plain is not None, "the line about GPT-2 small without techniques"
    yield make_plain(read_number(plain[1]), read_number(plain[2]))
    for cells in read_section(text, EIGHT):
        if (name := find_workload(cells[0])) and len(cells) == WITHOUT_HEAD:
            ms, gib, tokens = predict(name, {"fp8": True})
            yield Row(EIGHT, name, ms, 1e3 * tokens / read_number(cells[3]))
    for cells in read_section(text, LESS):
        if name := find_workload(cells[0]):
            ms, gib, tokens = predict(name, {"lean": {"mlp": "product"} if WORKLOADS[name].bf16_weights else True})
            yield Row(LESS, name, ms, 1e3 * tokens / read_number(cells[3]), gib, read_number(cells[4]))
    for cells in read_section(text, DROPPED):
        if (name := find_workload(cells[0])) and "index" not in cells[0]:
            ms, gib, _ = predict(name, {"layer_drop": {"schedule": "constant"}}, norm_order="pre")
            yield Row(DROPPED, name, ms, read_number(cells[2]))


def make_plain(tokens_per_s: float, gib: float) -> Row:
    name = "gpt2_small_32x1024"
    config = load_recipe("causal-lm", ["techniques.fused=false", "train.compile=true", "run.device=cuda"])
    needs, tokens = find_needs(config), config.data.batch_size * config.data.seq_len
    choice = find_choice(config, needs)
    work = Work(tokens, needs.load.labels, tokens * config.data.seq_len, attention=needs.load.attention)
    seconds = find_step(config, HARDWARE, work, needs, choice, shared=False).total
    memory = find_memory(config, needs, choice) / 2**30
    return Row("plain, compiled", name, 1e3 * seconds, 1e3 * tokens / tokens_per_s, memory, gib)


def summarise(rows: Sequence[Row]) -> str:
    times = [abs(row.errors[0]) for row in rows]
    memory = [abs(error) for row in rows if (error := row.errors[1]) is not None]
    words = f"{len(times)} times: median {median(times):.1%}, worst {max(times):.1%}"
    return f"{words}; {len(memory)} peaks: median {median(memory):.1%}, worst {max(memory):.1%}"


def main() -> None:
    rows = list(list_rows(RESULTS.read_text(encoding="utf-8")))
    print("| of | workload | ms, predicted | measured | error | GiB, predicted | measured | error | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    for row in rows:
        error, memory = row.errors
        gib = "| | |" if memory is None else f"{row.predicted_gib:.2f} | {row.measured_gib:.1f} | {memory:+.1%}"
        print(
            f"| {row.section} | {row.workload} | {row.predicted_ms:.1f} | {row.measured_ms:.1f} | {error:+.1%} |"
            f" {gib} | {row.kind} |"
        )
    print()
    for kind in dict.fromkeys(row.kind for row in rows):
        print(f"{kind}: {summarise([row for row in rows if row.kind == kind])}")


if __name__ == "__main__":
    main()
