"""How fast a training step is, how much memory it takes, where its time goes, and how far it is from the floor.

The floor is the least time the step could take on this device at the rates measured here, in the same process:

    floor = useful FLOPs / matmul rate + optimizer bytes / copy bandwidth

Useful FLOPs are those of flops.py: matrix products and attention on real tokens, forward and backward. The matmul rate
is that of one large product, so attention is counted as if it ran at that speed. The optimizer must read weight,
gradient and two moments and write all but the gradient: 7 values a parameter, 28 bytes if it is fp32, 14 if bf16.
Everything else (norms, activations, dropout, the loss) is counted as free.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from stretto.errors import NonFiniteError
from stretto.runtime import memory_gib, peak_flops

MOST_WARM_UP_PASSES = 20
MOST_KERNELS = 40  # to list by name
OPTIMIZER_VALUES = 7  # read and written per parameter
REPEATS = 20  # of what the ceilings are measured by

# The first match decides. Inductor names a kernel after the operators it came from, such as the transposition in front
# of an attention kernel, so its element-wise kernels must be recognised before anything else.
CATEGORIES = {
    "rest": re.compile(r"^triton_(poi|red|per|mix|for)_"),
    "optimizer": re.compile(r"adam|multi_tensor_apply|lpnorm|_squares_kernel", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|sdpa|attn|attention", re.IGNORECASE),
    "gemm": re.compile(r"nvjet|gemm|gemv|cutlass|xmma|cublas|sm\d\d+_|splitk|scaled_mm|^triton_tem_", re.IGNORECASE),
}
NOT_WORK = re.compile(r"Sync$|^Stream Wait")  # the profiler's notes about waiting


@dataclass(frozen=True)
class Contestant:
    step: Callable[[int], Tensor]  # one training step on batch number i; its mean loss, still on the device
    parameters: Sequence[Tensor]  # that are trained
    passes: int = 3  # over all batches, at least, until everything is compiled and recorded
    records: bool = False  # CUDA graphs, in its first passes: their replays no longer show in the statistics of memory


@dataclass(frozen=True)
class Work:
    """What one pass over all batches does."""

    num_batches: int
    tokens: int
    flops: float


class Kernel(NamedTuple):
    name: str
    start_us: float
    end_us: float


def measure(
    contestant: Contestant, work: Work, steps: int, device: torch.device, precision: torch.dtype
) -> dict[str, Any]:
    """Measures all numbers of one contestant. `steps` are rounded up to whole passes over the batches."""
    begin = time.perf_counter()
    first_loss = warm_up(contestant, work.num_batches, device)
    warm_up_s = time.perf_counter() - begin
    passes, last_loss = time_passes(contestant, work.num_batches, -(-steps // work.num_batches), device)
    pass_s = statistics.median(passes)
    step_ms = 1e3 * pass_s / work.num_batches
    reserved = {"reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30} if device.type == "cuda" else {}
    if not (math.isfinite(first_loss) and math.isfinite(last_loss)):
        raise NonFiniteError(f"the loss went from {first_loss} to {last_loss}: such a step is not worth timing")
    peak = peak_flops(device)
    numbers = {
        "tokens_per_s": work.tokens / pass_s,
        "step_ms": step_ms,
        "step_ms_by_pass": [1e3 * seconds / work.num_batches for seconds in passes],
        "mfu": work.flops / pass_s / peak if peak else None,
        "memory_gib": memory_gib(device),
        **reserved,
        "tokens_per_step": work.tokens / work.num_batches,
        "flops_per_step": work.flops / work.num_batches,
        "parameters": sum(p.numel() for p in contestant.parameters),
        "warm_up_s": warm_up_s,
        "first_loss": first_loss,
        "last_loss": last_loss,
    }
    if device.type == "cuda":
        numbers |= summarise(profile(contestant, work.num_batches, device), work.num_batches, step_ms)
    return numbers | find_floor(work, contestant.parameters, step_ms, device, precision)


def warm_up(contestant: Contestant, num_batches: int, device: torch.device) -> float:
    """Passes over all batches until two in a row are within 10% of the fastest: everything is then compiled, tuned and
    recorded. Returns the loss of the very first step.

    Peak memory counts from the second pass, since the first may hold what tuning needs; but from the beginning for a
    contestant that records CUDA graphs in the first pass.
    """
    first_loss, seconds, least = math.nan, list[float](), contestant.passes
    while len(seconds) < least or (len(seconds) < MOST_WARM_UP_PASSES and max(seconds[-2:]) > 1.1 * min(seconds)):
        begin = time.perf_counter()
        for i in range(num_batches):
            loss = contestant.step(len(seconds) * num_batches + i)
            if math.isnan(first_loss):
                first_loss = float(loss)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
        print(f"warm-up pass {len(seconds)}: {seconds[-1]:.3f} s", flush=True)
        if len(seconds) == 1 and device.type == "cuda" and not contestant.records:
            torch.cuda.reset_peak_memory_stats(device)
    return first_loss


def time_passes(
    contestant: Contestant, num_batches: int, passes: int, device: torch.device
) -> tuple[list[float], float]:
    """Returns the seconds of each pass over the batches, and the last loss; does not wait for the device in between."""
    clock = Clock(device)
    for i in range(passes * num_batches):
        loss = contestant.step(i)
        if (i + 1) % num_batches == 0:
            clock.tick()
    return clock.read(), float(loss)


class Clock:
    """Seconds between ticks, as the device saw them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ticks = device, list[Any]()
        _wait(device)
        self.tick()

    def tick(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.ticks.append(event)
        else:
            self.ticks.append(time.perf_counter())

    def read(self) -> list[float]:
        _wait(self.device)
        pairs = itertools.pairwise(self.ticks)
        return [a.elapsed_time(b) / 1e3 if self.device.type == "cuda" else b - a for a, b in pairs]


def profile(contestant: Contestant, num_batches: int, device: torch.device) -> list[Kernel]:
    """Returns everything that the GPU did in one pass over the batches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    _wait(device)
    with torch.profiler.profile(activities=activities) as profiler:
        for i in range(num_batches):
            contestant.step(i)
        _wait(device)
    return list_kernels(profiler)


def list_kernels(profiler: Any) -> list[Kernel]:
    """What the GPU did under a profiler, which has ended."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and not NOT_WORK.search(event.name)
    ]


