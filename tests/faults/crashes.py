"""Kills processes while they save: `python -m tests.faults.crashes FOLDER` is a process that has imported everything,
and forks one for each crash. It reads what to do from stdin, and prints what was found, both as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from stretto import checkpoint, runtime
from stretto.checkpoint import Snapshot, drafts, saving, verify
from stretto.checkpoint.pieces import Rows
from stretto.checkpoint.verify import name_step
from stretto.config import RunConfig
from stretto.errors import DiskFullError, StrettoError

OLD, NEW, BEST = 20, 30, 10
TIMEOUT_S = 60.0


def make_shot(step: int) -> Snapshot:
    weights = {"embedding": torch.full((4, 3), 1.0 + step), "norm": torch.full((3,), 2.0 + step)}
    moments = {f"exp_avg/{name}": value * 2 for name, value in weights.items()}
    return Snapshot(weights, moments | {"step/norm": torch.tensor(float(step))}, {"step": step, "best_step": BEST})


def take_rows(shot: Snapshot, rank: int) -> Snapshot:
    """What one of two processes saves: uneven rows of matrices, and the main process what has no rows."""
    cut = {0: slice(0, 3), 1: slice(3, 4)}[rank]

    def split(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: value[cut].clone() for name, value in tensors.items() if value.ndim and len(value[cut])} | {
            name: value for name, value in tensors.items() if not value.ndim and rank == 0
        }

    weights, moments = split(shot.weights), split(shot.moments)
    rows = {
        name: Rows(cut.start, tuple(value.shape))
        for name, value in (shot.weights | shot.moments).items()
        if value.ndim and name in weights | moments
    }
    return Snapshot(weights, moments, shot.state, rows=rows)


def equals(one: Snapshot, two: Snapshot) -> bool:
    pairs = [(one.weights, two.weights), (one.moments, two.moments)]
    same = all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)
    return same and one.state == two.state


def save_whole(folder: Path) -> None:
    checkpoint.save(folder, make_shot(NEW), keep=2)


def save_parts(folder: Path) -> None:
    """What the threads of two processes do, one after the other."""
    draft = drafts.name_draft(folder, NEW, "0" * 32)
    for rank in (1, 0):
        drafts.write_part(draft, take_rows(make_shot(NEW), rank), rank, parts=2)
    drafts.publish(draft, make_shot(NEW).state, keep=2, parts=2)


def make_two(folder: Path) -> Path:
    for step in (BEST, OLD):
        checkpoint.save(folder, make_shot(step), keep=2)
    return folder


def make_states(root: Path) -> dict[str, tuple[Path, Callable[[Path], None]]]:
    """Folders as a save may find them, and the save."""
    plain, damaged, left, many = (root / name for name in ("plain", "damaged", "left", "many"))
    make_two(plain)
    (plain / ".mine").mkdir()
    for other in (damaged, left, many):
        shutil.copytree(plain, other)
    shutil.copytree(damaged / name_step(OLD), damaged / name_step(NEW))
    shutil.copytree(left / name_step(BEST), left / drafts.name_draft(left, NEW, "f" * 32).name)
    shutil.copytree(left / name_step(BEST), left / f".gone-{name_step(5)}")
    with patch("stretto.checkpoint.drafts.LEAST", 9):
        for step in (12, 14):
            checkpoint.save(many, make_shot(step), keep=9)
    (damaged / name_step(NEW) / "manifest.json").write_text("{")
    states = {"plain": plain, "damaged": damaged, "left": left, "many": many}
    saves: dict[str, Callable[[Path], None]] = {**dict.fromkeys(states, save_whole), "parts": save_parts}
    return {name: (states.get(name, plain), act) for name, act in saves.items()}


def watch_lines(do: Callable[[int], object]) -> None:
    """Calls a function at each line of Python that this process and its new threads execute, with its number."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            do(seen)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
        os._exit(0)
    except StrettoError as error:
        os._exit(error.exit_code)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def crash_at(line: int, act: Callable[[], None]) -> None:
    kill_at(line)
    act()


