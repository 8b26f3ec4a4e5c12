"""Small trainers, and samples for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from stretto.hf.loop import DataCollator
from stretto.hf.trainer import Trainer
from tests.hf.families import CLASSES, VOCAB, accelerated, build

Sample = dict[str, Any]


def draw_samples(family: str, number: int = 24) -> list[Sample]:
    """Of different lengths, with labels that depend on the tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in torch.randint(3, 12, (number,), generator=generator).tolist():
        ids = torch.randint(4, VOCAB, (length,), generator=generator)
        labels = {"bert-classes": ids[0] % CLASSES, "gpt2": ids, "marian": ids.flip(0)[: length // 2 + 1]}
        samples.append({"input_ids": ids, "labels": labels[family]})
    return samples


def make(kind: Any, model: str | nn.Module, folder: Path, family: str = "", others: Any = (), **options: Any) -> Any:
    """A trainer of a class of ours begins with a copy of a model that was accelerated before, to save time."""
    family = family or str(model)
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    samples = draw_samples(family)
    return kind(
        model=(accelerated if issubclass(kind, Trainer) else build)(model) if isinstance(model, str) else model,
        args=hf.Seq2SeqTrainingArguments(str(folder), **defaults | options),
        train_dataset=samples,
        eval_dataset=samples[:10],
        **{"data_collator": DataCollator(1)} | dict(others),
    )


def history(trainer: Any, key: str = "loss") -> Tensor:
    return torch.tensor([line[key] for line in trainer.state.log_history if "loss" in line])


def assert_same_way(ours: Any, theirs: Any, tolerance: float = 2e-4) -> None:
    """Where there is no limit, theirs may have no norm."""
    for key in {"loss", "grad_norm", "learning_rate"} & theirs.state.log_history[0].keys():
        torch.testing.assert_close(history(ours, key), history(theirs, key), rtol=tolerance, atol=tolerance)


def add_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def train_both(family: str, folder: Path, others: Any = (), **options: Any) -> tuple[Any, Any]:
    trainers = [make(kind, family, folder, others=others, **options) for kind in (Trainer, hf.Trainer)]
    for trainer in trainers:
        trainer.train()
    return trainers[0], trainers[1]
