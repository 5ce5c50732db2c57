"""One copy of packed weights for all S-ranks of a NUMA node that have the same, which they make together.

And one copy of tables for those of a host.

Where the system has no huge pages for shared memory, GEMMs are some 3 % slower from it, and small weights are not
shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from hpcdecode.errors import InvariantViolation
from hpcdecode.ranks.team import Team
from hpcdecode.system.memory_file import Address
from hpcdecode.system.shared_memory import PrivateMemory, SharedMemory, WeightMemory, shares_huge_pages

COPIES_SHARE = 0.1  # of a host's memory, that copies of the weights may take where shared memory has small pages


@contextmanager
def node_memory(team: Team, *, loads: bool) -> Iterator[WeightMemory]:
    """Yield where this rank puts its packed weights: shared with the S-ranks of its NUMA node that have the same.

    What has been put there is whole once the block has ended. Collective over the team.

    Args:
        team: The ranks.
        loads: Whether this rank will pack weights, all of a model.

    Raises:
        InvariantViolation: If a rank that shares memory has not made its part of it.
    """
    me = team.me
    shares = loads and me.device == "cpu" and (shares_huge_pages() or _are_large(team))
    with _memory(team, f"{me.host} {me.numa} {me.member % me.parts}" if shares else "") as memory:
        yield memory


@contextmanager
def table_memory(team: Team, *, loads: bool) -> Iterator[WeightMemory]:
    """Yield where this rank puts tables: shared with the S-ranks of its host that have the same stage, as node_memory.

    Members have all of them, and a token takes some rows: other NUMA nodes may read them, too.
    """
    me = team.me
    with _memory(team, f"{me.host} {me.pp_rank}" if loads and me.device == "cpu" else "") as memory:
        yield memory


@contextmanager
def _memory(team: Team, key: str) -> Iterator[WeightMemory]:
    """Yield memory that ranks of one key share, or of this rank alone if it has none or nobody else has it."""
    keys = team.gather_all(key, str)
    if max(Counter(filter(None, keys)).values(), default=0) < 2:
        yield PrivateMemory()
        return
    mates = [place for place, other in enumerate(keys) if key and other == key]
    memory = _shared(team, mates)
    try:
        yield memory or PrivateMemory()
    finally:
        if memory is not None:
            memory.close()
    made = team.gather_all(memory.made if memory else 0, int)
    if memory is not None and [made[mate] for mate in mates] != memory.shares:
        own = [made[mate] for mate in mates]
        raise InvariantViolation("ranks make the weights that they share", f"expected {memory.shares}, got {own} bytes")


def _are_large(team: Team) -> bool:
    """Return whether copies of the weights would take much of this host's memory."""
    here = [rank for rank in team.ranks if rank.host == team.me.host]
    copies = sum(rank.weights / rank.parts for rank in here if rank.has_s and rank.device == "cpu")
    return copies > COPIES_SHARE * min(rank.memory for rank in here)


def _shared(team: Team, mates: list[int]) -> SharedMemory | None:
    """Return memory that this rank shares with its `mates`, itself among them, or None if one of them cannot have it.

    A rank without mates takes part in what is collective.
    """
    place, memory = mates.index(team.place) if mates else 0, None
    with ExitStack() as stack:
        own: list[Address] = []
        if len(mates) > 1 and place == 0:
            with suppress(OSError):
                own.append(stack.enter_context(SharedMemory.offered()))
        offers = team.gather_all(own, list[Address])
        for offer in offers[mates[0]] if mates else []:
            with suppress(OSError):
                memory = SharedMemory.open(offer, place, len(mates))
        have = team.gather_all(memory is not None, bool)
    if memory is not None and not all(have[mate] for mate in mates):
        memory.close()
        return None
    return memory
