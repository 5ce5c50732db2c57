"""Arrow files as untrusted prompts: what their metadata claim, offsets that lead astray, and values that are odd."""

from __future__ import annotations

import io
import random
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from hpcdecode.data.prompts import arrow_messages
from hpcdecode.data.prompts.kept import ALL, KeptColumns, Selection
from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams

ROWS = [{"prompt": f"prompt {i}" * 3, "label": f"l{i % 3}", "max_tokens": i + 1, "x": [i] * 3} for i in range(50)]
TABLE = pa.Table.from_pylist(ROWS)


def saved(table: pa.Table, *, file: bool = True, batch: int = 10, **options: object) -> bytes:
    sink = io.BytesIO()
    new = pyarrow.ipc.new_file if file else pyarrow.ipc.new_stream
    with new(sink, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch)
    return sink.getvalue()


def read(path: Path, data: bytes, **options: object) -> list[Row | RowError]:
    path.write_bytes(data)
    return list(read_rows([str(path)], SamplingParams(), **options))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p.arrow"


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_batch_does_not_unpack_to_far_more_than_is_stored(path, monkeypatch, codec):
    table = pa.table({"prompt": ["x" * (8 << 20), "b"]})
    data = saved(table, compression=codec)
    assert len(data) < 1 << 17 and read(path, data)[1].prompt == "b"
    size = table["prompt"].chunk(0).buffers()[2].size
    claimed = data.replace(size.to_bytes(8, "little"), (1 << 45).to_bytes(8, "little"))
    assert claimed != data
    with pytest.raises(UserError, match=r"got: a batch of 35184372088\d+ bytes of which \d+ are stored"):
        read(path, claimed)
    monkeypatch.setattr(arrow_messages, "_MAX_ANY_RATIO_BYTES", 1 << 20)
    with pytest.raises(UserError, match=r"got: a batch of 83886\d+ bytes of which \d+ are stored"):
        read(path, data)


def test_a_batch_of_more_rows_than_its_file_has_bits(path):
    data = saved(pa.table({"prompt": pa.nulls(77_777)}), file=False, batch=100_000)
    with pytest.raises(UserError, match=r"got: a batch of 77777 rows in a file of \d+ bytes"):
        read(path, data)


def changed(data: bytes, before: list[int], after: list[int]) -> bytes:
    """Replace numbers in a file."""
    old, new = (np.array(numbers, np.int32).tobytes() for numbers in (before, after))
    assert data.count(old) == 1
    return data.replace(old, new)


def test_offsets_and_indices_that_lead_out_of_a_batch(path):
    texts = saved(pa.table({"prompt": ["hello", "world"]}))
    for offsets in ([0, 5, 10_000], [0, 11, 10], [0, -5, 10]):
        with pytest.raises(UserError, match=r"expected a whole file of its kind, got: "):
            read(path, changed(texts, [0, 5, 10], offsets))
    encoded = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1, 0, 0, 1], pa.int32()), ["aa", "bbb"])
    for indices in ([1, 0, 9, 0, 0, 1], [1, 0, 1, -7, 0, 1]):
        with pytest.raises(UserError, match=r"expected a whole file of its kind, got: "):
            read(path, changed(saved(pa.table({"prompt": encoded})), [1, 0, 1, 0, 0, 1], indices))


def test_text_that_is_none_is_an_error_of_its_row(path):
    for kind, plain in ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())):
        column = pa.array([b"a", b"\xff", b"c"], plain).view(kind)
        first, bad, third = read(path, saved(pa.table({"prompt": column, "n": [1, 1, 1]})))
        assert (first.prompt, third.prompt) == ("a", "c")
        assert bad.reason.startswith("prompt: expected a string, got a bytes")


ODD = {
    "decimals": pa.array([Decimal(5)] * 2),
    "times": pa.array([datetime(2020, 1, 1)] * 2, pa.timestamp("ns")),
    "structs": pa.array([{"a": 1}, None]),
    "maps": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
    "dictionaries": pa.array(["a", "b"]).dictionary_encode(),
    "views": pa.array(["a", "b"], pa.string_view()),
    "halves": pa.array(np.array([1, 2], np.float16)),
    "durations": pa.array([1, 2], pa.duration("s")),
    "nulls": pa.nulls(2),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_types_are_kept_or_errors_of_their_rows(path, name):
    data = saved(pa.table({"prompt": ["a", "b"], "max_tokens": ODD[name], "other": ODD[name]}))
    rows = read(path, data, kept=KeptColumns(Selection(ALL)))
    reasons = [row.reason for row in rows if isinstance(row, RowError)]
    assert len(rows) == 2 and all(reason.startswith("max_tokens: expected a 64-bit integer") for reason in reasons)
    assert bool(reasons) == (name != "nulls")


def variants() -> list[bytes]:
    encoded = TABLE.set_column(1, "label", TABLE["label"].dictionary_encode())
    packed = [saved(TABLE, compression=codec) for codec in ("lz4", "zstd")]
    return [saved(TABLE), saved(TABLE, file=False), saved(encoded, file=False), *packed]


def test_damaged_files_give_rows_or_user_errors(path):
    """Bytes are changed, taken out, put in, or made large numbers."""
    whole, refused = variants(), 0
    for seed in range(400):
        draw = random.Random(seed)
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            number = draw.choice([2**62, -1, 10**6]).to_bytes(8, "little", signed=True)
            kind = draw.randrange(4)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                data[at : at + 8] = number
            elif kind == 2:
                del data[at : at + 8]
            else:
                data[at:at] = bytes(8)
        try:
            assert len(read(path, bytes(data), kept=KeptColumns(Selection(ALL)))) <= 60
        except UserError:
            refused += 1
    assert 200 < refused < 400
