"""Layers that run on the real tokens alone.

A Hugging Face model gets a rectangle [N, S] and a mask. Its own code embeds the rectangle and builds whatever it builds
around its layers; only the layers see less of it:

    first layer    [N, S, C] becomes [1, T, C], the T tokens that the mask keeps, one sequence after the other
    attention      finds a `Packing` where the mask would be, and stays inside the sequences (attention.py)
    last layer     [1, T, C] becomes [N, S, C] again, zero where there is padding

So positions, poolers, heads and outputs are the model's own. A hook on each model (`enter`, `leave`) decides, before
any mask is built, whether this call is packed; each layer is then handed the Packing in place of its mask. All of it
travels as arguments, so that a layer that is recomputed in the backward pass finds it again.

Packed documents are the same with nothing to leave out: rows of [N, S] hold several documents, whose ends are given by
position_ids that start anew, or by cu_seq_lens_q. A rectangle is kept where the result would not be the same: labels on
padding, a row whose class is read at padding, hidden states that are asked for, a cache, a window that the sequences
exceed, a hole in a row with a bias by distance. Compiled code keeps it too: how many tokens are real is not known to a
compiler.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.batch import IGNORE, Layout, dense_layout
from stretto.hf.call import NOTHING, Call, Facts, Known, current_call, known_batch, set_call
from stretto.hf.roles import Stack, is_ours

MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the tokens of a rectangle [rows, length] are, and what they attend to."""

    rows: int
    length: int
    index: Tensor | None  # int64 [T], places in the rectangle; None: all of them
    queries: Layout
    keys: Layout
    causal: bool = False
    last: nn.Module | None = None  # the layer behind which the rectangle comes back

    def pack(self, x: Tensor) -> Tensor:
        """[N, S, ...], or [1, S, ...] for all rows alike, to [1, T, ...]."""
        x = x.expand(self.rows, *x.shape[1:]).flatten(0, 1)
        return (x if self.index is None else x[self.index])[None]

    def unpack(self, x: Tensor) -> Tensor:
        if self.index is not None:
            x = x.new_zeros(self.rows * self.length, *x.shape[2:]).index_copy(0, self.index, x[0])
        return x.view(self.rows, self.length, *x.shape[-1:])


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Of the `forward` of its class, or of the class that one of ours was mixed into."""
    kind: Any = type(module)
    return _find_names(kind)


@cache
def _find_names(kind: Any) -> tuple[str, ...]:
    theirs = (base for base in kind.__mro__ if "forward" in vars(base) and not is_ours(base))
    return tuple(inspect.signature(next(theirs).forward).parameters)[1:]


def given_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(argument_names(module), args, strict=False)) | kwargs


def replace_argument(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with another value for one of them, which stays positional if it was."""
    if name in argument_names(module)[: len(args)]:
        at = argument_names(module).index(name)
        return (*args[:at], value, *args[at + 1 :]), kwargs
    return args, kwargs | {name: value}


