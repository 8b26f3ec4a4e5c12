"""The front door for Python: what it takes, what it gives back, and what it refuses with one clear error."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.config import dump_config
from stretto.data import open_data
from stretto.data.sequences import SequenceData
from stretto.data.tokenizer import ByteTokenizer
from stretto.errors import CheckpointError, ConfigError, DataError
from stretto.generate import sample
from stretto.given import CallbackError
from stretto.recipes import load_recipe
from stretto.score import measure
from stretto.trained import load_trained
from tests.corpora import write_images, write_pairs
from tests.given import TINY, Bigrams, Steps
from tests.runs import PATIENCE_S, MakeConfig, eval_losses, find_imported, losses

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")

# In any order, `stretto.train` is a module for those who import from it and a function for those who call it.
ORDERS = [
    "import stretto; door = stretto.train; from stretto.train import train; import stretto.train",
    "from stretto.train import train; import stretto; door = stretto.train",
    "import stretto.train; from stretto.train import train; door = stretto.train",
    "from stretto import train as door; import stretto; from stretto.train import train",
    "import stretto.api; from stretto.train import train; door = stretto.train",
    "import stretto; load = stretto.load; door = stretto.train; from stretto.train import train",
    "import stretto.cli; from stretto.train import train; door = stretto.train",
    "import importlib, stretto.train; door = importlib.reload(stretto.train); from stretto.train import train",
]
CHECK = """
import types, sys
assert callable(door) and isinstance(door, types.ModuleType) and door is sys.modules['stretto.train'] is stretto.train
assert isinstance(train, types.FunctionType) and train is stretto.train.train and stretto.train.run_step
from unittest.mock import patch
with patch('stretto.train.run_step', 1):
    assert stretto.train.run_step == door.run_step == 1
try:
    door('no-such-recipe')
except stretto.StrettoError as error:
    assert 'no-such-recipe' in str(error)
else:
    raise SystemExit('nothing was called')
