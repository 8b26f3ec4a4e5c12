"""The host's time for an eager training pass through a Hugging Face model, accelerated and untouched, side by side.

    python -m bench.host_time [bert gpt2 llama t5 vit] [--profile FAMILY]

A GPU waits for the host where layers are small, so what counts there is the Python between two launches. This is
measured on a CPU: models are so narrow that their operations take hardly longer than calling them, and the kernels of
ops are empty. Everything else of ours runs as on a GPU: launchers, autograd functions, products. What is missing is
Triton's own time for a launch, so launches are counted: those of our kernels, and all operations of torch.

A model with many layers and one with few are trained by turns with both, forward and backward, on a batch without
padding. The difference, divided by the number of layers, is the time of a layer; what is left of the smaller one is
the time of a call. Times are processor time of the thread, the median of many rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
import transformers as hf
import triton.runtime.jit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
from stretto.ops.op import Op

FAMILIES = ("bert", "gpt2", "llama", "t5", "vit")
FEW, MANY, WIDTH, TOKENS, ROUNDS = 2, 10, 32, 8, 60
launches: Counter[str] = Counter()


class Empty:
    """A kernel that is launched and does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **options: Any) -> None:
        launches[self.name] += 1


def launch_on_cpu() -> None:
    """From now on ops run on a CPU what they run on a GPU, with empty kernels."""
    kernel: Any = triton.runtime.jit.JITFunction
    kernel.__getitem__ = lambda self, grid: Empty(self.fn.__name__)
    for name, module in list(sys.modules.items()):
        if name.startswith("stretto.ops."):
            if hasattr(module, "runs_kernels"):
                vars(module)["runs_kernels"] = lambda x: True
            for op in (value for value in vars(module).values() if isinstance(value, Op)):
                for table in (op.bodies, op.functions):
                    table.update({"cpu": table["cuda"]} if table else {})


def build(family: str, layers: int) -> nn.Module:
    theirs: Any = hf
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 2, "vocab_size": 64}
    sizes |= {"intermediate_size": 2 * WIDTH}
    short = {"n_embd": WIDTH, "n_layer": layers, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    pairs = {"d_model": WIDTH, "d_ff": 2 * WIDTH, "num_heads": 2, "d_kv": WIDTH // 2, "decoder_start_token_id": 0}
    pairs |= {"num_layers": layers // 2, "num_decoder_layers": layers // 2, "vocab_size": 64}
    made = {
        "bert": lambda: theirs.BertForMaskedLM(theirs.BertConfig(**sizes)),
        "gpt2": lambda: theirs.GPT2LMHeadModel(theirs.GPT2Config(**short)),
        "llama": lambda: theirs.LlamaForCausalLM(theirs.LlamaConfig(**sizes)),
        "t5": lambda: theirs.T5ForConditionalGeneration(theirs.T5Config(**pairs)),
        "vit": lambda: theirs.ViTForImageClassification(theirs.ViTConfig(**sizes, image_size=16, patch_size=8)),
    }
    torch.manual_seed(0)
    model: nn.Module = made[family]()
    return model.train()


def draw_batch(family: str) -> dict[str, Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}
    ids = torch.randint(4, 64, (2, TOKENS))
    return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()


def measure(models: dict[str, nn.Module], batch: dict[str, Tensor]) -> dict[str, float]:
    """Microseconds of a pass, for each model."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(ROUNDS + 5):
        for name, model in models.items():
            begin = time.thread_time()
            train(model, batch)
            times[name] += [] if number < 5 else [1e6 * (time.thread_time() - begin)]
            model.zero_grad()
    return {name: statistics.median(found) for name, found in times.items()}


class Counting(TorchDispatchMode):
    """Counts operations of torch that are no views. Ours go through its dispatcher meanwhile, and are left out."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(word in str(func) for word in ("view", "stretto", "aten.t.", "transpose", "detach"))
        return func(*args, **(kwargs or {}))


def count_launches(model: nn.Module, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Launches of our kernels in a pass, and operations of torch, which a product inside of an op is not."""
    launches.clear()
    model.zero_grad()
    train(model, batch)
    number = launches.total()
    model.zero_grad()
    with Counting() as mode:
        train(model, batch)
    return number, mode.count


def build_all(family: str) -> dict[str, nn.Module]:
    models = {f"theirs {layers}": build(family, layers) for layers in (FEW, MANY)}
    return models | {f"ours {layers}": stretto.accelerate(build(family, layers)) for layers in (FEW, MANY)}


def report(family: str, models: dict[str, nn.Module], batch: dict[str, Tensor]) -> None:
    found = measure(models, batch)
    cells = []
    for who in ("theirs", "ours"):
        few, many = found[f"{who} {FEW}"], found[f"{who} {MANY}"]
        (few_own, few_ops), (many_own, many_ops) = (count_launches(models[f"{who} {n}"], batch) for n in (FEW, MANY))
        layer, steps = (many - few) / (MANY - FEW), MANY - FEW
        cells.append((layer, few - FEW * layer, (many_own - few_own) / steps, (many_ops - few_ops) / steps))
    (theirs, call, _, ops), (ours, our_call, kernels, our_ops) = cells
    print(
        f"{family:8} {theirs:8.0f} {ours:8.0f} {ours / theirs:6.2f} {call:10.0f} {our_call:8.0f} {ops:10.1f} "
        f"{our_ops:6.1f} + {kernels:.1f}",
        flush=True,
    )


def profile(family: str) -> None:
    models, batch = build_all(family), draw_batch(family)
    launch_on_cpu()
    for who in ("theirs", "ours"):
        train(models[f"{who} {MANY}"], batch)
        profiler = cProfile.Profile()
        with profiler:
            for _ in range(20):
                train(models[f"{who} {MANY}"], batch)
        print(f"{family}, {who}: 20 passes of {MANY} layers")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's time of an eager layer.")
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--profile", default="", metavar="FAMILY")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        return profile(options.profile)
    print(f"torch {torch.__version__}, transformers {hf.__version__}; microseconds")
    print(f"{'':8} {'a layer':>17} {'':6} {'a call':>19} {'operations of a layer':>24}")
    print(f"{'':8} {'theirs':>8} {'ours':>8} {'ratio':>6} {'theirs':>10} {'ours':>8} {'theirs':>10} ours + kernels")
    prepared = {family: (build_all(family), draw_batch(family)) for family in options.families}
    launch_on_cpu()
    for family, (models, batch) in prepared.items():
        report(family, models, batch)
    return None


if __name__ == "__main__":
    main()
