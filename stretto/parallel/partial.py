"""Attention to some of the keys that a query sees, so that the rest can come later, or from elsewhere.

    forward     out, lse = softmax(scale q k) v and the logarithm of its denominator, over the keys at hand
    merge       out = sum over parts of exp(lse_part - lse) out_part,   lse = log sum over parts of exp(lse_part)
    backward    with out and lse of all parts together, the gradients of a part are what they would be in one piece:
                P = exp(scale q k - lse),  dS = P (dP - delta),  delta = sum over channels of out dout

On a GPU in 16 bits these are kernels that torch has. FlashAttention for packed sequences takes all groups at once; its
causal mask is aligned at the last query and the last key of a group, as `Reach` means it. cuDNN's, group by group, is
1.5 times as fast on a Hopper if groups are large, but prepares itself for each new shape, so that shapes have to come
again. Everything else takes the formulas, in tiles of queries. Dropout does, too: a probability survives by the query's
place in the batch and the key's place in its sequence (ops/attention.py), so that the mask is the same however the
sequence is cut.

Shapes: q [T, H, D], a buffer of keys and values [R, 2, K, D], lse [H, T].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.ops.attention import keep_ref
from stretto.ops.language import wide, wide_dtype
from stretto.parallel.reach import Reach

TILE = 1024  # queries at a time, where the formulas are used
MOST_CHANNELS = 256  # that FlashAttention takes
HOPPER = (9, 0)  # from here on torch, too, prefers cuDNN
LARGE = 2**22  # pairs of a query and a key in a group: with fewer, FlashAttention is as fast as cuDNN, or faster


@dataclass(frozen=True)
class Scores:
    """What happens to scores and probabilities besides the mask."""

    scale: float
    dropout: float = 0.0
    words: Tensor | None = None  # int32 [2, H, T]: what the queries drop by

    def of_heads(self, heads: slice) -> Scores:
        return self if self.words is None else replace(self, words=self.words[:, heads])


def attend_part(q: Tensor, kv: Tensor, reach: Reach, scores: Scores) -> tuple[Tensor, Tensor]:
    """out and lse; 0 and -inf for a query that sees nothing."""
    if reach.num_keys == 0:
        return torch.zeros_like(q), q.new_full(q.shape[1::-1], -torch.inf, dtype=wide_dtype(q.dtype))
    k, v = kv[reach.rows].unbind(1)
    if not _fits_flash(q, scores):
        return _attend_by_formula(q, k, v, reach, scores)
    if _fits_cudnn(q, k, v, reach):
        return _attend_by_cudnn(q, k, v, reach, scores)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, reach.q_ends, reach.k_ends, reach.q_max, reach.k_max, 0.0, _is_causal(reach), False,
        scale=scores.scale, **_window(reach),
    )  # fmt: skip
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # what it calls the sum of nothing


def backward_part(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, reach: Reach, scores: Scores
) -> tuple[Tensor, Tensor]:
    """dq, and the gradient of the buffer: in fp32 at least, so that processes can add theirs up."""
    dkv = kv.new_zeros(kv.shape, dtype=wide_dtype(kv.dtype))
    if reach.num_keys == 0:
        return torch.zeros_like(q), dkv
    k, v = kv[reach.rows].unbind(1)
    if not _fits_flash(q, scores):
        dq, dk, dv = _backward_by_formula(dout, q, k, v, out, lse, reach, scores)
    elif _fits_cudnn(q, k, v, reach):
        dq, dk, dv = _backward_by_cudnn(dout, q, k, v, out, lse, reach, scores)
    else:
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a generator that is not used
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, reach.q_ends, reach.k_ends, reach.q_max, reach.k_max, 0.0, _is_causal(reach),
            none, none[:0], scale=scores.scale, **_window(reach),
        )  # fmt: skip
    for total, found in zip(dkv.unbind(1), (dk, dv), strict=True):
        if isinstance(reach.rows, slice):
            total[reach.rows] = found
        else:
            total.index_add_(0, reach.rows, found.to(total.dtype))  # a key may be in the lists of several groups
    return dq, dkv


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of the same queries."""
    total = torch.logaddexp(lse, other_lse)
    at = total.masked_fill(total == -torch.inf, 0.0)  # a query that has seen nothing yet: both weights are 0
    mine, its = (torch.exp(part - at).t()[..., None] for part in (lse, other_lse))
    return (wide(out) * mine + wide(other) * its).to(out.dtype), total  # the first factor says how it lies in memory


