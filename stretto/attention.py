"""Softmax attention inside each sequence of a layout, by the fastest kernel there is for it.

Shapes: queries [T, H, D], keys and values [T', K, D] with H a multiple of K; see batch.py for layouts. Masks: causal,
a window that slides with the query, the ends of sequences, and a bias [H, 2 R - 1] for each distance of key and query,
such as T5's. Tokens whose sequences go on in other processes know how to attend by themselves. Which kernel wins was
measured (docs/results.md, "Attention kernels of our own"):

    our own (ops/attention.py)    in 16 bits: where all keys of a sequence are one tile; packed, unless sequences are
                                  long; with a bias
    the variable-length one       packed and long, or with a window, without dropout, which it does not know
    cuDNN's, chosen by torch      dense and longer; on a CPU, in fp32 or with padding, through a rectangle
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.batch import Layout
from stretto.ops.attention import MOST_CHANNELS, attention, is_short, spread_bias
from stretto.ops.dropout import draw_keys
from stretto.ops.language import triton

LONG = 1024  # tokens; at 1,024 our kernels still win over the variable-length one, at 4,096 they do not


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: Layout,
    k_layout: Layout,
    causal: bool,
    dropout: float,
    bias: Tensor | None = None,
    key: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    by_key: bool = False,
) -> Tensor:
    """q [T, H, D], k and v [T', K, D] to [T, H, D]; softmax(scale q k + bias) v inside each sequence, with a scale of
    1 / sqrt(D) unless another is given. Causal queries see their last `window` keys, or all. Our own kernels drop by
    `key`, or by a new one; all others by torch's generator. `by_key`: what is dropped must be a function of the key, so
    our own kernels are used wherever something is dropped."""
    if q_layout.segment is not None:
        assert bias is None, "biases are for whole sequences"
        return q_layout.segment.attend(q, k, v, k_layout is q_layout, dropout, key, scale)
    dense, padded = q_layout.dense and k_layout.dense, not (q_layout.lengths is None and k_layout.lengths is None)
    window = window if causal and window < k_layout.max_len else 0
    ends = (q_layout.offsets, k_layout.offsets, q_layout.max_len, k_layout.max_len)
    if by_key and dropout:
        assert key is not None and not window and not padded, "what our own kernels know"
        return attention(q, k, v, *ends, causal, scale, bias, dropout, key)
    if not padded and _fits_kernels(q):
        ours = (
            bias is not None or is_short(q, k_layout.max_len) or (not dense and (dropout or k_layout.max_len <= LONG))
        )
        if ours and not window:
            key = draw_keys(q, 1)[0] if dropout and key is None else key
            return attention(q, k, v, *ends, causal, scale, bias, dropout, key)
        if (window or not dense) and not dropout:
            return _attend_packed(q, k, v, *ends, causal, scale, window)
    if dense:
        return _attend_dense(q, k, v, q_layout, k_layout, causal, dropout, bias, scale, window)
    rectangle = (_pad(q, q_layout), _pad(k, k_layout), _pad(v, k_layout), _padded(q_layout), _padded(k_layout))
    return _unpad(_attend_dense(*rectangle, causal, dropout, bias, scale, window), q_layout, q.shape[0])


def _fits_kernels(q: Tensor) -> bool:
    """Whether the kernels that are called by name, which check nothing, can take it."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= MOST_CHANNELS and triton is not None


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    q_max: int,
    k_max: int,
    causal: bool,
    scale: float | None,
    window: int,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if k.shape[1] != q.shape[1]:  # torch 2.11 groups KV heads by itself, later ones by an option: neither is needed
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    around = (window - 1, 0) if causal else (-1, -1)  # -1: no end
    out = varlen_attn(q, k, v, q_ends, k_ends, q_max, k_max, scale=scale, window_size=around)
    assert isinstance(out, Tensor)
    return out


def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: Layout,
    k_layout: Layout,
    causal: bool,
    dropout: float,
    bias: Tensor | None,
    scale: float | None,
    window: int,
) -> Tensor:
    q, k, v = (as_rows(t, layout).transpose(1, 2) for t, layout in ((q, q_layout), (k, k_layout), (v, k_layout)))
    mask = _mask(q, q_layout, k_layout, causal, bias, window)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, causal and mask is None, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


def _mask(
    q: Tensor, q_layout: Layout, k_layout: Layout, causal: bool, bias: Tensor | None, window: int
) -> Tensor | None:
    """Which keys a query sees, or what is added to its scores; None where causality says it all."""
    mask = None
    if k_layout.lengths is not None and not causal:  # causal rows cannot see the padding on their right anyway
        # An empty row keeps its first key: a softmax over nothing is NaN, and NaN spreads through the backward pass.
        keys = torch.arange(k_layout.max_len, device=q.device) < k_layout.lengths.clamp(min=1)[:, None]
        mask = keys[:, None, None, :]
    if causal and (window or bias is not None):
        mask = torch.ones(q_layout.max_len, k_layout.max_len, dtype=torch.bool, device=q.device).tril()
        mask = mask.triu(1 - window) if window else mask
    if bias is None:
        return mask
    bias = spread_bias(bias.to(q.dtype), q_layout.max_len, k_layout.max_len)
    return bias if mask is None else torch.where(mask, bias, -torch.inf)


def as_rows(x: Tensor, layout: Layout) -> Tensor:
    """[N * S, ...] of a dense layout seen as [N, S, ...]."""
    return x.view(layout.num_sequences, layout.max_len, *x.shape[1:])


def _padded(layout: Layout) -> Layout:
    return layout if layout.dense else Layout(layout.offsets, layout.max_len, dense=True, lengths=layout.offsets.diff())


def _pad(x: Tensor, layout: Layout) -> Tensor:
    """[T, ...] packed to [N * S, ...]; the filler repeats some real token, so it is finite."""
    at = layout.offsets[:-1, None] + torch.arange(layout.max_len, device=x.device)
    return x[at.clamp(max=x.shape[0] - 1).flatten()]


def _unpad(x: Tensor, layout: Layout, num_tokens: int) -> Tensor:
    """[N * S, ...] back to [T, ...]."""
    token = torch.arange(num_tokens, device=x.device)
    sequence = torch.searchsorted(layout.offsets[1:], token, right=True, out_int32=True)
    return x[sequence * layout.max_len + token - layout.offsets[sequence]]
