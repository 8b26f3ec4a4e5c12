"""accelerate, restore and report.

A module is exchanged by its class alone: it becomes an instance of a class made of one of ours and its own, under its
own name, and keeps its parameters, children, hooks and attributes. So checkpoints, optimizers, `isinstance` and
everything that looks for modules by class name go on as before, and giving back the class undoes it.

No exchange is taken on trust. Of each kind of module one is run before and after, on random rows, in eval and in
training mode; each stack of layers runs a small padded batch with and without its padding. What differs is left alone,
and the report says so: a future release of transformers can make an acceleration disappear, but not a result wrong.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stretto.config import LayerDropConfig, StandardizeConfig, build_config
from stretto.hf.attention import NAME, DistanceBias, register
from stretto.hf.call import Call, set_call
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
    weight_of,
)
from stretto.hf.loss import LazyHead
from stretto.hf.packing import PackedLayer, argument_names, enter, leave
from stretto.hf.pending import note_useful
from stretto.hf.projections import FusedAttention, FusedProjection, Rotated, find_groups, with_rotary
from stretto.hf.roles import (
    NONE,
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

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
YES = {"standardize": "yes: what save_pretrained writes is another function without it"}


@dataclass(frozen=True)
class Line:
    names: str  # of modules that differ by the number of their layer only: # stands for it
    role: str
    count: int
    problem: str | None  # why they stay as they are


@dataclass(frozen=True)
class Report:
    """What was accelerated, and what was not, and why."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        rows = [("role", "modules", "", "")]
        rows += [
            (line.role, line.names or "(the model)", f"x {line.count}", line.problem or YES.get(line.role, "yes"))
            for line in self.lines
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows)


@dataclass
class Record:
    """What restore needs besides the classes."""

    report: Report
    hooks: list[RemovableHandle] = field(default_factory=list)
    implementations: list[tuple[Any, str]] = field(default_factory=list)  # of attention, by configuration
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
    record, done, chained = Record(Report(()), steps=steps), list[Site](), stacks(model)
    if layer_drop:
        tried = [(stack, _draw_batch(stack)) for stack in chained]
        record.dropping = plan_drops(model, tried, _read_options("layer_drop", layer_drop), seed, done)
    tokens: dict[nn.Module, Tokens] = {}
    if standardize:
        record.pulling, tokens = _swap_norms(model, chained, _read_options("standardize", standardize), done)
    register()
    if fused:
        found = sites(model)
        done += _swap_sites(found) + _swap_attention(model, found, record)
    chains = {id(stack.owner): _swap_layers(stack, done) for stack in chained} if fused else {}
    for layer, gate in record.dropping.all_gates() if record.dropping is not None else ():
        layer.stretto_gate = gate  # type: ignore[assignment]
        swap(layer, SwitchedLayer)
    owned = {id(stack.owner): stack for stack in _swap_stacks(model, chained, done)} if unpad or packed else {}
    if packed and not any(stack.causal for stack in owned.values()):
        _undo(model, record)
        why = "; ".join(str(site.problem) for site in done if site.role == "padding")
        raise ValueError(f"{type(model).__name__} cannot keep packed documents apart: {why or 'it is not a decoder'}")
    if loss:
        done += _swap_heads(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            own = {"stack": owned.get(id(module)), "chain": chains.get(id(module), ())}
            record.hooks += _hook(module, **own, unpad=unpad, loss=loss, packed=packed)
    for norm, of_norm in tokens.items():
        norm.stretto_tokens = of_norm  # type: ignore[assignment]
    for around in record.pulling.around if record.pulling is not None else ():
        hook = partial(note_tokens, around=around)
        record.hooks.append(around.model.register_forward_pre_hook(hook, with_kwargs=True))
    record.report = _summarise(done)
    model._stretto = record  # type: ignore[assignment]
    log.info("%s\n%s", type(model).__name__, record.report)
    return model


def restore(model: Model) -> Model:
    """Undoes `accelerate`: the classes and the attention that were there before."""
    _undo(model, _record(model))
    del model._stretto
    return model


def _undo(model: nn.Module, record: Record) -> None:
    for module in model.modules():
        module.__class__ = _original(type(module))
        for name in ("stretto_gate", "stretto_tokens"):
            vars(module).pop(name, None)
    for handle in record.hooks:
        handle.remove()
    for config, implementation in record.implementations:
        config._attn_implementation_internal = implementation


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


@cache
def _mix(ours: Any, theirs: Any, parts: Parts) -> type[nn.Module]:
    own = {"parts": parts} if parts != NONE or not hasattr(theirs, "parts") else {}  # a second one of ours keeps them
    made: type[nn.Module] = type(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__} | own)
    made.__qualname__ = theirs.__qualname__
    return made