def kill_at(line: int) -> None:
    watch_lines(lambda seen: os.kill(os.getpid(), signal.SIGKILL) if seen == line else None)


def count_lines(act: Callable[[], None], path: Path) -> int:
    """Counts in a process of its own, which writes the number down at every line."""

    def counted() -> None:
        file = os.open(path, os.O_CREAT | os.O_WRONLY)
        watch_lines(lambda seen: os.pwrite(file, b"%9d" % seen, 0))
        act()

    os.waitpid(fork(counted), 0)
    return int(path.read_bytes())


def find_loss(folder: Path, newest: Callable[[Path], int | None]) -> str:
    """What is not as it has to be after a crash; then the save is repeated, as a run that was started again does."""
    step = newest(folder)
    if step not in (OLD, NEW):
        return f"the newest is {step}"
    if not equals(checkpoint.load(folder, step), make_shot(step)):
        return f"step {step} has other values"
    if checkpoint.find_best(folder) != BEST:
        return "the best is gone"
    save_whole(folder)
    left = sorted(name for name in os.listdir(folder) if name.startswith("."))
    if left != [".mine"] or checkpoint.find_newest(folder) != NEW or checkpoint.steps(folder) != [NEW, OLD, BEST]:
        return f"after another save there is {sorted(os.listdir(folder))}"
    return ""


