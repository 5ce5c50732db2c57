"""Weights that ranks of a NUMA node share: a rank that does not make its part is found, never read past."""

from __future__ import annotations

import pytest

from hpcdecode.errors import InvariantViolation
from hpcdecode.ranks import node_memory as node_memory_module
from hpcdecode.ranks.node_memory import node_memory, table_memory
from hpcdecode.ranks.roles import Rank
from hpcdecode.system.shared_memory import PrivateMemory, SharedMemory


class Pair:
    """The first of two ranks of a NUMA node; the other offers no memory, and makes `made` bytes."""

    place = 0

    def __init__(self, *, loads: bool, made: int, memory: int = 100):
        self.ranks = [Rank(rank=i, host="a", cpus=[0], numa="0", role="SR", memory=memory, weights=50) for i in (0, 1)]
        self.me = self.ranks[0]
        self._others = iter(["a 0 0" if loads else "", [], loads, made] if loads else ["", 0])

    def gather_all(self, value, _kind):
        return [value, next(self._others)]


def put(pair, *sizes):
    with node_memory(pair, loads=True) as memory:
        for nbytes in sizes:
            memory.filled(nbytes, lambda made: made.fill_(1))
    return memory


def test_a_rank_that_has_not_made_its_part_ends_the_job_by_name():
    assert isinstance(put(Pair(loads=True, made=30), 50, 30), SharedMemory)
    with pytest.raises(InvariantViolation, match=r"ranks make the weights that they share.*expected \[50, 30\]"):
        put(Pair(loads=True, made=0), 50, 30)


def test_small_weights_are_not_shared_where_that_takes_small_pages(monkeypatch):
    for huge, kind in ((True, SharedMemory), (False, PrivateMemory)):
        monkeypatch.setattr(node_memory_module, "shares_huge_pages", lambda huge=huge: huge)
        assert isinstance(put(Pair(loads=huge, made=30, memory=10_000), 50, 30), kind)


def test_members_of_a_host_share_tables():
    """A rank of its own part of the weights, on another NUMA node."""
    pair = Pair(loads=True, made=30)
    pair._others = iter(["a 0", [], True, 30])
    with table_memory(pair, loads=True) as memory:
        for nbytes in (50, 30):
            memory.filled(nbytes, lambda made: made.fill_(1))
    assert isinstance(memory, SharedMemory)


def test_a_rank_beside_which_none_loads_has_memory_of_its_own():
    assert isinstance(put(Pair(loads=False, made=0), 50), PrivateMemory)
