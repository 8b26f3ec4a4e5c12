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
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import inf
from typing import Any

from stretto.config import ModelConfig
from stretto.memory import (
    FP32,
    Account,
    Keep,
    Load,
    Way,
    block_bytes,
    chunk_rows,
    count_block_parameters,
    kv_width,
    list_blocks,
    mlp_widths,
    predict,
)

MOST_CHANNELS = 128  # of a head in our own attention kernels (ops/attention.py)
CHUNKS = (0, 4096, 2048, 1024)  # rows of logits at a time
PRODUCTS, ATTENTION, BYTES = 600e12, 250e12, 4e12  # FLOP/s, FLOP/s and bytes/s of an H200 in 16 bits


@dataclass(frozen=True)
class Choice:
    seconds: float  # of what a step computes again, and of the traffic of smaller chunks
    keeps: tuple[Keep, ...]  # what each block keeps, in the order of the forward pass
    chunk: int = 0  # most rows of logits at a time; 0: as usual


@dataclass(frozen=True)
class Needs:
    """What decides over the bytes of a step, besides a choice."""

    model: ModelConfig
    load: Load
    way: Way

    def predict(self, choice: Choice) -> Account:
        return predict(self.model, self.load, choice.keeps, replace(self.way, chunk=choice.chunk))


def list_options(norms: str, whole: bool) -> list[Keep]:
    """All that a block may keep, the most first. `whole`: a block may be computed again as a whole."""
    choices = product(("activation", "product", "input"), ("product", "input"))
    keeps = [Keep(norms, mlp, qkv) for mlp, qkv in choices]  # type: ignore[arg-type]
    return [*keeps, Keep(norms, block="input")] if whole else keeps  # type: ignore[arg-type]


def find_problem(cfg: ModelConfig, padded: bool) -> str:
    """Says why blocks cannot be computed again as a whole; empty: they can. Only our own kernels drop probabilities of
    attention by a key, which is drawn once for both passes."""
    kernels_know_no = {
        "data.layout = 'padded'": padded,
        "model.window": cfg.window > 0,
        f"heads of more than {MOST_CHANNELS} channels": cfg.width // cfg.heads > MOST_CHANNELS,
    }
    found = [what for what, holds in kernels_know_no.items() if holds and cfg.attention_dropout]
    return f"with {found[0]}, attention_dropout draws random numbers that cannot be drawn again" if found else ""


def follow(cfg: ModelConfig, keep: Keep, num_whole: int = 0) -> Choice:
    """The same for all blocks, but for the first of each stack, which are computed again as a whole."""
    names = [stack for stack, _ in list_blocks(cfg)]
    whole = Keep(keep.norms, block="input")
    return Choice(0.0, tuple(whole if i - names.index(name) < num_whole else keep for i, name in enumerate(names)))


def seconds_again(cfg: ModelConfig, keep: Keep, cross: bool, longest: int) -> float:
    """The time, for each token of a block, of what is computed again in the backward pass. Of an activation only its
    writing counts: the kernel that writes it reads the product anyway."""
    (up, inner), heads = mlp_widths(cfg), (2 if cross else 1) * cfg.width + 2 * kv_width(cfg)
    if keep.block == "input":
        seen = longest / 2 if cfg.kind == "decoder" else longest
        products = 2 * count_block_parameters(cfg, cross)[0] / PRODUCTS
        # Norms and activation move about as many bytes as a block keeps; those of products are in their rate.
        moved = sum(block_bytes(cfg, Keep(), 2, cross).values()) / BYTES
        return products + 4 * seen * cfg.width / ATTENTION + moved
    widths = (up if keep.mlp == "input" else 0) + (heads if keep.qkv == "input" else 0)
    return 2 * cfg.width * widths / PRODUCTS + (0.0 if keep.mlp == "activation" else 2 * inner / BYTES)


@dataclass(frozen=True)
class Options:
    """What a recipe asks for."""

    keep: Keep  # what blocks keep, where no memory is given
    num_whole: int = 0  # blocks of each stack, the first ones, that are computed again as a whole
    memory: int = 0  # bytes that a step may take; 0: nobody has said


def read_options(section: Any, card: int) -> Options:
    """The options of a recipe (config.py), on a GPU with so many bytes; None: everything is kept."""
    if section is None:
        return Options(Keep())
    return Options(Keep(section.norms, section.mlp, section.qkv), section.blocks, section.read_memory(card))


def decide(needs: Needs, options: Options, padded: bool) -> Choice:
    """What the options say, or else the fastest that their memory allows; a ValueError says why there is none."""
    if not options.memory:
        return follow(needs.model, options.keep, options.num_whole)
    ladder = list_options(options.keep.norms, whole=not find_problem(needs.model, padded))
    choice = choose(needs, ladder, options.memory)
    if choice is None:
        each = (needs.predict(replace(follow(needs.model, keep), chunk=CHUNKS[-1])) for keep in ladder)
        least = min(each, key=lambda account: account.peak)
        raise ValueError(
            f"{options.memory / 2**30:.2f} GiB cannot be met: with as little kept as can be a step takes about"
            f" {least.peak / 2**30:.2f} GiB, at the {least.peak_at}; make the batch smaller, or split the weights over"
            " processes (parallel.data = 'shard')"
        )
    return choice


def choose(needs: Needs, options: Sequence[Keep], memory: int) -> Choice | None:
    """The fastest choice of an option for each block, and of the size of a chunk of logits, with which a step takes at
    most so many bytes; None: there is none. The sum of an output layer's gradient is read and written once a chunk."""
    cfg, load, found = needs.model, needs.load, []
    if cfg.classes or not cfg.vocab:  # there are no chunks
        return fit(needs, options, memory)
    for chunk in CHUNKS:
        choice = fit(needs, options, memory, chunk)
        if choice is not None:
            rows = chunk_rows(load.labels, -(-cfg.vocab // 64) * 64 * needs.way.element, chunk)
            traffic = -(-load.labels // rows) * 2 * FP32 * cfg.vocab * cfg.width / BYTES
            found.append(replace(choice, seconds=choice.seconds + traffic))
    return min(found, key=lambda choice: choice.seconds, default=None)


def fit(needs: Needs, options: Sequence[Keep], memory: int, chunk: int = 0) -> Choice | None:
    """As `choose`, with chunks of one size."""
    cfg, blocks = needs.model, list_blocks(needs.model)
    accounts = [needs.predict(replace(follow(cfg, option), chunk=chunk)) for option in options]
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
    if not fitting:
        return None
    _, seconds, keeps = min(fitting, key=lambda state: state[1])
    return Choice(seconds, keeps, chunk)
