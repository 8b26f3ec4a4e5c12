"""Measuring a model: loss during training, and BLEU or accuracy where the task has them."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from stretto.data import Data, PairData, open_data
from stretto.data.other import open_other_data
from stretto.generate import translate
from stretto.mesh import Mesh
from stretto.model import Model, VisionTransformer
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
    can_stop: bool = False,
) -> dict[str, float]:
    """Measures the mean loss per predicted token, or image, over the first `num_batches` evaluation batches; 0 means
    all of them. If it `can_stop`, it returns nothing when the processes agree to stop before the end."""
    is_vit, was_training, num_labels = isinstance(model, VisionTransformer), model.training, 0
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
            loss, logits = model(batch, with_logits=True) if is_vit else (model(batch), None)
            loss_sum += weight * loss
            if logits is not None:
                correct += weight * (logits.argmax(-1) == batch.labels).sum()
        num_labels += batch.counts.labels * int(weight)
    model.train(was_training)
    (num_labels,) = rt.sum_over_ranks([num_labels], mesh.peers)
    totals = rt.sum_tensor(torch.stack([loss_sum, correct])) / max(num_labels, 1)
    mean, accuracy = totals.tolist()
    second = {"accuracy": accuracy} if is_vit else {"perplexity": math.exp(min(mean, 80.0))}
    own = len(range(mesh.data_rank, num_batches, mesh.data_world))
    others = _average(techniques.metrics(own), own / (num_batches * mesh.team), rt)
    return {"eval_loss": mean, **second, **others, "batches": num_batches, "all_batches": data.num_eval_batches}


def _average(values: dict[str, float], share: float, rt: Runtime) -> dict[str, float]:
    """Averages over the batches of all processes, of which this one had the share `share`. All measure the same."""
    if not values:
        return {}
    means = rt.sum_tensor(share * torch.tensor(list(values.values()), device=rt.device))
    return dict(zip(values, means.tolist(), strict=True))


def measure(folder: Path, beam: int, source: str = "", batches: int = 0) -> dict[str, Any]:
    """Measures what `stretto eval` prints: the loss of a run's best weights on all evaluation data, and BLEU on the
    test sentences; or both on the data that `source` names. `batches`: as many at most; 0: all."""
    opened = start(load_run_config(folder).run)
    with opened as rt, rt.interruptible(), TemporaryDirectory(prefix="stretto-") as scratch:
        trained, data = load_trained(folder, rt.device), None
        if source:
            cfg, labels = trained.config, trained.labels
            size = cfg.model.image_size
            data = open_other_data(cfg.data, source, folder / "data", labels, Path(scratch), cfg.run.seed, size)
        return measure_trained(trained, folder, rt, beam, data, batches)


def measure_trained(
    trained: Trained, folder: Path, rt: Runtime, beam: int, data: Data | None = None, batches: int = 0
) -> dict[str, Any]:
    """Measures a run that is loaded, on its own data, or on others. Evaluations while it was trained were over the
    first `batches_while_training` batches only."""
    cfg = trained.config
    if data is None:
        # Who measures a run of someone else's does not write where its configuration says.
        data = open_data(
            cfg.data, seed=cfg.run.seed, folder=folder / "data", image_size=cfg.model.image_size, fill_cache=False
        )
    precision = resolve_precision(cfg.train.precision, rt.device)
    scores: dict[str, Any] = evaluate(trained.model, precision, data, batches, rt, Mesh(rt.rank, rt.world))
    known = data.num_eval_batches
    origin = {"step": trained.step} | ({"weights": trained.weights} if trained.weights else {})
    scores = origin | scores | {"batches_while_training": min(cfg.train.eval_batches or known, known)}
    if isinstance(data, PairData):
        scores |= measure_bleu(trained, data.load_test_pairs(), beam)
    return scores


def measure_bleu(trained: Trained, pairs: list[tuple[str, str]], beam: int) -> dict[str, Any]:
    """Computes sacrebleu's corpus BLEU of detokenised text, with the signature that makes it comparable."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    found = translate(trained, [source for source, _ in pairs], beam)
    score = metric.corpus_score(found, [[reference for _, reference in pairs]])
    return {"bleu": score.score, "signature": str(metric.get_signature())}
