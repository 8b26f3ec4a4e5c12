"""Techniques that change the mathematics, in Hugging Face models: each next to the same thing written down plainly."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.multiprocessing as mp
import transformers as hf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stretto
import stretto.hf
import stretto.techniques.layer_drop
from stretto.batch import Batch as OurBatch
from stretto.batch import Counts, shape_of
from stretto.config import LayerDropConfig, ModelConfig, StandardizeConfig
from stretto.errors import ConfigError
from stretto.flops import training_flops
from stretto.hf.acceleration import gates_of, outermost, techniques_of
from stretto.hf.loop import Step
from stretto.hf.techniques import Gate
from stretto.hf.trainer import SpeedMeter, Trainer, find_counterpart
from stretto.hf.update import find_obstacle, plan
from stretto.ops.affine import standardization_loss
from stretto.optim import FlatAdamW
from stretto.techniques.layer_drop import LayerDrop
from stretto.techniques.technique import POST_NORM, At, Context
from tests.hf.families import _PAIRS, FAMILIES, Batch, accelerated, build, draw_batch, errors, learn
from tests.hf.observe import count_sums, replay_and_compare
from tests.hf.trainers import make

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

LAYERS, TOTAL = 4, 50
STACKS = {"gpt2": ["transformer"], "llama": ["model"], "qwen3": ["model"], "vit": ["vit"]}
STACKS["mbart"] = ["model.encoder", "model.decoder"]
STACKS["t5"] = ["encoder", "decoder"]
CLOSE = 1e-6  # in fp64, where the loss without logits is fp32
HALF = {"theta": 0.5, "schedule": "constant"}


def build_deep(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Of four layers a stack."""
    torch.manual_seed(0)
    if family == "mbart":
        model: Any = hf.MBartForConditionalGeneration(
            hf.MBartConfig(**_PAIRS | {"encoder_layers": LAYERS, "decoder_layers": LAYERS})
        )
    else:
        shallow: Any = FAMILIES[family]()
        config = shallow.config
        for name in ("num_hidden_layers", "num_decoder_layers"):
            if hasattr(config, name):
                setattr(config, name, LAYERS)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1] * LAYERS
        model = type(shallow)(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.05
    return model.to(dtype).train()


def draw(family: str, lengths: tuple[int, ...] | None = (9, 3, 6), seed: int = 0) -> Batch:
    return draw_batch("marian" if family == "mbart" else family, lengths, seed)


def layers_of(model: nn.Module, stack: str) -> nn.ModuleList:
    return next(
        m
        for m in model.get_submodule(stack).modules()
        if isinstance(m, nn.ModuleList) and len(m) == LAYERS and len({type(layer) for layer in m}) == 1
    )


def factors(model: nn.Module) -> dict[str, list[float | None]]:
    patterns = techniques_of(model).pattern()["layer_drop"]
    return {stack: list(of_layers.values()) for stack, of_layers in patterns.items()}


def all_gates(model: nn.Module) -> list[Gate]:
    return [gate for gates in gates_of(model).values() for gate in gates.values()]


@contextmanager
def scaled_by_hand(model: nn.Module, chosen: dict[str, list[float | None]]) -> Iterator[None]:
    """All layers of a plain model work, and what each adds to the stream is multiplied."""

    def scale(factor: float, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        y = out if isinstance(out, Tensor) else out[0]
        y = x + factor * (y - x)
        return y if isinstance(out, Tensor) else (y, *out[1:])

    hooks = [
        layer.register_forward_hook(lambda *a, f=factor: scale(f, *a), with_kwargs=True)
        for stack, of_layers in chosen.items()
        for layer, factor in zip(layers_of(model, stack), of_layers, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def count_calls(model: nn.Module, stacks: list[str]) -> Iterator[dict[str, int]]:
    """Of the modules inside of layers, by the name of the layer."""
    calls: dict[str, int] = {}
    hooks = []
    for stack in stacks:
        for i, layer in enumerate(layers_of(model, stack)):
            calls[f"{stack}.{i}"] = 0
            for module in layer.modules():

                def note(*_: Any, key: str = f"{stack}.{i}") -> None:
                    calls[key] += 1

                hooks.append(module.register_forward_pre_hook(note))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


# Layers that are left out.


@pytest.mark.parametrize("family", STACKS)
def test_with_theta_one_no_bit_changes(family: str) -> None:
    found = []
    for drop in (False, {"theta": 1.0}):
        model = accelerated(family, make=build_deep, layer_drop=drop, steps=TOTAL)
        if drop:
            stretto.hf.set_step(model, 7)
        found.append(learn(model, draw(family)))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


PATTERNS = [[0.0, 1.25, 0.0, 2.5], [1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", STACKS)
def test_it_is_the_plain_model_with_scaled_layers(family: str, fused: bool) -> None:
    """Also without the first and the last layers, between which padding is away."""
    model, plain = build_deep(family, torch.float64), build_deep(family, torch.float64)
    stretto.accelerate(model, fused=fused, unpad=fused, loss=fused, layer_drop=HALF)
    for number, pattern in enumerate(PATTERNS):
        if family == "t5":  # whose first layer makes the bias of all
            pattern = [1.5, *pattern[1:]]
        for gates in gates_of(model).values():
            for gate, factor in zip(gates.values(), pattern, strict=True):
                gate.factor = factor
        found = learn(model, draw(family, seed=number))
        with scaled_by_hand(plain, factors(model)):
            expected = learn(plain, draw(family, seed=number))
        for stack in gates_of(model):
            for layer, factor in zip(layers_of(model, stack), pattern, strict=True):
                assert all((p.grad is None) == (factor == 0.0) for p in layer.parameters()), "none, rather than zero"
        assert not any(expected.pop(name).any() for name in expected.keys() - found.keys())
        assert max(errors(found, expected).values()) < CLOSE


@pytest.mark.parametrize("family", STACKS)
def test_what_is_left_out_is_not_called(family: str) -> None:
    model = accelerated(family, make=build_deep, layer_drop=HALF)
    left_out = 0
    for step in range(4):
        stretto.hf.set_step(model, step)
        with count_calls(model, STACKS[family]) as calls:
            learn(model, draw(family))
        expected = {f"{stack}.{i}": f != 0.0 for stack, of in factors(model).items() for i, f in enumerate(of)}
        assert {key: number > 0 for key, number in calls.items()} == expected
        left_out += list(expected.values()).count(False)
    assert left_out > 1


def test_a_stack_gives_a_tensor_though_its_last_layer_is_left_out() -> None:
    """A sum may wait for the next layer, but there is none."""
    model = accelerated("gpt2", make=build_deep, layer_drop=HALF)
    given: list[type] = []
    for number, gate in enumerate(all_gates(model)):
        gate.factor = float(number < LAYERS - 1)
    model.get_submodule("transformer.ln_f").register_forward_pre_hook(lambda _, args: given.append(type(args[0])))
    learn(model, draw("gpt2", None))
    assert given == [Tensor]


@pytest.mark.parametrize("schedule", ["decay", "raptr", "constant"])
@pytest.mark.parametrize("sampling", ["systematic", "bernoulli"])
def test_gates_are_those_of_the_technique(schedule: Any, sampling: Any) -> None:
    cfg = LayerDropConfig(theta=0.3, schedule=schedule, sampling=sampling, scale="update", index="text")
    model = accelerated("mbart", make=build_deep, layer_drop=cfg, steps=TOTAL, seed=5)
    theirs = LayerDrop(cfg, Context(ModelConfig(), torch.device("cpu"), "fp32", seed=5, steps=TOTAL))
    theirs.num_blocks = dict.fromkeys(STACKS["mbart"], LAYERS)
    empty, left_out = OurBatch(torch.zeros(0), Counts(0, 0, 0, 0), ()), 0
    for step in range(TOTAL):
        stretto.hf.set_step(model, step)
        depths = theirs.prepare(empty, At(step, step)).depths
        for stack, of_layers in factors(model).items():
            works = range(LAYERS) if stack not in depths else depths[stack].parts
            scales = [1.0] * LAYERS if stack not in depths else depths[stack].scales.tolist()
            assert [i for i, factor in enumerate(of_layers) if factor] == list(works)
            assert [of_layers[i] for i in works] == pytest.approx([scales[i] for i in works])
            left_out += LAYERS - len(works)
    assert left_out > TOTAL / 4


def test_on_average_every_layer_adds_what_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all patterns of systematic sampling: those of four layers at theta 0.5 change at eighths."""
    model = accelerated("gpt2", make=build_deep, layer_drop=HALF)
    total, patterns = torch.zeros(LAYERS, dtype=torch.float64), set()
    for i in range(8):
        monkeypatch.setattr(stretto.techniques.layer_drop, "draw_number", lambda *keys, u=(i + 0.5) / 8: u)
        stretto.hf.set_step(model, 0)
        total += torch.tensor(factors(model)["transformer"], dtype=torch.float64)
        patterns.add(tuple(factors(model)["transformer"]))
    torch.testing.assert_close(total / 8, torch.ones(LAYERS, dtype=torch.float64), rtol=1e-15, atol=0)
    assert 1 < len(patterns) <= LAYERS + 1


@pytest.mark.parametrize("family", ["gpt2", "mbart"])
def test_evaluation_and_generation_run_all_layers(family: str) -> None:
    plain, model = build_deep(family).eval(), accelerated(family, make=build_deep, layer_drop=HALF)
    batch = draw(family)
    stretto.hf.set_step(model, 0)
    assert any(0.0 in of_layers for of_layers in factors(model).values())
    ids = {"input_ids": batch["input_ids"][:, :4], "max_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    assert torch.equal(model.generate(**ids), plain.generate(**ids)), "in training mode: it records no gradients"
    assert max(errors(learn(model.eval(), batch), learn(plain, batch)).values()) < 1e-5


def test_restore_undoes_it() -> None:
    model, plain = build_deep("llama"), build_deep("llama")
    stretto.restore(stretto.accelerate(model, layer_drop=HALF, standardize=True))
    for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert type(mine) is type(theirs) and vars(mine).keys() == vars(theirs).keys()
    found, expected = (learn(m, draw("llama")) for m in (model, plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["bert", "roberta", "bart", "marian"])
def test_post_norm_models_are_refused(family: str) -> None:
    model = build(family)
    with pytest.raises(ValueError, match=f"layer_drop does not apply to .*{POST_NORM}"):
        stretto.accelerate(model, layer_drop=True)
    assert type(model) is type(build(family)) and not hasattr(model, "_stretto")


class Halved(hf.models.gpt2.modeling_gpt2.GPT2Block):
    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(hidden_states, *args, **kwargs)
        return out / 2 if isinstance(out, Tensor) else (out[0] / 2, *out[1:])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="scale = 'branch' is inside of Hugging Face's own layers"):
        stretto.accelerate(build_deep("gpt2"), layer_drop=LayerDropConfig(scale="branch"))
    with pytest.raises(ValueError, match="gate = 'sample' would cut all that layers are given"):
        stretto.accelerate(build_deep("gpt2"), layer_drop={"gate": "sample"})
    with pytest.raises(ConfigError, match=r"unknown key techniques\.layer_drop\.thta.*theta"):
        stretto.accelerate(build_deep("gpt2"), layer_drop={"thta": 0.5})
    with pytest.raises(ValueError, match=r"makes what the others need.*index to 'algorithm'"):
        stretto.accelerate(build_deep("t5"), layer_drop={"index": "text"})
    strange = build_deep("gpt2")
    for layer in layers_of(strange, "transformer"):
        layer.__class__ = Halved
    with pytest.raises(ValueError, match="do more than add something to the stream"):
        stretto.accelerate(strange, layer_drop=True)
    model = accelerated("gpt2", make=build_deep, layer_drop=True)
    with pytest.raises(ValueError, match=r"layer_drop depends on the step: call stretto\.hf\.set_step"):
        model(**draw("gpt2"))
    with pytest.raises(ValueError, match="schedule = 'decay' needs the number of updates"):
        stretto.hf.set_step(model, 0)
    model = accelerated("gpt2", make=build_deep, standardize={"final": 0.5})
    with pytest.raises(ValueError, match=r"standardize depends on the step: call stretto\.hf\.set_step"):
        model(**draw("gpt2"))
    with pytest.raises(ValueError, match=r"final = 0\.5 needs the number of updates"):
        stretto.hf.set_step(model, 0)


# An affine and a loss instead of norms.


class Plain(nn.Module):
    """An affine whose results are kept."""

    def __init__(self, norm: Any, results: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.results = norm.weight, getattr(norm, "bias", None), results

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight if self.bias is None else x * self.weight + self.bias
        self.results.append(y)
        return y


def count_channels(model: nn.Module, sites: list[str]) -> int:
    norms: list[Any] = [model.get_submodule(name) for name in sites]
    return sum(norm.weight.numel() for norm in norms)


def learn_plainly(model: nn.Module, batch: Batch, cfg: StandardizeConfig, sites: list[str]) -> dict[str, Tensor]:
    """The same by autograd, with the loss as a value: every token that the mask keeps counts. For channels their number
    should be a power of two, whose inverse is exact: where variances are small, the gradient is a small difference."""
    results: dict[str, list[Tensor]] = {name: [] for name in sites}
    channels = count_channels(model, sites)
    for name in sites:
        model.set_submodule(name, Plain(model.get_submodule(name), results[name]))
    loss = model(**batch).loss
    total = loss
    for name, kept in results.items():
        mask = batch.get("decoder_attention_mask" if ".decoder." in f".{name}" else "attention_mask")
        if mask is None and ".decoder." in f".{name}":
            mask = batch["labels"] != -100
        for y in kept:
            rows = y.flatten(0, -2)
            real = (
                torch.ones(len(rows)) if mask is None else mask.flatten().repeat_interleave(len(rows) // mask.numel())
            )
            weights, factor = real.float() / real.sum(), torch.tensor(cfg.weight / channels)
            total = total + factor * standardization_loss(rows, weights, cfg.axis)
    total.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


STANDARD = ["bert", "gpt2", "llama", "qwen3", "vit", "marian", "bart", "t5"]


def standardized(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "stretto_tokens")]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", STANDARD)
def test_the_gradient_is_that_of_the_loss(family: str, fused: bool) -> None:
    axis: Literal["channel", "token"] = "channel" if family == "gpt2" else "token"
    cfg = StandardizeConfig(weight=30.0, warmup=0, stride=1, axis=axis)
    dtype = torch.float32 if family in ("llama", "qwen3", "t5") else torch.float64  # in which their norms compute
    model, plain = build(family, dtype), build(family, dtype)
    batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in draw_batch(family, (9, 3, 4)).items()}
    if family == "bart":
        batch.pop("decoder_attention_mask")  # what has no label is padding
    stretto.accelerate(model, fused=fused, unpad=fused, loss=fused, standardize=cfg)
    sites = standardized(model)
    unpulled = learn_plainly(copy.deepcopy(plain), batch, StandardizeConfig(weight=0.0, axis=axis), sites)
    expected = learn_plainly(plain, batch, cfg, sites)
    stretto.hf.set_step(model, 0)
    loss = model(**batch).loss
    loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert max(errors(found, expected).values()) < (CLOSE if dtype == torch.float64 else 1e-4)
    assert torch.equal(unpulled["loss"], expected["loss"]) and max(errors(unpulled, expected).values()) > 0.1


def test_every_norm_but_those_of_heads_is_replaced() -> None:
    model, names = build("bert"), [name for name, _ in build("bert").named_parameters()]
    stretto.accelerate(model, standardize=True)
    assert [name for name, _ in model.named_parameters()] == names and len(standardized(model)) == 5
    lines = [line for line in str(stretto.hf.report(model)).splitlines() if line.startswith("standardize")]
    assert len(lines) == 4 and sum("another function without it" in line for line in lines) == 3
    assert "cls.predictions.transform.LayerNorm" in lines[-1] and "it is in a head" in lines[-1]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "marian"])
def test_affines_are_fused_as_norms_are(family: str) -> None:
    """With the sums before them, too: what a trial finds wrong would be left alone."""
    sums, lines = [], []
    for standardize in (False, True):
        model = accelerated(family, standardize=standardize)
        stretto.hf.set_step(model, 0)
        with count_sums() as counted:
            learn(model, draw_batch(family))
        sums.append(len(counted))
        lines.append([line for line in stretto.hf.report(model).lines if line.role != "standardize"])
    assert lines[0] == lines[1] and sums[0] == sums[1] and (sums[0] > 0 or family == "bert")


def test_only_weight_times_normalised_is_replaced() -> None:
    """Gemma's norms multiply by 1 + weight."""
    config = hf.GemmaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"standardize does not apply to GemmaForCausalLM: .*multiplies by 1 \+ weight"
    ):
        stretto.accelerate(hf.GemmaForCausalLM(config), standardize=True)


def test_without_affine_nothing_is_left_of_a_norm() -> None:
    model = accelerated("gpt2", standardize={"affine": False, "weight": 0.0})
    stretto.hf.set_step(model, 0)
    found = learn(model, draw_batch("gpt2"))
    assert not any("ln_" in name for name in found) and found["loss"].isfinite()


def test_the_weight_follows_its_schedule_and_the_share_of_a_batch() -> None:
    model = accelerated("gpt2", standardize={"weight": 6.0, "warmup": 2, "final": 0.5}, steps=10)
    channels = 5 * 32

    def factor(step: int, **options: Any) -> float:
        stretto.hf.set_step(model, step, **options)
        return float(next(m for m in model.modules() if hasattr(m, "stretto_tokens")).stretto_tokens.rule.factor)

    assert factor(0) == pytest.approx(3.0 / channels) and factor(1, share=0.25) == pytest.approx(1.5 / channels)
    assert factor(10) == pytest.approx(3.0 / channels) and factor(20, steps=38) == pytest.approx(4.5 / channels)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert factor(1, scaler=scaler) == pytest.approx(48.0 / channels)


def test_evaluation_shows_the_loss_of_the_task() -> None:
    model = accelerated("gpt2", standardize={"warmup": 0})
    stretto.hf.set_step(model, 0)
    assert learn(model.eval(), draw_batch("gpt2"))["loss"] == pytest.approx(
        float(learn(model.train(), draw_batch("gpt2"))["loss"]), rel=1e-6
    )


# Together, and in the ways models are run.

BOTH: dict[str, Any] = {"layer_drop": HALF, "standardize": {"warmup": 0, "weight": 20.0, "stride": 1}}


def make_both(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return accelerated(family, dtype, make=build_deep, **BOTH, **options)


@pytest.mark.parametrize("family", ["gpt2", "mbart"])
def test_both_together(family: str) -> None:
    """A layer that is left out is not pulled either."""
    cfg = StandardizeConfig(**BOTH["standardize"])
    for fused in (False, True):
        model, plain = make_both(family, torch.float64, fused=fused), build_deep(family, torch.float64)
        stretto.hf.set_step(model, 1)
        chosen = factors(model)
        assert any(0.0 in of_layers for of_layers in chosen.values())
        found = learn(model, draw(family))
        found.pop("logits")
        sites = standardized(model)
        left = [
            name
            for name in sites
            for stack, of in chosen.items()
            for layer, factor in zip(layers_of(model, stack), of, strict=True)
            if factor == 0.0 and model.get_submodule(name) in layer.modules()
        ]
        with scaled_by_hand(plain, chosen):
            expected = learn_without(plain, draw(family), cfg, sites, left)
        assert max(errors(found, {name: expected[name] for name in found}).values()) < CLOSE


def learn_without(
    model: nn.Module, batch: Batch, cfg: StandardizeConfig, sites: list[str], left: list[str]
) -> dict[str, Tensor]:
    """Those that are left out get another norm than all others: none, and count for the mean."""
    kept = [name for name in sites if name not in left]
    share = count_channels(model, kept) / count_channels(model, sites)
    return learn_plainly(model, batch, StandardizeConfig(weight=cfg.weight * share, axis=cfg.axis, stride=1), kept)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "mbart"])
def test_recomputed_layers(family: str, reentrant: bool) -> None:
    found = []
    for recomputed in (False, True):
        model = make_both(family, torch.float64)
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        stretto.hf.set_step(model, 1)
        found.append(learn(model, draw(family)))
    assert max(errors(found[1], found[0]).values()) < CLOSE


def test_compiled_layers() -> None:
    """Each by itself: which of them work is decided outside."""
    found = []
    torch._dynamo.reset()
    for compiled in (False, True):
        model = make_both("gpt2", torch.float64, unpad=False)
        for layer in layers_of(model, "transformer") if compiled else ():
            layer.compile(backend="aot_eager")
        for step in range(3):
            stretto.hf.set_step(model, step)
            found.append(learn(model, draw("gpt2")))
    assert all(max(errors(a, b).values()) < CLOSE for a, b in zip(found[:3], found[3:], strict=True))


def parameters_after(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "mbart"])
def test_steps_are_those_of_a_plain_loop(family: str, accumulate: int) -> None:
    """A layer that is left out has no gradient, also where those of several batches are added up."""
    after, patterns = [], set()
    for by_step in (True, False):
        model = make_both(family)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = FlatAdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.1)
        step = Step(model, optimizer, accumulate=accumulate)
        for i in range(4):
            batches = [draw(family, seed=2 * i + j) for j in range(accumulate)]
            if by_step:
                for batch in batches:
                    step(batch)
            else:
                stretto.hf.set_step(model, i, 1 / accumulate)
                for batch in batches:
                    (model(**batch).loss / accumulate).backward()
                optimizer.step()
                optimizer.zero_grad()
            patterns.add(str(factors(model)))
        after.append(parameters_after(model))
    assert len(patterns) > 1 and step.updates == 0
    assert max(errors(*after).values()) < 1e-5


def test_a_recorded_update_is_one_of_its_pattern() -> None:
    """A graph is chosen by the shape of what is planned."""
    model = make_both("gpt2")
    step = Step(model, FlatAdamW(model.parameters(), lr=0.0))
    seen: list[Any] = []
    learn = step.update.learn
    step.update.learn = lambda batch: seen.append(batch) or learn(batch)  # type: ignore[method-assign]
    for _ in range(6):
        step(draw("gpt2"))
    shapes = {shape_of(planned): str(planned.pattern) for planned in seen}
    assert 1 < len(shapes) == len({str(planned.pattern) for planned in seen}) <= LAYERS + 1
    assert plan(draw("gpt2"), *outermost(model)).pattern == {}  # type: ignore[union-attr]


def test_the_trainer_knows_the_step(tmp_path: Path) -> None:
    """Micro-batches of one update leave out the same layers, and weigh less; the run's length is the trainer's."""
    model = accelerated("gpt2", make=build_deep, layer_drop={"theta": 0.3, "gamma": 0.0}, standardize={"warmup": 0})
    seen: list[tuple[int, Any, float]] = []

    class Noting(Trainer):
        def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tokens: Any = next(m for m in model.modules() if hasattr(m, "stretto_tokens")).stretto_tokens
            factor = float(tokens.rule.factor) * tokens.rule.num_channels
            seen.append((self.state.global_step, factors(model), factor))
            return super().compute_loss(model, *args, **kwargs)

    trainer = make(Noting, model, tmp_path, "gpt2", max_steps=5, gradient_accumulation_steps=2)
    trainer.train()
    assert len(seen) == 10 and [weight for *_, weight in seen] == pytest.approx([0.5] * 10)
    expected = accelerated("gpt2", make=build_deep, layer_drop={"theta": 0.3, "gamma": 0.0}, steps=5)
    for step, pattern, _ in seen:
        stretto.hf.set_step(expected, step)
        assert pattern == factors(expected)
    assert len({str(pattern) for _, pattern, _ in seen}) > 1
    assert trainer.args.ddp_find_unused_parameters


def test_the_meter_counts_the_work_that_was_done() -> None:
    """A model that leaves out all layers but the first counts as a model of one layer."""
    model = accelerated("gpt2", make=build_deep, layer_drop=HALF)
    meter, cfg = SpeedMeter(model, torch.device("cpu"), 1), find_counterpart(model)
    assert cfg is not None
    for number, gate in enumerate(all_gates(model)):
        gate.factor = 0.0 if number else 1.0
    meter.count(draw("gpt2"))
    counts = Counts(tokens=9 + 3 + 6, slots=27, labels=18, pairs=81 + 9 + 36)
    assert meter.count_flops() == training_flops(replace(cfg, layers=1), counts) < training_flops(cfg, counts)


def test_what_cannot_be_recorded_is_said() -> None:
    model = accelerated("gpt2", make=build_deep, layer_drop=HALF | {"sampling": "bernoulli"})
    assert "'bernoulli' has too many patterns to record" in find_obstacle(model)
    assert find_obstacle(make_both("gpt2")) == ""
    assert find_obstacle(make_both("gpt2"), several=True).startswith("layers that are left out have no gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("family", STACKS)
def test_graphs_give_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_step() -> Step:
        model = stretto.accelerate(build_deep(family, torch.bfloat16).to("cuda"), **BOTH)
        return Step(model, FlatAdamW(model.parameters(), lr=1e-3, weights="split"), clip=1.0)

    replays = replay_and_compare(make_step, [draw(family, seed=i) for i in range(40)], monkeypatch)
    assert len(replays) > 10 and len(set(replays)) > 1


def compare_steps(rank: int) -> None:
    """The updates of one process with the batches of both."""
    models = [make_both("gpt2"), make_both("gpt2")]
    together, alone = (FlatAdamW(m.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1) for m in models)
    step = Step(models[0], together)
    for number in range(6):
        step(draw("gpt2", seed=2 * number + rank))
        stretto.hf.set_step(models[1], number, share=0.5)
        for seed in range(2):
            (models[1](**draw("gpt2", seed=2 * number + seed)).loss / 2).backward()
        alone.step()
        alone.zero_grad()
    assert max(errors(*map(parameters_after, models)).values()) < 1e-5


def run_rank(rank: int, port: int) -> None:
    """Each with generators and batches of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    inner, alone = make_both("gpt2"), make_both("gpt2")
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    torch.manual_seed(rank)
    for step in range(4):
        model.zero_grad()
        alone.zero_grad()
        stretto.hf.set_step(model, step)
        stretto.hf.set_step(alone, step, share=0.5)
        model(**draw("gpt2", seed=rank)).loss.backward()
        for seed in range(2):
            (alone(**draw("gpt2", seed=seed)).loss / 2).backward()
        found, expected = (
            {name: p.grad for name, p in m.named_parameters() if p.grad is not None} for m in (inner, alone)
        )
        assert max(errors(found, expected).values()) < 1e-5
    compare_steps(rank)
    torch.distributed.barrier()  # as in test_modes.py
    del model
    torch.distributed.destroy_process_group()


@pytest.mark.dist
def test_two_processes() -> None:
    """They leave out the same layers, which then have no gradient, and learn what one process learns."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (port,), nprocs=2)
