"""Prompts whose answers repeat much of them: functions of Python's standard library, to be printed with a change."""

from __future__ import annotations

import ast
import functools
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

from hpcdecode.bench.workload import Shape, Workload
from hpcdecode.data.prompts.rows import Row
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.requests.params import SamplingParams

MODULES = ("calendar", "difflib", "fractions", "heapq", "shlex", "statistics", "string", "textwrap")
_SHORTEST, _LONGEST = 500, 1600  # characters of a function
ASKED = "Add type hints to this Python code, and print all of it again:\n\n```python\n{}\n```"


@dataclass(frozen=True)
class Edits(Workload):
    """Rows that ask for code with type hints, in the form of the model's chat template if it has one.

    Attributes:
        functions: Of a row.
    """

    functions: int = 1

    def prompts(self, shape: Shape, folder: Path | None = None) -> list[list[int]]:
        """Return token ids of as many prompts as there are rows.

        Args:
            shape: Of the model.
            folder: Directory of the model.

        Raises:
            UserError: If the model has no tokenizer of its own.
        """
        if folder is None or not (folder / "tokenizer.json").is_file():
            raise UserError(f"--workload {self.name}: expected --model DIR with a tokenizer.json, got none")
        texts = functions()
        if len(texts) < self.rows:
            raise UserError(f"--workload {self.name}: expected {self.rows} functions, found {len(texts)}")
        around = [[texts[(row + i) % len(texts)] for i in range(self.functions)] for row in range(self.rows)]
        return encoded(folder, tuple(ASKED.format("\n\n".join(some)) for some in around))


@functools.cache
def encoded(folder: Path, asked: tuple[str, ...]) -> list[list[int]]:
    """Return the token ids of messages by the tokenizer of a model, in the form of its chat template if it has one."""
    tokenizer = Tokenizer.load(str(folder))
    return [_ids(tokenizer, text) for text in asked]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a message, or of its text if the model has no chat template."""
    message = [{"role": "user", "content": text}]
    try:
        return tokenizer.encode(Row(1, "1", None, None, message, SamplingParams()))
    except RowProblem:
        return tokenizer.encode_texts([text])[0]


@functools.cache
def functions() -> list[str]:
    """Return the sources of functions of Python's standard library, in the order of modules and lines."""
    found = []
    for name in MODULES:
        source = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            text = isinstance(node, ast.FunctionDef) and ast.get_source_segment(source, node, padded=True)
            if text and _SHORTEST <= len(text) <= _LONGEST:
                found.append(textwrap.dedent(text))
    return found


EDITS = {w.name: w for w in (Edits(f"e{rows}", rows, 0, 0) for rows in (1, 4, 16, 64))}
EDITS["el16"] = Edits("el16", 16, 0, 0, functions=20)
