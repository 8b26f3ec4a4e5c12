"""Pipeline parallelism: the layers of a model over several processes, in the orders of schedule.py. Among them are
Ouroboros (Yang and others, arXiv 1909.06695), in which no module waits for the backward passes of those behind it and
learns from gradients that are some updates old, and 1F1B, which waits and is exact.

All processes of a pipeline read the same micro-batches, which are functions of (seed, step), so only the stream of
tokens travels, [T, C], and its gradient. A message carries the number of its micro-batch, and whether an update behind
it was cancelled: then those in front of it are cancelled too.

Old gradients are exact by definition: the gradient of update u is that of the whole model at the weights that its
forward passes used, and module k applies its part of it `find_delay(k)` updates later. So every module holds the
weights of all micro-batches that are between their two passes. That takes no copy: the optimizer writes new weights to
fresh memory (`FlatAdamW.renews`), and passes run on tensors over the old one. A backward pass runs with the same
tensors in place, since a block that is computed again reads them once more.

An embedding that is also the output matrix belongs to module 0. The last module borrows it: in a ring both are in one
process, and it is there once; in a line it is sent each update, and the gradient of the output is sent back.

When a run is saved, evaluated or logged, what is under way is brought to an end, which changes nothing in what is
computed (`Schedule.list_rest`). A checkpoint has, besides the weights under their usual names, the older weights that
are still needed and the gradients that wait: a resumed run repeats the forward passes between them, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import reduce
from itertools import pairwise, zip_longest
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from stretto.batch import Batch, dense_layout
from stretto.batch import Sequences as Tokens
from stretto.checkpoint import Snapshot
from stretto.config import KERNELS, Config, ModelConfig, OptimConfig, ParallelConfig
from stretto.execute import Executor
from stretto.model import Chain, LMHead, Model
from stretto.optim import FlatAdamW, clip_gradients, learning_rate, set_learning_rate
from stretto.parallel.gradients import Present
from stretto.parallel.schedule import Action, Schedule
from stretto.precision import autocast
from stretto.runtime import Runtime
from stretto.step import Update
from stretto.techniques.technique import Context, Estimate, Sites, Technique

TABLE = "embedding.token.weight"  # what a tied output matrix is
HEADER = 2  # int64: the number of the micro-batch, and whether the update was cancelled
Weights = dict[str, Tensor]


class Channel:
    """Messages from one process to another, which arrive in the order in which they were sent. Channels have groups of
    their own: NCCL knows no tags, and two processes of a ring are neighbours twice."""

    def __init__(self, source: int, target: int, rt: Runtime, limit: int) -> None:
        """`limit`: how many messages may be under way; the receiver never lags behind by more. Every process has to
        make every channel."""
        self.source, self.target, self.device, self.limit = source, target, rt.device, limit
        self.group = dist.new_group([source, target], timeout=timedelta(seconds=rt.timeout_s))
        self.sent: deque[tuple[Any, Tensor]] = deque()
        self.expected: dict[int, tuple[Any, Tensor, torch.Size, torch.dtype]] = {}

    def send(self, number: int, payload: Tensor, cancelled: Tensor | None = None) -> None:
        buffer = self._allocate(payload.shape, payload.dtype)
        header, body = self._divide(buffer, payload.shape, payload.dtype)
        header[0] = number
        header[1] = 0 if cancelled is None else cancelled
        body.copy_(payload)
        self.sent.append((dist.isend(buffer, self.target, self.group), buffer))
        while len(self.sent) > self.limit:
            self.sent.popleft()[0].wait()

    def expect(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Receives a message while other work goes on."""
        if number not in self.expected:
            buffer = self._allocate(shape, dtype)
            work = dist.irecv(buffer, self.source, self.group)
            self.expected[number] = work, buffer, torch.Size(shape), dtype

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """The message, and whether its update was cancelled behind it."""
        work, buffer, shape, dtype = self.expected.pop(number)
        work.wait()
        header, body = self._divide(buffer, shape, dtype)
        torch._assert_async(header[0] == number, f"a message of another micro-batch than {number} has come")
        return body, header[1]

    def finish(self) -> None:
        while self.sent:
            self.sent.popleft()[0].wait()

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = 8 * HEADER + torch.Size(shape).numel() * dtype.itemsize
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    @staticmethod
    def _divide(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return buffer[: 8 * HEADER].view(torch.int64), buffer[8 * HEADER :].view(dtype).view(*shape)


@dataclass(frozen=True)
class Flight:
    """A micro-batch between its two passes through a module."""

    given: Tensor | None  # what the module was given, which gets a gradient; None: tokens
    out: Tensor  # what it made: the stream, or the loss


class Module:
    """A stretch of the model, in the process that runs it."""

    def __init__(self, number: int, schedule: Schedule, blocks: range, names: Sequence[str], model: Chain) -> None:
        self.number, self.blocks, self.model = number, blocks, model
        self.is_first, self.is_last = number == 0, number == schedule.modules - 1
        self.own = {name: model.get_parameter(name) for name in names}
        self.places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
        self.clock = 0  # updates that are over
        self.before: Weights = {}  # the weights before the last update
        self.used: dict[int, Weights] = {}  # update -> leaves that its passes run on, until its last backward pass
        self.flights: dict[int, Flight] = {}  # by the number of the micro-batch
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}  # gradients that have come already, with their verdicts
        self.norm: Tensor | None = None  # of the gradients of the next update
        self.last_norm = torch.zeros(())
        self.cancelled = torch.zeros((), dtype=torch.int64)  # whether a module behind has cancelled this update
        self.done = {"forward": 0, "backward": 0, "update": 0}  # actions

    def borrow(self, name: str) -> None:
        """Passes use a parameter of another module, too."""
        owner, _, leaf = name.rpartition(".")
        self.places[name] = self.model.get_submodule(owner), leaf

    @contextmanager
    def running_on(self, weights: Weights) -> Iterator[None]:
        """Lets the model compute with these tensors in the place of its parameters."""
        usual = {name: owner._parameters[leaf] for name, (owner, leaf) in self.places.items()}
        try:
            for name, (owner, leaf) in self.places.items():
                owner._parameters[leaf] = weights[name]  # type: ignore[assignment]
            yield
        finally:
            for name, (owner, leaf) in self.places.items():
                owner._parameters[leaf] = usual[name]


