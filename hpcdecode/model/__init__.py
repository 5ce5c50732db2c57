"""The model front-end: trace a Hugging Face decoder, cut it at every attention, run the token-wise slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdecode.model.frontend.describe import render
    from hpcdecode.model.run.load import SplitModel, load_split

HOMES = {"SplitModel": "run.load", "load_split": "run.load", "render": "frontend.describe"}

__all__ = ["SplitModel", "load_split", "render"]


def __getattr__(name: str):
    """Import torch only when a name that needs it is asked for."""
    from importlib import import_module

    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
