"""The topology of few ranks line by line, and of many in a few lines."""

from __future__ import annotations

from hpcdecode.ranks.roles import Rank
from hpcdecode.report.text import numbers, topology


def ranks(count, role=lambda i: "SR"):
    return [
        Rank(
            rank=i,
            host=f"node{i // 8:03d}",
            cpus=[0],
            role=role(i),
            threads=16,
            pinned=True,
            numa=str(i % 8),
            isa="amx",
            kv_tokens=1000 + i % 3,
        )
        for i in range(count)
    ]


def test_few_ranks_have_a_line_each():
    lines = topology(ranks(16)).splitlines()
    assert len(lines) == 17 and lines[9].split() == ["8", "node001", "SR", "cpu", "0", "16", "amx", "1,002", "tokens"]


def test_ranks_that_are_alike_are_a_line():
    header, line = topology(ranks(1024)).splitlines()
    assert header.split()[:2] == ["rank", "host"]
    assert line.split("  ")[:2] == ["0-1023", "node000 .. node127 (128)"] and "1,000 .. 1,002 tokens" in line
    lines = topology(ranks(64, lambda i: "S" if i % 16 == 0 else "R")).splitlines()
    assert (
        len(lines) == 3 and lines[1].startswith("0, 16, 32, 48 ") and lines[2].startswith("1-15, 17-31, 33-47, 49-63 ")
    )


def test_numbers_of_ranks():
    assert numbers([0]) == "0" and numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert numbers(range(0, 20, 2)) == "0, 2, 4, 6, ... (10 in all)"
