"""Files of a stranger are opened by the real commands under an audit hook: nothing runs, nothing is written elsewhere.

The lists of inputs are in hostile.py, the hook in audited.py. In `make test` a sample is tried, in `make faults` all
of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from stretto.config import load_config
from stretto.train import train
from tests.corpora import write_corpus, write_images
from tests.faults import hostile
from tests.faults.conftest import Tally
from tests.faults.hostile import Case, Places, Server, find_faults
from tests.runs import PATIENCE_S

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc"),
]
ROOT = Path(__file__).parents[2]
FIRST, SAMPLE = 60, 12  # in `make test`: of the first ones, each twelfth
Try = Callable[[Iterator[Case]], None]


@pytest.fixture(scope="module")
def places(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("hostile")
    for name in ("outside", "temporary"):
        (root / name).mkdir()
    hostile.write_recipes(root)
    write_corpus(root / "text", documents=24)
    write_images(root / "images.npz", count=16)
    config = load_config(root / "images.toml", [f"data.train={root / 'images.npz'}", f"run.dir={root / 'image_run'}"])
    return Places(root, trained_run, train(config))


@pytest.fixture(scope="module")
def server(places: Places, whole: bool) -> Iterator[Server]:
    """The audited process. A `gs` on the path would notice if an image were handed to it."""
    program, temporary = places.root / "bin" / "gs", places.root / "temporary"
    hostile.write(program, f"#!/bin/sh\ntouch {places.outside / 'pwned'}\n").chmod(0o755)
    variables = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "TMPDIR": str(temporary), "HF_HOME": str(temporary),
        "HF_HUB_OFFLINE": "1", "MPLCONFIGDIR": str(temporary), "XDG_CACHE_HOME": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "WITH_DATASETS": "1" if whole else "",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.audited"],
        cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield Server(places.root, process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0


@pytest.fixture
def attempt(server: Server, places: Places, whole: bool, tally: Tally) -> Try:
    """Tries a list of inputs, or a sample of it."""

    def attempt_all(cases: Iterator[Case]) -> None:
        count, faults = 0, []
        for case in islice(cases, 0, None if whole else FIRST, 1 if whole else SAMPLE):
            faults += find_faults(case, server.ask(case))
            count += 1
        tally("hostile inputs", count)
        assert faults == [], f"{len(faults)} of {count}"
        assert not (places.outside / "pwned").exists()

    return attempt_all


def test_what_is_healthy_goes_on_working(server: Server, places: Places, whole: bool) -> None:
    for case in islice(hostile.list_healthy(places), 0, None, 1 if whole else 3):
        result = server.ask(case)
        assert [fault for fault in find_faults(case, result) if " MB:" not in fault] == []


@pytest.mark.fault("X1")
def test_pickles_and_programs_are_not_run(attempt: Try, places: Places) -> None:
    attempt(hostile.list_pickles(places))


@pytest.mark.fault("X1")
def test_data_sets_run_no_scripts(attempt: Try, places: Places, whole: bool) -> None:
    if not whole:
        pytest.skip("the library takes seconds to import")
    attempt(hostile.list_data_sets(places))


@pytest.mark.fault("X2")
def test_manifests_and_headers_lead_nowhere(attempt: Try, places: Places) -> None:
    attempt(hostile.list_manifests(places))


@pytest.mark.fault("X2")
def test_sizes_are_checked_before_memory_is_taken(attempt: Try, places: Places) -> None:
    attempt(hostile.list_sizes(places))


@pytest.mark.fault("X6")
def test_files_under_a_wrong_suffix_are_refused(attempt: Try, places: Places) -> None:
    attempt(hostile.list_disguises(places))


@pytest.mark.fault("X5")
@pytest.mark.fault("X6")
def test_links_and_pipes_are_refused(attempt: Try, places: Places) -> None:
    attempt(hostile.list_links(places))
    assert (places.outside / "precious").read_text() == "precious\n"


def assert_noticed(server: Server, case: Case, sabotage: str, event: str) -> None:
    """The same case is in order as it is, and not with the mechanism off."""
    assert find_faults(case, server.ask(case)) == []
    faults = find_faults(case, server.ask(replace(case, sabotage=sabotage)))
    assert any(f"forbidden: {event}" in fault for fault in faults), faults


def find(cases: Iterator[Case], name: str) -> Case:
    return next(case for case in cases if case.name == name)


@pytest.mark.control("X1")
def test_an_unpickled_class_would_be_noticed(server: Server, places: Places) -> None:
    case = find(hostile.list_pickles(places), "pickle 4 as .npz")
    assert_noticed(server, case, "unpickle", "pickle.find_class")
    case = find(hostile.list_pickles(places), "objects as labels")
    assert_noticed(server, case, "allow objects", "pickle.find_class")


@pytest.mark.control("X2")
def test_a_path_that_leads_out_would_be_noticed(server: Server, places: Places) -> None:
    case = find(hostile.list_manifests(places), f"index names {str(places.outside / 'secret.safetensors')!r}")
    assert_noticed(server, case, "join without check", "open")


@pytest.mark.control("X6")
def test_a_program_that_an_image_starts_would_be_noticed(server: Server, places: Places) -> None:
    folder = hostile.make_image_folder(places, "x.png", hostile.list_other_formats()["EPS program"])
    case = hostile.on_data("EPS", hostile.on_images(places, folder))
    assert_noticed(server, case, "open without formats", "subprocess.Popen")


@pytest.mark.control("X5")
def test_writing_through_a_link_would_be_noticed(server: Server, places: Places) -> None:
    case = find(hostile.list_links(places), "link as lock")
    assert_noticed(server, case, "follow links", "open")
