"""Models with the `fused` technique against the same models without it. The kernels by themselves are in tests/ops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.batch import Batch
from stretto.config import Config, FusedConfig, TechniquesConfig
from stretto.errors import ConfigError
from stretto.model import Decoder, Model, build_model
from stretto.report import read_events
from stretto.techniques import fused as technique
from stretto.train import train
from tests.corpora import write_images, write_pairs
from tests.models import (
    CONFIGS,
    DEVICE,
    KINDS,
    apply_techniques,
    build,
    learn,
    make_batch,
    recompute_blocks,
)
from tests.runs import MakeConfig

DROPPING: dict[str, Any] = {"dropout": 0.2, "activation_dropout": 0.1}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The relative errors of the loss, of all gradients together and of the worst one, in the Euclidean norm."""
    assert found.keys() == exact.keys()
    every = [name for name in exact if name != "loss"]
    apart = torch.stack([(found[n].double() - exact[n].double()).norm() for n in every])
    size = torch.stack([exact[n].double().norm() for n in every])
    return {
        "loss": float((found["loss"].double() - exact["loss"].double()).abs() / exact["loss"].double().abs()),
        "gradients": float(apart.norm() / size.norm()),
        "worst": float((apart / size.clamp(min=1e-3 * float(size.max()))).max()),
    }


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_are_those_of_the_plain_model(name: str, form: str) -> None:
    cfg = KINDS[name]
    batch = make_batch(cfg, form)
    exact = learn(build(cfg, dtype=torch.float64), batch)
    plain, fused = (errors(learn(build(cfg, fused), batch), exact) for fused in (None, FusedConfig()))
    for what in plain:
        assert fused[what] <= 2 * plain[what] + 1e-7, (what, fused[what], plain[what])


@pytest.mark.parametrize("name", KINDS)
def test_in_bf16_it_is_as_exact_as_a_plain_model_of_bf16_activations(name: str) -> None:
    """The plain model under autocast keeps its residual stream in fp32; the one to compare with keeps it in bf16. Over
    several batches: in one of them, a few ReLUs that rounding switches over can outweigh everything else."""
    cfg = KINDS[name]
    if cfg.positions == "sinusoidal":  # these are fp32, and so would be the plain stream
        cfg = replace(cfg, positions="learned")
    models = build(cfg, dtype=torch.float64), build(cfg, dtype=torch.bfloat16), build(cfg, FusedConfig())
    plain, fused = [], []
    for seed in range(0, 60, 10):
        batch = make_batch(cfg, seed=seed)
        exact = learn(models[0], batch)
        plain.append(errors(learn(models[1], batch), exact))
        fused.append(errors(learn(models[2], batch, "bf16"), exact))
    for what in ("loss", "gradients"):
        ours, theirs = (sum(found[what] for found in some) / len(some) for some in (fused, plain))
        assert ours <= 2 * theirs + 1e-3, (what, ours, theirs)


