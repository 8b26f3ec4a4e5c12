"""Tables of rows: their formats, and rows that cannot be used."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.data.documents import open_documents
from stretto.errors import DataError
from stretto.report import read_events
from stretto.train import train
from tests.data.corpora import Opener
from tests.runs import MakeConfig, losses

TEXTS = ["first", "second, with a comma\nand a line", 'naïve "quotes"']


def read(source: Path | str, column: str = "text", **how: Any) -> list[str]:
    return list(open_documents("data.train", str(source), ".txt", column, **how))


def write_json(path: Path, rows: list[Any]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    import csv

    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[Any]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


Writer = Callable[[Path, list[Any]], Path]
FORMATS: dict[str, Writer] = {
    "x.jsonl": write_json, "x.jsonl.gz": write_json, "x.csv": write_csv, "x.parquet": write_parquet,
}  # fmt: skip


@pytest.mark.parametrize(("name", "write"), FORMATS.items(), ids=FORMATS.keys())
def test_each_row_is_a_document(tmp_path: Path, name: str, write: Writer) -> None:
    path = write(tmp_path / name, [{"id": str(i), "body": text} for i, text in enumerate(TEXTS)])
    assert read(path, "body") == TEXTS
    with pytest.raises(DataError, match=rf"data\.column = 'text': .*{name} has no column 'text', only 'id', 'body'"):
        read(path)


def test_formats_have_one_fingerprint(tmp_path: Path) -> None:
    rows = [{"text": text} for text in TEXTS]
    found = {
        open_documents("data.train", str(write(tmp_path / n, rows)), "").fingerprint for n, write in FORMATS.items()
    }
    assert len(found) == 1


def test_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_json(tmp_path / "b" / "2.jsonl", [{"text": "two"}])
    write_csv(tmp_path / "b" / "1.csv", [{"text": "one"}])
    write_json(tmp_path / "3.jsonl", [{"text": "three"}])
    (tmp_path / "notes.log").write_text("no table")
    assert read(tmp_path) == ["three", "one", "two"]
    assert read(tmp_path / "**" / "*.jsonl") == ["three", "two"] and read(tmp_path / "b" / "*") == ["one", "two"]
    with pytest.raises(DataError, match=r"no file of such a pattern"):
        read(tmp_path / "*.parquet")
    (tmp_path / "plain.txt").write_text("plain")
    assert read(tmp_path) == ["plain"], "tables are for folders without text"


def spoil(path: Path, good: int) -> Path:
    lines = [json.dumps({"text": f"row {i}"}).encode() for i in range(good)]
    lines[3:3] = [b"{", b'{"text": "caf\xe9"}', b'{"other": 1}', b'{"text": 5}', b"[]", b'{"text": "\\ud800"}', b""]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_rows_that_cannot_be_used_are_counted_and_named(tmp_path: Path) -> None:
    path = spoil(tmp_path / "x.jsonl", 700)
    documents = open_documents("data.train", str(path), "")
    assert documents.count == 700 and len(list(documents)) == len(list(documents)) == 700
    said = documents.spoiled.describe()
    assert said.startswith(f"; left out: 6 of 706 rows, {path}:4 (it is not JSON: ") and said.endswith(" and 1 more")
    reasons = {5: "it is not UTF-8", 6: "it has no column 'text'", 7: "'text' is int, not text", 8: "not a JSON object"}
    assert all(f"{path}:{line} (" in said and reason in said for line, reason in reasons.items())
    with pytest.raises(
        DataError, match=r"too many rows cannot be used; left out: 6 of 506 rows, .*x\.jsonl:4 \(.*Correct"
    ):
        open_documents("data.train", str(spoil(path, 500)), "")


def test_rows_of_a_csv_file_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    lines = [b"id,text", *(b"%d,row" % i for i in range(300))]
    lines[5:5] = [b"1,2,3", b"7,caf\xe9", b""]
    path.write_bytes(b"\r\n".join(lines))
    documents = open_documents("data.train", str(path), "")
    assert documents.count == 300
    assert documents.spoiled.describe() == (
        f"; left out: 2 of 302 rows, {path}:6 (it has 3 fields instead of 2), {path}:7 ('text' is not UTF-8)"
    )


def test_the_first_row_may_be_one_that_cannot_be_used(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.jsonl", [{"about": "these rows"}, *[{"text": "row"}] * 200])
    documents = open_documents("data.train", str(path), "")
    assert documents.count == 200
    assert documents.spoiled.describe() == f"; left out: 1 of 201 rows, {path}:1 (it has no column 'text')"


def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path) -> None:
    assert read(write_csv(tmp_path / "ROWS.CSV", [{"text": "one"}])) == ["one"]


def test_a_parquet_file_with_text_that_is_none_is_named(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.array([b"good", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"cannot read the Parquet file .*x\.parquet: 'utf-8' codec can't decode"):
        read(tmp_path / "x.parquet")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": "one"}])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cannot read the Parquet file .*x\.parquet"):
        read(path)


def test_a_run_says_what_it_left_out(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spoil(tmp_path / "rows.jsonl", 700)
    config = make_config()
    folder = train(replace(config, data=replace(config.data, train=str(path))))
    assert len(losses(folder)) == 6
    (notes,) = [event["notes"] for event in read_events(folder) if "notes" in event]
    assert any("left out: 6 of 706 rows" in note and "rows.jsonl:4" in note for note in notes)
    assert "left out: 6 of 706 rows" in capsys.readouterr().out.replace("\n", " ")


def test_a_data_set_that_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opener) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_json(folder / "train.jsonl", [{"body": f"text number {i}"} for i in range(50)])
    source = f"hf:{folder}"
    assert read(source, "body", streaming=True) == read(source, "body") == [f"text number {i}" for i in range(50)]
    data = opened(train=source, column="body", streaming=True, seq_len=8)
    assert "49 documents" in data.describe() and "1 documents" in data.describe()
    with pytest.raises(DataError, match=r"no column 'text', only 'body'"):
        read(source, streaming=True)
    write_json(folder / "train.jsonl", [{"body": i} for i in range(50)])
    with pytest.raises(DataError, match=r"hf:.*: body' is int, not text"):
        read(source, "body")
