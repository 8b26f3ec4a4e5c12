"""The trainer's promises: exact resume, exact accumulation, nothing non-finite applied, nothing lost when stopped."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto.run
import stretto.train
from stretto import checkpoint
from stretto.checkpoint import verify
from stretto.config import Config
from stretto.data.prefetch import prefetch
from stretto.errors import CheckpointError, ConfigError, NonFiniteError, Preempted
from stretto.evaluate import evaluate
from stretto.optim import learning_rate
from stretto.report import Meter, read_events
from stretto.train import train
from tests.runs import MakeConfig


@dataclass
class Trace:
    """All that one run consumed and produced."""

    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    samples: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    final: checkpoint.Snapshot | None = None


@pytest.fixture
def trace_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trace]:
    """Runs a configuration, stopped by a real SIGTERM after the given steps and resumed each time."""

    def run(config: Config, stops: tuple[int, ...] = ()) -> Trace:
        trace, left = Trace(), list(stops)
        run_step, done = stretto.train.run_step, 0

        def watched(parts: Any, step: int, batches: Any, *rest: Any) -> Any:
            nonlocal done
            trace.samples += [(index, batch.samples) for index, batch in batches]
            result = run_step(parts, step, batches, *rest)
            done += 1
            if left and done == left[0]:  # the flag is read before the next step
                left.pop(0)
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(stretto.train, "run_step", watched)
            for number in range(len(stops) + 1):
                torch.manual_seed(0)  # a new process would begin like this
                if number < len(stops):
                    with pytest.raises(Preempted, match=f"after step {stops[number]} "):
                        train(config, resume=number > 0)
                else:
                    train(config, resume=number > 0)
        folder = Path(config.run.dir)
        for event in read_events(folder):
            if "loss" in event:
                trace.losses[event["step"]], trace.rates[event["step"]] = event["loss"], event["lr"]
        trace.final = checkpoint.load(folder / "checkpoints", config.train.steps)
        return trace

    return run


def assert_same(one: Trace, two: Trace) -> None:
    """Bit for bit."""
    assert one.samples == two.samples, "data position"
    assert one.losses == two.losses, "losses"
    assert one.rates == two.rates, "schedule"
    assert one.final is not None and two.final is not None
    for mine, theirs in ((one.final.weights, two.final.weights), (one.final.moments, two.final.moments)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


def no_randomness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stretto.step, "seed_all", lambda *keys: None)


def no_position(patch: pytest.MonkeyPatch) -> None:
    def from_the_start(make: Any, first: int, *rest: Any) -> Any:
        return prefetch(lambda i: make(i - first), first, *rest)

    patch.setattr(stretto.train, "prefetch", from_the_start)


def no_moments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "restore_moments", lambda *args: None)


def no_schedule(patch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    def forgetful(cfg: Any, step: int, total: int) -> float:
        if not starts or step < starts[-1]:
            starts[:] = [step]
        return learning_rate(cfg, step - starts[-1], total)

    load_latest = stretto.train.load_latest
    patch.setattr(stretto.train, "learning_rate", forgetful)
    patch.setattr(stretto.train, "load_latest", lambda *args: (starts.clear(), load_latest(*args))[1])


def twenty_steps(make_config: MakeConfig, folder: str, tmp_path: Path) -> Config:
    """Dropout, dropped layers, accumulation, warm-up, and an epoch boundary inside: 281 windows, 16 a step."""
    return make_config(
        run__dir=str(tmp_path / folder), train__steps=20, train__micro_batches=2, data__batch_size=8,
        techniques__layer_drop={"theta": 0.5, "schedule": "constant"},
    )  # fmt: skip


@pytest.mark.fault("R1")
def test_interrupted_equals_uninterrupted(
    make_config: MakeConfig, trace_run: Callable[..., Trace], tmp_path: Path
) -> None:
    whole = trace_run(twenty_steps(make_config, "whole", tmp_path))
    seen = [sample for _, samples in whole.samples for sample in samples]
    assert len(seen) == 320 > len(set(seen)), "the run must reach into a second epoch"
    for stops in ((10,), (7, 13)):
        name = "-".join(map(str, stops))
        assert_same(whole, trace_run(twenty_steps(make_config, name, tmp_path), stops))


@pytest.mark.control("R1")
@pytest.mark.parametrize("sabotage", [no_randomness, no_position, no_moments, no_schedule])
def test_each_sabotage_of_resume_is_caught(
    make_config: MakeConfig,
    trace_run: Callable[..., Trace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[pytest.MonkeyPatch], None],
) -> None:
    sabotage(monkeypatch)
    whole = trace_run(twenty_steps(make_config, "whole", tmp_path))
    parts = trace_run(twenty_steps(make_config, "parts", tmp_path), (10,))
    with pytest.raises(AssertionError):
        assert_same(whole, parts)


def test_accumulation_equals_the_large_batch(make_config: MakeConfig, trace_run: Callable[..., Trace]) -> None:
    """Two micro-batches of 4 hold the same windows as one of 8, but not equally many labels."""
    common = {"model__dropout": 0.0, "train__steps": 4}
    large = trace_run(make_config(data__batch_size=8, run__dir=make_config().run.dir + "-large", **common))
    small = trace_run(make_config(train__micro_batches=2, run__dir=make_config().run.dir + "-small", **common))
    assert [s for _, samples in large.samples for s in samples] == [s for _, samples in small.samples for s in samples]
    for step, loss in large.losses.items():
        assert small.losses[step] == pytest.approx(loss, abs=1e-6)
    assert large.final is not None and small.final is not None
    for name, value in large.final.weights.items():
        torch.testing.assert_close(small.final.weights[name], value, atol=2e-5, rtol=0)


def is_same_when_busy(make_config: MakeConfig, trace_run: Callable[..., Trace], tmp_path: Path) -> bool:
    """Whether a run that saves, logs and evaluates after every step ends like one that does so in the end only."""
    quiet = trace_run(make_config(run__dir=str(tmp_path / "quiet"), train__log_every=100))
    busy = trace_run(make_config(run__dir=str(tmp_path / "busy"), train__eval_every=1, checkpoint__every=1))
    assert quiet.final is not None and busy.final is not None and len(busy.losses) == 6
    pairs = [(quiet.final.weights, busy.final.weights), (quiet.final.moments, busy.final.moments)]
    same = all(torch.equal(other[name], value) for one, other in pairs for name, value in one.items())
    return same and busy.losses.items() >= quiet.losses.items()


@pytest.mark.fault("R3")
def test_saving_logging_and_evaluating_change_nothing(
    make_config: MakeConfig, trace_run: Callable[..., Trace], tmp_path: Path
) -> None:
    assert is_same_when_busy(make_config, trace_run, tmp_path)


@pytest.mark.control("R3")
@pytest.mark.parametrize("name", ["save", "evaluate"])
def test_one_random_number_in_saving_or_evaluating_would_be_seen(
    make_config: MakeConfig,
    trace_run: Callable[..., Trace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """If steps did not seed what they draw."""
    real = getattr(stretto.train, name)
    monkeypatch.setattr(stretto.train, name, lambda *args: (torch.rand(1), real(*args))[1])
    assert is_same_when_busy(make_config, trace_run, tmp_path / "seeded")
    no_randomness(monkeypatch)
    assert not is_same_when_busy(make_config, trace_run, tmp_path / "not seeded")


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Makes the loss infinite at these steps, inside the real update."""
    run_step, count = stretto.train.run_step, 0

    def poisoned(parts: Any, *rest: Any) -> Any:
        nonlocal count
        count += 1
        handle = None
        if count in steps:
            handle = parts.model.register_forward_hook(lambda module, args, loss: loss * torch.inf)
        result = run_step(parts, *rest)
        if handle is not None:
            handle.remove()
        return result

    monkeypatch.setattr(stretto.train, "run_step", poisoned)


