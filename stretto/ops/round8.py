"""How numbers get 8 bits: scales, bounds that are known beforehand, and the kernels that round a matrix both ways.

A factor is divided by a scale, rounded to nearest and clamped:

    scale = most / largest,   data = round(x / scale),   most >= |x| if nothing is to be clamped

    recipe     one scale for                                     most
    tensor     a matrix; a transposed copy is the same bytes     a bound, or the maximum
    row        a row of a factor, along what is added up         the maximum
    block128   128 numbers of a row; 128 x 128 of a weight       the maximum, found in passing

E4M3 has 3 mantissa bits and reaches 448, E5M2 has 2 and reaches 57,344. A matrix of zeros has the scale 1. A number
that is not finite makes its scale infinite, or becomes NaN where the scale is a bound that is known beforehand; so
results are not finite, and the guard of an update sees them.

Hopper adds up 8-bit factors along contiguous memory only. So x [T, C] is needed twice, as it is for the forward product
and transposed for dweight, dout as it is for dx and transposed for dweight, and a weight both ways. A kernel reads a
tile once and writes both: 4 bytes an element of a bf16 matrix. T is filled up with zeros to a multiple of 16 or 128
where it is added up. A scale along rows or blocks depends on the direction: then the two copies are rounded apart, each
from the original.

Bounds. The largest magnitude of a tensor takes a pass over it, which costs half as much again as rounding. So a
`Bound` is used in all of an update, and the kernels find in passing the largest magnitude that there really was,
`seen`, which makes the next update's bound: most = margin * seen. What a margin costs in a floating-point format is
range at the lower end, not precision. E4M3 holds 15 octaves with all of its mantissa bits and E5M2 holds 30; MARGIN
takes 2 and 3 of them. Activations and weights move little from one update to the next, unless a run is young, and of a
normal distribution 13 octaves hold all but one number in a thousand. Gradients follow the loss, its factor and the
batch, and have outliers: hence E5M2, and 8. What is larger than a bound is clamped to it, which `seen` tells. Where
there is no bound yet, the maximum is taken first. The bits are a function of x and of `most` alone, whichever kernel
rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.language import EMULATE, cdiv, dense_rows, jit, runs_kernels, tl

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MARGIN = {E4M3: 4.0, E5M2: 8.0}
RECIPES = ("tensor", "row", "block128")
BLOCK = 128
SPACE = 4  # numbers from one bound to the next: kernels are compiled for addresses that are multiples of 16 bytes
PARTS = {"tensor": 16, "row": 16, "block128": BLOCK}  # what dims of a product have to be multiples of
# Fours of rows and columns of a tile, and warps, of kernels that write both ways: 128 bytes of each row of both
# results, and the loads of 64 elements a thread may be on their way at once.
QUADS, COLS, WARPS = 32, 128, 8


class Narrow(NamedTuple):
    """A matrix [M, K] in 8 bits, both ways. Scales of blocks are [blocks of K, M], of a weight [blocks of M, blocks
    of K]; those of rows are [M, 1]."""

    data: Tensor  # [M, K]
    scale: Tensor
    data_t: Tensor  # [K, M], M filled up
    scale_t: Tensor


@dataclass
class Bound:
    """How large the numbers of one factor may be in an update, and how large they were. Both stay where they are on the
    device: a CUDA graph finds them there."""

    most: Tensor  # [], fp32
    seen: Tensor  # [], fp32; infinite if there was a number that is not finite
    known: bool = False  # `most` is used; else the maximum is taken
    asked: bool = False  # the maximum was taken since it was last said whether the bound is known


def find_scale(most: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of numbers up to `most` in magnitude; infinite if that is no finite number."""
    most = most.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(most == 0, 1.0, most / torch.finfo(dtype).max)


