"""Types of flags, and flags that several subcommands have."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
    Group = argparse._ArgumentGroup

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


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


def pick(kind: type[S], values: dict[str, Any]) -> S:
    """Return the struct `kind` made of those values that are its fields."""
    own = {name: values[name] for name in kind.__struct_fields__ if name in values}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in own.items()})
