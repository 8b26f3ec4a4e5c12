"""One layer as one rank of many computes it: alone on one device, where messages are copies of the same size, or among
real ranks.

    gather, ring  queries of s / P tokens, and keys of all: those before the rank's own tokens as rectangles without a
                  mask, its own as a causal square. Results of blocks are merged by the logarithms of their sums, `lse`;
                  the backward pass of each block starts from the merged result, so it is exact.
    ulysses       all tokens of heads / P
    megatron      all tokens of heads / P and of a share of the MLP, and s / P tokens of the norms

Tokens lie on ranks in order (contiguous), so that the last rank has most to do under a causal mask, or in 2 P chunks of
which rank r has r and 2 P - 1 - r (zig-zag), so that all have the same. Everything is the layer's own code
(layers.FusedBlock) but attention, and the same on a CPU in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.attention import attend
from stretto.batch import Layout, dense_layout
from stretto.config import ModelConfig
from stretto.layers import Branch, FusedBlock
from stretto.model import Block, Rotary, rotary_angles
from stretto.ops.heads import project_heads
from stretto.ops.linear import linear

# Since torch 2.13 by new names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Wait = Callable[[], Tensor]  # for a message that is under way; gives what came


@dataclass
class Peers:
    """Stands in for the other ranks: what comes is what would have been sent, so shapes, copies and memory are real."""

    ranks: int
    rank: int

    def start_gather(self, x: Tensor) -> Wait:
        """[...] of each rank to [P, ...]."""
        out = x.expand(self.ranks, *x.shape).contiguous()
        return lambda: out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[P, ...] to [...]: the sum over ranks of their parts for this one."""
        return x[self.rank].clone()

    def exchange(self, x: Tensor) -> Tensor:
        """[P, ...], a part for each rank, to [P, ...], a part of each."""
        return x.clone()

    def start_shift(self, x: Tensor) -> Wait:
        """To the next rank, while that of the one before comes."""
        out = x.clone()
        return lambda: out


