"""transformers' Trainer with an accelerated model: `from stretto.hf import Trainer` in place of theirs.

What changes, and nothing else does:

    model      goes through `stretto.accelerate`, unless it has been already
    optimizer  where theirs would be torch's AdamW it is FlatAdamW, with the same groups, one launch and clipping inside
               the update; weights in bf16 are then the upper halves of exact fp32 weights
    schedules  of layer_drop and standardize follow its steps
    logs       tokens_per_second and mfu stand next to the loss

Label smoothing needs no logits either. For it, and for a loss function of the user's, labels are taken out of the batch
before the model sees them; so it is the Trainer that says what logits are wanted for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from stretto.batch import IGNORE
from stretto.hf.layer_drop import Gate
from stretto.hf.loss import logits_wanted_for_loss
from stretto.hf.packing import has_labels_on_padding
from stretto.hf.swap import accelerate, dropping_of, is_accelerated, set_step
from stretto.optim import FlatAdamW
from stretto.runtime import peak_flops

if find_spec("accelerate") is None:
    raise ImportError("stretto.hf.Trainer needs the package `accelerate`, as transformers' own does: pip install "
                      '"stretto[hf]"')  # fmt: skip


class Trainer(transformers.Trainer):
    """transformers.Trainer, faster. To be mixed with another subclass of it, this one goes first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = _accelerate_once(self.model)
        self.meter = Meter(model)
        if dropping_of(model) is not None and self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = True
            if self.accelerator.ddp_handler is not None:  # which was given the argument as it was
                self.accelerator.ddp_handler.find_unused_parameters = True
        if self.label_smoother is not None:
            self.label_smoother = LeanSmoother(self.label_smoother.epsilon)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        return _accelerate_once(super().call_model_init(*args, **kwargs))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        given = self.optimizer_cls_and_kwargs
        if given is None and not (self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_model_parallel):
            model: Any = self.model
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            if kind is torch.optim.AdamW:
                options.pop("fused", None)
                weights = "split" if any(p.dtype == torch.bfloat16 for p in model.parameters()) else "fp32"
                self.optimizer_cls_and_kwargs = (ScheduledAdamW, options | {"weights": weights})
        try:
            return super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = given

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """What theirs calls before a step."""
        optimizer = getattr(self.optimizer, "optimizer", None)  # accelerate's wrapper holds it
        if not isinstance(optimizer, FlatAdamW):
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        self.accelerator.unscale_gradients()
        return optimizer.clip(self.args.max_grad_norm)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outside = self.label_smoother is not None or self.compute_loss_func is not None
        if not outside or "labels" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        mask = inputs.get("decoder_attention_mask" if self.meter.pairs else "attention_mask")
        padded = bool(has_labels_on_padding(inputs["labels"], mask))
        # DistributedDataParallel looks for the weights that outputs depend on: it must find a history there.
        lazy = model is self.model and model.training and torch.is_grad_enabled()
        with logits_wanted_for_loss(lazy, rectangle=padded):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        share, state = 1 / self.current_gradient_accumulation_steps, self.state
        set_step(model, state.global_step, share, state.max_steps, self.accelerator.scaler)
        self.meter.add(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.meter.restart()
        return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.meter.paused():
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.meter.paused():
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Into the dictionary that it is given, as theirs does: the caller may look at it afterwards."""
        if "loss" in logs:
            logs.update(self.meter.read(self.accelerator))
        super().log(logs, *args, **kwargs)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer, faster."""


def _accelerate_once(model: Any) -> Any:
    return model if is_accelerated(model) else accelerate(model)


class ScheduledAdamW(FlatAdamW):
    """FlatAdamW whose learning rates stay numbers on the host, for torch's schedulers and for logs: to read one from
    the device is to wait for it."""

    def take_rates(self) -> None:
        numbers = [group["lr"] for group in self.param_groups]
        super().take_rates()
        for group, number in zip(self.param_groups, numbers, strict=True):
            group["lr"] = number


class LeanSmoother(LabelSmoother):
    """The same loss by cross entropy, which accelerated models compute without logits."""

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            labels = F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]
        targets = labels.flatten()
        loss = F.cross_entropy(
            logits.view(-1, logits.shape[-1]),
            targets,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.epsilon,
        )
        return loss / ((targets != self.ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


class Meter:
    """Real tokens a second, and the share of the device's peak that is useful matrix products (mfu).

    Of a translation target tokens count, of an image its patches and one more. Sums stay on the device until they are
    read. A product counts 2 flops forward and 4 backward: the matrices of layers for every token, the output layer's
    for labelled ones, those of layers that were left out not at all; products inside attention are not counted, so mfu
    is a little low for long sequences.
    """

    def __init__(self, model: nn.Module) -> None:
        self.config = getattr(model, "config", None)
        self.pairs = bool(getattr(self.config, "is_encoder_decoder", False))
        self.source_size, self.size, self.head_size = _count_matrices(model, self.pairs)
        self.switched = _count_switched(model, self.pairs)
        self.restart()

    def restart(self) -> None:
        self.source: int | Tensor = 0
        self.tokens: int | Tensor = 0
        self.labelled: int | Tensor = 0
        self.left_out: int | Tensor = 0  # products of layers that did not work, by token and element
        self.since = perf_counter()

    def add(self, inputs: Mapping[str, Any]) -> None:
        tokens, labels = _count_tokens(inputs, self.config), inputs.get("labels")
        labelled: int | Tensor = 0
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            labelled = labels.ne(IGNORE).sum()
        self.labelled = self.labelled + labelled
        source: int | Tensor = 0
        if self.pairs:
            source, tokens = tokens, labelled
        self.source, self.tokens = self.source + source, self.tokens + tokens
        for gate, size, of_source in self.switched:
            if gate.factor == 0.0:
                self.left_out = self.left_out + size * (source if of_source else tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = perf_counter()
        yield
        self.since += perf_counter() - begin

    def read(self, accelerator: Any) -> dict[str, float]:
        """What was counted since the last time, by all processes; every one of them has to ask."""
        mine = (self.source, self.tokens, self.labelled, self.left_out)
        counts = torch.tensor([int(n) for n in mine], device=accelerator.device)
        seconds = perf_counter() - self.since
        source, tokens, labelled, left_out = accelerator.reduce(counts, "sum").tolist()
        self.restart()
        if tokens == 0:
            return {}
        flops = 6 * (source * self.source_size + tokens * self.size + labelled * self.head_size - left_out)
        peak = peak_flops(accelerator.device) * accelerator.num_processes
        return {"tokens_per_second": tokens / seconds} | ({"mfu": flops / seconds / peak} if peak else {})


def _count_tokens(inputs: Mapping[str, Any], config: Any) -> int | Tensor:
    """Of a batch: what the mask keeps, all where there is none, and nothing where they are neither text nor images."""
    mask, ids, pixels = (inputs.get(name) for name in ("attention_mask", "input_ids", "pixel_values"))
    if mask is not None and mask.ndim == 2:
        return mask.sum()
    if ids is not None:
        return ids.numel()
    if pixels is None or not isinstance(getattr(config, "patch_size", None), int):
        return 0
    return pixels.shape[0] * (pixels.shape[-2] // config.patch_size * (pixels.shape[-1] // config.patch_size) + 1)


def _count_matrices(model: Any, pairs: bool) -> tuple[int, int, int]:
    """Elements of the encoder's matrices (of a pair of stacks), of the other layers', and of the output layer's. Tables
    are looked up, not multiplied with."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables |= {id(output.weight)} if output is not None else set()

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.ndim >= 2 and id(p) not in tables)

    source = count(model.get_encoder()) if pairs else 0
    return source, count(model) - source, 0 if output is None else output.weight.numel()


def _count_switched(model: Any, pairs: bool) -> list[tuple[Gate, int, bool]]:
    """Of each layer that may be left out, the elements of its matrices, and whether it is the encoder's of a pair."""
    dropping, source = dropping_of(model), set(model.get_encoder().modules()) if pairs else set()
    gates = [] if dropping is None else dropping.all_gates()
    return [(gate, sum(p.numel() for p in layer.parameters() if p.ndim >= 2), layer in source) for layer, gate in gates]
