"""Measuring a run that has been trained, for `stretto eval`: loss, and BLEU or accuracy where the task has them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stretto.data import Data, PairData
from stretto.data.other import open_other_data
from stretto.evaluate import evaluate
from stretto.generate import translate
from stretto.mesh import Mesh
from stretto.precision import resolve_precision
from stretto.runtime import Runtime, start
from stretto.trained import Trained, load_run_config, load_trained, open_run_data


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
        data = open_run_data(cfg, folder, folder / "data")
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
