"""Results files of a small job: made by the writer, read by plain h5py."""

from __future__ import annotations

from itertools import pairwise

import h5py

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.resume import find_earlier
from hpcdecode.data.results.writer import Result, ResultsWriter

IDENTITY = {"sampling": {"seed": 1}}
ATTRIBUTES = {
    "identity": IDENTITY,
    "job": {"seed": 1},
    "model": "demo",
    "versions": {"hpcdecode": "0"},
    "topology": [{"rank": 0}],
}


def result(line, sample=0, count=None, text=None):
    ids = [line * 10 + k for k in range(line % 7 if count is None else count)]
    reason = "stop" if line % 2 else "length"
    return Result(line, f"row-{line}", sample, f"täxt {line}" if text is None else text, reason, line % 5 + 1, ids)


def contents(path):
    """Rows and errors as lists of tuples, by plain h5py."""
    with h5py.File(path, "r") as file:
        rows, errors = file["rows"], file["errors"]
        names = {number: name for name, number in h5py.check_enum_dtype(rows["finish_reason"].dtype).items()}
        offsets, ids = rows["token_offsets"][:], rows["token_ids"][:]
        table = zip(
            rows["line"][:].tolist(),
            rows["id"].asstr()[:],
            rows["sample"][:].tolist(),
            rows["text"].asstr()[:],
            [names[r] for r in rows["finish_reason"][:]],
            rows["prompt_tokens"][:].tolist(),
            [ids[a:b].tolist() for a, b in pairwise(offsets)],
            strict=True,
        )
        assert offsets[0] == 0 and offsets[-1] == len(ids)
        bad = zip(errors["line"][:].tolist(), errors["id"].asstr()[:], errors["reason"].asstr()[:], strict=True)
        return [Result(*row) for row in table], [RowError(*row) for row in bad]


def complete(path):
    with h5py.File(path, "r") as file:
        return bool(file.attrs["complete"])


def writer(path, *, overwrite=False, **options):
    earlier = find_earlier(path, IDENTITY, overwrite=overwrite)
    assert earlier is None or not earlier.complete
    return ResultsWriter(path, earlier=earlier, **{"attributes": ATTRIBUTES, "checkpoint_seconds": 1000, **options})
