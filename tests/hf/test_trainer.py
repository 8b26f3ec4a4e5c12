"""stretto.hf.Trainer does what transformers' own does: the same losses, evaluations and checkpoints."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import stretto
import stretto.hf.defer
import stretto.report
from stretto.hf.acceleration import is_accelerated
from stretto.hf.loop import DataCollator
from stretto.hf.trainer import ScheduledAdamW, Seq2SeqTrainer, SpeedMeter, Trainer, count_batch, find_counterpart
from stretto.ops.cross_entropy import linear_cross_entropy
from tests.hf.families import VOCAB, build
from tests.hf.observe import count_tokens
from tests.hf.trainers import add_dropout, assert_same_way, draw_samples, history, make, train_both

Sample = dict[str, Any]
MODELS = ["bert-classes", "gpt2", "marian"]
pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.mark.parametrize("family", MODELS)
def test_twenty_steps_go_the_same_way(family: str, tmp_path: Path) -> None:
    ours, theirs = (make(kind, build(family), tmp_path, family, max_steps=20) for kind in (Trainer, hf.Trainer))
    ours.train()
    theirs.train()
    assert is_accelerated(ours.model) and isinstance(ours.optimizer.optimizer, ScheduledAdamW)
    assert len(history(ours)) == 20 and history(ours).std() > 0.01
    assert_same_way(ours, theirs)


OPTIONS: dict[str, Sample] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "recomputed": {"gradient_checkpointing": True},
    "smoothing": {"label_smoothing_factor": 0.1},
    "smoothing-accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "no-limit": {"max_grad_norm": 0.0},
    "tight-limit": {"max_grad_norm": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "short-updates": {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "num_train_epochs": 3,
                      "max_steps": -1},
    "dropped-rest": {"per_device_train_batch_size": 5, "dataloader_drop_last": True, "num_train_epochs": 2,
                     "max_steps": -1},
    "counted": {"include_num_input_tokens_seen": "non_padding", "logging_steps": 2, "logging_first_step": True},
    "on-plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1,
                   "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}, "metric_for_best_model": "eval_loss"},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_options_mean_the_same(options: str, tmp_path: Path) -> None:
    assert_same_way(*train_both("gpt2", tmp_path, **OPTIONS[options]))


def test_batches_by_length_are_theirs(tmp_path: Path) -> None:
    """They are drawn from torch's generator, of which nothing is taken by a model that is accelerated in between."""
    trainers = []
    for kind in (Trainer, hf.Trainer):
        options = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2, "max_steps": -1}
        trainers.append(make(kind, build("gpt2"), tmp_path, "gpt2", **options))
        trainers[-1].train()
    assert_same_way(trainers[0], trainers[1])


