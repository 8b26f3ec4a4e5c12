"""Whole updates in buckets, and on a GPU as CUDA graphs: what they change, and when they are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import stretto
import stretto.hf.unpad
import stretto.hf.update
from stretto.execute import Executor
from stretto.graphs import Recorded
from stretto.hf.acceleration import outermost
from stretto.hf.find import argument_names, pad_id
from stretto.hf.loop import Step
from stretto.hf.unpad import get_to_know
from stretto.hf.update import find_obstacle, move, plan
from stretto.optim import FlatAdamW, clip_gradients
from stretto.techniques import Techniques
from tests.hf.families import FAMILIES, Batch, accelerated, build, draw_batch
from tests.hf.observe import replay_and_compare
from tests.ops.checks import DEVICE

LENGTHS = [(9, 3, 6), (9, 4, 5), (2, 9, 9), None, (9, 9, 9)]


def build_there(family: str, dtype: torch.dtype) -> nn.Module:
    return build(family, dtype).to(DEVICE)


def make(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, FlatAdamW]:
    model = accelerated(family, dtype, make=build_there)
    weights = "split" if dtype == torch.bfloat16 else "fp32"
    parameters = [p for p in model.parameters() if p.requires_grad]
    # A large eps: where a gradient is zero but for rounding, the update is too.
    return model, FlatAdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.1, weights=weights)


def assert_same_updates(family: str, batches: list[Batch]) -> None:
    """As those of a plain loop."""
    (model, optimizer), (other, others) = make(family), make(family)
    step = Step(model, optimizer, clip=0.5)
    for batch in batches:
        loss = step(batch)
        expected = other(**{name: t.to(DEVICE) for name, t in batch.items()}).loss
        expected.backward()
        clip_gradients(other, others, 0.5)
        others.step()
        others.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_are_those_of_a_plain_loop(family: str) -> None:
    assert_same_updates(family, [draw_batch(family, lengths, seed) for seed, lengths in enumerate(LENGTHS)])


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_gradients_of_several_batches_are_added_up(family: str) -> None:
    """Also where a batch is launched among others that are planned: its mask has holes."""
    (model, optimizer), (other, others) = make(family), make(family)
    step = Step(model, optimizer, clip=0.5, accumulate=3)
    batches = [draw_batch(family, LENGTHS[seed % len(LENGTHS)], seed) for seed in range(6)]
    batches[3]["attention_mask"] = batches[3]["input_ids"] % 5 != 0
    batches[3]["labels"][~batches[3]["attention_mask"]] = -100
    for number, batch in enumerate(batches):
        found = step(batch)
        loss = other(**{name: t.to(DEVICE) for name, t in batch.items()}).loss
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-5)
        (loss / 3).backward()
        if number % 3 == 2:
            clip_gradients(other, others, 0.5)
            others.step()
            others.zero_grad()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert step.updates == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_may_be_frozen_between_updates_and_no_longer_be(accumulate: int) -> None:
    """What is frozen has no gradient: it does not move, by its moments or by decay either."""
    (model, optimizer), (other, others) = make("gpt2"), make("gpt2")
    step = Step(model, optimizer, clip=0.5, accumulate=accumulate)
    for update in range(4):
        for each in (model, other):
            for name, p in each.named_parameters():
                p.requires_grad_(update % 2 == ("attn" in name))
        for i in range(accumulate):
            batch = draw_batch("gpt2", (9, 4, 5), seed=2 * update + i)
            step(batch)
            (other(**{name: t.to(DEVICE) for name, t in batch.items()}).loss / accumulate).backward()
        clip_gradients(other, others, 0.5)
        others.step()
        others.zero_grad()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_error_drops_the_update_that_it_was_in(accumulate: int) -> None:
    """A batch whose labels are not there, and one whose backward pass fails in the middle."""

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory, say")

    (model, optimizer), (other, others) = make("gpt2"), make("gpt2")
    steps = [Step(model, optimizer, accumulate=accumulate), Step(other, others, accumulate=accumulate)]
    first, second, third, fourth = (draw_batch("gpt2", (9, 4, 5), seed) for seed in range(4))
    without = {name: value for name, value in first.items() if name != "labels"}
    hook = None
    for number, bad in enumerate((without, first)):
        if accumulate > 1:
            steps[0](second)
        if number:
            hook = next(p for name, p in model.named_parameters() if "attn" in name).register_hook(fail)
        with pytest.raises((ValueError, RuntimeError), match=r"gave no loss|out of memory"):
            steps[0](bad)
    assert hook is not None
    hook.remove()
    for batch in [third, fourth] * accumulate:
        losses = [step(batch) for step in steps]
        assert torch.equal(*losses)
    assert steps[0].updates == steps[1].updates == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_autocast_around_the_loop_keeps_no_old_weights(accumulate: int) -> None:
    """torch casts each weight once for all that is inside of it, and would not see that updates change weights."""
    (model, optimizer), (other, others) = make("bert-classes"), make("bert-classes")
    steps = [Step(model, optimizer, accumulate=accumulate), Step(other, others, accumulate=accumulate)]
    batches, kind = [draw_batch("bert-classes", (9, 4, 5), seed) for seed in range(6)], torch.device(DEVICE).type
    with torch.autocast(kind, torch.bfloat16):
        around = [steps[0](batch) for batch in batches]
    inside = []
    for batch in batches:
        with torch.autocast(kind, torch.bfloat16):
            inside.append(steps[1](batch))
    assert torch.equal(torch.stack(around), torch.stack(inside)) and len(set(map(float, inside))) == 6


def test_a_model_may_be_inside_of_a_module() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    (model, optimizer), (other, others) = make("bert"), make("bert")
    batch = draw_batch("bert")
    assert torch.equal(Step(Around(model), optimizer)(batch), Step(other, others)(batch))


def test_batches_with_tensors_in_lists_are_launched() -> None:
    """A graph could not be given them. Detection has such labels."""
    batch: Any = draw_batch("vit") | {"labels": [{"boxes": torch.ones(1, 4), "names": ("a",)}]}
    assert plan(batch, *outermost(accelerated("vit"))) is None
    moved = move(batch, torch.device("meta"))
    assert moved["pixel_values"].is_meta and moved["labels"][0]["boxes"].is_meta
    assert moved["labels"][0]["names"] == ("a",)


class Now(nn.Module):
    """A weight that some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Sometimes(hf.GPT2LMHeadModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.now = Now()

    def forward(self, *args: Any, used: Tensor | None = None, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.loss = out.loss if used is None else out.loss * (used * self.now.scale).mean()
        return out


def make_sometimes() -> tuple[nn.Module, FlatAdamW]:
    torch.manual_seed(0)
    made: Any = Sometimes(build("gpt2").config)
    model = stretto.accelerate(made.to(DEVICE))
    return model, FlatAdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)


def test_weights_that_some_batches_use_alone_are_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their gradients would be left in the memory of graphs, from one pass to the update."""
    if DEVICE == "cpu":
        monkeypatch.setattr(stretto.hf.update, "can_record", lambda device: True)
        monkeypatch.setattr(stretto.hf.update, "Recorded", lambda work, optimizer: Executor(work))
        monkeypatch.setattr(stretto.hf.update, "TRIES", 0)
    (model, optimizer), (other, others) = make_sometimes(), make_sometimes()
    step = Step(model, optimizer, accumulate=2)
    with caplog.at_level(logging.INFO, "stretto"):
        for number, uses in enumerate((False, False, True, False, False, False, True, True)):
            batch = draw_batch("gpt2", (9, 4, 5), seed=number) | ({"used": torch.full((3,), 1.5)} if uses else {})
            assert (step.update.executor is step.update.eager) == (number > 2)
            step(batch)
            (other(**{name: t.to(DEVICE) for name, t in batch.items()}).loss / 2).backward()
            if number % 2:
                others.step()
                others.zero_grad()
    assert caplog.text.count("CUDA graphs: off: some weights have a gradient in a part of the batches only") == 1
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=f"{name}: {{}}".format)
    assert model.get_parameter("now.scale") != 1.0


def test_an_update_begins_and_ends_once_for_techniques(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with each of its batches: what they have counted is of updates."""
    calls = list[str]()
    for name in ("begin", "end"):
        monkeypatch.setattr(Techniques, name, lambda self, step, *_, name=name: calls.append(f"{name} {step}"))
    step = Step(*make("bert"), accumulate=3)
    for _ in range(7):
        step(draw_batch("bert"))
    assert calls == ["begin 0", "end 0", "begin 1", "end 1", "begin 2"]


def test_who_hooks_into_the_optimizer_is_called_in_every_step() -> None:
    model, optimizer = make("bert")
    assert find_obstacle(model, optimizer) == ""
    optimizer.register_step_post_hook(lambda *_: None)
    assert find_obstacle(model, optimizer) == "a hook looks at the optimizer's steps"


def test_batches_of_other_lengths_share_a_plan() -> None:
    known = outermost(accelerated("bert"))
    one, two, three = (
        plan(draw_batch("bert", lengths, seed=3), *known) for lengths in ((9, 3, 6), (9, 5, 5), (9, 9, 3))
    )
    assert one is not None and two is not None and three is not None
    assert one.masks == two.masks and one.fillers == two.fillers == 1
    assert one.masks["attention_mask"].tokens == 24 and three.masks["attention_mask"].tokens == 24
    full = plan(draw_batch("bert", (9, 9, 9)), *known)
    assert full is not None and full.fillers == 0 and "attention_mask" not in full.inputs, (
        "a mask that keeps everything"
    )


@pytest.mark.parametrize("family", ["bert", "t5", "marian", "gpt2"])
def test_filler_is_behind_the_real_tokens(family: str) -> None:
    """Labels rounded up are ignored ones, and all tokens of a bucket are in some sequence."""
    batch = draw_batch(family)
    model, tried = outermost(accelerated(family))
    planned = plan(batch, model, tried)
    assert planned is not None
    known = get_to_know(batch, argument_names(model), pad_id(model))
    assert known.labels <= planned.labels <= planned.positions == planned.inputs["labels"].numel()
    for (_, exact), facts in zip(known.masks, planned.masks.values(), strict=True):
        assert exact.tokens <= facts.tokens <= exact.tokens + planned.fillers * facts.longest


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_has_to_be_looked_at_runs_as_usual(family: str) -> None:
    batch = draw_batch(family)
    with_gap, with_empty_row = batch["attention_mask"].clone(), batch["attention_mask"].clone()
    with_gap[0, 4] = with_empty_row[1] = 0
    masked = [batch | {"attention_mask": m, "labels": mask_labels(batch, m)} for m in (with_gap, with_empty_row)]
    documents = {"position_ids": torch.arange(9).expand(3, 9) % 5, "labels": batch["labels"]}
    odd = [*masked, documents | {"input_ids": batch["input_ids"]}, batch | {"labels": batch["input_ids"]}]
    assert [plan(one, *outermost(accelerated(family))) for one in odd] == [None] * 4
    assert_same_updates(family, odd)


def mask_labels(batch: Batch, mask: Tensor) -> Tensor:
    return batch["labels"].where(mask != 0, torch.tensor(-100))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_row_that_is_its_bucket_and_is_padded_on_the_left(family: str) -> None:
    """Packed it has the shape it had: padding is behind the tokens."""
    batch = {name: value[:1, :8] for name, value in draw_batch(family, None).items()}
    mask = (torch.arange(8) >= 3).long()[None]
    batch |= {"attention_mask": mask, "labels": mask_labels(batch, mask.roll(1, 1) * mask)}
    planned = plan(batch, *outermost(accelerated(family)))
    assert planned is not None and planned.masks["attention_mask"].tokens == 8
    assert_same_updates(family, [batch])


def test_classes_that_are_read_at_padding_run_as_usual() -> None:
    batch = draw_batch("bert-classes")
    empty = batch["attention_mask"] * torch.tensor([[1], [0], [1]])
    odd = [batch | {"attention_mask": mask} for mask in (batch["attention_mask"].flip(1), empty)]
    assert [plan(one, *outermost(accelerated("bert-classes"))) for one in odd] == [None] * 2
    assert_same_updates("bert-classes", odd)


@pytest.mark.parametrize(
    ("family", "length", "masks"),
    [
        ("gpt2", 9, 0),
        ("llama", 9, 0),
        ("bert", 9, 0),
        ("marian", 9, 0),
        ("mistral", 9, 1),
        ("mistral", 3, 0),
        ("vit", 9, 0),
    ],
)
def test_a_mask_is_built_only_where_one_is_needed(
    family: str, length: int, masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers builds one whenever it sees that a graph is being recorded; the window of this Mistral is 4."""
    model, optimizer = make(family)
    built, build_mask = list[Any](), vars(stretto.hf.unpad)["sdpa_mask"]
    monkeypatch.setattr(
        stretto.hf.unpad, "sdpa_mask", lambda *args, **kwargs: built.append(kwargs) or build_mask(*args, **kwargs)
    )
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True, raising=False)
    batch = draw_batch(family, (9, 9, 9))
    batch.pop("decoder_attention_mask", None)
    Step(model, optimizer)({name: value[:, :length] if value.ndim == 2 else value for name, value in batch.items()})
    assert len(built) == masks


def test_rates_may_change_between_steps() -> None:
    model, optimizer = make("bert")
    step, batch = Step(model, optimizer), draw_batch("bert")
    step(batch)
    before = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_labels_that_are_no_ids_leave_the_mask_unknown() -> None:
    """It would have to be read while the model runs, which a graph does not allow."""
    batch = draw_batch("bert-classes")
    known = outermost(accelerated("bert-classes"))
    assert plan(batch, *known) is not None
    assert plan(batch | {"labels": batch["labels"].float()}, *known) is None


def test_mistakes_are_named() -> None:
    model, optimizer = make("bert")
    with pytest.raises(ValueError, match=r"accelerated model, not Linear: stretto\.accelerate"):
        Step(nn.Linear(2, 2), optimizer)
    batch = {name: value.to(DEVICE) for name, value in draw_batch("bert").items() if name != "labels"}
    with pytest.raises(ValueError, match="BertForMaskedLM gave no loss: the batch needs labels"):
        Step(model, optimizer)(batch)
    with pytest.raises(ValueError, match="accumulate = 0 is the number of batches of an update: at least 1"):
        Step(model, optimizer, accumulate=0)
    with pytest.raises(ValueError, match="FlatAdamW, not SGD"):
        Step(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    step, batch = Step(model, optimizer), draw_batch("bert")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="values up to 2: a mask is 0 or 1"):
        step(batch | {"attention_mask": 2 * batch["attention_mask"]})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_autograd_hears_of_every_update_once() -> None:
    """Also of those that are replayed, on a GPU."""
    model, optimizer = make("gpt2")
    step, batch, weights = Step(model, optimizer, clip=1.0), draw_batch("gpt2"), optimizer.param_groups[0]["params"]
    for number in range(6):
        # While a step is recorded nobody else may hold on to the weights' part in a backward pass.
        early = model(**{name: t.to(DEVICE) for name, t in batch.items()}).loss if number > 3 else None
        versions = [p._version for p in weights]
        step(batch)
        assert [p._version for p in weights] == [version + 1 for version in versions]
        if early is not None:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                early.backward()
    assert not isinstance(step.update.executor, Recorded) or step.update.executor.whole.recordings


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_same_bits(family: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, over batches of several shapes, of which some are launched among the others."""

    def make_step() -> Step:
        model, optimizer = make(family, torch.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return Step(model, optimizer, clip=1.0, accumulate=accumulate)

    batches = [draw_batch(family, LENGTHS[i % 3], seed=i % 3) for i in range(16)]
    if family == "bert":
        batches[9]["attention_mask"][0, 4] = 0
        batches[9]["labels"] = mask_labels(batches[9], batches[9]["attention_mask"])
    assert len(replay_and_compare(make_step, batches, monkeypatch)) > 5


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphs_follow_weights_that_are_frozen_and_an_autocast_around(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing(Step):
        def __call__(self, batch: Any) -> Tensor:
            for name, p in self.model.named_parameters():
                p.requires_grad_(self.updates < 6 or "attn" in name)
            return super().__call__(batch)

    batches = [draw_batch("gpt2", (9, 4, 5), seed=i) for i in range(16 * accumulate)]
    with torch.autocast("cuda", torch.bfloat16):
        replays = replay_and_compare(lambda: Changing(*make("gpt2"), 1.0, accumulate), batches, monkeypatch)
    assert len(replays) > 10 and len(set(replays)) > accumulate