def _original(kind: type[nn.Module]) -> type[nn.Module]:
    while kind.__bases__ and kind.__bases__[0].__module__.startswith("stretto.hf."):
        kind = kind.__bases__[1]
    return kind


def swap(module: nn.Module, ours: type[nn.Module], parts: Parts = NONE) -> None:
    kinds: tuple[Any, Any] = (ours, type(module))
    module.__class__ = _mix(*kinds, parts)


def _read_options(name: str, value: Any) -> Any:
    """The section of config.py, of which a part may be given."""
    own = {"scale": "update"} if name == "layer_drop" else {}
    if isinstance(value, Mapping | bool):
        value = own | (dict(value) if isinstance(value, Mapping) else {})
    return getattr(build_config({"techniques": {name: value}}).techniques, name)


def _swap_norms(
    model: nn.Module, found: list[Stack], cfg: StandardizeConfig, done: list[Site]
) -> tuple[Pulling, dict[nn.Module, Tokens]]:
    """All norms but those of heads, where what is to be replaced is known: by parameters of the same names."""
    norms: list[Site] = []
    problems: dict[Any, str | None] = {}
    for site in sites(model):
        if site.role == "norm":
            key = type(site.module), repr(site.module)
            if key not in problems:
                problems[key] = site.problem or _compare(site)
            problem = problems[key] or find_problem(model, site)
            done.append(replace(site, role="standardize", problem=problem))
            norms += [site] if problem is None else []
    if not norms:
        why = "; ".join(dict.fromkeys(str(site.problem) for site in done if site.role == "standardize"))
        raise ValueError(f"standardize does not apply to {type(model).__name__}: {why or 'it has no norms'}")
    for site in norms:
        swap(site.module, AffineNorm)
    return plan_pulls(model, norms, found, cfg)


def _swap_sites(found: list[Site]) -> list[Site]:
    """Modules with parameters of their own, and what became of them."""
    done: list[Site] = []
    problems: dict[Any, str | None] = {}
    inside: set[int] = set()
    for site in sorted(found, key=lambda site: site.name.count(".")):  # the whole before its parts
        if site.fused is None or id(site.module) in inside:
            continue
        key = (type(site.module), site.parts, repr(site.module))
        if key not in problems:
            problems[key] = site.problem or _compare(site)
        done.append(Site(site.name, site.role, site.module, site.fused, site.parts, problems[key]))
        if problems[key] is None:
            swap(site.module, site.fused, site.parts)
            used = (*site.parts.linears, site.parts.norm)
            inside |= {id(site.module.get_submodule(name)) for name in used if name}
    return done


