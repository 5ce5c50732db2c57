"""hpcdecode: offline LLM text generation for HPC clusters."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from hpcdecode.data.results.read import Results
    from hpcdecode.llm import LLM, CompletionOutput, PromptError, RequestOutput, ScoredOutput, ScoreOutput
    from hpcdecode.requests.params import SamplingParams

from hpcdecode._version import __version__

__all__ = [
    "LLM",
    "CompletionOutput",
    "PromptError",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "ScoredOutput",
    "__version__",
    "read",
]

_HOMES = dict.fromkeys(__all__, "hpcdecode.llm")
_HOMES["SamplingParams"] = "hpcdecode.requests.params"
logging.getLogger(__name__).addHandler(logging.NullHandler())


def read(path: str | os.PathLike[str]) -> Results:
    """Open a results file; `Results` gives its rows by line or id, and its columns as arrays or a DataFrame."""
    from hpcdecode.data.results.read import Results

    return Results(path)


def __dir__() -> list[str]:
    """Return the names of the API."""
    return sorted(__all__)


def __getattr__(name: str) -> object:
    """Return a name of the API, importing its module, and with it torch, on first use."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] == "hpcdecode.llm":
        from hpcdecode.system.cores import set_libraries

        set_libraries(ranks=1)
    return getattr(import_module(_HOMES[name]), name)
