"""The choice of what blocks keep: the fastest within a memory, by comparison with all choices that there are."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from stretto import dial, memory, plan
from stretto.config import Config, build_config
from stretto.dial import (
    CHUNKS,
    Choice,
    Needs,
    Options,
    choose,
    decide,
    fit,
    follow,
    list_options,
    read_options,
    seconds_again,
)  # fmt: skip
from stretto.errors import ConfigError
from stretto.memory import Keep, list_blocks
from stretto.ops.attention import MOST_CHANNELS

OPTIONS = [Keep("output"), Keep("output", "product"), Keep("output", "input", "input"), Keep("output", block="input")]


def make(preset: str = "gpt2-medium", layers: int = 5, **sections: Any) -> Config:
    model = {"preset": preset, "layers": layers, "max_len": 512, "vocab": 8192}
    tree = {"run": {"device": "cuda"}, "data": {"seq_len": 512, "batch_size": 8}, "model": model} | sections
    return build_config(tree)


def translation() -> Config:
    data = {"task": "translation", "languages": ["en", "de"], "max_tokens": 4096, "seq_len": 64}
    return make("transformer-base", 2, data=data)


def count_seconds(needs: Needs, keeps: tuple[Keep, ...]) -> float:
    return sum(
        needs.load.count_tokens(cross) * seconds_again(needs.model, keep, cross, needs.load.longest)
        for (_, cross), keep in zip(list_blocks(needs.model), keeps, strict=True)
    )


@pytest.mark.parametrize("config", [make(), translation()], ids=["decoder", "encoder-decoder"])
def test_the_search_is_exact(config: Config) -> None:
    needs = plan.find_needs(config)
    every = [Choice(0.0, keeps) for keeps in product(OPTIONS, repeat=len(list_blocks(needs.model)))]
    known = [(needs.predict(choice).peak, count_seconds(needs, choice.keeps)) for choice in every]
    most, least = max(peak for peak, _ in known), min(peak for peak, _ in known)
    for i in range(25):
        limit = int(least + (most - least) * i / 24)
        found = fit(needs, OPTIONS, limit)
        best = min(seconds for peak, seconds in known if peak <= limit)
        assert found is not None and found.seconds == pytest.approx(best, rel=1e-12)
        assert needs.predict(found).peak <= limit and found.seconds == pytest.approx(count_seconds(needs, found.keeps))
    assert fit(needs, OPTIONS, least - 1) is None


def test_a_wrong_account_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: what a block needs while it is computed again must count."""
    needs, right = plan.find_needs(make()), memory.predict
    least = min(needs.predict(Choice(0.0, keeps)).peak for keeps in product(OPTIONS, repeat=5))

    def forgetful(*arguments: Any) -> Any:
        account = right(*arguments)
        return replace(account, during=(*(0 for _ in account.during[:-1]), account.during[-1]))

    monkeypatch.setattr(dial, "predict", forgetful)
    found = fit(needs, OPTIONS, least - 1)
    assert found is not None
    monkeypatch.undo()
    assert needs.predict(found).peak > least - 1


def test_chunks_of_logits_become_smaller_where_that_is_the_cheapest() -> None:
    config = make("llama-1b", 2, model={"preset": "llama-1b", "layers": 2}, data={"seq_len": 4096, "batch_size": 4})
    needs, options = plan.find_needs(config), list_options("output", whole=True)
    roomy = needs.predict(Choice(0.0, (options[0],) * 2)).peak
    free, tight = choose(needs, options, roomy), choose(needs, options, roomy - 2**30)
    assert free is not None and free.chunk == 0 and set(free.keeps) == {options[0]}
    assert tight is not None and tight.chunk > 0 and needs.predict(tight).peak <= roomy - 2**30
    assert tight.seconds > free.seconds


def test_less_memory_never_is_faster() -> None:
    needs, options = plan.find_needs(make(layers=24)), list_options("output", whole=True)
    choices = [choose(needs, options, int(gib * 2**30)) for gib in (16, 8, 6, 5, 4.5, 4, 3.5)]
    seconds = [choice.seconds for choice in choices if choice is not None]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1] and len(seconds) >= 5


