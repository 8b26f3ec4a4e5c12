"""Which bytes to keep: for each block of a model, from the memory that there is and the time that it takes to compute
again what is not kept.

The times are a rule: products, attention and bytes at the rates of one GPU. So a resumed run and any number of
processes choose alike, and only ratios of rates matter: on a chip that is slower at everything the choice is the same.

The choice is exact. In the backward pass of block i memory holds what blocks 1 to i keep, the gradients of blocks i to
L, and what block i itself needs. What the choices for blocks 1 to i mean for later ones is one number, the bytes that
they keep; so of all choices that keep as many bytes or fewer only the fastest goes on to the next block.

Only the configuration is imported here: a plan must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import inf

from stretto.config import ModelConfig
from stretto.memory import (
    Account, Keep, Load, Way, block_bytes, count_block_parameters, kv_width, list_blocks, mlp_widths, predict,
)  # fmt: skip

PRODUCTS, ATTENTION, BYTES = 600e12, 250e12, 4e12  # FLOP/s, FLOP/s and bytes/s of an H200 in 16 bits


@dataclass(frozen=True)
class Needs:
    """What decides over the bytes of a step, besides what blocks keep."""

    model: ModelConfig
    load: Load
    way: Way

    def predict(self, keeps: Sequence[Keep]) -> Account:
        return predict(self.model, self.load, keeps, self.way)


def list_options(norms: str, whole: bool) -> list[Keep]:
    """All that a block may keep, the most first. `whole`: a block may be computed again as a whole."""
    choices = product(("activation", "product", "input"), ("product", "input"))
    keeps = [Keep(norms, mlp, qkv) for mlp, qkv in choices]  # type: ignore[arg-type]
    return [*keeps, Keep(norms, block="input")] if whole else keeps  # type: ignore[arg-type]


def follow_options(cfg: ModelConfig, keep: Keep, num_whole: int) -> list[Keep]:
    """The same for all blocks, but for the first of each stack, which are computed again as a whole."""
    names = [stack for stack, _ in list_blocks(cfg)]
    whole = Keep(keep.norms, block="input")
    return [whole if i - names.index(name) < num_whole else keep for i, name in enumerate(names)]


def seconds_again(cfg: ModelConfig, keep: Keep, cross: bool, longest: int) -> float:
    """The time, for each token of a block, of what is computed again in the backward pass. Of an activation only its
    writing counts: the kernel that writes it reads the product anyway."""
    (up, inner), heads = mlp_widths(cfg), (2 if cross else 1) * cfg.width + 2 * kv_width(cfg)
    if keep.block == "input":
        seen = longest / 2 if cfg.kind == "decoder" else longest
        products = 2 * count_block_parameters(cfg, cross)[0] / PRODUCTS
        # What a block keeps is written once and read about once more while it is computed.
        moved = 2 * sum(block_bytes(cfg, Keep(), 2, cross).values()) / BYTES
        return products + 4 * seen * cfg.width / ATTENTION + moved
    mlp = {"activation": 0.0, "product": 2 * inner / BYTES}.get(keep.mlp, 2 * cfg.width * up / PRODUCTS)
    mlp += 2 * inner / BYTES if keep.mlp == "input" else 0.0
    return mlp + (2 * cfg.width * heads / PRODUCTS if keep.qkv == "input" else 0.0)


def fit(needs: Needs, options: Sequence[Keep], memory: int) -> list[Keep] | None:
    """The fastest choice of an option for each block with which a step takes at most so many bytes; None: there is
    none."""
    cfg, blocks = needs.model, list_blocks(needs.model)
    accounts = [needs.predict([option] * len(blocks)) for option in options]
    if accounts[0].least > memory:
        return None
    kept_until = [[*accumulate(account.kept, initial=0)] for account in accounts]
    front: list[tuple[int, float, tuple[Keep, ...]]] = [(0, 0.0, ())]  # bytes kept so far, seconds, choices
    for i, (_, cross) in enumerate(blocks):
        tokens = needs.load.count_tokens(cross)
        grown = []
        for option, account, until in zip(options, accounts, kept_until, strict=True):
            seconds = tokens * seconds_again(cfg, option, cross, needs.load.longest)
            besides = account.during[i] - until[i + 1]  # all but what this block and earlier ones keep
            grown += [
                (kept + account.kept[i], spent + seconds, (*chosen, option))
                for kept, spent, chosen in front
                if kept + account.kept[i] + besides <= memory
            ]
        front, fastest = [], inf
        for state in sorted(grown, key=lambda state: state[:2]):
            if state[1] < fastest:
                front.append(state)
                fastest = state[1]
    at_head = accounts[0].during[-1] - kept_until[0][-1]
    fitting = [state for state in front if state[0] + at_head <= memory]
    return list(min(fitting, key=lambda state: state[1])[2]) if fitting else None
