"""What can go wrong for a user, one class per exit code, so that scripts and schedulers can tell the kinds apart.

| code | meaning |
|---|---|
| 0 | done |
| 1 | an error in a callback of your own, or one that nobody expected: its traceback is printed |
| 2 | wrong command line (from typer) |
| 3 | configuration |
| 4 | data |
| 5 | checkpoint |
| 6 | not finite, spikes in a row, replicas or a replay that differ; the same failure thrice at one step |
| 7 | another process was lost, or did not answer in time |
| 8 | out of memory |
| 9 | disk full |
| 75 | stopped by a signal, after saving: run again with `--resume` |
| 130 | Ctrl-C a second time: stopped at once |

torchrun turns all of these into 1, `stretto launch` does not. A run that has begun also writes its end to `exit.json`
in its folder: the code, the cause and its message, the step, and the rank of the process that failed first. A run
without one goes on, or was killed. Of several processes, the others end with the code of the first cause where they
learn it, and with 7 where they do not.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


def tell(text: str) -> None:
    """Prints a line on stderr. Nobody may be there to read it, and that must stop nothing."""
    with suppress(Exception):
        print(f"stretto: {text}", file=sys.stderr, flush=True)


class StrettoError(Exception):
    """An error whose message is meant for the user: it says what is wrong and what to do."""

    exit_code = 1
    told = False  # the user has read it already
    first: dict[str, Any] | None = None  # what another process has said that failed before this one


class ConfigError(StrettoError):
    exit_code = 3


class DataError(StrettoError):
    exit_code = 4


class CheckpointError(StrettoError):
    exit_code = 5


class NonFiniteError(StrettoError):
    exit_code = 6


class RepeatedFailure(StrettoError):
    """A run has failed in the same way, at the same step, until there was no hope left."""

    exit_code = 6


class SpikeError(StrettoError):
    exit_code = 6


class DifferenceError(StrettoError):
    """Two computations that had to end with the same bits did not."""

    exit_code = 6


class PeerLostError(StrettoError):
    exit_code = 7


class OutOfMemoryError(StrettoError):
    exit_code = 8


class DiskFullError(StrettoError):
    exit_code = 9


class Preempted(StrettoError):
    """Not a failure: the run was asked to stop, and saved itself first."""

    exit_code = 75
