"""The process and its peers: device, process group, seeds, the lock on the run folder, errors in the user's words."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from traceback import clear_frames
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.config import RunConfig
from stretto.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskFullError,
    NonFiniteError,
    OutOfMemoryError,
    PeerLostError,
    Preempted,
    StrettoError,
    tell,
)
from stretto.files import open_in_place
from stretto.hardware import find_by_driver
from stretto.heartbeat import call_roll, note_failure, wait_for_others, work_together
from stretto.signals import Stoppable, watching
from stretto.version import __version__

X = TypeVar("X")

ANOTHER = "another process was lost"  # where nobody knows which
LOST = re.compile("Connection closed by peer|Connection reset by peer|[Tt]imed out|Read error|Broken pipe")
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors and other libraries in Rust quote the system
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.EMFILE,
           errno.ENFILE, errno.ENOTDIR, errno.EISDIR, errno.ENOTCONN, errno.ENAMETOOLONG)  # fmt: skip
# What another process failed of is also what this one fails of. A bug has no class here: only its own process has it.
SHARED_CAUSES = {
    kind.exit_code: kind
    for kind in (ConfigError, DataError, CheckpointError, NonFiniteError, OutOfMemoryError, DiskFullError)
}

_BEGAN = time.time() - time.monotonic()


@dataclass
class Runtime(Stoppable):
    device: torch.device
    rank: int = 0
    world: int = 1
    timeout_s: float = 600.0  # how long to wait for another process
    step: int = 0  # updates done
    store: dist.Store | None = None  # where processes leave messages; none in a group that the caller has made
    missing: list[int] = field(default_factory=list)  # who did not answer when one was lost
    pulse: dist.ProcessGroup | None = None  # of the heartbeats
    said: BaseException | None = None  # the error that was announced
    advise: Callable[[], str] = field(default=lambda: "")  # what to do when memory is full
    reason: str = ""  # why a run has ended, where that is neither its last step nor a failure

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.world}"

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

    def advance(self, step: int) -> None:
        """Notes that so many updates are done."""
        self.step = step
        self.note_progress()

    def together(self, work: Callable[[], X]) -> X:
        """Does work that may take long and can be broken off, in all processes; none waits for another in vain."""
        if self.world == 1:
            with self.interruptible():
                return work()
        self.pulse = self.pulse or dist.new_group(timeout=timedelta(seconds=self.timeout_s), backend="gloo")
        return work_together(self, self.pulse, work, lambda error: self.announce(self.find_cause(error)))

    def while_main(self, work: Callable[[], X]) -> X | None:
        """Does work that is the main process's alone; the others wait as long as it is alive."""
        return self.together(work if self.is_main else lambda: None)

    def agree_to_stop(self) -> bool:
        """Whether any process was asked to stop; all processes get the same answer."""
        return self.sum_over_ranks([int(self.stop)])[0] > 0

    def find_cause(self, error: BaseException) -> BaseException:
        """The error in the user's words; where another process has failed first, what that one says."""
        cause = explain(error, self.timeout_s) or error
        if isinstance(cause, OutOfMemoryError) and cause is not error:
            advice = ""
            with suppress(Exception):  # the first error is the one to hear of
                advice = self.advise()
            return OutOfMemoryError(f"{cause} Peak: {memory_gib(self.device):.2f} GiB. {advice}".rstrip())
        if isinstance(cause, PeerLostError) and self.store is not None and cause.first is None:
            return self._name_lost(cause, self.store)
        return cause

    def _name_lost(self, cause: PeerLostError, store: dist.Store) -> StrettoError:
        first, self.missing = call_roll(store, self.rank, self.world)
        where = f"{self.name}, after step {self.step}: "
        if first is not None:
            kind = SHARED_CAUSES.get(first["code"], PeerLostError)
            lost: StrettoError = kind(f"{where}rank {first['rank']} has failed: {first['message']}")
        else:
            who = ", ".join(map(str, self.missing))
            who = f"rank {who} was lost without a word" if who else ANOTHER
            detail = str(cause).removeprefix(describe_loss(ANOTHER, self.timeout_s))
            lost = PeerLostError(where + describe_loss(who, self.timeout_s) + detail)
        lost.first = first or {}
        return lost

    def announce(self, error: BaseException) -> None:
        """Says why this process fails, before the others can notice that it does."""
        is_second = isinstance(error, StrettoError) and (error.told or error.first is not None)
        is_second |= self.said is not None and self.said in (error, error.__cause__)
        if self.world == 1 or is_second or isinstance(error, Preempted | PeerLostError | KeyboardInterrupt):
            return
        message = str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
        tell(f"{self.name}, after step {self.step}: {message}")
        self.said = error
        if isinstance(error, StrettoError):
            error.told = True
        if self.store is not None:
            note_failure(self.store, describe_end(error, self.rank, self.step))


