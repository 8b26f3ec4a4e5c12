"""A process that has imported everything and forks others which train: a start then costs tenths of a second.

    python -m tests.faults.server

It reads a line of JSON for each request and answers with one. `start` forks as many processes as a run has, which call
the command `stretto` in an environment like torchrun's, and answers with their numbers; `wait` answers with their exit
codes, as `subprocess` has them. Whoever asks may kill them in between. When nobody asks any more, what still runs is
killed. The server itself never trains: it stays a process of one thread, which can be forked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

# What a run imports when it needs it.
import matplotlib.figure  # noqa: F401
import torch
import torch.distributed.fsdp
import torch.utils.tensorboard

import stretto.cli
import stretto.report.page
import stretto.techniques
import stretto.train
from tests.faults.plants import PLANTS


def start(world: int, port: int, argv: list[str], log: str, plants: list[str]) -> list[int]:
    """Forks one process for each rank."""
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    ranks = [group | {"RANK": str(rank)} for rank in range(world)] if world > 1 else [{}]
    return [os.fork() or work(environment, argv, log, plants) for environment in ranks]


def work(environment: dict[str, str], argv: list[str], log: str, plants: list[str]) -> int:
    """The life of a forked process: it never returns."""
    code = 1
    try:
        os.environ.update(environment)
        sys.argv = ["stretto", *argv]
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(target, number)
        for plant in plants:
            name, _, argument = plant.partition(": ")
            PLANTS[name](argument)
        stretto.cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def wait(pids: list[int], running: set[int]) -> list[int]:
    running -= {*pids}
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def serve() -> None:
    torch.set_num_threads(1)
    stretto.techniques.load_all()
    running: set[int] = set()
    try:
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            if "wait" in request:
                answer = wait(request["wait"], running)
            else:
                answer = start(**request)
                running |= {*answer}
            print(json.dumps(answer), flush=True)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