def _fits_flash(q: Tensor, scores: Scores) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= MOST_CHANNELS and scores.dropout == 0.0


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> bool:
    large = all(queries * keys >= LARGE for queries, keys in reach.lengths if keys)
    if not (reach.dense and large) or reach.window or torch.cuda.get_device_capability(q.device) < HOPPER:
        return False
    inputs = (_by_head(q), _by_head(k), _by_head(v))
    shared = q.shape[1] != k.shape[1]  # a key head by several query heads
    params = torch.backends.cuda.SDPAParams(*inputs, None, 0.0, reach.causal, shared)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _by_head(x: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D]."""
    return x.transpose(0, 1)[None]


def _by_token(x: Tensor) -> Tensor:
    """[1, H, T, D] as [T, H, D]."""
    return x[0].transpose(0, 1)


def _attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor, reach: Reach, scores: Scores) -> tuple[Tensor, Tensor]:
    """Its causal mask is aligned at the first query and key: a causal group has as many of both."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[1::-1], -torch.inf, dtype=torch.float32)
    for rows, cols in reach.groups():
        inputs = (_by_head(t) for t in (q[rows], k[cols], v[cols]))
        sizes = (rows.stop - rows.start, cols.stop - cols.start)
        found, sums, *_ = torch.ops.aten._cudnn_attention_forward(
            *inputs, None, None, None, *sizes, True, 0.0, reach.causal, False, scale=scores.scale
        )
        out[rows], lse[:, rows] = _by_token(found), sums[0, ..., 0]
    return out, lse


def _backward_by_cudnn(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: Reach, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a generator that is not used
    for rows, cols in reach.groups():
        inputs = (_by_head(t) for t in (dout[rows], q[rows], k[cols], v[cols], out[rows]))
        sizes = (rows.stop - rows.start, cols.stop - cols.start)
        found = torch.ops.aten._cudnn_attention_backward(
            *inputs, lse[None, :, rows, None].contiguous(), none, none, None, None, None, *sizes, 0.0, reach.causal,
            scale=scores.scale,
        )  # fmt: skip
        dq[rows], dk[cols], dv[cols] = map(_by_token, found)
    return dq, dk, dv


def _is_causal(reach: Reach) -> bool:
    return reach.causal and not reach.window  # a window that ends at the query says it by itself


def _window(reach: Reach) -> dict[str, int]:
    return {
        "window_size_left": reach.window - 1 if reach.window else -1,
        "window_size_right": 0 if reach.causal else -1,
    }


def _tiles(reach: Reach) -> Iterator[tuple[slice, slice, int]]:
    """Queries of one group, its keys, and how many of these the first of the queries sees if the mask is causal."""
    for rows, cols in reach.groups():
        for start in range(rows.start, rows.stop, TILE):
            stop = min(start + TILE, rows.stop)
            yield slice(start, stop), cols, cols.stop - cols.start - (rows.stop - start) + 1


def _scores(q: Tensor, k: Tensor, reach: Reach, seen: int, scale: float) -> Tensor:
    """[H, queries, keys]; -inf where a query does not see a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", wide(q), wide(k)) * scale
    if not reach.causal:
        return scores
    last = torch.arange(seen - 1, seen - 1 + len(q), device=q.device)[:, None]  # that each query sees
    ahead = torch.arange(len(k), device=q.device) - last
    hidden = (ahead > 0) | (ahead <= -reach.window) if reach.window else ahead > 0
    return scores.masked_fill(hidden, -torch.inf)


def _survival(options: Scores, rows: slice, places: Tensor, dtype: torch.dtype) -> Tensor | float:
    """What drop() multiplies by, [H, queries, keys]."""
    if options.words is None:
        return 1.0
    return keep_ref(options.words[..., rows], places, options.dropout).to(dtype) / (1 - options.dropout)


def _attend_by_formula(q: Tensor, k: Tensor, v: Tensor, reach: Reach, options: Scores) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_full(q.shape[1::-1], -torch.inf, dtype=wide_dtype(q.dtype))
    for rows, cols, seen in _tiles(reach):
        scores = _scores(q[rows], k[cols], reach, seen, options.scale)
        lse[:, rows] = scores.logsumexp(-1)
        probabilities = scores.softmax(-1) * _survival(options, rows, reach.places[cols], scores.dtype)
        values = wide(v[cols]).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[rows] = torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)
    return out, lse


def _backward_by_formula(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: Reach, options: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros_like(t, dtype=wide_dtype(t.dtype)) for t in (q, k, v))
    delta = (wide(out) * wide(dout)).sum(-1).t()[..., None]  # [H, T, 1]
    group = (k.shape[1], q.shape[1] // k.shape[1])  # key heads, and the query heads of each
    for rows, cols, seen in _tiles(reach):
        scores = _scores(q[rows], k[cols], reach, seen, options.scale)
        probabilities = torch.exp(scores - lse[:, rows, None])
        survival = _survival(options, rows, reach.places[cols], scores.dtype)
        keys, values = (wide(t[cols]).repeat_interleave(group[1], dim=1) for t in (k, v))
        grad = wide(dout[rows])
        dprobabilities = torch.einsum("qhd,khd->hqk", grad, values) * survival
        dscores = probabilities * (dprobabilities - delta[:, rows]) * options.scale
        dq[rows] = torch.einsum("hqk,khd->qhd", dscores, keys)
        dk[cols] += torch.einsum("hqk,qhd->khd", dscores, wide(q[rows])).view(-1, *group, k.shape[2]).sum(2)
        dv[cols] += torch.einsum("hqk,qhd->khd", probabilities * survival, grad).view(-1, *group, k.shape[2]).sum(2)
    return dq, dk, dv
