"""Layers that run on the real tokens alone.

A Hugging Face model gets a rectangle [N, S] and a mask. Its own code embeds the rectangle and builds whatever it builds
around its layers; only the layers see less of it:

    first layer    [N, S, C] becomes [1, T, C], the T tokens that the mask keeps, one sequence after the other
    attention      finds a `Packing` where the mask would be, and stays inside the sequences
    last layer     [1, T, C] becomes [N, S, C] again, zero where there is padding

So positions, poolers, heads and outputs are the model's own. A hook on each model (`enter`, `leave`) decides, before
any mask is built, whether this call is packed; each layer is then handed the Packing in place of its mask. All of it
travels as arguments, so that a layer that is recomputed in the backward pass finds it again.

Packed documents are the same with nothing to leave out: rows of [N, S] hold several documents, whose ends are given by
position_ids that start anew, or by cu_seq_lens_q. A rectangle is kept where the result would not be the same: labels on
padding, a row whose class is read at padding, hidden states that are asked for, a cache, a window that the sequences
exceed, a hole in a row with a bias by distance. Compiled code keeps it too: a compiler does not know the number of real
tokens.

What the model around the layers does with their result is its own: it may read a class at the first position, at the
last one, or at the last id that is not padding; it may count tokens for a loss. So `try_padding` runs it on batches of
every kind of padding (find.py), with the rectangle and without, and kinds with another result keep the rectangle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stretto.attention import attend
from stretto.batch import IGNORE, Layout, dense_layout
from stretto.hf import find
from stretto.hf.defer import NOTHING, UNTRIED, Call, Facts, Known, Request, Tried, calling, current_call, set_call
from stretto.hf.find import LENGTH, NAME, SIDES, Batch, Stack, argument_names, draw_padded, find_tokens, pad_id
from stretto.hf.modules import is_touched, is_watched
from stretto.hf.trial import Result, Stage, find_difference, run

log = logging.getLogger(__name__)
MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}  # masks, and what they mask
OPTIONS = {  # arguments that concern no token; with the last one TRL reads labelled positions alone
    "return_dict", "use_cache", "logits_to_keep", "num_items_in_batch", "fused_lm_head",
}  # fmt: skip
SETTINGS = str | bool | int | float
HANDED_ON = {  # arguments of the model around the layers that the layers get packed, or never
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "encoder_hidden_states", "encoder_attention_mask",
    "token_type_ids", "labels", "seq_idx",  # the last one says what cu_seq_lens_q says
}  # fmt: skip


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
        if x.shape[1] != self.length or x.shape[0] not in (1, self.rows):
            raise ValueError(f"{list(x.shape)} is not of [{self.rows}, {self.length}] tokens")
        x = x.expand(self.rows, *x.shape[1:]).flatten(0, 1)
        return (x if self.index is None else x[self.index])[None]

    def unpack(self, x: Tensor) -> Tensor:
        if self.index is not None:
            x = x.new_zeros(self.rows * self.length, *x.shape[2:]).index_copy(0, self.index, x[0])
        return x.view(self.rows, self.length, *x.shape[-1:])


class Outside:
    """A module around layers, as it was when its model was tried."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.watched = module, is_watched(module)
        self.kind: Any = type(module)
        self.children = tuple(module._modules.values())

    def has_changed(self) -> bool:
        """Whether somebody has put another class or other children there, or looks at its calls."""
        kind: Any = type(self.module)
        replaced = kind is not self.kind and not kind.__module__.startswith(
            ("torch.", "stretto.")
        )  # FSDP's are derived
        children = tuple(self.module._modules.values())
        same = children == self.children or _are_alike(children, self.children)
        return replaced or not same or (not self.watched and is_watched(self.module))


def _are_alike(children: Sequence[nn.Module | None], before: Sequence[nn.Module | None]) -> bool:
    """Whether nothing is new but embeddings and output layers, as where a vocabulary grows: they see a token alone."""
    return len(children) == len(before) and all(
        new is old or any(isinstance(old, kind) and _is_plain(new, kind) for kind in (nn.Embedding, nn.Linear))
        for new, old in zip(children, before, strict=True)
    )


