"""The standardization loss: networks that learn to be normalised, and so have no norms once they are trained.

Every LayerNorm or RMSNorm gives way to a learned affine, which costs no sum over channels, and training asks for what
the norm would have enforced: a loss pulls the affine's result towards mean 0 and variance 1. The formula is in
ops/affine.py; it is that of Collins, Ballé and Shlens (arXiv 1903.00925), who had no Transformers. Three things are
ours: statistics of a token over its channels, which couple no examples and see no future; the affine in front, which
can rescale a residual stream that grows by design; and a weight that is a mean over sites and channels, so that it
means the same in models of other sizes. Branches begin small (`depth_init`): deep stacks then start near variance 1.

The loss acts in the backward pass alone: logs show the loss of the task. Its own value is measured and logged with each
evaluation. Padding and filler do not count. Parameters keep the names they have in norms, so checkpoints of one model
do load into the other, but it is not the same function: a run with norms is not resumed without.

It changes the mathematics, and is no substitute for norms where these are cheap: it is a safety net that lets networks
without norms train where they would diverge. What is gained is at inference: `fold` moves what is left into the linear
layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.batch import IGNORE, Layout, Share, find_real
from stretto.config import StandardizeConfig
from stretto.errors import CheckpointError
from stretto.model import EVERYTHING, AddingNorm, ClassHead, EncoderDecoder, LMHead, Model, Stack, build_model
from stretto.ops.affine import add_affine, standardization_loss
from stretto.ops.language import triton
from stretto.techniques.foreign import Foreign
from stretto.techniques.technique import SAY_STEPS, Sites, Technique

BRANCH_ENDS = ("attention.out.weight", "cross.out.weight", "mlp.down.weight")
Find = Callable[..., tuple[Layout, int]]


def _find_block_tokens(x: Tensor, layout: Layout, *others: Any, **named: Any) -> tuple[Layout, int]:
    """A block may work on a part of the batch (batch.Share)."""
    share = next((value for value in (*others, *named.values()) if isinstance(value, Share)), EVERYTHING)
    subset = share.part.subset
    return (layout, len(x)) if subset is None else (subset.layout, len(subset.tokens))


# Role -> the layout that its call is about, and the number of its tokens, from the arguments
TOKENS: dict[str, Find] = {
    "block": _find_block_tokens,
    "stack": lambda x, positions, layout, *others, **named: (layout, len(x)),
    "embedding": lambda inputs, *others, **named: (inputs.layout, len(inputs.ids)),
}


@dataclass
class Pressure:
    """What pulls the sites of a model towards mean 0 and variance 1: one for all of them (see ops/affine.py)."""

    num_channels: int  # of all sites together, which the loss is a mean of
    axis: str
    stride: int
    keeps_affine: bool = True  # the scale and shift of a norm stay
    factor: Tensor | None = None  # on the device, where recorded steps read it; None: nothing is pulled
    known: tuple[Layout, Tensor] | None = None  # the last layout, and its rows
    values: list[Tensor] | None = None  # the loss of each batch that was evaluated, without its weight; None: not kept

    def press(self, weight: float, device: torch.device, scaler: torch.amp.GradScaler | None) -> None:
        """Sets the weight of the loss in the next backward passes, on the device: recorded steps read it there."""
        if self.factor is None or self.factor.device != device:
            self.factor, self.values = torch.zeros((), device=device), []
        self.factor.fill_(weight / self.num_channels)
        if scaler is not None and scaler.is_enabled():
            self.factor.copy_(scaler.scale(self.factor))

    def weigh(self, real: Tensor) -> Tensor:
        """Weights of tokens in the loss, fp32 [T], which sum to 1: one in `stride` of those that are real counts."""
        counts = real & (torch.arange(len(real), device=real.device) % self.stride == 0)
        return counts / counts.sum().clamp(min=1)

    def add(
        self,
        branch: Tensor | None,
        x: Tensor,
        branch_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        p: float,
        key: Tensor | None,
        post: bool,
        rows: Tensor | None,
        from_output: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, factor = (None, None) if rows is None or self.factor is None else (rows, self.factor)
        parts = (branch, x, branch_bias, weight, bias, p, key, post)
        return add_affine(*parts, rows, factor, self.stride, self.axis, from_output=from_output)

    def measure(self, y: Tensor, rows: Tensor) -> None:
        """Adds the loss of a site in an evaluation to that of its batch."""
        if self.values:
            self.values[-1] += standardization_loss(y, rows, self.axis) / self.num_channels

    def weigh_layout(self, layout: Layout, num_tokens: int) -> Tensor:
        """The same for all blocks of a stack, so it is computed for the first."""
        if self.known is None or self.known[0] is not layout:
            self.known = layout, self.weigh(find_real(layout, num_tokens))
        return self.known[1]


class Affine(AddingNorm):
    """weight * x + bias where a norm was, of the same names; without parameters, x itself."""

    rows: Tensor | None = None  # weights of the tokens of the next input in the loss, [T]; None: nothing is measured

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None, pressure: Pressure) -> None:
        super().__init__()
        self.weight, self.bias, self.pressure = weight, bias, pressure

    def forward(self, x: Tensor) -> Tensor:
        return self.add(None, x, None, 0.0, None)[0]

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
        parts = (branch, x, branch_bias, self.weight, self.bias, p, key, post)
        y, stream = self.pressure.add(*parts, self.rows if self.training else None, from_output)
        if not self.training and self.rows is not None:
            self.pressure.measure(y, self.rows)
        return y, stream


class Standardize(Technique):
    name, exact, changes_function = "standardize", False, True
    cfg: StandardizeConfig
    pressure: Pressure

    def check(self, others: Sequence[Technique]) -> list[str]:
        reasons, model = [], self.context.model
        if self.context.device.type == "cuda" and triton is None:
            reasons.append("its kernels need Triton: pip install triton")
        if model is not None and model.norm == "none":
            reasons.append("model.norm = 'none' leaves it nothing to replace: set it to 'layernorm' or 'rmsnorm'")
        if self.cfg.axis != "token" and any(other.splits_sequences for other in others):
            reasons.append(
                f"axis = {self.cfg.axis!r} needs statistics over tokens of other processes: set it to 'token'"
            )
        return reasons

    def why_not_by_module(self) -> str:
        return "its loss is a mean over the norms of the whole model, and a process has some of them only"

    def apply(self, model: nn.Module, sites: Sites) -> None:
        norms: list[Any] = [model.get_submodule(name) for name in sites["norm"]]
        cfg, num_channels = self.cfg, sum(norm.weight.numel() for norm in norms)
        self.pressure = pressure = Pressure(num_channels, cfg.axis, cfg.stride)
        for name, norm in zip(sites["norm"], norms, strict=True):
            weight, bias = (getattr(norm, key, None) if cfg.affine else None for key in ("weight", "bias"))
            model.set_submodule(name, Affine(weight, bias, pressure))
        for role, find in TOKENS.items():
            for module in map(model.get_submodule, sites[role]):
                if _sites_of(module):
                    module.register_forward_pre_hook(partial(_note_tokens, find), with_kwargs=True)
        model.register_forward_pre_hook(partial(_begin_batch, pressure))
        if any(map(_sites_of, map(model.get_submodule, sites["head"]))):
            model.register_forward_pre_hook(_note_labels)

    def attach(self, model: Foreign) -> None:
        cfg = self.cfg
        self.pressure = model.replace_norms(self.name, lambda num: Pressure(num, cfg.axis, cfg.stride, cfg.affine))

    def start_value(self, name: str, value: Tensor) -> Tensor:
        """Branches begin smaller by the square root of their number, in all kinds of models; decoders always do so."""
        model = self.context.model
        if not self.cfg.depth_init or model is None or model.kind == "decoder" or not name.endswith(BRANCH_ENDS):
            return value
        in_decoder = name.startswith("decoder.")
        num_branches = 3 * (model.decoder_layers or model.layers) if in_decoder else 2 * model.layers
        return value / math.sqrt(num_branches)

    def begin(self, step: int, share: float, scaler: torch.amp.GradScaler | None) -> None:
        """Each micro-batch has statistics of its own and the loss is their mean, so the loss is the same on any number
        of processes, and none waits for another's."""
        if self.cfg.final < 1 and self.context.steps == 0:
            raise ValueError(f"{self.name}.final = {self.cfg.final} needs the number of updates: {SAY_STEPS}")
        self.pressure.press(weight_at(self.cfg, step, self.context.steps) * share, self.context.device, scaler)

    def metrics(self, num_batches: int) -> dict[str, float]:
        """The loss without its weight."""
        values, self.pressure.values = self.pressure.values, []
        if not values:
            return {}
        return {"standardization_loss": float(sum(values[:num_batches], torch.zeros(()))) / max(num_batches, 1)}

    def fold(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, Model)
        return fold(model)


