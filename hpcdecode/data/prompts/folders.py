"""Folders of prompts: the Parquet files in one, or the Arrow files of a saved `datasets` dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.requests.values import printable

_MAX_STATE_BYTES = 16 << 20
_MAX_FILES = 100_000
_SHOWN = 10
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def folder_files(folder: str) -> list[str]:
    """Return the prompt files of a folder: those that a saved dataset lists, or else all of one kind, by name.

    Raises:
        UserError: It has none or several kinds, or a file leads out of it.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise _refused(folder, f"expected a folder that can be read: {error.strerror}") from error
    if _SPLITS in names:
        raise _refused(folder, f"expected one split of this dataset; name {_splits(folder, names)}")
    if _STATE in names:
        return [_inside(folder, name) for name in _listed(folder)]
    found = {suffix: [n for n in names if n.endswith(suffix)] for suffix in (".parquet", ".arrow")}
    kinds = [suffix for suffix, files in found.items() if files]
    if len(kinds) != 1:
        raise _refused(
            folder, f"expected *.parquet or *.arrow files in this folder, found {_found(folder, names, kinds)}"
        )
    files = found[kinds[0]]
    if len(files) > _MAX_FILES:
        raise _refused(folder, f"expected at most {_MAX_FILES} files, found {len(files)}")
    return [_inside(folder, name) for name in files]


def _found(folder: str, names: Sequence[str], kinds: Sequence[str]) -> str:
    """Return what a folder has in place of files of one kind."""
    if kinds:
        return "both; name the files"
    inner = [name for name in names if os.path.isdir(os.path.join(folder, name))]
    return "none" + (f", but the folders {_some(inner)}" if inner else f", but {_some(names)}" if names else "")


def _splits(folder: str, names: Sequence[str]) -> str:
    inner = [name for name in names if os.path.isfile(os.path.join(folder, name, _STATE))]
    return " or ".join(printable(os.path.join(folder, name)) for name in inner[:_SHOWN]) or "a folder with a dataset"


def _listed(folder: str) -> list[str]:
    """Return the names of the files that a saved dataset consists of."""
    state = _json(folder, _STATE)
    if isinstance(state, dict) and state.get("_indices_data_files"):
        raise _refused(folder, "expected a dataset without indices; save it again with dataset.flatten_indices()")
    files = state.get("_data_files") if isinstance(state, dict) else None
    names = [f.get("filename") if isinstance(f, dict) else None for f in files] if isinstance(files, list) else []
    texts = [name for name in names if isinstance(name, str)]
    if not texts or len(texts) != len(names) or len(texts) > _MAX_FILES:
        raise _refused(folder, f"expected names of files under _data_files in {_STATE}, got none, or something else")
    return texts


def _json(folder: str, name: str) -> Any:
    with open(_inside(folder, name), "rb") as file:
        data = file.read(_MAX_STATE_BYTES + 1)
    try:
        return msgspec.json.decode(data if len(data) <= _MAX_STATE_BYTES else b"")
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise _refused(folder, f"expected {name} with at most {_MAX_STATE_BYTES} bytes of JSON: {error}") from error


def _inside(folder: str, name: str) -> str:
    """Return the path of a file in a folder.

    Raises:
        UserError: It is no file, or lies elsewhere.
    """
    path = os.path.join(folder, name)
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise _refused(folder, f"expected names of files in this folder, got {name[:100]!r}")
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        raise _refused(
            folder, f"expected files that lie in this folder, but {name} is a link out of it; name its target"
        )
    if not os.path.isfile(path):
        what = "is no file" if os.path.exists(path) else "does not exist"
        raise _refused(folder, f"expected {name} in this folder, but it {what}")
    return path


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _refused(folder: str, problem: str) -> UserError:
    return UserError(f"prompt folder {printable(folder)}: {printable(problem)}")
