"""Softmax attention inside each of many sequences that lie packed one after the other.

    S = scale q k^T + bias          query i of a sequence sees its keys j; causal: its keys with j <= i
    P = softmax(S)                  a query without keys gives 0
    out = drop(P) v

    backward, with dP = drop(dout v^T):
    dS = P (dP - delta),  delta = sum over keys of P dP = sum over channels of out dout
    dq = scale dS k     dk = scale dS^T q     dv = drop(P)^T dout     dbias = sum of dS over pairs of equal distance

Nothing of size [queries, keys] is kept: the backward pass computes P again from q, k and the logarithm of each query's
sum, `lse`. Two kinds of kernel:

    short   All keys of a sequence are one tile, so a row of P is there at once: no rescaling forward. A program goes
            from head to head and reads the next one while it works. Backward is one kernel for all three gradients,
            which finds delta in the tile and sums dk and dv in registers over the queries, and over the query heads
            that share a key head.
    long    Key tile by key tile with a running maximum (FlashAttention-2). Backward is two kernels, one that goes along
            the keys for dq and one that goes along the queries for dk and dv: nothing is added up by atomics, so
            results repeat bit for bit. The first one also writes delta, which the second one reads.

A program of the long kind is a tile. Sequence i begins at tile offsets[i] // BLOCK + i: so all tiles have a place below
T // BLOCK + N, whatever the lengths are, and the host need not know them. Tiles are taken in the order of sequences,
all heads of one before the next: if the longest come first, no processor begins a long one when others are done.

The bias is relative, as T5's is: one number for each head and distance j - i. Its gradient has a kernel of its own, in
which a program follows one diagonal of tiles through all sequences: a place inside these tiles is always the same
distance, so their dS add up in registers, and the diagonals inside the sums are added up at the end.

Dropout is counter-based as in dropout.py, with its two words for each row = query token * H + head. The hash of an
element would cost more than all else that happens to it, so it is a shorter one, one round of mixing, and each serves
two elements: keys j and j + 8 (bit 3 of j clear) take a half of its 32 bits each. A tensor core hands these two to the
same thread whether a tile is [queries, keys] or [keys, queries], so the compiler sees that it is the same hash. In a
tile of the latter kind each thread meets many queries but few keys: the words of the rows, which take four rounds, are
kept. The probability is rounded down to a multiple of 2^-16.

Products take their operands in the dtype of the inputs (P and dS are rounded to it) and add up in fp32; everything else
is fp32. Shapes: q and out [T, H, D]; k and v [T', K, D], H a multiple of K; offsets int32 [N + 1], sequence i being
tokens offsets[i] to offsets[i + 1], which together are all tokens; bias [H, 2 R - 1], fp32, distance 0 in the middle;
key [2], int64. Saved for backward: q, k, v, bias, out, and lse [H, T], fp32, in nats; with dropout, the words of the
rows, [2, H, T].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from stretto.ops import attention_kernels as kernels
from stretto.ops.dropout import mix_ref, row_words_ref
from stretto.ops.language import INTERPRET, cdiv, next_power_of_2, num_processors, wide, wide_dtype
from stretto.ops.op import Op

MOST_CHANNELS = 128  # of one head
_MARGIN = 128  # longest side of a tile
_WORD = 0xFFFFFFFF
_SPREAD = 0x9E3779B1  # odd, so that keys stay distinct; about 2^32 / golden ratio, so that neighbours lie far apart


class Forward(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    q_offsets: Tensor
    k_offsets: Tensor
    q_max: int  # the most queries of a sequence
    k_max: int
    causal: bool
    scale: float
    p: float
    key: Tensor | None  # None: no dropout, or the backward pass, which has the words


def words_ref(key: Tensor | None, token: Tensor, heads: int) -> Tensor:
    """The words [2, H, T], int32, of the queries with the numbers `token` [T]; no words without a key."""
    if key is None:
        return torch.empty(2, heads, 0, dtype=torch.int32)
    row = token * heads + torch.arange(heads, device=key.device)[:, None]
    return torch.stack(row_words_ref(key, row)).to(torch.int32)


def keep_ref(words: Tensor, col: Tensor, p: float) -> Tensor:
    """The mask [H, queries, keys] for words [2, H, queries] and the places of the keys in their sequence [keys]: True
    where a probability survives."""
    first, second = (words.long() & _WORD)[..., None]
    word = mix_ref((((col & ~8) * _SPREAD & _WORD ^ first) + second) & _WORD)
    return (word >> (col & 8) * 2 & 0xFFFF) >= int(p * 2**16)


def spread_bias(bias: Tensor, queries: int, keys: int) -> Tensor:
    """The bias [H, 2 R - 1], one number for each distance, as a matrix [H, queries, keys]."""
    query, key = torch.arange(queries, device=bias.device)[:, None], torch.arange(keys, device=bias.device)
    return bias[:, key - query + bias.shape[1] // 2]


def _sequences(q_offsets: Tensor, k_offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    q_ends, k_ends = q_offsets.tolist(), k_offsets.tolist()
    for i in range(len(q_ends) - 1):
        yield slice(*q_ends[i : i + 2]), slice(*k_ends[i : i + 2])


def _scores_ref(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The scores [H, queries, keys] of one sequence; -inf where a query does not see a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = wide(q.transpose(0, 1) @ k.permute(1, 2, 0)) * scale
    if bias is not None:
        scores = scores + spread_bias(bias, *scores.shape[1:])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def _survival_ref(words: Tensor, scores: Tensor, p: float) -> Tensor | float:
    """The factors of drop(), [H, queries, keys], for words [2, H, queries]."""
    if p == 0.0:
        return 1.0
    return keep_ref(words, torch.arange(scores.shape[2], device=words.device), p).to(scores.dtype) / (1 - p)


def attention_ref(a: Forward) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, lse and words: the definition of correct."""
    q, k, v = a.q, a.k, a.v
    words = words_ref(a.key, torch.arange(q.shape[0], device=q.device), q.shape[1]).to(q.device)
    outs, sums = [q[:0]], [q.new_empty(q.shape[1], 0, dtype=wide_dtype(q.dtype))]
    for rows, cols in _sequences(a.q_offsets, a.k_offsets):
        scores = _scores_ref(q[rows], k[cols], a.bias, a.causal, a.scale)
        probabilities = scores.softmax(-1) * _survival_ref(words[..., rows], scores, a.p)
        values = v[cols].repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(0, 1)
        outs.append((probabilities.to(q.dtype) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1), words


def attention_backward_ref(
    a: Forward, dout: Tensor, out: Tensor, lse: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv and dbias, which is empty without a bias, by the formulas above, sequence by sequence."""
    q, k, v, bias = a[:4]
    dq, dk, dv, dbias = _new_gradients(q, k, v, bias)
    heads, kv_heads = q.shape[1], k.shape[1]
    dbias.zero_()

    def group(t: Tensor) -> Tensor:
        """Sums [keys, H, D] over the query heads of each key head."""
        return t.unflatten(1, (kv_heads, -1)).sum(2)

    for rows, cols in _sequences(a.q_offsets, a.k_offsets):
        scores = _scores_ref(q[rows], k[cols], bias, a.causal, a.scale)
        probabilities = torch.exp(scores - lse[:, rows, None])
        survival = _survival_ref(words[..., rows], scores, a.p)
        keys, values = (wide(t[cols]).repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        grad = wide(dout[rows])
        dprobabilities = torch.einsum("qhd,khd->hqk", grad, values) * survival
        delta = (probabilities * dprobabilities).sum(-1, keepdim=True)
        dscores = probabilities * (dprobabilities - delta)
        dq[rows] = (torch.einsum("hqk,khd->qhd", dscores, keys) * a.scale).to(q.dtype)
        dk[cols] = (group(torch.einsum("hqk,qhd->khd", dscores, wide(q[rows]))) * a.scale).to(k.dtype)
        dv[cols] = group(torch.einsum("hqk,qhd->khd", probabilities * survival, grad)).to(v.dtype)
        if bias is not None:
            places = torch.arange(bias.shape[1], device=bias.device).expand(heads, -1)
            at = spread_bias(places, *scores.shape[1:]).flatten(1)
            dbias.scatter_add_(1, at, dscores.flatten(1).to(bias.dtype))
    return dq, dk, dv, dbias


Tiles = dict[str, int]


def is_short(q: Tensor, k_max: int) -> bool:
    """Whether the keys of a sequence fit into one tile, whose size the registers limit. Products in 32 bits do not use
    the tensor cores, and take small tiles."""
    if q.dtype.itemsize > 2:
        return k_max <= 32
    return k_max <= (128 if q.shape[2] <= 64 else 64)


def short_tiles(q: Tensor, q_max: int, k_max: int, group: int, sequences: int, p: float) -> tuple[Tiles, Tiles]:
    """The tiles of the forward and of the backward kernel."""
    keys, longest, heads = max(16, next_power_of_2(k_max)), max(16, next_power_of_2(q_max)), q.shape[1]
    both: Tiles = {"BLOCK_N": keys, "BLOCK_D": max(16, next_power_of_2(q.shape[2]))}
    forward, backward = both | {"HEADS": 1}, both | {"BLOCK_M": min(64 if keys <= 64 else 32, longest)}
    forward["BLOCK_M"] = min(max(64, keys), longest)
    if keys > 64:  # then two programs fit a processor at a time; with one for each place, every program reads ahead
        fits = [
            n for n in range(1, heads + 1) if heads % n == 0 and sequences * heads <= 2 * n * num_processors(q.device)
        ]
        forward["HEADS"] = min(fits, default=heads)
    forward["SINGLE"] = forward["BLOCK_M"] == longest and forward["HEADS"] == 1
    backward["SINGLE"] = backward["BLOCK_M"] == longest and group == 1
    for tile in (forward, backward):
        tile["num_stages"] = 1 if tile["SINGLE"] else 2  # nothing to read ahead
    pairs, large = forward["BLOCK_M"] * keys, {"num_warps": 8, "maxnreg": 128}
    forward |= {"num_warps": 1 if pairs <= 1024 else 4} if pairs <= 4096 else large
    backward |= {"num_warps": max(1, keys // 16)} if keys <= 64 else large if p > 0.0 else {"num_warps": 4}
    return forward, backward


def long_tiles(q: Tensor, q_max: int) -> tuple[Tiles, Tiles, Tiles]:
    """The tiles of the forward kernel, of the kernel for dq, and of the kernel for dk and dv."""
    block = max(16, next_power_of_2(q.shape[2]))
    if q.dtype.itemsize > 2:
        tile: Tiles = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_D": block, "num_warps": 4, "num_stages": 1}
        return tile, tile, tile
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": block, "num_warps": 4, "num_stages": 3 if block <= 64 else 2}
    tall = tile | {"BLOCK_M": 128, "num_warps": 8}
    # Up to 512 tokens, small tiles: less of the last one of a sequence is in vain.
    return tile if q_max <= 512 and block <= 64 else tall, tile | {"BLOCK_N": 32}, tile | {"BLOCK_M": 32}


def _describe(a: Forward, *tensors: Tensor) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
    """Returns the tensors with dense heads (the kernels take any stride from token to token, but none inside of a
    token), and the arguments and the constants of all kernels that read these tensors."""
    dense = [t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous() for t in tensors]
    tokens, heads, size = a.q.shape
    layout = (a.q_offsets, a.k_offsets, tokens, a.scale * math.log2(math.e), *(t.stride(0) for t in dense))
    return dense, layout, {"H": heads, "GROUP": heads // a.k.shape[1], "D": size, "CAUSAL": a.causal, "P": a.p}


def launch_attention(a: Forward) -> tuple[Tensor, Tensor, Tensor]:
    if INTERPRET and a.q.dtype == torch.bfloat16:  # the interpreter takes the bits of bf16 factors for integers
        return attention_ref(a)
    (tokens, heads, _), sequences = a.q.shape, a.q_offsets.shape[0] - 1
    out, lse, words = _new_outputs(a.q, a.key)
    if out.numel():
        qkv, layout, kind = _describe(a, a.q, a.k, a.v)
        written = (out, lse, None if a.key is None else words, a.key)
        if a.bias is None and is_short(a.q, a.k_max):
            tile, _ = short_tiles(a.q, a.q_max, a.k_max, kind["GROUP"], sequences, a.p)
            kernels.short_attention_kernel[(sequences * heads // tile["HEADS"],)](
                *qkv, *written, *layout, **kind, **tile
            )
        else:
            tile, _, _ = long_tiles(a.q, a.q_max)
            tiles = tokens // tile["BLOCK_M"] + sequences
            aligned, width = align_bias(a.bias)
            kernels.long_attention_kernel[(heads * tiles,)](
                *qkv, aligned, *written, *layout, width, sequences,
                SEQUENCES=next_power_of_2(sequences), **kind, **tile,
            )  # fmt: skip
    return out, lse, words


def launch_attention_backward(
    a: Forward, dout: Tensor, out: Tensor, lse: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if INTERPRET and a.q.dtype == torch.bfloat16:
        return attention_backward_ref(a, dout, out, lse, words)
    (tokens, heads, _), kv_heads, sequences = a.q.shape, a.k.shape[1], a.q_offsets.shape[0] - 1
    dq, dk, dv, dbias = _new_gradients(a.q, a.k, a.v, a.bias)
    if not dq.numel() and not dk.numel():
        return dq, dk, dv, dbias.zero_()
    given, layout, kind = _describe(a, dout, a.q, a.k, a.v)
    kept = (lse, words if a.p > 0.0 else None)
    if a.bias is None and is_short(a.q, a.k_max):
        _, tile = short_tiles(a.q, a.q_max, a.k_max, kind["GROUP"], sequences, a.p)
        grid = (sequences * kv_heads,)
        kernels.short_attention_backward_kernel[grid](*given, *kept, dq, dk, dv, *layout, **kind, **tile)
        return dq, dk, dv, dbias
    _, dq_tile, dkv_tile = long_tiles(a.q, a.q_max)
    aligned, width = align_bias(a.bias)
    delta, layout, search = torch.empty_like(lse), (*layout, width, sequences), next_power_of_2(sequences)
    if dq.numel():
        kernels.long_attention_dq_kernel[(heads * (tokens // dq_tile["BLOCK_M"] + sequences),)](
            *given, aligned, out, *kept, delta, dq, *layout, SEQUENCES=search, **kind, **dq_tile
        )
    kernels.long_attention_dkv_kernel[(kv_heads * (a.k.shape[0] // dkv_tile["BLOCK_N"] + sequences),)](
        *given, aligned, *kept, delta, dk, dv, *layout, SEQUENCES=search, **kind, **dkv_tile
    )
    if a.bias is not None:
        block = 32 if a.q.dtype.itemsize > 2 else 64
        q_tiles, k_tiles, shares = cdiv(a.q_max, block), cdiv(a.k_max, block), min(sequences, 8)
        sums = a.q.new_empty(q_tiles + k_tiles - 1, heads, shares, block, block, dtype=torch.float32)
        kernels.attention_dbias_kernel[(sums.numel() // block**2,)](
            *given, aligned, *kept, delta, sums, *layout, q_tiles - 1,
            SHARES=shares, BLOCK=block, BLOCK_D=dq_tile["BLOCK_D"], **kind,
        )  # fmt: skip
        dbias = sum_diagonals(sums.sum(2).transpose(0, 1), q_tiles, a.bias.shape[1]).to(a.bias.dtype)
    return dq, dk, dv, dbias


def sum_diagonals(tiles: Tensor, before: int, size: int) -> Tensor:
    """Returns the sums over each distance, [H, size], of tiles [H, diagonals, B, B], the first of which belongs to the
    first tile of keys and the last of `before` tiles of queries. Inside a tile each row is moved by one place more than
    the row before, which makes diagonals columns."""
    block = tiles.shape[3]
    wide_rows = F.pad(tiles.flip(2), (0, block)).flatten(2)[..., : block * (2 * block - 1)]
    columns = wide_rows.unflatten(2, (block, 2 * block - 1)).sum(2)  # from distance 1 - B to B - 1 of each
    first, second = F.pad(columns, (0, 1)).unflatten(2, (2, block)).unbind(2)
    line = F.pad(first.flatten(1), (0, block)) + F.pad(second.flatten(1), (block, 0))
    left = size // 2 + 1 - before * block
    return F.pad(line, (left, size - left - line.shape[1]))


def align_bias(bias: Tensor | None) -> tuple[Tensor | None, int]:
    """Returns a bias [H, 2 R - 1] as the kernels read it, [H, 4, width], distance 0 in the middle, and the width. The
    numbers of a query for four keys in a row are neighbours, but may begin at any place; of four copies, each moved by
    one place, one has these numbers at a multiple of four, where one load reads them. The bias is in units of log2, as
    scores are, and 0 where tiles go beyond sequences."""
    if bias is None:
        return None, 0
    width = cdiv(bias.shape[1] + 2 * _MARGIN + 4, 16) * 16
    before = width // 2 - bias.shape[1] // 2
    line = F.pad(bias * math.log2(math.e), (before + 3, width - before - bias.shape[1]))
    return line.unfold(1, width, 1).contiguous(), width


def _new_outputs(q: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _ = q.shape
    lse = q.new_empty(heads, tokens, dtype=wide_dtype(q.dtype))
    return q.new_empty(q.shape), lse, q.new_empty(2, heads, 0 if key is None else tokens, dtype=torch.int32)


def _new_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _count(q: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_max: int, k_max: int) -> int:
    """Two products of all queries and keys of a sequence, as torch counts them: a causal mask halves nothing. Where
    the lengths are not known, each is the longest."""
    if isinstance(q_offsets, FakeTensor) or q_offsets.is_meta:
        pairs = (len(q_offsets) - 1) * q_max * k_max
    else:
        pairs = int((q_offsets.diff().long() * k_offsets.diff()).sum())
    return 4 * pairs * q.shape[1] * q.shape[2]


def _count_backward(q: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_max: int, k_max: int) -> int:
    """Five products, of which one computes the scores again."""
    return 5 * _count(q, q_offsets, k_offsets, q_max, k_max) // 2


_attention = Op("attention", attention_ref, launch_attention, fake=_new_outputs, flops=_count)
_attention_backward = Op(
    "attention_backward",
    attention_backward_ref,
    launch_attention_backward,
    fake=_new_gradients,
    flops=_count_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.options = inputs[6:11]
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros in place of the gradients of lse and words


@_attention.gradient(_save)
def _backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 12
    *inputs, out, lse, words = ctx.saved_tensors
    dq, dk, dv, dbias = _attention_backward(*inputs, *ctx.options, None, dout, out, lse, words)
    return (dq, dk, dv, None if inputs[3] is None else dbias, *[None] * 8)


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_max: int, k_max: int,
    causal: bool = False, scale: float | None = None, bias: Tensor | None = None,
    p: float = 0.0, key: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns [T, H, D], for q [T, H, D] and k and v [T', K, D]: the queries of each sequence attend to its keys.
    Sequence i has the tokens from offsets[i] to offsets[i + 1], at most q_max queries and k_max keys; every token
    belongs to a sequence. Scores are multiplied by `scale` (1 / sqrt(D)); then bias [H, 2 R - 1], if it is given, is
    added by the distance of key and query, which is below R. With p > 0 probabilities are dropped by `key`, see
    dropout.py."""
    (_, heads, size), kv_heads = q.shape, k.shape[1]
    if k.shape != v.shape or k.shape[2] != size or heads % kv_heads or size > MOST_CHANNELS:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} have to be [T, H, D], [T', K, D] and "
            f"[T', K, D], with H a multiple of K and D at most {MOST_CHANNELS}"
        )
    if q_offsets.shape != k_offsets.shape or q_offsets.ndim != 1:
        shapes = f"{list(q_offsets.shape)} and {list(k_offsets.shape)}"
        raise ValueError(f"q_offsets and k_offsets {shapes} have to be [N + 1] both")
    least = 2 * max(q_max, k_max) - 1
    if bias is not None and (bias.shape[0] != heads or bias.shape[1] < least or bias.shape[1] % 2 == 0):
        raise ValueError(
            f"bias {list(bias.shape)} has to be [{heads}, 2 R - 1] with at least {least} distances: one for each, from "
            "a key R - 1 before the query to one R - 1 behind it"
        )
    if p > 0.0 and (key is None or key.shape != (2,)):
        raise ValueError(f"dropout needs a key [2], not {None if key is None else list(key.shape)}")
    scale, bias = size**-0.5 if scale is None else scale, None if bias is None else wide(bias).contiguous()
    key = key if p > 0.0 else None
    return _attention(q, k, v, bias, q_offsets, k_offsets, q_max, k_max, causal, scale, p, key)[0]
