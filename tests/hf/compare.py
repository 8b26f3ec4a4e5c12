"""The same input for one of our models and one of theirs, and small runs to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

from stretto.batch import Batch, Counts, Sequences, dense_layout
from stretto.config import Config, ModelConfig, build_config
from stretto.model import Model
from tests.corpora import WORDS, write_corpus, write_images, write_pairs

AUTO: dict[str, Any] = {
    "decoder": hf.AutoModelForCausalLM,
    "encoder": hf.AutoModelForMaskedLM,
    "encoder-decoder": hf.AutoModelForSeq2SeqLM,
    "vit": hf.AutoModelForImageClassification,
}


def load_theirs(folder: Path, cfg: ModelConfig) -> Any:
    auto = hf.AutoModelForSequenceClassification if cfg.kind == "encoder" and cfg.classes else AUTO[cfg.kind]
    model, info = auto.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def draw_inputs(cfg: ModelConfig) -> dict[str, Tensor]:
    """What theirs reads."""
    generator = torch.Generator().manual_seed(5)
    if cfg.kind == "vit":
        return {"pixel_values": torch.randn(3, cfg.channels, cfg.image_size, cfg.image_size, generator=generator)}
    ids = torch.randint(1, cfg.vocab, (3, 9), generator=generator)
    if cfg.kind == "encoder-decoder":
        return {"input_ids": ids, "decoder_input_ids": torch.randint(1, cfg.vocab, (3, 7), generator=generator)}
    return {"input_ids": ids}


@torch.no_grad()
def our_logits(model: Model, inputs: dict[str, Tensor]) -> Tensor:
    """In the shape of theirs."""
    *others, last = inputs.values()
    batch = Batch(torch.zeros(0, dtype=torch.long), Counts(0, 0, 0, 0), ())
    if model.cfg.kind == "vit":
        return model.logits(Batch(batch.labels, batch.counts, (), pixels=last))
    source = _sequences(others[0]) if others else None
    logits = model.logits(Batch(batch.labels, batch.counts, (), inputs=_sequences(last), source=source))
    return logits if model.cfg.classes else logits.view(*last.shape, -1)


def _sequences(ids: Tensor) -> Sequences:
    rows, length = ids.shape
    return Sequences(ids.flatten(), torch.arange(length).repeat(rows), dense_layout(rows, length))


@torch.no_grad()
def assert_same_logits(ours: Model, theirs: Any, tolerance: float = 1e-5) -> None:
    inputs = draw_inputs(ours.cfg)
    wanted = theirs(**inputs).logits
    assert wanted.std() > 0.01  # or an absolute bound would mean nothing
    assert float((our_logits(ours, inputs) - wanted).abs().max()) < tolerance


def write_words(folder: Path, size: int) -> Path:
    """A tokenizer.json of whole words with BERT's special tokens: `size` tokens in all."""
    specials = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    words = [*specials, *WORDS, *(f"w{i}" for i in range(size - len(specials) - len(WORDS)))]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(specials)
    inner.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def build_run(folder: Path, data: dict[str, Any], model: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A tiny run; its data lie in `folder`."""
    task = data.get("task", "causal")
    if task == "translation":
        source = write_pairs(folder / "pairs")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        source = write_images(folder / "images.npz") if task == "images" else write_corpus(folder / "text")
    return build_config(
        {
            "run": {"dir": str(folder / "run"), "device": "cpu"},
            "data": {"train": str(source), "seq_len": 16, "batch_size": 4, "suffix": ".txt"} | data,
            "model": model,
            "optim": {"lr": 1e-2, "warmup": 5},
            "train": {"steps": 6, "log_every": 1, "eval_batches": 2},
        }
        | sections
    )
