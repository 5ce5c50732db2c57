"""The model front-end: trace a Hugging Face decoder, cut it at every attention, run the token-wise slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdecode.model.describe import render
    from hpcdecode.model.load import SplitModel, load_split

HOMES = {"SplitModel": "load", "load_split": "load", "render": "describe"}

__all__ = ["SplitModel", "load_split", "render"]


def __getattr__(name: str):
    """Import torch only when a name that needs it is asked for."""
    from importlib import import_module

    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