"""


def test_the_door_is_there_in_every_order_of_imports() -> None:
    """Each order in a process of its own; the last is the control, in which the package leaves the module as it is."""
    code = (
        "import os, sys, torch, tokenizers, torch.distributed.fsdp, torch.distributed.tensor, rich.progress, typer\n"
        "for order in sys.argv[2:]:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        exec(order + sys.argv[1], {})\n"
        "        os._exit(0)\n"
        "    if os.waitpid(child, 0)[1]:\n"
        "        sys.exit(order)\n"
    )
    control = "import sys, types, stretto; sys.modules['stretto'].__class__ = types.ModuleType; " + ORDERS[1]
    command = [sys.executable, "-W", "ignore", "-c", code, CHECK, *ORDERS, control]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.strip().endswith(control), done.stderr


def test_importing_the_package_imports_nothing_slow() -> None:
    code = (
        "import stretto; from stretto import Callback, Config, StrettoError, load_config; import stretto.recipes\n"
        "assert stretto.hf.__name__ == 'stretto.hf'"
    )
    assert find_imported(code, "torch", "numpy", "transformers", "rich") == []


def test_all_public_names_are_there() -> None:
    assert all(hasattr(stretto, name) for name in stretto.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        stretto.trian  # noqa: B018


def test_all_that_may_stand_for_a_recipe(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    path = tmp_path / "recipe.toml"
    path.write_text(dump_config(config))
    tree = {"run": {"dir": tmp_path / "run", "device": "cpu"}, "data": {"train": tmp_path / "text"}}
    assert load_recipe(path) == load_recipe(str(path)) == load_recipe(config) == load_recipe(asdict(config)) == config
    assert load_recipe(tree).data.train == str(tmp_path / "text")
    assert load_recipe(path, ["train.steps=3"]).train.steps == 3


def test_overrides_are_strings_or_values(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    values = {"train.steps": 3, "run.dir": tmp_path / "5", "optim": {"lr": 0.5}, "techniques.layer_drop": {}}
    changed = load_recipe(config, values | {"techniques.fused": None, "train.sample": "3"})
    assert changed == load_recipe(
        config,
        [
            "train.steps=3",
            f"run.dir={tmp_path / '5'}",
            "optim.lr=0.5",
            "techniques.layer_drop=true",
            "techniques.fused=false",
            'train.sample="3"',
        ],
    )
    assert changed.techniques.layer_drop is not None and changed.train.sample == "3"
    assert config.train.steps == 6, "nothing that was given is changed"
    for wrong in ("train.steps=3", [("train.steps", 3)], {"train.stepz": 3}, {"steps": 3}):
        with pytest.raises(ConfigError):
            load_recipe(config, wrong)  # type: ignore[arg-type]


class Notes(stretto.Callback):
    """Notes what it is told, and does its best to disturb."""

    def __init__(self, stop_at: int = 0) -> None:
        self.told: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def note(self, hook: str, step: int) -> bool | None:
        self.told.append((hook, step))
        torch.manual_seed(step), torch.rand(step), random.seed(1), np.random.seed(1)
        return True if hook == "step" and step == self.stop_at else None

    def after_step(self, step: int, numbers: Mapping[str, float]) -> bool | None:
        assert numbers["step"] == step and numbers["loss"] > 0 and numbers["tokens_per_s"] > 0
        with pytest.raises(TypeError):
            numbers["loss"] = 0.0  # type: ignore[index]
        return self.note("step", step)

    def after_evaluation(self, step: int, scores: Mapping[str, float]) -> bool | None:
        assert scores["eval_loss"] > 0
        return self.note("evaluation", step)

    def after_save(self, step: int, checkpoint: Path) -> bool | None:
        assert checkpoint.name == f"step-{step:08d}"
        return self.note("save", step)


def test_a_run_and_its_result(make_config: MakeConfig, tmp_path: Path) -> None:
    """Callbacks see everything and change no bit; a stop that one asks for can be resumed."""
    changes = {"train.eval_every": 2, "checkpoint.every": 3, "train.log_every": 1, "train.steps": 6}
    plain = stretto.train(make_config(run__dir=str(tmp_path / "plain")), overrides=changes)
    with pytest.raises(FrozenInstanceError):
        plain.step = 5  # type: ignore[misc]
    assert (plain.folder, plain.step, plain.stopped) == (tmp_path / "plain", 6, False)
    assert plain.losses == losses(plain.folder) and list(plain.losses) == [1, 2, 3, 4, 5, 6]
    assert plain.eval_losses == eval_losses(plain.folder) and list(plain.eval_losses) == [2, 4, 6]
    assert plain.best_loss == min(plain.eval_losses.values()) == plain.eval_losses[plain.best_step]
    assert plain.best_checkpoint == plain.folder / "checkpoints" / f"step-{plain.best_step:08d}"
    assert plain.best_checkpoint.is_dir() and plain.metrics["eval_loss"] == plain.eval_losses[6]
    assert plain.metrics["seconds"] > 0

    notes = Notes(stop_at=3)
    config = make_config(run__dir=str(tmp_path / "stopped"))
    first = stretto.train(config, overrides=changes, callbacks=[notes, stretto.Callback()])
    assert first.stopped and 3 <= first.step <= 4, "at most one step later"
    assert first.best_step == 2 or first.best_step == 4
    second = stretto.train(str(first.folder), resume=True, callbacks=[notes])
    assert not second.stopped and second.losses == plain.losses and second.eval_losses == plain.eval_losses
    told = dict.fromkeys(notes.told)
    assert [step for hook, step in told if hook == "evaluation"] == [2, 4, 6]
    assert [step for hook, step in told if hook == "step"] == [1, 2, 3, 4, 5, 6]
    assert {("save", 3), ("save", 6)} <= told.keys()
    assert all(
        torch.equal(one, other)
        for one, other in zip(weights(plain), weights(second), strict=True)
    )  # fmt: skip


def weights(result: stretto.Result) -> list[Tensor]:
    return list(stretto.load(result, step=6, device="cpu").model.state_dict().values())


class Broken(stretto.Callback):
    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def after_evaluation(self, step: int, scores: Mapping[str, float]) -> bool | None:
        if self.answer is None:
            raise KeyError("bleu")
        return self.answer


def test_a_callback_that_fails_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    small = {"train.steps": 1, "checkpoint.keep": 0}
    with pytest.raises(CallbackError, match=r"Broken\.after_evaluation failed after step 1: KeyError: 'bleu'") as error:
        stretto.train(make_config(), overrides=small, callbacks=[Broken()])
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(CallbackError, match="returned 'no'"):
        stretto.train(make_config(run__dir=str(tmp_path / "other")), overrides=small, callbacks=[Broken("no")])
    with pytest.raises(ConfigError, match=r"derive its class from stretto\.Callback"):
        stretto.train(make_config(run__dir=str(tmp_path / "third")), callbacks=[print])


def test_a_loaded_run_generates_and_evaluates_as_the_commands_do(make_config: MakeConfig) -> None:
    folder = stretto.train(make_config()).folder
    trained = stretto.load(str(folder), device="cpu")
    assert trained.generate("the ", max_new=8, seed=3) == sample(load_trained(folder, CPU), "the ", 8, seed=3)
    scores = trained.evaluate()
    assert scores == measure(folder, 4)
    assert scores["batches"] == scores["all_batches"] > scores["batches_while_training"] == 2
    assert trained.step == scores["step"] and trained.config.model.layers == 2
    assert stretto.load(folder, step=6).step == 6
    wrong: list[tuple[type[Exception], Any]] = [
        (DataError, lambda: trained.translate(["a"])),
        (DataError, lambda: trained.label(["a.png"])),
        (ConfigError, lambda: trained.generate("a", top_k=0)),
        (ConfigError, lambda: trained.generate("a", temperature=-1)),
        (ConfigError, lambda: trained.generate("a", top_p=90)),
        (ConfigError, lambda: stretto.load(folder, device="tpu")),
        (CheckpointError, lambda: stretto.load(folder / "nothing")),
        (CheckpointError, lambda: stretto.load(folder, step=5)),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()


def test_other_tasks_have_their_own_words(make_config: MakeConfig, tmp_path: Path) -> None:
    pairs = make_config(
        data__task="translation", data__train=str(write_pairs(tmp_path / "pairs")), data__languages=["xx", "yy"],
        model__kind="encoder-decoder", train__steps=1, run__dir=str(tmp_path / "pairs-run"),
    )  # fmt: skip
    trained = stretto.load(stretto.train(pairs))
    assert len(trained.translate(["the cat", "a dog"], beam=1)) == 2
    with pytest.raises(DataError, match=r"translate\(\["):
        trained.translate("the cat")
    with pytest.raises(DataError, match=r"use \.translate"):
        trained.generate("the cat")
    images = make_config(
        data__task="images", data__train=str(write_images(tmp_path / "images.npz")), data__batch_size=16,
        model__kind="vit", model__image_size=16, model__patch=8, train__steps=1, run__dir=str(tmp_path / "images-run"),
    )  # fmt: skip
    from PIL import Image

    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    trained = stretto.load(stretto.train(images))
    (labels,) = trained.label([tmp_path / "one.png"], top=2)
    assert len(labels) == 2 and all(0 <= share <= 1 for _, share in labels)
    assert trained.evaluate()["accuracy"] >= 0


SEQUENCES = [list(range(start, start + 30)) for start in range(60)]


class Ids(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(SEQUENCES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(SEQUENCES[index])}


def test_token_sequences_are_data(tmp_path: Path) -> None:
    """A list and a torch Dataset of the same ids are the same data; the run says that only Python can open them."""
    first = stretto.train(TINY, data=SEQUENCES, overrides={"run.dir": tmp_path / "list"})
    other = stretto.train(TINY, data=Ids(), overrides={"run.dir": tmp_path / "dataset"})
    assert first.losses == other.losses and len(first.losses) == 4
    trained = stretto.load(first)
    assert trained.config.model.vocab == 128 and trained.config.data.own == "stretto.data.sequences.SequenceData"
    scores = trained.evaluate(SEQUENCES)
    assert math.isclose(scores["eval_loss"], first.eval_losses[4], rel_tol=1e-5) and scores["batches"] < 20
    for call in (trained.evaluate, lambda: measure(first.folder, 1)):
        with pytest.raises(DataError, match="given in Python"):
            call()
    with pytest.raises(DataError, match="no tokenizer"):
        trained.generate("a")
    with pytest.raises(ConfigError, match=r"stretto\.train\(data"):
        stretto.train(first.folder, resume=True)
    going_on = {"train.steps": 6}
    resumed = stretto.train(first.folder, resume=True, data=SEQUENCES, overrides=going_on)
    assert resumed.step == 6
    with pytest.raises(CheckpointError, match="another configuration"):
        stretto.train(first.folder, resume=True, data=SEQUENCES[1:], overrides=going_on)


def test_windows_of_sequences_hold_their_tokens() -> None:
    config = load_recipe(TINY)
    data = SequenceData(config.data, 0, SEQUENCES)
    inputs = data.train_batch(0).inputs
    assert inputs is not None
    for start, end in zip(inputs.layout.offsets[:-1].tolist(), inputs.layout.offsets[1:].tolist(), strict=True):
        ids = inputs.ids[start:end]
        assert torch.equal(ids, torch.arange(len(ids)) + ids[:1].sum()), "sequences count up, and are kept apart"
    assert data.num_train == (59 * 30 - 1) // 16


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a text", "torch Dataset"),
        (iter(SEQUENCES), "numbered items"),
        ([[1, 2], [1.5]], "item 1"),
        ([[[1, 2]]], "item 0"),
        ([[1, -2]], "-2"),
        ([], "fewer than two"),
        ([[1, 2, 3]], "too few"),
        ([["a"]], "item 0"),
    ],
)
def test_what_cannot_be_data_is_refused(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        SequenceData(load_recipe(TINY).data, 0, data)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token id 88"):
        stretto.train(TINY, data=SEQUENCES, overrides={"model.vocab": 64})
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"token id 329, but .*data\.tokenizer, has only 260"):
        ids = [[start + 300 for start in range(30)]] * 60
        stretto.train(TINY, data=ids, overrides={"data.tokenizer": tmp_path / "tokenizer.json"})
    with pytest.raises(DataError, match=r"data\.task = 'causal'"):
        stretto.train("masked-lm", data=SEQUENCES)


def test_a_model_of_ones_own_is_trained_and_resumed_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Bigrams()
    begin = model.table.weight.detach().clone()
    whole = stretto.train(TINY, model=model, data=Steps(), overrides={"run.dir": tmp_path / "whole"})
    assert "Bigrams with 0.0M parameters" in capsys.readouterr().out
    assert whole.losses[4] < whole.losses[1] and not torch.equal(model.table.weight, begin)
    overrides = {"run.dir": tmp_path / "parts", "checkpoint.every": 2}
    stretto.train(TINY, model=Bigrams(), data=Steps(), overrides=overrides, callbacks=[Notes(stop_at=2)])
    parts = stretto.train(TINY, model=Bigrams(), data=Steps(), overrides=overrides, resume=True)
    assert parts.losses == whole.losses, "bit for bit, dropout too"
    trained = stretto.load(whole, model=Bigrams())
    assert torch.equal(trained.model.state_dict()["table.weight"], model.table.weight)
    assert math.isclose(trained.evaluate(Steps())["eval_loss"], whole.best_loss, rel_tol=1e-5)
    for call in (lambda: stretto.load(whole), lambda: measure(whole.folder, 1)):
        with pytest.raises(CheckpointError, match=r"stretto\.load\(run, model"):
            call()
    with pytest.raises(DataError, match="model of its own"):
        trained.generate("a")
    with pytest.raises(ConfigError, match=r"stretto\.train\(model"):
        stretto.train(whole.folder, data=Steps(), resume=True)


class Tied(Bigrams):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.table


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        (Bigrams, {"techniques.layer_drop": True}, r"techniques\.layer_drop"),
        (Bigrams, {"parallel.sequence": 2}, r"parallel\.sequence = 2"),
        (Bigrams, {"parallel.data": "shard"}, "shard"),
        (Tied, {}, "one tensor under two names"),
        (nn.Identity, {}, "no parameters"),
        (lambda: Bigrams().to("meta"), {}, "meta device"),
    ],
)
def test_what_a_model_of_ones_own_cannot_have(model: Any, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stretto.train(TINY, model=model(), data=Steps(), overrides=overrides)


def test_data_without_a_tokenizer_need_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab"):
        stretto.train(TINY, data=Steps(), overrides={"run.dir": tmp_path / "run"})
    with pytest.raises(DataError, match="only Python can open"):
        open_data(load_recipe(TINY, {"data.own": "x.Y"}).data, seed=0, folder=tmp_path)
