"""The front door for Python: `stretto.train` and `stretto.load` (docs/python.md).

result = stretto.train("demo", overrides={"train.steps": 100})
print(stretto.load(result).generate("def "))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from stretto import checkpoint
from stretto.bench.ablate import train_and_ablate
from stretto.checkpoint.verify import name_step
from stretto.config import Config
from stretto.data import Data
from stretto.data.sequences import SequenceData
from stretto.errors import ConfigError, DataError
from stretto.generate import classify, fill, sample, translate
from stretto.given import Callback, Given
from stretto.recipes import Overrides, Recipe, load_recipe
from stretto.report import read_events
from stretto.runtime import choose_device, start
from stretto.score import measure_trained
from stretto.train import train as run_training
from stretto.trained import Trained, load_run_config, load_trained

USES = {
    "causal": "generate", "instruct": "generate", "masked": "fill", "translation": "translate", "images": "label",
    "classification": "label",
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What became of a run, by its events and checkpoints."""

    folder: Path  # the run folder
    step: int  # updates done
    stopped: bool  # a callback or train.patience ended the run before its last step
    losses: dict[int, float]  # of training, by step; those that were logged
    eval_losses: dict[int, float]  # on held-out data, by step
    best_step: int  # of the lowest evaluation loss; 0: there is none
    best_loss: float  # nan: there is none
    best_checkpoint: Path | None  # what `stretto.load` loads; None: nothing was saved
    metrics: dict[str, float]  # of the last evaluation, and `seconds` of training


