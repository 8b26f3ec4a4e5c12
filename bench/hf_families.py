"""Whether `stretto.accelerate` gives the same results, on every class of model that transformers exports.

    python -m bench.hf_families                                  all of them: more than an hour on one core
    python -m bench.hf_families --families bert,llama --jobs 2
    python -m bench.hf_families --classes WhisperModel,SiglipModel --out families.json

A tiny model of each class (hf_tiny.py) is compared with a copy that was made before it was accelerated: loss, outputs
at positions that the mask keeps, and in training every gradient. The judge is the untouched model in fp64: ours may be
twice as far from it as the untouched model in the same precision, plus a few roundings. A case that the untouched model
cannot run, or for which it gives two answers, does not count. Then what `restore` gives back is compared bit by bit.

Each class runs in a process of its own, with a time limit: a hang or a crash is a result like any other. It exits with
1 where any class is not equal.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import Signals
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

import stretto
import stretto.hf
from bench.hf_tiny import (
    OTHER_PADDING,
    Batch,
    Draw,
    Form,
    NotTried,
    build,
    draw_batch,
    find_form,
    model_classes,
    narrow,
    takes_cache,
)

FAULTS = ("wrong", "half exchanged", "raises in accelerate", "raises when called", "hangs or crashes")
RESULTS = (*FAULTS, "equal", "not tried")
FLOORS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # a few roundings, relative
NOISE = 0.2  # relative error of an untouched gradient from which on one draw of it says nothing
SEEDS = 5  # batches that a case is judged by, where the first looks wrong
PATIENCE = 5  # seconds that may pass for one of computing: other programs compute, too
MEMORY = 8 << 30  # bytes of addresses a child may have


# One run of a model


def collect(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of numbers in an output, with its path."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("past_key_values", "mems", "cache_params", "state", "rnn_state"):
                yield from collect(inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from collect(inner, f"{path}.{i}".lstrip("."))


def keep_real(value: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """What is defined of a tensor: the positions that every mask of its shape keeps, else all of it."""
    fitting = [mask != 0 for mask in masks if value.shape[: mask.ndim] == mask.shape]
    if not fitting:  # rows [N S, ...], as of a router
        fitting = [mask.flatten() != 0 for mask in masks if value.ndim > 1 and len(value) == mask.numel()]
    return value[torch.stack(fitting).all(0)] if fitting else value


def learn(model: nn.Module, batch: Batch, autocast: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Outputs at real positions, the loss, and in training every gradient: of the loss, or where there is none of a
    random sum of all outputs."""
    torch.manual_seed(seed)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    masks = [batch[name] for name in ("attention_mask", "decoder_attention_mask") if name in batch]
    model.zero_grad()
    with torch.set_grad_enabled(model.training):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = model(**batch)
        outputs = {name: keep_real(value, masks) for name, value in collect(out if isinstance(out, dict) else [out])}
        found = {name: value.detach().clone() for name, value in outputs.items()}
        if model.training:
            goal = outputs.get("loss")
            goal = _mix(outputs.values()) if goal is None else goal
            if goal.requires_grad:
                goal.sum().backward()
            found |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


def _mix(outputs: Iterable[Tensor]) -> Tensor:
    total = torch.zeros(())
    for value in outputs:
        if value.requires_grad:
            weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.dtype)
            finite = value.isfinite()
            total = total + (value.where(finite, 0.0) * weights).sum() / max(value.numel(), 1) ** 0.5
    return total


# Comparing runs


