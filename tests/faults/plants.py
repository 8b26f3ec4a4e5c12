"""What tests plant in a process before it runs, so that it can be watched, disturbed, or spoiled:

faults    in a phase of the run, the process says `@PHASE RANK` and then waits, sleeps in a library, or fails
off       a mechanism is left out, for a negative control
plants    stops after a given step, notes of what was read, and sabotage
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stretto.mesh import Mesh
from stretto.parallel.data import Portion
from tests.runs import PATIENCE_S

RANK = "RANK"
TRAIN: Any = import_module("stretto.train")
ITERATIONS = 2_000_000_000  # of a call that takes minutes
# phase: the function that is called in it, as module.name
PHASES = {
    "tokenise": "stretto.data.tokens._tokenise",
    "bpe": "stretto.data.tokenizer.train_bpe",
    "hash": "stretto.data.documents._survey",
    "verify": "stretto.checkpoint.find_newest",
    "build": "stretto.train.build",
    "load": "stretto.data.text.TextData.train_batch",
    "step": "stretto.train.run_step",
    "learn": "stretto.step.Update.learn",
    "apply": "stretto.step.Update.apply",
    "evaluate": "stretto.data.text.TextData.eval_batch",
    "save": "stretto.checkpoint.saving.publish",
    "event": "stretto.report.Report.event",
    "report": "stretto.report.page.sample",
}


def do_nothing() -> None:
    pass


def wait_in_python() -> None:
    for _ in range(int(PATIENCE_S / 0.05)):
        time.sleep(0.05)


def pause() -> None:
    time.sleep(0.5)


def wait_in_library() -> None:
    """A call that Python cannot interrupt, and that lets other threads run."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", ITERATIONS)


def fail_in_data() -> None:
    from stretto.errors import DataError

    raise DataError("a torn file")


def fail_as_a_bug() -> None:
    raise ZeroDivisionError("a planted bug")


def fill_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def refuse_to_write() -> None:
    raise OSError(5, "Input/output error", "a file")


def raise_bus_error() -> None:
    """As the system does where a mapped file was cut off."""
    signal.raise_signal(signal.SIGBUS)


def call_another_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(3), 1)


ACTIONS: dict[str, Callable[[], None]] = {
    "say": do_nothing,
    "pause": pause,
    "wait": wait_in_python,
    "hang": wait_in_library,
    "data": fail_in_data,
    "bug": fail_as_a_bug,
    "memory": fill_memory,
    "io": refuse_to_write,
    "bus": raise_bus_error,
    "other": call_another_collective,
}


def plant(faults: Sequence[tuple[str, str, int | None, int]], off: Sequence[str], plants: Sequence[str]) -> None:
    """Changes this process, before it runs: faults by phase, mechanisms that are left out, and names of PLANTS, each
    perhaps with an argument behind a colon."""
    for fault in faults:
        act_in_phase(*fault)
    for mechanism in off:
        switch_off(mechanism)
    for each in plants:
        name, _, argument = each.partition(": ")
        PLANTS[name](argument)


def act_in_phase(phase: str, action: str, rank: int | None, call: int) -> None:
    """Has a process act when the function of a phase is called for the `call`-th time; 0: whenever it is."""
    owner, name = find_function(PHASES[phase])
    real, calls = getattr(owner, name), 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if call in (0, calls) and rank in (None, int(os.environ[RANK])):
            print(f"@{phase} {os.environ[RANK]}", file=sys.stderr, flush=True)
            ACTIONS[action]()
        return real(*args, **kwargs)

    setattr(owner, name, planted)


def find_function(path: str) -> tuple[Any, str]:
    """The module or class that a function belongs to."""
    *parts, name = path.split(".")
    module = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules)
    owner: Any = sys.modules[".".join(parts[:module])]
    for part in parts[module:]:
        owner = getattr(owner, part)
    return owner, name


