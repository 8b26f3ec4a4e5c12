"""Our attention kernels against torch's. Needs a GPU.

    python -m bench.attention            every shape
    python -m bench.attention lognormal  shapes whose name contains it

Queries, keys and values are views of one projection, as in the model; bf16; milliseconds of the forward and of the
backward pass and, in brackets, TFLOP/s of the pairs that are not masked (backward counted as 2.5 forward passes).
`short` and `long` are our two kinds; `short` is left out where keys do not fit a tile. Padded peers of a packed batch
get the rectangle with a mask, and its padding for free. Before it is timed, each of our kernels is compared with the
fp32 reference on the first two sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from stretto.ops import attention as family

# name: lengths of the sequences, query heads, key and value heads, causal, dropouts
SHAPES: dict[str, tuple[list[int], int, int, bool, tuple[float, ...]]] = {
    "bert_large_64x512": ([512] * 64, 16, 16, False, (0.0, 0.1)),
    "bert_large_256x128": ([128] * 256, 16, 16, False, (0.0, 0.1)),
    "transformer_big_512x32": ([32] * 512, 16, 16, False, (0.0, 0.1)),
    "transformer_big_512x32 causal": ([32] * 512, 16, 16, True, (0.0, 0.1)),
    "full_64x128": ([128] * 64, 16, 16, False, (0.0,)),
    "bert_8x128": ([128] * 8, 16, 16, False, (0.1,)),
    "vit_base_256": ([197] * 256, 12, 12, False, (0.0,)),
    "gpt2_small_32x1024": ([1024] * 32, 12, 12, True, (0.0,)),
    "gpt2_medium_16x1024": ([1024] * 16, 16, 16, True, (0.0,)),
    "llama1b_4x4096": ([4096] * 4, 32, 8, True, (0.0,)),
}
SIZE = 64
KEY = [0x123456789ABCDEF, -7]


def lognormal(median: float, sigma: float, low: int, high: int, count: int) -> list[int]:
    normal = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths: list[int] = (median * (sigma * normal).exp()).round().clamp(low, high).int().tolist()
    return sorted(lengths, reverse=True)  # as batches are laid out


SHAPES["lognormal_64x512"] = (lognormal(140, 0.8, 8, 512, 64), 16, 16, False, (0.0, 0.1))
SHAPES["lognormal_600x128 causal"] = (lognormal(24, 0.6, 4, 128, 600), 16, 16, True, (0.0, 0.1))


def main(name_contains: str) -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'shape':30} {'p':>3} {'kernel':26} {'forward':>16} {'backward':>16}")
    for name, (lengths, heads, kv_heads, causal, dropouts) in SHAPES.items():
        if name_contains not in name:
            continue
        flops = 4 * heads * sum(n**2 for n in lengths) * SIZE / (2 if causal else 1)
        qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, SIZE, device="cuda", dtype=torch.bfloat16)
        parts = [part.detach().requires_grad_() for part in qkv.split([heads, kv_heads, kv_heads], 1)]
        for p in dropouts:
            for kind in ("short", "long"):
                if kind == "long" or family.is_short(qkv, max(lengths)):
                    with patch.object(family, "is_short", lambda q, k_max, kind=kind: kind == "short"):
                        run = ours(parts, lengths, causal, p)
                        report(name, p, kind, run, parts, flops, partial(check, parts, lengths, causal, p))
            grouped = heads != kv_heads
            if len(set(lengths)) == 1:
                for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                    with sdpa_kernel(backend):
                        run = dense(parts, len(lengths), causal, p, grouped)
                        report(name, p, backend.name.split("_")[0].lower(), run, parts, flops)
            else:
                padded_parts, run = padded(lengths, heads, kv_heads, causal, p)
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    report(name, p, "cudnn, padded", run, padded_parts, flops)
            if p == 0.0:
                report(name, p, "varlen", packed(parts, lengths, causal), parts, flops)


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)


def ours(parts: list[Tensor], lengths: list[int], causal: bool, p: float) -> Callable[[], Tensor]:
    q, k, v = parts
    offsets, longest, key = ends(lengths), max(lengths), torch.tensor(KEY, device="cuda")
    return lambda: family.attention(q, k, v, offsets, offsets, longest, longest, causal, p=p, key=key)


def check(parts: list[Tensor], lengths: list[int], causal: bool, p: float) -> str:
    """Largest relative error of out and the gradients on the first two sequences."""
    few = lengths[:2]
    mine = [part.detach()[: sum(few)].requires_grad_() for part in parts]
    theirs = [part.detach().float().requires_grad_() for part in mine]
    offsets, key = ends(few), torch.tensor(KEY, device="cuda") if p else None
    layout = (offsets, offsets, max(few), max(few), causal)
    q, k, v = mine
    out = family.attention(q, k, v, *layout, p=p, key=key)
    q, k, v = theirs
    exact = family.attention_ref(family.Forward(q, k, v, None, *layout, SIZE**-0.5, p, key))[0]
    gradient = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, mine, gradient)]
    expected = [exact, *torch.autograd.grad(exact, theirs, gradient.float())]
    worst = max(float((a.float() - b).detach().norm() / b.detach().norm()) for a, b in zip(got, expected, strict=True))
    return f"error {worst:.1e}" + ("" if worst < 0.02 else "  WRONG")


def dense(parts: list[Tensor], rows: int, causal: bool, p: float, grouped: bool) -> Callable[[], Tensor]:
    q, k, v = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in parts)
    return lambda: F.scaled_dot_product_attention(q, k, v, None, p, causal, enable_gqa=grouped)


def padded(
    lengths: list[int], heads: int, kv_heads: int, causal: bool, p: float
) -> tuple[list[Tensor], Callable[[], Tensor]]:
    rows, longest = len(lengths), max(lengths)
    qkv = torch.randn(rows * longest, heads + 2 * kv_heads, SIZE, device="cuda", dtype=torch.bfloat16)
    parts = [part.detach().requires_grad_() for part in qkv.split([heads, kv_heads, kv_heads], 1)]
    q, k, v = (part.unflatten(0, (rows, longest)).transpose(1, 2) for part in parts)
    real = torch.arange(longest, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    # Causal rows cannot see the padding on their right.
    mask = None if causal else real[:, None, None, :].expand(rows, 1, longest, longest)
    return parts, lambda: F.scaled_dot_product_attention(q, k, v, mask, p, causal)


def packed(parts: list[Tensor], lengths: list[int], causal: bool) -> Callable[[], Tensor]:
    q, k, v = parts
    if q.shape[1] != k.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    offsets, longest, window = ends(lengths), max(lengths), (-1, 0) if causal else (-1, -1)
    return lambda: varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window)  # type: ignore[return-value]


def report(
    name: str, p: float, kernel: str, run: Callable[[], Tensor], parts: list[Tensor], flops: float,
    verify: Callable[[], str] | None = None,
) -> None:  # fmt: skip
    try:
        note = verify() if verify else ""
        out = run()
        gradient = torch.randn_like(out)
        forward = milliseconds(run)
        backward = milliseconds(lambda: torch.autograd.grad(out, parts, gradient, retain_graph=True))
    except Exception as error:  # a kernel that refuses, or does not fit the chip: the others are still wanted
        print(f"{name:30} {p:3} {kernel:26} {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
        return
    times = f"{forward:7.3f} ms ({flops / forward / 1e9:4.0f}) {backward:7.3f} ms ({2.5 * flops / backward / 1e9:4.0f})"
    print(f"{name:30} {p:3} {kernel:26} {times}  {note}", flush=True)


def milliseconds(call: Callable[[], object], repeats: int = 10, replays: int = 5) -> float:
    """Times one call among `repeats` in a CUDA graph: the kernels alone, which for some of these shapes take less time
    than the host takes to launch them."""
    for _ in range(3):
        call()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / (repeats * replays)


if __name__ == "__main__":
    with torch.cuda.stream(torch.cuda.Stream()):  # backward passes run where forward passes did: where graphs record
        main(sys.argv[1] if len(sys.argv) > 1 else "")
