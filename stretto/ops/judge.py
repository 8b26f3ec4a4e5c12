"""The verdict on an update: whether its gradient is finite, and whether its norm is a spike. It takes one launch, and
the host is not asked.

    x = log(norm),   spike: x - mean > max(log LEAST, SPREAD * deviation)

Mean and deviation are those of x over about the last WINDOW updates that were applied: each has the weight 1 / n, until
n is WINDOW. They say nothing until there are HISTORY of them. What is not applied is not learned from, so one NaN does
not blind later verdicts; and of what is applied, at most the limit itself is, so that a single spike does not either.

By this rule a norm that falls, as in a warm-up, is none; nor is one that a slow rise or ordinary noise explains: LEAST
times the mean at least, and beyond all but three in a million of what a bell curve gives. A norm of ten times the mean
is one as long as the deviation of x is below log(10) / SPREAD = 0.51, a noise of more than half the norm.

The state is one vector, in fp64, that stays where it is: a CUDA graph finds it there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.ops.language import jit, runs_kernels, tl, triton

LEAST, SPREAD, HISTORY, WINDOW = 4.0, 4.5, 20, 100
FIELDS = (
    "updates",  # judged so far
    "cancelled",  # of them
    "streak", "worst", "last",  # not finite: in a row now, the most in a row, and the number of the last one
    "spikes", "spike_streak", "spike_worst", "spike_last",  # all, and the same of spikes
    "known", "mean", "variance",  # what was learned of log(norm), and from how many updates
)  # fmt: skip


def judge_ref(state: Tensor, norm: Tensor, skip: bool, watch: bool) -> Tensor:
    updates, cancelled, streak, worst, last, spikes, row, longest, latest, known, mean, variance = state.unbind()
    finite = norm.isfinite()
    distance = norm.double().log() - mean
    limit = (SPREAD * variance.sqrt()).clamp(min=math.log(LEAST))
    ready = known >= HISTORY
    spike = finite & ready & (distance > limit) & watch
    cancel = ~finite | (spike & skip)
    learns = ~cancel & (norm > 0) & watch
    distance = torch.where(known > 0, torch.minimum(torch.maximum(distance, -limit), limit), distance)
    distance = torch.where(learns, distance, 0.0)
    known = known + learns
    weight = learns / known.clamp(1, WINDOW)
    updates, streak, row = updates + 1, (streak + ~finite) * cancel, (row + spike) * cancel
    found = [
        updates, cancelled + cancel, streak, torch.maximum(worst, streak), torch.where(finite, last, updates),
        spikes + spike, row, torch.maximum(longest, row), torch.where(spike, updates, latest),
        known, mean + weight * distance, (1 - weight) * (variance + weight * distance * distance),
    ]  # fmt: skip
    state.copy_(torch.stack(found))
    return cancel.float()


@jit
def _judge_kernel(
    state_ptr, norm_ptr, cancel_ptr, SKIP: tl.constexpr, WATCH: tl.constexpr,
    LIMIT: tl.constexpr, SPREAD: tl.constexpr, HISTORY: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    norm = tl.load(norm_ptr).to(tl.float64)
    known, mean, variance = tl.load(state_ptr + 9), tl.load(state_ptr + 10), tl.load(state_ptr + 11)
    finite = tl.abs(norm) < float("inf")  # not if it is NaN
    positive = finite & (norm > 0)
    distance = tl.log(tl.where(positive, norm, 1.0)) - mean
    deviation = tl.sqrt(variance)
    limit = tl.where(SPREAD * deviation > LIMIT, SPREAD * deviation, LIMIT)
    ready = known >= HISTORY
    spike = positive & ready & (distance > limit) & WATCH
    bad = (finite == 0).to(tl.float64)
    cancel = tl.where((finite == 0) | (spike & SKIP), 1.0, 0.0).to(tl.float64)
    learns = positive & (cancel == 0) & WATCH
    near = tl.where(distance > limit, limit, tl.where(distance < -limit, -limit, distance))
    distance = tl.where(learns, tl.where(known > 0, near, distance), 0.0)
    known += learns.to(tl.float64)
    weight = learns.to(tl.float64) / tl.where(known > WINDOW, WINDOW, tl.where(known < 1, 1.0, known))
    updates = tl.load(state_ptr) + 1
    streak, row = tl.load(state_ptr + 2), tl.load(state_ptr + 6)
    worst, longest = tl.load(state_ptr + 3), tl.load(state_ptr + 7)
    streak = (streak + bad) * cancel
    row = (row + spike.to(tl.float64)) * cancel
    tl.store(state_ptr, updates)
    tl.store(state_ptr + 1, tl.load(state_ptr + 1) + cancel)
    tl.store(state_ptr + 2, streak)
    tl.store(state_ptr + 3, tl.where(streak > worst, streak, worst))
    tl.store(state_ptr + 4, tl.where(finite, tl.load(state_ptr + 4), updates))
    tl.store(state_ptr + 5, tl.load(state_ptr + 5) + spike.to(tl.float64))
    tl.store(state_ptr + 6, row)
    tl.store(state_ptr + 7, tl.where(row > longest, row, longest))
    tl.store(state_ptr + 8, tl.where(spike, updates, tl.load(state_ptr + 8)))
    tl.store(state_ptr + 9, known)
    tl.store(state_ptr + 10, mean + weight * distance)
    tl.store(state_ptr + 11, (1 - weight) * (variance + weight * distance * distance))
    tl.store(cancel_ptr, cancel.to(tl.float32))


def launch_judge(state: Tensor, norm: Tensor, skip: bool, watch: bool) -> Tensor:
    cancel = torch.empty((), device=state.device)
    _judge_kernel[(1,)](
        state, norm, cancel, SKIP=skip, WATCH=watch, LIMIT=math.log(LEAST), SPREAD=SPREAD, HISTORY=HISTORY,
        WINDOW=WINDOW, num_warps=1,
    )  # fmt: skip
    return cancel


@torch.no_grad()
def judge(state: Tensor, norm: Tensor, skip: bool, watch: bool) -> Tensor:
    """Returns 1.0 if the update must be cancelled, else 0.0, on the device; `state`, of FIELDS, is brought up to date.
    `skip`: spikes are cancelled, too. Without `watch` there are none, and nothing is learned of the norm."""
    launch = launch_judge if triton is not None and runs_kernels(state) else judge_ref
    return launch(state, norm, skip, watch)
