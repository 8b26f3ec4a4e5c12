"""What a run says about itself while it goes: events.jsonl, TensorBoard, and a bar or plain lines on the terminal; and
to W&B or MLflow if the recipe says so.

One line of events.jsonl is one JSON object. Logged training steps carry `step`, `loss` and `tokens_per_s`, and what the
guard has counted so far, updates `cancelled` and `spikes` of the gradient; evaluations carry `step` and `eval_loss`;
the first line of each start carries `environment`; at the end there are `memory`, in bytes, and `finished`.

Each of these may fail, by a full disk or a reader that went away: a warning says so once, and training goes on.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.segment import Segment

from stretto.config import Config
from stretto.errors import tell
from stretto.files import open_in_place, open_regular, replacing
from stretto.optim import count_state
from stretto.plan import predict_for
from stretto.report.loggers import Background, open_loggers
from stretto.runtime import Runtime, count_gpu_memory, memory_gib, peak_flops, read_clock, total_memory
from stretto.step import Update

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS, BOARD, TERMINAL = "events.jsonl", "tensorboard", "the output"
GAP = "  "
COUNTS = ("batches", "all_batches")  # of an evaluation: those that it was over, and those there are
IMPORTANCE = ("step", "loss", "speed", "left", "bar", "mfu", "memory", "lr", "norm", "padding", "elapsed")
SHORTEST_BAR, LONGEST_BAR = 10, 40


class Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Raises an error, where Rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output any more")


class Report:
    """Only the main process has a real one; the others are told to be quiet."""

    def __init__(self, folder: Path, total: int, resume_at: int, active: bool, config: Config | None = None) -> None:
        self.total, self.path = total, folder / EVENTS
        self.console = Terminal(quiet=not active, highlight=False)
        self.bar: Progress | None = None
        self.file: int | None = None
        self.board: SummaryWriter | None = None
        self.loggers: dict[str, Background] = {}
        self.lost: set[str] = set()  # what has failed
        if not active:
            return
        self.attempt(EVENTS, lambda: self._open_events(resume_at))
        self.attempt(BOARD, lambda: self._open_board(folder / BOARD, resume_at))
        self.loggers = {} if config is None else open_loggers(folder, config, self.lose)
        if sys.stdout.isatty():
            self.bar = Progress(BarAndNumbers(), console=self.console)
            self.task = self.bar.add_task("train", total=total, completed=resume_at, numbers={})
            self.attempt(TERMINAL, self.bar.start)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            with suppress(OSError):  # its thread has to end also if the terminal is gone
                self.bar.stop()
        if self.board is not None:
            self.attempt(BOARD, self.board.close)
        for name, logger in self.loggers.items():
            self.attempt(name, logger.close)
        if self.file is not None:
            os.close(self.file)

    def attempt(self, sink: str, write: Callable[[], object]) -> None:
        """Calls `write`. If it fails, now or earlier, the run has one thing less to show, and nothing else changes."""
        if sink in self.lost:
            return
        try:
            write()
        except Exception as error:
            self.lose(sink, error)

    def lose(self, sink: str, error: Exception) -> None:
        self.lost.add(sink)
        self.console.quiet |= sink == TERMINAL
        tell(f"warning: {sink} failed, and is left out from now on; the run does not need it: {error}")

    def _open_events(self, resume_at: int) -> None:
        """Removes the lines of later steps: a run that is resumed does these steps again."""
        with replacing(self.path) as file:
            for event in read_events(self.path.parent):
                step = event.get("step")
                if not isinstance(step, (int, float)) or step <= resume_at:
                    file.write(json.dumps(event).encode() + b"\n")
        self.file = open_in_place(self.path)

    def _open_board(self, folder: Path, resume_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(folder), purge_step=resume_at + 1)

    def start(self, environment: dict[str, Any], *descriptions: str) -> None:
        self.event(environment=environment, notes=descriptions)
        for text in (environment["device"], *descriptions):
            self.say(text)

    def say(self, text: str) -> None:
        self.attempt(TERMINAL, lambda: self.console.print(text, markup=False, soft_wrap=True))

    def advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def event(self, **values: Any) -> None:
        """Writes one line; numbers also go to TensorBoard and loggers. A line is on its way to the disk before this
        returns."""
        if self.file is not None:
            line: dict[str, Any] = {"time": read_clock()}
            for key, value in values.items():  # JSON has no NaN and no infinity
                line[key] = None if isinstance(value, float) and not math.isfinite(value) else value
            text = json.dumps(line, allow_nan=False) + "\n"
            self.attempt(EVENTS, partial(os.write, self.file, text.encode()))
        if "step" in values:
            self._draw(values.pop("step"), "eval" if "eval_loss" in values else "train", values)

    def _draw(self, step: int, group: str, values: dict[str, Any]) -> None:
        numbers = {f"{group}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}
        if self.board is not None:
            for key, value in numbers.items():
                self.attempt(BOARD, partial(self.board.add_scalar, key, value, step))
        for logger in self.loggers.values():
            logger.log(step, {key: value for key, value in numbers.items() if math.isfinite(value)})

    def train_line(self, values: dict[str, Any], seconds_per_step: float) -> None:
        self.event(**values)
        numbers = {
            "loss": f"loss {values['loss']:.4f}",
            "lr": f"lr {values['lr']:.2e}",
            "norm": f"norm {values['grad_norm']:.2f}",
            "speed": f"{values['tokens_per_s']:,.0f} tok/s",
            "padding": f"pad {values['padding']:.1%}",
            **({"mfu": f"mfu {values['mfu']:.1%}"} if values["mfu"] else {}),
            "memory": f"mem {values['memory_gib']:.2f} GiB",
        }
        if self.bar is not None:
            self.bar.update(self.task, completed=values["step"], numbers=numbers)
        else:
            # The first step compiles and allocates: it foretells nothing.
            left = _clock(seconds_per_step * (self.total - values["step"])) if values["step"] > 1 else "?"
            self.say(GAP.join([f"step {values['step']}/{self.total}", *numbers.values(), f"left {left}"]))

    def eval_line(self, step: int, scores: dict[str, float]) -> None:
        self.event(step=step, **scores)
        words = [f"{name} {value:.4f}" for name, value in scores.items() if name not in COUNTS]
        self.say(GAP.join([f"step {step}", *words, "({} of {} batches)".format(*(scores[name] for name in COUNTS))]))

    def memory_line(self, config: Config, update: Update, rt: Runtime) -> None:
        """Writes what is in memory next to what was predicted, of one process that has the whole micro-batch."""
        means = {} if update.average is None else {"average of weights": update.average.count_bytes()}

        def compare() -> None:
            known = rt.world == 1 and not config.model.own
            predicted = predict_for(config, total_memory(rt.device)) if known else {}
            measured = count_state(update.optimizer) | means | count_gpu_memory(rt.device)
            self.event(memory={"measured": measured, "predicted": predicted})

        self.attempt("the account of memory", compare)

    def finish(self, step: int, reason: str, meter: Meter) -> None:
        """Writes that the run is over after so many steps, for a reason if these are not all."""
        if reason:
            self.say(reason)
        finished: dict[str, Any] = {"steps": step} | ({"reason": reason} if reason else {})
        if meter.steps:  # since the last line
            meter.read()
        if meter.total_seconds:  # else there was nothing left to do
            finished |= {"seconds": round(meter.total_seconds, 3), "recording_s": round(meter.recording_seconds, 3)}
        self.event(finished=finished)


class BarAndNumbers(ProgressColumn):
    """One line, however wide the terminal is: what does not fit is left out, and the most important stays."""

    def render(self, task: Task) -> RenderableType:
        left = "?" if task.time_remaining is None else _clock(task.time_remaining)
        pieces = {"step": f"{task.completed:.0f}/{task.total:.0f}", **task.fields["numbers"]}
        pieces |= {"elapsed": f"time {_clock(task.elapsed or 0.0)}", "left": f"left {left}", "bar": " " * SHORTEST_BAR}
        return FittedLine(task, pieces)


@dataclass
class FittedLine:
    task: Task
    pieces: dict[str, str]  # by name, in the order in which they are shown

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(options.max_width, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        chosen = choose_pieces(self.pieces, options.max_width)
        text = GAP.join(piece for name, piece in self.pieces.items() if name in chosen - {"bar"})
        yield Segment(text)
        if "bar" in chosen:
            yield Segment(GAP)
            width = min(options.max_width - len(text) - len(GAP), LONGEST_BAR)
            yield ProgressBar(self.task.total, self.task.completed, width)


def choose_pieces(pieces: dict[str, str], width: int) -> set[str]:
    """Chooses the names of the pieces that fit into a line, by importance."""
    chosen, left = set(), width + len(GAP)
    for name in IMPORTANCE:
        if name in pieces and len(pieces[name]) + len(GAP) <= left:
            chosen.add(name)
            left -= len(pieces[name]) + len(GAP)
    return chosen


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Reads all whole lines, and none if there is no file: a crash may tear a line, and a disk may spoil one."""
    path, events = folder / EVENTS, []
    if not path.exists():
        return []
    with open_regular(path) as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