def summarise(kernels: Sequence[Kernel], num_steps: int, step_ms: float) -> dict[str, Any]:
    """Adds up milliseconds per step by category, idle time, and the kernels that took most.

    Kernels take the same time under the profiler, but the host is slower there: idle time is what the GPU's busy time
    leaves of the step as it was timed without the profiler.
    """
    times, calls = defaultdict[str, float](float), Counter(kernel.name for kernel in kernels)
    for kernel in kernels:
        times[kernel.name] += (kernel.end_us - kernel.start_us) / 1e3 / num_steps
    breakdown = dict.fromkeys(("gemm", "attention", "optimizer", "rest"), 0.0)
    for name, ms in times.items():
        breakdown[categorise(name)] += ms
    busy_ms = _busy_us(kernels) / 1e3 / num_steps
    top = [
        {"name": name, "category": categorise(name), "ms": ms, "calls": calls[name] / num_steps}
        for name, ms in sorted(times.items(), key=lambda item: -item[1])[:MOST_KERNELS]
    ]
    return {"breakdown_ms": breakdown | {"idle": max(step_ms - busy_ms, 0.0)}, "kernels": top}


def categorise(name: str) -> str:
    return next((category for category, pattern in CATEGORIES.items() if pattern.search(name)), "rest")


def _busy_us(kernels: Sequence[Kernel]) -> float:
    """Returns the time in which at least one kernel ran; kernels on several streams may overlap."""
    busy, until = 0.0, -math.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        busy += max(kernel.end_us - max(kernel.start_us, until), 0.0)
        until = max(until, kernel.end_us)
    return busy


def find_floor(
    work: Work, parameters: Sequence[Tensor], step_ms: float, device: torch.device, precision: torch.dtype
) -> dict[str, float]:
    flops_per_s, bytes_per_s = measure_ceilings(device, precision)
    optimizer_bytes = OPTIMIZER_VALUES * sum(p.numel() * p.element_size() for p in parameters)
    floor_ms = 1e3 * (work.flops / work.num_batches / flops_per_s + optimizer_bytes / bytes_per_s)
    rates = {"matmul_tflops": flops_per_s / 1e12, "copy_tb_per_s": bytes_per_s / 1e12}
    return rates | {"floor_ms": floor_ms, "floor_share": floor_ms / step_ms}


def measure_ceilings(device: torch.device, precision: torch.dtype) -> tuple[float, float]:
    """Measures FLOP/s of a large square matrix product, and bytes/s, read plus written, of a large copy."""
    size, values = (8192, 2**28) if device.type == "cuda" else (512, 2**22)
    a, b = (torch.randn(size, size, device=device, dtype=precision) for _ in range(2))
    product = torch.empty_like(a)
    matmul_s = _median_seconds(lambda: torch.mm(a, b, out=product), device)
    source = torch.empty(values, device=device)
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source), device)
    return 2 * size**3 / matmul_s, 2 * values * source.element_size() / copy_s


def _median_seconds(call: Callable[[], Any], device: torch.device) -> float:
    call()
    clock = Clock(device)
    for _ in range(REPEATS):
        call()
        clock.tick()
    return statistics.median(clock.read())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
