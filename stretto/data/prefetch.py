"""Builds the next batches in a thread while the device works on the current one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

X = TypeVar("X")
DEPTH = 2  # enough to hide one slow batch; more would only hold memory


def prefetch(make: Callable[[int], X], first: int, last: int) -> Iterator[tuple[int, X]]:
    """Yields (i, make(i)) for first <= i < last, in order. `make` must not depend on when it is called."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        waiting: deque[Future[X]] = deque(pool.submit(make, i) for i in range(first, min(first + DEPTH, last)))
        try:
            for i in range(first, last):
                ready = waiting.popleft().result()
                if i + DEPTH < last:
                    waiting.append(pool.submit(make, i + DEPTH))
                yield i, ready
        finally:
            pool.shutdown(cancel_futures=True)