def _is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    theirs = type(module).__module__.startswith(("torch.", "transformers."))
    return isinstance(module, kind) and theirs and not is_watched(module)


@dataclass(eq=False)
class Seat:
    """What accelerate has decided for one PreTrainedModel, which may be a part of another."""

    unpad: bool
    loss: bool
    packed: bool
    stack: Stack | None = None  # layers that can run without padding
    around: frozenset[PreTrainedModel] = frozenset()  # models that it is a part of
    kin: frozenset[nn.Module] = frozenset()  # models that were accelerated with it
    outside: tuple[Outside, ...] = ()  # modules in it that are in no layer
    works_without_cache: bool = False
    layers: nn.ModuleList | None = None  # layers that hand their result to the next one alone
    tried: Tried = UNTRIED


def enter(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], seat: Seat
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of every PreTrainedModel in an accelerated model. The outermost one knows the labels, and what
    has to be returned; the one that owns a stack of layers decides about its packing."""
    if torch.compiler.is_compiling() or getattr(model, "_is_replica", False):
        return None  # in a replica of DataParallel, whose layers are others than those that were tried, padding stays
    before = current_call()
    outer = before or Call()
    if outer.model is not None and outer.model not in seat.around:
        before = None if outer.model in seat.kin else before  # one of its own parts was left by an interrupt
        outer = Call()  # a call of another model goes on
    given, names = find.given_arguments(model, args, kwargs), argument_names(model)
    masked = add_target_mask(given, model, seat.tried) if seat.unpad and outer.request.loss_only else given
    call = _describe_call(model, seat, masked, outer)
    call.before = before
    if outer.model is None:
        _describe_request(call, model, seat, given)
    if seat.layers is not None and not _wants(model, given, "output_hidden_states"):
        layers = tuple(seat.layers)
        # Layers that run again in the backward pass do so from tensors that autograd has to know.
        recomputed = model.training and any(getattr(m, "gradient_checkpointing", False) for m in (model, layers[0]))
        call.chain = () if recomputed or any(map(is_touched, layers)) else layers[:-1]
    set_call(call)
    if masked is not given and not call.rectangle:
        target = masked["decoder_attention_mask"]
        if any(mask is target and not facts.whole for mask, facts in call.known.masks):
            args, kwargs = find.replace_arguments(model, args, kwargs, decoder_attention_mask=target)
    scored = model.training or call.labels is not None
    unwanted = seat.works_without_cache and scored and not call.request.as_tuple
    if unwanted and "use_cache" in names and given.get("use_cache") is None:  # who wants a loss reads no cache
        args, kwargs = find.replace_arguments(model, args, kwargs, use_cache=False)
        given["use_cache"] = False
    if seat.stack is not None and seat.stack.is_whole():
        _decide(call, seat.stack, given, seat.unpad and not call.rectangle, seat.packed)
    return args, kwargs


def add_target_mask(batch: dict[str, Any], model: PreTrainedModel, tried: Tried) -> dict[str, Any]:
    """With a mask of the target, where a decoder has none: behind the last label is padding, which it sees from there
    alone."""
    labels, name = batch.get("labels"), "decoder_attention_mask"
    theirs = not model.config.is_encoder_decoder or name not in tried.names or batch.get(name) is not None
    if theirs or not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return batch
    mask = (labels != IGNORE).flip(1).cumsum(1).flip(1).clamp(max=1)
    mask[:, :1] = 1
    return batch | {name: mask}


def _describe_call(model: PreTrainedModel, seat: Seat, given: dict[str, Any], outer: Call) -> Call:
    labels = given.get("labels")
    known = outer.known
    if labels is not None and not outer.request.planned:
        known = get_to_know(given, argument_names(model), pad_id(model)) if seat.unpad else NOTHING
    on_padding = seat.unpad and known.labels_on_padding
    lazy = outer.lazy or (seat.loss and labels is not None and model.training)
    return Call(
        model,
        outer,
        rectangle=outer.rectangle or on_padding or _wants(model, given, "output_hidden_states"),
        lazy=lazy and torch.is_grad_enabled(),
        request=outer.request,
        labels=outer.labels if labels is None else labels,
        known=known,
        layer=outer.layer,
    )


def _describe_request(call: Call, model: PreTrainedModel, seat: Seat, given: dict[str, Any]) -> None:
    """Notes what the outermost model is given. Padding stays if the model was not tried with that."""
    request = call.request
    request.as_tuple = not _wants(model, given, "return_dict")
    request.tried, request.ids = seat.tried, given.get("input_ids")
    request.given = frozenset(name for name, value in given.items() if value is not None)
    familiar = request.trial or is_familiar(model, given, seat.tried)
    if not familiar or any(part.has_changed() for part in seat.outside):
        call.rectangle = True


def is_familiar(model: PreTrainedModel, given: Mapping[str, Any], tried: Tried) -> bool:
    """Whether a model was tried with such labels, and with all arguments that have a value for each token."""
    tokens = find_tokens(given)
    shape = tokens.shape[:2] if isinstance(tokens, Tensor) else None
    labels = given.get("labels")
    if isinstance(labels, Tensor):  # a row may have a class or numbers, which does not matter here
        kind = "tokens" if labels.ndim > 1 and not labels.is_floating_point() else "rows"
        if kind != tried.labels:
            return False
    defaults = {name: parameter.default for name, parameter in find.parameters_of(model).items()}
    for name, value in given.items():
        if name in tried.names or value is None:
            continue
        if isinstance(value, Tensor):
            if value.ndim and (value.shape[:2] == shape or _may_point(name, value, shape)):
                return False
        elif name not in OPTIONS and isinstance(value, SETTINGS) and value != defaults.get(name):
            return False
    return wanted_outputs(model, given) == tried.options


def _may_point(name: str, value: Tensor, shape: Any) -> bool:
    """Whether it may say, for each row, which token is meant: whole numbers that are no labels."""
    whole = not value.is_floating_point() and not name.endswith(("label", "labels"))
    return whole and shape is not None and len(value) == shape[0]


def wanted_outputs(model: PreTrainedModel, given: Mapping[str, Any]) -> frozenset[str]:
    """What else than its usual result a model is asked for, by its arguments or its configuration."""
    names = (name for name in (*vars(model.config), *given) if name.startswith("output_"))
    return frozenset(name for name in (*names, "output_attentions") if _wants(model, given, name))


def leave(model: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that is always called."""
    if torch.compiler.is_compiling():
        return
    call = current_call()
    if call is not None and call.model is model:
        set_call(call.before)


