"""`python -m bench.kernels`: all compute the same, the work is counted right, and what fails stops nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from bench.kernels import (
    CASES,
    FAMILIES,
    Case,
    Problem,
    app,
    build_problem,
    call,
    main,
    measure_case,
    print_family,
    run_kernels,
)
from stretto.bench.contest import TINY
from stretto.errors import ConfigError, StrettoError
from stretto.runtime import choose_device
from tests.ops.checks import error

CPU = torch.device("cpu")
CEILINGS = {"TB/s": 4.0, "TF/s": 700.0}
IDS = [f"{case.family}, {case.name}, {case.sizes['width' if 'width' in case.sizes else 'rows']}" for case in CASES]


def without_dropout(case: Case) -> Case:
    return replace(case, options=case.options | {"p": 0.0}) if "p" in case.options else case


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_all_contestants_compute_the_same(case: Case) -> None:
    problem = build_problem(without_dropout(case), CPU)
    contestants = [problem.plain, problem.ours]
    if problem.compiled:
        torch.compiler.reset()
        contestants.append(torch.compile(problem.plain, fullgraph=True, dynamic=False, backend="aot_eager"))
    results = [[t.detach() for t in call(function, problem.args)] for function in contestants]
    if "both" in problem.work:
        gradients = [torch.randn_like(output) for output in results[0]]
        for some, function in zip(results, contestants, strict=True):
            some += call(function, problem.args, gradients)
    for others in results[1:]:
        assert [t.dtype for t in others] == [t.dtype for t in results[0]] or case.family == "adamw"
        # Roundings to bf16. An optimizer step that is left out is 0.05.
        assert max(error(a, b) for a, b in zip(others, results[0], strict=True)) < 0.015


@pytest.mark.parametrize(
    ("name", "share"),
    [("LayerNorm dropout", 0.1), ("relu, dropout", 0.55), ("BERT", 0.1), ("dropout", 0.1)],
)
def test_all_contestants_drop_as_much(name: str, share: float) -> None:
    (case,) = (case for case in CASES if case.name == name)
    problem = build_problem(case, CPU)
    for function in (problem.plain, problem.ours):
        out = call(function, problem.args)
        # The stream is the residual where the branch was dropped, any other result is 0 there.
        dropped = out[1] == problem.args[1] if case.family == "norm" else out[0] == 0
        assert float(dropped.float().mean()) == pytest.approx(share, abs=0.03)


def matrix_bytes(tensors: Any) -> int:
    """Of those tensors with two dimensions or more; what shares memory counts once."""
    matrices = {t.data_ptr(): t for t in tensors if isinstance(t, Tensor) and t.ndim > 1}
    return sum(t.numel() * t.element_size() for t in matrices.values())


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.family in ("norm", "activation", "dropout") or case.name == "of logits"],
    ids=lambda case: f"{case.family}, {case.name}",
)
def test_bytes_are_those_of_the_tensors(case: Case) -> None:
    problem = build_problem(case, CPU)
    outputs = call(problem.ours, problem.args)
    assert problem.work["forward"] == matrix_bytes([*problem.args, *outputs])
    upstream = [torch.randn_like(output) for output in outputs]
    kept = {"norm": outputs[1:], "dropout": []}.get(case.family, problem.args[:1])
    backward = matrix_bytes([*upstream, *kept, *call(problem.ours, problem.args, upstream)])
    assert problem.work["both"] == problem.work["forward"] + backward


def test_bytes_of_an_embedding_are_those_of_the_rows_it_looks_up() -> None:
    plain, bert = (build_problem(case, CPU) for case in CASES if case.family == "embedding")
    tokens, width, vocab = 64, 64, 512
    rows = len(set(plain.args[0].tolist())) + tokens  # each at a position of its own
    assert plain.work["forward"] == 4 * rows * width + 2 * tokens * width
    assert plain.work["both"] - plain.work["forward"] == 2 * tokens * width + 4 * (vocab + 1024) * width
    rows = len(set(bert.args[0].tolist())) + tokens
    written = 4 * (vocab + 512) * width
    assert bert.work["both"] - bert.work["forward"] == 4 * rows * width + 2 * tokens * width + written


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.family in ("mlp", "heads") or case.name == "linear"],
    ids=lambda case: f"{case.family}, {case.name}, {case.sizes['width']}",
)
def test_flops_are_those_that_torch_counts(case: Case) -> None:
    problem = build_problem(case, CPU)
    with FlopCounterMode(display=False) as counter:
        outputs = call(problem.plain, problem.args)
    assert problem.work.get("forward", counter.get_total_flops()) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        call(problem.plain, problem.args, [torch.randn_like(output) for output in outputs])
    assert problem.work["both"] == counter.get_total_flops() and problem.unit == "TF/s"


def test_bytes_of_an_update() -> None:
    for case, each in zip((case for case in CASES if case.family == "adamw"), (32, 28, 16), strict=True):
        problem = build_problem(case, CPU)
        assert problem.work == {"update": each * sum(p.numel() for p in call(problem.ours, ()))}


def build_broken(rows: int) -> Problem:
    def plain(x: Tensor) -> Tensor:
        raise ValueError("no such thing\nin plain torch")

    return Problem(torch.neg, plain, (torch.randn(rows, rows).requires_grad_(),), {"forward": 1e6, "both": 2e6})


def build_nothing(rows: int) -> Problem:
    raise MemoryError("too large")


def test_what_fails_says_why_and_the_rest_goes_on() -> None:
    broken = measure_case(Case("norm", "broken", build_broken, {"rows": 4}), CPU, CEILINGS)
    assert broken["failed"].keys() == {"eager", "compile"} and "ValueError" in broken["failed"]["eager"]
    for kind, work in (("forward", 1e6), ("both", 2e6)):
        assert broken["passes"][kind].keys() == {"work", "stretto"}
        ours = broken["passes"][kind]["stretto"]
        assert ours["rate"] == pytest.approx(work / (ours["ms"] / 1e3) / 1e12) and ours["share"] == ours["rate"] / 4.0
    nothing = measure_case(Case("norm", "nothing", build_nothing, {"rows": 4}), CPU, CEILINGS)
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        print_family(console, "norm", [broken, nothing])
    text = capture.get()
    assert "broken: eager: failed: ValueError: no such thing\n" in text
    assert "nothing: inputs: failed: MemoryError: too large\n" in text


def test_the_table_fits_80_columns() -> None:
    numbers = {"ms": 0.01234, "rate": 602.4, "share": 0.851}
    ours = numbers | {"over_eager": 12.345, "over_compile": 1.2345}
    times = {"work": 1.0, "eager": numbers | {"ms": 123.456}, "compile": numbers, "stretto": ours}
    results = [
        {"name": case.name, "sizes": case.sizes, "unit": "TF/s", "passes": {"forward": times, "both": times}}
        | {"failed": {}}
        for case in CASES
    ]
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        print_family(console, max(FAMILIES, key=len), results)
    lines = capture.get().splitlines()
    assert not any("…" in line for line in lines)
    row = "LayerNorm dropout forward 123 0.0123 0.0123 12.35 1.23 602 TF/s 85%"
    assert row.split() in [line.split() for line in lines]
    assert "16384x2048x128256" in {line.split()[0] for line in lines if line.split()}


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the family that needs no compiler."""
    monkeypatch.setattr("bench.kernels.WARM_UP", 1)
    monkeypatch.setattr("bench.kernels.TIMED", 3)
    run_kernels(["adamw"], tmp_path / "new")
    path = tmp_path / "new" / "kernels.json"
    printed, saved, device = capsys.readouterr().out, json.loads(path.read_text()), choose_device()
    assert str(path) in printed
    assert saved["environment"]["torch"] == torch.__version__ and saved["steps"] == 3
    assert saved["note"] == (TINY if device.type == "cpu" else "") and saved["note"] in printed
    assert [case["name"] for case in saved["cases"]] == ["fp32", "split", "bf16"]
    for case in saved["cases"]:
        times = case["passes"]["update"]
        assert case["failed"] == {} and times.keys() == {"work", "eager", "stretto"}
        assert times["stretto"]["over_eager"] == times["eager"]["ms"] / times["stretto"]["ms"]
        assert times["eager"]["share"] == times["eager"]["rate"] / saved["peak"]["TB/s"]


