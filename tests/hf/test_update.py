"""Updates that are planned, and on a GPU recorded, in stretto.hf.Trainer: what they change, and when they are refused.
On a CPU everything but the recording itself is tried."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import stretto.hf.trainer
import stretto.hf.update
import stretto.optim
from stretto.batch import copy_into, pack, shape_of
from stretto.execute import Executor
from stretto.graphs import TIMES, Recorder, prepare_nothing
from stretto.hf.acceleration import outermost
from stretto.hf.loop import DataCollator, Step
from stretto.hf.trainer import Trainer
from stretto.hf.update import MOST, OFTEN, Planned, Sizes, Update, noting_waits, plan
from tests.hf.families import Batch, accelerated, build, draw_batch
from tests.hf.trainers import add_dropout, assert_same_way, draw_samples, history, make, train_both

pytestmark = pytest.mark.usefixtures("fresh_accelerator")
FAMILIES = ["bert-classes", "gpt2", "marian"]


class Launched(Executor):
    def __init__(self, work: Any, optimizer: Any) -> None:
        super().__init__(work)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Planned | dict[str, Any]]:
    """Nothing speaks against graphs, on a CPU too; gives the batches of updates."""
    for module in (stretto.hf.update, stretto.hf.trainer):
        monkeypatch.setattr(module, "can_record", lambda device: True)
    monkeypatch.setattr(stretto.hf.update, "Recorded", Launched)
    monkeypatch.setattr(stretto.hf.update, "TRIES", 0)
    seen, run = list[Planned | dict[str, Any]](), Update.run
    monkeypatch.setattr(Update, "run", lambda self, batch, *others: seen.append(batch) or run(self, batch, *others))
    return seen


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "smoothing": {"label_smoothing_factor": 0.1},
    "smoothing-accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "no-limit": {"max_grad_norm": 0.0},
    "tight-limit": {"max_grad_norm": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "short-batches": {"per_device_train_batch_size": 5, "num_train_epochs": 3, "max_steps": -1},
    "short-updates": {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "max_steps": 7},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_go_the_way_of_theirs(family: str, options: str, runs: list[Any], tmp_path: Path) -> None:
    if family == "marian" and "smoothing" in options:
        pytest.skip("theirs needs decoder_input_ids for that: test_label_smoothing_of_pairs")
    ours, theirs = train_both(family, tmp_path, **OPTIONS[options])
    assert len(runs) >= 6 and all(isinstance(batch, Planned) for batch in runs)
    assert_same_way(ours, theirs)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)  # Adam: a rate of 1e-2 times a rounded direction


def test_autocast_goes_about_the_same_way(runs: list[Any], tmp_path: Path) -> None:
    assert_same_way(*train_both("gpt2", tmp_path, bf16=True), tolerance=0.02)
    assert runs


@pytest.mark.parametrize("accumulation", [1, 2])
def test_frozen_weights_stay(accumulation: int, runs: list[Any], tmp_path: Path) -> None:
    def freeze(model: nn.Module) -> nn.Module:
        for name, p in model.named_parameters():
            p.requires_grad_("attn" in name)
        return model

    makers: list[Any] = [accelerated, build]
    options = {"gradient_accumulation_steps": accumulation}
    ours, theirs = (
        make(kind, freeze(maker("gpt2")), tmp_path, "gpt2", **options)
        for kind, maker in zip((Trainer, hf.Trainer), makers, strict=True)
    )
    before = [p.clone() for p in ours.model.parameters()]
    ours.train()
    theirs.train()
    assert runs
    assert_same_way(ours, theirs)
    for p, old in zip(ours.model.parameters(), before, strict=True):
        assert torch.equal(p, old) != p.requires_grad


class Freezing(hf.TrainerCallback):
    """As recipes freeze and unfreeze layers while a model trains."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(state.global_step < 2 or "attn" in name or state.global_step > 3)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_may_be_frozen_while_it_trains(accumulation: int, runs: list[Any], tmp_path: Path) -> None:
    others, options = {"callbacks": [Freezing()]}, {"gradient_accumulation_steps": accumulation}
    ours, theirs = train_both("gpt2", tmp_path, others, **options)
    assert runs
    assert_same_way(ours, theirs)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)


