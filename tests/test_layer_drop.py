"""Layer dropping: the formulas, what a block that is left out does (nothing), and what the others do instead.

Two processes are in tests/distributed/test_layer_drop.py.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from stretto import checkpoint
from stretto.batch import Batch, Counts, Depth, Part, Share, copy_into, pack, shape_of
from stretto.config import FusedConfig, LayerDropConfig, TechniquesConfig, build_config
from stretto.errors import CheckpointError, ConfigError
from stretto.flops import training_flops
from stretto.model import Block, Model, build_model, sites
from stretto.ops.residual import add_ref
from stretto.techniques.layer_drop import (
    LEVELS,
    LayerDrop,
    choose_systematically,
    level_at,
    select,
)
from stretto.techniques.technique import At
from stretto.train import train
from tests.layer_drops import BLOCKS, KINDS, TOTAL, make_batches, make_drop
from tests.models import DEVICE, apply_techniques, build, learn, recompute_blocks
from tests.runs import MakeConfig

# The schedule.


@pytest.mark.parametrize("theta", [0.1, 0.5, 0.9, 1.0])
def test_theta_decays_as_the_paper_says(theta: float) -> None:
    cfg = LayerDropConfig(theta=theta, gamma=0.03)
    values = [cfg.theta_at(step, TOTAL) for step in range(200)]
    assert values == [(1 - theta) * math.exp(-0.03 * step) + theta for step in range(200)] and values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert replace(cfg, gamma=0.0).theta_at(10, TOTAL) == (1 - theta) * math.exp(-1) + theta  # 100 / T


def test_the_reverse_schedule_ends_with_all_blocks() -> None:
    cfg = LayerDropConfig(theta=0.4, schedule="raptr")
    values = [cfg.theta_at(step, TOTAL) for step in range(TOTAL + 1)]
    assert values[0] == 0.4 and values[TOTAL // 2] == pytest.approx(0.7) and values[-1] == 1.0
    assert values == sorted(values) and level_at(cfg, TOTAL - 1, TOTAL) == 1.0


@pytest.mark.parametrize("schedule", ["decay", "raptr"])
def test_it_changes_in_few_steps_that_stay_close(schedule: Any) -> None:
    cfg = LayerDropConfig(schedule=schedule)
    exact, levels = ([f(cfg, step, TOTAL) for step in range(TOTAL)] for f in (LayerDropConfig.theta_at, level_at))
    assert set(levels) == {1 - i / 16 for i in range(LEVELS + 1)}
    assert max(abs(a - b) for a, b in zip(exact, levels, strict=True)) <= 0.5 / LEVELS / 2 + 1e-12


@pytest.mark.parametrize(
    ("num_blocks", "text", "algorithm"), [(12, 8.75, 9.25), (24, 17.75, 18.25), (48, 35.75, 36.25)]
)
def test_expected_depth(num_blocks: int, text: float, algorithm: float) -> None:
    found = {index: LayerDropConfig(index=index).keep_probabilities(0.5, num_blocks) for index in ("text", "algorithm")}
    assert found["text"] == pytest.approx([1 - (i + 1) / (2 * num_blocks) for i in range(num_blocks)], abs=1e-15)
    assert found["algorithm"][0] == 1.0 and found["algorithm"][1:] == found["text"][:-1]
    assert sum(found["text"]) == pytest.approx(text) and sum(found["algorithm"]) == pytest.approx(algorithm)


# The draws.


def expectations(probabilities: Sequence[float]) -> list[float]:
    """The exact mean of each block's gate under systematic sampling: the choice changes at few values of u."""
    sums = itertools.accumulate(1 - p for p in probabilities)
    edges = sorted({0.0, 1.0, *(math.ceil(s) - s for s in sums)})
    found = [0.0] * len(probabilities)
    for low, high in itertools.pairwise(edges):
        for i, works in enumerate(choose_systematically(probabilities, (low + high) / 2)):
            found[i] += works * (high - low)
    return found


def assert_unbiased(gates: Sequence[float], scales: Sequence[float]) -> None:
    assert [gate * scale for gate, scale in zip(gates, scales, strict=True)] == pytest.approx(
        [1] * len(gates), abs=1e-6
    )


