"""The table of GPUs: how they are named, and how those of a machine are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stretto.errors import ConfigError
from stretto.hardware import GPUS, choose_hardware, find_by_driver, find_devices, read_hardware, read_report

REPORT = "NVIDIA H200, 143771, 700.00\nNVIDIA H200, 143771, 700.00\nNVIDIA H200, 143771, [N/A]\n"


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("h200", "h200", 1),
        ("8xH100", "h100", 8),
        ("2 x a100", "a100-80", 2),
        ("A100-40", "a100-40", 1),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 1),
        ("4x4090", "rtx4090", 4),
        ("cpu", "cpu", 1),
    ],
)
def test_names_as_people_write_them(text: str, name: str, count: int) -> None:
    found = read_hardware(text)
    assert (found.name, found.count, found.is_gpu) == (name, count, name != "cpu")
    assert found.memory > 2**30 and found.flops > 0 and found.bandwidth > 0 and found.watts > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h2000", "did you mean h200"),
        ("rtx4080", "did you mean rtx"),
        ("tpu-v5", "There are b200, h200"),
        ("", "There are b200, h200"),
        ("0xh100", "has to be from 1 to 4,096"),
        ("-1xh100", "no such GPU"),
        ("9999xh100", "has to be from 1 to 4,096"),
        ("2xcpu", "has to be one"),
    ],
)
def test_nonsense_is_answered_with_what_there_is(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_hardware(text)


def test_every_gpu_is_found_by_its_own_name_and_by_that_of_the_driver() -> None:
    for gpu in GPUS:
        assert read_hardware(gpu.name) == gpu and find_by_driver(f"NVIDIA {gpu.driver}") == gpu
        assert gpu.fp8 == 0 or gpu.fp8 > 1.9 * gpu.flops
    assert find_by_driver("NVIDIA T400") is None


def test_the_drivers_report_says_more_than_the_table() -> None:
    found = read_report(REPORT, None)
    assert found is not None and (found.name, found.count, found.watts) == ("h200", 3, 700.0)
    assert found.memory == 143771 * 2**20 and found.flops == read_hardware("h200").flops
    some = read_report(REPORT, "1,2")
    assert some is not None and some.count == 2
    limited = read_report("NVIDIA L40S, [N/A], [N/A]\n", "0")
    assert limited is not None and limited.memory == read_hardware("l40s").memory and limited.watts == 350
    assert read_report(REPORT, "") is None
    with pytest.raises(ConfigError, match="'NVIDIA T400', which this machine has, is not known here"):
        read_report("NVIDIA T400, 4096, 30\n", None)
    assert read_report("No devices were found\n", None) is None


def test_the_machines_own_gpus_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's tool, which stands in the path; without it one has to say which GPU is meant."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<END\n{REPORT}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_hardware("").describe() == "3 x h200" and choose_hardware("l4").name == "l4"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert find_devices() is None
    with pytest.raises(ConfigError, match=r"say by --gpu which one .* --gpu cpu plans for this machine"):
        choose_hardware("")
