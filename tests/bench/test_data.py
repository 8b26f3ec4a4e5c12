"""The script that times how batches are made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.data import main
from tests.corpora import write_corpus


@pytest.mark.parametrize(("recipe", "task"), [("demo", "causal"), ("masked-lm", "masked")])
def test_it_times_what_training_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, task: str
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    sizes = ["data.seq_len=16", "data.batch_size=4", "data.held_out=0.2"]
    main(recipe, batches=3, override=[f"data.train={corpus}", "data.suffix=.txt", "data.tokenizer=bytes", *sizes])
    found = re.search(rf"{task}: 64 tokens a batch; (\S+) ms to make, at most (\S+): ", capsys.readouterr().out)
    assert found
    mean, most = map(float, found.groups())
    assert 0 < mean <= most
