"""accelerate, restore, report and set_step, and all exchanges of a model in their order (`Exchanges.make_all`).

No exchange is taken on trust. A module by itself, a stack of layers with each thing that is changed in it, the output
layer with its loss are run before and after (trial.py), and what gives another result, or cannot be run, is left as it
was; the report says why. So a future release of transformers can make an acceleration disappear, but not a result
wrong. Whatever else goes wrong, all changes are undone.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stretto.hf import find, modules, unpad
from stretto.hf.defer import UNTRIED, Call, Request, Tried, calling
from stretto.hf.find import NAME, Site, Stack, argument_names, find_activation, find_owners
from stretto.hf.modules import Parts, is_touched
from stretto.hf.techniques import Gate, Giving, Handles, Keeping, SwitchedLayer
from stretto.hf.trial import (
    ROUGH,
    Journal,
    Result,
    Stage,
    Unit,
    checked_indices,
    find_difference,
    find_stand_ins,
    judge_kinds,
    kind_of,
)
from stretto.hf.unpad import Outside, Seat
from stretto.ops.products import Product
from stretto.techniques import Techniques, open_outside
from stretto.techniques.foreign import Layer
from stretto.techniques.technique import Context

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Line:
    names: str  # name of modules that differ by the number of their layer only, for which # stands
    role: str
    count: int
    problem: str | None  # reason why they stay as they are
    remark: str = ""  # exceptions, where they do not


@dataclass(frozen=True)
class Report:
    """What was accelerated, and what was not, and why."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        rows = [("role", "modules", "", "")]
        for line in self.lines:
            rows.append(
                (line.role, line.names or "(the model)", f"x {line.count}", line.problem or "yes" + line.remark)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows)


@dataclass
class Record:
    """What restore and the steps of a run need."""

    report: Report = field(default_factory=lambda: Report(()))
    journal: Journal = field(default_factory=Journal)
    seats: dict[PreTrainedModel, Seat] = field(default_factory=dict)  # one for every PreTrainedModel
    techniques: Techniques = field(default_factory=Techniques)
    gates: dict[str, dict[nn.Module, Gate]] = field(default_factory=dict)  # gates of layers, by the name of the stack
    step: int | None = None  # number of the update that runs, where that was said


def accelerate(
    model: Model,
    unpad: bool = True,
    loss: bool = True,
    packed: bool = False,
    steps: int = 0,
    seed: int = 0,
    **techniques: Any,
) -> Model:
    """The same model, faster: the same object, with the same parameters, names and results up to rounding.

    unpad   layers run on the tokens that attention_mask keeps; outputs at padding are zero
    loss    in training with labels, the loss is computed without logits; those in the output are computed when used
    packed  rows hold several documents: a training batch that does not say where they end is an error
    steps   number of updates of the run, for schedules of techniques
    seed    seed for random choices of techniques

    Techniques (stretto/techniques) are given by name: True, False, or the options of their section in config.py. Exact
    ones are on unless they are False; those that change the mathematics of training are off.

    `restore` undoes it, `report` tells what was found. To be called before the model is compiled or wrapped.
    """
    _check(model)
    context = Context(None, next(model.parameters()).device, "fp32", seed=seed, steps=steps)
    chosen, handles = open_outside(techniques, context), Handles(model, find.find_stacks(model))
    try:
        with checked_indices(model):
            for technique in reversed(tuple(chosen)):  # layers are tried before norms are replaced
                technique.attach(handles)
            exchanges = Exchanges(handles, Seat(unpad, loss, packed))
            exchanges.make_all()
            handles.tell_tokens()
    except BaseException:
        handles.journal.undo_all()
        raise
    record = Record(_summarise(handles.done), handles.journal, exchanges.seats, chosen, handles.gates)
    model._stretto = record  # type: ignore[assignment]
    log.info("%s\n%s", type(model).__name__, record.report)
    return model


def restore(model: Model) -> Model:
    """Undoes `accelerate`: the classes and the attention that were there before."""
    _record(model).journal.undo_all()
    for module in model.modules():
        vars(module).pop("_stretto", None)  # it may be inside of an adapter's model
    return model


def report(model: nn.Module) -> Report:
    return _find_record(model).report


