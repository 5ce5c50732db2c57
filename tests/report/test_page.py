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
from hpcdecode.report.page.busy import read_busy
from hpcdecode.report.page.facts import lengths_of, read_facts
from hpcdecode.report.page.flow import RowTimes, flow_of
from hpcdecode.report.page.style import STYLE
from hpcdecode.report.page.write import page, write_page
from tests.support.html_pages import Page, write_results
from tests.support.many_ranks import CAPACITY, attributes_of

OLD = Path(__file__).parents[1] / "data/files/formats_of_0_1_0.tar.gz"
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'--><!--]]></style></title>&lt;\x00\x1b[31m\u202e"
)
MOST_BYTES = 1_000_000
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "article", "h1", "h2"),
    *(
        "h3",
        "h4",
        "p",
        "span",
        "div",
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "figure",
        "figcaption",
        "table",
        "caption",
        "thead",
    ),
    *("tbody", "tr", "th", "td", "pre", "details", "summary", "svg", "desc", "path", "line", "text"),
}


def made(path):
    """The page of a file, checked."""
    return checked(page(read_facts(str(path))))


def checked(source):
    """A page that is well formed, runs nothing and fetches nothing."""
    read = Page(source)
    assert read.faults == [] and {tag for tag, _ in read.elements} <= ALLOWED
    names = {name for _, attributes in read.elements for name in attributes}
    assert not names & {"src", "href", "srcset", "action"} and not any(name.startswith("on") for name in names)
    assert "url(" not in source and "@import" not in source and "http:" not in source and "https:" not in source
    assert read.named("meta")[2]["content"].startswith("default-src 'none'")
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for picture in read.named("svg"):
        told = picture.get("role") == "img" and {picture["aria-labelledby"], picture["aria-describedby"]} <= set(ids)
        assert told or picture.get("aria-hidden") == "true"
    assert all(cell.get("scope") in ("row", "col") for cell in read.named("th"))
    assert len(source.encode()) < MOST_BYTES
    return read


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


def test_tokens_over_time_are_those_of_the_rows():
    random = np.random.default_rng(3)
    queued = 1.7e9 + random.uniform(0, 900, 4000)
    first = queued + random.uniform(0, 5, 4000)
    finished = first + np.where(random.random(4000) < 0.1, 0, random.uniform(0, 90, 4000))
    prompt, generated = (random.integers(1, 999, 4000).astype(np.float64) for _ in range(2))
    flow = flow_of(RowTimes(queued, first, finished, prompt, generated))
    width = flow.edges[1]
    assert np.isclose(flow.generated.sum() * width, generated.sum()) and np.isclose(
        flow.prompt.sum() * width, prompt.sum()
    )
    for place in (10, 100, 200):
        now = flow.edges[place + 1] + queued.min()
        share = ((now - first) / np.maximum(finished - first, 1e-9)).clip(0, 1)
        read = ((now - queued) / np.maximum(first - queued, 1e-9)).clip(0, 1)
        held = (prompt * read + generated * share)[finished > now].sum()
        assert np.isclose(flow.held[place], held, rtol=1e-6)


def test_lengths_count_every_row():
    values = np.concatenate([np.arange(500.0), [100_000.0]])
    found = lengths_of(values)
    assert sum(found.counts) + found.beyond == 501 and found.beyond == 1 and found.most == 100_000
    assert found.counts[0] == found.edges[1] and len(found.counts) <= 41
    whole = lengths_of(np.arange(41.0))
    assert whole.beyond == 0 and sum(whole.counts) == 41
    assert lengths_of(np.empty(0)) is None


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


def traced(path, spans, ranks=((0, "S"), (1, "R"), (2, "R"))):
    """Write a trace, an event a line, of spans (rank, operation, begin and end in seconds)."""
    accounts = [
        {"rank": rank, "host": HOSTILE, "role": role, "seconds": {"slice": 1.0}, "load": [[0.5, 7]] * (role == "R")}
        for rank, role in ranks
    ]
    events = [
        json.dumps({"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": start * 1e6, "dur": (end - start) * 1e6})
        for rank, name, start, end in spans
    ]
    head = f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps({"accounts": accounts})},\n"traceEvents": [\n'
    path.write_text(head + ",\n".join(events) + "\n]}\n")


def test_busy_times_of_a_trace(tmp_path):
    spans = [(0, "slice", 1.0, 3.0), (0, "wait", 3.0, 8.0), (1, "attend", 2.0, 2.5), (1, "idle", 2.5, 8.0)]
    spans += [(2, "attend", 7 + k / 10, 7 + k / 10 + 0.025) for k in range(10)] + [(9, "slice", 0.0, 8.0)]
    traced(tmp_path / "t.json", spans)
    times = read_busy(str(tmp_path / "t.json"), [0, 1, 2])
    width = times.edges[1]
    assert np.allclose(times.shares.sum(axis=1) * width, [2.0, 0.5, 0.25])
    assert 120 <= len(times.edges) - 1 <= 240 and 8.0 <= times.edges[-1] <= 8.0 + width
    inside = (times.edges[:-1] >= 1.0) & (times.edges[1:] <= 3.0)
    assert np.allclose(times.shares[0][inside], 1) and times.shares[0][times.edges[:-1] >= 3.0].max() == 0


@pytest.mark.parametrize("spans", [[], [(0, "slice", 0.0, 1.0)], [(0, "slice", -5.0, 1.0), (1, "attend", 0.0, 1e12)]])
def test_the_page_of_a_trace(tmp_path, spans):
    traced(tmp_path / "t.json", spans)
    write_page(str(tmp_path / "t.json"), str(tmp_path / "run.html"))
    read = checked((tmp_path / "run.html").read_text())
    assert "Where the time went" in read.text and "KV load over time" in read.text
    assert ("Busy share of 2 R-ranks" in read.text) == (spans == [(0, "slice", 0.0, 1.0)])


def test_what_is_neither_results_nor_trace_is_refused(tmp_path):
    (tmp_path / "t.json").write_text('{"otherData": 5}')
    for name in ("t.json", "none.h5"):
        with pytest.raises(UserError, match=name):
            write_page(str(tmp_path / name), str(tmp_path / "run.html"))
    assert not (tmp_path / "run.html").exists()


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_are_readable(theme):
    """Contrast as WCAG defines it: 4.5 for text, 3 for marks."""
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", STYLE.split("@media (prefers-color-scheme: dark)")[theme]))

    def luminance(name):
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(text, paper) >= 4.5 for text in ("ink", "muted", "bad") for paper in ("paper", "soft"))
    assert all(contrast(mark, "paper") >= 3 for mark in ("c1", "c2", "c3", "c4"))
