"""A bar for what takes long before a run begins, if someone is there to see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

_WORTH_SHOWING = 5_000_000  # bytes of text
Advance = Callable[[int], object]


@contextmanager
def progress(what: str, num_bytes: int, *, known: bool = True) -> Iterator[Advance]:
    """Yields a function to call with the number of bytes done. `known`: these will be so many; else about as many."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = num_bytes < _WORTH_SHOWING or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        yield partial(bar.advance, bar.add_task(what, total=num_bytes if known else None))