def test_resumed_is_uninterrupted(runs: list[Any], tmp_path: Path) -> None:
    """All batches have one size here: with several, that of a batch depends on those before."""

    def begin() -> Any:
        options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "cosine"}
        trainer = make(Trainer, add_dropout(build("gpt2")), tmp_path, "gpt2", **options)
        trainer.train_dataset = [sample | {"input_ids": torch.arange(4, 12)} for sample in trainer.train_dataset]
        trainer.train_dataset = [sample | {"labels": sample["input_ids"]} for sample in trainer.train_dataset]
        return trainer

    whole, resumed = begin(), begin()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert runs and torch.equal(history(resumed), history(whole))
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_batches_that_cannot_be_planned_are_launched_among_the_others(runs: list[Any], tmp_path: Path) -> None:
    class WithEmptyRow(DataCollator):
        def __call__(self, samples: Any) -> dict[str, Tensor]:
            batch = super().__call__(samples)
            if len(samples[0]["input_ids"]) % 2:
                batch["attention_mask"][1], batch["labels"][1] = 0, -100
            return batch

    assert_same_way(*train_both("gpt2", tmp_path, {"data_collator": WithEmptyRow(1)}, gradient_accumulation_steps=2))
    assert {type(batch) for batch in runs} == {Planned, dict}


def test_a_smaller_batch_is_tried_where_memory_ends(runs: list[Any], tmp_path: Path) -> None:
    """What was learned before stays, as with theirs."""

    class Large(DataCollator):
        calls = 0

        def __call__(self, samples: Any) -> dict[str, Tensor]:
            self.calls += 1
            if self.calls > 2 and len(samples) > 3:
                raise RuntimeError("CUDA out of memory.")
            return super().__call__(samples)

    trainers = []
    for kind in (Trainer, hf.Trainer):
        trainers.append(make(kind, "gpt2", tmp_path, "", {"data_collator": Large(1)}, auto_find_batch_size=True))
        trainers[-1].train()
    assert len(runs) > 6 and trainers[0]._train_batch_size == trainers[1]._train_batch_size < 4
    assert_same_way(trainers[0], trainers[1])


def test_losses_that_are_not_finite_are_left_out_of_the_log_without_asking(runs: list[Any], tmp_path: Path) -> None:
    trainer = make(Trainer, "bert-classes", tmp_path, max_steps=3, logging_steps=3)
    given, backpropagate = [], trainer._backpropagate
    trainer._backpropagate = lambda inputs: given.append(1) or backpropagate(inputs) * (torch.nan if given[1:2] else 1)
    trainer.train()
    (line,) = [line for line in trainer.state.log_history if "loss" in line]
    assert 0 < line["loss"] < 5 and len(given) == 3
    assert trainer.args.logging_nan_inf_filter, "the argument is as it was"


class Looking(hf.TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **others: Any) -> None: ...


class Own(Trainer):
    def compute_loss(self, *args: Any, **others: Any) -> Any:
        return super().compute_loss(*args, **others)


class Hooking(hf.TrainerCallback):
    """As callbacks that watch a model do."""

    def on_train_begin(self, *args: Any, model: Any = None, **others: Any) -> None:
        model.get_submodule("classifier").register_forward_hook(lambda *_: None)


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