class Group(Peers):
    """The ranks of torch.distributed's default group."""

    def __init__(self) -> None:
        super().__init__(dist.get_world_size(), dist.get_rank())

    def start_gather(self, x: Tensor) -> Wait:
        x = x.contiguous()
        out = x.new_empty(self.ranks, *x.shape)
        return partial(_finish, [_all_gather(out.flatten(0, 1), x, async_op=True)], out, x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[1:])
        _reduce_scatter(out, x.contiguous().flatten(0, 1))
        return out

    def exchange(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    def start_shift(self, x: Tensor) -> Wait:
        x = x.contiguous()
        out = torch.empty_like(x)
        send = dist.P2POp(dist.isend, x, (self.rank + 1) % self.ranks)
        receive = dist.P2POp(dist.irecv, out, (self.rank - 1) % self.ranks)
        return partial(_finish, dist.batch_isend_irecv([send, receive]), out, x)


def _finish(works: Sequence[Any], out: Tensor, sent: Tensor) -> Tensor:
    """`sent` is an argument so that it lives until it has been sent."""
    for work in works:
        work.wait()
    return out


@dataclass(frozen=True)
class Span:
    """Queries of this rank and keys of the whole sequence that all of them see."""

    queries: slice
    keys: slice


def find_spans(placement: str, rank: int, ranks: int, own: int) -> list[Span]:
    """What a rank's `own` queries see besides its own tokens."""
    if placement == "contiguous":
        spans = [Span(slice(0, own), slice(0, rank * own))]
    else:
        half = own // 2
        later = Span(slice(half, own), slice((rank + 1) * half, (2 * ranks - 1 - rank) * half))
        spans = [Span(slice(0, own), slice(0, rank * half)), later]
    return [span for span in spans if span.keys.stop > span.keys.start]


def find_ring_span(placement: str, rank: int, source: int, own: int) -> Span | None:
    """The same for the tokens of another rank alone; keys are counted among these."""
    everything, half = slice(0, own), own // 2
    if source < rank:
        return Span(everything, everything if placement == "contiguous" else slice(0, half))
    return None if placement == "contiguous" else Span(slice(half, own), everything)


def to_sequence(x: Tensor, placement: str) -> Tensor:
    """[P, 2, T, ...], tokens as they lie on ranks, to [2, P T, ...] in the order of the sequence."""
    if placement == "zigzag":
        first, second = x.unflatten(2, (2, -1)).unbind(2)
        x = torch.cat([first, second.flip(0)])
    return x.movedim(0, 1).flatten(1, 2)


def to_ranks(x: Tensor, placement: str, ranks: int) -> Tensor:
    """And back."""
    if placement == "contiguous":
        return x.unflatten(1, (ranks, -1)).movedim(1, 0)
    first, second = x.unflatten(1, (2 * ranks, -1)).movedim(1, 0).split(ranks)
    return torch.cat([first, second.flip(0)], 2)


@dataclass(frozen=True)
class Kernel:
    """Attention to a block of keys. Forward: q [T, H, D], k and v [T', K, D], and whether the block is causal (a square
    then), to the result [T, H, D] and lse [H, T]. Backward: the result's gradient, q, k, v, and result and lse of all
    keys, to dq, dk and dv of this block."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_ends(q, k), 0.0, causal, False)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is not
    kept = (dout, q, k, v, out, lse.contiguous(), *_ends(q, k))
    dq, dk, dv = torch.ops.aten._flash_attention_backward(*kept, 0.0, causal, state, state[:0])
    return dq, dk, dv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    heads = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal)
    return out[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads = (t.transpose(0, 1)[None] for t in (dout, q, k, v, out))
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    options = (lse.contiguous()[None, :, :, None], state, state, None, None, None, q.shape[0], k.shape[0], 0.0, causal)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*heads, *options)
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return dq, dk, dv


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), _spread(v, q)), scores.logsumexp(-1)


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """delta comes from the result: the sum over this block's keys alone would be another."""
    probabilities = torch.exp(_scores(q, k, causal) - lse[..., None])
    delta = (dout * out).sum(-1).t()[..., None]
    dscores = probabilities * (torch.einsum("qhd,khd->hqk", dout, _spread(v, q)) - delta) * q.shape[2] ** -0.5
    dk, dv = torch.einsum("hqk,qhd->khd", dscores, q), torch.einsum("hqk,qhd->khd", probabilities, dout)
    dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))  # over the queries' heads that share a key's
    return torch.einsum("hqk,khd->qhd", dscores, _spread(k, q)), dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, _spread(k, q)) * q.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def _spread(t: Tensor, q: Tensor) -> Tensor:
    """[T', K, D] to [T', H, D]"""
    return t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def _ends(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    q_layout, k_layout = (dense_layout(1, t.shape[0], device=t.device) for t in (q, k))
    return q_layout.offsets, k_layout.offsets, q_layout.max_len, k_layout.max_len


KERNELS = {
    "flash": Kernel(_flash, _flash_backward),
    "cudnn": Kernel(_cudnn, _cudnn_backward),
    "plain": Kernel(_plain, _plain_backward),  # for tiny sequences on a CPU
}


@cache
def find_kernel(device: torch.device, wanted: str = "flash") -> str:
    """The one that is wanted, or the other, if it gives the gradients of a part of the keys as they should be."""
    if device.type != "cuda":
        return "plain"
    found = [name for name in sorted(("flash", "cudnn"), key=lambda name: name != wanted) if _is_right(name, device)]
    if not found:
        raise RuntimeError("neither FlashAttention nor cuDNN attends to a block of keys with this torch and GPU")
    return found[0]


def _is_right(name: str, device: torch.device) -> bool:
    """By a small example with grouped heads: the second half of its keys, given what all of them come to."""
    generator, kernel = torch.Generator(device).manual_seed(0), KERNELS[name]
    shapes = ((256, 4, 64), (512, 2, 64), (512, 2, 64), (256, 4, 64))
    q, k, v, dout = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes)
    out, lse = _plain(q.float(), k.float(), v.float(), False)
    _, dk, dv = _plain_backward(dout.float(), q.float(), k.float(), v.float(), out, lse, False)
    half = slice(256, 512)
    try:
        result, sums = kernel.forward(q, k, v, False)
        _, *got = kernel.backward(dout, q, k[half], v[half], result, sums, False)
    except (RuntimeError, TypeError):  # another version of torch or cuDNN
        return False
    pairs = zip((result, sums, *got), (out, lse, dk[half], dv[half]), strict=True)
    return all(a.shape == b.shape and bool((a.float() - b).norm() <= 0.02 * b.norm()) for a, b in pairs)


