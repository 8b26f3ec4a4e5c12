"""The counter-based generator: the same mask everywhere, forward and backward, and random enough."""

from __future__ import annotations

import pytest
import torch

from stretto.ops import dropout as family
from stretto.ops.dropout import draw_keys, dropout, dropout_ref, hash_ref, keep_ref
from tests.ops.checks import DEVICE, DTYPES, RUNS_KERNELS, assert_compiles, assert_op, assert_parity, rand, strided

KEY = torch.tensor([0x123456789ABCDEF0, -7], device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 257), (5, 1100), (0, 8), (4, 0)])
def test_parity(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_parity(lambda x: dropout(x, 0.3, KEY), lambda x: dropout_ref(x, 0.3, KEY), [rand(*shape)], dtype)


def test_rows_may_be_strided() -> None:
    x = rand(5, 33)
    assert torch.equal(dropout(strided(x), 0.5, KEY), dropout(x, 0.5, KEY))
    assert torch.equal(dropout(x.t(), 0.5, KEY), dropout(x.t().contiguous(), 0.5, KEY))


def test_op() -> None:
    rows = torch.tensor([5, 0, 2**30], device=DEVICE)
    assert_op(family._dropout.overload, (rand(3, 40).requires_grad_(), 0.2, KEY, None))
    assert_op(family._dropout.overload, (rand(40, 3).t().requires_grad_(), 0.2, KEY, rows))
    assert_compiles(lambda x: dropout(x, 0.2, KEY), [rand(3, 40)])
    assert_compiles(lambda x: dropout(x, 0.2, KEY, rows), [rand(3, 40)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_is_dropped_as_in_the_whole(dtype: torch.dtype) -> None:
    rows = torch.tensor([7, 2, 9, 2], device=DEVICE)
    whole = rand(10, 50).to(dtype)
    assert torch.equal(dropout(whole[rows], 0.4, KEY, rows), dropout(whole, 0.4, KEY)[rows])
    assert_parity(lambda x: dropout(x, 0.3, KEY, rows), lambda x: dropout_ref(x, 0.3, KEY, rows), [rand(4, 33)], dtype)


def test_probability_zero_is_the_identity() -> None:
    x = rand(2, 3)
    assert dropout(x, 0.0, KEY) is x


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[rows, columns\]"):
        dropout(rand(2, 3, 4), 0.1, KEY)
    with pytest.raises(ValueError, match="each of 2 rows"):
        dropout(rand(2, 3), 0.1, KEY, torch.arange(3, device=DEVICE))


def test_keys_follow_torchs_generator() -> None:
    torch.manual_seed(5)
    first = draw_keys(torch.zeros((), device=DEVICE), 3)
    second = draw_keys(torch.zeros((), device=DEVICE), 3)
    torch.manual_seed(5)
    assert torch.equal(draw_keys(torch.zeros((), device=DEVICE), 3), first)
    assert not torch.equal(first, second)


def test_bits_are_random() -> None:
    """Each bit is set half of the time, and neighbours (columns, rows, keys that differ in one bit) do not agree more
    often than chance: 2^16 samples, five standard deviations."""
    side, bound = 256, 5 * 0.5 / 256
    row, col = torch.arange(side, device=DEVICE)[:, None], torch.arange(side, device=DEVICE)[None]
    bits = hash_ref(KEY, row, col)
    others = [bits.roll(1, 0), bits.roll(1, 1), bits.roll(2, 1)]
    for word in range(2):
        for bit in (0, 31, 32, 62):
            changed = KEY.clone()
            changed[word] ^= 1 << bit
            others.append(hash_ref(changed, row, col))
    for shift in (0, 7, 15, 16, 24, 31):
        plane = bits >> shift & 1
        assert abs(float(plane.double().mean()) - 0.5) < bound
        for other in others:
            assert abs(float((plane == (other >> shift & 1)).double().mean()) - 0.5) < bound


def test_rows_drop_independently() -> None:
    """The number of survivors in a row is binomial: mean and variance over 4,096 rows."""
    survivors = keep_ref(KEY, 4096, 64, 0.25).sum(1).double()
    assert abs(float(survivors.mean()) - 48) < 5 * (12 / 4096) ** 0.5
    assert abs(float(survivors.var()) - 12) < 5 * 12 * (2 / 4096) ** 0.5


@pytest.mark.skipif(not RUNS_KERNELS, reason="runs the kernel: needs TRITON_INTERPRET=1 or a GPU")
def test_a_wrong_column_would_be_seen() -> None:
    wrong = family.launch_dropout
    with pytest.raises(AssertionError):
        assert_parity(
            lambda x: wrong(x.roll(1, 1), 0.3, KEY, None),
            lambda x: dropout_ref(x, 0.3, KEY),
            [rand(3, 40)],
            torch.float32,
        )


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, cols = 2**16 + 1, 2**15 + 8
    x = torch.ones(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    y = dropout(x, 0.5, KEY)
    last = keep_ref_of_last_row(rows, cols)
    assert torch.equal(y[-1] != 0, last)


def keep_ref_of_last_row(rows: int, cols: int) -> torch.Tensor:
    row, col = torch.tensor([[rows - 1]], device=DEVICE), torch.arange(cols, device=DEVICE)[None]
    return (hash_ref(KEY, row, col) >= 2**31)[0]
