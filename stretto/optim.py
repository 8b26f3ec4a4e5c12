"""AdamW with its decay groups, and learning-rate schedules that are pure functions of the step.

torch's own AdamW is the plain choice. `FlatAdamW` does the same in one launch and knows other ways to keep weights and
moments; its kernel is in ops/adamw.py. Checkpoints move between the two, and between all ways.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from stretto.config import OptimConfig
from stretto.ops.adamw import ALIGN, Control, Launch, Place, Rule, Workspace, join, split, upload
from stretto.weights import Write, find_local, find_start, put, wrap_rows

WEIGHTS = {"fp32": (torch.float32,), "split": (torch.float32, torch.bfloat16), "bf16": (torch.float32, torch.bfloat16)}
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def learning_rate(cfg: OptimConfig, step: int, total: int) -> float:
    """The rate of update number `step`, counted from 0, in a run of `total` steps."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "inverse_sqrt":
        return cfg.lr * math.sqrt(max(cfg.warmup, 1) / (step + 1))
    begin = max(cfg.warmup, total - round(cfg.decay * total)) if cfg.schedule == "wsd" else cfg.warmup
    done = min(max((step - begin) / max(total - begin, 1), 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if cfg.schedule == "cosine" else 1 - done
    return cfg.lr * (cfg.min_lr + (1 - cfg.min_lr) * left)


Build = Callable[[list[dict[str, Any]], OptimConfig], torch.optim.Optimizer | None]


def build_optimizer(model: nn.Module, cfg: OptimConfig, build: Build | None = None) -> torch.optim.Optimizer:
    """Matrices decay; vectors (biases, norms) do not. `build` may have an optimizer of its own for them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    own = None if build is None else build(groups, cfg)
    # Torch's fused kernel also takes `found_inf`, by which guard.py cancels an update without asking the host.
    return own or torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def clip_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, limit: float, across: dist.ProcessGroup | None = None
) -> Tensor:
    """The norm of all gradients there are, on the device. They are scaled down to the norm `limit`, or will be by the
    update itself where the optimizer can do that; 0: no limit. `across`: processes that have other parameters of the
    same model, whose gradients count too."""
    if isinstance(optimizer, FlatAdamW):
        return optimizer.clip(limit, across)
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if across is not None:
        square = norm.double().square()
        dist.all_reduce(square, group=across)
        norm = square.sqrt().float()
    nn.utils.clip_grads_with_norm_(parameters, limit or math.inf, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def weight_writer(optimizer: torch.optim.Optimizer) -> Write:
    """What puts a whole fp32 value into a parameter: into both halves where the optimizer holds the lower one."""
    return optimizer.put_weight if isinstance(optimizer, FlatAdamW) else put


def weight_reader(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """What gives the exact fp32 value of a parameter: of both halves where the optimizer holds the lower one."""
    return optimizer.weight if isinstance(optimizer, FlatAdamW) else lambda parameter: parameter.detach().float()


def count_state(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes of weights, gradients and moments in this process. Between two steps gradients may not exist: then
    each counts as its parameter, whose shape and type autograd gives it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in parameters if p in optimizer.state]
    tensors = {
        "weights": [*parameters, *(state["low"] for state in states if "low" in state)],
        "gradients": [p if p.grad is None else p.grad for p in parameters],
        "moments": [state[key] for state in states for key in ("exp_avg", "exp_avg_sq") if key in state],
    }
    return {role: sum(find_local(t).nbytes for t in members) for role, members in tensors.items()}


class FlatAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for all parameters at once, over flat state. The host never waits for the device.

    `weights` says how parameters are kept: "fp32"; "split", where a bf16 parameter is the upper half of an exact fp32
    weight and the state holds the lower half; or "bf16", rounded at random. fp32 parameters stay fp32 in every mode.
    `moments` are "fp32" or "bf16". `optimizer.state` has the entries of torch's AdamW, as views of the flat state.

    Learning rate and weight decay of a group are tensors on the device; numbers may be assigned too. As torch's fused
    optimizers do, a step reads `found_inf` (unless 0, nothing is changed and nothing counted) and `grad_scale`.

    Kernels write weights by their addresses, where autograd does not see it. So a step counts as a change of every
    weight that has a gradient: a backward pass that needs the weights as they were is refused, as torch refuses it.
    With `renews`, a step gives every such weight new memory instead: who still holds a tensor over the old memory
    (`p.detach()`) has the weights as they were, which costs no copy.
    """

    renews = False

    _step_supports_amp_scaling = True  # GradScaler then sets these two, and does not wait for the device
    found_inf: Tensor
    grad_scale: Tensor

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        weights: str = "fp32",
        moments: str = "fp32",
        seed: int = 0,
    ) -> None:
        self._places: list[Place] = []
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        members = [(p, number) for number, group in enumerate(self.param_groups) for p in group["params"]]
        members.sort(key=lambda member: member[0].dtype == torch.float32)  # last: they have no lower half
        self._params = [p for p, _ in members]
        device = _check(self._params, weights)
        end = halves = 0
        for number, (p, group) in enumerate(members):
            self._places.append(Place(number, group, end, find_local(p).numel(), _first_element(p)))
            end += -(-find_local(p).numel() // ALIGN) * ALIGN
            halves = end if p.dtype == torch.bfloat16 else halves
        self._rule = Rule(*betas, eps)
        self._betas = torch.tensor(betas, dtype=torch.float64, device=device)
        self._flat = Workspace(
            exp_avg=torch.zeros(end, dtype=MOMENTS[moments], device=device),
            exp_avg_sq=torch.zeros(end, dtype=MOMENTS[moments], device=device),
            low=torch.zeros(halves, dtype=torch.int16, device=device) if weights == "split" else None,
            steps=torch.zeros(len(members), device=device),
            rates=torch.zeros(len(self.param_groups), 2, device=device),
            keys=torch.tensor([[seed, 0]], device=device).repeat(len(members), 1),
        )
        self._rates = [dict(zip(("lr", "weight_decay"), row.unbind(), strict=True)) for row in self._flat.rates]
        self.take_rates()
        for place, p in zip(self._places, self._params, strict=True):
            self.state[p] = self._views(place, p)
        self._yes, self._one = torch.ones((), dtype=torch.bool, device=device), torch.ones((), device=device)
        self._active = torch.ones(len(members), device=device)  # 1 for parameters that have a gradient
        self._present = [True] * len(members)  # the same, on the host
        self._written = self._find_written()
        self._grad_types = [p.dtype for p in self._params]
        self._launches = self._plan()
        self._norm: Tensor | None = None  # from `clip` to `step`
        self._limit = math.inf
        self._recording = False
        self._fresh: dict[int, Tensor] = {}  # new memory of weights, by their number, from `_aim` to the end of a step

    def _views(self, place: Place, p: Tensor) -> dict[str, Tensor]:
        flats = {"exp_avg": self._flat.exp_avg, "exp_avg_sq": self._flat.exp_avg_sq}
        if self._flat.low is not None and p.dtype == torch.bfloat16:
            flats["low"] = self._flat.low
        views = {key: wrap_rows(p, place.of(flat).view(find_local(p).shape)) for key, flat in flats.items()}
        return {"step": self._flat.steps[place.number], **views}

    def _plan(self) -> list[tuple[tuple[dist.ProcessGroup, ...], Launch]]:
        """One launch for each pair of dtypes, and the processes that its parameters are split over."""
        members = defaultdict(list)
        for place, p, grad_type in zip(self._places, self._params, self._grad_types, strict=True):
            members[_split_over(p), p.dtype, grad_type].append(place)
        return [
            (groups, Launch(places, param_type, grad_type, self._betas.device))
            for (groups, param_type, grad_type), places in members.items()
        ]

    def _aim(self) -> None:
        """Tells the launches where weights and gradients are now: both may have moved since the last step."""
        grads = [p.grad for p in self._params]
        types = [old if grad is None else grad.dtype for grad, old in zip(grads, self._grad_types, strict=True)]
        present = [grad is not None for grad in grads]
        assert not self._recording or types == self._grad_types, "a step like the others"
        if types != self._grad_types:
            self._grad_types = types
            self._launches = self._plan()
        if self.renews:
            self._fresh = {i: torch.empty_like(self._params[i]).detach() for i, there in enumerate(present) if there}
        for _, launch in self._launches:
            weights = {place.number: find_local(self._params[place.number]) for place in launch.places}
            launch.aim(
                list(weights.values()),
                [find_local(grad) if (grad := grads[number]) is not None else None for number in weights],
                [self._fresh.get(number, weight) for number, weight in weights.items()],
            )
        if present != self._present:
            self._present = present
            self._written = self._find_written()
            if not self._recording:
                self._upload_present()

    def _upload_present(self) -> None:
        upload(torch.tensor(self._present, dtype=torch.float32, device="cpu"), self._active)

    def _find_written(self) -> list[Tensor]:
        """The weights that a step changes. A sharded one and its local part are two tensors to autograd."""
        written = [p for p, present in zip(self._params, self._present, strict=True) if present]
        return written + [p._local_tensor for p in written if isinstance(p, DTensor)]

    @torch.no_grad()
    def clip(self, limit: float, across: dist.ProcessGroup | None = None) -> Tensor:
        """The norm of all gradients of all processes, or with `across` those of that group, each of which has other
        parameters. The step that follows, with the same gradients, scales them down
        to the norm `limit` (0: no limit) while it reads them, and is cancelled if the norm is not finite."""
        self._aim()
        squares = []
        for groups, launch in self._launches:
            total = launch.sum_squares()
            for group in groups:
                dist.all_reduce(total, group=group)
            squares.append(total)
        square = reduce(torch.add, squares)
        if across is not None:
            dist.all_reduce(square, group=across)
        self._norm, self._limit = square.sqrt().float(), limit or math.inf
        return self._norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        if self._norm is None:
            self._aim()
        self.take_rates()
        flat, applied, scale = self._flat, self._decide(), getattr(self, "grad_scale", None)
        flat.steps.add_(self._active * applied)
        flat.keys[:, 1].copy_(flat.steps)
        control = Control(
            applied=applied,
            corrections=1 - self._betas ** flat.steps[:, None],
            norm=self._one if self._norm is None else self._norm,
            limit=self._limit,
            scale=self._one if scale is None else scale,
        )
        for _, launch in self._launches:
            launch.update(flat, control, self._rule)
        for number, fresh in self._fresh.items():
            self._params[number].data = fresh
        if not self._recording and not self._fresh:
            increment_version(self._written)
        self._fresh = {}
        self._norm, self._limit = None, math.inf

    @contextmanager
    def recording(self) -> Iterator[tuple[list[Tensor | None], list[Tensor]]]:
        """Around the recording of a step as a CUDA graph. Gives what has to live as long as the graph (where weights
        and gradients are, and which parameters have one in it), and the weights that each replay changes. All of it is
        filled in afterwards, since nothing may be uploaded meanwhile."""
        usual = self._active, self._present, self._written
        written: list[Tensor] = []
        self._active, self._recording = torch.empty_like(self._active), True
        try:
            with ExitStack() as stack:
                tables = [stack.enter_context(launch.recording()) for _, launch in self._launches]
                yield [self._active, *tables], written
                self._upload_present()
                written += self._written
        finally:
            (self._active, self._present, self._written), self._recording = usual, False

    def _decide(self) -> Tensor:
        """Whether the update is applied: a boolean on the device."""
        doubts = [] if self._norm is None else [self._norm - self._norm]  # 0 if it is finite, else NaN
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            doubts.append(found_inf)
        return reduce(torch.add, doubts) == 0 if doubts else self._yes

    def take_rates(self) -> None:
        """Puts rates that were assigned since the last step where kernels read them: `step` does, and who replays a
        recorded step has to."""
        for group, views in zip(self.param_groups, self._rates, strict=True):
            for key, view in views.items():
                if group[key] is not view:  # assigned since the last step
                    view.fill_(group[key])
                    group[key] = view

    @torch.no_grad()
    def weight(self, parameter: Tensor) -> Tensor:
        """The exact fp32 weight that a bf16 parameter stands for; any other tensor as it is."""
        low = self.state.get(parameter, {}).get("low")
        if low is not None:
            return wrap_rows(parameter, join(find_local(parameter), find_local(low)))
        return parameter.float() if parameter.dtype == torch.bfloat16 else parameter

    def put_weight(self, parameter: Tensor, value: Tensor) -> None:
        """`weights.put` for fp32 values, into both halves where there are two."""
        low = self.state.get(parameter, {}).get("low")
        if low is None:
            put(parameter, value)
        else:
            for half, part in zip((parameter, low), split(find_local(value).float()), strict=True):
                put(half, wrap_rows(value, part))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies into the flat state; torch would put other tensors in its place, and of the parameters' dtype."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: saved[key] for key in ("lr", "weight_decay")})
        order = [p for group in self.param_groups for p in group["params"]]
        for number, entries in state_dict["state"].items():
            for key, value in entries.items():
                self.state[order[number]][key].copy_(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._places:
            raise ValueError("FlatAdamW takes all its parameters when it is built: its state is laid out then")
        super().add_param_group(param_group)


def _check(parameters: list[Tensor], weights: str) -> torch.device:
    """The one device of the parameters."""
    if not parameters:
        raise ValueError("FlatAdamW has no parameter to train: all are frozen")
    for p in parameters:
        if p.dtype not in WEIGHTS[weights] or p.is_meta or p.device != parameters[0].device:
            raise ValueError(
                f"FlatAdamW with weights = {weights!r} takes parameters of {' or '.join(map(str, WEIGHTS[weights]))}, "
                f"all on one device and not on meta: one is of {p.dtype} on {p.device}"
            )
        if not find_local(p).is_contiguous():
            raise ValueError(f"FlatAdamW takes contiguous parameters: one is {list(p.shape)}, strides {p.stride()}")
    return parameters[0].device


def _split_over(p: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of processes that hold different elements of a parameter."""
    if not isinstance(p, DTensor):
        return ()
    return tuple(p.device_mesh.get_group(axis) for axis, place in enumerate(p.placements) if place.is_shard())


def _first_element(p: Tensor) -> int:
    """Where this process's part of a parameter begins."""
    if not isinstance(p, DTensor):
        return 0
    return sum(offset * stride for offset, stride in zip(find_start(p), p.stride(), strict=True))
