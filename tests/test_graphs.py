"""Steps as CUDA graphs: the same numbers, chosen where they help, and a clear answer where they cannot be used.

Two processes are in tests/distributed/test_graphs.py, the shapes of batches in test_buckets.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stretto.build
import stretto.train
from stretto import checkpoint, graphs, runtime
from stretto.batch import Batch, Counts, copy_into, pack, shape_of
from stretto.buckets import to_bucket
from stretto.build import Trainable
from stretto.config import Config, load_config
from stretto.errors import ConfigError, NonFiniteError
from stretto.evaluate import evaluate
from stretto.execute import Executor
from stretto.gradients import Gradients, Static
from stretto.mesh import Mesh
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.train import train
from tests.corpora import write_images, write_pairs
from tests.models import KINDS, make_batch
from tests.ops.checks import DEVICE
from tests.runs import MakeConfig, explain_graphs

NEVER = 10**9
Run = Callable[..., tuple[list[float], checkpoint.Snapshot]]


@pytest.fixture
def run(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Losses and the last checkpoint of a run with dropout everywhere."""

    def run(name: str, resume: bool = False, **changes: Any) -> tuple[list[float], checkpoint.Snapshot]:
        """`train__graphs="open"`: as with "on" but launched by the host, since the choice is put off for ever."""
        folder = tmp_path / name
        defaults: dict[str, Any] = {
            "run__dir": str(folder), "run__device": "cuda", "train__steps": 50, "techniques__fused": {},
            "data__join_documents": True, "model__attention_dropout": 0.1, "model__activation_dropout": 0.1,
            "run__deterministic": True, "train__graphs": "off",
        }  # fmt: skip
        changes = defaults | changes
        with monkeypatch.context() as patch:
            if changes["train__graphs"] == "open":
                changes["train__graphs"] = "auto"
                patch.setattr(graphs, "TIMED", NEVER)
            config: Config = make_config(**changes)
            train(config, resume)
        losses = [event["loss"] for event in read_events(folder) if "loss" in event]
        return losses, checkpoint.load(folder / "checkpoints", config.train.steps)

    return run


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every replay from now on."""
    seen, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: seen.append(graph) or replay(graph))
    return seen


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing speaks against graphs, on a CPU too: everything but the recording itself can be tried there."""
    monkeypatch.setattr(stretto.build, "_find_obstacles", lambda *args: [])


