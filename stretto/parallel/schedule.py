"""The orders of a pipeline: which passes a process runs one after the other, and what that takes. No tensors here: the
pipeline executes these lists, and `simulate` walks through them with durations instead of work.

A model is cut by depth into K modules, 0 to K-1. `linear`: each has a process of its own. `ring`: the first and the
last are in process 0, where the embedding that both use is then needed once. An update learns from M micro-batches;
micro-batches are numbered through, and number g belongs to update g // M.

    order      gradient of module k          weights of update t      what a process does with its micro-batch g
    1f1b       of the same update            all updates before it    F(g), B(g - (K-1-k)); at the end of an update the
                                                                      rest of its backward passes, then the update
    2bw        one update old                all but the last one     the same without an end: the next update goes on
    pipelined  K-1-k updates old             all updates before it    F(g), B(g - (K-1-k) M)
    ouroboros  K-1-k updates old             all updates before it    as pipelined, but waits at the end of an update
                                                                      for what its next backward pass needs (the paper)

An embedding that is also the output matrix gets both its gradients at module 0's update: in a pipelined order that of
the output is `late` updates old, so that module 0 need not wait for the last module. In the paper's order it is not.

Every process can walk through its list without a deadlock: each entry needs only what earlier entries of others give.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

FORWARD_SHARE = 1 / 3  # of the work on a micro-batch


class Action(NamedTuple):
    kind: Literal["forward", "backward", "update", "collect"]  # collect: receive the gradients of the next update
    module: int
    number: int  # of the micro-batch; of an update: which one


@dataclass(frozen=True)
class Schedule:
    order: str
    processes: int
    ring: bool = False
    micro_batches: int = 1  # of an update, in this process
    first: int = 0  # the first update in this order: nothing before it is waited for
    # 1f1b, 2bw: micro-batches that a module has under way beyond those of the next one. With 1, every message is waited
    # for; with 2, a message may take as long as the passes of a micro-batch, at the cost of twice the activations.
    lead: int = 1

    def __post_init__(self) -> None:
        if self.lead != 1 and self.order not in ("1f1b", "2bw"):
            raise ValueError(f"lead = {self.lead}: how far modules of {self.order!r} are ahead says their delay")
        if self.order == "2bw" and self.micro_batches < (least := self.lead * (self.modules - 1)):
            raise ValueError(
                f"2bw with {self.modules} modules needs {least} micro-batches in an update or more, not "
                f"{self.micro_batches}: the weights that its passes use would not be there yet"
            )

    @property
    def modules(self) -> int:
        return self.processes + self.ring

    @property
    def is_exact(self) -> bool:
        """Whether gradients are those of the weights that they are applied to."""
        return self.order == "1f1b" or self.modules == 1

    def find_modules(self, process: int) -> tuple[int, ...]:
        return (0, self.modules - 1) if self.ring and process == 0 else (process,)

    def find_process(self, module: int) -> int:
        return module % self.processes

    def find_delay(self, module: int) -> int:
        """How many updates lie between the weights that a gradient was computed with and those it is applied to."""
        if self.order in ("1f1b", "2bw"):
            return int(self.order == "2bw")
        return self.modules - 1 - module

    def find_wait(self, module: int) -> int:
        """How many updates a module runs forward before it runs backward. Their weights are those of then."""
        return 0 if self.order in ("1f1b", "2bw") else self.modules - 1 - module

    @property
    def late(self) -> int:
        """How old, in updates, the output's gradient of a tied embedding is."""
        return self._ahead if self.order == "pipelined" else 0

    @cached_property
    def _ahead(self) -> int:
        """How many micro-batches the first module is ahead of the last, in time."""
        return -int(-(self.modules - 1) * FORWARD_SHARE // 1)

    def find_version(self, update: int) -> int:
        """The number of updates behind the weights that the passes of an update use."""
        return max(update - 1, self.first) if self.order == "2bw" else update

    def list_actions(self, process: int, update: int) -> list[Action]:
        """What a process does in one update."""
        size = self.micro_batches
        if self.order == "ouroboros":
            return list(self._list_strictly(process, update))
        slots = range(update * size, (update + 1) * size)
        actions = [action for slot in slots for action in self._list_slot(process, slot)]
        if self.order != "1f1b":
            return actions
        first = {"update": update}  # what belongs to updates before was done at their ends
        actions += self.list_rest(process, update)
        return [action for action in actions if action.number >= first.get(action.kind, slots.start)]

    def _list_slot(self, process: int, slot: int) -> Iterator[Action]:
        """While a process runs micro-batch `slot` forward in its first module. The last module of a ring comes in
        between: other processes wait for what it gives."""
        size, begin, (module, *last) = self.micro_batches, self.first * self.micro_batches, self.find_modules(process)
        unit = size if self.order == "pipelined" else 1

        def list_end(module: int, ahead: int) -> Iterator[Action]:
            behind = ahead - (self.modules - 1 - module) * unit * self.lead
            if behind >= begin:
                yield Action("backward", module, behind)
            done = ahead if self.order == "pipelined" else behind
            if done >= begin and (done + 1) % size == 0:
                yield Action("update", module, done // size)

        yield Action("forward", module, slot)
        for other in last:
            if (late := slot - self._ahead * unit) >= begin:
                yield Action("forward", other, late)
                yield from list_end(other, late)
        yield from list_end(module, slot)

    def _list_strictly(self, process: int, update: int) -> Iterator[Action]:
        size, modules = self.micro_batches, self.find_modules(process)
        for module in modules:
            for index in range(size):
                yield Action("forward", module, update * size + index)
                if (old := update - self.find_wait(module)) >= self.first:
                    yield Action("backward", module, old * size + index)
        for module in reversed(modules):
            yield Action("update", module, update)
        yield from self._list_waiting(process, update)

    def _list_waiting(self, process: int, update: int) -> Iterator[Action]:
        for module in self.find_modules(process):
            if (wait := self.find_wait(module)) and update + 1 - wait >= self.first:
                yield Action("collect", module, update + 1 - wait)

    def list_rest(self, process: int, update: int) -> list[Action]:
        """What is left to do until all that belongs to this update and those before it is done, in all processes: then
        nothing is under way. It changes when things are computed, not what is computed."""
        end, size = (update + 1) * self.micro_batches, self.micro_batches
        if self.order == "ouroboros":
            return []
        if self.order == "pipelined":
            last = self.modules - 1
            slots = range(end, end + self._ahead * size if self.ring and process == 0 else end)
            late = [action for slot in slots for action in self._list_slot(process, slot) if action.module == last]
            return [*late, *self._list_waiting(process, update)]
        slots = range(end, end + (self.modules - 1) * self.lead + self._ahead)
        rest = [action for slot in slots for action in self._list_slot(process, slot)]
        return [a for a in rest if a.number < (update + 1 if a.kind == "update" else end)]


def balance(costs: Sequence[float], modules: int, ring: bool = False, last: float = 0.0) -> list[range]:
    """Cuts blocks that cost so much into modules, such that the busiest process has as little to do as is possible.
    `last` is what the head costs besides. Every module has at least one block; where there is a choice, later modules
    have more of them, since earlier ones hold more micro-batches. What the busiest process does is a sum over
    neighbours, or in a ring over all that is left and right of them: the least sum that will do is found by
    bisection."""
    blocks = len(costs)
    if not 1 + ring <= modules <= blocks:
        raise ValueError(f"{blocks} blocks cannot be cut into {modules} modules{' of a ring' if ring else ''}")
    until = [*accumulate(costs, initial=0.0)]
    until[-1] += last  # the head is behind the last block
    pairs = [(i, j) for j in range(1, blocks + 1) for i in range(j)]
    sums = {until[j] - until[i] for i, j in pairs}
    sums |= {until[i] + until[-1] - until[j] for i, j in pairs} if ring else set()

    def cut(limit: float) -> list[int]:
        """Where modules begin, the last one first, with no process beyond the limit; empty: that cannot be."""
        for start in range(blocks - 1, modules - 2, -1) if ring else (blocks,):  # of the last module of a ring
            found = [start]
            for left in range(modules - 1 - ring, ring - 1, -1):  # modules in front of the one that is cut off
                begin = found[-1] - 1
                while begin > left and until[found[-1]] - until[begin - 1] <= limit:
                    begin -= 1
                found.append(begin)
            loads = [until[b] - until[a] for b, a in pairwise(found)]
            if ring:
                loads.append(until[found[-1]] + until[-1] - until[start])
                found = [blocks, *found, 0]
            if found[-1] == 0 and max(loads) <= limit:
                return found
        return []

    limits = sorted(sums)
    found = cut(limits[bisect_left(limits, True, key=lambda limit: bool(cut(limit)))])
    return [range(a, b) for b, a in pairwise(found)][::-1]
