"""Results files as untrusted input: a reader opens nothing else, claims no more memory, and says what is wrong."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest

import hpcdecode as package
from hpcdecode.data.results.writer import Result, ResultsWriter
from hpcdecode.errors import UserError
from tests.hostile.trial import REFUSED, Trial
from tests.support.commands import run

pytestmark = pytest.mark.full
SECRET = "SECRET"
MEMORY = 8 << 30  # bytes of addresses; torch is not loaded by these commands
COMMANDS = {
    "show": ("show", "r.h5"),
    "export": ("export", "r.h5", "--to", "jsonl", "-o", "-"),
    "batch": ("export", "r.h5", "--to", "openai-batch", "-o", "-"),
    "merge": ("merge", "merged.h5", "r.h5", "--overwrite"),
    "report": ("report", "r.h5"),
    "page": ("report", "r.h5", "-o", "run.html", "--overwrite"),
}
READERS = ("show", "export", "batch", "merge", "page")


def write(path: Path, text: str = "text", *, complete: bool = True, lines: range = range(1, 4)) -> None:
    out = ResultsWriter(path, attributes={"identity": {"name": 1}, "job": {}, "model": {"path": "m"}})
    for line in lines:
        out.add(Result(line, str(line), 0, f"{text} {line}", "stop", 1, [line] * line))
    account = {"rank": 0, "host": "h", "role": "SR", "seconds": {"slice": 1.0}, "load": []}
    out.close(complete=complete, summary={"accounts": [account]})


def edited(change: Callable[[h5py.File], None], *, complete: bool = True) -> Callable[[Path], None]:
    """A results file that was changed."""

    def arrange(directory: Path) -> None:
        write(directory / "r.h5", complete=complete)
        write(directory / "secret.h5", SECRET)
        with h5py.File(directory / "r.h5", "r+") as file:
            change(file)

    return arrange


def replaced(name: str, **options) -> Callable[[Path], None]:
    """A dataset in place of the one of that name."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return edited(change)


def put(name: str, make: Callable[[], object]) -> Callable[[Path], None]:
    """A link, or a value, in place of the member of that name."""

    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = make()

    return edited(change)


def external_storage(file: h5py.File) -> None:
    del file["rows/line"]
    file.create_dataset("rows/line", (3,), "i8", external=[("secret.h5", 0, 24)])


def virtual(source: str, name: str = "rows/text") -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        kind = file[name].dtype
        del file[name]
        layout = h5py.VirtualLayout((3,), dtype=kind)
        layout[:] = h5py.VirtualSource(source, name, (3,), dtype=kind)
        file.create_virtual_dataset(name, layout)

    return change


def cyclic(file: h5py.File) -> None:
    file["rows/rows"] = file["rows"]
    file["errors/root"] = file["/"]


def cyclic_rows(file: h5py.File) -> None:
    del file["rows"]
    file["rows"] = file["/"]


def attribute(name: str, value: object) -> Callable[[Path], None]:
    def change(file: h5py.File) -> None:
        del file.attrs[name]
        if value is not None:
            file.attrs[name] = value

    return edited(change)


def offsets(values: list[int]) -> Callable[[Path], None]:
    return edited(lambda file: file["rows/token_offsets"].__setitem__(slice(None), values))


def huge_chunks(file: h5py.File) -> None:
    del file["rows/token_ids"]
    file.create_dataset("rows/token_ids", (6,), "i4", chunks=(1 << 29,), maxshape=(None,))


def cut(part: float) -> Callable[[Path], None]:
    def arrange(directory: Path) -> None:
        write(directory / "r.h5")
        data = (directory / "r.h5").read_bytes()
        (directory / "r.h5").write_bytes(data[: int(len(data) * part)])

    return arrange


def flipped(seed: int) -> Callable[[Path], None]:
    """Some bytes are not as they were: refused, or shown, but with no traceback and no hang."""

    def arrange(directory: Path) -> None:
        write(directory / "r.h5")
        data = np.fromfile(directory / "r.h5", np.uint8)
        random = np.random.default_rng(seed)
        data[random.integers(0, len(data), 40)] ^= random.integers(1, 256, 40, dtype=np.uint8)
        data.tofile(directory / "r.h5")

    return arrange


