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

from collections.abc import Sequence
from dataclasses import asdict
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.checkpoint import Stored
from stretto.config import Config, OptimConfig, ParallelConfig
from stretto.execute import Executor
from stretto.model import Chain, Model
from stretto.parallel.passes import Pipelined
from stretto.parallel.pipeline_costs import is_ring, list_reasons
from stretto.parallel.schedule import Schedule
from stretto.parallel.stages import cut, find_spans
from stretto.runtime import Runtime
from stretto.step import Update
from stretto.techniques.technique import Context, Sites, Technique


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
        self.size = context.micro_batches // gcd(context.micro_batches, mesh.data_world)  # micro-batches of an update
        ring = is_ring(cfg, model)
        enough = max(self.size, cfg.pipeline + ring)  # `check` says so where there are fewer
        self.schedule = Schedule(
            cfg.schedule, cfg.pipeline, ring, enough if cfg.schedule == "2bw" else self.size, cfg.sync_steps
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
        return {key: value for key, value in asdict(cfg).items() if key in keys} | {"cuts": list(cfg.cuts)}

    @property
    def key(self) -> str:
        return "parallel.pipeline"

    def check(self, others: Sequence[Technique]) -> list[str]:
        cfg, model, context, schedule = self.cfg, self.context.model, self.context, self.schedule
        assert model is not None
        by_place = any(other.drops_by_place for other in others)
        facts = context.precision, context.compiled, context.sharded, context.padded, by_place
        found = list_reasons(cfg, model, schedule, *facts)
        if cfg.schedule == "2bw" and self.size < schedule.modules:
            found.append(
                f"schedule = '2bw' needs {schedule.modules} micro-batches or more for each update and process, and"
                f" there are {self.size}: raise train.micro_batches"
            )
        return found + [f"{other.key}: {why}" for other in others if (why := other.why_not_by_module())]

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

    def saves(self, name: str) -> bool:
        """The processes of the first pipeline save their own modules: not copies of them, nor what they borrow."""
        return self._is_first() and any(name in stage.own for stage in self.executor.modules.values())

    def _is_first(self) -> bool:
        return dist.get_process_group_ranks(self.group)[0] == 0

    def dump(self) -> dict[str, Tensor]:
        return self.executor.dump() if self._is_first() else {}

    def take_part(self, stored: Stored) -> Stored:
        model, modules = self.executor.model, self.executor.modules
        here, trained = model.state_dict().keys(), {name for module in modules.values() for name in module.own}
        mine = {
            key: value.read()
            for key, value in stored.others.items()
            if (0 in modules if key.startswith("output/") else int(key.split("/")[1]) in modules)
        }
        self.executor.load(mine)
        return Stored(
            {name: value for name, value in stored.weights.items() if name in here},
            {key: value for key, value in stored.moments.items() if key.partition("/")[2] in trained},
            stored.state,
            {},
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
