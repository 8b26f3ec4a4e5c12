"""Matrix products of 8-bit factors: how numbers get their 8 bits, and a `Product` that multiplies them.

A factor is divided by a scale, rounded to nearest and clamped; the product of two is multiplied by both scales:

    scale = max |x| / largest,   data = round(x / scale),   a b^T = scale_a scale_b (data_a data_b^T)

    recipe     one scale for                                     forward        dx             dweight
    tensor     a matrix; a transposed copy is the same bytes     E4M3 E4M3      E5M2 E4M3      E5M2 E4M3
    row        a row of a factor, along what is added up         E4M3 E4M3      E4M3 E4M3      E4M3 E4M3
    block128   128 numbers of a row; 128 x 128 of a weight       E4M3 E4M3      E4M3 E4M3      E4M3 E4M3

E4M3 has 3 mantissa bits and reaches 448, E5M2 has 2 and reaches 57,344. A matrix of zeros has the scale 1. A number
that is not finite makes its scale infinite, or becomes NaN where the scale is a bound that is known beforehand; so
results are not finite, and the guard of an update sees them.

Hopper adds up 8-bit factors along contiguous memory only. So x [T, C] is needed twice, as it is for the forward product
and transposed for dweight, dout as it is for dx and transposed for dweight, and a weight both ways. One kernel reads a
tile of 128 x 128 once and writes both; T is filled up with zeros to a multiple of 16 or 128 where it is added up.
A scale along rows or blocks depends on the direction: then the two copies are rounded apart, each from the original.

Saved for backward: the transposed x, one byte an element, and its scales, in place of x itself. Sums are fp32: on a
GPU partial sums are promoted (no fast accumulation), in all three products; on a CPU the definition below computes
exact products of the rounded factors, in fp32. Weights are rounded once an update by `renew`, both ways.

The largest magnitude of a tensor takes a pass over it. What a norm gives needs none: |x| <= sqrt(C) max |gamma| +
max |beta|, and in a floating-point format a bound that is too wide costs range at the lower end, not precision.

Nothing here has been measured on a GPU yet (docs/fp8.md).
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.language import cdiv, dense_rows, jit, runs_kernels, tl
from stretto.ops.products import Kept, Product, compute_dweight, compute_dx, multiply_scaled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensor", "row", "block128")
BLOCK = 128
PARTS = {"tensor": 16, "row": 16, "block128": BLOCK}  # what dims of a product have to be multiples of


class Narrow(NamedTuple):
    """A matrix [M, K] in 8 bits, both ways. Scales of blocks are [blocks of K, M], of a weight [blocks of M, blocks
    of K]; those of rows are [M, 1]."""

    data: Tensor  # [M, K]
    scale: Tensor
    data_t: Tensor  # [K, M], M filled up
    scale_t: Tensor


def find_scale(most: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of numbers up to `most` in magnitude; infinite if that is no finite number."""
    most = most.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(most == 0, 1.0, most / torch.finfo(dtype).max)


