"""The Hugging Face model of the same shape: as its users train it, and through `stretto.accelerate`.

Others: fused AdamW, autocast over fp32 weights (or bf16 weights without it), SDPA attention, the model's own loss. The
KV cache is off, which is the faster setting for training. Accelerated: bf16 weights whose exact rest our optimizer
keeps, and whole steps as CUDA graphs. All read the same batches, where sequences of different lengths are padded and
masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto.model
from stretto import graphs
from stretto.batch import IGNORE, Batch, Counts, Sequences
from stretto.bench.measure import Contestant
from stretto.config import Config, ModelConfig
from stretto.convert.families import choose_family, write_model
from stretto.errors import ConfigError
from stretto.optim import FlatAdamW, build_optimizer
from stretto.precision import autocast, resolve_precision
from stretto.techniques import find_optimizers, open_techniques
from stretto.techniques.technique import Context

# How each is compiled; None: not at all. "liger" is eager, with Liger-Kernel's modules in the place of some;
# "checkpoint" is eager, and computes layers again in the backward pass.
MODES: dict[str, dict[str, str] | None] = {
    "eager": None, "compile": {}, "graphs": {"mode": "reduce-overhead"}, "liger": None, "checkpoint": None,
}  # fmt: skip


def build_peer(
    config: Config, own: Mapping[str, Any], draws: Sequence[Batch], mode: str, device: torch.device,
    weights: torch.dtype,
) -> Contestant:  # fmt: skip
    model, parameters = _build(config, own, weights, device)
    if mode == "liger":
        _use_liger(model)
    if mode == "checkpoint":
        recompute: Any = model
        recompute.gradient_checkpointing_enable({"use_reentrant": False})
    options = MODES[mode]
    called: Any = model if options is None else torch.compile(model, **options)  # type: ignore[call-overload]
    batches = [{name: t.to(device) for name, t in to_inputs(draw, config.model).items()} for draw in draws]
    cfg = config.optim
    optimizer = torch.optim.AdamW(
        parameters, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True
    )
    precision = resolve_precision(config.train.precision, device)

    def step(i: int) -> Tensor:
        if mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with autocast(precision, device) if weights == torch.float32 else nullcontext():
            loss = called(**batches[i % len(batches)]).loss
        loss.backward()
        if cfg.clip:
            nn.utils.clip_grad_norm_(parameters, cfg.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contestant(step, parameters, records=mode == "graphs")


def _use_liger(model: Any) -> None:
    """Does what `use_liger_kernel=True` does in transformers' Trainer, which passes over a model that Liger does not
    know."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"Liger has nothing for models of type {model.config.model_type!r}")
    apply_liger_kernel(model, None)  # type: ignore[no-untyped-call]


def build_accelerated(
    config: Config, own: Mapping[str, Any], draws: Sequence[Batch], device: torch.device, **more: Any
) -> Contestant:
    """`more` are techniques that an accelerated model has only if it is told."""
    from stretto.hf import Step, accelerate, report  # imports transformers

    precision = resolve_precision(config.train.precision, device)
    techniques = open_techniques(config, Context(config.model, device, precision, seed=config.run.seed))
    if not techniques.has_optimizer:
        names = " or ".join(find_optimizers())
        raise ConfigError(f"{names}: the accelerated model takes its weights and moments from there; leave it on")
    weights = techniques.parameter_dtype
    model, parameters = _build(config, own, weights, device)
    print(report(accelerate(model, **more)), flush=True)
    optimizer = build_optimizer(model, config.optim, techniques.build_optimizer)
    assert isinstance(optimizer, FlatAdamW)
    step = Step(model, optimizer, config.optim.clip)
    # Ids and labels stay on the CPU, where a loader leaves them: what is real is decided there. Pixels are large.
    batches = [to_inputs(draw, config.model) for draw in draws]
    for inputs in batches:
        inputs |= {name: t.to(device, weights) for name, t in inputs.items() if t.is_floating_point()}
    records = step.update.executor is not step.update.eager

    def run(i: int) -> Tensor:
        with autocast(precision, device) if weights == torch.float32 else nullcontext():
            return step(batches[i % len(batches)])

    return Contestant(run, parameters, graphs.TIMES + 2 if records else 3, records)


