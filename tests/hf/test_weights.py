"""Folders that `save_pretrained` wrote become our models, and our models become these folders again, bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

from stretto.config import ModelConfig, build_model_config
from stretto.convert.families import CHOICES, describe_size, read_model
from stretto.convert.folder import Tensors, load_model, load_weights, write_folder
from stretto.data import load_tokenizer
from stretto.errors import CheckpointError, ConfigError
from stretto.model import build_model
from stretto.weights import initialise, put
from tests.hf.compare import assert_same_logits, load_theirs, read_tensors, write_words
from tests.parity_cases import CASES, ROPE_SCALING, VOCAB, get_case, measure_error

NAMES = [name for name in CASES if name != "vit"] + ["vit"]
BERT: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
}
VIT: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder for each model that tests/test_parity.py compares, with every parameter away from its first value."""
    base = tmp_path_factory.mktemp("folders")
    for name in NAMES:
        get_case(name).theirs.save_pretrained(base / name)  # type: ignore[operator]
        write_words(base / name, VOCAB)
    return {name: base / name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_becomes_our_model_with_its_logits(name: str, folders: dict[str, Path]) -> None:
    case, ours = get_case(name), load_model(folders[name])
    for form in case.batches:
        assert measure_error(case, ours, form) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_config_json_says_all_that_the_recipe_would(name: str, folders: dict[str, Path]) -> None:
    found, wanted = (
        {key: value for key, value in describe_size(asdict(cfg)).items() if key not in (*CHOICES, "max_len")}
        for cfg in (build_model_config(read_model(folders[name])), get_case(name).cfg)
    )
    assert found == wanted


@pytest.mark.parametrize("name", NAMES)
def test_from_a_folder_and_back_is_bit_equal(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    ours = load_model(folders[name])
    write_folder(tmp_path / "back", ours, None if name == "vit" else load_tokenizer(folders[name]))
    before, after = read_tensors(folders[name]), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, value in before.items():
        first = 2 if name == "bart" and "embed_positions" in key else 0  # positions that it does not have
        assert value.dtype == after[key].dtype and torch.equal(value[first:], after[key][first:]), key
    assert_same_logits(ours, load_theirs(tmp_path / "back", ours.cfg))


def test_an_untied_gpt2_and_a_llama_with_biases(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, tie_word_embeddings=False, **sizes))
    llama = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=24, attention_bias=True,
            mlp_bias=True, **sizes,
        )
    )  # fmt: skip
    for name, theirs in {"gpt2": gpt2, "llama": llama}.items():
        for parameter in theirs.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        theirs.save_pretrained(tmp_path / name)
        ours = load_model(tmp_path / name)
        assert_same_logits(ours, theirs.eval())
        write_folder(tmp_path / f"{name}-back", ours, load_tokenizer(write_words(tmp_path / name, VOCAB)))
        assert_same_logits(ours, load_theirs(tmp_path / f"{name}-back", ours.cfg))


def test_where_both_sides_share_their_embedding_bart_has_it_twice(tmp_path: Path) -> None:
    """One table of positions and one norm for both, and no bias of the logits: a BART has more, and can be this too."""
    cfg = ModelConfig(
        kind="encoder-decoder", layers=1, decoder_layers=2, width=24, heads=3, vocab=VOCAB, max_len=11,
        activation="gelu", norm_order="post", embed_norm=True, embed_scale=True,
    )  # fmt: skip
    ours = build_model(cfg, "cpu").eval()
    initialise(ours, cfg, 1, put)
    for parameter in ours.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    write_folder(tmp_path / "bart", ours, load_tokenizer(write_words(tmp_path / "words", VOCAB)))
    theirs = load_theirs(tmp_path / "bart", cfg)
    assert type(theirs).__name__ == "BartForConditionalGeneration"
    assert_same_logits(ours, theirs)
    again = load_model(tmp_path / "bart")
    assert_same_logits(again, theirs)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    new = again.state_dict().keys() - ours.state_dict().keys()
    assert new == {
        "head.bias",
        *(f"target_embedding.{name}" for name in ("position.weight", "norm.weight", "norm.bias")),
    }