ALL = slice(None)


class Merged:
    """Attention to the keys seen so far, in fp32; begins with the causal block of all queries."""

    def __init__(self, kernel: Kernel, q: Tensor, kv: Tensor) -> None:
        self.kernel, self.q = kernel, q
        out, self.lse = kernel.forward(q, kv[0], kv[1], True)
        self.out = out.float().contiguous()

    def add(self, rows: slice, kv: Tensor) -> None:
        out, lse = self.kernel.forward(self.q[rows], kv[0], kv[1], False)
        before = self.lse[:, rows]
        self.out[rows].lerp_(out.float(), torch.sigmoid(lse - before).t()[..., None])
        self.lse[:, rows] = torch.logaddexp(before, lse)


class Gradients:
    """Of queries, added up over blocks in fp32, given what Merged came to."""

    def __init__(self, kernel: Kernel, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.kernel, self.kept = kernel, (dout.contiguous(), q, out, lse)
        self.dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)

    def add(self, rows: slice, kv: Tensor, dkv: Tensor, causal: bool = False) -> None:
        """Adds dk and dv of this block to dkv, too."""
        dout, q, out, lse = self.kept
        dq, dk, dv = self.kernel.backward(dout[rows], q[rows], kv[0], kv[1], out[rows], lse[:, rows], causal)
        self.dq[rows] += dq
        dkv[0] += dk
        dkv[1] += dv


class GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, peers: Peers, placement: str, keep: bool
    ) -> Tensor:
        kv = torch.stack([k, v])
        finish = peers.start_gather(kv)
        merged = Merged(kernel, q, kv)  # while the others' keys come
        everything = to_sequence(finish(), placement)
        for span in find_spans(placement, peers.rank, peers.ranks, q.shape[0]):
            merged.add(span.queries, everything[:, span.keys])
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merged.lse, everything if keep else None)
        ctx.options = kernel, peers, placement
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, everything = ctx.saved_tensors
        kernel, peers, placement = ctx.options
        gradients, own = Gradients(kernel, dout, q, out, lse), torch.zeros_like(kv, dtype=torch.float32)
        gradients.add(ALL, kv, own, causal=True)
        everything = to_sequence(peers.start_gather(kv)(), placement) if everything is None else everything
        dkv = torch.zeros_like(everything, dtype=torch.float32)
        for span in find_spans(placement, peers.rank, peers.ranks, q.shape[0]):
            gradients.add(span.queries, everything[:, span.keys], dkv[:, span.keys])
        dk, dv = (own + peers.reduce_scatter(to_ranks(dkv, placement, peers.ranks))).to(kv.dtype)
        return gradients.dq.to(q.dtype), dk, dv, None, None, None, None


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, peers: Peers, placement: str) -> Tensor:
        kv = torch.stack([k, v])
        finish = peers.start_shift(kv)
        merged = Merged(kernel, q, kv)
        for step in range(1, peers.ranks):
            block = finish()
            finish = peers.start_shift(block) if step < peers.ranks - 1 else finish
            span = find_ring_span(placement, peers.rank, (peers.rank - step) % peers.ranks, q.shape[0])
            if span is not None:
                merged.add(span.queries, block[:, span.keys])
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merged.lse)
        ctx.options = kernel, peers, placement
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Behind each block goes the sum of its gradients, to which every rank adds; its own rank does so last."""
        q, kv, out, lse = ctx.saved_tensors
        kernel, peers, placement = ctx.options
        finish, finish_sum = peers.start_shift(kv), None
        gradients, own = Gradients(kernel, dout, q, out, lse), torch.zeros_like(kv, dtype=torch.float32)
        gradients.add(ALL, kv, own, causal=True)
        for step in range(1, peers.ranks):
            block = finish()
            finish = peers.start_shift(block) if step < peers.ranks - 1 else finish
            dblock = torch.zeros_like(own)
            span = find_ring_span(placement, peers.rank, (peers.rank - step) % peers.ranks, q.shape[0])
            if span is not None:
                gradients.add(span.queries, block[:, span.keys], dblock[:, span.keys])
            finish_sum = peers.start_shift(dblock if finish_sum is None else dblock + finish_sum())
        assert finish_sum is not None
        dk, dv = (own + finish_sum()).to(kv.dtype)
        return gradients.dq.to(q.dtype), dk, dv, None, None, None


class Exchange(torch.autograd.Function):
    """[P, ...] to [P, ...] with all ranks, which is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.exchange(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.exchange(dout), None


class GatherRows(torch.autograd.Function):
    """[T, C] of each rank to [P T, C]; its adjoint sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.start_gather(x)().flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.reduce_scatter(dout.unflatten(0, (ctx.peers.ranks, -1))), None


class SumRows(torch.autograd.Function):
    """The adjoint of the above: parts of sums, [P T, C], to the sums of this rank's rows, [T, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.reduce_scatter(x.unflatten(0, (peers.ranks, -1)))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.start_gather(dout)().flatten(0, 1), None


class Skip(torch.autograd.Function):
    """In place of attention, to time all the rest."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k, v)
        return q.contiguous()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return dout, *(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in ctx.saved_tensors)


class RankBlock(FusedBlock):
    """A block on one rank: [s / P, C] to [s / P, C]. build_block makes one."""

    method: str  # one of costs.METHODS, or megatron
    kernel: Kernel  # of gather and ring; whole sequences are attended to as ever
    peers: Peers
    placement: str  # contiguous or zigzag; ulysses and megatron have all tokens in order, so only the former
    keep: bool  # what is gathered
    skip: bool  # leaves attention out

    def attend_self(self, h: Tensor, layout: Layout, rotary: Rotary | None, key: Tensor | None) -> Branch:
        at = self.attention
        parts = [at.heads, at.kv_heads, at.kv_heads]
        angles = () if rotary is None else (rotary.cos, rotary.sin)
        q, k, v = project_heads(self.gather_rows(h), at.qkv.weight, at.qkv.bias, parts, *angles)
        return self.sum_rows(linear(self.attend(q, k, v).flatten(1), at.out.weight)), at.out.bias

    def expand(self, h: Tensor, key: Tensor | None) -> Branch:
        out, bias = super().expand(self.gather_rows(h), key)
        assert out is not None
        return self.sum_rows(out), bias

    def gather_rows(self, h: Tensor) -> Tensor:
        return GatherRows.apply(h, self.peers) if self.splits_weights else h

    def sum_rows(self, out: Tensor) -> Tensor:
        return SumRows.apply(out, self.peers) if self.splits_weights else out

    @property
    def splits_weights(self) -> bool:
        return self.method == "megatron" and self.peers.ranks > 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, H, D]"""
        if self.skip:
            return Skip.apply(q, k, v)
        if self.method == "gather" and self.peers.ranks > 1:
            return GatherAttention.apply(q, k, v, self.kernel, self.peers, self.placement, self.keep)
        if self.method == "ring" and self.peers.ranks > 1:
            return RingAttention.apply(q, k, v, self.kernel, self.peers, self.placement)
        if self.method == "ulysses" and self.peers.ranks > 1:
            keys, values = self.to_heads(torch.stack([k, v], 1)).unbind(1)
            return self.to_tokens(attend_alone(self.to_heads(q[:, None])[:, 0], keys, values))
        return attend_alone(q, k, v)

    def to_heads(self, t: Tensor) -> Tensor:
        """[T, n, H, D] to [P T, n, H / P, D]"""
        return Exchange.apply(t.unflatten(2, (self.peers.ranks, -1)).movedim(2, 0), self.peers).flatten(0, 1)

    def to_tokens(self, t: Tensor) -> Tensor:
        return Exchange.apply(t.unflatten(0, (self.peers.ranks, -1)), self.peers).transpose(0, 1).flatten(1, 2)


def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    layout = dense_layout(1, q.shape[0], device=q.device)
    return attend(q, k, v, layout, layout, causal=True, dropout=0.0)


def build_block(
    cfg: ModelConfig,
    method: str,
    peers: Peers,
    device: torch.device,
    dtype: torch.dtype,
    placement: str = "contiguous",
    keep: bool = False,
    recompute: bool = False,
    skip: bool = False,
    kernel: str = "flash",
) -> RankBlock:
    """With the weights of this rank: all, or for megatron its rows and columns of a block that all ranks draw alike."""
    torch.manual_seed(0)
    block = Block(cfg, causal=True, cross=False)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    for norm in (block.attention_norm, block.mlp_norm):
        nn.init.ones_(norm.weight)  # type: ignore[arg-type]
    block.__class__ = RankBlock
    assert isinstance(block, RankBlock)
    block.method, block.peers, block.placement, block.keep, block.skip = method, peers, placement, keep, skip
    block.recompute, block.kernel = recompute, KERNELS[find_kernel(device, kernel)]
    if block.splits_weights:
        _split_weights(block, cfg, peers)
    return block.to(device, dtype)


def _split_weights(block: RankBlock, cfg: ModelConfig, peers: Peers) -> None:
    """Query heads and the MLP's inner values are divided; a KV head that several ranks need is on each of them."""
    at, ranks, rank = block.attention, peers.ranks, peers.rank
    kv_heads = max(at.kv_heads // ranks, 1)
    first = rank * at.kv_heads // ranks
    q, k, v = torch.arange(at.qkv.out_features).view(-1, at.head_size).split([at.heads, at.kv_heads, at.kv_heads])
    q, k, v = q.chunk(ranks)[rank], k[first : first + kv_heads], v[first : first + kv_heads]
    ups = 2 if cfg.activation == "swiglu" else 1
    inner = torch.arange(block.mlp.up.out_features).view(ups, ranks, -1)[:, rank].flatten()
    _take(at.qkv, rows=torch.cat([q, k, v]).flatten())
    _take(at.out, columns=q.flatten())
    _take(block.mlp.up, rows=inner)
    _take(block.mlp.down, columns=inner[: len(inner) // ups])
    at.heads, at.kv_heads = at.heads // ranks, kv_heads


def _take(layer: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """The bias of a layer of which columns are taken is added once, by the norm behind the sum."""
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(weight[rows].clone() if columns is None else weight[:, columns].clone())
    if layer.bias is not None and rows is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[rows].clone())


def own_positions(placement: str, rank: int, ranks: int, tokens: int, device: torch.device | None = None) -> Tensor:
    """Which tokens of the sequence are this rank's, in the order in which it has them."""
    positions = torch.arange(tokens, device=device)
    if placement == "contiguous":
        return positions.chunk(ranks)[rank]
    chunks = positions.chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def angles_of(cfg: ModelConfig, positions: Tensor) -> Rotary | None:
    size = cfg.width // cfg.heads
    return rotary_angles(positions, size, cfg.rope_theta, cfg.rope_scaling) if cfg.positions == "rotary" else None


def run_block(block: RankBlock, x: Tensor, branch: Tensor, rotary: Rotary | None) -> Tensor:
    """In the middle of a stack: the branch of the block before is still to be added, and its own is added by the norm
    that follows, which is not of this block. Gives both as one, so that both have gradients."""
    layout = dense_layout(1, x.shape[0], device=x.device)
    stream, (out, _) = block(x, layout, rotary, pending=(branch, None))
    return stream + out
