"""A small job for trials of durability: its prompts, its contents, and damage to its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import h5py
import msgspec
import pytest

from tests.hostile.trial import ROW_ERRORS
from tests.support.commands import Command, run

ROWS, BROKEN = 30, 18
JOB = ("generate", "p.jsonl", "--model", "demo", "--dtype", "float32", "--batch", 6, "--kv-memory", "64M")
AGAIN = (*JOB, "-o", "out.h5")
LAUNCHER = Path(__file__).parent / "launcher.py"
KILLED_AT = 20  # rows
SECONDS = 300  # of a busy machine
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def prompts(directory: Path) -> None:
    """Write the prompt file: rows of one and two samples, one line that is broken."""
    rows = []
    for i in range(1, ROWS + 1):
        row = {"prompt": f"def number_{i}(a, b):", "max_tokens": 8 + i * 5 % 24}
        rows.append(row | ({"n": 2, "temperature": 1.0} if i % 9 == 0 else {}))
    lines = [msgspec.json.encode(row).decode() for row in rows]
    lines[BROKEN - 1] = "{broken"
    (directory / "p.jsonl").write_text("\n".join(lines))


def contents(path: Path) -> dict:
    """Columns of a complete file that do not depend on when and where it was made."""
    with h5py.File(path) as file:
        rows, ends = file["rows"], file["rows/token_offsets"][:]
        tokens = [rows["token_ids"][a:b].tolist() for a, b in pairwise(ends)]
        assert file.attrs["complete"]
        return {
            **{name: rows[name][:].tolist() for name in ("line", "sample", "finish_reason", "prompt_tokens", "text")},
            "tokens": tokens,
            "errors": file["errors/line"][:].tolist(),
        }


def goes_on(hpcdecode: Command, directory: Path, expected: dict, command: tuple = AGAIN) -> None:
    """The same command comes to its end, with the rows of an undisturbed job and nothing beside them."""
    result = run(hpcdecode.line(*command), cwd=directory, env=hpcdecode.environment, timeout=SECONDS)
    assert result.returncode == ROW_ERRORS, result.stderr
    assert contents(directory / "out.h5") == expected
    assert not list(directory.rglob("*.tmp"))


def damaged(find: Callable[[Path], Path], how: str) -> Callable[[Path], None]:
    """A file is cut to a half, to nothing or by its last byte, has a bit flipped, or is gone."""

    def arrange(directory: Path) -> None:
        path = find(directory)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        if how == "gone":
            path.unlink()
            return
        cuts = {"half": slice(len(data) // 2), "empty": slice(0), "a-byte-less": slice(-1), "flipped": slice(None)}
        path.write_bytes(data[cuts[how]])

    return arrange