def most_of(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude in fp32, NaN if there is one; along a dim, which stays. It is one pass, without a copy."""
    return torch.linalg.vector_norm(x, torch.inf, dim, keepdim=dim is not None, dtype=torch.float32)


def _round(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * scale.reciprocal()).clamp(-largest, largest).masked_fill(x.isinf(), torch.nan).to(dtype)


def _round_blocks(x: Tensor, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    """x [M, K] in blocks of `rows` x 128; and scales [blocks of K, M], or [blocks of M, blocks of K] for squares."""
    height, width = x.shape
    padded = F.pad(x, (0, -width % BLOCK, 0, -height % rows))
    tiles = padded.view(len(padded) // rows, rows, -1, BLOCK)
    scale = find_scale(tiles.abs().amax((1, 3)), dtype)
    data = _round(tiles, scale[:, None, :, None], dtype).view(padded.shape)[:height, :width]
    return data.contiguous(), (scale if rows > 1 else scale.t().contiguous())


def quantize_ref(x: Tensor, dtype: torch.dtype, recipe: str, most: Tensor | None, weight: bool) -> Narrow:
    wide = x.float()
    filled = F.pad(wide, (0, 0, 0, -len(x) % PARTS[recipe])).t()
    if recipe == "block128":
        rows = BLOCK if weight else 1
        return Narrow(*_round_blocks(wide, dtype, rows), *_round_blocks(filled, dtype, rows))
    if recipe == "tensor":
        scale = scale_t = find_scale(most_of(x) if most is None else most, dtype).view(1, 1)
    else:
        scale, scale_t = find_scale(most_of(x, 1), dtype), find_scale(most_of(x, 0), dtype).view(-1, 1)
    return Narrow(_round(wide, scale, dtype), scale, _round(filled, scale_t, dtype).contiguous(), scale_t)


@jit
def _round_first(y, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Rounds to nearest, as the cast of a GPU does. Triton's interpreter (3.6 and 3.7) loses a carry into the exponent
    when it casts to 8 bits, but casts numbers of the format as they are."""
    LOW: tl.constexpr = 23 - MANTISSA  # bits that are lost
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + (1 << (LOW - 1)) - 1 + ((bits >> LOW) & 1)) >> LOW << LOW
    steps: tl.constexpr = 1.5 * 2.0 ** (23 + LOWEST - MANTISSA)  # a sum with it is a multiple of the smallest step
    y = tl.where(tl.abs(y) < 2.0**LOWEST, (y + steps) - steps, tl.where(y == y, bits.to(tl.float32, bitcast=True), y))
    return y


@jit
def _put(x, scale, ptr, offset, mask, LARGEST: tl.constexpr, EMULATE: tl.constexpr):
    y = x * (1.0 / scale)
    y = tl.where(y > LARGEST, LARGEST, y)  # NaN stays
    y = tl.where(y < -LARGEST, -LARGEST, y)
    y = tl.where(tl.abs(x) == float("inf"), float("nan"), y)
    if EMULATE:
        y = _round_first(y, 3, -6) if LARGEST == 448 else _round_first(y, 2, -14)
    tl.store(ptr + offset, y.to(ptr.dtype.element_ty), mask=mask)


@jit
def _scale_of(most, LARGEST: tl.constexpr):
    most = tl.where(most == most, most, float("inf"))
    return tl.where(most == 0.0, 1.0, most / LARGEST)


@jit
def _most_of(x, AXIS: tl.constexpr):
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), AXIS)


