"""Measuring a model: loss during training, and BLEU or accuracy where the task has them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from stretto.data import Data, PairData, open_data
from stretto.generate import translate
from stretto.mesh import Mesh
from stretto.model import Model
from stretto.precision import autocast, resolve_precision
from stretto.runtime import Runtime, start
from stretto.techniques import Techniques
from stretto.techniques.technique import At
from stretto.trained import Trained, load_run_config, load_trained

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
) -> dict[str, float]:
    """Mean loss per predicted token (or image) over the first `num_batches` evaluation batches; 0 means all."""
    kind = model.cfg.kind
    num_batches = min(num_batches or data.num_eval_batches, data.num_eval_batches)
    loss_sum, correct = torch.zeros((), device=rt.device), torch.zeros((), device=rt.device)
    num_labels = 0
    was_training = model.training
    model.eval()
    for i in range(0, num_batches, mesh.data_world):
        # Where batches run out, a process repeats the last one with weight 0: sharded weights need all to take part.
        mine = i + mesh.data_rank
        batch = data.eval_batch(min(mine, num_batches - 1))
        batch = techniques.prepare(batch, At(0, mine, training=False)).to(rt.device)
        weight = float(mine < num_batches)
        with autocast(precision, rt.device):
            if kind == "vit":
                loss, logits = model(batch, with_logits=True)
                correct += weight * (logits.argmax(-1) == batch.labels).sum()
                loss_sum += weight * loss
            else:
                loss_sum += weight * model(batch)
        num_labels += batch.counts.labels * int(weight)
    model.train(was_training)
    (num_labels,) = rt.sum_over_ranks([num_labels])
    totals = rt.sum_tensor(torch.stack([loss_sum, correct])) / max(num_labels, 1)
    mean, accuracy = totals.tolist()
    second = {"accuracy": accuracy} if kind == "vit" else {"perplexity": math.exp(min(mean, 80.0))}
    own = len(range(mesh.data_rank, num_batches, mesh.data_world))
    others = _average(techniques.metrics(own), own / (num_batches * mesh.team), rt)
    return {"eval_loss": mean, **second, **others}


def _average(values: dict[str, float], share: float, rt: Runtime) -> dict[str, float]:
    """Over the batches of all processes, which have measured the same things; `share` is that of this process."""
    if not values:
        return {}
    means = rt.sum_tensor(share * torch.tensor(list(values.values()), device=rt.device))
    return dict(zip(values, means.tolist(), strict=True))


def measure(folder: Path, beam: int) -> dict[str, Any]:
    """What `stretto eval` prints: the best weights of a run on all evaluation data, and BLEU on the test sentences."""
    cfg = load_run_config(folder)
    with start(cfg.run) as rt:
        trained = load_trained(folder, rt.device)
        data = open_data(
            cfg.data,
            seed=cfg.run.seed,
            folder=folder / "data",
            image_size=cfg.model.image_size,
            fill_cache=False,  # who measures a run of someone else's does not write where its configuration says
        )
        precision = resolve_precision(cfg.train.precision, rt.device)
        scores: dict[str, Any] = {
            "step": trained.step,
            **evaluate(trained.model, precision, data, 0, rt, Mesh(rt.rank, rt.world)),
        }
        if isinstance(data, PairData):
            scores |= measure_bleu(trained, data.load_test_pairs(), beam)
    return scores


def measure_bleu(trained: Trained, pairs: list[tuple[str, str]], beam: int) -> dict[str, Any]:
    """sacrebleu's corpus BLEU of detokenised text, with the signature that makes it comparable."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    found = translate(trained, [source for source, _ in pairs], beam)
    score = metric.corpus_score(found, [[reference for _, reference in pairs]])
    return {"bleu": score.score, "signature": str(metric.get_signature())}