class Meter:
    """Tokens per second, padding, MFU and memory since the last reading, without the time spent on anything else."""

    def __init__(self, device: torch.device, world: int) -> None:
        self.device, self.peak = device, peak_flops(device) * world
        self.total_seconds = self.seconds_per_step = self.recording_seconds = 0.0
        self.restart()

    def restart(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.steps = self.tokens = self.slots = self.padding = self.flops = 0
        self.since = time.perf_counter()

    def add(self, tokens: int, slots: int, padding: int, flops: int) -> None:
        """Adds one step; `padding` counts the slots, on both sides of a translation, that hold nothing."""
        self.steps, self.tokens, self.flops = self.steps + 1, self.tokens + tokens, self.flops + flops
        self.slots, self.padding = self.slots + slots, self.padding + padding

    def read(self) -> dict[str, float]:
        """Returns the numbers since the last reading; the caller has just waited for the device."""
        seconds = time.perf_counter() - self.since
        values = {
            "tokens_per_s": self.tokens / seconds,
            "padding": self.padding / max(self.slots, 1),
            "flops_per_s": self.flops / seconds,
            "mfu": self.flops / seconds / self.peak if self.peak else 0.0,
            "memory_gib": memory_gib(self.device),
        }
        self.total_seconds += seconds
        self.seconds_per_step = seconds / max(self.steps, 1)
        self.restart()
        return values

    def leave_out_recording(self, seconds: float) -> None:
        """Leaves out the recording of CUDA graphs, which has taken these seconds so far, once for all later steps."""
        self.since += seconds - self.recording_seconds
        self.recording_seconds = seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time inside: evaluating and saving do not count."""
        begin = time.perf_counter()
        yield
        self.since += time.perf_counter() - begin