def test_bf16_autocast_goes_about_the_same_way(tmp_path: Path) -> None:
    assert_same_way(*train_both("gpt2", tmp_path, bf16=True), tolerance=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", MODELS)
def test_on_a_gpu(family: str, precision: str, tmp_path: Path) -> None:
    options = {} if precision == "fp32" else {precision: True}
    ours, theirs = train_both(family, tmp_path, use_cpu=False, max_steps=12, **options)
    assert next(ours.model.parameters()).is_cuda and 0 < history(ours, "mfu").max() < 1
    torch.testing.assert_close(history(ours), history(theirs), rtol=0.03, atol=0.03)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss function of a user, which counts padding too."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="sum") / 50


def test_a_loss_function_that_reads_padding(tmp_path: Path) -> None:
    class WithoutIgnored(DataCollator):
        def __call__(self, samples: Any) -> dict[str, Tensor]:
            batch = super().__call__(samples)
            return batch | {"labels": batch["labels"].clamp(min=0)}

    others = {"compute_loss_func": summed, "data_collator": WithoutIgnored(1)}
    assert_same_way(*train_both("gpt2", tmp_path, others))


@pytest.mark.parametrize("family", ["bert-classes", "gpt2"])
def test_a_row_of_padding_alone(family: str, tmp_path: Path) -> None:
    class WithEmptyRow(DataCollator):
        def __call__(self, samples: Any) -> dict[str, Tensor]:
            batch = super().__call__(samples)
            batch["attention_mask"][1] = 0
            if family == "gpt2":
                batch["labels"][1] = -100
            return batch

    assert_same_way(*train_both(family, tmp_path, {"data_collator": WithEmptyRow(1)}))


def test_label_smoothing_of_pairs(tmp_path: Path) -> None:
    trainers = [make(kind, "marian", tmp_path, label_smoothing_factor=0.1) for kind in (Trainer, hf.Trainer)]
    for trainer in trainers:

        def collate(samples: list[Sample], shift: Any = trainer.model.prepare_decoder_input_ids_from_labels) -> Sample:
            batch = DataCollator(1)(samples)
            return batch | {"decoder_input_ids": shift(labels=batch["labels"])}

        trainer.data_collator = collate
        trainer.train()
    assert_same_way(trainers[0], trainers[1])
    found, expected = (trainer.evaluate()["eval_loss"] for trainer in trainers)
    assert found == pytest.approx(expected, abs=1e-4)


def test_targets_without_a_mask_lose_their_padding(tmp_path: Path) -> None:
    """Behind the last label is padding, where nobody but the loss reads the logits; a batch without any has no mask."""
    ours, theirs = (make(kind, "marian", tmp_path) for kind in (Trainer, hf.Trainer))
    with count_tokens() as tokens:
        ours.train()
    theirs.train()
    assert_same_way(ours, theirs)
    lengths = {name: sum(len(sample[name]) for sample in draw_samples("marian")) for name in ("input_ids", "labels")}
    assert sum(tokens) == 2 * lengths["input_ids"] + 4 * lengths["labels"], "layers of 1 and 2 attentions"
    batch = DataCollator(1)(draw_samples("marian")[:4])
    logits = [trainer.compute_loss(trainer.model, dict(batch), True)[1].logits for trainer in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_need_no_logits(smoothing: float, tmp_path: Path) -> None:
    rows: list[int] = []

    def note(x: Tensor, *others: Any, **options: Any) -> Tensor:
        rows.append(len(x))
        return linear_cross_entropy(x, *others, **options)

    trainer = make(Trainer, "gpt2", tmp_path, label_smoothing_factor=smoothing)
    with (
        patch.object(stretto.hf.defer, "linear_cross_entropy", note),
        patch.object(stretto.hf.defer.Logits, "compute", side_effect=AssertionError("logits were computed")),
    ):
        trainer.train()
    samples = draw_samples("gpt2")  # an epoch
    predicted = sum(len(sample["input_ids"]) - 1 for sample in samples)
    assert len(rows) == 6 and predicted <= sum(rows) <= predicted + len(samples)  # first tokens are labels too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_is_uninterrupted(dtype: torch.dtype, tmp_path: Path) -> None:
    def begin() -> Any:
        options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "cosine"}
        return make(Trainer, add_dropout(build("bert-classes", dtype)), tmp_path, "bert-classes", **options)

    whole, resumed = begin(), begin()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(history(resumed), history(whole)) and len(history(whole)) == 10
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        exact = [t.optimizer.optimizer.weight(r) for t, r in ((whole, p), (resumed, q))]
        assert torch.equal(*exact)


def test_goes_on_from_a_checkpoint_of_the_plain_trainer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    plain, ours = make(hf.Trainer, "gpt2", tmp_path, **options), make(Trainer, "gpt2", tmp_path / "ours", **options)
    plain.train()
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close(history(ours), history(plain), rtol=2e-4, atol=2e-4)


def test_weights_in_bf16_are_halves_of_exact_ones(tmp_path: Path) -> None:
    trainer = make(Trainer, build("gpt2", torch.bfloat16), tmp_path, "gpt2", learning_rate=1e-5, weight_decay=0.0)
    before = {name: p.detach().float().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    for name, p in trainer.model.named_parameters():
        assert p.dtype == torch.bfloat16
        moved = (optimizer.weight(p) - before[name]).abs().max()
        assert 1e-6 < moved < 6.1e-5, name  # far less than a bf16 weight can move, and it is not lost


def test_other_optimizers_stay(tmp_path: Path) -> None:
    class Asked(Trainer):
        times = 0

        @staticmethod
        def get_optimizer_cls_and_kwargs(*args: Any) -> Any:
            Asked.times += 1
            return hf.Trainer.get_optimizer_cls_and_kwargs(*args)

    assert type(make(Asked, "gpt2", tmp_path, optim="adafactor").create_optimizer()) is hf.Adafactor
    assert Asked.times == 1, "some hook an optimizer into each parameter when they are asked for"
    model = build("gpt2")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make(Trainer, model, tmp_path, "gpt2", others={"optimizers": (sgd, None)})
    assert trainer.create_optimizer() is sgd
    given = (torch.optim.AdamW, {"lr": 0.1})
    trainer = make(Trainer, "gpt2", tmp_path, others={"optimizer_cls_and_kwargs": given})
    assert type(trainer.create_optimizer()) is torch.optim.AdamW


def test_decay_groups_are_theirs(tmp_path: Path) -> None:
    ours, theirs = (make(kind, "bert-classes", tmp_path).create_optimizer() for kind in (Trainer, hf.Trainer))
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert [p.shape for p in mine["params"]] == [p.shape for p in other["params"]]
        assert mine["lr"] == other["lr"] and float(mine["weight_decay"]) == pytest.approx(other["weight_decay"])


def accuracy(found: Any) -> dict[str, float]:
    assert type(found.predictions) is np.ndarray
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def test_evaluation_prediction_and_saving(tmp_path: Path) -> None:
    others = {"compute_metrics": accuracy}
    ours, theirs = train_both("bert-classes", tmp_path, others, eval_strategy="steps", eval_steps=3)
    for key in ("eval_loss", "eval_accuracy"):
        expected, found = (trainer.evaluate()[key] for trainer in (theirs, ours))
        assert found == pytest.approx(expected, abs=1e-4)
    expected, found = (trainer.predict(trainer.eval_dataset).predictions for trainer in (theirs, ours))
    assert type(found) is type(expected) and abs(found - expected).max() < 1e-3
    ours.save_model(str(tmp_path / "saved"))
    assert "stretto" not in (tmp_path / "saved" / "config.json").read_text()
    plain = hf.AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "saved"))
    assert not is_accelerated(plain) and plain.config._attn_implementation == "sdpa"
    for (name, p), (other, q) in zip(plain.named_parameters(), ours.model.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q)