def kill_savers(root: Path, points: int, control: bool) -> dict[str, Any]:
    """K1. As control, files are written in place, and the largest number is believed."""
    newest = by_name if control else checkpoint.find_newest
    states = make_states(root / "states")
    losses: dict[str, str] = {}
    tried = 0
    for name, (folder, act) in states.items():
        here = root / "here"

        def crash(act: Callable[[Path], None] = act, here: Path = here) -> None:
            if control:
                write_in_place()
            act(here)

        shutil.copytree(folder, here)
        lines = count_lines(crash, root / "lines")
        share = min(lines, -(-points // len(states)))
        for line in sorted({1 + i * lines // share for i in range(share)}):
            shutil.rmtree(here)
            shutil.copytree(folder, here)
            pid = fork(partial(crash_at, line, crash))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            tried += code == -signal.SIGKILL
            try:
                loss = find_loss(here, newest) if code in (0, -signal.SIGKILL) else f"exit code {code}"
            except (StrettoError, KeyError, ValueError, OSError) as error:
                loss = repr(error)
            if loss:
                losses[f"{name}, line {line} of {lines}"] = loss
        shutil.rmtree(here)
    return {"tried": tried, "losses": losses}


def write_in_place() -> None:
    """Takes drafts away from this process."""
    patch("stretto.checkpoint.name_draft", lambda folder, step, token: folder / name_step(step)).start()
    patch("stretto.checkpoint.drafts.find_damage", lambda target: "in the way").start()
    for function in ("_rename", "_discard"):
        patch(f"stretto.checkpoint.drafts.{function}", lambda *paths: None).start()


def by_name(folder: Path) -> int | None:
    return next(iter(checkpoint.steps(folder)), None)


def save_together(folder: Path, store: Path, rank: int, watch: Callable[[], None]) -> None:
    """One of two processes that save together; `watch` is called when both are about to."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with (
        runtime.start(RunConfig(device="cpu", timeout_s=TIMEOUT_S)) as rt,
        saving.Saver(folder, 2, rt, size=100) as saver,
    ):
        watch()
        saver.start(take_rows(make_shot(NEW), rank))
        saver.settle()


def kill_one_of_two(root: Path, rounds: int, control: bool) -> dict[str, Any]:
    """K2. As control, the main process does not wait for the other, and nobody asks whether all rows are there."""
    newest: Callable[[Path], int | None] = checkpoint.find_newest
    if control:
        patch("stretto.checkpoint.saving.Saver._wait_for_parts", lambda saver: None).start()
        patch(
            "stretto.checkpoint.saving.publish", lambda draft, state, keep, parts: drafts.publish(draft, state, keep, 1)
        ).start()
        patch("stretto.checkpoint.drafts.find_manifest_flaw", lambda manifest: None).start()
        newest = by_name
    folder, _ = make_states(root / "states")["plain"]
    lines = dict.fromkeys((0, 1), 0)
    losses: dict[str, str] = {}
    slowest, codes = 0.0, list[int]()
    for number in range(-1, rounds):
        here, store = root / "here", root / f"store{number}"
        shutil.copytree(folder, here)
        victim = number % 2
        share = (number // 2 + 0.5) / max(-(-rounds // 2), 1)

        kill = {victim: int(1 + share * lines[victim])} if number >= 0 else {}

        def watch(rank: int, kill: dict[int, int] = kill) -> None:
            if rank in kill:
                kill_at(kill[rank])
            elif not kill:
                file = os.open(root / f"lines{rank}", os.O_CREAT | os.O_WRONLY)
                watch_lines(lambda seen: os.pwrite(file, b"%9d" % seen, 0))

        pids = {rank: fork(partial(save_together, here, store, rank, partial(watch, rank))) for rank in (0, 1)}
        found = wait_for_both(pids, victim)
        slowest, codes = max(slowest, found["after"]), [*codes, found["codes"][1 - victim]]
        if number < 0:
            lines = {rank: int((root / f"lines{rank}").read_bytes()) for rank in (0, 1)}
        try:
            loss = find_loss(here, newest)
        except (StrettoError, KeyError, ValueError, OSError) as error:
            loss = repr(error)
        if loss or found["codes"][1 - victim] not in (0, 7):
            losses[f"process {victim}, line {kill.get(victim)}"] = loss or f"exit codes {found['codes']}"
        shutil.rmtree(here)
    return {"tried": rounds, "losses": losses, "slowest": slowest, "codes": codes}


def fail_one_of_two(root: Path, number: int, control: bool) -> dict[str, Any]:
    """C4. The disk of one process is full: the exit codes of both, what is left, and how long it took. As control, the
    error stays where it is."""
    folder, _ = make_states(root / "states")["plain"]
    real = drafts.write_part

    def write_part(failing: int, draft: Path, shot: Snapshot, rank: int, parts: int) -> None:
        if rank == failing:
            raise DiskFullError("the disk is full")
        real(draft, shot, rank, parts)

    def save(rank: int, failing: int, here: Path, store: Path) -> None:
        saving.write_part = partial(write_part, failing)  # type: ignore[attr-defined]
        if control:
            patch("stretto.checkpoint.saving.Saver._gather_codes", lambda saver: [0, 0]).start()
        save_together(here, store, rank, lambda: None)

    found = {}
    for failing in range(number):
        here, store = root / f"here{failing}", root / f"store{failing}"
        shutil.copytree(folder, here)
        pids = {rank: fork(partial(save, rank, failing, here, store)) for rank in (0, 1)}
        done = wait_for_both(pids, failing)
        left = [name for name in os.listdir(here) if name.startswith(".new")]
        found[str(failing)] = [done["codes"][0], done["codes"][1], checkpoint.find_newest(here), left, done["after"]]
    return found


def wait_for_both(pids: dict[int, int], victim: int) -> dict[str, Any]:
    """The exit codes, and how much longer the survivor took than the one that was killed."""
    codes, times = {}, {}
    for rank in (victim, 1 - victim):
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
        times[rank] = time.monotonic()
    return {"codes": codes, "after": times[1 - victim] - times[victim]}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # imports much, which no process has to do again
    verify.PAUSES_S = (0.0, 0.0, 0.0)
    work = json.load(sys.stdin)
    do = {"K1": kill_savers, "K2": kill_one_of_two, "C4": fail_one_of_two}[work["row"]]
    print(json.dumps(do(Path(sys.argv[1]), work["number"], work["control"])))


if __name__ == "__main__":
    main()
