"""transformers' Trainer with an accelerated model: `from stretto.hf import Trainer` in place of theirs.

What changes, and nothing else does:

    model      goes through `stretto.accelerate`, unless it has been already
    updates    are launched as one where that is possible (update.py); the log says why where it is not
    optimizer  torch's AdamW becomes FlatAdamW, with the same groups, one launch and clipping inside the update; weights
               in bf16 are then the upper halves of exact fp32 weights
    schedules  of techniques follow its steps
    logs       tokens_per_second and mfu stand next to the loss

Label smoothing needs no logits either. For it, and for a loss function of the user's, labels are taken out of the batch
before the model sees them; so the Trainer says what logits are wanted for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from stretto.batch import IGNORE, Counts, Depth
from stretto.config import ModelConfig, build_model_config
from stretto.convert.families import FAMILIES, convert_config
from stretto.errors import ConfigError
from stretto.flops import training_flops
from stretto.hf.acceleration import accelerate, gates_of, is_accelerated, set_step, techniques_of
from stretto.hf.defer import Call, Request, calling, is_planned, logits_wanted_for_loss
from stretto.hf.unpad import has_labels_on_padding
from stretto.hf.update import Update, can_record, find_obstacle
from stretto.optim import FlatAdamW
from stretto.report import Meter

if find_spec("accelerate") is None:
    raise ImportError("stretto.hf.Trainer needs the package `accelerate`, as transformers' own does: pip install "
                      '"stretto[hf]"')  # fmt: skip
log = logging.getLogger(__name__)
ITEMS = "num_items_in_batch"  # its name among the inputs of a batch
REPLAYED = (  # what graphs are replayed instead of
    "training_step", "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager",
    "_prepare_inputs", "_prepare_input", "_clip_grad_norm", "_get_grad_norm",
)  # fmt: skip


class Trainer(transformers.Trainer):
    """transformers.Trainer, faster. To be mixed with another subclass of it, this one goes first."""

    update: Update | None = None  # what makes whole updates in this training; None: they run as theirs
    obstacle = "there is no training"  # why they do
    opened = False  # whether `update` is decided
    told: int | None = None  # number of the update that techniques know of
    filters = False  # whether losses that are not finite are left out of what is logged here, and not by theirs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = _accelerate_once(self.model)
        self.meter = SpeedMeter(model, self.accelerator.device, self.accelerator.num_processes)
        self.operations: dict[Any, Any] = {}  # floating-point operations, by shape of the batch
        if techniques_of(model).gaps and self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = True
            if self.accelerator.ddp_handler is not None:  # which was given the argument as it was
                self.accelerator.ddp_handler.find_unused_parameters = True
        if self.label_smoother is not None:
            self.label_smoother = SummedSmoother(self.label_smoother.epsilon)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        return _accelerate_once(super().call_model_init(*args, **kwargs))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        given, model = self.optimizer_cls_and_kwargs, self.model
        theirs = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_model_parallel or given is not None
        # For other names nobody asks here: an answer may hook an optimizer into each parameter.
        if not theirs and self.args.optim in ("adamw_torch", "adamw_torch_fused"):
            _, options = self.get_optimizer_cls_and_kwargs(self.args, model)  # type: ignore[arg-type]
            weights = "split" if any(p.dtype == torch.bfloat16 for p in model.parameters()) else "fp32"  # type: ignore
            ours = {name: options[name] for name in ("lr", "betas", "eps")}  # torch's may have one more, its kernel
            self.optimizer_cls_and_kwargs = (ScheduledAdamW, ours | {"weights": weights})
            try:
                return super().create_optimizer(*args, **kwargs)
            except ValueError as error:
                log.info("the optimizer is torch's: %s", error)
            finally:
                self.optimizer_cls_and_kwargs = given
        return super().create_optimizer(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Batches that are planned stay on the CPU until then: to look at them there is not to wait for the device."""
        loader = super().get_train_dataloader()
        if not self.obstacle:
            loader.device = None
        return loader

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Is called by `train`, once for each size of batches that it tries."""
        self.opened, self.told, self.obstacle = False, None, self._find_obstacle()
        self.meter.restart()
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self.update = None  # and with it the memory of graphs
            self.obstacle = Trainer.obstacle
            if self.filters:
                self.filters, self.args.logging_nan_inf_filter = False, True

    def _find_obstacle(self, optimizer: FlatAdamW | None = None) -> str:
        """Why updates cannot be recorded, by what is known so far; empty if they can."""
        args: Any = self.args
        model: Any = self.model
        if not can_record(args.device):
            return "the model is not on a GPU"
        reasons = {
            "there are several processes or devices": args.world_size > 1 or args.n_gpu > 1 or self.is_model_parallel,
            "FSDP or DeepSpeed shards the model": self.is_fsdp_enabled or self.is_deepspeed_enabled,
            "the loss is scaled, for fp16": self.accelerator.scaler is not None,
            "the model is compiled": args.torch_compile,
            "torch_empty_cache_steps empties the cache inside of steps": args.torch_empty_cache_steps is not None,
            "compute_loss_func is a function of your own": self.compute_loss_func is not None,
        }
        own = next((name for name in REPLAYED if self._is_own(name)), None)
        seen = next((type(each).__name__ for each in self.callback_handler.callbacks if _looks_inside(each)), None)
        reasons |= {f"{own} is a method of your own": own, f"{seen} looks at gradients": seen}
        found = next((reason for reason, holds in reasons.items() if holds), "")
        return found or find_obstacle(model, optimizer, self._adds_up())

    def _adds_up(self) -> bool:
        return self.args.gradient_accumulation_steps > 1

    def _is_own(self, name: str) -> bool:
        """Whether somebody has put another method there than Stretto and transformers."""
        kinds = [kind.__module__ for kind in type(self).__mro__ if name in vars(kind)]
        return name in vars(self) or not all(kind.startswith(("stretto.hf.", "transformers.")) for kind in kinds)

    def _open_update(self, model: nn.Module) -> Update | None:
        """Called with the first batch, when the optimizer is known, whether the model is wrapped, and what callbacks
        have hooked into since."""
        optimizer: Any = getattr(self.optimizer, "optimizer", None)  # accelerate's wrapper holds it
        if model is not self.model:
            found = f"{type(model).__name__} is around the model"
        elif not isinstance(optimizer, ScheduledAdamW):
            found = "the optimizer is not Stretto's"
        else:
            found = self._find_obstacle(optimizer)
        self.obstacle = self.obstacle or found
        if self.obstacle:
            log.info("CUDA graphs: off: %s", self.obstacle)
            return None
        optimizer.done = False  # a training that was interrupted may have left it so
        if self.args.logging_nan_inf_filter and hasattr(self, "_tr_loss"):  # for theirs the host waits in each step
            self.filters, self.args.logging_nan_inf_filter = True, False
        return Update(model, optimizer, self.args.max_grad_norm, self._backpropagate, "", self._adds_up())

    def _backpropagate(self, inputs: dict[str, Any]) -> Tensor:
        model: Any = self.model
        return super().training_step(model, inputs, inputs.pop(ITEMS, None))

    def _get_num_items_in_batch(self, batches: list[Any], device: torch.device) -> Any:
        """They travel with the batch."""
        return super()._get_num_items_in_batch(batches, device if self.obstacle else torch.device("cpu"))

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        share, state = 1 / self.current_gradient_accumulation_steps, self.state
        if state.global_step != self.told:
            self.told = state.global_step
            set_step(model, state.global_step, share, state.max_steps, self.accelerator.scaler)
        self.meter.count(inputs)
        if not self.opened:
            self.update, self.opened = self._open_update(model), True
        if self.update is None:
            return super().training_step(model, inputs, num_items_in_batch, *args, **kwargs)
        return self._train(self.update, inputs, num_items_in_batch)

    def _train(self, update: Update, inputs: dict[str, Any], items: Any) -> Tensor:
        """The update is made together with the last batch's passes, with the rates of now; what theirs calls for it
        afterwards finds it done."""
        if not update.model.training:
            update.model.train()
        share = {"share": self.current_gradient_accumulation_steps}
        batch = update.plan(dict(inputs), {} if items is None else {ITEMS: torch.as_tensor(items)}, share)
        last = self.accelerator.sync_gradients
        loss = update.run(batch, self.state.global_step, last)
        update.optimizer.done = last  # type: ignore[attr-defined]
        if not self.filters:
            return loss
        usual = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, usual)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Is called by theirs before a step."""
        if self.update is not None:
            return self.update.norm
        optimizer = getattr(self.optimizer, "optimizer", None)  # accelerate's wrapper holds it
        if not isinstance(optimizer, FlatAdamW):
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        self.accelerator.unscale_gradients()
        return optimizer.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Is called by theirs where there is no limit, too."""
        return self.update.norm if self.update is not None else super()._get_grad_norm(model, grad_norm)  # type: ignore

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outside = self.label_smoother is not None or self.compute_loss_func is not None
        if not outside and not (is_planned() or (args[0] if args else kwargs.get("return_outputs"))):
            with calling(Call(request=Request(loss_only=True))):
                return super().compute_loss(model, inputs, *args, **kwargs)
        if not outside or "labels" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        mask = inputs.get("decoder_attention_mask" if self.meter.pairs else "attention_mask")
        padded = not is_planned() and bool(has_labels_on_padding(inputs["labels"], mask))
        # DistributedDataParallel looks for the weights that outputs depend on: it must find a history there.
        lazy = model is self.model and model.training and torch.is_grad_enabled()
        with logits_wanted_for_loss(lazy, rectangle=padded):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """As theirs, which goes through all parameters: once for each shape of batch."""
        shape = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, Tensor))
        if shape not in self.operations:
            self.operations[shape] = super().floating_point_ops(inputs)
        return self.operations[shape]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.meter.paused():
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.meter.paused():
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds to the dictionary that it is given, as theirs does: the caller may look at it afterwards."""
        if "loss" in logs:
            logs.update(self.meter.read_all(self.accelerator))
        super().log(logs, *args, **kwargs)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer, faster."""


def _accelerate_once(model: Any) -> Any:
    return model if is_accelerated(model) else accelerate(model)


class ScheduledAdamW(FlatAdamW):
    """FlatAdamW whose learning rates stay numbers on the host, for torch's schedulers and for logs: to read one from
    the device is to wait for it."""

    taken: Sequence[float] = ()  # rates that kernels read
    done = False  # whether the update that theirs will ask for is made already

    def take_rates(self) -> None:
        numbers = [group["lr"] for group in self.param_groups]
        for group, views, number, before in zip(self.param_groups, self._rates, numbers, self.taken, strict=False):
            group["lr"] = views["lr"] if number == before else number  # a view is not taken again
        super().take_rates()
        for group, number in zip(self.param_groups, numbers, strict=True):
            group["lr"] = number
        self.taken = numbers

    def _update(self) -> None:
        if not self.done:
            super()._update()
        self.done = False


def _looks_inside(callback: transformers.TrainerCallback) -> bool:
    """Whether a callback is called between a backward pass and the end of the update."""
    names = ("on_pre_optimizer_step", "on_optimizer_step")
    return any(getattr(type(callback), name) is not getattr(transformers.TrainerCallback, name) for name in names)


class SummedSmoother(LabelSmoother):
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


class SpeedMeter(Meter):
    """The core's meter for batches of a Hugging Face model: real tokens a second, and mfu as flops.py counts it, for
    models that Stretto has, too. Of a translation target tokens count, of an image its patches and one more. Sums stay
    on the device until they are read."""

    def __init__(self, model: nn.Module, device: torch.device, world: int) -> None:
        self.config = getattr(model, "config", None)
        self.pairs = bool(getattr(self.config, "is_encoder_decoder", False))
        self.cfg = find_counterpart(model)
        self.gates = gates_of(model)
        super().__init__(device, world)

    def restart(self) -> None:
        super().restart()
        self.counted: int | Tensor = 0  # real tokens
        self.sums: dict[tuple[tuple[str, int], ...], Tensor] = {}  # counts of batches, by the layers that worked

    def count(self, inputs: Mapping[str, Any]) -> None:
        counts = count_batch(inputs, self.pairs)
        self.counted = self.counted + counts[0] * _tokens_per_sample(inputs, self.config)
        if self.cfg is not None:
            working = self._count_layers(self.cfg.kind)
            self.sums[working] = counts + self.sums[working] if working in self.sums else counts

    def _count_layers(self, kind: str) -> tuple[tuple[str, int], ...]:
        """The number of layers that work in this update, by the sides of flops.py; empty where all of them do."""
        found = []
        for stack, gates in self.gates.items():
            decodes = kind == "decoder" or (kind == "encoder-decoder" and not stack.endswith("encoder"))
            found.append(("decoder" if decodes else "encoder", sum(gate.factor != 0.0 for gate in gates.values())))
        return tuple(found)

    def read_all(self, accelerator: Any) -> dict[str, float]:
        """The numbers since the last reading, of all processes together; every one of them has to ask."""
        sums = torch.tensor([float(self.counted), self.count_flops()], device=accelerator.device)
        tokens, flops = accelerator.reduce(sums, "sum").tolist()
        self.add(tokens=int(tokens), slots=0, padding=0, flops=int(flops))
        values = self.read()
        if tokens == 0:
            return {}
        return {"tokens_per_second": values["tokens_per_s"]} | ({"mfu": values["mfu"]} if values["mfu"] else {})

    def count_flops(self) -> float:
        flops = 0.0
        for working, sums in self.sums.items():
            depths = {side: Depth(torch.empty(0), {}, whole=True, work=work) for side, work in working}
            tokens, labels, pairs, source, source_pairs, cross_pairs = sums.tolist()
            counts = Counts(tokens, 0, labels, pairs, source, 0, source_pairs, cross_pairs)
            assert self.cfg is not None
            flops += training_flops(self.cfg, counts, depths)
        return flops


def find_counterpart(model: nn.Module) -> ModelConfig | None:
    """The configuration of our model with the same sizes and the same head; None where Stretto has no such model."""
    config: Any = getattr(model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None or type(model).__name__ not in (family.architecture, family.classifier):
        return None
    try:
        return build_model_config(convert_config(config.model_type, config.to_dict(), type(model).__name__))
    except ConfigError:
        return None


def count_batch(inputs: Mapping[str, Any], pairs: bool) -> Tensor:
    """int64 [6]: tokens (images), labels, pairs of tokens; where `pairs` of sequences are translated, source tokens,
    their pairs, and pairs of a source and a target token. Without text and images all of them are 0."""
    labels = inputs.get("labels")
    lengths = _measure_rows(inputs)
    predicted = torch.zeros_like(lengths)
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        predicted = labels.ne(IGNORE).reshape(len(labels), -1).sum(1).to(lengths.device)
    positions = inputs.get("position_ids")
    seen = lengths.square().sum()
    if positions is not None and positions.ndim == 2 and inputs.get("attention_mask") is None:
        seen = (2 * positions + 1).expand(len(lengths), -1).sum()  # documents in a row: 1 + 3 + 5 + ... is a square
    own = [lengths.sum(), predicted.sum(), seen]
    if not pairs:
        return torch.stack([*own, *[torch.zeros_like(seen)] * 3])
    return torch.stack([own[1], own[1], predicted.square().sum(), own[0], seen, (lengths * predicted).sum()])


def _measure_rows(inputs: Mapping[str, Any]) -> Tensor:
    """The real tokens of each row, int64 [N]; of an image 1."""
    mask, ids, pixels = (inputs.get(name) for name in ("attention_mask", "input_ids", "pixel_values"))
    if mask is not None and mask.ndim == 2:
        return mask.sum(1)
    if ids is not None:
        return torch.full(ids.shape[:1], ids.shape[-1], device=ids.device)
    return torch.ones(0 if pixels is None else len(pixels), dtype=torch.int64)


def _tokens_per_sample(inputs: Mapping[str, Any], config: Any) -> int:
    """1 for text, whose tokens are counted; for images their patches and one more, 0 where patches are unknown."""
    pixels, patch = inputs.get("pixel_values"), getattr(config, "patch_size", None)
    if pixels is None or inputs.get("input_ids") is not None or inputs.get("attention_mask") is not None:
        return 1
    return pixels.shape[-2] // patch * (pixels.shape[-1] // patch) + 1 if isinstance(patch, int) else 0
