"""What GPUs there are: their names, and what a plan needs to know of them.

Peaks, bandwidths and power are the vendors' figures: dense products in 16 bits without sparsity, bytes/s of the memory,
bytes/s of the link to another GPU in each direction, watts of the board. Memory is what the driver reports. Nothing
here has been measured; what share of these peaks is reached is in planning/times.py. Torch is not imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from stretto.errors import ConfigError

MOST = 4096  # GPUs that are planned for
NODE = 8  # GPUs that one machine has at most; machines are joined by a network
NETWORK = 50e9  # bytes/s of each GPU between machines, in each direction
CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # version 2, 1
CPU_FLOPS, CPU_BYTES, CPU_WATTS = 50e9, 10e9, 10.0  # of a core, roughly


@dataclass(frozen=True)
class Hardware:
    """Devices of one kind; figures are those of one of them."""

    name: str
    driver: str  # a part of the name that the driver reports
    memory: int  # bytes
    flops: float  # of products in 16 bits with sums in fp32 (a CPU: in fp32), per second
    fp8: float  # of products in 8 bits, per second; 0: there are none
    bandwidth: float  # bytes/s of the memory
    link: float  # bytes/s to another GPU, in each direction
    watts: float
    count: int = 1
    has_bf16: bool = True

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    def describe(self) -> str:
        return self.name if self.count == 1 else f"{self.count} x {self.name}"


def _gpu(
    name: str, driver: str, gib: float, tflops: float, fp8: float, tbytes: float, gbytes: float, watts: float,
    has_bf16: bool = True,
) -> Hardware:  # fmt: skip
    memory = int(gib * 2**30)
    return Hardware(name, driver, memory, tflops * 1e12, fp8 * 1e12, tbytes * 1e12, gbytes * 1e9, watts, 1, has_bf16)


# The first one whose name for the driver is a part of what that reports is meant: the more special ones come first.
GPUS = (
    _gpu("b200", "B200", 179.0, 2250, 4500, 8.0, 900, 1000),
    _gpu("h200", "H200", 139.8, 989, 1979, 4.8, 450, 700),
    _gpu("h100-pcie", "H100 PCIe", 79.2, 756, 1513, 2.0, 64, 350),
    _gpu("h100", "H100", 79.2, 989, 1979, 3.35, 450, 700),
    _gpu("a100-40", "A100-SXM4-40GB", 39.4, 312, 0, 1.555, 300, 400),
    _gpu("a100-80", "A100", 79.2, 312, 0, 2.04, 300, 400),
    _gpu("l40s", "L40S", 44.4, 362, 733, 0.864, 32, 350),
    _gpu("l40", "L40", 44.4, 181, 362, 0.864, 32, 300),
    _gpu("l4", "NVIDIA L4", 22.0, 121, 242, 0.3, 32, 72),
    _gpu("rtx5090", "RTX 5090", 31.4, 209, 419, 1.79, 64, 575),
    _gpu("rtx4090", "RTX 4090", 23.6, 165, 330, 1.008, 32, 450),
    _gpu("rtx3090", "RTX 3090", 23.6, 71, 0, 0.936, 32, 350),
    _gpu("v100", "V100", 31.7, 112, 0, 0.9, 150, 300, has_bf16=False),
    _gpu("t4", "Tesla T4", 14.6, 65, 0, 0.32, 16, 70, has_bf16=False),
)
SHORT = {"h100-80": "h100", "h100-sxm": "h100", "a100": "a100-80", "4090": "rtx4090", "3090": "rtx3090"}


def find_by_driver(name: str) -> Hardware | None:
    """The GPU that a driver reports under this name; None: it is not in the table."""
    return next((gpu for gpu in GPUS if gpu.driver in name), None)


def find_machine_memory() -> int:
    """Returns the bytes of memory that this machine has, or that its container may use."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTAINER:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            sizes.append(int(path.read_text()))
    return min(sizes)


def make_cpu(processes: int = 1) -> Hardware:
    """This machine without a GPU, shared by so many processes. Its figures are guesses."""
    cores, memory = (os.cpu_count() or 1) / processes, find_machine_memory() // processes
    return Hardware(
        "cpu", "", memory, cores * CPU_FLOPS, 0.0, cores * CPU_BYTES, CPU_BYTES, cores * CPU_WATTS, count=processes
    )


def read_hardware(text: str) -> Hardware:
    """Reads what --gpu says: h200, or 8xh100, or cpu for this machine without a GPU."""
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", text.strip().lower())
    said = re.sub(r"[\s_]+", "-", match[2]).removeprefix("nvidia-").removeprefix("geforce-") if match else ""
    name = SHORT.get(said, said).replace("rtx-", "rtx")
    names = {gpu.name: gpu for gpu in GPUS}
    if match is None or name not in {*names, "cpu"}:
        close = get_close_matches(name, names, n=3, cutoff=0.4)
        nearest = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(
            f"{text!r}: no such GPU is known; {nearest}There are {', '.join(names)}; write h200, 8xh100, or cpu"
        )
    count = int(match[1] or 1)
    if not 1 <= count <= (MOST if name != "cpu" else 1):
        most = f"from 1 to {MOST:,}" if name != "cpu" else "one, which is this machine"
        raise ConfigError(f"{text!r}: the number of devices has to be {most}")
    return replace(names[name], count=count) if name != "cpu" else make_cpu()


def find_devices() -> Hardware | None:
    """The GPUs of this machine, as the driver's own tool reports them; None: there is none, or it is not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,memory.total,power.limit", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return read_report(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def read_report(report: str, visible: str | None) -> Hardware | None:
    """Reads lines of name, MiB and watts; None: there are none. The first one of several stands for all."""
    rows = [[cell.strip() for cell in line.split(",")] for line in report.splitlines() if line.count(",") == 2]
    if visible is not None:
        rows = rows[: len([part for part in visible.split(",") if part.strip() not in ("", "-1")])]
    if not rows:
        return None
    gpu = find_by_driver(rows[0][0])
    if gpu is None:
        raise ConfigError(
            f"{rows[0][0]!r}, which this machine has, is not known here: plan for one like it, by `stretto plan --gpu`"
        )
    mib, watts = (float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else 0.0 for cell in rows[0][1:])
    return replace(gpu, memory=int(mib * 2**20) or gpu.memory, watts=watts or gpu.watts, count=len(rows))


def choose_hardware(text: str) -> Hardware:
    """What a plan is for: what --gpu says, or else the GPUs of this machine."""
    found = read_hardware(text) if text else find_devices()
    if found is None:
        names = ", ".join(gpu.name for gpu in GPUS)
        raise ConfigError(
            "this machine has no GPU that is known here, so say by --gpu which one the plan is for, such as --gpu h200"
            f" or --gpu 8xh100 (there are {names}); --gpu cpu plans for this machine as it is"
        )
    return found
