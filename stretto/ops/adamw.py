"""AdamW for all parameters in one launch, with clipping, loss scale and the decision to skip read on the device.

    g = grad * min(limit / (norm + 1e-6), 1) / scale
    m = m + (g - m) (1 - beta1)                       exp_avg
    v = v beta2 + g^2 (1 - beta2)                     exp_avg_sq
    w = w (1 - lr decay) - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps),     c = 1 - beta^t

This is torch.optim.AdamW. The state of all parameters lies in flat tensors, one parameter after the other, each from a
multiple of 16 elements. Weights and gradients stay where they are: autograd hands over a fresh gradient for nothing,
while adding it into a flat one would read and write every gradient once more. So a launch gets a table with a row per
parameter (addresses, length, place in the flat state) and a list of chunks of at most 16,384 elements, one for each
program. Only the addresses change from step to step, and only they are sent again.

A weight is kept in one of three ways, told apart by the tensors:
    fp32    as it is
    split   a bf16 weight and an int16: bits(fp32) = (bits(bf16) << 16) + low. The bf16 weight is the fp32 one rounded
            to nearest (halves away from zero), so low fits 16 bits; together they are the fp32 weight, bit for bit
    bf16    only the bf16 weight, rounded at random: up with the probability that makes it right on average, since an
            update below half a unit in the last place would otherwise be lost each time
Moments may be bf16 too, rounded in the same way: with beta2 = 0.999, v would stop moving when rounded to nearest. The
random bits of an element are a hash of (seed, t, parameter, place in the whole parameter), so they are the same on any
number of processes. All arithmetic is fp32 without fused multiply-add: every way of keeping weights rounds alike.

A launch may write the new weights to other memory than it reads the old ones from, so that a backward pass which is
still to come finds them as they were. Then a step that is not applied copies them.

Bytes per weight, read and written: fp32 28, split 26, bf16 with bf16 moments 14. The norm reads each gradient before.
These are plain functions, not custom ops: a table of addresses is nothing that a compiler could see through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ops.dropout import hash_ref, mix, row_words
from stretto.ops.language import INTERPRET, jit, tl

ALIGN = 16  # elements; every parameter's state begins at a multiple, so that vector loads apply
CHUNK = 16384  # elements a program updates
BLOCK = 2048  # elements it holds at a time
SMALL_BLOCK = 1024  # where they are rounded at random: half the registers, so that twice as many programs hide waiting
NUM_WARPS = 8


@dataclass(frozen=True)
class Rule:
    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True)
class Workspace:
    """The state of P parameters in G groups."""

    exp_avg: Tensor  # [N], fp32 or bf16
    exp_avg_sq: Tensor  # [N], the same
    low: Tensor | None  # [N], int16: the low halves of bf16 weights; None where weights have no second half
    steps: Tensor  # [P], fp32: updates so far
    rates: Tensor  # [G, 2], fp32: learning rate, weight decay
    keys: Tensor  # [P, 2], int64: seed and step, for random rounding


@dataclass(frozen=True)
class Control:
    """The numbers on the device that steer one update."""

    applied: Tensor  # whether the update takes place
    corrections: Tensor  # [P, 2], fp64: c of both moments, with this update counted
    norm: Tensor  # norm of all gradients, before they are divided by `scale`
    limit: float  # largest norm without clipping; infinite: no clipping
    scale: Tensor  # factor that the gradients were multiplied by


@dataclass(frozen=True)
class Place:
    """The place of a parameter's elements, or of this process's part of them."""

    number: int  # number of the parameter
    group: int  # number of its group
    offset: int  # first element in the flat state
    length: int  # elements
    first: int  # place of the first element in the whole parameter

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.length]


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 weight of two halves."""
    return (high.float().view(torch.int32) + low).view(torch.float32)


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The halves, bf16 and int16, of an fp32 weight."""
    bits = torch.where(weight.isnan(), torch.nan, weight).view(torch.int32)  # one NaN, which does not overflow below
    high = (bits + 0x8000) & -0x10000
    return high.view(torch.float32).bfloat16(), (bits - high).short()


def round_ref(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to bf16 by 16 random bits: away from zero with a probability equal to the part that is cut off."""
    high = (x.view(torch.int32) + (bits & 0xFFFF).int()) & -0x10000
    return torch.where(x.isnan(), x, high.view(torch.float32)).bfloat16()


