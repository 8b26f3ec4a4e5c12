"""How long an update of a pipeline takes, and what its devices hold: the lists of schedule.py are walked through with
durations instead of work. Counterparts that are not run here have closed forms. Torch is not imported.

A process runs its entries one after the other. Messages travel meanwhile, one at a time on each edge and direction:

    forward, module k    needs the forward pass of module k-1; in the last module, with a tied embedding, also the table
                         that the first module's pass had
    backward, module k   needs its own forward pass, and the backward pass of module k+1
    collect, module k    needs all gradients of an update from module k+1
    update, module k     needs its backward passes; in the first module, with a tied embedding, also the gradient of the
                         output, `late` updates old

In a ring both uses of a tied embedding are in one process, and nothing of it travels.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from stretto.parallel.schedule import Action, Schedule
from stretto.parallel.sequence_costs import Link

AT_ONCE = Link("no time", float("inf"), 0.0)


@dataclass(frozen=True)
class Module:
    """What a module takes: seconds of a micro-batch or of an update, and bytes."""

    forward: float
    backward: float
    update: float = 0.0
    weights: int = 0  # as the optimizer keeps them
    version: int = 0  # of weights of another age, as passes read them
    gradients: int = 0
    moments: int = 0
    activations: int = 0  # of a micro-batch, from its forward to its backward pass


@dataclass(frozen=True)
class Traffic:
    """What travels between processes, in bytes, and how fast."""

    link: Link = AT_ONCE
    stream: int = 0  # of a micro-batch between two modules, in each direction
    tied: bool = False
    table: int = 0  # of a tied embedding, and as much of its gradient

    def seconds(self, size: int) -> float:
        return size / self.link.bandwidth + self.link.latency


@dataclass(frozen=True)
class Device:
    """One process in the steady state."""

    period: float  # seconds of an update
    utilisation: float  # the share of them with work
    held: dict[int, int]  # most micro-batches between forward and backward pass, by module
    versions: dict[int, int]  # most weights of different age, by module
    memory: int  # bytes when there are the most


def simulate(schedule: Schedule, modules: Sequence[Module], traffic: Traffic | None = None) -> list[Device]:
    """Each process in the steady state; lists that cannot be walked through raise a ValueError."""
    found = []
    for process, period in enumerate(find_periods(schedule, modules, traffic or Traffic())):
        own = [modules[k] for k in schedule.find_modules(process)]
        work = sum(schedule.micro_batches * (module.forward + module.backward) + module.update for module in own)
        found.append(Device(period, work / period, *count_held(schedule, modules, process)))
    return found


def find_periods(schedule: Schedule, modules: Sequence[Module], traffic: Traffic) -> list[float]:
    """The seconds of an update in each process, in the steady state. Gradients that come late make it one in which K
    updates repeat themselves."""
    fill, window = count_updates(schedule)
    ends = Walk(schedule, modules, traffic).run(list_all(schedule))
    return [(times[fill + window - 1] - times[fill - 1]) / window for times in ends]


def count_updates(schedule: Schedule) -> tuple[int, int]:
    """How many updates it takes until the steady state, and how many show it."""
    if schedule.is_exact:
        return 1, 1
    if schedule.find_wait(0):
        return 2 * schedule.modules, schedule.modules
    deep = -(-2 * schedule.modules // schedule.micro_batches)
    return deep + 1, deep + 1


@lru_cache(maxsize=1)
def list_all(schedule: Schedule) -> list[list[list[Action]]]:
    """The entries of each process by update. The last updates are there for others to go on, and so is the rest."""
    fill, window = count_updates(schedule)
    updates, processes = range(schedule.first, schedule.first + fill + 2 * window), range(schedule.processes)
    lists = [[schedule.list_actions(process, update) for update in updates] for process in processes]
    rest = [[] if schedule.order == "1f1b" else schedule.list_rest(process, updates[-1]) for process in processes]
    return [[*some, last] for some, last in zip(lists, rest, strict=True)]


class Walk:
    """All lists at once: an entry begins when its process has ended the one before and all that it needs is there."""

    def __init__(self, schedule: Schedule, modules: Sequence[Module], traffic: Traffic) -> None:
        self.schedule, self.modules, self.tied = schedule, modules, traffic.tied and schedule.modules > 1
        self.message = traffic.seconds(traffic.stream) if schedule.processes > 1 else 0.0
        self.table = 0.0 if schedule.ring else traffic.seconds(traffic.table)
        self.ended = dict[Action, float]()  # when an entry has ended
        self.arrived = dict[Action, float]()  # when what a pass has made is in the next process
        self.free = defaultdict[tuple[str, int], float](float)  # when a module's edge has carried its last message
        self.ready = deque[Iterator[Action]]()  # processes that can go on
        self.waiting = defaultdict[Action, list[Iterator[Action]]](list)  # processes by what they wait for

    def run(self, lists: Sequence[Sequence[Sequence[Action]]]) -> list[list[float]]:
        """When each process ends each of its updates, whose entries are given."""
        ends = [list[float]() for _ in lists]
        self.ready.extend(map(self._run_process, lists, ends))
        while self.ready:
            process = self.ready.popleft()
            if (need := next(process, None)) is not None:
                self.waiting[need].append(process)
        if self.waiting:
            raise ValueError(f"{self.schedule} cannot go on: processes wait for {', '.join(map(str, self.waiting))}")
        return ends

    def _run_process(self, updates: Sequence[Sequence[Action]], ends: list[float]) -> Iterator[Action]:
        """Yields what is missing, until there is nothing left to do."""
        clock = 0.0
        for actions in updates:
            for action in actions:
                for need, times, travels in self._list_needs(*action):
                    if need not in times:
                        yield need
                    clock = max(clock, times[need] + travels)
                clock += getattr(self.modules[action.module], action.kind, 0.0)
                self._finish(action, clock)
            ends.append(clock)

    def _finish(self, action: Action, clock: float) -> None:
        edge = action.kind, action.module
        self.ended[action] = clock
        self.arrived[action] = self.free[edge] = max(clock, self.free[edge]) + self.message
        self.ready.extend(self.waiting.pop(action, ()))

    def _list_needs(self, kind: str, k: int, number: int) -> Iterator[tuple[Action, dict[Action, float], float]]:
        """What an entry needs, where the time of that stands, and how long it travels since then."""
        schedule, size, last = self.schedule, self.schedule.micro_batches, self.schedule.modules - 1
        if kind == "forward":
            if k > 0:
                yield Action("forward", k - 1, number), self.arrived, 0.0
            if self.tied and k == last and (version := schedule.find_version(number // size)) > schedule.first:
                yield Action("update", 0, version - 1), self.ended, self.table
        elif kind == "backward":
            yield Action("forward", k, number), self.ended, 0.0
            if k < last:
                yield Action("backward", k + 1, number), self.arrived, 0.0
        elif kind == "collect":
            yield Action("backward", k + 1, (number + 1) * size - 1), self.arrived, 0.0
        else:
            if (old := number - schedule.find_wait(k)) >= schedule.first:
                yield Action("backward", k, (old + 1) * size - 1), self.ended, 0.0
            if self.tied and k == 0 and (old := number - schedule.late) >= schedule.first:
                yield Action("backward", last, (old + 1) * size - 1), self.ended, self.table


def count_held(
    schedule: Schedule, modules: Sequence[Module], process: int
) -> tuple[dict[int, int], dict[int, int], int]:
    """What a process holds when there is the most: micro-batches and weight versions by module, and bytes."""
    own = schedule.find_modules(process)
    flying = {k: list[int]() for k in own}  # the versions that micro-batches on their way have seen
    newest = dict.fromkeys(own, schedule.first)
    held, versions, memory = dict.fromkeys(own, 0), dict.fromkeys(own, 1), 0
    state = sum(modules[k].weights + modules[k].gradients + modules[k].moments for k in own)
    for kind, k, number in chain.from_iterable(list_all(schedule)[process][: sum(count_updates(schedule))]):
        if kind == "forward":
            flying[k].append(schedule.find_version(number // schedule.micro_batches))
        elif kind == "backward":
            flying[k].remove(schedule.find_version(number // schedule.micro_batches))
        elif kind == "update":
            newest[k] = number + 1
        old = {k: len({*flying[k]} - {newest[k]}) for k in own}
        held[k], versions[k] = max(held[k], len(flying[k])), max(versions[k], 1 + old[k])
        memory = max(memory, sum(old[k] * modules[k].version + len(flying[k]) * modules[k].activations for k in own))
    return held, versions, state + memory


def find_sequential_period(modules: Sequence[Module], traffic: Traffic, micro_batches: int = 1) -> float:
    """Model parallelism without any overlap: M (sum of F_k + B_k + 2 (K-1) messages), then all updates at once. It is
    what seeds/ouroboros.md, section 4, calls T_F + T_B."""
    passes = sum(module.forward + module.backward for module in modules)
    passes += 2 * (len(modules) - 1) * traffic.seconds(traffic.stream)
    return micro_batches * passes + max(module.update for module in modules)


def find_data_parallel_period(model: Module, devices: int, link: Link, blocks: int) -> float:
    """Data parallelism: each of D devices has the model and its part of the samples; gradients of one block are summed
    while those of the next are computed (Li et al., arXiv 2006.15704). A ring sums n bytes in
    2 (D-1)/D n / bandwidth + 2 (D-1) latency (Patarasuk and Yuan, 2009). The first message begins behind the backward
    pass of the last of L blocks, and the last message cannot begin before that of the first block ends: the longer one
    of B/L + sum and B + sum/L follows the forward pass."""
    hops = 2 * (devices - 1)
    summing = hops / devices * model.gradients / link.bandwidth + hops * link.latency
    behind = max(model.backward / blocks + summing, model.backward + summing / blocks)
    return model.forward + behind + model.update


def find_zero_bubble_period(modules: Sequence[Module], traffic: Traffic, micro_batches: int) -> float:
    """The bound of ZB-H1, whose memory is that of 1F1B: M (F + B + W) + (K-1) (F + B - W), where B is the backward pass
    of inputs and W that of weights, each half of the backward pass here (Qi et al., arXiv 2401.10241, section 2; 1F1B
    has (K-1) (F + B + W) behind the plus). M counts for the slowest module, the rest for the others. The first
    micro-batch and the last gradient pass K-1 edges each; what a tied embedding sends is not counted."""
    busy = [module.forward + module.backward for module in modules]
    slowest = busy.index(max(busy))
    idle = sum(module.forward for k, module in enumerate(modules) if k != slowest)
    idle += 2 * (len(modules) - 1) * traffic.seconds(traffic.stream)
    return micro_batches * busy[slowest] + idle + max(module.update for module in modules)
