"""Tables as untrusted prompt files: nothing is read but what was named, sizes are bounded, odd types are row errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hpcdecode.data.prompts import tables
from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.errors import UserError
from hpcdecode.requests.params import SamplingParams

SECRET = "SECRET"


def hdf5(change: Callable[[h5py.File], object]) -> Callable[[Path], None]:
    """A prompt file, beside others whose prompts are secret."""

    def arrange(directory: Path) -> None:
        with h5py.File(directory / "other.h5", "w") as file:
            file["prompt"] = [SECRET] * 3
        (directory / "raw").write_bytes(SECRET.encode() * 3)
        with h5py.File(directory / "p.h5", "w") as file:
            change(file)

    return arrange


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3,), h5py.string_dtype())
    layout[:] = h5py.VirtualSource("other.h5", "prompt", shape=(3,))
    file.create_virtual_dataset("prompt", layout)


def linked(**members: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        for name, value in members.items():
            file[name] = value

    return change


def created(*arguments: object, **options: object) -> Callable[[h5py.File], object]:
    return lambda file: file.create_dataset("prompt", *arguments, **options)


OTHER = h5py.ExternalLink("other.h5", "/prompt")
ELSEWHERE = "expected data that lie in this file itself, got "
H5 = [
    ("external link", linked(prompt=OTHER), ELSEWHERE + "an external link"),
    ("external link beside", linked(prompt=["a"] * 3, stop=OTHER), "stop: " + ELSEWHERE + "an external link"),
    ("soft link", linked(x=OTHER, prompt=h5py.SoftLink("/x")), ELSEWHERE + "a soft link"),
    ("virtual dataset", virtual, ELSEWHERE + "a virtual dataset"),
    ("external storage", created((3,), "S6", external=[("raw", 0, 18)]), ELSEWHERE + "external storage"),
    ("1e12 rows", created((10**12,), "i8", chunks=(1000,)), "expected a dataset that was written"),
    ("elements of 1 GB", created((3,), "S1000000000", chunks=(1,), compression="gzip"), "chunks of at most"),
    ("chunks of 800 MB", created((10**9,), "i8", chunks=(10**8,), compression="gzip"), "chunks of at most"),
    ("no columns", linked(prompt="a"), "expected a column 'prompt'"),
]
NAMED = {"rows": h5py.ExternalLink("other.h5", "/")}


def read(path: Path, **options: object) -> list[Row | RowError]:
    return list(read_rows([str(path)], SamplingParams(), **options))


@pytest.mark.parametrize(("change", "says"), [h[1:] for h in H5], ids=[h[0] for h in H5])
def test_an_hdf5_file_that_is_not_what_it_seems(tmp_path, monkeypatch, change, says):
    monkeypatch.chdir(tmp_path)
    hdf5(change)(tmp_path)
    with pytest.raises(UserError, match=f"prompt file p.h5: .*{re.escape(says)}"):
        read(Path("p.h5"))


def test_a_group_of_another_hdf5_file(tmp_path):
    hdf5(linked(**NAMED))(tmp_path)
    with pytest.raises(UserError, match="rows: expected data that lie in this file itself, got an external link"):
        read(tmp_path / "p.h5", column="rows/prompt")


def test_links_that_are_no_columns_are_left_alone(tmp_path):
    hdf5(linked(prompt=["a"] * 2, note=OTHER, other=h5py.SoftLink("/none")))(tmp_path)
    assert [row.prompt for row in read(tmp_path / "p.h5")] == ["a", "a"]


def test_odd_types_of_hdf5_are_errors_of_their_rows(tmp_path):
    types = {"seed": np.array([1j, 2j]), "id": np.zeros(2, [("a", "i4")]), "n": np.array([b"a", b"b"], "V1")}
    for name, values in types.items():
        hdf5(
            lambda file, n=name, v=values: [
                file.create_dataset("prompt", data=["a", "b"]),
                file.create_dataset(n, data=v),
            ]
        )(tmp_path)
        assert all(isinstance(row, RowError) and name in row.reason for row in read(tmp_path / "p.h5"))
    hdf5(created(data=[b"a", b"\xff"], dtype=h5py.string_dtype()))(tmp_path)
    good, bad = read(tmp_path / "p.h5")
    assert good.prompt == "a" and bad.reason.startswith("prompt: expected a string, got a bytes")


def parquet(**columns: object) -> Callable[[Path], None]:
    return lambda directory: pyarrow.parquet.write_table(pyarrow.table(columns), directory / "p.parquet")


def column(values: list, kind: object = None) -> pyarrow.Array:
    return pyarrow.array(values, kind)


TEXT = column(["a", "b"])
TABLES = {  # columns, and the reasons of both rows if they are errors
    "decimals": ({"max_tokens": column([Decimal(5), None])}, ["max_tokens: expected a 64-bit integer, got a Decimal"]),
    "times": ({"id": column([datetime(2020, 1, 1)] * 2)}, ["id: expected a string or an integer, got a datetime"] * 2),
    "binary": ({"prompt": column([b"a", b"\xff"])}, ["prompt: expected a string, got a bytes"] * 2),
    "text that is none": (
        {"prompt": pyarrow.Array.from_buffers(pyarrow.string(), 2, column([b"\xff", b"b"]).buffers())},
        ["prompt: expected a string, got a bytes"],
    ),
    "maps": (
        {"logit_bias": column([[(1, 2.0)], None], pyarrow.map_(pyarrow.int32(), pyarrow.float32()))},
        ["logit_bias"],
    ),
    "structs": ({"prompt": column([{"a": 1}, {"a": 2}])}, ["prompt: expected a string, got an object"] * 2),
    "nested lists": ({"prompt": None, "prompt_token_ids": column([[[1]], [[2]]])}, ["prompt_token_ids"] * 2),
    "NaN": ({"temperature": column([float("nan"), 1.0])}, ["temperature: expected a finite number"]),
    "dictionaries": ({"prompt": TEXT.dictionary_encode(), "stop": column(["x", None]).dictionary_encode()}, []),
    "nulls": ({"max_tokens": pyarrow.nulls(2), "messages": pyarrow.nulls(2)}, []),
    "nothing but nulls": ({"prompt": pyarrow.nulls(2)}, ["expected exactly one of prompt"] * 2),
}


@pytest.mark.parametrize("name", TABLES)
def test_odd_types_of_parquet_are_values_or_errors_of_their_rows(tmp_path, name):
    columns, reasons = TABLES[name]
    given = {key: value for key, value in {"prompt": TEXT, **columns}.items() if value is not None}
    parquet(**given)(tmp_path)
    rows = read(tmp_path / "p.parquet")
    found = [row.reason for row in rows if isinstance(row, RowError)]
    assert len(rows) == 2 and len(found) == len(reasons)
    assert all(expected in reason for expected, reason in zip(reasons, found, strict=True))


def test_a_column_is_there_once(tmp_path):
    table = pyarrow.Table.from_arrays([TEXT, TEXT], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(UserError, match=r"p.parquet: prompt: expected one column of this name, found 2"):
        read(tmp_path / "p.parquet")


def test_a_parquet_column_does_not_unpack_to_far_more_than_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_MAX_UNPACKED_BYTES", 1 << 20)
    table = pyarrow.table({"prompt": ["x" * (50 << 20)], "note": ["y" * (50 << 20)]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet", compression="zstd")
    with pytest.raises(UserError, match=r"prompt: expected a column of prompts, got 52\d+ bytes of which"):
        read(tmp_path / "p.parquet")
    pyarrow.parquet.write_table(table.set_column(0, "prompt", [["a"]]), tmp_path / "p.parquet", compression="zstd")
    assert [row.prompt for row in read(tmp_path / "p.parquet")] == ["a"]


def test_columns_like_known_ones_are_told_and_no_others(tmp_path, caplog):
    parquet(prompt=TEXT, max_token=TEXT, source=TEXT, label=TEXT)(tmp_path)
    assert len(read(tmp_path / "p.parquet")) == 2
    hdf5(linked(prompt=["a"], temprature=[1.0], note=["x"]))(tmp_path)
    assert len(read(tmp_path / "p.h5")) == 1
    assert caplog.messages == [
        f"hpcdecode: warning: {tmp_path}/{name} is not known and ignored; did you mean {known!r}?"
        for name, known in (
            ("p.parquet: column 'max_token'", "max_tokens"),
            ("p.h5: column 'temprature'", "temperature"),
        )
    ]
