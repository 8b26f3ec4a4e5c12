"""accelerate, restore and report.

No exchange is taken on trust (trial.py): a module by itself, a stack of layers with each thing that is changed in it,
the output layer with its loss are run before and after, and what gives another result, or cannot be run, is left as it
was; the report says why. Whether the model around a stack reads padding is found by running it on batches of every kind
of padding, with it and without. So a future release of transformers can make an acceleration disappear, but not a
result wrong. Whatever else goes wrong, all changes are undone (exchange.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stretto.config import LayerDropConfig, StandardizeConfig, build_config
from stretto.hf.attention import DistanceBias, register
from stretto.hf.call import UNTRIED, Call, Tried, set_call
from stretto.hf.draw import IDS, LENGTH, SIDES, Batch, draw_padded, draw_stack_batches, with_labels
from stretto.hf.exchange import Journal, mix, original
from stretto.hf.layer_drop import Dropping, SwitchedLayer, plan_drops
from stretto.hf.layers import (
    AffineNorm,
    Fused,
    FusedActivation,
    FusedGatedMLP,
    FusedLayer,
    FusedLinear,
    FusedMLP,
    Parts,
    Tokens,
    is_touched,
    weight_of,
)
from stretto.hf.loss import LazyHead, note_computed
from stretto.hf.packing import PackedLayer, Seat, argument_names, enter, leave, wanted_outputs
from stretto.hf.pending import note_useful
from stretto.hf.projections import FusedAttention, FusedProjection, Rotated, find_groups, rotated_forward
from stretto.hf.roles import (
    NAME,
    Site,
    Stack,
    calls_attention_interface,
    draw_inputs,
    find_activation,
    is_activation,
    quietly,
    sites,
    stacks,
)
from stretto.hf.standardize import Pulling, find_problem, note_tokens, plan_pulls
from stretto.hf.trial import (
    Result,
    Stage,
    attempt,
    describe,
    disguised_copy,
    find_difference,
    find_loss_of_precision,
    find_stand_ins,
    run,
)

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
        chained = stacks(model)
        if layer_drop:
            tried = [(stack, next(draw_stack_batches(stack.owner, stack.crosses), None)) for stack in chained]
            record.dropping = plan_drops(model, tried, _read_options("layer_drop", layer_drop), seed, done)
        tokens: dict[nn.Module, Tokens] = {}
        if standardize:
            options = _read_options("standardize", standardize)
            record.pulling, tokens = _swap_norms(model, chained, options, record.journal, done)
        _Trials(model, record, chained, done, fused=fused, unpad=unpad, loss=loss, packed=packed).make_all()
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
    del model._stretto
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
            key = _kind(site)
            if key not in problems:
                problems[key] = site.problem or _compare(site)
            problem = problems[key] or find_problem(model, site)
            done.append(replace(site, role="standardize", problem=problem))
            norms += [site] if problem is None else []
    if not norms:
        why = "; ".join(dict.fromkeys(str(site.problem) for site in done if site.role == "standardize"))
        raise ValueError(f"standardize does not apply to {type(model).__name__}: {why or 'it has no norms'}")
    for site in norms:
        journal.swap(site.module, AffineNorm)
    return plan_pulls(model, norms, found, cfg)


def _kind(site: Site) -> Any:
    """Modules of one kind compute the same function of their parameters: one of them is tried."""
    plain = tuple((name, value) for name, value in vars(site.module).items() if isinstance(value, str | int | float))
    types = tuple(p.dtype for p in site.module.parameters())
    return type(site.module), site.parts, repr(site.module), tuple(p for p in plain if p[0] != "training"), types


def _compare(site: Site) -> str | None:
    """Why the fused module must not take the place of the plain one."""
    assert site.fused is not None and issubclass(site.fused, Fused)
    if any(is_touched(child) for child in site.module.children()):
        return "its children have hooks"
    try:
        exact = _compare_copies(site, exact=True)
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in site.module.parameters())
        if isinstance(exact, str) or not half:
            return exact if isinstance(exact, str) else None
        return str(_compare_copies(site, False, exact) or "") or None
    except Exception as error:
        return f"the fused module cannot take its place: {describe(error)}"


def _compare_copies(site: Site, exact: bool, truth: Result | None = None) -> str | Result | None:
    """In fp32 a difference, or what the result is; in the module's own precision, how it falls short of that."""
    assert site.fused is not None
    module = disguised_copy(site.module, exact)
    dense = site.parts.linears
    width = weight_of(module.get_submodule(dense[0])).shape[1] if dense else next(module.parameters()).shape[0]
    inputs = draw_inputs(module, 2 if site.role == "residual norm" else 1, width)
    with quietly(module, training=True):
        trained = run(module, inputs)
    with quietly(module):
        if find_difference(trained, run(module, inputs)):
            return "it is random in training, by something other than a Dropout module"
        expected = run(module, inputs, dict(module.named_parameters()))
        Journal().swap(module, site.fused, site.parts)
        found = run(module, inputs, dict(module.named_parameters()))
    if truth is not None:
        return find_loss_of_precision(found, expected, truth)
    return find_difference(found, expected) or expected