def train(
    recipe: Recipe,
    *,
    overrides: Overrides = (),
    resume: bool = False,
    model: nn.Module | None = None,
    data: Any = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Trains what a recipe says: the name of a shipped one, a TOML file, a run folder, a Config, or a tree of sections.

    `overrides` is ["train.steps=100"] or {"train.steps": 100}; `resume` goes on from the newest checkpoint, if any.
    `data` takes the place of the recipe's: an object of a class derived from stretto.data.Data, or a list or a torch
    Dataset of token sequences. `model` takes the place of the recipe's, and keeps the values it has: a module that,
    called with a stretto.batch.Batch, returns the summed loss of its labels. docs/python.md says what these can do.
    """
    config = load_recipe(recipe, overrides)
    if data is not None:
        config, data = _adopt(data, config)
    run = train_and_ablate if config.report.ablate else run_training
    folder = run(config, resume, Given(model, data, tuple(callbacks)))
    return read_result(folder, load_run_config(folder).train.steps)


def _adopt(data: Any, config: Config) -> tuple[Config, Data]:
    """Returns the data, and the configuration with the size of their vocabulary if it leaves that open."""
    if isinstance(data, Data):
        return config, data
    own, vocab = SequenceData(config.data, config.run.seed, data), config.model.vocab
    if own.tokenizer is None and vocab == 0:
        vocab = -(-(own.largest + 1) // 64) * 64
    if own.largest >= (size := vocab or own.tokenizer.size):
        raise ConfigError(f"data= has the token id {own.largest}, but model.vocab, or data.tokenizer, has only {size}")
    return replace(config, model=replace(config.model, vocab=vocab)), own


def read_result(folder: Path, steps: int) -> Result:
    """Reads what became of a run that was to have so many steps."""
    events, saved = read_events(folder), checkpoint.steps(folder / "checkpoints")
    losses, eval_losses = (
        {event["step"]: math.nan if event[key] is None else event[key] for event in events if key in event}
        for key in ("loss", "eval_loss")
    )
    done = max([*losses, *eval_losses, *saved], default=0)
    finite = {step: loss for step, loss in eval_losses.items() if math.isfinite(loss)}
    best = min(finite, key=lambda step: finite[step], default=0)
    kept = best if best in saved else max(saved, default=0)
    last: dict[str, Any] = next((event for event in reversed(events) if "eval_loss" in event), {})
    ends: list[dict[str, Any]] = [event["finished"] for event in events if "finished" in event]
    timed = [end for end in ends if "seconds" in end]  # a start with nothing left to do has none
    finished = timed[-1] if timed else {}
    return Result(
        folder=folder,
        step=done,
        stopped=done < steps,
        losses=losses,
        eval_losses=eval_losses,
        best_step=best,
        best_loss=finite.get(best, math.nan),
        best_checkpoint=folder / "checkpoints" / name_step(kept) if kept else None,
        metrics={key: value for key, value in last.items() if key not in ("time", "step")}
        | {key: finished[key] for key in ("seconds",) if key in finished},
    )


def load(
    run: str | Path | Result, *, step: int | None = None, device: str = "auto", model: nn.Module | None = None
) -> Loaded:
    """Loads a run with its best weights, or those of a step. A run that was given its own model needs one like it."""
    folder = run.folder if isinstance(run, Result) else Path(run)
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {device!r} must be 'auto', 'cpu' or 'cuda'")
    return Loaded(folder, load_trained(folder, choose_device(device), step, model))


@dataclass(frozen=True)
class Loaded:
    """A trained run."""

    folder: Path
    trained: Trained  # its config, model, step, tokenizer, labels and device

    @property
    def model(self) -> nn.Module:
        return self.trained.model

    @property
    def config(self) -> Config:
        return self.trained.config

    @property
    def step(self) -> int:
        """The step that the weights are from."""
        return self.trained.step

    def generate(
        self, prompt: str = "", *, max_new: int = 400, temperature: float = 0.8, top_k: int = 40, top_p: float = 1.0,
        seed: int = 0,
    ) -> str:  # fmt: skip
        """Returns the prompt and what a causal language model writes after it, or the answer of one that was trained to
        give it. Temperature 0 takes the likeliest token; else one of the `top_k` likeliest is drawn, and of these one
        of the fewest that together have the share `top_p`."""
        self._require("generate")
        _require_at_least(max_new=(max_new, 0), temperature=(temperature, 0), top_k=(top_k, 1))
        if not 0 <= top_p <= 1:
            raise ConfigError(f"top_p = {top_p} is a share: it must be between 0 and 1")
        return sample(self.trained, prompt, max_new, temperature, top_k, seed, top_p)

    def fill(self, text: str, *, top: int = 5) -> list[list[tuple[str, float]]]:
        """Returns for each [MASK] in the text the likeliest words of a masked language model, with probabilities."""
        self._require("fill")
        _require_at_least(top=(top, 1))
        return fill(self.trained, text, top)

    def translate(self, sentences: Sequence[str], *, beam: int = 4) -> list[str]:
        """Translates sentences. Beam 1 is greedy."""
        self._require("translate")
        _require_at_least(beam=(beam, 1))
        if isinstance(sentences, str):
            raise DataError("sentences: give a list, as in translate(['a dog runs'])")
        return translate(self.trained, sentences, beam)

    def label(self, images: Sequence[str | Path], *, top: int = 5) -> list[list[tuple[str, float]]]:
        """Returns the likeliest labels of each image file, or of each text, with their probabilities."""
        self._require("label")
        _require_at_least(top=(top, 1))
        if isinstance(images, str | Path):
            raise DataError("images: give a list of files, as in label(['cat.png']), or of texts")
        return list(classify(self.trained, images, top))

    def evaluate(self, data: Any = None, *, beam: int = 4) -> dict[str, Any]:
        """Measures the loss on all evaluation data, and BLEU or accuracy where the task has them. A run that was given
        its data needs them again, in the same form."""
        _require_at_least(beam=(beam, 1))
        data = None if data is None else _adopt(data, self.config)[1]
        device = cast(Literal["cpu", "cuda"], self.trained.device.type)
        with start(replace(self.config.run, device=device)) as rt, rt.interruptible():
            return measure_trained(self.trained, self.folder, rt, beam, data)

    def _require(self, use: str) -> None:
        own, can = self.config.model.own, USES.get(self.config.data.task)
        if own:
            raise DataError(f"{self.folder} has a model of its own, {own}: use it by `.model`")
        if can != use:
            way = f"use .{can}(...)" if can else "it only evaluates"
            raise DataError(f"{self.folder} is a run with data.task = {self.config.data.task!r}: {way}")


def _require_at_least(**values: tuple[float, float]) -> None:
    for name, (value, least) in values.items():
        if value < least:
            raise ConfigError(f"{name} = {value} must be at least {least}")
