"""The code of README and of the documents runs: every block of Python and every command, in the order of the page, in a
folder of its own, with small sizes. Output that stands right behind one is compared. What is not run is in SKIPPED,
with the reason."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import stretto
import stretto.hf
from stretto import cli
from stretto.config import build_config
from stretto.optim import FlatAdamW
from stretto.runtime import describe_loss, explain
from stretto.signals import NOTHING_LOST
from stretto.values import parse
from tests.corpora import write_corpus, write_pairs
from tests.runs import PATIENCE_S

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash")

# Page, beginning of a command or of a block of Python ("" stands for all of them), and why it is not run here.
SKIPPED = {
    ("results", ""): "was measured on an H200, in hours",
    ("add-a-technique", ""): "tests/test_technique_page.py does it",
    ("numerics-lab", "stretto numerics causal-lm --probe"): "takes a GPU",
    ("numerics-lab", "python -m bench.eight_bits"): "takes minutes; tests/bench/test_eight_bits.py does it in short",
    (
        "pipeline",
        "stretto launch -n 8",
    ): "takes eight GPUs; tests/distributed/test_pipeline.py does it with two processes",
    ("plan", "python -m bench.check_plan"): "tests/bench/test_check_plan.py does it",
    ("sequence", "stretto launch -n 8"): "takes eight GPUs; tests/distributed/test_sequence_train.py does it with two",
    ("several-gpus", "stretto launch -n 8"): "takes four machines",
    ("several-gpus", "#!/bin/bash"): "takes Slurm",
    ("several-gpus", "srun "): "takes Slurm",
    ("start", "git clone"): "is for somebody who has no clone; bench/first_minutes.py does it",
    ("start", "cd stretto"): "the same",
    ("start", "python3 -m venv"): "fetches packages",
    ("start", ".venv/bin/pip"): "fetches packages",
    ("start", "pip install"): "fetches packages; bench/first_minutes.py does it",
    ("start", "python examples/"): "tests/test_examples.py does it",
    ("time-to-loss", "python -m bench"): "takes minutes; tests/bench/test_time_to_loss.py does it in short",
}
SMALL = {
    "model.layers": "2", "model.width": "32", "model.heads": "2", "model.vocab": "0", "data.vocab": "300",
    "data.seq_len": "32", "data.batch_size": "4", "data.train": "texts", "train.steps": "4", "train.log_every": "2",
    "run.device": "cpu",
}  # fmt: skip
OWN_DATA = {"instruct", "classify"}  # recipes that bring small data themselves
SHOWN = ("data.seq_len", "data.batch_size", "data.vocab", "model.vocab", "train.log_every")  # in what errors say
# Errors that no command leads to on a machine that is in order, as they are put into words, by the section.
UNPROVOKED: dict[str, Callable[[], object]] = {
    "Memory is full: 8": lambda: explain(MemoryError(), 600),
    "The disk is full: 9": lambda: explain(OSError(28, "No space left on device"), 600),
    "It was stopped: 75": lambda: NOTHING_LOST,
    "A process is lost: 7": lambda: describe_loss("rank 1 was lost without a word", 600),
}


def make_gpt2(**options: Any) -> GPT2LMHeadModel:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options)).train()


def make_loop(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """What a training loop around a Hugging Face model has."""
    model: Any = make_gpt2()
    model, ids = model.to(dtype), torch.randint(0, 64, (2, 16))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    optimizer = FlatAdamW(model.parameters(), lr=1e-3, weights="split" if dtype == torch.bfloat16 else "fp32")
    return {"model": model, "optimizer": optimizer, "batch": batch, "loader": [batch] * 3, "ids": ids}


def make_failing_loop() -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    bert = BertForMaskedLM(BertConfig(vocab_size=64, **sizes))
    models = {
        "bert": bert,
        "other": make_gpt2(),
        "eager": make_gpt2(attn_implementation="eager"),
    }
    return {**make_loop(torch.float32), **models, "FlatAdamW": FlatAdamW}


def make_plain_loop() -> dict[str, Any]:
    return make_loop(torch.float32)


NAMES = {"start": make_plain_loop, "fp8": make_loop, "hugging-face": make_loop, "troubleshooting": make_failing_loop}
BEFORE = {"hugging-face": ["stretto train causal-lm"]}  # what was done before the page is read


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    title: str  # of the section
    shows: str  # the output that stands right behind it

    @property
    def commands(self) -> list[str]:
        """The lines of a shell, continued ones as one; a script is one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [self.text] if self.text.startswith("#!") else [line for line in lines if line.strip()]

    @property
    def code(self) -> int:
        """The exit code of what is shown, which the title says."""
        found = re.search(r": (\d+)$", self.title)
        return int(found[1]) if found and self.shows else 0


def read_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    titles = [(0, ""), *((match.start(), match[1]) for match in re.finditer(r"^##+ (.*)", text, re.MULTILINE))]
    return [
        Block(
            path.stem,
            match[1],
            match[2],
            [title for at, title in titles if at <= match.start()][-1],
            behind[2] if (behind := FENCE.match(text, match.end() + 1)) and behind[1] == "text" else "",
        )
        for match in FENCE.finditer(text)
    ]


def find_reason(page: str, code: str) -> tuple[str, str] | None:
    return next((key for key in SKIPPED if key[0] == page and code.startswith(key[1])), None)


def flatten(text: str) -> str:
    return " ".join(text.split())