def _compare(site: Site) -> str | None:
    """Why the fused module must not take the place of the plain one."""
    assert site.fused is not None and issubclass(site.fused, Fused)
    module, original = site.module, type(site.module)
    if site.parts.linears:
        width = weight_of(module.get_submodule(site.parts.linears[0])).shape[1]
        inputs = draw_inputs(module, 2 if site.role == "residual norm" else 1, width)
    else:
        inputs = draw_inputs(module, 1, next(module.parameters()).shape[0])
    with quietly(module):
        expected = module(*inputs)
    with quietly(module, training=True):
        trained = module(*inputs)
    if not torch.equal(expected, trained):
        return "it is random in training, by something other than a Dropout module"
    swap(module, site.fused, site.parts)
    try:
        if not Fused.is_intact(module):  # type: ignore[arg-type]
            return "its linear layers have hooks"
        with quietly(module):
            found = module(*inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"the fused module cannot take its place: {error}"
    finally:
        module.__class__ = original
    return None if _close(found, expected) else "the fused module gives other results"


def _close(found: Tensor, expected: Tensor, roundings: int = 32) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    bound = min(roundings * torch.finfo(expected.dtype).eps, 0.25) * expected.abs().max()
    return bool((found - expected).abs().max() <= bound)


def _swap_attention(model: nn.Module, found: list[Site], record: Record) -> list[Site]:
    """Attention that goes through transformers' interface, where it is torch's: other kinds may know more than ours."""
    done: list[Site] = []
    configs: dict[int, Any] = {}
    for site in found:
        if site.role == "attention":
            chosen = getattr(getattr(site.module, "config", None), "_attn_implementation", None)
            problem = None if chosen == "sdpa" else f"its attention is {chosen!r}: only 'sdpa' is replaced"
            done.append(Site(site.name, "attention", site.module, problem=problem))
            if problem is None:  # its own, and those of the models around it, which build the masks
                around = [module for module in _ancestors(model, site.name) if isinstance(module, PreTrainedModel)]
                configs |= {id(module.config): module.config for module in (site.module, *around)}
    for config in configs.values():
        record.implementations.append((config, config._attn_implementation))
        config._attn_implementation_internal = NAME
    return done


def _ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    while name:
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def _swap_layers(stack: Stack, done: list[Site]) -> tuple[nn.Module, ...]:
    """What a stack's layers do between the modules we know, one thing after the other, as far as results stay the same.
    Gives the layers whose result may wait for the next one."""
    inputs = _draw_batch(stack)
    if inputs is None:
        return ()
    chain, plain, changed = tuple(stack.layers)[:-1], {layer: type(layer) for layer in stack.layers}, False
    expected = _learn_stack(stack, inputs, ())
    for layer in stack.layers:
        swap(layer, FusedLayer)
    learn = partial(_learn_stack, stack, inputs, chain)
    for role, change in (("rotary", _swap_rotary), ("projections", _swap_projections), ("residual", _swap_sums)):
        before, problem = {module: type(module) for module in stack.layers.modules()}, None
        try:
            if not change(stack, learn):
                continue
            if not all(_close(a, b, 1024) for a, b in zip(learn(), expected, strict=True)):
                problem = "it gives other results"
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"it cannot take its place: {error}"
        if problem:
            for module, kind in before.items():
                module.__class__ = kind
        changed |= problem is None
        done.append(Site(stack.name, role, stack.owner, problem=problem))
    if not changed:
        for layer, kind in plain.items():
            layer.__class__ = kind
    return chain if changed else ()


def _swap_rotary(stack: Stack, learn: Callable[[], Any]) -> bool:
    attentions = [module for module in stack.layers.modules() if calls_attention_interface(module)]
    for attention in attentions:
        kind: Any = type(attention)
        attention.__class__ = with_rotary(kind) or kind
    return any(isinstance(attention, Rotated) for attention in attentions)


def _swap_projections(stack: Stack, learn: Callable[[], Any]) -> bool:
    """Linear layers of an attention module that are given one input."""
    attentions = [module for module in stack.layers.modules() if calls_attention_interface(module)]
    calls: dict[nn.Module, list[tuple[str, nn.Module, Tensor]]] = {module: [] for module in attentions}
    hooks = []
    for attention in attentions:
        for name, child in attention.named_children():
            if type(child) is nn.Linear and not child._forward_hooks and not child._forward_pre_hooks:
                note = partial(lambda to, name, child, args: to.append((name, child, args[0])), calls[attention], name)
                hooks.append(child.register_forward_pre_hook(note))
    learn()
    for hook in hooks:
        hook.remove()
    groups = [(attention, names) for attention in attentions for names in find_groups(calls[attention])[:1]]
    for attention, names in groups:
        swap(attention, FusedAttention, Parts(linears=names))
        for name in names:
            swap(attention.get_submodule(name), FusedProjection)
    return bool(groups)


def _swap_sums(stack: Stack, learn: Callable[[], Any]) -> bool:
    """Every linear layer and activation that stands alone, and every MLP, leaves its last steps to what follows; those
    of which nothing does more than read them become again what they were."""
    before: dict[nn.Module, type[nn.Module]] = {}
    for layer in stack.layers:
        known = {part for module in layer.modules() if isinstance(module, Fused) for part in module.children()}
        for module in [m for m in layer.modules() if m not in known]:
            before[module] = type(module)
            if isinstance(module, FusedMLP | FusedGatedMLP):
                ours, theirs = type(module).__bases__
                module.__class__ = _mix(ours, theirs, replace(module.parts, defers=True))  # type: ignore[assignment]
            elif type(module) in (nn.Linear, Conv1D):
                swap(module, FusedLinear)
            elif is_activation(module) and (kind := find_activation(module)) is not None:
                swap(module, FusedActivation, Parts(activation=kind))
    with note_useful() as useful:
        learn()
    for module, original in before.items():
        if module not in useful:
            module.__class__ = original
    return bool(useful)


def _learn_stack(stack: Stack, inputs: dict[str, Any], chain: tuple[nn.Module, ...]) -> list[Tensor]:
    """The result of a stack in eval mode, and the gradients of its first layer, side by side: those that are zero but
    for rounding, as of a key's bias, count little."""
    hooks = _hook(stack.owner, stack=None, chain=chain, unpad=False, loss=False, packed=False)
    try:
        with quietly(stack.owner), torch.enable_grad():
            out: Tensor = stack.owner(**inputs)[0]
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
            parameters = [p for p in stack.layers[0].parameters() if p.requires_grad]
            gradients = torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True) if parameters else ()
    finally:
        for hook in hooks:
            hook.remove()
    flat = [g.flatten() for g in gradients if g is not None]
    return [out.detach(), *([torch.cat(flat)] if flat else [])]


