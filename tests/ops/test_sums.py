"""Partial sums are added up in fp32 and rounded once."""

from __future__ import annotations

import pytest
import torch

from stretto.ops.sums import launch_sums
from tests.ops.checks import DEVICE, RUNS_KERNELS, error, rand

pytestmark = pytest.mark.skipif(not RUNS_KERNELS, reason="runs the kernel: needs TRITON_INTERPRET=1 or a GPU")


@pytest.mark.parametrize("programs", [0, 1, 7, 132, 1000])
@pytest.mark.parametrize("cols", [1, 33, 1100])
def test_totals(programs: int, cols: int) -> None:
    """Into up to three places, each of its own dtype, also in the middle of a tensor."""
    for dtypes in ([torch.float32], [torch.float32, torch.float16], [torch.float16, torch.float32, torch.float32]):
        partial = rand(programs, len(dtypes), cols)
        room = [torch.full((cols + 3,), torch.nan, dtype=dtype, device=DEVICE) for dtype in dtypes]
        launch_sums(partial, [total[1:-2] for total in room])
        for total, exact, dtype in zip(room, partial.double().sum(0), dtypes, strict=True):
            assert total.isnan().tolist() == [True, *[False] * cols, True, True]
            assert error(total[1:-2], exact) <= torch.finfo(dtype).eps
