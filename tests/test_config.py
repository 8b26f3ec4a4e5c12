"""Recipes: strict, helpful, and never executing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import Config, LayerDropConfig, build_config, dump_config, load_config
from stretto.errors import ConfigError
from stretto.presets import PRESETS
from stretto.recipes import find_recipe, list_recipes


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"trian": {}}, ["[trian]", "'train'"]),
        ({"train": {"stpes": 3}}, ["train.stpes", "'steps'"]),
        ({"train": {"steps": "3"}}, ["train.steps", "int", "str"]),
        ({"train": {"steps": True}}, ["train.steps", "int", "bool"]),
        ({"train": {"steps": 0}}, ["train.steps"]),
        ({"train": 3}, ["train", "section"]),
        ({"optim": {"lr": float("nan")}}, ["optim.lr", "finite"]),
        ({"optim": {"schedule": "cosin"}}, ["optim.schedule", "'cosine'"]),
        ({"model": {"preset": "gpt2-smal"}}, ["model.preset", "'gpt2-small'"]),
        ({"model": {"width": 30, "heads": 4}}, ["model.width", "model.heads"]),
        ({"model": {"kv_heads": 3}}, ["model.kv_heads"]),
        ({"model": {"dropout": 1.0}}, ["model.dropout"]),
        ({"model": {"head_bias": True}}, ["model.head_bias", "'decoder'"]),
        ({"model": {"embed_shared": False}}, ["model.embed_shared", "'decoder'"]),
        ({"model": {"rope_scaling": {"factor": 8.0}}}, ["[model.rope_scaling]", "'learned'"]),
        ({"model": {"positions": "rotary", "rope_scaling": {"factr": 8.0}}}, ["model.rope_scaling.factr", "'factor'"]),
        ({"model": {"positions": "rotary", "rope_scaling": {"low_freq_factor": 4.0}}}, ["high_freq_factor", "larger"]),
        ({"model": {"kind": "encoder"}}, ["data.task", "model.kind"]),
        ({"data": {"seq_len": 4096}}, ["data.seq_len", "model.max_len"]),
        ({"data": {"task": "translation"}, "model": {"kind": "encoder-decoder"}}, ["data.languages"]),
        ({"data": {"languages": [1]}}, ["data.languages", "strings"]),
        ({"techniques": {"fusion": True}}, ["techniques.fusion", "'fused'"]),
        ({"techniques": {"fused": 3}}, ["techniques.fused", "[techniques.fused]"]),
        ({"techniques": {"fused": {"weights": "int4"}}}, ["techniques.fused.weights", "'split'"]),
        ({"checkpoint": {"keep": -1}}, ["checkpoint.keep"]),
        ({"optim": {"clip": -1.0}}, ["optim.clip", "negative"]),
        ({"optim": {"lr": -1.0}}, ["optim.lr", "positive"]),
        ({"optim": {"min_lr": -5.0}}, ["optim.min_lr"]),
        ({"optim": {"beta1": 1.5}}, ["optim.beta1"]),
        ({"train": {"eval_batches": -1}}, ["train.eval_batches"]),
        ({"train": {"micro_batches": -2}}, ["train.micro_batches"]),
        ({"model": {"kv_heads": -2}}, ["model.kv_heads"]),
        ({"model": {"norm_eps": 0.0}}, ["model.norm_eps"]),
        ({"model": {"preset": [1]}}, ["model.preset"]),
        ({"run": {"timeout_s": 0}}, ["run.timeout_s"]),
        ({"data": {"task": "images"}, "model": {"preset": "vit-tiny", "channels": 1}}, ["model.channels"]),
    ],
)
def test_errors_name_the_key_and_the_way_out(tree: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(tree)
    for word in words:
        assert word in str(error.value)


def test_a_preset_gives_way_to_explicit_keys() -> None:
    model = build_config({"model": {"preset": "gpt2-small", "layers": 3}}).model
    assert (model.layers, model.width, model.vocab) == (3, 768, 50257)


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("1e-3", 1e-3), ("5", 5.0), ("true", True), ("runs/x=y", "runs/x=y"), ('"a b"', "a b")],
)
def test_set_overrides_one_key(tmp_path: Path, text: str, value: object) -> None:
    keys = {int: "train.steps", float: "optim.lr", bool: "train.compile", str: "run.dir"}
    section, _, key = keys[type(value)].partition(".")
    (tmp_path / "r.toml").write_text("[train]\nsteps = 5\n")
    config = load_config(tmp_path / "r.toml", [f"{section}.{key}={text}"])
    assert getattr(getattr(config, section), key) == value


def test_set_changes_an_option_of_what_is_on(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[techniques]\nfused = true\nlayer_drop = true\n")
    config = load_config(tmp_path / "r.toml", ["techniques.layer_drop.theta=0.7"])
    assert config.techniques.layer_drop == LayerDropConfig(theta=0.7)


@pytest.mark.parametrize("override", ["steps=3", "train.steps", "=3", ".=3"])
def test_malformed_overrides_show_the_form(tmp_path: Path, override: str) -> None:
    (tmp_path / "r.toml").write_text("")
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(tmp_path / "r.toml", [override])


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
        load_config(tmp_path / "bad.toml")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_dump_and_load_give_the_same_config(tmp_path: Path, preset: str) -> None:
    task = {"decoder": "causal", "encoder": "masked", "encoder-decoder": "translation", "vit": "images"}
    data = {
        "task": task[PRESETS[preset]["kind"]],
        "languages": ["en", "de"],
        "seq_len": 64,
        "train": 'a "b" \\ ü \U0001f600 \x7f',
    }
    scaled = {"rope_scaling": {"factor": 32.0}} if preset == "llama-1b" else {}
    config = build_config({"model": {"preset": preset, **scaled}, "data": data})
    (tmp_path / "c.toml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "c.toml") == config


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_shipped_recipes_parse_and_say_what_they_show(name: str) -> None:
    load_config(find_recipe(name))
    assert len(list_recipes()[name]) > 20
    assert find_recipe(name).read_text().startswith("# ")


def test_an_unknown_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"demo.*translation"):
        find_recipe("demmo")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
sections = ["run", "data", "model", "optim", "train", "techniques", "parallel", "checkpoint", "os"]
keys = st.sampled_from(["dir", "steps", "lr", "width", "heads", "preset", "task", "__class__", "languages", "every"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sections), values | st.dictionaries(keys, values, max_size=3), max_size=3))
def test_any_tree_is_a_config_or_one_clear_error(tree: dict[str, object]) -> None:
    before = set(sys.modules)
    try:
        assert isinstance(build_config(tree), Config)
    except ConfigError as error:
        assert str(error)
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("recipe", "preset"),
    [
        ("translation", "transformer-big"),
        ("images", "vit-large"),
        ("causal-lm", "llama-1b"),
        ("masked-lm", "bert-large"),
    ],
)
def test_a_recipe_takes_another_size_by_preset_alone(recipe: str, preset: str) -> None:
    model = load_config(find_recipe(recipe), [f"model.preset={preset}"]).model
    for key in ("layers", "width", "heads"):
        assert getattr(model, key) == PRESETS[preset][key]