def test_a_bad_update_stops_the_run_before_it_is_applied(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {4})
    config = make_config(checkpoint__every=3)
    with pytest.raises(NonFiniteError, match="step 4"):
        train(config)
    assert checkpoint.steps(Path(config.run.dir) / "checkpoints") == [3]


def test_skip_leaves_weights_and_moments_and_goes_on(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, {4})
    config = make_config(train__non_finite="skip", checkpoint__every=1, checkpoint__keep=10)
    train(config)
    folder = Path(config.run.dir) / "checkpoints"
    before, after, later = (checkpoint.load(folder, step) for step in (3, 4, 5))
    for old, new in ((before.weights, after.weights), (before.moments, after.moments)):
        assert all(torch.equal(new[name], value) for name, value in old.items())
    assert not torch.equal(later.weights["embedding.token.weight"], after.weights["embedding.token.weight"])
    assert [event["cancelled"] for event in read_events(folder.parent) if "loss" in event] == [0, 0, 0, 1, 1, 1]


def test_too_many_skips_in_a_row_stop_the_run(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2, 3, 4, 5})
    with pytest.raises(NonFiniteError, match="4 update"):
        train(make_config(train__non_finite="skip", train__steps=8))


def test_loss_falls_and_the_run_folder_is_complete(make_config: MakeConfig) -> None:
    config = make_config(train__steps=40, train__log_every=5, train__eval_every=20)
    folder = train(config)
    losses = [event["loss"] for event in read_events(folder) if "loss" in event]
    assert losses[0] > 5.0 and losses[-1] < 3.2
    names = {path.name for path in folder.iterdir()}
    assert {"config.toml", "events.jsonl", "tensorboard", "checkpoints", "report.html", "data"} <= names
    assert list((folder / "tensorboard").glob("events*"))
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if "loss" in event:
            assert event["tokens_per_s"] > 0 and event["flops_per_s"] > 0
            assert {"step", "lr", "grad_norm", "padding", "mfu", "memory_gib"} <= set(event)
    scores = {event["eval_loss"]: event["step"] for event in read_events(folder) if "eval_loss" in event}
    assert checkpoint.find_best(folder / "checkpoints") == scores[min(scores)]


