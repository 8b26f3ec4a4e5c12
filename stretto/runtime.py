"""The process and its peers: device, process group, seeds, signals, the lock on the run folder, and how a run ended."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from traceback import clear_frames
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from stretto.config import RunConfig
from stretto.errors import CheckpointError, ConfigError, DiskFullError, OutOfMemoryError, PeerLostError, StrettoError
from stretto.files import open_in_place, open_new, write_text
from stretto.version import __version__

# Dense bf16/fp16 matrix rate without sparsity, by a part of the name that the driver reports; the first match counts.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
              "L40": 181e12, "NVIDIA L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 112e12,
              "Tesla T4": 65e12}  # fmt: skip

# The usual ways to be asked to stop: Ctrl-C, schedulers, a terminal that was closed, Slurm's --signal=USR1.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAME_REQUEST_S = 5.0  # a control group signals all processes, and torchrun then passes the signal on to its workers
EXIT = "exit.json"
LOST = re.compile("Connection closed by peer|Connection reset by peer|[Tt]imed out|Read error|Broken pipe")


@dataclass
class Runtime:
    device: torch.device
    rank: int = 0
    world: int = 1
    timeout_s: float = 600.0  # how long to wait for another process
    stop: bool = False  # a signal asked for it

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_over_ranks(self, values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
        """Sums integers over all processes, or those of a group, on the host: the device is not asked and goes on
        working."""
        if (self.world if group is None else group.size()) == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(total, group=group)
        return total.tolist()

    def gather_over_ranks(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the integers of each process, gathered on the host."""
        size, others = len(values), self.world - 1 - self.rank
        flat = self.sum_over_ranks([0] * size * self.rank + list(values) + [0] * size * others)
        return [flat[i : i + size] for i in range(0, len(flat), size)]

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        self.sum_over_ranks([0])


@contextmanager
def start(cfg: RunConfig) -> Iterator[Runtime]:
    """Sets up this process, alone or under torchrun, and takes it down again. A process group that the caller has
    made is used and left alone."""
    deterministic_before = torch.are_deterministic_algorithms_enabled()
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    runtime = Runtime(choose_device(cfg.device), rank, world, cfg.timeout_s)
    if runtime.device.type == "cuda":
        torch.cuda.set_device(runtime.device)
        # Segments grow instead of new ones beside them, so batches of many shapes share the same memory. Who has set up
        # torch's allocator keeps that.
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    own_group = runtime.world > 1 and not dist.is_initialized()
    try:
        if own_group:
            backend = "cpu:gloo,cuda:nccl" if runtime.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=cfg.timeout_s))
        with _signals(runtime):
            yield runtime
    except BaseException as error:
        if own_group:
            clear_frames(error.__traceback__)  # they hold the model, which must not outlive the group: see train.py
        explained = explain(error, cfg.timeout_s)
        if explained is None:
            raise
        raise explained from error
    finally:
        torch.use_deterministic_algorithms(deterministic_before)
        if own_group and dist.is_initialized():
            dist.destroy_process_group()


def choose_device(name: str = "auto") -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def _signals(runtime: Runtime) -> Iterator[None]:
    """Handles signals: the first asks the loop to save and stop. The same signal soon after is the same request; later,
    it ends the process at once."""
    asked: dict[int, float] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        if number in asked and time.monotonic() - asked[number] > SAME_REQUEST_S:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if runtime.is_main and not runtime.stop:
            tell(f"saving after this step, then stopping; the same signal {SAME_REQUEST_S:g} s from now, or later, "
                 "stops at once")  # fmt: skip
        asked.setdefault(number, time.monotonic())
        runtime.stop = True

    # nohup lets a run outlive its terminal by having SIGHUP ignored.
    watched = [s for s in STOP_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    try:
        before = {number: signal.signal(number, ask) for number in watched}
    except ValueError:  # not in the main thread, where Python allows no handlers: the caller keeps its own
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell(text: str) -> None:
    """Prints a line on stderr. Nobody may be there to read it, and that must stop nothing."""
    with suppress(Exception):
        print(f"stretto: {text}", file=sys.stderr, flush=True)


def seed_all(seed: int, *keys: int) -> None:
    """Sets torch's generators to a function of the keys, so that nothing has to be saved to resume them."""
    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds a lock, since two runs must not write one folder. The lock ends with the process, however that ends."""
    path = folder / "lock"
    try:
        handle = open_in_place(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened for writing: {error.strerror}") from error
    with open(handle, "r+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise CheckpointError(f"{folder} is in use by {owner}; choose another run.dir or wait") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextmanager
def recording_exit(folder: Path, runtime: Runtime, timeout_s: float) -> Iterator[None]:
    """Writes how the run ended to exit.json: torchrun turns every exit code into 1. While there is none, the run goes
    on, or was killed. Every process may write it, once the main process holds the lock."""
    path = folder / EXIT
    if runtime.is_main:
        with suppress(OSError):
            path.unlink()
    try:
        yield
    except BaseException as error:
        _record_exit(path, runtime.rank, explain(error, timeout_s) or error)
        raise
    if runtime.is_main:
        _record_exit(path, runtime.rank, None)


def _record_exit(path: Path, rank: int, cause: BaseException | None) -> None:
    code = 130 if isinstance(cause, KeyboardInterrupt) else getattr(cause, "exit_code", 0 if cause is None else 1)
    kind, message = ("", "") if cause is None else (type(cause).__name__, str(cause))
    record = {"code": code, "cause": kind, "message": message, "rank": rank, "time": round(time.time(), 3)}
    text = json.dumps(record, indent=1) + "\n"
    try:
        if isinstance(cause, PeerLostError):  # what the lost process has written itself, before or after, says more
            with suppress(FileExistsError), open(open_new(path), "w", encoding="utf-8") as file:
                file.write(text)
        else:
            write_text(path, text)
    except OSError as error:
        tell(f"{path} could not be written: {error.strerror}")


def explain(error: BaseException, timeout_s: float) -> StrettoError | None:
    """Puts errors of torch and of the system into the user's words; None for errors that are bugs."""
    text = str(error)
    if isinstance(error, StrettoError):
        return None
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return OutOfMemoryError(f"memory is full: lower data.batch_size or data.max_tokens and raise "
                                f"train.micro_batches by as much. {text.partition(chr(10))[0]}")  # fmt: skip
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left on device" in text or "Disk quota exceeded" in text:
        return DiskFullError(f"the disk is full; earlier checkpoints are whole: {text}")
    if isinstance(error, dist.DistError) or (dist.is_initialized() and LOST.search(text)):
        return PeerLostError(
            f"another process was lost, or did not answer within run.timeout_s = {timeout_s:g} (raise that if it was "
            f"still preparing data): {text}"
        )
    return None


def describe_environment(runtime: Runtime) -> dict[str, Any]:
    on_gpu = runtime.device.type == "cuda"
    name = torch.cuda.get_device_name(runtime.device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return {
        "device": name if runtime.world == 1 else f"{runtime.world} x {name}",
        "processes": runtime.world,
        "stretto": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def peak_flops(device: torch.device) -> float:
    """Returns the device's matrix rate in FLOP/s, for MFU; 0 where it is not known."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAK_FLOPS.items() if part in name), 0.0)


def memory_gib(device: torch.device) -> float:
    """Returns the peak memory of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def total_memory(device: torch.device) -> int:
    """Returns the bytes of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def count_gpu_memory(device: torch.device) -> dict[str, int]:
    """Returns the bytes of tensors at the peak, those that the allocator has taken for them, and how many of these it
    keeps for recorded graphs; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return {
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "pool of graphs": sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0)),
    }
