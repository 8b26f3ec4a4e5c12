"""Whole updates of a Hugging Face model, for `Step` and `Trainer`: each launched as one where that is possible.

The layers of such a model are many small pieces of Python, and the GPU often waits for them. An `Update` records what
they launch, backward pass and optimizer included, as CUDA graphs (graphs.py). A graph is of one shape, so batches are
planned first (`plan`), on the CPU, without waiting for the GPU:

    width    up to a power of two, for rows with padding: layers run without it, so that it costs next to nothing
    tokens   numbers of real tokens and of labels are rounded up, and filled up with padding that nobody looks at
    sizes    a batch of a new size is run in that of an earlier one, if that has room for it (`Sizes`)

What cannot be recorded is found by looking at the model (`find_obstacle`), and by running it: a model that makes the
host wait for the device is noticed in its first passes with such arguments, which are launched.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.utils import import_utils

from stretto.batch import IGNORE, pack, shape_of
from stretto.buckets import round_to_bucket, round_to_power
from stretto.execute import Executor
from stretto.gradients import Gradients, Present, Static
from stretto.graphs import TIMES, Recorded
from stretto.hf.acceleration import outermost, report, techniques_of
from stretto.hf.defer import Call, Facts, Known, Request, Tried, calling
from stretto.hf.find import argument_names, pad_id
from stretto.hf.modules import is_watched
from stretto.hf.unpad import MASKS, SETTINGS, add_target_mask, get_to_know, is_familiar
from stretto.optim import FlatAdamW, clip_gradients

log = logging.getLogger(__name__)
PARTS = 16  # buckets of tokens between two powers of two, and of labels where most tokens have one
FEW_PARTS = 4  # those of labels where few have one: they cost little
NEAR = 1.125  # a size that is at most so much larger is as good as one's own
WIDE = 2.0  # a size that is at most so much larger does for now
OFTEN = 16  # times until a batch gets a size of its own all the same
MOST = 24  # sizes for batches of one kind
TRIES = 4  # passes of which one must not wait for the device
PLAIN = Tensor | SETTINGS | None  # what a graph can be given, or can be for
DECODER = {"decoder_input_ids", "decoder_attention_mask", "labels"}  # what is as long as a target
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Planned:
    """A batch, and what the host knows of it."""

    inputs: dict[str, Any]
    masks: dict[str, Facts]
    labels: int
    positions: int
    fillers: int
    pattern: dict[str, Any] = field(default_factory=dict)  # what techniques do in this update
    tokens: tuple[int, ...] = ()  # numbers of real tokens, by mask

    def known(self) -> Known:
        masks = tuple((self.inputs[name], facts) for name, facts in self.masks.items())
        return Known(masks, self.labels, self.positions, fillers=self.fillers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What may differ in batches of one kind: the tokens and the longest row of each mask, and the labels."""
        return (*(size for facts in self.masks.values() for size in (facts.tokens, facts.longest)), self.labels)

    def kind(self) -> Hashable:
        """What a graph depends on besides `sizes`."""
        return (*self.masks, *shape_of(replace(self, masks={}, labels=0, fillers=0)))

    def resize(self, sizes: tuple[int, ...]) -> Planned:
        pairs = zip(self.masks.items(), sizes[:-1:2], sizes[1:-1:2], strict=True)
        masks = {name: replace(facts, tokens=tokens, longest=longest) for (name, facts), tokens, longest in pairs}
        return replace(self, masks=masks, labels=sizes[-1], fillers=count_fillers(masks))

    def fits(self, sizes: tuple[int, ...]) -> bool:
        """Whether there is room for the batch, and the fillers reach the end of it."""
        if any(mine > room for mine, room in zip(self.sizes, sizes, strict=True)):
            return False
        resized = self.resize(sizes)
        pairs = zip(self.tokens, resized.masks.values(), strict=True)
        return all(facts.tokens - tokens <= resized.fillers * facts.longest for tokens, facts in pairs)


