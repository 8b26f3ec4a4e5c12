"""What tests of 8-bit factors share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.ops.fp8 import FACTORS
from stretto.ops.round8 import Bound
from tests.ops.checks import DEVICE

HAS_PRODUCTS = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


def bound_of(most: Tensor | float, known: bool = True) -> Bound:
    value = torch.as_tensor(most, dtype=torch.float32, device=DEVICE).clone()
    return Bound(value, torch.zeros_like(value), known)


def bounds_of(values: Mapping[str, float]) -> dict[str, Bound]:
    return {factor: bound_of(values[factor]) for factor in FACTORS}


def same(found: Sequence[Tensor], exact: Sequence[Tensor]) -> bool:
    """Every bit, also of 8-bit numbers; NaN is not the same as NaN."""
    return len(found) == len(exact) and all(
        one.dtype == other.dtype and torch.equal(one.float(), other.float())
        for one, other in zip(found, exact, strict=True)
    )
