"""Accelerated models in the hands of other libraries: each trains as it does with the untouched model. What needs
nothing of theirs is elsewhere: copies in test_accelerate.py, pickling in test_trust.py, FSDP2 in test_fsdp.py,
torch.compile in test_modes.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import stretto
from tests.hf.compare import write_words
from tests.hf.families import FLOOR, VOCAB, accelerated, assert_parity, build, draw_batch, learn
from tests.hf.observe import count_tokens

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_accelerator")]
Builder = Callable[[str], Any]


# peft

TARGETS: dict[str, str | list[str]] = {
    "llama": "all-linear",
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "value", "output.dense"],
    "t5": ["q", "v", "wi"],
}


def adapt(model: nn.Module, targets: str | list[str], dtype: torch.dtype = torch.float32) -> Any:
    """With adapters that do something from the beginning."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config).to(dtype)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("family", TARGETS)
def test_adapters_before_and_after(family: str, order: str, tmp_path: Path) -> None:
    batch, targets = draw_batch(family), TARGETS[family]
    plain = adapt(build(family), targets)
    exact = learn(adapt(build(family), targets, torch.float64), batch)
    if order == "before":
        model = stretto.accelerate(adapt(build(family), targets))
    else:
        model = adapt(accelerated(family), targets)
    with count_tokens() as tokens:
        found = learn(model, batch)
    assert min(tokens) < batch["input_ids"].numel(), "padding is left out"
    assert_parity(found, learn(plain, batch), exact, FLOOR)
    with torch.no_grad(), model.disable_adapter():
        expected = learn(build(family).eval(), batch)
        torch.testing.assert_close(learn(model.eval(), batch), expected, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = pytest.importorskip("peft").PeftModel.from_pretrained(build(family), tmp_path)
    torch.testing.assert_close(learn(loaded, batch)["logits"], found["logits"], rtol=1e-4, atol=1e-5)


def test_adapters_that_are_there_before_lose_only_what_they_take() -> None:
    model = stretto.accelerate(adapt(build("llama"), ["q_proj", "v_proj"]))
    roles = {line.role for line in stretto.hf.report(model).lines if line.problem is None}
    assert roles == {"norm", "gated mlp", "attention", "rotary", "residual", "padding", "loss"}


# TRL


def make_tokenizer(folder: Path) -> Any:
    write_words(folder, VOCAB)
    names = {"pad_token": "[PAD]", "eos_token": "[SEP]", "unk_token": "[UNK]"}
    return hf.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)


def draw_texts(tokenizer: Any, number: int, least: int, most: int) -> list[str]:
    words = sorted(word for word in tokenizer.get_vocab() if not word.startswith("["))
    generator = torch.Generator().manual_seed(least)
    lengths = torch.randint(least, most, (number,), generator=generator).tolist()
    chosen = (torch.randint(len(words), (length,), generator=generator).tolist() for length in lengths)
    return [" ".join(words[i] for i in each) for each in chosen]


def run_trl(way: str, builder: Builder, family: str, folder: Path, options: dict[str, Any]) -> list[dict[str, float]]:
    """What a trainer of TRL logs in four steps."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer, others = make_tokenizer(folder), dict[str, Any]()
    if "lora" in options:
        config = pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
        others["peft_config"] = config
        torch.manual_seed(0)
    elif way == "DPO":
        others["ref_model"] = builder(family).eval()
    names = {"SFT": {"text": (3, 12)}, "DPO": {"prompt": (3, 6), "chosen": (4, 9), "rejected": (2, 7)}}[way]
    data = datasets.Dataset.from_dict({name: draw_texts(tokenizer, 12, *span) for name, span in names.items()})
    defaults = {"max_steps": 4, "per_device_train_batch_size": 3, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
    chosen = {name: value for name, value in options.items() if name != "lora"}
    args = getattr(trl, f"{way}Config")(str(folder / "out"), **defaults, **quiet, **chosen)
    model = builder(family)
    trainer = getattr(trl, f"{way}Trainer")(
        model=model, args=args, train_dataset=data, processing_class=tokenizer, **others
    )
    trainer.train()
    kept = ("loss", "grad_norm", "mean_token_accuracy", "rewards/margins")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: line[name] for name in kept if name in line} for line in lines]


WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("SFT", "llama", {}),
    "sft packed": ("SFT", "gpt2", {"packing": True, "max_length": 24}),
    "sft without padding": ("SFT", "llama", {"padding_free": True, "max_length": None}),
    "sft lora": ("SFT", "llama", {"lora": True}),
    "dpo": ("DPO", "gpt2", {}),
    "dpo lora": ("DPO", "llama", {"lora": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_trl(way: str, tmp_path: Path) -> None:
    kind, family, options = WAYS[way]
    accelerated(family)  # whose trial calls attention, too
    theirs = run_trl(kind, build, family, tmp_path, options)
    with count_tokens() as tokens:
        ours = run_trl(kind, accelerated, family, tmp_path, options)
    assert len(ours) == 4 and ours[0]["loss"] != ours[-1]["loss"]
    for line, expected in zip(ours, theirs, strict=True):
        assert line == pytest.approx(expected, rel=2e-4, abs=2e-5)
    assert tokens, "masks of padding would go to another attention"


# Loops


def train_with_lightning(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    lightning, losses = pytest.importorskip("pytorch_lightning"), list[float]()

    class Learner(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_steps=len(batches) // 2, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=1.0, **quiet
    )
    trainer.fit(Learner(), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return losses


def train_with_accelerate(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    inside, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(inside):
            loss = inside(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(inside.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert accelerator.unwrap_model(inside) is model
    return losses


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("train", [train_with_lightning, train_with_accelerate])
def test_loops_of_others(train: Any, family: str) -> None:
    batches = [draw_batch(family, seed=seed) for seed in range(6)]
    with count_tokens() as tokens:
        found = train(accelerated(family), batches)
    assert min(tokens) < batches[0]["input_ids"].numel(), "padding is left out"
    expected = train(build(family), batches)
    assert len(found) == 6 and abs(expected[-1] - expected[0]) > 0.01
    assert found == pytest.approx(expected, rel=1e-4)


# Larger vocabularies


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "bart"])
def test_embeddings_are_resized(family: str) -> None:
    """More tokens come in, which are read, and predicted."""
    batch = draw_batch(family)
    for name in ("input_ids", "labels"):
        batch[name] = batch[name].where(batch[name] % 7 != 0, torch.tensor(VOCAB + 3))
    models = [build(family), accelerated(family)]
    for model in models:
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + 5, mean_resizing=False)
    plain, model = models
    exact = learn(copy.deepcopy(plain).double(), batch)
    with count_tokens() as tokens:
        found = learn(model, batch)
    assert min(tokens) < batch["input_ids"].numel() and found["logits"].shape[-1] == VOCAB + 5
    assert_parity(found, learn(plain, batch), exact, FLOOR)
    again = stretto.accelerate(stretto.restore(model))
    assert {line.problem for line in stretto.hf.report(again).lines if line.role in ("loss", "padding")} == {None}
    assert_parity(learn(again, batch), learn(plain, batch), exact, FLOOR)