def count_fillers(masks: Mapping[str, Facts]) -> int:
    """Sequences for tokens that are not real, none longer than the longest row: at most half of all tokens."""
    return max((-(-facts.tokens // (2 * facts.longest)) for facts in masks.values()), default=0)


class Sizes:
    """Finds sizes for batches, so that few are in use: each needs a graph of its own."""

    def __init__(self) -> None:
        self.used: dict[Hashable, Counter[tuple[int, ...]]] = {}  # how often, by kind of batch
        self.missed: Counter[Hashable] = Counter()  # how often a batch had to be run in a size that is not its own

    def choose(self, planned: Planned) -> Planned:
        kind, own = planned.kind(), planned.sizes
        used = self.used.setdefault(kind, Counter())
        if own not in used:
            own = self._find_room(planned, used, self.missed[kind, own] < OFTEN) or own
            self.missed[kind, planned.sizes] += 1
        if own in used or len(used) < MOST:
            used[own] += 1
        return planned if own == planned.sizes else planned.resize(own)

    def _find_room(self, planned: Planned, used: Counter[tuple[int, ...]], wide: bool) -> tuple[int, ...] | None:
        """The smallest size that was in use before, has room for the batch, and is not much larger."""
        largest = (WIDE if wide else NEAR) * _weigh(planned.sizes)
        rooms = (sizes for sizes, times in used.items() if times >= TIMES and _weigh(sizes) <= largest)
        return min(filter(planned.fits, rooms), key=_weigh, default=None)


def _weigh(sizes: tuple[int, ...]) -> int:
    return sum(sizes[::2])  # tokens and labels


def plan(batch: Mapping[str, Any], model: PreTrainedModel, tried: Tried) -> Planned | None:
    """What the host knows of a batch beforehand. None for a batch that is looked at while the model runs: one with
    documents in its rows, gaps, labels on padding, padding that has to stay, or labels that are no ids, beside which a
    mask stays unknown; and for one with tensors in lists, as detection has them."""
    if any(batch.get(name) is not None for name in ("position_ids", "cu_seq_lens_q")):
        return None
    if any(not isinstance(value, PLAIN) for value in batch.values()):
        return None
    inputs = add_target_mask(dict(batch), model, tried)
    known = get_to_know(inputs, argument_names(model), pad_id(model))
    if known.labels_on_padding or any(facts.sides & {"empty", "holes"} for _, facts in known.masks):
        return None
    masks = {name: facts for name in MASKS for mask, facts in known.masks if inputs.get(name) is mask}
    if any(inputs.get(name) is not None and name not in masks for name in MASKS):
        return None
    # A mask that keeps everything is none: so the model need not ask.
    inputs = {name: value for name, value in inputs.items() if name not in masks or not masks[name].whole}
    masks = {name: facts for name, facts in masks.items() if name in inputs}
    if masks:
        wide = _widen(inputs, masks, model)
        chosen = next((pair for pair in (wide, (inputs, masks)) if _is_tried(*pair, model, tried)), None)
        if chosen is None:
            return None
        inputs, masks = chosen
    tokens = tuple(facts.tokens for facts in masks.values())
    masks = {name: _round(facts, inputs[name]) for name, facts in masks.items()}
    positions = inputs["labels"].numel() if known.positions else 0
    parts = PARTS if 2 * known.labels > min(tokens, default=known.positions) else FEW_PARTS
    labels = min(round_to_bucket(known.labels, parts), positions)
    return Planned(inputs, masks, labels, positions, count_fillers(masks), tokens=tokens)


def _round(facts: Facts, mask: Tensor) -> Facts:
    tokens = min(round_to_bucket(facts.tokens, PARTS), mask.numel())
    return replace(facts, tokens=tokens, longest=round_to_power(facts.longest))


def _is_tried(inputs: Mapping[str, Any], masks: Mapping[str, Facts], model: PreTrainedModel, tried: Tried) -> bool:
    return is_familiar(model, inputs, tried) and all(tried.covers(facts, inputs) for facts in masks.values())


def _widen(
    inputs: dict[str, Any], masks: dict[str, Facts], model: PreTrainedModel
) -> tuple[dict[str, Any], dict[str, Facts]]:
    """Rows with padding get some more of it, unless the batch has something of a token whose padding is not known."""
    pairs, pad = model.config.is_encoder_decoder, pad_id(model) or 0
    fill = dict.fromkeys(("attention_mask", "decoder_attention_mask", "token_type_ids"), 0) | {"labels": IGNORE}
    fill |= {"input_ids": pad, "decoder_input_ids": pad}
    inputs, masks = dict(inputs), dict(masks)
    for mask_name in masks:
        shape = inputs[mask_name].shape
        more = _find_width(shape[1], model) - shape[1]
        same = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.shape[:2] == shape]
        same = [name for name in same if not pairs or (name in DECODER) == (mask_name in DECODER)]
        if more <= 0 or any(name not in fill or inputs[name].ndim != 2 for name in same):
            continue
        inputs |= {name: F.pad(inputs[name], (0, more), value=fill[name]) for name in same}
        masks[mask_name] = replace(masks[mask_name], sides=masks[mask_name].sides | {"right"})
    return inputs, masks


def _find_width(width: int, model: PreTrainedModel) -> int:
    """No more than the model has positions for; what is not said is not known, but for positions by distance."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None:
        limit = math.inf if hasattr(model.config, "relative_attention_num_buckets") else 0
    return int(min(round_to_power(width), limit))


class Update:
    """What an executor runs: `learn` from each batch of an update, and `apply`.

    `backpropagate` takes the arguments of the model, on its device, makes the gradients, and returns the loss. It may
    be replayed instead of called. `several`: gradients of several batches are added up in an update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: FlatAdamW,
        clip: float,
        backpropagate: Callable[[dict[str, Any]], Tensor],
        obstacle: str = "",
        several: bool = False,
    ) -> None:
        self.model, self.optimizer, self.clip, self.backpropagate = model, optimizer, clip, backpropagate
        self.techniques, self.sizes = techniques_of(model), Sizes()
        self.inner, self.tried = outermost(model)
        self.unpads = not any(line.role == "padding" and line.problem for line in report(model).lines)
        self.several, self.parameters = several, list(model.parameters())
        self.trained: tuple[bool, ...] = ()  # whether each of them was to be trained in the last update
        self.gradients = Gradients(model)
        self.device = self.parameters[0].device
        obstacle = obstacle if can_record(self.device) else "the model is not on a GPU"
        self.eager = Executor(self)
        self.executor = self.eager if obstacle else Recorded(self, optimizer)
        self.norm: Tensor | None = None  # norm of the last update's gradients
        self.begun = False  # whether gradients of earlier batches wait for the update
        self.tries: dict[Hashable, int] = {}  # passes with such arguments that are left to see one that does not wait
        log.info("CUDA graphs: %s", f"off: {obstacle}" if obstacle else "on")

    def plan(
        self, batch: Mapping[str, Any], others: Mapping[str, Tensor] = NONE, pattern: Mapping[str, Any] = NONE
    ) -> Planned | dict[str, Any]:
        """The batch on the device, in few shapes where it can be planned. `others` travel with it, for
        `backpropagate`; a graph is for the values in `pattern`."""
        planned = plan(batch, self.inner, self.tried)
        if planned is None or (planned.masks and not self.unpads):
            return move({**batch, **others}, self.device)
        pattern = {**self.techniques.pattern(), **pattern}
        planned = self.sizes.choose(replace(planned, inputs={**planned.inputs, **others}, pattern=pattern))
        there = all(value.device == self.device for value in planned.inputs.values() if isinstance(value, Tensor))
        return planned if there else pack(planned, self.device)

    def run(self, batch: Planned | dict[str, Any], number: int, last: bool = True) -> Tensor:
        """The loss of a batch of update `number`, which is made with its last batch."""
        if not self.begun:
            self._look_again()
        self.optimizer.take_rates()
        self.begun = not last
        try:
            return self._run(batch, number, last)
        except BaseException:  # of the passes that were made, nothing stays
            self.gradients.zero(self.optimizer)
            self.begun = False
            raise

    def _look_again(self) -> None:
        """Weights may have been frozen since the last update, and others no longer be."""
        trained = tuple(p.requires_grad for p in self.parameters)
        if trained != self.trained:
            self.trained = trained
            self.executor.forget()
            self.gradients.release()
            kind = (Present if self.techniques.gaps else Static) if self.several else Gradients
            self.gradients = kind(self.model)

    def _run(self, batch: Planned | dict[str, Any], number: int, last: bool) -> Tensor:
        names = frozenset(batch.inputs) if isinstance(batch, Planned) else None
        key = None if names is None else self.techniques.graph_key(number)
        tries = 0 if key is None or self.executor is self.eager else self.tries.get(names, TRIES)
        with self._watched(names, tries) if tries else nullcontext():
            key = None if tries or key is None else (key, self.model.training)
            if not self.gradients.stay:
                loss, self.norm = self.executor.run([(number, batch)], key)
                return loss
            self.executor.turn_to(key)
            loss = self.executor.learn(batch)
            if self.gradients.has_strays():  # they may be in the memory of graphs, which the next replay writes to
                self._launch_all("some weights have a gradient in a part of the batches only")
            if last:
                self.gradients.finish()
                self.norm = self.executor.apply()
        return loss

    @contextmanager
    def _watched(self, names: Hashable, tries: int) -> Iterator[None]:
        """Around first passes, which are launched until one has not waited for the device; if all have, all are."""
        with noting_waits() as places, as_if_recorded():
            yield
        self.tries[names] = tries - 1 if places else 0
        if places and tries == 1:
            self._launch_all(f"the host waits for the device at {', '.join(places)}")

    def _launch_all(self, reason: str) -> None:
        if self.executor is not self.eager:
            log.info("CUDA graphs: off: %s", reason)
            self.executor.forget()
            self.executor = self.eager

    def seed_for(self, index: int) -> None:
        """Random numbers are those of the loop around."""

    def learn(self, batch: Planned | dict[str, Any]) -> Tensor:
        self.gradients.attach()
        if isinstance(batch, Planned):
            inputs, call = dict(batch.inputs), Call(known=batch.known(), request=Request(planned=True))
        else:
            inputs, call = batch, Call(request=Request(loss_only=True))
        # Where there is an autocast around, its copies of weights are older than these, or not of this graph.
        torch.clear_autocast_cache()
        with calling(call):
            loss = self.backpropagate(inputs)
        torch.clear_autocast_cache()
        self.gradients.settle()
        return loss.detach()

    def apply(self) -> Tensor:
        self.gradients.attach()
        norm = clip_gradients(self.model, self.optimizer, self.clip)
        self.optimizer.step()
        self.gradients.zero(self.optimizer)
        return norm


@contextmanager
def as_if_recorded() -> Iterator[None]:
    """transformers asks the device some questions, such as whether a mask keeps everything, unless a graph is being
    recorded. A pass that is watched has to go the way of a recording."""
    before = import_utils.is_cuda_stream_capturing
    import_utils.is_cuda_stream_capturing = lambda: True
    try:
        yield
    finally:
        import_utils.is_cuda_stream_capturing = before


@contextmanager
def noting_waits() -> Iterator[list[str]]:
    """Notes the lines of Python that make the host wait for the device, which a recording does not allow."""
    before, places = torch.cuda.get_sync_debug_mode(), dict[str, None]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        found: list[str] = []
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if "called a synchronizing CUDA operation" in str(each.message):
            places[f"{each.filename}:{each.lineno}"] = None
        elif "Synchronization debug mode" not in str(each.message):  # which is new, and says so
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    found += places


def move(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with all tensors in it, in lists and dictionaries too, on the device."""

    def move_one(value: Tensor) -> Tensor:
        if value.device == device:
            return value
        return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)

    moved: dict[str, Any] = tree_map_only(Tensor, move_one, dict(batch))
    return moved


def can_record(device: torch.device) -> bool:
    return device.type == "cuda"


def find_obstacle(model: nn.Module, optimizer: FlatAdamW | None = None, several: bool = False) -> str:
    """Why updates cannot be recorded, by what is known; empty if they can. `several`: as in `Update`."""
    modules, techniques = dict(model.named_modules()), techniques_of(model)
    if reasons := techniques.find_obstacles():
        return "; ".join(reasons)
    if several and techniques.gaps:
        return "layers that are left out have no gradient, which would have to stay in place to be added up"
    if any(getattr(module, "layerdrop", 0.0) for module in modules.values()):
        return "layers are dropped at random, by the host"
    if any(getattr(module, "gradient_checkpointing", False) for module in modules.values()):
        return "layers are recomputed with a state of the random numbers that the host keeps"
    if (name := next((name for name, module in modules.items() if is_watched(module)), None)) is not None:
        return f"a hook looks at {name or 'the model'}"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        return "a hook looks at gradients"
    if optimizer is not None and (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
        return "a hook looks at the optimizer's steps"
    return ""