def describe_loss(who: str, timeout_s: float) -> str:
    return f"{who}, or did not answer within run.timeout_s = {timeout_s:g}: "


def describe_end(error: BaseException | None, rank: int, step: int, reason: str = "") -> dict[str, Any]:
    """How a process ended, for exit.json, the log and other processes. `reason`: why, if it is not an error."""
    code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 0 if error is None else 1)
    kind, message = ("", reason) if error is None else (type(error).__name__, str(error))
    return {"code": code, "cause": kind, "message": message, "rank": rank, "step": step}


@contextmanager
def start(cfg: RunConfig) -> Iterator[Runtime]:
    """Sets up this process, alone or under a launcher, and takes it down again. A process group that the caller has
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
    own_group = world > 1 and not dist.is_initialized()
    with watching(runtime, runtime.name, runtime.is_main, cfg.timeout_s):
        try:
            if own_group:
                with runtime.interruptible():
                    _join_group(runtime)
            yield runtime
        except BaseException as error:
            cause = runtime.find_cause(error)
            runtime.announce(cause)
            if own_group:
                _clear_frames(error)  # they hold the model, which must not outlive the group: see train.py
            if cause is error:
                raise
            raise cause from error
        finally:
            torch.use_deterministic_algorithms(deterministic_before)
            _leave_group(runtime, own_group)


def _join_group(runtime: Runtime) -> None:
    backend = "cpu:gloo,cuda:nccl" if runtime.device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=runtime.timeout_s)
    try:
        store, *_ = next(iter(dist.rendezvous("env://", runtime.rank, runtime.world, timeout=timeout)))
        # A launcher may have one store for all its attempts; in it are the addresses of processes that are gone.
        runtime.store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            backend, store=runtime.store, rank=runtime.rank, world_size=runtime.world, timeout=timeout
        )
        runtime.pulse = dist.new_group(timeout=timeout, backend="gloo")
    except RuntimeError as error:
        raise PeerLostError(
            f"{runtime.name}: the processes did not find each other within run.timeout_s = {runtime.timeout_s:g}, or "
            f"one was lost meanwhile: {str(error).partition(chr(10))[0]}"
        ) from error


def _leave_group(runtime: Runtime, own_group: bool) -> None:
    error = sys.exc_info()[1]
    if own_group and dist.is_initialized():
        dist.destroy_process_group()
    elif runtime.pulse is not None and dist.is_initialized():
        dist.destroy_process_group(runtime.pulse)
    if runtime.store is not None and error is not None and not isinstance(error, Preempted):
        wait_for_others(runtime.store, [r for r in range(runtime.world) if r not in (runtime.rank, *runtime.missing)])


def _clear_frames(error: BaseException | None) -> None:
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()  # a pipeline and its model know each other, and its channels close with it


def choose_device(name: str = "auto") -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def read_clock() -> float:
    """The time of day when the process began, plus what has passed since then: a clock that is set does not change how
    long things took."""
    return round(_BEGAN + time.monotonic(), 3)


def seed_all(seed: int, *keys: int) -> None:
    """Sets torch's generators to a function of the keys, so that nothing has to be saved to resume them."""
    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def lock_folder(folder: Path) -> Iterator[str]:
    """Holds a lock, since two runs must not write one folder. The lock ends with the process, however that ends; its
    file then still says whose it was, which is what the next one gets."""
    path = folder / "lock"
    try:
        handle = open_in_place(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened for writing: {error.strerror}") from error
    with open(handle, "r+", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        owner = file.read(1000).strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = owner or "another process"
            raise CheckpointError(f"{folder} is in use by {owner}; choose another run.dir or wait") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield owner
        finally:
            file.truncate(0)


def explain(error: BaseException, timeout_s: float) -> StrettoError | None:
    """Puts errors of torch and of the system into the user's words; None for errors that are bugs."""
    text = str(error)
    if isinstance(error, StrettoError):
        return None
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return OutOfMemoryError(f"memory is full: lower data.batch_size or data.max_tokens and raise "
                                f"train.micro_batches by as much. {text.partition(chr(10))[0]}")  # fmt: skip
    quoted = SYSTEM_ERROR.search(text)
    number = error.errno if isinstance(error, OSError) else int(quoted[1]) if quoted else None
    if number in FULL:
        return DiskFullError(f"the disk is full, or a file may not grow; earlier checkpoints are whole: {text}")
    if number in REFUSED:
        return CheckpointError(f"the system refuses to read or write; earlier checkpoints are whole: {text}")
    if isinstance(error, dist.DistError) or (dist.is_initialized() and LOST.search(text)):
        return PeerLostError(describe_loss(ANOTHER, timeout_s) + text)
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
    gpu = find_by_driver(torch.cuda.get_device_name(device))
    return gpu.flops if gpu else 0.0


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
