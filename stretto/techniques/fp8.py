"""Matrix products in 8 bits, where they are faster, watched while they run.

IBM's training in 8 bits (arXiv 1812.08011) stands on sums in chunks; on Hopper that is the promotion of partial sums
to fp32, which no product here goes without. A linear layer of a block is given an object for its products (`Eight`,
ops/fp8.py), which rounds factors to 8 bits and keeps these bytes for the backward pass. Weights are rounded once an
update, in `begin`; evaluation multiplies as without. Weights, gradients, moments and all else stay as they are.

What may be the largest number of a factor is known before it exists (`Bound`, ops/round8.py): from what all processes
have seen in the updates before. So no tensor is read only for its maximum, and the bounds are part of the state. The
first update has none: it takes maxima, and is launched.

Which layers have it is a rule, so that a resumed run and any number of processes choose alike. For T tokens and a
weight [O, C], with the rates of RATES (estimate.py):

    saved   6 T O C (1 / bf16 - 1 / fp8)                      three products
    spent   6 bytes each for x, dout and the weight / memory   read for a scale, read and written both ways

It pays where the first is more. The first and the last block of a stack stay as they are; and where no layer pays, or
no GPU has such products, nothing changes, to the bit. `sites = "all"` takes every layer of blocks, on any device: on a
CPU by the definition of the products, which is slow. What was chosen is part of the state of a run. The batches of a
Hugging Face model are not known beforehand: there each layer has the number of tokens from which on it pays, and
multiplies as usual in batches with fewer.

Every LOOK updates an eighth of the layers is watched: their gradients are compared with those of factors that are not
rounded. A layer whose gradients turn too far, on any process, multiplies as usual from then on; that is part of the
state too, and the log has a line. CUDA graphs stay: an update that is watched is launched.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.config import KERNELS, Fp8Config
from stretto.estimate import RATES
from stretto.model import build_model, sites
from stretto.ops.fp8 import FACTORS, Eight, can_multiply
from stretto.ops.products import Product
from stretto.ops.round8 import PARTS, Bound, Bounds
from stretto.ops.weights8 import Weights
from stretto.techniques.foreign import Foreign, Layer
from stretto.techniques.technique import Context, Sites, Technique

LOOK = 100  # updates between two looks
GROUPS = 8  # of layers; one of them is watched in a look
LEAST = 0.98  # cosine of a gradient; rounding to 3 and 2 bits alone gives 0.998
MEASURED = ("dx", "dweight", "most x", "most dout", "underflow x", "underflow dout", "saturated x", "saturated dout")


class Fp8(Technique):
    name, exact = "fp8", False
    cfg: Fp8Config

    def __init__(self, cfg: Fp8Config, context: Context) -> None:
        super().__init__(cfg, context)
        self.model: nn.Module | None = None
        self.products: dict[str, Eight] = {}  # of layers, by their names
        self.layers: Mapping[str, Layer] = {}  # those of a model of others
        self.ended = False  # an update is over
        self.bounds: Bounds | None = None  # of the FACTORS of each layer, for the recipe `tensor`
        self.weights = Weights()
        self.share: float | None = None  # of a micro-batch in the loss, which gradients are in proportion to
        self.over: dict[str, float] = {}  # what was seen over its bound at the most, by factor, since the last metrics
        self.watched: list[str] = []
        self.seen: dict[str, float] = {}  # the most that was measured since the last metrics
        self.notes: list[str] = []

    def check(self, others: Sequence[Technique]) -> list[str]:
        cfg, reasons = self.context.model, []
        if cfg is not None and not self._choose(model := build_model(cfg), sites(model)["block"]):
            return []
        if not any(other.asks_products for other in others):
            reasons.append(f"plain modules multiply as torch does: set {KERNELS} to true")
        if cfg is None:
            return reasons
        if self.context.precision != "bf16":
            reasons.append(
                f"8 bits take the place of bf16: set train.precision to 'bf16', not {self.context.precision!r}"
            )
        if self.context.compiled:
            reasons.append("torch.compile does not know its products: set train.compile to false")
        return reasons

    def why_not_by_module(self) -> str:
        return "weights are rounded once an update, and passes use older ones here"

    def _find_problem(self) -> str:
        """Says why nothing is done on this device; empty: something may be."""
        device = self.context.device
        if self.cfg.sites == "all":
            return ""
        if device.type != "cuda":
            return "there is no GPU"
        if torch.cuda.get_device_capability(device) < (8, 9):
            return "this GPU has no 8-bit products"
        return ""

    def _choose(self, model: nn.Module, blocks: Sequence[str]) -> list[str]:
        """The layers whose products are done in 8 bits."""
        if self._find_problem():
            return []
        layers = find_layers(model, blocks)
        if self.cfg.sites == "auto":
            stacks = [name.rpartition(".")[0] for name in blocks]
            ends = {blocks[i] for i, stack in enumerate(stacks) if i in (stacks.index(stack), rindex(stacks, stack))}
            inside = {name: layer for name, layer in layers.items() if split_name(name)[0] not in ends}
            layers = {name: layer for name, layer in inside.items() if self._pays(model, name, layer)}
        chosen = [name for name, layer in layers.items() if can_multiply(self.cfg.recipe, *layer.weight.shape)]
        head = find_head_weight(model)
        if self.cfg.head and head is not None and can_multiply(self.cfg.recipe, *head.shape):
            chosen.append("head")
        return chosen

    def _pays(self, model: nn.Module, name: str, layer: nn.Linear) -> bool:
        load, block = self.context.load, model.get_submodule(split_name(name)[0])
        tokens = 0 if load is None else load.count_tokens(getattr(block, "cross", None) is not None)
        return tokens > RATES.find_least(layer.out_features, layer.in_features)

    def apply(self, model: nn.Module, sites: Sites) -> None:
        self.model = model
        self._install(self._choose(model, sites["block"]))

    def _install(self, names: Sequence[str]) -> None:
        assert self.model is not None
        for name in self.products:
            del self.model.get_submodule(name).product
        self.bounds, self.weights = None, Weights()
        self.products = {name: Eight(self.cfg.recipe) for name in names}
        for name, product in self.products.items():
            self.model.get_submodule(name).product = product  # type: ignore[assignment]

    def attach(self, model: Foreign) -> None:
        model.give_products(self.name, self._choose_outside)

    def _choose_outside(self, layers: Mapping[str, Layer]) -> Mapping[str, Product | str]:
        chosen = {name: self._judge(layer) for name, layer in layers.items()}
        self.layers = layers
        self.products = {name: product for name, product in chosen.items() if isinstance(product, Eight)}
        return chosen

    def _judge(self, layer: Layer) -> Eight | str:
        """An object for the products of a layer of others, or why it has none."""
        if problem := self._find_problem():
            return problem
        if layer.place == "head" and not self.cfg.head:
            return "the output layer stays in bf16 unless fp8's option `head` is on"
        if not can_multiply(self.cfg.recipe, *layer.shape):
            return f"{list(layer.shape)}: 8-bit products need sides that are multiples of {PARTS[self.cfg.recipe]}"
        least: float = 1
        if self.cfg.sites == "auto":
            if layer.place == "end":
                return "the first and the last layer stay in bf16"
            least = RATES.find_least(*layer.shape)
            if least == inf:
                return f"{list(layer.shape)} is too small to gain by it with any number of tokens"
        return Eight(self.cfg.recipe, least=least, transposed=layer.transposed)

    def _open_bounds(self) -> Bounds | None:
        if self.bounds is None and self.products and self.cfg.recipe == "tensor":
            self.bounds = Bounds([*FACTORS.values()] * len(self.products), self.context.device)
            each = iter(self.bounds.each)
            for product in self.products.values():
                product.bounds = {factor: next(each) for factor in FACTORS}
        return self.bounds

    def _list_bounds(self) -> list[Bound]:
        live = (product for product in self.products.values() if product.on)
        return [bound for product in live for bound in product.bounds.values()]

    def begin(self, step: int, share: float, scaler: torch.amp.GradScaler | None) -> None:
        """Weights that are split over processes are rounded where they are gathered, by each pass."""
        live = {name: product for name, product in self.products.items() if product.on}
        found = ((product, self._find_weight(name)) for name, product in live.items())
        here = [(product, weight) for product, weight in found if weight is not None]
        if (all_bounds := self._open_bounds()) is not None:
            if self.share not in (None, share):  # another number of processes, say
                factors = [share / self.share if factor == "dout" else 1.0 for factor in FACTORS] * len(self.products)
                all_bounds.set([most * factor for most, factor in zip(all_bounds.get(), factors, strict=True)])
            self.share = share
            rooms, bounds = [p.take_room(w) for p, w in here], [p.bounds["weight"] for p, _ in here]
            self.weights.round([weight for _, weight in here], rooms, bounds)
        else:
            for product, weight in here:
                product.renew(weight)
        looks = step % LOOK == 0
        self.watched = [name for i, name in enumerate(live) if i % GROUPS == step // LOOK % GROUPS] if looks else []
        for name in self.watched:
            live[name].watched = True

    def _find_weight(self, name: str) -> Any:
        """The weight of a layer, as it is kept; None: it is in parts, which passes put together."""
        if name in self.layers:
            first, *others = self.layers[name].modules
            weight: Any = None if others else first.weight
        else:
            assert self.model is not None
            weight = find_head_weight(self.model) if name == "head" else self.model.get_submodule(name).weight
        return None if isinstance(weight, DTensor) else weight

    def end(self, step: int) -> None:
        """All processes go on with one bound. The host waits here for the device, if this was an update that was
        watched, or one without bounds."""
        if self.bounds is not None:
            if self.context.mesh.world > 1:
                dist.all_reduce(self.bounds.seen, dist.ReduceOp.MAX)
            self.bounds.renew()
            if any(bound.asked and not bound.known for bound in self._list_bounds()):
                self.bounds.set(self.bounds.get())
        self.ended = True
        if not self.watched:
            return
        zero = torch.zeros((), device=self.context.device)
        rows = [[self.products[name].seen.get(what, zero) for what in MEASURED] for name in self.watched]
        found = torch.stack([torch.stack([value.reshape(()) for value in row]) for row in rows])
        if self.context.mesh.world > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        for name, values in zip(self.watched, found.tolist(), strict=True):
            product, seen = self.products[name], dict(zip(MEASURED, values, strict=True))
            product.watched, product.seen = False, {}
            self.seen = {what: max(value, self.seen.get(what, 0.0)) for what, value in seen.items()}
            cosine = 1 - max(seen["dx"], seen["dweight"])
            if cosine < LEAST:
                product.on = False
                self.notes.append(
                    f"8 bits: {name} multiplies in bf16 from step {step + 1} on: the cosine of its gradients was"
                    f" {cosine:.4f}, below {LEAST}; of its input {seen['saturated x']:.2%} saturated and"
                    f" {seen['underflow x']:.2%} became zero, of its gradient {seen['saturated dout']:.2%} and"
                    f" {seen['underflow dout']:.2%}"
                )
        self.watched = []
        self._look_at_bounds()

    def _look_at_bounds(self) -> None:
        """What was beyond its bound in the updates since the last look."""
        places = [(name, factor) for name in self.products for factor in FACTORS]
        ratios = {} if self.bounds is None else dict(zip(places, self.bounds.take_over(), strict=True))
        for (_, factor), ratio in ratios.items():
            self.over[factor] = max(ratio, self.over.get(factor, 0.0))
        if (beyond := sum(ratio > 1 for ratio in ratios.values())) > 0:
            name, factor = max(ratios, key=lambda place: ratios[place])
            self.notes.append(
                f"8 bits: of {len(ratios)} factors {beyond} had numbers beyond their bounds since the last look, which"
                f" were clamped; the furthest was the {factor} of {name}, {ratios[name, factor]:.3g} times its bound"
            )

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def find_lost(self) -> list[str]:
        """The layers that went back to bf16."""
        return [name for name, product in self.products.items() if not product.on]

    def graph_key(self, step: int) -> Hashable:
        """What is watched is launched, and so is a first update, which takes maxima. A layer whose bounds have become
        known, or that went back, runs other kernels."""
        bounds = self._list_bounds()
        known = sum(bound.known for bound in bounds)
        first = bool(bounds) and not known and not self.ended
        return None if self.watched or first else (known, *self.find_lost())

    def metrics(self, num_batches: int) -> dict[str, float]:
        if not self.products:
            return {}
        seen, self.seen, over, self.over = self.seen, {}, self.over, {}
        values = {"fp8_layers": float(len(self.products) - len(self.find_lost()))}
        if seen:
            values["fp8_cosine"] = 1 - max(seen["dx"], seen["dweight"])
            values |= {f"fp8_over_{factor}": ratio for factor, ratio in over.items()}
            values |= {f"fp8_{what.replace(' ', '_')}": seen[what] for what in MEASURED[2:]}
        return values

    def state_dict(self) -> dict[str, Any]:
        bounds = {} if self.bounds is None else {"bounds": self.bounds.get(), "share": self.share}
        return {"layers": list(self.products), "lost": self.find_lost()} | bounds

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What a run has begun with it goes on with, also on a device for which the rule would choose otherwise."""
        if "layers" not in state:
            return
        if state["layers"] != list(self.products):
            self._install(state["layers"])
        for name in state["lost"]:
            self.products[name].on = False
        if "bounds" in state and (bounds := self._open_bounds()) is not None:
            bounds.set(state["bounds"])
            self.share = state["share"]

    def describe(self) -> str:
        if self.products:
            how = f"products of 8 bits ({self.cfg.recipe})"
            return f"{how} in {len(self.products)} layers: {', '.join(shorten(self.products))}"
        load = self.context.load
        tokens = 0 if load is None else load.tokens
        return (
            f"8 bits: off: {self._find_problem() or f'no product is large enough to gain by it, with {tokens} tokens'}"
        )


