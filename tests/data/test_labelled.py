"""Texts with labels: what is read, where labels are, and what is held out."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.api import load
from stretto.batch import Batch
from stretto.buckets import to_bucket
from stretto.config import ModelConfig, build_config
from stretto.data import Data
from stretto.data.labelled import sort_labels
from stretto.errors import ConfigError, DataError
from stretto.model import build_model
from stretto.score import measure
from stretto.train import train
from tests.data.corpora import Opener, same, sentence
from tests.runs import base, change

LABELS = ("kiwi", "apple", "plum")


def make_rows(count: int) -> list[dict[str, Any]]:
    """Whose label is their first word, said three times."""
    return [
        {"text": f"{LABELS[i % 3]} {LABELS[i % 3]} {LABELS[i % 3]} {sentence(i, i % 8 + 1)}", "label": LABELS[i % 3]}
        for i in range(count)
    ]


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_batch(batch: Batch, data: Data) -> list[tuple[str, str]]:
    assert batch.inputs is not None and batch.label_at is not None and data.tokenizer is not None
    begins = batch.label_at.tolist()
    ends = [*begins[1:], len(batch.inputs.ids)]
    assert [int(batch.inputs.ids[at]) for at in begins] == [data.tokenizer.bos] * len(begins)
    texts = [data.tokenizer.decode(batch.inputs.ids[a:b].tolist()) for a, b in zip(begins, ends, strict=True)]
    return [(text, data.labels[label]) for text, label in zip(texts, batch.labels.tolist(), strict=True)]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_each_text_has_its_label_and_none_is_in_both_parts(tmp_path: Path, opened: Opener, layout: str) -> None:
    rows = make_rows(60)
    settings = {"train": write_rows(tmp_path / "x.jsonl", rows), "batch_size": 8, "held_out": 0.2, "layout": layout}
    data = opened(task="classification", **settings)
    assert data.labels == ("apple", "kiwi", "plum") and data.num_train == 48 and data.num_eval_batches == 2
    seen = [pair for i in range(6) for pair in read_batch(data.train_batch(i), data)]
    seen += [pair for i in range(2) for pair in read_batch(data.eval_batch(i), data)]
    assert Counter(seen) == Counter((row["text"], row["label"]) for row in rows)
    again = opened(task="classification", **settings)
    assert all(same(data.train_batch(i), again.train_batch(i)) for i in range(12))
    parts = [data.train_batch(7, part, 2) for part in range(2)]
    assert sum((part.samples for part in parts), ()) == data.train_batch(7).samples


def test_labels_may_be_numbers_and_texts_are_cut(tmp_path: Path, opened: Opener) -> None:
    rows = [{"body": "x" * 50, "stars": i % 11} for i in range(44)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    data = opened(task="classification", train=path, column="body", label="stars", seq_len=20, batch_size=2)
    assert data.labels == tuple(map(str, range(11)))
    batch = data.train_batch(0)
    assert batch.inputs is not None and batch.inputs.ids.tolist()[:20] == [257, *[120] * 18, 258]
    assert "44 have 20 tokens, and may have been cut" in data.describe()
    assert sort_labels(["b", "10", "9"]) == ("10", "9", "b")
    zeros = ["0" * i + "7" for i in range(8)]
    assert sort_labels(zeros[::-1]) == tuple(zeros), "the same in every process, though all of them are 7"


def test_what_is_not_there_is_named(tmp_path: Path, opened: Opener) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"text": "a", "kind": "b"}])
    with pytest.raises(DataError, match=r"x\.jsonl has no column 'label', only 'text', 'kind'"):
        opened(task="classification", train=path)
    rows = [*make_rows(200), {"text": "a", "label": None}]
    data = opened(task="classification", train=write_rows(tmp_path / "x.jsonl", rows))
    assert "left out: 1 of 201 rows" in data.describe() and "x.jsonl:201 (it has no 'label')" in data.describe()
    (tmp_path / "x.csv").write_bytes(b"text,label\n" + b"a,b\n" * 200 + b"a,caf\xe9\n")
    data = opened(task="classification", train=str(tmp_path / "x.csv"))
    assert data.labels == ("b",) and "x.csv:202 ('label' is not UTF-8)" in data.describe()
    other = write_rows(tmp_path / "y.jsonl", [{"text": "a", "label": "whale"}])
    with pytest.raises(DataError, match=r"data\.eval has labels that data\.train has not: whale"):
        opened(task="classification", train=path, eval=other)
    (tmp_path / "plain.txt").write_text("a")
    with pytest.raises(DataError, match=r"it needs rows, in files that end in \.jsonl, \.csv, \.parquet"):
        opened(task="classification", train=str(tmp_path / "plain.txt"))


def test_evaluation_data_that_are_sorted_by_label_are_mixed(tmp_path: Path, opened: Opener) -> None:
    """Evaluations during training read the first batches alone."""
    rows = sorted(make_rows(90), key=lambda row: str(row["label"]))
    path = write_rows(tmp_path / "x.jsonl", rows)
    data = opened(task="classification", train=path, eval=path, batch_size=10)
    assert data.num_train == 90 and data.num_eval_batches == 9
    seen = [read_batch(data.eval_batch(i), data) for i in range(9)]
    assert len({label for _, label in seen[0]}) == 3
    assert Counter(chain(*seen)) == Counter((row["text"], row["label"]) for row in rows)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_texts_as_long_as_the_table_of_positions(tmp_path: Path, opened: Opener, layout: str) -> None:
    """Which is no multiple of what batches are rounded up to."""
    path = write_rows(tmp_path / "x.jsonl", make_rows(20))
    data = opened(task="classification", train=path, seq_len=21, batch_size=4, layout=layout)
    sizes = {"kind": "encoder", "classes": 3, "layers": 1, "width": 32, "heads": 2, "vocab": 320, "max_len": 21}
    model = build_model(ModelConfig(**sizes), "cpu").eval()  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        assert model(data.train_batch(0)).isfinite()


def test_a_batch_that_is_rounded_up_for_graphs_has_the_same_loss(tmp_path: Path, opened: Opener) -> None:
    data = opened(task="classification", train=write_rows(tmp_path / "x.jsonl", make_rows(60)), batch_size=7)
    torch.manual_seed(0)
    sizes = {"kind": "encoder", "classes": 3, "layers": 2, "width": 32, "heads": 2, "vocab": 320}
    model = build_model(ModelConfig(**sizes), "cpu").eval()  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = data.train_batch(0)
    rounded = to_bucket(batch)
    assert rounded.inputs is not None and batch.inputs is not None and len(rounded.inputs.ids) > len(batch.inputs.ids)
    with torch.no_grad():
        assert float(model(rounded)) == pytest.approx(float(model(batch)), rel=1e-5)


def test_a_run_learns_its_labels(tmp_path: Path) -> None:
    tree = change(
        base(tmp_path), data__task="classification", data__train=write_rows(tmp_path / "x.jsonl", make_rows(120)),
        model__kind="encoder", model__dropout=0.0, train__steps=60, train__micro_batches=1, data__batch_size=16,
        data__seq_len=32, run__dir=str(tmp_path / "run"), train__eval_batches=0, train__eval_every=0,
        data__held_out=0.2,
    )  # fmt: skip
    run = load(train(build_config(tree)))
    assert run.config.model.classes == 3 and run.evaluate()["accuracy"] > 0.9
    (best, *_), _ = run.label(["kiwi kiwi kiwi on a mat", "plum and"], top=2)
    assert best[0] == "kiwi" and best[1] > 0.5
    texts, sizes = [row["text"] for row in make_rows(40)], list[int]()
    logits = run.model.logits
    run.trained.model.logits = lambda batch: sizes.append(len(batch.labels)) or logits(batch)  # type: ignore[method-assign,operator]
    assert len(run.label(texts, top=1)) == 40 and sizes == [16, 16, 8], "as many at a time as in training"
    other = write_rows(tmp_path / "other.jsonl", [row for row in make_rows(30) if row["label"] == "plum"])
    assert measure(run.folder, 1, other)["accuracy"] > 0.5, "labels have the numbers of the run"
    with pytest.raises(ConfigError, match=r"model\.classes = 2, but the data has 3 classes"):
        train(build_config(change(tree, model__classes=2, run__dir=str(tmp_path / "other"))))
