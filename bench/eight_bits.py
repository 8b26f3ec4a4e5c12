"""Trains a small model in emulated numbers of 8 bits, as in 2018 (emulated.py), next to fp32.

    python -m bench.eight_bits RECIPE [--set section.key=value ...] [--steps 40] [--lr 0.1] [--mantissa 9] [--chunk 64]

prints the loss in fp32, with sums in chunks, and with sums in one go. Sums of T tokens in M mantissa bits stop growing
after 2^(M + 1) equal terms: with --mantissa 5, batches of 512 tokens are to their sums what 8,192 are to (1,6,9).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from bench.emulated import Emulated, Momentum, set_products, train
from stretto.build import build
from stretto.config import Config, load_config
from stretto.data import open_data
from stretto.mesh import Mesh
from stretto.model import sites
from stretto.numerics.formats import Format
from stretto.recipes import find_recipe
from stretto.runtime import Runtime
from stretto.train import complete

FIXED = ("run.device=cpu", "train.precision=fp32", "techniques.fused=true", "model.dropout=0.0")


def run(config: Config, folder: Path, product: Emulated | None, steps: int, lr: float) -> list[float]:
    """Returns the losses of a run; without a product, in fp32. `folder` is for token files."""
    data = open_data(config.data, seed=config.run.seed, folder=folder, image_size=config.model.image_size)
    model = build(complete(config, data, Mesh()), Runtime(torch.device("cpu")), Mesh()).model.train()
    if product is not None:
        set_products(model, sites(model)["block"], product)
    rule = Momentum(lr, None if product is None else product.sums)
    return train(model, (data.train_batch(i) for i in range(steps)), rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--mantissa", type=int, default=9)
    parser.add_argument("--chunk", type=int, default=64)
    args = parser.parse_args()
    config, sums = load_config(find_recipe(args.recipe), [*FIXED, *args.set]), Format(6, args.mantissa)
    ways = {
        "fp32": None,
        f"8 bits, chunks of {args.chunk}": Emulated(sums=sums, chunk=args.chunk),
        "8 bits, in one go": Emulated(sums=sums, chunk=0),
    }
    print(f"sums of (1,6,{args.mantissa}); mean loss of steps 1 and of the last five of {args.steps}")
    for name, product in ways.items():
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            losses = run(config, Path(folder), product, args.steps, args.lr)
        print(f"{name:24} {losses[0]:.4f} {sum(losses[-5:]) / 5:.4f}   {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
