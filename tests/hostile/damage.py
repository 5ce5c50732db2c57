"""What is done to a model directory before a trial, and what its files are made of."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    """Return what sets `values` in the JSON file `name` of a model directory."""

    def change(model: Path) -> None:
        file = model / name
        (file).write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}))

    return change


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def fifo(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return change


def folder(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).mkdir()

    return change


def link(name: str, target: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target)

    return change


def safetensors(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
