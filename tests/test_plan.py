"""`stretto plan`: what is chosen, why, what is answered to nonsense, and that the choice is what is trained."""

from __future__ import annotations

import resource
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stretto import cli
from stretto.build import run_step
from stretto.config import KEEPING, Config, load_config
from stretto.errors import ConfigError
from stretto.hardware import read_hardware
from stretto.plan import FILLED, find_size
from stretto.planning import probe
from stretto.planning.search import BATCH, CLOSE, Plan, apply, explain, make_plan, try_options
from stretto.recipes import load_recipe
from stretto.report import read_events
from stretto.techniques import open_techniques
from stretto.techniques.technique import Context
from tests.corpora import write_corpus

LLAMA = ("model.preset=llama-1b", "model.max_len=4096", "data.seq_len=4096")
TINY = ("model.layers=2", "model.width=32", "model.heads=2", "data.seq_len=32", "model.max_len=32")


def plan(recipe: str, gpu: str, *overrides: str, approximate: bool = False) -> Plan:
    return make_plan(load_recipe(recipe, overrides), read_hardware(gpu), approximate)


def count_samples(config: Config) -> int:
    return find_size(config)[1] * config.train.micro_batches


@pytest.mark.parametrize(
    ("recipe", "gpu", "overrides"),
    [
        ("causal-lm", "h200", ()),
        ("causal-lm", "rtx3090", (*LLAMA, "data.batch_size=48")),
        ("masked-lm", "2xa100", ("train.micro_batches=6",)),
        ("translation", "l4", ()),
        ("images", "4xl40s", ()),
        ("demo", "cpu", ()),
    ],
)
def test_what_is_planned_is_the_same_training_and_fits(recipe: str, gpu: str, overrides: tuple[str, ...]) -> None:
    given, found = load_recipe(recipe, overrides), plan(recipe, gpu, *overrides)
    assert found.candidates[0] is found.best and len(found.candidates) > 2
    times = [one.seconds for one in found.candidates]
    assert times[0] <= min(times) * (1 + CLOSE)
    for one in found.candidates:
        chosen = found.write(one)
        assert count_samples(chosen) == count_samples(given) and one.fits
        assert one.outcome.memory <= FILLED * found.hardware.memory
        assert (chosen.model, chosen.run, chosen.optim) == (given.model, given.run, given.optim)
        assert chosen.train.eval_batches * find_size(chosen)[1] >= given.train.eval_batches * find_size(given)[1]


@pytest.mark.parametrize("overrides", [("data.batch_size=12",), (*LLAMA, "data.batch_size=6", "model.layers=8")])
def test_the_search_leaves_out_nothing_that_is_faster(overrides: tuple[str, ...]) -> None:
    """It tries less kept only where memory is not enough, and stops with small micro-batches: here all are tried."""
    found = plan("causal-lm", "l4", *overrides)
    every = [
        try_options(found.config, found.hardware, options, found.dimensions)
        for options in product(*found.dimensions.values())
    ]
    fitting = [one.seconds for one in every if one.fits]
    assert len(fitting) > 10 and found.best.seconds <= min(fitting) * (1 + CLOSE)


def test_less_is_kept_only_where_memory_asks_for_it() -> None:
    roomy, tight = (
        plan("causal-lm", gpu, *LLAMA, "data.batch_size=16", "model.layers=12") for gpu in ("h200", "rtx4090")
    )
    assert roomy.best.words[KEEPING] == "off" and roomy.best.words[BATCH] == "1"
    assert int(tight.best.words[BATCH]) > 1 or tight.best.words[KEEPING] != "off"
    assert "times the time" in "\n".join(explain(tight))
    given = plan("causal-lm", "rtx3090", *LLAMA, "data.batch_size=1", "data.seq_len=4096", "model.layers=20")
    assert given.best.words[BATCH] == "1" and given.best.words[KEEPING].startswith("on")
    assert f"{KEEPING}: {given.best.words[KEEPING]}; off: does not fit, with" in "\n".join(explain(given))


