"""The parameters of a `transformers` model in memory under our names and in our shapes, for tests that compare them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch import Tensor, nn

from stretto.convert.names import match, to_ours


def translate(theirs: nn.Module, ours: nn.Module, read: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """`read` of each of their parameters (its value, its gradient) by our names: what `ours.load_state_dict` takes.

    Raises unless every parameter of ours is found and every trainable one of theirs is used. The bias of their logits
    is a buffer, which is trained here if a test says so.
    """
    named = chain(theirs.named_parameters(), theirs.named_buffers())
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    wanted = dict(ours.named_parameters())
    found = match(type(theirs).__name__, wanted, trained)
    left = trained.keys() - {found.stored[name] for name in chain(*found.places.values())}
    if found.missing or left:
        raise KeyError(f"missing: {', '.join(found.missing)}; not in the table: {', '.join(left)}")
    return {
        name: to_ours(found, name, parameter.shape, lambda stored: read(trained[stored]))
        for name, parameter in wanted.items()
    }