def assert_equal(one: tuple[list[float], checkpoint.Snapshot], two: tuple[list[float], checkpoint.Snapshot]) -> None:
    assert one[0] == two[0]
    for mine, theirs in ((one[1].weights, two[1].weights), (one[1].moments, two[1].moments)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


def ragged(task: str, folder: Path) -> dict[str, Any]:
    """Batches that differ in the number of tokens, sequences or labels."""
    if task == "masked":
        return {
            "data__task": "masked", "model__kind": "encoder", "data__join_documents": False, "data__batch_size": 5,
            "data__seq_len": 15,
        }  # fmt: skip
    prefix = str(write_pairs(folder / "pairs"))
    return {
        "data__task": "translation", "data__train": prefix, "data__eval": prefix, "data__languages": ["xx", "yy"],
        "model__kind": "encoder-decoder", "data__max_tokens": 64, "data__seq_len": 64, "model__max_len": 64,
        "data__join_documents": False,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("weights", ["fp32", "split", "bf16"])
def test_a_language_model_trains_bit_for_bit_as_without(
    run: Run, replays: list[object], weights: str, micro_batches: int
) -> None:
    fused = {"weights": weights, "moments": "bf16" if weights == "bf16" else "fp32"}
    extra: dict[str, Any] = {"techniques__fused": fused, "train__eval_every": 20, "train__micro_batches": micro_batches}
    off = run("off", **extra)
    assert not replays
    assert_equal(off, run("on", **extra, train__graphs="on"))
    # One micro-batch: whole steps from the second on. Two: a pass is recorded within the first step, the update later.
    assert len(replays) == (49 if micro_batches == 1 else 99 + 49)
    assert len(set(replays)) == micro_batches


KEPT: dict[str, dict[str, Any]] = {
    "lean": {"techniques__lean": {}},
    "inputs": {"techniques__lean": {"norms": "input", "mlp": "input", "qkv": "input"}},
    "blocks": {"techniques__lean": {"blocks": 1}},
    "8 bits": {"techniques__fp8": {"sites": "all"}},
    "the mean of the weights": {"train__ema": 0.9, "train__eval_every": 20},
    "the mean over two batches": {"train__ema": 0.9, "train__micro_batches": 2},
    "8 bits in blocks, lean": {"techniques__fp8": {"sites": "all", "recipe": "block128"}, "techniques__lean": {}},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_and_rounded_is_so_in_graphs_too(run: Run, replays: list[object], name: str) -> None:
    wide = {"model__width": 128, "train__precision": "bf16"}
    extra: dict[str, Any] = wide | {"techniques__fused": {"weights": "split"}} | KEPT[name]
    off = run("off", **extra)
    assert not replays
    assert_equal(off, run("on", **extra, train__graphs="on"))
    assert len(replays) > 40


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_autograd_hears_of_every_replayed_update_once(make_config: MakeConfig, micro_batches: int) -> None:
    changes: dict[str, Any] = {"techniques__fused": {"weights": "split"}, "train__precision": "bf16"}
    config = make_config(run__device="cuda", train__graphs="on", train__micro_batches=micro_batches, **changes)
    config = replace(config, model=replace(config.model, vocab=260))
    parts = stretto.train.build(config, Runtime(torch.device("cuda")), Mesh())
    batch, weights = make_batch(KINDS["decoder"]).to(torch.device("cuda")), list(parts.model.parameters())
    for step in range(8):
        # While steps are recorded nobody else may hold on to the weights' part in a backward pass.
        early = parts.model(batch) if step > 4 else None
        versions = [p._version for p in weights]
        batches = [(step * micro_batches + i, batch) for i in range(micro_batches)]
        stretto.train.run_step(parts, step, batches, micro_batches * batch.counts.labels, 1)
        assert [p._version for p in weights] == [version + 1 for version in versions], step
        if early is not None:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                early.backward()
    assert isinstance(parts.executor, graphs.Recorded)
    assert (parts.executor.whole if micro_batches == 1 else parts.executor.update).recordings


def test_what_a_replay_changes_is_made_known_to_autograd() -> None:
    """What a graph writes it writes by address, as numpy does here in its place."""

    class Graph:
        def replay(self) -> None:
            weight.detach().numpy()[:] += 1

    weight, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    recorder = graphs.Recorder(lambda: (), graphs.prepare_nothing, memory=None)  # type: ignore[arg-type]
    recorder.recordings[()] = graphs.Recording(Graph(), [], (), None, [weight])  # type: ignore[arg-type]
    loss = (weight.square() * other).sum()
    recorder.run()
    assert weight.tolist() == [2, 2, 2] and (weight._version, other._version) == (1, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Replayed:
    """A graph whose replay is noted."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.mark.parametrize("stay", [False, True])
def test_an_update_without_a_key_is_launched_and_recordings_stay(monkeypatch: pytest.MonkeyPatch, stay: bool) -> None:
    """One that a technique watches, say; with gradients that stay in place, too."""
    monkeypatch.setattr(graphs, "Memory", lambda: SimpleNamespace(borrowed=nullcontext))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls, loss = list[str](), torch.zeros(())
    gradients: Any = SimpleNamespace(stay=stay, sync=lambda last: nullcontext(), finish=lambda: None)
    work: Any = SimpleNamespace(
        gradients=gradients, device=torch.device("cpu"), seed_for=lambda index: None,
        learn=lambda batch: calls.append("learn") or loss, apply=lambda: calls.append("apply") or loss,
    )  # fmt: skip
    executor = graphs.Recorded(work, SimpleNamespace(recording=graphs.prepare_nothing))

    def record(recorder: graphs.Recorder, results: int) -> None:
        batches: list[Any] = [{}] * (recorder is not executor.update)
        graph = Replayed(calls)
        shape = tuple(map(shape_of, batches))
        recorder.recordings[shape] = graphs.Recording(graph, batches, (loss,) * results, None, [])  # type: ignore

    executor.turn_to(())
    for recorder, results in ((executor.whole, 2), (executor.passes, 1), (executor.update, 1)):
        record(recorder, results)
    for key in ((), None, ()):
        executor.run([(0, {})], key)
    replays = ["replay"] * (1 + stay)
    assert calls == [*replays, "learn", "apply", *replays]
    executor.turn_to("another")
    assert not executor.whole.recordings and not executor.passes.recordings and executor.update.recordings
    executor.forget()
    assert not executor.update.recordings


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [{}, {"data__mixup": 0.8, "data__cutmix": 1.0}], ids=["plain", "mixed"])
def test_images_train_bit_for_bit_as_without(run: Run, tmp_path: Path, mixed: dict[str, float]) -> None:
    data: dict[str, Any] = {"data__task": "images", "data__train": str(write_images(tmp_path / "images.npz")), **mixed}
    data |= {"model__kind": "vit", "model__image_size": 16, "model__patch": 8, "data__join_documents": False}
    assert_equal(run("off", **data), run("on", **data, train__graphs="on"))


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("task", ["masked", "translation"])
def test_ragged_batches_train_bit_for_bit_as_in_the_same_buckets_without(
    run: Run, replays: list[object], tmp_path: Path, task: str, micro_batches: int
) -> None:
    extra = ragged(task, tmp_path) | {"train__eval_every": 20, "train__micro_batches": micro_batches}
    launched = run("open", **extra, train__graphs="open")
    assert not replays
    assert_equal(launched, run("on", **extra, train__graphs="on"))
    num_graphs = len(set(replays)) - (micro_batches - 1)  # without that of the update
    assert len(replays) > 20 and {"masked": 1, "translation": 5}[task] <= num_graphs <= graphs.MOST


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["batch", "sample"])
@pytest.mark.parametrize("scale", ["branch", "update"])
def test_leaving_out_blocks_trains_bit_for_bit_as_without(
    run: Run, replays: list[object], gate: str, scale: str
) -> None:
    """Through all levels of theta, and then some steps at the lowest."""
    drop = {"gate": gate, "scale": scale, "theta": 0.3, "gamma": 0.05}
    extra: dict[str, Any] = {"techniques__layer_drop": drop, "model__layers": 6, "train__steps": 120}
    off = run("off", **extra)
    assert not replays
    assert_equal(off, run("on", **extra, train__graphs="on"))
    assert len(replays) > 40 and len(set(replays)) > 5


@pytest.mark.gpu
def test_graphs_may_all_be_forgotten(run: Run) -> None:
    """At another theta. Here nobody else keeps them."""
    drop = {"techniques__layer_drop": {"theta": 0.3, "gamma": 0.1}, "model__layers": 6, "train__steps": 60}
    assert_equal(run("off", **drop), run("on", **drop, train__graphs="on"))


@pytest.mark.gpu
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_networks_without_norms_train_bit_for_bit_as_without(
    run: Run, replays: list[object], tmp_path: Path, axis: str
) -> None:
    """Batches of one shape have different numbers of real tokens; the loss grows from step to step."""
    extra = ragged("masked", tmp_path) | {"techniques__standardize": {"axis": axis, "warmup": 30, "stride": 3}}
    launched = run("open", **extra, train__graphs="open")
    assert not replays
    assert_equal(launched, run("on", **extra, train__graphs="on"))
    assert len(replays) > 20


@pytest.mark.gpu
def test_there_are_only_so_many_graphs(
    run: Run, replays: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    data = ragged("translation", tmp_path)
    assert_equal(run("open", **data, train__graphs="open"), run("on", **data, train__graphs="on"))
    assert len(set(replays)) == 2 and len(replays) < 49


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_small_model_chooses_them_by_itself(
    run: Run, replays: list[object], capsys: pytest.CaptureFixture[str], micro_batches: int
) -> None:
    extra = {"train__micro_batches": micro_batches}
    off = run("off", **extra)
    assert "CUDA graphs" not in capsys.readouterr().out
    assert_equal(off, run("auto", **extra, train__graphs="auto"))
    assert capsys.readouterr().out.count("CUDA graphs: on: the host takes ") == 1 and replays


@pytest.mark.gpu
def test_a_resumed_run_records_at_another_step_and_ends_with_the_same_bits(run: Run) -> None:
    options: dict[str, Any] = {"train__graphs": "on", "optim__schedule": "constant", "train__steps": 12}
    whole = run("whole", **options)
    run("parts", **(options | {"train__steps": 7}))
    parts = run("parts", **options, resume=True)
    assert_equal(whole, parts)


@pytest.mark.gpu
def test_a_cancelled_update_is_cancelled_in_a_graph_too(run: Run, replays: list[object]) -> None:
    """The first update ruins the weights; the second step is recorded, and its gradient is not finite."""
    with pytest.raises(NonFiniteError, match="none was applied"):
        run("on", train__graphs="on", optim__lr=1e30, optim__clip=0.0)
    assert len(replays) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_memory_is_not_taken_twice(
    run: Run, replays: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    """Evaluation, here at the end alone, takes a little of its own beside that of the graphs."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("train", "train-too", "zzz"):  # the last documents are held out
        (folder / f"{name}.txt").write_text("the quick brown fox jumps over the lazy dog " * 2000)
    extra: dict[str, Any] = {
        "model__width": 1024, "model__layers": 4, "model__heads": 16, "model__max_len": 512, "data__seq_len": 512,
        "data__batch_size": 16, "train__steps": 8, "train__micro_batches": micro_batches,
    }  # fmt: skip
    reserved = {}
    for name in ("warm", "off", "on"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

        def evaluate_and_note(*args: Any, name: str = name) -> Any:
            reserved[name] = torch.cuda.max_memory_reserved()
            return evaluate(*args)

        monkeypatch.setattr(stretto.train, "evaluate", evaluate_and_note)
        run(name, **extra, train__graphs="on" if name == "on" else "off")
    assert replays and reserved["off"] > 2**30
    assert reserved["on"] <= 1.1 * reserved["off"], reserved


@pytest.mark.gpu
def test_many_shapes_share_the_same_memory(make_config: MakeConfig) -> None:
    """Batches that grow, which is the hardest order: no block of one shape is large enough for the next."""
    weight = torch.ones(4096, device="cuda", requires_grad=True)

    def work(batch: Batch) -> tuple[torch.Tensor, ...]:
        x = batch.labels[:, None] * weight
        for _ in range(8):
            x = (1.01 * x).sin()
        loss = x.sum()
        loss.backward()
        loss, weight.grad = loss.detach() + weight.grad.sum(), None  # type: ignore[union-attr]
        return (loss,)

    with runtime.start(make_config(run__device="cuda").run):
        sizes = range(4000, 8000, 500)
        batches = [Batch(torch.ones(size, device="cuda"), Counts(size, size, size, size), ()) for size in sizes]
        recorder = graphs.Recorder(work, graphs.prepare_nothing, graphs.Memory())
        reserved, losses = {}, {}
        for name, step in (("off", work), ("on", recorder.run)):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            losses[name] = [float(step(batch)[0]) for _ in range(3) for batch in batches]
            reserved[name] = torch.cuda.max_memory_reserved()
    assert len(recorder.recordings) == len(batches) and losses["on"] == losses["off"]
    assert 2**30 < reserved["on"] <= 1.1 * reserved["off"], reserved


@pytest.mark.gpu
def test_garbage_waits_until_a_recording_is_over() -> None:
    """A graph in it that were destroyed meanwhile would invalidate the recording."""
    made: list[object] = []

    def work(batch: Batch) -> tuple[torch.Tensor, ...]:
        made.extend([] for _ in range(10 * gc.get_threshold()[0]))  # enough to start a collection
        return (batch.labels + 1,)

    def record(prepare: graphs.Prepare) -> graphs.Recorder:
        recorder = graphs.Recorder(work, prepare, graphs.Memory())
        for _ in range(graphs.TIMES):
            recorder.run(Batch(torch.ones(4, device="cuda"), Counts(4, 4, 4, 4), ()))
        return recorder

    def lose() -> Any:
        ring: list[object] = [old.pop()]
        ring.append(ring)
        return graphs.prepare_nothing()

    old = [record(graphs.prepare_nothing)]
    assert record(lose).recordings and not old and gc.isenabled()


def test_they_say_why_they_cannot_be_used(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.graphs: they need a GPU; .*techniques\.fused.*; fp16 .*bf16"):
        train(make_config(train__graphs="on", train__precision="fp16"))


def test_the_log_says_why_not_but_not_on_a_cpu(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(train__steps=2)
    assert config.train.graphs == "auto"
    train(config)
    assert "CUDA graphs" not in capsys.readouterr().out
    (line,) = explain_graphs(make_config(techniques__fused=False))
    assert line.startswith("CUDA graphs: off: they need [techniques.fused]")
    assert explain_graphs(config) == explain_graphs(make_config(techniques__fused={})) == []
    assert explain_graphs(make_config(techniques__fused=False, train__graphs="off")) == []
    (line,) = explain_graphs(make_config(train__precision="fp16"))
    assert "fp16" in line and "fused" not in line
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert explain_graphs(config) == []
    (line,) = explain_graphs(make_config(parallel__data="shard"))
    assert "shard" in line


def test_blocks_that_are_left_out_may_stand_in_the_way(make_config: MakeConfig) -> None:
    def find(micro_batches: int = 1, **drop: Any) -> str:
        changes = {"techniques__layer_drop": drop, "train__micro_batches": micro_batches}
        return "".join(explain_graphs(make_config(techniques__fused={}, **changes)))

    assert find() == find(gate="sample", sampling="bernoulli") == find(2, gate="sample") == ""
    assert "too many patterns to record: set it to 'systematic'" in find(sampling="bernoulli")
    assert "set its gate to 'sample'" in find(2)


def test_the_setting_is_a_word(make_config: MakeConfig, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[train]\ngraphs = true\n")
    with pytest.raises(ConfigError, match=r"train\.graphs = True must be one of 'auto', 'on', 'off'"):
        load_config(recipe)


CPU: dict[str, Any] = {"run__device": "cpu", "train__steps": 8, "train__eval_every": 3}


@pytest.mark.parametrize("weights", ["fp32", "split"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_static_gradients_add_up_bit_for_bit_as_those_of_autograd(
    run: Run, possible: None, monkeypatch: pytest.MonkeyPatch, micro_batches: int, weights: str
) -> None:
    made, settle = [], Static.settle
    monkeypatch.setattr(Static, "settle", lambda gradients: (made.append(gradients), settle(gradients)))
    extra = CPU | {"train__micro_batches": micro_batches, "techniques__fused": {"weights": weights}}
    if weights == "split":
        extra["train__precision"] = "bf16"
    off = run("off", **extra)
    assert not made
    assert_equal(off, run("open", **extra, train__graphs="open"))
    assert len(made) == (8 * micro_batches if micro_batches > 1 else 0) and len(set(made)) <= 1


def test_static_gradients_stay_where_they_are(make_config: MakeConfig, possible: None) -> None:
    config = make_config(techniques__fused={}, train__micro_batches=2, model__vocab=260)
    parts = stretto.train.build(config, Runtime(torch.device(DEVICE)), Mesh())
    batch, gradients = make_batch(KINDS["decoder"]), parts.update.gradients
    assert isinstance(gradients, Static)
    places = []
    for step in range(2):
        for _ in range(2):
            parts.update.learn(batch)
            places.append([p.grad.data_ptr() for p in parts.model.parameters() if p.grad is not None])
        assert any(flat.abs().max() > 0 for flat in gradients.flats)
        parts.update.apply()
        assert all(not flat.any() for flat in gradients.flats), step
    assert len(places[0]) == len(list(parts.model.parameters()))
    assert all(place % 64 == 0 for place in places[0]) and all(some == places[0] for some in places)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_that_the_device_holds_up_is_left_alone(
    run: Run,
    possible: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    micro_batches: int,
) -> None:
    """The choice itself, after the fourth step: it changes no number, and gradients are autograd's again."""
    monkeypatch.setattr(graphs, "LAUNCH_BOUND", 2.0)  # no host takes longer than the whole
    built: list[Trainable] = []
    build = stretto.train.build
    monkeypatch.setattr(stretto.train, "build", lambda *args: built.append(build(*args)) or built[-1])
    extra = CPU | {"train__micro_batches": micro_batches}
    off = run("off", **extra)
    assert "CUDA graphs" not in capsys.readouterr().out
    assert_equal(off, run("auto", **extra, train__graphs="auto"))
    assert capsys.readouterr().out.count("CUDA graphs: off: the host takes ") == 1
    executor, gradients = built[-1].executor, built[-1].update.gradients
    assert isinstance(executor, graphs.Auto) and type(executor.chosen) is Executor and type(gradients) is Gradients


class Peer(Runtime):
    """One of two processes; the other one has told its times."""

    other = (0, 0)

    def sum_over_ranks(self, values: Any, group: Any = None) -> list[int]:
        return [*values[:2], *self.other] if self.rank == 0 else [*self.other, *values[2:]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("other", "wanted"), [((9000, 10000), "on"), ((3000, 10000), "off")])
def test_the_process_that_launching_holds_up_most_decides(
    make_config: MakeConfig, possible: None, monkeypatch: pytest.MonkeyPatch, rank: int, other: Any, wanted: str
) -> None:
    """Mine needs 1 of 10 ms."""
    monkeypatch.setattr(graphs, "Recorded", lambda work, optimizer: (work, optimizer))
    peer = Peer(torch.device("cpu"), rank, 2)
    peer.other = other
    parts = stretto.train.build(make_config(techniques__fused={}, model__vocab=64), peer, Mesh(rank, 2))
    executor, update = parts.executor, parts.update
    assert isinstance(executor, graphs.Auto) and isinstance(update.gradients, Static)
    executor._choose(1e-3, 10e-3)
    host = {"on": "9.0", "off": "3.0"}[wanted]
    assert executor.take_notes() == [f"CUDA graphs: {wanted}: the host takes {host} ms of a step's 10.0 ms"]
    chosen: Any = executor.chosen
    assert (chosen == (update, update.optimizer)) == (wanted == "on")
    assert isinstance(update.gradients, Static) == (wanted == "on")


def test_buckets_change_only_rounding_in_a_run(run: Run, possible: None, tmp_path: Path) -> None:
    """Ragged documents and sentences, without dropout, whose masks follow the shape."""
    calm = CPU | {"model__dropout": 0.0, "model__attention_dropout": 0.0, "model__activation_dropout": 0.0}
    for task in ("masked", "translation"):
        (plain, _), (bucketed, _) = (
            run(f"{task}-{how}", **calm | ragged(task, tmp_path), train__graphs=how) for how in ("off", "open")
        )
        assert bucketed == pytest.approx(plain, abs=1e-4), task
        shares = [event["padding"] for event in read_events(tmp_path / f"{task}-open") if "loss" in event]
        assert 0 < max(shares) < 0.5, "batches this small have much filler"


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder", "vit"])
def test_batches_of_one_shape(name: str) -> None:
    one, other = (make_batch(KINDS[name], seed=seed) for seed in (0, 20))
    if name == "encoder":
        assert shape_of(one) != shape_of(other)  # another number of labels
        one, other = (to_bucket(batch.to(torch.device("cpu"))) for batch in (one, other))
    assert shape_of(one) == shape_of(other)
    assert name == "vit" or shape_of(one) != shape_of(make_batch(KINDS[name], "padded"))
    own = pack(one)
    copy_into(own, other)
    for role in ("labels", "pixels"):
        mine, wanted, first = (getattr(batch, role) for batch in (own, other, one))
        assert wanted is None or (torch.equal(mine, wanted) and mine is not first)
    if own.inputs is not None and other.inputs is not None:
        assert torch.equal(own.inputs.ids, other.inputs.ids) and not torch.equal(own.inputs.ids, one.inputs.ids)  # type: ignore[union-attr]


def test_processes_do_not_add_up_what_only_one_of_them_has(monkeypatch: pytest.MonkeyPatch) -> None:
    always, sometimes = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    gradients = Static(torch.nn.ModuleDict({"always": always, "sometimes": sometimes}))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    always(torch.ones(1, 2)).sum().backward()
    gradients.settle()
    sometimes(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"^sometimes\.weight has a gradient now, and had none in the first batch"):
        gradients.settle()


def test_static_gradients_of_parameters_that_are_used_later_go_with_the_update() -> None:
    always, sometimes = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    gradients = Static(torch.nn.ModuleList([always, sometimes]))
    for used in ([always], [always, sometimes], [always]):
        for layer in used:
            layer(torch.ones(1, 2)).sum().backward()
        gradients.settle()
        assert (sometimes.weight.grad is not None) == (sometimes in used)
        gradients.zero(torch.optim.SGD(sometimes.parameters()))
        assert sometimes.weight.grad is None and always.weight.grad is not None and not always.weight.grad.any()