@pytest.mark.parametrize("index", ["text", "algorithm"])
@pytest.mark.parametrize("num_blocks", [12, 24, 48])
def test_a_gate_times_its_scale_is_1_on_average(num_blocks: int, index: Any) -> None:
    cfg = LayerDropConfig(index=index)
    probabilities = cfg.keep_probabilities(0.5, num_blocks)
    gates = expectations(probabilities)
    drop = make_drop(cfg, replace(KINDS["decoder"], layers=num_blocks))
    scales = drop.prepare(make_batches(KINDS["decoder"])[0], At(TOTAL, 0)).depths["decoder"].scales.tolist()
    assert_unbiased(gates, scales)
    later = [1 / (p - 0.5 / num_blocks) for p in probabilities]  # DeepSpeed's: of the next block
    assert 1 + 0.5 / num_blocks < gates[0] * later[0] < 1 + 0.6 / num_blocks
    with pytest.raises(AssertionError):
        assert_unbiased(gates, later)


def test_systematic_sampling_leaves_out_as_many_blocks_every_time() -> None:
    for num_blocks in (12, 24, 48):
        probabilities = LayerDropConfig().keep_probabilities(0.5, num_blocks)
        patterns = {tuple(choose_systematically(probabilities, i / 5000)) for i in range(5000)}
        dropped = sum(1 - p for p in probabilities)
        assert {num_blocks - sum(p) for p in patterns} <= {math.floor(dropped), math.ceil(dropped)}
        assert len(patterns) <= num_blocks + 1


@pytest.mark.parametrize("sampling", ["systematic", "bernoulli"])
def test_frequencies_over_steps(sampling: Any) -> None:
    drop, num, size = make_drop(LayerDropConfig(sampling=sampling)), 4000, 12
    probabilities = drop.cfg.keep_probabilities(0.5, size)
    gates = np.zeros((num, size))
    for step in range(num):
        gates[step, list(drop.draw_blocks("decoder", probabilities, step))] = 1
    p = np.array(probabilities)
    assert (np.abs(gates.mean(0) - p) <= 4 * np.sqrt(p * (1 - p) / num)).all()
    if sampling == "bernoulli":  # each by itself
        correlation = np.corrcoef(gates[:, 1:].T) - np.eye(size - 1)
        assert np.abs(correlation).max() < 4.5 / math.sqrt(num)


def test_draws_depend_on_seed_step_stack_and_block_alone() -> None:
    cfg = KINDS["encoder-decoder"]
    batch, _ = make_batches(cfg)

    def draw(gate: Any, step: int, index: int, seed: int = 0) -> Any:
        drop = make_drop(LayerDropConfig(gate=gate, theta=0.3, schedule="constant", sampling="bernoulli"), cfg, seed)
        depths = drop.prepare(batch, At(step, index)).depths
        return {
            (name, i): None if part.subset is None else tuple(part.subset.tokens.tolist())
            for name, depth in depths.items()
            for i, part in depth.parts.items()
        }

    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    steps = [draw("batch", step, 0) for step in range(40)]
    subsets = [draw("sample", 0, index) for index in range(10)]
    assert before[1:] == (random.getstate(), repr(np.random.get_state())) and torch.equal(
        before[0], torch.get_rng_state()
    )
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert steps == [draw("batch", step, 7) for step in range(40)], "a process has other micro-batches, not other gates"
    assert subsets == [draw("sample", 3, index) for index in range(10)]
    assert steps != [draw("batch", step, 0, seed=1) for step in range(40)]
    assert len({tuple(step) for step in steps}) > 10 and len({tuple(s.items()) for s in subsets}) == 10
    assert any((("encoder", 3) in step) != (("decoder", 3) in step) for step in steps), "stacks draw on their own"


# What blocks do.


