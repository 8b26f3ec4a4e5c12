"""Two real processes (gloo) end a run early at the same step as one does, by what they have measured together."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from stretto import checkpoint
from tests.distributed.processes import launch
from tests.runs import base, change, eval_losses, losses

pytestmark = pytest.mark.dist


def test_all_processes_end_early_together(tmp_path: Path) -> None:
    tree = change(
        base(tmp_path), optim__lr=3.0, optim__warmup=0, train__epochs=0.7, train__eval_every=1, train__patience=2,
    )  # fmt: skip
    launch({"early": {"config": copy.deepcopy(tree)}}, tmp_path / "one", 1)
    jobs: dict[str, Any] = {mode: {"config": change(tree, parallel__data=mode)} for mode in ("replicate", "shard")}
    jobs["again"] = {"config": copy.deepcopy(jobs["shard"]["config"]), "resume": True, "folder": "shard"}
    launch(jobs, tmp_path / "two", 2)
    end = max(losses(tmp_path / "one" / "early"))
    for mode in ("replicate", "shard"):
        run = tmp_path / "two" / mode
        assert max(losses(run)) == end == checkpoint.steps(run / "checkpoints")[0] and len(eval_losses(run)) == end
        record = json.loads((run / "exit.json").read_text())
        assert record["code"] == 0 and record["message"].startswith(f"stopped early after step {end} of 13: ")
    found = [json.loads((tmp_path / "two" / f"{name}.{rank}.json").read_text()) for name in jobs for rank in (0, 1)]
    assert [one["code"] for one in found] == [0] * 6
    assert found[-1]["samples"] == {} == found[-2]["samples"], "the resumed run has nothing left to do"
