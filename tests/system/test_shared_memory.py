"""Memory that processes share: each piece is made once, by one of them, and read by all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hpcdecode.system.memory_file import Address
from hpcdecode.system.shared_memory import PrivateMemory, SharedMemory

READER = """
import sys
from hpcdecode.system.memory_file import Address
from hpcdecode.system.shared_memory import SharedMemory
memory = SharedMemory.open(Address(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]), 1, 2)
first = memory.filled(3_000_000, lambda made: sys.exit("not this one's"))
second = memory.filled(5, lambda made: made.fill_(int(first[-1]) + 1))
print(int(first.sum()), second.tolist())
"""


def test_another_process_reads_what_this_one_made_and_the_other_way_round():
    with SharedMemory.offered() as address:
        memory = SharedMemory.open(address, 0, 2)
        first = memory.filled(3_000_000, lambda made: made.fill_(7))
        arguments = [sys.executable, "-c", READER, *map(str, (address.process, address.descriptor, address.name))]
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
        assert ran.stdout == f"{7 * 3_000_000} [8, 8, 8, 8, 8]\n"
        second = memory.filled(5, lambda _: pytest.fail("the other made it"))
        memory.close()
    assert second.tolist() == [8] * 5 and first[0] == first[-1] == 7


def test_each_piece_is_made_by_who_made_least_and_what_reads_another_by_its_maker():
    made: list[tuple[int, int]] = []
    with SharedMemory.offered() as address:
        members = [SharedMemory.open(address, place, 3) for place in range(3)]

        def ask(nbytes: int, beside: list[torch.Tensor | None]) -> list[torch.Tensor]:
            return [
                member.filled(nbytes, lambda _, place=place: made.append((place, nbytes)), near)
                for place, (member, near) in enumerate(zip(members, beside, strict=True))
            ]

        pieces = [ask(nbytes, [None] * 3) for nbytes in (50, 30, 20, 10, 15)]
        ask(1, pieces[0])
        for member in members:
            member.close()
    assert made == [(0, 50), (1, 30), (2, 20), (2, 10), (1, 15), (0, 1)]


def test_a_file_of_another_name_is_refused_and_left_alone(tmp_path):
    with open(tmp_path / "other", "w") as file, pytest.raises(OSError, match="is another one here"):
        SharedMemory.open(Address(os.getpid(), file.fileno(), "hpcdecode-0"), 0, 1)
    with SharedMemory.offered() as address:
        pass
    with pytest.raises(OSError, match="No such file"):
        SharedMemory.open(address, 0, 1)


def test_private_memory_is_made_here():
    assert PrivateMemory().filled(4, lambda made: made.fill_(3)).tolist() == [3] * 4