OBSTACLES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "compute_loss is a method of your own": (Own, {}, {}),
    "compute_loss_func is a function of your own": (Trainer, {"compute_loss_func": own_loss}, {}),
    "a hook looks at classifier": (Trainer, {"callbacks": [Hooking()]}, {}),
    "Looking looks at gradients": (Trainer, {"callbacks": [Looking()]}, {}),
    "layers are recomputed": (Trainer, {}, {"gradient_checkpointing": True}),
    "torch_empty_cache_steps empties": (Trainer, {}, {"torch_empty_cache_steps": 2}),
    "the optimizer is not Stretto's": (Trainer, {}, {"optim": "adafactor"}),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_cannot_be_recorded_runs_as_theirs(
    reason: str, runs: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, others, options = OBSTACLES[reason]
    trainer = make(kind, "bert-classes", tmp_path, others=others, max_steps=2, **options)
    with caplog.at_level(logging.INFO, "stretto"):
        trainer.train()
    assert not runs and trainer.update is None
    assert caplog.text.count("CUDA graphs: off: ") == caplog.text.count(f"CUDA graphs: off: {reason}") == 1


def test_a_loader_of_ones_own_does_not_stand_in_the_way(
    runs: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Loading(Trainer):
        def get_train_dataloader(self) -> Any:
            dataset: Any = self.train_dataset
            return self.accelerator.prepare(DataLoader(dataset, 4, collate_fn=self.data_collator))

    with caplog.at_level(logging.INFO, "stretto"):
        make(Loading, "gpt2", tmp_path).train()
    assert len(runs) == 6 and "CUDA graphs: off: there is no training" not in caplog.text


def test_batches_stay_on_the_cpu_only_where_they_are_planned(runs: list[Any], tmp_path: Path) -> None:
    devices: list[Any] = []

    class Noting(hf.TrainerCallback):
        def on_train_begin(self, *args: Any, train_dataloader: Any = None, **others: Any) -> None:
            devices.append(train_dataloader.device)

    trainer = make(Trainer, "gpt2", tmp_path, others={"callbacks": [Noting()]}, max_steps=1)
    device = trainer.get_train_dataloader().device
    trainer.train()
    assert devices == [None] and trainer.get_train_dataloader().device == device == torch.device("cpu")


def test_no_update_is_lost_after_an_interrupt(runs: list[Any], tmp_path: Path) -> None:
    """Which came between an update and what theirs calls for it afterwards."""

    class Interrupted(Trainer):
        def floating_point_ops(self, inputs: Any) -> Any:
            if len(runs) == 3:
                runs.append(None)
                raise KeyboardInterrupt
            return super().floating_point_ops(inputs)

    trainer = make(Interrupted, "gpt2", tmp_path, max_steps=4)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {3 + 4}


def test_hooks_of_the_optimizer_are_called_once_a_step(tmp_path: Path) -> None:
    stretto.optim.FlatAdamW([nn.Parameter(torch.ones(2))])  # torch puts hooks around the step of each class once
    calls = list[int]()

    class Hooking(hf.TrainerCallback):
        def on_train_begin(self, *args: Any, optimizer: Any = None, **others: Any) -> None:
            optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(1))

    make(Trainer, "gpt2", tmp_path, others={"callbacks": [Hooking()]}, max_steps=3).train()
    assert len(calls) == 3


def test_each_kind_of_batch_is_watched_before_it_is_recorded(
    runs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches with a mask wait for the device here, those without do not; they come later."""
    model = accelerated("gpt2")
    step = Step(model, stretto.optim.FlatAdamW(model.parameters()))
    monkeypatch.setattr(stretto.hf.update, "TRIES", 2)
    masked, watched = list[bool](), list[bool]()

    @contextmanager
    def note() -> Iterator[list[str]]:
        watched.append(True)
        places = list[str]()
        yield places
        places += ["model.py:7"] if masked[-1] else []

    monkeypatch.setattr(stretto.hf.update, "noting_waits", note)
    with caplog.at_level(logging.INFO, "stretto"):
        for number in range(8):
            masked.append(number > 3)
            step(draw_batch("gpt2", (9, 4, 5) if masked[-1] else None))
            assert (step.update.executor is step.update.eager) == (number > 4)
    assert len(watched) == 3
    assert caplog.text.count("CUDA graphs: off: the host waits for the device at model.py:7") == 1


class Reads(TorchDispatchMode):
    """Notes the lines of transformers in which the host reads a tensor, which on a GPU is to wait for the device."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)

    def __init__(self) -> None:
        super().__init__()
        self.places = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READS:
            frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
            theirs = [f for f in frames[-1:] if "/transformers/" in f.filename]
            self.places |= {f"{f.filename}:{f.lineno}" for f in theirs if "layerdrop" not in str(f.line)}  # on the host
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [None, (9, 3, 6)], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "marian", "vit"])
def test_a_first_pass_reads_no_more_than_a_recording(
    family: str, lengths: tuple[int, ...] | None, runs: list[Any]
) -> None:
    """transformers looks whether a mask keeps everything, and rows have one document, but not while it is recorded."""
    if family == "vit" and lengths:
        pytest.skip("images have no padding")
    model = accelerated(family).train()
    step = Step(model, stretto.optim.FlatAdamW(model.parameters()))
    batch = step.update.plan(draw_batch(family, lengths))
    assert isinstance(batch, Planned)
    with Reads() as reads, stretto.hf.update.as_if_recorded():
        step.update.learn(batch)
    assert not reads.places


def test_what_the_host_reads_would_be_found() -> None:
    with Reads() as reads:
        build("gpt2").train()(**draw_batch("gpt2", None), use_cache=False)
    assert [place for place in reads.places if "masking_utils" in place]


