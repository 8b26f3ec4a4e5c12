"""Tensors that autograd does not keep for the backward pass, but makes again there.

An operation saves what its gradient needs: attention saves queries, keys and values, which one product has made of an
input that is kept anyway. `forgetting` takes that product out of what is saved: in the backward pass the first
operation that wants a part of it has it made again, and after the last one it is gone. The same function of the same
tensors gives the same bits.

Nothing is copied, and nothing is known of the operations: autograd itself asks, by its hooks for saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """What was saved of a tensor: which elements, but none of their values."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def forgetting(tensor: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """Operations in here keep neither `tensor` nor views of it. `make` returns it once more, over a storage laid out in
    the same way, whenever a backward pass needs it."""
    storage, num_views = tensor.untyped_storage().data_ptr(), 0
    made, left = None, 0  # the tensor in a backward pass, and how many views of it are still to come there

    def pack(saved: Tensor) -> Tensor | View:
        nonlocal num_views
        if not storage or saved.untyped_storage().data_ptr() != storage:  # all tensors without elements lie at 0
            return saved.detach()  # a result that knew its operation, which keeps it, would be a cycle that nobody sees
        num_views += 1
        return View(saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(kept: Tensor | View) -> Tensor:
        nonlocal made, left
        if isinstance(kept, Tensor):
            return kept
        if made is None:
            with torch.no_grad():
                made, left = make(), num_views
        part = made.as_strided(*kept)
        left -= 1
        if left == 0:
            made = None
        return part

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
