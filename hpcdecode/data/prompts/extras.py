"""Modules for file formats that are installed only with an extra of the package, such as pyarrow for Parquet."""

from __future__ import annotations

import importlib
from typing import Any

from hpcdecode.errors import UserError


def import_extra(module: str, path: str, extra: str) -> Any:
    """Return a module of an optional dependency.

    Args:
        module: Name of the module.
        path: File that needs it, for the error message.
        extra: Extra of the package that installs it.

    Raises:
        UserError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UserError(
            f"{path}: this format needs {module}, which is not installed: pip install 'hpcdecode[{extra}]'"
        ) from e