def set_step(
    model: nn.Module, step: int, share: float = 1.0, steps: int = 0, scaler: torch.amp.GradScaler | None = None
) -> None:
    """To be called before each update, with its number, counted from 0, where techniques depend on it.
    `Step` and `Trainer` do so themselves. The model may be wrapped.

    share   share of the update that a batch is: 1 over the number of batches whose gradients are added up
    steps   number of updates, if `accelerate` was not told
    scaler  scaler of the loss, in fp16
    """
    record = _find_record(model)
    techniques, known = record.techniques, {"steps": steps} if steps else {}
    if record.step is not None:
        techniques.end(record.step)
        for note in techniques.take_notes():
            log.warning("%s", note)
    record.step = step
    techniques.set_context(device=next(model.parameters()).device, **known)
    techniques.begin(step, share, scaler)


def techniques_of(model: nn.Module) -> Techniques:
    return _find_record(model).techniques if is_accelerated(model) else Techniques()


def gates_of(model: nn.Module) -> dict[str, dict[nn.Module, Gate]]:
    """The gates of layers that may be left out, by the name of their stack."""
    return _find_record(model).gates if is_accelerated(model) else {}


def outermost(model: nn.Module) -> tuple[PreTrainedModel, Tried]:
    """The PreTrainedModel that is called when the model is, and the batches that it was tried with."""
    for module, seat in _find_record(model).seats.items():
        return module, seat.tried
    raise ValueError(f"there is no PreTrainedModel in this {type(model).__name__}")


