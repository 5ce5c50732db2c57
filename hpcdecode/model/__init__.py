"""The model: trace a Hugging Face decoder, cut it at every attention, and run the slices between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdecode.model.frontend.describe import render
    from hpcdecode.model.run.load import load_split
    from hpcdecode.model.run.split_model import SplitModel

MODULES = {"SplitModel": "run.split_model", "load_split": "run.load", "render": "frontend.describe"}

__all__ = ["SplitModel", "load_split", "render"]


def __getattr__(name: str) -> object:
    """Return a name of MODULES, and import torch only then."""
    from importlib import import_module

    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
