"""The plain modules over fused kernels: same parameters, same names, same results up to rounding.

Each class takes the place of the plain one it extends (techniques/fused.py changes the class of existing modules, as
FSDP2 does). The residual stream runs in the precision of the matrix products. Between two products there is one kernel:

    plain                                   here
    x = x + dropout(linear(h) + bias)       add_norm: the bias, the dropout, the sum and the norm, one pass;
    h = norm(x)                             the sum that ends a block is done by the norm that begins the next
    q, k, v = split(rotate(linear(h)))      project_heads: views of the product, rotated in place
    down(dropout(act(up(h) + bias)))        mlp
    cross_entropy(linear(x))                linear_cross_entropy: the logits never exist as a whole

Generation, which goes token by token through a cache, takes the plain path. Where tokens are parts of longer sequences,
dropout is a kernel of its own: the others count rows from 0, and a mask has to depend on a token's place in the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stretto.attention import attend
from stretto.batch import Layout, Sequences
from stretto.model import (
    Block,
    Cache,
    CrossAttention,
    Embedding,
    LayerCache,
    LMHead,
    PatchEmbedding,
    Rotary,
    Stack,
    rotary_angles,
    sinusoids,
)
from stretto.ops.activation import activate
from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.dropout import draw_keys, dropout
from stretto.ops.embedding import embed
from stretto.ops.heads import project_heads
from stretto.ops.language import product_dtype
from stretto.ops.linear import linear
from stretto.ops.mlp import mlp
from stretto.ops.norm import add_norm, norm

Heads = tuple[Tensor, Tensor]  # keys and values, each [T, K, D]
NormParts = tuple[Tensor | None, Tensor | None, float, bool]  # weight, bias, epsilon, whether it is an RMSNorm
Keys = tuple[Tensor | None, ...]  # of dropout, each [2]; None where nothing is dropped
Branch = tuple[Tensor | None, Tensor | None]  # without the bias of its last product, and that bias: a norm adds both


class FusedStack(Stack):
    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        layout: Layout,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        if cache is not None:
            return super().forward(x, positions, layout, memory, memory_layout, cache)
        rotary = None if self.rope is None else rotary_angles(positions, *self.rope)
        keys = self.draw_keys(x)
        memories = [None] * len(self.blocks) if memory is None else self.project_memory(memory)
        last = self.blocks[-1]
        assert isinstance(last, FusedBlock)
        pending: Branch = (None, None) if last.pre_norm else (x, None)
        for block, key, kv in zip(self.blocks, keys[:-1], memories, strict=True):
            x, pending = block(x, layout, rotary, memory, memory_layout, pending=pending, keys=key, memory_kv=kv)
        return last.add(pending, x, self.norm, keys[-1][0], layout)[0] if last.pre_norm else x

    def draw_keys(self, x: Tensor) -> list[Keys]:
        """For each block, and for the norm after the last."""
        first = self.blocks[0]
        assert isinstance(first, FusedBlock)
        if not self.training or first.dropout == first.mlp.dropout == 0.0:
            return [(None,) * FusedBlock.KEYS] * (len(self.blocks) + 1)
        keys = draw_keys(x, (len(self.blocks) + 1) * FusedBlock.KEYS).unbind()
        return [keys[i : i + FusedBlock.KEYS] for i in range(0, len(keys), FusedBlock.KEYS)]

    def project_memory(self, memory: Tensor) -> list[Heads | None]:
        """Keys and values of all layers by one product: all project the same encoder output, and its gradient is then
        summed over the layers inside the backward product. Where the weights are sharded each block has to gather its
        own, and projects for itself."""
        layers: list[CrossAttention] = [block.cross for block in self.blocks]  # type: ignore[misc]
        if any(isinstance(layer.kv.weight, DTensor) for layer in layers):
            return [None] * len(layers)
        weight = torch.cat([layer.kv.weight for layer in layers])
        bias = None if layers[0].kv.bias is None else torch.cat([layer.kv.bias for layer in layers])
        heads = project_heads(memory, weight, bias, [layer.heads for layer in layers for _ in "kv"])
        return list(zip(heads[::2], heads[1::2], strict=True))


class FusedBlock(Block):
    KEYS = 6  # places that drop: in front of up to three norms, inside the MLP, and in up to two attentions
    recompute: bool  # what the MLP keeps: see FusedConfig

    def forward(  # type: ignore[override]  # the stream, and what the next norm needs besides it
        self,
        x: Tensor,
        layout: Layout,
        rotary: Rotary | None,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        cache: LayerCache | None = None,
        cross_cache: LayerCache | None = None,
        *,
        pending: Branch = (None, None),
        keys: Keys = (None,) * KEYS,
        memory_kv: Heads | None = None,
    ) -> Tensor | tuple[Tensor, Branch]:
        """Pre-norm: `pending` is the branch that is still to be added to the stream x. Post-norm: it is x again, with a
        gradient of its own, so that the norm that made both adds their gradients up."""
        if cache is not None:
            return super().forward(x, layout, rotary, memory, memory_layout, cache, cross_cache)
        *norm_keys, mlp_key, self_key, cross_key = keys
        branches: list[tuple[nn.Module, Callable[[Tensor], Branch]]] = [
            (self.attention_norm, lambda h: self.attend_self(h, layout, rotary, self_key)),
            (self.mlp_norm, lambda h: self.expand(h, mlp_key, layout)),
        ]
        if self.cross is not None and self.cross_norm is not None:
            parts = (layout, memory, memory_layout, memory_kv, cross_key)
            branches.insert(1, (self.cross_norm, lambda h: self.attend_memory(h, *parts)))
        if self.pre_norm:
            for (norm, branch), key in zip(branches, norm_keys, strict=False):
                h, x = self.add(pending, x, norm, key, layout)
                pending = branch(h)
            return x, pending
        again, _ = pending
        assert again is not None
        for (norm, branch), key in zip(branches, norm_keys, strict=False):
            again, x = self.add(branch(again), x, norm, key, layout)
        return x, (again, None)

    def add(
        self, branch: Branch, x: Tensor, norm: nn.Module, key: Tensor | None, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """The normalised sum, and the stream that goes on: the sum itself, or post-norm the normalised one."""
        p, (out, bias) = self.dropout if self.training else 0.0, branch
        if p > 0.0 and out is not None and key is not None and layout.segment is not None:
            out, bias = dropout(out if bias is None else out + bias.to(out.dtype), p, key, layout.segment.tokens), None
            p, key = 0.0, None
        return add_norm(out, x, bias, *norm_parts(norm), p, key, post=not self.pre_norm)

    def attend_self(self, h: Tensor, layout: Layout, rotary: Rotary | None, key: Tensor | None) -> Branch:
        at = self.attention
        parts = [at.heads, at.kv_heads, at.kv_heads]
        angles = () if rotary is None else (rotary.cos, rotary.sin)
        q, k, v = project_heads(h, at.qkv.weight, at.qkv.bias, parts, *angles)
        p = at.dropout if self.training else 0.0
        out = attend(q, k, v, layout, layout, at.causal, p, key=key, window=at.window).flatten(1)
        return linear(out, at.out.weight), at.out.bias

    def attend_memory(
        self,
        h: Tensor,
        layout: Layout,
        memory: Tensor | None,
        memory_layout: Layout | None,
        kv: Heads | None,
        key: Tensor | None,
    ) -> Branch:
        at = self.cross
        assert at is not None and memory is not None and memory_layout is not None
        (q,) = project_heads(h, at.q.weight, at.q.bias, [at.heads])
        k, v = kv or project_heads(memory, at.kv.weight, at.kv.bias, [at.heads, at.heads])
        p = at.dropout if self.training else 0.0
        out = attend(q, k, v, layout, memory_layout, causal=False, dropout=p, key=key).flatten(1)
        return linear(out, at.out.weight), at.out.bias

    def expand(self, h: Tensor, key: Tensor | None, layout: Layout) -> Branch:
        up, down, p = self.mlp.up, self.mlp.down, self.mlp.dropout if self.training else 0.0
        # Pre-norm, the norm that adds the bias is the next block's, by when FSDP2 has put this block's weights away.
        mine, left = (down.bias, None) if self.pre_norm and isinstance(self, FSDPModule) else (None, down.bias)
        if p > 0.0 and key is not None and layout.segment is not None:
            inner = activate(linear(h, up.weight), up.bias, self.mlp.activation, 0.0, None)
            return linear(dropout(inner, p, key, layout.segment.tokens), down.weight, mine), left
        return mlp(h, up.weight, up.bias, down.weight, mine, self.mlp.activation, p, key, self.recompute), left


class FusedEmbedding(Embedding):
    def forward(self, inputs: Sequences, table: Tensor | None = None) -> Tensor:
        p, token = self.dropout if self.training else 0.0, self.table if table is None else table
        positions, place = self.place(inputs, token.shape[1])
        kind = None if self.token_type is None else self.token_type.weight
        norm: NormParts = (None, None, 0.0, False) if isinstance(self.norm, nn.Identity) else norm_parts(self.norm)
        key, dtype, segment = (
            draw_keys(inputs.ids, 1)[0] if p > 0 else None,
            product_dtype(token),
            inputs.layout.segment,
        )
        tables = (inputs.ids, token, positions, place, inputs.types, kind, self.scale, *norm)
        if key is not None and segment is not None:
            return dropout(embed(*tables, 0.0, None, dtype), p, key, segment.tokens)
        return embed(*tables, p, key, dtype)

    def place(self, inputs: Sequences, width: int) -> tuple[Tensor | None, Tensor | None]:
        """Positions, and the table that they look up."""
        if self.position is not None:
            return inputs.positions, self.position.weight
        if not self.sinusoidal:
            return None, None
        at = inputs.positions
        if self.training:  # whole sequences, counted from 0
            return at, sinusoids(torch.arange(inputs.layout.max_len, device=at.device), width)
        return torch.arange(len(at), device=at.device), sinusoids(at, width)


class FusedPatchEmbedding(PatchEmbedding):
    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels).to(product_dtype(self.position))


class FusedLMHead(LMHead):
    def loss(self, x: Tensor, embedding: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        if self.transform is not None and self.norm is not None:
            x = linear(x, self.transform.weight)
            x = norm(activate(x, self.transform.bias, self.activation, 0.0, None), *norm_parts(self.norm))
        return linear_cross_entropy(x, embedding if self.weight is None else self.weight, self.bias, labels, smoothing)


def norm_parts(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, bool]:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.eps is not None
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)
