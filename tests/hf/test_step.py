"""Whole updates in buckets, and on a GPU as CUDA graphs: what they change, and when they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
import stretto.hf.unpad
from stretto.graphs import Recorded
from stretto.hf.acceleration import outermost
from stretto.hf.find import argument_names, pad_id
from stretto.hf.loop import Step
from stretto.hf.unpad import get_to_know
from stretto.hf.update import plan
from stretto.optim import FlatAdamW, clip_gradients
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
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, over batches of several shapes."""

    def make_step() -> Step:
        model, optimizer = make(family, torch.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return Step(model, optimizer, clip=1.0)

    batches = [draw_batch(family, LENGTHS[i % 3], seed=i % 3) for i in range(15)]
    assert len(replay_and_compare(make_step, batches, monkeypatch)) > 5
