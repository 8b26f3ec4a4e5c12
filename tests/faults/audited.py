"""A process that runs commands of Stretto under an audit hook, and says what it saw; each is a line of JSON.

Python reports what it is about to do to audit hooks, whatever the spelling: start a program, connect, unpickle a class,
import, run code, open, rename or delete a file. While a command runs, the hook forbids what reading the files of a
stranger must never lead to, and writes it down in case that the command catches the error. Each command is a process of
its own, forked from this one, which has imported everything: a crash or a loop costs only that one.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import resource
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import stretto.convert.folder
import stretto.data.images
import stretto.files
import stretto.runtime
import stretto.train
import stretto.trained
from stretto import cli, evaluate, generate
from stretto.report import page

# These would be imported when they are first needed; the time of that is not the input's.
import matplotlib.font_manager  # isort: skip  # noqa: F401
import tokenizers  # isort: skip  # noqa: F401
import torch.utils.tensorboard  # isort: skip

PLANTED = "planted_by_a_stranger"  # the name of a module, and a word in every program, that the inputs hold
WALL_S, CPU_S = 120, 60  # after which a command is ended
PROGRAMS = {
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
}
NETWORK = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"}
CHANGES = {
    "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown",
    "shutil.rmtree", "shutil.move", "shutil.copyfile",
}  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HARMLESS = ("/dev/null", "/dev/tty", "/proc/self/")


class Forbidden(BaseException):
    """Not an `Exception`: few catch it."""


class Watch:
    """What one command may do; `root` holds everything that came from a stranger."""

    def __init__(self, root: str, writable: list[str], unreadable: list[str]) -> None:
        self.root = os.path.realpath(root)
        self.writable = [os.path.realpath(path) for path in writable]
        self.unreadable = [os.path.realpath(path) for path in unreadable]
        self.seen: list[str] = []

    def find_offence(self, event: str, args: tuple[Any, ...]) -> str:
        """Says what is wrong about an event; nothing if it is allowed."""
        if event in PROGRAMS or event in NETWORK or event == "pickle.find_class":
            return f"{event} {args[:2]!r}"
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            return self._judge_open(os.fsdecode(args[0]), int(args[2] or 0))
        if event in CHANGES:
            folder = next((arg for arg in args[1:] if type(arg) is int and arg >= 0), None)  # or the mode of a file
            paths = [place(path, folder) for path in args[:2] if isinstance(path, str | bytes | os.PathLike)]
            outside = [path for path in paths if not self._may_write(path, follow=False)]
            return f"{event} {outside}" if outside else ""
        if event == "import" and PLANTED in str(args[0]):
            return f"import {args[0]}"
        if event in ("exec", "compile"):
            return self._judge_code(event, args)
        return ""

    def _judge_open(self, path: str, flags: int) -> str:
        if self._is_below(os.path.realpath(path), self.unreadable):
            return f"open {path}, which is outside of the folder"
        if flags & WRITES and not self._may_write(path, follow=True):
            return f"open {path} for writing"
        return ""

    def _judge_code(self, event: str, args: tuple[Any, ...]) -> str:
        name = args[0].co_filename if event == "exec" else args[1]
        if isinstance(name, str) and self._is_below(os.path.realpath(name), [self.root]):
            return f"{event} of {name}"
        text = args[0] if event == "compile" else repr(args[0].co_consts)
        return f"{event} of a planted program" if PLANTED in str(text) else ""

    def _may_write(self, path: str, follow: bool) -> bool:
        if path.startswith(HARMLESS):
            return True
        real = (
            os.path.realpath(path)
            if follow
            else os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        )
        return self._is_below(real, self.writable)

    @staticmethod
    def _is_below(path: str, folders: list[str]) -> bool:
        return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def place(path: Any, folder: int | None) -> str:
    """The path of a file that may be named relative to an open folder."""
    path = os.fsdecode(path)
    if os.path.isabs(path) or folder is None or not os.path.exists(f"/proc/self/fd/{folder}"):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)


watch: Watch | None = None
judging = threading.local()  # whether this thread is: judging opens nothing, but asks the file system


def hook(event: str, args: tuple[Any, ...]) -> None:
    now = watch
    if now is None or getattr(judging, "on", False):
        return
    judging.on = True
    try:
        offence = now.find_offence(event, args)
    finally:
        judging.on = False
    if offence:
        now.seen.append(offence)
        raise Forbidden(offence)


pillow: Any = Image
numpy: Any = np
images: Any = stretto.data.images
folder: Any = stretto.convert.folder
start: Any = stretto.train
runtime: Any = stretto.runtime


def _open_without_formats() -> None:
    real = pillow.open
    pillow.open = lambda fp, mode="r", formats=None: real(fp, mode)


def _follow_links() -> None:
    start.refuse_links = lambda run: None
    runtime.open_in_place = lambda path: os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def _unpickle() -> None:
    """Takes a pickle where an .npz should be."""
    images._read_arrays = lambda path: pickle.loads(path.read_bytes())


def _join_without_check() -> None:
    folder._is_inside = lambda name: True


def _allow_objects() -> None:
    real = numpy.load
    images._check_header = lambda name, file, size: None
    numpy.load = lambda file, allow_pickle=False: real(file, allow_pickle=True)


# What the tests plant to see that the hook would notice.
SABOTAGES = {
    "open without formats": _open_without_formats,
    "follow links": _follow_links,
    "unpickle": _unpickle,
    "join without check": _join_without_check,
    "allow objects": _allow_objects,
}


def run_child(case: dict[str, Any], answer: int) -> None:
    """Runs the command and ends the process."""
    global watch
    output = os.open(case["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if case["sabotage"]:
        SABOTAGES[case["sabotage"]]()
    sys.argv = ["stretto", *case["argv"]]
    code, mine = 1, Watch(case["root"], case["writable"], case["unreadable"])
    watch = mine
    try:
        cli.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        watch = None
        traceback.print_exc()
    watch = None
    os.write(answer, json.dumps({"code": code, "events": mine.seen}).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Runs a command in a process of its own; says how it ended, and what it took."""
    question, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(question)
        run_child(case, answer)
    os.close(answer)
    least = peak = count_own_memory(pid)
    end, said = time.monotonic() + WALL_S, b""
    while time.monotonic() < end:
        peak = max(peak, count_own_memory(pid))
        if select.select([question], [], [], 0.01)[0]:
            part = os.read(question, 65536)
            if not part:
                break
            said += part
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(question)
    _, status, usage = os.wait4(pid, 0)
    record = json.loads(said) if said else {"code": os.waitstatus_to_exitcode(status) or -1, "events": []}
    record["seconds"] = usage.ru_utime + usage.ru_stime
    record["extra_mb"] = (peak - least) / 1e6
    record["output"] = Path(case["output"]).read_text(encoding="utf-8", errors="replace")[-4000:]
    return record


def count_own_memory(pid: int) -> int:
    """The bytes of a process that are in memory and in no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # as every run does: it imports much
    platform.platform()  # as every run does: it asks `uname`, once
    Image.init()  # all formats that Pillow knows, as a program may have done that uses Stretto
    assert evaluate and generate and page
    if os.environ.get("WITH_DATASETS"):
        import datasets  # noqa: F401
    sys.addaudithook(hook)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
