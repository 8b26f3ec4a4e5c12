"""Guards in one process: numbers that are not finite, spikes, odd inputs of 8-bit layers, evaluations that fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import stretto.train
from stretto import checkpoint
from stretto.config import build_config
from stretto.errors import ConfigError
from stretto.guard import LIMITS, Guard
from stretto.ops import round8
from stretto.ops.fp8 import Eight
from stretto.ops.judge import FIELDS, HISTORY, judge
from stretto.ops.round8 import Bound, find_scale
from stretto.report import read_events
from stretto.train import Run, train
from tests.faults.conftest import Tally
from tests.faults.guard_jobs import run_job
from tests.runs import base, change

pytestmark = pytest.mark.usefixtures("one_thread")
NAN, INF = math.nan, math.inf
BAD = 3  # the update with the fault, counted from 0
CPU = torch.device("cpu")
Tree = dict[str, Any]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A tiny run of six steps that keeps no checkpoint."""
    return change(
        base(tmp_path), run__dir=str(tmp_path / "run"), train__steps=6, train__micro_batches=2, train__eval_every=0,
        train__eval_batches=1, checkpoint__keep=0, optim__schedule="constant", model__dropout=0.0,
    )  # fmt: skip


def events_of(tree: Tree, key: str) -> list[Any]:
    return [event[key] for event in read_events(Path(tree["run"]["dir"])) if "loss" in event]


def unchanged(result: dict[str, Any]) -> list[int]:
    """The steps that left every bit of weights and moments as it was."""
    return [step for step, (before, after) in enumerate(result["states"]) if before == after]


def skip_one(tree: Tree, kind: str, value: float, off: tuple[str, ...] = ()) -> dict[str, Any]:
    return run_job({"config": change(tree, train__non_finite="skip"), "faults": [(kind, 0, [BAD], value)], "off": off})


@pytest.mark.fault("N1")
@pytest.mark.fault("N2")
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_one_update_is_skipped_and_no_other(tree: Tree, kind: str, value: float) -> None:
    result = skip_one(tree, kind, value)
    assert (result["code"], unchanged(result)) == (0, [BAD])
    assert events_of(tree, "cancelled") == [0, 0, 0, 1, 1, 1]


@pytest.mark.control("N1")
def test_without_doubt_a_loss_that_is_not_finite_is_learned_from(tree: Tree) -> None:
    result = skip_one(tree, "loss", NAN, off=("doubt",))
    assert unchanged(result) == []


def judge_by_all_norms(history: list[float]) -> Callable[..., Tensor]:
    """A guard of another kind: it skips what is not below four times the mean of all norms, NaN among them."""

    def judge_norm(state: Tensor, norm: Tensor, skip: bool, watch: bool) -> Tensor:
        accepted = not history or float(norm) <= 4 * sum(history) / len(history)
        history.append(float(norm))
        state[FIELDS.index("cancelled")] += not accepted
        return torch.tensor(float(not accepted))

    return judge_norm


@pytest.mark.fault("N2")
def test_the_optimizer_counts_what_was_applied(tree: Tree, tmp_path: Path) -> None:
    """One NaN in 20 steps: 19 updates."""
    tree = change(tree, train__non_finite="skip", train__steps=20, checkpoint__keep=1)
    result = run_job({"config": tree, "faults": [("loss", 0, [5], NAN)]})
    shot = checkpoint.load(tmp_path / "run" / "checkpoints", 20)
    assert unchanged(result) == [5] and events_of(tree, "cancelled")[-1] == 1
    assert {float(value) for name, value in shot.moments.items() if name.startswith("step/")} == {19.0}


@pytest.mark.control("N2")
def test_a_history_that_keeps_a_nan_skips_all_that_follows(tree: Tree) -> None:
    with patch("stretto.guard.judge", judge_by_all_norms([])):
        result = skip_one(tree, "loss", NAN)
    assert unchanged(result) == [3, 4, 5] and events_of(tree, "cancelled")[-1] == 3