def test_a_plan_is_as_fast_with_more_memory() -> None:
    overrides = (*LLAMA, "data.batch_size=16", "model.layers=12")
    times = []
    for gib in (20, 30, 60, 120):
        hardware = read_hardware("h100")
        hardware = type(hardware)(**vars(hardware) | {"memory": gib * 2**30})
        times.append(make_plan(load_recipe("causal-lm", overrides), hardware).best.seconds)
    assert all(later <= earlier * (1 + CLOSE) for earlier, later in pairwise(times))
    assert times[-1] < times[0]


@pytest.mark.parametrize("recipe", ["causal-lm", "masked-lm", "translation", "images"])
def test_techniques_can_be_opened_as_planned(recipe: str) -> None:
    """Their own checks have no reason against any candidate."""
    found = plan(recipe, "rtx3090")
    for one in found.candidates:
        config = one.config
        context = Context(
            config.model,
            torch.device("cuda"),
            "bf16",
            compiled=config.train.compile,
            padded=config.data.layout == "padded",
            micro_batches=config.train.micro_batches,
            seq_len=config.data.seq_len,
        )
        open_techniques(config, context)


def test_other_mathematics_is_named_and_needs_to_be_allowed() -> None:
    exact, free = (plan("causal-lm", "h200", approximate=allowed) for allowed in (False, True))
    assert free.best.seconds < 0.9 * exact.best.seconds and exact.forbidden and not free.forbidden
    assert {option.key for option in exact.forbidden} >= {"techniques.fp8", "techniques.layer_drop"}
    assert sum("by --approximate" in line for line in explain(exact)) == len(exact.forbidden)
    assert exact.best.words["techniques.fp8"] == "off" and free.best.words["techniques.fp8"] == "on"
    own = plan("causal-lm", "h200", "techniques.layer_drop=true")
    assert own.best.words["techniques.layer_drop"] == "on", "it is part of what the recipe trains"
    assert plan("causal-lm", "t4").best.config.train.precision == "fp16", "it has no bf16"
    wide = plan("causal-lm", "h200", "train.precision=fp32")
    assert wide.best.config.train.precision == "fp32" and "train.precision" in {o.key for o in wide.forbidden}


