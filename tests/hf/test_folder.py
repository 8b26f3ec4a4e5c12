"""Runs become Hugging Face folders, which `transformers` loads: the same logits, ids and texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor

from stretto.config import ModelConfig
from stretto.convert.families import CHOICES
from stretto.convert.folder import load_model, write_folder
from stretto.data import Tokenizer, load_tokenizer, open_data, read_image
from stretto.data.tokenizer import ByteTokenizer
from stretto.errors import CheckpointError, ConfigError
from stretto.generate import sample, translate
from stretto.model import build_model
from stretto.report import read_events
from stretto.train import train
from stretto.trained import Trained, load_trained
from tests.hf.compare import AUTO, assert_same_logits, build_run, load_theirs, read_tensors, write_words

CPU = torch.device("cpu")
TEXTS = ["the cat sees a dog.", "  two  spaces,\tand a tab\n", "größer 東京 🙂 <b>", "don't  the river and or"]
_LLAMA = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "kv_heads": 2, "tied": False,
    "rope_theta": 700.0,
}  # fmt: skip
_TRANSLATION = {"task": "translation", "languages": ["xx", "yy"], "tokenizer": "bpe", "vocab": 290, "max_tokens": 200}

# What differs from the small GPT-2 below.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {"data": {"tokenizer": "bytes"}},
    "llama": {"data": {"tokenizer": "bpe", "vocab": 300}, "model": _LLAMA},
    "bert": {"data": {"task": "masked", "tokenizer": "bpe", "vocab": 300}, "model": {"preset": "bert-tiny"}},
    "marian": {"data": _TRANSLATION, "model": {"preset": "transformer-tiny", "norm_eps": 1e-5}},
    "bart": {
        "data": _TRANSLATION,
        "model": {"kind": "encoder-decoder", "norm_order": "post", "embed_norm": True, "activation": "gelu"},
    },
    "vit": {"data": {"task": "images"}, "model": {"preset": "vit-tiny", "image_size": 16, "patch": 4}},
}
SMALL = {"layers": 2, "width": 32, "heads": 4, "max_len": 48}


@pytest.fixture(scope="module")
def get_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Trained, Path]]:
    """A trained run of a family and the folder that it was exported to, made when first asked for."""

    @cache
    def get(name: str) -> tuple[Trained, Path]:
        base = tmp_path_factory.mktemp(name)
        run, sections = base / "run", RUNS[name]
        train(build_run(base, sections["data"], SMALL | sections.get("model", {})))
        trained = load_trained(run, CPU)
        write_folder(base / "hf", trained.model, trained.tokenizer, trained.labels)
        return trained, base / "hf"

    return get


@pytest.mark.parametrize("name", RUNS)
def test_a_trained_run_becomes_a_folder_with_its_logits(name: str, get_run: Any) -> None:
    trained, folder = get_run(name)
    theirs = load_theirs(folder, trained.model.cfg)
    assert theirs.config.model_type == name
    assert_same_logits(trained.model, theirs)
    for key, value in trained.model.state_dict().items():
        assert torch.equal(value, load_model(folder).state_dict()[key]), key


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_starts_from_an_export_begins_with_its_loss(name: str, get_run: Any, tmp_path: Path) -> None:
    trained, folder = get_run(name)
    data = {key: value for key, value in RUNS[name]["data"].items() if key not in ("tokenizer", "vocab")}
    still = dict.fromkeys(CHOICES, 0.0)
    config = build_run(tmp_path, data, {"init": str(folder)} | still, train={"steps": 1})
    run = train(config)
    batch = open_data(config.data, seed=0, folder=run / "data", image_size=16).train_batch(0)
    with torch.no_grad():
        wanted = float(trained.model(batch)) / batch.counts.labels
    loss = next(event["loss"] for event in read_events(run) if "loss" in event)
    assert loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "vit"])
def test_the_exported_tokenizer_gives_the_same_ids_and_texts(name: str, get_run: Any) -> None:
    trained, folder = get_run(name)
    ours, theirs = trained.tokenizer, hf.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == text
        # As in training: see data/text.py and data/pairs.py.
        begin = [] if trained.model.cfg.kind == "encoder-decoder" else [ours.bos]
        end = [] if trained.model.cfg.kind == "decoder" else [ours.eos]
        assert theirs(text).input_ids == [*begin, *ids, *end]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos, ours.eos, ours.pad)
    assert theirs.mask_token_id == ours.mask and theirs.model_max_length == trained.model.cfg.max_len
    assert ours.decode([7, 300, ours.eos]) == theirs.decode([7, 300, ours.eos], skip_special_tokens=True)
    both = theirs(TEXTS, padding=True, return_tensors="pt")  # what a model is called with
    AUTO[trained.model.cfg.kind].from_pretrained(folder)(**both, **_target(trained, both["input_ids"]))


def _target(trained: Trained, ids: Tensor) -> dict[str, Tensor]:
    return {"decoder_input_ids": ids[:, :3]} if trained.model.cfg.kind == "encoder-decoder" else {}


def test_bytes_that_are_no_text_are_decoded_alike(get_run: Any) -> None:
    theirs = hf.AutoTokenizer.from_pretrained(get_run("gpt2")[1])
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = random.integers(0, 256, 12).tolist()
        assert theirs.decode(ids) == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_theirs_writes_what_ours_does(name: str, get_run: Any) -> None:
    """Greedily: the prompt begins, the cache goes on and eos ends in the same way."""
    trained, folder = get_run(name)
    tokenizer, model = hf.AutoTokenizer.from_pretrained(folder), AUTO["decoder"].from_pretrained(folder)
    for prompt in ("the ", "a big"):
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False)[0]
        ours = sample(trained, prompt, temperature=0)
        assert len(ids) > len(tokenizer(prompt).input_ids) + 5 or ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == ours


@pytest.mark.parametrize("name", ["marian", "bart"])
def test_theirs_translates_as_ours_does(name: str, get_run: Any) -> None:
    trained, folder = get_run(name)
    tokenizer, model = hf.AutoTokenizer.from_pretrained(folder), AUTO["encoder-decoder"].from_pretrained(folder)
    for sentence in ("the cat", "big dog and a red bird"):
        inputs = tokenizer(sentence, return_tensors="pt")
        limit = 2 * inputs.input_ids.shape[1] + 10  # as ours
        ids = model.generate(**inputs, do_sample=False, max_length=limit + 1)[0]
        assert tokenizer.decode(ids, skip_special_tokens=True) == translate(trained, [sentence], beam=1)[0]


def test_images_are_described_as_they_are_read(get_run: Any, tmp_path: Path) -> None:
    trained, folder = get_run("vit")
    assert load_theirs(folder, trained.model.cfg).config.id2label == dict(enumerate(trained.labels))
    pixels = np.random.default_rng(0).integers(0, 255, (23, 31, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    processor = hf.ViTImageProcessor.from_pretrained(folder)
    theirs = processor(Image.open(tmp_path / "image.png"), return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(read_image(tmp_path / "image.png", 16), theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"positions": "rotary"}, r"GPT2LMHeadModel: model\.positions = 'rotary'.*LlamaForCausalLM: .*'layernorm'"),
        ({"kind": "encoder-decoder", "positions": "sinusoidal"}, r"MarianMTModel: model\.norm_order = 'pre'"),
        ({"embed_norm": True}, r"model\.embed_norm = True"),
        ({"kv_heads": 2}, r"model\.kv_heads = 2"),
        ({"activation": "swiglu"}, r"model\.activation = 'swiglu'"),
        ({"kind": "encoder", "norm_order": "post", "embed_norm": True}, r"model\.token_types = 0"),
    ],
)
def test_models_that_no_class_describes_are_refused(model: dict[str, Any], words: str, tmp_path: Path) -> None:
    ours = build_model(ModelConfig(**(SMALL | {"vocab": 64} | model)), "cpu")
    with pytest.raises(ConfigError, match=words):
        write_folder(tmp_path / "out", ours, tokenizer(tmp_path))
    assert not list(tmp_path.glob("*out*"))


def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(write_words(folder / "words", 64))


def test_nothing_is_overwritten_and_nothing_half_written(get_run: Any, tmp_path: Path) -> None:
    trained, folder = get_run("gpt2")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write_folder(folder, trained.model, trained.tokenizer)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", trained.model, trained.tokenizer)
    assert read_tensors(tmp_path / "empty").keys() == read_tensors(folder).keys()
    assert json.loads((tmp_path / "empty" / "generation_config.json").read_text())["eos_token_id"] == 258

    class Broken(ByteTokenizer):
        def find_special(self, role: str) -> int:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_folder(tmp_path / "broken", trained.model, Broken())
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_another_step_can_be_loaded(get_run: Any, tmp_path: Path) -> None:
    run = train(build_run(tmp_path, {}, SMALL, checkpoint={"every": 2, "keep": 5}))
    weights = [load_trained(run, CPU, step).model.state_dict() for step in (2, 6)]
    assert not torch.equal(weights[0]["embedding.token.weight"], weights[1]["embedding.token.weight"])
    with pytest.raises(CheckpointError, match=r"step 3 .* it has: 6, 4, 2"):
        load_trained(run, CPU, 3)
