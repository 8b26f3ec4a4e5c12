"""No update that is not finite is ever applied, and all processes decide alike.

The decision is a number on the device, made from the norm of all gradients (ops/judge.py). A loss that is not finite
makes its gradient so (`doubt`), and the sum over processes brings that to all of them. Where processes hold the same
gradients once more, after the sum, they take the largest of their norms (gradients.py). So the verdict is the same
everywhere. The optimizer reads it and leaves weights and moments untouched. The host looks only when it logs, so a
healthy run never waits.

A norm far above those of the updates before is a spike: it is counted, and with `train.spikes = "skip"` cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.errors import NonFiniteError, SpikeError
from stretto.ops.judge import FIELDS, LEAST, judge

# How many updates in a row may be cancelled. fp16 finds its loss scale by trying, so it needs some.
LIMITS = {"stop": 0, "skip": 3, "fp16": 20}
Gather = Callable[[Sequence[int]], list[list[int]]]
ReadSamples = Callable[[int, Sequence[int]], dict[int, Sequence[int]]]


class Guard:
    def __init__(self, policy: str, device: torch.device, spikes: str = "log") -> None:
        self.limit, self.skips_spikes = LIMITS[policy], spikes == "skip"
        self.state = torch.zeros(len(FIELDS), dtype=torch.float64, device=device)
        self.own = torch.zeros(2, device=device)  # NaN once a loss, or a norm, of this process alone was not finite
        self.notes: list[str] = []  # what the log should say
        self.said = 0  # spikes that it has said

    def state_dict(self) -> dict[str, float]:
        return dict(zip(FIELDS, self.state.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Fields that the version of a run did not have begin with 0."""
        self.state.copy_(torch.tensor([state.get(name, 0.0) for name in FIELDS], dtype=torch.float64))
        self.said = int(state.get("spikes", 0))

    def doubt(self, loss: Tensor) -> Tensor:
        """Returns 0, or NaN for a loss that is not finite: added to its factor, that makes its gradient NaN."""
        doubt = 0 * loss.detach()
        self.own[0].add_(doubt)
        return doubt

    def judge(self, norm: Tensor, own: Tensor | None = None, watch: bool = True) -> Tensor:
        """Returns a tensor on the device: 1.0 if the update must be cancelled, else 0.0. `own`: what the norm was in
        this process, before all agreed on one. Without `watch` nothing is a spike."""
        if own is not None and own is not norm:
            self.own[1].add_(0 * own)
        return judge(self.state, norm, self.skips_spikes, watch)

    def check(self, step: int, gather: Gather | None = None, read_samples: ReadSamples | None = None) -> dict[str, int]:
        """Counts cancelled updates and spikes; an error if too many were cancelled in a row. The host waits for the
        device here. For the error, `gather` asks the other processes, and `read_samples` gives the samples of
        the micro-batches, by number, that these ranks, or all, have read in a step."""
        found = self.state_dict()
        self.state[FIELDS.index("worst")] = found["streak"]
        self.state[FIELDS.index("spike_worst")] = found["spike_streak"]
        ago = {name: step - int(found["updates"] - found[name]) for name in ("last", "spike_last")}
        if found["worst"] > self.limit:
            raise NonFiniteError(self._explain(int(found["worst"]), ago["last"], gather, read_samples))
        if self.skips_spikes and found["spike_worst"] > LIMITS["skip"]:
            raise SpikeError(
                f"the norm of the gradient was a spike, more than {LEAST:g} times the usual one, in "
                f"{int(found['spike_worst'])} updates in a row, the last at step {ago['spike_last']}"
                f"{_name(read_samples, ago['spike_last'])}; none was applied. Lower optim.lr, look at "
                "the data of these steps, or let such updates be applied by train.spikes = 'log'"
            )
        if found["spikes"] > self.said:
            self.notes.append(
                f"{int(found['spikes']) - self.said} spike(s) of the gradient, the last at step {ago['spike_last']}: "
                + ("not applied" if self.skips_spikes else "applied")
            )
            self.said = int(found["spikes"])
        return {"cancelled": int(found["cancelled"]), "spikes": int(found["spikes"])}

    def _explain(self, streak: int, step: int, gather: Gather | None, read_samples: ReadSamples | None) -> str:
        mine = self.own.isnan().int().tolist()
        flags = [mine] if gather is None else gather(mine)
        losses, norms = ([rank for rank, found in enumerate(flags) if found[i]] for i in (0, 1))
        ranks = losses or (norms if len(norms) < len(flags) else [])
        what = "loss" if losses else "gradient"
        where = f" of rank {', '.join(map(str, ranks))}" if ranks and len(flags) > 1 else ""
        return (
            f"the {what}{where} was not finite in {streak} update(s) in a row, the last at step {step}"
            f"{_name(read_samples, step, ranks)}; none was applied, in any process. Lower optim.lr, "
            "lengthen optim.warmup, or look at the data of these steps"
            + ("; train.non_finite = 'skip' goes on over single ones" if self.limit == 0 else "")
        )

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


def _name(read_samples: ReadSamples | None, step: int, ranks: Sequence[int] = ()) -> str:
    """The first samples of the micro-batches of a step."""
    if read_samples is None:
        return ""
    found = {i: ", ".join(map(str, samples[:3])) for i, samples in read_samples(step, ranks).items()}
    return " (micro-batch " + "; ".join(f"{i}: samples {names} ..." for i, names in found.items()) + ")"