@pytest.mark.fault("N1")
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_stop_says_where(tree: Tree, kind: str) -> None:
    """With exit code 6, the step, and the samples it had read, however late the host looks."""
    result = run_job({"config": change(tree, train__log_every=5), "faults": [(kind, 0, [BAD], NAN)]})
    data = stretto.train.open_data(
        build_config(tree).data, seed=0, folder=Path(tree["run"]["dir"]) / "data", image_size=1
    )
    assert result["code"] == 6 and len(result["states"]) == 5 and unchanged(result) == [BAD]
    assert f"the {kind} was not finite in 1 update(s) in a row, the last at step {BAD + 1}" in result["message"]
    for number in (2 * BAD, 2 * BAD + 1):
        names = ", ".join(map(str, data.train_batch(number).samples[:3]))
        assert f"{number}: samples {names} ..." in result["message"]


# Spikes.

LONG, WILD = 50, 40  # steps; the update with the spike, counted from 0


def spike(tree: Tree, policy: str, steps: list[int], **more: Any) -> dict[str, Any]:
    tree = change(tree, train__spikes=policy, train__steps=LONG, optim__lr=2e-3)
    return run_job({"config": tree, "faults": [("times", 0, steps, 10.0)]} | more)


@pytest.mark.fault("N3")
def test_a_healthy_run_has_no_spikes_from_its_warm_up_on(tree: Tree, whole: bool) -> None:
    """With dropout, until it knows its small corpus by heart. At three times the rate it is no longer healthy, and has
    two spikes, with a loss that rises."""
    tree = change(tree, train__steps=600 if whole else 120, train__log_every=20, model__dropout=0.1)
    run_job({"config": tree})
    assert events_of(tree, "spikes")[-1] == 0


