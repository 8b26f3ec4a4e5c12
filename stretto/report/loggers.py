"""The numbers of a run for W&B and MLflow, by their own libraries: `report.loggers`.

Each logger works in a thread of its own, so that a slow network holds up nothing. Where things go is what the
libraries read from their own settings: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol

from stretto.config import Config
from stretto.errors import ConfigError
from stretto.files import read_text, write_text

IDS = "loggers.json"  # what the run is called there: one that goes on goes on there, too
CLOSE_S = 20.0  # for what is still on its way when the run ends
_MOST_BYTES = 1 << 16
_LOCK = Lock()  # on that file

Numbers = Mapping[str, float]


class Logger(Protocol):
    id: str

    def log(self, step: int, values: Numbers) -> None: ...

    def close(self) -> None: ...


class Wandb:
    def __init__(self, name: str, options: dict[str, Any], known: str) -> None:
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            raise RuntimeError("nobody is logged in: call `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "stretto"), name=name, config=options, id=known or None,
            resume="allow" if known else None, settings=wandb.Settings(console="off"),
        )  # fmt: skip
        self.id = str(self.run.id)
        self.run.define_metric("*", step_metric="step")  # its own steps only grow; those of a resumed run go back

    def log(self, step: int, values: Numbers) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    def __init__(self, name: str, options: dict[str, Any], known: str) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.client, self.metric = MlflowClient(), Metric
        self.id = known
        if known:
            self.client.update_run(known, status="RUNNING")
            return
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "stretto")
        experiment = self.client.get_experiment_by_name(title)
        number = self.client.create_experiment(title) if experiment is None else experiment.experiment_id
        self.id = self.client.create_run(number, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in options.items()]
        for i in range(0, len(params), 100):  # as many as it takes at once
            self.client.log_batch(self.id, params=params[i : i + 100])

    def log(self, step: int, values: Numbers) -> None:
        now = int(1000 * time.time())
        self.client.log_batch(self.id, metrics=[self.metric(key, value, now, step) for key, value in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.id)


KINDS: dict[str, Callable[[str, dict[str, Any], str], Logger]] = {"wandb": Wandb, "mlflow": Mlflow}


def require_loggers(names: tuple[str, ...]) -> None:
    """Raises a `ConfigError` for libraries that are not installed."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, such as W&B makes, is none
            raise ConfigError(
                f"report.loggers: {name} is not installed: pip install 'stretto[loggers]', or leave it out"
            )


class Background:
    """A logger that works in a thread. `lose` hears of its error, after which it does nothing more."""

    def __init__(self, open_logger: Callable[[], Logger], lose: Callable[[Exception], None]) -> None:
        self.open_logger, self.lose = open_logger, lose
        self.queue: SimpleQueue[tuple[int, Numbers] | None] = SimpleQueue()
        self.thread = Thread(target=self._work, name="logger", daemon=True)
        self.thread.start()

    def log(self, step: int, values: Numbers) -> None:
        if self.thread.is_alive():
            self.queue.put((step, values))

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join(CLOSE_S)
        if self.thread.is_alive():
            raise TimeoutError(f"it has not taken all numbers within {CLOSE_S:.0f} s after the end of the run")

    def _work(self) -> None:
        try:
            logger = self.open_logger()
            while (item := self.queue.get()) is not None:
                logger.log(*item)
            logger.close()
        except Exception as error:
            self.lose(error)


def open_loggers(folder: Path, config: Config, lose: Callable[[str, Exception], None]) -> dict[str, Background]:
    """The loggers of a run, by name; `lose` hears of the name and the error of one that fails."""

    def start(name: str) -> Background:
        return Background(lambda: _open_known(name, folder, config), lambda error: lose(name, error))

    return {name: start(name) for name in config.report.loggers}


def _open_known(name: str, folder: Path, config: Config) -> Logger:
    logger = KINDS[name](folder.resolve().name, dict(_flatten(asdict(config))), _read_ids(folder).get(name, ""))
    with _LOCK:
        write_text(folder / IDS, json.dumps(_read_ids(folder) | {name: logger.id}))
    return logger


def _read_ids(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        return {str(name): str(value) for name, value in json.loads(read_text(folder / IDS, _MOST_BYTES)).items()}
    return {}


def _flatten(tree: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{key}{name}.")
        else:
            yield f"{key}{name}", value
