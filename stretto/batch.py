"""What the data hands to the model: sequences as one flat run of tokens, plus where each one begins and ends.

Shapes: T tokens in all, N sequences, S the longest. Packed is the native form: no padding, T = sum of lengths.
Dense is the special case in which the T tokens are a rectangle of N rows of S; a dense batch may be padded on the
right, and then carries the real lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

B = TypeVar("B")
ALIGNED = 64  # bytes: where a tensor may begin in a packed batch
IGNORE = -100  # a label that is not to be predicted


class Segment(Protocol):
    """Tokens whose sequences go on in other processes (see parallel/sequence.py): how they attend to all of them."""

    @property
    def tokens(self) -> Tensor:
        """int64 [T]: which tokens of the whole batch these are."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, own: bool, dropout: float, key: Tensor | None, scale: float | None
    ) -> Tensor:
        """As attention.attend does for whole sequences, by the masks of the model that the batch was split for. `own`:
        keys are those of the same side of the batch."""
        ...


@dataclass(frozen=True)
class Layout:
    """How T tokens split into N sequences of at most `max_len`."""

    offsets: Tensor  # int32 [N + 1], packed: sequence i is tokens[offsets[i] : offsets[i + 1]]; may end in empty ones
    max_len: int
    dense: bool = False  # the tokens are a rectangle [N, max_len]
    lengths: Tensor | None = None  # int32 [N], dense only: real tokens per row; None: every row is full
    num_real: Tensor | None = None  # int64 [], packed only: number of real tokens, before filler; None: no filler
    segment: Segment | None = None  # these are parts of longer sequences; None: they are whole

    @property
    def num_sequences(self) -> int:
        return self.offsets.shape[0] - 1


def find_real(layout: Layout, num_tokens: int) -> Tensor:
    """Which tokens are neither padding nor filler: bool [T]."""
    device = layout.offsets.device
    if layout.lengths is not None:
        return (torch.arange(layout.max_len, device=device) < layout.lengths[:, None]).flatten()
    token = torch.arange(num_tokens, device=device)
    return token >= 0 if layout.num_real is None else token < layout.num_real


def dense_layout(rows: int, length: int, lengths: Tensor | None = None, device: Any = None) -> Layout:
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
    return Layout(offsets, length, dense=True, lengths=lengths)


@dataclass(frozen=True)
class Sequences:
    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], restarting at 0 in each sequence
    layout: Layout
    types: Tensor | None = None  # int64 [T], token types; None: all 0


@dataclass(frozen=True)
class Subset:
    """Some of the sequences of a layout."""

    tokens: Tensor  # int64 [T']: where they are among all T tokens, in the same order
    places: Tensor  # int32 [T]: where each token is among these, -1: nowhere
    layout: Layout  # how these T' split


@dataclass(frozen=True)
class Part:
    """What a block works on."""

    subset: Subset | None = None  # None: everything
    memory: Subset | None = None  # of the encoder's output, where there is cross attention


@dataclass(frozen=True)
class Share:
    """A block's part, and the factor of what it adds to it. Not a tuple: FSDP2 would round the factor."""

    part: Part = Part()
    scale: Tensor | None = None  # fp32 []; None: 1
    whole: bool = False  # the factor is that of the block as a whole, not of each of its branches


@dataclass(frozen=True)
class Depth:
    """Which blocks of a stack work on a batch. The pattern is part of the batch's shape."""

    scales: Tensor  # fp32 [L]
    parts: dict[int, Part]  # by the number of the block; all other blocks are left out
    whole: bool  # as in Share
    work: float  # number of blocks that would do as much work on the whole batch

    def shares(self) -> dict[int, Share]:
        scales = self.scales.unbind()
        return {number: Share(part, scales[number], self.whole) for number, part in self.parts.items()}