class Diary(hf.TrainerCallback):
    """Every event of a callback, with the state and the arguments that the trainer hands over."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def note(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> None:
        noted = (event, state.global_step, state.epoch, sorted(given), control.should_save, control.should_evaluate)
        self.lines.append((*noted, sorted(given.get("logs") or given.get("metrics") or ())))


for _event in [name for name in vars(hf.TrainerCallback) if name.startswith("on_")]:
    setattr(Diary, _event, lambda self, *args, event=_event, **given: self.note(event, *args, **given))


def test_callbacks_are_called_as_by_theirs(tmp_path: Path) -> None:
    """Which also look between backward pass and update."""
    diaries = [Diary(), Diary()]
    for kind, diary in zip((Trainer, hf.Trainer), diaries, strict=True):
        options: dict[str, Any] = {
            "eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1,
            "gradient_accumulation_steps": 2, "per_device_train_batch_size": 5, "logging_steps": 2,
        }  # fmt: skip
        make(kind, "gpt2", tmp_path / kind.__module__, others={"callbacks": [diary]}, **options).train()
    ours, theirs = ([(*line[:-1], set(line[-1]) - {"tokens_per_second"}) for line in diary.lines] for diary in diaries)
    events = {line[0] for line in ours}
    assert {"on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_evaluate", "on_save"} <= events
    assert ours == [(*line[:-1], set(line[-1])) for line in theirs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_model_is_loaded_at_the_end(dtype: torch.dtype, tmp_path: Path) -> None:
    """The rate grows until it does harm, so that the best model is not the last one; then training goes on."""
    found = []
    for kind in (Trainer, hf.Trainer):
        options: dict[str, Any] = {
            "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1,
            "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 0.05, "max_steps": 12,
        }  # fmt: skip
        stop = hf.EarlyStoppingCallback(early_stopping_patience=2)
        folder = tmp_path / kind.__module__
        others = {"compute_metrics": accuracy, "callbacks": [stop]}
        trainer = make(kind, build("bert-classes", dtype), folder, "bert-classes", others, **options)
        trainer.train()
        best = trainer.state.best_model_checkpoint
        assert best is not None and Path(best).parent == folder and trainer.state.best_metric > 0
        saved = hf.AutoModelForSequenceClassification.from_pretrained(best, dtype=dtype)
        for p, q in zip(trainer.model.parameters(), saved.parameters(), strict=True):
            assert torch.equal(p, q)
        predicted = trainer.predict(trainer.eval_dataset)
        assert predicted.metrics["test_accuracy"] == trainer.state.best_metric
        trainer.train()
        found.append((trainer.state.best_metric, trainer.state.best_global_step, predicted.predictions))
    assert dtype == torch.bfloat16 or found[0][:2] == found[1][:2]
    if dtype == torch.float32:
        assert abs(found[0][2] - found[1][2]).max() < 0.01


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resumed_in_the_middle_of_an_epoch_with_a_short_update(accumulation: int, tmp_path: Path) -> None:
    def begin(kind: Any) -> Any:
        options = {"max_steps": -1, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2}
        options |= {"per_device_train_batch_size": 5, "gradient_accumulation_steps": accumulation}
        model = add_dropout(build("gpt2"))
        return make(kind, model, tmp_path / kind.__module__, "gpt2", **options)

    whole, resumed, theirs = begin(Trainer), begin(Trainer), begin(hf.Trainer)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / Trainer.__module__ / "checkpoint-4"))
    assert torch.equal(history(resumed), history(whole))
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
    theirs.train()
    assert resumed.state.global_step == theirs.state.global_step == len(history(theirs))


def test_predictions_in_parts_and_metrics_of_batches(tmp_path: Path) -> None:
    def count(found: Any, compute_result: bool) -> dict[str, float]:
        seen.append(len(found.label_ids))
        return {"rows": float(sum(seen))} if compute_result else {}

    for kind in (Trainer, hf.Trainer):
        seen: list[int] = []
        options: dict[str, Any] = {"batch_eval_metrics": True, "eval_accumulation_steps": 1, "eval_on_start": True}
        trainer = make(kind, "bert-classes", tmp_path, others={"compute_metrics": count}, **options)
        trainer.train()
        seen.clear()
        assert trainer.evaluate()["eval_rows"] == 10 and seen == [4, 4, 2]
        assert "eval_loss" in trainer.state.log_history[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_weights_of_other_types_train_by_torchs_optimizer(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = [stretto.accelerate(build("bert-classes", dtype)), build("bert-classes", dtype)]
    options: dict[str, Any] = {"adam_epsilon": 1e-4}  # fp16 holds it
    with caplog.at_level(logging.INFO, "stretto"):
        ours, theirs = (
            make(kind, model, tmp_path, "bert-classes", **options)
            for kind, model in zip((Trainer, hf.Trainer), models, strict=True)
        )
        ours.train()
    theirs.train()
    assert type(ours.optimizer.optimizer) is torch.optim.AdamW
    assert "the optimizer is torch's: FlatAdamW with weights = 'fp32' takes parameters of torch.float32" in caplog.text
    assert_same_way(ours, theirs, tolerance=2e-4 if dtype == torch.float64 else 0.02)


def test_seq2seq_generates(tmp_path: Path) -> None:
    options: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 8, "label_smoothing_factor": 0.0}
    found = []
    for kind in (Seq2SeqTrainer, hf.Seq2SeqTrainer):
        trainer = make(kind, "marian", tmp_path, **options)
        trainer.train()
        found.append(trainer.predict(trainer.eval_dataset))
    assert (found[0].predictions == found[1].predictions).all()
    assert found[0].metrics["test_loss"] == pytest.approx(found[1].metrics["test_loss"], abs=1e-4)


def test_a_model_is_accelerated_once_and_when_it_is_made_anew(tmp_path: Path) -> None:
    model = stretto.accelerate(build("gpt2"), unpad=False)
    assert make(Trainer, model, tmp_path, "gpt2").model is model
    args = hf.TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    init: Callable[[], Any] = lambda: build("gpt2")  # noqa: E731
    trainer = Trainer(args=args, model_init=init, train_dataset=draw_samples("gpt2"), data_collator=DataCollator(1))
    first = trainer.model
    trainer.train()
    assert trainer.model is not None and trainer.model is not first and is_accelerated(trainer.model)


def test_speed_counts_real_tokens_of_all_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretto.report, "peak_flops", lambda device: 1e9)
    clock = SimpleNamespace(perf_counter=count().__next__)  # a second passes between two looks
    monkeypatch.setattr(stretto.report, "time", clock)
    trainer = make(Trainer, "gpt2", tmp_path, gradient_accumulation_steps=2, logging_steps=3, max_steps=3)
    trainer.train()
    line = trainer.state.log_history[0]
    lengths = [len(sample["input_ids"]) for sample in trainer.train_dataset]
    assert line["tokens_per_second"] == sum(lengths)
    matrices = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 48) + VOCAB * 32
    attention = 2 * 32 * sum(length**2 for length in lengths)  # half a square
    assert line["mfu"] == pytest.approx(6 * (sum(lengths) * matrices + attention) / 1e9)
    assert "tokens_per_second" not in trainer.evaluate()


def test_what_is_logged_is_added_to_the_dictionary_that_was_given(tmp_path: Path) -> None:
    """Ours and theirs, as their own `log` does: by an evaluation, whose result has the epoch, and by anybody else."""
    trainer = make(Trainer, "gpt2", tmp_path, max_steps=1)
    trainer.train()
    trainer.meter.count({"input_ids": torch.ones(2, 3)})
    logs = {"loss": 1.5}
    trainer.log(logs)
    assert logs.keys() >= {"loss", "tokens_per_second", "epoch"}
    assert trainer.state.log_history[-1] == logs | {"step": 1}
    other = {"other": 1.0}
    trainer.log(other)
    assert other.keys() == {"other", "epoch"}


BATCHES: dict[str, tuple[dict[str, Any], int]] = {
    "bert-classes": ({"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, 3),
    "gpt2": ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, 6),
    "marian": (
        {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3), "labels": torch.tensor([[5, 6, -100]])},
        2,
    ),
    "vit": ({"pixel_values": torch.ones(3, 3, 16, 16), "labels": [{"boxes": torch.ones(1, 4)}] * 3}, 3 * 17),
}


@pytest.mark.parametrize("family", BATCHES)
def test_what_counts_as_a_token(family: str) -> None:
    model, (batch, expected) = build(family), BATCHES[family]
    meter = SpeedMeter(model, torch.device("cpu"), 1)
    meter.count(batch)
    meter.count(batch)
    assert int(meter.counted) == 2 * expected
    assert find_counterpart(model) is not None and meter.count_flops() > 0


def test_pairs_of_tokens_are_those_that_attend_to_each_other() -> None:
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert count_batch({"input_ids": ids}, pairs=False).tolist() == [10, 0, 2 * 25, 0, 0, 0]
    assert count_batch({"input_ids": ids, "attention_mask": mask}, pairs=False).tolist() == [8, 0, 9 + 25, 0, 0, 0]
    documents = {"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    assert count_batch(documents, pairs=False).tolist() == [5, 0, 9 + 4, 0, 0, 0]
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([[5, -100], [5, 6]])}
    assert count_batch(batch, pairs=True).tolist() == [3, 3, 1 + 4, 8, 9 + 25, 3 * 1 + 5 * 2]


def test_batches_of_any_shape_are_counted() -> None:
    """Positions of three kinds, as Qwen2-VL's; labels of pixels that are not contiguous."""
    ids = torch.ones(2, 5, dtype=torch.int64)
    positions = torch.arange(5).expand(3, 2, 5)
    assert count_batch({"input_ids": ids, "position_ids": positions}, pairs=False).tolist() == [10, 0, 50, 0, 0, 0]
    labels = torch.zeros(2, 4, 3, dtype=torch.int64).transpose(1, 2)
    found = count_batch({"pixel_values": torch.ones(2, 3, 8, 8), "labels": labels}, pairs=False)
    assert found.tolist() == [2, 24, 2, 0, 0, 0]


