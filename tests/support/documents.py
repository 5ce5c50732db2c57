"""Commands and programs of a Markdown document: those of its code blocks, and those in its sentences and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

INLINE = re.compile(r"`((?:mpiexec [^`]*)?hpcdecode (?:[^`\\]|\\.)+)`")
INDENT = "    "


class Shown(NamedTuple):
    """What a document shows.

    kind: `command`, `python`, `json`, or `inline` for a command within a line.
    output: what a command that is written after a `$` prints, else empty.
    """

    kind: str
    text: str
    output: str = ""


def shown(text: str) -> Iterator[Shown]:
    """Yield what a document shows, in its order."""
    paragraph: list[str] = []
    before = ""
    for line in [*text.splitlines(), ""]:
        if line.startswith(INDENT) and (paragraph or not before.strip() or before.startswith(INDENT)):
            paragraph.append(line.removeprefix(INDENT))
        else:
            yield from _of_paragraph(paragraph)
            paragraph = []
            yield from (Shown("inline", found.replace("\\|", "|")) for found in INLINE.findall(line))
        before = line


def _of_paragraph(lines: list[str]) -> Iterator[Shown]:
    text = "\n".join(lines)
    if text.startswith(("import ", "from ")):
        yield Shown("python", text)
    elif text.startswith("{"):
        yield Shown("json", text)
    elif text.startswith("$ "):
        for each in text.removeprefix("$ ").split("\n$ "):
            command, _, output = re.sub(r" *\\\n *", " ", each).partition("\n")
            yield Shown("command", command, output)
    else:
        yield from (Shown("command", line) for line in re.sub(r" *\\\n *", " ", text).splitlines())
