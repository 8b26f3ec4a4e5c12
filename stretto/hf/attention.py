"""Attention inside the sequences of a packed batch, under the name "stretto" in transformers' AttentionInterface.

Where a layer was handed a Packing (packing.py), queries, keys and values are [1, heads, T, D], and attention stays
inside its sequences. Without a mask it is dense. With a mask that is a tensor (a cache, a window, a hole) it is
transformers' own. The function for masks builds none where layers are packed, or where it would hide nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stretto.attention import attend
from stretto.batch import dense_layout
from stretto.hf.call import current_call
from stretto.hf.packing import Packing
from stretto.hf.roles import NAME


def register() -> None:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, build_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Packing | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [N, H, S, D], key and value [N, K, S', D] to [N, S, H, D]."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    bias = others.get("position_bias")
    rows, length, others_length = query.shape[0], query.shape[2], key.shape[2]
    if isinstance(attention_mask, Packing):
        queries, keys, causal = attention_mask.queries, attention_mask.keys, attention_mask.causal
        bias = None if bias is None or bias.numel() == 0 else bias
    elif (
        attention_mask is None
        and bias is None
        and (length == others_length or not causal)
        and value.shape[-1] == query.shape[-1]
        and others.get("softcap") is None
    ):
        queries = dense_layout(rows, length, device=query.device)
        keys = queries if length == others_length else dense_layout(rows, others_length, device=query.device)
    else:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **others
        )
        return out, None
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = attend(q, k, _let_go(v, k), queries, keys, causal, dropout, bias, scale=scaling)
    return out.view(rows, length, *out.shape[1:]), None


def _let_go(value: Tensor, key: Tensor) -> Tensor:
    """Values that are a part of one product with queries and keys (projections.py) keep all of it for the backward
    pass; where those were rotated, and are elsewhere, they are better copied."""
    if torch.compiler.is_compiling() or not value.requires_grad:
        return value
    return value if value.untyped_storage().data_ptr() == key.untyped_storage().data_ptr() else value.contiguous()


def build_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if not torch.compiler.is_compiling():
        call, window = current_call(), kwargs.get("local_size")
        if call is not None and call.stack is not None and isinstance(window, int):
            call.stack.windows.add(window)
        if call is not None and call.own is not None:
            return None
        # Without padding everybody sees everybody. While a graph is recorded, transformers 5.17 would not skip it.
        anyone_may_see = kwargs.get("allow_is_bidirectional_skip") and kwargs.get("local_size") is None
        if anyone_may_see and kwargs.get("attention_mask") is None:
            return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


class DistanceBias(nn.Module):
    """Mixed into attention with a bias by distance, such as T5's. In a packed batch the bias is [H, 2 R - 1], a number
    for each distance up to the longest sequence, instead of one for each pair of tokens; for attention without a bias
    of its own it is empty."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packing = next((value for value in (*args, *kwargs.values()) if isinstance(value, Packing)), None)
        if packing is not None and kwargs.get("position_bias") is None:
            kwargs["position_bias"] = self.bias_by_distance(hidden_states, packing.keys.max_len)
        return super().forward(hidden_states, *args, **kwargs)

    def bias_by_distance(self, like: Tensor, reach: int) -> Tensor:
        if not self.has_relative_attention_bias:
            return like.new_zeros(self.n_heads, 0)  # type: ignore[call-overload]
        compute: Any = self.compute_bias
        ahead, behind = (compute(*shape, device=like.device) for shape in ((1, reach), (reach, 1)))
        return torch.cat([behind[0, :, 1:, 0].flip(1), ahead[0, :, 0]], 1)