def is_accelerated(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is accelerated."""
    return any(hasattr(module, "_stretto") for module in model.modules())


def _find_record(model: nn.Module) -> Record:
    """The record of a model, or of the part of it that is accelerated."""
    return _record(next((module for module in model.modules() if hasattr(module, "_stretto")), model))


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
        if parameter.is_cuda and parameter.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{parameter_name} is on {parameter.device}, and kernels are launched on the current device, which is"
                f" cuda:{torch.cuda.current_device()}: call torch.cuda.set_device({parameter.device.index}) before, and"
                " keep the model on one GPU"
            )
        if not parameter.is_floating_point() or type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{parameter_name} is {type(parameter).__name__} {parameter.dtype}; accelerate works on plain "
                "parameters in floating point, before a model is quantised or sharded"
            )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"this {name} is quantised: accelerate works on models in floating point")


def _summarise(done: list[Site]) -> Report:
    counts = Counter((re.sub(r"\.\d+(?=\.|$)", ".#", site.name), site.role, site.problem, site.remark) for site in done)
    return Report(tuple(Line(name, role, n, problem, remark) for (name, role, problem, remark), n in counts.items()))


class Exchanges:
    """What is exchanged in a model; `journal` can undo it, `done` says what became of each site."""

    def __init__(self, handles: Handles, options: Seat) -> None:
        self.handles, self.options = handles, options
        self.model, self.stacks, self.journal, self.done = handles.model, handles.stacks, handles.journal, handles.done
        self.models = {m: name for name, m in self.model.named_modules() if isinstance(m, PreTrainedModel)}
        self.inside = {m: set(m.modules()) for m in self.models}
        self.seats = {m: replace(options, around=self._find_around(m), kin=frozenset(self.models)) for m in self.models}
        self.stage = Stage(self.model, [stack.layers for stack in self.stacks])
        self.lazy_heads: list[nn.Module] = []  # output layers whose logits wait for the loss

    def _find_around(self, model: PreTrainedModel) -> frozenset[PreTrainedModel]:
        return frozenset(other for other, inside in self.inside.items() if other is not model and model in inside)

    def make_all(self) -> None:
        kernels = self.handles.kernels
        found = find.find_sites(self.model) if kernels else []
        units: dict[Any, Unit | str] = {each.owner: self._run_owner(each.owner, each.crosses) for each in self.stacks}
        attentions = self._find_attentions(found)
        units |= {owner: self._run_owner(owner) for owner in attentions if owner not in units}
        heads = {m: path for m in self.models if self.options.loss and (path := _find_head(m)) is not None}
        losses = {m: self._run_head(m) for m in heads}
        self._add_hooks(units)
        self._swap_sites(found, [*units.values(), *losses.values()])
        self._swap_attention(attentions, units)
        for stack in self.stacks if kernels else ():
            unit = units[stack.owner]
            if isinstance(unit, Unit):
                self._swap_layers(stack, unit)
        for layer, gate in self.handles.all_gates():
            gate.factor = 1.0  # all layers work while things are tried
            self.journal.change(layer, "stretto_gate", gate)
            self.journal.swap(layer, SwitchedLayer)
        if self.options.unpad or self.options.packed:
            self._swap_stacks(units)
        for m, path in heads.items():
            self._swap_head(m, path, losses[m])
        if self.handles.keeping is not None:
            self._keep_less(self.handles.keeping, [*units.values(), *losses.values()])
        if self.handles.giving is not None:
            self._give_products(self.handles.giving, [*units.values(), *losses.values()])
        for _, gate in self.handles.all_gates():
            gate.factor = None  # from now on each update has to say

    # Before anything is changed

    def _find_attentions(self, found: list[Site]) -> dict[PreTrainedModel, list[Site]]:
        """Attention that goes through transformers' interface, by the innermost model around it."""
        groups: dict[PreTrainedModel, list[Site]] = {}
        for site in found:
            owner = next(find_owners(self.model, site.name), None) if site.role == "attention" else None
            if owner is not None:
                groups.setdefault(owner[1], []).append(site)
        return groups

    def _run_owner(self, owner: PreTrainedModel, crosses: bool = False) -> Unit | str:
        batches = (("", inputs) for inputs in find.draw_stack_batches(owner, crosses))
        return self.stage.run_untouched(owner, batches, "it reads neither tokens nor images nor hidden states")

    def _run_head(self, model: PreTrainedModel) -> Unit | str:
        labelled = (each for each in find.draw_labelled(model) if each[0] == "tokens")
        return self.stage.run_untouched(model, labelled, "it reads no tokens")

    def _add_hooks(self, units: dict[Any, Unit | str]) -> None:
        """Every PreTrainedModel tells its inside what it is called for."""
        unpad.register()
        for owner, unit in units.items():
            if isinstance(unit, Unit) and "use_cache" in unit.inputs:
                for m in (owner, *self.seats[owner].around):
                    self.seats[m].works_without_cache = True
        for m, seat in self.seats.items():
            enter = partial(unpad.enter, seat=seat)
            self.journal.hooks.append(m.register_forward_pre_hook(enter, with_kwargs=True))
            self.journal.hooks.append(m.register_forward_hook(unpad.leave, always_call=True))

    # Modules by themselves

    def _swap_sites(self, found: list[Site], units: Sequence[Unit | str]) -> None:
        """Exchanges modules with parameters of their own: each kind is tried by itself, and then all of them at once
        where they are. If that gives another result, each kind is tried where it is."""
        ordered = sorted((site for site in found if site.ours is not None), key=lambda site: site.name.count("."))
        kinds, problems = [kind_of(site) for site in ordered], judge_kinds(ordered)
        inside: set[int] = set()

        def change(chosen: Sequence[Any]) -> None:
            inside.clear()
            for site, kind in zip(ordered, kinds, strict=True):  # the whole before its parts
                if kind in chosen and id(site.module) not in inside:
                    self.journal.swap(site.module, site.ours, site.parts)  # type: ignore[arg-type]
                    used = (*site.parts.linears, site.parts.norm)
                    inside.update(id(site.module.get_submodule(name)) for name in used if name)

        def check() -> str | None:
            return next((p for unit in units if isinstance(unit, Unit) and (p := self._compare(unit))), None)

        good = [kind for kind, problem in problems.items() if problem is None]
        if self.journal.attempt(partial(change, good), check)[1]:
            for kind in good:
                mark = self.journal.mark()
                problems[kind] = self.journal.attempt(partial(change, [kind]), check)[1]
                self.journal.undo(mark)
            change([kind for kind in good if problems[kind] is None])
        for site, kind in zip(ordered, kinds, strict=True):
            if id(site.module) not in inside:
                self.done.append(replace(site, problem=problems[kind]))

    def _compare(self, unit: Unit | str) -> str | None:
        return self.stage.check(unit, Call(rectangle=True))

    # Attention

    def _swap_attention(self, groups: dict[PreTrainedModel, list[Site]], units: dict[Any, Unit | str]) -> None:
        """Exchanges torch's attention: other kinds may know more than ours. A choice holds for all that share a
        configuration, and for the models around it, which build the masks: one that fails keeps it from all of them."""
        problems: dict[PreTrainedModel, str | None] = {}
        configs: dict[PreTrainedModel, list[Any]] = {}
        for owner, group in groups.items():
            configs[owner] = [getattr(site.module, "config", None) for site in group]
            names = {getattr(config, "_attn_implementation", None) for config in configs[owner]}
            problems[owner] = None
            if names != {"sdpa"}:
                problems[owner] = f"its attention is {next(iter(names - {'sdpa'}))!r}: only 'sdpa' is replaced"
                continue
            configs[owner] += [m.config for m in (owner, *(m for _, m in find_owners(self.model, self.models[owner])))]
            mark = self.journal.mark()
            choose, check = partial(self._choose, configs[owner]), partial(self._compare, units[owner])
            _, problems[owner] = self.journal.attempt(choose, check)
            self.journal.undo(mark)
        failed = {id(c) for owner, problem in problems.items() if problem for c in configs[owner][: len(groups[owner])]}
        for owner, group in groups.items():
            if problems[owner] is None and any(id(config) in failed for config in configs[owner]):
                problems[owner] = "it shares its configuration with attention that cannot be replaced"
            if problems[owner] is None:
                self._choose(configs[owner])
            self.done += [replace(site, problem=problems[owner]) for site in group]

    def _choose(self, configs: list[Any]) -> None:
        for config in configs:
            if config._attn_implementation != NAME:
                self.journal.change(config, "_attn_implementation_internal", NAME)

    # Layers

    def _swap_layers(self, stack: Stack, unit: Unit) -> None:
        """Exchanges what layers do between the modules that are known by now, one thing after the other."""
        mark, changed, seat = self.journal.mark(), False, self.seats[stack.owner]
        for layer in stack.layers:
            self.journal.change(layer, "stretto_inside", tuple(m for m in layer.modules() if m is not layer))
            self.journal.swap(layer, modules.DeferringLayer)
        self.journal.change(seat, "layers", stack.layers)
        passes: dict[str, Callable[[Stack, Unit], bool]] = {
            "rotary": self._swap_rotary, "projections": self._swap_projections, "residual": self._swap_sums,
        }  # fmt: skip
        for role, change in passes.items():
            there, problem = self.journal.attempt(partial(change, stack, unit), partial(self._compare, unit))
            if there:
                self.done.append(Site(stack.name, role, stack.owner, problem=problem))
            changed |= there and problem is None
        if not changed:
            self.journal.undo(mark)

    def _swap_rotary(self, stack: Stack, unit: Unit) -> bool:
        rotated = [m for m in _find_attention(stack) if modules.rotated_forward(modules.original(type(m))) is not None]
        for attention in rotated:
            self.journal.swap(attention, modules.Rotated)
        return bool(rotated)

    def _swap_projections(self, stack: Stack, unit: Unit) -> bool:
        """Joins linear layers of an attention module that are given one input."""
        calls: dict[nn.Module, list[tuple[str, nn.Module, Tensor]]] = {m: [] for m in _find_attention(stack)}
        with ExitStack() as hooks:
            for attention, noted in calls.items():
                for name, child in attention.named_children():
                    if type(child) is nn.Linear and not is_touched(child):
                        hooks.enter_context(child.register_forward_pre_hook(partial(_note_call, noted, name)))
            self.stage.run(unit.module, unit.inputs)
        groups = {module: group for module, noted in calls.items() if (group := find_group(noted))}
        for attention, stand_in in _pair_with_stand_ins(stack):
            if stand_in in groups:
                self.journal.swap(attention, modules.JoiningAttention, Parts(linears=groups[stand_in]))
                for name in groups[stand_in]:
                    self.journal.swap(attention.get_submodule(name), modules.JoinedProjection)
        return bool(groups)

    def _swap_sums(self, stack: Stack, unit: Unit) -> bool:
        """Linear layers and activations that stand alone, and MLPs, leave their last steps to what follows, if that
        does more than read the result."""
        mark = self.journal.mark()
        chosen = [module for layer in stack.layers for module in _find_loose(layer)]
        for module in chosen:
            self._defer(module)
        useful: set[nn.Module] = set()
        with calling(Call(rectangle=True, request=Request(useful=useful))):
            self.stage.run(unit.module, unit.inputs)
        self.journal.undo(mark)
        used = [m for m, stand_in in _pair_with_stand_ins(stack) if m in chosen and stand_in in useful]
        for module in used:
            self._defer(module)
        return bool(used)

    def _defer(self, module: nn.Module) -> None:
        if isinstance(module, modules.WholeMLP):
            kind: Any = type(module)
            ours, theirs, parts = kind.made_of
            self.journal.change(module, "__class__", modules.mix(ours, theirs, replace(parts, defers=True)))
        elif type(module) in (nn.Linear, Conv1D):
            self.journal.swap(module, modules.DeferringLinear)
        else:
            self.journal.swap(module, modules.DeferringActivation, Parts(activation=find_activation(module) or ""))

    # Padding

    def _swap_stacks(self, units: dict[Any, Unit | str]) -> None:
        """Prepares stacks to run without padding; then finds, for each model around them, the batches for which they
        may."""
        if not self.stacks:
            missing = "no stack of layers with attention by transformers' AttentionInterface"
            self.done.append(Site("", "padding", self.model, problem=missing))
        problems = {stack: self._prepare_stack(stack, units[stack.owner]) for stack in self.stacks}
        ready = [stack for stack, problem in problems.items() if problem is None]
        layers = {module for stack in self.stacks for module in stack.inside}
        for m, inside in ((m, inside) for m, inside in self.inside.items() if not self.seats[m].around):
            mine = [stack for stack in ready if stack.owner in inside]
            tried = unpad.PaddingTrial(self.stage, m, mine, self.model).run() if mine else UNTRIED
            self.seats[m].tried = tried
            self.seats[m].outside = tuple(map(Outside, inside - layers))
            for stack in (stack for stack in self.stacks if stack.owner in inside):
                problem = problems[stack]
                if problem is None and not tried.kinds and not self.options.packed:
                    problem = "the model around it gives other results without padding"
                remark = unpad.describe_kept(tried, mine)
                self.done.append(Site(stack.name, "padding", stack.owner, problem=problem, remark=remark))
        if self.options.packed and not any(stack.causal for stack in ready):
            why = "; ".join(str(site.problem) for site in self.done if site.role == "padding" and site.problem)
            name = type(self.model).__name__
            raise ValueError(f"{name} cannot keep packed documents apart: {why or 'it is not a decoder'}")

    def _prepare_stack(self, stack: Stack, unit: Unit | str) -> str | None:
        if "input_ids" not in argument_names(stack.owner):
            return "it reads no tokens: there is no padding"
        if stack.attention.config._attn_implementation != NAME:  # type: ignore[union-attr]
            return "its attention was not replaced"
        if stack.problem:
            return stack.problem

        def change() -> None:
            for module in stack.layers.modules() if stack.relative else ():
                flag = getattr(module, "has_relative_attention_bias", None)
                if isinstance(flag, bool) and hasattr(module, "n_heads"):
                    self.journal.swap(module, unpad.DistanceBias)
            for layer in stack.layers:
                self.journal.swap(layer, unpad.PackedLayer)
            self.journal.change(self.seats[stack.owner], "stack", stack)

        return self.journal.attempt(change, lambda: self.stage.check(unit, Call(request=Request(trial=True))))[1]

    # The loss

    def _swap_head(self, model: PreTrainedModel, path: str, unit: Unit | str) -> None:
        """Exchanges the output layer of a language model, and the module around it that begins with hidden states."""
        outer, _, rest = path.partition(".")
        head = model.get_submodule(outer)

        def change() -> None:
            self.journal.swap(model.get_submodule(path), modules.LazyHead, Parts(linears=("",)))
            if rest and not isinstance(head, PreTrainedModel) and len(argument_names(head)) == 1:
                self.journal.swap(head, modules.LazyHead, Parts(linears=(rest,)))

        def check() -> str | None:
            request = Request()
            problem = self.stage.check(unit, Call(rectangle=True, lazy=True, request=request))
            computed = "its logits are changed before the loss, and so computed" if request.computed_logits else None
            return problem or computed

        if type(model.get_submodule(path)) is nn.Linear:
            _, problem = self.journal.attempt(change, check)
            self.lazy_heads += [model.get_submodule(path)] if problem is None else []
            self.done.append(Site(f"{self.models[model]}.{outer}".lstrip("."), "loss", head, problem=problem))

    # What is kept

    def _keep_less(self, keeping: Keeping, units: Sequence[Unit | str]) -> None:
        """After all other trials, whose bound is too tight for it: an activation's slope is coded, and a norm's weight
        that noise has brought near 0 loses its gradient on the stage. What this trial finds is a model that writes into
        a tensor that is now kept."""

        def check() -> str | None:
            some = (unit for unit in units if isinstance(unit, Unit))
            return next((p for unit in some if (p := self.stage.check(unit, Call(rectangle=True), ROUGH))), None)

        _, problem = self.journal.attempt(partial(keeping.tell_modules, self.model, self.journal), check)
        if problem:
            keeping.tell({})
        self.done.append(Site("", "kept", self.model, problem=problem, remark=", less than before"))

    # Products

    def _give_products(self, giving: Giving, units: Sequence[Unit | str]) -> None:
        """Behind everything else: what was exchanged asks, and so do linear layers that stayed as they were."""
        names, stayed = {module: name for name, module in self.model.named_modules()}, set[nn.Module]()
        layers = {names[head]: Layer((head,), False, "head") for head in self.lazy_heads}
        for stack in self.stacks:
            for layer in stack.layers:
                groups = [group for module in layer.modules() for group in modules.find_layers(module)]
                known = {module for group in groups for module in group}
                loose = [m for m in layer.modules() if m not in known and type(m) in (nn.Linear, Conv1D)]
                stayed.update(loose)
                for group in (*groups, *((module,) for module in loose)):
                    at_end = layer in (stack.layers[0], stack.layers[-1])
                    layers[names[group[0]]] = Layer(group, isinstance(group[0], Conv1D), "end" if at_end else "inside")

        def give(products: Mapping[str, Product | str]) -> None:
            for name, product in products.items():
                for module in layers[name].modules if isinstance(product, Product) else ():
                    self.journal.lend(module, "product", product)
                    if module in stayed:
                        self.journal.swap(module, modules.AskingLinear)

        def run() -> list[Result]:
            some = (unit for unit in units if isinstance(unit, Unit))
            with calling(Call(rectangle=True, lazy=True)):
                return [self.stage.run(unit.module, unit.inputs, unit.labels, training=True) for unit in some]

        def check() -> str | None:
            problems = (find_difference(found, plain) for found, plain in zip(run(), before, strict=True))
            return next(filter(None, problems), None)

        before, mark = run(), self.journal.mark()
        _, problem = self.journal.attempt(partial(give, dict.fromkeys(layers, Product())), check)
        self.journal.undo(mark)
        chosen = dict.fromkeys(layers, problem) if problem else giving.choose(layers)
        give(chosen)
        for name, product in chosen.items():
            why = product if isinstance(product, str) else None
            self.done.append(Site(name, giving.name, layers[name].modules[0], problem=why))


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


def _find_attention(stack: Stack) -> list[nn.Module]:
    return [module for module in stack.layers.modules() if find.calls_attention_interface(module)]


def _find_loose(layer: nn.Module) -> list[nn.Module]:
    """Linear layers, activations and MLPs that are not a part of a recognised module."""
    known = {part for module in layer.modules() if isinstance(module, modules.Recognised) for part in module.children()}
    loose = [module for module in layer.modules() if module not in known]
    dense = [m for m in loose if isinstance(m, modules.WholeMLP) or type(m) in (nn.Linear, Conv1D)]
    return dense + [m for m in loose if find.is_activation(m) and find_activation(m) is not None]


def _pair_with_stand_ins(stack: Stack) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module of the layers, and its counterpart in a layer of the same kind that is on the stage."""
    numbers, _ = find_stand_ins(stack.layers)
    for layer, number in zip(stack.layers, numbers, strict=True):
        for name, module in layer.named_modules():
            yield module, stack.layers[number].get_submodule(name)


def _note_call(calls: list[tuple[str, nn.Module, Tensor]], name: str, child: nn.Module, args: tuple[Tensor]) -> None:
    calls.append((name, child, args[0]))


def find_group(calls: list[tuple[str, nn.Module, Tensor]]) -> tuple[str, ...] | None:
    """The first linear layers of an attention module that were given one tensor, all with a bias or all without."""
    groups: dict[tuple[int, bool], list[str]] = {}
    for name, layer, x in calls:
        groups.setdefault((id(x), layer.bias is None), []).append(name)
    found = (tuple(names) for names in groups.values() if len(names) > 1 and len(set(names)) == len(names))
    return next(found, None)
