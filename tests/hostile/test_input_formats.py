"""Prompt files of each format as untrusted input: bombs, lines without end, wrong encodings, and what is cut off."""

from __future__ import annotations

import functools
import gzip
import json
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import hpcdecode as package
from tests.hostile.trial import OK, REFUSED, ROW_ERRORS, Trial, each

pytestmark = pytest.mark.full
MEMORY = 24 << 30  # bytes of addresses, of which torch maps many
PIECE = 100 << 20


def generate(name: str) -> tuple[object, ...]:
    return ("generate", name, "--model", "demo", "--dtype", "float32", "--max-tokens", 2, "-o", "out.h5")


def written(name: str, pieces: Iterable[bytes], *, packed: bool = False) -> Callable[[Path], dict]:
    """A file of these pieces; the command has bounded memory."""

    def arrange(directory: Path) -> dict:
        with open(directory / name, "wb") as file:
            for piece in pieces:
                file.write(gzip.compress(piece, 1) if packed else piece)
        return {"preexec_fn": functools.partial(resource.setrlimit, resource.RLIMIT_AS, (MEMORY, MEMORY))}

    return arrange


def lines_of(*lines: int, errors: int = 0) -> Callable[[Path, object], None]:
    def check(directory: Path, _result: object) -> None:
        with package.read(str(directory / "out.h5")) as results:
            assert [row["line"] for row in results] == list(lines) and len(results.errors()) == errors

    return check


BOMBS = {  # first piece, the one that is repeated, and what is said
    "p.jsonl.gz": (b"", b"{" * PIECE, "expected a whole file of its kind, got: a line of more than 1 GiB"),
    "p.csv.gz": (b"prompt\n", b"x" * PIECE, "got: a record of more than 67108864 bytes; are its quotes closed"),
    "q.csv.gz": (b'prompt\n"', b"x,\n" * (PIECE // 3), "got: a record of more than 67108864 bytes"),
    "p.tsv.gz": (b"prompt\n", b"\t" * PIECE, "got: a record of more than 67108864 bytes"),
    "header.csv.gz": (b"", b"a," * (PIECE // 2), "got: a record of more than 67108864 bytes"),
    "p.json.gz": (b'[{"prompt": "', b"x" * PIECE, "got: an element of more than 128 MiB"),
    "deep.json.gz": (b"[{", b"[" * PIECE, "got: an element that is nested too deeply"),
    "wide.json.gz": (b"[{", b"[]," * (PIECE // 3), "got: an element of more than 128 MiB"),
    "p.gz": (b"", bytes(PIECE), "got what seems to be binary data of no known format"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_unpacks_to_10_gb(hpcdecode, tmp_path, name):
    first, repeated, says = BOMBS[name]
    member = gzip.compress(repeated, 1)
    arrange = written(name, [gzip.compress(first), *[member] * 100])
    result = Trial(name, arrange, generate(name), says=says, seconds=240).run(hpcdecode, tmp_path)
    assert "layout" not in result.stderr  # before the model loads


EMPTY = b"\n" * 10**6 + b"\r\n" * 10**5
CSV = b"prompt,label\n"
TRIALS = [
    Trial(f"a million empty lines in {name}", written(name, pieces), generate(name), code=OK, check=check, seconds=120)
    for name, pieces, check in (
        ("p.jsonl", (EMPTY, b'{"prompt": "a"}\n', EMPTY), lines_of(1_100_001)),
        ("p.csv", (EMPTY, CSV, EMPTY, b"a,b\n", EMPTY, b"c,d\n", EMPTY), lines_of(1, 2)),
        ("p.tsv", (EMPTY, CSV.replace(b",", b"\t"), EMPTY, b"a\tb\n", EMPTY), lines_of(1)),
        (
            "p.json",
            (EMPTY[: 10**6], b"[", EMPTY, b'{"prompt": "a"}', EMPTY, b',{"prompt": "b"}', EMPTY, b"]", EMPTY),
            lines_of(1, 2),
        ),
    )
]
LATIN = "é".encode("latin-1")
TRIALS += [
    Trial(name, written(file, [data]), generate(file), code=code, says=says, check=check)
    for name, file, data, code, says, check in (
        ("latin-1 in csv", "p.csv", CSV + b"a,b\n" + LATIN + b",b\nc,d\n", ROW_ERRORS, "", lines_of(1, 3, errors=1)),
        ("latin-1 beside the prompt", "p.csv", CSV + b"a," + LATIN + b"\nc,d\n", OK, "", lines_of(1, 2)),
        ("latin-1 in an array", "p.json", b'[{"prompt": "a"}, {"prompt": "' + LATIN + b'"}]', ROW_ERRORS, "", None),
        ("nothing but latin-1", "p.csv", b"prompt\n" + LATIN + b"\n", REFUSED, "expected a string, got a bytes", None),
        ("a csv in utf-16", "p.csv", "prompt\na\n".encode("utf-16"), REFUSED, "seems to be text in UTF-16", None),
        ("NUL in csv", "p.csv", CSV + b"a,b\n\0,\0\nc,d\n", (OK, ROW_ERRORS, REFUSED), "", None),
        (
            "a csv that is cut off",
            "p.csv",
            CSV + b'a,b\n"c\nd',
            ROW_ERRORS,
            "unexpected end of data",
            lines_of(1, errors=1),
        ),
        (
            "an array that is cut off",
            "p.json",
            b'[{"prompt": "a"}, {"pro',
            REFUSED,
            "a JSON array without its end",
            None,
        ),
        ("an array and more", "p.json", b'[{"prompt": "a"}] {}', REFUSED, "more after the end of the JSON array", None),
        ("a field of 60 MiB", "p.csv", CSV + b"a," + b"x" * (60 << 20) + b"\nc,d\n", OK, "", lines_of(1, 2)),
        (
            "an element of 65 MiB",
            "p.json",
            b'[{"prompt": "a"}, {"prompt": "' + b"x" * (65 << 20) + b'"}, {"prompt": "c"}]',
            ROW_ERRORS,
            "expected a line of at most 67108864 bytes",
            lines_of(1, 3, errors=1),
        ),
        (
            "a record of 65 MiB",
            "p.csv",
            CSV + b"a,b\n" + b"x" * (65 << 20) + b",b\nc,d\n",
            REFUSED,
            "a record of more",
            None,
        ),
        ("a csv of old line ends", "p.csv", b"prompt,label\ra,b\rc,d\r", REFUSED, "new-line character", None),
        ("deep elements", "p.json", b"[" + b'{"a":' * 10**6 + b"]", REFUSED, "p.json: ", None),
    )
]


@each(TRIALS)
def test_odd_content(hpcdecode, tmp_path, trial):
    trial.run(hpcdecode, tmp_path)


def test_rows_of_standard_input_are_looked_at_within_bounds(hpcdecode, tmp_path):
    """80 MiB of rows that cannot be used, and then a good one: the job begins, and has all rows."""
    row = json.dumps({"question": "x" * (4 << 20)}).encode() + b"\n"

    def arrange(directory: Path) -> dict:
        (directory / "p").write_bytes(row * 20 + b'{"prompt": "a"}\n')
        return {"stdin": open(directory / "p", "rb")}

    trial = Trial("ahead", arrange, generate("-"), code=ROW_ERRORS, check=lines_of(21, errors=20), seconds=120)
    trial.run(hpcdecode, tmp_path)
