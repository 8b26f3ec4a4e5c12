"""Recipes and overrides of any form are a configuration or one clear error; sizes that cannot fit are refused."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import stretto.config
from stretto.capacity import require_room, require_room_for_weights
from stretto.config import Config, build_config, dump_config, load_config
from stretto.errors import ConfigError
from stretto.hardware import find_machine_memory
from stretto.memory import MOST_BLOCKS, list_blocks
from stretto.values import MOST_BYTES
from tests.faults.conftest import Tally
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[2]
CASES, QUICK = 5_200, 320
SECONDS_EACH = 0.05  # on average
KEYS = [f"{section}.{key}" for section, values in asdict(Config()).items() for key in values]
KEYS += [
    "os.system",
    "model.__class__",
    "train.steps.more",
    "run",
    "",
    ".",
    "a.b.c.d",
    "import.os",
    "techniques.fused.weights",
]
VALUES = [
    "1",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "true",
    '"text"',
    '""',
    "[]",
    "[1, 2]",
    '["en", "de"]',
    "{}",
    "{a = 1}",
    "1" * 4301,
    "0x" + "f" * 6000,
    "1" + "0" * 400,
    "1e400",
    str(2**63),
    str(-(2**63) - 1),
    "[" * 3000,
    "[" * 900 + "]" * 900,
    "{a=" * 500,
    '"' + "x" * 5000 + '"',
    '"\\u0000"',
    '"\\ud800"',
    "2026-11-18",
    "07:32:00",
    "'''",
    '"""',
    "\\",
    "#",
    "a." * 5000 + "a",
    "'os.system'",
    "\"__import__('os').system('true')\"",
    '"gpt2-small"',
    '"hf:x"',
    '"../../etc"',
    "\x00",
    "\udcff",
    "\u2028",
    "é",
    "1_000",
    "0b1",
    "+1",
    "'auto'",
    "'cuda'",
    "'vit'",
    "'encoder'",
    "'translation'",
    "'images'",
]


def draw_text(choose: random.Random) -> str:
    """Lines that look like TOML, and lines that do not."""
    lines = []
    for _ in range(choose.randrange(1, 6)):
        section, _, key = choose.choice(KEYS).partition(".")
        lines += [f"[{section}]"] if choose.random() < 0.7 else []
        lines.append(f"{key or section} = {choose.choice(VALUES)}")
    text = "\n".join(lines)
    for _ in range(choose.randrange(3) if choose.random() < 0.3 else 0):
        at = choose.randrange(len(text))
        text = text[:at] + choose.choice("\x00[]{}\"'=.\n\\#é\udcff0") + text[at + choose.randrange(2) :]
    return text


def try_one(number: int, folder: Path, load: Callable[..., Any]) -> None:
    """Reads a drawn recipe with drawn overrides: a configuration, which can be written and read again, or an error."""
    choose = random.Random(number)
    path, sets = folder / "recipe.toml", []
    path.write_bytes(draw_text(choose).encode("utf-8", errors="surrogateescape") if choose.random() < 0.6 else b"")
    for _ in range(choose.randrange(3)):
        key, value = choose.choice(KEYS), choose.choice(VALUES)
        sets.append(choose.choice([f"{key}={value}", f"{key} = {value}", key, f"={value}", f"{key}{value}"]))
    try:
        config = load(path, sets)
    except ConfigError as error:
        assert 0 < len(str(error)) < 10_000
        return
    assert isinstance(config, Config)
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def try_many(count: int, folder: Path, load: Callable[..., Any] = load_config) -> None:
    modules, files, begin = (
        set(sys.modules),
        set(folder.parent.rglob("*")) | {folder / "recipe.toml"},
        time.process_time(),
    )
    for number in range(count):
        try_one(number, folder, load)
    assert set(sys.modules) == modules, "a module was imported"
    assert set(folder.parent.rglob("*")) <= files, "a file was made"
    assert time.process_time() - begin < count * SECONDS_EACH


