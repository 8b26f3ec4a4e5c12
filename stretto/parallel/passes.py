"""The executor of a pipeline: runs the modules of this process in the order of a schedule (see pipeline.py)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.batch import Batch, dense_layout
from stretto.batch import Sequences as Tokens
from stretto.config import OptimConfig, ParallelConfig
from stretto.execute import Executor
from stretto.gradients import Present
from stretto.model import Chain, LMHead
from stretto.ops.judge import FIELDS
from stretto.optim import FlatAdamW, clip_gradients, learning_rate, set_learning_rate
from stretto.parallel.schedule import Action, Schedule
from stretto.parallel.stages import Channel, Flight, Stage, Weights, find_names
from stretto.precision import autocast
from stretto.runtime import Runtime
from stretto.step import Update

TABLE = "embedding.token.weight"  # what a tied output matrix is


class Pipelined(Executor):
    """Runs the modules of this process in the order of a schedule."""

    work: Update
    agrees_late = True

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
            number: Stage(number, schedule, spans[number], find_names(model, spans, number), model)
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
        self.step = self.settled = 0  # updates begun, and after how many of them nothing was under way
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

    def _forward(self, module: Stage, number: int) -> None:
        update, (index, batch) = number // self.size, self.batches[number]
        given = None
        if not module.is_first:
            given = self.onward[module.number].take(number)[0].requires_grad_()
        weights = self._open_weights(module, update)
        out = self._run(module, index, batch, given, weights)
        if module.is_last:
            self.losses[update].append(out.detach())
            out = out * (self.factors[update] + self.work.guard.doubt(out))
        else:
            self.onward[module.number + 1].send(number, out.detach())
        module.flights[number] = Flight(given, out)

    def _run(self, module: Stage, index: int, batch: Batch, given: Tensor | None, weights: Weights) -> Tensor:
        self.work.seed_for(index)
        with module.running_on(weights), autocast(self.work.precision, self.work.device):
            return self._compute(module, batch, given)

    def _compute(self, module: Stage, batch: Batch, given: Tensor | None) -> Tensor:
        """The stream behind a module; the loss behind the last."""
        x = self.model.run(batch, given, module.blocks)
        if not module.is_last:
            return x
        assert isinstance(self.model.head, LMHead)
        return self.model.compute_loss(self.model.head, self.model.pick(x, batch), batch)

    def _backward(self, module: Stage, number: int) -> None:
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

    def _collect(self, module: Stage, update: int) -> None:
        """Receives the gradients of an update before they are needed."""
        for number in range(update * self.size, (update + 1) * self.size):
            if number not in module.waiting:
                self._expect_stream(self.back[module.number], number)
                module.waiting[number] = self.back[module.number].take(number)

    # Weights.

    def _open_weights(self, module: Stage, update: int) -> Weights:
        """The leaves that all passes of an update run on."""
        if update in module.used:
            return module.used[update]
        version = self.schedule.find_version(update)
        assert version in (module.clock, module.clock - 1), "older weights than those before the last update are gone"
        weights = self._find_weights(module) if version == module.clock else dict(module.before)
        if self.tied and module.is_first:
            # The gradient of the output is younger than that of the input, so it is predicted less far ahead.
            young = self.schedule.find_wait(0) > 0
            self._lend_table(
                update, self._predict(module, module.own[TABLE], self.schedule.late) if young else weights[TABLE]
            )
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

    def _hand_over_table_gradient(self, module: Stage, update: int) -> None:
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

    def _find_weights(self, module: Stage) -> Weights:
        """What passes are to use of the weights as they are now."""
        ahead = self.schedule.find_delay(module.number)
        return {name: self._predict(module, p, ahead) for name, p in module.own.items()}

    @torch.no_grad()
    def _predict(self, module: Stage, p: Tensor, ahead: int) -> Tensor:
        """A weight as it is; with the option `predict`, moved by as many updates as will be made until its gradient is
        applied, each like the last one (Chen and others, arXiv 1809.02839)."""
        state, optim = self.work.optimizer.state.get(p), self.optim
        if not (self.cfg.predict and ahead and state):
            return p.detach()
        count = state["step"].clamp(min=1)  # before the first update both moments are 0
        mean = state["exp_avg"].float() / (1 - optim.beta1**count)
        root = (state["exp_avg_sq"].float() / (1 - optim.beta2**count)).sqrt()
        shift = ahead * self._find_rate(module, module.clock)
        return (p.float() - shift * mean / (root + optim.eps)).to(p.dtype)

    def _find_rate(self, module: Stage, update: int) -> float:
        age = self.schedule.find_delay(module.number)
        return learning_rate(self.optim, update, self.steps) / (1 + age) ** self.cfg.late_lr

    # Updates.

    def _gather_gradients(self, module: Stage, update: int) -> None:
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
        if self._has_peers:
            self.sums[module.number].finish()

    @property
    def _has_peers(self) -> bool:
        return self.peers is not None and self.peers.size() > 1

    def _agree(self, module: Stage, norm: Tensor) -> Tensor:
        return self.sums[module.number].agree(norm) if self._has_peers else norm

    def _judge(self, module: Stage, learned: int, cancelled: Tensor) -> Tensor:
        """Takes the norm of a module's gradients; whether its update is cancelled, or was behind it."""
        self._gather_gradients(module, learned + self.schedule.find_wait(module.number))
        norm = self._agree(module, clip_gradients(self.model, self.work.optimizer, self.work.clip))
        module.norm = torch.where(cancelled > 0, torch.nan, norm)
        return (~torch.isfinite(module.norm)).long()

    def _update(self, module: Stage, update: int) -> None:
        self._learn(module, update)
        module.clock = update + 1

    def _learn(self, module: Stage, update: int) -> None:
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
        self._apply(list(self.modules.values()), update, self._agree(module, norm))

    def _apply(self, modules: Sequence[Stage], update: int, norm: Tensor) -> None:
        optimizer, guard = self.work.optimizer, self.work.guard
        set_learning_rate(optimizer, self._find_rate(modules[0], update))
        guard.state[FIELDS.index("updates")] = update  # it may judge several modules of one update
        # What is usual of a norm is not known where only a part of the model is behind it.
        optimizer.found_inf = guard.judge(norm, watch=self.schedule.is_exact)  # type: ignore[attr-defined]
        for module in modules:
            if self.usual.order == "2bw":
                module.before = self._find_weights(module)
            if not isinstance(optimizer, FlatAdamW) and not self.schedule.is_exact:
                for p in module.own.values():
                    p.data = p.data.clone()  # torch's optimizers write where weights are
            module.last_norm = norm.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for module in modules:
            self.sums[module.number].release()

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
        dist.all_reduce(guard.state, dist.ReduceOp.MAX, group=self.group)
        if not before.is_exact:
            dist.all_reduce(square, group=self.group)
        self.settled = self.step
        return loss, square.sqrt()

    def end_updates(self) -> None:
        if self.settled < self.step:
            self.settle(*2 * [torch.zeros((), device=self.work.device)])

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
        return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in found.items()}

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

    def _repeat(self, module: Stage, number: int, step: int) -> None:
        update, (index, batch) = number // self.size, self.batches[number]
        given = None
        if not module.is_first:
            self._expect_stream(self.onward[module.number], number)
            given = self.onward[module.number].take(number)[0].requires_grad_()
        out = self._run(module, index, batch, given, module.used[update])
        module.flights[number] = Flight(given, out)
        if update >= step - self.usual.find_wait(module.number + 1):
            self.onward[module.number + 1].send(number, out.detach())