@dataclass
class _Unit:
    """A model that was run untouched, and what it gave."""

    model: PreTrainedModel
    inputs: Batch
    labels: str  # of what they are, if there are any
    exact: Result
    own: Result | None  # in 16 bits, if it has such weights


class _Trials:
    """All exchanges of one model, each tried on a stage."""

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        chained: list[Stack],
        done: list[Site],
        fused: bool,
        unpad: bool,
        loss: bool,
        packed: bool,
    ) -> None:
        self.model, self.record, self.journal, self.done = model, record, record.journal, done
        self.chained, self.fused, self.unpad, self.loss, self.packed = chained, fused, unpad or packed, loss, packed
        self.stage = Stage(model, [stack.layers for stack in chained])
        self.models = {m: name for name, m in model.named_modules() if isinstance(m, PreTrainedModel)}
        record.seats.update({m: Seat(unpad, loss, packed) for m in self.models})

    def make_all(self) -> None:
        found = sites(self.model) if self.fused else []
        units = {stack.owner: self._run_untouched(stack.owner, stack) for stack in self.chained}
        attentions = self._find_attentions(found)
        units |= {owner: self._run_untouched(owner) for owner in attentions if owner not in units}
        heads = {m: self._run_head(m) for m in self.models if self.loss and _find_head(m) is not None}
        register()
        if not (found or self.chained or heads):
            return
        for m, seat in self.record.seats.items():
            self.journal.hooks.append(m.register_forward_pre_hook(partial(enter, seat=seat), with_kwargs=True))
            self.journal.hooks.append(m.register_forward_hook(leave, always_call=True))
        self._swap_sites(found)
        self._swap_attention(attentions, units)
        for stack in self.chained if self.fused else ():
            unit = units[stack.owner]
            if isinstance(unit, _Unit):
                self._swap_layers(stack, unit)
        for layer, gate in self.record.dropping.all_gates() if self.record.dropping is not None else ():
            self.journal.change(layer, "stretto_gate", gate)
            self.journal.swap(layer, SwitchedLayer)
        if self.unpad:
            self._swap_stacks(units)
        for m, head in heads.items():
            self._swap_head(m, head)

    def _run_untouched(self, owner: PreTrainedModel, stack: Stack | None = None) -> _Unit | str:
        problem = "it reads neither tokens nor images nor hidden states"
        for inputs in _catch(draw_stack_batches, owner, stack is not None and stack.crosses):
            if isinstance(inputs, str):
                return inputs
            found = self._try_unit(owner, inputs, "")
            if isinstance(found, _Unit):
                return found
            problem = found
        return problem

    def _run_head(self, model: PreTrainedModel) -> _Unit | str:
        try:
            batch = draw_padded(model, ("right",), ("own",), "ids")
            found: _Unit | str = "it reads no tokens"
            for labels, inputs in with_labels(model, batch) if batch is not None else ():
                found = self._try_unit(model, inputs, labels) if labels == "tokens" else found
            return found
        except Exception as error:
            return f"it cannot be tried: {describe(error)}"

    def _try_unit(self, model: PreTrainedModel, inputs: Batch, labels: str) -> _Unit | str:
        try:
            exact, own = self._play(model, inputs, labels)
        except Exception as error:
            return f"it cannot be tried: {describe(error)}"
        return _Unit(model, inputs, labels, exact, own)

    def _play(self, model: nn.Module, inputs: Batch, labels: str) -> tuple[Result, Result | None]:
        """In fp32 and, where there are weights in 16 bits, as it is."""
        results = [self._run(model, inputs, labels, exact) for exact in (True, False)[: 1 + self.stage.has_halves]]
        return results[0], results[1] if len(results) > 1 else None

    def _run(self, model: nn.Module, inputs: Batch, labels: str, exact: bool) -> Result:
        with self.stage.set_up(exact):
            like, tokens = next(model.parameters()).dtype, labels == "tokens"
            given = {name: value.to(like) if _is_real(value) else value for name, value in inputs.items()}
            parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
            return run(model, given, parameters, _masks(inputs), scores=tokens, loss_only=tokens)

    def _check(self, unit: _Unit | str, lazy: bool = False, trial: bool = False) -> str | None:
        """What a model gives now, against what it gave untouched."""
        if isinstance(unit, str):
            return unit
        set_call(Call(None, None, rectangle=not trial, lazy=lazy, trial=trial))
        try:
            exact, own = self._play(unit.model, unit.inputs, unit.labels)
        finally:
            set_call(None)
        problem = find_difference(exact, unit.exact)
        if problem is None and own is not None and unit.own is not None:
            problem = find_loss_of_precision(own, unit.own, unit.exact)
        return problem

    def _swap_sites(self, found: list[Site]) -> None:
        """Modules with parameters of their own."""
        problems: dict[Any, str | None] = {}
        inside: set[int] = set()
        for site in sorted(found, key=lambda site: site.name.count(".")):  # the whole before its parts
            if site.fused is None or id(site.module) in inside:
                continue
            key = _kind(site)
            if key not in problems:
                problems[key] = site.problem or _compare(site)
            self.done.append(replace(site, problem=problems[key]))
            if problems[key] is None:
                self.journal.swap(site.module, site.fused, site.parts)
                used = (*site.parts.linears, site.parts.norm)
                inside |= {id(site.module.get_submodule(name)) for name in used if name}

    def _find_attentions(self, found: list[Site]) -> dict[PreTrainedModel, list[Site]]:
        """Attention that goes through transformers' interface, by the innermost model around it."""
        groups: dict[PreTrainedModel, list[Site]] = {}
        for site in found:
            if site.role == "attention":
                around = [m for m in _ancestors(self.model, site.name) if isinstance(m, PreTrainedModel)]
                if around:
                    groups.setdefault(around[0], []).append(site)
        return groups

    def _swap_attention(self, groups: dict[PreTrainedModel, list[Site]], units: dict[Any, _Unit | str]) -> None:
        """Where it is torch's: other kinds may know more than ours. A choice holds for all that share a configuration,
        and for the models around it, which build the masks: one that fails keeps it from all of them."""
        problems: dict[PreTrainedModel, str | None] = {}
        configs: dict[PreTrainedModel, list[Any]] = {}
        for owner, group in groups.items():
            names = {getattr(getattr(site.module, "config", None), "_attn_implementation", None) for site in group}
            configs[owner] = [getattr(site.module, "config", None) for site in group]
            problems[owner] = None
            if names != {"sdpa"}:
                problems[owner] = f"its attention is {next(iter(names - {'sdpa'}))!r}: only 'sdpa' is replaced"
                continue
            around = [m for m in (owner, *_ancestors(self.model, self.models[owner])) if isinstance(m, PreTrainedModel)]
            configs[owner] += [m.config for m in around]
            mark = self.journal.mark()
            _, problems[owner] = attempt(
                self.journal, partial(self._choose, configs[owner]), partial(self._check, units[owner])
            )
            self.journal.undo(mark)
        failed = {id(c) for owner, problem in problems.items() if problem for c in configs[owner][: len(groups[owner])]}
        for owner, group in groups.items():
            if problems[owner] is None and any(id(config) in failed for config in configs[owner]):
                problems[owner] = "it shares its configuration with attention that cannot be replaced"
            if problems[owner] is None:
                self._choose(configs[owner])
            self.done += [replace(site, problem=problems[owner]) for site in group]

    def _choose(self, configs: list[Any]) -> bool:
        for config in configs:
            if config._attn_implementation != NAME:
                self.journal.change(config, "_attn_implementation_internal", NAME)
        return True

    def _swap_layers(self, stack: Stack, unit: _Unit) -> None:
        """What a stack's layers do between the modules we know, one thing after the other."""
        mark, changed, seat = self.journal.mark(), False, self.record.seats[stack.owner]
        for layer in stack.layers:
            self.journal.change(layer, "stretto_inside", tuple(m for m in layer.modules() if m is not layer))
            self.journal.swap(layer, FusedLayer)
        self.journal.change(seat, "layers", stack.layers)
        for role, change in (
            ("rotary", self._swap_rotary),
            ("projections", self._swap_projections),
            ("residual", self._swap_sums),
        ):
            there, problem = attempt(self.journal, partial(change, stack, unit), partial(self._check, unit))
            if there:
                self.done.append(Site(stack.name, role, stack.owner, problem=problem))
            changed |= there and problem is None
        if not changed:
            self.journal.undo(mark)

    def _learn(self, unit: _Unit) -> None:
        """One pass in fp32, for those who listen."""
        self._run(unit.model, unit.inputs, unit.labels, exact=True)

    def _swap_rotary(self, stack: Stack, unit: _Unit) -> bool:
        attentions: list[Any] = [module for module in stack.layers.modules() if calls_attention_interface(module)]
        rotated = [module for module in attentions if rotated_forward(original(type(module))) is not None]
        for attention in rotated:
            self.journal.swap(attention, Rotated)
        return bool(rotated)

    def _swap_projections(self, stack: Stack, unit: _Unit) -> bool:
        """Linear layers of an attention module that are given one input."""
        attentions = [module for module in stack.layers.modules() if calls_attention_interface(module)]
        calls: dict[nn.Module, list[tuple[str, nn.Module, Tensor]]] = {module: [] for module in attentions}
        hooks = []
        for attention in attentions:
            for name, child in attention.named_children():
                if type(child) is nn.Linear and not is_touched(child):
                    note = partial(_note_call, calls[attention], name)
                    hooks.append(child.register_forward_pre_hook(note))
        try:
            self._learn(unit)
        finally:
            for hook in hooks:
                hook.remove()
        found = False
        for layer, stand_in in _stand_ins(stack):
            for name, attention in layer.named_modules():
                groups = find_groups(calls.get(stand_in.get_submodule(name), []))[:1]
                found |= bool(groups)
                for together in groups:
                    self.journal.swap(attention, FusedAttention, Parts(linears=together))
                    for each in together:
                        self.journal.swap(attention.get_submodule(each), FusedProjection)
        return found

    def _swap_sums(self, stack: Stack, unit: _Unit) -> bool:
        """Every linear layer and activation that stands alone, and every MLP, leaves its last steps to what follows,
        but those of which nothing does more than read them."""
        mark = self.journal.mark()
        chosen = [module for layer in stack.layers for module in _loose_modules(layer)]
        for module in chosen:
            self._defer(module)
        with note_useful() as useful:
            self._learn(unit)
        self.journal.undo(mark)
        pairs = [
            (module, stand_in.get_submodule(name))
            for layer, stand_in in _stand_ins(stack)
            for name, module in layer.named_modules()
        ]
        used = [module for module, stand_in in pairs if module in chosen and stand_in in useful]
        for module in used:
            self._defer(module)
        return bool(used)

    def _defer(self, module: nn.Module) -> None:
        if isinstance(module, FusedMLP | FusedGatedMLP):
            kind: Any = type(module)
            ours, theirs, parts = kind.made_of
            self.journal.change(module, "__class__", mix(ours, theirs, replace(parts, defers=True)))
        elif type(module) in (nn.Linear, Conv1D):
            self.journal.swap(module, FusedLinear)
        else:
            self.journal.swap(module, FusedActivation, Parts(activation=find_activation(module)))

    def _swap_stacks(self, units: dict[Any, _Unit | str]) -> None:
        """Stacks that can run without padding; then, for each model around them, the batches for which it may."""
        if not self.chained:
            missing = "no stack of layers with attention by transformers' AttentionInterface"
            self.done.append(Site("", "padding", self.model, problem=missing))
        problems: dict[Stack, str | None] = {}
        for stack in self.chained:
            problem = stack.problem
            if "input_ids" not in argument_names(stack.owner):
                problem = "it reads no tokens: there is no padding"
            elif stack.attention.config._attn_implementation != NAME:  # type: ignore[union-attr]
                problem = "its attention was not replaced"
            if problem is None:
                change = partial(self._give_packing, stack)
                _, problem = attempt(self.journal, change, partial(self._check, units[stack.owner], trial=True))
            problems[stack] = problem
        packed = [stack for stack, problem in problems.items() if problem is None]
        for m, inside in self._outermost_models():
            mine = [stack for stack in packed if stack.owner in inside]
            tried = self._try_padding(m, mine) if mine else UNTRIED
            self.record.seats[m].tried = tried
            for stack in (stack for stack in self.chained if stack.owner in inside):
                problem = problems[stack]
                if problem is None and not tried.kinds and not self.packed:
                    problem = "the model around it gives other results without padding"
                remark = _remark(tried, mine)
                self.done.append(Site(stack.name, "padding", stack.owner, problem=problem, remark=remark))
        if self.packed and not any(stack.causal for stack in packed):
            why = "; ".join(str(site.problem) for site in self.done if site.role == "padding" and site.problem)
            name = type(self.model).__name__
            raise ValueError(f"{name} cannot keep packed documents apart: {why or 'it is not a decoder'}")

    def _outermost_models(self) -> Iterator[tuple[PreTrainedModel, set[nn.Module]]]:
        """Those that are not a part of another: they are what is called. With each, the modules in it."""
        seen: set[nn.Module] = set()
        for m in self.models:
            if m not in seen:
                inside = set(m.modules())
                seen |= inside
                yield m, inside

    def _give_packing(self, stack: Stack) -> bool:
        for module in stack.layers.modules() if stack.relative else ():
            if isinstance(getattr(module, "has_relative_attention_bias", None), bool) and hasattr(module, "n_heads"):
                self.journal.swap(module, DistanceBias)
        for layer in stack.layers:
            self.journal.swap(layer, PackedLayer)
        self.journal.change(self.record.seats[stack.owner], "stack", stack)
        return True

    def _try_padding(self, model: PreTrainedModel, packed: list[Stack]) -> Tried:
        """The kinds of batch with which a model gives the same results without padding."""
        kinds: set[tuple[str, str]] = set()
        names: set[str] = set()
        labels, windows = None, [window for stack in packed for window in stack.windows]
        for form, sorts in (("ids", IDS), ("embeds", ("none",)), ("positions", ("positions",))):
            groups = [[(side, sort) for side in _sides(packed) for sort in sorts]]
            while groups:  # all kinds at once; where that fails, one side after the other, and then each by itself
                some = groups.pop()
                tried = self._try_batch(model, some, form, labels, min([LENGTH, *windows]))
                if tried is not None:
                    labels, given = tried
                    kinds |= set(some)
                    names |= given
                elif len(some) > 1:
                    sides = dict.fromkeys(side for side, _ in some)
                    parts = [[kind for kind in some if kind[0] == side] for side in sides]
                    groups += parts if len(parts) > 1 else [[kind] for kind in some]
        names |= {"decoder_input_ids", "decoder_attention_mask"} if "decoder_attention_mask" in names else set()
        return Tried(frozenset(kinds), frozenset(names), labels or "", wanted_outputs(model, {}))

    def _try_batch(
        self, model: PreTrainedModel, some: list[tuple[str, str]], form: str, labels: str | None, length: int
    ) -> tuple[str, set[str]] | None:
        """The kind of labels and the arguments of a batch that gave the same results; None: none did."""
        try:
            sides, sorts = (list(dict.fromkeys(each)) for each in zip(*some, strict=True))
            batch = draw_padded(model, sides, sorts, form, length)
            for sort, inputs in with_labels(model, batch) if batch is not None else ():
                if labels is not None and sort != labels:
                    continue
                same = self._compare_padding(model, inputs, sort)
                if same is not None:
                    return (sort, set(inputs)) if same else None
        except Exception as error:
            log.debug("%s cannot be tried with padding: %s", type(model).__name__, error)
        return None

    def _compare_padding(self, model: PreTrainedModel, inputs: Batch, labels: str) -> bool | None:
        """Whether a batch gives the same results without its padding; None where the model does not take it."""
        results = []
        with self.stage.set_up():
            for trial in (False, True):
                call = Call(None, None, rectangle=not trial, lazy=False, trial=trial)
                set_call(call)
                try:
                    results.append(run(model, inputs, None, _masks(inputs), scores=labels == "tokens"))
                except Exception as error:
                    log.debug("%s, %s: %s", type(model).__name__, sorted(inputs), error)
                    return False if trial else None
                finally:
                    set_call(None)
        return call.ran_packed and find_difference(results[1], results[0]) is None

    def _swap_head(self, model: PreTrainedModel, unit: _Unit | str) -> None:
        """The output layer of a language model, and the module around it that begins with hidden states."""
        path = _find_head(model)
        assert path is not None
        outer, _, rest = path.partition(".")
        head = model.get_submodule(outer)

        def change() -> bool:
            self.journal.swap(model.get_submodule(path), LazyHead, Parts(linears=("",)))
            if rest and not isinstance(head, PreTrainedModel) and len(argument_names(head)) == 1:
                self.journal.swap(head, LazyHead, Parts(linears=(rest,)))
            return True

        def check() -> str | None:
            with note_computed() as computed:
                problem = self._check(unit, lazy=True)
            return problem or ("its logits are changed before the loss, and so computed" if computed else None)

        if type(model.get_submodule(path)) is nn.Linear:
            _, problem = attempt(self.journal, change, check)
            self.done.append(Site(f"{self.models[model]}.{outer}".lstrip("."), "loss", head, problem=problem))


