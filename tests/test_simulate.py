"""The orders of a pipeline, walked through: the table of the paper's specification, and laws that hold for all."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from random import Random

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.config import load_config
from stretto.errors import ConfigError
from stretto.parallel.pipeline_costs import Costs, explain_pipeline, list_rows
from stretto.parallel.schedule import Action, Schedule, balance
from stretto.parallel.sequence_costs import Link
from stretto.parallel.simulate import (
    Device,
    Module,
    Traffic,
    Walk,
    find_data_parallel_period,
    find_sequential_period,
    find_zero_bubble_period,
    simulate,
)
from stretto.recipes import find_recipe
from tests.runs import find_imported

ORDERS = ("1f1b", "2bw", "pipelined", "ouroboros")
ONE, HALF = Module(1.0, 2.0), Module(0.5, 1.0)


def make_modules(schedule: Schedule) -> list[Module]:
    """All processes have as much to do: the ends of a ring are half as large."""
    return [HALF, *[ONE] * (schedule.modules - 2), HALF] if schedule.ring else [ONE] * schedule.modules


def find_period(schedule: Schedule, tied: bool = False, link: Link | None = None, table: int = 0) -> float:
    traffic = Traffic(tied=tied) if link is None else Traffic(link, stream=1, tied=tied, table=table)
    (period,) = {round(device.period, 9) for device in simulate(schedule, make_modules(schedule), traffic)}
    return period


def list_schedules(most: int) -> list[Schedule]:
    """Half of them do not begin with the first update."""
    every = [
        (order, processes, ring, size)
        for order, processes, ring, size in product(ORDERS, range(1, most + 1), (False, True), (1, 2, 3, 9))
        if order != "2bw" or size >= processes + ring - 1
    ]
    return [Schedule(*each, first=2 * (number % 2)) for number, each in enumerate(every)]


def test_the_table_of_the_paper_is_reproduced() -> None:
    assert find_sequential_period([ONE] * 4, Traffic()) == 12
    assert find_period(Schedule("ouroboros", 4), tied=True) == 6
    assert find_period(Schedule("ouroboros", 4)) == 4, "gradients are received at the end of an update"
    assert find_period(Schedule("pipelined", 4)) == find_period(Schedule("pipelined", 4), tied=True) == 3
    whole = find_sequential_period(make_modules(Schedule("ouroboros", 4, ring=True)), Traffic())
    assert whole / find_period(Schedule("ouroboros", 4, ring=True), tied=True) == pytest.approx(2.4)
    assert whole / find_period(Schedule("pipelined", 4, ring=True), tied=True) == 4


def test_every_order_is_walked_through_without_needless_waiting() -> None:
    for schedule, tied in product(list_schedules(8), (False, True)):
        size, processes, period = schedule.micro_batches, schedule.processes, find_period(schedule, tied)
        if schedule.order in ("2bw", "pipelined") or processes == 1:
            assert period == 3 * size, schedule
        elif schedule.order == "1f1b":
            usual = 3 * (size + processes - 1)
            assert period <= usual if schedule.ring else period == usual, schedule
        elif not schedule.ring and size == 1:
            assert period == (processes + 2 if tied else 4), schedule


def test_passes_use_the_weights_that_they_should() -> None:
    """Each update comes once and in order, and each pass once; the version that a pass wants is there."""
    ahead = [Schedule(*each, 12, lead=2) for each in product(("1f1b", "2bw"), range(1, 7), (False, True))]
    for schedule in list_schedules(6) + ahead:
        size = schedule.micro_batches
        for process in range(schedule.processes):
            done, seen = dict.fromkeys(schedule.find_modules(process), schedule.first), set[Action]()
            for update in range(schedule.first, schedule.first + 12):
                for action in schedule.list_actions(process, update):
                    assert action not in seen
                    seen.add(action)
                    if action.kind == "update":
                        assert action.number == done[action.module]
                        done[action.module] += 1
                    if action.kind == "forward":
                        wanted, there = schedule.find_version(action.number // size), done[action.module]
                        assert there in (wanted, wanted + (schedule.order == "2bw"))


def test_too_few_micro_batches_for_2bw() -> None:
    with pytest.raises(ValueError, match="2bw with 5 modules needs 4 micro-batches in an update or more, not 3"):
        Schedule("2bw", 5, micro_batches=3)


def test_messages_are_hidden_behind_more_micro_batches() -> None:
    for processes, ring in product((2, 3, 4, 7), (False, True)):
        schedule = Schedule("2bw", processes, ring, 16, lead=2)
        assert find_period(schedule, link=Link("", 4.0, 0.0)) == 3 * 16, schedule
        assert simulate(schedule, make_modules(schedule))[0].held[0] == 2 * (schedule.modules - 1) + 1
    slow = Schedule("1f1b", 4, False, 16)
    quick, link = replace(slow, lead=2), Link("", 4.0, 0.0)
    assert 3 * 19 < find_period(quick, link=link) < find_period(slow, link=link)
    with pytest.raises(ValueError, match="lead = 2: how far modules of 'pipelined' are ahead says their delay"):
        Schedule("pipelined", 4, lead=2)


def test_a_deadlock_raises() -> None:
    schedule = Schedule("pipelined", 2)
    walk = Walk(schedule, [ONE, ONE], Traffic())
    backward_first = [[[Action("backward", 0, 0), Action("forward", 0, 0)]], [[Action("forward", 1, 0)]]]
    with pytest.raises(ValueError, match=r"cannot go on: .*kind='forward', module=0, number=0"):
        walk.run(backward_first)


def test_messages_take_their_time() -> None:
    """As many micro-batches are under way as there are modules from here on: a round of one of them is the time of as
    many updates, and 2 (K-1) messages are in it. A link that is slower than the work alone decides."""
    link = Link("a tenth", 10.0, 0.0)
    assert find_period(Schedule("pipelined", 4), link=link) == pytest.approx(3 + 6 * 0.1 / 4)
    assert find_period(Schedule("ouroboros", 4), True, link, table=2) == pytest.approx(6 + 3 * 0.1 + 0.2)
    assert find_period(Schedule("ouroboros", 4, ring=True), True, link, table=2) == pytest.approx(5 + 4 * 0.1)
    slow = Link("all", 0.1, 0.0)
    (period,) = {
        device.period for device in simulate(Schedule("pipelined", 2, micro_batches=8), [ONE] * 2, Traffic(slow, 1))
    }
    assert period == 80


def test_what_devices_hold() -> None:
    def find(order: str, processes: int, ring: bool = False, size: int = 1) -> list[Device]:
        schedule = Schedule(order, processes, ring, size)
        module = Module(1.0, 2.0, 0.0, weights=1000, version=500, gradients=300, moments=200, activations=10)
        return simulate(schedule, [module] * schedule.modules)

    devices = find("pipelined", 4)
    assert [device.held for device in devices] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert [device.versions for device in devices] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert [device.memory for device in devices] == [1500 + 500 * n + 10 * (n + 1) for n in (3, 2, 1, 0)]
    assert [device.versions for device in find("ouroboros", 3)] == [{0: 3}, {1: 2}, {2: 1}]
    assert [device.versions for device in find("1f1b", 4, size=8)] == [{0: 1}, {1: 1}, {2: 1}, {3: 1}]
    assert [device.held for device in find("1f1b", 4, size=8)] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    devices = find("2bw", 4, size=8)
    assert [device.versions for device in devices] == [{0: 2}, {1: 2}, {2: 2}, {3: 2}]
    assert [device.held for device in devices] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert find("pipelined", 3, ring=True)[0].held == {0: 4, 3: 1}
    assert find("1f1b", 2, size=4)[0].utilisation == pytest.approx(4 / 5)


def test_64_modules() -> None:
    assert find_period(Schedule("pipelined", 64), tied=True) == 3
    assert find_period(Schedule("ouroboros", 64), tied=True) == 66


def test_closed_forms() -> None:
    assert find_zero_bubble_period([ONE] * 4, Traffic(), 8) == 8 * 3 + 3 * 1, "a third of the 9 of 1f1b"
    model, link = Module(1.0, 2.0, gradients=300), Link("", 100.0, 0.0)
    assert find_data_parallel_period(model, 4, link, blocks=4) == 1 + (0.5 + 4.5), "messages are longer than the pass"
    assert find_data_parallel_period(model, 4, Link("", 1e9, 0.0), blocks=4) == pytest.approx(3)


def test_balance_is_exact() -> None:
    random = Random(0)
    for _ in range(300):
        blocks = random.randint(1, 7)
        modules = random.randint(1, blocks)
        ring = modules > 1 and random.random() < 0.5
        costs = [random.randint(1, 9) for _ in range(blocks)]
        last = random.randint(0, 20)

        def find_load(starts: tuple[int, ...], costs: list[int] = costs, ring: bool = ring, last: int = last) -> int:
            loads = [sum(costs[a:b]) for a, b in zip((0, *starts), (*starts, len(costs)), strict=True)]
            loads[-1] += last
            return max([loads[0] + loads[-1], *loads[1:-1]] if ring else loads)

        cuts = balance(costs, modules, ring, last)
        assert [i for cut in cuts for i in cut] == [*range(blocks)] and all(cuts) and len(cuts) == modules
        best = min(map(find_load, combinations(range(1, blocks), modules - 1)))
        assert find_load(tuple(cut.start for cut in cuts[1:])) == best
    with pytest.raises(ValueError, match="3 blocks cannot be cut into 4 modules of a ring"):
        balance([1.0] * 3, 4, ring=True)


MEDIUM = ["model.preset=gpt2-medium", "data.batch_size=16", "data.seq_len=1024", "model.vocab=50304"]


def test_a_plan_compares_all_ways() -> None:
    rows = {(row.devices, row.way): row for row in list_rows(Costs(load_config(find_recipe("causal-lm"), MEDIUM)))}
    alone, ways = rows[1, "one device"], {way for _, way in rows}
    assert alone.periods[0] == pytest.approx(74.5e-3, rel=0.01), "docs/results.md: 74.6 ms were measured"
    assert len(ways) == 1 + 8 + 3
    assert rows[4, "pipelined, linear"].periods[0] < rows[4, "1f1b, linear"].periods[0] < alone.periods[0]
    assert rows[4, "2bw, ring"].memory < rows[4, "2bw, linear"].memory < rows[4, "pipelined, linear"].memory
    assert rows[4, "1f1b, ring"].periods[2] < rows[4, "1f1b, linear"].periods[2], "the table does not travel"
    assert all(0 < row.busy < 1.0001 for row in rows.values())


def test_a_plan_is_printed() -> None:
    outcome = CliRunner().invoke(app, ["plan", "demo", "--pipeline"])
    assert outcome.exit_code == 0, outcome.output
    ways = [line[9:29].strip() for line in outcome.output.splitlines()[5:]]
    assert ways[0] == "one device" and ways.count("data parallelism") == 5
    assert ways.count("2bw, linear") == 3 and ways.count("2bw, ring") == 2, "four blocks: no more than four modules"


def test_a_plan_of_what_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match=r"model\.kind = 'vit' cannot be cut into a pipeline"):
        list(explain_pipeline(load_config(find_recipe("images"), [])))


def test_a_plan_needs_no_torch() -> None:
    assert find_imported("from stretto.parallel import pipeline_costs", "torch") == []
