"""Schedules are pure functions of the step; decay touches matrices only; the flat AdamW is torch's."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto.build
from stretto import checkpoint
from stretto.config import FusedConfig, ModelConfig, OptimConfig
from stretto.model import build_model
from stretto.optim import FlatAdamW, clip_gradients, learning_rate, set_learning_rate
from stretto.report import read_events
from stretto.train import train
from tests.models import build_adamw
from tests.ops.checks import DEVICE, error
from tests.runs import MakeConfig


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.2 + 0.8 * 0.5),
        ("cosine", 110, 0.2),
        ("cosine", 500, 0.2),
        ("linear", 60, 0.6),
        ("linear", 110, 0.2),
        ("constant", 70, 1.0),
        ("wsd", 4, 0.5),
        ("wsd", 10, 1.0),
        ("wsd", 82, 1.0),
        ("wsd", 96, 0.6),
        ("wsd", 110, 0.2),
        ("inverse_sqrt", 9, 1.0),
        ("inverse_sqrt", 39, 0.5),
    ],
)
def test_known_values(schedule: str, step: int, expected: float) -> None:
    cfg = OptimConfig(lr=1.0, min_lr=0.2, warmup=10, schedule=schedule, decay=0.25)  # type: ignore[arg-type]
    assert learning_rate(cfg, step, 110) == pytest.approx(expected)


def test_a_stable_rate_does_not_know_how_long_the_run_is() -> None:
    """So a run of wsd may be made longer before it decays; with cosine every rate would have been another one."""
    wsd, cosine = (OptimConfig(warmup=10, schedule=name, decay=0.2) for name in ("wsd", "cosine"))
    short, long = ([learning_rate(wsd, step, total) for step in range(80)] for total in (100, 1000))
    assert short == long
    assert learning_rate(cosine, 50, 100) != learning_rate(cosine, 50, 1000)
    late = OptimConfig(lr=1.0, warmup=90, schedule="wsd", decay=0.5, min_lr=0.0)
    rates = [learning_rate(late, step, 100) for step in (89, 90, 95, 100)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.0]), "warm-up comes first, and what is left is for the decay"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_no_jump_and_never_above_the_peak(schedule: str, warmup: int) -> None:
    cfg = OptimConfig(lr=0.5, warmup=warmup, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(cfg, step, 50) for step in range(60)]
    assert max(rates) == pytest.approx(0.5) and min(rates) > 0
    assert all(later <= earlier + 1e-12 for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))


@pytest.mark.parametrize("fused", [None, FusedConfig()])
def test_matrices_decay_and_vectors_do_not(fused: FusedConfig | None) -> None:
    model = build_model(ModelConfig(vocab=8, width=8, heads=2, layers=1), "cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    build_adamw(model, OptimConfig(lr=0.5, weight_decay=0.1), fused).step()
    for name, parameter in model.named_parameters():
        expected = 0.95 if parameter.ndim == 2 else 1.0
        assert torch.allclose(parameter, torch.tensor(expected)), name
    assert math.isclose(model.get_parameter("embedding.token.weight")[0, 0].item(), 0.95, rel_tol=1e-6)


SHAPES = [(33, 17), (5, 7, 3), (301,), (1,), (), (0, 4), (2, 2500)]


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES]
    return [nn.Parameter(value.to(DEVICE, dtype)) for value in values]


def make_gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    scale = 10.0 ** (step % 5 - 3)
    return [(torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype) for shape in SHAPES]


def make_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]


def give(parameters: list[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if gradient is None else gradient.clone()


OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}


def close(one: Tensor, two: Tensor) -> None:
    """To one millionth of the largest element."""
    largest = two.detach().abs().max().item() if two.numel() else 0.0
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6 * largest)


class Mean(nn.Module):
    """Parameters as a module, for what takes one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.values = nn.ParameterList(parameters)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_flat_adamw_is_torchs(limit: float) -> None:
    """Twenty updates: odd shapes, a scalar, an empty tensor, two groups, a schedule, clipping that sometimes binds, and
    a parameter that has a gradient only now and then. In fp32 it is as near to torch in fp64 as torch in fp32 is."""

    def run(kind: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        parameters = make_parameters(dtype)
        optimizer = kind(make_groups(parameters), **OPTIONS)
        found = {"norm": torch.zeros(20, dtype=dtype)}
        for step in range(20):
            give(parameters, make_gradients(step, dtype))
            if step % 3 == 1:
                parameters[2].grad = None
            set_learning_rate(optimizer, 1e-2 / (step + 1))
            found["norm"][step] = clip_gradients(Mean(parameters), optimizer, limit)
            optimizer.step()
        states = [optimizer.state[p] for p in parameters]
        assert [float(state["step"]) for state in states] == [20, 20, 13, 20, 20, 20, 20]
        found["weight"] = torch.cat([p.detach().flatten() for p in parameters])
        return found | {key: torch.cat([s[key].flatten() for s in states]) for key in ("exp_avg", "exp_avg_sq")}

    flat, plain = run(FlatAdamW, torch.float32), run(torch.optim.AdamW, torch.float32)
    exact = run(torch.optim.AdamW, torch.float64)
    for key, value in exact.items():
        assert error(flat[key], value) <= 2 * error(plain[key], value) + 1e-7, key
    torch.testing.assert_close(flat["weight"], plain["weight"], rtol=1e-6, atol=1e-7)


def test_without_clipping_first_a_step_takes_gradients_as_they_are() -> None:
    mine, theirs = make_parameters(), make_parameters()
    flat, plain = FlatAdamW(make_groups(mine), **OPTIONS), torch.optim.AdamW(make_groups(theirs), **OPTIONS)
    for step in range(3):
        flat.clip(1e-3)  # of the step before: must not reach the next one
        flat.found_inf = torch.ones((), device=DEVICE)
        flat.step()
        del flat.found_inf
        for parameters, optimizer in ((mine, flat), (theirs, plain)):
            give(parameters, make_gradients(step))
            optimizer.step()
    for one, two in zip(mine, theirs, strict=True):
        close(one, two)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("weights", ["fp32", "split", "bf16"])
def test_what_is_not_finite_changes_nothing(weights: str, bad: float) -> None:
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    parameters = make_parameters(dtype)
    optimizer = FlatAdamW(make_groups(parameters), **OPTIONS, weights=weights)
    give(parameters, make_gradients(0, dtype))
    optimizer.step()
    before = [p.detach().clone() for p in parameters], copy.deepcopy(optimizer.state_dict()["state"])
    give(parameters, make_gradients(1, dtype))
    parameters[6].grad[0, 3] = bad  # type: ignore[index]
    assert not optimizer.clip(1.0).isfinite()
    optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(parameters, before[0], strict=True))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[n][key], value) for n, entry in before[1].items() for key, value in entry.items())
    give(parameters, make_gradients(1, dtype))
    optimizer.clip(1.0)
    optimizer.step()
    assert not torch.equal(parameters[6], before[0][6])


