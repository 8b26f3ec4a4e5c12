"""W&B and MLflow get the numbers of a run, by the real libraries where they are installed; and none of them can stop
or hold up a run."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.config import LOGGERS, build_config
from stretto.errors import ConfigError
from stretto.report import loggers, read_events
from stretto.report.loggers import KINDS
from stretto.train import train
from tests.runs import MakeConfig, eval_losses, losses

REASON = "not installed here: pip install 'stretto[loggers]'"


def go_on(make_config: MakeConfig, name: str) -> tuple[Path, str]:
    """A run that is resumed, and what it is called there."""
    changes: dict[str, Any] = {"report__loggers": [name], "optim__schedule": "constant"}
    folder = train(make_config(train__steps=4, **changes))
    known = json.loads((folder / "loggers.json").read_text())[name]
    train(make_config(train__steps=6, **changes), resume=True)
    assert json.loads((folder / "loggers.json").read_text()) == {name: known}
    return folder, known


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of W&B's file: LevelDB's log in blocks of 32 KiB, each piece behind its checksum, length and kind:
    1 is a whole record, 2 its begin, 3 its middle and 4 its end."""
    at, record = 7, b""  # behind what says that it is W&B's
    while at + 7 <= len(data):
        if -at % 32768 < 7:  # too little for another piece in this block
            at += -at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb_has_the_numbers(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason=REASON)
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    folder, known = go_on(make_config, "wandb")
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{known}/*.wandb"))
    assert len(files) == 2, "the run, and that it went on"
    found: dict[str, dict[int, float]] = {"train/loss": {}, "eval/eval_loss": {}}
    for file in files:
        for data in read_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            for key in found.keys() & items.keys():
                found[key][json.loads(items["step"])] = json.loads(items[key])
    assert found == {"train/loss": losses(folder), "eval/eval_loss": eval_losses(folder)}


def test_mlflow_has_the_numbers(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason=REASON)
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    folder, known = go_on(make_config, "mlflow")
    client = MlflowClient()
    for key, wanted in (("train/loss", losses(folder)), ("eval/eval_loss", eval_losses(folder))):
        assert {one.step: one.value for one in client.get_metric_history(known, key)} == wanted
    run = client.get_run(known)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["model.width"] == "32" and run.data.params["train.steps"] == "4"


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries of these names that the test writes itself."""
    monkeypatch.syspath_prepend(str(tmp_path / "libraries"))
    (tmp_path / "libraries").mkdir()
    for name in LOGGERS:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    return tmp_path / "libraries"


def test_a_logger_that_fails_or_hangs_is_said_once(
    make_config: MakeConfig, tmp_path: Path, broken: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (broken / "wandb.py").write_text("raise OSError('no network')")
    (broken / "mlflow").mkdir()
    (broken / "mlflow" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(loggers, "CLOSE_S", 0.2)
    plain = train(make_config(run__dir=str(tmp_path / "plain")))
    capsys.readouterr()
    begin = time.monotonic()
    folder = train(make_config(report__loggers=["wandb", "mlflow"]))
    assert time.monotonic() - begin < 30, "nobody waited for it"
    assert losses(folder) == losses(plain) and any("finished" in event for event in read_events(folder))
    said = capsys.readouterr().err
    assert said.count("wandb failed") == said.count("mlflow failed") == 1
    assert "no network" in said and "has not taken all numbers" in said


def test_a_library_that_is_missing_is_said_before_the_run(
    make_config: MakeConfig, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(KINDS) == LOGGERS
    monkeypatch.setattr(sys, "path", [str(broken)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    (broken / "wandb").mkdir()  # W&B makes such a folder where it runs
    config = make_config(report__loggers=["wandb"])
    with pytest.raises(ConfigError, match=r"report\.loggers: wandb is not installed"):
        train(config)
    assert not Path(config.run.dir).exists()
    with pytest.raises(ConfigError, match="must be one of wandb, mlflow"):
        build_config({"report": {"loggers": ["tensorboard"]}})
