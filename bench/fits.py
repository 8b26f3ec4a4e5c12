"""What fits into how much memory, and how fast it then runs: the claims of the technique `lean`.

    python -m bench.fits batches                     the largest batches within caps of memory, ours and Hugging Face's
    python -m bench.fits settings                    predicted and measured peaks of everything that blocks may keep
    python -m bench.fits long --model gpt2-medium    one very long sequence, blocks computed again as a whole

Every measurement is a process of its own, in which torch's allocator may take no more than the cap: what fails, and
what it leaves behind in the memory of its process, does not touch the next. What the driver takes is not counted. A
batch fits if a training step runs three times or more, as often as `stretto bench` warms up; where steps are recorded
as CUDA graphs, recording and a replay are among these.

A measurement whose result is in the folder already, of the same commit and device, is not repeated: an interrupted run
goes on where it was. On a CPU models are tiny and memory has no cap: as many rows fit as the cap has GiB.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from stretto import runtime
from stretto.batch import Batch
from stretto.bench.batches import draw_batches
from stretto.bench.contest import FUSED, describe_run, find_obstacle, make_recipe, run_apart, say
from stretto.bench.measure import time_passes, warm_up
from stretto.bench.worker import build_contestant, count_work, explain, form
from stretto.bench.workloads import WORKLOADS, Workload, find_workloads, fit_to_device
from stretto.config import Config, build_config
from stretto.dial import CHUNKS, follow
from stretto.errors import ConfigError, OutOfMemoryError, StrettoError
from stretto.files import make_folder, write_text
from stretto.memory import Keep, list_blocks
from stretto.plan import LADDER, find_choice, find_largest, find_needs
from stretto.runtime import choose_device, memory_gib, total_memory

GIB = 2**30
RESERVE = 0.05  # share of a cap that the dial leaves to the allocator, which cannot use all that it takes
FULL = "out of memory"
FROM_OUTPUTS: dict[str, Any] = {"norms": "output", "mlp": "product"}
# What each contestant adds to the recipe of `stretto bench`; the dial's memory is the cap's.
CONTESTANTS: dict[str, dict[str, Any]] = {
    "stretto": {}, "stretto lean": FROM_OUTPUTS, "stretto dial": FROM_OUTPUTS, "stretto hf lean": {}, "hf eager": {},
    "hf compile": {}, "hf checkpoint": {},
}  # fmt: skip
SETTINGS = {"fused alone": LADDER["everything"]} | {name: k for name, k in LADDER.items() if k != Keep()}
ROBERTA = Workload(
    "RoBERTa large, masked LM, 64 x 512, by Hugging Face and accelerated",
    {"preset": "bert-large", "vocab": 50304}, 64, 512,
    own={"model_type": "roberta", "vocab_size": 50304, "hidden_size": 1024, "num_hidden_layers": 24,
         "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 514, "type_vocab_size": 1,
         "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
)  # fmt: skip
# Learned positions of such lengths would be more parameters than the rest of a model.
MEDIUM = {"preset": "gpt2-medium", "vocab": 50304, "positions": "rotary", "dropout": 0.0, "attention_dropout": 0.0}
LONG = {
    "gpt2-medium": Workload("GPT-2 medium, rotary positions", MEDIUM, bf16_weights=True),
    "llama-1b": Workload("Llama-3.2-1B's shape", {"preset": "llama-1b", "kv_heads": 8}, bf16_weights=True),
}
SEARCHED = ["bert_large_64x512", "gpt2_medium_16x1024", "roberta_large_64x512"]
ROWS = {name: workload for name, workload in WORKLOADS.items() if workload.rows} | {SEARCHED[-1]: ROBERTA}
ALL = WORKLOADS | ROWS | LONG

Numbers = dict[str, Any]  # of one measurement, or {"failed": reason}
Row = dict[str, Any]  # of a table
app = typer.Typer(help="What fits into how much memory.", no_args_is_help=True, add_completion=False,
                  pretty_exceptions_enable=False)  # fmt: skip
Out = Annotated[Path, typer.Option(help="folder for JSON, recipes and logs")]
Steps = Annotated[int, typer.Option(min=1, help="timed steps of each measurement")]


@dataclass(frozen=True)
class Job:
    """One contestant on one workload, in a process of its own."""

    workload: str
    contestant: str
    sizes: dict[str, int]  # fields of the workload that are not its usual ones
    recipe: dict[str, Any]
    cap: float = 0.0  # GiB; 0: all that there is
    passes: int = 0  # over the batches until time counts; 0: as `stretto bench`
    steps: int = 8  # timed ones
    turn: int = 0  # number of the measurement where there are several of a kind


def make_job(name: str, contestant: str, device: str, lean: dict[str, Any] | None, **options: Any) -> Job:
    """Makes the contestant's recipe, with the sizes that plans and the dial read."""
    sizes = options.pop("sizes", {})
    workload = shape(name, device, sizes)
    base = next((one for one in reversed(FUSED) if contestant.startswith(one)), contestant)
    recipe = make_recipe(workload, base, graphs=device == "cuda" and base in FUSED and name not in LONG)
    data = recipe["data"] | {"join_documents": workload.lengths is None, "batch_size": max(workload.rows, 1)}
    length = workload.length or (workload.lengths.longest if workload.lengths else 0)
    if data["task"] == "translation":
        data["max_tokens"] = workload.budget or workload.rows * max(length, workload.source_length)
    recipe |= {"data": data | ({"seq_len": length} if length else {}), "run": {"device": device}}
    if name in LONG:
        recipe["model"] = recipe["model"] | {"max_len": length}
    recipe["techniques"] |= {"lean": lean or False}
    return Job(name, contestant, sizes, recipe, **options)