def test_names_do_not_change() -> None:
    for cfg in KINDS.values():
        assert build(cfg, FusedConfig()).state_dict().keys() == build(cfg).state_dict().keys()


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder"])
def test_dropout_depends_on_the_seed_alone_and_averages_out(name: str) -> None:
    cfg = replace(KINDS[name], dropout=0.1, activation_dropout=0.1, attention_dropout=0.0)
    batch, model = make_batch(cfg), build(cfg, FusedConfig())
    first, again, other = (learn(model, batch, seed=seed)["loss"] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    plain = build(cfg)
    with torch.no_grad():
        ours, theirs = (torch.stack([_loss(m, batch, seed) for seed in range(40)]).double() for m in (model, plain))
    spread = ((ours.var() + theirs.var()) / 40).sqrt()
    assert abs(float(ours.mean() - theirs.mean())) < 5 * float(spread)


def _loss(model: Model, batch: Batch, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return model(batch)


def test_evaluation_is_exact_and_draws_nothing() -> None:
    cfg = replace(KINDS["encoder"], dropout=0.3)
    batch, plain, fused = make_batch(cfg), build(cfg).eval(), build(cfg, FusedConfig()).eval()
    torch.testing.assert_close(fused(batch), plain(batch))
    assert torch.equal(_loss(fused, batch, 1), _loss(fused, batch, 2))


def test_two_models_and_two_forwards_do_not_disturb_each_other() -> None:
    cfg = replace(KINDS["encoder-decoder"], **DROPPING)
    one, two = build(cfg, FusedConfig()), build(replace(cfg, norm_order="pre"), FusedConfig())
    batches = [make_batch(cfg, seed=seed) for seed in (0, 10)]
    alone = [learn(model, batch, seed=i) for model in (one, two) for i, batch in enumerate(batches)]
    losses = []
    for model in (one, two):
        for i, batch in enumerate(batches):
            torch.manual_seed(i)
            losses.append(model(batch))
    for k in (2, 0, 3, 1):  # backward passes in another order than the forward passes
        model = (one, two)[k // 2]
        gradients = torch.autograd.grad(losses[k], list(model.parameters()))
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert torch.equal(gradient, alone[k][name]), name


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "encoder"])
def test_activation_checkpointing(name: str) -> None:
    cfg = replace(KINDS[name], attention_dropout=0.1, **DROPPING)
    batch, model = make_batch(cfg), build(cfg, FusedConfig())
    kept = learn(model, batch)
    again = learn(recompute_blocks(model), batch)
    assert all(torch.equal(kept[key], again[key]) for key in kept)


def test_a_frozen_layer_keeps_the_others_right() -> None:
    cfg = KINDS["encoder-decoder"]
    batch = make_batch(cfg)

    def frozen(model: Model) -> Model:
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(("decoder.blocks.0", "encoder.blocks.1.mlp.up", "embedding")))
        return model

    plain, fused = learn(frozen(build(cfg)), batch), learn(frozen(build(cfg, FusedConfig())), batch)
    assert plain.keys() == fused.keys()
    for name in plain:
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["encoder-decoder", "encoder-decoder-pre"])
def test_a_dropped_layer_keeps_the_others_right(name: str) -> None:
    """Keys and values are projected for it too; nobody looks at them."""
    batch = make_batch(KINDS[name])
    plain, fused = build(KINDS[name]), build(KINDS[name], FusedConfig())
    skips: dict[Model, Any] = {plain: lambda x, *_: x, fused: lambda x, *_, pending, **__: (x, pending)}
    for model, skip in skips.items():
        model.get_submodule("decoder.blocks.0").forward = skip
    wanted, found = learn(plain, batch), learn(fused, batch)
    for key, value in found.items():
        torch.testing.assert_close(value, wanted.get(key, torch.zeros_like(value)), rtol=1e-4, atol=1e-5)
    assert wanted.keys() <= found.keys()


def test_generation_takes_the_plain_path() -> None:
    for name in ("decoder", "decoder-rotary"):
        models = build(KINDS[name]).eval(), build(KINDS[name], FusedConfig()).eval()
        outputs = []
        for model in models:
            assert isinstance(model, Decoder)
            cache = model.start()
            first = model.decode(torch.tensor([[3, 1, 4]], device=DEVICE), cache)
            outputs.append(torch.stack([first, model.decode(torch.tensor([[1]], device=DEVICE), cache)]))
        torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_traced_whole(name: str) -> None:
    cfg = replace(KINDS[name], **DROPPING)
    batch, model = make_batch(cfg, "padded"), build(cfg, FusedConfig())
    eager = learn(model, batch)
    torch.compiler.reset()  # all models share the code of `forward`, and it may be compiled only so many times
    compiled = copy.copy(model)
    compiled.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]
    traced = learn(compiled, batch)
    for key in eager:
        torch.testing.assert_close(traced[key], eager[key], rtol=1e-5, atol=1e-6)


def losses(config: Config) -> Tensor:
    folder = train(config)
    return torch.tensor([event["loss"] for event in read_events(folder) if "loss" in event])