def enter(
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stack: Stack | None,
    chain: tuple[nn.Module, ...],
    unpad: bool,
    loss: bool,
    packed: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of every PreTrainedModel in an accelerated model. The outermost one knows the labels, and what
    has to be returned; the one that owns a stack of layers decides about its packing."""
    if torch.compiler.is_compiling():
        return None
    given, outer, names = given_arguments(model, args, kwargs), current_call(), argument_names(model)
    labels = given.get("labels")
    known = known_batch.get() or (get_to_know(given, names) if unpad and labels is not None else NOTHING)
    call = Call(
        model,
        outer,
        labels=labels if outer is None or labels is not None else outer.labels,
        known=known if outer is None or labels is not None else outer.known,
        rectangle=(outer is not None and outer.rectangle)
        or _wants(model, given, "output_hidden_states")
        or "start_positions" in names  # the probability of a position is compared with that of padding
        or (unpad and known.labels_on_padding),
        lazy=(outer is not None and outer.lazy)
        or (loss and labels is not None and model.training and torch.is_grad_enabled()),
    )
    if chain and not _is_recomputed(model, chain[0]) and not _wants(model, given, "output_hidden_states"):
        call.chain = chain
    set_call(call)
    if "use_cache" in names and model.training and given.get("use_cache") is None:
        args, kwargs = replace_argument(model, args, kwargs, "use_cache", False)  # nobody reads a cache while training
        given["use_cache"] = False
    if stack is not None:
        _decide(call, stack, given, unpad and not call.rectangle, packed)
    return args, kwargs


def leave(model: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that is always called."""
    if torch.compiler.is_compiling():
        return
    call = current_call()
    if call is not None and call.model is model:
        set_call(call.outer)


def _wants(model: PreTrainedModel, given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    return bool(getattr(model.config, name, False) if value is None else value)


def _is_recomputed(model: PreTrainedModel, layer: nn.Module) -> bool:
    """Whether layers run again in the backward pass, from tensors that autograd has to know."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in (model, layer))


def get_to_know(given: Mapping[str, Any], names: Sequence[str]) -> Known:
    """A batch with labels, for a model that takes arguments of these names. The host waits for the device once."""
    labels = given.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return NOTHING
    named = {name: given.get(name) for name in MASKS}
    masks = [mask for mask in named.values() if isinstance(mask, Tensor) and mask.device == labels.device]
    masks = [mask for mask in masks if mask.ndim == 2 and mask.numel()]
    mask = named["decoder_attention_mask" if "decoder_attention_mask" in names else "attention_mask"]
    numbers = [_measure(mask) for mask in masks]
    numbers.append(torch.stack([(labels != IGNORE).sum(), has_labels_on_padding(labels, mask).long()]))
    read = iter(torch.cat(numbers).tolist())
    facts = [_judge(mask, read) for mask in masks]
    count, on_padding = read
    return Known(tuple(zip(masks, facts, strict=True)), count, labels.numel(), bool(on_padding))


def has_labels_on_padding(labels: Tensor, mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != labels.shape or mask.device != labels.device:
        return labels.new_zeros((), dtype=torch.bool)
    labelled, padding = labels != IGNORE, mask == 0
    shifted = labelled[:, 1:] & padding[:, :-1]  # a causal model predicts from the position before
    return (labelled & padding).any() | shifted.any()


def _measure(mask: Tensor) -> Tensor:
    """int64 [6]: its largest value, tokens, longest row, shortest row, first tokens, most pieces in a row."""
    kept = mask != 0
    lengths = kept.sum(1)
    pieces = kept[:, 0] + (kept[:, 1:] & ~kept[:, :-1]).sum(1)
    first = kept[:, 0].sum()
    return torch.stack([mask.max().long(), lengths.sum(), lengths.max(), lengths.min(), first, pieces.max()])


def _judge(mask: Tensor, read: Iterator[int]) -> Facts:
    largest, tokens, longest, shortest, first, most_pieces = islice(read, 6)
    if largest > 1:
        raise ValueError(
            f"attention_mask has values up to {largest}: a mask is 0 or 1; the ends of packed documents are given by "
            "position_ids that start anew with each of them"
        )
    return Facts(tokens, longest, tokens == mask.numel(), shortest == 0, first < len(mask), most_pieces > 1)


def _decide(call: Call, stack: Stack, given: dict[str, Any], unpad: bool, packed: bool) -> None:
    """Sets the packing of a call of the stack's owner, if there is to be one."""
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[0] * tokens.shape[1] == 0:
        return
    call.stack = stack
    cached = stack.causal and (given.get("past_key_values") is not None or _wants(stack.owner, given, "use_cache"))
    documents = _find_documents(tokens, given) if stack.causal else None
    if documents is None:
        if packed and stack.causal and stack.owner.training:
            raise ValueError(
                f"{type(stack.owner).__name__} was accelerated with packed=True: it needs the ends of documents, as "
                "position_ids that start anew with each of them, or as cu_seq_lens_q"
            )
        if unpad and not cached and not stack.problem and not (stack.owner.training and _drops_layers(stack)):
            _unpad(call, stack, tokens, given)
        return
    problem = "the model keeps a cache: pass use_cache=False" if cached else stack.problem
    problem = "its layers are dropped at random" if stack.owner.training and _drops_layers(stack) else problem
    if _exceeds_window(stack, documents.max_len):
        if given.get("cu_seq_lens_q") is None and not cached:
            return  # transformers' own mask has the window, and the ends of documents by position_ids
        problem = "its window is shorter than a document: pass position_ids instead of cu_seq_lens_q"
    if given.get("encoder_hidden_states") is not None:
        problem = "it attends to an encoder: give one sequence a row"
    if problem:
        raise ValueError(f"the batch has several documents in a row, but {type(stack.owner).__name__}: {problem}")
    call.own = Packing(tokens.shape[0], tokens.shape[1], None, documents, documents, True, stack.layers[-1])


def _find_documents(tokens: Tensor, given: dict[str, Any]) -> Layout | None:
    """The documents in the rows of a batch, if their ends are given: by offsets, or by positions without a mask."""
    rows, length = tokens.shape[:2]
    offsets = given.get("cu_seq_lens_q")
    if offsets is not None:
        if rows != 1 or int(offsets[-1]) != length:
            raise ValueError(f"cu_seq_lens_q ends at {int(offsets[-1])}, but the batch is [{rows}, {length}]")
        return Layout(offsets.int(), int(offsets.diff().max()))
    positions = given.get("position_ids")
    if positions is None or positions.ndim != 2 or given.get("attention_mask") is not None:
        return None
    starts = positions.expand(rows, -1).diff(dim=1) != 1
    starts = torch.cat([starts.new_ones(rows, 1), starts], 1).flatten()
    offsets = torch.cat([starts.nonzero().flatten(), positions.new_tensor([len(starts)])]).int()
    return Layout(offsets, int(offsets.diff().max())) if len(offsets) > rows + 1 else None


def _unpad(call: Call, stack: Stack, tokens: Tensor, given: dict[str, Any]) -> None:
    """Packs what the masks keep, where that is less than everything, or where attention has a bias by distance; always
    where the batch is known beforehand, since transformers, while a CUDA graph is recorded, would build a mask."""
    shape, memory = (tokens.shape[0], tokens.shape[1]), given.get("encoder_hidden_states")
    own = _read_mask(call.known, given.get("attention_mask"), shape, tokens.device)
    if own is None or (own.facts.holes and stack.relative) or _exceeds_window(stack, own.layout.max_len):
        return
    if stack.owner.config.is_encoder_decoder:
        if own.facts.empty:
            return  # a decoder that attends to a row of padding alone sees the padding
    elif (own.facts.empty or (own.facts.headless and not stack.causal)) and call.known.positions != math.prod(shape):
        return  # where not every token has a label, the class of a row may be read at its first one
    other = None
    if stack.crosses and memory is not None:
        mask = given.get("encoder_attention_mask")
        other = _read_mask(call.known, mask, (memory.shape[0], memory.shape[1]), tokens.device)
        if other is None or other.facts.empty:
            return
    all_kept = own.index is None and (other is None or other.index is None)
    if all_kept and not stack.relative and known_batch.get() is None:
        return
    call.own = Packing(*shape, own.index, own.layout, own.layout, stack.causal, stack.layers[-1])
    if other is not None and memory is not None:
        call.memory = Packing(memory.shape[0], memory.shape[1], other.index, own.layout, other.layout)


@dataclass(frozen=True)
class _Kept:
    """What a mask keeps."""

    index: Tensor | None
    layout: Layout
    facts: Facts


def _read_mask(known: Known, mask: Any, shape: tuple[int, int], device: torch.device) -> _Kept | None:
    """None where it keeps nothing, or is not a mask of these rows."""
    rows, length = shape
    facts = Facts(rows * length, length, whole=True, empty=False, headless=False, holes=False)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != shape:
            return None
        found = next((facts for other, facts in known.masks if other is mask), None)
        facts = found or _judge(mask, iter(_measure(mask).tolist()))
    if facts.tokens == 0:
        return None
    if facts.whole:
        layout = dense_layout(rows, length, device=device)
        return _Kept(None, _append(layout, known.fillers, facts), facts)
    assert mask is not None
    kept = mask.to(device) != 0
    offsets = F.pad(kept.sum(1).cumsum(0, dtype=torch.int32), (1, 0))
    # Not `nonzero`, for which the host would wait. Where there is room for more, the first of the padding follows.
    index = (~kept).flatten().byte().argsort(stable=True)[: facts.tokens]
    return _Kept(index, _append(Layout(offsets, facts.longest), known.fillers, facts), facts)


def _append(layout: Layout, fillers: int, facts: Facts) -> Layout:
    """Sequences for the tokens behind the real ones, empty where there are none left."""
    if not fillers:
        return layout
    ends = layout.offsets[-1] + facts.longest * torch.arange(1, fillers + 1, device=layout.offsets.device)
    ends = ends.clamp(max=facts.tokens).int()
    return Layout(torch.cat([layout.offsets, ends]), facts.longest)


def _drops_layers(stack: Stack) -> bool:
    return bool(getattr(stack.owner, "layerdrop", 0.0))


def _exceeds_window(stack: Stack, longest: int) -> bool:
    windows = [getattr(m, "sliding_window", None) for m in (stack.owner.config, *stack.layers[0].modules())]
    return any(window is not None and longest > window for window in windows)


class PackedLayer(nn.Module):
    """Mixed into the layers of a stack."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else current_call()
        if call is None or call.own is None or call.stack is None or self not in call.stack.layers:
            return super().__call__(*args, **kwargs)
        args, kwargs = self._pack_arguments(call, call.own, args, kwargs)
        out = super().__call__(*args, **kwargs)
        if self is not call.own.last:
            return out
        return call.own.unpack(out) if isinstance(out, Tensor) else (call.own.unpack(out[0]), *out[1:])

    def _pack_arguments(
        self, call: Call, own: Packing, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What all layers are given is packed once, hidden states for the first layer. Not in `forward`: a layer
        that is recomputed in the backward pass is then given what it was given before."""
        given = given_arguments(self, args, kwargs)
        if call.stack is not None and self is call.stack.layers[0]:
            args, kwargs = replace_argument(self, args, kwargs, "hidden_states", own.pack(given["hidden_states"]))
        for name in ("position_ids", "position_embeddings"):
            if given.get(name) is not None:
                args, kwargs = replace_argument(self, args, kwargs, name, _pack_once(call, own, given[name]))
        args, kwargs = replace_argument(self, args, kwargs, "attention_mask", own)
        if call.memory is not None:
            memory = _pack_once(call, call.memory, given["encoder_hidden_states"])
            args, kwargs = replace_argument(self, args, kwargs, "encoder_hidden_states", memory)
            args, kwargs = replace_argument(self, args, kwargs, "encoder_attention_mask", call.memory)
        return args, kwargs


def _pack_once(call: Call, packing: Packing, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value)(_pack_once(call, packing, x) for x in value)
    for before, packed in call.packed:
        if before is value:
            return packed
    call.packed.append((value, packing.pack(value)))
    return call.packed[-1][1]
