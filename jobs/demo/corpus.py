"""English text that Python itself ships, cut into short documents; no document appears twice."""

from __future__ import annotations

import ast
import codecs
import re
import sysconfig
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

HEADING = re.compile(r"\n\n(?=[^\n]+\n(\*{4,}|={4,}|-{4,}|~{4,})\n)")
MIN_CHARACTERS = 200


def documents() -> list[str]:
    """Sections of the language reference (pydoc's topics), then the Zen and module docstrings, in a fixed order."""
    texts = [section for name in sorted(topics) for section in sections(topics[name])]
    texts += [zen(), *module_docstrings(Path(sysconfig.get_paths()["stdlib"]))]
    stripped = (text.strip() for text in texts)
    return list(dict.fromkeys(text for text in stripped if len(text) >= MIN_CHARACTERS))


def sections(topic: str) -> list[str]:
    """Cut a topic before each heading: a line underlined by *, =, - or ~."""
    starts = [0, *(match.end() for match in HEADING.finditer(topic)), len(topic)]
    return [topic[a:b] for a, b in pairwise(starts)]


def module_docstrings(folder: Path) -> list[str]:
    """Return the docstrings of the modules that lie directly in `folder`, by file name."""
    found = (ast.get_docstring(ast.parse(path.read_bytes())) for path in sorted(folder.glob("*.py")))
    return [text for text in found if text]


def zen() -> str:
    """Return the text that `import this` prints, read without printing it."""
    source = (Path(sysconfig.get_paths()["stdlib"]) / "this.py").read_text(encoding="utf-8")
    return codecs.decode(ast.literal_eval(re.search(r's = (""".*?""")', source, re.DOTALL)[1]), "rot13")
