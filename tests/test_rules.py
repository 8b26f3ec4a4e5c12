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
FORBIDDEN_MODULES = {"pickle", "dill", "shelve", "marshal", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "torch.load", "torch.save", "os.system"}
FORBIDDEN_ARGUMENTS = {"shell", "trust_remote_code", "weights_only"}


def find_offences(source: str) -> list[str]:
    offences = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            offences += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            offences.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS:
                offences.append(name)
            offences += [word.arg for word in node.keywords if word.arg in FORBIDDEN_ARGUMENTS]
            if name == "Image.open" and not any(word.arg == "formats" for word in node.keywords):
                offences.append("Image.open without formats")  # some formats start other programs
            if any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords):
                offences.append("allow_pickle")
    return offences


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executes_what_it_loads(path: Path) -> None:
    assert find_offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from dill import load",
        "eval('1')",
        "torch.load(f)",
        "run(x, shell=True)",
        "np.load(f, allow_pickle=True)",
        "Image.open(path)",
    ],
)
def test_a_planted_offence_is_found(planted: str) -> None:
    assert find_offences(planted)


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
    assert any(need.startswith("pillow>=") for need in project["dependencies"]), "what reads images is ours to choose"


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
