"""What the examples share: their options, and a small model, tokenizer and sentences where none are given."""

import argparse
import gzip
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, set_seed

GOOD, BAD = ["bright", "kind", "warm", "fine"], ["dull", "cruel", "cold", "broken"]


def parse(description: str | None, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("model", *options):
        parser.add_argument(f"--{option}")
    return parser.parse_args()


def read_lines(path: str) -> list[str]:
    """Of a text file, plain or gzip."""
    content = Path(path).read_bytes()
    text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


def make_sentences(count: int) -> list[str]:
    """One to four times: an animal and what it is."""
    pick = random.Random(0)
    animals = ["cat", "dog", "bird", "horse", "mouse", "fox"]
    clauses = [f"the {animal} is {word}" for animal in animals for word in GOOD + BAD]
    return [" and ".join(pick.choices(clauses, k=pick.randint(1, 4))) for _ in range(count)]


def load_model(kind: Any, folder: str | None, config: Any) -> Any:
    """An AutoModelFor... from a folder, else a new one of this configuration."""
    set_seed(0)
    return kind.from_pretrained(folder, num_labels=config.num_labels) if folder else kind.from_config(config)


def load_tokenizer(folder: str | None, texts: list[str]) -> Any:
    """From a folder, else pieces of words of these texts, and </s> at the end of each."""
    if folder:
        return AutoTokenizer.from_pretrained(folder)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=[*names.values()], show_progress=False)
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.train_from_iterator(texts, trainer)
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)
