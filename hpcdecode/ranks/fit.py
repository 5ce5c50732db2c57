"""Whether the weights of a model fit into the memory of hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank

_WEIGHTS_SHARE = 0.5  # of a host's memory, that the weights of several replicas may take
_ONE_COPY_SHARE = 0.9  # the same of one replica or a part of it


def too_large(ranks: Sequence[Rank], size: int) -> str | None:
    """Return why the weights should not lie on all ranks, as replicas of `size` ranks each, or None."""
    weights = max(r.weights for r in ranks)
    for here in _by_host(ranks):
        copies, memory = copies_of(here, size), min(r.memory for r in here)
        if copies * weights > (_WEIGHTS_SHARE if copies > 1 else _ONE_COPY_SHARE) * memory:
            sizes = f"{copies:g} x {_gib(weights)} for {len(here)} ranks, {_gib(memory)} free"
            return f"weights do not fit on every rank of {here[0].host} ({sizes})"
    return None


def copies_of(here: Sequence[Rank], size: int = 1) -> float:
    """Return how many copies of the weights the ranks of a host have as replicas of `size` ranks each.

    Members have a part of the weights each. Ranks of a NUMA node that have the same part may share it.
    """
    if not all(r.shares_weights for r in here):
        return len(here) / size
    parts = {(node, r.rank % size) for r in here for node in r.numa.split(",")}
    return min(len(here), len(parts)) / size


def require_fit(ranks: Sequence[Rank]) -> None:
    """Refuse weights that are larger than the memory that is free on the hosts of S-ranks on CPUs.

    Raises:
        UserError: On every rank; it says how many members would make them fit.
    """
    weights = max(r.weights for r in ranks)
    for here in _by_host([r for r in ranks if r.has_s and r.device == "cpu"]):
        size, memory = here[0].parts, min(r.memory for r in here)
        copies = copies_of(here, size)
        if copies * weights <= memory:
            continue
        members = -(-weights // max(int(_ONE_COPY_SHARE * memory), 1))
        raise UserError(
            f"the weights take {_gib(weights)}, of which the S-ranks of {here[0].host} would hold "
            f"{_gib(copies * weights)}, and {_gib(memory)} are free there; start at least {members} ranks, each on a "
            f"host with as much memory, and add --tp {members} (each rank holds a part of every layer) or "
            f"--pp {members} (each holds some of the layers)",
            everywhere=True,
        )


def _by_host(ranks: Sequence[Rank]) -> Iterator[list[Rank]]:
    for host in {r.host: 0 for r in ranks}:
        yield [r for r in ranks if r.host == host]


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