def alone(model: Model, batch: Batch, work: dict[str, dict[int, float]], params: dict[str, Tensor]) -> Tensor:
    """The loss of one sequence by a network of the blocks that work on it: another way to the same numbers, in which
    scales are part of the matrices that end a branch. Gradients go to the parameters of `model`."""
    scaled, network = dict(params), copy.deepcopy(model)
    for stack, scales in work.items():
        for name in params:
            parts = name.split(".")
            if parts[0] == stack and parts[1] == "blocks" and parts[-2] in ("out", "down"):
                scaled[name] = params[name] * scales.get(int(parts[2]), 1.0)
        blocks: Any = network.get_submodule(stack).blocks
        for i in range(len(blocks)):
            if i not in scales:
                blocks[i].forward = lambda x, *_: x
    return torch.func.functional_call(network, scaled, (batch,))


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("gate", ["batch", "sample"])
@pytest.mark.parametrize("name", KINDS)
def test_each_sequence_goes_through_its_blocks_alone(name: str, gate: Any, form: str) -> None:
    """Plain and fused; the branches are scaled, and a block that is left out has no gradient."""
    cfg = KINDS[name]
    drop = make_drop(LayerDropConfig(gate=gate, theta=0.3, schedule="constant", index="text"), cfg)
    together, rows = make_batches(cfg, form)
    batch = drop.prepare(together, At(3, 3))
    assert any(len(depth.parts) < BLOCKS or depth.parts[3].subset is not None for depth in batch.depths.values())

    model = build(cfg, dtype=torch.float64)
    params = {key: value.detach().requires_grad_() for key, value in model.named_parameters()}
    if cfg.kind == "vit":
        rows = [replace(row, pixels=row.pixels.double()) for row in rows]  # type: ignore[union-attr]
    loss = sum(alone(model, row, works_on(batch, drop, i), params) for i, row in enumerate(rows))
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    wanted = {"loss": loss.detach()} | {k: g for k, g in zip(params, gradients, strict=True) if g is not None}

    for fused in (None, FusedConfig()):
        found = learn(build(cfg, fused, torch.float32 if fused else torch.float64), batch.to(DEVICE))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            scale = float(value.abs().max())
            error = float((found[key].double() - value).abs().max()) / max(scale, 1e-2)
            assert error < (1e-4 if fused else 1e-9), (key, error, fused)


def works_on(batch: Batch, drop: LayerDrop, row: int) -> dict[str, dict[int, float]]:
    """Stack -> block -> scale, for one sequence."""
    work: dict[str, dict[int, float]] = {}
    for stack, depth in batch.depths.items():
        own, _ = drop.find_layouts(batch, stack)
        tokens = range(int(own.offsets[row]), int(own.offsets[row + 1]))
        work[stack] = {
            i: float(depth.scales[i])
            for i, part in depth.parts.items()
            if part.subset is None or tokens[0] in part.subset.tokens
        }
    return work