@pytest.mark.slow
def test_a_run_with_a_compiler(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dropout", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (case,) = json.loads((tmp_path / "kernels.json").read_text())["cases"]
    assert case["failed"] == {} and case["passes"].keys() == {"forward", "both"}
    for times in case["passes"].values():
        assert times["stretto"]["over_compile"] == times["compile"]["ms"] / times["stretto"]["ms"]


@pytest.mark.gpu
@pytest.mark.slow
def test_no_kernel_is_faster_than_memory() -> None:
    """Were bytes counted that nobody moves, or found in the cache, this would show."""
    (case,) = (case for case in CASES if case.name == "LayerNorm")
    for times in measure_case(case, torch.device("cuda"), {"TB/s": 4.8})["passes"].values():
        assert 0.3 < times["stretto"]["share"] < 1.0 and times["compile"]["share"] < 1.0


def test_mistakes_answer_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"there is no family of kernels 'nom'; there are: {', '.join(FAMILIES)}"
    monkeypatch.setattr("sys.argv", ["kernels", "norm", "nom", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=str(ConfigError.exit_code)):
        main()
    assert capsys.readouterr().err == f"kernels: {message}\n"
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        run_kernels(["norm"], tmp_path / "file")


def test_a_run_without_a_result_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kernels.CASES", [Case("norm", "nothing", build_nothing, {"rows": 4})])
    with pytest.raises(StrettoError, match="nothing could be measured"):
        run_kernels(["norm"], tmp_path)
    assert json.loads((tmp_path / "kernels.json").read_text())["cases"][0]["failed"] == {
        "inputs": "MemoryError: too large"
    }
