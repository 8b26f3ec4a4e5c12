"""Tempo's memory reduction: what the backward pass needs is kept in fewer bytes, or computed again.

Training keeps, for each token and block, what its gradients are computed from (memory.py counts it). Much of it says
the same twice. Tempo (arXiv 2210.10246) drops the second copy where the first one will do, and no product is computed
again for it; beyond that, each further byte costs time. This technique sets what each block keeps (`Keep`):

    norms    output   the backward pass of a norm reads what the norm gave, which the product behind it keeps anyway
    mlp      product  the activation is computed again, by the kernel that reads the product for its gradient
             input    the first product, too
    qkv      input    queries, keys and values are multiplied again, and attention is not
    blocks            the first blocks of each stack are computed again as a whole

All but the first give the same bits. A norm's output determines its normalised input, (y - bias) / weight, up to the
rounding of y: the gradient of the stream is as exact as before, and that of the norm's weight gets one rounding more.
A channel whose weight is near 0 has lost its input: every LOOK updates the weights are looked at, between two updates,
and a norm with such a channel keeps its input from then on. Which norms do is part of the state of a run.

In Hugging Face's models the linear layers around an activation may be separate modules: there the activation keeps its
slope in a byte, or a bit next to its output (`activations`, ops/coded_activation.py), which is not exact to the bit.

`memory` is a dial over all of this. From the bytes that each choice frees and the time that it costs, an exact search
finds the fastest combination, block by block, whose peak is within the given memory (dial.py). The times are a rule,
not measured, so that a resumed run chooses alike. What is chosen changes no number, but for the order in which the
gradient of an output layer is summed, and for what attention drops in blocks that are computed again as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stretto.config import KERNELS, LeanConfig
from stretto.dial import Choice, decide, find_problem, follow, read_options
from stretto.errors import ConfigError
from stretto.memory import Keep
from stretto.ops.residual import can_restore
from stretto.runtime import total_memory
from stretto.techniques.foreign import Foreign
from stretto.techniques.technique import Context, Sites, Technique

LOOK = 64  # updates between two looks at the weights of norms


class Lean(Technique):
    name, exact = "lean", True
    cfg: LeanConfig
    choice = Choice(0.0, ())  # what blocks keep

    def __init__(self, cfg: LeanConfig, context: Context) -> None:
        super().__init__(cfg, context)
        self.norms: Mapping[str, Any] = {}  # those whose backward pass may read their output, by name
        self.looked = False  # at the weights of these norms

    def check(self, others: Sequence[Technique]) -> list[str]:
        model, cfg, reasons = self.context.model, self.cfg, []
        again = [key for key in ("memory", "qkv", "blocks") if getattr(cfg, key) != getattr(LeanConfig(), key)]
        if not any(other.keeps_as_told for other in others):
            reasons.append(f"plain modules keep what torch keeps: set {KERNELS} to true")
        if model is None:
            way = "use gradient_checkpointing_enable() to compute layers of a Hugging Face model again"
            return [*reasons, f"{', '.join(again)}: for Stretto's own models; {way}"] if again else reasons
        if cfg.activations != LeanConfig().activations:
            reasons.append("activations: for Hugging Face's models; in Stretto's own, `mlp` says what an MLP keeps")
        if cfg.memory.endswith("%") and self.context.device.type != "cuda":
            reasons.append(f"memory = {cfg.memory!r} is a share of a GPU's memory, and there is none: name GiB")
        if cfg.blocks and (problem := find_problem(model, self.context.padded)):
            reasons.append(f"blocks: {problem}")
        if self.context.compiled and again:
            reasons.append(f"{', '.join(again)}: torch.compile cannot compute again: set train.compile to false")
        return reasons

    def _choose(self) -> Choice:
        model, cfg, needs, device = self.context.model, self.cfg, self.context.needs, self.context.device
        options = read_options(cfg, total_memory(device))
        if needs is None:
            assert model is not None
            return follow(model, options.keep, options.num_whole)
        try:
            return decide(needs, options, self.context.padded)
        except ValueError as error:
            raise ConfigError(f"{self.key}.memory = {cfg.memory!r}: {error}") from error

    def apply(self, model: nn.Module, sites: Sites) -> None:
        blocks, self.choice = sites["block"], self._choose()
        for name, keep in zip(blocks, self.choice.keeps, strict=True):
            model.get_submodule(name).keep = keep  # type: ignore[assignment]
        for head in map(model.get_submodule, sites["head"]):
            head.chunk = self.choice.chunk  # type: ignore[assignment]
        inside = [name for name in sites["norm"] if name.startswith(tuple(f"{block}." for block in blocks))]
        self._tell_norms({name: model.get_submodule(name) for name in inside})

    def attach(self, model: Foreign) -> None:
        activations = "input" if self.cfg.mlp == "activation" else self.cfg.activations
        model.keep_less(Keep(self.cfg.norms, self.cfg.mlp), activations, self._watch)

    def _watch(self, norms: Mapping[str, nn.Module]) -> None:
        self._tell_norms(norms)
        self.look()

    def _tell_norms(self, norms: Mapping[str, nn.Module]) -> None:
        self.norms = norms if self.cfg.norms == "output" else {}
        for norm in self.norms.values():
            norm.from_output = True

    def begin(self, step: int, share: float, scaler: torch.amp.GradScaler | None) -> None:
        """Looks at norms in the same updates whether a run was interrupted or not."""
        if step % LOOK == 0 or not self.looked:
            self.look()

    @torch.no_grad()
    def look(self) -> None:
        """The host waits here for the device, before anything of an update has begun."""
        self.looked = True
        norms = [norm for norm in self.norms.values() if norm.weight is not None]
        if not norms:
            return
        here = [norm for norm in norms if not norm.weight.is_meta]  # others are in other processes
        verdicts = {id(norm): can_restore(norm.weight, getattr(norm, "bias", None)) for norm in here}
        whole = {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in verdicts.items()}
        good = torch.stack([whole.get(id(norm), next(iter(whole.values())).new_ones(())) for norm in norms]).int()
        if len(here) < len(norms):
            dist.all_reduce(good, dist.ReduceOp.MIN)
        for norm, verdict in zip(norms, good.tolist(), strict=True):
            norm.from_output = bool(verdict)

    def graph_key(self, step: int) -> tuple[str, ...]:
        """A norm that has changed what it keeps runs other kernels."""
        return tuple(self.find_lost())

    def find_lost(self) -> list[str]:
        """The norms that keep their input since their output does not say what it was."""
        return [name for name, norm in self.norms.items() if not norm.from_output]

    def metrics(self, num_batches: int) -> dict[str, float]:
        lost = len(self.find_lost())
        return {"norms_keeping_input": float(lost)} if lost else {}

    def state_dict(self) -> dict[str, Any]:
        return {"lost": self.find_lost()} if self.norms else {}  # where none were told, none were looked at

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.norms.keys() & state.get("lost", []):
            self.norms[name].from_output = False
        self.looked = "lost" in state

    def describe(self) -> str:
        keeps = self.choice.keeps
        words = [f"{keeps.count(keep)} blocks keep {keep.describe()}" for keep in dict.fromkeys(keeps)]
        if self.context.needs is not None and keeps:
            words.append(f"predicted peak {self.context.needs.predict(self.choice).peak / 2**30:.2f} GiB")
        return "; ".join(words)