def test_mfu_is_left_out_where_flops_cannot_count() -> None:
    for family in ("mistral", "t5", "roberta"):
        assert find_counterpart(build(family)) is None


def test_sums_stay_on_the_device_until_they_are_read() -> None:
    class Unreadable(Tensor):
        def __int__(self) -> int:
            raise AssertionError("the device was asked")

        __bool__ = __float__ = item = tolist = __int__  # type: ignore[assignment]

    meter = SpeedMeter(build("marian"), torch.device("cpu"), 1)
    meter.count({name: value.as_subclass(Unreadable) for name, value in BATCHES["marian"][0].items()})
    with pytest.raises(AssertionError, match="was asked"):
        meter.read_all(SimpleNamespace(device="cpu"))


def test_evaluation_and_saving_take_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 10.0, 15.0])
    monkeypatch.setattr(stretto.report, "time", SimpleNamespace(perf_counter=times.__next__))
    meter = SpeedMeter(build("gpt2"), torch.device("cpu"), 1)
    with meter.paused():
        pass
    assert meter.since == 5.0


def test_without_the_package_accelerate_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "stretto.hf.trainer")
    with pytest.raises(ImportError, match=r'pip install "stretto\[hf\]"'):
        importlib.import_module("stretto.hf").Trainer  # noqa: B018
    assert callable(stretto.hf.accelerate)