def test_split_weights_are_fp32_weights_bit_for_bit() -> None:
    """Fed with the same bf16 gradients; the control drops the lower halves once."""
    gradients = [make_gradients(step, torch.bfloat16) for step in range(12)]
    whole, halves, broken = make_parameters(), make_parameters(torch.bfloat16), make_parameters(torch.bfloat16)
    plain = FlatAdamW(make_groups(whole), **OPTIONS)
    split, careless = (FlatAdamW(make_groups(p), **OPTIONS, weights="split") for p in (halves, broken))
    for parameter, half, other in zip(whole, halves, broken, strict=True):
        split.put_weight(half, parameter.detach().cpu())
        careless.put_weight(other, parameter.detach().cpu())
    careless.state[broken[6]]["low"].zero_()
    for step in range(12):
        give(whole, [gradient.float() for gradient in gradients[step]])
        give(halves, gradients[step])
        give(broken, gradients[step])
        for optimizer in (plain, split, careless):
            optimizer.clip(0.5)
            optimizer.step()
    for parameter, half in zip(whole, halves, strict=True):
        assert torch.equal(split.weight(half), parameter)
        assert (half - parameter).abs().max() <= parameter.abs().max() / 256 if half.numel() else True
    assert not torch.equal(careless.weight(broken[6]), whole[6])


def test_bf16_weights_do_not_lose_small_updates() -> None:
    """Each update is a hundredth of a unit in the last place of 1.0: rounded to nearest, none would show."""
    parameter = nn.Parameter(torch.ones(20_000, device=DEVICE, dtype=torch.bfloat16))
    optimizer = FlatAdamW([parameter], lr=2**-8 / 100, betas=(0.0, 0.0), weights="bf16", seed=3)
    for _ in range(50):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = 1 - parameter.double().mean().item()
    assert moved == pytest.approx(50 * 2**-8 / 100, rel=0.05)
    assert torch.equal((parameter.detach() - 2**-8 / 100).bfloat16(), parameter.detach()), "nearest stays"