@pytest.mark.fault("N3")
def test_a_spike_is_counted_said_and_applied(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    result = spike(tree, "log", [WILD])
    assert (result["code"], unchanged(result)) == (0, [])
    assert events_of(tree, "spikes") == [0] * WILD + [1] * (LONG - WILD) and events_of(tree, "cancelled")[-1] == 0
    assert f"1 spike(s) of the gradient, the last at step {WILD + 1}: applied" in capsys.readouterr().out


@pytest.mark.fault("N3")
def test_a_spike_is_skipped(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    result = spike(tree, "skip", [WILD])
    assert (result["code"], unchanged(result)) == (0, [WILD])
    assert (events_of(tree, "spikes")[-1], events_of(tree, "cancelled")[-1]) == (1, 1)
    assert ": not applied" in capsys.readouterr().out


@pytest.mark.fault("N3")
def test_the_fourth_in_a_row_stops_the_run(tree: Tree) -> None:
    result = spike(tree, "skip", list(range(WILD, LONG)))
    assert result["code"] == 6 and unchanged(result) == [WILD, WILD + 1, WILD + 2, WILD + 3]
    assert f"in 4 updates in a row, the last at step {WILD + 4} (micro-batch " in result["message"]
    assert "train.spikes = 'log'" in result["message"]


@pytest.mark.control("N3")
def test_ten_times_is_nothing_to_who_does_not_watch(tree: Tree) -> None:
    with patch.object(Guard, "judge", lambda self, norm, own: judge(self.state, norm, True, watch=False)):
        result = spike(tree, "skip", [WILD])
    assert unchanged(result) == [] and events_of(tree, "spikes")[-1] == 0


def resume_before_spike(tree: Tree) -> dict[str, Any]:
    """The run ends right before the spike, and goes on in it."""
    tree = change(tree, checkpoint__keep=1, train__spikes="skip", optim__lr=2e-3)
    assert run_job({"config": change(tree, train__steps=WILD)})["code"] == 0
    tree = change(tree, train__steps=WILD + 3)
    return run_job({"config": tree, "faults": [("times", 0, [WILD], 10.0)], "resume": True})


@pytest.mark.fault("N3")
def test_the_history_survives_a_resume(tree: Tree) -> None:
    assert unchanged(resume_before_spike(tree)) == [0]  # the first step of what is left


@pytest.mark.control("N3")
def test_a_history_that_is_not_saved_knows_no_spike(tree: Tree) -> None:
    with patch.object(Guard, "load_state_dict", lambda self, state: None):
        assert unchanged(resume_before_spike(tree)) == []


@pytest.mark.fault("N3")
def test_a_checkpoint_of_an_older_version_has_no_history() -> None:
    guard = Guard("skip", CPU)
    guard.load_state_dict({"cancelled": 5.0, "streak": 2.0})
    assert guard.check(7) == {"cancelled": 5, "spikes": 0} and guard.state_dict()["streak"] == 2


def follow(norms: Tensor, skip: bool = False) -> list[int]:
    """The places of the spikes among these norms."""
    state, found = torch.zeros(len(FIELDS), dtype=torch.float64), []
    for place, norm in enumerate(norms):
        before = float(state[FIELDS.index("spikes")])
        judge(state, norm, skip, watch=True)
        if float(state[FIELDS.index("spikes")]) > before:
            found.append(place)
    return found


def draw_noise(kind: str, count: int, seed: int) -> Tensor:
    """Norms as runs have them: their logarithms are noisy, with heavy tails, and fall, or rise tenfold and more."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    t = torch.arange(count) / count
    chi = torch.randn(5, count, generator=generator).square().mean(0).sqrt()
    return {
        "bell": 0.3 * normal,
        "heavy": 0.12 * normal / chi,  # Student's t with five degrees of freedom
        "warm-up": 0.1 * normal + 4 * torch.exp(-50 * t),
        "rise": 0.1 * normal + 3 * t,
        "steps": 0.1 * normal + 0.7 * (t * 20 % 2 > 1),  # twice, back and forth
    }[kind].exp()


@pytest.mark.fault("N3")
@pytest.mark.parametrize("kind", ["bell", "heavy", "warm-up", "rise", "steps"])
def test_noise_is_no_spike_and_ten_times_is_one(kind: str, whole: bool, tally: Tally) -> None:
    """Also after a NaN, after zeros, and after a spike of a million times that was applied."""
    count, seeds = (2000, 2) if whole else (600, 2)
    for seed in range(seeds):
        norms = draw_noise(kind, count, seed)
        few = follow(norms)
        assert len(few) <= (count // 1000 if kind == "heavy" else 0)
        place = count // 2
        level = norms[place - 20 : place].log().mean().exp()
        for value in (NAN, INF, 0.0, 1e6 * level):
            marred = norms.clone()
            marred[place - 10], marred[place] = value, 10 * level
            found = follow(marred)
            assert place in found and len(found) <= 2 + len(few)
        tally("norms that were judged", 5 * count)


@pytest.mark.control("N3")
def test_a_history_that_learns_a_nan_is_blind() -> None:
    norms = draw_noise("bell", 400, 0)
    norms[300] = 10.0
    assert 300 in follow(norms)
    state = torch.zeros(len(FIELDS), dtype=torch.float64)
    for norm in norms[:300]:
        judge(state, norm, False, True)
    state[FIELDS.index("mean")] = NAN  # as if it had been taken in
    judge(state, norms[300], False, True)
    assert state[FIELDS.index("spikes")] == 0


@pytest.mark.fault("N3")
def test_a_persistent_change_is_noticed_and_then_usual() -> None:
    norms = draw_noise("bell", 600, 1)
    norms[300:] *= 10
    found = follow(norms)
    assert 3 <= len(found) <= 40 and all(300 <= place < 350 for place in found)
    assert follow(norms, skip=True)[:4] == [300, 301, 302, 303]


@pytest.mark.fault("N3")
def test_a_young_history_judges_nobody() -> None:
    norms = torch.ones(HISTORY + 1)
    norms[HISTORY - 1] = 100.0
    assert follow(norms) == []
    assert follow(torch.tensor([1.0] * HISTORY + [100.0])) == [HISTORY]


def test_a_pipeline_with_old_gradients_cannot_skip(tree: Tree) -> None:
    with pytest.raises(ConfigError, match=r"train.spikes = 'skip' needs the norm of all gradients"):
        build_config(change(tree, train__spikes="skip", parallel__pipeline=2, parallel__schedule="2bw"))
    assert LIMITS["skip"] == 3


# 8-bit layers.

RECIPES = ("tensor", "row", "block128")


def multiply(recipe: str, x: Tensor, bound: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Product, dx and dweight of a layer, with x as gradient, too."""
    weight, bounds = torch.eye(128, dtype=torch.bfloat16), dict[str, Bound]()
    if bound is not None:
        bounds["x"] = Bound(bound, torch.zeros_like(bound), True)
    product = Eight(recipe, bounds)
    out, kept = product.multiply(x, weight)
    taken = product.take(x)
    return out, product.compute_dx(taken, weight), product.compute_dweight(taken, kept)


def surfaces(recipe: str, value: float, bound: Tensor | None = None) -> bool:
    x = torch.ones(128, 128, dtype=torch.bfloat16)
    x[3, 5] = value
    return not any(bool(result.isfinite().all()) for result in multiply(recipe, x, bound))


@pytest.mark.fault("N5")
@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_inputs_of_8_bit_products(recipe: str) -> None:
    for value in (INF, -INF, NAN):
        assert surfaces(recipe, value)
        if recipe == "tensor":
            assert surfaces(recipe, value, torch.tensor(100.0))  # as a norm gives it
    large = torch.full((128, 128), 1e6, dtype=torch.bfloat16)
    for result, expected in zip(multiply(recipe, large), (1e6, 1e6, 128e12), strict=True):
        assert torch.allclose(result.float(), torch.tensor(expected), rtol=0.1)
    assert all(not result.any() for result in multiply(recipe, torch.zeros(128, 128, dtype=torch.bfloat16)))
    nothing = multiply(recipe, torch.zeros(0, 128, dtype=torch.bfloat16))
    assert [result.shape for result in nothing] == [(0, 128), (0, 128), (128, 128)] and not nothing[2].any()


@pytest.mark.control("N5")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cast_that_saturates_hides_an_infinity(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def saturate(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        largest = torch.finfo(dtype).max
        return (x * scale.reciprocal()).clamp(-largest, largest).to(dtype)

    monkeypatch.setattr(round8, "_round", saturate)
    monkeypatch.setattr(round8, "find_scale", lambda most, dtype: find_scale(most.clamp(max=448.0), dtype))
    assert not surfaces(recipe, INF)


def train_narrow(tree: Tree, **changes: Any) -> Tree:
    return change(
        tree, train__precision="bf16", techniques__fused=True, techniques__fp8={"sites": "all"}, checkpoint__keep=1,
        **changes,
    )  # fmt: skip


def train_in_parts(tree: Tree, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Six steps at once; and three, in the last of which a layer goes back to 16 bits, then three more."""
    from stretto.techniques.fp8 import Fp8

    real = Fp8.end

    def lose(self: Fp8, step: int) -> None:
        real(self, step)
        self.products[next(iter(self.products))].on &= step < 2

    results = []
    with patch.object(Fp8, "end", lose):
        results.append(run_job({"config": change(train_narrow(tree), run__dir=str(folder / "whole"))}))
        results.append(run_job({"config": change(train_narrow(tree, train__steps=3), run__dir=str(folder / "parts"))}))
    results[1] = run_job({"config": change(train_narrow(tree), run__dir=str(folder / "parts")), "resume": True})
    return results[0], results[1]


@pytest.mark.fault("N5")
def test_the_state_of_8_bit_layers_resumes_exactly(tree: Tree, tmp_path: Path) -> None:
    whole_run, parts = train_in_parts(tree, tmp_path)
    assert whole_run["states"][3:] == parts["states"]


@pytest.mark.control("N5")
def test_8_bit_layers_without_their_state_go_on_otherwise(tree: Tree, tmp_path: Path) -> None:
    from stretto.techniques.fp8 import Fp8

    with patch.object(Fp8, "load_state_dict", lambda self, state: None):
        whole_run, parts = train_in_parts(tree, tmp_path)
    assert whole_run["states"][3:] != parts["states"]


@pytest.mark.fault("N5")
def test_an_infinity_in_an_8_bit_layer_cancels_the_update(tree: Tree) -> None:
    """One element of the input of each product, in one step."""
    tree = train_narrow(tree, train__non_finite="skip")
    real_step, real, count = stretto.train.run_step, Eight.multiply, 0

    def spoil(self: Eight, x: Tensor, *rest: Any) -> Any:
        x = x.clone()
        x.view(-1)[0] = INF
        return real(self, x, *rest)

    def run_step(*args: Any) -> Any:
        nonlocal count
        count += 1
        with patch.object(Eight, "multiply", spoil if count == BAD + 1 else real):
            return real_step(*args)

    with patch("stretto.train.run_step", run_step):
        result = run_job({"config": tree})
    assert unchanged(result) == [BAD]


# Evaluations that fail.

NUM_EVALUATIONS = 20


def evaluate_as(values: list[float | None]) -> Any:
    """Evaluations that give these values, in order; None: there is none."""
    real_now, real = stretto.train.evaluate_now, stretto.train.evaluate

    def evaluate(*args: Any, **kwargs: Any) -> dict[str, float]:
        return real(*args, **kwargs) | {"eval_loss": next(given)}

    def evaluate_now(run: Run, report: Any) -> bool:
        return False if values[run.step - 1] is None else real_now(run, report)

    given = iter([value for value in values if value is not None])
    return patch.multiple(stretto.train, evaluate=evaluate, evaluate_now=evaluate_now)


def find_kept(tree: Tree, values: list[float | None]) -> tuple[int, bool]:
    """The step that counts as the best, and whether its checkpoint is there and whole."""
    folder = Path(tree["run"]["dir"]) / "checkpoints"
    with evaluate_as(values):
        train(build_config(change(tree, train__steps=len(values), train__eval_every=1, checkpoint__keep=2)))
    best = int(checkpoint.load(folder, checkpoint.steps(folder)[0]).state["best_step"])
    return best, checkpoint.find_damage(folder / f"step-{best:08d}") is None


def list_evaluations(place: int, bad: float | None) -> list[float | None]:
    values: list[float | None] = [3.0 - 0.1 * i if i < 8 else 3.0 + 0.1 * i for i in range(NUM_EVALUATIONS)]
    values[place] = bad
    return values


def lowest(values: list[float | None]) -> int:
    finite = {i + 1: value for i, value in enumerate(values) if value is not None and math.isfinite(value)}
    return min(finite, key=lambda step: finite[step])


@pytest.mark.fault("N6")
def test_the_best_is_the_lowest_that_is_finite(tree: Tree, tmp_path: Path, whole: bool, tally: Tally) -> None:
    cases = [(place, bad) for bad in (NAN, INF, -INF, None) for place in range(NUM_EVALUATIONS)]
    for number, (place, bad) in enumerate(cases if whole else [(0, NAN), (7, INF), (8, -INF), (19, None)]):
        values = list_evaluations(place, bad)
        assert find_kept(change(tree, run__dir=str(tmp_path / f"run-{number}")), values) == (lowest(values), True)
        tally("evaluations that failed", 1)


@pytest.mark.control("N6")
def test_a_nan_that_counts_as_better_costs_the_best(tree: Tree) -> None:
    def evaluate_now(run: Run, report: Any) -> bool:
        loss = values[run.step - 1]
        if loss >= run.best:
            return False
        run.best, run.best_step = loss, run.step
        return True

    values = [value or 0.0 for value in list_evaluations(12, NAN)]
    with patch("stretto.train.evaluate_now", evaluate_now):
        train(build_config(change(tree, train__steps=len(values), train__eval_every=1, checkpoint__keep=2)))
    folder = Path(tree["run"]["dir"]) / "checkpoints"
    best = checkpoint.load(folder, checkpoint.steps(folder)[0]).state["best_step"]
    assert best != lowest(list(values)) and lowest(list(values)) not in checkpoint.steps(folder)
