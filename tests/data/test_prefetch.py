"""Reading ahead changes nothing but the time it takes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from stretto.data import prefetch as module
from stretto.data.prefetch import DEPTH, prefetch
from stretto.errors import DataError


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


def test_a_thread_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits may give up, or loses patience; the thread is left behind, and does not keep the process alive."""
    monkeypatch.setattr(module, "CLOSING_S", 0.1)
    ends, given_up = threading.Event(), threading.Event()

    def make(i: int) -> int:
        if i == 2:
            ends.wait()
        return i

    stream = prefetch(make, 0, 5, gives_up=given_up.is_set)
    assert [next(stream), next(stream)] == [(0, 0), (1, 1)]
    given_up.set()
    assert next(stream) == (2, None)
    stream.close()  # type: ignore[attr-defined]
    impatient = prefetch(make, 2, 5, patience_s=0.5)
    began = time.monotonic()
    with pytest.raises(DataError, match="the batch of step 3 was not there"):
        next(impatient)
    assert time.monotonic() - began >= 0.5
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "prefetch")
    ends.set()