@pytest.mark.fault("X3")
def test_any_text_is_a_configuration_or_one_clear_error(
    tmp_path: Path, whole: bool, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fuzz").mkdir()
    monkeypatch.chdir(tmp_path)
    count = CASES if whole else QUICK
    try_many(count, tmp_path / "fuzz")
    tally("fuzzed configurations", count)


@pytest.mark.control("X3")
def test_an_import_by_string_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that imports what a key names, as some do."""
    (tmp_path / "fuzz").mkdir()
    monkeypatch.chdir(tmp_path)
    real, wanted = stretto.config._convert, "wave"
    monkeypatch.delitem(sys.modules, wanted, raising=False)

    def instantiate(key: str, kind: Any, value: Any) -> Any:
        importlib.import_module(wanted)
        return real(key, kind, value)

    monkeypatch.setattr(stretto.config, "_convert", instantiate)
    with pytest.raises(AssertionError, match="a module was imported"):
        try_many(QUICK, tmp_path / "fuzz")


@pytest.mark.fault("X3")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nsteps = " + "1" * 4301, "not valid TOML"),
        ("[optim]\nlr = 1" + "0" * 400, "optim.lr"),
        ("[train]\nsteps = 0x" + "f" * 6000, "train.steps = a number of 24,000 bits"),
        ("[train]\nsteps = " + "[" * 3000, "not valid TOML"),
        (f"[run]\nseed = {2**63}", "run.seed"),
        ('[run]\ndir = "a\\u0000b"', "run.dir"),
        ("a" + ".a" * 30_000 + " = 1", "dots"),
        ("#" * (MOST_BYTES + 1), "more than"),
        ("[data]\nvocab = 1000000000000", "data.vocab"),
        ('[train]\nsteps = "' + "x" * 100_000 + '"', "train.steps"),
    ],
    ids=lambda value: value[:20],
)
def test_what_no_recipe_has(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "r.toml")
    assert words in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.fault("X3")
def test_a_command_line_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("")
    for value in ("\udcff", '"\udcff"', "1" * 4301, "1" + "0" * 400, "[" * 3000):
        for key in ("run.dir", "train.steps", "optim.lr", "data.languages", "\udcff.x"):
            if (key, value) not in {("run.dir", "[" * 3000), ("run.dir", "1" * 4301)}:  # which are folders, if odd ones
                with pytest.raises(ConfigError):
                    load_config(tmp_path / "r.toml", [f"{key}={value}"])
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "plan", "demo", "--memory", b"--set", b"run.dir=\xff"],
        cwd=ROOT, capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, b"Traceback" in done.stderr) == (3, False), done.stderr


GIANTS: list[tuple[str, dict[str, Any]]] = [
    ("model.layers", {"model": {"layers": 10**9}}),
    ("model.layers", {"model": {"layers": 20_000}}),
    ("model.width", {"model": {"width": 2**40}}),
    ("model.vocab", {"model": {"vocab": 2**50}}),
    ("model.max_len", {"model": {"max_len": 2**50}}),
    ("model.mlp_width", {"model": {"mlp_width": 2**50}}),
    ("data.batch_size", {"data": {"batch_size": 10**12}}),
    ("train.micro_batches", {"train": {"micro_batches": 10**12}}),
    ("model.image_size", {"data": {"task": "images"}, "model": {"preset": "vit-tiny", "image_size": 2**30}}),
    ("data.batch_size", {"data": {"task": "images", "batch_size": 10**9}, "model": {"preset": "vit-tiny"}}),
]


@pytest.mark.fault("X2")
@pytest.mark.parametrize(("key", "tree"), GIANTS)
def test_sizes_that_cannot_fit_are_refused_with_both_numbers(key: str, tree: dict[str, Any]) -> None:
    for gpu in (0, 2**34):
        with pytest.raises(ConfigError) as error:
            require_room(build_config(tree), 1, gpu)
        assert key in str(error.value) and str(error.value).count("GiB") == 2
        assert ("GPU" in str(error.value) and "16.0 GiB" in str(error.value)) or not gpu or key == "model.layers"


@pytest.mark.control("X2")
@pytest.mark.parametrize(("key", "tree"), [giant for giant in GIANTS if "layers" not in giant[1].get("model", {})])
def test_a_machine_without_end_would_take_them(key: str, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.capacity.find_machine_memory", lambda: 10**40)
    require_room(build_config(tree), 1, 0)


def test_what_fits_is_not_refused() -> None:
    for preset in ("gpt2-xl", "llama-1b", "gpt2-tiny"):
        config = build_config({"model": {"preset": preset}, "data": {"seq_len": 128}})
        require_room(config, 1, 80 * 2**30)
        require_room_for_weights(config.model, 80 * 2**30)
    large = build_config({"model": {"preset": "gpt2-xl"}})
    with pytest.raises(ConfigError, match=r"model\.layers = 48"):
        require_room(large, 1, 8 * 2**30)
    require_room(large, 8, 8 * 2**30)
    assert find_machine_memory() > 2**28


def test_plans_have_an_end() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers"):
        list_blocks(build_config({"model": {"layers": MOST_BLOCKS + 1}}).model)


def test_every_section_is_drawn() -> None:
    assert {key.partition(".")[0] for key in KEYS} >= asdict(Config()).keys() and len(KEYS) > 80
