"""Which batches a model may be given without their padding: those with which it was seen to give the same results.

What the model around the layers does with their result is its own: it may read a class at the first position, at the
last one, or at the last id that is not padding; it may count tokens for a loss. So it is run on batches of every kind
of padding (draw.py), with the rectangle and without, and what differs keeps the rectangle.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import PreTrainedModel

from stretto.hf.call import Call, Tried, set_call
from stretto.hf.draw import IDS, LENGTH, SIDES, draw_padded, masks_of, with_labels
from stretto.hf.packing import argument_names, takes_any_name, wanted_outputs
from stretto.hf.roles import Stack
from stretto.hf.trial import Batch, Result, Stage, find_difference, in_precision_of, run

log = logging.getLogger(__name__)


def try_padding(stage: Stage, model: PreTrainedModel, packed: list[Stack], around: nn.Module) -> Tried:
    """The kinds of batch with which a model gives the same results without padding. A module around it that takes such
    batches is what is called, and may read padding, too."""
    called = around if _takes(stage, model, around) else model
    kinds: set[tuple[str, str]] = set()
    names: set[str] = set()
    labels, windows = None, [window for stack in packed for window in stack.windows]
    for form, sorts in (("ids", IDS), ("embeds", ("none",)), ("positions", ("positions",))):
        groups = [[(side, sort) for side in _sides(packed) for sort in sorts]]
        while groups:  # all kinds at once; where that fails, one side after the other, and then each by itself
            some = groups.pop()
            tried = _try_batch(stage, model, called, some, form, labels, min([LENGTH, *windows]))
            if tried is not None:
                labels, given = tried
                kinds |= set(some)
                names |= given
            elif len(some) > 1:
                sides = dict.fromkeys(side for side, _ in some)
                parts = [[kind for kind in some if kind[0] == side] for side in sides]
                groups += parts if len(parts) > 1 else [[kind] for kind in some]
    names |= {"decoder_input_ids", "decoder_attention_mask"} if "decoder_attention_mask" in names else set()
    return Tried(frozenset(kinds), frozenset(names), labels or "", wanted_outputs(model, {}))


def _takes(stage: Stage, model: PreTrainedModel, around: nn.Module) -> bool:
    """Whether a module takes batches by the names of their parts; one that takes any names, if it can be run so."""
    if {"input_ids", "attention_mask"} <= set(argument_names(around)):
        return True
    batch = draw_padded(model, ("right",), ("own",), "ids") if takes_any_name(around) else None
    return batch is not None and _compare(stage, around, batch, "") is not None


def _try_batch(
    stage: Stage,
    model: PreTrainedModel,
    called: nn.Module,
    some: list[tuple[str, str]],
    form: str,
    labels: str | None,
    length: int,
) -> tuple[str, set[str]] | None:
    """The kind of labels and the arguments of a batch that gave the same results; None: none did."""
    try:
        sides, sorts = (list(dict.fromkeys(each)) for each in zip(*some, strict=True))
        batch = draw_padded(model, sides, sorts, form, length)
        if batch is None:
            return None
        for sort, inputs in with_labels(model, batch, called):
            if labels is not None and sort != labels:
                continue
            same = _compare(stage, called, inputs, sort)
            if same is not None:
                # What a model does may depend on whether there are labels, and whether it is trained.
                others = [_compare(stage, called, batch, ""), _compare(stage, called, inputs, sort, training=True)]
                return (sort, set(inputs)) if same and False not in others else None
    except Exception as error:
        log.debug("%s cannot be tried with padding: %s", type(model).__name__, error)
    return None


def _compare(stage: Stage, model: nn.Module, inputs: Batch, labels: str, training: bool = False) -> bool | None:
    """Whether a batch gives the same results without its padding; None where the model does not take it, or gives, in
    training, another result each time."""
    if not isinstance(model, PreTrainedModel) and not takes_any_name(model):
        inputs = {name: value for name, value in inputs.items() if name in argument_names(model)}
    results: list[Result] = []
    for trial in (False, False, True) if training else (False, True):
        with stage.set_up(training=training):
            torch.manual_seed(len(results))
            call = Call(None, None, rectangle=not trial, lazy=False, trial=trial)
            set_call(call)
            try:
                given = in_precision_of(model, inputs)
                results.append(run(model, given, None, masks_of(inputs), scores=labels == "tokens"))
            except Exception as error:
                log.debug("%s, %s: %s", type(model).__name__, sorted(inputs), error)
                return False if trial else None
            finally:
                set_call(None)
    if training and find_difference(results[1], results[0]):
        return None
    return call.ran_packed and find_difference(results[-1], results[0]) is None


def _sides(packed: list[Stack]) -> list[str]:
    """The kinds of padding that these stacks may run without (packing.py)."""
    hidden = {"empty"} if any(stack.owner.config.is_encoder_decoder for stack in packed) else set()
    hidden |= {"holes"} if any(stack.relative for stack in packed) else set()
    return [side for side in SIDES if side not in hidden]


def describe_kept(tried: Tried, packed: list[Stack]) -> str:
    """What keeps its padding although other batches do not."""
    words = {"right": "at the end of rows", "left": "at the beginning of rows", "holes": "between tokens"}
    gone = {side for side, _ in tried.kinds}
    kept = [words[side] for side in _sides(packed) if side in words and side not in gone]
    return f"; padding {' or '.join(kept)} stays" if kept else ""
