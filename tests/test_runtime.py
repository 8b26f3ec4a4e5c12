"""What torch and the system raise, in the user's words."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from stretto import heartbeat
from stretto.errors import ConfigError
from stretto.runtime import choose_device, explain, peak_flops


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 8, "data.batch_size"),
        (OSError(28, "No space left on device", "x"), 9, "disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 9, "disk is full"),
        (OSError(122, "Disk quota exceeded"), 9, "disk is full"),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), 9, "disk is full"),
        (OSError(27, "File too large"), 9, "may not grow"),
        (SafetensorError("I/O error: File too large (os error 27)"), 9, "may not grow"),
        (OSError(5, "Input/output error", "x"), 5, "refuses to read or write"),
        (OSError(30, "Read-only file system", "x"), 5, "Read-only"),
        (OSError(116, "Stale file handle", "x"), 5, "earlier checkpoints are whole"),
        (PermissionError(13, "Permission denied", "x"), 5, "Permission denied"),
        (SafetensorError("I/O error: Read-only file system (os error 30)"), 5, "refuses to read or write"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            8,
            "data.batch_size",
        ),
        (MemoryError(), 8, "data.batch_size"),
        (torch.distributed.DistBackendError("NCCL watchdog"), 7, "run.timeout_s = 5"),
    ],
)
def test_known_errors_get_their_exit_code(error: BaseException, code: int, words: str) -> None:
    explained = explain(error, timeout_s=5)
    assert explained is not None and explained.exit_code == code and words in str(explained)


@pytest.mark.parametrize(
    "error", [ConfigError("x"), ValueError("a bug"), OSError(2, "No such file"), KeyboardInterrupt()]
)
def test_the_rest_is_left_as_it_is(error: BaseException) -> None:
    assert explain(error, timeout_s=5) is None


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA T400", 0.0),
    ],
)
def test_mfu_is_against_the_right_chip(monkeypatch: pytest.MonkeyPatch, name: str, rate: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == rate


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"run\.device"):
        choose_device("cuda")


class Leaving(torch.distributed.HashStore):
    """A store whose holder goes as soon as the other one has answered."""

    def set(self, key: str, value: str) -> None:
        if key.startswith(heartbeat.HERE):
            raise ConnectionError("nobody is there")
        super().set(key, value)


def test_who_answers_has_read_the_cause() -> None:
    store, cause = Leaving(), {"code": 6, "rank": 0, "message": "not finite"}
    heartbeat.note_failure(store, cause)
    assert heartbeat.call_roll(store, 1, 2) == (cause, [0])
