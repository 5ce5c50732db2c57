"""Print tables and save pictures, for all figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from hpcdecode.report.plot import canvas, save
from hpcdecode.report.text import table


def flags(default: str) -> argparse.ArgumentParser:
    """Return a parser with -o, the picture, which is `default` if it is not given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", default=default, metavar="FILE.png", help="(%(default)s)")
    return parser


def drawn(path: str, draw: Callable[[ModuleType], Any]) -> None:
    """Save the figure that `draw` makes with pyplot."""
    pyplot = canvas()
    save(pyplot, draw(pyplot), path)
    print(path, end="\n\n")


def show(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    print(table(heads, [[f"{x:,.2f}" if isinstance(x, float) else f"{x}" for x in row] for row in rows]), end="\n\n")
