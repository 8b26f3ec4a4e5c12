"""Runs start from Hugging Face folders: their weights, sizes and tokenizer, once."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from stretto import checkpoint
from stretto.config import Config, build_config, dump_config, load_config
from stretto.convert.folder import load_model, write_folder
from stretto.data import open_data
from stretto.errors import ConfigError, DataError
from stretto.recipes import load_recipe
from stretto.report import read_events
from stretto.score import measure
from stretto.train import train
from stretto.trained import load_trained
from tests.corpora import WORDS, write_corpus
from tests.distributed.processes import launch
from tests.hf.compare import AUTO, build_run, write_words
from tests.runs import find_imported, losses

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as one would download them, by the task that can start from them."""
    base = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    drop: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    still: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    models = {
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=40, **drop, **common)),
        "bert": hf.BertForMaskedLM(hf.BertConfig(max_position_embeddings=40, **still, **sizes, **common)),
        "body": hf.BertModel(hf.BertConfig(max_position_embeddings=40, **still, **sizes, **common)),
        "vit": hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, num_labels=7, **sizes)),
    }
    for name, model in models.items():
        for parameter in model.parameters():  # fresh biases are 0: even the smallest update would change them
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(base / name)
        if name != "vit":
            write_words(base / name, 64)
    return {name: base / name for name in models}


def start(folder: Path, init: Path, data: dict[str, Any] | None = None, **model: Any) -> Config:
    return build_run(folder, data or {}, {"init": str(init)} | model)


def first_loss(run: Path) -> float:
    return float(next(event["loss"] for event in read_events(run) if "loss" in event))


@pytest.mark.parametrize(
    "keep", [None, {"weights": "fp32"}, {"weights": "split"}, {"weights": "bf16"}], ids=lambda keep: str(keep)
)
def test_training_starts_at_the_loss_of_the_folder(
    keep: dict[str, str] | None, published: dict[str, Path], tmp_path: Path
) -> None:
    """However weights are kept; and nothing is lost of them where it is all kept."""
    sections: dict[str, Any] = {"techniques": {"fused": keep}} if keep else {}
    precision = "bf16" if keep and keep["weights"] != "fp32" else "fp32"
    sections |= {"optim": {"lr": 1e-30}, "train": {"steps": 1, "precision": precision}}
    config = build_run(tmp_path, {}, {"init": str(published["gpt2"])}, **sections)
    run = train(config)
    theirs = AUTO["decoder"].from_pretrained(published["gpt2"])
    batch = open_data(config.data, seed=0, folder=run / "data").train_batch(0)
    assert batch.inputs is not None
    with torch.no_grad():
        bounds, ids, total = batch.inputs.layout.offsets.tolist(), batch.inputs.ids, 0.0
        for a, b in pairwise(bounds):  # a sequence at a time
            if b > a:
                logits = theirs(ids[None, a:b]).logits[0]
                total += float(torch.nn.functional.cross_entropy(logits, batch.labels[a:b], reduction="sum"))
    assert first_loss(run) == pytest.approx(total / batch.counts.labels, rel=1e-5 if precision == "fp32" else 1e-2)
    saved = checkpoint.load(run / "checkpoints", 1).weights
    for name, value in load_model(published["gpt2"]).state_dict().items():
        if keep and keep["weights"] == "bf16":
            torch.testing.assert_close(saved[name], value, rtol=2**-7, atol=0)
        else:
            assert torch.equal(saved[name], value), name


@pytest.mark.dist
def test_sharded_and_replicated_processes_start_there_too(published: dict[str, Path], tmp_path: Path) -> None:
    def job(shared: str) -> dict[str, Any]:
        return {
            "config": {
                "run": {"dir": "", "device": "cpu", "timeout_s": 60},
                "data": {"train": str(write_corpus(tmp_path / "text")), "seq_len": 16, "batch_size": 4},
                "model": {"init": str(published["gpt2"])},
                "train": {"steps": 3, "log_every": 1, "micro_batches": 2, "eval_batches": 1},
                "parallel": {"data": shared},
            }
        }

    one = job("replicate")["config"]
    train(build_config(one | {"run": {"dir": str(tmp_path / "alone"), "device": "cpu"}}))
    launch({"shard": job("shard"), "replicate": job("replicate")}, tmp_path / "together", 2)
    alone = losses(tmp_path / "alone")
    for name in ("shard", "replicate"):
        assert losses(tmp_path / "together" / name) == pytest.approx(alone, rel=1e-5)


def test_a_resumed_run_needs_the_folder_no_more(published: dict[str, Path], tmp_path: Path) -> None:
    """Nor does evaluating or exporting; and the folder may be elsewhere when the run goes on."""
    shutil.copytree(published["gpt2"], tmp_path / "source")
    config = start(tmp_path, tmp_path / "source")
    whole = train(replace(config, run=replace(config.run, dir=str(tmp_path / "whole"))))
    run = train(replace(config, train=replace(config.train, steps=3)))
    before = measure(run, 1)
    shutil.move(tmp_path / "source", tmp_path / "moved")
    assert measure(run, 1) == before
    with pytest.raises(ConfigError, match=r"RUN/config.toml --resume"):
        start(tmp_path, tmp_path / "source")
    again = load_config(run / "config.toml", ["train.steps=6"])
    assert again.data.tokenizer == again.model.init == str(tmp_path / "source")
    assert load_config(run / "config.toml").model.layers == 2 and build_config({}).model.init == ""
    older = [line for line in (run / "config.toml").read_text().splitlines() if "head_bias" not in line]
    (tmp_path / "older.toml").write_text("\n".join(older))  # of a version that did not have this option
    assert load_config(tmp_path / "older.toml", ["train.steps=6"]) == again
    train(replace(again, train=replace(again.train, steps=4)), resume=True)
    train(start(tmp_path, tmp_path / "moved"), resume=True)
    ends = [checkpoint.load(folder / "checkpoints", 6).weights for folder in (whole, run)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    write_folder(tmp_path / "out", load_trained(run, CPU).model, load_trained(run, CPU).tokenizer)
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "out")("the cat").input_ids == [1, *word_ids("the", "cat"), 2]