def most_of(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude in fp32, infinite if there is a NaN; along a dim, which stays. It is one pass, without a
    copy."""
    most = torch.linalg.vector_norm(x, torch.inf, dim, keepdim=dim is not None, dtype=torch.float32)
    return most.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def find_most(x: Tensor, bound: Bound | None) -> Tensor:
    """The maximum of x, where no bound is known; it counts as seen."""
    most = most_of(x)
    if bound is not None:
        bound.asked = True
        torch.maximum(bound.seen, most, out=bound.seen)
    return most


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


def quantize_ref(x: Tensor, dtype: torch.dtype, recipe: str, bound: Bound | None, weight: bool) -> Narrow:
    wide = x.float()
    filled = F.pad(wide, (0, 0, 0, -len(x) % PARTS[recipe])).t()
    if recipe == "block128":
        rows = BLOCK if weight else 1
        return Narrow(*_round_blocks(wide, dtype, rows), *_round_blocks(filled, dtype, rows))
    if recipe == "tensor":
        found = find_most(x, bound)
        most = bound.most if bound is not None and bound.known else found
        scale = scale_t = find_scale(most, dtype).view(1, 1)
    else:
        scale, scale_t = find_scale(most_of(x, 1), dtype), find_scale(most_of(x, 0), dtype).view(-1, 1)
    return Narrow(_round(wide, scale, dtype), scale, _round(filled, scale_t, dtype).contiguous(), scale_t)


@jit
def _emulate(y, LARGEST: tl.constexpr):
    """The bytes of y, as a GPU rounds to nearest. Triton's interpreter (3.6 and 3.7) loses a carry into the exponent
    when it casts to 8 bits, but casts numbers of the format as they are, other than NaN."""
    MANTISSA: tl.constexpr = 3 if LARGEST == 448 else 2
    LOWEST: tl.constexpr = -6 if LARGEST == 448 else -14
    FORMAT: tl.constexpr = tl.float8e4nv if LARGEST == 448 else tl.float8e5
    LOW: tl.constexpr = 23 - MANTISSA  # bits that are lost
    y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))  # NaN stays
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + (1 << (LOW - 1)) - 1 + ((bits >> LOW) & 1)) >> LOW << LOW
    steps: tl.constexpr = 1.5 * 2.0 ** (23 + LOWEST - MANTISSA)  # a sum with it is a multiple of the smallest step
    near = tl.where(tl.abs(y) < 2.0**LOWEST, (y + steps) - steps, bits.to(tl.float32, bitcast=True))
    return tl.where(y == y, near.to(FORMAT).to(tl.uint8, bitcast=True), 0x7F).to(tl.uint8)


@jit
def _divide(x, scale):
    """x / scale; NaN for what is infinite, as infinity times zero is."""
    inverse = tl.div_rn(1.0, scale)
    if EMULATE:
        return tl.where(tl.abs(x) == float("inf"), float("nan"), x * inverse)
    return tl.fma(x, inverse, x * 0.0)


@jit
def _narrow(a, b, c, d, LARGEST: tl.constexpr):
    """Returns the bytes [Q, C] of four tiles, and words [Q, C] of one byte of each. The instruction rounds two numbers,
    clamps them and keeps NaN; some versions of Triton cast to E5M2 by a dozen others, which do not clamp. Four columns
    at a time, 4 x 4 bytes are transposed in 8 instructions."""
    if EMULATE:
        a, b, c, d = _emulate(a, LARGEST), _emulate(b, LARGEST), _emulate(c, LARGEST), _emulate(d, LARGEST)
        words = a.to(tl.int32) | b.to(tl.int32) << 8 | c.to(tl.int32) << 16 | d.to(tl.int32) << 24
        return a, b, c, d, words
    ROUND: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if LARGEST == 448 else "cvt.rn.satfinite.e5m2x2.f32"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .b32 a, b, c, d, s, t, u, v; "
        + ROUND + " l, $9, $8; " + ROUND + " h, $11, $10; mov.b32 a, {l, h}; "
        + ROUND + " l, $13, $12; " + ROUND + " h, $15, $14; mov.b32 b, {l, h}; "
        + ROUND + " l, $17, $16; " + ROUND + " h, $19, $18; mov.b32 c, {l, h}; "
        + ROUND + " l, $21, $20; " + ROUND + " h, $23, $22; mov.b32 d, {l, h}; "
        "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; "
        "prmt.b32 s, a, b, 0x5140; prmt.b32 t, c, d, 0x5140; prmt.b32 u, a, b, 0x7362; prmt.b32 v, c, d, 0x7362; "
        "prmt.b32 $4, s, t, 0x5410; prmt.b32 $5, s, t, 0x7632; prmt.b32 $6, u, v, 0x5410; prmt.b32 $7, u, v, 0x7632; }",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, c, d],
        dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8, tl.int32), is_pure=True, pack=4,
    )  # fmt: skip


@jit
def scale_of(most, LARGEST: tl.constexpr):
    most = tl.where(most == most, most, float("inf"))
    return tl.where(most == 0.0, 1.0, tl.div_rn(most, LARGEST))


@jit
def _store(at, found, mask):
    tl.store(at, found.to(at.dtype.element_ty, bitcast=True), mask=mask)


@jit
def _put_words(words, data_t_ptr, quad, col, exists, filled_rows):
    """Four rows of a column lie side by side in the transposed matrix, of which this is an int32 view: as a word they
    cross from thread to thread at the price of a byte. `filled_rows` is a multiple of 16."""
    quads = filled_rows // 16 * 4  # tells the compiler that it is a multiple of 4: words are stored by fours
    tl.store(data_t_ptr + col * quads + quad, words, mask=(quad < quads) & exists)


@jit
def put_turned(a, b, c, d, scale, data_t_ptr, quad, col, exists, filled_rows, LARGEST: tl.constexpr):
    """Rounds a tile as put_both does, and writes it transposed only."""
    _, _, _, _, words = _narrow(
        _divide(a, scale), _divide(b, scale), _divide(c, scale), _divide(d, scale), LARGEST
    )  # fmt: skip
    _put_words(words, data_t_ptr, quad, col, exists, filled_rows)


@jit
def put_both(
    a, b, c, d, scale, data_ptr, data_t_ptr, quad, col, rows, stride, exists, filled_rows, LARGEST: tl.constexpr
):
    """Rounds a tile and writes it both ways, given its rows 4 quad, 4 quad + 1, + 2 and + 3 as [Q, C], in fp32; quad
    [Q, 1] and col [1, C] are int64, `exists` masks columns, and rows are `stride` apart. Returns magnitudes [Q, C], the
    largest of which is that of the tile, or NaN. What a tile reads is read before this is called: the compiler cannot
    know that it is not overwritten here, and would wait for each row."""
    at = data_ptr + 4 * quad * stride + col
    a8, b8, c8, d8, words = _narrow(
        _divide(a, scale), _divide(b, scale), _divide(c, scale), _divide(d, scale), LARGEST
    )  # fmt: skip
    _store(at, a8, (4 * quad < rows) & exists)
    _store(at + stride, b8, (4 * quad + 1 < rows) & exists)
    _store(at + 2 * stride, c8, (4 * quad + 2 < rows) & exists)
    _store(at + 3 * stride, d8, (4 * quad + 3 < rows) & exists)
    _put_words(words, data_t_ptr, quad, col, exists, filled_rows)
    return larger(larger(tl.abs(a), b), larger(tl.abs(c), d))


@jit
def larger(a, b):
    """The larger of a and |b|; NaN if one of them is."""
    return tl.maximum(a, tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@jit
def see(magnitudes, seen_ptr):
    """Makes `seen` the largest magnitude of a tile, if it is less; infinite if there is a NaN."""
    bits = magnitudes.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of magnitudes, with NaN above all
    tl.atomic_max(seen_ptr, tl.minimum(tl.max(bits), 0x7F800000).to(tl.float32, bitcast=True), sem="relaxed")


@jit
def _most_of(x, AXIS: tl.constexpr):
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), AXIS)


@jit
def _load_row(x_ptr, row, col, rows, cols, x_stride):
    return tl.load(x_ptr + row * x_stride + col, mask=(row < rows) & (col < cols), other=0.0).to(tl.float32)


@jit
def round_tile(
    x_ptr, tile_row, tile_col, rows, cols, filled_rows, x_stride, scale, data_ptr, data_t_ptr,
    LARGEST: tl.constexpr, QUADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rounds a tile of 4 QUADS x COLS both ways, and returns magnitudes as put_both does."""
    quad = (tile_row * QUADS + tl.arange(0, QUADS)).to(tl.int64)[:, None]
    col = (tile_col * COLS + tl.arange(0, COLS)).to(tl.int64)[None, :]
    a = _load_row(x_ptr, 4 * quad, col, rows, cols, x_stride)
    b = _load_row(x_ptr, 4 * quad + 1, col, rows, cols, x_stride)
    c = _load_row(x_ptr, 4 * quad + 2, col, rows, cols, x_stride)
    d = _load_row(x_ptr, 4 * quad + 3, col, rows, cols, x_stride)
    return put_both(
        a, b, c, d, scale, data_ptr, data_t_ptr, quad, col, rows, cols, col < cols, filled_rows, LARGEST
    )  # fmt: skip


@jit
def _round_kernel(
    x_ptr, most_ptr, seen_ptr, data_ptr, scale_ptr, data_t_ptr, rows, cols, filled_rows, x_stride,
    LARGEST: tl.constexpr, QUADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Recipe `tensor`: a program has one tile. `seen` is None where the maximum was taken before."""
    scale = scale_of(tl.load(most_ptr), LARGEST)
    most = round_tile(
        x_ptr, tl.program_id(0), tl.program_id(1), rows, cols, filled_rows, x_stride, scale, data_ptr, data_t_ptr,
        LARGEST, QUADS, COLS,
    )  # fmt: skip
    tl.store(scale_ptr, scale)  # by all programs, the same
    if seen_ptr is not None:
        see(most, seen_ptr)


@jit
def _quantize_kernel(
    x_ptr, most_ptr, most_t_ptr, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr, rows, cols, filled_rows, x_stride,
    KIND: tl.constexpr,  # row, block128, or square: the blocks of a weight
    LARGEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The other recipes: a program has one tile of SIZE x SIZE. The largest magnitudes of rows are given, those of
    blocks are found here."""
    tile_row, tile_col = tl.program_id(0), tl.program_id(1)
    row = (tile_row * SIZE + tl.arange(0, SIZE)).to(tl.int64)[:, None]
    col = (tile_col * SIZE + tl.arange(0, SIZE)).to(tl.int64)[None, :]
    inside, filled = (row < rows) & (col < cols), (row < filled_rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if KIND == "row":
        scale = scale_of(tl.load(most_ptr + row, mask=row < rows, other=0.0), LARGEST)
        scale_t = scale_of(tl.load(most_t_ptr + col, mask=col < cols, other=0.0), LARGEST)
        tl.store(scale_ptr + row, scale, mask=row < rows)
        tl.store(scale_t_ptr + col, scale_t, mask=col < cols)
    elif KIND == "square":
        scale = scale_of(_most_of(tl.reshape(x, [SIZE * SIZE]), 0), LARGEST)
        scale_t = scale
        tl.store(scale_ptr + tile_row * tl.num_programs(1) + tile_col, scale)
        tl.store(scale_t_ptr + tile_col * tl.num_programs(0) + tile_row, scale)
    else:
        scale = scale_of(_most_of(x, 1), LARGEST)[:, None]
        scale_t = scale_of(_most_of(x, 0), LARGEST)[None, :]
        tl.store(scale_ptr + tile_col.to(tl.int64) * rows + row, scale, mask=row < rows)
        tl.store(scale_t_ptr + tile_row.to(tl.int64) * cols + col, scale_t, mask=col < cols)
    _put(x, scale, data_ptr, row * cols + col, inside, LARGEST)
    _put(x, scale_t, data_t_ptr, col * filled_rows + row, filled, LARGEST)


@jit
def _put(x, scale, ptr, offset, mask, LARGEST: tl.constexpr):
    y = _divide(x, scale)
    if EMULATE:
        _store(ptr + offset, _emulate(y, LARGEST), mask)
    else:
        y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))  # NaN stays
        tl.store(ptr + offset, y.to(ptr.dtype.element_ty), mask=mask)


def new_narrow(x: Tensor, shape: tuple[int, int], dtype: torch.dtype, recipe: str, weight: bool = False) -> Narrow:
    """The memory for a matrix of this shape, on the device of x."""
    (rows, cols), parts = shape, PARTS[recipe]
    high, wide = cdiv(rows, BLOCK), cdiv(cols, BLOCK)
    shapes = {
        "tensor": ((1, 1), (1, 1)),
        "row": ((rows, 1), (cols, 1)),
        "block128": ((high, wide), (wide, high)) if weight else ((wide, rows), (high, cols)),
    }[recipe]
    scale = x.new_empty(shapes[0], dtype=torch.float32)
    scale_t = scale if recipe == "tensor" else x.new_empty(shapes[1], dtype=torch.float32)
    data, data_t = x.new_empty(rows, cols, dtype=dtype), x.new_empty(cols, cdiv(rows, parts) * parts, dtype=dtype)
    return Narrow(data, scale, data_t, scale_t)


def launch_quantize(
    x: Tensor, dtype: torch.dtype, recipe: str, bound: Bound | None, weight: bool,
    out: Narrow | None = None,
) -> Narrow:  # fmt: skip
    """Computes quantize_ref by one kernel, after one reduction where no bound is known, or one for each way for the
    scales of rows."""
    x, out = dense_rows(x), new_narrow(x, (len(x), x.shape[1]), dtype, recipe, weight) if out is None else out
    sizes = (*x.shape, out.data_t.shape[1], x.stride(0))
    if recipe == "tensor":
        most, seen = (bound.most, bound.seen) if bound is not None and bound.known else (find_most(x, bound), None)
        _round_kernel[(cdiv(len(x), 4 * QUADS), cdiv(x.shape[1], COLS))](
            x, most, seen, out.data, out.scale, out.data_t.view(torch.int32), *sizes,
            LARGEST=torch.finfo(dtype).max, QUADS=QUADS, COLS=COLS, num_warps=WARPS,
        )  # fmt: skip
        return out
    maxima = (most_of(x, 1), most_of(x, 0)) if recipe == "row" else (None, None)
    _quantize_kernel[(cdiv(len(x), BLOCK), cdiv(x.shape[1], BLOCK))](
        x, *maxima, *out, *sizes, KIND="square" if recipe == "block128" and weight else recipe,
        LARGEST=torch.finfo(dtype).max, SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


def quantize(
    x: Tensor, dtype: torch.dtype = E4M3, recipe: str = "tensor", bound: Bound | None = None, weight: bool = False,
    out: Narrow | None = None,
) -> Narrow:  # fmt: skip
    """x [M, K] in 8 bits, both ways, in the memory of `out` if that is given. `bound` is for the recipe `tensor`.
    `weight`: blocks are squares, which are the same both ways."""
    if recipe not in RECIPES:
        raise ValueError(f"a recipe is one of {', '.join(RECIPES)}, not {recipe!r}")
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"8-bit factors are matrices with at least one row, not {list(x.shape)}")
    if runs_kernels(x):
        return launch_quantize(x, dtype, recipe, bound, weight, out)
    found = quantize_ref(x, dtype, recipe, bound, weight)
    return found if out is None else Narrow(*(old.copy_(new) for old, new in zip(out, found, strict=True)))


def renew_bounds_ref(most: Tensor, seen: Tensor, margins: Tensor, over: Tensor) -> None:
    """After an update: makes the bounds `most` the next ones, from what was `seen`, which becomes zero. What was not
    seen, or not finite, says nothing. `over` becomes the largest ratio of what was seen to its bound. All are fp32, of
    one shape."""
    said = (seen > 0) & (seen < torch.inf)
    over.copy_(torch.where(said & (most > 0), torch.maximum(over, seen / most), over))
    most.copy_(torch.where(said, seen * margins, most))
    seen.zero_()


@jit
def _renew_bounds_kernel(most_ptr, seen_ptr, margins_ptr, over_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    most, seen = tl.load(most_ptr + i, mask=i < size, other=0.0), tl.load(seen_ptr + i, mask=i < size, other=0.0)
    margin, over = tl.load(margins_ptr + i, mask=i < size, other=0.0), tl.load(over_ptr + i, mask=i < size, other=0.0)
    said = (seen > 0) & (seen < float("inf"))
    ratio = tl.div_rn(seen, tl.where(most > 0, most, float("inf")))
    tl.store(over_ptr + i, tl.where(said, tl.maximum(over, ratio), over), mask=i < size)
    tl.store(most_ptr + i, tl.where(said, seen * margin, most), mask=i < size)
    tl.store(seen_ptr + i, tl.zeros([BLOCK], tl.float32), mask=i < size)


def renew_bounds(most: Tensor, seen: Tensor, margins: Tensor, over: Tensor) -> None:
    """Computes renew_bounds_ref, by one launch."""
    if runs_kernels(most):
        size = most.numel()
        _renew_bounds_kernel[(cdiv(size, 256),)](most, seen, margins, over, size, BLOCK=256)
    else:
        renew_bounds_ref(most, seen, margins, over)


class Bounds:
    """The bounds of many factors, in flat tensors."""

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.margins = torch.zeros(len(dtypes) * SPACE, device=device)
        self.margins[::SPACE] = torch.tensor([MARGIN[dtype] for dtype in dtypes], device=device)
        self.most, self.seen, self.over = (torch.zeros_like(self.margins) for _ in range(3))
        self.each = [Bound(self.most[i * SPACE], self.seen[i * SPACE]) for i in range(len(dtypes))]

    def renew(self) -> None:
        """After an update, whose `seen` is by now that of all processes."""
        renew_bounds(self.most, self.seen, self.margins, self.over)

    def get(self) -> list[float]:
        """The bounds of the next update; 0: not known. The host waits for the device."""
        return [float(value) for value in self.most[::SPACE].tolist()]

    def set(self, values: Sequence[float]) -> None:
        """What `get` gave, exactly."""
        self.most[::SPACE] = torch.tensor(values, device=self.most.device)
        for bound, value in zip(self.each, values, strict=True):
            bound.known, bound.asked = value > 0, False

    def take_over(self) -> list[float]:
        """The largest ratios of what was seen to its bound since the last call; the host waits for the device."""
        over = self.over[::SPACE].tolist()
        self.over.zero_()
        return over
