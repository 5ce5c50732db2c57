"""The CUDA build: warnings of the compiler are errors for `make cuda` alone, so that new compilers end no install."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands(folder: Path, *flags: str) -> list[str]:
    """Return the commands that compile what is for CUDA."""
    line = ["cmake", "-S", ROOT, "-B", folder, "-DHPCDECODE_CUDA=ON", "-DHPCDECODE_PYTHON=OFF"]
    subprocess.run([*line, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *flags], check=True, capture_output=True)
    found = json.loads((folder / "compile_commands.json").read_text())
    return [each["command"] for each in found if each["file"].endswith(".cu")]


@pytest.mark.skipif(not (shutil.which("nvcc") and shutil.which("cmake")), reason="needs nvcc and cmake")
def test_warnings_are_errors_where_that_is_asked_for(tmp_path):
    users, ours = commands(tmp_path), commands(tmp_path, "-DHPCDECODE_WERROR=ON")
    assert users and len(users) == len(ours)
    assert all("-Wall" in command and "-Werror" not in command for command in users)
    assert all("-Werror=all-warnings" in command for command in ours)
    made = subprocess.run(["make", "-n", "cuda"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "-DHPCDECODE_WERROR=ON" in made