def weight_at(cfg: StandardizeConfig, step: int, total: int) -> float:
    """The weight of the loss in update number `step`, counted from 0, in a run of `total` steps."""
    if step < cfg.warmup:
        return cfg.weight * (step + 1) / cfg.warmup
    done = min((step - cfg.warmup) / max(total - cfg.warmup, 1), 1.0)
    return cfg.weight * (1 - done * (1 - cfg.final))


def _sites_of(module: nn.Module) -> list[Affine]:
    return [child for child in module.children() if isinstance(child, Affine)]


def _begin_batch(pressure: Pressure, model: nn.Module, args: tuple[Any, ...]) -> None:
    """What is known of a layout is computed for each batch: a recorded step reads all of them in the same place."""
    pressure.known = None
    if pressure.values is not None and not model.training:
        pressure.values.append(torch.zeros((), device=next(model.parameters()).device))


def _note_tokens(find: Find, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Tells sites, before each call, which tokens count. Per block: one may get other sequences than the last."""
    layout, num_tokens = find(*args, **named)
    for site in _sites_of(module):
        wanted = module.training or site.pressure.values
        site.rows = site.pressure.weigh_layout(layout, num_tokens) if wanted else None


def _note_labels(model: nn.Module, args: tuple[Any, ...]) -> None:
    """A language model's head reads the positions that are predicted, and filler."""
    (batch,) = args
    for site in _sites_of(model.get_submodule("head")):
        wanted = model.training or site.pressure.values
        site.rows = site.pressure.weigh(batch.labels != IGNORE) if wanted else None


@dataclass(frozen=True)
class Scaling:
    """What x is in terms of what the folded model has in its place: x = gain * z + shift, both [C], in fp64."""

    gain: Tensor
    shift: Tensor

    def then(self, site: nn.Module) -> Scaling:
        if not isinstance(site, Affine) or site.weight is None:
            return self
        gain, shift = site.weight.detach().double(), 0.0 if site.bias is None else site.bias.detach().double()
        return Scaling(gain * self.gain, gain * self.shift + shift)


@torch.no_grad()
def fold(model: Model) -> Model:
    """The same function without norms or affines: each is moved into the linear layer behind it.

    Where an affine stands in the residual stream itself (post-norm, or behind the embedding), the folded stream goes on
    without it, and branches give back what they add divided by all gains so far. An output layer that shares the token
    embedding gets a table of its own, since it is scaled and the embedding is not.
    """
    cfg = model.cfg
    state = {name: value.detach().double() for name, value in model.state_dict().items()}
    one = torch.ones(cfg.width, dtype=torch.float64)
    start = Scaling(one, torch.zeros_like(one))
    sides = [name for name in ("encoder", "decoder") if hasattr(model, name)]
    out = start
    for side in sides:
        table = model.embedding
        if side == "decoder" and isinstance(model, EncoderDecoder) and model.target_embedding is not None:
            table = model.target_embedding
        stream = start.then(getattr(table, "norm", nn.Identity()))
        out = _fold_stack(state, side, model.get_submodule(side), stream, memory=out)
    folded = replace(cfg, norm="none")
    head = model.head
    if isinstance(head, LMHead):
        if head.transform is not None and head.norm is not None:
            _fold_into(state, "head.transform", out)
            out = start.then(head.norm)
        folded = replace(
            folded, tied=False, head_bias=cfg.kind != "encoder" and (cfg.head_bias or bool(out.shift.any()))
        )
        state.setdefault("head.weight", state["embedding.token.weight"].clone())
        if head.bias is None and folded.head_bias:
            state["head.bias"] = torch.zeros(cfg.vocab, dtype=torch.float64)
        _fold_into(state, "head", out)
    else:
        _fold_into(state, "head.pooler" if isinstance(head, ClassHead) else "head", out)
    plain = build_model(folded).to_empty(device="cpu").to(next(model.parameters()).dtype).eval()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    return plain


def _fold_stack(state: dict[str, Tensor], name: str, stack: nn.Module, stream: Scaling, memory: Scaling) -> Scaling:
    """Returns what the result of the stack is in terms of that of the folded one."""
    assert isinstance(stack, Stack)
    for i in range(len(stack.blocks)):
        block: Any = stack.blocks[i]
        at = f"{name}.blocks.{i}"
        branches = [("attention.qkv", "attention.out", block.attention_norm), ("mlp.up", "mlp.down", block.mlp_norm)]
        if block.cross is not None:
            branches.insert(1, ("cross.q", "cross.out", block.cross_norm))
            _fold_into(state, f"{at}.cross.kv", memory)
        for first, last, site in branches:
            _fold_into(state, f"{at}.{first}", stream.then(site) if block.pre_norm else stream)
            _fold_out_of(state, f"{at}.{last}", stream)
            stream = stream if block.pre_norm else stream.then(site)
    return stream.then(stack.norm)


def _fold_into(state: dict[str, Tensor], linear: str, x: Scaling) -> None:
    """W (gain z + shift) + b"""
    weight = state[f"{linear}.weight"]
    if bool(x.shift.any()):
        state[f"{linear}.bias"] = state[f"{linear}.bias"] + weight @ x.shift
    state[f"{linear}.weight"] = weight * x.gain


def _fold_out_of(state: dict[str, Tensor], linear: str, x: Scaling) -> None:
    """What is added to z is what would be added to x over the gain."""
    if bool((x.gain == 0).any()):
        raise CheckpointError(
            f"{linear} adds to channels that a learned scale of exactly 0 switches off: they do not fold"
        )
    state[f"{linear}.weight"] = state[f"{linear}.weight"] / x.gain[:, None]
    if f"{linear}.bias" in state:
        state[f"{linear}.bias"] = state[f"{linear}.bias"] / x.gain