def _swap_stacks(model: nn.Module, found: list[Stack], done: list[Site]) -> list[Stack]:
    """The stacks that can run without padding."""
    kept: list[Stack] = []
    if not found:
        missing = "no stack of layers with attention by transformers' AttentionInterface"
        done.append(Site("", "padding", model, problem=missing))
    for stack in found:
        problem = stack.problem
        if "input_ids" not in argument_names(stack.owner):
            problem = "it reads no tokens: there is no padding"
        elif stack.owner.config._attn_implementation != NAME:
            problem = "its attention was not replaced"
        problem = problem or _try_packing(stack)
        done.append(Site(stack.name, "padding", stack.owner, problem=problem))
        if problem is None:
            kept.append(stack)
    return kept


def _try_packing(stack: Stack) -> str | None:
    """Gives the stack's layers the means to run packed, unless they then give other results."""
    if stack.relative:
        for module in stack.layers.modules():
            if isinstance(getattr(module, "has_relative_attention_bias", None), bool) and hasattr(module, "n_heads"):
                swap(module, DistanceBias)
    for layer in stack.layers:
        swap(layer, PackedLayer)
    hooks = _hook(stack.owner, stack=stack, chain=(), unpad=True, loss=False, packed=False)
    inputs = _draw_batch(stack)
    assert inputs is not None
    try:
        with quietly(stack.owner):
            packed, rectangle = (_run_stack(stack, inputs, rectangle) for rectangle in (False, True))
        kept = inputs["attention_mask"] != 0
        problem = None if _close(packed[kept], rectangle[kept]) else "without padding it gives other results"
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"it cannot run without padding: {error}"
    for hook in hooks:
        hook.remove()
    if problem:
        for module in stack.layers.modules():
            while issubclass(type(module), PackedLayer | DistanceBias):
                module.__class__ = type(module).__bases__[1]
    return problem


def _draw_batch(stack: Stack) -> dict[str, Any] | None:
    """Three sequences of different lengths; for a decoder that reads an encoder's output, that too. For a model of
    images two of them; for any other none."""
    generator = torch.Generator().manual_seed(0)
    if stack.owner.main_input_name == "pixel_values":
        like, config = next(stack.owner.parameters()), stack.owner.config
        size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
        pixels = torch.randn(2, config.num_channels, *size, generator=generator)
        return {"pixel_values": pixels.to(like.device, like.dtype)}
    if "input_ids" not in argument_names(stack.owner):
        return None
    embedding: Any = stack.owner.get_input_embeddings()
    device, dtype = embedding.weight.device, embedding.weight.dtype
    lengths, longest = torch.tensor([6, 2, 4]), 6
    batch: dict[str, Any] = {
        "input_ids": torch.randint(embedding.num_embeddings, (3, longest), generator=generator),
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
    }
    if stack.crosses:
        memory = torch.randn(3, longest, embedding.embedding_dim, generator=generator).to(dtype)
        batch |= {"encoder_hidden_states": memory, "encoder_attention_mask": batch["attention_mask"].roll(1, 0)}
    batch = {name: value.to(device) for name, value in batch.items()}
    return batch | ({"use_cache": False} if "use_cache" in argument_names(stack.owner) else {})


def _run_stack(stack: Stack, inputs: dict[str, Any], rectangle: bool) -> Tensor:
    set_call(Call(None, None, rectangle, lazy=False))
    try:
        out: Tensor = stack.owner(**inputs)[0]
    finally:
        set_call(None)
    return out


def _swap_heads(model: nn.Module) -> list[Site]:
    """The output layer of each language model, and the module around it that begins with hidden states."""
    done = []
    for name, owner in model.named_modules():
        if not isinstance(owner, PreTrainedModel) or "labels" not in argument_names(owner):
            continue
        output = owner.get_output_embeddings()  # type: ignore[no-untyped-call]
        if type(output) is not nn.Linear:
            continue
        inner = next(child for child, module in owner.named_modules() if module is output)
        swap(output, LazyHead, Parts(linears=("",)))
        outer, _, rest = inner.partition(".")
        head = owner.get_submodule(outer)
        if rest and not isinstance(head, PreTrainedModel) and len(argument_names(head)) == 1:
            swap(head, LazyHead, Parts(linears=(rest,)))
        done.append(Site(f"{name}.{outer}".lstrip("."), "loss", head))
    return done


def _hook(model: PreTrainedModel, **options: Any) -> list[RemovableHandle]:
    return [
        model.register_forward_pre_hook(partial(enter, **options), with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
    ]


def _summarise(done: list[Site]) -> Report:
    counts: dict[tuple[str, str, str | None], int] = {}
    for site in done:
        key = re.sub(r"\.\d+(?=\.|$)", ".#", site.name), site.role, site.problem
        counts[key] = counts.get(key, 0) + 1
    return Report(tuple(Line(names, role, count, problem) for (names, role, problem), count in counts.items()))
