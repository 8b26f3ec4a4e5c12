"""The command `stretto` in two processes, of which the second fails in the middle of an update:

    python -m tests.distributed.failing HOW train ...

HOW is one of WAYS, or empty: nothing happens then.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from stretto.cli import main
from stretto.parallel import gather, stages


def end_by(number: int) -> Callable[..., Any]:
    def end(*arguments: Any) -> Any:
        os.kill(os.getpid(), number)
        return arguments

    return end


def confuse(channel: stages.Channel, number: int, *others: Any) -> Any:
    """The message says that it is another micro-batch's."""
    return channel, number + 1, *others


# Who sends, which of its messages is the last one, and what becomes of that.
WAYS: dict[str, tuple[Any, str, int, Callable[..., Any]]] = {
    "killed": (stages.Channel, "send", 40, end_by(signal.SIGKILL)),
    "frozen": (stages.Channel, "send", 40, end_by(signal.SIGSTOP)),
    "confused": (stages.Channel, "send", 40, confuse),
    "killed in a gather": (gather, "all_gather", 10, end_by(signal.SIGKILL)),
}


def fail(how: str) -> None:
    owner, name, last, spoil = WAYS[how]
    real, calls = getattr(owner, name), []

    def send(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*(spoil(*arguments) if len(calls) == last else arguments), **options)

    setattr(owner, name, send)


if __name__ == "__main__":
    _, how, *arguments = sys.argv
    sys.argv = ["stretto", *arguments]
    if how and os.environ["RANK"] == "1":
        fail(how)
    main()
