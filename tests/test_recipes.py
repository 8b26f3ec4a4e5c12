"""Every shipped recipe trains for real, made small by overrides alone, and then evaluates and generates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from stretto.cli import app
from stretto.report import read_events
from tests.corpora import write_corpus, write_images, write_pairs

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = [
    *("model.layers=2", "model.width=32", "model.heads=2", "model.mlp_width=64", "run.device=cpu"),
    *("train.compile=false", "train.steps=30", "train.log_every=5", "train.eval_every=15"),
    *("optim.warmup=5", "optim.lr=1e-2"),
]
TEXT = ["data.vocab=300", "data.seq_len=32", "data.batch_size=8", "model.vocab=0"]


def stretto(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def train(recipe: str, folder: Path, *overrides: str) -> list[float]:
    """The logged losses."""
    options = [part for override in [*TINY, *overrides, f"run.dir={folder}"] for part in ("--set", override)]
    assert "report.html" in stretto("train", recipe, *options)
    return [event["loss"] for event in read_events(folder) if "loss" in event]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return f"data.train={write_corpus(tmp_path / 'text', documents=40)}"


@pytest.mark.parametrize("recipe", ["demo", "causal-lm"])
def test_causal(recipe: str, tmp_path: Path, corpus: str) -> None:
    run = tmp_path / "run"
    losses = train(recipe, run, *TEXT, corpus)
    assert losses[-1] < losses[0] - 1.5
    assert "perplexity: " in stretto("eval", str(run))
    assert stretto("generate", str(run), "--prompt", "the cat", "--max-new", "9").startswith("the cat")


def test_demo_on_the_standard_library(tmp_path: Path) -> None:
    losses = train("demo", tmp_path / "run", "data.seq_len=64", "data.batch_size=8")
    assert 5.3 < losses[0] < 5.8 and losses[-1] < 4.0


def test_instruct(tmp_path: Path) -> None:
    run = tmp_path / "run"
    losses = train("instruct", run, f"data.train={EXAMPLES / 'chat.jsonl'}")
    assert losses[-1] < losses[0] - 2
    assert "perplexity: " in stretto("eval", str(run))
    asked = "What comes after five?"
    answer = stretto("generate", str(run), "--prompt", asked, "--max-new", "20", "--temperature", "0")
    assert answer.strip() and asked not in answer


def test_masked(tmp_path: Path, corpus: str) -> None:
    run = tmp_path / "run"
    losses = train("masked-lm", run, *TEXT, corpus, "model.dropout=0.0", "train.steps=60")
    assert losses[-1] < losses[0] - 1.0
    assert "perplexity: " in stretto("eval", str(run))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_translation(tmp_path: Path, layout: str) -> None:
    run, prefix = tmp_path / "run", write_pairs(tmp_path / "pairs", count=200)
    losses = train(
        "translation", run, f"data.train={prefix}", "data.eval=", "data.test=", "data.held_out=0.1", "data.vocab=300",
        'data.languages=["xx", "yy"]', "data.max_tokens=256", f"data.layout={layout}", "model.dropout=0.0",
    )  # fmt: skip
    assert losses[-1] < losses[0] - 1.0
    shares = [event["padding"] for event in read_events(run) if "loss" in event]
    assert all(share == 0 for share in shares) if layout == "packed" else max(shares) > 0
    scores = stretto("eval", str(run), "--beam", "2")
    assert "bleu: " in scores and "signature: nrefs:1" in scores
    (tmp_path / "lines.txt").write_text("the cat\nbig dog sees\n")
    assert len(stretto("generate", str(run), "--input", str(tmp_path / "lines.txt"), "--beam", "1").splitlines()) == 2


def test_images(tmp_path: Path) -> None:
    run, images = tmp_path / "run", write_images(tmp_path / "images.npz", count=200)
    train(
        "images",
        run,
        f"data.train={images}",
        "data.batch_size=16",
        "model.image_size=16",
        "train.steps=250",
        "model.dropout=0.0",
        "optim.lr=3e-3",
    )
    assert float(stretto("eval", str(run)).split("accuracy: ")[1]) > 0.9
    picture = np.zeros((16, 16), np.uint8)
    picture[4:8] = 190  # class 1
    Image.fromarray(picture).save(tmp_path / "one.png")
    line = stretto("generate", str(run), "--input", str(tmp_path / "one.png"), "--top-k", "2")
    assert line.startswith("one.png: 1 ") and line.count("%") == 2


def test_translation_on_real_data(tmp_path: Path, real_data: Path) -> None:
    losses = train(
        "translation", tmp_path / "run", f"data.train={real_data}/multi30k/train",
        f"data.eval={real_data}/multi30k/val", "data.test=", "data.vocab=1000", "data.max_tokens=1024",
        "train.eval_batches=2", "train.steps=40",
    )  # fmt: skip
    assert losses[-1] < losses[0] - 1.0


def test_language_model_on_real_data(tmp_path: Path, real_data: Path) -> None:
    losses = train(
        "causal-lm", tmp_path / "run", f"data.train={real_data}/wikitext2/valid.txt",
        f"data.eval={real_data}/wikitext2/test.txt", *TEXT,
    )  # fmt: skip
    assert losses[-1] < losses[0] - 1.0


def test_recipes_are_listed() -> None:
    lines = stretto("recipes").splitlines()
    assert [line.split()[0] for line in lines] == [
        "causal-lm",
        "demo",
        "images",
        "instruct",
        "masked-lm",
        "translation",
    ]