def index(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """An unfinished job whose files were changed by `change`, called with its directory."""

    def arrange(directory: Path) -> None:
        write(directory / "r.h5", complete=False)
        write(directory / "secret.h5", SECRET)
        change(directory)

    return arrange


def segment(directory: Path) -> Path:
    return directory / "r.h5.parts" / "seg-00000001-00000001.h5"


def segment_is_a_link(directory: Path) -> None:
    segment(directory).unlink()
    segment(directory).symlink_to("../secret.h5")


def segment_reads_others(directory: Path) -> None:
    with h5py.File(segment(directory), "r+") as file:
        del file["rows/text"]
        file["rows/text"] = h5py.ExternalLink("../secret.h5", "rows/text")


def folder_is_a_link(directory: Path) -> None:
    write(directory / "other.h5", SECRET, complete=False)
    shutil.rmtree(directory / "r.h5.parts")
    (directory / "r.h5.parts").symlink_to("other.h5.parts")


def reads_another_job(directory: Path) -> None:
    write(directory / "other.h5", SECRET, complete=False)
    shutil.copy(directory / "other.h5", directory / "r.h5")


def of(name: str, arrange: Callable[[Path], object], says: str = "expected", commands=READERS, code=REFUSED):
    return [Trial(f"{name}-{c}", arrange, COMMANDS[c], code, says, no_secret) for c in commands]


def no_secret(_: Path, result) -> None:
    assert SECRET not in result.stdout + result.stderr


def empty(directory: Path, data: bytes = b"") -> None:
    (directory / "r.h5").write_bytes(data)


ALL = tuple(COMMANDS)
HUGE = 1 << 60
TRIALS = [
    *of("empty", empty, commands=ALL),
    *of("text", partial(empty, data=b"no HDF5\n" * 100), commands=ALL),
    *of("a-directory", lambda d: (d / "r.h5").mkdir(), "directory|found none", commands=ALL),
    *of("a-fifo", lambda d: os.mkfifo(d / "r.h5"), "no regular file|found none", commands=ALL),
    *of("nothing", lambda d: None, "No such file|found none", commands=ALL),
    *of("another-hdf5", lambda d: h5py.File(d / "r.h5", "w").close(), commands=ALL),
    *of("half", cut(0.5), commands=ALL),
    *of("all-but-a-byte", cut(0.9999), commands=ALL),
    *of("soft-link", put("rows/text", lambda: h5py.SoftLink("/rows/id")), "a link to somewhere else", commands=ALL),
    *of("external-link", put("rows/text", lambda: h5py.ExternalLink("secret.h5", "rows/text")), "a link to somewhere"),
    *of("external-rows", put("rows", lambda: h5py.ExternalLink("secret.h5", "rows")), "rows is a link", commands=ALL),
    *of("external-errors", put("errors", lambda: h5py.ExternalLink("secret.h5", "errors")), "errors is a link"),
    *of("external-storage", edited(external_storage), "rows/line lies in another file", commands=ALL),
    *of("virtual-other", edited(virtual("secret.h5")), r"refers to secret\.h5, not to a segment"),
    *of("virtual-absolute", edited(virtual("/etc/passwd")), "refers to /etc/passwd"),
    *of("virtual-above", edited(virtual("../r.h5.parts/seg-00000001-00000001.h5")), "refers to"),
    *of("virtual-itself", edited(virtual(".")), "refers to"),
    *of("virtual-no-segment", edited(virtual("r.h5.parts/seg-00000001-00000001.h5")), "which is not there"),
    *of("virtual-another-job", index(reads_another_job), r"refers to other\.h5\.parts"),
    *of("segment-link", index(segment_is_a_link), "no regular file", READERS[:3]),
    *of("segment-reads-others", index(segment_reads_others), "a link to somewhere else", READERS[:3]),
    *of("parts-link", index(folder_is_a_link), "is no folder"),
    *of("no-segment", index(lambda d: segment(d).unlink()), "which is not there"),
    *of("no-parts", index(lambda d: shutil.rmtree(d / "r.h5.parts")), "which is not there", commands=ALL),
    *of("huge-contiguous", replaced("rows/line", shape=(HUGE,), dtype="i8"), "claims", commands=ALL),
    *of("huge-chunked", replaced("rows/line", shape=(HUGE,), dtype="i8", chunks=(1 << 16,)), "claims", commands=ALL),
    *of("huge-tokens", replaced("rows/token_ids", shape=(HUGE,), dtype="i4", chunks=(1 << 16,)), "claims"),
    *of("huge-texts", replaced("rows/text", shape=(HUGE,), dtype=h5py.string_dtype(), chunks=(1 << 10,)), "claims"),
    *of("huge-chunks", edited(huge_chunks), "claims|chunks"),
    *of("floats", replaced("rows/line", data=np.zeros(3)), "rows/line is of type float64", commands=ALL),
    *of("numbers-for-texts", replaced("rows/text", data=np.zeros(3)), "rows/text is of type"),
    *of("bytes-for-texts", replaced("rows/text", data=np.zeros(3, "S4")), "rows/text is of type"),
    *of("plain-reasons", replaced("rows/finish_reason", data=np.zeros(3, "u1")), "rows/finish_reason is of type"),
    *of("two-dimensions", replaced("rows/line", data=np.zeros((3, 1), "i8")), "has 2 dimensions", commands=ALL),
    *of("a-scalar", replaced("rows/line", data=np.int64(3)), "has 0 dimensions", commands=ALL),
    *of("no-column", edited(lambda f: f["rows"].__delitem__("sample")), "it has no rows/sample", commands=ALL),
    *of("no-errors", edited(lambda f: f.__delitem__("errors")), "it has no errors", commands=ALL),
    *of("a-short-column", replaced("rows/sample", data=np.zeros(2, "i4")), "rows/sample has 2 entries, not 3"),
    *of("a-group-for-a-column", put("rows/text", lambda: h5py.SoftLink("/")), "a link"),
    *of("cyclic-rows", edited(cyclic_rows), "it has no|is no"),
    *of("offsets-back", offsets([0, 3, 1, 6]), "expected offsets of tokens that ascend", READERS),
    *of("offsets-beyond", offsets([0, 1, 3, 1 << 50]), "has 6 entries, not", commands=ALL),
    *of("offsets-below", offsets([-(1 << 40), 1, 3, 6]), "has 6 entries, not"),
    *of("no-complete", attribute("complete", None), "complete", READERS),
    *of("no-json", attribute("model", "{"), "attribute model is no JSON", READERS),
    *of("deep-json", attribute("model", "[" * 60_000), "attribute model is no JSON", READERS),
    *of("number-for-json", attribute("model", 7), "attribute model is no JSON", READERS),
    *of("array-for-json", attribute("model", np.zeros(9)), "attribute model is no JSON", READERS),
    *of("list-for-identity", attribute("identity", "[1]"), "attribute identity: expected a JSON object", ("merge",)),
    *of("odd-shard", attribute("identity", '{"shard": "9/3"}'), "expected the name of a shard", ("merge",)),
    *of("odd-summary", attribute("summary", '{"accounts": [1]}'), "expected", ("report",)),
    *of("no-summary", attribute("summary", None), "summary", ("report",)),
    *of("unsorted", replaced("rows/line", data=np.array([3, 1, 2])), "sorted by line", ("merge",)),
    *of("twice", replaced("rows/line", data=np.array([1, 1, 2])), "more than once", ("merge",)),
    *of("negative-lines", replaced("rows/line", data=np.array([-5, 1, 2])), "from 0 on", ("merge",)),
    *of("odd-model", attribute("model", '"../../etc"'), "", ("batch",), code=0),
    *of("odd-path", attribute("model", '{"path": ["x"]}'), "", ("batch",), code=0),
    *of("cyclic", edited(cyclic), "", READERS, code=0),
    *of("unfinished", index(lambda d: None), "", READERS, code=0),
    *(t for seed in range(20) for t in of(f"flipped-{seed}", flipped(seed), "", ALL, code=(0, REFUSED))),
]


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


@pytest.mark.parametrize("trial", [pytest.param(t, id=t.name, marks=t.marks) for t in TRIALS])
def test_results_are_untrusted(hpcdecode, trial, tmp_path):
    trial.arrange(tmp_path)
    line = hpcdecode.line(*trial.command)
    result = run(line, cwd=tmp_path, env=hpcdecode.environment, timeout=trial.seconds, preexec_fn=limited)
    trial.verify(result)
    trial.check(tmp_path, result)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "trial", [t for t in TRIALS if t.name.endswith("-export") and t.code == REFUSED], ids=lambda t: t.name
)
def test_read_refuses_the_same(trial, tmp_path):
    trial.arrange(tmp_path)
    with pytest.raises(UserError), package.read(tmp_path / "r.h5") as results:
        list(results)
