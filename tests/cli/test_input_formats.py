"""Prompt files of every format through the command: into the results, with their columns, and refused before a load."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

import hpcdecode as package
from tests.support.commands import TIMEOUT, run

FLAGS = ("--model", "demo", "--max-tokens", 3)
ROWS = [{"question": f'The "{word}" statement,\nand more', "label": f"l{word}"} for word in ("with", "for", "while")]


def csv(delimiter: str = ",") -> bytes:
    quoted = (['"' + value.replace('"', '""') + '"' for value in row.values()] for row in ROWS)
    return "\n".join([delimiter.join(ROWS[0]), *map(delimiter.join, quoted)]).encode()


def save(directory) -> dict[str, str]:
    """Write the rows in every format; return the names by what they are."""
    table = pa.Table.from_pylist(ROWS)
    (directory / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (directory / "p.csv").write_bytes(csv())
    (directory / "p.tsv.gz").write_bytes(gzip.compress(csv("\t")))
    (directory / "p.json").write_text(json.dumps(ROWS, indent=1))
    (directory / "named.txt").write_bytes(gzip.compress(csv()))  # known by its content
    with pyarrow.ipc.new_file(directory / "p.feather", table.schema) as writer:
        writer.write_table(table)
    for folder in ("parquets", "saved"):
        (directory / folder).mkdir()
    pq.write_table(table.slice(0, 2), directory / "parquets" / "0.parquet")
    pq.write_table(table.slice(2), directory / "parquets" / "1.parquet")
    with pyarrow.ipc.new_stream(directory / "saved" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    files = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (directory / "saved" / "state.json").write_text(json.dumps(files))
    (directory / "saved" / "dataset_info.json").write_text("{}")
    return {
        "lines": "p.jsonl",
        "csv": "p.csv",
        "tsv.gz": "p.tsv.gz",
        "array": "p.json",
        "by content": "named.txt",
        "feather": "p.feather",
        "parquets": "parquets",
        "dataset": "saved/",
    }


def found(path) -> list[dict]:
    with package.read(path) as results:
        return [{name: row[name] for name in ("line", "id", "text", "prompt", "label")} for row in results]


def test_every_format_gives_the_same_results_with_columns(hpcdecode, tmp_path):
    wanted = None
    for what, name in save(tmp_path).items():
        result = hpcdecode("generate", name, "--prompt-column", "question", "-o", "o.h5", "--overwrite", *FLAGS)
        assert result.returncode == 0, (what, result.stderr)
        assert "results: o.h5 (3 of 3 rows, 0 errors)" in result.stderr
        rows = found(tmp_path / "o.h5")
        wanted = wanted or rows
        assert rows == wanted, what
    assert [row["label"] for row in wanted] == [row["label"] for row in ROWS]
    assert [row["prompt"] for row in wanted] == [row["question"] for row in ROWS]


def test_templates_kept_columns_shards_and_resumption(hpcdecode, tmp_path):
    names = save(tmp_path)
    template = ("--prompt-template", "{{ label }}: {{ question }}", "--keep-columns", "label")
    for name in (names["csv"], names["dataset"], names["parquets"]):
        first = hpcdecode("generate", name, *template, "--limit", 2, "-o", "o.h5", "--overwrite", *FLAGS)
        assert first.returncode == 0 and "(2 of 2 rows" in first.stderr, first.stderr
        rest = hpcdecode("generate", name, *template, "-o", "o.h5", *FLAGS)
        assert rest.returncode == 0 and "(3 of 3 rows" in rest.stderr, rest.stderr
        with package.read(tmp_path / "o.h5") as results:
            assert "question" not in results.columns and [row["label"] for row in results] == [
                "lwith",
                "lfor",
                "lwhile",
            ]
            whole = [row["text"] for row in results]
        shard = hpcdecode("generate", name, *template, "--shard", "0/2", "-o", "s.h5", "--overwrite", *FLAGS)
        assert shard.returncode == 0, shard.stderr
        with package.read(tmp_path / "s.h5") as results:
            assert [(row["line"], row["text"]) for row in results] == [(2, whole[1])]


def test_the_names_of_results_follow_from_files_and_folders(hpcdecode, tmp_path):
    save(tmp_path)
    for name, output in (("p.csv", "p.h5"), ("saved/", "saved.h5")):
        result = hpcdecode("generate", name, "--prompt-column", "question", *FLAGS)
        assert result.returncode == 0 and (tmp_path / output).exists(), result.stderr


def test_csv_on_standard_input(hpcdecode, tmp_path):
    result = subprocess.run(
        hpcdecode.line("generate", "-", "-o", "o.h5", "--prompt-column", "question", *FLAGS),
        input=gzip.compress(csv()),
        capture_output=True,
        cwd=tmp_path,
        env=hpcdecode.environment,
        timeout=TIMEOUT,
    )
    assert result.returncode == 0, result.stderr
    with package.read(tmp_path / "o.h5") as results:
        assert [row["label"] for row in results] == [row["label"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.jsonl", b"\x89PNG\r\n\x1a\n" + bytes(99), "prompt file p.jsonl: expected JSON Lines, .* to be a PNG image"),
        ("p.parquet", b"PK\x03\x04" + bytes(99), "prompt file p.parquet: expected .* seems to be a zip archive"),
        ("p", b"Tell me a story.\n", "prompt file p: expected .* seems to be plain text"),
        ("p.csv", csv(), "prompt file p.csv: expected a column 'prompt', found label, question; use --prompt-column q"),
        (
            "p.json",
            b"[" + b'{"question": "a"},' * 100 + b'{"prompt": "a"}]',
            "the first 100 that cannot.*-column question",
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_no_prompt_file_is_refused_before_the_model_loads(hpcdecode, tmp_path, name, content, says, ranks):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n')
    files = ("good.jsonl", name) if "seems" in says else (name,)  # all files are looked at
    result = hpcdecode("generate", *files, "-o", "o.h5", *FLAGS, ranks=ranks)
    assert result.returncode == 2 and result.stderr.count("hpcdecode: error") == 1, result.stderr
    assert re.search(says, result.stderr), result.stderr
    assert "layout" not in result.stderr and "Traceback" not in result.stderr and not (tmp_path / "o.h5").exists()


def test_a_pipe_with_a_name_is_read_once(hpcdecode, tmp_path):
    line = " ".join(map(shlex.quote, hpcdecode.line("generate", "-o", "o.h5", "--keep-columns", "label", *FLAGS)))
    (tmp_path / "p.csv").write_bytes(csv().replace(b"question", b"prompt"))
    result = run(["bash", "-c", f"{line} <(cat p.csv)"], cwd=tmp_path, env=hpcdecode.environment)
    assert result.returncode == 0, result.stderr
    with package.read(tmp_path / "o.h5") as results:
        assert [row["label"] for row in results] == [row["label"] for row in ROWS]