def _wants(model: PreTrainedModel, given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    return bool(getattr(model.config, name, False) if value is None else value)


def get_to_know(given: Mapping[str, Any], names: Sequence[str], pad: int | None) -> Known:
    """What the host can know of a batch with labels, for a model that takes arguments of these names and has padding of
    the id `pad`. The host waits for the device once."""
    labels = given.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return NOTHING
    masks = {
        name: mask for name in MASKS if isinstance(mask := given.get(name), Tensor) and mask.device == labels.device
    }
    masks = {name: mask for name, mask in masks.items() if mask.ndim == 2 and mask.numel()}
    mask = given.get("decoder_attention_mask" if "decoder_attention_mask" in names else "attention_mask")
    numbers = [_measure(mask, given.get(MASKS[name]), pad) for name, mask in masks.items()]
    numbers.append(torch.stack([(labels != IGNORE).sum(), has_labels_on_padding(labels, mask).long()]))
    read = iter(torch.cat(numbers).tolist())
    facts = [_judge(mask, read) for mask in masks.values()]
    if len(facts) == len(MASKS) and given.get("decoder_input_ids") is None:
        facts[-1] = replace(facts[-1], ids="other")  # the model makes them of the labels, one place further on
    count, on_padding = read
    return Known(tuple(zip(masks.values(), facts, strict=True)), count, labels.numel(), bool(on_padding))


def has_labels_on_padding(labels: Tensor, mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != labels.shape or mask.device != labels.device:
        return labels.new_zeros((), dtype=torch.bool)
    labelled, padding = labels != IGNORE, mask == 0
    shifted = labelled[:, 1:] & padding[:, :-1]  # a causal model predicts from the position before
    return (labelled & padding).any() | shifted.any()


def _measure(mask: Tensor, ids: Any, pad: int | None) -> Tensor:
    """int64 [8]: largest value, tokens, longest row, shortest row, rows without their first token, rows without their
    last one, most pieces in a row, and number of ids at padding that are not `pad` (-1: there are no ids)."""
    kept = mask != 0
    lengths = kept.sum(1)
    pieces = kept[:, 0] + (kept[:, 1:] & ~kept[:, :-1]).sum(1)
    filled = lengths > 0
    headless, tailless = (filled & ~kept[:, 0]).sum(), (filled & ~kept[:, -1]).sum()
    if isinstance(ids, Tensor) and ids.shape == mask.shape and ids.device == mask.device:
        others = (~kept & (ids != (-1 if pad is None else pad))).sum()
    else:
        others = torch.full_like(headless, -1)
    rows = [lengths.sum(), lengths.max(), lengths.min(), headless, tailless, pieces.max(), others]
    return torch.stack([mask.max().long(), *rows])


def _judge(mask: Tensor, read: Iterator[int]) -> Facts:
    largest, tokens, longest, shortest, headless, tailless, most_pieces, others = islice(read, 8)
    if largest > 1:
        raise ValueError(
            f"attention_mask has values up to {largest}: a mask is 0 or 1; the ends of packed documents are given by "
            "position_ids that start anew with each of them"
        )
    there = {"right": tailless, "left": headless, "holes": most_pieces > 1, "empty": shortest == 0}
    sides = frozenset(side for side, found in there.items() if found)
    ids = "none" if others < 0 else "other" if others else "own"
    return Facts(tokens, longest, tokens == mask.numel(), sides, ids)


def _decide(call: Call, stack: Stack, given: dict[str, Any], unpad: bool, packed: bool) -> None:
    """Sets the packing of a call of the stack's owner, if there is to be one."""
    tokens = find_tokens(given)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[0] * tokens.shape[1] == 0:
        return
    call.stack = stack
    # What the model does with it, between layers or for them, may rely on the rectangle's shape.
    strange = next((name for name, value in given.items() if name not in HANDED_ON and _has_rows(value)), None)
    cached = stack.causal and (given.get("past_key_values") is not None or _wants(stack.owner, given, "use_cache"))
    dropped = stack.owner.training and bool(getattr(stack.owner, "layerdrop", 0.0))
    documents = _find_documents(tokens, given) if stack.causal else None
    if documents is None:
        if packed and stack.causal and stack.owner.training:
            raise ValueError(
                f"{type(stack.owner).__name__} was accelerated with packed=True: it needs the ends of documents, as "
                "position_ids that start anew with each of them, or as cu_seq_lens_q"
            )
        if unpad and not (cached or stack.problem or dropped or strange) and not any(map(is_watched, stack.inside)):
            _unpad(call, stack, tokens, given)
        return
    if not packed and given.get("cu_seq_lens_q") is None and (cached or stack.problem):
        return  # nobody has said that these positions are of documents: what they mean is up to the model
    problem = "the model keeps a cache: pass use_cache=False" if cached else stack.problem
    problem = "its layers are dropped at random" if dropped else problem
    exceeds = stack.exceeds_window(documents.max_len)
    if exceeds or strange:
        if given.get("cu_seq_lens_q") is None and not cached:
            return  # transformers' own mask has the window, and the ends of documents by position_ids
        why = "its window is shorter than a document" if exceeds else f"it is given {strange} as well"
        problem = f"{why}: pass position_ids instead of cu_seq_lens_q"
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
    ids = given.get("input_ids")
    ids, pad = call.request.ids if ids is None else ids, pad_id(stack.owner)
    own = _read_mask(call.known, given.get("attention_mask"), shape, tokens.device, ids, pad)
    if own is None or ("holes" in own.facts.sides and stack.relative) or stack.exceeds_window(own.layout.max_len):
        return
    if not call.request.trial and not call.request.tried.covers(own.facts, call.request.given):
        return  # what the model around does with its layers' result may depend on padding
    if stack.owner.config.is_encoder_decoder and "empty" in own.facts.sides:
        return  # a decoder that attends to a row of padding alone sees the padding
    other = None
    if stack.crosses and memory is not None:
        mask = given.get("encoder_attention_mask")
        other = _read_mask(call.known, mask, (memory.shape[0], memory.shape[1]), tokens.device, None, None)
        if other is None or "empty" in other.facts.sides:
            return
    all_kept = own.index is None and (other is None or other.index is None)
    if all_kept and not stack.relative and not call.request.planned:
        return
    call.own = Packing(*shape, own.index, own.layout, own.layout, stack.causal, stack.layers[-1])
    if other is not None and memory is not None:
        call.memory = Packing(memory.shape[0], memory.shape[1], other.index, own.layout, other.layout)
    call.request.ran_packed = True


@dataclass(frozen=True)
class _Kept:
    """What a mask keeps."""

    index: Tensor | None
    layout: Layout
    facts: Facts


def _read_mask(
    known: Known, mask: Any, shape: tuple[int, int], device: torch.device, ids: Any, pad: int | None
) -> _Kept | None:
    """What a mask keeps; None where that is nothing, or it is not a mask of these rows."""
    rows, length = shape
    facts = Facts(rows * length, length, whole=True, sides=frozenset(), ids="none")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != shape:
            return None
        found = next((facts for other, facts in known.masks if other is mask), None)
        facts = found or _judge(mask, iter(_measure(mask, ids, pad).tolist()))
    if facts.tokens == 0:
        return None
    layout, index = dense_layout(rows, length, device=device), None
    if not facts.whole:
        kept = mask.to(device) != 0
        layout = Layout(F.pad(kept.sum(1).cumsum(0, dtype=torch.int32), (1, 0)), facts.longest)
        # Not `nonzero`, for which the host would wait. Where there is room for more, the first of the padding follows.
        index = (~kept).flatten().byte().argsort(stable=True)[: facts.tokens]
    if known.fillers:  # sequences for the tokens behind the real ones, empty where there are none left
        ends = layout.offsets[-1] + facts.longest * torch.arange(1, known.fillers + 1, device=device)
        layout = Layout(torch.cat([layout.offsets, ends.clamp(max=facts.tokens).int()]), facts.longest)
    return _Kept(index, layout, facts)


def _has_rows(value: Any) -> bool:
    """Whether an argument may have a value for each token."""
    if isinstance(value, Tensor):
        return value.ndim > 1
    return isinstance(value, list | tuple | dict) and len(value) > 0


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
        given = find.given_arguments(self, args, kwargs)
        changes: dict[str, Any] = {"attention_mask": own}
        if call.stack is not None and self is call.stack.layers[0]:
            changes["hidden_states"] = own.pack(given["hidden_states"])
        for name in ("position_ids", "position_embeddings"):
            if given.get(name) is not None:
                changes[name] = _pack_once(call, own, given[name])
        if call.memory is not None:
            memory = _pack_once(call, call.memory, given["encoder_hidden_states"])
            changes |= {"encoder_hidden_states": memory, "encoder_attention_mask": call.memory}
        return find.replace_arguments(self, args, kwargs, **changes)


def _pack_once(call: Call, packing: Packing, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value)(_pack_once(call, packing, x) for x in value)
    for before, packed in call.packed:
        if before is value:
            return packed
    call.packed.append((value, packing.pack(value)))
    return call.packed[-1][1]


def register() -> None:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, build_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Packing | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [N, H, S, D], key and value [N, K, S', D] to [N, S, H, D]."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    bias = others.get("position_bias")
    rows, length, others_length = query.shape[0], query.shape[2], key.shape[2]
    if isinstance(attention_mask, Packing):
        queries, keys = attention_mask.queries, attention_mask.keys
        causal = attention_mask.causal if is_causal is None else is_causal  # CLIP's text model says it in the call
        bias = None if bias is None or bias.numel() == 0 else bias
    elif (
        attention_mask is None
        and bias is None
        and (length == others_length or not causal)
        and value.shape[-1] == query.shape[-1]
        and others.get("softcap") is None
    ):
        queries = _lay_out(rows, length, query.device)
        keys = queries if length == others_length else _lay_out(rows, others_length, query.device)
    else:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **others
        )
        return out, None
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = attend(q, k, _let_go(v, k), queries, keys, causal, dropout, bias, scale=scaling)
    return out.view(rows, length, *out.shape[1:]), None


def _lay_out(rows: int, length: int, device: torch.device) -> Layout:
    """The same for all layers of a call."""
    call = None if torch.compiler.is_compiling() else current_call()
    if call is None:
        return dense_layout(rows, length, device=device)
    found = call.dense.get((rows, length))
    if found is None or found.offsets.device != device:
        found = call.dense[rows, length] = dense_layout(rows, length, device=device)
    return found


def _let_go(value: Tensor, key: Tensor) -> Tensor:
    """Values that are a part of one product with queries and keys (`Together`) keep all of it for the backward pass; a
    copy is better where queries and keys were rotated, and are elsewhere."""
    if torch.compiler.is_compiling() or not value.requires_grad:
        return value
    return value if value.untyped_storage().data_ptr() == key.untyped_storage().data_ptr() else value.contiguous()


def build_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if not torch.compiler.is_compiling():
        call, window = current_call(), kwargs.get("local_size")
        if call is not None and call.stack is not None and isinstance(window, int):
            call.stack.windows.add(window)
        if call is not None and call.own is not None:
            return None
        # Without padding everybody sees everybody. While a graph is recorded, transformers 5.17 would not skip it.
        anyone_may_see = kwargs.get("allow_is_bidirectional_skip") and kwargs.get("local_size") is None
        if anyone_may_see and kwargs.get("attention_mask") is None:
            return None
    return sdpa_mask(*args, **kwargs)


class DistanceBias(nn.Module):
    """Mixed into attention with a bias by distance, such as T5's. In a packed batch the bias is [H, 2 R - 1], a number
    for each distance up to the longest sequence, instead of one for each pair of tokens; for attention without a bias
    of its own it is empty."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packing = next((value for value in (*args, *kwargs.values()) if isinstance(value, Packing)), None)
        if packing is not None and kwargs.get("position_bias") is None:
            kwargs["position_bias"] = self.bias_by_distance(hidden_states, packing.keys.max_len)
        return super().forward(hidden_states, *args, **kwargs)

    def bias_by_distance(self, like: Tensor, reach: int) -> Tensor:
        if not self.has_relative_attention_bias:
            return like.new_zeros(self.n_heads, 0)  # type: ignore[call-overload]
        compute: Any = self.compute_bias
        ahead, behind = (compute(*shape, device=like.device) for shape in ((1, reach), (reach, 1)))
        return torch.cat([behind[0, :, 1:, 0].flip(1), ahead[0, :, 0]], 1)


class PaddingTrial:
    """Runs a model on batches of every kind of padding, with the rectangle and without; or the module around it that is
    called, if that takes batches: it may read padding, too. `stacks` are those in the model that can run without."""

    def __init__(self, stage: Stage, model: PreTrainedModel, stacks: list[Stack], around: nn.Module) -> None:
        self.stage, self.model, self.stacks = stage, model, stacks
        takes = {"input_ids", "attention_mask"} <= set(argument_names(around))
        if not takes and find.takes_any_name(around):  # it takes batches if it can be run with one
            batch = draw_padded(model, ("right",), ("own",), "ids")
            takes = batch is not None and compare_padded(stage, around, batch, "") is not None
        self.called = around if takes else model

    def run(self) -> Tried:
        """The kinds of batch with which the model gives the same results without padding."""
        kinds, names, labels = set[tuple[str, str]](), set[str](), None
        for form, sorts in (("ids", find.IDS), ("embeds", ("none",)), ("positions", ("positions",))):
            groups = [[(side, sort) for side in _sides(self.stacks) for sort in sorts]]
            while groups:  # all kinds at once; where that fails, one side after the other, and then each by itself
                some = groups.pop()
                tried = self._try_group(some, form, labels)
                if tried is not None:
                    labels, given = tried
                    kinds |= set(some)
                    names |= given
                elif len(some) > 1:
                    sides = dict.fromkeys(side for side, _ in some)
                    parts = [[kind for kind in some if kind[0] == side] for side in sides]
                    groups += parts if len(parts) > 1 else [[kind] for kind in some]
        names |= {"decoder_input_ids", "decoder_attention_mask"} if "decoder_attention_mask" in names else set()
        return Tried(frozenset(kinds), frozenset(names), labels or "", wanted_outputs(self.model, {}))

    def _try_group(self, kinds: list[tuple[str, str]], form: str, labels: str | None) -> tuple[str, set[str]] | None:
        """The kind of labels and the arguments of a batch that gave the same results; None where there is none."""
        try:
            sides, sorts = (list(dict.fromkeys(each)) for each in zip(*kinds, strict=True))
            length = min([LENGTH, *(window for stack in self.stacks for window in stack.windows)])
            batch = draw_padded(self.model, sides, sorts, form, length)
            if batch is None:
                return None
            for sort, inputs in find.with_labels(self.model, batch, self.called):
                if labels is not None and sort != labels:
                    continue
                same = compare_padded(self.stage, self.called, inputs, sort)
                if same:  # what a model does may depend on whether there are labels, and whether it is trained
                    unlabelled = compare_padded(self.stage, self.called, batch, "")
                    trained = compare_padded(self.stage, self.called, inputs, sort, training=True)
                    same = False not in (unlabelled, trained)
                if same is not None:
                    return (sort, set(inputs)) if same else None
        except Exception as error:
            log.debug("%s cannot be tried with padding: %s", type(self.model).__name__, error)
        return None


def compare_padded(stage: Stage, model: nn.Module, inputs: Batch, labels: str, training: bool = False) -> bool | None:
    """Whether a batch gives the same results without its padding; None where the model does not take it, or gives, in
    training, another result each time."""
    if not isinstance(model, PreTrainedModel) and not find.takes_any_name(model):
        inputs = {name: value for name, value in inputs.items() if name in argument_names(model)}
    results: list[Result] = []
    for trial in (False, False, True) if training else (False, True):
        request = Request(trial)
        with stage.set_up(training=training), calling(Call(rectangle=not trial, request=request)):
            torch.manual_seed(len(results))
            try:
                results.append(run(model, inputs, labels=labels))
            except Exception as error:
                log.debug("%s, %s: %s", type(model).__name__, sorted(inputs), error)
                return False if trial else None
            if labels and "labels" not in request.given:
                return None  # what is called has kept them to itself
    if training and find_difference(results[1], results[0]):
        return None
    return request.ran_packed and find_difference(results[-1], results[0]) is None


def _sides(packed: list[Stack]) -> list[str]:
    """The kinds of padding that these stacks may run without (`_unpad`)."""
    hidden = {"empty"} if any(stack.owner.config.is_encoder_decoder for stack in packed) else set()
    hidden |= {"holes"} if any(stack.relative for stack in packed) else set()
    return [side for side in SIDES if side not in hidden]


def describe_kept(tried: Tried, packed: list[Stack]) -> str:
    """A remark for the report: the kinds of padding that stay although others do not."""
    words = {"right": "at the end of rows", "left": "at the beginning of rows", "holes": "between tokens"}
    gone = {side for side, _ in tried.kinds}
    kept = [words[side] for side in _sides(packed) if side in words and side not in gone]
    return f"; padding {' or '.join(kept)} stays" if kept else ""
