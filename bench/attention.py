"""Which of torch's attention kernels is fastest for which shape: what attention.py's choice rests on. Needs a GPU.

    python bench/attention.py

Queries, keys and values are views of one projection, as in the model; bf16; milliseconds of the forward and of the
backward pass, and TFLOP/s of the pairs that are not masked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

# name: sequences, length, query heads, key and value heads, causal, dropouts
SHAPES = {
    "bert_large_64x512": (64, 512, 16, 16, False, (0.0, 0.1)),
    "bert_large_256x128": (256, 128, 16, 16, False, (0.0, 0.1)),
    "transformer_big_512x32": (512, 32, 16, 16, False, (0.0, 0.1)),
    "transformer_big_512x32 causal": (512, 32, 16, 16, True, (0.0, 0.1)),
    "vit_base_256": (256, 197, 12, 12, False, (0.0,)),
    "gpt2_small_32x1024": (32, 1024, 12, 12, True, (0.0,)),
    "gpt2_medium_16x1024": (16, 1024, 16, 16, True, (0.0,)),
    "llama1b_4x4096": (4, 4096, 32, 8, True, (0.0,)),
}
SIZE = 64  # of a head, in all of them
DENSE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, (rows, length, heads, kv_heads, causal, dropouts) in SHAPES.items():
        flops = 4 * rows * heads * length**2 * SIZE / (2 if causal else 1)
        qkv = torch.randn(rows * length, heads + 2 * kv_heads, SIZE, device="cuda", dtype=torch.bfloat16)
        parts = [part.detach().requires_grad_() for part in qkv.split([heads, kv_heads, kv_heads], 1)]
        for dropout in dropouts:
            for backend in DENSE:
                run = dense(parts, rows, causal, dropout, heads != kv_heads)
                with sdpa_kernel(backend):
                    report(name, dropout, backend.name.split("_")[0].lower(), run, parts, flops)
            if dropout == 0.0:
                report(name, dropout, "varlen", packed(parts, rows, length, causal), parts, flops)


def dense(parts: list[Tensor], rows: int, causal: bool, dropout: float, grouped: bool) -> Callable[[], Tensor]:
    q, k, v = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in parts)
    return lambda: F.scaled_dot_product_attention(q, k, v, None, dropout, causal, enable_gqa=grouped)


def packed(parts: list[Tensor], rows: int, length: int, causal: bool) -> Callable[[], Tensor]:
    ends = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * length
    q, k, v = parts
    if q.shape[1] != k.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    window = (-1, 0) if causal else (-1, -1)
    return lambda: varlen_attn(q, k, v, ends, ends, length, length, window_size=window)  # type: ignore[return-value]


def report(
    name: str, dropout: float, kernel: str, run: Callable[[], Tensor], parts: list[Tensor], flops: float
) -> None:
    try:
        out = run()
    except RuntimeError as error:
        print(f"{name:30} {dropout:3} {kernel:10} {str(error).splitlines()[0]}")
        return
    gradient = torch.randn_like(out)
    forward = milliseconds(run)
    backward = milliseconds(lambda: torch.autograd.grad(out, parts, gradient, retain_graph=True))
    rates = f"{flops / forward / 1e9:4.0f} {2.5 * flops / backward / 1e9:4.0f} TFLOP/s"
    print(f"{name:30} {dropout:3} {kernel:10} {forward:6.3f} {backward:6.3f} ms  {rates}", flush=True)


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


if __name__ == "__main__":
    main()
