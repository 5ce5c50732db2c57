"""The readable page of a first day, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_LONGEST = 160  # characters of a cell
_ERROR_LINES = 30  # of a failed part


def page(found: dict[str, Any]) -> str:
    """Return the page of what `first_day` has found so far."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    parts: dict[str, Any] = found["parts"]
    yield f"# First day on a GPU, hpcdecode {found['version']}"
    yield ""
    if found["emulated"]:
        yield "On a CPU, with the kernels emulated: no figure says anything of a GPU."
        yield ""
    gpu = parts.get("machine", {}).get("notes", {}).get("GPU")
    if gpu:
        yield f"{gpu['name']}, torch {gpu['torch']}, CUDA {gpu['CUDA of torch']}, cuDNN {gpu['cuDNN']}."
        yield ""
    rows = [(name, part["status"], f"{part['seconds']:.1f}", _surprise(part)) for name, part in parts.items()]
    yield from _table(("part", "status", "seconds", "surprise"), rows)
    for name, part in parts.items():
        yield from _part(name, part)


def _surprise(part: dict[str, Any]) -> str:
    """Return why a part failed or was skipped, in short."""
    wrong = [check["check"] for check in part["checks"] if not check["passed"]]
    last = part["error"].strip().splitlines()[-1:]
    return "; ".join(wrong) or "".join(last) or str(part["notes"].get("skipped", ""))


def _part(name: str, part: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {name}: {part['status']}\n"
    if part["figures"]:
        cells = (
            (c["case"], f"{c['value']:.5g} {c['unit']}", f"{c['ratio']:.3f}", c["reference"]) for c in part["figures"]
        )
        yield from _table(("figure", "value", "ratio", "against"), list(cells))
        yield ""
    if part["checks"]:
        checks = [(c["check"], c["expected"], c["found"], "yes" if c["passed"] else "**no**") for c in part["checks"]]
        yield from _table(("check", "expected", "found", "passed"), checks)
    facts = [(key, value) for key, value in part["notes"].items() if len(_cell(value)) <= _LONGEST]
    if facts:
        yield ""
        yield from _table(("note", "found"), facts)
    if part["error"].strip():
        yield "\n```"
        yield from part["error"].strip().splitlines()[-_ERROR_LINES:]
        yield "```"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(_cell(each) for each in row)} |"


def _cell(value: object) -> str:
    """Return a value as the text of a cell, in one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    text = " ".join(str(value).split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
