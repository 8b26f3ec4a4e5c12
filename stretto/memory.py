"""What a training step keeps in memory, in bytes: one model for the choice of what to keep, for plans and for reports.

A block of Stretto's own kernels keeps for its backward pass, for each token, in elements of 2 or 4 bytes (C width, K
channels of all keys, U and I outputs of the first product of the MLP and inputs of the second, n norms):

    inputs of its norms                     n C        (norms = "output": none)
    outputs of its norms                    n C
    queries, keys, values                   C + 2 K    (qkv = "input": none)
    attention's output                      C
    the MLP's first product, activation     U + I      (mlp = "product": U; "input": none; relu has only the activation)
    statistics of norms and attention       fp32: n or 2 n numbers, and one a head

Cross attention adds queries and an output, and the keys and values of the encoder's tokens. A product of 8 bits keeps
its input in one byte, in place of what is in the list; attention's output stays besides, and so does what norms or the
first product are computed again from. With block = "input" a block keeps only what comes into it. Post-norm blocks keep
as much as pre-norm ones: the input of the first product is then the output of the norm of the block before.

Only the configuration is imported here: a plan must not wait for torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from stretto.config import ModelConfig
from stretto.errors import ConfigError
from stretto.estimate import RATES

Attention = Literal["dense", "own", "variable"]  # which kernel: see stretto/attention.py
FP32, KEY = 4, 16  # bytes of a number, and of a key of dropout
MOST_BLOCKS = 100_000  # that a plan goes through one by one
BLOCK_KEYS = 6  # keys of dropout that a block is given
CHUNK_ROWS, CHUNK_BYTES = 8192, 2**31  # of logits, the most that exist at a time
WEIGHT_BYTES = {"fp32": 4, "split": 4, "bf16": 2}
GRADIENT_BYTES = {"fp32": 4, "split": 2, "bf16": 2}
MOMENT_BYTES = {"fp32": 8, "bf16": 4}
NARROW_SIDE = 16  # what both sides of a weight with 8-bit products are multiples of
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Keep:
    """What a block keeps for its backward pass; each field names the last thing that is kept of a chain, and what
    follows from it is computed again."""

    norms: Literal["input", "output"] = "input"  # output: what the product behind the norm keeps anyway
    mlp: Literal["activation", "product", "input"] = "activation"  # product: the first one, before the activation
    qkv: Literal["product", "input"] = "product"
    block: Literal["inside", "input"] = "inside"  # inside: what the other fields say

    def describe(self) -> str:
        if self.block == "input":
            return "nothing but their input"
        mlp = {"activation": ["MLP product", "MLP activation"], "product": ["MLP product"], "input": []}[self.mlp]
        heads = ["queries, keys, values"] if self.qkv == "product" else []
        norms = ["inputs of norms"] if self.norms == "input" else []
        return ", ".join([*norms, "outputs of norms", *heads, "attention output", *mlp])


EVERYTHING = Keep()


@dataclass(frozen=True)
class Load:
    """What one micro-batch brings."""

    tokens: int  # that the only stack, or the decoder, works on
    labels: int  # rows that the head predicts
    source: int = 0  # tokens of the encoder of an encoder-decoder
    longest: int = 0  # tokens of the longest sequence; of pairs, of the longest on each side, added up
    attention: Attention = "dense"

    def count_tokens(self, cross: bool) -> int:
        """The tokens of a block with cross attention, or of one without."""
        return self.source if self.source and not cross else self.tokens


@dataclass(frozen=True)
class Way:
    """How a step computes, and what it holds between two steps."""

    element: int = 2  # bytes of an activation
    weights: Literal["fp32", "split", "bf16"] = "split"
    moments: Literal["fp32", "bf16"] = "fp32"
    micro_batches: int = 1  # beyond one, gradients are there when a forward pass begins
    chunk: int = 0  # most rows of logits at a time; 0: as many as the kernel of the loss takes by itself
    shards: int = 1  # processes that weights, gradients and moments are split over
    averages: bool = False  # there is a running mean of the weights
    # Whose products have 8 bits, where that pays: of no block, of those inside of a stack, or all of all blocks.
    narrow: Literal["", "inside", "all"] = ""

    @property
    def copies(self) -> bool:
        """Whether products read copies of the weights in another type."""
        return self.weights == "fp32" and self.element != FP32


def kv_width(cfg: ModelConfig) -> int:
    """Returns the number of channels of all keys of a token, or of all its values."""
    return cfg.width // cfg.heads * (cfg.kv_heads or cfg.heads)


def mlp_widths(cfg: ModelConfig) -> tuple[int, int]:
    """Returns the channels that the first product of an MLP makes, and those that its second product reads."""
    inner = cfg.mlp_width or 4 * cfg.width
    return (2 * inner if cfg.activation == "swiglu" else inner), inner


def _norm_parameters(cfg: ModelConfig) -> int:
    return {"none": 0, "rmsnorm": 1, "layernorm": 2 if cfg.bias else 1}[cfg.norm] * cfg.width


def count_block_parameters(cfg: ModelConfig, cross: bool = False) -> tuple[int, int]:
    """Counts the elements of the matrices of one block, and those of its biases and norms."""
    (up, inner), width = mlp_widths(cfg), cfg.width
    heads = width + 2 * kv_width(cfg)
    matrices = width * (heads + width + up + inner) + (4 * width * width if cross else 0)
    biases = heads + width + up + width + (4 * width if cross else 0) if cfg.bias else 0
    return matrices, biases + (3 if cross else 2) * _norm_parameters(cfg)


def count_parameters(cfg: ModelConfig) -> dict[str, int]:
    """Counts the parameters of all four kinds by part: all blocks of a stack, and what is outside of blocks."""
    width, norm, masked = cfg.width, _norm_parameters(cfg), cfg.kind == "encoder" and not cfg.classes
    tables = (cfg.max_len if cfg.positions == "learned" else 0) + cfg.token_types
    side = tables * width + (norm if cfg.embed_norm else 0)
    if cfg.kind == "vit":
        embedding = (cfg.channels * cfg.patch**2 + 2 + (cfg.image_size // cfg.patch) ** 2 + 1) * width
        head = (width + 1) * cfg.classes
    else:
        embedding = cfg.vocab * width + side * (1 if cfg.embed_shared else 2)
        head = (0 if cfg.tied else cfg.vocab * width) + (cfg.vocab if masked or cfg.head_bias else 0)
        head += width * width + width + norm if masked else 0
        if cfg.kind == "encoder" and cfg.classes:
            head = width * width + width + (width + 1) * cfg.classes
    blocks = Counter[str]()
    for (stack, cross), many in Counter(list_blocks(cfg)).items():
        blocks[f"{stack} blocks"] += many * sum(count_block_parameters(cfg, cross))
    outside = norm * len(blocks) if cfg.norm_order == "pre" else 0
    return {"embedding": embedding, **blocks, "norms outside of blocks": outside, "head": head}


def list_blocks(cfg: ModelConfig) -> list[tuple[str, bool]]:
    """Lists the blocks in the order of the forward pass: their stack, and whether they have cross attention."""
    both = cfg.kind == "encoder-decoder"
    if max(cfg.layers, cfg.decoder_layers) > MOST_BLOCKS:
        raise ConfigError(
            f"model.layers = {cfg.layers:,} is more than {MOST_BLOCKS:,}, beyond which nothing is planned"
        )
    first = [("decoder" if cfg.kind == "decoder" else "encoder", False)] * cfg.layers
    return first + [("decoder", True)] * (cfg.decoder_layers or cfg.layers) if both else first


def list_products(cfg: ModelConfig, cross: bool) -> dict[str, tuple[int, int]]:
    """Returns the outputs and inputs of those linear layers of a block that may have 8 bits."""
    (up, inner), width = mlp_widths(cfg), cfg.width
    found = {
        "qkv": (width + 2 * kv_width(cfg), width),
        "out": (width, width),
        "up": (up, width),
        "down": (width, inner),
    }
    return found | ({"cross query": (width, width), "cross out": (width, width)} if cross else {})


def find_narrow(cfg: ModelConfig, load: Load, way: Way, cross: bool, is_end: bool) -> frozenset[str]:
    """Returns those that have; `is_end`: of the first or the last block of a stack."""
    if not way.narrow or (way.narrow == "inside" and is_end):
        return NOTHING
    shapes, tokens = list_products(cfg, cross).items(), load.count_tokens(cross)
    able = [(name, shape) for name, shape in shapes if not any(side % NARROW_SIDE for side in shape)]
    return frozenset(name for name, shape in able if way.narrow == "all" or tokens > RATES.find_least(*shape))


def block_bytes(
    cfg: ModelConfig, keep: Keep = EVERYTHING, element: int = 2, cross: bool = False, attention: Attention = "dense",
    narrow: frozenset[str] = NOTHING,
) -> dict[str, int]:  # fmt: skip
    """Returns the bytes that one block keeps for each of its tokens, by role; the keys and values of the encoder's
    tokens are not among them. A kernel for variable lengths reads keys once for each query head."""
    width, kv, (up, inner) = cfg.width, kv_width(cfg), mlp_widths(cfg)
    norms, attentions = (3, 2) if cross else (2, 1)
    numbers = 1 if cfg.norm == "rmsnorm" or (keep.norms == "output" and keep.block == "inside") else 2
    if keep.block == "input":
        first = numbers * FP32 if cfg.norm_order == "pre" else 0
        return {"inputs of blocks": width * element, "statistics": first}
    words = 2 * FP32 * cfg.heads if attention == "own" and cfg.attention_dropout else 0
    repeated = 2 * width if attention == "variable" and kv < width else 0
    heads = width * attentions + 2 * kv if keep.qkv == "product" else 0
    relu = cfg.activation == "relu"  # the sign of its activation says all that the product would
    # The output of a norm stays as it is if the product behind it keeps that, or something is computed again from it.
    again = {"qkv": keep.qkv == "input", "up": keep.mlp == "input"}
    if cross:
        again["cross query"] = keep.qkv == "input"
    stays = [name not in narrow or keep.norms == "output" or begins for name, begins in again.items()]
    eights = len(narrow & again.keys()) - ("up" in narrow and keep.mlp == "input")  # the MLP rounds it once more
    activation = 1 if "down" in narrow and not relu else element
    return {
        "inputs of norms": norms * width * element if keep.norms == "input" else 0,
        "outputs of norms": width * (sum(stays) * element + eights),
        "queries, keys, values": (heads + repeated) * element,
        "attention outputs": width * (attentions * element + len(narrow & {"out", "cross out"})),
        "MLP products": up * element if keep.mlp != "input" and not relu else 0,
        "MLP activations": inner * activation if keep.mlp == "activation" or (keep.mlp == "product" and relu) else 0,
        "statistics": FP32 * (norms * numbers + attentions * cfg.heads),
        "words of attention dropout": attentions * words,
    }


def work_bytes(
    cfg: ModelConfig, keep: Keep = EVERYTHING, element: int = 2, cross: bool = False, attention: Attention = "dense"
) -> int:
    """Estimates the bytes for each token that the backward pass of one block needs besides what is kept. Beside the
    gradients of the residual stream, of a branch and of its input there are, at the worse of two times: the gradient of
    the MLP's inner values, which overwrites that of the activation unless a gate makes it wider, and what of these
    values is computed again; or gradients of queries, keys and values, as they are found and side by side, and these
    three again."""
    width, kv, (up, inner) = cfg.width, kv_width(cfg), mlp_widths(cfg)
    made = 0 if cfg.activation == "relu" else inner
    mlp = inner + (up if up > inner else 0) + {"activation": 0, "product": made, "input": up + made}[keep.mlp]
    heads = (width + 2 * kv) * (3 if keep.qkv == "input" else 2)
    again = sum(block_bytes(cfg, EVERYTHING, element, cross, attention).values()) if keep.block == "input" else 0
    return (max(mlp, heads) + (3 if cfg.dropout else 2) * width) * element + again


def chunk_rows(tokens: int, row_bytes: int, chunk: int = 0) -> int:
    """Returns the rows of logits that exist at a time, as the kernel of the loss does."""
    most = max((chunk or min(CHUNK_BYTES // row_bytes, CHUNK_ROWS)) // 128 * 128, 128)
    each = -(-tokens // max(-(-tokens // most), 1))
    return max(-(-each // 128), 1) * 128


@dataclass(frozen=True)
class Head:
    """The bytes of the output layer and its loss."""

    kept: int  # from its forward pass to its backward pass: gradients, which the forward pass has made, among them
    forward: int  # what its forward pass needs besides: logits, and what comes into it
    backward: int  # gradients in the type of the weights, while the kept ones are still there


def head_bytes(cfg: ModelConfig, load: Load, way: Way) -> Head:
    """The loss of a language model makes its gradients in the forward pass, chunk by chunk of the logits. A classifier
    is small, but a ViT's reads one row in each image of a tensor that then stays as a whole."""
    rows, width, e = load.labels, cfg.width, way.element
    if cfg.classes and cfg.kind in ("vit", "encoder"):
        logits = (rows * cfg.classes + 1) * FP32  # and the sum of their weights
        inputs = load.tokens * width * e if cfg.kind == "vit" else 2 * rows * width * e
        copies = width * cfg.classes * e if way.copies else 0
        return Head(inputs + copies + logits, logits, rows * width * e)
    table = cfg.vocab * width
    kept = rows * width * e + FP32 * table
    forward = load.tokens * width * e + (table * e if way.copies else 0)
    if cfg.kind == "encoder":  # BERT's head has one more layer, with a norm
        norm = FP32 * (1 if cfg.norm == "rmsnorm" else 2)
        kept += rows * (3 * width * e + norm)
    if cfg.kind == "encoder" or cfg.head_bias:
        kept += FP32 * cfg.vocab
    stride = -(-cfg.vocab // 64) * 64
    forward += min(chunk_rows(rows, stride * e, way.chunk), rows) * stride * e
    return Head(kept, forward, rows * width * e + table * GRADIENT_BYTES[way.weights])


def outside_bytes(cfg: ModelConfig, load: Load, way: Way) -> dict[str, int]:
    """Returns what is kept outside of blocks and head, by role: inputs of the norms behind stacks, what all blocks
    read, and the patches of images."""
    stacks, tokens = len({stack for stack, _ in list_blocks(cfg)}), load.tokens + load.source
    found = Counter[str]()
    if cfg.norm_order == "pre":
        found["inputs of norms"] = tokens * cfg.width * way.element
        found["statistics"] = tokens * FP32 * (1 if cfg.norm == "rmsnorm" else 2)
    if cfg.positions == "rotary":
        found["positions"] = tokens * cfg.width // cfg.heads * FP32
    if cfg.positions == "sinusoidal" and cfg.kind != "vit":
        found["positions"] = load.longest * cfg.width * FP32
    if cfg.kind == "vit":
        found["patches"] = (load.tokens - load.labels) * cfg.channels * cfg.patch**2 * way.element
        found["embedding dropout"] = load.tokens * cfg.width if cfg.dropout else 0
    elif cfg.dropout:
        found["keys of dropout"] += KEY * stacks
    if cfg.kind == "encoder-decoder":
        found["outputs of norms"] += load.source * cfg.width * way.element  # what keys and values are made of
    if cfg.dropout or cfg.activation_dropout:
        found["keys of dropout"] += stacks * BLOCK_KEYS * KEY  # one more set than there are blocks
    return found


def kept_by_blocks(cfg: ModelConfig, load: Load, keeps: Sequence[Keep], way: Way) -> list[dict[str, int]]:
    """Returns what each block keeps, by role, in the order of the forward pass."""
    narrow = list_narrow(cfg, load, way)
    kinds = [(cross, keep, some) for (_, cross), keep, some in zip(list_blocks(cfg), keeps, narrow, strict=True)]
    again = any(keep.block == "input" for keep in keeps)  # then attention drops by these keys, too
    kept = {}
    for cross, keep, some in set(kinds):
        tokens = load.count_tokens(cross)
        per_token = block_bytes(cfg, keep, way.element, cross, load.attention, some)
        found = Counter({role: size * tokens for role, size in per_token.items()})
        if cross:  # made by one product for all blocks
            found["queries, keys, values"] += 2 * cfg.width * load.source * way.element
        if cfg.dropout or cfg.activation_dropout or (again and cfg.attention_dropout):
            found["keys of dropout"] += BLOCK_KEYS * KEY
        kept[cross, keep, some] = dict(found)
    return [kept[kind] for kind in kinds]


def list_narrow(cfg: ModelConfig, load: Load, way: Way) -> list[frozenset[str]]:
    """Returns the products of 8 bits of each block."""
    blocks = list_blocks(cfg)
    stacks = ["", *(stack for stack, _ in blocks), ""]
    ends = [len({*stacks[i : i + 3]}) > 1 for i in range(len(blocks))]  # beside a block of another stack, or of none
    return [find_narrow(cfg, load, way, cross, end) for (_, cross), end in zip(blocks, ends, strict=True)]


def narrow_bytes(cfg: ModelConfig, load: Load, way: Way) -> int:
    """Returns the bytes of weights in 8 bits, both ways. Of weights that are split they last for a pass only."""
    if way.shards > 1:
        return 0
    blocks = zip(list_blocks(cfg), list_narrow(cfg, load, way), strict=True)
    return sum(2 * prod(list_products(cfg, cross)[name]) for (_, cross), some in blocks for name in some)


@dataclass(frozen=True)
class Account:
    """The bytes of a training step on one device."""

    weights: int
    gradients: int
    moments: int
    activations: dict[str, int]  # what all blocks and the embedding keep for the backward pass, by role
    head: Head
    kept: tuple[int, ...]  # by each block, in the order of the forward pass
    during: tuple[int, ...]  # what there is in the backward pass of each block, and at the worst time of the head
    least: int  # what there is at the end of a step, whatever blocks keep
    times: dict[str, int] = field(repr=False)  # what there is at each of the times that may be the peak
    average: int = 0  # the running mean of the weights
    narrow: int = 0  # weights in 8 bits

    @property
    def peak(self) -> int:
        return max(self.times.values())

    @property
    def peak_at(self) -> str:
        return max(self.times, key=self.times.__getitem__)


def gathered_bytes(cfg: ModelConfig, way: Way) -> int:
    """Returns what a process gathers of weights that are split: those of a block, those of the next one, and those
    outside of blocks."""
    blocks = {cross: sum(count_block_parameters(cfg, cross)) for cross in {cross for _, cross in list_blocks(cfg)}}
    outside = sum(size for part, size in count_parameters(cfg).items() if not part.endswith("blocks"))
    return (2 * max(blocks.values()) + outside) * way.element if way.shards > 1 else 0


def predict(cfg: ModelConfig, load: Load, keeps: Sequence[Keep], way: Way) -> Account:
    """Computes the account of a step. Its peak is at one of five times:

    - the forward pass of the head: everything is kept, and a chunk of logits comes on top. It is the peak where
      vocabularies are large, or blocks keep much.
    - the backward pass of the head: gradients of the output layer, once in fp32 and once in the type of the weights
    - the backward pass of a block: what it and earlier blocks keep, the gradients of later ones, and what it needs
      itself. It is the peak where a block makes more again than the head needs.
    - the end of the backward pass: all gradients, and a second one of the table of tokens
    - the update: weights, gradients and moments, and no activations. Small batches have their peak at one of these two.

    Gradients come into being block by block while the kept tensors go, so state and activations are never there as a
    whole unless several micro-batches share an update."""
    parts, kept = count_parameters(cfg), kept_by_blocks(cfg, load, keeps, way)
    size, head = -(-sum(parts.values()) // way.shards), head_bytes(cfg, load, way)
    outside, each = outside_bytes(cfg, load, way), GRADIENT_BYTES[way.weights]
    weights, moments, gradients = size * WEIGHT_BYTES[way.weights], size * MOMENT_BYTES[way.moments], size * each
    stay = way.micro_batches > 1  # what a backward pass makes is added to them at once, but for tables with two uses
    average, narrow = size * FP32 if way.averages else 0, narrow_bytes(cfg, load, way)
    held = weights + moments + average + narrow + (gradients if stay else 0) + gathered_bytes(cfg, way)
    everything = held + sum(outside.values()) + sum(sum(found.values()) for found in kept)
    stream, table = load.tokens * cfg.width * way.element, cfg.vocab * cfg.width * each
    now = everything + (parts["head"] * each if cfg.classes or not cfg.tied else table)
    during, own = [], {cross: sum(count_block_parameters(cfg, cross)) * each for cross in (False, True)}
    for (_, cross), keep, found in reversed(list(zip(list_blocks(cfg), keeps, kept, strict=True))):
        tokens = load.count_tokens(cross)
        during.append(now + own[cross] + tokens * work_bytes(cfg, keep, way.element, cross, load.attention))
        now += (0 if stay else -(-own[cross] // way.shards)) - sum(found.values())
    state = weights + gradients + moments + average + narrow
    times = {
        "forward pass of the head": everything + head.kept + head.forward,
        "backward pass of the head": everything + head.kept + head.backward,
        "backward pass of a block": max(during),
        "end of the backward pass": state + table * (2 if stay and cfg.tied else 1) + stream,
        "update": state,
    }
    activations = Counter(outside)
    for found in kept:
        activations.update(found)
    return Account(
        weights,
        gradients,
        moments,
        {role: size for role, size in activations.items() if size},
        head,
        kept=tuple(sum(found.values()) for found in kept),
        during=(*reversed(during), max(list(times.values())[:2])),
        least=max(list(times.values())[3:]),
        times=times,
        average=average,
        narrow=narrow,
    )
