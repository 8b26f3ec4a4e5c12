"""`stretto plan`: what is chosen, why, what is answered to nonsense, and that the choice is what is trained."""

from __future__ import annotations

import resource
import subprocess
import sys
from io import StringIO
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from stretto import cli
from stretto.build import run_step
from stretto.config import KEEPING, Config, FusedConfig, ParallelConfig, build_config, dump_config, load_config
from stretto.errors import ConfigError
from stretto.hardware import make_cpu, read_hardware
from stretto.plan import FILLED, complete_sizes, find_size
from stretto.planning import probe
from stretto.planning.search import (
    BATCH,
    CLOSE,
    LAYOUT,
    MOST_COUNTS,
    Plan,
    apply,
    explain,
    keep_plan,
    list_counts,
    make_plan,
    try_options,
)
from stretto.planning.table import ROWS, make_table
from stretto.recipes import load_recipe
from stretto.report import read_events
from stretto.techniques import open_techniques
from stretto.techniques.technique import Context
from stretto.values import parse
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
        ("l4", ("data.seq_len=1048576", "model.max_len=1048576"), "67.9 GiB .* it would fit h100-pcie or 4 x l4"),
        ("l4", (f"data.seq_len={2**28}", f"model.max_len={2**28}"), "none of the GPUs"),
        (
            "8xh100",
            (*LLAMA, "model.layers=80", "model.width=16384", "model.heads=128"),
            "would fit 8 x b200 or 32 x h100",
        ),
        ("h100", (*LLAMA, "model.layers=126", "model.width=16384", "model.heads=128"), "would fit 32 x h100"),
    ],
)
def test_what_fits_nowhere_is_answered_with_what_would_do(gpu: str, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        plan("causal-lm", gpu, *overrides)
    assert "has room for" in str(error.value)


def test_what_is_named_as_large_enough_is() -> None:
    long = ("data.seq_len=1048576", "model.max_len=1048576")
    for gpu in ("h100-pcie", "4xl4"):
        assert plan("causal-lm", gpu, *long).candidates
    with pytest.raises(ConfigError, match="at the least a step takes"):
        plan("causal-lm", "2xl4", *long)


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
    many = run_cli("plan", "causal-lm", "--gpu", "12xh100", "--set", "data.batch_size=48")
    assert "stretto launch -n 6 --machines 2 --machine 0 --meet HOST:29500 train FILE.toml" in many


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for arguments, words in (
        (["plan", "demo", "--gpu-memory", "16GiB"], "--memory"),
        (["plan", "demo", "--memory", "--gpu-memory", "16"], "not a size"),
        (["plan", "demo", "--memory", "--gpu", "l5"], "did you mean"),
        (["plan", "demo", "--pipeline", "--gpu", "l4"], "--memory"),
        (["plan", "demo", "--memory", "--out", "planned.toml"], "does not go with"),
        (["plan", "demo", "--pipeline", "--measure"], "does not go with"),
        (["plan", "demo", "--gpu", "h900"], "no such GPU is known"),
        (["plan", "demo", "--gpu", "0xh100"], "from 1 to 4,096"),
        (["plan", "demo", "--gpu", "h100", "--out", str(tmp_path / "no" / "planned.toml")], "no folder"),
        (["plan", "demo", "--gpu", "h100", "--out", str(tmp_path)], "is a directory"),
        (["numerics", "demo", "--out", str(tmp_path / "no" / "sums.svg")], "no folder"),
    ):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 2 and words in " ".join(result.output.replace("│", "").split()), result.output
    assert "peak, at the" in run_cli("plan", "causal-lm", "--memory", "--gpu-memory", "16GiB")
    assert "data.batch_size in 22.0 GiB" in run_cli("plan", "causal-lm", "--memory", "--gpu", "8xl4")
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


@pytest.mark.parametrize("size", [31, 49, 2 * 3 * 7 * 11, 2**61 - 1, 5 * 7 * 720720])
def test_every_number_that_divides_the_samples_is_tried(size: int) -> None:
    """Also those that have other factors than 2, 3 and 5; of a batch that nobody has, some, at once."""
    found = list_counts(load_recipe("causal-lm", [f"data.batch_size={size}"]))
    assert found[0] == 1 and all(size % many == 0 for many in found)
    assert len(found) <= MOST_COUNTS + 1
    assert size > 10**6 or sorted(found) == [many for many in range(1, size + 1) if size % many == 0]


def test_a_batch_of_a_prime_number_is_cut_into_single_samples() -> None:
    long = (*LLAMA, "model.layers=8", "data.batch_size=31")
    assert plan("causal-lm", "l4", *long).best.words[BATCH] == "31"


def test_the_recipes_own_way_of_keeping_less_hides_no_faster_one() -> None:
    """Of a model that is too large for the choice block by block."""
    deep = (*LLAMA, "model.layers=30", "model.width=1536", "data.batch_size=1", "techniques.lean.blocks=30")
    found = plan("causal-lm", "rtx3090", *deep)
    assert found.best.words[KEEPING] not in ("off", "on (blocks = 30)")
    slow = next(one for one in found.candidates if one.words[KEEPING] == "on (blocks = 30)")
    assert slow.seconds > found.best.seconds * (1 + CLOSE)
    free = plan("causal-lm", "h200", 'techniques.lean.mlp="activation"').best.words[KEEPING]
    assert free == 'on (mlp = "activation")', "it costs no time, so it is left as it is"


def test_a_layout_that_the_recipe_forbids_is_a_reason_and_no_error() -> None:
    found = plan("causal-lm", "2xh100", "train.ema=0.999")
    assert found.best.words[LAYOUT] == "data 2"
    assert "data 1 x pipeline 2: train.ema follows whole updates" in "\n".join(explain(found))


@pytest.mark.parametrize(
    ("recipe", "gpu", "overrides", "words"),
    [
        ("demo", "cpu", ("techniques.lean=true",), "there is no plan for cpu: techniques.lean needs techniques.fused"),
        ("demo", "h100", ("train.graphs=on", "train.precision=fp16"), "train.graphs = 'on' cannot be"),
        ("images", "4xh100", ("data.batch_size=1",), r"1 x 1 samples cannot be dealt out to 4 GPUs"),
    ],
)
def test_what_cannot_be_is_not_blamed_on_memory(recipe: str, gpu: str, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        plan(recipe, gpu, *overrides)
    assert "GiB" not in str(error.value)


def test_what_needs_bf16_is_not_planned_in_fp16() -> None:
    """A run would refuse it before its first step."""
    for gpu, overrides in (("t4", ()), ("h100", ("train.precision=fp16",))):
        found = plan("causal-lm", gpu, *overrides, approximate=True)
        for one in found.candidates:
            techniques = one.config.techniques
            halves = getattr(techniques.fused, "weights", "auto") in ("split", "bf16")
            eight = techniques.fp8 is not None and gpu != "t4"  # which has no such products, so that nothing is done
            assert one.config.train.precision != "fp16" or not (halves or eight)


def test_a_layout_is_planned_with_the_options_that_the_recipe_has() -> None:
    """GPT-2's 12 heads cannot be shared out to 8, and cuts are those of one number of parts."""
    found = plan("causal-lm", "8xh100", "parallel.sequence_method=ulysses", "data.seq_len=1024")
    sizes = {one.config.parallel.sequence for one in found.candidates}
    assert 8 not in sizes and sizes == {1, 2, 4}
    cut = ("parallel.pipeline=2", "parallel.cuts=[5]", "parallel.placement=linear", "model.layers=12")
    found = plan("causal-lm", "4xh100", *cut)
    assert found.dimensions[LAYOUT][0].words == "data 2 x pipeline 2"
    cuts = {one.config.parallel.pipeline: one.config.parallel.cuts for one in found.candidates}
    assert cuts == {1: (), 2: (5,), 4: ()}
    assert found.notes == []
    for gpu, own in (("4xh100", "parallel.data=hybrid"), ("h100", "parallel.data=shard")):
        (note,) = plan("causal-lm", gpu, "parallel.sequence=2", own).notes
        assert "[parallel] of the recipe is not among the layouts that are tried" in note
    alone = plan("causal-lm", "h100", "parallel.sequence=4", "parallel.data=shard")
    assert alone.best.words[LAYOUT] == "data 1" and alone.best.config.parallel == ParallelConfig()


@pytest.mark.parametrize("recipe", ["demo", "causal-lm", "masked-lm", "translation", "images", "classify", "instruct"])
@pytest.mark.parametrize("gpu", ["h200", "3xl4", "8xa100", "2xt4", "cpu"])
def test_a_plan_of_a_plan_is_the_same(recipe: str, gpu: str) -> None:
    hardware = read_hardware(gpu)
    given = load_recipe(recipe)
    first = make_plan(given, hardware)
    written = build_config(parse(dump_config(first.write(first.best))))
    again = make_plan(written, hardware)
    assert again.write(again.best) == written == first.write(first.best) == keep_plan(given, written)


def test_a_plan_that_was_written_is_trained(tmp_path: Path) -> None:
    """One for a GPU, here by the reference bodies of its kernels."""
    path, corpus = tmp_path / "planned.toml", write_corpus(tmp_path / "text")
    sets = [f"data.train={corpus}", "data.batch_size=6", "train.steps=3", "train.log_every=1", *TINY]
    run_cli("plan", "demo", "--gpu", "3xa100", "--out", str(path), *(part for one in sets for part in ("--set", one)))
    run_cli("train", str(path), "--set", f"run.dir={tmp_path / 'run'}", "--set", "run.device=cpu")
    assert load_config(path).techniques.fused == FusedConfig()
    assert len([event for event in read_events(tmp_path / "run") if "loss" in event]) == 3


def test_a_planned_run_goes_on_as_it_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same command with --resume, as `stretto launch --restarts` and schedulers start it, also where another
    choice would be made by now."""
    folder = tmp_path / "run"
    small = [f"run.dir={folder}", f"data.train={write_corpus(tmp_path / 'text')}", "run.device=cpu"]
    small += ["data.batch_size=6", "train.log_every=1", "optim.schedule=constant"]
    options = [part for one in (*small, *TINY) for part in ("--set", one)]
    run_cli("train", "demo", "--plan", "--set", "train.steps=2", *options)
    monkeypatch.setattr("stretto.planning.search.plan_run", lambda *_: pytest.fail("it was planned already"))
    begun, more = load_config(folder / "config.toml"), ("--resume", "--set", "train.steps=4")
    run_cli("train", "demo", "--plan", *more, *options)
    assert load_config(folder / "config.toml").data == begun.data
    assert [event["step"] for event in read_events(folder) if "loss" in event] == [1, 2, 3, 4]


def test_processes_of_a_cpu_share_it() -> None:
    one, four = make_cpu(), make_cpu(4)
    assert (four.count, four.memory) == (4, one.memory // 4) and four.flops == one.flops / 4


def test_a_narrow_terminal_has_room_for_words() -> None:
    found = plan("causal-lm", "8xh100", approximate=True)
    for width in (80, 100, 150):
        console = Console(width=width, file=StringIO())
        console.print(make_table(found, width))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= width and len(lines) < 4 + 2 * ROWS
        assert any("data 8" in line and "tokens/s" not in line for line in lines)


@pytest.mark.parametrize("recipe", ["classify", "images", "translation"])
def test_every_kind_of_recipe_can_be_measured(recipe: str) -> None:
    sizes = ["model.layers=1", "model.width=32", "model.heads=2", "model.mlp_width=32", "run.device=cpu"]
    of_images = ["model.image_size=32", "model.patch=16", "model.classes=10"]
    sizes += of_images if recipe == "images" else ["model.vocab=64", "data.seq_len=16", "data.max_tokens=32"]
    config, _ = complete_sizes(load_recipe(recipe, [*sizes, "data.batch_size=2"]))
    assert probe.probe(config)["loss"] > 0
