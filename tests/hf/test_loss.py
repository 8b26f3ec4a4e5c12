"""The loss without logits, and logits for whoever wants them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import stretto
import stretto.hf.defer
from stretto.hf.defer import Logits
from stretto.ops.cross_entropy import linear_cross_entropy
from tests.hf.families import DECODERS, FLOOR, PAIRS, VOCAB, accelerated, assert_parity, build, draw_batch, learn

LANGUAGE = ["bert", "roberta", *DECODERS, *PAIRS]


@pytest.mark.parametrize("family", LANGUAGE)
def test_the_loss_needs_labelled_rows_only_and_no_logits(family: str) -> None:
    model, batch = accelerated(family), draw_batch(family)
    rows: list[int] = []

    def note(x: Tensor, *others: Any, **more: Any) -> Tensor:
        rows.append(len(x))
        return linear_cross_entropy(x, *others, **more)

    with patch.object(stretto.hf.defer, "linear_cross_entropy", note):
        out = model(**batch)
    assert rows == [int((batch["labels"] != -100).sum())]
    assert isinstance(out.logits, Logits) and not out.logits.recipe.made
    assert out.logits.shape == (*batch["labels"].shape, VOCAB) and out.logits.dtype == torch.float32
    assert out.logits.grad_fn is None  # DistributedDataParallel asks
    assert not out.logits.recipe.made  # to look at the shape is not to compute
    out.loss.backward()


@pytest.mark.parametrize("family", LANGUAGE)
def test_logits_become_a_tensor_with_gradients(family: str) -> None:
    model, plain, batch = accelerated(family, unpad=False), build(family), draw_batch(family)
    ours, theirs = model(**batch).logits, plain(**batch).logits
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1)) and type(ours[:, 0]) is Tensor
    assert repr(ours) == repr(ours + 0).replace("AddBackward0", "ViewBackward0")
    ours.square().sum().backward()
    theirs.square().sum().backward()
    gradients = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    for mine, other in gradients:
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_other_losses_get_their_logits() -> None:
    model, plain, batch = accelerated("llama"), build("llama"), draw_batch("llama", None)
    for loss in (
        lambda z: nn.functional.cross_entropy(z.view(-1, VOCAB), batch["labels"].view(-1), torch.ones(VOCAB)),
        lambda z: nn.functional.cross_entropy(z.transpose(1, 2), batch["labels"]),
        lambda z: nn.functional.cross_entropy(z.view(-1, VOCAB), batch["labels"].view(-1), label_smoothing=0.1),
        lambda z: nn.functional.cross_entropy(z.view(-1, VOCAB), batch["labels"].view(-1), reduction="sum"),
        lambda z: nn.functional.nll_loss(z.log_softmax(-1).flatten(0, 1), batch["labels"].flatten()),
        lambda z: nn.functional.kl_div(z.log_softmax(-1), z.detach().softmax(-1) * 0.5, reduction="sum"),
    ):
        torch.testing.assert_close(loss(model(**batch).logits), loss(plain(**batch).logits))


@pytest.mark.parametrize("family", ["llama", "bert", "bart"])
def test_number_of_items_and_sums(family: str) -> None:
    """The Trainer's way to count labels over several micro-batches."""
    batch = draw_batch(family)
    if family == "llama":
        options: dict[str, Any] = {"num_items_in_batch": torch.tensor(7)}
        exact, plain = (learn(build(family, d), batch, **options) for d in (torch.float64, torch.float32))
        assert_parity(learn(accelerated(family), batch, **options), plain, exact, FLOOR)
    out = accelerated(family)(**batch, return_dict=False)
    torch.testing.assert_close(out[0], build(family)(**batch, return_dict=False)[0])


def test_logits_are_not_made_from_weights_that_changed() -> None:
    model, batch = accelerated("gpt2"), draw_batch("gpt2")
    early, late = model(**batch), model(**batch)
    kept = early.logits.argmax(-1)
    late.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(early.logits.argmax(-1), kept)
    with pytest.raises(RuntimeError, match="before the optimizer's step"):
        late.logits.argmax(-1)


@pytest.mark.parametrize("copy", [None, Tensor.clone, Tensor.float, Tensor.double])
def test_logits_that_are_changed_in_place_stay_changed(copy: Any) -> None:
    batch = draw_batch("gpt2")
    losses = []
    for model in (accelerated("gpt2", unpad=False), build("gpt2")):
        original = model(**batch).logits
        logits = original if copy is None else copy(original)
        logits[..., 3] = 5.0
        assert bool((original[..., 3] == 5.0).all()) == (logits is original or copy is Tensor.float)
        losses.append(nn.functional.cross_entropy(logits.view(-1, VOCAB), batch["labels"].view(-1)))
    torch.testing.assert_close(losses[0], losses[1])


def test_no_labels_no_training_no_laziness() -> None:
    model, batch = accelerated("gpt2"), draw_batch("gpt2")
    labels = batch.pop("labels")
    assert type(model(**batch).logits) is Tensor
    with torch.no_grad():
        assert type(model(**batch, labels=labels).logits) is Tensor
    assert type(model.eval()(**batch, labels=labels).logits) is Tensor
    assert type(accelerated("gpt2", loss=False)(**batch, labels=labels).logits) is Tensor


def test_autocast_holds_for_logits_that_are_read_later() -> None:
    model, plain, batch = accelerated("bert", unpad=False), build("bert"), draw_batch("bert")
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(**batch).logits, plain(**batch).logits
    assert ours.dtype == theirs.dtype == (ours + 0).dtype == torch.bfloat16
    torch.testing.assert_close(ours + 0, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("family", ["bart", "bert", "llama"])
def test_logits_have_the_type_that_they_had(family: str) -> None:
    """Under autocast a product is in 16 bits, but not with a bias in fp32 added to it."""
    types = []
    for model in (build(family), accelerated(family)):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**draw_batch(family)).logits
        types.append((logits.dtype, (logits + 0).dtype))
    assert types[0] == types[1]
