"""The whole stack in seconds: what pre-commit runs."""

from __future__ import annotations

from pathlib import Path

from stretto.report import read_events
from stretto.score import measure
from stretto.train import train
from tests.runs import MakeConfig


def test_train_resume_evaluate_and_report(make_config: MakeConfig) -> None:
    folder = train(make_config(train__steps=12))
    longer = make_config(train__steps=16)
    assert train(longer, resume=True) == folder
    losses = [event["loss"] for event in read_events(folder) if "loss" in event]
    assert len(losses) == 16 and losses[-1] < losses[0]
    assert measure(folder, beam=1)["eval_loss"] < losses[0]
    assert "<svg" in Path(folder, "report.html").read_text()
