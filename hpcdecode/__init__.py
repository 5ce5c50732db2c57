"""hpcdecode: offline LLM text generation for HPC clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from hpcdecode.data.read import Results

__version__ = "0.1.0"


def read(path: str | os.PathLike) -> Results:
    """Open a results file: rows by line or id, columns as arrays or a pandas DataFrame; see `Results`."""
    from hpcdecode.data.read import Results

    return Results(path)