def test_a_run_that_keeps_no_checkpoint_writes_none(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(checkpoint__keep=0, checkpoint__every=1, train__eval_every=2)
    folder = train(config)
    assert not (folder / "checkpoints").exists() and (folder / "report.html").exists()
    losses = [event["eval_loss"] for event in read_events(folder) if "eval_loss" in event]
    assert len(losses) == 3

    run_step = stretto.train.run_step

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(stretto.train, "run_step", run_step)
        return run_step(*arguments)

    monkeypatch.setattr(stretto.train, "run_step", interrupted)
    with pytest.raises(Preempted, match="step 1 of 6; nothing was saved"):
        train(config)
    assert not (folder / "checkpoints").exists()


def test_the_meter_leaves_recordings_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0, 15.0, 15.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter(torch.device("cpu"), world=1)
    meter.add(80, 80, 0, 800)
    meter.leave_out_recording(2.0)
    assert meter.read() | {"memory_gib": 0} == {
        "tokens_per_s": 10.0, "flops_per_s": 100.0, "padding": 0.0, "mfu": 0.0, "memory_gib": 0,
    }  # fmt: skip
    meter.add(80, 80, 0, 800)
    meter.leave_out_recording(3.0)  # one more second
    assert meter.read()["tokens_per_s"] == 20.0
    assert (meter.total_seconds, meter.recording_seconds) == (12.0, 3.0)


def test_fp16_and_bf16_train_on_the_cpu_too(make_config: MakeConfig, tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        config = make_config(run__dir=str(tmp_path / precision), train__precision=precision, train__steps=20)
        events = read_events(train(config))
        losses = [event["loss"] for event in events if "loss" in event]
        assert losses[-1] < losses[0] - 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("join", [False, True])
def test_interrupted_equals_uninterrupted_on_a_gpu(
    make_config: MakeConfig, trace_run: Callable[..., Trace], tmp_path: Path, precision: str, join: bool
) -> None:
    runs = [
        trace_run(
            make_config(
                run__dir=str(tmp_path / name), run__device="cuda", run__deterministic=True, train__steps=20,
                techniques__fused=False, train__precision=precision, train__micro_batches=2, data__join_documents=join,
                data__batch_size=8,
            ),
            stops,
        )
        for name, stops in (("whole", ()), ("parts", (7, 13)))
    ]  # fmt: skip
    assert_same(*runs)


@pytest.mark.slow
def test_compile_follows_eager(make_config: MakeConfig, trace_run: Callable[..., Trace], tmp_path: Path) -> None:
    runs = [
        trace_run(make_config(run__dir=str(tmp_path / f"{on}"), train__compile=on, model__dropout=0.0))
        for on in (False, True)
    ]
    for step, loss in runs[0].losses.items():
        assert runs[1].losses[step] == pytest.approx(loss, abs=1e-4)


def test_a_second_start_without_resume_is_refused(make_config: MakeConfig) -> None:
    train(make_config())
    with pytest.raises(CheckpointError, match="--resume"):
        train(make_config())


def test_resume_of_another_configuration_lists_the_differences(make_config: MakeConfig) -> None:
    train(make_config())
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.01, is 0\.02.*run\.seed was 0, is 3"):
        train(make_config(optim__lr=0.02, run__seed=3), resume=True)


def test_a_run_of_a_version_with_fewer_options_can_be_resumed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as those it did not have are at their defaults."""
    whole = stretto.run._identity

    def older(run: Any) -> dict[str, Any]:
        identity = whole(run)
        del identity["model"]["head_bias"], identity["model"]["embed_shared"], identity["model"]["norm_order"]
        return identity

    with monkeypatch.context() as patch:
        patch.setattr(stretto.run, "_identity", older)
        train(make_config(train__steps=2))
    train(make_config(), resume=True)
    with pytest.raises(CheckpointError, match=r"configuration: model\.norm_order was 'pre', is 'post'$"):
        train(make_config(model__norm_order="post"), resume=True)


def test_resume_falls_back_over_a_damaged_checkpoint(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(checkpoint__every=2)
    folder = train(config)
    newest = folder / "checkpoints" / "step-00000006" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    train(config, resume=True)
    assert "step 6 is damaged" in capsys.readouterr().err
    assert checkpoint.find_newest(folder / "checkpoints") == 6
    steps = [event["step"] for event in read_events(folder) if "loss" in event]
    assert steps == [1, 2, 3, 4, 5, 6], "each step once, although 5 and 6 ran twice"


def test_resume_with_nothing_but_damage_is_refused(make_config: MakeConfig) -> None:
    folder = train(make_config())
    for path in (folder / "checkpoints").glob("*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = (folder / "events.jsonl").read_text()
    with pytest.raises(CheckpointError, match="move them away"):
        train(make_config(), resume=True)
    *lines, last = (folder / "events.jsonl").read_text().splitlines()
    assert lines == before.splitlines() and json.loads(last)["ended"]["code"] == 5


def test_resume_may_change_the_precision_but_not_the_samples(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(train__steps=2))
    train(make_config(train__steps=4, train__precision="fp16"), resume=True)
    train(make_config(train__steps=6), resume=True)
    with pytest.raises(CheckpointError, match=r"content\.num_train"):  # what was held out would now be trained on
        train(make_config(train__steps=8, data__eval=str(tmp_path / "text" / "000.txt")), resume=True)
    with pytest.raises(CheckpointError, match=r"at step 6, beyond train\.steps = 3"):
        train(make_config(train__steps=3), resume=True)


def test_a_sample_that_is_too_long_is_refused_before_step_one(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.sample"):
        train(make_config(train__sample="x" * 40))


def test_resume_without_a_checkpoint_begins(make_config: MakeConfig) -> None:
    train(make_config(), resume=True)


def test_vocabulary_that_is_too_small_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab = 100 .*260"):
        train(make_config(model__vocab=100))


def test_two_runs_cannot_share_a_folder(make_config: MakeConfig) -> None:
    from stretto.runtime import lock_folder

    folder = Path(make_config().run.dir)
    folder.mkdir()
    with lock_folder(folder), pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
        train(make_config())


@pytest.mark.parametrize(
    ("losses", "best", "kept"),
    [
        ((3.0, math.nan, 5.0, 4.5), 2, [8, 6, 2]),
        ((3.0, 2.5, 2.0, math.nan), 6, [8, 6]),
        ((math.nan, 3.0, math.inf, 3.0), 4, [8, 6, 4]),
        ((math.nan,) * 4, 0, [8, 6]),
    ],
)
def test_an_evaluation_that_is_not_a_number_is_never_the_best(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...], best: int, kept: list[int]
) -> None:
    values = iter(losses)
    monkeypatch.setattr(stretto.train, "evaluate", lambda *args: evaluate(*args) | {"eval_loss": next(values)})
    folder = train(make_config(train__steps=8, train__eval_every=2, checkpoint__every=2)) / "checkpoints"
    assert checkpoint.steps(folder) == kept
    assert checkpoint.load(folder, 8).state["best_step"] == best
    assert checkpoint.find_best(folder) == (best or 8)


def test_a_resumed_run_stops_at_a_checkpoint_that_cannot_be_used(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves it there: it may be whole, or someone's only copy."""
    config = make_config(checkpoint__every=2)
    folder = train(config) / "checkpoints"

    def unreadable(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(verify, "PAUSES_S", (0.0,), raising=False)
        patch.setattr(verify, "_hash", unreadable)
        with pytest.raises(CheckpointError, match="step-00000006 cannot be read"):
            train(config, resume=True)
    (folder / "step-00000006").rename(folder / "step-00000005")
    with pytest.raises(CheckpointError, match="step-00000005 is step-00000006 by its manifest"):
        train(config, resume=True)
    (folder / "step-00000005").rename(folder / "step-00000006")
    assert checkpoint.steps(folder) == [6, 4]
    shot = checkpoint.load(folder, 6)
    del shot.state["identity"]
    shutil.rmtree(folder)
    checkpoint.save(folder, shot, keep=1)
    with pytest.raises(CheckpointError, match="export --fold"):
        train(config, resume=True)