def adamw_ref(
    param: Tensor, out: Tensor, grad: Tensor, place: Place, state: Workspace, control: Control, rule: Rule
) -> None:
    """One parameter's update, from `param` to `out`, which may be the same; the definition of correct."""
    if not control.applied:
        out.copy_(param)
        return
    param, out, grad = param.view(-1), out.view(-1), grad.reshape(-1)
    exp_avg, exp_avg_sq = place.of(state.exp_avg), place.of(state.exp_avg_sq)
    low = place.of(state.low) if state.low is not None and param.dtype == torch.bfloat16 else None
    lr, decay = state.rates[place.group]
    c1, c2 = control.corrections[place.number].float()

    clip = ((control.norm + 1e-6).reciprocal() * control.limit).clamp(max=1.0)
    g = grad.float() * (clip / control.scale)
    m, v = exp_avg.float(), exp_avg_sq.float()
    m = m + (g - m) * (1 - rule.beta1)
    v = v * rule.beta2 + g * g * (1 - rule.beta2)
    weight = param.float() if low is None else join(param, low)
    weight = weight * (1 - lr * decay) - (lr / c1) * m / (_sqrt(v) * (1 / _sqrt(c2)) + rule.eps)

    if exp_avg.dtype == torch.bfloat16:
        bits = _bits_ref(place, state)
        m, v = round_ref(m, bits >> 8), round_ref(v, bits)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if low is not None:
        high, rest = split(weight)
        out.copy_(high)
        low.copy_(rest)
    elif param.dtype == torch.bfloat16:
        out.copy_(round_ref(weight, _bits_ref(place, state) >> 16))
    else:
        out.copy_(weight)


def _bits_ref(place: Place, state: Workspace) -> Tensor:
    """32 random bits per element: 16 for the weight, 16 for v, and 8 of each for m. Each is right on average by itself,
    and the kernel, which is short of instructions and not of bytes, is spared a second hash."""
    row = torch.tensor(place.number, device=state.keys.device)
    col = (torch.arange(place.length, device=state.keys.device) + place.first) & 0xFFFFFFFF
    return hash_ref(state.keys[place.number], row, col)


def _sqrt(x: Tensor) -> Tensor:
    return x.double().sqrt().float()  # to nearest; the fp32 root of torch on a CPU is sometimes one unit off


@jit
def _open_chunk(rows_ptr, chunks_ptr, CHUNK: tl.constexpr):
    """Returns this program's row of the table, its first element in the parameter, and its number of elements."""
    chunk = chunks_ptr + 2 * tl.program_id(0)
    row = rows_ptr + 9 * tl.load(chunk)
    begin = tl.load(chunk + 1).to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(row + 2) - begin, CHUNK).to(tl.int32)
    return row, begin, count