def judge(
    ours: dict[str, Tensor], plain: Sequence[dict[str, Tensor]], exact: dict[str, Tensor], floor: float
) -> list[str]:
    """Where ours is not as near to the exact result as the farthest of the untouched runs is, up to a factor of two and
    a floor. A gradient, or an output, that is nearly zero counts by the size of the largest. A gradient that is noise
    in the untouched model has nothing to be compared with: CpmAntModel has one in bf16, those of Gemma 3's norms of
    queries and keys cancel (over twelve draws in bf16 ours are off by 0.131 and the untouched ones by 0.139, medians,
    with factors above two between them in single draws), and where torch reads memory that nobody wrote, as in a
    convolution of DeformableDetrForObjectDetection under autocast on a CPU, it is anything."""
    first = plain[0]
    problems = [f"{name}: not there" for name in first.keys() - ours.keys()]
    problems += [f"{name}: not there in the untouched model" for name in ours.keys() - first.keys()]
    exact = {name: _right(exact.get(name), value) for name, value in first.items()}
    sizes = {name: float(value.nan_to_num(0, 0, 0).norm()) for name, value in exact.items()}
    least = {
        kind: 1e-2 * max([size for name, size in sizes.items() if name.startswith("grad ") == kind], default=0.0)
        for kind in (False, True)
    }
    undefined = "loss" in first and not bool(first["loss"].isfinite().all())  # then gradients are, too
    for name in first.keys() & ours.keys():
        found, expected, right = ours[name], first[name], exact[name]
        is_gradient = name.startswith("grad ")
        if found.shape != expected.shape:
            problems.append(f"{name}: {list(found.shape)}, untouched {list(expected.shape)}")
        elif not bool(expected.isfinite().all()):
            if bool(found.isfinite().all()) and not is_gradient:
                problems.append(f"{name}: finite, untouched not")
        elif not (is_gradient and undefined):
            size = max(sizes[name], least[is_gradient] if name != "loss" else 0.0, 1e-30)
            error = float((found.double() - right).norm()) / size
            theirs = max(float((run[name].double() - right).norm()) / size for run in plain if name in run)
            if is_gradient and not theirs <= NOISE:
                continue
            if not error <= 2 * theirs + floor:
                problems.append(f"{name}: off by {error:.2g}, untouched {theirs:.2g}")
    return sorted(problems, key=lambda p: (p.startswith("grad "), p))


def _right(exact: Tensor | None, plain: Tensor) -> Tensor:
    """Some models are not themselves in fp64."""
    fits = exact is not None and exact.shape == plain.shape and bool(exact.isfinite().all())
    return (exact if exact is not None and fits else plain).double()


