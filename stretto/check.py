"""`stretto check`: what is in a run folder, whether it can go on, and from where. Nothing is written."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.checkpoint import find_best, steps
from stretto.checkpoint.verify import judge, name_step, read_manifest, read_state
from stretto.config import Config, DataConfig, TrainConfig
from stretto.ending import EXIT, MOST_BYTES
from stretto.errors import CheckpointError, StrettoError
from stretto.files import read_text
from stretto.length import explain_early_end, is_over
from stretto.trained import load_run_config


@dataclass
class Findings:
    lines: list[str] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)  # why the run can neither go on nor be used


def check_run(run: Path) -> Findings:
    """Looks at all of a run folder. The configuration comes first: without it, the rest means nothing."""
    found = Findings()
    try:
        config = load_run_config(run)  # refuses links, too
    except StrettoError as error:
        found.obstacles.append(str(error))
        return found
    found.lines.append(f"configuration: {config.model.kind}, {config.train.steps} steps; no links")
    newest = _check_checkpoints(run / "checkpoints", config, found)
    _check_data(config.data, finished=newest == config.train.steps, found=found)
    found.lines.append(f"last attempt: {_describe_end(run / EXIT)}")
    return found


def _check_checkpoints(folder: Path, config: Config, found: Findings) -> int:
    """Says which step a resumed run begins after."""
    verdicts = {step: judge(folder / name_step(step)) for step in steps(folder)}
    for step, (verdict, reason) in verdicts.items():
        words = _describe_files(folder / name_step(step)) if verdict == "whole" else reason
        found.lines.append(f"step {step}: {verdict}, {words}")
    newest = next((step for step, (verdict, _) in verdicts.items() if verdict != "damaged"), 0)
    total = config.train.steps
    if not newest:
        _note_beginning(folder, bool(verdicts), found)
    elif verdicts[newest][0] == "uncertain":
        found.obstacles.append(verdicts[newest][1])
    elif newest > total:
        found.obstacles.append(f"{folder} is at step {newest}, beyond train.steps = {total}")
    else:
        found.lines.append(_say_whether_it_goes_on(config.train, newest, folder))
        found.lines.append(f"best: step {_find_best(folder)}")
    return newest


def _say_whether_it_goes_on(cfg: TrainConfig, newest: int, folder: Path) -> str:
    if newest == cfg.steps:
        return f"finished: step {newest}"
    with suppress(CheckpointError):
        state = read_state(folder / name_step(newest))
        if is_over(cfg, newest, state.get("waited", 0)):
            return explain_early_end(cfg, newest, state["waited"], state["best_step"])
    return f"resumes after step {newest} of {cfg.steps}"


def _find_best(folder: Path) -> str:
    try:
        return str(find_best(folder))
    except CheckpointError as error:
        return f"not known: {error}"


def _note_beginning(folder: Path, has_damaged: bool, found: Findings) -> None:
    if has_damaged:
        found.obstacles.append(f"no checkpoint in {folder} can be used; move them away to begin anew")
    else:
        found.lines.append("no checkpoint: resumes from the beginning")


def _describe_files(checkpoint: Path) -> str:
    manifest = read_manifest(checkpoint)
    sizes = [entry["size"] for entry in manifest["files"].values()]
    return f"verified: {len(sizes)} files, {sum(sizes) / 1e6:,.1f} MB, format {manifest['format']}"


def _check_data(cfg: DataConfig, finished: bool, found: Findings) -> None:
    """A run that is finished needs its data no more."""
    sources = {f"data.{key} = {value!r}": value for key in ("train", "eval") if (value := getattr(cfg, key))}
    missing = [words for words, source in sources.items() if not _is_there(source)]
    if missing and finished:
        found.lines.append(f"data: not there any more ({'; '.join(missing)})")
    elif missing:
        found.obstacles.append(f"the data are not there: {'; '.join(missing)}")
    else:
        found.lines.append("data: there")


def _is_there(source: str) -> bool:
    """Whether there are files of that name, or that begin with it, as those of a translation do."""
    path = Path(source)
    return source.startswith(("hf:", "python-stdlib")) or path.exists() or any(path.parent.glob(f"{path.name}.*"))


def _describe_end(path: Path) -> str:
    """In the words of exit.json; without one, the run goes on or was killed."""
    try:
        record: dict[str, Any] = json.loads(read_text(path, MOST_BYTES))
        cause = f"{record['cause']} in process {record['rank']}: {record['message']}"
        return ", ".join(filter(None, (f"exit code {record['code']}", cause if record["cause"] else record["message"])))
    except FileNotFoundError:
        return "goes on, or was killed (no exit.json)"
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        return f"not known: {path} cannot be read ({type(error).__name__})"
