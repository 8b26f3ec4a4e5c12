"""The plain Transformer in its four kinds: the definition of correct that every technique is compared with.

Shape legend: T tokens of all sequences together, N sequences, S longest sequence, C width, H query heads, K key/value
heads, D head size, V vocabulary. Activations are flat, [T, C]: packed sequences need no padding, and a dense batch is
the same memory seen as [N, S, C] (see batch.py). Only attention has to know where a sequence ends.

    Decoder            GPT-2 and Llama: causal language model
    Encoder            BERT: masked language model on the masked positions, or a classifier
    EncoderDecoder     the original Transformer: translation
    VisionTransformer  ViT: image classification

`model(batch)` gives the summed loss of a batch, `model.logits(batch)` what it is computed from, and
`model.features(batch)` what the head makes logits of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.attention import as_rows, attend
from stretto.batch import IGNORE, Batch, Depth, Layout, Mix, Part, Sequences, Share, dense_layout
from stretto.config import ModelConfig, RopeScaling

X = TypeVar("X")
EVERYTHING = Share()


@dataclass(frozen=True)
class Rotary:
    """The angles of each token, [T, D / 2]. Not a tuple: FSDP2 would round its tensors to the weights' precision."""

    cos: Tensor
    sin: Tensor


@dataclass
class LayerCache:
    """Keys and values of one layer while generating, [N, S, K, D]."""

    key: Tensor | None = None
    value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], 1), torch.cat([self.value, value], 1)
        self.key, self.value = key, value
        return key, value

    def select(self, rows: Tensor) -> None:
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[rows], self.value[rows]


@dataclass
class Cache:
    """What incremental decoding remembers: the past of each layer, and the encoder's output where there is one."""

    layers: list[LayerCache]
    cross: list[LayerCache] = field(default_factory=list)  # computed once, kept flat: [T, K, D]
    memory: Tensor | None = None  # [T, C]
    memory_layout: Layout | None = None
    length: int = 0

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, in this order: how a beam search follows its survivors. The rows of one source must
        stay together, so that the memory need not move."""
        for layer in self.layers:
            layer.select(rows)


class AddingNorm(nn.Module):
    """What stands where a norm stood, and can take over the sum in front of it."""

    from_output = False  # its backward pass reads what it gave, instead of what it was given

    def add(
        self,
        branch: Tensor | None,
        x: Tensor,
        branch_bias: Tensor | None,
        p: float,
        key: Tensor | None,
        post: bool = False,
        from_output: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The result, and the stream that goes on: x + dropout(branch + branch_bias), or with `post` the result."""
        raise TypeError("AddingNorm is abstract")