def _find_head(model: PreTrainedModel) -> str | None:
    """The path of the output layer of a model that computes a loss."""
    if "labels" not in argument_names(model):
        return None
    try:
        output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    except Exception:
        return None
    if output is None:
        return None
    return next((name for name, module in model.named_modules() if module is output), None)


def _catch(draw: Callable[..., Iterator[Batch]], *args: Any) -> Iterator[Batch | str]:
    """The batches as long as they can be drawn; then why they cannot."""
    try:
        yield from draw(*args)
    except Exception as error:
        yield f"it cannot be tried: {describe(error)}"


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _masks(inputs: Batch) -> list[Tensor]:
    return [inputs[name] for name in ("attention_mask", "decoder_attention_mask") if name in inputs]


def _ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    while name:
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def _note_call(calls: list[tuple[str, nn.Module, Tensor]], name: str, child: nn.Module, args: tuple[Tensor]) -> None:
    calls.append((name, child, args[0]))


def _stand_ins(stack: Stack) -> list[tuple[nn.Module, nn.Module]]:
    """Each layer, and the one of its kind that was on the stage."""
    numbers, _ = find_stand_ins(stack.layers)
    return [(layer, stack.layers[number]) for layer, number in zip(stack.layers, numbers, strict=True)]


def _loose_modules(layer: nn.Module) -> list[nn.Module]:
    """Linear layers, activations and MLPs that are not a part of something that we know."""
    known = {part for module in layer.modules() if isinstance(module, Fused) for part in module.children()}
    loose = [module for module in layer.modules() if module not in known]
    dense = [m for m in loose if isinstance(m, FusedMLP | FusedGatedMLP) or type(m) in (nn.Linear, Conv1D)]
    return dense + [m for m in loose if is_activation(m) and find_activation(m) is not None]


def _sides(packed: list[Stack]) -> list[str]:
    """The kinds of padding that these stacks may run without (packing.py)."""
    hidden = {"empty"} if any(stack.owner.config.is_encoder_decoder for stack in packed) else set()
    hidden |= {"holes"} if any(stack.relative for stack in packed) else set()
    return [side for side in SIDES if side not in hidden]


def _remark(tried: Tried, packed: list[Stack]) -> str:
    """What keeps its padding although other batches do not."""
    words = {"right": "at the end of rows", "left": "at the beginning of rows", "holes": "between tokens"}
    gone = {side for side, _ in tried.kinds}
    kept = [words[side] for side in _sides(packed) if side in words and side not in gone]
    return f"; padding {' or '.join(kept)} stays" if kept else ""


def _summarise(done: list[Site]) -> Report:
    counts: dict[tuple[str, str, str | None, str], int] = {}
    for site in done:
        key = re.sub(r"\.\d+(?=\.|$)", ".#", site.name), site.role, site.problem, site.remark
        counts[key] = counts.get(key, 0) + 1
    return Report(tuple(Line(*what[:2], count, *what[2:]) for what, count in counts.items()))
