"""The stubs in hpcdecode/ are those that nanobind's stubgen made in the build."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import hpcdecode
from hpcdecode import _attn_cpu

PACKAGE, BUILT = Path(hpcdecode.__file__).parent, Path(_attn_cpu.__file__).parent
IMPORTS = (ast.Import, ast.ImportFrom)


def content(path: Path) -> tuple[set[str], list[str]]:
    """Return what a stub imports and what it declares, without the layout of the text."""
    tree = ast.parse(path.read_text())
    imported = {f"{getattr(n, 'module', None)} {a.name}" for n in tree.body if isinstance(n, IMPORTS) for a in n.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = inspect.cleandoc(node.value).strip()
    return imported, [ast.unparse(node) for node in tree.body if not isinstance(node, IMPORTS)]


@pytest.mark.parametrize("name", ["_attn_cpu", "_ops_cpu", "_attn_cuda"])
def test_a_stub_is_what_the_build_made(name):
    built = BUILT / f"{name}.pyi"
    if not built.exists() or built.samefile(PACKAGE / built.name):
        pytest.skip("the build made no stubs: it needs Python 3.11")
    expected, found = content(built), content(PACKAGE / built.name)
    assert found == expected, f"copy {built} to {PACKAGE} and run ruff format"


def test_the_emulation_has_the_interface_of_the_cuda_module():
    names = {a.name for n in ast.parse((PACKAGE / "_attn_cuda_emulated.pyi").read_text()).body[1:] for a in n.names}
    declared = ast.parse((PACKAGE / "_attn_cuda.pyi").read_text()).body
    assert names == {n.name for n in declared if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