def test_what_a_recipe_asks_for() -> None:
    assert read_options(None, 0).keep == Keep()
    lean: Any = make(techniques={"lean": {"memory": "50%", "norms": "input"}}).techniques.find_keeping()
    assert read_options(lean, 2**34).memory == 2**33 and read_options(lean, 2**34).keep.norms == "input"


def test_memory_that_cannot_be_met_is_an_answer() -> None:
    config = make(techniques={"lean": {"memory": "1GiB"}})
    with pytest.raises(ConfigError, match=r"techniques\.lean: 1\.00 GiB cannot be met: .* about .* GiB, at the"):
        plan.find_choice(config, plan.find_needs(config))
    with pytest.raises(ConfigError, match=r"techniques\.lean\.memory = 'much' must be a size"):
        make(techniques={"lean": {"memory": "much"}})


@pytest.mark.parametrize("memory", ["0GiB", "0.0%", "120%"])
def test_a_limit_that_is_none_is_refused(memory: str) -> None:
    """Nothing would otherwise mean that there is no limit."""
    with pytest.raises(ConfigError, match=rf"memory = '{memory}' must be a size, .*: more than nothing"):
        make(techniques={"lean": {"memory": memory}})


def test_a_share_of_a_gpu_that_nobody_has_named_is_refused() -> None:
    config = make(techniques={"lean": {"memory": "80%"}})
    with pytest.raises(ConfigError, match=r"memory = '80%' is a share of a GPU's memory: .* --gpu-memory"):
        plan.find_choice(config, plan.find_needs(config))
    assert len(plan.find_choice(config, plan.find_needs(config), 2**40).keeps) == 5


@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_the_least_that_is_named_can_be_met(dropped: float) -> None:
    """Of few blocks, one that is computed again as a whole is more than one that keeps its norms' outputs."""
    config = make(layers=1, model={"preset": "gpt2-small", "layers": 1, "attention_dropout": dropped})
    needs, padded = plan.find_needs(config), dropped > 0
    with pytest.raises(ValueError, match="cannot be met: with as little kept as can be") as raised:
        decide(needs, Options(Keep("output"), memory=2**20), padded)
    gib = float(re.search(r"about ([\d.]+) GiB", str(raised.value))[1])  # type: ignore[index]
    assert decide(needs, Options(Keep("output"), memory=int((gib + 0.01) * 2**30)), padded)
    with pytest.raises(ValueError, match="cannot be met"):
        decide(needs, Options(Keep("output"), memory=int((gib - 0.01) * 2**30)), padded)


def test_padded_batches_that_drop_attention_have_no_whole_blocks() -> None:
    config = make(model={"preset": "gpt2-small", "layers": 24, "max_len": 512, "attention_dropout": 0.1})
    needs, inside = plan.find_needs(config), list_options("output", whole=False)
    least = needs.predict(replace(follow(config.model, inside[-1]), chunk=CHUNKS[-1])).peak
    options = Options(Keep("output"), memory=least - 1)
    assert any(keep.block == "input" for keep in decide(needs, options, padded=False).keeps)
    with pytest.raises(ValueError, match="cannot be met"):
        decide(needs, options, padded=True)
    assert dial.MOST_CHANNELS == MOST_CHANNELS


def test_a_configuration_of_a_former_version_means_what_it_meant() -> None:
    again = make(techniques={"fused": {"recompute": True, "moments": "bf16"}})
    assert again == make(techniques={"fused": {"moments": "bf16"}, "lean": {"norms": "input"}})
    assert make(techniques={"fused": {"recompute": False}}) == make(techniques={"fused": True})
    own = {"fused": {"recompute": True}, "lean": {"mlp": "input"}}
    assert make(techniques=own) == make(techniques=own | {"fused": True})


def test_a_model_without_logits_in_chunks_has_a_choice() -> None:
    config = make("vit-base", 4, data={"task": "images", "batch_size": 64})
    needs = plan.find_needs(config)
    keep = Keep("output")
    most = needs.predict(follow(needs.model, keep)).peak
    found = decide(needs, Options(keep, memory=int(0.8 * most)), padded=False)
    assert needs.predict(found).peak <= 0.8 * most and found.seconds > 0 and found.chunk == 0
