"""A disk that fills up at any phase of a job: what was committed is there, and the job goes on with space."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled
from hpcdecode.data.results.result import Result
from hpcdecode.data.results.resume import find_earlier
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.engine.kv_swap import KvSwap
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import FileTier
from tests.hostile.jobs import AGAIN, SECONDS, goes_on, needs_root
from tests.hostile.trial import REFUSED, ROW_ERRORS
from tests.support.commands import run
from tests.support.swapping import chunk_bytes

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_core")]


STEP_BYTES = 72 << 10
LEVELS = 40
IDENTITY = {"a": "job"}
LINES = range(1, 121)
SHAPE = LayerShape(kv_heads=4, k_dim=128, v_dim=128, q_heads=4, scale=0.1)


def row(line: int) -> Result:
    text = "".join(chr(33 + (line * 7919 + i * i * 31) % 90) for i in range(1500))
    return Result(line, str(line), 0, text, "length", 3, [(line * i * i) % 50_000 for i in range(300)])


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    disk = directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def work(path: Path, size: int = 5) -> int:
    """Do the rows that are left, so many a commit; returns how many were there."""
    earlier = find_earlier(path, IDENTITY, overwrite=False)
    if earlier and earlier.complete:
        return earlier.rows
    options = {
        "attributes": {"identity": IDENTITY},
        "earlier": earlier,
        "segment_rows": size,
        "checkpoint_seconds": 1e3,
    }
    out = ResultsWriter(path, **options)
    try:
        left = [line for line in LINES if not (earlier and earlier.done(line))]
        for line in left:
            out.add(row(line))
        out.close(complete=True, summary={}, rows_read=len(left))
    finally:
        out._lock.release()
    return earlier.rows if earlier else 0


@needs_root
def test_a_disk_that_fills_at_every_phase(tmp_path):
    """The index, segments, merges and the final file: what was committed is there, and the job goes on with space."""
    kept = set()
    with small_disk(tmp_path) as disk:
        for level in range(LEVELS):
            path, filler = disk / "out.h5", disk / "filler"
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            filler.write_bytes(b"x" * max(free - level * STEP_BYTES, 0))
            try:
                work(path)
            except UserError as error:
                assert "No space left on device" in str(error)
                assert not list(disk.rglob("*.tmp"))
            filler.unlink()
            kept.add(work(path))
            with h5py.File(path) as file:
                assert file["rows/line"][:].tolist() == list(LINES) and file.attrs["complete"]
                assert [t.decode() for t in file["rows/text"][:]] == [row(line).text for line in LINES]
            assert os.listdir(disk) == ["out.h5"]
            path.unlink()
    assert {0, len(LINES)} <= kept and len(kept) > 8


@needs_root
def test_a_job_on_a_disk_that_fills(hpcdecode, jobs, tmp_path):
    with small_disk(tmp_path) as disk:
        shutil.copy(jobs[0] / "p.jsonl", disk)
        (disk / "filler").write_bytes(b"x" * ((8 << 20) - (160 << 10)))
        line = hpcdecode.line(*AGAIN, "--checkpoint-every", 0.01)
        full = run(line, cwd=disk, env=hpcdecode.environment, timeout=SECONDS)
        assert full.returncode in (REFUSED, ROW_ERRORS) and "Traceback" not in full.stderr, full.stderr
        assert full.returncode == ROW_ERRORS or "No space left on device" in full.stderr
        (disk / "filler").unlink()
        goes_on(hpcdecode, disk, jobs[1])


@needs_root
def test_what_has_no_room_on_a_full_tier_is_lost_and_the_rest_comes_back(tmp_path):
    kv_cache = open_kv_cache([SHAPE], kv_dtype="bfloat16", capacity_tokens=1 << 14, max_sequences=9)
    filled.fill(kv_cache, SHAPE, (1024,) * 9)  # 2 MiB each, of which three fit at least
    slots = np.arange(9, dtype=np.int32)
    with small_disk(tmp_path) as disk:
        size = chunk_bytes(kv_cache)
        swap = KvSwap(kv_cache, [FileTier(str(disk), 1 << 30, size)])
        for slot in slots:
            swap.out(0, int(slot), int(slot))
        swap.wait()
        held = [held_by(kv_cache, slot) for slot in slots]
        kv_cache.release(slots)
        kv_cache.extend(slots, np.full(9, 1024, np.int32))
        for slot in slots:
            swap.bring(0, int(slot), int(slot))
        swap.wait()
        back = dict(swap.take_results(0))
        assert 3 <= sum(back.values()) < 9 == len(back)
        assert swap.counts.failures == 9 - sum(back.values())
        assert all(np.array_equal(held[slot], held_by(kv_cache, slot)) for slot in slots if back[slot])
        swap.check()
        swap.close()


def held_by(kv_cache, slot):
    out = np.empty(1024 // 64 * kv_cache.native.block_bytes, np.uint8)
    kv_cache.native.copy_out(int(slot), 0, out)
    return out
