"""A sample of what bench/hf_families.py does to every class of transformers; and that it finds what is wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from bench import hf_families
from bench.hf_families import Result, check_class, sweep
from bench.hf_tiny import find_class

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of many families
SAMPLE = {
    "BartForConditionalGeneration": "bart",
    "BertForPreTraining": "bert",
    "BertForSequenceClassification": "bert",
    "CLIPModel": "clip",
    "CohereForCausalLM": "cohere",
    "DebertaV2ForMaskedLM": "deberta_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DetrForObjectDetection": "detr",
    "Dinov2ForImageClassification": "dinov2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "GPT2ForSequenceClassification": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Llama4ForCausalLM": "llama4",
    "LlamaForSequenceClassification": "llama",
    "MPNetForMaskedLM": "mpnet",
    "Mamba2ForCausalLM": "mamba2",
    "MixtralForCausalLM": "mixtral",
    "ModernBertForSequenceClassification": "modernbert",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "SamModel": "sam",
    "SiglipModel": "siglip",
    "SiglipTextModel": "siglip",
    "T5ForConditionalGeneration": "t5",
    "ViTForImageClassification": "vit",
    "VideoMAEForVideoClassification": "videomae",
    "Wav2Vec2ForSequenceClassification": "wav2vec2",
    "WhisperForConditionalGeneration": "whisper",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_accelerated_model_gives_the_same_results(name: str) -> None:
    try:
        find_class(name, SAMPLE[name])
    except LookupError as error:
        pytest.skip(str(error))
    result = check_class(name, SAMPLE[name])
    assert not result.reason
    assert not result.faults
    assert result.tried >= 4  # in training and in eval mode, each in two precisions


def check_with(monkeypatch: pytest.MonkeyPatch, accelerate: Any, restore: Any = lambda model: model) -> Result:
    """Of a model that others than ours accelerate."""
    monkeypatch.setattr(stretto, "accelerate", accelerate, raising=False)
    monkeypatch.setattr(stretto, "restore", restore, raising=False)
    monkeypatch.setattr(hf_families, "_describe_share", lambda model, result: None)
    return check_class("LlamaForCausalLM", "llama")


def test_what_changes_nothing_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_with(monkeypatch, lambda model: model)
    assert result.result == "equal" and result.tried > 15


@pytest.mark.parametrize("size, found", [(1e-8, "equal"), (1e-3, "wrong")])
def test_other_logits_are_found(monkeypatch: pytest.MonkeyPatch, size: float, found: str) -> None:
    def accelerate(model: Any) -> Any:
        model.handle = model.lm_head.register_forward_hook(lambda head, args, out: out * (1 + size))
        return model

    def restore(model: Any) -> Any:
        model.handle.remove()
        del model.handle
        return model

    assert check_with(monkeypatch, accelerate, restore).result == found


def test_other_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def accelerate(model: Any) -> Any:
        model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 1.01 * gradient)
        return model

    result = check_with(monkeypatch, accelerate)
    assert any("train" in where and "grad model.layers.0.mlp.up_proj" in where for where in result.faults["wrong"])
    assert not any("eval" in where for where in result.faults["wrong"])


def test_what_is_noise_in_the_untouched_model_is_not_compared() -> None:
    right = {"grad a": torch.ones(4), "grad b": torch.ones(4), "logits": torch.ones(4)}
    noisy = right | {"grad a": torch.full((4,), 9e31)}
    ours = {name: 3 * value for name, value in right.items()}
    assert [problem.split(":")[0] for problem in hf_families.judge(ours, [noisy], right, 1e-3)] == ["logits", "grad b"]


def test_an_error_in_some_calls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training and "labels" not in kwargs:
            raise RuntimeError("no labels")

    def accelerate(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(refuse, with_kwargs=True)
        return model

    result = check_with(monkeypatch, accelerate)
    (where,) = result.faults["raises when called"]
    assert where.startswith("no labels, train, float32: RuntimeError: no labels")
    assert "half exchanged" in result.faults  # nobody took the hook away


def test_a_model_that_is_left_half_exchanged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        pass

    def accelerate(model: Any) -> Any:
        model.lm_head.__class__ = Other
        raise RuntimeError("not this one")

    result = check_with(monkeypatch, accelerate)
    assert result.result == "half exchanged"
    assert set(result.faults) == {"half exchanged", "raises in accelerate"}


def test_a_crash_and_a_hang_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str, family: str, tell: Any) -> Result:
        result = Result(name, family, stage="accelerate" if family == "ours" else "building")
        tell(result)
        while name == "hang":
            pass
        if name == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkeypatch.setattr(hf_families, "check_class", check)
    chosen = [("crash", "ours"), ("crash", "theirs"), ("hang", "ours"), ("nothing", "ours")]
    found = sweep(chosen, jobs=2, limit=1, save=lambda results: None)
    assert [(result.name, result.family, result.result) for result in found] == [
        ("crash", "ours", "hangs or crashes"),
        ("hang", "ours", "hangs or crashes"),
        ("nothing", "ours", "equal"),
        ("crash", "theirs", "not tried"),
    ]
    assert found[0].faults["hangs or crashes"] == ["SIGKILL while accelerate"]
    assert found[1].faults["hangs or crashes"] == ["SIGXCPU while accelerate"]


def test_a_class_that_cannot_be_built_is_not_tried() -> None:
    result = check_class("LlamaForNothing", "llama")
    assert result.result == "not tried" and "LlamaForNothing" in result.reason
