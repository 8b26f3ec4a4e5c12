"""Changes of a model: each is tried before it stays, and each can be undone.

Every change is noted in a `Journal`, which undoes them from the last one back to any mark.

A model is tried on a `Stage`: its parameters are replaced for a while, each by its own values with noise on top, so
that weights that are still one or zero hide nothing, and its stacks are cut down to their first layers, one of every
kind. On the stage the model is in fp32 (fp64 stays), where another formula shows and rounding does not. A model in 16
bits is run in its own precision as well: there the result must be about as near to that in fp32 as the original's is,
and of the same type.

What is compared is every output and the gradient of every parameter. Where a batch is padded, positions that the mask
keeps are compared of what has a value for each token, [N, S, C]; all else is compared as a whole.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from stretto.hf.defer import Call, calling, compute
from stretto.hf.find import Batch, Site, draw_inputs, in_precision_of, masks_of, quietly
from stretto.hf.modules import NONE, Parts, Recognised, is_touched, mix, weight_of

TIGHT = 1e-3  # largest distance of results in fp32, relative to their norm
ROUGH = 0.1  # the same, of gradients from what is kept in fewer bytes
LEAST = 1e-5  # share of the largest gradient that a gradient of zero, but for rounding, may be off by
NOISE = 0.25  # share of a parameter's size
LEAST_NOISE = 0.02  # lower bound of the noise: a scale of nearly zero would hide what it scales


class Missing:
    """Stands for the value of an attribute that was not there."""


def _read(thing: Any, name: str) -> Any:
    return type(thing) if name == "__class__" else vars(thing).get(name, Missing)


@dataclass
class Journal:
    """The changes of a model, in order."""

    changes: list[tuple[Any, str, Any, Any]] = field(default_factory=list)  # object, attribute, old and new value
    hooks: list[RemovableHandle] = field(default_factory=list)

    def change(self, thing: Any, name: str, value: Any) -> None:
        self.changes.append((thing, name, _read(thing, name), value))
        setattr(thing, name, value)

    def lend(self, thing: Any, name: str, value: Any) -> None:
        """A new attribute that its user may set later: it is taken away whatever its value is then."""
        self.changes.append((thing, name, Missing, Missing))
        setattr(thing, name, value)

    def swap(self, module: nn.Module, ours: type[nn.Module], parts: Parts = NONE) -> None:
        kinds: tuple[Any, Any] = (ours, type(module))
        self.change(module, "__class__", mix(*kinds, parts))

    def mark(self) -> int:
        return len(self.changes)

    def undo(self, mark: int = 0) -> None:
        """Undoes every change since the mark, but what others have changed meanwhile: a class that torch has derived
        from ours for a parametrization, for instance, which goes on working."""
        while len(self.changes) > mark:
            thing, name, before, since = self.changes.pop()
            if since is not Missing and _read(thing, name) is not since:
                continue
            if before is Missing:
                delattr(thing, name)
            else:
                setattr(thing, name, before)

    def attempt(self, change: Callable[[], bool | None], check: Callable[[], str | None]) -> tuple[bool, str | None]:
        """Makes a change, and undoes it if the check finds a problem. Returns whether there was anything to change, and
        the problem."""
        mark = self.mark()
        try:
            if change() is False:
                self.undo(mark)
                return False, None
            problem = check()
        except Exception as error:
            problem = f"it cannot take its place: {describe(error)}"
        if problem:
            self.undo(mark)
        return True, problem

    def undo_all(self) -> None:
        self.undo()
        while self.hooks:
            self.hooks.pop().remove()


def describe(error: Exception) -> str:
    """An error in one line of a report."""
    text = " ".join(str(error).split())
    return f"{text[:120] + ' ...' if len(text) > 120 else text}" or type(error).__name__


@dataclass(frozen=True)
class Result:
    """What one run gave."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """A module that was run untouched, and what it gave."""

    module: nn.Module
    inputs: Batch | list[Tensor]
    labels: str  # "tokens" if the inputs have such labels
    exact: Result
    own: Result | None  # result in 16 bits, for weights in 16 bits


class Stage:
    """A model whose parameters, precision and number of layers are others for a while."""

    def __init__(self, model: nn.Module, lists: Sequence[nn.ModuleList] = ()) -> None:
        self.model = model
        self.lengths = [(layers, find_stand_ins(layers)[1]) for layers in lists]
        self.has_halves = any(is_half(p) for p in model.parameters())
        self.values: dict[bool, list[Tensor]] = {}  # values of the parameters, exact and in their own precision

    @contextmanager
    def set_up(self, exact: bool = True, training: bool = False) -> Iterator[None]:
        """`exact`: in fp32, or fp64; otherwise in the model's own precision. `training`: but without dropout."""
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        with quietly(self.model, training), _without_tf32(), torch.autocast(device, enabled=False):
            for layers, length in self.lengths:
                layers._modules = dict(list(layers._modules.items())[:length])  # `quietly` puts all of them back
            parameters = [p for p in self.model.parameters() if p.is_floating_point()]
            if not self.values:  # drawn once: a large table takes a CPU long
                own = [_disturb(p.data, number) for number, p in enumerate(parameters)]
                self.values = {False: own, True: [_widen(value) for value in own]}
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:  # a copy: some are written to
                        module._buffers[name] = _widen(buffer.clone()) if exact else buffer.clone()
            with _disguised(parameters, self.values[exact]):
                yield

    def run_untouched(self, module: nn.Module, batches: Iterable[tuple[str, Any]], otherwise: str = "") -> Unit | str:
        """What later runs are compared with, on the first of some batches that the module takes, each with the kind of
        its labels; or why there is nothing to compare with."""
        problem, rest = otherwise, iter(batches)
        while True:
            try:
                labels, inputs = next(rest)
                return Unit(module, inputs, labels, *self._run_both(module, inputs, labels))
            except StopIteration:
                return problem
            except Exception as error:
                problem = f"it cannot be tried: {describe(error)}"

    def check(self, unit: Unit | str, call: Call, bound: float = TIGHT) -> str | None:
        """How a module, called in `call`, differs from what it gave untouched; `bound` is that of gradients in fp32."""
        if isinstance(unit, str):
            return unit
        with calling(call):
            exact, own = self._run_both(unit.module, unit.inputs, unit.labels)
        problem = find_difference(exact, unit.exact, bound)
        if problem is None and own is not None and unit.own is not None:
            problem = find_loss_of_precision(own, unit.own, unit.exact)
        return problem

    def _run_both(self, module: nn.Module, inputs: Any, labels: str) -> tuple[Result, Result | None]:
        """The results in fp32 and, where there are weights in 16 bits, in their precision."""
        exact = self.run(module, inputs, labels)
        return exact, self.run(module, inputs, labels, exact=False) if self.has_halves else None

    def run(
        self, module: nn.Module, inputs: Any, labels: str = "", exact: bool = True, training: bool = False
    ) -> Result:
        with self.set_up(exact, training):
            parameters = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
            return run(module, inputs, parameters, labels, loss_only=labels == "tokens")


