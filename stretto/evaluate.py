"""Measuring a model while it is trained: loss, and accuracy where the task has it."""

from __future__ import annotations

import math

import torch

from stretto.data import Data
from stretto.mesh import Mesh
from stretto.model import Model
from stretto.precision import autocast
from stretto.runtime import Runtime
from stretto.techniques import Techniques
from stretto.techniques.technique import At

NONE = Techniques()


@torch.no_grad()
def evaluate(
    model: Model,
    precision: str,
    data: Data,
    num_batches: int,
    rt: Runtime,
    mesh: Mesh,
    techniques: Techniques = NONE,
    can_stop: bool = False,
) -> dict[str, float]:
    """Measures the mean loss per predicted token, or image, over the first `num_batches` evaluation batches; 0 means
    all of them. If it `can_stop`, it returns nothing when the processes agree to stop before the end."""
    classifies = isinstance(model, Model) and model.cfg.kind in ("vit", "encoder") and model.cfg.classes > 0
    was_training, num_labels = model.training, 0
    num_batches = min(num_batches or data.num_eval_batches, data.num_eval_batches)
    loss_sum, correct = torch.zeros((), device=rt.device), torch.zeros((), device=rt.device)
    model.eval()
    for i in range(0, num_batches, mesh.data_world):
        if can_stop and rt.agree_to_stop():
            model.train(was_training)
            return {}
        rt.note_progress()
        # Where batches run out, a process repeats the last one with weight 0: sharded weights need all to take part.
        mine = i + mesh.data_rank
        batch = data.eval_batch(min(mine, num_batches - 1))
        batch = techniques.prepare(batch, At(0, mine, training=False)).to(rt.device)
        weight = float(mine < num_batches)
        with autocast(precision, rt.device):
            loss, logits = model(batch, with_logits=True) if classifies else (model(batch), None)
            loss_sum += weight * loss
            if logits is not None:
                correct += weight * (logits.argmax(-1) == batch.labels).sum()
        num_labels += batch.counts.labels * int(weight)
    model.train(was_training)
    (num_labels,) = rt.sum_over_ranks([num_labels], mesh.peers)
    totals = rt.sum_tensor(torch.stack([loss_sum, correct])) / max(num_labels, 1)
    mean, accuracy = totals.tolist()
    second = {"accuracy": accuracy} if classifies else {"perplexity": math.exp(min(mean, 80.0))}
    own = len(range(mesh.data_rank, num_batches, mesh.data_world))
    others = _average(techniques.metrics(own), own / (num_batches * mesh.team), rt)
    return {"eval_loss": mean, **second, **others, "batches": num_batches, "all_batches": data.num_eval_batches}


def _average(values: dict[str, float], share: float, rt: Runtime) -> dict[str, float]:
    """Averages over the batches of all processes, of which this one had the share `share`. All measure the same."""
    if not values:
        return {}
    means = rt.sum_tensor(share * torch.tensor(list(values.values()), device=rt.device))
    return dict(zip(values, means.tolist(), strict=True))
