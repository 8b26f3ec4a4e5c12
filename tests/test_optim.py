"""Schedules are pure functions of the step; decay touches matrices only."""

from __future__ import annotations

import math

import pytest
import torch

from stretto.config import ModelConfig, OptimConfig
from stretto.model import build_model
from stretto.optim import build_optimizer, learning_rate


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.2 + 0.8 * 0.5),
        ("cosine", 110, 0.2),
        ("cosine", 500, 0.2),
        ("linear", 60, 0.6),
        ("linear", 110, 0.2),
        ("constant", 70, 1.0),
        ("inverse_sqrt", 9, 1.0),
        ("inverse_sqrt", 39, 0.5),
    ],
)
def test_known_values(schedule: str, step: int, expected: float) -> None:
    cfg = OptimConfig(lr=1.0, min_lr=0.2, warmup=10, schedule=schedule)  # type: ignore[arg-type]
    assert learning_rate(cfg, step, 110) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_no_jump_and_never_above_the_peak(schedule: str, warmup: int) -> None:
    cfg = OptimConfig(lr=0.5, warmup=warmup, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(cfg, step, 50) for step in range(60)]
    assert max(rates) == pytest.approx(0.5) and min(rates) > 0
    assert all(later <= earlier + 1e-12 for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build_model(ModelConfig(vocab=8, width=8, heads=2, layers=1), "cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, OptimConfig(lr=0.5, weight_decay=0.1)).step()
    for name, parameter in model.named_parameters():
        expected = 0.95 if parameter.ndim == 2 else 1.0
        assert torch.allclose(parameter, torch.tensor(expected)), name
    assert math.isclose(model.embedding.token.weight[0, 0].item(), 0.95, rel_tol=1e-6)
