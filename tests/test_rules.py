"""Rules that no linter knows: nothing executes what it loads, tests share no test module, the documents are true."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "stretto").rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEST_MODULES = sorted((ROOT / "tests").rglob("*.py"))
# What runs, or may run, what it is given. An audit hook sees it at run time, whatever the spelling, in what the tests
# reach (tests/faults/audited.py); this looks at all of the sources.
FORBIDDEN = {
    "pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "yaml", "joblib", "runpy", "pty",
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "os.system", "os.popen",
    "os.startfile", "os.execv", "os.execve", "os.execvp", "os.execvpe", "os.execl", "os.execle", "os.execlp",
    "os.execlpe", "os.fork", "os.posix_spawn", "os.posix_spawnp", "os.spawnl", "os.spawnle", "os.spawnv",
    "os.spawnve", "os.spawnvp", "os.forkpty", "torch.load", "torch.save", "torch.serialization", "torch.jit.load",
    "torch.hub", "torch.package", "torch.export.load", "torch.distributed.checkpoint", "torch.utils.model_zoo",
    "torch.classes.load_library", "torch.ops.load_library", "pandas.read_pickle", "pandas.read_hdf",
    "numpy.fromregex", "numpy.lib.format.read_array", "importlib.util.spec_from_file_location",
    "importlib.machinery.SourceFileLoader", "ctypes.CDLL", "ctypes.cdll", "PIL.Image.init", "PIL.ImageFile",
    "PIL.ImageGrab", "PIL.EpsImagePlugin", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
FORBIDDEN_ARGUMENTS = {"shell", "trust_remote_code", "weights_only", "use_safetensors"}
# Who starts processes, by arguments that are written there; and who imports modules that a list of its own names.
STARTS_PROCESSES = {
    "stretto/bench/contest.py", "stretto/hardware.py", "stretto/launch.py", "bench/big_corpus.py",
    "bench/check_scale.py", "bench/first_minutes.py", "bench/hf_families.py", "bench/pipeline_speed.py",
    "bench/same_numbers.py",
    "bench/time_to_loss.py", "bench/trainer_jobs.py",
}  # fmt: skip
IMPORTS_BY_NAME = {"stretto/techniques/__init__.py"}
CALLS_THE_SYSTEM = {"stretto/signals.py"}  # prctl(2), for which Python has no function
CHECKED = sorted(path for name in ("stretto", "bench", "examples") for path in (ROOT / name).rglob("*.py"))


class Names:
    """Finds what names stand for: modules under other names, what was imported from them, and what was assigned."""

    def __init__(self, tree: ast.AST) -> None:
        self.known: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    self.known[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self.known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                meant = self.resolve(node.value)
                if "." in meant:
                    self.known[node.targets[0].id] = meant

    def resolve(self, node: ast.AST) -> str:
        """Returns the full name of an expression: "numpy.load" of `np.load` and of `getattr(np, "load")`."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, f"builtins.{node.id}" if node.id in BUILTINS else node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.resolve(node.value)}.{node.attr}"
        if isinstance(node, ast.Subscript) and self.resolve(node.value).endswith(".__dict__"):
            return f"{self.resolve(node.value).removesuffix('.__dict__')}.{_text(node.slice)}"
        if isinstance(node, ast.Call):
            called, arguments = self.resolve(node.func), node.args
            if called in ("importlib.import_module", "builtins.__import__") and arguments:
                return _text(arguments[0])
            if called == "builtins.getattr" and len(arguments) > 1:
                return f"{self.resolve(arguments[0])}.{_text(arguments[1])}"
        return ""


BY_NAME = "import of a name that is not written there"
BUILTINS = {"eval", "exec", "compile", "__import__", "getattr"}


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def find_offences(source: str) -> list[str]:
    tree = ast.parse(source)
    names, offences = Names(tree), list[str]()
    for node in ast.walk(tree):
        meant = [names.resolve(node)] if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else []
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            meant = []
        if isinstance(node, ast.Import):
            meant = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            meant = [f"{node.module}.{alias.name}" for alias in node.names]
        offences += [name for name in meant for bad in FORBIDDEN if name == bad or name.startswith(f"{bad}.")]
        if isinstance(node, ast.Call):
            offences += _judge_call(names.resolve(node.func), node)
    return offences


def _judge_call(name: str, node: ast.Call) -> list[str]:
    """Judges the arguments of a call, also those in a dictionary that is spread over them."""
    words = {word.arg: word.value for word in node.keywords if word.arg}
    for word in node.keywords:
        if word.arg is None and isinstance(word.value, ast.Dict):
            words |= {_text(key): value for key, value in zip(word.value.keys, word.value.values, strict=True) if key}
    offences = [word for word in words if word in FORBIDDEN_ARGUMENTS]
    if name in ("PIL.Image.open", "Image.open") and "formats" not in words and len(node.args) < 3:
        offences.append("Image.open without formats")  # some formats start other programs
    if name == "numpy.load" and ast.unparse(words.get("allow_pickle", ast.Constant(None))) != "False":
        offences.append("numpy.load without allow_pickle=False")
    if name == "importlib.import_module" and not _is_own(node.args[0] if node.args else node):
        offences.append(BY_NAME)
    return offences


