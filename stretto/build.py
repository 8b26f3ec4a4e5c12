"""What is trained, from a configuration: model, techniques, parallelism, optimizer, first weights, execution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from stretto.average import Average
from stretto.batch import Batch
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.execute import Executor
from stretto.gradients import Gradients, choose_gradients
from stretto.graphs import Auto, Recorded
from stretto.guard import Guard
from stretto.mesh import Mesh
from stretto.model import Model, build_model, sites
from stretto.optim import build_optimizer, weight_writer
from stretto.parallel.data import Portion, deal, shard, will_shard
from stretto.plan import find_needs, for_device
from stretto.precision import PRECISIONS, resolve_precision
from stretto.runtime import Runtime
from stretto.step import Update
from stretto.techniques import Techniques, find_optimizers, open_techniques
from stretto.techniques.technique import At, Context
from stretto.weights import initialise


@dataclass(frozen=True)
class Trainable:
    """A model and all that trains it."""

    model: Model
    techniques: Techniques
    update: Update
    executor: Executor

    def prepare(self, batch: Batch, at: At) -> Batch:
        """The batch as a training step takes it, on the host."""
        return self.techniques.prepare(self.executor.prepare(batch), at)

    def describe(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        kind = self.model.cfg.kind if isinstance(self.model, Model) else type(self.model).__name__
        words = [f"{kind} with {size / 1e6:.1f}M parameters", self.update.precision]
        return ", ".join([*words, *self.techniques.describe()])


def run_step(
    parts: Trainable, step: int, batches: list[tuple[int, Batch]], num_labels: int, world: int
) -> tuple[Tensor, Tensor]:
    """Update number `step` from this process's micro-batches: its summed loss and the norm of all gradients, both still
    on the device. `num_labels` counts the labels of all processes."""
    share = parts.update.gradients.copies / (world * len(batches))
    parts.update.begin(step, num_labels)
    parts.techniques.begin(step, share, parts.update.scaler)
    results = parts.executor.run(batches, parts.techniques.graph_key(step))
    parts.techniques.end(step)
    return results


def describe_context(config: Config, rt: Runtime, mesh: Mesh) -> Context:
    """What techniques may know of the run."""
    portion = find_portion(config, mesh)
    return Context(
        model=config.model,
        device=rt.device,
        precision=resolve_precision(config.train.precision, rt.device),
        mesh=mesh,
        seed=config.run.seed,
        steps=config.train.steps,
        micro_batches=config.train.micro_batches,
        seq_len=config.data.seq_len,
        padded=config.data.layout == "padded",
        compiled=config.train.compile,
        sharded=will_shard(config.parallel),
        needs=find_needs(
            for_device(config, rt.device.type == "cuda"),
            parts=portion.parts,
            shards=rt.world if will_shard(config.parallel) else 1,
        ),
        load=find_needs(for_device(config, rt.device.type == "cuda")).load,
        part=(portion.part,) if portion.parts > 1 else (),
    )


def build(config: Config, rt: Runtime, mesh: Mesh, given: nn.Module | None = None) -> Trainable:
    """Model, techniques, parallelism, optimizer, weights, execution: each needs the one before. A `given`
    model has its weights already."""
    context = describe_context(config, rt, mesh)
    techniques = open_techniques(config, context)
    obstacles = _find_obstacles(config, context, techniques)
    model = build_model(config.model) if given is None else cast(Model, given.to(rt.device).train())
    roles = sites(model)
    techniques.apply(model, roles)
    sharded = shard(model, config.parallel, roles["block"], rt.device, PRECISIONS[context.precision], mesh)
    if given is None:
        model.to_empty(device=rt.device)
    optimizer = build_optimizer(model, config.optim, techniques.build_optimizer)
    if given is None:
        initialise(model, config.model, config.run.seed, weight_writer(optimizer), techniques.start_value)
    if config.train.compile:
        _compile(model, roles["block"] if sharded or techniques.by_block else [""])
    may_record = config.train.graphs != "off" and not obstacles
    num_passes = max(rt.world, config.train.micro_batches) if may_record else 0
    update = Update(
        gradients=(
            Gradients(model)
            if techniques.has_executor
            else choose_gradients(model, sharded, techniques.gaps, num_passes)
        ),
        optimizer=optimizer,
        guard=Guard("fp16" if context.precision == "fp16" else config.train.non_finite, rt.device, config.train.spikes),
        scaler=torch.amp.GradScaler(rt.device.type, enabled=context.precision == "fp16"),
        precision=context.precision,
        device=rt.device,
        clip=config.optim.clip,
        seed=config.run.seed,
        average=Average(optimizer, config.train.ema) if config.train.ema else None,
        # Parts of a micro-batch are dropped from differently, as different samples are.
        random_keys=context.part + techniques.random_keys(),
    )
    own = techniques.build_executor(model, update, rt, config.optim)
    executor = own or _choose_executor(config.train.graphs, update, model, obstacles, rt)
    return Trainable(model, techniques, update, executor)


def _compile(model: Model, names: list[str]) -> None:
    """One graph for the whole model; or one for each block, the same for all, where nothing is left to fuse between
    blocks, not all of them work, or each block's weights are gathered on their own. The function is compiled, not the
    call: hooks, which gather those weights, stay outside."""
    torch._dynamo.config.recompile_limit = 64  # kinds of blocks, training or not, first and later shapes
    for module in map(model.get_submodule, names):
        module.forward = torch.compile(module.forward)


def _choose_executor(graphs: str, update: Update, model: Model, obstacles: list[str], rt: Runtime) -> Executor:
    def give_up() -> None:
        update.gradients.release()
        update.gradients = choose_gradients(model, sharded=False, gaps=False)

    if graphs == "on":
        return Recorded(update, update.optimizer)
    if graphs == "auto" and not obstacles:
        return Auto(update, update.optimizer, rt.gather_over_ranks, give_up)
    executor = Executor(update)
    if graphs == "auto" and rt.device.type != "cpu":  # nobody expects them on a CPU
        executor.notes.append("CUDA graphs: off: " + "; ".join(obstacles))
    return executor


def _find_obstacles(config: Config, context: Context, techniques: Techniques) -> list[str]:
    """Why steps cannot be replayed from CUDA graphs."""
    names = " or ".join(f"[{key}]" for key in find_optimizers())
    obstacles = {
        "they need a GPU": context.device.type != "cuda",
        f"they need {names}, whose optimizer keeps all it needs on the device": not techniques.has_optimizer,
        f"parallel.data = '{config.parallel.data}' gathers weights in the middle of a pass, into memory that moves": (
            will_shard(config.parallel)
        ),
        "fp16 adjusts its loss scale on the host: set train.precision to 'bf16'": context.precision == "fp16",
    }
    found = [reason for reason, holds in obstacles.items() if holds] + techniques.find_obstacles()
    if found and config.train.graphs == "on":
        raise ConfigError("train.graphs: " + "; ".join(found))
    return found


def find_portion(config: Config, mesh: Mesh) -> Portion:
    return deal(config.train.micro_batches, mesh.data_rank, mesh.data_world)
