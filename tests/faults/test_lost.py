"""Processes that are killed, frozen or fail: the others end in bounded time, and say who it was and why."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from stretto import checkpoint
from stretto.config import Config, build_config
from stretto.plan import advise_on_memory
from stretto.report import read_events
from tests.faults.conftest import Tally
from tests.faults.fleet import Fleet, sets
from tests.server import Group

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_thread")]
Faults = list[tuple[str, str, int | None, int]]
BOUND_S = 60.0  # far above what is measured alone, and far below run.timeout_s, which is 600 where it is not set
FROZEN_S = 6.0  # run.timeout_s, where a process is frozen
LONG = sets(train__steps=100_000, train__eval_every=3, checkpoint__every=3)


def says(log: str, word: str = "stretto: ") -> list[str]:
    return [line.partition(word)[2] for line in log.splitlines() if line.startswith(word)]


def names_the_lost(group: Group) -> bool:
    return any("rank 0 of 2" in line and "rank 1 was lost without a word" in line for line in says(group.log))


def lose(fleet: Fleet, phase: str, call: int, *off: str) -> tuple[Path, Group]:
    """The second of two processes is killed in a phase."""
    faults: Faults = [(phase, "wait", 1, call)]
    run, group = fleet.start(phase, processes=2, faults=faults, off=off, arguments=LONG)
    group.wait_for(f"@{phase} 1")
    group.send(signal.SIGKILL, 1)
    return run, group


@pytest.mark.fault("H1")
@pytest.mark.parametrize("phase", ["hash", "learn", "apply", "evaluate"])
def test_a_process_is_killed_while_the_other_waits(fleet: Fleet, phase: str, whole: bool, tally: Tally) -> None:
    """Before the first step, in the forward and backward pass, before gradients are applied, and while it evaluates."""
    if phase != "learn" and not whole:
        pytest.skip("in `make faults`")
    run, group = lose(fleet, phase, 3 if phase in ("learn", "apply") else 1)
    assert group.wait(BOUND_S) == [7, -signal.SIGKILL], group.log
    assert names_the_lost(group), group.log
    record = json.loads((run / "exit.json").read_text())
    assert (record["code"], record["rank"]) == (7, 0) and read_events(run)[-1]["ended"]["code"] == 7
    assert checkpoint.find_newest(run / "checkpoints") is not None
    tally("kills", 1)


@pytest.mark.usefixtures("thorough")
@pytest.mark.fault("H1")
def test_a_process_is_killed_while_the_other_saves(fleet: Fleet, tally: Tally) -> None:
    faults: Faults = [("save", "pause", 0, 1)]
    run, group = fleet.start("save", processes=2, faults=faults, arguments=LONG)
    group.wait_for("@save 0")
    group.send(signal.SIGKILL, 1)
    assert group.wait(BOUND_S) == [7, -signal.SIGKILL] and names_the_lost(group), group.log
    assert checkpoint.find_newest(run / "checkpoints") == 6, "what was being saved is whole"
    tally("kills", 1)


@pytest.mark.usefixtures("thorough")
@pytest.mark.control("H1")
def test_without_the_store_nobody_knows_who_was_lost(fleet: Fleet) -> None:
    _, group = lose(fleet, "learn", 3, "store")
    assert group.wait(BOUND_S) == [7, -signal.SIGKILL] and not names_the_lost(group), group.log


def freeze(fleet: Fleet, timeout_s: float, rank: int = 1) -> Group:
    faults: Faults = [("step", "say", rank, 3)]
    arguments = [*LONG, *sets(run__timeout_s=timeout_s)]
    _, group = fleet.start("frozen", processes=2, faults=faults, arguments=arguments)
    group.wait_for(f"@step {rank}")
    group.send(signal.SIGSTOP, rank)
    return group


def stands_somewhere(group: Group, rank: int) -> bool:
    """Whether this process has said where it waits."""
    _, found, stack = group.log.partition(f"rank {rank} of 2 has made no progress")
    return bool(found) and "it stands here" in stack and "in run_loop" in stack


@pytest.mark.fault("H2")
@pytest.mark.parametrize("rank", [1, 0])
def test_a_process_is_frozen(fleet: Fleet, rank: int, whole: bool) -> None:
    """The other says where it stands before it gives up. The first one also has the store in which they would meet."""
    if not rank and not whole:
        pytest.skip("in `make faults`")
    group, other = freeze(fleet, FROZEN_S, rank), 1 - rank
    deadline = time.monotonic() + BOUND_S
    while not group.codes and time.monotonic() < deadline:
        group.poll()
        time.sleep(0.1)
    assert group.codes.get(group.pids[other]) == 7 and stands_somewhere(group, other), group.log
    assert f"rank {rank} was lost without a word" in group.log


@pytest.mark.usefixtures("thorough")
@pytest.mark.control("H2")
def test_without_a_limit_the_other_waits_on(fleet: Fleet) -> None:
    group = freeze(fleet, 600)
    assert not group.ends_within(3 * FROZEN_S) and not stands_somewhere(group, 0), group.log


@pytest.mark.fault("H2")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loader_hangs(fleet: Fleet, processes: int, whole: bool) -> None:
    """The batch that does not come is a mistake of the data, which names the step; all processes learn it."""
    if processes > 1 and not whole:
        pytest.skip("in `make faults`")
    # The main process also reads a batch to know its size, before the first step.
    faults: Faults = [("load", "hang", processes - 1, 4 if processes == 1 else 3)]
    arguments = [*LONG, *sets(run__timeout_s=FROZEN_S)]
    _, group = fleet.start("loader", processes=processes, faults=faults, arguments=arguments)
    assert group.wait(BOUND_S) == [4] * processes, group.log
    assert "the batch of step 7 was not there after" in group.log and "has made no progress" in group.log


@pytest.mark.fault("H2")
def test_work_does_not_count_as_waiting(fleet: Fleet) -> None:
    """The main process tokenises for longer than the others would wait."""
    assert long_work(fleet) == [0, 0]


@pytest.mark.usefixtures("thorough")
@pytest.mark.control("H2")
def test_without_heartbeats_work_counts_as_waiting(fleet: Fleet) -> None:
    assert long_work(fleet, "heartbeat") != [0, 0]


def long_work(fleet: Fleet, *off: str) -> list[int]:
    faults: Faults = [("hash", "pause", 0, 1)] * 16  # half a second each
    arguments = sets(run__timeout_s=4, train__steps=2)
    _, group = fleet.start("long", fresh=True, processes=2, faults=faults, off=off, arguments=arguments)
    return group.wait(BOUND_S)


def cause_is_first(group: Group, words: str) -> bool:
    """Whether the first thing that is said is the cause, with its rank; and the other tells it too."""
    lines = [line for line in says(group.log) if "step" in line or "Error" in line]
    return lines[0].startswith("rank 1 of 2, after step 6: ") and words in lines[0] and len(lines) > 1


FAILURES: dict[str, tuple[str, list[int], str]] = {
    "data": ("DataError", [4, 4], "a torn file"),
    "bug": ("ZeroDivisionError", [7, 1], "a planted bug"),
    "memory": ("OutOfMemoryError", [8, 8], "memory is full"),
    "io": ("CheckpointError", [5, 5], "the system refuses"),
}


def fail(fleet: Fleet, what: str, phase: str = "step", *off: str) -> tuple[Path, Group]:
    faults: Faults = [(phase, what, 1, 3)]
    run, group = fleet.start(what, processes=2, faults=faults, off=off, arguments=LONG)
    return run, group


@pytest.mark.fault("H3")
@pytest.mark.parametrize("what", ["data", "bug", "io"])
def test_an_exception_in_one_process(fleet: Fleet, what: str, whole: bool) -> None:
    if what != "data" and not whole:
        pytest.skip("in `make faults`")
    run, group = fail(fleet, what)
    kind, codes, words = FAILURES[what]
    assert group.wait(BOUND_S) == codes and cause_is_first(group, words), group.log
    assert group.log.count("Traceback") == (what == "bug"), group.log
    record = json.loads((run / "exit.json").read_text())
    assert (record["cause"], record["code"], record["rank"], record["step"]) == (kind, codes[1], 1, 6)
    ended = read_events(run)[-1]["ended"]
    assert (ended["cause"], ended["rank"], ended["step"]) == (kind, 1, 6)


@pytest.mark.usefixtures("thorough")
@pytest.mark.control("H3")
def test_a_process_that_leaves_without_a_word_is_only_missed(fleet: Fleet) -> None:
    _, group = fail(fleet, "data", "step", "announcement")
    group.wait(BOUND_S)
    assert not cause_is_first(group, "a torn file"), group.log


@pytest.mark.usefixtures("thorough")
@pytest.mark.fault("H3")
def test_processes_that_call_different_collectives(fleet: Fleet) -> None:
    faults: Faults = [("learn", "other", 1, 3)]
    arguments = [*LONG, *sets(run__timeout_s=FROZEN_S)]
    _, group = fleet.start("other", processes=2, faults=faults, arguments=arguments)
    assert all(group.wait(BOUND_S)), group.log


def test_a_process_that_the_system_ends_says_where_it_stood(fleet: Fleet) -> None:
    """A bus error, as after a mapped file was cut off between two looks at it."""
    _, group = fleet.start("bus", faults=[("load", "bus", 0, 4)], arguments=LONG)
    # The dump reads the frames of threads that go on meanwhile, and may itself trip over one, after what counts.
    assert group.wait(BOUND_S)[0] in (-signal.SIGBUS, -signal.SIGSEGV), group.log
    assert "Bus error" in group.log and "in read_batches" in group.log


@pytest.mark.fault("O1")
@pytest.mark.parametrize("phase", ["learn", "apply"])
def test_memory_is_full_in_one_process(fleet: Fleet, phase: str, whole: bool) -> None:
    if phase != "learn" and not whole:
        pytest.skip("in `make faults`")
    run, group = fail(fleet, "memory", phase)
    assert group.wait(BOUND_S) == [8, 8], group.log
    assert "data.batch_size" in says(group.log)[0] and "Peak: " in says(group.log)[0], group.log
    assert json.loads((run / "exit.json").read_text())["rank"] == 1
    assert checkpoint.find_newest(run / "checkpoints") == 6


@pytest.mark.usefixtures("thorough")
@pytest.mark.control("O1")
def test_memory_that_nobody_explains(fleet: Fleet) -> None:
    _, group = fail(fleet, "memory", "learn", "explanation")
    assert group.wait(BOUND_S) != [8, 8], group.log


def plan(**changes: Any) -> Config:
    tree: dict[str, Any] = {"model": {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "max_len": 1024}}
    tree |= {"data": {"seq_len": 1024, "batch_size": 4096, "train": "text"} | changes}
    return build_config(tree | {"techniques": {"fused": True}})


@pytest.mark.fault("O1")
def test_the_advice_is_the_batch_that_fits() -> None:
    advice = advise_on_memory(plan(), 80 * 2**30, 1)
    size = int(advice.rpartition(" = ")[2].partition(" ")[0].replace(",", ""))
    assert 8 <= size < 4096 and advise_on_memory(plan(batch_size=size), 80 * 2**30, 1).endswith(f"= {size - 1} fits")
    assert "no micro-batch fits" in advise_on_memory(plan(), 2**30, 1)
    assert advise_on_memory(plan(), 0, 1) == advise_on_memory(plan(), 80 * 2**30, 8) == ""
