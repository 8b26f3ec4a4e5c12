"""What a technique's options say to a plan: what it changes in the time of a step, and which options are worth trying.

The options of every technique (config.py) are a section of one of these kinds, so that a plan names no technique. What
a technique changes in memory is in its options' own words for it (`find_kernels`, `find_keeping`), which memory.py
counts with. Nothing else of the package is imported here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self


@dataclass(frozen=True)
class Estimate:
    """What a technique changes in the time of a step, and where it can be."""

    work: float = 1.0  # share of the blocks that work, on average over a run
    # Whose products are in 8 bits, where that is faster: of no block, of those inside of a stack, or of all blocks.
    narrow: Literal["", "inside", "all"] = ""
    by_module: bool = True  # it works where a process has some of the blocks only
    by_token: bool = True  # and where it has some of the tokens of each sequence
    passes: float = math.inf  # of an update, over all processes, up to which CUDA graphs can replay it


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches, in FLOP/s and bytes/s: the rule by which products have 8 bits."""

    bf16: float
    fp8: float
    memory: float

    def find_least(self, out: int, inner: int) -> float:
        """The number of tokens with which a layer's products save as much as rounding costs."""
        saved = out * inner * (1 / self.bf16 - 1 / self.fp8) - (inner + out) / self.memory
        return out * inner / self.memory / saved if saved > 0 else math.inf


RATES = Rates(680e12, 1200e12, 4.2e12)  # of an H200; for other GPUs only their ratios matter


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


class Own(Section):
    """Our own kernels, and how their optimizer keeps weights and moments."""

    @classmethod
    def list_choices(cls, approximate: bool, model: Any) -> list[Self]:
        return [cls(), *([_make(cls, weights="bf16", moments="bf16")] if approximate else [])]


class Kept(Section):
    """What is kept for the backward pass."""

    on_kernels = True

    @classmethod
    def list_choices(cls, approximate: bool, model: Any) -> list[Self]:
        half, whole = max(model.layers // 2, 1), max(model.layers, model.decoder_layers)
        again: list[dict[str, Any]] = [{}, {"qkv": "input"}, {"mlp": "input", "qkv": "input"}]
        return [_make(cls, **options) for options in (*again, {"blocks": half}, {"blocks": whole})]

    @classmethod
    def refine(cls, memory: int) -> list[Self]:
        return [_make(cls, memory=f"{memory / 2**30:.1f}GiB")]


class Narrow(Section):
    """Products of 8 bits. Weights are rounded once an update, which a process with some of the blocks cannot do."""

    on_kernels = True
    sites: str

    def estimate(self, num_blocks: int, steps: int) -> Estimate:
        return Estimate(narrow="all" if self.sites == "all" else "inside", by_module=False)

    @classmethod
    def list_choices(cls, approximate: bool, model: Any) -> list[Self]:
        return [cls()] if approximate else []


class Dropped(Section):
    """Blocks that are left out by a schedule; those of a post-norm model cannot be."""

    theta: float
    schedule: str
    gamma: float
    index: str
    gate: str
    sampling: str

    def theta_at(self, step: int, total: int) -> float:
        """Before update number `step`, counted from 0, of `total`."""
        if self.schedule == "constant":
            return self.theta
        if self.schedule == "raptr":
            return self.theta + (1 - self.theta) * min(step / total, 1.0)
        return (1 - self.theta) * math.exp(-(self.gamma or 100 / total) * step) + self.theta

    def keep_probabilities(self, theta: float, num_blocks: int) -> list[float]:
        first = 0 if self.index == "algorithm" else 1
        return [1 - number / num_blocks * (1 - theta) for number in range(first, first + num_blocks)]

    def estimate(self, num_blocks: int, steps: int) -> Estimate:
        levels = [self.theta_at(step, steps) for step in range(0, steps, max(steps // 100, 1))]
        shares = [sum(self.keep_probabilities(theta, num_blocks)) / num_blocks for theta in levels]
        whole = self.gate == "batch"  # it goes through whole blocks, and others have no gradients
        passes = math.inf if not whole else int(self.sampling == "systematic")
        return Estimate(sum(shares) / len(shares), by_module=whole, by_token=whole, passes=passes)

    @classmethod
    def list_choices(cls, approximate: bool, model: Any) -> list[Self]:
        return [cls()] if approximate and model.norm_order == "pre" else []


class Normless(Section):
    """A loss in place of the norms. It is a mean over those of the whole model."""

    axis: str

    def estimate(self, num_blocks: int, steps: int) -> Estimate:
        return Estimate(by_module=False, by_token=self.axis == "token")


def _make(kind: Any, **options: Any) -> Any:
    """Options of a section, whose fields are known in config.py."""
    return kind(**options)


def find_estimate(config: Any) -> Estimate:
    """What all techniques that are on change together."""
    on = [value for value in vars(config.techniques).values() if isinstance(value, Section)]
    found = [Estimate(), *(section.estimate(config.model.layers, config.train.steps) for section in on)]
    return Estimate(
        math.prod(each.work for each in found),
        max((each.narrow for each in found), key=("", "inside", "all").index),
        all(each.by_module for each in found),
        all(each.by_token for each in found),
        min(each.passes for each in found),
    )
