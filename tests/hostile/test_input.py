"""Prompt files and chat templates as untrusted input: bounded in time and memory, and only what was named is read."""

from __future__ import annotations

import functools
import gzip
import json
import random
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import pytest
from backports import zstd

import hpcdecode as package
from tests.hostile.trial import GENERATE, OK, ROW, ROW_ERRORS, Trial, each

pytestmark = pytest.mark.full
DEMO = Path(__file__).parents[2] / "jobs" / "demo" / "model"
MEMORY = 24 << 30  # bytes of addresses, of which torch maps many
SECRET = "SECRET"


def generate(*prompts: str, model: str = "demo") -> tuple[object, ...]:
    command, _, *rest = GENERATE
    rest[rest.index("demo")] = model
    return command, *prompts, *rest


def lines(*rows: object) -> Callable[[Path], None]:
    """A prompt file of these rows between two good ones."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]

    def arrange(directory: Path) -> None:
        (directory / "p.jsonl").write_text(ROW + "".join(text + "\n" for text in texts) + ROW)

    return arrange


def errors(*reasons: str, rows: int = 2) -> Callable[[Path, object], None]:
    """Every row but the first and the last is an error for a reason that contains this."""

    def check(directory: Path, _result: object) -> None:
        with package.read(str(directory / "out.h5")) as results:
            found = [error["reason"] for error in results.errors()]
            assert len(found) == len(reasons) and len(results) == rows, found
        for expected, reason in zip(reasons, found, strict=True):
            assert expected in reason and "\n" not in reason, found

    return check


def asking(**fields: object) -> dict[str, object]:
    return {"prompt": "a", **fields}


def keyed(count: int) -> dict[str, int]:
    return dict.fromkeys(map(str, range(count)), 1)


RULES = "".join(f"r{i}: r{i + 1} | /x/\n" for i in range(20_000))
COMPILES = "structured_outputs: expected what llguidance can compile, got: "
FOLLOWS = "structured_outputs: the grammar cannot be followed"
REFUSED_ROWS = {  # and why
    "n of 1e9": (asking(n=10**9), "n: expected an integer in [1, 65535]"),
    "n of all that is allowed": (asking(n=65535, max_tokens=2000), "lower "),  # the batch or the KV cache is too small
    "1e6 biases": (asking(logit_bias=keyed(10**6)), "logit_bias: expected at most 10000 elements, got 1000000"),
    "1e5 stop strings": (asking(stop=list(keyed(10**5))), "stop: expected at most 10000 elements, got 100000"),
    "1e5 bad words": (asking(bad_words=list(keyed(10**5))), "bad_words: expected at most 10000 elements, got 100000"),
    "1e5 stop tokens": (asking(stop_token_ids=list(range(10**5))), "stop_token_ids: expected at most"),
    "deep object": ('{"prompt": "a", "x": ' + "[" * 10**6 + "}", "nested too deeply"),
    "large integer": ('{"prompt": "a", "seed": ' + "9" * 10**6 + "}", "out of range"),
}
REFUSED_GRAMMARS = {
    "regex that does not fit": ({"regex": "|".join(f"w{i}" for i in range(200_000))}, "too big"),
    "regex of 1e6 letters": ({"regex": "a" * 10**6}, FOLLOWS),
    "deep schema": ({"json": '{"a":' * 100_000}, COMPILES + "recursion limit exceeded"),
    "large schema": ({"json": {"allOf": [{"properties": {f"a{i}": {}}} for i in range(500)]}}, "schema too large"),
    "schema of itself": ({"json": {"$ref": "#"}}, FOLLOWS),
    "large multiple": ({"json": {"multipleOf": 1_999_993, "type": "integer"}}, "one that takes more than 5 s"),
    "schema of the web": ({"json": {"$ref": "http://localhost/x"}}, COMPILES),
    "choice of 1e5": ({"choice": [f"word {i}" for i in range(10**5)]}, COMPILES),
    "stack overflow": ({"grammar": f"start: r0\n{RULES}r20000: /y/"}, COMPILES + "one that ends the process"),
}
FOLLOWED = [
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "((a*)*)*b"},
    {"regex": "(a|b)*a(a|b){25}c"},
    {"json": {"type": "array", "items": {"$ref": "#"}}},
    {"grammar": 'start: s\ns: s s | s s s | "a" | ""'},
]


def of_all(name: str, rows: list[object], reasons: list[str], seconds: float = 120) -> Trial:
    code, check = (ROW_ERRORS, errors(*reasons)) if reasons else (OK, None)
    return Trial(name, lines(*rows), code=code, check=check, seconds=seconds)


ROWS = [
    of_all("large values", *map(list, zip(*REFUSED_ROWS.values(), strict=True))),
    of_all(
        "grammars beyond the bounds",
        [asking(structured_outputs=asked) for asked, _ in REFUSED_GRAMMARS.values()],
        [reason for _, reason in REFUSED_GRAMMARS.values()],
    ),
    of_all("grammars that are ambiguous", [asking(structured_outputs=g, max_tokens=40) for g in FOLLOWED], []),
]


@each(ROWS)
def test_rows_that_ask_for_too_much(hpcdecode, tmp_path, trial):
    trial.run(hpcdecode, tmp_path)


def brackets(name: str, compress: Callable[[bytes], bytes], count: int) -> Callable[[Path], dict]:
    """10 GB of open brackets: `count` times the same member or frame."""

    def arrange(directory: Path) -> dict:
        member = compress(b"{" * (10 * 10**9 // count))
        with open(directory / name, "wb") as file:
            for _ in range(count):
                file.write(member)
        assert (directory / name).stat().st_size < 20 << 20
        return {"preexec_fn": functools.partial(resource.setrlimit, resource.RLIMIT_AS, (MEMORY, MEMORY))}

    return arrange


BOMBS = [
    Trial(
        f"10 GB of brackets in {name}",
        brackets(name, compress, 100),
        generate(name),
        says="expected a whole file of its kind, got: a line of more than 1 GiB",
    )
    for name, compress in (("p.jsonl.gz", gzip.compress), ("p.jsonl.zst", zstd.compress))
]


@each(BOMBS)
def test_a_file_that_unpacks_to_far_more_than_it_is(hpcdecode, tmp_path, trial):
    trial.run(hpcdecode, tmp_path)


def virtual(directory: Path) -> None:
    """A prompt file whose rows lie in another."""
    with h5py.File(directory / "other.h5", "w") as file:
        file["prompt"] = [SECRET] * 3
    layout = h5py.VirtualLayout((3,), h5py.string_dtype())
    layout[:] = h5py.VirtualSource("other.h5", "prompt", shape=(3,))
    with h5py.File(directory / "p.h5", "w") as file:
        file.create_virtual_dataset("prompt", layout)


def test_an_hdf5_file_whose_rows_lie_in_another(hpcdecode, tmp_path):
    """tests/data/test_tables.py has more."""
    says = "expected data that lie in this file itself, got a virtual dataset"
    result = Trial("virtual", virtual, generate("p.h5"), says=says).run(hpcdecode, tmp_path)
    assert SECRET not in result.stdout + result.stderr
    assert not (tmp_path / "out.h5").exists()


def named(name: str, content: str = ROW) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(content) and None


ODD = "p\n\x1b[31m q.jsonl"
NAMES = [
    Trial("a good file", named(ODD), generate(ODD), code=OK),
    Trial("a missing file", named("p.jsonl"), generate(ODD), says=r"prompt file p\\n\\x1b\[31m q\.jsonl: "),
    Trial(
        "a broken file",
        named(f"{ODD}.gz", "\0"),
        generate(f"{ODD}.gz"),
        says=r"prompt file p\\n\\x1b\[31m q\.jsonl\.gz: ",
    ),
    Trial(
        "a bad row of several files",
        lambda directory: [named(name, "{}\n" + ROW)(directory) for name in ("a.jsonl", ODD)] and None,
        generate("a.jsonl", ODD),
        code=ROW_ERRORS,
        check=errors("a.jsonl:1: expected", r"p\n\x1b[31m q.jsonl:1: expected"),
    ),
    Trial(
        "a field's name",
        lines({"prompt": "a", "a\nb\x1b": 1}),
        (*GENERATE, "--keep-columns", "none"),
        code=OK,
        says=r"warning: line 2: field 'a\\nb\\x1b' is",
    ),
]


@each(NAMES)
def test_a_name_with_control_characters(hpcdecode, tmp_path, trial):
    result = trial.run(hpcdecode, tmp_path)
    assert "\x1b[31m" not in result.stderr.replace(str(tmp_path), "")


def with_template(template: str, *rows: dict) -> Callable[[Path], None]:
    def arrange(directory: Path) -> None:
        shutil.copytree(DEMO, directory / "model")
        (directory / "model" / "chat_template.jinja").write_text(template)
        lines(*rows)(directory)

    return arrange


CHAT = {"messages": [{"role": "user", "content": "a"}]}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {  # tests/data/test_chat.py has more
    "loops": (LOOP, "within 10 s of computing and 1 GiB, got no answer in time"),
    "allocates": ("{{ messages[0].content * 10 ** 10 }}", "got a need for more memory"),
    "is deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "whose chat template jinja2 can compile"),
    "reaches for the system": ("{{ cycler.__init__.__globals__.os.system('touch made') }}", "SecurityError"),
}
MODELS = [
    Trial(
        f"a template that {name}",
        with_template(template, CHAT, CHAT),
        generate("p.jsonl", model="model"),
        code=ROW_ERRORS,
        check=errors(reason, reason),
        seconds=120,
    )
    for name, (template, reason) in TEMPLATES.items()
]


@each(MODELS)
def test_a_hostile_chat_template(hpcdecode, tmp_path, trial):
    trial.run(hpcdecode, tmp_path)
    assert not (tmp_path / "made").exists()


GOOD = [
    {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0.5, "seed": 3, "stop": ["\n\n", "x"]},
    {"prompt_token_ids": [5, 6, 7], "n": 2, "logit_bias": {"5": 1.5}, "logprobs": 2, "meta": {"a": [1, None]}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "é😀"}]}], "top_p": 0.5, "id": "x"},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2], "max_tokens": 3}},
    {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}, "truncate_prompt_tokens": 5, "bad_words": ["b"]},
]
BYTES = b'\x00\x01\x7f\x80\xc3\xe2\xff"{}[]:,\\0159-.eEtrufalsn \t'


def fuzzed(count: int) -> Iterable[bytes]:
    """Good lines with bytes changed, taken out, doubled or spliced with another line's, or with another value."""
    for seed in range(count):
        draw = random.Random(seed)
        row = json.loads(json.dumps(draw.choice(GOOD)))
        if draw.random() < 0.5:
            row[draw.choice(list(row))] = draw.choice(
                [None, True, -1, 1e308, 10**30, "", "\0", [], [[]], {}, {"": {}}, [5]]
            )
        line = bytearray(json.dumps(row).encode())
        for _ in range(draw.randint(0, 3)):
            at, kind = draw.randrange(len(line)), draw.randrange(4)
            if kind == 0:
                line[at] = draw.choice(BYTES)
            elif kind == 1:
                del line[at : at + draw.randint(1, 9)]
            elif kind == 2:
                line[at:at] = line[at : at + draw.randint(1, 30)] * draw.randint(1, 20)
            else:
                other = json.dumps(draw.choice(GOOD)).encode()
                line[at:] = other[draw.randrange(len(other)) :]
            line = line or bytearray(b"{")
        yield bytes(line).replace(b"\n", b" ")


def test_3000_fuzzed_lines_are_rows_or_errors_and_harm_no_other(hpcdecode, tmp_path):
    made = list(fuzzed(3000))
    with open(tmp_path / "p.jsonl", "wb") as file:
        for line in made:
            file.write(line + b"\n" + ROW.encode())
    trial = Trial("fuzz", lambda directory: None, (*GENERATE, "--batch", 128), code=ROW_ERRORS, seconds=240)
    trial.run(hpcdecode, tmp_path)
    numbers = {2 * n + 1 for n, line in enumerate(made) if line.strip()}
    with package.read(str(tmp_path / "out.h5")) as results:
        rows = {}
        for row in results:
            rows.setdefault(row["line"], []).append(row["text"])
        wrong = {error["line"] for error in results.errors()}
        assert all("\n" not in error["reason"] and len(error["reason"]) <= 500 for error in results.errors())
    assert rows.keys() | wrong == numbers | set(range(2, 6001, 2)) and not rows.keys() & wrong
    assert {tuple(rows[n]) for n in range(2, 6001, 2)} == {tuple(rows[2])}
    assert len(wrong) > 1000 and len(rows.keys() & numbers) > 300
