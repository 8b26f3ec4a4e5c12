"""accelerate, restore and report.

No exchange is taken on trust (exchanges.py): a future release of transformers can make an acceleration disappear, but
not a result wrong. Whatever else goes wrong, all changes are undone (journal.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from stretto.config import LayerDropConfig, StandardizeConfig, build_config
from stretto.hf.call import Tried
from stretto.hf.draw import draw_stack_batches
from stretto.hf.exchanges import Exchanges, compare, kind_of
from stretto.hf.journal import Journal
from stretto.hf.layer_drop import Dropping, plan_drops
from stretto.hf.layers import AffineNorm, Tokens
from stretto.hf.packing import Seat
from stretto.hf.roles import Site, Stack, sites, stacks
from stretto.hf.standardize import Pulling, find_problem, note_tokens, plan_pulls
from stretto.hf.trial import checked_indices

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
YES = {"standardize": "yes: what save_pretrained writes is another function without it"}


@dataclass(frozen=True)
class Line:
    names: str  # of modules that differ by the number of their layer only: # stands for it
    role: str
    count: int
    problem: str | None  # why they stay as they are
    remark: str = ""  # where they do so nevertheless

    def say(self) -> str:
        return self.problem or YES.get(self.role, "yes") + self.remark


@dataclass(frozen=True)
class Report:
    """What was accelerated, and what was not, and why."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        rows = [("role", "modules", "", "")]
        rows += [(line.role, line.names or "(the model)", f"x {line.count}", line.say()) for line in self.lines]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows)


@dataclass
class Record:
    """What restore and the steps of a run need."""

    report: Report
    journal: Journal = field(default_factory=Journal)
    seats: dict[PreTrainedModel, Seat] = field(default_factory=dict)  # of every PreTrainedModel
    steps: int = 0  # of the run; 0: not known
    dropping: Dropping | None = None
    pulling: Pulling | None = None


def accelerate(
    model: Model,
    fused: bool = True,
    unpad: bool = True,
    loss: bool = True,
    packed: bool = False,
    layer_drop: LayerDropConfig | Mapping[str, Any] | bool = False,
    standardize: StandardizeConfig | Mapping[str, Any] | bool = False,
    steps: int = 0,
    seed: int = 0,
) -> Model:
    """The same model, faster: the same object, with the same parameters, names and results up to rounding.

    fused   norms, MLPs and residual adds by fused kernels, and attention by the fastest one
    unpad   layers run on the tokens that attention_mask keeps; outputs at padding are zero
    loss    in training with labels, the loss is computed without logits; those in the output are computed when used
    packed  rows hold several documents: a training batch that does not say where they end is an error

    What changes the mathematics of training is off, unless it is given the options of its section in config.py:

    layer_drop   updates leave out some layers (techniques/layer_drop.py)
    standardize  norms become affines that a loss keeps near mean 0 and variance 1 (techniques/standardize.py)
    steps, seed  of the run: how many updates it has, for schedules, and what draws layers

    `restore` undoes it, `report` tells what was found. To be called before the model is compiled or wrapped.
    """
    _check(model)
    record, done = Record(Report(()), steps=steps), list[Site]()
    try:
        with checked_indices(model):
            chained = stacks(model)
            if layer_drop:
                tried = [(stack, next(draw_stack_batches(stack.owner, stack.crosses), None)) for stack in chained]
                record.dropping = plan_drops(model, tried, _read_options("layer_drop", layer_drop), seed, done)
            tokens: dict[nn.Module, Tokens] = {}
            if standardize:
                options = _read_options("standardize", standardize)
                record.pulling, tokens = _swap_norms(model, chained, options, record.journal, done)
            exchanges = Exchanges(model, chained, record.journal, done, unpad, loss, packed)
            exchanges.make_all(fused, record.dropping)
            record.seats = exchanges.seats
            _add_pulls(record, tokens)
    except BaseException:
        record.journal.undo_all()
        raise
    record.report = _summarise(done)
    model._stretto = record  # type: ignore[assignment]
    log.info("%s\n%s", type(model).__name__, record.report)
    return model


def _add_pulls(record: Record, tokens: dict[nn.Module, Tokens]) -> None:
    """Which tokens the former norms look at is told to them behind the hooks of packing.py."""
    journal = record.journal
    for norm, of_norm in tokens.items():
        journal.change(norm, "stretto_tokens", of_norm)
    for around in record.pulling.around if record.pulling is not None else ():
        hook = partial(note_tokens, around=around)
        journal.hooks.append(around.model.register_forward_pre_hook(hook, with_kwargs=True))


