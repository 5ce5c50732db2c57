"""Types of flags, and flags that several subcommands have."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from hpcdecode.cli.parser import near
from hpcdecode.config import DTYPES

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
    Group = argparse._ArgumentGroup

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add -q and -v, which set `verbosity` to a level of logging; the subcommand's parser has no default for it."""
    group = parser.add_mutually_exclusive_group()
    add = partial(group.add_argument, dest="verbosity", action="store_const", default=argparse.SUPPRESS)
    add("-q", "--quiet", const=logging.WARNING, help="print only warnings and errors, and show no progress")
    add("-v", "--verbose", const=logging.DEBUG, help="also print what was chosen and why, and the stages of the start")


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a type for a flag: `parse`, whose ValueError says what was expected."""

    def of(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return of


def parse_dtype(text: str, among: Sequence[str] = DTYPES) -> str | None:
    """Return the data type of `among` that a name stands for, None for `auto`, or raise ValueError."""
    if text == "auto":
        return None
    name = _DTYPE_ALIASES.get(text, text)
    if name not in among:
        raise ValueError(f"expected one of {', '.join(among)}, auto; got {text!r}{near(text, among)}")
    return name


def pick(kind: type[S], values: dict[str, Any]) -> S:
    """Return the struct `kind` made of those values that are its fields."""
    own = {name: values[name] for name in kind.__struct_fields__ if name in values}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in own.items()})