def test_hooks_of_a_user_are_called_in_every_step(
    runs: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, calls = build("bert-classes"), list[int]()
    model.get_submodule("classifier").register_forward_hook(lambda *_: calls.append(1))
    trainer = make(Trainer, model, tmp_path, "bert-classes")
    calls.clear()
    with caplog.at_level(logging.INFO, "stretto"):
        trainer.train()
    assert "CUDA graphs: off: a hook looks at classifier" in caplog.text and not runs and len(calls) == 6


def test_on_a_cpu_nothing_is_planned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(Trainer, "gpt2", tmp_path, max_steps=1)
    with caplog.at_level(logging.INFO, "stretto"):
        trainer.train()
    assert "CUDA graphs: off: the model is not on a GPU" in caplog.text


# Few shapes


def draw_rows(family: str, lengths: tuple[int, ...]) -> Batch:
    """As a dynamic-padding collator gives them."""
    return {name: t[:, : max(lengths)] if t.ndim == 2 else t for name, t in draw_batch(family, lengths).items()}


def plan_rows(family: str, lengths: tuple[int, ...]) -> Planned:
    planned = plan(draw_rows(family, lengths), *outermost(accelerated(family)))
    assert planned is not None
    return planned


@pytest.mark.parametrize("family", ["bert", "bert-classes", "gpt2", "t5"])
def test_rows_with_padding_are_as_wide_as_a_power_of_two(family: str) -> None:
    widths = {plan_rows(family, (longest, 3, 4)).inputs["input_ids"].shape[1] for longest in (5, 6, 7, 9)}
    assert widths == {8, 16}


def test_rows_do_not_exceed_the_positions_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = outermost(accelerated("bert"))
    for limit, width in ((40, 16), (12, 12), (9, 9)):
        monkeypatch.setattr(model.config, "max_position_embeddings", limit)
        planned = plan(draw_rows("bert", (9, 3, 4)), model, tried)
        assert planned is not None and planned.inputs["input_ids"].shape[1] == width


def test_what_has_unknown_padding_stays_as_wide_as_it_is() -> None:
    batch = draw_rows("bert", (9, 3, 4))
    batch["token_type_ids"] = batch["input_ids"] * 0
    planned = plan(batch, *outermost(accelerated("bert")))
    assert planned is None or planned.inputs["token_type_ids"].shape == planned.inputs["input_ids"].shape
    inputs = batch | {"other": batch["input_ids"]}
    masks = {"attention_mask": next(iter(plan_rows("bert", (9, 3, 4)).masks.values()))}
    same, _ = stretto.hf.update._widen(inputs, masks, outermost(accelerated("bert"))[0])
    assert same == inputs


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_a_target_without_a_mask_gets_one(family: str) -> None:
    batch = draw_batch(family, (9, 5, 3))
    batch.pop("decoder_attention_mask", None)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 4:] = -100
    batch["labels"][0, 1] = -100  # among others
    planned = plan(batch, *outermost(accelerated(family)))
    assert planned is not None
    mask = planned.inputs["decoder_attention_mask"]
    real = (planned.inputs["labels"] != -100).flip(1).cummax(1).values.flip(1)
    assert torch.equal(mask != 0, real) and mask[0].sum() == 4


def resized(planned: Planned, tokens: int, labels: int) -> Planned:
    (facts,) = planned.masks.values()
    return planned.resize((tokens, facts.longest, labels))


def test_a_batch_runs_in_an_earlier_size_that_has_room_for_it() -> None:
    small = plan_rows("gpt2", (9, 4, 5))
    large = resized(small, 32, 24)
    sizes = Sizes()
    assert sizes.choose(small) is small, "nothing was in use"
    for _ in range(TIMES):
        assert sizes.choose(large) is large
    other = resized(small, 28, 20)
    found = sizes.choose(other)
    assert found.sizes == large.sizes and found.fillers == large.fillers
    assert shape_of(found) == shape_of(large)
    assert sizes.choose(small).sizes == small.sizes, "its own is in use"
    assert sizes.choose(resized(small, 40, 24)).sizes[0] == 40, "there is no room"


def test_a_size_that_comes_often_gets_its_own() -> None:
    small = plan_rows("gpt2", (9, 4, 5))
    sizes, large = Sizes(), resized(plan_rows("gpt2", (9, 4, 5)), 44, 24)
    for _ in range(TIMES):
        sizes.choose(large)
    found = [sizes.choose(small).sizes == small.sizes for _ in range(2 * OFTEN)]
    assert found == [False] * OFTEN + [True] * OFTEN


def test_there_are_only_so_many_sizes() -> None:
    small, sizes = plan_rows("gpt2", (9, 4, 5)), Sizes()
    for number in range(2 * MOST):
        sizes.choose(resized(small, 24 + 8 * number, 24))
    assert [len(used) for used in sizes.used.values()] == [MOST]


def test_fillers_reach_the_end_of_every_size_that_fits() -> None:
    small = plan_rows("gpt2", (9, 4, 5))
    for tokens in range(24, 200, 8):
        wide = resized(small, tokens, 24)
        (facts,) = wide.masks.values()
        assert small.fits(wide.sizes) == (18 + wide.fillers * facts.longest >= tokens)


