"""Check Markdown files: lines of at most 100 characters, and links and file names that exist.

Tables, code blocks and the targets of links may be longer. A name in backticks that ends like a source file and
contains a slash must exist below the repository, `hpcdecode/` or `native/`. In `engine/s_rank.py:SRank.run` the file
must also have the names after the colon.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 100
LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|pyi|cpp|h|cu|sbatch|sh|toml|yml|yaml|md))(?::([\w.]+))?`")
BASES = (ROOT, ROOT / "hpcdecode", ROOT / "native")  # names of files start at one of these


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of what is no code block."""
    fenced, blank, indented = False, True, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        indented = line.startswith("    ") and (blank or indented)
        blank = not line.strip()
        if not (fenced or indented):
            yield number, line


def problems(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file, a line each."""
    for number, line in prose(path.read_text()):
        width = len(LINK.sub("]()", line))
        if width > MOST and not line.lstrip().startswith("|"):
            yield f"{path}:{number}: expected at most {MOST} characters, got {width}"
        for target in LINK.findall(line):
            file = target.partition("#")[0]
            if "://" not in target and file and not (path.parent / file).exists():
                yield f"{path}:{number}: links to {target}, which does not exist"
        for name, symbols in SOURCE.findall(line):
            source = next((base / name for base in BASES if (base / name).exists()), None)
            if source is None:
                yield f"{path}:{number}: names `{name}`, which does not exist"
            elif any(not re.search(rf"\b{symbol}\b", source.read_text()) for symbol in symbols.split(".")):
                yield f"{path}:{number}: names `{symbols}`, which `{name}` does not have"


def main() -> int:
    """Print the problems of the files named on the command line; return 1 if there are any."""
    found = [problem for name in sys.argv[1:] for problem in problems(Path(name))]
    print(*found, sep="\n", end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