def find_stand_ins(layers: nn.ModuleList) -> tuple[list[int], int]:
    """For each layer the number of a layer of its kind that is on the stage, and the number of layers on the stage: one
    of every kind, and one more, behind which no layer follows. That one stands in for the last layer, if alike."""
    kinds = [(repr(layer), tuple(map(_traits, layer.modules()))) for layer in layers]
    stand_ins = [kinds.index(kind) for kind in kinds]
    length = min(max(stand_ins) + 2, len(layers))
    if kinds[-1] == kinds[length - 1]:
        stand_ins[-1] = length - 1
    return stand_ins, length


def _traits(module: nn.Module) -> tuple[Any, ...]:
    """The attributes of a module, without the values of numbers, by which layers are counted."""
    flags = {name: str(value) for name, value in vars(module).items() if isinstance(value, str | bool | None)}
    counts = {name: type(value).__name__ for name, value in vars(module).items() if isinstance(value, int | float)}
    return tuple(sorted(item for item in (counts | flags).items() if item[0] != "training"))


@contextmanager
def _disguised(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    before = [(p, p.data, p.requires_grad) for p in parameters]
    try:
        for p, value in zip(parameters, values, strict=True):
            p.data = value
            p.requires_grad_(True)
        yield
    finally:
        for p, data, wanted in before:
            p.requires_grad_(wanted)
            p.data = data


def _widen(values: Tensor) -> Tensor:
    return values.float() if is_half(values) else values


def _disturb(values: Tensor, seed: int) -> Tensor:
    """The values with noise on top, in their precision, so that fp32 holds them too."""
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randn(values.shape, generator=generator, device=values.device)
    scale = max(NOISE * float(values.float().square().mean().sqrt()), LEAST_NOISE) if values.numel() else 0.0
    return (values + scale * noise).to(values.dtype)


def is_half(values: Tensor) -> bool:
    return values.dtype in (torch.float16, torch.bfloat16)


@contextmanager
def _without_tf32() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:  # the user has set precisions by another of torch's ways: it does not mix
        yield
        return
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run(
    module: nn.Module,
    inputs: Batch | list[Tensor],
    parameters: Mapping[str, Tensor] | None = None,
    labels: str = "",
    loss_only: bool = False,
) -> Result:
    """What a module on the stage gives for these inputs, and with parameters the gradients of a random sum of it. With
    labels of "tokens", numbers [N, S] are one for each token, and those at padding do not count."""
    given, masks = in_precision_of(module, inputs), masks_of(inputs) if isinstance(inputs, dict) else []
    with torch.set_grad_enabled(parameters is not None):
        out = module(**given) if isinstance(given, dict) else module(*given)
        outputs = dict(_tensors("", out))
        if loss_only:
            outputs = {"loss": outputs["loss"]}
        if not outputs:
            raise ValueError("it gives nothing that could be compared")
        axes = 2 if labels == "tokens" else 3
        kept = {name: _keep_real(compute(value), masks, axes) for name, value in outputs.items()}
        gradients = _differentiate(kept, parameters) if parameters else {}
    return Result({name: value.detach() for name, value in kept.items()}, gradients)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name or "result", value
    elif is_dataclass(value) and not isinstance(value, Mapping):
        yield from _tensors(name, vars(value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}".lstrip("."), inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _tensors(f"{name}.{number}".lstrip("."), inner)


def _keep_real(value: Tensor, masks: Sequence[Tensor], least_axes: int) -> Tensor:
    for mask in masks:
        if value.ndim >= least_axes and value.shape[:2] == mask.shape:
            return value[mask.to(value.device) != 0]
    return value


def _differentiate(outputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    total = sum(
        (value * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value)).sum().double()
        for value in outputs.values()
        if value.requires_grad and value.is_floating_point()
    )
    if not isinstance(total, Tensor):
        return {}
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def find_difference(found: Result, expected: Result, bound: float = TIGHT) -> str | None:
    """The first difference between two runs in fp32; `bound` is that of gradients."""
    problem = _find_other_shape(found, expected)
    if problem:
        return problem
    for name, value in expected.outputs.items():
        if not _is_near(found.outputs[name], value, TIGHT, 0.0):
            return f"it gives other results ({name})"
    least = LEAST * max((float(g.norm()) for g in expected.gradients.values()), default=0.0)
    for name in expected.gradients | found.gradients:
        ours, theirs = found.gradients.get(name), expected.gradients.get(name)
        nothing = torch.zeros_like(theirs if ours is None else ours)  # type: ignore[arg-type]
        if not _is_near(nothing if ours is None else ours, nothing if theirs is None else theirs, bound, least):
            return f"it gives other results (the gradient of {name})"
    return None


def find_loss_of_precision(found: Result, plain: Result, exact: Result) -> str | None:
    """How a run in 16 bits is worse than the original's, both compared with the original in fp32."""
    problem = _find_other_shape(found, plain)
    if problem:
        return problem
    real = [name for name, value in exact.outputs.items() if value.is_floating_point()]
    groups = [[r.outputs[name] for r in (found, plain, exact)] for name in real]
    names = [name for name in exact.gradients if name in found.gradients and name in plain.gradients]
    if names:
        results = (found, plain, exact)
        groups.append([torch.cat([r.gradients[name].flatten().float() for name in names]) for r in results])
    for ours, theirs, truth in groups:
        error, usual = ((value.float() - truth.float()).norm() for value in (ours, theirs))
        rounding = torch.finfo(theirs.dtype if is_half(theirs) else torch.bfloat16).eps * truth.float().norm()
        if usual.isfinite() and not error <= 4 * usual + 8 * rounding:
            return "in its precision it gives other results"
    return None


def _find_other_shape(found: Result, expected: Result) -> str | None:
    if found.outputs.keys() != expected.outputs.keys():
        return f"it gives {sorted(found.outputs)} instead of {sorted(expected.outputs)}"
    for name, value in expected.outputs.items():
        other = found.outputs[name]
        same = other.dtype == value.dtype or (value.ndim == 0 and other.dtype == torch.float32)  # a loss may be exact
        if other.shape != value.shape or not same:
            return f"{name} is {other.dtype} {list(other.shape)} instead of {value.dtype} {list(value.shape)}"
    return None


def _is_near(found: Tensor, expected: Tensor, relative: float, absolute: float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    difference, size = (found - expected).norm(), expected.norm()
    if not size.isfinite():  # the model itself gives no numbers in some places: the same ones, and not everywhere
        finite = expected.isfinite()
        if not torch.equal(finite, found.isfinite()) or not finite.any():
            return False
        difference, size = ((value.where(finite, 0)).norm() for value in (found - expected, expected))
    return bool(difference <= relative * size + absolute + 1e-30)


def kind_of(site: Site) -> Any:
    """Modules of one kind compute the same function of their parameters: one of them is tried."""
    plain = tuple((name, value) for name, value in vars(site.module).items() if isinstance(value, str | int | float))
    types = tuple(p.dtype for p in site.module.parameters())
    return type(site.module), site.parts, repr(site.module), tuple(p for p in plain if p[0] != "training"), types


def judge_kinds(sites: Sequence[Site]) -> dict[Any, str | None]:
    """The problem of each kind of site, if there is one: the first site of a kind is tried by itself."""
    first = {kind_of(site): site for site in reversed(sites)}
    return {kind: site.problem or compare_module(site) for kind, site in first.items()}


def compare_module(site: Site) -> str | None:
    """Why a class of ours must not take the place of the module's own: a copy of the module is tried."""
    assert site.ours is not None and issubclass(site.ours, Recognised)
    if any(is_touched(child) for child in site.module.children()):
        return "its children have hooks"
    try:
        module, dense = copy.deepcopy(site.module), site.parts.linears
        stage = Stage(module)
        width = weight_of(module.get_submodule(dense[0])).shape[1] if dense else next(module.parameters()).shape[0]
        inputs = draw_inputs(module, site.ours.takes, width)
        unit = stage.run_untouched(module, [("", inputs)])
        if isinstance(unit, str):
            return unit
        if find_difference(stage.run(module, inputs, training=True), unit.exact):
            return "it is random in training, by something other than a Dropout module"
        Journal().swap(module, site.ours, site.parts)
        return stage.check(unit, Call())
    except Exception as error:
        return f"our module cannot take its place: {describe(error)}"


def checked_indices(model: nn.Module) -> AbstractContextManager[object]:
    """An index out of range is an error that can be caught. On a GPU it is none by itself: it ends all use of the GPU
    in the process, and a trial gives a model batches that it may not be made for."""
    on_gpu = any(p.is_cuda for p in model.parameters())
    return IndexCheck() if on_gpu else contextlib.nullcontext()  # type: ignore[no-untyped-call]


class IndexCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before an operation that would fail on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            _check_operation(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))


_ALONG = {  # operations on (values, dim, index)
    *("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    *("index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_"),
}


def _check_operation(name: str, args: tuple[Any, ...]) -> None:
    match name, args:
        case "embedding", (table, index, *_):
            _check_range(index, 0, len(table))
        case (("index" | "index_put" | "index_put_"), (values, indices, *_)):
            _check_indices(values, indices)
        case (("nll_loss_forward" | "nll_loss2d_forward"), (scores, target, _, _, ignore, *_)):
            _check_range(target[target != ignore], 0, scores.shape[1 if scores.ndim > 1 else 0])
        case "binary_cross_entropy", (values, *_):
            if not values.is_meta and not bool(((values >= 0) & (values <= 1)).all()):
                raise ValueError("a probability is not between 0 and 1")
        case "_assert_async", (condition, *message):
            if not condition.is_meta and not bool(condition):
                raise ValueError(f"{(*message, 'an assertion failed')[0]}")
        case _, (values, dim, index, *_) if name in _ALONG:
            _check_range(index, 0, values.shape[dim] if values.ndim else 1)


def _check_range(index: Tensor, low: int, high: int) -> None:
    if index.numel() and not index.is_meta:
        first, last = (int(bound) for bound in index.aminmax())
        if first < low or last >= high:
            raise IndexError(f"index {first if first < low else last} is out of range for size {high}")


def _check_indices(values: Tensor, indices: Sequence[Tensor | None]) -> None:
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            _check_range(index, -values.shape[dim], values.shape[dim])
        dim += index.ndim if index is not None and is_mask else 1
