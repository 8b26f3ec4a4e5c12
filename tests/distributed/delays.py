"""The definition of training with old gradients, in one process: whole gradients of a plain model, each kept in a queue
and applied late. It shares nothing with parallel/pipeline.py but the model, the optimizer and the table of delays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.build import build
from stretto.config import Config, build_config
from stretto.data import open_data
from stretto.mesh import Mesh
from stretto.model import Chain, LMHead
from stretto.optim import clip_gradients, learning_rate, set_learning_rate
from stretto.parallel.pipeline_costs import is_ring
from stretto.parallel.schedule import Schedule
from stretto.parallel.stages import find_spans
from stretto.precision import autocast
from stretto.runtime import Runtime
from stretto.techniques.technique import At
from stretto.train import complete
from tests.runs import change

TABLE = "embedding.token.weight"


class Delayed:
    """Trains by the definition."""

    def __init__(self, config: Config, schedule: Schedule) -> None:
        rt = Runtime(torch.device("cpu"))
        self.schedule = schedule
        folder = Path(config.run.dir)
        self.data = open_data(config.data, seed=config.run.seed, folder=folder / "data", image_size=1)
        self.config = complete(config, self.data, Mesh())
        self.spans = find_spans(self.config.model, schedule, config.parallel.cuts)  # the blocks of each module
        self.parts = build(self.config, rt, Mesh())
        assert isinstance(self.parts.model, Chain)
        self.model = self.parts.model
        for block in self.model.stack.blocks:
            block.by_place = True  # type: ignore[assignment]
        self.tied = self.model.cfg.tied and schedule.modules > 1
        self.named = dict(self.model.named_parameters())
        self.gradients: list[dict[str, Tensor]] = []  # of each update
        self.outputs: list[Tensor | None] = []  # those of the embedding as an output matrix
        self.versions = [self.find_weights(0)]  # what passes are to use after each update
        self.losses: list[float] = []

    def copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named.items()}

    def find_weights(self, version: int) -> dict[str, Tensor]:
        found = {}
        for name, p in self.named.items():
            age = self.schedule.find_delay(self.find_module(name))
            found[name] = self.predict(version, p, age, age)
        age = self.schedule.find_delay(0)
        if self.tied:
            ahead = self.schedule.late if self.schedule.find_wait(0) else age
            found["output"] = self.predict(version, self.named[TABLE], ahead, age)
        return found

    def predict(self, version: int, p: Tensor, ahead: int, age: int) -> Tensor:
        state, optim = self.parts.update.optimizer.state.get(p), self.config.optim
        if not (self.config.parallel.predict and ahead and state and version >= self.schedule.first):
            return p.detach().clone()
        rate = learning_rate(optim, version, self.config.train.steps) / (1 + age) ** self.config.parallel.late_lr
        count = state["step"].clamp(min=1)
        mean = state["exp_avg"].float() / (1 - optim.beta1**count)
        root = (state["exp_avg_sq"].float() / (1 - optim.beta2**count)).sqrt()
        return (p.detach().float() - ahead * rate * mean / (root + optim.eps)).to(p.dtype)

    def put(self, values: dict[str, Tensor]) -> None:
        for name, p in self.named.items():
            p.data.copy_(values[name])

    def find_module(self, name: str) -> int:
        stack = self.model.stack_name
        if name.startswith(f"{stack}.blocks."):
            number = int(name.split(".")[2])
            return next(i for i, span in enumerate(self.spans) if number in span)
        return 0 if name.startswith("embedding.") else self.schedule.modules - 1

    def learn(self, step: int, exact: bool) -> None:
        """The gradients of an update, at the weights that its passes use."""
        now = self.copy()
        if not exact:
            self.put(self.versions[self.schedule.find_version(step)])
        size = self.config.train.micro_batches
        batches = [
            self.parts.prepare(self.data.train_batch(i, 0, 1), At(step, i))
            for i in range(step * size, (step + 1) * size)
        ]
        factor = torch.ones(()) / max(sum(batch.counts.labels for batch in batches), 1)
        used = (
            self.versions[self.schedule.find_version(step)]["output"] if self.tied and not exact else self.named[TABLE]
        )
        table = used.detach().clone().requires_grad_()
        self.model.zero_grad(set_to_none=True)
        losses = []
        for index, batch in zip(range(step * size, (step + 1) * size), batches, strict=True):
            with autocast(self.parts.update.precision, torch.device("cpu")):
                x = None
                for span in self.spans:
                    self.parts.update.seed_for(index)
                    x = self.model.run(batch, x, span)
                assert x is not None and isinstance(self.model.head, LMHead)
                features = self.model.pick(x, batch)
                if self.tied:
                    smoothing = self.model.cfg.label_smoothing
                    loss = self.model.head.loss(features, table, batch.labels, smoothing)
                else:
                    loss = self.model.compute_loss(self.model.head, features, batch)
            (loss * factor).backward()
            losses.append(loss.detach())
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        self.losses.append(float(total * factor))
        self.gradients.append({name: p.grad for name, p in self.named.items() if p.grad is not None})
        self.outputs.append(table.grad)
        self.model.zero_grad(set_to_none=True)
        self.put(now)

    def update(self, step: int, exact: bool) -> None:
        """Every module by itself, or all of them together."""
        schedule, first = self.schedule, 0 if exact else self.schedule.first
        groups = [range(schedule.modules)] if exact else [[module] for module in range(schedule.modules)]
        for modules in groups:
            for name, p in self.named.items():
                if (module := self.find_module(name)) in modules:
                    learned = step - (0 if exact else schedule.find_wait(module))
                    grad = self.gradients[learned].get(name) if learned >= first else None
                    if name == TABLE and self.tied:
                        grad = self.mix(grad, step - (0 if exact else schedule.late), first, exact)
                    p.grad = grad
            if all(p.grad is None for p in self.named.values()):
                continue
            norm = clip_gradients(self.model, self.parts.update.optimizer, self.parts.update.clip)
            rate = learning_rate(self.config.optim, step, self.config.train.steps)
            age = 0 if exact else schedule.find_delay(modules[0])
            set_learning_rate(self.parts.update.optimizer, rate / (1 + age) ** self.config.parallel.late_lr)
            self.parts.update.optimizer.found_inf = self.parts.update.guard.judge(norm)  # type: ignore[attr-defined]
            self.parts.update.optimizer.step()
            self.model.zero_grad(set_to_none=True)
        self.versions.append(self.find_weights(step + 1))

    def mix(self, grad: Tensor | None, late: int, first: int, exact: bool) -> Tensor | None:
        out = self.outputs[late] if late >= first else None
        found = [half for half in (out, grad) if half is not None]
        if not found:
            return None
        total = found[0] if len(found) == 1 else found[0] + found[1]
        return (
            total / 2
            if self.config.parallel.tied_gradient == "mean" and not exact and self.schedule.find_wait(0)
            else total
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            exact = self.schedule.is_exact or step < self.schedule.first
            self.learn(step, exact)
            self.update(step, exact)

    def result(self) -> dict[str, Tensor]:
        optimizer = self.parts.update.optimizer
        exact = getattr(optimizer, "weight", Tensor.detach)
        return {name: exact(p).detach() for name, p in self.named.items()}


def define(tree: dict[str, Any], folder: Path) -> Delayed:
    """What the pipeline of a recipe has to compute."""
    config, cfg = build_config(change(tree, parallel__pipeline=1, run__dir=str(folder))), build_config(tree).parallel
    size = config.train.micro_batches
    found = Delayed(config, Schedule(cfg.schedule, cfg.pipeline, is_ring(cfg, config.model), size, cfg.sync_steps))
    found.train(config.train.steps)
    return found
