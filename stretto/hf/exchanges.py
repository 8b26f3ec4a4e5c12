"""All exchanges of one model, each tried before it stays.

A module by itself, a stack of layers with each thing that is changed in it, the output layer with its loss are run
before and after (trial.py), and what gives another result, or cannot be run, is left as it was; the report says why.
Whether the model around a stack reads padding is found out by padding.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stretto.hf.attention import DistanceBias, register
from stretto.hf.call import UNTRIED, Call, set_call
from stretto.hf.draw import draw_padded, draw_stack_batches, masks_of, with_labels
from stretto.hf.journal import Journal, mix, original
from stretto.hf.layer_drop import Dropping, SwitchedLayer
from stretto.hf.layers import (
    Fused,
    FusedActivation,
    FusedGatedMLP,
    FusedLayer,
    FusedLinear,
    FusedMLP,
    Parts,
    is_touched,
    weight_of,
)
from stretto.hf.loss import LazyHead, note_computed
from stretto.hf.packing import Outside, PackedLayer, Seat, argument_names, enter, leave
from stretto.hf.padding import describe_kept, try_padding
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
)
from stretto.hf.trial import (
    Batch,
    Result,
    Stage,
    attempt,
    describe,
    disguised_copy,
    find_difference,
    find_loss_of_precision,
    find_stand_ins,
    in_precision_of,
    is_half,
    run,
)

log = logging.getLogger(__name__)


def kind_of(site: Site) -> Any:
    """Modules of one kind compute the same function of their parameters: one of them is tried."""
    plain = tuple((name, value) for name, value in vars(site.module).items() if isinstance(value, str | int | float))
    types = tuple(p.dtype for p in site.module.parameters())
    return type(site.module), site.parts, repr(site.module), tuple(p for p in plain if p[0] != "training"), types


def compare(site: Site) -> str | None:
    """Why the fused module must not take the place of the plain one."""
    assert site.fused is not None and issubclass(site.fused, Fused)
    if any(is_touched(child) for child in site.module.children()):
        return "its children have hooks"
    try:
        exact = _compare_copies(site, exact=True)
        half = any(map(is_half, site.module.parameters()))
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


@dataclass(frozen=True)
class Unit:
    """A model that was run untouched, and what it gave."""

    model: PreTrainedModel
    inputs: Batch
    labels: str  # of what they are, if there are any
    exact: Result
    own: Result | None  # in 16 bits, if it has such weights


class Exchanges:
    """What is exchanged in a model, in order; `journal` can undo it, `done` says what became of each site."""

    def __init__(
        self,
        model: nn.Module,
        chained: list[Stack],
        journal: Journal,
        done: list[Site],
        unpad: bool,
        loss: bool,
        packed: bool,
    ) -> None:
        self.model, self.chained, self.journal, self.done = model, chained, journal, done
        self.unpad, self.loss, self.packed = unpad or packed, loss, packed
        self.models = {m: name for name, m in model.named_modules() if isinstance(m, PreTrainedModel)}
        kin = frozenset(self.models)
        around = {m: frozenset(other for other in kin if other is not m and m in set(other.modules())) for m in kin}
        self.seats = {m: Seat(unpad, loss, packed, around=around[m], kin=kin) for m in self.models}
        self.stage = Stage(model, [stack.layers for stack in chained])

    def make_all(self, fused: bool, dropping: Dropping | None) -> None:
        found = sites(self.model) if fused else []
        units = {stack.owner: self._run_untouched(stack.owner, stack) for stack in self.chained}
        attentions = self._find_attentions(found)
        units |= {owner: self._run_untouched(owner) for owner in attentions if owner not in units}
        for owner, unit in units.items():
            if isinstance(unit, Unit) and "use_cache" in unit.inputs:
                for m, seat in self.seats.items():
                    seat.works_without_cache |= m is owner or m in self.seats[owner].around
        heads = {m: self._run_head(m) for m in self.models if self.loss and _find_head(m) is not None}
        register()
        for m, seat in self.seats.items():
            self.journal.hooks.append(m.register_forward_pre_hook(partial(enter, seat=seat), with_kwargs=True))
            self.journal.hooks.append(m.register_forward_hook(leave, always_call=True))
        self._swap_sites(found, [*units.values(), *heads.values()])
        self._swap_attention(attentions, units)
        for stack in self.chained if fused else ():
            unit = units[stack.owner]
            if isinstance(unit, Unit):
                self._swap_layers(stack, unit)
        for layer, gate in dropping.all_gates() if dropping is not None else ():
            self.journal.change(layer, "stretto_gate", gate)
            self.journal.swap(layer, SwitchedLayer)
        if self.unpad:
            self._swap_stacks(units)
        for m, head in heads.items():
            self._swap_head(m, head)

    def _run_untouched(self, owner: PreTrainedModel, stack: Stack | None = None) -> Unit | str:
        problem = "it reads neither tokens nor images nor hidden states"
        for inputs in _catch(draw_stack_batches, owner, stack is not None and stack.crosses):
            if isinstance(inputs, str):
                return inputs
            found = self._try_unit(owner, inputs, "")
            if isinstance(found, Unit):
                return found
            problem = found
        return problem

    def _run_head(self, model: PreTrainedModel) -> Unit | str:
        try:
            batch = draw_padded(model, ("right",), ("own",), "ids")
            found: Unit | str = "it reads no tokens"
            for labels, inputs in with_labels(model, batch, model) if batch is not None else ():
                found = self._try_unit(model, inputs, labels) if labels == "tokens" else found
            return found
        except Exception as error:
            return f"it cannot be tried: {describe(error)}"

    def _try_unit(self, model: PreTrainedModel, inputs: Batch, labels: str) -> Unit | str:
        try:
            exact, own = self._play(model, inputs, labels)
        except Exception as error:
            return f"it cannot be tried: {describe(error)}"
        return Unit(model, inputs, labels, exact, own)

    def _play(self, model: nn.Module, inputs: Batch, labels: str) -> tuple[Result, Result | None]:
        """In fp32 and, where there are weights in 16 bits, as it is."""
        results = [self._run(model, inputs, labels, exact) for exact in (True, False)[: 1 + self.stage.has_halves]]
        return results[0], results[1] if len(results) > 1 else None

    def _run(self, model: nn.Module, inputs: Batch, labels: str, exact: bool) -> Result:
        with self.stage.set_up(exact):
            given, tokens = in_precision_of(model, inputs), labels == "tokens"
            parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
            return run(model, given, parameters, masks_of(inputs), scores=tokens, loss_only=tokens)

    def _check(self, unit: Unit | str, lazy: bool = False, trial: bool = False) -> str | None:
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

    def _swap_sites(self, found: list[Site], units: Sequence[Unit | str]) -> None:
        """Modules with parameters of their own: each kind by itself, and then, where they are, all of them at once. If
        that gives another result, each kind where it is."""
        ordered = sorted((site for site in found if site.fused is not None), key=lambda site: site.name.count("."))
        kinds = [kind_of(site) for site in ordered]
        first = dict(zip(reversed(kinds), reversed(ordered), strict=True))
        problems = {kind: site.problem or compare(site) for kind, site in first.items()}
        inside: set[int] = set()

        def change(chosen: Sequence[Any]) -> bool:
            inside.clear()
            for site, kind in zip(ordered, kinds, strict=True):  # the whole before its parts
                if kind in chosen and id(site.module) not in inside:
                    self.journal.swap(site.module, site.fused, site.parts)  # type: ignore[arg-type]
                    used = (*site.parts.linears, site.parts.norm)
                    inside.update(id(site.module.get_submodule(name)) for name in used if name)
            return True

        def check() -> str | None:
            return next((p for unit in units if isinstance(unit, Unit) and (p := self._check(unit))), None)

        good = [kind for kind, problem in problems.items() if problem is None]
        if attempt(self.journal, partial(change, good), check)[1]:
            for kind in good:
                mark = self.journal.mark()
                problems[kind] = attempt(self.journal, partial(change, [kind]), check)[1]
                self.journal.undo(mark)
            change([kind for kind in good if problems[kind] is None])
        for site, kind in zip(ordered, kinds, strict=True):
            if id(site.module) not in inside:
                self.done.append(replace(site, problem=problems[kind]))

    def _find_attentions(self, found: list[Site]) -> dict[PreTrainedModel, list[Site]]:
        """Attention that goes through transformers' interface, by the innermost model around it."""
        groups: dict[PreTrainedModel, list[Site]] = {}
        for site in found:
            if site.role == "attention":
                around = [m for m in _ancestors(self.model, site.name) if isinstance(m, PreTrainedModel)]
                if around:
                    groups.setdefault(around[0], []).append(site)
        return groups

    def _swap_attention(self, groups: dict[PreTrainedModel, list[Site]], units: dict[Any, Unit | str]) -> None:
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

    def _swap_layers(self, stack: Stack, unit: Unit) -> None:
        """What a stack's layers do between the modules we know, one thing after the other."""
        mark, changed, seat = self.journal.mark(), False, self.seats[stack.owner]
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

    def _learn(self, unit: Unit) -> None:
        """One pass in fp32, for those who listen."""
        self._run(unit.model, unit.inputs, unit.labels, exact=True)

    def _swap_rotary(self, stack: Stack, unit: Unit) -> bool:
        attentions: list[Any] = [module for module in stack.layers.modules() if calls_attention_interface(module)]
        rotated = [module for module in attentions if rotated_forward(original(type(module))) is not None]
        for attention in rotated:
            self.journal.swap(attention, Rotated)
        return bool(rotated)

    def _swap_projections(self, stack: Stack, unit: Unit) -> bool:
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

    def _swap_sums(self, stack: Stack, unit: Unit) -> bool:
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

    def _swap_stacks(self, units: dict[Any, Unit | str]) -> None:
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
            tried = try_padding(self.stage, m, mine, self.model) if mine else UNTRIED
            self.seats[m].tried = tried
            layers = {module for stack in self.chained for module in stack.inside}
            self.seats[m].outside = tuple(map(Outside.note, inside - layers))
            for stack in (stack for stack in self.chained if stack.owner in inside):
                problem = problems[stack]
                if problem is None and not tried.kinds and not self.packed:
                    problem = "the model around it gives other results without padding"
                remark = describe_kept(tried, mine)
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
        self.journal.change(self.seats[stack.owner], "stack", stack)
        return True

    def _swap_head(self, model: PreTrainedModel, unit: Unit | str) -> None:
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