@dataclass(frozen=True)
class Counts:
    """What the host knows of a batch without asking the device."""

    tokens: int  # real tokens the model reads: target tokens for translation; for images, the number of images
    slots: int  # the same with padding
    labels: int  # positions that are predicted
    pairs: int  # (query, key) pairs of self attention in the main stack, before any causal mask
    source_tokens: int = 0
    source_slots: int = 0
    source_pairs: int = 0
    cross_pairs: int = 0

    @property
    def all_slots(self) -> int:
        """The slots of both sides of a translation."""
        return self.slots + self.source_slots

    @property
    def padding(self) -> int:
        """How many of them hold nothing."""
        return self.all_slots - self.tokens - self.source_tokens


@dataclass(frozen=True)
class Mix:
    """What is in each image besides itself. Not a tuple: FSDP2 would round the shares."""

    labels: Tensor  # int64 [N]: of the other image
    shares: Tensor  # fp32 [N]: how much of the loss the image's own label has; the other one has the rest


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Which fields are set depends on the kind of model."""

    labels: Tensor  # int64 [T], or [M] when label_at says where, or [N] for classes
    counts: Counts
    samples: tuple[int, ...]  # ids of the samples, in order: what a resumed or split run is compared by
    inputs: Sequences | None = None  # text
    label_at: Tensor | None = None  # int64 [M]: labels are for these tokens only (masked LM, classes of texts)
    source: Sequences | None = None  # what the encoder of an encoder-decoder reads
    pixels: Tensor | None = None  # float [N, C, H, W]
    mix: Mix | None = None  # None: each image is only itself
    depths: dict[str, Depth] = field(default_factory=dict)  # by the name of the stack; in others every block works

    def to(self, device: torch.device) -> Batch:
        return self if self.labels.device.type == device.type else pack(self, device)


def silence(batch: Batch) -> Batch:
    """The same work, of which nothing is learned: for a process without samples, while others wait for its part in what
    all of them compute. All its slots count as padding."""
    counts = Counts(0, batch.counts.slots, 0, 0, source_slots=batch.counts.source_slots)
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE), counts=counts, samples=())


# Below, a batch may be any dataclass with tensors in it.


def pack(batch: B, device: torch.device | None = None) -> B:
    """A copy, on another device or where it is, with all tensors in one buffer, which travels as one. Even a small copy
    takes a GPU some microseconds, and where each block has sequences of its own there would be 150 of them."""
    tensors = _tensors(batch)
    home = tensors[0].device
    device = home if device is None else device
    starts = list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors), initial=0))
    pin = home.type == "cpu" and device.type == "cuda"
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=home, pin_memory=pin)

    def divide(buffer: Tensor) -> list[Tensor]:
        # .data, since autograd takes a change of one view for a change of all.
        pairs = zip(starts, tensors, strict=False)
        return [buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).data for at, tensor in pairs]

    for part, tensor in zip(divide(buffer), tensors, strict=True):
        part.copy_(tensor)
    parts = iter(divide(buffer.to(device, non_blocking=pin)))
    packed: B = _map_tensors(batch, lambda _: next(parts))
    return packed


def copy_into(target: B, source: B) -> None:
    """Copies the tensors of a batch into those of another one, in one copy if both are packed, else one by one."""
    to, new = _tensors(target), _tensors(source)
    if (place := _find_place(to)) is not None and place == _find_place(new):
        to, new = [_buffer_of(to[0])], [_buffer_of(new[0])]
    for one, other in zip(to, new, strict=True):
        one.copy_(other, non_blocking=True)


def _find_place(tensors: list[Tensor]) -> list[object] | None:
    """Where they are in a buffer of which size; None if they have no buffer in common."""
    buffers = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    if len(buffers) != 1:
        return None
    return [*buffers.values(), *((tensor.storage_offset(), tensor.stride()) for tensor in tensors)]


def _buffer_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def shape_of(batch: Any) -> tuple[Any, ...]:
    """All that the operations on a batch depend on, other than the values in its tensors."""
    return tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in _leaves(batch))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Counts | tuple):  # for the host alone
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _leaves(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from _leaves(getattr(value, item.name))
    else:
        yield value


def _map_tensors(value: Any, fn: Any) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, fn) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _map_tensors(getattr(value, item.name), fn) for item in fields(value)})
    return value