class Pipelined(Executor):
    """Runs the modules of this process in the order of a schedule."""

    work: Update

    def __init__(
        self,
        work: Update,
        model: Chain,
        cfg: ParallelConfig,
        schedule: Schedule,
        spans: Sequence[range],
        group: dist.ProcessGroup,
        peers: dist.ProcessGroup | None,
        rt: Runtime,
        optim: OptimConfig,
        steps: int,
    ) -> None:
        """`group`: the processes of this pipeline. `peers`: those who run the same modules on other tokens."""
        super().__init__(work)
        self.model, self.cfg, self.group, self.peers, self.rt = model, cfg, group, peers, rt
        self.optim, self.steps = optim, steps
        self.usual, self.exact = schedule, replace(schedule, order="1f1b", first=0)  # exact: the first updates
        self.place = group.rank()
        self.tied = model.cfg.tied and schedule.modules > 1
        self.modules = {
            number: Module(number, schedule, spans[number], find_names(model, spans, number), model)
            for number in schedule.find_modules(self.place)
        }
        if self.tied and (last := self.modules.get(schedule.modules - 1)):
            last.borrow(TABLE)
        self.sums = {number: Present(model, list(m.own.values()), peers) for number, m in self.modules.items()}
        self.batches: dict[int, tuple[int, Batch]] = {}  # by number
        self.factors: dict[int, Tensor] = {}  # of the loss, by update
        self.losses: dict[int, list[Tensor]] = defaultdict(list)  # of micro-batches, by update
        self.tables: dict[int, Tensor] = {}  # the tied embedding that the passes of an update use
        self.output_gradients: dict[int, Tensor] = {}  # of the tied embedding, by update
        self.step = 0  # updates begun
        self.evaluations = 0
        self.flags: deque[tuple[Any, Tensor]] = deque()  # who was asked to stop, in the last updates
        self.stop = False
        if isinstance(work.optimizer, FlatAdamW):
            work.optimizer.renews = not schedule.is_exact
        self.dtype = self._find_dtype()
        self._open_channels()

    @property
    def schedule(self) -> Schedule:
        return self.exact if self.step < self.usual.first else self.usual

    @property
    def size(self) -> int:
        return self.usual.micro_batches

    def _find_dtype(self) -> torch.dtype:
        """The dtype of the stream, which the process with the embedding finds out."""
        known, dtypes = [0], (torch.float32, torch.bfloat16)
        if self.place == 0:
            zero = torch.zeros(1, dtype=torch.int64, device=self.work.device)
            tokens = Tokens(zero, zero, dense_layout(1, 1, device=self.work.device))
            with torch.no_grad(), autocast(self.work.precision, self.work.device):
                known = [dtypes.index(self.model.eval().embedding(tokens).dtype)]
            self.model.train()
        return dtypes[self.rt.sum_over_ranks(known, self.group)[0]]

    def _open_channels(self) -> None:
        """Every process opens the channels of all pipelines."""
        ranks = dist.get_process_group_ranks(self.group)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, ranks)
        schedule, limit = self.usual, self.usual.modules * (self.size + 1) + 2
        self.onward: dict[int, Channel] = {}  # by the module that receives
        self.back: dict[int, Channel] = {}  # by the module that receives
        self.table_channels: list[Channel] = []
        for row in sorted({tuple(ranks) for ranks in everyone}):
            opened: list[tuple[dict[int, Channel] | None, int, Channel]] = []
            for one, two in pairwise(range(schedule.modules)):
                here, there = (row[schedule.find_process(number)] for number in (one, two))
                opened.append((self.onward, two, Channel(here, there, self.rt, limit)))
                opened.append((self.back, one, Channel(there, here, self.rt, limit)))
            if self.tied and not schedule.ring:
                ends = row[0], row[-1]
                opened += [(None, 0, Channel(*ends, self.rt, limit)), (None, 0, Channel(*ends[::-1], self.rt, limit))]
            if list(row) != ranks:
                continue
            for kept, number, channel in opened:
                if kept is None:
                    self.table_channels.append(channel)
                else:
                    kept[number] = channel

    # One update.

    def run(self, batches: Sequence[tuple[int, Any]], key: Hashable = ()) -> tuple[Tensor, Tensor]:
        update, schedule = self.step, self.schedule
        assert len(batches) == self.size, "as many micro-batches as the schedule was made for"
        self.batches |= {update * self.size + i: batch for i, batch in enumerate(batches)}
        self.factors[update] = self.work.factor.clone()
        self._execute(schedule.list_actions(self.place, update))
        self.step += 1
        for known in (self.factors, self.losses):
            known.pop(update - self.usual.modules, None)
        zero = torch.zeros((), device=self.work.device)
        return zero, zero  # `settle` knows more

    def _execute(self, actions: Sequence[Action]) -> None:
        left = [a for a in actions if a.number >= self.modules[a.module].done.get(a.kind, 0)]
        for action, after in zip_longest(left, left[1:]):
            self._expect(action)
            if after is not None:  # its message may come while this one is worked on
                self._expect(after)
            getattr(self, f"_{action.kind}")(self.modules[action.module], action.number)
            if action.kind in self.modules[action.module].done:
                self.modules[action.module].done[action.kind] = action.number + 1

    def _expect(self, action: Action) -> None:
        module = self.modules[action.module]
        if action.kind == "forward" and not module.is_first:
            self._expect_stream(self.onward[module.number], action.number)
        if action.kind == "backward" and not module.is_last and action.number not in module.waiting:
            self._expect_stream(self.back[module.number], action.number)

    def _expect_stream(self, channel: Channel, number: int) -> None:
        inputs = self.batches[number][1].inputs
        assert inputs is not None
        channel.expect(number, (len(inputs.ids), self.model.cfg.width), self.dtype)

    def _forward(self, module: Module, number: int) -> None:
        update, (index, batch) = number // self.size, self.batches[number]
        given = None
        if not module.is_first:
            given = self.onward[module.number].take(number)[0].requires_grad_()
        weights = self._open_weights(module, update)
        out = self._run(module, index, batch, given, weights)
        if module.is_last:
            self.losses[update].append(out.detach())
            out = out * self.factors[update]
        else:
            self.onward[module.number + 1].send(number, out.detach())
        module.flights[number] = Flight(given, out)

    def _run(self, module: Module, index: int, batch: Batch, given: Tensor | None, weights: Weights) -> Tensor:
        self.work.seed_for(index)
        with module.running_on(weights), autocast(self.work.precision, self.work.device):
            return self._compute(module, batch, given)

    def _compute(self, module: Module, batch: Batch, given: Tensor | None) -> Tensor:
        """The stream behind a module; the loss behind the last."""
        x = self.model.run(batch, given, module.blocks)
        if not module.is_last:
            return x
        assert isinstance(self.model.head, LMHead)
        return self.model.compute_loss(self.model.head, self.model.pick(x, batch), batch)

    def _backward(self, module: Module, number: int) -> None:
        flight, update = module.flights.pop(number), number // self.size
        cancelled = torch.zeros((), dtype=torch.int64, device=self.work.device)
        gradient = None
        if not module.is_last:
            held = module.waiting.pop(number, None)
            gradient, cancelled = held if held is not None else self.back[module.number].take(number)
        with module.running_on(module.used[update]):
            torch.autograd.backward(flight.out, gradient)
        is_end = (number + 1) % self.size == 0
        if module.is_last and self.tied and is_end:
            self._hand_over_table_gradient(module, update)
        if module.is_first:
            self.batches.pop(number)
            module.cancelled = cancelled
            return
        if is_end and not self.schedule.is_exact:
            cancelled = self._judge(module, update, cancelled)
        assert flight.given is not None and flight.given.grad is not None
        self.back[module.number - 1].send(number, flight.given.grad, cancelled)
        if 0 not in self.modules:
            self.batches.pop(number)

    def _collect(self, module: Module, update: int) -> None:
        """Receives the gradients of an update before they are needed."""
        for number in range(update * self.size, (update + 1) * self.size):
            if number not in module.waiting:
                self._expect_stream(self.back[module.number], number)
                module.waiting[number] = self.back[module.number].take(number)

    # Weights.

    def _open_weights(self, module: Module, update: int) -> Weights:
        """The leaves that all passes of an update run on."""
        if update in module.used:
            return module.used[update]
        version = self.schedule.find_version(update)
        assert version in (module.clock, module.clock - 1), (version, module.clock)
        if version == module.clock:
            weights = {name: p.detach() for name, p in module.own.items()}
        else:
            weights = {name: module.before.get(name, p.detach()) for name, p in module.own.items()}
        ahead = self.schedule.find_delay(module.number)
        if self.cfg.predict and ahead:
            weights = self._predict(module, weights, ahead, update)
        if self.tied and module.is_first:
            self._lend_table(update, weights[TABLE])
        if self.tied and module.is_last and not module.is_first:
            weights[TABLE] = self._borrow_table(update)
        module.used[update] = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        return module.used[update]

    def _lend_table(self, update: int, table: Tensor) -> None:
        if self.usual.ring:
            self.tables[update] = table
        elif self.usual.modules > 1:
            self.table_channels[0].send(update, table)

    def _borrow_table(self, update: int) -> Tensor:
        if self.usual.ring:
            return self.tables.pop(update)
        table = self.model.get_parameter(TABLE)
        self.table_channels[0].expect(update, table.shape, table.dtype)
        return self.table_channels[0].take(update)[0]

    def _hand_over_table_gradient(self, module: Module, update: int) -> None:
        gradient = module.used[update][TABLE].grad
        assert gradient is not None
        if self.usual.ring or self.usual.modules == 1:
            self.output_gradients[update] = gradient
        else:
            self.table_channels[1].send(update, gradient)

    def _take_table_gradient(self, update: int) -> Tensor:
        if update not in self.output_gradients:
            table = self.model.get_parameter(TABLE)
            self.table_channels[1].expect(update, table.shape, table.dtype)
            self.output_gradients[update] = self.table_channels[1].take(update)[0]
        return self.output_gradients[update]

    @torch.no_grad()
    def _predict(self, module: Module, weights: Weights, ahead: int, update: int) -> Weights:
        """The weights moved by as many updates as will be made until their gradient is applied, each as the last one
        (Chen and others, arXiv 1809.02839)."""
        optimizer, optim, rate, found = self.work.optimizer, self.optim, self._find_rate(module, update), {}
        for name, p in module.own.items():
            state = optimizer.state.get(p, {})
            if not state or not state["step"]:
                found[name] = weights[name]
                continue
            mean = state["exp_avg"].float() / (1 - optim.beta1 ** state["step"])
            root = (state["exp_avg_sq"].float() / (1 - optim.beta2 ** state["step"])).sqrt()
            found[name] = (weights[name].float() - ahead * rate * mean / (root + optim.eps)).to(p.dtype)
        return found

    def _find_rate(self, module: Module, update: int) -> float:
        age = self.schedule.find_delay(module.number)
        return learning_rate(self.optim, update, self.steps) / (1 + age) ** self.cfg.late_lr

    # Updates.

    def _gather_gradients(self, module: Module, update: int) -> None:
        """Puts the gradients of an update where the optimizer looks for them, summed over processes."""
        learned = update - self.schedule.find_wait(module.number)
        leaves = module.used.pop(learned, {})
        for name, p in module.own.items():
            p.grad = leaves[name].grad if name in leaves else None
        if self.tied and module.is_first and self.usual.modules > 1:
            table = module.own[TABLE]
            late = update - self.schedule.late
            halves = [table.grad]
            if late >= self.schedule.first:
                halves.append(self._take_table_gradient(late))
                del self.output_gradients[late]
            found = [half for half in halves[::-1] if half is not None]
            table.grad = reduce(torch.add, found) if found else None
            if self.cfg.tied_gradient == "mean" and self.schedule.find_wait(0) and table.grad is not None:
                table.grad = table.grad / 2
        if self.peers is not None and self.peers.size() > 1:
            self.sums[module.number].finish()

    def _judge(self, module: Module, learned: int, cancelled: Tensor) -> Tensor:
        """Takes the norm of a module's gradients; whether its update is cancelled, or was behind it."""
        self._gather_gradients(module, learned + self.schedule.find_wait(module.number))
        norm = clip_gradients(self.model, self.work.optimizer, self.work.clip)
        module.norm = torch.where(cancelled > 0, torch.nan, norm)
        return (~torch.isfinite(module.norm)).long()

    def _update(self, module: Module, update: int) -> None:
        module.clock = update + 1
        if self.schedule.is_exact:
            if module.number == min(self.modules):  # the last of this process
                self._update_all(update)
            return
        if module.norm is None and module.is_first:
            learned = update - self.schedule.find_wait(0)
            if learned >= self.schedule.first or (self.tied and update - self.schedule.late >= self.schedule.first):
                self._judge(module, learned, module.cancelled.to(self.work.device))
        if module.norm is None:
            return  # the pipeline is filling
        self._apply([module], update, module.norm)
        module.norm = None

    def _update_all(self, update: int) -> None:
        """All modules of all processes, by the norm of all gradients, as without a pipeline."""
        for module in self.modules.values():
            self._gather_gradients(module, update)
        norm = clip_gradients(self.model, self.work.optimizer, self.work.clip, across=self.group)
        self._apply(list(self.modules.values()), update, norm)

    def _apply(self, modules: Sequence[Module], update: int, norm: Tensor) -> None:
        optimizer = self.work.optimizer
        set_learning_rate(optimizer, self._find_rate(modules[0], update))
        optimizer.found_inf = self.work.guard.judge(norm)  # type: ignore[attr-defined]
        for module in modules:
            module.before = {name: p.detach() for name, p in module.own.items()}
            if not isinstance(optimizer, FlatAdamW) and not self.schedule.is_exact:
                for p in module.own.values():
                    p.data = p.data.clone()  # torch's optimizers write where weights are
            module.last_norm = norm.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for module in modules:
            self.sums[module.number].release()
            if self.usual.order != "2bw":
                module.before = {}

    # Between updates.

    def exchange(self, counts: list[int], rt: Runtime) -> list[int]:
        """What is counted is the same in all processes of a pipeline. Whether to stop is agreed on some updates late:
        a message that all wait for would bring the pipeline to a halt in each update."""
        *counts, stop = counts
        flag = torch.tensor([stop])
        self.flags.append((dist.all_reduce(flag, async_op=True), flag))
        if len(self.flags) > 2 * self.usual.processes:
            self._read_flag()
        return [*rt.sum_over_ranks(counts, self.peers), int(self.stop)]

    def _read_flag(self) -> None:
        work, flag = self.flags.popleft()
        work.wait()
        self.stop |= bool(flag.item())

    def settle(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        update, guard = self.step - 1, self.work.guard
        before = self.exact if update < self.usual.first else self.usual
        self._execute(before.list_rest(self.place, update))
        if self.tied and 0 in self.modules and before.late:
            for late in range(max(update - before.late + 1, before.first), update + 1):
                self._take_table_gradient(late)
        while self.flags:
            self._read_flag()
        losses = self.losses.pop(update, [])
        self.losses.clear()
        loss = reduce(torch.add, losses) if losses else torch.zeros((), device=self.work.device)
        norms = [module.last_norm.to(loss) for module in self.modules.values()]
        square = norms[0].square() if before.is_exact else torch.stack(norms).square().sum()
        worst = torch.stack([guard.cancelled, guard.streak, guard.worst])
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        for known, found in zip((guard.cancelled, guard.streak, guard.worst), worst, strict=True):
            known.copy_(found)
        if not before.is_exact:
            dist.all_reduce(square, group=self.group)
        return loss, square.sqrt()

    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss, in the process with the last module; 0 in the others. Nothing may be under way."""
        self.evaluations += 1
        loss, number = torch.zeros((), device=self.work.device), -self.evaluations
        assert batch.inputs is not None
        shape = (len(batch.inputs.ids), self.model.cfg.width)
        for module in self.modules.values():
            given = None
            if not module.is_first:
                self.onward[module.number].expect(number, shape, self.dtype)
                given = self.onward[module.number].take(number)[0]
            if module.is_last and self.tied and not self.usual.ring:
                with module.running_on({**module.own, TABLE: self._borrow_table(number)}):
                    out = self._compute(module, batch, given)
            else:
                if module.is_first and self.tied and not self.usual.ring:
                    self._lend_table(number, module.own[TABLE].detach())
                out = self._compute(module, batch, given)
            if module.is_last:
                loss = out
            else:
                self.onward[module.number + 1].send(number, out)
        return loss

    @torch.no_grad()
    def find_drift(self) -> float:
        moved, size = torch.zeros((), device=self.work.device), torch.zeros((), device=self.work.device)
        for module in self.modules.values():
            older = module.used[min(module.used)] if module.used else module.before
            for name, p in module.own.items():
                size += p.float().square().sum()
                if name in older:
                    moved += (p.float() - older[name].float()).square().sum()
        return float((moved / size).sqrt())

    # Interruption.

    def dump(self) -> dict[str, Tensor]:
        """What is between two passes, besides weights and moments."""
        found: dict[str, Tensor] = {}
        for number, module in self.modules.items():
            for update, weights in module.used.items():
                found |= {f"used/{number}/{update}/{name}": weight.detach() for name, weight in weights.items()}
            for index, (gradient, cancelled) in module.waiting.items():
                found |= {f"waiting/{number}/{index}": gradient, f"cancelled/{number}/{index}": cancelled}
            found |= {f"before/{number}/{name}": weight for name, weight in module.before.items()}
        if 0 in self.modules:
            found |= {f"output/{update}": gradient for update, gradient in self.output_gradients.items()}
        return {name: value.detach().cpu().contiguous() for name, value in found.items()}

    def load(self, values: Mapping[str, Tensor]) -> None:
        for key, stored in values.items():
            kind, *path = key.split("/")
            value = stored.to(self.work.device)
            if kind == "output":
                self.output_gradients[int(path[0])] = value
                continue
            module = self.modules[int(path[0])]
            if kind == "used":
                module.used.setdefault(int(path[1]), {})[path[2]] = value.requires_grad_()
            elif kind == "before":
                module.before[path[1]] = value
            elif kind == "waiting":
                module.waiting[int(path[1])] = value, values[f"cancelled/{path[0]}/{path[1]}"].to(self.work.device)

    def resume(self, step: int, batches_of: Callable[[int], list[tuple[int, Any]]]) -> None:
        """Repeats the forward passes whose backward passes are still to come."""
        self.step = step
        schedule = self.schedule
        for number, module in self.modules.items():
            module.clock = step
            behind = max(step - schedule.find_wait(number), schedule.first if step >= self.usual.first else step)
            module.done = {"forward": step * self.size, "backward": behind * self.size, "update": step}
        pending = sorted({update for module in self.modules.values() for update in module.used})
        for update in pending:
            for i, batch in enumerate(batches_of(update)):
                self.batches[update * self.size + i] = batch
        for number in range(pending[0] * self.size, step * self.size) if pending else ():
            for module in self.modules.values():
                if number // self.size in module.used:
                    self._repeat(module, number, step)

    def _repeat(self, module: Module, number: int, step: int) -> None:
        update, (index, batch) = number // self.size, self.batches[number]
        given = None
        if not module.is_first:
            self._expect_stream(self.onward[module.number], number)
            given = self.onward[module.number].take(number)[0].requires_grad_()
        out = self._run(module, index, batch, given, module.used[update])
        module.flights[number] = Flight(given, out)
        if update >= step - self.usual.find_wait(module.number + 1):
            self.onward[module.number + 1].send(number, out.detach())


def find_names(model: Chain, spans: Sequence[range], module: int) -> list[str]:
    """The parameters of a module."""
    stack = model.stack_name
    starts = [f"{stack}.blocks.{number}." for number in spans[module]]
    starts += ["embedding."] if module == 0 else []
    starts += [f"{stack}.norm.", "head."] if module == len(spans) - 1 else []
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(starts))]


def find_spans(cfg: ModelConfig, schedule: Schedule, cuts: Sequence[int]) -> list[range]:
    """The blocks of each module."""
    if cuts:
        return [range(*ends) for ends in pairwise([0, *cuts, cfg.layers])]
    inner = cfg.mlp_width or 4 * cfg.width
    block = 4 * cfg.width + (3 if cfg.activation == "swiglu" else 2) * inner  # products of a token, by the width
    labels = 1.0 if cfg.kind == "decoder" else 0.15
    return balance(cfg.layers, labels * cfg.vocab / block, schedule)


def balance(layers: int, head: float, schedule: Schedule) -> list[range]:
    """Parts of which the largest is as small as can be; `head` is the work of the output in blocks."""
    processes, ring = schedule.processes, schedule.ring

    def find_load(sizes: Sequence[int]) -> float:
        loads = [float(size) for size in sizes]
        loads[-1] += head
        return max([loads[0] + loads[-1], *loads[1:-1]] if ring else loads)

    def share(blocks: int, parts: int) -> list[int]:
        return [blocks // parts + (i < blocks % parts) for i in range(parts)]

    ends = [(first, last) for last in range(1, layers) for first in (range(1, layers - last) if ring else (0,))]
    tried = []
    for first, last in ends:
        middle = processes - 1
        if layers - first - last >= middle:
            sizes = [*([first] if ring else []), *share(layers - first - last, middle), last]
            tried.append(sizes)
    # Equal loads: modules in front are larger, since the first learn latest from what the others have done.
    best = min(tried, key=lambda sizes: (find_load(sizes), abs(sizes[0] - sizes[-1])))
    starts = [sum(best[:i]) for i in range(len(best) + 1)]
    return [range(*ends) for ends in pairwise(starts)]


def cut(model: Chain, spans: Sequence[range], mine: Sequence[int]) -> None:
    """Takes out what other processes have, whose names stay free. Blocks that are not here become empty modules."""
    first, last, stack, embedding, head = 0 in mine, len(spans) - 1 in mine, model.stack, model.embedding, model.head
    here = {number for module in mine for number in spans[module]}
    for number in set(range(len(stack.blocks))) - here:
        stack.blocks[number] = nn.Identity()
    if not first:
        embedding.position = embedding.token_type = None
        embedding.norm = nn.Identity()
        if last and model.cfg.tied and embedding.token is not None:
            embedding.token.weight.requires_grad_(False)  # borrowed: module 0 learns for both
        else:
            embedding.token = None
    if not last:
        assert isinstance(head, LMHead)
        stack.norm = nn.Identity()
        head.transform = head.norm = None
        head.weight = head.bias = None
    for number in here:
        stack.blocks[number].by_place = True  # type: ignore[assignment]


class Pipeline(Technique):
    """Processes share the layers of a model."""

    name, exact, has_executor = "pipeline", False, True
    cfg: ParallelConfig
    executor: Pipelined

    def __init__(self, cfg: ParallelConfig, context: Context) -> None:
        super().__init__(cfg, context)
        model, mesh = context.model, context.mesh
        assert model is not None and mesh.grid is not None
        self.group = mesh.grid.get_group(self.name)
        parts = gcd(context.micro_batches, mesh.data_world)
        self.schedule = Schedule(
            cfg.schedule, cfg.pipeline, is_ring(cfg, model), context.micro_batches // parts, cfg.sync_steps
        )

    @classmethod
    def find_options(cls, config: Config, device: torch.device) -> ParallelConfig | None:
        return config.parallel if config.parallel.pipeline > 1 else None

    @classmethod
    def identity(cls, cfg: ParallelConfig | None) -> dict[str, Any] | None:
        """How old gradients are is a part of what a run computes; in which processes layers are, is not."""
        if cfg is None or cfg.schedule == "1f1b":
            return None
        keys = ("pipeline", "schedule", "placement", "cuts", "sync_steps", "predict", "late_lr", "tied_gradient")
        return {key: value for key, value in asdict(cfg).items() if key in keys}

    @property
    def key(self) -> str:
        return "parallel.pipeline"

    def check(self, others: Sequence[Technique]) -> list[str]:
        cfg, model, context, schedule = self.cfg, self.context.model, self.context, self.schedule
        assert model is not None
        modules, size = schedule.modules, schedule.micro_batches
        drops = model.dropout or model.attention_dropout or model.activation_dropout
        wanted = modules - 1
        reasons = {
            f"model.kind = {model.kind!r} is not one stack of blocks over tokens: leave out parallel.pipeline": (
                model.kind not in ("decoder", "encoder")
            ),
            f"{modules} parts ({'ring' if schedule.ring else 'linear'}) need as many blocks, and model.layers ="
            f" {model.layers}: lower parallel.pipeline": model.layers < modules,
            f"cuts = {list(cfg.cuts)} has to be {wanted} growing numbers from 1 to {model.layers - 1}": bool(cfg.cuts)
            and (len(cfg.cuts) != wanted or sorted({0, *cfg.cuts, model.layers}) != [0, *cfg.cuts, model.layers]),
            f"schedule = '2bw' needs at least {modules} micro-batches for each update and process, and there are {size}:"
            " raise train.micro_batches": cfg.schedule == "2bw" and size < modules,
            "placement = 'ring' needs two processes or more": cfg.placement == "ring" and cfg.pipeline < 2,
            "fp16 adjusts its loss scale by updates that are over: set train.precision to 'bf16'": (
                context.precision == "fp16"
            ),
            "torch.compile would compile every version of the weights again: set train.compile to false": (
                context.compiled
            ),
            "weights are split over processes by layers, and not once more: set parallel.data to 'replicate'": (
                context.sharded
            ),
            f"torch draws what is dropped in the order in which layers run: set {KERNELS} to true, or all dropout to"
            " 0": bool(drops) and not any(other.drops_by_place for other in others),
        }
        found = [reason for reason, holds in reasons.items() if holds]
        return found + [f"{other.key}: {why}" for other in others if (why := other.why_not_by_module())]

    def estimate(self) -> Estimate:
        share = 1 / self.schedule.modules
        return Estimate(state=share, activations=1.0 if self.schedule.is_exact else share, work=share)

    def apply(self, model: nn.Module, sites: Sites) -> None:
        assert isinstance(model, Chain)
        self.spans = find_spans(model.cfg, self.schedule, self.cfg.cuts)
        cut(model, self.spans, self.schedule.find_modules(self.group.rank()))

    def build_executor(self, model: Model, update: Update, rt: Runtime, optim: OptimConfig) -> Executor:
        assert isinstance(model, Chain)
        peers, steps = self.context.mesh.peers, self.context.steps
        self.executor = Pipelined(
            update, model, self.cfg, self.schedule, self.spans, self.group, peers, rt, optim, steps
        )
        model.forward = self.executor.evaluate  # type: ignore[assignment]
        return self.executor

    def find_obstacles(self) -> list[str]:
        return [" sends messages in the middle of an update"]

    def join(self, shot: Snapshot) -> Snapshot:
        ranks = dist.get_process_group_ranks(self.group)
        shot = replace(shot, others=shot.others | self.executor.dump())
        if ranks[0] != 0:
            return shot
        if self.group.rank() > 0:
            kinds = {"weights": shot.weights, "moments": shot.moments, "others": shot.others}
            packed = save({f"{kind}:{name}": value for kind, values in kinds.items() for name, value in values.items()})
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            dist.send(torch.tensor([len(data)]), 0, self.group)
            dist.send(data, 0, self.group)
            return shot
        found: dict[str, dict[str, Tensor]] = {"weights": {}, "moments": {}, "others": {}}
        for rank in ranks[1:]:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank, self.group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, rank, self.group)
            for key, value in load(data.numpy().tobytes()).items():
                kind, _, name = key.partition(":")
                found[kind][name] = value
        return Snapshot(
            found["weights"] | shot.weights, found["moments"] | shot.moments, shot.state, found["others"] | shot.others
        )

    def take_part(self, shot: Snapshot) -> Snapshot:
        model, modules = self.executor.model, self.executor.modules
        here, trained = model.state_dict().keys(), {name for module in modules.values() for name in module.own}
        mine = {
            key: value
            for key, value in shot.others.items()
            if (0 in modules if key.startswith("output/") else int(key.split("/")[1]) in modules)
        }
        self.executor.load(mine)
        return Snapshot(
            {name: value for name, value in shot.weights.items() if name in here},
            {key: value for key, value in shot.moments.items() if key.partition("/")[2] in trained},
            shot.state,
        )

    def metrics(self, num_batches: int) -> dict[str, float]:
        """How far weights have moved since those that the oldest waiting gradients are of, relative to their size; a
        mean over processes."""
        return {} if self.schedule.is_exact else {"weight_drift": self.executor.find_drift()}

    def describe(self) -> str:
        schedule, parts = self.schedule, " | ".join(f"{len(span)}" for span in self.spans)
        place = "ring" if schedule.ring else "linear"
        delays = [schedule.find_delay(module) for module in range(schedule.modules)]
        words = f"blocks {parts} over {schedule.processes} processes ({schedule.order}, {place})"
        return words if schedule.is_exact else f"{words}, gradients {', '.join(map(str, delays))} updates old"


def is_ring(cfg: ParallelConfig, model: ModelConfig) -> bool:
    fits = model.layers > cfg.pipeline
    return cfg.placement == "ring" or (cfg.placement == "auto" and model.tied and cfg.pipeline > 1 and fits)