class Reader:
    """Somebody who types what a page says."""

    def __init__(self, page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.page, self.capsys, self.monkeypatch = page, capsys, monkeypatch
        self.small = {key: value for key, value in SMALL.items() if page != "troubleshooting" or key not in SHOWN}
        self.names: dict[str, Any] = {"stretto": stretto, "torch": torch, **self.make_names()}
        for line in BEFORE.get(page, ()):
            self.type(line)

    def make_names(self) -> dict[str, Any]:
        return NAMES[self.page]() if self.page in NAMES else {}

    def follow(self, block: Block) -> None:
        if block.language == "python":
            if find_reason(self.page, block.text) is None:
                self.compare(block, 0, self.execute(block))
        elif block.language == "toml":
            build_config(parse(block.text))
        elif block.language == "yaml":
            assert all(isinstance(part, dict) for part in yaml.safe_load_all(block.text))
        elif block.language == "text":
            if block.title in UNPROVOKED:
                assert flatten(str(UNPROVOKED[block.title]())) in flatten(block.text)
        else:
            assert block.language in SHELL, f"{self.page}: is {block.language} code, output, or what else?"
            lines = [line for line in block.commands if find_reason(self.page, line) is None]
            for number, line in enumerate(lines, 1):
                code, output = self.type(line)
                assert code in (0, block.code), f"{line}\nended with {code}: {output}"
                if number == len(lines):
                    self.compare(block, code, output)

    def compare(self, block: Block, code: int, output: str) -> None:
        assert code == block.code, f"{block.text}ended with {code}: {output}"
        assert flatten(block.shows) in flatten(output), f"{block.text}gave {output}"

    def execute(self, block: Block) -> str:
        """What Python prints; where output is shown, the error that it may be, as in the last line of a traceback."""
        if re.search(r"stretto\.accelerate\(\s*model\b", block.text):
            self.names |= self.make_names()
        try:
            exec(block.text, self.names)
        except Exception as error:
            if not block.shows:
                raise
            return f"{type(error).__name__}: {error}"
        return self.capsys.readouterr().out

    def type(self, line: str) -> tuple[int, str]:
        """The exit code and the output of a command."""
        words, target = shlex.split(line, comments=True), ""
        if words[0] == "make":
            found = re.search(rf"^{words[1]}:.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert found, f"Makefile has no {words[1]}"
            commands = [line.strip().removeprefix("$(BIN)/") for line in found[1].splitlines()]
            return max([self.type(command) for command in commands if command.startswith("stretto ")], default=(0, ""))
        if line == ". .venv/bin/activate":
            return 0, ""
        assert words[0] == "stretto", f"{self.page}: {line!r} cannot be run here: say in SKIPPED why not"
        if words[-2:-1] == [">"]:
            *words, _, target = words
        said = {word.partition("=")[0] for word in words}
        if "train" in words and not words[-2].startswith("runs/"):  # a run knows its own recipe
            said |= {"data.train", "data.seq_len"} if OWN_DATA & said else set()
            words += [
                part for key, value in self.small.items() if key not in said for part in ("--set", f"{key}={value}")
            ]
        code, output = self.launch(words) if words[1] == "launch" else self.call(words)
        if target:
            Path(target).write_text(output)
        return code, output

    def call(self, words: list[str]) -> tuple[int, str]:
        self.monkeypatch.setattr(sys, "argv", words)
        code = 0
        with suppress(SystemExit):
            code = 1
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
                raise
        read = self.capsys.readouterr()
        return code, read.out + read.err

    def launch(self, words: list[str]) -> tuple[int, str]:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_a_page_says_can_be_typed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    blocks = read_blocks(path)
    if not blocks:
        pytest.skip("has no code")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    reader = Reader(path.stem, capsys, monkeypatch)
    for block in blocks:
        reader.follow(block)


def write_files(folder: Path) -> None:
    """What readers are taken to have: texts, and the mistakes that troubleshooting.md makes."""
    write_corpus(folder / "texts", documents=400)
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, content in {
        "short/a.txt": "Hello.\n",
        "pictures/a.png": "",
        "docs/a.md": "The loss falls.\n" * 200,
    }.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(content)
    with write_pairs(folder / "pairs").with_suffix(".yy").open("a") as file:
        file.write("one more\n")
    make_gpt2().save_pretrained(folder / "models" / "gpt2")
    (folder / "recipe.toml").write_text('[model]\npreset = "llama-1b"\nmax_len = 262144\n')


def test_what_is_skipped_is_there() -> None:
    codes = [
        (path.stem, code) for path in PAGES for block in read_blocks(path) for code in [block.text, *block.commands]
    ]
    met = {find_reason(page, code) for page, code in codes}
    assert set(SKIPPED) - met == set()


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("python", "```python\nstretto.trian('demo')\n```\n"),
        ("README", "```sh\nstretto train demo --set train.stepz=1\n```\n"),
        ("README", "```\nstretto train demo\nstretto train demo\n```\n"),
        ("README", "```sh\nrm -rf /tmp/nothing\n```\n"),
        ("lean", "```toml\n[techniques.lean]\nnorm = 1\n```\n"),
        ("troubleshooting", "## No: 3\n```sh\nstretto train gpt9\n```\n```text\nstretto: something else\n```\n"),
        ("troubleshooting", "## No: 4\n```sh\nstretto train gpt9\n```\n```text\nstretto: there is no file\n```\n"),
        ("troubleshooting", "## Memory is full: 8\n```text\nout of memory\n```\n"),
    ],
)
def test_mistakes_are_seen(
    page: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control of the test above."""
    (tmp_path / f"{page}.md").write_text(wrong)
    with pytest.raises((AssertionError, AttributeError, stretto.StrettoError)):
        test_what_a_page_says_can_be_typed(tmp_path / f"{page}.md", tmp_path, monkeypatch, capsys, None)
