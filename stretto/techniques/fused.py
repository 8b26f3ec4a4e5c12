"""LightSeq2's fused training: every chain between two matrix products is one kernel.

Each module here takes the place of the plain one that it extends, with the same parameters and names, so a checkpoint
moves between on and off: `Fused` changes the class of existing modules, as FSDP2 does. The mathematics is exact; in 16
bits the residual stream is rounded to 16 bits too. The optimizer becomes one launch over all parameters (optim.py), and
keeps weights as `weights` says.

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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as compute_again

from stretto.attention import attend
from stretto.batch import Depth, Layout, Sequences, Share, Subset
from stretto.config import Config, FusedConfig, OptimConfig
from stretto.memory import Keep
from stretto.model import (
    EVERYTHING,
    AddingNorm,
    Block,
    Cache,
    CrossAttention,
    Embedding,
    LayerCache,
    LMHead,
    PatchEmbedding,
    Rotary,
    Stack,
    narrow,
    rotary_angles,
    sinusoids,
    take,
)
from stretto.ops.activation import activate
from stretto.ops.affine import add_affine
from stretto.ops.cross_entropy import linear_cross_entropy
from stretto.ops.dropout import draw_keys, dropout
from stretto.ops.embedding import embed
from stretto.ops.heads import project_heads
from stretto.ops.language import product_dtype, triton
from stretto.ops.linear import linear
from stretto.ops.mlp import mlp
from stretto.ops.norm import add_norm, norm
from stretto.ops.products import find_product
from stretto.ops.remake import forgetting
from stretto.optim import FlatAdamW
from stretto.techniques.foreign import Foreign
from stretto.techniques.technique import Context, Sites, Technique

Heads = tuple[Tensor, Tensor]  # keys and values, each [T, K, D]
NormParts = tuple[Tensor | None, Tensor | None, float, bool]  # weight, bias, epsilon, whether it is an RMSNorm
Keys = tuple[Tensor | None, ...]  # of dropout, each [2]; None where nothing is dropped


class Branch(NamedTuple):
    """What a norm has still to add to the stream."""

    out: Tensor | None = None  # without the bias of its last product
    bias: Tensor | None = None
    scale: Tensor | None = None  # of both
    places: Tensor | None = None  # which of its rows is a token's; None: it has one for each


NOTHING = Branch()
Run = Callable[[Tensor, Tensor], tuple[Tensor, Branch]]  # h and the stream to the stream and what is to be added to it


class Fused(Technique):
    name, exact, drops_by_place, by_block, default_outside = "fused", True, True, True, True
    keeps_as_told = asks_products = True
    cfg: FusedConfig

    def __init__(self, cfg: FusedConfig, context: Context) -> None:
        weights = cfg.find_weights(context.device.type == "cuda", context.precision)
        super().__init__(replace(cfg, weights=weights), context)

    @classmethod
    def find_options(cls, config: Config, device: torch.device) -> FusedConfig | None:
        return config.techniques.find_kernels(device.type == "cuda" and triton is not None)

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        return None if self.cfg.weights == "fp32" else torch.bfloat16

    def check(self, others: Sequence[Technique]) -> list[str]:
        reasons, weights, precision = [], self.cfg.weights, self.context.precision
        if self.context.device.type == "cuda" and triton is None:
            reasons.append("its kernels need Triton: pip install triton")
        if weights != "fp32" and precision != "bf16":
            reasons.append(
                f"weights = {weights!r} keeps bf16 weights: set train.precision to 'bf16', not {precision!r}"
            )
        return reasons

    def apply(self, model: nn.Module, sites: Sites) -> None:
        for role in ("stack", "block", "embedding", "head"):
            for module in map(model.get_submodule, sites[role]):
                module.__class__ = FUSED.get(type(module), type(module))
        if self.parameter_dtype is not None:
            model.to(self.parameter_dtype)

    def attach(self, model: Foreign) -> None:
        model.use_kernels()

    def build_optimizer(self, groups: list[dict[str, Any]], cfg: OptimConfig) -> FlatAdamW:
        return FlatAdamW(
            groups,
            cfg.lr,
            (cfg.beta1, cfg.beta2),
            cfg.eps,
            weights=self.cfg.weights,
            moments=self.cfg.moments,
            seed=self.context.seed,
        )


class FusedStack(Stack):
    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        layout: Layout,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        cache: Cache | None = None,
        depth: Depth | None = None,
        stretch: range | None = None,
    ) -> Tensor:
        if cache is not None:
            return super().forward(x, positions, layout, memory, memory_layout, cache)
        rotary = None if self.rope is None else rotary_angles(positions, *self.rope)
        keys, shares = self.draw_keys(x, stretch), self.shares(depth, stretch)
        memories = {} if memory is None else self.project_memory(memory, shares)
        last = self.find_blocks()[-1]
        pending = NOTHING if last.pre_norm else Branch(x)
        for i, share in shares.items():
            parts = {"share": share, "pending": pending, "keys": keys[i], "memory_kv": memories.get(i)}
            x, pending = self.blocks[i](x, layout, rotary, memory, memory_layout, **parts)
        if not last.pre_norm:
            return x
        if stretch is not None and self.goes_on(stretch):  # the norm that would add the branch is in the next stretch
            return x if pending.out is None else last.settle(pending, x, keys[stretch.stop][0], layout)
        return last.add(pending, x, self.norm, keys[-1][0], layout)[0]

    def find_blocks(self) -> list[FusedBlock]:
        """Those that are here: others may be in other processes."""
        return [block for block in self.blocks if isinstance(block, FusedBlock)]

    def draw_keys(self, x: Tensor, stretch: range | None) -> list[Keys]:
        """The keys of dropout, for each block and for the norm after the last: all of them, whatever the stretch, so
        that a block drops the same in every cut. Attention that is computed once in the place where torch's generator
        stands for it needs none: its kernels draw for themselves."""
        first, blocks = self.find_blocks()[0], self.find_blocks()
        by_key = any(block.drops_by_key for block in blocks)
        drops = first.dropout or first.mlp.dropout or (by_key and first.attention.dropout)
        if not self.training or not drops:
            return [(None,) * FusedBlock.KEYS] * (len(self.blocks) + 1)
        if stretch is not None and stretch.start > 0 and first.dropout:
            draw_keys(x, 1)  # the embedding, which is elsewhere, has drawn first
        keys = draw_keys(x, (len(self.blocks) + 1) * FusedBlock.KEYS).unbind()
        return [keys[i : i + FusedBlock.KEYS] for i in range(0, len(keys), FusedBlock.KEYS)]

    def project_memory(self, memory: Tensor, shares: dict[int, Share]) -> dict[int, Heads]:
        """Keys and values of all layers by one product: all project the same encoder output, and its gradient is then
        summed over the layers inside the backward product. Where the weights are sharded each block has to gather its
        own, and projects for itself; so it does where it sees a part only."""
        layers: list[CrossAttention] = [self.blocks[i].cross for i in shares]  # type: ignore[misc]
        sharded = any(isinstance(layer.kv.weight, DTensor) for layer in layers)
        if sharded or not layers or any(share.part.memory is not None for share in shares.values()):
            return {}
        weights, biases = ([getattr(layer.kv, name) for layer in layers] for name in ("weight", "bias"))
        parts = [layer.heads for layer in layers for _ in "kv"]
        heads = project_heads(memory, weights, None if biases[0] is None else biases, parts)
        return dict(zip(shares, zip(heads[::2], heads[1::2], strict=True), strict=True))


class FusedBlock(Block):
    KEYS = 6  # places that drop: in front of up to three norms, inside the MLP, and in up to two attentions
    keep = Keep()  # for the backward pass

    @property
    def drops_by_key(self) -> bool:
        """Attention drops by a key, not by the state of torch's generator: when it is computed again, that state is
        another one, and so it is in a process that has not run the blocks in front."""
        return self.keep.block == "input" or self.by_place

    def forward(  # type: ignore[override]  # the stream, and what the next norm needs besides it
        self,
        x: Tensor,
        layout: Layout,
        rotary: Rotary | None,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        cache: LayerCache | None = None,
        cross_cache: LayerCache | None = None,
        share: Share = EVERYTHING,
        *,
        pending: Branch = NOTHING,
        keys: Keys = (None,) * KEYS,
        memory_kv: Heads | None = None,
    ) -> Tensor | tuple[Tensor, Branch]:
        """Pre-norm: `pending` is the branch that is still to be added to the stream x. Post-norm: it is x again, with a
        gradient of its own, so that the norm that made both adds their gradients up."""
        if cache is not None:
            return super().forward(x, layout, rotary, memory, memory_layout, cache, cross_cache)
        *norm_keys, mlp_key, self_key, cross_key = keys
        layout, rotary, memory, memory_layout = narrow(share.part, layout, rotary, memory, memory_layout)
        branches: list[tuple[nn.Module, Callable[[Tensor], Branch]]] = [
            (self.attention_norm, lambda h: self.attend_self(h, layout, rotary, self_key)),
            (self.mlp_norm, lambda h: self.expand(h, mlp_key, layout)),
        ]
        if self.cross is not None and self.cross_norm is not None:
            parts = (layout, memory, memory_layout, memory_kv, cross_key)
            branches.insert(1, (self.cross_norm, lambda h: self.attend_memory(h, *parts)))
        if not self.pre_norm:
            assert pending.out is not None

            def run(h: Tensor, x: Tensor) -> tuple[Tensor, Branch]:
                for (norm_module, branch), key in zip(branches, norm_keys, strict=False):
                    h, x = self.add(branch(h), x, norm_module, key, layout)
                return x, Branch(h)

            return self.run_inside(run, lambda x: x, pending.out, x)
        settles = share.scale is not None and (
            share.whole or not isinstance(self.attention_norm, nn.LayerNorm | nn.RMSNorm)
        )
        x, put = take(share, x) if settles else (x, None)
        wanted = None if settles else share.part.subset
        scaled = partial(scale_branch, share, settles)

        def run_rest(h: Tensor, x: Tensor) -> tuple[Tensor, Branch]:
            pending = scaled(branches[0][1](h))
            for (norm_module, branch), key in zip(branches[1:], norm_keys[1:], strict=False):
                h, x = self.add(pending, x, norm_module, key, layout, wanted)
                pending = scaled(branch(h))
            return x, pending

        first, whole = branches[0][0], self.keep.block == "input"
        h, x = self.add(pending, x, first, norm_keys[0], layout, wanted, keeps_input=whole)
        x, pending = self.run_inside(run_rest, lambda x: self.add(NOTHING, x, first, None, layout, wanted)[0], h, x)
        return (x, pending) if put is None else (put(self.settle(pending, x, norm_keys[0], layout)), NOTHING)

    def run_inside(self, run: Run, restore: Callable[[Tensor], Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, Branch]:
        """The block behind its first norm, on h and the stream x. If the block keeps nothing but its input, all of it
        is computed again in the backward pass: `restore` gives h once more, from x."""
        if self.keep.block == "inside" or not torch.is_grad_enabled():
            return run(h, x)
        given, needs, stream = [h, x], (h.requires_grad, x.requires_grad), x.detach()
        del h, x  # what is run again in the backward pass must not hold on to h

        def run_again() -> tuple[Tensor, Branch]:
            if given:
                x, h = given.pop(), given.pop()
            else:
                with torch.no_grad():
                    h = restore(stream)
                h, x = (t.detach().requires_grad_(need) for t, need in zip((h, stream), needs, strict=True))
            return run(h, x)

        return compute_again(run_again, use_reentrant=False, preserve_rng_state=False)

    def add(
        self,
        branch: Branch,
        x: Tensor,
        norm: nn.Module,
        key: Tensor | None,
        layout: Layout,
        wanted: Subset | None = None,
        keeps_input: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The normalised sum, of the tokens that are wanted; and the stream that goes on: the sum itself, or post-norm
        the normalised one. `keeps_input`: the norm keeps what it reads, whatever it was told."""
        p, post = self.dropout if self.training else 0.0, not self.pre_norm
        rows = find_rows(layout)
        if rows is not None and branch.out is not None and key is not None:
            branch = branch._replace(out=dropout(add_bias(branch), p, key, rows), bias=None)
            p, key = 0.0, None
        from_output = getattr(norm, "from_output", False) and not keeps_input
        if isinstance(norm, AddingNorm):
            return norm.add(branch.out, x, branch.bias, p, key, post, from_output)
        if isinstance(norm, nn.Identity):
            return add_affine(branch.out, x, branch.bias, None, None, p, key, post)
        some = (None, 0) if wanted is None else (wanted.places, len(wanted.tokens))
        parts = (*norm_parts(norm), p, key, post, branch.scale, branch.places, *some, from_output)
        return add_norm(branch.out, x, branch.bias, *parts)

    def settle(self, branch: Branch, x: Tensor, key: Tensor | None, layout: Layout) -> Tensor:
        """The stream with the last branch added to it, where the next norm cannot do that."""
        out, p = add_bias(branch), self.dropout if self.training else 0.0
        out = out if branch.scale is None else (branch.scale * out).to(out.dtype)
        return x + (out if key is None else dropout(out, p, key, find_rows(layout)))

    def attend_self(self, h: Tensor, layout: Layout, rotary: Rotary | None, key: Tensor | None) -> Branch:
        at = self.attention
        parts = [at.heads, at.kv_heads, at.kv_heads]
        angles = (None, None) if rotary is None else (rotary.cos, rotary.sin)
        made_of = (h, at.qkv.weight, at.qkv.bias, parts, *angles, find_product(at.qkv))
        q, k, v = project_heads(*made_of)
        p, by_key = at.dropout if self.training else 0.0, self.drops_by_key
        with self.keeping(q, made_of):
            out = attend(q, k, v, layout, layout, at.causal, p, key=key, window=at.window, by_key=by_key).flatten(1)
        return Branch(linear(out, at.out.weight, product=find_product(at.out)), at.out.bias)

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
        made_of = (h, at.q.weight, at.q.bias, [at.heads], None, None, find_product(at.q))
        (q,) = project_heads(*made_of)
        k, v = kv or project_heads(memory, at.kv.weight, at.kv.bias, [at.heads, at.heads])
        p, by_key = at.dropout if self.training else 0.0, self.drops_by_key
        with self.keeping(q, made_of):
            out = attend(q, k, v, layout, memory_layout, causal=False, dropout=p, key=key, by_key=by_key).flatten(1)
        return Branch(linear(out, at.out.weight, product=find_product(at.out)), at.out.bias)

    def keeping(self, q: Tensor, made_of: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Around attention, which keeps queries, and keys and values next to them, or has them multiplied again."""
        if self.keep.qkv == "product" or not torch.is_grad_enabled():
            return nullcontext()
        h, *others = made_of
        return forgetting(q, lambda: project_heads(h.detach(), *others)[0])

    def expand(self, h: Tensor, key: Tensor | None, layout: Layout) -> Branch:
        up, down, p = self.mlp.up, self.mlp.down, self.mlp.dropout if self.training else 0.0
        # Pre-norm, the norm that adds the bias is the next block's, by when FSDP2 has put this block's weights away.
        mine, left = (down.bias, None) if self.pre_norm and isinstance(self, FSDPModule) else (None, down.bias)
        rows, products = find_rows(layout), (find_product(up), find_product(down))
        if p > 0.0 and key is not None and rows is not None:
            inner = activate(linear(h, up.weight, None, products[0]), up.bias, self.mlp.activation, 0.0, None)
            return Branch(linear(dropout(inner, p, key, rows), down.weight, mine, products[1]), left)
        out = mlp(h, up.weight, up.bias, down.weight, mine, self.mlp.activation, p, key, self.keep.mlp, products)
        return Branch(out, left)


class FusedEmbedding(Embedding):
    def forward(self, inputs: Sequences, table: Tensor | None = None) -> Tensor:
        p, token = self.dropout if self.training else 0.0, self.table if table is None else table
        positions, place = self.place(inputs, token.shape[1])
        kind = None if self.token_type is None else self.token_type.weight
        plain = isinstance(self.norm, nn.Identity | AddingNorm)
        norm: NormParts = (None, None, 0.0, False) if plain else norm_parts(self.norm)
        key, dtype = draw_keys(inputs.ids, 1)[0] if p > 0 else None, product_dtype(token)
        tables, rows = (inputs.ids, token, positions, place, inputs.types, kind, self.scale), find_rows(inputs.layout)
        if isinstance(self.norm, AddingNorm) or (key is not None and rows is not None):
            x = embed(*tables, *norm, 0.0, None, dtype)
            x = self.norm(x) if isinstance(self.norm, AddingNorm) else x
            return x if key is None else dropout(x, p, key, rows)
        return embed(*tables, *norm, p, key, dtype)

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
    chunk = 0  # most rows of logits at a time; 0: as many as the kernel takes by itself

    def loss(self, x: Tensor, embedding: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        if self.transform is not None and self.norm is not None:
            x = linear(x, self.transform.weight)
            x = activate(x, self.transform.bias, self.activation, 0.0, None)
            plain = isinstance(self.norm, nn.Identity | AddingNorm)
            x = self.norm(x) if plain else norm(x, *norm_parts(self.norm))
        weight = embedding if self.weight is None else self.weight
        product = find_product(self)
        return linear_cross_entropy(x, weight, self.bias, labels, smoothing, chunk=self.chunk, product=product)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Stack: FusedStack,
    Block: FusedBlock,
    Embedding: FusedEmbedding,
    PatchEmbedding: FusedPatchEmbedding,
    LMHead: FusedLMHead,
}


def find_rows(layout: Layout) -> Tensor | None:
    """What tokens are dropped by, their numbers in the whole batch; None: all of it is here."""
    return None if layout.segment is None else layout.segment.tokens


def add_bias(branch: Branch) -> Tensor:
    assert branch.out is not None
    return branch.out if branch.bias is None else branch.out + branch.bias.to(branch.out.dtype)


def scale_branch(share: Share, settles: bool, branch: Branch) -> Branch:
    """The branch times the factor of the share: at once, or by the norm that adds it, unless `settles` says that none
    can; or not at all, where the factor is that of the block as a whole."""
    if not settles:
        places = None if share.part.subset is None else share.part.subset.places
        # Not by _replace: torch 2.11 cannot compile a function that returns what that made.
        return Branch(branch.out, branch.bias, share.scale, places)
    if share.whole or share.scale is None:
        return branch
    return Branch(*(None if part is None else share.scale * part for part in branch[:2]))


def norm_parts(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, bool]:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.eps is not None
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)
