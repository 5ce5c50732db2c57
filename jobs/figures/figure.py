"""What the figures have in common: a picture and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hpcdecode.report.plot import canvas, save
from hpcdecode.report.text import table


def drawn(default: str, draw: Callable[[Any], Any]) -> None:
    """Save what `draw` makes of pyplot, as -o says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", default=default, metavar="FILE.png", help="(%(default)s)")
    path, pyplot = parser.parse_args().output, canvas()
    save(pyplot, draw(pyplot), path)
    print(path)


def show(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print(table(heads, [[f"{x:,.2f}" if isinstance(x, float) else f"{x}" for x in row] for row in rows]), end="\n\n")
