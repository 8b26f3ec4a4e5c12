"""Softmax attention inside each sequence of a layout, by the fastest kernel that torch has for it.

Shapes: queries [T, H, D], keys and values [T', K, D] with H a multiple of K; see batch.py for layouts. Masks: causal,
the ends of sequences, and an additive bias [H, S, S'] such as T5's relative positions. Which kernel wins was measured
(docs/results.md, "Attention kernels"):

    dense                 cuDNN's; the memory-efficient one where sequences are short, since it works on smaller tiles
    packed, 16 bits       the variable-length kernel, which knows neither dropout nor a bias
    packed, otherwise     through a padded rectangle
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.batch import Layout

# The memory-efficient kernel wins at 32 tokens (0.40 against cuDNN's 0.63 ms) and loses at 128 (0.90 against 0.55), in
# bf16 with 16 heads of 64 and dropout; between them nothing was measured.
SHORT = 64


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: Layout,
    k_layout: Layout,
    causal: bool,
    dropout: float,
    bias: Tensor | None = None,
) -> Tensor:
    """q [T, H, D], k and v [T', K, D] to [T, H, D]; softmax(q k / sqrt(D) + bias) v inside each sequence."""
    if q_layout.dense and k_layout.dense:
        return _attend_dense(q, k, v, q_layout, k_layout, causal, dropout, bias)
    packed = q_layout.lengths is None and k_layout.lengths is None
    if packed and dropout == 0.0 and bias is None and _fits_kernels(q):
        return _attend_packed(q, k, v, q_layout, k_layout, causal)
    rectangle = (_pad(q, q_layout), _pad(k, k_layout), _pad(v, k_layout), _padded(q_layout), _padded(k_layout))
    return _unpad(_attend_dense(*rectangle, causal, dropout, bias), q_layout, q.shape[0])


def _fits_kernels(q: Tensor) -> bool:
    """Whether the kernels that are called by name, which check nothing, can take it."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if k.shape[1] != q.shape[1]:  # torch 2.11 groups KV heads by itself, later ones by an option: neither is needed
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    ends = (q_layout.offsets, k_layout.offsets, q_layout.max_len, k_layout.max_len)
    out = varlen_attn(q, k, v, *ends, window_size=(-1, 0) if causal else (-1, -1))
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
) -> Tensor:
    q, k, v = (as_rows(t, layout).transpose(1, 2) for t, layout in ((q, q_layout), (k, k_layout), (v, k_layout)))
    mask = _mask(q, q_layout, k_layout, causal, bias)
    grouped = q.shape[1] != k.shape[1]
    if k_layout.max_len <= SHORT and mask is None and not grouped and _fits_kernels(q):
        # By its own name: the context manager that would choose it is not traced by torch.compile as a whole.
        keep = torch.is_grad_enabled()
        out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, keep, dropout, causal)[0]
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal and mask is None, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _mask(q: Tensor, q_layout: Layout, k_layout: Layout, causal: bool, bias: Tensor | None) -> Tensor | None:
    """Which keys a query sees, or what is added to its scores; None where causality says it all."""
    mask = None
    if k_layout.lengths is not None and not causal:  # causal rows cannot see the padding on their right anyway
        # An empty row keeps its first key: a softmax over nothing is NaN, and NaN spreads through the backward pass.
        keys = torch.arange(k_layout.max_len, device=q.device) < k_layout.lengths.clamp(min=1)[:, None]
        mask = keys[:, None, None, :]
    if bias is None:
        return mask
    if causal:
        mask = torch.ones(q_layout.max_len, k_layout.max_len, dtype=torch.bool, device=q.device).tril()
    return bias.to(q.dtype) if mask is None else torch.where(mask, bias.to(q.dtype), -torch.inf)


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
