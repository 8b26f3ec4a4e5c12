"""What can go wrong for a user, one class per exit code, so that scripts and schedulers can tell the kinds apart.

| code | meaning |
|---|---|
| 0 | done |
| 2 | wrong command line (from typer) |
| 3 | configuration |
| 4 | data |
| 5 | checkpoint |
| 6 | numbers that cannot be trusted: not finite, spikes in a row, replicas or a replay that differ |
| 7 | another process was lost, or did not answer in time |
| 8 | out of memory |
| 9 | disk full |
| 75 | stopped by a signal after saving: run again with `--resume` |
| 130 | Ctrl-C a second time: stopped at once |

torchrun turns all of these into 1, so a run that has begun also writes its end to `exit.json` in its folder: the code,
the cause and its message, and the rank of the process that failed first. A run without one goes on, or was killed.
"""


class StrettoError(Exception):
    """An error whose message is meant for the user: it says what is wrong and what to do."""

    exit_code = 1


class ConfigError(StrettoError):
    exit_code = 3


class DataError(StrettoError):
    exit_code = 4


class CheckpointError(StrettoError):
    exit_code = 5


class NonFiniteError(StrettoError):
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