def test_random_rounding_depends_on_seed_step_and_place_only() -> None:
    def run(seed: int, sizes: list[int]) -> list[Tensor]:
        parameters = [nn.Parameter(torch.ones(size, device=DEVICE, dtype=torch.bfloat16)) for size in sizes]
        optimizer = FlatAdamW(parameters, lr=1e-3, weights="bf16", moments="bf16", seed=seed)
        for _ in range(3):
            give(parameters, [torch.ones_like(p) for p in parameters])
            optimizer.step()
        return [value for p in parameters for value in (p.detach(), *optimizer.state[p].values())]

    first = run(1, [700, 500])
    assert all(torch.equal(one, two) for one, two in zip(first, run(1, [700, 500]), strict=True))
    assert not torch.equal(first[0], run(2, [700, 500])[0])
    assert not torch.equal(first[0][:500], first[4]), "parameters round apart"
    assert torch.equal(run(1, [700, 300])[4], first[4][:300])


def test_bf16_moments_follow_the_gradient() -> None:
    """With beta2 = 0.999 an update of v from 1.5 towards E[g^2] = 4 is below half a unit in the last place. Its mean
    over 4,096 elements must still take the way that fp32 takes; rounded to nearest, v stands still."""
    gradient = torch.full((4096,), 2.0, device=DEVICE)
    parameters = [nn.Parameter(torch.zeros(4096, device=DEVICE)) for _ in range(2)]
    optimizers = [FlatAdamW([p], lr=0.0, moments=kind) for p, kind in zip(parameters, ("fp32", "bf16"), strict=True)]
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        optimizer.state[parameter]["exp_avg_sq"].fill_(1.5)
    for _ in range(100):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient
            optimizer.step()
    exact, rounded = (optimizers[i].state[parameters[i]] for i in (0, 1))
    assert rounded["exp_avg_sq"].dtype == torch.bfloat16
    for key in ("exp_avg", "exp_avg_sq"):
        wanted = exact[key].mean().item()
        assert rounded[key].double().mean().item() == pytest.approx(wanted, rel=0.005)
    assert exact["exp_avg_sq"].mean().item() > 1.7
    assert torch.tensor(1.5 * 0.999 + 4 * 0.001).bfloat16().item() == 1.5, "the control"


def test_dtypes_may_be_mixed() -> None:
    """fp32 and bf16 parameters in one optimizer, each updated as if alone; bf16 ones may have fp32 gradients."""
    whole, halves = make_parameters()[:4], make_parameters(torch.bfloat16)[:4]
    halves[1].grad_dtype = None  # any
    together = FlatAdamW([*whole, *halves], **OPTIONS, weights="split")
    apart = [[nn.Parameter(p.detach().clone()) for p in part] for part in (whole, halves)]
    apart[1][1].grad_dtype = None
    alone = [FlatAdamW(part, **OPTIONS, weights="split") for part in apart]
    for step in range(3):
        gradients = make_gradients(step, torch.bfloat16)[:4]
        full = [gradient.float() for gradient in gradients]
        mixed = [gradients[0], full[1], *gradients[2:]]
        give(whole + halves, full + mixed)
        give(apart[0], full)
        give(apart[1], mixed)
        for optimizer in (together, *alone):
            optimizer.step()
    for one, two in zip(whole + halves, apart[0] + apart[1], strict=True):
        assert torch.equal(one, two)
    norms = [optimizer.clip(0.0).double() for optimizer in (together, *alone)]
    assert norms[0].item() == pytest.approx(math.hypot(norms[1].item(), norms[2].item()), rel=1e-6)


def test_gradients_may_be_strided_and_numbers_may_be_assigned() -> None:
    mine, theirs = make_parameters()[:1], make_parameters()[:1]
    flat, plain = (kind(p, lr=1e-2) for kind, p in ((FlatAdamW, mine), (torch.optim.AdamW, theirs)))
    for step in range(3):
        gradient = make_gradients(step)[0]
        mine[0].grad, theirs[0].grad = gradient.t().contiguous().t(), gradient.clone()
        for optimizer in (flat, plain):
            optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            optimizer.step()
    close(mine[0], theirs[0])


def test_gradients_are_not_held_on_to() -> None:
    parameter = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = FlatAdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    gradient = weakref.ref(parameter.grad)
    optimizer.clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert gradient() is None