def _build(
    config: Config, own: Mapping[str, Any], weights: torch.dtype, device: torch.device
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Builds the model, and returns the parameters that are trained, which Marian's table of sines is not. `own` is the
    configuration of a model that has no counterpart among ours."""
    with device:  # the weights of a large model take a CPU long to draw
        model = build_model(config.model, weights, own)
    parameters = [p for p in model.parameters() if p.requires_grad]
    theirs = sum(p.numel() for p in parameters)
    ours = sum(p.numel() for p in stretto.model.build_model(config.model).parameters())
    if theirs != ours and not own:
        raise ConfigError(f"Hugging Face's model has {theirs:,} parameters and Stretto's {ours:,}: not the same model")
    return model, parameters


def build_model(cfg: ModelConfig, weights: torch.dtype, own: Mapping[str, Any]) -> nn.Module:
    """Builds the stock class of this kind, with fresh weights, in training mode."""
    hf: Any = import_module("transformers")  # only where it is needed: it is large, and may be missing
    auto = {
        "decoder": hf.AutoModelForCausalLM,
        "encoder": hf.AutoModelForMaskedLM,
        "encoder-decoder": hf.AutoModelForSeq2SeqLM,
        "vit": hf.AutoModelForImageClassification,
    }[cfg.kind]
    shape = hf.AutoConfig.for_model(**(own or _describe(cfg)))
    model: nn.Module = auto.from_config(shape, dtype=weights)  # with SDPA, unless it has none
    return model.train()


def _describe(cfg: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of a model that has a counterpart among ours."""
    kind = choose_family(asdict(cfg))
    # Special tokens play no part here, but by default they may lie outside of a small vocabulary.
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    if cfg.kind == "encoder-decoder":
        tokens |= {"pad_token_id": 0, "decoder_start_token_id": 0}
    options = {"model_type": kind, "use_cache": False, **tokens} | write_model(kind, asdict(cfg))
    return options | ({"num_labels": cfg.classes} if cfg.classes else {})


def to_inputs(batch: Batch, cfg: ModelConfig) -> dict[str, Tensor]:
    """Makes the arguments of the model's forward call."""
    if batch.inputs is None:
        assert batch.pixels is not None
        return {"pixel_values": batch.pixels, "labels": batch.labels}
    read = batch.inputs if batch.source is None else batch.source  # of the target, the model reads the labels
    width = read.layout.max_len if batch.source is None else 0  # texts are as wide as the workload says
    inputs = {"input_ids": _pad(read, read.ids, 0, width)}
    if not read.layout.dense:
        inputs["attention_mask"] = _pad(read, torch.ones_like(read.ids), 0, width)
    if cfg.kind == "decoder":  # a causal model shifts the labels by itself
        return inputs | {"labels": inputs["input_ids"]}
    labels = batch.labels
    if batch.label_at is not None:
        labels = torch.full_like(read.ids, IGNORE).index_copy(0, batch.label_at, labels)
    return inputs | {"labels": _pad(batch.inputs, labels, IGNORE, width)}


def _pad(side: Sequences, values: Tensor, fill: int, width: int) -> Tensor:
    """Makes [N, S] of [T]; S is the longest sequence, or `width` if that is larger."""
    rows = list(torch.split(values, side.layout.offsets.diff().tolist()))
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
    return F.pad(padded, (0, max(width - padded.shape[1], 0)), value=fill)


def count(batch: Batch, cfg: ModelConfig) -> Counts:
    """Counts what speed and MFU are measured in; the slots are those of a peer, which pads."""
    if batch.inputs is None:
        return batch.counts
    inputs = to_inputs(batch, cfg)
    source_slots = 0 if batch.source is None else inputs["input_ids"].numel()
    return replace(batch.counts, slots=inputs["labels"].numel(), source_slots=source_slots)
