"""Prompt files of every kind give the rows that the plain file gives."""

import gzip
import io
import json
import sys

import h5py
import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd

from hpcdecode.data.prompts.files import resolve
from hpcdecode.data.prompts.rows import RowError, read_rows
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=7)
ROWS = [{"id": f"r{i}", "prompt": f"text {i} é", "max_tokens": i + 1, "note": "mine"} for i in range(3000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(*paths, **options):
    return list(read_rows([str(p) for p in paths], DEFAULTS, **options))


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(LINES)
    return path


def test_compressed_files(tmp_path, plain):
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(LINES))
    frames = [zstd.compress(LINES[:1000]), zstd.compress(LINES[1000:])]
    (tmp_path / "p.jsonl.zst").write_bytes(b"".join(frames))
    assert len(read(plain)) == 3000
    assert read(tmp_path / "p.jsonl.gz") == read(plain) == read(tmp_path / "p.jsonl.zst")


def test_standard_input(plain, monkeypatch):
    expected = read(plain)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES)))
    assert read("-") == expected


def test_parquet(tmp_path, plain):
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet", row_group_size=700)
    assert read(tmp_path / "p.parquet") == read(plain)
    pyarrow.parquet.write_table(table.rename_columns(["id", "q", "max_tokens", "note"]), tmp_path / "q.parquet")
    assert read(tmp_path / "q.parquet", column="q") == read(plain)
    ids = pyarrow.table({"ids": [[1, 2], [3]]})
    pyarrow.parquet.write_table(ids, tmp_path / "i.parquet")
    assert [r.prompt_token_ids for r in read(tmp_path / "i.parquet", column="ids")] == [[1, 2], [3]]


def test_hdf5(tmp_path, plain):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for name in ("id", "prompt", "max_tokens"):
            file[f"rows/{name}"] = [row[name] for row in ROWS]
        file["rows/seed"] = [1, 2]  # of another length: no column of these rows
        ids = file.create_dataset("ids", 2, h5py.vlen_dtype("i4"))
        ids[0], ids[1] = [1, 2], [3]
    assert read(tmp_path / "p.h5", column="rows/prompt") == read(plain)
    assert [r.prompt_token_ids for r in read(tmp_path / "p.h5", column="ids")] == [[1, 2], [3]]


def test_several_files_are_numbered_through(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "b1"}\n\n{"prompt": "b3"}')
    (tmp_path / "a.jsonl").write_text('{"prompt": "a1"}\n{"promt": "a2"}\n')
    first, bad, *others = read(*resolve([str(tmp_path / "*.jsonl")]))
    assert (first.line, first.prompt) == (1, "a1")
    assert isinstance(bad, RowError) and bad.line == 2 and bad.reason.startswith(f"{tmp_path / 'a.jsonl'}:2: expected")
    assert [(r.line, r.prompt) for r in others] == [(3, "b1"), (5, "b3")]


def test_limit_counts_rows_and_done_ones_are_left_out(plain):
    assert [r.line for r in read(plain, limit=5, wanted={2, 3, 5, 6}.__contains__)] == [2, 3, 5]


def test_a_column_by_name_in_json_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    lines = [{"q": "a", "prompt": "other"}, {"q": [1, 2]}, {"q": chat}, {"prompt": "b"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, ids, messages, missing = read(path, column="q")
    assert (text.prompt, ids.prompt_token_ids, messages.messages) == ("a", [1, 2], chat)
    assert missing.reason == "q: expected the prompt (--prompt-column), got none"


def test_requests_of_the_openai_batch_format(tmp_path):
    def line(url, body, **fields):
        return json.dumps({"custom_id": "c", "method": "POST", "url": url, "body": body, **fields})

    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9, "top_p": 0.5}
    path = tmp_path / "batch.jsonl"
    path.write_text(
        "\n".join(
            [
                line("/v1/chat/completions", chat),
                line("/v1/completions", {"prompt": "a", "max_tokens": 3}),
                line("/v1/completions", {"prompt": [1, 2]}),
                line("/v1/embeddings", {"input": "a"}),
                line([], {"input": "a"}),
                line("/v1/completions", {"messages": chat["messages"]}),
                line("/v1/completions", "a"),
                line("/v1/completions", {"prompt": "a"}, method="GET"),
            ]
        )
    )
    first, second, third, *bad = read(path)
    assert first.id == "c" and first.messages == chat["messages"]
    assert first.params == SamplingParams(max_tokens=9, top_p=0.5)
    assert (second.prompt, second.params.max_tokens, third.prompt_token_ids) == ("a", 3, [1, 2])
    expected = [
        "url: expected /v1/chat",
        "url: expected /v1/chat",
        "body: expected prompt for",
        "body: expected an object",
        "expected POST",
    ]
    assert [e.id for e in bad] == ["c"] * 5
    assert all(text in error.reason for text, error in zip(expected, bad, strict=True))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet", ".h5"])
def test_broken_files_are_user_errors(tmp_path, suffix):
    whole = {
        ".jsonl.gz": gzip.compress(LINES),
        ".jsonl.zst": zstd.compress(LINES),
        ".parquet": b"PAR1" + LINES,
        ".h5": b"\x89HDF\r\n\x1a\n" + LINES,
    }[suffix]
    path = tmp_path / f"p{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"prompt file {path}: "):
        read(path)


def test_tables_without_prompts_are_user_errors(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": [2]}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match=r"expected a column 'prompt', found a, b; use --prompt-column a or"):
        read(tmp_path / "p.parquet")
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["rows/text"] = ["a"]
    with pytest.raises(UserError, match=r"expected a column 'rows/prompt', found text"):
        read(tmp_path / "p.h5", column="rows/prompt")


def test_names_that_are_no_files(tmp_path):
    for name, what in (
        ("none.jsonl", "does not exist"),
        ("", r"expected \*.parquet or \*.arrow files in this folder, found none"),
        ("*.gz", "found none"),
    ):
        with pytest.raises(UserError, match=what):
            resolve([f"{tmp_path}/{name}"])
    with pytest.raises(UserError, match="once at most"):
        resolve(["-", "-"])