def test_state_dict_round_trip() -> None:
    def run(first: int, last: int, saved: dict[str, Any] | None, values: list[Tensor] | None) -> Any:
        parameters = make_parameters(torch.bfloat16)
        if values is not None:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data.copy_(value)
        optimizer = FlatAdamW(make_groups(parameters), **OPTIONS, weights="split", moments="bf16")
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in range(first, last):
            give(parameters, make_gradients(step, torch.bfloat16))
            optimizer.step()
        return copy.deepcopy(optimizer.state_dict()), [optimizer.weight(p) for p in parameters], parameters

    _, whole, _ = run(0, 6, None, None)
    saved, _, parameters = run(0, 3, None, None)
    _, resumed, _ = run(3, 6, saved, parameters)
    assert all(torch.equal(one, two) for one, two in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("unscale", [True, False])
def test_gradscaler(unscale: bool) -> None:
    """Both ways to use it, through an overflow; compared with torch's fused AdamW."""
    runs = []
    for kind in (FlatAdamW, torch.optim.AdamW):
        parameters = make_parameters()
        extra: dict[str, Any] = {} if kind is FlatAdamW else {"fused": True}
        optimizer = kind(make_groups(parameters), **OPTIONS, **extra)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**127, growth_interval=2)
        for step in range(8):
            give(parameters, make_gradients(step))
            loss: Any = sum((p * p.grad).sum() for p in parameters if p.grad is not None)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                clip_gradients(Mean(parameters), optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
        runs.append((parameters, scaler.get_scale(), optimizer.state[parameters[0]]["step"].item()))
    assert runs[0][1:] == runs[1][1:] and runs[0][2] < 8.0, "some updates must have been skipped"
    for one, two in zip(runs[0][0], runs[1][0], strict=True):
        close(one, two)


def test_an_fp16_run_with_flat_adamw(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same losses, skips and loss scales as with torch's AdamW."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**20))  # too high
    runs = []
    for name, fused in (("plain", None), ("flat", FusedConfig())):
        monkeypatch.setattr(
            stretto.build, "build_optimizer", lambda model, cfg, *_, fused=fused: build_adamw(model, cfg, fused)
        )
        config = make_config(run__dir=str(tmp_path / name), train__precision="fp16", optim__clip=0.5)
        folder = train(config)
        events = [event for event in read_events(folder) if "loss" in event]
        runs.append((events, checkpoint.load(folder / "checkpoints", 6)))
    (mine, first), (theirs, second) = runs
    for one, two in zip(mine, theirs, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=0.05)
        assert two["cancelled"] == one["cancelled"]
    assert 0 < mine[-1]["cancelled"] < 6, "the loss scale must be sought, and found"
    assert first.state["scaler"] == second.state["scaler"] and first.moments.keys() == second.moments.keys()


def test_what_it_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weights = 'fp32'.*torch\.float32.*torch\.bfloat16"):
        FlatAdamW(make_parameters(torch.bfloat16))
    with pytest.raises(ValueError, match="float16"):
        FlatAdamW(make_parameters(torch.float16), weights="split")
    with pytest.raises(ValueError, match="meta"):
        FlatAdamW([nn.Parameter(torch.empty(3, device="meta"))])
    with pytest.raises(ValueError, match="contiguous"):
        FlatAdamW([nn.Parameter(torch.zeros(3, 4, device=DEVICE).t())])
    optimizer = FlatAdamW(make_parameters())
    with pytest.raises(ValueError, match="when it is built"):
        optimizer.add_param_group({"params": make_parameters()})


def test_a_closure_is_called() -> None:
    parameter = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = FlatAdamW([parameter], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert torch.allclose(parameter, torch.tensor(0.9, device=DEVICE))


def test_a_recorded_step_has_its_own_list_of_gradients() -> None:
    """Steps that leave out other parameters are recorded one after the other, and between steps that are not."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = FlatAdamW(params)

    def step(*present: int) -> None:
        for i, p in enumerate(params):
            p.grad = torch.ones(3) if i in present else None
        optimizer.clip(1.0)
        optimizer.step()

    step(0, 1)
    with optimizer.recording() as (kept, written):
        optimizer._active.copy_(torch.tensor([0.0, 1.0, 1.0]))  # what a replay would find
        step(1, 2)
    assert kept[0] is not None and kept[0].tolist() == [0, 1, 1] and optimizer._active.tolist() == [1, 1, 0]
    assert [i for i, p in enumerate(params) if any(p is other for other in written)] == [1, 2]
    step(0, 1)
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 3, 1]
