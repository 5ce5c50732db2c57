"""The page of a job: well formed whatever the file holds, no script, no other file, bounded, and true to the rows."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdecode.data.results.join import join
from hpcdecode.errors import UserError
from hpcdecode.report.page.facts import read_facts
from hpcdecode.report.page.write import page, write_page
from tests.support.html_pages import HOSTILE, checked, write_results
from tests.support.many_ranks import CAPACITY, attributes_of

OLD = Path(__file__).parents[1] / "data/files/formats_of_0_1_0.tar.gz"


def made(path):
    """The page of a file, checked."""
    return checked(page(read_facts(str(path))))


def headings(read):
    return [tag for tag, _ in read.elements if re.fullmatch("h[1-4]", tag)]


def test_a_job(tmp_path):
    write_results(tmp_path / "r.h5", rows=50, errors=6, **attributes_of(1, 3, seconds=60.0))
    read = made(tmp_path / "r.h5")
    for said in ("of 56 rows done", "complete", "Throughput over time", "capacity", "1 S + 3 R on 1 host", "text 50"):
        assert said in read.text, said
    assert headings(read)[0] == "h1" and headings(read).count("h1") == 1
    assert "prompt: expected a string, got null" in read.text and "51, 54" in read.text.replace("52, 53, 55, 56", "")
    assert "stop34" in read.text and "length16" in read.text and "error6" in read.text


def test_errors_that_differ_in_values_are_one_cause(tmp_path):
    write_results(tmp_path / "r.h5", rows=2, errors=12)
    facts = read_facts(str(tmp_path / "r.h5"))
    found = [(cause.reason, cause.number, cause.lines) for cause in facts.causes]
    assert found == [
        ("prompt: expected a string, got null", 8, [4, 5, 7, 8, 10]),
        ("max_tokens: expected 1 or more, got -3", 4, [3, 6, 9, 12]),
    ]


def test_hostile_texts_are_text(tmp_path):
    out = tmp_path / "r.h5"
    attributes = attributes_of(1, 2)
    attributes["topology"][0]["host"] = attributes["summary"]["accounts"][0]["host"] = HOSTILE
    attributes |= {"model": {"path": HOSTILE, "architectures": [HOSTILE]}, "versions": {HOSTILE: HOSTILE}}
    columns = {HOSTILE: HOSTILE, "nested": [{HOSTILE: HOSTILE}]}
    write_results(out, 5, 0, prompt=HOSTILE, texts=HOSTILE, ids=HOSTILE, columns=columns, **attributes)
    with h5py.File(out, "r+") as file:
        reasons = [HOSTILE, HOSTILE + "7"]
        for name, values in (("line", [6, 7]), ("id", reasons), ("reason", reasons)):
            kind = file[f"errors/{name}"].dtype
            del file[f"errors/{name}"]
            file.create_dataset(
                f"errors/{name}", data=values if name == "line" else [v.replace("\0", "") for v in values], dtype=kind
            )
    read = made(out)
    assert read.text.count("<script>alert(1)</script>") >= 10
    assert "\u241b[31m" in read.text and "\u27e8U+202E\u27e9" in read.text
    assert not re.search("[\x00\x1b\u202e]", read.text)


def test_the_size_is_bounded(tmp_path):
    names = {f"column {i} " + "n" * 500: "v" * 5000 for i in range(600)}
    attributes = attributes_of(128, 896)
    attributes["versions"] = {f"package {i}": "\x01" * 1000 for i in range(1000)}
    long = "word \x01" * 100_000
    write_results(tmp_path / "r.h5", 7, prompt=long, texts=long, ids="i" * 10_000, columns=names, **attributes)
    read = made(tmp_path / "r.h5")
    assert "characters more" in read.text and "more values" in read.text


def test_many_causes_are_bounded(tmp_path):
    write_results(tmp_path / "r.h5", rows=0, errors=5000)
    with h5py.File(tmp_path / "r.h5", "r+") as file:
        letters = np.random.default_rng(0).integers(97, 123, (5000, 900), dtype=np.uint8)
        file["errors/reason"][:] = [row.tobytes().decode() for row in letters]
    facts = read_facts(str(tmp_path / "r.h5"))
    assert facts.errors == sum(cause.number for cause in facts.causes) == 5000
    assert facts.causes[0].reason == "other causes"
    assert "more causes" in made(tmp_path / "r.h5").text


@pytest.mark.parametrize(("s_ranks", "r_ranks"), [(1, 1), (1, 2), (8, 56), (128, 896)])
def test_any_number_of_ranks(tmp_path, s_ranks, r_ranks):
    write_results(tmp_path / "r.h5", **attributes_of(s_ranks, r_ranks))
    read = made(tmp_path / "r.h5")
    assert f"{s_ranks:,} S + {r_ranks:,} R" in read.text
    assert f"Capacity {CAPACITY * r_ranks:,} tokens" in read.text
    many = s_ranks + r_ranks > 16
    assert ("R bubble" in read.text) == many and ("least to most of all ranks" in read.text) == (r_ranks > 2)


def test_a_load_limit_is_drawn(tmp_path):
    job = {"schedule": "load-control", "load_limit": 150_000}
    write_results(tmp_path / "r.h5", job=job, **attributes_of(1, 1))
    assert "load limit 150k" in made(tmp_path / "r.h5").text
    write_results(tmp_path / "s.h5", job=job | {"schedule": "fixed-f"}, **attributes_of(1, 1))
    assert "load limit" not in made(tmp_path / "s.h5").text


def test_a_job_that_has_not_ended(tmp_path):
    write_results(tmp_path / "r.h5", rows=20, errors=3, complete=False, job={"limit": 40})
    read = made(tmp_path / "r.h5")
    assert "not complete" in read.text and "of at most 40 rows done" in read.text
    assert "rows in flight are not in it" in read.text and "Throughput over time" in read.text


@pytest.mark.parametrize(("rows", "errors"), [(0, 0), (0, 9), (1, 0)])
def test_few_rows(tmp_path, rows, errors):
    write_results(tmp_path / "r.h5", rows, errors)
    read = made(tmp_path / "r.h5")
    assert ("No row is done" in read.text) == (rows + errors == 0)
    assert ("Errors by cause" in read.text) == (errors > 0)
    assert ("Throughput over time" in read.text) == (rows > 0)


@pytest.mark.parametrize("name", ["complete", "interrupted"])
def test_files_of_0_1_0(tmp_path, name):
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    read = made(tmp_path / f"{name}.h5")
    assert "got an integer 5" in read.text and ("not complete" in read.text) == (name == "interrupted")


def test_merged_files(tmp_path):
    for index in range(2):
        identity = {"prompts": ["p"], "shard": f"{index}/2"}
        write_results(tmp_path / f"{index}.h5", 10, identity=identity, **attributes_of(1, 1))
        with h5py.File(tmp_path / f"{index}.h5", "r+") as file:
            file["rows/line"][:] = file["rows/line"][:] * 2 - index
    join(str(tmp_path / "both.h5"), [str(tmp_path / f"{index}.h5") for index in range(2)])
    read = made(tmp_path / "both.h5")
    assert "complete, merged from 2" in read.text and "Merged parts" in read.text
    assert read.text.count("node000") == 4 + 2  # accounts of both, and the topology of one


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("topology", value)
            for value in (None, 5, [5], [{"rank": 0}], [{"rank": 0, "host": "h", "cpus": [], "kv_tokens": 1 << 70}])
        ),
        *(("model", value) for value in (None, "demo", ["demo"], {"architectures": 5}, {"path": {"a": [1] * 1000}})),
        *(("job", value) for value in (None, [], {"load_limit": 10**30, "schedule": "load-control", "limit": 10**30})),
        *(
            ("summary", value)
            for value in ({"seconds": -1}, {"seconds": 10**30}, {"merged": []}, {"merged": [5, None]})
        ),
        ("identity", [[[[[[{"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}]]]]]]),
    ],
)
def test_odd_attributes(tmp_path, name, value):
    write_results(tmp_path / "r.h5", **attributes_of(1, 1))
    with h5py.File(tmp_path / "r.h5", "r+") as file:
        file.attrs[name] = json.dumps(value)
    assert "of 50 rows done" in made(tmp_path / "r.h5").text


@pytest.mark.parametrize("load", [[[-1.0, 5]], [[1e300, 5]], [[1.0, 1 << 62]], [["a", 5]], [[5]]])
def test_odd_loads_are_refused(tmp_path, load):
    attributes = attributes_of(1, 1)
    attributes["summary"]["accounts"][1]["load"] = load
    write_results(tmp_path / "r.h5", **attributes)
    with pytest.raises(UserError, match="expected"):
        read_facts(str(tmp_path / "r.h5"))


def test_unknown_roles_are_refused(tmp_path):
    attributes = attributes_of(1, 1)
    attributes["summary"]["accounts"][1]["role"] = HOSTILE
    write_results(tmp_path / "r.h5", **attributes)
    with pytest.raises(UserError, match="expected a role of S, SR, R"):
        read_facts(str(tmp_path / "r.h5"))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -1.0, 0.0, 1e300])
def test_odd_times(tmp_path, odd):
    write_results(tmp_path / "r.h5", 9)
    with h5py.File(tmp_path / "r.h5", "r+") as file:
        file["rows/finished_at"][3] = file["rows/queued_at"][5] = odd
    assert "of 9 rows done" in made(tmp_path / "r.h5").text


def test_only_wanted_files_are_replaced(tmp_path):
    source, out = tmp_path / "r.h5", tmp_path / "run.html"
    write_results(source)
    write_page(str(source), str(out))
    first = out.read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        write_page(str(source), str(out))
    out.write_bytes(b"")
    write_page(str(source), str(out), overwrite=True)
    assert out.read_bytes() == first
    (tmp_path / "link.html").symlink_to(source)
    with pytest.raises(UserError):
        write_page(str(source), str(tmp_path / "link.html"), overwrite=True)
    assert h5py.is_hdf5(source)