def test_shards(folders: dict[str, Path], tmp_path: Path) -> None:
    get_case("llama-untied").theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")  # type: ignore[operator]
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    whole, parts = load_model(folders["llama-untied"]), load_model(tmp_path / "shards")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="elsewhere"):
        load_model(tmp_path / "shards")
    index.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not an index"):
        load_model(tmp_path / "shards")
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not an index"):
        load_model(tmp_path / "shards")


def rewrite(source: Path, target: Path, change: Any) -> Path:
    """A copy of a folder with other tensors: `change` is given them by name."""
    shutil.copytree(source, target)
    tensors = read_tensors(source)
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def rename(old: str, new: str) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def add(**values: Tensor) -> Any:
    return lambda tensors: tensors.update({name.replace("__", "."): value for name, value in values.items()})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", rename("transformer.", "")),  # as the published GPT-2 is stored
        ("gpt2", add(transformer__h__0__attn__bias=torch.ones(1, 1, 19, 19))),
        ("llama-tied", add(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(3))),
        ("bert-masked", rename("LayerNorm.weight", "LayerNorm.gamma")),  # as the published BERT is stored
        ("bert-masked", rename("LayerNorm.bias", "LayerNorm.beta")),
        ("bert-masked", add(bert__embeddings__position_ids=torch.arange(19))),
        ("bert-masked", add(bert__pooler__dense__weight=torch.ones(36, 36), cls__seq_relationship__bias=torch.ones(2))),
        ("vit", rename("vit.encoder.layer.", "vit.layers.")),
        ("opus-mt", add(model__encoder__embed_positions__weight=torch.ones(19, 36))),
        ("bart", rename("model.shared.", "model.decoder.embed_tokens.")),  # of tied weights any may be the stored one
        ("gpt2", rename("transformer.wte.", "lm_head.")),
    ],
)
def test_other_ways_of_storing_the_same(name: str, change: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    ours, other = load_model(folders[name]), load_model(rewrite(folders[name], tmp_path / "copy", change))
    for key, value in ours.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_half_precision_is_read_as_it_is(folders: dict[str, Path], tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: value.bfloat16() for name, value in tensors.items()})

    copy = rewrite(folders["gpt2"], tmp_path / "copy", halve)
    for key, value in load_model(folders["gpt2"]).state_dict().items():
        assert torch.equal(load_model(copy).state_dict()[key], value.bfloat16().float()), key


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "gpt2",
            lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.bias"),
            "transformer.h.1.mlp.c_fc.bias is missing",
        ),
        ("gpt2", add(transformer__h__0__attn__scale=torch.ones(3)), "transformer.h.0.attn.scale .* no counterpart"),
        ("gpt2", add(transformer__wpe__weight=torch.ones(20, 30)), r"\[20, 30\].*\[19, 30\]"),
        ("gpt2", add(transformer__ln_f__bias=torch.ones(30, dtype=torch.int8)), "quantised"),
        ("gpt2", add(lm_head__weight=torch.ones(61, 30)), "lm_head.weight differs"),
        ("bart", add(model__encoder__embed_tokens__weight=torch.ones(61, 36)), "embed_tokens.weight differs"),
    ],
)
def test_weights_that_are_not_understood_are_refused(
    name: str, change: Any, words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_model(rewrite(folders[name], tmp_path / "copy", change))


def test_a_body_without_the_head_we_need(tmp_path: Path) -> None:
    """It is used, and what is new or not used is said by name."""
    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**BERT)).save_pretrained(tmp_path / "body")
    hf.BertForSequenceClassification(hf.BertConfig(**BERT)).save_pretrained(tmp_path / "class")
    hf.ViTForImageClassification(hf.ViTConfig(patch_size=4, num_labels=5, **VIT)).save_pretrained(tmp_path / "vit")
    head = {"head.bias", "head.transform.weight", "head.transform.bias", "head.norm.weight", "head.norm.bias"}
    cases: list[tuple[str, dict[str, Any], set[str], str]] = [
        ("body", {}, head, ""),
        ("class", {"classes": 0}, head, "classifier.weight"),
        ("vit", {"classes": 3}, {"head.weight", "head.bias"}, ""),
    ]
    for name, changes, new, unused in cases:
        cfg = replace(build_model_config(read_model(tmp_path / name)), **changes)
        model = build_model(cfg, "cpu")
        initialise(model, cfg, 7, put)
        first = {key: value.clone() for key, value in model.state_dict().items()}
        notes = load_weights(tmp_path / name, model, cfg)
        kept = {key for key, value in model.state_dict().items() if torch.equal(value, first[key])}
        # Biases and norms of a fresh model are 0 and 1 here and there, so that only matrices can tell.
        assert {key for key in kept if key.endswith("weight") and "norm" not in key} == {
            key for key in new if key.endswith("weight") and "norm" not in key
        }
        said = next(note for note in notes if note.startswith("not in it"))
        assert set(said.removeprefix("not in it, so new: ").split(", ")) == new
        assert any(unused in note for note in notes if note.startswith("in it")) == bool(unused)