def test_a_plan_travels_as_one() -> None:
    planned = plan_rows("bert", (9, 4, 5))
    packed = pack(planned, torch.device("cpu"))
    assert shape_of(packed) == shape_of(planned) and packed.tokens == planned.tokens
    assert all(torch.equal(packed.inputs[name], value) for name, value in planned.inputs.items())
    other = pack(plan_rows("bert", (9, 5, 5)))
    copy_into(other, packed)
    assert all(torch.equal(other.inputs[name], value) for name, value in planned.inputs.items())


def test_graphs_that_are_hardly_replayed_are_not_recorded_on_and_on(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(lambda: (), prepare_nothing, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "stretto"):
        for number in range(20):
            assert recorder.pays() == (number < 12)
            recorder.recordings[number] = None  # type: ignore[assignment]
            recorder.replays += 1
    assert caplog.text.count("no more for now: 12 of them were replayed 12 times") == 1
    recorder.replays = 40
    assert recorder.pays()


def test_rates_are_uploaded_when_they_change() -> None:
    """In a recording nothing may be: the number would be a part of it."""
    p = nn.Parameter(torch.ones(3))
    optimizer = stretto.hf.trainer.ScheduledAdamW([p], lr=0.5)
    filled: list[float] = []
    views = [group["lr"] for group in optimizer._rates]
    assert [float(view) for view in views] == [0.5] and optimizer.param_groups[0]["lr"] == 0.5
    version = views[0]._version
    optimizer.take_rates()
    assert views[0]._version == version, filled
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.take_rates()
    assert float(views[0]) == 0.25 and optimizer.param_groups[0]["lr"] == 0.25


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}, {"max_grad_norm": 0.0}])
@pytest.mark.parametrize("family", ["bert", "bert-classes", "gpt2", "t5"])
def test_graphs_give_the_same_bits(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, over batches of several sizes."""
    common: dict[str, Any] = {
        "per_device_train_batch_size": 1, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False,
    }  # fmt: skip
    replays, replay = list[Any](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    found = []
    for launched in (True, False):
        with monkeypatch.context() as patches:
            if launched:
                patches.setattr(stretto.hf.update, "Recorded", Launched)
            batches = [draw_rows(family, lengths) for lengths in ((9, 3, 6), (9, 4, 5), (8, 7, 7))] * 6
            updates = options.get("gradient_accumulation_steps", 1)
            trainer: Any = Trainer(
                model=add_dropout(build(family)),
                args=hf.TrainingArguments(str(tmp_path), max_steps=len(batches) // updates, **common | options),
                train_dataset=list(range(len(batches))),
                data_collator=lambda numbers, batches=batches: batches[numbers[0]],
            )
            trainer.train()
            weights = [p.clone() for p in trainer.model.parameters()]
            found.append((history(trainer), history(trainer, "grad_norm"), weights))
        if launched:
            assert not replays
    assert len(replays) > 5
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert all(torch.equal(p, q) for p, q in zip(found[0][2], found[1][2], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_batches_without_padding_are_recorded(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replays, replay = list[Any](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    model = accelerated(family).cuda().train()
    step = Step(model, stretto.optim.FlatAdamW(model.parameters()))
    with caplog.at_level(logging.INFO, "stretto"):
        for seed in range(8):
            step(draw_batch(family, None, seed=seed))
    assert len(replays) > 3 and "CUDA graphs: off" not in caplog.text


@pytest.mark.gpu
def test_the_host_is_seen_to_wait() -> None:
    x = torch.ones(4, device="cuda")
    with noting_waits() as places:
        x.sum()
    assert not places
    with noting_waits() as places:
        float(x.sum())
        torch.tensor(1.0, device="cuda")
    assert len(places) == 2 and all("test_update.py" in place for place in places)


@pytest.mark.gpu
def test_a_model_that_waits_is_launched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build("bert-classes")
    trainer = make(Trainer, model, tmp_path, "bert-classes", use_cpu=False, max_steps=8)
    forward = model.classifier.forward
    trainer.model.classifier.__class__ = type(
        "Linear", (type(model.classifier),), {"forward": lambda self, x: forward(x) + 0 * float(x.detach().sum())}
    )
    with caplog.at_level(logging.INFO, "stretto"):
        trainer.train()
    assert caplog.text.count("CUDA graphs: off: the host waits for the device at ") == 1
    assert len(draw_samples("bert-classes")) and 0 < history(trainer)[-1] < 5
