"""A whole update of an accelerated model, launched as one.

The layers of a Hugging Face model are many small pieces of Python, and the GPU often waits for them. `Step` records
what they launch, backward pass and update included, as a CUDA graph (graphs.py), once for each shape of batch:

    step = stretto.hf.Step(model, optimizer, clip=1.0)
    for batch in loader:
        loss = step(batch)

How many tokens are real is decided on the host before a graph is chosen: of a batch on the CPU without waiting for the
GPU. Numbers of tokens and of labels are rounded up to buckets (buckets.py), and filled up with padding that nobody
looks at. batching.py makes rectangles of few shapes. Where a step cannot be recorded it runs as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from stretto.buckets import round_to_bucket, round_to_power, size_of_bucket
from stretto.graphs import Memory, Recorder
from stretto.hf.call import Facts, Known, Tried, known_batch
from stretto.hf.packing import MASKS, argument_names, get_to_know, is_familiar, pad_id
from stretto.hf.swap import dropping_of, is_accelerated, outermost, report, set_step
from stretto.optim import FlatAdamW, clip_gradients

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """A batch, and what the host knows of it."""

    inputs: dict[str, Any]
    masks: dict[str, Facts]
    labels: int
    positions: int
    fillers: int
    layers: dict[str, dict[int, float | None]] = field(default_factory=dict)  # which of them work (layer_drop.py)

    def known(self) -> Known:
        masks = tuple((self.inputs[name], facts) for name, facts in self.masks.items())
        return Known(masks, self.labels, self.positions, fillers=self.fillers)


class Step:
    def __init__(self, model: nn.Module, optimizer: FlatAdamW, clip: float = 0.0) -> None:
        """`clip` is the largest norm of the gradients; 0: any."""
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if several or isinstance(model, DistributedDataParallel):
            raise ValueError("Step is for one process: it does not exchange gradients; stretto.hf.Trainer does")
        if not is_accelerated(model):
            raise ValueError(f"Step takes an accelerated model, not {type(model).__name__}: stretto.accelerate(model)")
        if not isinstance(optimizer, FlatAdamW):
            raise ValueError(f"Step takes stretto.optim.FlatAdamW, not {type(optimizer).__name__}")
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.updates = 0  # so far: what schedules depend on. A run that is resumed sets it
        self.dropping = dropping_of(model)
        self.inner, self.tried = outermost(model)
        self.unpads = not any(line.role == "padding" and line.problem for line in report(model).lines)
        self.device = next(model.parameters()).device
        obstacle = "the model is not on a GPU" if self.device.type != "cuda" else _find_obstacle(model)
        self.recorder = None if obstacle else Recorder(self._run, optimizer.recording, Memory())
        if obstacle:
            log.info("CUDA graphs: off: %s", obstacle)

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss, still on the device. Tensors of the batch may be on the CPU."""
        self.optimizer.take_rates()
        self._begin_update()
        planned = plan(batch, self.inner, self.tried)
        if planned is None or (planned.masks and not self.unpads):
            return self._update(_move(batch, self.device))
        pattern = {} if self.dropping is None else self.dropping.pattern()
        planned = replace(planned, inputs=_move(planned.inputs, self.device), layers=pattern)
        (loss,) = self._run(planned) if self.recorder is None else self.recorder.run(planned)
        return loss

    def _begin_update(self) -> None:
        theta = None if self.dropping is None else self.dropping.theta
        set_step(self.model, self.updates)
        self.updates += 1
        if self.recorder is not None and self.dropping is not None and self.dropping.theta != theta:
            self.recorder.forget()  # the patterns of layers that worked under the last theta do not come again

    def _run(self, planned: Planned) -> tuple[Tensor]:
        before = known_batch.set(planned.known())
        try:
            return (self._update(planned.inputs),)
        finally:
            known_batch.reset(before)

    def _update(self, inputs: Mapping[str, Any]) -> Tensor:
        loss: Tensor | None = self.model(**inputs).loss
        if loss is None:
            raise ValueError(f"{type(self.model).__name__} gave no loss: the batch needs labels")
        loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(self.model, self.optimizer, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def plan(batch: Mapping[str, Any], model: PreTrainedModel, tried: Tried) -> Planned | None:
    """None for a batch that is looked at while the model runs: with documents in its rows, gaps, labels on padding,
    padding that has to stay, or labels that are no ids, beside which a mask stays unknown."""
    if any(batch.get(name) is not None for name in ("position_ids", "cu_seq_lens_q")):
        return None
    known = get_to_know(batch, argument_names(model), pad_id(model))
    if known.labels_on_padding or any(facts.empty or facts.holes for _, facts in known.masks):
        return None
    padded = any(not facts.whole for _, facts in known.masks)
    if padded and not (
        is_familiar(model, batch, tried) and all(tried.covers(facts, batch) for _, facts in known.masks)
    ):
        return None
    facts_of = {name: facts for name in MASKS for mask, facts in known.masks if batch.get(name) is mask}
    if any(batch.get(name) is not None and name not in facts_of for name in MASKS):
        return None
    # A mask that keeps everything is none: so the model need not ask.
    inputs = {name: value for name, value in batch.items() if name not in facts_of or not facts_of[name].whole}
    masks = {name: _fill(inputs[name], facts) for name, facts in facts_of.items() if name in inputs}
    fillers = [-(-size_of_bucket(facts.tokens) // facts.longest) for facts in masks.values()]
    labels = min(round_to_bucket(known.labels), known.positions)
    return Planned(inputs, masks, labels, known.positions, max(fillers, default=0))


def _fill(mask: Tensor, facts: Facts) -> Facts:
    tokens = min(round_to_bucket(facts.tokens), mask.numel())
    return replace(facts, tokens=tokens, longest=round_to_power(facts.longest))


def _move(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device == device:
            return value
        return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)

    return {name: move(value) for name, value in batch.items()}


def _find_obstacle(model: nn.Module) -> str:
    """Why its steps cannot be recorded; empty if they can."""
    modules, dropping = list(model.modules()), dropping_of(model)
    if dropping is not None and dropping.drop.cfg.sampling == "bernoulli":
        return "layer_drop.sampling = 'bernoulli' has too many patterns to record: set it to 'systematic'"
    if any(getattr(module, "layerdrop", 0.0) for module in modules):
        return "layers are dropped at random, by the host"
    if any(getattr(module, "gradient_checkpointing", False) for module in modules):
        return "layers are recomputed with a state of the random numbers that the host keeps"
    return ""