def test_pickles_and_missing_files_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickle \(pytorch_model.bin\).*save_pretrained"):
        Tensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        Tensors(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        Tensors(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json.*No such file"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt2", {"model_type": "mistral"}, "'mistral'; Stretto can be one of gpt2, llama"),
        ("gpt2", {"activation_function": "quick_gelu"}, "quick_gelu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama-tied", {"rope_parameters": {"rope_type": "llama3", "factor": 32.0}}, "no low_freq_factor"),
        ("llama-tied", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ("llama-tied", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn.*only do that of Llama 3"),
        ("llama-tied", {"head_dim": 8}, "head_dim = 8"),
        ("llama-tied", {"mlp_bias": True}, "attention_bias = False, mlp_bias = True"),
        ("bert-masked", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert-masked", {"is_decoder": True}, "is_decoder"),
        ("marian", {"decoder_attention_heads": 9}, "encoder_attention_heads = 3, decoder_attention_heads = 9"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
        ("bart", {"normalize_before": True}, "normalize_before"),
        ("vit", {"qkv_bias": False}, "qkv_bias"),
    ],
)
def test_models_that_are_not_ours_are_refused_with_the_reason(
    name: str, change: dict[str, Any], words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders[name] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=words):
        read_model(tmp_path)


def test_the_rope_of_both_versions_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["llama-tied"] / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("rope")}
    scaled = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    of_type = scaled | {"rope_type": "llama3"}
    cases: list[tuple[dict[str, Any], float, Any]] = [
        ({"rope_theta": 700.0, "rope_scaling": None}, 700.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, 700.0, None),
        ({}, 10000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": of_type}, 5e5, scaled),  # as the published Llama 3.2 has it
        ({"rope_parameters": of_type | {"rope_theta": 5e5}}, 5e5, scaled),
    ]
    for rope, theta, scaling in cases:
        (tmp_path / "config.json").write_text(json.dumps(config | rope))
        found = read_model(tmp_path)
        assert (found["rope_theta"], found["rope_scaling"]) == (theta, scaling)


def test_a_configuration_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        read_model(tmp_path)


def test_both_versions_find_the_rope_in_an_export(folders: dict[str, Path], tmp_path: Path) -> None:
    """Where transformers 4 looks, and where 5 does."""
    ours = load_model(folders["llama-scaled"])
    write_folder(tmp_path / "back", ours, load_tokenizer(folders["llama-scaled"]))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["rope_theta"] == 700.0
    assert config["rope_scaling"] == {"rope_type": "llama3"} | asdict(ROPE_SCALING)
    assert config["rope_parameters"] == config["rope_scaling"] | {"rope_theta": 700.0}
