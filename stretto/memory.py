"""What a training step keeps in memory, in bytes: one model for the choice of what to keep, for plans and for reports.

Only the configuration is imported here: a plan must not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Keep:
    """What a block keeps for its backward pass; each field names the last thing that is kept of a chain, and what
    follows from it is computed again."""

    norms: Literal["input", "output"] = "input"  # output: what the product behind the norm keeps anyway
    mlp: Literal["activation", "product", "input"] = "activation"  # product: the first one, before the activation
    qkv: Literal["product", "input"] = "product"
    block: Literal["inside", "input"] = "inside"  # inside: what the other fields say