def shape(name: str, device: str, sizes: dict[str, Any]) -> Workload:
    return replace(fit_to_device(ALL[name], device), **sizes)


def run(job: Job) -> Numbers:
    """Runs in the process of the job."""
    config = build_config(job.recipe)
    with runtime.start(config.run) as rt:
        on_gpu, workload = rt.device.type == "cuda", shape(job.workload, rt.device.type, job.sizes)
        if job.cap and on_gpu:
            torch.cuda.set_per_process_memory_fraction(min(job.cap * GIB / total_memory(rt.device), 1.0), rt.device)
        elif job.cap and workload.rows > job.cap:
            raise OutOfMemoryError("a CPU has no cap: as many rows fit as there are GiB")
        draws = draw_batches(workload, config.model)
        contestant, work = build_contestant(job.contestant, config, workload, draws, rt), count_work(config, draws, rt)
        if job.passes:
            contestant = replace(contestant, passes=job.passes)
        warm_up(contestant, len(draws), rt.device)
        seconds, loss = time_passes(contestant, len(draws), -(-job.steps // len(draws)), rt.device)
        numbers: Numbers = {
            "rows": workload.rows,
            "loss": loss,
            "tokens_per_s": work.tokens / statistics.median(seconds),
        }
        numbers |= {"tokens": work.tokens // len(draws), "allocated_gib": memory_gib(rt.device)}
        numbers["reserved_gib"] = torch.cuda.max_memory_reserved(rt.device) / GIB if on_gpu else None
        return numbers | ({} if "hf" in job.contestant else predict(config, [form(draw, config) for draw in draws]))


def predict(config: Config, batches: Sequence[Batch]) -> Numbers:
    """The peak by the formula, and the bytes that blocks keep for each token and unit of width: of the largest batch as
    it is, and the choice that the recipe makes for the batch that it expects."""
    needs = find_needs(config)
    choice, largest = find_choice(config, needs), max(batches, key=lambda batch: batch.counts.all_slots)
    if largest.inputs is not None:
        source = 0 if largest.source is None else largest.source.ids.numel()
        load = replace(needs.load, tokens=largest.inputs.ids.numel(), labels=largest.labels.numel(), source=source)
        needs = replace(needs, load=load)
    account = needs.predict(choice)
    tokens = sum(needs.load.count_tokens(cross) for _, cross in list_blocks(config.model))
    kept = sum(account.kept) / tokens / config.model.width
    return {"predicted_gib": account.peak / GIB, "kept": kept, "choice": [asdict(keep) for keep in choice.keeps]}


def ran_out(error: BaseException | None) -> bool:
    """Whether memory was the cause: what then goes wrong in a recording may hide it."""
    if error is None or isinstance(error, OutOfMemoryError | torch.OutOfMemoryError):
        return error is not None
    return ran_out(error.__cause__ or error.__context__)


@app.command(hidden=True)
def worker(job: Path, result: Path) -> None:
    try:
        numbers = run(Job(**json.loads(job.read_text(encoding="utf-8"))["job"]))
    except Exception as error:
        traceback.print_exc()
        numbers = {"failed": FULL if ran_out(error) else explain(error)}
    write_text(result, json.dumps(numbers))


class Study:
    """One command: its measurements, and the rows of its table, saved as they come."""

    def __init__(self, command: str, out: Path, steps: int) -> None:
        self.command, self.out, self.rows = command, out.resolve(), list[Row]()
        self.console, self.device = Console(highlight=False), choose_device()
        self.facts = describe_run(self.device, steps, [])
        make_folder("--out", self.out / command)
        here = self.facts["environment"]
        self.place = {name: here[name] for name in ("device", "torch", "commit")}
        words = f"{here['device']}, torch {here['torch']}, {here['date']}, commit {here['commit']}"
        say(self.console, " ".join(filter(None, [words, self.facts["note"]])))

    def measure(self, job: Job) -> Numbers:
        words = [job.workload, job.contestant, *map(str, job.sizes.values()), f"{job.cap:g}", str(job.turn)]
        stem = self.out / self.command / re.sub(r"\W+", "-", " ".join(words))
        order, told = stem.with_suffix(".job"), json.dumps({"job": asdict(job)} | self.place, indent=1)
        done = stem.with_suffix(".json")
        known = done.exists() and order.exists() and order.read_text(encoding="utf-8") == told
        if known and not str(self.place["commit"]).endswith("-dirty"):
            return json.loads(done.read_text(encoding="utf-8"))
        done.unlink(missing_ok=True)
        write_text(order, told)
        return run_apart("bench.fits", ["worker", str(order)], stem)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        write_text(self.out / f"{self.command}.json", json.dumps(self.facts | {"rows": self.rows}, indent=1))

    def show(self, columns: dict[str, str], rows: Sequence[Row], title: str) -> None:
        """Prints rows as Markdown; `columns` has a heading and the format of a number: `GiB:.2f`."""
        told = {key: text.partition(":")[::2] for key, text in columns.items() if any(key in row for row in rows)}
        lines = [[head for head, _ in told.values()], ["---:" if number else "---" for _, number in told.values()]]
        for row in rows:
            lines.append(["-" if row.get(key) is None else format(row[key], told[key][1]) for key in told])
        say(self.console, "\n".join([f"\n### {title}", "", *(f"| {' | '.join(cells)} |" for cells in lines), ""]))

    def end(self) -> None:
        say(self.console, f"numbers: {self.out / self.command}.json; logs: {self.out / self.command}")


def find_most(fits: Callable[[int], bool], start: int) -> int:
    """Returns the largest number that fits, 0 if none does: from `start` in steps that double, then by bisection."""
    low = high = max(start, 1)
    step = max(low // 32, 1)
    if fits(low):
        high = low + step
        while fits(high):
            step *= 2
            low, high = high, high + step
    else:
        low = max(high - step, 0)
        while low and not fits(low):
            step *= 2
            low, high = max(low - step, 0), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@app.command()
def batches(
    workloads: Annotated[list[str] | None, typer.Argument(help=f"by default {', '.join(SEARCHED)}")] = None,
    caps: Annotated[str, typer.Option(help="GiB, with commas between them")] = "6,8,12,16,24",
    contestants: Annotated[str, typer.Option(help="with commas between them")] = ",".join(CONTESTANTS),
    steps: Steps = 8,
    out: Out = Path("runs/fits"),
) -> None:
    """Find the largest batch of each contestant within each cap of memory, and its speed."""
    names, chosen, sizes = workloads or SEARCHED, contestants.split(","), read_numbers("--caps", caps)
    check("workload with rows to search", names, ROWS)
    check("contestant", chosen, CONTESTANTS)
    study = Study("batches", out, steps)
    for name in names:
        factors, found = dict.fromkeys(chosen, 1.0), list[Row]()
        for cap in sorted(sizes):
            for contestant in chosen:
                row: Row = {"workload": name, "cap_gib": cap, "contestant": contestant}
                obstacle = find_obstacle(ROWS[name], contestant, study.device)
                row |= {"failed": obstacle} if obstacle else search(study, name, contestant, cap, steps, factors)
                study.add(row)
                found.append(row)
                say(study.console, f"{name}, {cap:g} GiB, {contestant}: {describe(row)}")
        columns = {"cap_gib": "GiB:g", "contestant": "contestant", "rows": "rows:d", "predicted_rows": "predicted:d",
                   "tokens_per_s": "tokens/s:,.0f", "reserved_gib": "reserved:.2f", "failed": "why not"}  # fmt: skip
        study.show(columns, found, f"{name}: the largest batch that runs")
    study.end()


def search(study: Study, name: str, contestant: str, cap: float, steps: int, factors: dict[str, float]) -> Numbers:
    """Searches from the prediction; others than ours from that of `stretto`. What the last cap was off by counts."""
    device, tried, memory = study.device.type, dict[int, Numbers](), cap * (1 - RESERVE)

    def make(rows: int) -> Job:
        lean = CONTESTANTS[contestant] | ({"memory": f"{memory:.3f}GiB"} if contestant == "stretto dial" else {})
        return make_job(name, contestant, device, lean, sizes={"rows": rows, "num_batches": 1}, cap=cap, steps=steps)

    def fits(rows: int) -> bool:
        job = make(rows)
        if contestant == "stretto dial" and not can_choose(build_config(job.recipe)):
            tried[rows] = {"failed": FULL}
        elif rows not in tried:
            tried[rows] = study.measure(job)
        reason = tried[rows].get("failed")
        if reason not in (None, FULL):
            raise StrettoError(reason)
        return reason is None

    ours = contestant if contestant in ("stretto lean", "stretto dial") else "stretto"
    predicted = predict_rows(name, ours, device, memory)
    try:
        most = find_most(fits, min(round(predicted * factors[contestant]), 2**16))
    except StrettoError as error:
        return {"failed": str(error)}
    if most and predicted:
        factors[contestant] = most / predicted
    probes = {rows: numbers.get("tokens_per_s", FULL) for rows, numbers in sorted(tried.items())}
    numbers = {"predicted_rows": predicted if ours == contestant else None, "probes": probes}
    return {"rows": most} | (tried[most] if most else {"failed": FULL}) | numbers


def can_choose(config: Config) -> bool:
    try:
        find_choice(config, find_needs(config))
    except ConfigError:
        return False
    return True


def predict_rows(name: str, contestant: str, device: str, memory: float) -> int:
    """Returns the largest batch by the formula; the dial can at most compute all blocks again."""
    job = make_job(name, contestant, device, CONTESTANTS[contestant], sizes={"rows": 1})
    config = build_config(job.recipe)
    choice = find_choice(config, find_needs(config))
    if contestant == "stretto dial":
        choice = replace(follow(config.model, Keep("output", block="input")), chunk=CHUNKS[-1])
    row = config.data.max_tokens if config.data.task == "translation" else 1  # of one pair, in tokens
    return find_largest(config, choice, int(memory * GIB)) // row if device == "cuda" else int(memory)


@app.command()
def settings(
    workloads: Annotated[list[str] | None, typer.Argument(help="names, or all; by default all")] = None,
    steps: Steps = 16,
    out: Out = Path("runs/fits"),
) -> None:
    """Measure memory and speed of everything that blocks may keep, twice, the second time in the opposite order."""
    names = find_workloads(workloads or ["all"])
    if "all" in (workloads or ["all"]):
        names = [name for name in names if not WORKLOADS[name].own]
    for obstacle in filter(None, (find_obstacle(WORKLOADS[name], "stretto", choose_device()) for name in names)):
        raise ConfigError(obstacle)
    study = Study("settings", out, steps)
    for name in names:
        turns = list[dict[str, Numbers]]()
        for turn, order in enumerate((list(SETTINGS), list(SETTINGS)[::-1])):
            turns.append({one: measure_setting(study, name, one, steps, turn) for one in order})
        rows = compare(name, turns)
        for row in rows:
            study.add(row)
        columns = {"setting": "what blocks keep", "predicted_gib": "predicted:.2f", "allocated_gib": "peak, GiB:.2f",
                   "reserved_gib": "reserved:.2f", "kept": "B/token/C:.1f", "tokens_per_s": "tokens/s:,.0f",
                   "memory_ratio": "memory x:.3f", "speed_ratio": "speed x:.3f", "failed": "why not"}  # fmt: skip
        study.show(columns, rows, f"{name}: ratios to fused alone")
    study.end()


def measure_setting(study: Study, name: str, setting: str, steps: int, turn: int) -> Numbers:
    keep, device = SETTINGS[setting], study.device.type
    job = make_job(name, f"stretto, {setting}", device, None, steps=steps, turn=turn)
    model, lean = build_config(job.recipe).model, asdict(keep)
    lean["blocks"] = max(model.layers, model.decoder_layers) if lean.pop("block") == "input" else 0
    if keep != Keep():
        job = make_job(name, job.contestant, device, lean, steps=steps, turn=turn)
    numbers = study.measure(job)
    say(study.console, f"{name}, {setting}: {describe(numbers)}")
    return numbers


def compare(name: str, turns: Sequence[dict[str, Numbers]]) -> list[Row]:
    """Makes a row for each setting: the mean speed and the larger peak of its turns, and ratios to fused alone."""
    rows = list[Row]()
    for setting in SETTINGS:
        some = [turn[setting] for turn in turns]
        row: Row = {"workload": name, "setting": setting} | next((one for one in some if "failed" in one), some[0])
        if "failed" not in row:
            row["speeds"] = [one["tokens_per_s"] for one in some]
            row["tokens_per_s"] = statistics.fmean(row["speeds"])
            row["allocated_gib"] = max(one["allocated_gib"] for one in some)
            base = rows[0] if rows else row
            if "failed" not in base:
                row["speed_ratio"] = row["tokens_per_s"] / base["tokens_per_s"]
                row["memory_ratio"] = row["allocated_gib"] / base["allocated_gib"]
        rows.append(row)
    return rows


@app.command("long")
def long_sequence(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(LONG)}")] = "gpt2-medium",
    tokens: Annotated[str, typer.Option(help="lengths, with commas between them")] = "65536,131072,262144,524288",
    steps: Steps = 1,
    out: Out = Path("runs/fits"),
) -> None:
    """Train on one long sequence a step: weights and moments in bf16, all blocks computed again as a whole."""
    check("model for long sequences", [model], LONG)
    lengths = [int(number) for number in read_numbers("--tokens", tokens)]
    study, rows = Study(f"long-{model}", out, steps), list[Row]()
    for length in lengths:
        sizes = {"rows": 1, "length": length, "num_batches": 1}
        layers = build_config({"model": shape(model, study.device.type, {}).model}).model.layers
        job = make_job(model, "stretto", study.device.type, {"blocks": layers}, sizes=sizes, passes=1, steps=steps)
        row: Row = {"model": model, "length": length} | study.measure(job)
        study.add(row)
        rows.append(row)
        say(study.console, f"{model}, {length:,} tokens: {describe(row)}")
    columns = {"length": "tokens:,d", "tokens_per_s": "tokens/s:,.0f", "allocated_gib": "peak, GiB:.2f",
               "reserved_gib": "reserved:.2f", "predicted_gib": "predicted:.2f", "failed": "why not"}  # fmt: skip
    study.show(columns, rows, f"{model}: one sequence a step, blocks computed again")
    study.end()


def describe(numbers: Numbers) -> str:
    if "failed" in numbers:
        return numbers["failed"]
    rows = f"{numbers['rows']} rows, " if numbers["rows"] else ""
    return f"{rows}{numbers['tokens_per_s']:,.0f} tokens/s, {numbers['allocated_gib']:.2f} GiB"


def check(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; there are: {', '.join(known)}")


def read_numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise ConfigError(f"{option} {text}: must be positive numbers, with commas between them")
    return numbers


def main() -> None:
    try:
        app()
    except StrettoError as error:
        print(f"fits: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
