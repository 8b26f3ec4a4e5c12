"""The weights of many layers in 8 bits, both ways, by one launch for all of them.

Weights change once an update, and there are a hundred of them: rounded one by one, each would be launched by itself,
and the host would be what a GPU waits for. So a launch gets a table with a row per weight, in the manner of adamw.py
(the addresses of the weight, of its `Narrow` and of its bound, and its shape), and a list of tiles, one a program.
Addresses stay from update to update; the table is sent again if one has changed.

Scales and bounds are those of the recipe `tensor` (round8.py), whose definition this is: quantize_ref, one weight after
the other. A weight [O, C] is fp32 or bf16 (of a split weight its upper half, which is the weight rounded), and its
sides are multiples of 16. Bytes: 6 an element of fp32, 4 of bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.ops.adamw import upload
from stretto.ops.language import cdiv, jit, runs_kernels, tl
from stretto.ops.round8 import (
    COLS,
    E4M3,
    QUADS,
    WARPS,
    Bound,
    Narrow,
    most_of,
    quantize,
    round_tile,
    scale_of,
    see,
)

COLUMNS = 8  # of the table: addresses of weight, data, data_t, scale, most and seen; rows and columns of the weight


@jit
def _address(row, column: tl.constexpr, TYPE: tl.constexpr, UNIT: tl.constexpr):
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(TYPE)), UNIT)


@jit
def _weights_kernel(
    table_ptr, tiles_ptr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    COLUMNS: tl.constexpr, QUADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile = tiles_ptr + 3 * tl.program_id(0)
    entry = table_ptr + COLUMNS * tl.load(tile).to(tl.int64)
    rows, cols = tl.load(entry + 6) // 16 * 16, tl.load(entry + 7) // 16 * 16  # tells the compiler that they are such
    scale = scale_of(tl.load(_address(entry, 4, tl.float32, 4)), 448)
    tl.store(_address(entry, 3, tl.float32, 4), scale)  # by all programs of a weight, the same
    most = round_tile(
        _address(entry, 0, WEIGHT, UNIT), tl.load(tile + 1), tl.load(tile + 2), rows, cols, rows, cols, scale,
        _address(entry, 1, tl.float8e4nv, 16), _address(entry, 2, tl.int32, 16), 448, QUADS, COLS,
    )  # fmt: skip
    see(most, _address(entry, 5, tl.float32, 4))


class Weights:
    """Rounds the same weights before each update: all that have one dtype by one launch."""

    def __init__(self) -> None:
        self._tables: dict[torch.dtype, _Table] = {}

    @torch.no_grad()
    def round(self, weights: Sequence[Tensor], outs: Sequence[Narrow], bounds: Sequence[Bound]) -> None:
        """Writes E4M3 numbers of each dense weight to its `out`. A bound that is not known becomes the maximum."""
        places = list(zip(weights, outs, bounds, strict=True))
        for weight, _, bound in places:
            if not bound.known:
                bound.asked = True
                bound.most.copy_(most_of(weight))
        if weights and not runs_kernels(weights[0]):
            for weight, out, bound in places:
                quantize(weight, E4M3, bound=Bound(bound.most, bound.seen, True), out=out)
            return
        for dtype in dict.fromkeys(weight.dtype for weight in weights):
            some = [place for place in places if place[0].dtype == dtype]
            self._tables.setdefault(dtype, _Table()).launch(some, dtype)


class _Table:
    """What one launch covers."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._table = self._tiles = torch.empty(0)

    def launch(self, places: Sequence[tuple[Tensor, Narrow, Bound]], dtype: torch.dtype) -> None:
        assert all(weight.is_contiguous() for weight, _, _ in places)
        rows = [
            [t.data_ptr() for t in (weight, out.data, out.data_t, out.scale, bound.most, bound.seen)] + [*weight.shape]
            for weight, out, bound in places
        ]
        device = places[0][0].device
        if rows != self._rows:
            self._rows = rows
            shapes = [(cdiv(row[-2], 4 * QUADS), cdiv(row[-1], COLS)) for row in rows]
            tiles = [[i, j, k] for i, (high, wide) in enumerate(shapes) for k in range(wide) for j in range(high)]
            self._table = torch.empty(len(rows), COLUMNS, dtype=torch.int64, device=device)
            self._tiles = torch.empty(len(tiles), 3, dtype=torch.int32, device=device)
            upload(torch.tensor(rows, device="cpu"), self._table)
            upload(torch.tensor(tiles, dtype=torch.int32, device="cpu"), self._tiles)
        _weights_kernel[(len(self._tiles),)](
            self._table, self._tiles, WEIGHT=_TYPES[dtype], UNIT=16 if all(row[0] % 16 == 0 for row in rows) else 1,
            COLUMNS=COLUMNS, QUADS=QUADS, COLS=COLS, num_warps=WARPS,
        )  # fmt: skip


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16} if tl else {}