def pool(runs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Several runs as one."""
    if len(runs) == 1:
        return runs[0]
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: torch.cat([run[name].flatten() for run in runs]) for name in names}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in a)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
Snapshot = dict[str, dict[str, Any]]  # by module, and by what is looked at


def take_snapshot(model: nn.Module) -> Snapshot:
    """What `accelerate` may change of each module, and `restore` must give back."""
    found: Snapshot = {"state dict": {"keys": tuple(model.state_dict())}}
    for name, module in model.named_modules():
        found[name or "the model"] = {
            "class": type(module),
            "attributes": frozenset(vars(module)),
            "hooks": tuple((kind, tuple(getattr(module, kind))) for kind in HOOKS),
            "mode": module.training,
            "attention": getattr(getattr(module, "config", None), "_attn_implementation", None),
        }
    return found


def compare_snapshots(now: Snapshot, before: Snapshot) -> list[str]:
    """The first three changes."""
    changes = []
    for name in before.keys() | now.keys():
        old, new = before.get(name, {}), now.get(name, {})
        for what in [what for what in old.keys() | new.keys() if old.get(what) != new.get(what)]:
            values: Any = old.get(what), new.get(what)
            if all(isinstance(value, frozenset) for value in values):
                values = sorted(values[0] - values[1]), sorted(values[1] - values[0])
            changes.append(f"{what} of {name}: {values[0]} is now {values[1]}")
    return sorted(changes)[:3]


# All cases of a class


@dataclass(frozen=True)
class Case:
    name: str
    draw: Draw
    training: bool
    narrow: bool = False  # also in bf16 and under autocast


def cases(model: PreTrainedModel, form: Form) -> list[Case]:
    """In eval mode first: what a model remembers of batches in training does not matter there."""
    draws = {"right": Draw()}
    if form.text:
        draws |= {
            "left": Draw(side="left"),
            "other padding": Draw(padding=OTHER_PADDING),
            "no mask": Draw(mask=False),
            "short": Draw(lengths=(5, 3, 4)),
        }
    if form.labels:
        draws |= {"no labels": Draw(labels="none")}
    made = [Case(name, draw, False, narrow=name == "right") for name, draw in draws.items()]
    if takes_cache(model, form):
        made.append(Case("cached", Draw(options=(("use_cache", True),)), False))
    if form.labels:
        draws |= {"labels ignored": Draw(labels="ignored")}
    if form.text and form.labels in ("words", "masked", "tokens"):
        draws |= {"labels on padding": Draw(labels="everywhere")}
    if hasattr(model.config, "output_router_logits") and form.text:
        draws |= {"router": Draw(options=(("output_router_logits", True),))}
    return made + [Case(name, draw, True, narrow=name == "right") for name, draw in draws.items()]


@dataclass
class Result:
    name: str
    family: str
    faults: dict[str, list[str]] = field(default_factory=dict)  # kind of fault: where, and what
    reason: str = ""  # why it was not tried
    share: str = ""  # how much was accelerated: full, partly, untouched
    left: list[str] = field(default_factory=list)  # roles that were found and stay as they are
    form: str = ""
    dtypes: list[str] = field(default_factory=list)  # outputs that have another one than those of the untouched model
    tried: int = 0  # cases that count
    dropped: list[str] = field(default_factory=list)  # those that do not
    seconds: float = 0.0
    stage: str = "building"

    @property
    def result(self) -> str:
        found = [fault for fault in FAULTS if fault in self.faults]
        return "not tried" if self.reason else found[0] if found else "equal"

    def note_dtypes(self, where: str, ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
        """The loss is fp32 where it is computed without logits; that is not noted."""
        for name in plain.keys() & ours.keys() - {"loss"}:
            if ours[name].dtype != plain[name].dtype:
                self.dtypes.append(f"{where}: {name} is {ours[name].dtype}, untouched {plain[name].dtype}")

    def blame(self, fault: str, what: str) -> None:
        self.faults.setdefault(fault, []).append(what[:300])


def check_class(name: str, family: str, tell: Callable[[Result], None] = lambda result: None) -> Result:
    """`tell` is told before each stage."""
    result, begin = Result(name, family), time.perf_counter()

    def enter(stage: str) -> None:
        result.stage, result.seconds = stage, round(time.perf_counter() - begin, 2)
        tell(result)

    enter("building")
    try:
        model = build(name, family)
        form = find_form(model)
    except Exception as error:
        result.reason = _describe(error)
        return result
    result.form = str(form)
    _compare_all(model, form, result, enter)
    if not result.tried and not result.faults:
        result.reason = f"no case counts: {'; '.join(result.dropped[:3])}"
    result.seconds = round(time.perf_counter() - begin, 2)
    return result


def remember_buffers(model: nn.Module) -> Callable[[], None]:
    """Remembers what a call may change: statistics of batches, or tables that take over the precision of a call, and
    keep the rounding when the next call is wider. Returns a function that gives it back."""
    modules = list(model.modules())
    known = [(m, name, buffer.clone()) for m in modules for name, buffer in m._buffers.items() if buffer is not None]

    def forget() -> None:
        for module, name, value in known:
            buffer = module._buffers.get(name)
            if buffer is None or buffer.shape != value.shape:
                continue  # a table that has grown
            if buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:
                module._buffers[name] = value.clone()

    return forget


class Untouched:
    """A model as transformers made it, in some precision, and its runs, which are needed more than once."""

    def __init__(self, model: PreTrainedModel, form: Form) -> None:
        self.model, self.form = model, form
        self.forget = remember_buffers(model)
        self.runs: dict[Any, dict[str, Tensor]] = {}

    def draw(self, case: Case, seed: int = 0) -> Batch:
        return draw_batch(self.model, self.form, case.draw, seed)

    def learn(self, case: Case, seed: int = 0, autocast: bool = False) -> dict[str, Tensor]:
        key = case, seed, autocast
        if key not in self.runs:
            self.runs[key] = learn(self.model.train(case.training), self.draw(case, seed), autocast)
            self.forget()
        return self.runs[key]

    def nudged(self, seed: int, dtype: torch.dtype) -> Untouched:
        """With weights that are off by about a rounding: where its results then are, chance may take them."""
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator) * torch.finfo(dtype).eps / 2
                    parameter.mul_((1 + noise).to(parameter.dtype) if parameter.dtype != dtype else 1 + noise.to(dtype))
        return Untouched(model, self.form)


def _compare_all(model: PreTrainedModel, form: Form, result: Result, enter: Callable[[str], None]) -> None:
    enter("running the untouched model")
    plain = Untouched(copy.deepcopy(model), form)
    steady = _drop_unsteady(plain, cases(model, form), result)
    if not steady:
        return
    for case in [case for case in steady if case.narrow or case.draw.options]:
        learn(model.train(case.training), plain.draw(case))  # what it keeps for itself is there before it is looked at
    model.load_state_dict(plain.model.state_dict())
    exact = Untouched(copy.deepcopy(plain.model).double(), form)
    try:
        exact.learn(steady[0])
    except Exception:
        exact = plain  # a model that is fp32 in some place whatever it is told
    enter("accelerate in float32")
    ours = _accelerate(model, plain, result, "float32")
    if ours is not None:
        _describe_share(ours, result)
        for case in steady:
            enter(f"{case.name}, {'train' if case.training else 'eval'}")
            for autocast in (False, True) if case.narrow else (False,):
                _compare(case, ours, plain, exact, result, autocast)
        enter("restore")
        _check_restore(ours, plain, steady[0], result)
    both = [case for case in steady if case.narrow]
    _compare_narrow(plain, exact, both, result, enter)
    mild = build(result.name, result.family, outliers=False)
    mild_exact = Untouched(mild.double(), form) if exact is not plain else Untouched(mild, form)
    mild_plain = Untouched(copy.deepcopy(mild).float(), form)
    _compare_narrow(mild_plain, mild_exact, both, result, enter)
    if getattr(model, "_keep_in_fp32_modules", None):  # which concerns fp16 alone
        _compare_narrow(mild_plain, mild_exact, both, result, enter, torch.float16)


def _compare_narrow(
    wide: Untouched, exact: Untouched, chosen: list[Case], result: Result, enter: Callable[[str], None],
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Compares with weights in 16 bits."""
    name = str(dtype).removeprefix("torch.")
    enter(f"accelerate in {name}")
    plain = Untouched(narrow(copy.deepcopy(wide.model), dtype), wide.form)
    ours = _accelerate(copy.deepcopy(plain.model), plain, result, name)
    for case in chosen if ours is not None else ():
        enter(f"{name}, {'train' if case.training else 'eval'}")
        _compare(case, ours, plain, exact, result)


def _drop_unsteady(plain: Untouched, chosen: list[Case], result: Result) -> list[Case]:
    """Leaves the cases that the untouched model can run, and gives one answer for."""
    steady = []
    for case in chosen:
        try:
            first, reason = plain.learn(case), ""
            if case.narrow and not same(first, learn(plain.model, plain.draw(case), seed=1)):
                reason = "it is random"
            elif not any(value.isfinite().any() for value in first.values()) and case.name != "labels ignored":
                reason = "nothing is finite"
        except Exception as error:
            reason = _describe(error)
        if reason:
            result.dropped.append(f"{case.name}, {'train' if case.training else 'eval'}: {reason}"[:200])
        else:
            steady.append(case)
    random = [case.training for case in chosen if case.narrow and case not in steady]
    return [case for case in steady if case.training not in random]


def _accelerate(model: PreTrainedModel, plain: Untouched, result: Result, precision: str) -> Any:
    """The model, accelerated, or None."""
    model.train()
    before, state = take_snapshot(model), {name: value.clone() for name, value in model.state_dict().items()}
    try:
        stretto.accelerate(model)
    except Exception as error:
        result.blame("raises in accelerate", f"{precision}: {_describe(error)}")
        result.share = result.share or "untouched"
        for change in compare_snapshots(take_snapshot(model), before):
            result.blame("half exchanged", f"{precision}, after accelerate raised: {change}")
        return None
    if tuple(model.state_dict()) != tuple(state):
        result.blame("wrong", f"{precision}: accelerate changes the state dict's keys")
    elif not all(torch.equal(value, state[name]) for name, value in model.state_dict().items()):
        result.blame("wrong", f"{precision}: accelerate changes the state")
    model._families_before = before  # type: ignore[assignment]
    return model


def _describe_share(model: nn.Module, result: Result) -> None:
    lines = stretto.hf.report(model).lines
    result.left = sorted({f"{line.role}: {line.problem}"[:160] for line in lines if line.problem})
    done = [line for line in lines if not line.problem]
    result.share = "untouched" if not done else "partly" if result.left else "full"


def _compare(
    case: Case, ours: PreTrainedModel, plain: Untouched, exact: Untouched, result: Result, autocast: bool = False
) -> None:
    """What looks wrong is looked at again: with more batches, as one, and against runs of the untouched model whose
    weights are off by a rounding. A fault stays, while chance, as in a token that is routed elsewhere, does not."""
    dtype = torch.bfloat16 if autocast else next(ours.parameters()).dtype
    where = f"{case.name}, {'train' if case.training else 'eval'}, {'autocast' if autocast else str(dtype)[6:]}"
    floor = FLOORS[dtype] * (10 if exact.model.dtype == plain.model.dtype else 1)
    chances: list[Untouched] = []
    runs: list[dict[str, Tensor]] = []
    problems: list[str] = []
    forget = remember_buffers(ours)
    for seeds in (1, SEEDS):
        try:
            expected = [pool([one.learn(case, s, autocast) for s in range(seeds)]) for one in (plain, *chances)]
            reference = pool([exact.learn(case, s) for s in range(seeds)])
        except Exception as error:
            result.dropped.append(f"{where}: {_describe(error)}"[:200])
            return
        try:
            runs += [learn(ours.train(case.training), plain.draw(case, s), autocast) for s in range(len(runs), seeds)]
        except Exception as error:
            result.blame("raises when called", f"{where}: {_describe(error)}")
            return
        finally:
            forget()
        if seeds == 1:
            result.note_dtypes(where, runs[0], expected[0])
        problems = judge(pool(runs), expected, reference, floor)
        if not problems:
            break
        chances = [plain.nudged(seed, dtype) for seed in range(3)]
    result.tried += 1
    if problems:
        result.blame("wrong", f"{where}: {'; '.join(problems[:3])} ({len(problems)} in all)")


def _check_restore(ours: PreTrainedModel, plain: Untouched, case: Case, result: Result) -> None:
    before: Snapshot = ours._families_before  # type: ignore[assignment]
    del ours._families_before
    try:
        stretto.restore(ours.train())
    except Exception as error:
        result.blame("half exchanged", f"restore raises: {_describe(error)}")
        return
    for change in compare_snapshots(take_snapshot(ours), before):
        result.blame("half exchanged", f"after restore: {change}")
    ours.load_state_dict(plain.model.state_dict())  # what batches in training left there
    batch = plain.draw(case)
    if not same(learn(ours.eval(), batch), learn(plain.model.eval(), batch)):
        result.blame("half exchanged", "after restore: another result")


def _describe(error: BaseException) -> str:
    if isinstance(error, NotTried):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f" ({Path(last.filename).name}:{last.lineno})" if last else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


# All classes, each in a process of its own


def sweep(
    chosen: Sequence[tuple[str, str]], jobs: int, limit: float, save: Callable[[list[Result]], None]
) -> list[Result]:
    """Children are forked, so that they need not import transformers again; nothing has run here before."""
    results: list[Result] = []
    waiting, running = list(reversed(chosen)), list[_Child]()
    bar = Progress(
        TextColumn("{task.description:40.40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), auto_refresh=False,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(chosen))
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Child.start(*waiting.pop(), limit))
            wait([child.pipe for child in running], timeout=0.5)
            for child in running:
                child.read()
            if any(child.over for child in running):
                results += [child.last for child in running if child.over]
                running = [child for child in running if not child.over]
                save(results)
            counts = Counter(result.result for result in results)
            bad = sum(counts[fault] for fault in FAULTS)
            at = ", ".join(child.last.name for child in running)
            bar.update(task, completed=len(results), description=f"{bad} at fault  {at}", refresh=True)
    return sorted(results, key=lambda result: (result.family, result.name))


@dataclass
class _Child:
    process: BaseProcess
    pipe: Connection
    last: Result
    end: float
    over: bool = False

    @classmethod
    def start(cls, name: str, family: str, limit: float) -> _Child:
        context = get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(name, family, limit, theirs))
        process.start()
        theirs.close()
        return cls(process, ours, Result(name, family), time.monotonic() + PATIENCE * limit)

    def read(self) -> None:
        try:
            while not self.over and self.pipe.poll():
                self.last, self.over = self.pipe.recv()
        except EOFError:
            code = self._join() or 0
            self._fail(Signals(-code).name if code < 0 else f"exit code {code}")
        if not self.over and time.monotonic() > self.end:
            self.process.kill()
            self._fail("nothing happens")
        if self.over:
            self._join()

    def _join(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def _fail(self, how: str) -> None:
        """What happens before anything of ours runs is no fault of ours."""
        what = f"{how} while {self.last.stage}"
        if self.last.stage in ("building", "running the untouched model"):
            self.last.reason = what
        else:
            self.last.blame("hangs or crashes", what)
        self.over = True


def _work(name: str, family: str, limit: float, pipe: Connection) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    pipe.send((check_class(name, family, lambda result: pipe.send((result, False))), True))
    pipe.close()


# The script


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    counts = Counter(result.result for result in results)
    tried = [result for result in results if not result.reason]
    shares = Counter(result.share for result in tried)
    return {
        "classes": len(tried),
        "families": len({result.family for result in tried}),
        "cases": sum(result.tried for result in tried),
        "results": {name: counts[name] for name in RESULTS},
        "other dtypes": sum(bool(result.dtypes) for result in tried),
        "accelerated": {name: shares[name] for name in ("full", "partly", "untouched")},
    }


def show_results(results: Sequence[Result], console: Console) -> None:
    worst = Table("family", "class", "result", "where", title="Not equal")
    for result in results:
        if result.faults:
            first = next(result.faults[fault][0] for fault in FAULTS if fault in result.faults)
            worst.add_row(result.family, result.name, ", ".join(result.faults), first[:150])
    summary = summarise(results)
    table = Table("", "classes", "share", title=f"{summary['classes']} classes of {summary['families']} families")
    for name, count in [*summary["results"].items(), *summary["accelerated"].items()]:
        share = "" if name == "not tried" else f"{count / max(summary['classes'], 1):.1%}"
        table.add_row(name, str(count), share, end_section=name == "not tried")
    if worst.row_count:
        console.print(worst)
    console.print(table)
    console.print(f"{summary['other dtypes']} classes have outputs of another dtype")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    console.print(f"{summary['cases']} cases compared; {versions}")


def main(
    families: Annotated[str, typer.Option(help="folders of transformers/models, with commas between them")] = "",
    classes: Annotated[str, typer.Option(help="names of classes, with commas between them")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="processes at a time")] = 1,
    limit: Annotated[float, typer.Option(help="seconds of computing for one class")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="a JSON file for all results")] = None,
) -> None:
    prepare()
    known = model_classes()
    wanted = [name for name in families.split(",") if name], [name for name in classes.split(",") if name]
    unknown = [name for name in wanted[0] if name not in known.values()] + [n for n in wanted[1] if n not in known]
    if unknown:
        raise typer.BadParameter(f"transformers {transformers.__version__} has no {', '.join(unknown)}")
    chosen = [
        (name, family)
        for name, family in sorted(known.items(), key=lambda item: (item[1], item[0]))
        if not any(wanted) or family in wanted[0] or name in wanted[1]
    ]
    order = Counter[str]()
    turns = {name: (order.update([family]), order[family])[1] for name, family in chosen}
    chosen.sort(key=lambda item: turns[item[0]])  # one class of each family, then the second ones
    results = sweep(chosen, jobs, limit, partial(save, out))
    show_results(results, Console())
    save(out, results)
    sys.exit(1 if any(result.faults for result in results) else 0)


def save(path: Path | None, results: Sequence[Result]) -> None:
    if path is not None:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        rows = [{"result": result.result, **asdict(result)} for result in results]
        path.write_text(json.dumps({"versions": versions, "summary": summarise(results), "classes": rows}, indent=1))


def prepare() -> None:
    """One thread for models this small, and nothing but results on the screen."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    typer.run(main)