class SelfAttention(nn.Module):
    def __init__(self, cfg: ModelConfig, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = cfg.heads, cfg.kv_heads or cfg.heads, cfg.width // cfg.heads
        self.causal, self.window, self.dropout = causal, cfg.window, cfg.attention_dropout
        self.qkv = nn.Linear(cfg.width, (self.heads + 2 * self.kv_heads) * self.head_size, bias=cfg.bias)
        self.out = nn.Linear(cfg.width, cfg.width, bias=cfg.bias)

    def forward(self, x: Tensor, layout: Layout, rotary: Rotary | None, cache: LayerCache | None = None) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        causal, kv_layout = self.causal, layout
        if cache is not None:
            rows = layout.num_sequences
            past_k, past_v = cache.append(*(t.reshape(rows, -1, self.kv_heads, self.head_size) for t in (k, v)))
            if self.window and layout.max_len == 1:
                past_k, past_v = past_k[:, -self.window :], past_v[:, -self.window :]
            k, v = past_k.flatten(0, 1), past_v.flatten(0, 1)
            kv_layout = dense_layout(rows, past_k.shape[1], device=x.device)
            causal = layout.max_len > 1  # one new token sees all of the past; a first prompt is causal as in training
        p = self.dropout if self.training else 0.0
        return self.out(attend(q, k, v, layout, kv_layout, causal, p, window=self.window).flatten(1))


class CrossAttention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_size, self.dropout = cfg.heads, cfg.width // cfg.heads, cfg.attention_dropout
        self.q = nn.Linear(cfg.width, cfg.width, bias=cfg.bias)
        self.kv = nn.Linear(cfg.width, 2 * cfg.width, bias=cfg.bias)
        self.out = nn.Linear(cfg.width, cfg.width, bias=cfg.bias)

    def forward(
        self, x: Tensor, layout: Layout, memory: Tensor, memory_layout: Layout, cache: LayerCache | None = None
    ) -> Tensor:
        q = self.q(x).view(-1, self.heads, self.head_size)
        if cache is not None and cache.key is not None and cache.value is not None:
            k, v = cache.key, cache.value
        else:
            k, v = self.kv(memory).view(-1, 2 * self.heads, self.head_size).chunk(2, dim=1)
            if cache is not None:
                cache.append(k, v)
        p = self.dropout if self.training else 0.0
        return self.out(attend(q, k, v, layout, memory_layout, causal=False, dropout=p).flatten(1))


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        inner = cfg.mlp_width or 4 * cfg.width
        self.activation, self.dropout = cfg.activation, cfg.activation_dropout
        self.up = nn.Linear(cfg.width, 2 * inner if cfg.activation == "swiglu" else inner, bias=cfg.bias)
        self.down = nn.Linear(inner, cfg.width, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(activate(self.up(x), self.activation), self.dropout, self.training))


class Block(nn.Module):
    """Attention, cross attention where there is an encoder to look at, and the MLP, each a residual branch."""

    by_place = False  # what is dropped must depend on nothing that ran before, in any process

    def __init__(self, cfg: ModelConfig, causal: bool, cross: bool) -> None:
        super().__init__()
        self.pre_norm, self.dropout = cfg.norm_order == "pre", cfg.dropout
        self.attention = SelfAttention(cfg, causal)
        self.attention_norm = build_norm(cfg)
        self.cross = CrossAttention(cfg) if cross else None
        self.cross_norm = build_norm(cfg) if cross else None
        self.mlp = MLP(cfg)
        self.mlp_norm = build_norm(cfg)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        rotary: Rotary | None,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        cache: LayerCache | None = None,
        cross_cache: LayerCache | None = None,
        share: Share = EVERYTHING,
    ) -> Tensor:
        layout, rotary, memory, memory_layout = narrow(share.part, layout, rotary, memory, memory_layout)
        (x, put), scale = take(share, x), None if share.whole else share.scale
        x = self.add_branch(x, self.attention_norm, scale, lambda h: self.attention(h, layout, rotary, cache))
        if self.cross is not None and self.cross_norm is not None:
            cross, seen = self.cross, (memory, memory_layout, cross_cache)
            x = self.add_branch(x, self.cross_norm, scale, lambda h: cross(h, layout, *seen))
        return put(self.add_branch(x, self.mlp_norm, scale, self.mlp))

    def add_branch(
        self, x: Tensor, norm: nn.Module, scale: Tensor | None, branch: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if self.pre_norm:
            out = F.dropout(branch(norm(x)), self.dropout, self.training)
            return x + (out if scale is None else scale * out)
        return norm(x + F.dropout(branch(x), self.dropout, self.training))


class Stack(nn.Module):
    def __init__(self, cfg: ModelConfig, layers: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.rope = (cfg.width // cfg.heads, cfg.rope_theta, cfg.rope_scaling) if cfg.positions == "rotary" else None
        self.blocks = nn.ModuleList(Block(cfg, causal, cross) for _ in range(layers))
        self.norm = build_norm(cfg) if cfg.norm_order == "pre" else nn.Identity()

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
        """`stretch`: only these blocks run, from the stream in front of the first of them to that behind the last."""
        rotary = None if self.rope is None else rotary_angles(positions, *self.rope)
        for i, share in self.shares(depth, stretch).items():
            past = cache.layers[i] if cache is not None else None
            cross_past = cache.cross[i] if cache is not None and cache.cross else None
            x = self.blocks[i](x, layout, rotary, memory, memory_layout, past, cross_past, share)
        return x if self.goes_on(stretch) else self.norm(x)

    def shares(self, depth: Depth | None, stretch: range | None = None) -> dict[int, Share]:
        """What each block that works on a batch does, by its number; other blocks leave the stream as it is."""
        some = range(len(self.blocks)) if stretch is None else stretch
        if depth is None:
            return dict.fromkeys(some, EVERYTHING)
        return {number: share for number, share in depth.shares().items() if number in some}

    def goes_on(self, stretch: range | None) -> bool:
        """Whether blocks are left behind this stretch."""
        return stretch is not None and stretch.stop < len(self.blocks)


class _Take(torch.autograd.Function):
    """Some tokens of x [T, C], and x for `_Put` to put others in their place: in the backward pass too, the gradient of
    these tokens takes the place of what came for them, so nothing is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        return x.index_select(0, tokens), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dpart: Tensor, dx: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        return dx.index_copy(0, tokens, dpart), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return x.index_copy(0, tokens, out)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return dx, None, dx.index_select(0, tokens)


def narrow(
    part: Part, layout: Layout, rotary: Rotary | None, memory: Tensor | None, memory_layout: Layout | None
) -> tuple[Layout, Rotary | None, Tensor | None, Layout | None]:
    """What goes with a part of the stream."""
    subset, seen = part.subset, part.memory
    if subset is not None:
        layout = subset.layout
        if rotary is not None:
            rotary = Rotary(rotary.cos.index_select(0, subset.tokens), rotary.sin.index_select(0, subset.tokens))
    if seen is not None and memory is not None:
        memory, memory_layout = memory.index_select(0, seen.tokens), seen.layout
    return layout, rotary, memory, memory_layout


def take(share: Share, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The part of the stream x [T, C] that a block works on, and a function that puts the block's output back."""
    subset, stream = share.part.subset, x
    if subset is not None:
        x, stream = _Take.apply(x, subset.tokens)  # type: ignore[no-untyped-call]

    def put(out: Tensor) -> Tensor:
        if share.whole and share.scale is not None:
            out = x + share.scale * (out - x)
        if subset is None:
            return out
        return _Put.apply(stream, subset.tokens, out)  # type: ignore[no-untyped-call]

    return x, put


class Embedding(nn.Module):
    """dropout(norm(scale * token + position + type)). `tokens` False: the table of tokens is that of another one."""

    def __init__(self, cfg: ModelConfig, tokens: bool = True) -> None:
        super().__init__()
        self.scale = math.sqrt(cfg.width) if cfg.embed_scale else 1.0
        self.sinusoidal, self.dropout = cfg.positions == "sinusoidal", cfg.dropout
        self.token = nn.Embedding(cfg.vocab, cfg.width) if tokens else None
        self.position = nn.Embedding(cfg.max_len, cfg.width) if cfg.positions == "learned" else None
        self.token_type = nn.Embedding(cfg.token_types, cfg.width) if cfg.token_types else None
        self.norm = build_norm(cfg) if cfg.embed_norm else nn.Identity()

    def forward(self, inputs: Sequences, table: Tensor | None = None) -> Tensor:
        x = F.embedding(inputs.ids, self.table if table is None else table) * self.scale
        if self.position is not None:
            x = x + self.position(inputs.positions)
        elif self.sinusoidal:
            x = x + sinusoids(inputs.positions, x.shape[1])
        if self.token_type is not None:
            x = x + (self.token_type.weight[0] if inputs.types is None else self.token_type(inputs.types))
        return F.dropout(self.norm(x), self.dropout, self.training)

    @property
    def table(self) -> Tensor:
        """[V, C]"""
        assert self.token is not None, "this side has no tokens of its own: pass the table"
        return self.token.weight


class LMHead(nn.Module):
    """Hidden states to logits over the vocabulary. BERT's has one more layer in front and a bias; Marian's has a bias,
    which is trained here as in Marian itself (in transformers it is a buffer, and stays as it was)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        masked = cfg.kind == "encoder"
        self.activation = "gelu" if cfg.activation == "swiglu" else cfg.activation  # no gate here: the width stays
        self.transform = nn.Linear(cfg.width, cfg.width) if masked else None
        self.norm = build_norm(cfg) if masked else None
        self.weight = None if cfg.tied else nn.Parameter(torch.empty(cfg.vocab, cfg.width))
        self.bias = nn.Parameter(torch.empty(cfg.vocab)) if masked or cfg.head_bias else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        if self.transform is not None and self.norm is not None:
            x = self.norm(activate(self.transform(x), self.activation))
        return F.linear(x, embedding if self.weight is None else self.weight, self.bias)

    def loss(self, x: Tensor, embedding: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return summed_loss(self(x, embedding), labels, smoothing)


class Model(nn.Module):
    """What the four kinds share: the loss."""

    embedding: nn.Module
    head: nn.Module

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg

    def features(self, batch: Batch) -> Tensor:
        """What the head reads: one row per position, or per sequence, that is predicted."""
        raise TypeError("Model is abstract: build_model gives one of its four kinds")

    def logits(self, batch: Batch) -> Tensor:
        x = self.features(batch)
        return self.head(x, self._table()) if isinstance(self.head, LMHead) else self.head(x)

    def forward(self, batch: Batch, with_logits: bool = False) -> Any:
        """The summed loss; with what it is computed from, if that is wanted."""
        if isinstance(self.head, LMHead) and not with_logits:
            return self.compute_loss(self.head, self.features(batch), batch)
        logits = self.logits(batch)
        loss = summed_loss(logits, batch.labels, self._smoothing(), batch.mix)
        return (loss, logits) if with_logits else loss

    def compute_loss(self, head: LMHead, features: Tensor, batch: Batch) -> Tensor:
        table = self._table() if head.weight is None else head.weight
        return head.loss(features, table, batch.labels, self._smoothing())

    def _smoothing(self) -> float:
        return self.cfg.label_smoothing if self.training else 0.0

    def _table(self) -> Tensor:
        """The token embedding, which a language-model head may be tied to."""
        assert isinstance(self.embedding, Embedding)
        return self.embedding.table


class Writer(Model):
    """A model that writes one token after another."""

    embedding: Embedding
    decoder: Stack
    head: LMHead

    def embed(self, inputs: Sequences) -> Tensor:
        """The embeddings of the tokens that the model writes."""
        return self.embedding(inputs)

    def decode(self, ids: Tensor, cache: Cache) -> Tensor:
        """Logits [N, V] after the new tokens ids [N, S]; the cache remembers them."""
        rows, new = ids.shape
        assert new == 1 or cache.length == 0, "several tokens at once only as the first prompt"
        positions = torch.arange(cache.length, cache.length + new, device=ids.device).repeat(rows)
        layout = dense_layout(rows, new, device=ids.device)
        x = self.embed(Sequences(ids.flatten(), positions, layout))
        x = self.decoder(x, positions, layout, cache.memory, cache.memory_layout, cache)
        cache.length += new
        return self.head(x.view(rows, new, -1)[:, -1], self.embedding.table)


class Chain(Model):
    """A model of one stack. All that a block needs is the batch and what the block in front of it has made, so the
    model can be run in stretches."""

    embedding: Embedding
    stack_name: ClassVar[str]

    @property
    def stack(self) -> Stack:
        return getattr(self, self.stack_name)

    def features(self, batch: Batch) -> Tensor:
        return self.pick(self.run(batch), batch)

    def run(self, batch: Batch, x: Tensor | None = None, stretch: range | None = None) -> Tensor:
        """The stream behind these blocks, from that in front of them; from the tokens if there is none."""
        inputs = _given(batch.inputs)
        x = self.embedding(inputs) if x is None else x
        depth = batch.depths.get(self.stack_name)
        return self.stack(x, inputs.positions, inputs.layout, depth=depth, stretch=stretch)

    def pick(self, x: Tensor, batch: Batch) -> Tensor:
        """What the head reads of the stream behind the last block."""
        return x


class Decoder(Writer, Chain):
    stack_name = "decoder"

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.embedding = Embedding(cfg)
        self.decoder = Stack(cfg, cfg.layers, causal=True)
        self.head = LMHead(cfg)

    def start(self) -> Cache:
        return Cache([LayerCache() for _ in self.decoder.blocks])


class Encoder(Chain):
    stack_name = "encoder"

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.embedding = Embedding(cfg)
        self.encoder = Stack(cfg, cfg.layers)
        self.head = ClassHead(cfg) if cfg.classes else LMHead(cfg)

    def pick(self, x: Tensor, batch: Batch) -> Tensor:
        if isinstance(self.head, ClassHead) and batch.label_at is None:
            inputs = _given(batch.inputs)
            return x[inputs.layout.offsets[:-1].clamp(max=x.shape[0] - 1)]  # an empty sequence has no token of its own
        return x if batch.label_at is None else x[batch.label_at]


class ClassHead(nn.Module):
    """BERT's pooler and classifier."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dropout = cfg.dropout
        self.pooler = nn.Linear(cfg.width, cfg.width)
        self.classifier = nn.Linear(cfg.width, cfg.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.dropout(torch.tanh(self.pooler(x)), self.dropout, self.training))


class EncoderDecoder(Writer):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.embedding = Embedding(cfg)  # of source, target and, when tied, output
        self.target_embedding = None if cfg.embed_shared else Embedding(cfg, tokens=False)
        self.encoder = Stack(cfg, cfg.layers)
        self.decoder = Stack(cfg, cfg.decoder_layers or cfg.layers, causal=True, cross=True)
        self.head = LMHead(cfg)

    def embed(self, inputs: Sequences) -> Tensor:
        if self.target_embedding is None:
            return self.embedding(inputs)
        return self.target_embedding(inputs, self.embedding.table)

    def encode(self, source: Sequences, depth: Depth | None = None) -> Tensor:
        return self.encoder(self.embedding(source), source.positions, source.layout, depth=depth)

    def features(self, batch: Batch) -> Tensor:
        source, target = _given(batch.source), _given(batch.inputs)
        memory, depth = self.encode(source, batch.depths.get("encoder")), batch.depths.get("decoder")
        return self.decoder(self.embed(target), target.positions, target.layout, memory, source.layout, depth=depth)

    def start(self, source: Sequences, copies: int = 1) -> Cache:
        """A cache for decoding `copies` continuations of each source (a dense layout), side by side."""
        layout = source.layout
        rows = torch.arange(layout.num_sequences, device=source.ids.device).repeat_interleave(copies)
        memory = as_rows(self.encode(source), layout)[rows].flatten(0, 1)
        lengths = None if layout.lengths is None else layout.lengths[rows]
        layers = [(LayerCache(), LayerCache()) for _ in self.decoder.blocks]
        return Cache(
            [own for own, _ in layers],
            [cross for _, cross in layers],
            memory,
            dense_layout(len(rows), layout.max_len, lengths, rows.device),
        )


class PatchEmbedding(nn.Module):
    """Images [N, channels, height, width] to [N, S, C]: a class token, then one token per patch."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.size, self.grid, self.dropout = cfg.patch, cfg.image_size // cfg.patch, cfg.dropout
        self.patch = nn.Linear(cfg.channels * cfg.patch**2, cfg.width)
        self.class_token = nn.Parameter(torch.empty(cfg.width))
        self.position = nn.Parameter(torch.empty(self.grid**2 + 1, cfg.width))

    def forward(self, pixels: Tensor) -> Tensor:
        rows, channels = pixels.shape[:2]
        patches = pixels.view(rows, channels, self.grid, self.size, self.grid, self.size).permute(0, 2, 4, 1, 3, 5)
        x = self.patch(patches.reshape(rows, self.grid**2, -1))
        x = torch.cat([self.class_token.to(x.dtype).expand(rows, 1, -1), x], 1) + self.position
        return F.dropout(x, self.dropout, self.training)


class VisionTransformer(Model):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.embedding = PatchEmbedding(cfg)
        self.encoder = Stack(cfg, cfg.layers)
        self.head = nn.Linear(cfg.width, cfg.classes)

    def features(self, batch: Batch) -> Tensor:
        x = self.embedding(_given(batch.pixels))
        rows, tokens = x.shape[:2]
        positions = torch.arange(tokens, device=x.device).repeat(rows)
        layout, depth = dense_layout(rows, tokens, device=x.device), batch.depths.get("encoder")
        x = self.encoder(x.flatten(0, 1), positions, layout, depth=depth)
        return x.view(rows, tokens, -1)[:, 0]


KINDS: dict[str, type[Model]] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "encoder-decoder": EncoderDecoder,
    "vit": VisionTransformer,
}


def build_model(cfg: ModelConfig, device: torch.device | str = "meta") -> Model:
    """The model without values: on the meta device nothing is allocated until `to_empty`."""
    with torch.device(device):
        return KINDS[cfg.kind](cfg)


def sites(model: nn.Module) -> dict[str, list[str]]:
    """Role -> names of the modules that play it: what techniques and parallelism look for, never classes."""
    roles: dict[str, tuple[type[nn.Module], ...]] = {
        "stack": (Stack,),
        "block": (Block,),
        "attention": (SelfAttention, CrossAttention),
        "mlp": (MLP,),
        "norm": (nn.LayerNorm, nn.RMSNorm),
        "embedding": (Embedding, PatchEmbedding),
    }
    modules = list(model.named_modules())
    found = {role: [name for name, module in modules if isinstance(module, kinds)] for role, kinds in roles.items()}
    return found | {"head": ["head"]}


def rotary_angles(positions: Tensor, head_size: int, theta: float, scaling: RopeScaling | None = None) -> Rotary:
    frequencies = theta ** -(torch.arange(0, head_size, 2, device=positions.device).float() / head_size)
    if scaling is not None:
        turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    angles = positions.float()[:, None] * frequencies
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) of each head of x [T, heads, D] by the token's angles."""
    cos, sin = rotary.cos[:, None, :], rotary.sin[:, None, :]
    first, second = _at_least_fp32(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[T, C]: sines in the first half of the channels, cosines in the second."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def activate(x: Tensor, name: str) -> Tensor:
    if name == "swiglu":
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    if name in ("relu", "silu"):
        return F.relu(x) if name == "relu" else F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def summed_loss(logits: Tensor, labels: Tensor, smoothing: float, mix: Mix | None = None) -> Tensor:
    logits = _at_least_fp32(logits)
    if mix is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    own, other = (
        F.cross_entropy(logits, each, reduction="none", label_smoothing=smoothing) for each in (labels, mix.labels)
    )
    return (mix.shares * own + (1 - mix.shares) * other).sum()


def build_norm(cfg: ModelConfig) -> nn.Module:
    if cfg.norm == "none":
        return nn.Identity()
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.width, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.width, eps=cfg.norm_eps, bias=cfg.bias)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _given(value: X | None) -> X:
    assert value is not None, "the batch is for another kind of model"
    return value
