"""The sums of recipes: lengths counted by hand, how they are added up today, the verdicts, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.config import build_config, load_config
from stretto.errors import ConfigError
from stretto.numerics.survey import Sum, list_sums
from stretto.presets import PRESETS
from stretto.recipes import find_recipe, list_recipes
from tests.runs import find_imported


def sums_of(recipe: str, *overrides: str, processes: int = 1) -> dict[str, Sum]:
    return {one.name: one for one in list_sums(load_config(find_recipe(recipe), overrides), processes)[0]}


def lengths(sums: dict[str, Sum], product: str) -> list[int]:
    return [sums[f"{product}, {kind}"].length if f"{product}, {kind}" in sums else 0 for kind in KINDS]


KINDS = ("forward", "dgrad", "wgrad")


def test_a_decoder() -> None:
    sums, tokens = sums_of("causal-lm"), 32 * 1024
    assert lengths(sums, "decoder qkv") == [768, 3 * 768, tokens]
    assert lengths(sums, "decoder out") == [768, 768, tokens]
    assert lengths(sums, "decoder up") == [768, 3072, tokens]
    assert lengths(sums, "decoder down") == [3072, 768, tokens]
    assert lengths(sums, "head") == [768, 50304, tokens]
    assert sums["head, wgrad"].chunk == 8192 and sums["decoder up, wgrad"].chunk == 0
    assert sums["attention, P V"].length == sums["attention, dK and dV"].length == 1024
    assert sums["biases and norms, over tokens"].length == tokens
    assert sums["second moment, over steps"].length == 20 and "gradients, over processes" not in sums
    products = [one for one in sums.values() if one.product]
    assert {(one.term, one.mantissa) for one in products} == {(15, 23)}, "bf16 products, fp32 sums"


def test_grouped_heads_and_swiglu_and_a_window() -> None:
    sums = sums_of("causal-lm", "model.preset=llama-1b", "model.vocab=128256", "model.window=512")
    assert lengths(sums, "decoder qkv")[1] == 2048 + 2 * 512 and lengths(sums, "decoder up")[1] == 2 * 8192
    assert sums["attention, P V"].length == 512 and sums["attention, dK and dV"].length == 4 * 512


def test_an_encoder_decoder() -> None:
    sums = sums_of("translation")
    assert lengths(sums, "decoder cross q") == lengths(sums, "decoder cross out") == [256, 256, 8192]
    assert lengths(sums, "decoder cross kv") == [256, 2 * 256 * 4, 8192], "one product for all four blocks"
    assert lengths(sums, "encoder qkv") == lengths(sums, "decoder qkv")
    plain = sums_of("translation", "techniques.fused=false")
    assert lengths(plain, "decoder cross kv")[1] == 512 and plain["head, wgrad"].chunk == 0


def test_a_masked_language_model_and_images() -> None:
    sums, labels = sums_of("masked-lm"), 256 * round(0.15 * 128)
    assert lengths(sums, "head transform") == [768, 768, labels] and lengths(sums, "head")[2] == labels
    sums = sums_of("images")
    assert lengths(sums, "patch") == [3 * 16, 0, 128 * 64] and lengths(sums, "head") == [192, 1000, 128]
    assert sums["attention, P V"].length == 65 and "a row of the token table, at most" not in sums


def test_sums_outside_of_products() -> None:
    bf16 = ["train.micro_batches=64", "techniques.fused.weights=bf16", "techniques.fused.moments=bf16"]
    sums = sums_of("causal-lm", *bf16, "optim.beta2=0.999", processes=4)
    assert (sums["gradients, over micro-batches"].length, sums["gradients, over processes"].length) == (16, 4)
    assert sums["gradients, over micro-batches"].mantissa == sums["gradients, over processes"].mantissa == 7
    second = sums["second moment, over steps"]
    assert (second.length, second.mantissa, second.rounding, second.verdict()) == (1000, 7, "stochastic", "widen it")
    assert sums["gradients, over micro-batches"].verdict() == "safe as it is"
    alone = sums_of("causal-lm", *bf16)["gradients, over micro-batches"]
    assert alone.length == 64 and alone.error() == pytest.approx((0.0225 * 64) ** 0.5 / 128, rel=0.01)
    assert sums_of("causal-lm", "train.micro_batches=300")["gradients, over micro-batches"].verdict() == "widen it"
    sharded = sums_of("causal-lm", "parallel.data=shard", processes=8)
    assert sharded["gradients, over processes"].mantissa == 23 and lengths(sharded, "decoder up")[2] == 4 * 1024
    fp32 = sums_of("demo", "run.device=cpu")
    assert fp32["decoder up, wgrad"].term == 47 and fp32["second moment, over steps"].mantissa == 23
    assert sums_of("demo", "train.precision=fp16")["decoder up, wgrad"].term == 21


def test_verdicts() -> None:
    sums = sums_of("causal-lm")
    assert {one.verdict() for name, one in sums.items() if "wgrad" in name} == {"chunk it"}
    assert sums["decoder qkv, forward"].verdict() == "safe if cut toward zero"
    assert {one.verdict() for one in sums_of("demo", "data.batch_size=1").values() if one.product} == {"safe"}
    assert Sum("longer than any vocabulary", 10**6, 15).verdict() == "chunk it"
    for one in sums.values():
        assert one.error(128) <= one.error() and one.required(128) <= one.required()
        assert not one.product or one.fp8_error(128) < 1e-3 <= one.fp8_error()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_sums(preset: str) -> None:
    kind = PRESETS[preset]["kind"]
    task = {"decoder": "causal", "encoder": "masked", "encoder-decoder": "translation", "vit": "images"}[kind]
    data: dict[str, Any] = {"task": task, "seq_len": 128} | (
        {"languages": ["en", "de"]} if task == "translation" else {}
    )
    sums, _ = list_sums(build_config({"data": data, "model": {"preset": preset}}), 8)
    assert len(sums) > 15 and all(one.length > 1 for one in sums) and len({one.name for one in sums}) == len(sums)


@pytest.mark.parametrize("recipe", list_recipes())
def test_the_command(recipe: str, tmp_path: Path) -> None:
    picture = tmp_path / "sums.svg"
    result = CliRunner().invoke(app, ["numerics", recipe, "--out", str(picture), "--processes", "8"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    head = next(line for line in lines if line.startswith("sum "))
    rows = [line for line in lines if ", wgrad" in line]
    assert len(rows) >= 5 and "gradients, over processes" in result.output and head.endswith("fp8 on Hopper")
    assert all(row[: head.index("terms") + 5].split()[-1].replace(",", "").isdigit() for row in rows), "columns line up"
    svg = picture.read_text()
    assert svg.startswith("<?xml") and "wgrad" in svg and "in chunks of 128" in svg
    assert CliRunner().invoke(app, ["numerics", recipe, "--out", str(picture)]).exit_code == 0, "written anew"


def test_mistakes_of_the_command() -> None:
    for arguments in (["numerics", "nowhere"], ["numerics", "demo", "--set", "model.widht=3"]):
        assert isinstance(CliRunner().invoke(app, arguments).exception, ConfigError)
    assert CliRunner().invoke(app, ["numerics", "demo", "--processes", "0"]).exit_code == 2


def test_the_table_needs_nothing_heavy() -> None:
    code = (
        "import stretto.cli as cli; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(cli.app, ['numerics', 'causal-lm']).exit_code == 0"
    )
    assert find_imported(code, "torch", "numpy", "matplotlib") == []
