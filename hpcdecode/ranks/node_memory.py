"""One copy of packed weights for all S-ranks of a NUMA node, which they make together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from hpcdecode.errors import InvariantViolation
from hpcdecode.ranks.team import Team
from hpcdecode.system.shared_memory import Address, PrivateMemory, SharedMemory, WeightMemory


@contextmanager
def node_memory(team: Team, *, loads: bool) -> Iterator[WeightMemory]:
    """Yield where this rank puts its packed weights: shared with the S-ranks of its NUMA nodes if there are others.

    What has been put there is whole once the block has ended. Collective over the team.

    Args:
        team: The ranks.
        loads: Whether this rank will pack weights, all of a model.

    Raises:
        InvariantViolation: If a rank that shares memory has not made its part of it.
    """
    me = team.me
    nodes = team.gather_all(f"{me.host} {me.numa}" if loads and me.device == "cpu" else "", str)
    if max(Counter(filter(None, nodes)).values(), default=0) < 2:
        yield PrivateMemory()
        return
    mates = [place for place, node in enumerate(nodes) if node and node == nodes[team.place]]
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