def word_ids(*words: str) -> list[int]:
    return [5 + WORDS.index(word) for word in words]


def test_a_head_that_the_folder_lacks_is_new_and_said(
    published: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(start(tmp_path / "masked", published["body"], {"task": "masked"}))
    assert "not in it, so new: head.bias, head.transform.weight" in capsys.readouterr().out
    assert load_trained(run, CPU).config.model.layers == 2
    run = train(start(tmp_path / "images", published["vit"], {"task": "images"}, classes=0))
    assert "not in it, so new: head.weight, head.bias" in capsys.readouterr().out
    assert load_trained(run, CPU).config.model.classes == 4, "those of the data"


def test_other_pixels_are_said(published: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(published["vit"], tmp_path / "other")
    (tmp_path / "other" / "preprocessor_config.json").write_text('{"image_mean": [0.4], "image_std": [0.5]}')
    train(start(tmp_path, tmp_path / "other", {"task": "images"}))
    output = capsys.readouterr().out
    assert "normalised with [0.4, 0.5]" in output and "not in it" not in output


def test_the_tokenizer_is_that_of_the_folder_unless_told_otherwise(published: dict[str, Path], tmp_path: Path) -> None:
    assert start(tmp_path, published["gpt2"]).data.tokenizer == str(published["gpt2"])
    assert start(tmp_path, published["gpt2"], {"tokenizer": "bpe"}).data.tokenizer == "bpe"
    shutil.copytree(published["gpt2"], tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"mute' has no tokenizer\.json.*data\.tokenizer"):
        train(start(tmp_path, tmp_path / "mute"))
    with pytest.raises(ConfigError, match=r"model\.vocab = 64 is smaller than the tokenizer's 260"):
        train(start(tmp_path, published["gpt2"], {"tokenizer": "bytes"}))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"layers": 3}, r"has model\.layers = 2, but the recipe says 3"),
        ({"layers": 4}, r"layers = 2, but the recipe says 4"),  # our default, but said
        ({"preset": "gpt2-medium"}, r"but model\.preset = 'gpt2-medium' says"),
        ({"preset": "llama-tiny"}, r"but model\.preset = 'llama-tiny' says"),
        ({"max_len": 64}, r"max_len = 40, but the recipe says 64"),
        ({"activation": "relu"}, r"activation = 'gelu_tanh', but the recipe says 'relu'"),
        ({"vocab": 128}, r"vocab = 64, but the recipe says 128"),
    ],
)
def test_sizes_that_contradict_the_folder_are_named(
    model: dict[str, Any], words: str, published: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(tmp_path, published["gpt2"], **model)


@pytest.mark.parametrize(
    ("recipe", "folder"),
    [("causal-lm", "gpt2"), ("demo", "gpt2"), ("instruct", "gpt2"), ("masked-lm", "bert"), ("classify", "bert")],
)
def test_a_folder_takes_the_place_of_the_model_that_a_recipe_describes(
    recipe: str, folder: str, published: dict[str, Path]
) -> None:
    init = str(published[folder])
    config = load_recipe(recipe, [f"model.init={init}", "data.seq_len=32"])
    assert (config.model.layers, config.model.width, config.model.vocab, config.model.max_len) == (2, 32, 64, 40)
    assert config.data.tokenizer == config.model.init == init
    changed = load_recipe(
        recipe, {"model": {"init": init, "dropout": 0.3}, "data": {"seq_len": 32, "tokenizer": "bpe"}}
    )
    assert changed.model.dropout == 0.3 and changed.data.tokenizer == "bpe"
    with pytest.raises(ConfigError, match=r"has model\.layers = 2, but the recipe says 3"):
        load_recipe(recipe, ["model.layers=3", f"model.init={init}"])
    with pytest.raises(ConfigError, match=r"model\.kind"):
        load_recipe(recipe, [f"model.init={published['bert' if folder == 'gpt2' else 'gpt2']}"])


def test_what_the_recipe_may_say(published: dict[str, Path], tmp_path: Path) -> None:
    config = start(tmp_path, published["gpt2"], dropout=0.25, vocab=0, mlp_width=0, layers=2)
    assert (config.model.dropout, config.model.attention_dropout, config.model.vocab) == (0.25, 0.0, 64)
    assert build_config(tomllib.loads(dump_config(config))) == config
    with pytest.raises(ConfigError, match=r"data\.task = 'masked' needs model\.kind = 'encoder'"):
        start(tmp_path, published["gpt2"], {"task": "masked"})
    with pytest.raises(ConfigError, match=r"model\.init = 3 must be of type str"):
        build_config({"model": {"init": 3}})


def test_training_does_not_import_transformers() -> None:
    """Folders are read without it; it takes seconds to import, and need not be installed."""
    assert find_imported("import stretto.train, stretto.convert.folder", "transformers") == []