@pytest.mark.slow
def test_200_steps_in_bf16_stay_closer_to_the_plain_model_than_another_seed(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    def run(name: str, **changes: Any) -> Tensor:
        changes |= {"train__steps": 200, "train__precision": "bf16", "model__dropout": 0.0}
        return losses(make_config(run__dir=str(tmp_path / name), run__device=DEVICE.type, **changes))

    plain, other = run("plain", techniques__fused=False), run("other", techniques__fused=False, run__seed=1)
    fused = run("fused", techniques__fused={})
    noise = (plain - other)[20:].abs().mean()
    assert (plain - fused)[20:].abs().mean() < noise
    assert abs(float(fused[-20:].mean() - plain[-20:].mean())) < abs(float(noise))


def test_gradients_accumulate_over_micro_batches(make_config: MakeConfig, tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> Tensor:
        return losses(make_config(run__dir=str(tmp_path / name), model__dropout=0.0, **changes))

    once = run("once", data__batch_size=8)
    twice = run("twice", data__batch_size=4, train__micro_batches=2, techniques__fused={})
    torch.testing.assert_close(twice, once, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("task", ["causal", "masked", "translation", "images"])
def test_a_checkpoint_moves_between_on_and_off(make_config: MakeConfig, tmp_path: Path, task: str) -> None:
    """Two steps on, two off, two on again: the same losses as all off."""
    data: dict[str, Any] = {"data__task": task, "model__dropout": 0.0}
    if task == "masked":
        data |= {"model__kind": "encoder", "model__norm_order": "post", "model__embed_norm": True}
    elif task == "translation":
        data |= {"data__train": str(write_pairs(tmp_path / "pairs")), "data__languages": ["xx", "yy"]}
        data |= {"model__kind": "encoder-decoder", "data__max_tokens": 64, "data__eval": str(tmp_path / "pairs")}
    elif task == "images":
        data |= {"data__train": str(write_images(tmp_path / "images.npz")), "model__kind": "vit"}
        data |= {"model__image_size": 16, "model__patch": 8}

    def run(name: str, steps: int, on: bool, resume: bool = False) -> list[float]:
        extra: dict[str, Any] = {"techniques__fused": {}} if on else {}
        folder = str(tmp_path / name)
        config = make_config(run__dir=folder, train__steps=steps, optim__schedule="constant", **data, **extra)
        train(config, resume=resume)
        return [event["loss"] for event in read_events(Path(folder)) if "loss" in event]

    plain = run("plain", 6, on=False)
    run("mixed", 2, on=True)
    run("mixed", 4, on=False, resume=True)
    mixed = run("mixed", 6, on=True, resume=True)
    torch.testing.assert_close(torch.tensor(mixed), torch.tensor(plain), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("weights", ["split", "bf16"])
def test_weights_of_16_bits_train(make_config: MakeConfig, tmp_path: Path, weights: str) -> None:
    def run(name: str, **changes: Any) -> Tensor:
        return losses(make_config(run__dir=str(tmp_path / name), train__steps=30, train__precision="bf16", **changes))

    plain = run("plain")
    lean = run("lean", techniques__fused={"weights": weights, "moments": "bf16" if weights == "bf16" else "fp32"})
    assert abs(float(lean[-5:].mean() - plain[-5:].mean())) < 0.15
    assert lean[-5:].mean() < lean[:5].mean() - 0.3


def test_16_bit_weights_need_bf16() -> None:
    model = build_model(CONFIGS["decoder"])
    with pytest.raises(ConfigError, match=r"techniques\.fused: weights = 'split' .* train\.precision"):
        apply_techniques(model, TechniquesConfig(fused=FusedConfig(weights="split")))


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a norm that forgets the stream's own gradient": lambda patch: _wrap(
        patch, "add_norm", lambda out: (out[0], out[1].detach())
    ),
    "an MLP that is off by a thousandth": lambda patch: _wrap(patch, "mlp", lambda out: out * 1.001),
    "keys and values of the wrong layer": lambda patch: patch.setattr(
        "stretto.techniques.fused.FusedStack.project_memory", _shifted_memory
    ),
}


def _wrap(patch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    right = getattr(technique, name)
    patch.setattr(technique, name, lambda *args, **kw: change(right(*args, **kw)))


def _shifted_memory(self: Any, memory: Tensor, shares: dict[int, Any]) -> dict[int, Any]:
    layers = [self.blocks[i].cross for i in shares]
    pairs = [at.kv(memory).unflatten(1, (2, -1, at.head_size)).unbind(1) for at in layers]
    return dict(zip(shares, [*pairs[1:], pairs[0]], strict=True))


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    with pytest.raises(AssertionError):
        test_loss_and_gradients_are_those_of_the_plain_model("encoder-decoder-pre", "packed")
