"""The last step of kernels whose programs walk over rows and keep column sums in registers: adding the programs' sums.

    total[i, c] = sum over programs p of partial[p, i, c]

The order is fixed, so that results repeat bit for bit. Sums are taken in the dtype of `partial` and rounded once, to
the dtype of the total. They are the gradients of biases and of the parameters of norms, of which a model has hundreds:
torch's own sum takes longer, and would leave the rounding to another kernel.

Shapes: partial [P, K, C], fp32, K up to 3; each total [C].
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.ops.language import cdiv, jit, next_power_of_2, tl


@jit
def _sum_kernel(
    partial_ptr, first_ptr, second_ptr, third_ptr, programs, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    which = tl.program_id(1)
    at = (row * tl.num_programs(1) + which).to(tl.int64) * cols + col
    total = tl.sum(tl.load(partial_ptr + at, mask=(row < programs) & (col < cols), other=0.0), 0)
    if which == 0:
        tl.store(first_ptr + col, total.to(first_ptr.dtype.element_ty), mask=col < cols)
    elif which == 1:
        tl.store(second_ptr + col, total.to(second_ptr.dtype.element_ty), mask=col < cols)
    else:
        tl.store(third_ptr + col, total.to(third_ptr.dtype.element_ty), mask=col < cols)


def launch_sums(partial: Tensor, totals: Sequence[Tensor]) -> None:
    """Writes the sum of partial[:, i] to totals[i]."""
    programs, count, cols = partial.shape
    assert count == len(totals) <= 3
    if programs == 0:
        for total in totals:
            total.zero_()
    elif count and cols:
        # 512 threads with 32 partial sums each, in columns of at least 64 bytes
        lines = next_power_of_2(programs)
        columns = min(next_power_of_2(cols), max(16, 16384 // lines))
        _sum_kernel[(cdiv(cols, columns), count)](
            partial, *(*totals, *[totals[-1]] * (3 - count)), programs, cols,
            ROWS=lines, COLS=columns, num_warps=16,
        )  # fmt: skip
