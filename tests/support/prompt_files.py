"""The same rows as prompt files of every format, for tests of their readers."""

from __future__ import annotations

import gzip
import io
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
from backports import zstd

from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.data.prompts.total import RowTotal
from hpcdecode.requests.params import SamplingParams

ROWS = [
    {"prompt": "a, b", "label": "x", "max_tokens": 5},
    {"prompt": 'say "hi"\nand go\r\n', "label": "é😀", "max_tokens": 6},
    {"prompt": "[1]", "label": "", "max_tokens": 7},
]


def delimited(delimiter: str, rows: list[dict] = ROWS) -> bytes:
    def quoted(value: object) -> str:
        return '"' + str(value).replace('"', '""') + '"'

    lines = [delimiter.join(rows[0]), *(delimiter.join(map(quoted, row.values())) for row in rows)]
    return "\r\n".join(lines).encode()


def arrow(*, stream: bool = False, rows: list[dict] = ROWS, batch: int = 2, **options: object) -> bytes:
    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(sink, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch)
    return sink.getvalue()


def feather() -> bytes:
    sink = io.BytesIO()
    pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FORMATS = {
    "csv": delimited(","),
    "csv with a byte order mark": b"\xef\xbb\xbf" + delimited(","),
    "csv with blank lines": b"\n\r\n" + delimited(",").replace(b"\r\n", b"\n\n  \n", 1) + b"\n\n",
    "tsv": delimited("\t"),
    "array": json.dumps(ROWS).encode(),
    "array over lines": b"\xef\xbb\xbf\n " + json.dumps(ROWS, indent=2, ensure_ascii=False).encode() + b"\n",
    "arrow file": arrow(),
    "arrow file, lz4": arrow(compression="lz4"),
    "arrow file, zstd": arrow(compression="zstd"),
    "arrow stream": arrow(stream=True),
    "feather": feather(),
    "parquet": parquet(),
    "lines": JSONL,
}
STREAMS = [name for name in FORMATS if not name.startswith(("arrow", "feather", "parquet"))]
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


def read(*paths: object, **options: object) -> list[Row | RowError]:
    return list(read_rows(list(map(str, paths)), SamplingParams(), **options))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def total(*paths: object) -> int | None:
    counted, end = RowTotal(list(map(str, paths))), time.monotonic() + 20
    while counted.rows is None and time.monotonic() < end:
        time.sleep(0.01)
    return counted.rows


def suffix(name: str) -> str:
    return {"csv": ".csv", "tsv": ".tsv"}.get(name[:3], "")
