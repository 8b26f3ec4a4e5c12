"""`stretto eval RUN --data`: other data, read as the run's own are; and what cannot be read says why."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.errors import DataError, StrettoError
from stretto.evaluate import measure
from stretto.train import train
from tests.corpora import write_corpus, write_images, write_pairs
from tests.runs import MakeConfig


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_text_is_read_by_the_tokenizer_of_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """The run's own evaluation data give the same loss, other text gives another one; the run stays as it is."""
    held_out = write_corpus(tmp_path / "held-out", documents=6)
    folder = train(make_config(data__tokenizer="bpe", data__vocab=300, data__eval=str(held_out)))
    before, own = list_files(folder), measure(folder, 1)
    found = measure(folder, 1, str(held_out))
    assert {key: found[key] for key in own} == own
    (tmp_path / "strange.txt").write_text("Zyx! " * 200)
    outcome = CliRunner().invoke(app, ["eval", str(folder), "--data", str(tmp_path / "strange.txt"), "--batches", "2"])
    assert outcome.exit_code == 0, outcome.output
    (loss,) = re.findall(r"eval_loss: ([\d.]+)", outcome.output)
    assert float(loss) > own["eval_loss"] + 1 and "batches: 2 of" in outcome.output
    assert measure(folder, 1, batches=1)["eval_loss"] != own["eval_loss"]
    assert list_files(folder) == before

    for source, words in (("none", "none"), (str(tmp_path / "little.txt"), "too few")):
        (tmp_path / "little.txt").write_text("a")
        with pytest.raises(DataError, match=f"--data .*data.task is 'causal'.*{words}"):
            measure(folder, 1, source)


def test_translation_is_measured_on_other_pairs(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = train(
        make_config(
            data__task="translation", data__train=str(write_pairs(tmp_path / "pairs")), data__languages=["xx", "yy"],
            model__kind="encoder-decoder", train__steps=2,
        )
    )  # fmt: skip
    found = measure(folder, 1, str(write_pairs(tmp_path / "other", count=9)))
    assert math.isfinite(found["eval_loss"]) and 0 <= found["bleu"] <= 100
    (tmp_path / "half.xx").write_text("a dog\n")
    with pytest.raises(DataError, match=r"--data .*half.*half\.yy"):
        measure(folder, 1, str(tmp_path / "half"))


def test_images_have_the_classes_of_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """Some of them may be missing: the others keep their numbers."""
    images = write_images(tmp_path / "images.npz")
    folder = train(
        make_config(
            data__task="images", data__train=str(images), data__batch_size=16, model__kind="vit",
            model__image_size=16, model__patch=8, train__steps=2,
        )
    )  # fmt: skip
    with np.load(images) as arrays:
        chosen = arrays["labels"] >= 2
        some, labels = arrays["images"][chosen], arrays["labels"][chosen]
    np.savez(tmp_path / "plain.npz", images=some, labels=labels)
    np.savez(tmp_path / "some.npz", images=some, labels=labels - 2, names=np.array(["2", "3"]))
    assert measure(folder, 1, str(tmp_path / "some.npz")) == measure(folder, 1, str(tmp_path / "plain.npz"))
    np.savez(tmp_path / "others.npz", images=some, labels=labels - 2, names=np.array(["2", "emu"]))
    for source, words in (("others.npz", "emu"), ("nothing", "nothing")):
        with pytest.raises(StrettoError, match=f"--data .*{words}"):
            measure(folder, 1, str(tmp_path / source))