@pytest.mark.parametrize("fused", [None, FusedConfig()], ids=["plain", "fused"])
def test_scaled_as_a_whole_a_block_is_right_on_average(fused: FusedConfig | None) -> None:
    """Over all choices of two sequences out of four, and of a gate. Scaled by branches it is not: an MLP bends."""
    cfg = KINDS["decoder"]
    batch, _ = make_batches(cfg)
    assert batch.inputs is not None
    dtype = torch.float32 if fused else torch.float64
    model, layout = build(cfg, fused, dtype), batch.inputs.layout
    x = torch.randn(int(layout.offsets[-1]), cfg.width, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run(share: Share) -> Tensor:
        out = model.get_submodule("decoder.blocks.0")(x, layout, None, share=share)
        if fused is None:
            return out
        stream, pending = out  # what is pending is the last branch
        if pending.out is None:
            return stream
        return add_ref(pending.out, stream, pending.bias, 0.0, None, pending.scale, pending.places)

    def average(whole: bool) -> Tensor:
        subsets = [Part(select(layout, torch.tensor(rows))) for rows in itertools.combinations(range(4), 2)]
        outs = [run(Share(part, torch.tensor(2.0), whole)) for part in subsets]
        for part, out in zip(subsets, outs, strict=True):
            assert part.subset is not None
            others = torch.ones(len(x), dtype=torch.bool).index_fill(0, part.subset.tokens, False)
            assert torch.equal(out[others], x[others])
        return torch.stack(outs).mean(0)

    full, bound = run(Share()), 1e-5 if fused else 1e-12
    assert float((average(whole=True) - full).detach().abs().max()) < bound
    assert float((average(whole=False) - full).detach().abs().max()) > 1e-3
    halved = 0.5 * run(Share(scale=torch.tensor(2.0), whole=True)) + 0.5 * x
    assert float((halved - full).detach().abs().max()) < bound


@pytest.mark.parametrize("gate", ["batch", "sample"])
@pytest.mark.parametrize("scale", ["branch", "update"])
def test_activation_checkpointing(gate: Any, scale: Any) -> None:
    cfg = replace(KINDS["encoder-decoder"], dropout=0.2, activation_dropout=0.1, attention_dropout=0.1)
    drop = make_drop(LayerDropConfig(gate=gate, theta=0.3, schedule="constant", scale=scale), cfg)
    batch = drop.prepare(make_batches(cfg)[0], At(1, 1))
    for fused in (None, FusedConfig()):
        model = build(cfg, fused)
        kept = learn(model, batch)
        again = learn(recompute_blocks(model), batch)
        assert kept.keys() == again.keys() and all(torch.equal(kept[key], again[key]) for key in kept)


@pytest.mark.parametrize("fused", [None, FusedConfig()], ids=["plain", "fused"])
@pytest.mark.parametrize("gate", ["batch", "sample"])
def test_blocks_are_compiled_once_whatever_the_pattern(gate: Any, fused: FusedConfig | None) -> None:
    cfg, schedule = KINDS["decoder"], LayerDropConfig(sampling="bernoulli", gamma=0.1, gate=gate)
    drop, (batch, _) = make_drop(schedule, cfg), make_batches(cfg, "padded")
    batches = [drop.prepare(batch, At(step, step)) for step in range(0, 60, 6)]
    assert len({shape_of(b) for b in batches}) > 3  # patterns of blocks, or numbers of sequences that they work on
    eager = [learn(build(cfg, fused), b)["loss"] for b in batches]
    model = build(cfg, fused)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    for site in sites(model)["block"]:
        block = model.get_submodule(site)
        block.forward = torch.compile(block.forward, backend=counter)
    torch.testing.assert_close([learn(model, b)["loss"] for b in batches], eager)
    # With a scale and without; fused, the first block that works has nothing to add, and later ones add what is for all
    # tokens or for some; a part may have two sizes or more.
    assert counter.frame_count <= {"batch": 4 if fused else 2, "sample": 8 if fused else 6}[gate]


def test_a_recorded_step_is_told_apart_by_its_pattern() -> None:
    drop, (batch, _) = make_drop(LayerDropConfig(theta=0.3, schedule="constant")), make_batches(KINDS["decoder"])
    shapes: dict[Any, set[Any]] = {}
    for step in range(60):
        one = drop.prepare(batch, At(step, step))
        shapes.setdefault(tuple(one.depths["decoder"].parts), set()).add(shape_of(one))
    assert 1 < len(shapes) <= BLOCKS + 1 and all(len(found) == 1 for found in shapes.values())
    assert len(set.union(*shapes.values())) == len(shapes)
    sample = make_drop(LayerDropConfig(gate="sample", theta=0.3, schedule="constant"))
    padded, _ = make_batches(KINDS["decoder"], "padded")
    first, second = (sample.prepare(padded, At(0, index)) for index in (0, 1))
    assert shape_of(first) == shape_of(second)
    own = pack(first)
    copy_into(own, second)
    a, b = (x.depths["decoder"].parts[3].subset for x in (own, second))
    assert a is not None and b is not None and torch.equal(a.tokens, b.tokens)


def test_flops_are_those_of_the_blocks_that_work() -> None:
    counts = Counts(100, 100, 90, 1000, 80, 80, 900, 950)
    for cfg in (KINDS["decoder"], KINDS["encoder"], KINDS["encoder-decoder"], KINDS["vit"]):
        depth = Depth(torch.ones(BLOCKS), {1: Part(), 3: Part()}, False, 2.0)
        both = {"encoder": depth, "decoder": depth}
        assert training_flops(cfg, counts, both) == training_flops(replace(cfg, layers=2), counts)


# Runs.


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, int]]]:
    """One entry for each block that runs: whether it is training, and which one it is."""
    seen: list[tuple[bool, int]] = []
    forward = Block.forward

    def watched(self: Block, *args: Any, **kwargs: Any) -> Any:
        seen.append((self.training, id(self)))
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", watched)
        yield seen


