"""Tiers: what users may ask for, and what is written is what is read, until a disk is full or gives less."""

from __future__ import annotations

import errno
import os
import threading
import time
from functools import partial

import numpy as np
import pytest

from hpcdecode._attn_cpu import crc32c, crc32c_by_table
from hpcdecode.config import EngineOptions
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import FileTier, HostTier, TierSpec, memory_for, open_tiers
from hpcdecode.system.tier_threads import NewestFirst, TierThreads

SIZE = 8192  # bytes of a chunk


def test_tiers_are_named_by_kind_directory_and_size():
    assert TierSpec.parse("host:64G") == TierSpec("host", 64 << 30)
    assert TierSpec.parse("nvme:/scratch:1T") == TierSpec("nvme", 1 << 40, "/scratch")
    assert TierSpec.parse("nvme:/a:b/c:512M") == TierSpec("nvme", 512 << 20, "/a:b/c")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("disk:/tmp:1G", "got the tier 'disk'"),
        ("", "got the tier ''"),
        ("nvme:/tmp", "lacks the directory or the size"),
        ("nvme:1G", "lacks the directory or the size"),
        ("host:", "whose size is ''"),
        ("host:lots", "whose size is 'lots'"),
        ("nvme:/tmp:-1G", "whose size is '-1G'"),
        ("host:0", "has no room"),
    ],
)
def test_what_is_no_tier_is_refused(text, problem):
    with pytest.raises(ValueError, match=r"expected host:SIZE or nvme:DIRECTORY:SIZE") as error:
        TierSpec.parse(text)
    assert problem in str(error.value)
    with pytest.raises(UserError, match="--kv-swap: expected host:SIZE"):
        EngineOptions(model="demo", admission="optimistic", kv_swap=(text,)).check()


def test_tiers_need_rows_that_give_up_their_room():
    with pytest.raises(UserError, match=r"--kv-swap: expected --admission optimistic.*got neither"):
        EngineOptions(model="demo", kv_swap=("host:1G",)).check()
    assert len(EngineOptions(model="demo", admission="optimistic", kv_swap=("host:1G",)).check().swap_tiers) == 1


def chunks(count):
    draw = np.random.default_rng(2)
    made = []
    for _ in range(count):
        data = memory_for(SIZE)
        data[:] = draw.integers(0, 256, SIZE)
        made.append(data)
    return made


@pytest.mark.parametrize("kind", ["file", "host"])
def test_what_is_read_is_what_was_written_last(tmp_path, kind):
    tier = FileTier(str(tmp_path), 5 * SIZE + 1, SIZE) if kind == "file" else HostTier(5 * SIZE + 1, SIZE)
    assert tier.chunks == 5
    written, read = chunks(6), memory_for(SIZE)
    for place in (3, 0, 4, 1, 2):
        tier.write(place, written[place])
    tier.write(3, written[5][:4096])
    for place in range(5):
        tier.read(place, read)
        expected = np.concatenate([written[5][:4096], written[3][4096:]]) if place == 3 else written[place]
        assert np.array_equal(read, expected)
    assert not list(tmp_path.iterdir())
    tier.close()


def test_a_file_that_ends_early_is_an_error(tmp_path):
    tier, read = FileTier(str(tmp_path), 4 * SIZE, SIZE), memory_for(SIZE)
    tier.write(1, chunks(1)[0])
    os.ftruncate(tier._file, SIZE + 4096)
    with pytest.raises(OSError, match="ends before its chunk"):
        tier.read(1, read)
    with pytest.raises(OSError, match="ends before its chunk"):
        tier.read(3, read)
    tier.close()


def test_short_writes_go_on_and_none_at_all_is_a_full_disk(tmp_path, monkeypatch):
    tier, read = FileTier(str(tmp_path), 4 * SIZE, SIZE), memory_for(SIZE)
    (data,), write = chunks(1), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, left, at: write(file, left[:4096], at))
    tier.write(2, data)
    tier.read(2, read)
    assert np.array_equal(read, data)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="No space left") as error:
        tier.write(2, data)
    assert error.value.errno == errno.ENOSPC


def test_tiers_that_cannot_be_opened_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected a directory to write to.*No such file"):
        open_tiers([TierSpec("nvme", SIZE, str(tmp_path / "none"))], SIZE, 1 << 30)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        open_tiers([TierSpec("nvme", SIZE, str(tmp_path / "file"))], SIZE, 1 << 30)
    with pytest.raises(UserError, match="expected at most 1024M, the memory of this host, got 2048M"):
        open_tiers([TierSpec("host", 2 << 30)], SIZE, 1 << 30)


def test_checksums_are_those_of_castagnoli():
    known = np.frombuffer(bytearray(b"123456789"), np.uint8)
    assert crc32c(known) == crc32c_by_table(known) == 0xE3069283
    draw = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 9, 63, 1000, 6143, 6144, 6145, 20_001):
        data = draw.integers(0, 256, size).astype(np.uint8)
        assert crc32c(data) == crc32c_by_table(data)
        if size:
            other = data.copy()
            other[size // 2] ^= 1
            assert crc32c(other) != crc32c(data)


def test_a_tier_may_have_a_rate():
    assert TierSpec.parse("host:64M@2M") == TierSpec("host", 64 << 20, "", 2 << 20)
    assert TierSpec.parse("nvme:/a@b/c:1G") == TierSpec("nvme", 1 << 30, "/a@b/c")
    assert TierSpec.parse("nvme:/a@b/c:1G@3k").rate == 3 << 10
    for wrong in ("host:64M@", "host:64M@fast", "host:64M@0"):
        with pytest.raises(ValueError, match=r"expected host:SIZE or nvme.*with @RATE.*bytes a second are"):
            TierSpec.parse(wrong)


def test_moves_of_several_threads_share_a_rate():
    (tier,) = open_tiers([TierSpec("host", 1 << 20, "", 2 << 20)], 1 << 16, 1 << 30)
    data = [np.full(1 << 16, 7 + i, np.uint8) for i in range(2)]
    begin = time.perf_counter()
    threads = [threading.Thread(target=tier.write, args=(i, data[i])) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    back = np.empty(1 << 16, np.uint8)
    for i in range(2):
        tier.read(i, back)
        assert (back == data[i]).all()
    assert time.perf_counter() - begin >= 4 / 32  # seconds: 4 of 32 chunks that it moves in a second
    assert tier.chunks == 16
    tier.close()


def test_awaited_jobs_come_first_then_the_newest():
    jobs, done = NewestFirst(), []
    for number in range(3):
        jobs.put(partial(done.append, number))
    jobs.put(None)
    for number in (3, 4):
        jobs.put(partial(done.append, number), awaited=True)
    while job := jobs.get():
        job()
    assert done == [3, 4, 2, 1, 0]


def test_threads_do_what_is_left_before_they_end():
    done = []
    threads = TierThreads("test", None, (), newest_first=True)
    for number in range(100):
        threads.put(partial(done.append, number), awaited=number % 3 == 0)
    threads.close()
    assert sorted(done) == list(range(100))
