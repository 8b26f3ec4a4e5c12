"""Reading ahead changes nothing but the time it takes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from stretto.data.stream import DEPTH, prefetch


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (3, 20), (5, 5)])
def test_in_order_from_first_to_last(first: int, last: int) -> None:
    assert list(prefetch(lambda i: i * i, first, last)) == [(i, i * i) for i in range(first, last)]


def test_it_reads_ahead_but_not_too_far() -> None:
    made: list[int] = []
    stream: Any = prefetch(lambda i: made.append(i), 0, 100)
    next(stream)
    stream.close()  # waits for what has begun
    assert 1 <= len(made) <= 1 + DEPTH


def test_an_error_in_the_thread_reaches_the_caller_at_its_batch() -> None:
    def make(i: int) -> int:
        if i == 2:
            raise KeyError("broken")
        return i

    stream = prefetch(make, 0, 5)
    assert [next(stream), next(stream)] == [(0, 0), (1, 1)]
    with pytest.raises(KeyError, match="broken"):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
