"""Damage to the files of an interrupted job: a clear ending, and the same rows once it has gone on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hpcdecode.data.results.result import Result
from hpcdecode.data.results.seal import sealed, unsealed
from hpcdecode.data.results.writer import ResultsWriter
from tests.hostile.jobs import AGAIN, ROWS, SECONDS, contents, damaged, goes_on
from tests.hostile.trial import REFUSED, ROW_ERRORS, Trial, each

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_core")]


def parts(directory: Path) -> Path:
    return directory / "out.h5.parts"


def segment(directory: Path, number: int) -> Path:
    return sorted(parts(directory).glob("seg-*.h5"))[number]


def add(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda directory: make(parts(directory) / name) and None


def foreign_segment(directory: Path) -> None:
    other = directory / "other.h5"
    out = ResultsWriter(other, attributes={"identity": {"another": "job"}})
    out.add(Result(30, "30", 0, "foreign", "stop", 1, [1]))
    out.close(complete=False, summary={})
    shutil.move(
        directory / "other.h5.parts" / "seg-00000001-00000001.h5", parts(directory) / "seg-00000009-00000009.h5"
    )


def segment_twice(directory: Path) -> None:
    shutil.copy(segment(directory, 1), parts(directory) / "seg-00000009-00000009.h5")


def odd_tokens(directory: Path) -> None:
    """Tokens in flight that no tokenizer has, of samples and lengths that no row has."""
    path = parts(directory) / "unfinished.msgpack"
    entries = [[line, sample, [1 << 30] * 100] for line in range(1, ROWS) for sample in (0, 5)]
    path.write_bytes(sealed(msgspec.msgpack.encode(entries), unsealed(path)[1]))


def foreign_tokens(directory: Path) -> None:
    path = parts(directory) / "unfinished.msgpack"
    path.write_bytes(sealed(unsealed(path)[0], "0" * 16))


def unfinished(directory: Path) -> Path:
    return parts(directory) / "unfinished.msgpack"


def index(directory: Path) -> Path:
    return directory / "out.h5"


def lock(directory: Path) -> Path:
    return parts(directory) / "lock"


def lock_is_a_folder(directory: Path) -> None:
    lock(directory).unlink()
    lock(directory).mkdir()


def lock_is_a_link(directory: Path) -> None:
    lock(directory).unlink()
    (directory / "precious").write_text("precious")
    lock(directory).symlink_to("../precious")


WRONG = ("half", "empty", "flipped")
HOWS = ("half", "empty", "a-byte-less", "flipped", "gone")


def on(name: str, arrange: Callable, says: str, code: int = ROW_ERRORS, **more) -> Trial:
    return Trial(name, arrange, AGAIN, code, says, seconds=SECONDS, **more)


GOING_ON = [
    *(on(f"segment-{how}", damaged(lambda d: segment(d, 1), how), "generated again") for how in WRONG),
    on("segment-a-byte-less", damaged(lambda d: segment(d, 1), "a-byte-less"), ""),  # of its seal, not of its rows
    on("last-segment-half", damaged(lambda d: segment(d, -1), "half"), "is damaged; their rows are generated again"),
    on("first-segment-gone", damaged(lambda d: segment(d, 0), "gone"), "are missing; their rows are generated again"),
    on("last-segment-gone", damaged(lambda d: segment(d, -1), "gone"), "5 rows that out.h5 shows are missing"),
    *(on(f"in-flight-{how}", damaged(unfinished, how), "begin anew") for how in HOWS[:-1]),
    on("in-flight-gone", damaged(unfinished, "gone"), ""),
    on("in-flight-odd", odd_tokens, ""),
    on("in-flight-foreign", foreign_tokens, "another job.*begin anew"),
    *(on(f"index-{how}", damaged(index, how), "cannot be read.*made again") for how in ("half", "empty", "gone")),
    on("index-a-byte-less", damaged(index, "a-byte-less"), ""),
    on("lock-gone", damaged(lock, "gone"), ""),
    on("lock-flipped", damaged(lock, "flipped"), ""),
    on("other-files", add("seg-notes.h5", lambda path: path.write_text("mine")), ""),
]
STANDING = [
    on("segment-foreign", foreign_segment, "expected rows of this job, got those of another", REFUSED),
    on("segment-twice", segment_twice, "expected rows of its own", REFUSED),
    on("segment-a-folder", add("seg-00000009-00000009.h5", lambda path: path.mkdir()), "Is a directory", REFUSED),
    on("lock-a-folder", lock_is_a_folder, "Is a directory", REFUSED),
    on("lock-a-link", lock_is_a_link, "Too many levels of symbolic links", REFUSED),
    on("index-text", lambda d: index(d).write_text("mine") and None, "remove it, and it is made again", REFUSED),
]


@each(GOING_ON)
def test_a_damaged_job_goes_on(hpcdecode, jobs, killed, trial):
    trial.run(hpcdecode, killed)
    assert contents(killed / "out.h5") == jobs[1]
    left = ["seg-notes.h5"] if trial.name == "other-files" else []
    assert [path.name for path in killed.rglob("out.h5.parts/*")] == left


@each(STANDING)
def test_what_cannot_be_mended_is_left_for_its_owner(hpcdecode, jobs, killed, trial):
    """Refused with nothing changed; once the culprit is removed the job goes on."""
    before = {path: path.read_bytes() for path in killed.rglob("seg-0000000[1-4]*.h5")}
    trial.run(hpcdecode, killed)
    assert before == {path: path.read_bytes() for path in before}
    if trial.name == "lock-a-link":
        assert (killed / "precious").read_text() == "precious"
    culprit = index(killed) if "index" in trial.name else lock(killed) if "lock" in trial.name else segment(killed, -1)
    shutil.rmtree(culprit) if culprit.is_dir() else culprit.unlink()
    goes_on(hpcdecode, killed, jobs[1])
