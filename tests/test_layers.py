"""Imports point downward: the contract of the package's layers, which docs/architecture.md shows as a picture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hpcdecode

PACKAGE = Path(hpcdecode.__file__).parent
LAYERS = (  # the ground first; a module imports from its own room and from rooms above it in this list
    "errors",
    "_version",
    "system",
    "mpi",
    "ranks",
    "attention",
    "requests",
    "config",
    "schedule",
    "sampling",
    "model.frontend",
    "model.lower",
    "model.run",
    "model",
    "exchange",
    "data.prompts",
    "data.results",
    "report",
    "engine",
    "doctor",
    "planning",
    "generate",
    "serve",
    "llm",
    "serve",
    "",  # `hpcdecode` itself, its lazy names
    "bench",
    "cli",
    "__main__",
)
NATIVE = {"_attn_cpu", "_attn_cuda", "_attn_cuda_emulated", "_ops_cpu"}  # below everything


def modules(package: Path) -> dict[str, Path]:
    """Return the path of every module by its name below `package`."""
    found = {}
    for path in package.rglob("*.py"):
        if "demo" in path.relative_to(package).parts:
            continue
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports, in functions and for type checkers too."""
    found = set()
    for node in _statements(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {_module(name.partition(".")[2], known) for name in names if name.partition(".")[0] == "hpcdecode"}
    return {name for name in found if name not in NATIVE}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file, in functions too."""
    return [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def _module(name: str, known: dict[str, Path]) -> str:
    while name and name not in known and name not in NATIVE:
        name = name.rpartition(".")[0]
    return name


def room(module: str) -> str:
    """Return the layer of a module: its longest prefix in LAYERS."""
    while module not in LAYERS:
        module, _, last = module.rpartition(".")
        assert module or last in LAYERS, f"{last}: in no layer"
    return module


def upward(package: Path) -> list[str]:
    """Return the imports that point upward."""
    known = modules(package)
    return [
        f"{module} imports {other}"
        for module, path in sorted(known.items())
        for other in sorted(imports(path, known))
        if LAYERS.index(room(other)) > LAYERS.index(room(module))
    ]


def circles(package: Path) -> list[str]:
    """Return one circle of imports, if there is one."""
    known = modules(package)
    try:
        list(TopologicalSorter({m: imports(p, known) - {m} for m, p in known.items()}).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_point_downward():
    assert upward(PACKAGE) == []


def test_no_circles():
    assert circles(PACKAGE) == []


def test_no_class_name_stands_for_two_things():
    trees = (_tree(path) for path in modules(PACKAGE).values())
    names = Counter(node.name.lstrip("_") for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_few_modules_lie_at_the_top():
    assert {p.stem for p in PACKAGE.glob("*.py")} == {
        *("__init__", "__main__", "_version", "config", "errors", "generate", "llm")
    }


@pytest.mark.parametrize("line", ["import hpcdecode.engine.desk", "def f():\n    from hpcdecode.cli import main"])
def test_one_upward_import_is_found(tmp_path, line):
    (tmp_path / "schedule").mkdir()
    for name in ("engine", "cli"):
        (tmp_path / name).mkdir()
    (tmp_path / "engine/desk.py").touch()
    (tmp_path / "cli/__init__.py").touch()
    (tmp_path / "schedule/plan.py").write_text(line)
    assert len(upward(tmp_path)) == 1


def test_no_test_module_imports_another():
    """What tests share lies in tests/support, or in a module beside them that is no test."""
    root = Path(__file__).parent
    found = [
        f"{path.relative_to(root)} imports {name}"
        for path in sorted(root.rglob("*.py"))
        if re.search(r"^\s*(from|import)\b.*\btests\b", path.read_text(), re.MULTILINE)
        for name in _imported(path)
        if re.match(r"tests\.(.*\.)?(test_|conftest\b)", name)
    ]
    assert found == []


def _imported(path: Path) -> list[str]:
    """Return the full names of what is imported."""
    nodes = _statements(path)
    return [
        *(alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names),
        *(f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names),
    ]


def test_the_command_line_begins_without_torch():
    """A signal that comes while torch is imported is caught: a second without it would be long."""
    code = "import sys, hpcdecode.cli.generate, hpcdecode.ranks.launch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