STEPS = 8
RUN: dict[str, Any] = {"model__layers": 6, "train__steps": STEPS, "optim__schedule": "constant"}


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_left_out_does_not_run_nor_learn_and_evaluation_uses_all(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """With two micro-batches a step. How often each weight was updated is in the optimizer's state."""
    drop = {"theta": 0.2, "schedule": "constant", "index": "text"}
    config = make_config(**RUN, train__micro_batches=2, techniques__layer_drop=drop, techniques__fused=fused)
    with calls(monkeypatch) as seen:
        folder = train(config)
    cfg = config.techniques.layer_drop
    assert cfg is not None
    layer_drop = make_drop(cfg, replace(KINDS["decoder"], layers=6), config.run.seed)
    works = [list(layer_drop.draw_blocks("decoder", cfg.keep_probabilities(0.2, 6), step)) for step in range(STEPS)]
    assert 0 < sum(map(len, works)) < STEPS * 6
    if not fused:  # fused blocks have a forward of their own
        assert sum(training for training, _ in seen) == 2 * sum(map(len, works))
        uses = Counter(block for training, block in seen if not training)  # in evaluation and in the report's sample
        assert uses and all(number % 6 == 0 for number in Counter(uses.values()).values())
    moments = checkpoint.load(folder / "checkpoints", STEPS).moments
    steps = [int(moments.get(f"step/decoder.blocks.{i}.mlp.up.weight", torch.zeros(()))) for i in range(6)]
    assert steps == [sum(i in step for step in works) for i in range(6)]


@pytest.mark.parametrize("fused", [False, True])
def test_theta_of_1_changes_no_bit(make_config: MakeConfig, tmp_path: Path, fused: bool) -> None:
    def run(name: str, **changes: Any) -> checkpoint.Snapshot:
        config = make_config(**RUN, run__dir=str(tmp_path / name), techniques__fused=fused, **changes)
        return checkpoint.load(train(config) / "checkpoints", STEPS)

    plain, same = run("off"), run("on", techniques__layer_drop={"theta": 1.0})
    other = run("less", techniques__layer_drop={"theta": 0.5, "schedule": "constant"})
    assert all(torch.equal(plain.weights[key], same.weights[key]) for key in plain.weights)
    assert any(not torch.equal(plain.weights[key], other.weights[key]) for key in plain.weights)


@pytest.mark.parametrize("gate", ["batch", "sample"])
def test_a_run_resumed_in_mid_schedule_ends_with_the_same_bits(
    make_config: MakeConfig, tmp_path: Path, gate: str
) -> None:
    drop = {"gate": gate, "gamma": 0.3}

    def run(name: str, steps: int, resume: bool = False, **changes: Any) -> checkpoint.Snapshot:
        changes = RUN | {"train__steps": steps, "techniques__layer_drop": drop} | changes
        config = make_config(run__dir=str(tmp_path / name), **changes)
        return checkpoint.load(train(config, resume) / "checkpoints", steps)

    whole = run("whole", STEPS)
    run("parts", 4)
    with pytest.raises(CheckpointError, match=r"techniques\.layer_drop was .*'gamma': 0\.3.*, is None"):
        run("parts", STEPS, resume=True, techniques__layer_drop=False)
    parts = run("parts", STEPS, resume=True)
    for mine, theirs in ((whole.weights, parts.weights), (whole.moments, parts.moments)):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    model = build_model(replace(KINDS["encoder"], norm_order="post"))
    with pytest.raises(
        ConfigError, match=r"techniques\.layer_drop: a post-norm block .* use model\.norm_order = 'pre'"
    ):
        apply_techniques(model, TechniquesConfig(layer_drop=LayerDropConfig()))
    for theta in (0.0, 1.5, -1):
        with pytest.raises(ConfigError, match=r"techniques\.layer_drop\.theta = .* must be above 0"):
            build_config({"techniques": {"layer_drop": {"theta": theta}}})