@pytest.mark.parametrize(
    ("gpu", "overrides", "words"),
    [
        ("l4", ("data.seq_len=1048576", "model.max_len=1048576"), "none of the GPUs"),
        ("8xh100", (*LLAMA, "model.layers=80", "model.width=16384", "model.heads=128"), "it would fit 32 x h100"),
        ("h100", (*LLAMA, "model.layers=126", "model.width=16384", "model.heads=128"), "it would fit 64 x h100"),
    ],
)
def test_what_fits_nowhere_is_answered_with_what_would_do(gpu: str, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        plan("causal-lm", gpu, *overrides)
    assert "has room for" in str(error.value)


def test_the_recipes_own_layout_counts_as_its_own() -> None:
    found = plan("causal-lm", "2xh100", "parallel.data=shard")
    assert (
        found.dimensions["parallel"][0].words == "data 2, weights sharded" and found.best.words["parallel"] == "data 2"
    )
    late = ("parallel.schedule=2bw", *(f"parallel.{axis}=2" for axis in list(found.config.parallel.axes())[:1]))
    with pytest.raises(ConfigError, match="its gradients are old"):
        plan("causal-lm", "2xh100", *late)


def test_a_plan_for_a_cpu_leaves_techniques_to_the_device() -> None:
    found = plan("causal-lm", "cpu")
    assert found.write(found.best).techniques == found.recipe.techniques


def test_a_batch_beyond_any_memory_is_cut() -> None:
    found = plan("causal-lm", "h200", "data.batch_size=1000000000")
    assert count_samples(found.best.config) == 10**9 and found.best.words[BATCH] != "1"


def run_cli(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output


def test_the_command_answers_at_once_and_without_torch() -> None:
    """The bar is five seconds, here of the processor: the largest search of a shipped recipe is over eight GPUs."""
    code = (
        "import sys; from stretto import cli; from typer.testing import CliRunner\n"
        "result = CliRunner().invoke(cli.app, ['plan', 'causal-lm', '--gpu', '8xh100', '--approximate'])\n"
        "assert result.exit_code == 0, result.output\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stdout + done.stderr
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before < 5


def test_the_table_the_reasons_and_the_recipe_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    out = run_cli("plan", "causal-lm", "--gpu", "8xh100", "--out", str(path), "--set", "train.steps=100")
    for words in ("tokens/s", "GiB", "MFU", "kWh", "data 8", "techniques.fused: on; off:", "computed, not measured"):
        assert words in out, words
    assert f"stretto launch -n 8 train {path}" in out and path.read_text().startswith("# Planned for 8 x h100")
    best = plan("causal-lm", "8xh100", "train.steps=100")
    assert load_config(path) == best.write(best.best)
    assert "stretto train" in run_cli("plan", "demo", "--gpu", "l4")


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for arguments, words in (
        (["plan", "demo", "--gpu-memory", "16GiB"], "--memory"),
        (["train", "demo", "--plan", "--resume"], "stays as it was planned"),
    ):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 2 and words in result.output
    assert "peak, at the" in run_cli("plan", "causal-lm", "--memory", "--gpu-memory", "16GiB")
    several = plan("demo", "2xl4", *TINY)
    with pytest.raises(ConfigError, match="runs on one device"):
        probe.measure_plan(several)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="the plan is for l4, and this machine has cpu"):
            probe.measure_plan(plan("demo", "l4", *TINY))


def test_a_run_begins_with_its_plan(tmp_path: Path) -> None:
    """The same samples in an update, from the plan that was said."""
    corpus, folder = tmp_path / "text.txt", tmp_path / "run"
    write_corpus(corpus)
    small = [f"run.dir={folder}", f"data.train={corpus}", "run.device=cpu", "data.batch_size=4", "train.steps=3"]
    options: list[Any] = [part for one in (*small, *TINY, "train.log_every=1") for part in ("--set", one)]
    out = run_cli("train", "demo", "--plan", *options)
    assert "planned for cpu: train.micro_batches = 1" in out
    assert count_samples(load_config(folder / "config.toml")) == 4
    assert len([event for event in read_events(folder) if "loss" in event]) == 3


@pytest.mark.slow
def test_measured_times_rank_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps, in processes of their own, on this machine."""
    monkeypatch.setattr(probe, "TRIED", 2)
    computed = plan("demo", "cpu", *TINY, "data.batch_size=4", "run.device=cpu")
    found = probe.measure_plan(computed)
    assert found.measured == 2 and len(found.candidates) == len(computed.candidates)
    first, second = found.candidates[:2]
    assert first.seconds <= second.seconds * (1 + CLOSE) or first.own > second.own
    assert found.scale != 1 and sum("measured" in note for note in found.notes) == 2
    assert "1." in found.notes[-3] and all(one.seconds > 0 for one in found.candidates)


def test_several_micro_batches_are_measured_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the probe makes one update of as many micro-batches as the recipe has."""
    small = (*TINY, "run.device=cpu", "data.batch_size=2", "train.micro_batches=3", "model.vocab=64")
    seen = list[tuple[int, int]]()

    def watch(parts: Any, step: int, batches: Any, labels: int, world: int) -> Any:
        seen.append((len(batches), labels))
        return run_step(parts, step, batches, labels, world)

    monkeypatch.setattr("stretto.planning.probe.run_step", watch)
    numbers = probe.probe(load_recipe("demo", small))
    assert numbers["step_ms"] > 0 and numbers["loss"] > 0 and set(seen) == {(3, 3 * 2 * 31)}


def test_apply_changes_nothing_by_the_recipes_own_options() -> None:
    found = plan("causal-lm", "h200")
    own = [options[0] for options in found.dimensions.values()]
    changed = apply(found.config, own)
    assert changed.data == found.config.data and changed.train == found.config.train