def find_layers(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers of blocks, but for those that read an encoder's output: all blocks multiply that at once."""
    inside = {f"{name}.{place}": layer for name in blocks for place, layer in model.get_submodule(name).named_modules()}
    return {name: layer for name, layer in inside.items() if isinstance(layer, nn.Linear) and not name.endswith(".kv")}


def rindex(values: Sequence[str], value: str) -> int:
    """The place of the last one that is equal."""
    return len(values) - 1 - list(reversed(values)).index(value)


def split_name(name: str) -> tuple[str, str]:
    """The block of a layer, and its place in it: the names of a part of the block and of a layer of that part."""
    block, part, layer = name.rsplit(".", 2)
    return block, f"{part}.{layer}"


def find_head_weight(model: nn.Module) -> Tensor | None:
    """Of an output layer that computes its loss in chunks; it may be the embedding's table."""
    head: Any = model.get_submodule("head")
    if not hasattr(head, "loss"):
        return None
    embedding: Any = model.get_submodule("embedding")
    return embedding.table if head.weight is None else head.weight


def shorten(names: Mapping[str, Any]) -> list[str]:
    """Each place once, with how many blocks have it."""
    places = [split_name(name)[1] if "." in name else name for name in names]
    return [f"{places.count(place)} {place}" for place in dict.fromkeys(places)]
