"""The jobs of bench/trainer_jobs.py, tiny: each runs by both Trainers and says how fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.trainer_jobs import JOBS, TINY, Samples, find_trainers
from tests.runs import PATIENCE_S


@pytest.mark.parametrize("name", JOBS)
def test_samples_are_the_same_for_the_same_index(name: str) -> None:
    job = JOBS[name]
    samples = Samples(job, 50, TINY.vocab, 1)
    assert samples[3] == samples[3] != samples[4]
    lengths = [len(samples[i]["input_ids"]) for i in range(50)]
    assert max(lengths) <= job.longest and (len(set(lengths)) == 1) == job.packed
    assert max(max(samples[i]["input_ids"]) for i in range(50)) < TINY.vocab


def test_only_what_is_there_is_compared() -> None:
    assert find_trainers("t5") == ["transformers", "stretto"]


def test_a_table() -> None:
    command = [sys.executable, "-m", "bench.trainer_jobs", "--tiny", "--jobs", "bert-mlm", "--steps", "3"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    rows = {words[1]: words for line in done.stdout.splitlines() if (words := line.split())[0] == "bert-mlm"}
    assert {"transformers", "stretto"} <= rows.keys()
    first = [float(words[5]) for words in (rows["transformers"], rows["stretto"])]
    assert float(rows["stretto"][2]) > 0 and first[0] == pytest.approx(first[1], abs=0.1)
