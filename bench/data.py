"""How long the host takes to make a batch: a GPU whose steps are faster waits for it.

    python -m bench.data masked-lm
    python -m bench.data translation --set data.train=DATA/train --set data.eval=DATA/val

As in training with CUDA graphs, by one thread (images: on all cores): read, masked, packed and rounded to few shapes;
not yet on the device.
The first batch is not counted, nor is what comes before it, such as tokenising.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from stretto.buckets import to_bucket
from stretto.config import load_config
from stretto.data import open_data
from stretto.errors import StrettoError
from stretto.flops import tokens_per_sample
from stretto.recipes import find_recipe


def main(
    recipe: Annotated[str, typer.Argument(help="a TOML file or a shipped recipe")],
    batches: Annotated[int, typer.Option(min=1, help="how many to time")] = 100,
    override: Annotated[list[str], typer.Option("--set", help="override a key: section.key=value")] = [],  # noqa: B006
) -> None:
    config = load_config(find_recipe(recipe), override)
    with tempfile.TemporaryDirectory() as folder:
        data = open_data(config.data, seed=config.run.seed, folder=Path(folder), image_size=config.model.image_size)
        print(data.describe())
        to_bucket(data.train_batch(0))
        seconds, tokens = [], 0
        for i in range(1, batches + 1):
            begin = time.perf_counter()
            batch = to_bucket(data.train_batch(i))
            seconds.append(time.perf_counter() - begin)
            tokens += batch.counts.tokens * tokens_per_sample(config.model)
    print(
        f"{config.data.task}: {tokens / batches:,.0f} tokens a batch; {1e3 * statistics.fmean(seconds):.2f} ms to make,"
        f" at most {1e3 * max(seconds):.2f}: {tokens / sum(seconds):,.0f} tokens/s"
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except StrettoError as error:
        print(f"data: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
