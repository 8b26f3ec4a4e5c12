"""A batch in one buffer: the same values, and one copy from one to the next."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.batch import Batch, copy_into, pack, shape_of
from stretto.config import LayerDropConfig
from stretto.techniques.technique import At
from tests.layer_drops import KINDS, make_batches, make_drop

PLACES = "depths.decoder.parts.3.subset.places."


class Copies(TorchDispatchMode):
    """Counts the copies that are made."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.copy_.default
        return func(*args, **kwargs or {})


def tensors_of(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {"": value}
    inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return {f"{name}.{rest}": leaf for name, item in inner.items() for rest, leaf in tensors_of(item).items()}


def draw(name: str, form: str, index: int) -> Batch:
    """Draws a batch that says which sequences each block works on."""
    drop = make_drop(LayerDropConfig(gate="sample", theta=0.3, schedule="constant"), KINDS[name])
    return drop.prepare(make_batches(KINDS[name], form)[0], At(0, index))


@pytest.mark.parametrize(
    ("name", "form"),
    [*product(["decoder", "encoder-decoder"], ["dense", "padded", "packed"]), ("vit", "dense")],
)
def test_a_packed_batch_is_the_same_batch(name: str, form: str) -> None:
    batch = draw(name, form, 0)
    packed, wanted = pack(batch), tensors_of(batch)
    found = tensors_of(packed)
    assert shape_of(packed) == shape_of(batch) and found.keys() == wanted.keys() and len(found) > 10
    for path, tensor in found.items():
        assert torch.equal(tensor, wanted[path]) and tensor.is_contiguous(), path
        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0, path
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
    packed.labels.zero_()
    assert all(tensor._version == (path == "labels.") for path, tensor in found.items()), "to autograd they are apart"


def test_packed_batches_are_copied_at_once() -> None:
    own, other = pack(draw("decoder", "padded", 0)), draw("decoder", "padded", 1)
    wanted = tensors_of(other)
    for source, most in ((other, len(wanted)), (pack(other), 1)):
        copy_into(own, pack(draw("decoder", "padded", 3)))
        assert not torch.equal(tensors_of(own)[PLACES], wanted[PLACES])
        with Copies() as copies:
            copy_into(own, source)
        assert copies.number == most
        for path, tensor in tensors_of(own).items():
            assert torch.equal(tensor, wanted[path]), path


def test_tensors_of_one_buffer_in_another_order_are_copied_one_by_one() -> None:
    """They have a buffer in common, too, but what is where differs."""
    own, other = (pack({"a": torch.full((8,), a), "b": torch.full((8,), b)}) for a, b in ((0.0, 0.0), (1.0, 2.0)))
    copy_into(own, {"a": other["b"], "b": other["a"]})
    assert own["a"].tolist() == [2.0] * 8 and own["b"].tolist() == [1.0] * 8