def restore(model: Model) -> Model:
    """Undoes `accelerate`: the classes and the attention that were there before."""
    _record(model).journal.undo_all()
    for module in model.modules():
        vars(module).pop("_stretto", None)  # it may be inside of an adapter's model
    return model


def report(model: nn.Module) -> Report:
    return _record(model).report


def set_step(
    model: nn.Module, step: int, share: float = 1.0, steps: int = 0, scaler: torch.amp.GradScaler | None = None
) -> None:
    """To be called before each update, with its number, counted from 0, where layers are left out or norms replaced.
    `Step` and `Trainer` do so themselves. The model may be wrapped.

    share   of the update that a batch is: 1 over the number of batches whose gradients are added up
    steps   how many updates there are, if `accelerate` was not told
    scaler  of the loss, in fp16
    """
    part = _find_accelerated(model)
    record = _record(model if part is None else part)
    steps = steps or record.steps
    if record.dropping is not None:
        record.dropping.set_step(step, steps)
    if record.pulling is not None:
        record.pulling.set_step(step, steps, share, scaler, next(model.parameters()).device)


def dropping_of(model: nn.Module) -> Dropping | None:
    part = _find_accelerated(model)
    return None if part is None else _record(part).dropping


def outermost(model: nn.Module) -> tuple[PreTrainedModel, Tried]:
    """The PreTrainedModel that is called when the model is, and the batches that it was tried with."""
    part = _find_accelerated(model)
    seats = _record(model if part is None else part).seats
    for module, seat in seats.items():
        return module, seat.tried
    raise ValueError(f"there is no PreTrainedModel in this {type(model).__name__}")


def is_accelerated(model: nn.Module) -> bool:
    """Whether it, or a part of it, is."""
    return _find_accelerated(model) is not None


def _find_accelerated(model: nn.Module) -> nn.Module | None:
    return next((module for module in model.modules() if hasattr(module, "_stretto")), None)


def _record(model: nn.Module) -> Record:
    record = getattr(model, "_stretto", None)
    if not isinstance(record, Record):
        raise ValueError(f"this {type(model).__name__} is not accelerated")
    return record


def _check(model: nn.Module) -> None:
    name = type(model).__name__
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ValueError(f"accelerate the model inside {name}, before it is wrapped")
    if is_accelerated(model):
        raise ValueError(f"this {name} is accelerated already; stretto.restore(model) undoes it")
    if any(hasattr(type(module), "made_of") for module in model.modules()):
        raise ValueError(
            f"a part of this {name} is accelerated already, as a part of another model: restore that first"
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{parameter_name} is on the meta device: load the weights before accelerate(model)")
        if not parameter.is_floating_point() or type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{parameter_name} is {type(parameter).__name__} {parameter.dtype}; accelerate works on plain "
                "parameters in floating point, before a model is quantised or sharded"
            )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"this {name} is quantised: accelerate works on models in floating point")


def _read_options(name: str, value: Any) -> Any:
    """The section of config.py, of which a part may be given."""
    own = {"scale": "update"} if name == "layer_drop" else {}
    if isinstance(value, Mapping | bool):
        value = own | (dict(value) if isinstance(value, Mapping) else {})
    return getattr(build_config({"techniques": {name: value}}).techniques, name)


def _swap_norms(
    model: nn.Module, found: list[Stack], cfg: StandardizeConfig, journal: Journal, done: list[Site]
) -> tuple[Pulling, dict[nn.Module, Tokens]]:
    """All norms but those of heads, where what is to be replaced is known: by parameters of the same names."""
    norms: list[Site] = []
    problems: dict[Any, str | None] = {}
    for site in sites(model):
        if site.role == "norm":
            key = kind_of(site)
            if key not in problems:
                problems[key] = site.problem or compare(site)
            problem = problems[key] or find_problem(model, site)
            done.append(replace(site, role="standardize", problem=problem))
            norms += [site] if problem is None else []
    if not norms:
        why = "; ".join(dict.fromkeys(str(site.problem) for site in done if site.role == "standardize"))
        raise ValueError(f"standardize does not apply to {type(model).__name__}: {why or 'it has no norms'}")
    for site in norms:
        journal.swap(site.module, AffineNorm)
    return plan_pulls(model, norms, found, cfg)


def _summarise(done: list[Site]) -> Report:
    counts: dict[tuple[str, str, str | None, str], int] = {}
    for site in done:
        key = re.sub(r"\.\d+(?=\.|$)", ".#", site.name), site.role, site.problem, site.remark
        counts[key] = counts.get(key, 0) + 1
    return Report(tuple(Line(*what[:2], count, *what[2:]) for what, count in counts.items()))