def _is_own(node: ast.AST) -> bool:
    """Says whether the name of a module is written in the source, at least its beginning."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return bool(_text(first))


def starts_processes(source: str) -> bool:
    tree = ast.parse(source)
    names = Names(tree)
    found = [names.resolve(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    return any(name.startswith(("subprocess.", "multiprocessing.", "torch.multiprocessing.")) for name in found)


@pytest.mark.fault("X4")
@pytest.mark.parametrize("path", CHECKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executes_what_it_loads(path: Path) -> None:
    source, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    allowed = {BY_NAME: name in IMPORTS_BY_NAME, "ctypes.CDLL": name in CALLS_THE_SYSTEM}
    assert [found for found in find_offences(source) if not allowed.get(found)] == []
    assert not starts_processes(source) or name in STARTS_PROCESSES


@pytest.mark.control("X4")
@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as p",
        "from dill import load",
        "from torch import load",
        "from torch import load as read\nread(f)",
        "import torch as t\nt.load(f)",
        "import torch\nread = torch.load\nread(f)",
        "import torch\ngetattr(torch, 'load')(f)",
        "import torch\ntorch.__dict__['load'](f)",
        "import torch\ntorch.jit.load(f)",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from importlib import import_module\nimport_module('pickle').load(f)",
        "from importlib import import_module\nimport_module(name)",
        "import importlib\nimportlib.import_module(config['target'])",
        "__import__('pickle')",
        "eval('1')",
        "import builtins\nbuiltins.eval('1')",
        "run = exec\nrun(text)",
        "compile(text, 'x', 'exec')",
        "run(x, shell=True)",
        "run(x, **{'shell': True})",
        "import os\nos.popen(x)",
        "from os import system as say\nsay(x)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import numpy as np\nnp.load(f, None, True)",
        "import numpy as np\nnp.load(f, allow_pickle=flag)",
        "from numpy import load\nload(f)",
        "import pandas as pd\npd.read_pickle(f)",
        "from PIL import Image\nImage.open(path)",
        "from PIL.Image import open as show\nshow(path)",
        "import PIL.Image\nPIL.Image.open(path)",
        "import runpy\nrunpy.run_path(f)",
        "import yaml\nyaml.unsafe_load(f)",
    ],
)
def test_a_planted_offence_is_found(planted: str) -> None:
    assert find_offences(planted)


@pytest.mark.control("X4")
def test_a_planted_process_is_found() -> None:
    assert starts_processes("from subprocess import run as go\ngo(['ls'])") and starts_processes(
        "import subprocess as s\ns.Popen"
    )


def find_imported_tests(source: str) -> list[str]:
    """The test modules that a source imports; their fixtures and builders belong into modules of another name."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return [name for name in names if ".test_" in name]


@pytest.mark.parametrize("path", TEST_MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_imports_a_test_module(path: Path) -> None:
    assert find_imported_tests(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import tests.test_model",
        "from tests.test_model import x",
        "from tests import test_model",
        "from .test_x import y",
    ],
)
def test_a_planted_import_of_a_test_module_is_found(planted: str) -> None:
    assert find_imported_tests(planted)


def test_advice_names_the_versions_that_are_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    transformers = next(need for need in project["optional-dependencies"]["hf"] if need.startswith("transformers"))
    assert f"pip install '{transformers}'" in (ROOT / "stretto" / "convert" / "folder.py").read_text(encoding="utf-8")
    assert f"transformers {transformers.partition('>=')[2]} or later" in (ROOT / "docs" / "hugging-face.md").read_text()
    # Older ones have faults that a stranger's file can use, or classes that are exchanged wrongly.
    floors = dict(need.split(">=") for need in [transformers, *project["dependencies"]] if ">=" in need)
    for name, least in {"transformers": (5, 3), "pillow": (12, 2), "jinja2": (3, 1, 6)}.items():
        assert tuple(map(int, floors[name].split(",")[0].split("."))) >= least, name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_in_the_documents_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)\)", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    assert missing == []


def test_the_walk_names_every_module() -> None:
    """A module that no document mentions is one that nobody will find."""
    walk = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    modules = [path for path in SOURCES if path.stem not in ("__init__", "__main__")]
    names = [str(path.relative_to(ROOT / "stretto")) for path in modules]
    assert [name for name in names if name not in walk] == []


def test_the_first_hour_is_short() -> None:
    """The files that docs/walk.md names for a first reading: a budget, so that they stay readable."""
    walk = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    hour = walk[walk.index("**The first hour**") : walk.index("## All files")]
    paths = re.findall(r"\]\(\.\./(stretto/[^)]+\.py)\)", hour)
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths)
    assert len(paths) > 15 and lines <= 3800