def switch_off(mechanism: str) -> None:
    """Leaves out what a row is about, for its negative control."""
    import stretto.ending
    import stretto.execute
    import stretto.runtime
    import stretto.signals
    from stretto.report import Report

    if mechanism == "agreement":  # every process obeys its own flag
        real = stretto.execute.Executor.exchange
        stretto.execute.Executor.exchange = lambda self, counts, rt: [*real(self, counts, rt)[:-1], counts[-1]]  # type: ignore[method-assign]
    elif mechanism == "same request":
        stretto.signals.SAME_REQUEST_S = -1.0
    elif mechanism == "store":
        patch("stretto.runtime.call_roll", lambda *args: (None, [])).start()
    elif mechanism == "announcement":
        stretto.runtime.Runtime.announce = lambda self, error: None  # type: ignore[method-assign]
    elif mechanism == "watch":
        stretto.signals.Watch.look = lambda self: None  # type: ignore[method-assign]
    elif mechanism == "explanation":
        stretto.runtime.explain = lambda error, timeout_s: None
    elif mechanism == "heartbeat":  # a barrier, as any other
        stretto.runtime.Runtime.together = lambda self, work: (work(), self.barrier())[0]  # type: ignore[method-assign]
    elif mechanism == "count":
        stretto.ending.MOST_ATTEMPTS = 10**9
    elif mechanism == "one line at a time":  # the whole log is written again for each event

        def rewrite(self: Report, **values: Any) -> None:
            if self.file is not None:
                known = self.path.read_bytes() + json.dumps(values).encode() + b"\n"
                with self.path.open("wb", buffering=0) as file:
                    print("@rewriting", file=sys.stderr, flush=True)
                    time.sleep(0.5)
                    file.write(known)

        Report.event = rewrite  # type: ignore[method-assign]
    else:
        raise ValueError(mechanism)


def after_step(act: Callable[[int, Any], None]) -> None:
    """Has a function called after each update, with the number of updates done and the batches of this process."""
    run_step = TRAIN.run_step

    def watched(parts: Any, step: int, batches: Any, *rest: Any) -> Any:
        result = run_step(parts, step, batches, *rest)
        act(step + 1, batches)
        return result

    TRAIN.run_step = watched


def after_load(act: Callable[[Any], None]) -> None:
    """Has a function called with a run that was loaded from a checkpoint."""
    load_latest = TRAIN.load_latest

    def watched(run: Any, before: int | None = None) -> None:
        load_latest(run, before)
        if run.step:
            act(run)

    TRAIN.load_latest = watched


def stop_after(step: str) -> None:
    """The last process is asked to stop when so many updates are done; all agree to, at once or after one more."""
    last = int(os.environ["WORLD_SIZE"]) - 1

    def ask(done: int, batches: Any) -> None:
        if done == int(step) and int(os.environ[RANK]) == last:
            os.kill(os.getpid(), signal.SIGTERM)

    after_step(ask)


def note_samples(path: str) -> None:
    """A line of JSON for each update: its number, and the samples that this process read."""

    def note(done: int, batches: Any) -> None:
        line = json.dumps([done, sorted(sample for _, batch in batches for sample in batch.samples)])
        with Path(f"{path}.{os.environ.get(RANK, '0')}").open("a") as file:
            file.write(line + "\n")

    after_step(note)


def forget_moments(_: str) -> None:
    """A resumed run begins with the moments of a new one."""

    def forget(run: Any) -> None:
        for state in run.parts.update.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].zero_()

    after_load(forget)


def forget_a_step(_: str) -> None:
    """A resumed run takes its checkpoint for the one of the step before."""

    def forget(run: Any) -> None:
        run.step -= 1

    after_load(forget)


def share_by_own_numbers(_: str) -> None:
    """Each process counts its micro-batches by itself, so that some are read twice and others never."""

    def find_micro_batches(self: Portion, step: int) -> range:
        begin = step * self.micro_batches // self.stride
        return range(begin, begin + self.micro_batches // self.stride)

    Portion.find_micro_batches = find_micro_batches  # type: ignore[method-assign]


def ask_nothing(_: str) -> None:
    """Nobody asks whether the batch can be shared by so many processes."""
    complete = TRAIN.complete
    TRAIN.complete = lambda config, data, mesh: complete(config, data, Mesh())


def rename_a_module(_: str) -> None:
    """The model gives other names to some of its parameters."""
    build = TRAIN.build

    def rename(*arguments: Any) -> Any:
        parts = build(*arguments)
        block = parts.model.get_submodule("decoder.blocks.0")
        block.renamed = block.mlp
        del block.mlp
        return parts

    TRAIN.build = rename


PLANTS: dict[str, Callable[[str], None]] = {
    "stop after": stop_after,
    "note samples": note_samples,
    "forget moments": forget_moments,
    "forget a step": forget_a_step,
    "share by own numbers": share_by_own_numbers,
    "ask nothing": ask_nothing,
    "rename a module": rename_a_module,
}
