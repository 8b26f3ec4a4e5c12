"""What a technique's options say to a plan: what it changes in the time of a step, and which options are worth trying.

The options of every technique (config.py) are such a section, so that a plan names none of them. What a technique
changes in memory is in its options' own words for it (`find_kernels`, `find_keeping`), which memory.py counts with.
Nothing is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self


@dataclass(frozen=True)
class Estimate:
    """What a technique changes in the time of a step."""

    work: float = 1.0  # share of the blocks that work, on average over a run
    # Whose products are in 8 bits, where that is faster: of no block, of those inside of a stack, or of all blocks.
    narrow: Literal["", "inside", "all"] = ""
    by_module: bool = True  # it works where a process has some of the blocks only


class Section:
    """Of a technique's options."""

    on_kernels: ClassVar[bool] = False  # it needs our own kernels, and no torch.compile

    def estimate(self, num_blocks: int, steps: int) -> Estimate:
        return Estimate()

    @classmethod
    def list_choices(cls, approximate: bool, model: Any) -> list[Self]:
        """The options that a plan tries besides the technique being off, those that cost the least time first.
        `approximate`: those that change what is computed, too. A technique without any is as the recipe says."""
        return []

    @classmethod
    def refine(cls, memory: int) -> list[Self]:
        """Options that take long to judge, for the best plans alone, where a step may take so many bytes."""
        return []