@jit
def _quantize_kernel(
    x_ptr, most_ptr, most_t_ptr, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr, rows, cols, filled_rows, x_stride,
    KIND: tl.constexpr,  # tensor, row, block128, or square: the blocks of a weight
    LARGEST: tl.constexpr, SIZE: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """A program has one tile of SIZE x SIZE. The largest magnitudes of tensors and rows are given, those of blocks are
    found here."""
    tile_row, tile_col = tl.program_id(0), tl.program_id(1)
    row = (tile_row * SIZE + tl.arange(0, SIZE)).to(tl.int64)[:, None]
    col = (tile_col * SIZE + tl.arange(0, SIZE)).to(tl.int64)[None, :]
    inside, filled = (row < rows) & (col < cols), (row < filled_rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if KIND == "tensor":
        scale = _scale_of(tl.load(most_ptr), LARGEST)
        scale_t = scale
        tl.store(scale_ptr, scale)  # by all programs, the same
    elif KIND == "row":
        scale = _scale_of(tl.load(most_ptr + row, mask=row < rows, other=0.0), LARGEST)
        scale_t = _scale_of(tl.load(most_t_ptr + col, mask=col < cols, other=0.0), LARGEST)
        tl.store(scale_ptr + row, scale, mask=row < rows)
        tl.store(scale_t_ptr + col, scale_t, mask=col < cols)
    elif KIND == "square":
        scale = _scale_of(_most_of(tl.reshape(x, [SIZE * SIZE]), 0), LARGEST)
        scale_t = scale
        tl.store(scale_ptr + tile_row * tl.num_programs(1) + tile_col, scale)
        tl.store(scale_t_ptr + tile_col * tl.num_programs(0) + tile_row, scale)
    else:
        scale = _scale_of(_most_of(x, 1), LARGEST)[:, None]
        scale_t = _scale_of(_most_of(x, 0), LARGEST)[None, :]
        tl.store(scale_ptr + tile_col.to(tl.int64) * rows + row, scale, mask=row < rows)
        tl.store(scale_t_ptr + tile_row.to(tl.int64) * cols + col, scale_t, mask=col < cols)
    _put(x, scale, data_ptr, row * cols + col, inside, LARGEST, EMULATE)
    _put(x, scale_t, data_t_ptr, col * filled_rows + row, filled, LARGEST, EMULATE)


def _new_narrow(x: Tensor, dtype: torch.dtype, recipe: str, weight: bool) -> Narrow:
    """The memory of the result."""
    (rows, cols), parts = x.shape, PARTS[recipe]
    high, wide = cdiv(rows, BLOCK), cdiv(cols, BLOCK)
    shapes = {
        "tensor": ((1, 1), (1, 1)),
        "row": ((rows, 1), (cols, 1)),
        "block128": ((high, wide), (wide, high)) if weight else ((wide, rows), (high, cols)),
    }[recipe]
    scale, scale_t = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    data, data_t = x.new_empty(rows, cols, dtype=dtype), x.new_empty(cols, cdiv(rows, parts) * parts, dtype=dtype)
    return Narrow(data, scale, data_t, scale if recipe == "tensor" else scale_t)


def launch_quantize(
    x: Tensor, dtype: torch.dtype, recipe: str, most: Tensor | None, weight: bool,
    out: Narrow | None = None, emulate: bool | None = None,
) -> Narrow:  # fmt: skip
    """Computes quantize_ref by one kernel, after one reduction for each way where scales are not those of blocks.
    `emulate`: the kernel rounds before it casts; None: where it runs in the interpreter."""
    x, emulate = dense_rows(x), not x.is_cuda if emulate is None else emulate
    out, most_t = out or _new_narrow(x, dtype, recipe, weight), None
    if recipe == "row":
        most, most_t = most_of(x, 1), most_of(x, 0)
    elif recipe == "tensor" and most is None:
        most = most_of(x)
    _quantize_kernel[(cdiv(len(x), BLOCK), cdiv(x.shape[1], BLOCK))](
        x, most, most_t, *out, *x.shape, out.data_t.shape[1], x.stride(0),
        KIND="square" if recipe == "block128" and weight else recipe, LARGEST=torch.finfo(dtype).max, SIZE=BLOCK,
        EMULATE=emulate, num_warps=8,
    )  # fmt: skip
    return out


def quantize(
    x: Tensor, dtype: torch.dtype = E4M3, recipe: str = "tensor", most: Tensor | None = None, weight: bool = False,
    out: Narrow | None = None,
) -> Narrow:  # fmt: skip
    """x [M, K] in 8 bits, both ways, in the memory of `out` if that is given. `most` is a bound of its magnitudes, in
    fp32, for the recipe `tensor`, where one is known. `weight`: blocks are squares, which are the same both ways."""
    if recipe not in RECIPES:
        raise ValueError(f"a recipe is one of {', '.join(RECIPES)}, not {recipe!r}")
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"8-bit factors are matrices with at least one row, not {list(x.shape)}")
    if runs_kernels(x):
        return launch_quantize(x, dtype, recipe, most, weight, out)
    found = quantize_ref(x, dtype, recipe, most, weight)
    return found if out is None else Narrow(*(old.copy_(new) for old, new in zip(out, found, strict=True)))


def can_multiply(recipe: str, out: int, inner: int) -> bool:
    """Whether a weight [out, inner] has a shape that the products of a GPU take; tokens may be any number."""
    return out % PARTS[recipe] == 0 and inner % PARTS[recipe] == 0


class Eight(Product):
    """The products of one layer in 8 bits, by one of RECIPES. It can be switched off, and then multiplies as usual;
    and watched: then it measures its factors, and compares its gradients with those of factors that were not rounded,
    for which it keeps these too."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self.on, self.watched = recipe, True, False
        self.gradients = E5M2 if recipe == "tensor" else E4M3  # the format of dout
        self.seen: dict[str, Tensor] = {}  # the most of what was measured; `dx` and `dweight`: 1 - cosine
        self.most: Tensor | None = None  # a bound of the input, if there is one
        self._weight: Narrow | None = None
        self._version = -1
        self._dtype = torch.bfloat16  # of results

    @torch.no_grad()
    def renew(self, weight: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> None:
        """Rounds the weight, before an update. If the input is what a norm gives, its parameters say how large it can
        be. All of it stays where it is on the device: a CUDA graph finds it there."""
        self._weight = quantize(weight, E4M3, self.recipe, weight=True, out=self._weight)
        self._version = weight._version
        if gamma is not None and self.recipe == "tensor":
            most = sqrt(len(gamma)) * most_of(gamma)
            most = most if beta is None else most + most_of(beta)
            self.most = most if self.most is None else self.most.copy_(most)

    def _weigh(self, weight: Tensor) -> Narrow:
        """The weight as `renew` has rounded it; a weight that has changed since, or was gathered, is rounded here."""
        if self._weight is None or self._version != weight._version:
            return quantize(weight, E4M3, self.recipe, weight=True)
        return self._weight

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Kept]:
        if not self._can(x):
            return super().multiply(x, weight, bias)
        x8, w8, self._dtype = quantize(x, E4M3, self.recipe, self.most), self._weigh(weight), x.dtype
        out = multiply_scaled(x8.data, w8.data, x8.scale, w8.scale, self.recipe, x.dtype, bias, square=True)
        return out, self._keep(x, x8)

    def keep(self, x: Tensor) -> Kept:
        return self._keep(x, quantize(x, E4M3, self.recipe, self.most)) if self._can(x) else super().keep(x)

    def _can(self, x: Tensor) -> bool:
        return self.on and len(x) > 0

    def _keep(self, x: Tensor, x8: Narrow) -> Kept:
        if self.watched:
            self._measure("x", x, x8)
            return x8.data_t, x8.scale_t, x
        return x8.data_t, x8.scale_t

    def take(self, dout: Tensor) -> Kept:
        if not self._can(dout):
            return super().take(dout)
        dout8, self._dtype = quantize(dout, self.gradients, self.recipe), dout.dtype
        if self.watched:
            self._measure("dout", dout, dout8)
            return *dout8, dout
        return tuple(dout8)

    def compute_dx(self, taken: Kept, weight: Tensor) -> Tensor:
        if len(taken) == 1:
            return super().compute_dx(taken, weight)
        w8 = self._weigh(weight)
        parts = (taken[0], w8.data_t, taken[1], w8.scale_t)
        dx = multiply_scaled(*parts, self.recipe, self._dtype, square=True)
        if len(taken) > 4:
            self._compare("dx", dx, compute_dx(taken[4], weight.to(self._dtype)))
        return dx

    def compute_dweight(self, taken: Kept, kept: Kept) -> Tensor:
        if len(taken) == 1:
            return super().compute_dweight(taken, kept)
        dweight = multiply_scaled(taken[2], kept[0], taken[3], kept[1], self.recipe, self._dtype)
        if len(taken) > 4 and len(kept) > 2:
            self._compare("dweight", dweight, compute_dweight(taken[4], kept[2]))
        return dweight

    def _note(self, name: str, value: Tensor) -> None:
        self.seen[name] = value if name not in self.seen else torch.maximum(self.seen[name], value)

    @torch.no_grad()
    def _measure(self, name: str, x: Tensor, x8: Narrow) -> None:
        """The largest magnitude, and the shares of numbers that were clamped and that became zero."""
        data, largest = x8.data.float(), torch.finfo(x8.data.dtype).max
        zero = (data == 0) & (x != 0)
        self._note(f"most {name}", most_of(x))
        self._note(f"underflow {name}", zero.float().mean())
        if self.recipe == "tensor":
            over = (x.float() * x8.scale.reciprocal()).abs() > largest * 1.01  # more than the division rounds
            self._note(f"saturated {name}", over.float().mean())

    @torch.no_grad()
    def _compare(self, name: str, found: Tensor, exact: Tensor) -> None:
        """1 - cosine; two gradients that are both zero, or not finite, say nothing."""
        a, b = found.flatten().float(), exact.flatten().float()
        off = 1 - F.cosine_similarity(a, b, 0, eps=0.0)
        self._note(name, torch.nan_to_num(off, nan=0.0))
