"""Models whose norms gave way to affines and a loss: what is pulled, what is not, and what is left in the end."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from stretto import checkpoint
from stretto.batch import Batch, find_real
from stretto.buckets import to_bucket
from stretto.cli import app
from stretto.config import FusedConfig, LayerDropConfig, ModelConfig, StandardizeConfig, TechniquesConfig, build_config
from stretto.data import open_data
from stretto.errors import CheckpointError, ConfigError
from stretto.mesh import Mesh
from stretto.model import Model, build_model, sites
from stretto.ops.affine import standardization_loss
from stretto.optim import learning_rate, set_learning_rate
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.score import measure
from stretto.techniques.standardize import BRANCH_ENDS, Affine, Pressure, Standardize, fold, weight_at
from stretto.techniques.technique import At, Context
from stretto.train import build as build_parts
from stretto.train import complete, run_step, train
from stretto.trained import load_trained
from stretto.weights import initialise, put
from tests.layer_drops import make_drop
from tests.models import KINDS, Sample, apply_techniques, collate, get_inputs, make_batch, materialise, recompute_blocks
from tests.runs import MakeConfig

CPU = torch.device("cpu")
FACTOR = 0.3
COARSE = StandardizeConfig(stride=3)


def build(
    cfg: ModelConfig, how: StandardizeConfig = COARSE, fused: bool = False, dtype: torch.dtype = torch.float64
) -> Model:
    """Builds a model with affines that do something, and a loss of weight FACTOR per site."""
    model = build_model(cfg)
    chosen = TechniquesConfig(fused=FusedConfig() if fused else None, standardize=how)
    apply_techniques(model, chosen, CPU)
    materialise(model, cfg, 0, CPU)
    for i, p in enumerate(model.parameters()):
        p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.1)
    press(model, FACTOR, dtype)
    return model.to(dtype).train()


def press(model: Model, factor: float | None, dtype: torch.dtype = torch.float64) -> None:
    find_pressure(model).factor = None if factor is None else torch.tensor(factor, dtype=dtype)


def find_pressure(model: Model) -> Pressure:
    return next(site.pressure for site in model.modules() if isinstance(site, Affine))


def batch_for(cfg: ModelConfig, form: str = "packed", dtype: torch.dtype = torch.float64) -> Batch:
    batch = make_batch(cfg, form).to(CPU)
    return batch if batch.pixels is None else replace(batch, pixels=batch.pixels.to(dtype))


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=atol, msg=partial("{}: {}".format, name))


def by_autograd(model: Model, batch: Batch, axis: str, every: bool = True) -> dict[str, Tensor]:
    """The loss as a term, as the paper has it; `every`: of all sites."""
    terms: list[Tensor] = []

    def note(site: nn.Module, args: Any, y: Tensor) -> None:
        assert isinstance(site, Affine) and site.rows is not None
        terms.append(standardization_loss(y, site.rows.to(y.dtype), axis))

    hooks = [site.register_forward_hook(note) for site in model.modules() if isinstance(site, Affine)]
    press(model, None)
    loss = model(batch)
    assert len(terms) >= len(hooks) or not every  # an embedding that both sides share is two sites
    found = gradients(model, loss + FACTOR * torch.stack(terms).sum())
    for hook in hooks:
        hook.remove()
    press(model, FACTOR)
    return found


@pytest.mark.parametrize(
    ("name", "axis"), [*((name, "token") for name in KINDS), ("decoder", "channel"), ("encoder", "layer")]
)
def test_gradients_are_those_of_the_loss_as_a_term(name: str, axis: Any) -> None:
    """On every kind of model, plain and with `fused`."""
    cfg, how = KINDS[name], replace(COARSE, axis=axis)
    batch, model = batch_for(cfg), build(cfg, how)
    wanted = by_autograd(model, batch, axis)
    atol = 1e-9 if axis == "token" else 1e-4  # fp32 weights that sum to nearly 1
    assert_equal(gradients(model, model(batch)), wanted, atol)
    fused = build(cfg, how, fused=True)
    assert_equal(gradients(fused, fused(batch)), wanted, atol)
    press(model, 0.0)
    free = gradients(model, model(batch))
    assert max(float((free[key] - wanted[key]).abs().max()) for key in wanted) > 1e-3


@pytest.mark.parametrize(
    ("name", "fused"), [*((name, True) for name in KINDS if name != "vit"), ("decoder", False), ("encoder", False)]
)
def test_padding_and_filler_do_not_count(name: str, fused: bool) -> None:
    """With a stride of 1 the tokens that count are the same in all forms."""
    cfg, how = KINDS[name], replace(COARSE, stride=1)
    model = build(cfg, how, fused)
    packed = batch_for(cfg)
    wanted = gradients(model, model(packed))
    if not cfg.classes:  # filler is for language models
        filled = to_bucket(packed)
        assert filled.inputs is not None and packed.inputs is not None
        assert len(filled.inputs.ids) > len(packed.inputs.ids)
        assert int(find_real(filled.inputs.layout, len(filled.inputs.ids)).sum()) == len(packed.inputs.ids)
        assert_equal(gradients(model, model(filled)), wanted)
    padded = batch_for(cfg, "padded")
    assert_equal(gradients(model, model(padded)), wanted)
    layout = padded.inputs.layout if padded.inputs is not None else None
    assert layout is not None and layout.lengths is not None
    blind = replace(padded, inputs=replace(get_inputs(padded), layout=replace(layout, lengths=None)))
    found = gradients(model, model(blind))
    assert max(float((found[key] - wanted[key]).abs().max()) for key in wanted) > 1e-3


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "vit"])
@pytest.mark.parametrize("gate", ["batch", "sample"])
def test_blocks_that_work_on_a_part_of_a_batch_are_pulled_by_that_part(name: str, gate: Any) -> None:
    cfg = replace(KINDS[name], norm_order="pre", layers=3)
    drop = make_drop(LayerDropConfig(theta=0.3, schedule="constant", gate=gate), cfg)
    batch = drop.prepare(batch_for(cfg) if cfg.classes else to_bucket(batch_for(cfg)), At(0, 0))
    if gate == "sample":
        subsets = [part.subset for depth in batch.depths.values() for part in depth.parts.values() if part.subset]
        assert subsets and all(len(find_real(of.layout, len(of.tokens))) == len(of.tokens) for of in subsets)
    model, fused = build(cfg), build(cfg, fused=True)
    wanted = by_autograd(model, batch, "token", every=False)
    assert_equal(gradients(model, model(batch)), wanted)  # scales are fp32
    assert_equal(gradients(fused, fused(batch)), wanted)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_evaluation_knows_nothing_of_it(fused: bool) -> None:
    cfg = KINDS["decoder"]
    model, batch = build(cfg, fused=fused), batch_for(cfg)
    trained = gradients(model, model(batch))
    model.eval()
    pressed = gradients(model, model(batch))
    press(model, None)
    assert_equal(pressed, gradients(model, model(batch)), atol=0)
    assert torch.equal(model.train()(batch), model.eval()(batch))
    assert any(not torch.equal(trained[key], pressed[key]) for key in pressed)


def test_names_are_those_of_norms_and_without_affine_there_are_none() -> None:
    for cfg in KINDS.values():
        plain = build_model(cfg)
        assert build(cfg).state_dict().keys() == plain.state_dict().keys()
        norms = tuple(f"{name}." for name in sites(plain)["norm"])
        bare = build(cfg, replace(COARSE, affine=False))
        assert bare.state_dict().keys() == {key for key in plain.state_dict() if not key.startswith(norms)}
        assert not any(isinstance(module, nn.LayerNorm | nn.RMSNorm) for module in bare.modules())


def test_no_token_sees_the_future_or_another_sequence() -> None:
    cfg = KINDS["decoder"]
    model, batch = build(cfg), batch_for(cfg)
    assert batch.inputs is not None
    before = model.logits(batch)
    ids = batch.inputs.ids.clone()
    ids[5] = (ids[5] + 1) % cfg.vocab
    after = model.logits(replace(batch, inputs=replace(batch.inputs, ids=ids)))
    end = int(batch.inputs.layout.offsets[1])
    same = (before == after).all(1)
    assert same[:5].all() and not same[5] and same[end:].all()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_recomputed_blocks_are_pulled_once(fused: bool) -> None:
    cfg = KINDS["decoder"]
    model, batch = build(cfg, fused=fused), batch_for(cfg)
    wanted = gradients(model, model(batch))
    assert_equal(gradients(model, recompute_blocks(model)(batch)), wanted, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_compiled(fused: bool) -> None:
    """As train.build does it: the whole model, or each block. Without a break in it."""
    torch.compiler.reset()  # what other tests compiled counts towards its limit
    cfg = KINDS["decoder"]
    batches = [batch_for(cfg), make_longer(cfg)]
    eager, model = (build(cfg, fused=fused, dtype=torch.float32) for _ in range(2))
    press(eager, FACTOR, torch.float32)
    press(model, FACTOR, torch.float32)
    for module in [model.get_submodule(name) for name in sites(model)["block"]] if fused else [model]:
        module.forward = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    for factor in (FACTOR, 2 * FACTOR):
        for m in (eager, model):
            pressure = find_pressure(m)
            assert pressure.factor is not None
            pressure.factor.fill_(factor)
        for batch in batches:
            assert_equal(gradients(model, model(batch)), gradients(eager, eager(batch)), atol=1e-5)


def make_longer(cfg: ModelConfig) -> Batch:
    return collate(cfg, [Sample.draw(11, 3, seed=5), Sample.draw(9, 2, seed=6)])


@pytest.mark.parametrize("name", KINDS)
def test_folding_is_exact_and_leaves_no_norm(name: str) -> None:
    cfg = KINDS[name]
    for affine, dtype, bound in (
        (True, torch.float64, 1e-11),
        (False, torch.float64, 1e-11),
        (True, torch.float32, 1e-6),
    ):
        model = build(cfg, StandardizeConfig(affine=affine), dtype=dtype).eval()
        if dtype == torch.float32:  # weights as they begin, else the model itself magnifies rounding
            materialise(model, cfg, 0, CPU)
            for i, site in enumerate(module for module in model.modules() if isinstance(module, Affine)):
                random = torch.Generator().manual_seed(i)
                for p in site.parameters():
                    p.data.add_(torch.randn(p.shape, generator=random), alpha=0.1)
        folded = fold(model)
        assert not any(isinstance(module, nn.LayerNorm | nn.RMSNorm | Affine) for module in folded.modules())
        for form in ("packed", "padded"):
            batch = batch_for(cfg, form, dtype)
            found, wanted = folded.logits(batch).detach(), model.logits(batch).detach()
            assert float((found - wanted).abs().max()) < bound * max(1.0, float(wanted.abs().max()))


def test_a_channel_that_is_switched_off_in_the_stream_does_not_fold() -> None:
    model = build(KINDS["encoder"])
    site = model.get_submodule("embedding.norm")
    assert isinstance(site, Affine) and site.weight is not None
    site.weight.data[3] = 0.0
    with pytest.raises(CheckpointError, match=r"encoder\.blocks\.0\.attention\.out"):
        fold(model)


def test_the_weight_is_a_function_of_the_step() -> None:
    cfg = StandardizeConfig(weight=2.0, warmup=4, final=0.5)
    assert [weight_at(cfg, step, 12) for step in (0, 3, 4, 8, 12)] == [0.5, 2.0, 2.0, 1.5, 1.0]
    assert weight_at(StandardizeConfig(weight=2.0, warmup=0), 0, 5) == 2.0


@pytest.mark.parametrize("name", ["encoder", "encoder-decoder", "vit", "decoder"])
def test_branches_begin_smaller_by_the_root_of_their_number(name: str) -> None:
    cfg = KINDS[name]
    models = [build_model(cfg, "cpu") for _ in range(2)]
    for model, by_depth in zip(models, (False, True), strict=True):
        technique = Standardize(StandardizeConfig(depth_init=by_depth), Context(cfg, CPU, "fp32"))
        initialise(model, cfg, 0, put, technique.start_value)
    for (key, plain), (_, scaled) in zip(*(model.named_parameters() for model in models), strict=True):
        ratio = 1.0
        if key.endswith(BRANCH_ENDS) and name != "decoder":  # which begins like that anyway
            ratio = math.sqrt(6 if key.startswith("decoder") else 4)
        torch.testing.assert_close(plain, scaled * ratio)


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(folder) if "loss" in event}


def test_a_run_resumes_exactly_evaluates_and_folds(make_config: MakeConfig, tmp_path: Path) -> None:
    """In the middle of its warm-up, too."""
    config = make_config(
        train__steps=6, train__micro_batches=2, checkpoint__every=3, techniques__fused=True,
        techniques__standardize={"warmup": 5},
    )  # fmt: skip
    folder = train(config)
    before, whole = losses(folder), checkpoint.load(folder / "checkpoints", 6)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    train(config, resume=True)
    assert losses(folder) == before and len(before) == 6
    again = checkpoint.load(folder / "checkpoints", 6)
    assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights)
    scores = measure(folder, beam=1)
    assert exit_code("export", str(folder), str(tmp_path / "folded"), "--fold") == 0
    trained = load_trained(tmp_path / "folded", CPU)
    assert not any(isinstance(module, nn.LayerNorm | Affine) for module in trained.model.modules())
    assert trained.config.techniques.standardize is None and trained.config.model.norm == "none"
    assert measure(tmp_path / "folded", beam=1)["eval_loss"] == pytest.approx(scores["eval_loss"], abs=1e-5)
    with pytest.raises(CheckpointError, match=r"holds a model alone, by `stretto export --fold`: it cannot go on"):
        train(trained.config, resume=True)
    assert exit_code("export", str(folder), str(tmp_path / "theirs"), "--to", "hf") == ConfigError.exit_code


@torch.no_grad()
def measure_by_hand(model: Model, batch: Batch, stride: int) -> float:
    """A mean over the channels of all sites."""
    assert batch.inputs is not None
    real = find_real(batch.inputs.layout, len(batch.inputs.ids))
    counted = (real & (torch.arange(len(real)) % stride == 0)).float()
    rows, results = counted / counted.sum(), list[Tensor]()
    affines = [site for site in model.modules() if isinstance(site, Affine)]
    hooks = [site.register_forward_hook(lambda site, args, y: results.append(y)) for site in affines]
    model(batch)
    for hook in hooks:
        hook.remove()
    assert len(results) == len(affines) == 5
    return float(sum(standardization_loss(y, rows, "token") for y in results) / (5 * model.cfg.width))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_an_evaluation_line_has_the_value_of_the_loss(make_config: MakeConfig, fused: bool) -> None:
    """Without its weight, a mean over batches; in the middle of a run too, which it does not change."""
    how = {"stride": 3, "weight": 2.0, "warmup": 0}
    config = make_config(techniques__standardize=how, techniques__fused=fused, train__eval_every=4)
    folder = train(config)
    lines = {event["step"]: event["standardization_loss"] for event in read_events(folder) if "eval_loss" in event}
    assert list(lines) == [4, 6] and len(set(lines.values())) == 2
    data = open_data(config.data, seed=0, folder=folder / "data", image_size=0)
    for step, found in lines.items():
        model = load_trained(folder, CPU, step).model
        wanted = [measure_by_hand(model, data.eval_batch(i), 3) for i in range(config.train.eval_batches)]
        assert len(set(wanted)) == 2 and found == pytest.approx(sum(wanted) / 2, rel=1e-5)


def test_images_have_such_a_value_too(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (24, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(24) % 2)
    config = build_config(
        {
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "data": {"task": "images", "train": str(tmp_path / "images.npz"), "batch_size": 4, "held_out": 0.5},
            "model": {"preset": "vit-tiny", "image_size": 16, "layers": 1, "width": 16},
            "train": {"steps": 1},
            "techniques": {"standardize": True},
        }
    )
    (line,) = [event for event in read_events(train(config)) if "eval_loss" in event]
    assert line["standardization_loss"] > 0.0 and 0.0 <= line["accuracy"] <= 1.0


def test_there_is_no_such_value_without_it(make_config: MakeConfig) -> None:
    events = read_events(train(make_config(train__eval_every=4)))
    assert sum("eval_loss" in event for event in events) == 2
    assert not any("standardization_loss" in event for event in events)


def exit_code(*arguments: str) -> int:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code if result.exception is None else getattr(result.exception, "exit_code", 1)


def test_what_is_refused(make_config: MakeConfig) -> None:
    folder = train(make_config(train__steps=2))
    with pytest.raises(CheckpointError, match=r"techniques\.standardize was None"):
        train(make_config(train__steps=4, techniques__standardize=True), resume=True)
    assert exit_code("export", str(folder), str(folder / "x"), "--fold") == ConfigError.exit_code
    with pytest.raises(ConfigError, match="nothing to replace"):
        build(ModelConfig(vocab=8, norm="none"))
    for key, value in {"weight": -1.0, "stride": 0, "final": 2.0, "axis": "batch"}.items():
        with pytest.raises(ConfigError, match=rf"standardize\.{key}"):
            make_config(techniques__standardize={key: value})


def learn_python(folder: Path, steps: int, techniques: dict[str, Any], depth: float = 1.0) -> float:
    """A deep, narrow model of Python source whose matrices begin at 1 / sqrt(inputs) and tables at 1, those that end
    branches times `depth`. Returns the mean loss of the last 25 steps."""
    config = build_config({
        "run": {"dir": str(folder), "device": "cpu"},
        "data": {"train": str(folder / "text"), "seq_len": 48, "batch_size": 16, "join_documents": True},
        "model": {"layers": 8, "width": 64, "heads": 4, "max_len": 48, "activation": "gelu", "tied": False},
        "optim": {"lr": 3e-3, "warmup": 40, "schedule": "constant", "weight_decay": 0.0},
        "train": {"steps": steps, "non_finite": "skip"},
        "techniques": techniques,
    })  # fmt: skip
    data = open_data(config.data, seed=0, folder=folder / "data", image_size=0)
    config = complete(config, data, Mesh())
    parts, random = build_parts(config, Runtime(CPU), Mesh()), torch.Generator().manual_seed(0)
    for name, p in parts.model.named_parameters():
        if p.ndim == 2:
            scale = 1.0 if name.startswith("embedding") else p.shape[1] ** -0.5
            scale *= depth if name.endswith(BRANCH_ENDS) else 1.0
            put(p, scale * torch.randn(p.shape, generator=random))
    found = []
    for step in range(steps):
        batch = data.train_batch(step)
        set_learning_rate(parts.update.optimizer, learning_rate(config.optim, step, steps))
        loss, _ = run_step(parts, step, [(step, batch)], batch.counts.labels, 1)
        found.append(float(loss) / batch.counts.labels)
    return sum(found[-25:]) / 25


@pytest.fixture
def python_source(tmp_path: Path) -> Iterator[Path]:
    """And one thread: on products as small as these, two wait for each other on a busy machine."""
    (tmp_path / "text").mkdir()
    for module in ("argparse", "ast", "dataclasses", "inspect", "typing", "tarfile", "socket", "shutil", "subprocess"):
        shutil.copy(Path(os.__file__).parent / f"{module}.py", tmp_path / "text")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_network_that_diverges_without_norms_learns_as_with_them(python_source: Path) -> None:
    bare = learn_python(python_source, 50, {"standardize": {"weight": 0.0, "affine": False}})
    normed = learn_python(python_source, 250, {})
    ours = learn_python(python_source, 250, {"standardize": {"warmup": 40}}, depth=1 / math.sqrt(16))
    print(f"without norms {bare:.3f}, with them {normed:.3f}, with the technique {ours:.3f}")
    assert bare > 10 and normed < 2.5 and ours < normed + 0.25


@pytest.mark.slow
def test_the_loss_alone_saves_what_an_affine_alone_does_not(python_source: Path) -> None:
    """Where branches begin as large as all else."""
    affine = learn_python(python_source, 150, {"standardize": {"weight": 0.0}})
    pulled = learn_python(python_source, 150, {"standardize": {"weight": 10.0, "warmup": 0, "stride": 1}})
    print(f"affine alone {affine:.3f}, pulled {pulled:.3f}")
    assert affine > 100 and pulled < 20