@jit
def _at(address, begin, TYPE: tl.constexpr, UNIT: tl.constexpr):
    """A pointer to element `begin`; the address is a multiple of UNIT bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)) + begin, UNIT)


@jit
def _sum_squares(grad_ptr, count, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    count = count // UNIT * UNIT  # changes nothing: it tells the compiler that UNIT elements share a mask
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + i, mask=i < count, other=0.0).to(tl.float32)
        total += g * g
    return tl.sum(total.to(tl.float64))  # whose order depends on the dtype of the gradients; in fp64 it does not show


@jit
def _squares_kernel(rows_ptr, chunks_ptr, sums_ptr, GRAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    row, begin, count = _open_chunk(rows_ptr, chunks_ptr, CHUNK)
    grad = tl.load(row + 1)
    if (tl.load(row + 7) != 0) & (count % 16 == 0):
        total = _sum_squares(_at(grad, begin, GRAD, 16), count, 16, BLOCK)
    else:
        total = _sum_squares(_at(grad, begin, GRAD, 1), count, 1, BLOCK)
    tl.store(sums_ptr + tl.program_id(0), total)


@jit
def _round(x, bits):
    """Computes round_ref, but leaves the result in fp32."""
    high = (x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
    return tl.where(x == x, high.to(tl.float32, bitcast=True), x)


@jit
def _copy(param_ptr, out_ptr, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, tl.load(param_ptr + i, mask=i < count), mask=i < count)


@jit
def _update(
    param_ptr, out_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, count, col,
    factor, rest1, beta2, rest2, eps, keep, lr, unroot, first, second,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes adamw_ref for one chunk; rest = 1 - beta, keep = 1 - lr decay, `lr` = lr / c1, unroot = 1 / sqrt(c2)."""
    count = count // UNIT * UNIT  # as above
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < count
        g = tl.load(grad_ptr + i, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(exp_avg_ptr + i, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq_ptr + i, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(param_ptr + i, mask=inside, other=0.0).to(tl.float32)
        if low_ptr is not None:
            low = tl.load(low_ptr + i, mask=inside, other=0).to(tl.int32)
            weight = (weight.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)

        m = m + (g - m) * rest1
        v = v * beta2 + g * g * rest2
        weight = weight * keep - tl.div_rn(lr * m, tl.sqrt_rn(v) * unroot + eps)

        bits = mix(mix((col + i).to(tl.uint32) ^ first) + second)  # computed only if one of these uses it
        if exp_avg_ptr.dtype.element_ty == tl.bfloat16:
            m, v = _round(m, bits >> 8), _round(v, bits)
        tl.store(exp_avg_ptr + i, m.to(exp_avg_ptr.dtype.element_ty), mask=inside)
        tl.store(exp_avg_sq_ptr + i, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=inside)
        if low_ptr is not None:
            raw = tl.where(weight == weight, weight, float("nan")).to(tl.int32, bitcast=True)
            high = (raw + 0x8000) & -0x10000
            tl.store(low_ptr + i, (raw - high).to(tl.int16), mask=inside)
            weight = high.to(tl.float32, bitcast=True)
        elif param_ptr.dtype.element_ty == tl.bfloat16:
            weight = _round(weight, bits >> 16)
        tl.store(out_ptr + i, weight.to(param_ptr.dtype.element_ty), mask=inside)


@jit
def _adamw_kernel(
    rows_ptr, chunks_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, rates_ptr, keys_ptr,
    applied_ptr, corrections_ptr, norm_ptr, scale_ptr, limit, rest1, beta2, rest2, eps,
    PARAM: tl.constexpr, GRAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, begin, count = _open_chunk(rows_ptr, chunks_ptr, CHUNK)
    param, grad, out = tl.load(row), tl.load(row + 1), tl.load(row + 8)
    if tl.load(applied_ptr) == 0:
        if out != param:
            _copy(_at(param, begin, PARAM, 1), _at(out, begin, PARAM, 1), count, BLOCK)
        return
    place, col = tl.load(row + 3) + begin, tl.load(row + 4) + begin
    number, group = tl.load(row + 5), tl.load(row + 6)
    exp_avg_ptr = tl.multiple_of(exp_avg_ptr + place, 16)
    exp_avg_sq_ptr = tl.multiple_of(exp_avg_sq_ptr + place, 16)
    if low_ptr is not None:
        low_ptr = tl.multiple_of(low_ptr + place, 16)

    clip = tl.minimum(tl.div_rn(1.0, tl.load(norm_ptr) + 1e-6) * limit, 1.0)
    factor = tl.div_rn(clip, tl.load(scale_ptr))
    lr = tl.load(rates_ptr + 2 * group)
    keep = 1 - lr * tl.load(rates_ptr + 2 * group + 1)
    lr = tl.div_rn(lr, tl.load(corrections_ptr + 2 * number).to(tl.float32))
    unroot = tl.div_rn(1.0, tl.sqrt_rn(tl.load(corrections_ptr + 2 * number + 1).to(tl.float32)))
    first, second = row_words(keys_ptr + 2 * number, number)
    if (tl.load(row + 7) != 0) & (count % 16 == 0):
        _update(
            _at(param, begin, PARAM, 16), _at(out, begin, PARAM, 16), _at(grad, begin, GRAD, 16),
            exp_avg_ptr, exp_avg_sq_ptr, low_ptr, count, col,
            factor, rest1, beta2, rest2, eps, keep, lr, unroot, first, second, 16, BLOCK,
        )  # fmt: skip
    else:
        _update(
            _at(param, begin, PARAM, 1), _at(out, begin, PARAM, 1), _at(grad, begin, GRAD, 1),
            exp_avg_ptr, exp_avg_sq_ptr, low_ptr, count, col,
            factor, rest1, beta2, rest2, eps, keep, lr, unroot, first, second, 1, BLOCK,
        )  # fmt: skip


class Launch:
    """Parameters of one dtype whose gradients have one dtype: what one launch covers."""

    def __init__(
        self, places: Sequence[Place], param_type: torch.dtype, grad_type: torch.dtype, device: torch.device
    ) -> None:
        self.places, self.param_type, self.grad_type, self.device = places, param_type, grad_type, device
        self.params: Sequence[Tensor] = ()
        self.outs: Sequence[Tensor] = ()
        self.grads: Sequence[Tensor | None] = ()
        if not self.runs_kernels:
            return
        self._addresses: list[int] = []
        self._recording = False
        self._lengths = torch.tensor([place.length for place in places], device="cpu")
        # Columns: address of the weight, of the gradient, length, offset, first, number, group, whether all addresses
        # are aligned, address of the new weight.
        rows = [[0, 0, 0, p.offset, p.first, p.number, p.group, 0, 0] for p in places]
        self._host = torch.tensor(rows, device="cpu")
        self._rows = torch.empty_like(self._host, device=device)
        counts = (self._lengths + CHUNK - 1) // CHUNK
        row = torch.repeat_interleave(counts)
        within = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts)[row]
        self._chunks = torch.stack([row, within], 1).int().to(device)
        self._sums = torch.empty(len(row), dtype=torch.float64, device=device)

    @property
    def runs_kernels(self) -> bool:
        return INTERPRET or self.device.type == "cuda"

    def aim(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], outs: Sequence[Tensor]) -> None:
        """Notes the addresses of weights, gradients and new weights; a parameter without gradient is passed over."""
        self.params, self.outs = params, outs
        self.grads = [grad if grad is None else grad.contiguous() for grad in grads]
        if not self.runs_kernels:
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*params, *self.grads, *outs)]
        if addresses != self._addresses:
            self._addresses = addresses
            columns = torch.tensor(addresses, device="cpu").view(3, -1).t()
            self._host[:, [0, 1, 8]] = columns
            self._host[:, 2] = self._lengths * (columns[:, 1] != 0)
            self._host[:, 7] = (columns % 16 == 0).all(1)
            if not self._recording:
                upload(self._host, self._rows)

    @contextmanager
    def recording(self) -> Iterator[Tensor | None]:
        """Gives a CUDA graph that is being recorded a table of its own, which is filled afterwards, since nothing may
        be uploaded during the recording. The gradients of the graph stay where they were, other gradients do not."""
        if not self.runs_kernels:
            yield None
            return
        usual, self._rows, self._recording = self._rows, torch.empty_like(self._rows), True
        try:
            yield self._rows
            upload(self._host, self._rows)
        finally:
            self._rows, self._recording, self._addresses = usual, False, []

    def sum_squares(self) -> Tensor:
        """Returns the sum of the squares of all gradients, fp64. The order of additions is fixed."""
        if not self.runs_kernels:
            sums = [grad.float().square().sum(dtype=torch.float64) for grad in self.grads if grad is not None]
            return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
        if len(self._chunks):
            _squares_kernel[(len(self._chunks),)](
                self._rows, self._chunks, self._sums, GRAD=_TYPES[self.grad_type],
                CHUNK=CHUNK, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
        return self._sums.sum()

    def update(self, state: Workspace, control: Control, rule: Rule) -> None:
        """Updates the weights, once for each `aim`, after which the gradients are let go. Autograd does not see the
        weights change on any device: the caller has to tell it."""
        if not self.runs_kernels:
            for param, out, grad, place in zip(self.params, self.outs, self.grads, self.places, strict=True):
                if grad is not None:
                    adamw_ref(param.data, out.data, grad, place, state, control, rule)
        elif len(self._chunks):
            _adamw_kernel[(len(self._chunks),)](
                self._rows, self._chunks, state.exp_avg, state.exp_avg_sq,
                state.low if self.param_type == torch.bfloat16 else None, state.rates, state.keys,
                control.applied, control.corrections, control.norm, control.scale, control.limit,
                1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps,
                PARAM=_TYPES[self.param_type], GRAD=_TYPES[self.grad_type],
                CHUNK=CHUNK, BLOCK=SMALL_BLOCK if state.exp_avg.dtype == torch.bfloat16 else BLOCK,
                num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        self.params = self.grads = self.outs = ()


def upload(host: Tensor, target: Tensor) -> None:
    """Copies to the device without waiting. torch keeps the pinned copy until the device has read it."""
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16} if tl else {}
