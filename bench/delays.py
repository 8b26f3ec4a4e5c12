"""What delayed gradients cost in loss: the pipeline's arithmetic without a pipeline, in one process, on real text.

    python -m bench.delays gpt2-small --data runs/python --out runs/delays                  on a GPU, as time_to_loss
    python -m bench.delays demo --set data.train=valid.txt --set data.eval=test.txt ...     small, on a CPU

Each update computes all gradients by an ordinary pass; those of module k wait in a queue and are applied as many
updates later as stretto/parallel/schedule.py says, by AdamW with its own moments, clipped by module. A module without a
gradient yet is passed over. So losses are those of real processes, whose times `simulate` predicts. Variants are words
joined by `+`:

    1f1b, 2bw, pipelined, ouroboros  the order; 1f1b is synchronous training, with gradients clipped by module too
    warmup    the first `--warmup` updates are synchronous
    predict   passes use w - delay lr mhat / (sqrt(vhat) + eps): the weights that AdamW is heading for
              (arXiv 2003.11666); those of a tied embedding separately for its two uses
    discount  the rate of module k is lr / (1 + delay)^p, where p falls from 1 to 0 in `--warmup` updates: the first
              rule of PipeMare (arXiv 1910.05124)
    mean      the two gradients of a tied embedding are averaged; else they are summed

Finished runs in `out` are not repeated: the same command goes on after an interruption.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from bench.time_to_loss import RECIPES, use_data
from stretto import files
from stretto.batch import Batch
from stretto.build import Trainable, build
from stretto.config import Config, dump_config, load_config
from stretto.data import Data, open_data
from stretto.errors import ConfigError, StrettoError
from stretto.evaluate import evaluate
from stretto.mesh import Mesh
from stretto.model import Chain
from stretto.optim import learning_rate
from stretto.parallel.schedule import Schedule, balance
from stretto.parallel.simulate import Module, Traffic, simulate
from stretto.precision import autocast
from stretto.recipes import find_recipe
from stretto.runtime import Runtime, choose_device, describe_environment
from stretto.techniques.technique import At
from stretto.train import complete

TABLE, OUTPUT = "embedding.token.weight", "the table as the output layer uses it"
ORDERS, CHANGES = ("1f1b", "2bw", "pipelined", "ouroboros"), ("warmup", "predict", "discount", "mean")
DEFAULT = (
    "1f1b,pipelined,pipelined+warmup,pipelined+warmup+predict,pipelined+discount,ouroboros+warmup+predict,2bw,"
    "2bw+predict,2bw+warmup+predict"
)
NUM_EVALS = 10  # in a run

Values = dict[str, Tensor]  # by the name of a parameter, and OUTPUT


@dataclass(frozen=True)
class Variant:
    order: str
    modules: int
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join([f"{self.order} K={self.modules}", *self.changes])


def read_variants(text: str, modules: Sequence[int]) -> list[Variant]:
    """All variants for each number of modules, the synchronous one first."""
    found = []
    for count, words in product(modules, dict.fromkeys(["1f1b", *text.split(",")])):
        order, *changes = words.split("+")
        if order not in ORDERS or not set(changes) <= set(CHANGES):
            raise ConfigError(f"--variants {words}: one of {', '.join(ORDERS)}, then + and {', '.join(CHANGES)}")
        found.append(Variant(order, count, tuple(changes)))
    return found


def make_schedule(variant: Variant, first: int = 0) -> Schedule:
    """The order in linear placement; with micro-batches where it has some by its nature."""
    size = 2 * variant.modules if variant.order in ("1f1b", "2bw") else 1
    return Schedule(variant.order, variant.modules, micro_batches=size, first=first)


def find_speed(variant: Variant) -> float:
    """How many times as fast as one device the order is, with equal modules, a tied embedding and free messages."""
    schedule, module = make_schedule(variant), Module(1.0, 2.0)
    devices = simulate(schedule, [module] * schedule.modules, Traffic(tied=True))
    return sum(device.utilisation for device in devices)


class Delayed:
    """Training whose gradients come late."""

    def __init__(self, parts: Trainable, config: Config, variant: Variant, warmup: int) -> None:
        model = parts.model
        if not isinstance(model, Chain) or any(p.dtype != torch.float32 for p in model.parameters()):
            raise ConfigError("gradients are delayed in models of one stack with fp32 weights")
        self.parts, self.config, self.changes, self.warmup = parts, config, variant.changes, warmup
        self.model: Any = model
        first = warmup if "warmup" in variant.changes else 0
        self.schedule = make_schedule(variant, first)
        self.parameters = dict(model.named_parameters())
        self.owner = {name: self._find_module(name) for name in self.parameters}
        optim, groups = config.optim, []
        for module, decays in product(range(variant.modules), (True, False)):
            own = [p for name, p in self.parameters.items() if self.owner[name] == module and (p.ndim >= 2) == decays]
            groups.append({"params": own, "weight_decay": optim.weight_decay * decays, "module": module})
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(groups, optim.lr, (optim.beta1, optim.beta2), optim.eps, fused=True)
        self.gradients = dict[int, Values]()  # by the update whose passes made them
        self.versions = deque([self._look_ahead(0)], maxlen=2)  # what passes use after the last two updates

    def _find_module(self, name: str) -> int:
        last, stack = self.schedule.modules - 1, f"{self.model.stack_name}.blocks."
        if name.startswith("embedding."):
            return 0
        if not name.startswith(stack):
            return last
        number, cuts = int(name.removeprefix(stack).split(".")[0]), balance([1.0] * self.config.model.layers, last + 1)
        return next(module for module, blocks in enumerate(cuts) if number in blocks)

    def _rate(self, update: int, module: int) -> float:
        rate, since = learning_rate(self.config.optim, update, self.config.train.steps), update - self.schedule.first
        if "discount" not in self.changes or since < 0:
            return rate
        power = 1 - min(since / max(self.warmup, 1), 1.0)
        return rate / (1 + self.schedule.find_delay(module)) ** power

    @torch.no_grad()
    def _look_ahead(self, update: int) -> Values:
        """The weights that the passes of the next update may use, after so many updates."""

        def predict(name: str, updates: int) -> Tensor:
            weight = self.parameters[name]
            state, (beta1, beta2) = self.optimizer.state[weight], self.optimizer.defaults["betas"]
            if not state or not updates or update < self.schedule.first or "predict" not in self.changes:
                return weight.clone()
            step = state["step"]
            mean, square = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
            rate = self._rate(min(update, self.config.train.steps - 1), self.owner[name])
            return weight - updates * rate * mean / (square.sqrt() + self.optimizer.defaults["eps"])

        schedule = self.schedule
        values = {name: predict(name, schedule.find_delay(self.owner[name])) for name in self.parameters}
        return values | {OUTPUT: predict(TABLE, schedule.late or schedule.find_delay(schedule.modules - 1))}

    @contextmanager
    def _weights(self, values: Values) -> Iterator[None]:
        """The model has other weights for a while."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(values[name])
        yield
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(own[name])

    def run(self, update: int, batches: Sequence[tuple[int, Batch]]) -> None:
        """One update: passes, and what of all gradients is due."""
        synchronous, schedule = update < self.schedule.first, self.schedule
        version = update if synchronous else schedule.find_version(update)
        self.gradients[update] = self._compute_gradients(update, self.versions[version - update - 1], batches)

        def find(name: str, updates: int) -> Tensor | None:
            if synchronous or update - updates >= schedule.first:
                return self.gradients[update - (0 if synchronous else updates)].get(name)
            return None

        for name, p in self.parameters.items():
            uses = [find(name, schedule.find_wait(self.owner[name]))]
            if name == TABLE:
                uses.append(find(OUTPUT, schedule.late))
            there = [use for use in uses if use is not None]
            p.grad = sum(there[1:], there[0].clone()) if there else None
            if name == TABLE and "mean" in self.changes and p.grad is not None and self.model.cfg.tied:
                p.grad /= 2
        for module in range(schedule.modules):
            own = [p for name, p in self.parameters.items() if self.owner[name] == module]
            nn.utils.clip_grad_norm_(own, self.config.optim.clip or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(update, group["module"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.gradients.pop(update - schedule.modules, None)
        self.versions.append(self._look_ahead(update + 1))

    def _compute_gradients(self, update: int, values: Values, batches: Sequence[tuple[int, Batch]]) -> Values:
        """The gradients of all modules by ordinary passes; a tied table has one for each of its uses."""
        step, labels = self.parts.update, max(sum(batch.counts.labels for _, batch in batches), 1)
        output = values[OUTPUT].detach().requires_grad_()  # a version may be used twice
        self.parts.techniques.begin(update, 1 / len(batches), None)
        with self._weights(values):
            for number, batch in batches:
                step.seed_for(number)
                with autocast(step.precision, step.device):
                    features = self.model.features(batch)
                    loss = self.model.head.loss(features, output, batch.labels, self.model.cfg.label_smoothing)
                (loss / labels).backward()
        self.parts.techniques.end(update)
        found = {name: p.grad for name, p in self.parameters.items()} | {OUTPUT: output.grad}
        self.optimizer.zero_grad()
        return {name: gradient for name, gradient in found.items() if gradient is not None}


def train(config: Config, data: Data, variant: Variant, warmup: int, rt: Runtime) -> dict[str, Any]:
    """The evaluation losses of one run."""
    parts, total = build(config, rt, Mesh()), config.train.steps
    delayed, size = Delayed(parts, config, variant, warmup), config.train.micro_batches
    curve, begin = dict[int, float](), time.perf_counter()
    for update in range(total):
        numbers = range(update * size, (update + 1) * size)
        batches = [(i, parts.prepare(data.train_batch(i), At(update, i)).to(rt.device)) for i in numbers]
        delayed.run(update, batches)
        if (update + 1) % max(total // NUM_EVALS, 1) == 0 or update + 1 == total:
            scores = evaluate(
                parts.model, parts.update.precision, data, config.train.eval_batches, rt, Mesh(), parts.techniques
            )
            curve[update + 1] = scores["eval_loss"]
    return {"config": dump_config(config), "warmup": warmup, "curve": curve, "wall_s": time.perf_counter() - begin}


def make_table(variants: Sequence[Variant], results: dict[str, dict[str, Any]], seeds: int) -> list[str]:
    """Final losses by seed, and what they are above synchronous training with the same seed and modules."""

    def find(name: str) -> list[float]:
        return [list(results[f"{name}, {seed}"]["curve"].values())[-1] for seed in range(seeds)]

    rows = [
        "| variant | simulated speed-up | loss by seed | mean | gap by seed | mean |",
        "|---|---:|---|---:|---|---:|",
    ]
    for variant in variants:
        losses = find(variant.name)
        gaps = [a - b for a, b in zip(losses, find(replace(variant, order="1f1b", changes=()).name), strict=True)]
        each, above = (" ".join(f"{value:{sign}.4f}" for value in some) for some, sign in ((losses, ""), (gaps, "+")))
        means = f"{each} | {statistics.fmean(losses):.4f} | {above} | {statistics.fmean(gaps):+.4f}"
        rows.append(f"| {variant.name} | {find_speed(variant):.2f} | {means} |")
    return rows


def main(
    recipe: Annotated[str, typer.Argument(help="gpt2-small, bert-base, a TOML file or a shipped recipe")],
    data: Annotated[Path | None, typer.Option(help="what `bench.time_to_loss prepare` wrote")] = None,
    out: Annotated[Path, typer.Option(help="for results, and tokens where --data is not given")] = Path("runs/delays"),
    variants: Annotated[str, typer.Option(help="with commas between them")] = DEFAULT,
    modules: Annotated[str, typer.Option(help="with commas between them")] = "2,4",
    seeds: Annotated[int, typer.Option(min=1, help="how many")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="updates, of `warmup` and `discount`")] = 300,
    override: Annotated[list[str], typer.Option("--set", help="override a key: section.key=value")] = [],  # noqa: B006
) -> None:
    path = RECIPES / f"{recipe}.toml"
    rt = Runtime(choose_device())
    needed = ["train.graphs=off", *(["techniques.fused.weights=fp32"] if rt.device.type == "cuda" else [])]
    config = load_config(path if path.exists() else find_recipe(recipe), [*override, *needed])
    config = config if data is None else use_data(config, data)
    if not config.data.cache:
        config = replace(config, data=replace(config.data, cache=str(out)))
    chosen, store = read_variants(variants, [int(n) for n in modules.split(",")]), out / "delays.json"
    results = json.loads(store.read_text(encoding="utf-8"))["runs"] if store.exists() else {}
    for seed, variant in product(range(seeds), chosen):
        key, seeded = f"{variant.name}, {seed}", replace(config, run=replace(config.run, seed=seed))
        text = open_data(seeded.data, seed=seed, folder=out, image_size=0)
        seeded = complete(seeded, text, Mesh())
        if key in results and (results[key]["config"], results[key]["warmup"]) != (dump_config(seeded), warmup):
            raise ConfigError(f"{store} has runs of another configuration: choose another --out")
        if key not in results:
            results[key] = train(seeded, text, variant, warmup, rt)
            files.write_text(store, json.dumps({"environment": describe_environment(rt), "runs": results}, indent=1))
            print(
                f"{key}: {list(results[key]['curve'].values())[-1]:.4f} in {results[key]['wall_s']:.0f} s", flush=True
            )
    print("\n".join(make_table(chosen, results, seeds)))


if __name__ == "__main__":
    try:
        typer.run(main)
    except StrettoError as error:
        print(f"delays: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
