"""Input columns in results: jobs on the demo model keep them, by every way that a job may go."""

from __future__ import annotations

import json
import signal
import time

import h5py
import numpy as np
import pytest

import hpcdecode as package
from tests.support.commands import run

FLAGS = ("--model", "demo", "--max-tokens", 4, "--dtype", "float32")
LONG = "long" * 100
ROWS = [
    {"id": "a", "prompt": "One", "label": 1, "score": 0.5, "ok": True, "text": "their own", "mixed": 7, "big": 2**60},
    {"id": "b", "prompt": "Two", "label": -2, "score": 2, "ok": False, "text": "ö", "mixed": "x", "big": 0, "some": 5},
    {
        "id": "c",
        "prompt": "Three",
        "label": 3,
        "score": 1e9,
        "ok": True,
        "text": "",
        "mixed": [1, {"a": None}],
        "big": 1,
    },
    {"id": "d", "prompt": "", "label": 4, "tags": ["kept"]},
]
HOSTILE = {
    "a/b": 1,
    "..": 2,
    "a": 3,
    "": 4,
    "n\0l": 5,
    "50%": 6,
    "%2F": 7,
    "input.text": 8,
    LONG: 9,
    "ünï": 10,
    ".": 11,
}


@pytest.fixture
def write(tmp_path):
    def written(rows, name="p.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    return written


def inputs(path):
    """Datasets of /input by the name that they are said to have, and the raw values."""
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        found = {
            data.attrs["name"]: (data.dtype, bool(data.attrs["json"]), data[:].tolist())
            for data in file["input"].values()
        }
        return found, [text.decode() for text in file["rows/prompt"][:]]


def test_columns_have_their_types_in_hdf5(hpcdecode, tmp_path, write):
    write([*ROWS, "broken"])
    assert hpcdecode("generate", "p.jsonl", *FLAGS).returncode == 3
    found, prompts = inputs(tmp_path / "p.h5")
    assert prompts == ["One", "Two", "Three"]
    assert found.keys() == {"label", "score", "ok", "text", "mixed", "big", "some"}
    assert found["label"] == (np.int64, False, [1, -2, 3]) and found["big"] == (np.int64, False, [2**60, 0, 1])
    assert found["score"] == (np.float64, False, [0.5, 2.0, 1e9]) and found["ok"] == (bool, False, [True, False, True])
    assert found["text"][1:] == (False, [b"their own", "ö".encode(), b""])
    assert found["mixed"][1:] == (True, [b"7", b'"x"', b'[1,{"a":null}]'])
    assert found["some"][1:] == (True, [b"null", b"5", b"null"])
    with package.read(tmp_path / "p.h5") as results:
        assert results.columns[-8:] == ("prompt", "label", "score", "ok", "input.text", "mixed", "big", "some")
        row = results[2]
        assert (row["prompt"], row["label"], row["ok"], row["input.text"], row["some"]) == ("Two", -2, False, "ö", 5)
        assert row["text"] != "ö" and results[1]["some"] is None and results[3]["mixed"] == [1, {"a": None}]
        assert results.column("label").dtype == np.int64
        first, second = results.errors()
        assert first["input"] == {"prompt": "", "label": 4, "tags": ["kept"]} and second["input"] == {}


def test_exports_have_the_columns(hpcdecode, tmp_path, write):
    parquet = pytest.importorskip("pyarrow.parquet")
    write(ROWS)
    hpcdecode("generate", "p.jsonl", *FLAGS)
    made = hpcdecode("export", "p.h5", "--to", "jsonl", "-o", "-").stdout
    rows = [json.loads(line) for line in made.splitlines()]
    for row, given in zip(rows, ROWS, strict=False):
        expected = {"input.text" if name == "text" else name: value for name, value in given.items()}
        assert expected.items() <= row.items() and row["some"] == given.get("some")
    assert hpcdecode("export", "p.h5", "--to", "parquet").returncode == 0
    table = parquet.read_table(tmp_path / "p.results.parquet")
    types = {name: str(table.schema.field(name).type) for name in ("prompt", "label", "score", "ok", "mixed", "some")}
    assert types == {
        "prompt": "string",
        "label": "int64",
        "score": "double",
        "ok": "bool",
        "mixed": "string",
        "some": "int64",
    }
    assert table["some"].to_pylist() == [None, 5, None] and table["mixed"].to_pylist()[2] == '[1,{"a":null}]'
    chosen = hpcdecode("export", "p.h5", "--to", "jsonl", "-o", "-", "--columns", "prompt,input.text").stdout
    assert json.loads(chosen.splitlines()[1]) == {"prompt": "Two", "input.text": "ö"}


def test_hostile_names_lie_flat_and_apart(hpcdecode, tmp_path, write):
    write([{"prompt": "One", **HOSTILE}, {"prompt": "Two", **HOSTILE}])
    assert hpcdecode("generate", "p.jsonl", *FLAGS).returncode == 0
    with h5py.File(tmp_path / "p.h5") as file:
        assert all(isinstance(member, h5py.Dataset) for member in file["input"].values())
        names = {data[0]: (name, data.attrs["name"]) for name, data in file["input"].items()}
        assert max(map(len, file["input"])) < 256
    assert (
        names[1] == ("a%2Fb", "a/b") and names[2] == ("%2E.", "..") and names[4] == ("%", "") and names[7][0] == "%252F"
    )
    assert names[5] == ("n%00l", "n\ufffdl") and names[9][1] == LONG and len(names) == len(HOSTILE)
    with package.read(tmp_path / "p.h5") as results:
        row = results[2]
    shown = {"input.input.text" if n == "input.text" else n or "input.": value for n, value in HOSTILE.items()}
    assert shown.items() <= row.items()


def test_more_columns_than_datasets_are_kept_together(hpcdecode, tmp_path, write):
    write([{"prompt": "One", f"a{n}": n, "input": [n]} for n in range(600)])
    assert hpcdecode("generate", "p.jsonl", *FLAGS, "--ignore-eos").returncode == 0
    with h5py.File(tmp_path / "p.h5") as file:
        assert list(file["input"]) == ["%columns"] and json.loads(file["input/%columns"][9]) == {"a9": 9, "input": [9]}
    with package.read(tmp_path / "p.h5") as results:
        assert results[600]["input"] == {"a599": 599, "input": [599]} and results[600]["prompt"] == "One"


@pytest.mark.parametrize(
    "value, columns, prompt",
    [
        ("none", set(), False),
        ("label", {"label"}, False),
        ("label,prompt", {"label"}, True),
        ("score, ok", {"score", "ok"}, False),
    ],
)
def test_chosen_columns(hpcdecode, tmp_path, write, value, columns, prompt):
    write(ROWS[:3])
    assert hpcdecode("generate", "p.jsonl", *FLAGS, "--keep-columns", value).returncode == 0
    with package.read(tmp_path / "p.h5") as results:
        extra = {"label", "score", "ok", "input.text", "mixed", "big", "some", "prompt"} & set(results.columns)
        assert extra == columns | ({"prompt"} if prompt else set())
    with h5py.File(tmp_path / "p.h5") as file:
        assert ("input" in file) == (value != "none")


def test_an_unknown_name_is_refused_with_the_columns_before_the_model_loads(hpcdecode, write):
    write(ROWS)
    refused = hpcdecode(
        "generate", "p.jsonl", "--model", "no-such-folder", "--dtype", "float32", "--keep-columns", "label,headline"
    )
    piped = hpcdecode.line("generate", "-", "-o", "x.h5", *FLAGS, "--keep-columns", "headline")
    assert refused.returncode == 2 and "got headline" in refused.stderr and "id, prompt, label, score" in refused.stderr
    told = run(["sh", "-c", '"$@" < p.jsonl', "sh", *piped], cwd=hpcdecode.directory, env=hpcdecode.environment)
    assert told.returncode == 2 and "got headline" in told.stderr and "Traceback" not in told.stderr


def test_the_prompts_own_column_and_a_job_file(hpcdecode, tmp_path, write):
    write([{"question": "One", "prompt": "not this", "label": n} for n in range(2)])
    (tmp_path / "job.toml").write_text(
        'prompts = ["p.jsonl"]\nprompt_column = "question"\nkeep_columns = ["question", "prompt"]\n'
    )
    assert hpcdecode("generate", "--job", "job.toml", *FLAGS).returncode == 0
    with package.read(tmp_path / "p.h5") as results:
        row = results[1]
        assert row["prompt"] == "One" and row["input.prompt"] == "not this" and "label" not in row


LONG_JOB = [
    {"prompt": f"Line {n}", "n_words": n if n < 250 else "many", "pad": "x" * 500, "max_tokens": 20 + n % 60}
    for n in range(300)
]


@pytest.fixture
def whole(hpcdecode, tmp_path, write):
    write(LONG_JOB)
    assert hpcdecode("generate", "p.jsonl", *FLAGS, "--ignore-eos", "-o", "whole.h5").returncode == 0
    return contents(tmp_path / "whole.h5")


def contents(path):
    with package.read(path) as results:
        assert results.complete
        names = [name for name in results.columns if not name.endswith("_at")]
        rows = [{name: np.asarray(row[name]).tolist() for name in names} for row in results]
    with h5py.File(path) as file:
        return (
            rows,
            {name: (data.dtype, data[:].tolist()) for name, data in file["input"].items()},
            dict(file["input"].attrs),
        )


def shown(path):
    """Rows that an unfinished job shows."""
    if not path.exists():
        return 0
    with h5py.File(path) as file:
        return len(file["rows/line"])


def killed(hpcdecode, path, *flags, ranks=1):
    process = hpcdecode.start(
        "generate", "p.jsonl", *FLAGS, "--ignore-eos", "-o", path, "--checkpoint-every", 0.1, *flags, ranks=ranks
    )
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end and not shown(path):
        time.sleep(0.01)
    assert process.poll() is None, "killed before its end"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


def test_a_killed_job_goes_on_to_the_same_columns(hpcdecode, tmp_path, whole):
    out = tmp_path / "out.h5"
    killed(hpcdecode, out)
    with package.read(out) as results:
        first = next(iter(results))
        assert not results.complete and first["prompt"] == f"Line {first['n_words']}" and first["pad"] == "x" * 500
    refused = hpcdecode("generate", "p.jsonl", *FLAGS, "--ignore-eos", "-o", out, "--keep-columns", "pad")
    assert refused.returncode == 2 and "keep_columns was 'all' and is 'pad'" in refused.stderr
    assert hpcdecode("generate", "p.jsonl", *FLAGS, "--ignore-eos", "-o", out).returncode == 0
    assert contents(out) == whole
    assert whole[1]["n_words"][1][:2] == [b"0", b"1"] and whole[1]["n_words"][1][-1] == b'"many"'


def test_a_job_goes_on_with_the_columns_that_it_began_with(hpcdecode, tmp_path, write):
    write(LONG_JOB)
    killed(hpcdecode, tmp_path / "out.h5", "--keep-columns", "none")
    assert hpcdecode("generate", "p.jsonl", *FLAGS, "--ignore-eos", "-o", "out.h5").returncode == 0
    with package.read(tmp_path / "out.h5") as results:
        assert "prompt" not in results.columns and results.attributes["job"]["keep_columns"] == ["none"]


def test_a_greater_limit_goes_on_from_the_final_file(hpcdecode, tmp_path, whole):
    for limit in (100, 300):
        assert (
            hpcdecode("generate", "p.jsonl", *FLAGS, "--ignore-eos", "-o", "out.h5", "--limit", limit).returncode == 0
        )
        with h5py.File(tmp_path / "out.h5") as file:
            assert file["input/n_words"].dtype == (np.int64 if limit == 100 else object)
    assert contents(tmp_path / "out.h5") == whole


def test_shards_join_with_their_columns(hpcdecode, tmp_path, whole):
    for index in range(2):
        assert (
            hpcdecode(
                "generate", "p.jsonl", *FLAGS, "--ignore-eos", "--shard", f"{index}/2", "-o", f"{index}.h5"
            ).returncode
            == 0
        )
    assert hpcdecode("merge", "joined.h5", "0.h5", "1.h5").returncode == 0
    assert contents(tmp_path / "joined.h5") == whole


def test_two_ranks_keep_them_too(hpcdecode, tmp_path, whole):
    assert hpcdecode("generate", "p.jsonl", *FLAGS, "--ignore-eos", "-o", "two.h5", ranks=2).returncode == 0
    assert contents(tmp_path / "two.h5") == whole
