"""The layout of a world: which ranks hold the weights, and which hold the KV caches of the rows that these decode.

`replicas` gives every rank both roles: the ranks share nothing but the lead's desk. `split` gives every rank one role,
as FastDecode and Lamina do. N ranks that are alike are never faster split: with W and A seconds of S- and R-work in a
step of one rank, replicas take (W + A) / N and K S-ranks max(W / K, A / (N - K)). So a world of ranks that are alike
gets replicas, unless the weights do not fit on every one of them, and a world in which some ranks see a GPU is split.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank

LAYOUTS = ("auto", "replicas", "split")
POOLS = ("shared", "own")
_WEIGHTS_SHARE = 0.5  # of a host's memory, that the weights of all its replicas may take


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks of its layout.

    Attributes:
        layout: One of LAYOUTS; `auto` chooses.
        s_ranks: Number of S-ranks of the layout `split`; None chooses.
        pools: Whether all R-ranks serve every S-rank, or an even share of them each.
    """

    layout: str = "auto"
    s_ranks: int | None = None
    pools: str = "shared"


class Group(msgspec.Struct, frozen=True):
    """An S-rank and its pool, by their places in a team.

    Attributes:
        s_rank: Rank that holds the weights.
        pool: Ranks that hold the KV caches of its rows, in order; itself in the layout `replicas`.
    """

    s_rank: int
    pool: list[int]

    @property
    def alone(self) -> bool:
        """Whether it attends to its rows itself."""
        return self.pool == [self.s_rank]


def assign_roles(ranks: Sequence[Rank], wishes: Wishes) -> str:
    """Set the role of every rank, and whom R-ranks serve; return why, as a line for the user.

    S-ranks are ranks that see a GPU first. Without a number, each GPU has one; rank 0 is one if there are none.

    Raises:
        UserError: If the world does not have what is asked for.
    """
    size, s_ranks = len(ranks), wishes.s_ranks
    if size == 1:
        if s_ranks not in (None, 1):
            raise UserError(
                f"--s-ranks {s_ranks}: the world has 1 rank, which plays both roles; start more ranks", everywhere=True
            )
        ranks[0].role = "SR"
        return "one rank of both roles"
    if wishes.layout == "replicas" and s_ranks is not None:
        raise UserError(
            f"--layout replicas: expected no --s-ranks, since every rank has both roles, got {s_ranks}; leave one out",
            everywhere=True,
        )
    why = None if s_ranks is not None or wishes.layout == "split" else against_replicas(ranks)
    if wishes.layout == "replicas" or (wishes.layout == "auto" and s_ranks is None and why is None):
        for rank in ranks:
            rank.role = "SR"
        return f"{size} replicas, each rank with both roles"
    count = _split(ranks, s_ranks)
    assign_pools(ranks, wishes.pools)
    return f"{count} S + {size - count} R" + f": {why}" * (why is not None)


def against_replicas(ranks: Sequence[Rank]) -> str | None:
    """Return why the ranks should be split, or None if they should be replicas."""
    owners, weights = len(_owners(ranks)), max(r.weights for r in ranks)
    if 0 < owners < len(ranks):
        return f"{len(ranks)} ranks, {owners} of them with a GPU of their own"
    for host in {r.host: 0 for r in ranks}:
        here = [r for r in ranks if r.host == host]
        memory, copies = min(r.memory for r in here), copies_of(here)
        if len(here) > 1 and copies * weights > _WEIGHTS_SHARE * memory:
            sizes = f"{copies} x {weights / 2**30:,.1f} GiB for {len(here)} ranks, {memory / 2**30:,.1f} GiB free"
            return f"weights do not fit on every rank of {host} ({sizes})"
    return None


def copies_of(here: Sequence[Rank]) -> int:
    """Return how many copies of the weights the ranks of a host have as replicas: one a NUMA node, or one each."""
    if not all(r.shares_weights for r in here):
        return len(here)
    return min(len(here), len({node for r in here for node in r.numa.split(",")}))


def _split(ranks: Sequence[Rank], s_ranks: int | None) -> int:
    """Make some ranks S-ranks and the others R-ranks; return the number of S-ranks."""
    size, owners = len(ranks), _owners(ranks)
    count = s_ranks or (len(owners) if 0 < len(owners) < size else 1)
    if count >= size:
        raise UserError(
            f"--s-ranks {count}: the world has {size} ranks, which leaves no R-rank to hold the KV cache; "
            f"expected 1 to {size - 1}, or start more ranks",
            everywhere=True,
        )
    chosen = sorted(ranks, key=lambda r: (r.rank not in owners, not r.gpus, r.rank))[:count]
    for rank in ranks:
        rank.role = "S" if rank in chosen else "R"
    return count


def _owners(ranks: Sequence[Rank]) -> set[int]:
    """Return the ranks that can have a GPU of their own: the first of a host, as many as it has GPUs."""
    owners = set()
    for host in {r.host for r in ranks}:
        seeing = [r for r in ranks if r.host == host and r.gpus]
        owners |= {r.rank for r in seeing[: len({gpu for r in seeing for gpu in r.gpus})]}
    return owners


def assign_pools(ranks: Sequence[Rank], pools: str) -> None:
    """Settle which S-rank each R-rank serves: all of them, or one if every S-rank can have a pool of its own.

    Raises:
        UserError: If there are fewer R-ranks than S-ranks that want their own.
    """
    s_ranks, r_ranks = ([r for r in ranks if r.role == role] for role in ("S", "R"))
    if pools == "own" and len(r_ranks) < len(s_ranks):
        raise UserError(
            f"--pools own: expected at least one R-rank for each of {len(s_ranks)} S-ranks, got {len(r_ranks)}; "
            "start more ranks, lower --s-ranks, or use --pools shared",
            everywhere=True,
        )
    for place, rank in enumerate(r_ranks):
        rank.serves = s_ranks[place * len(s_ranks) // len(r_ranks)].rank if pools == "own" else None


def groups_of(ranks: Sequence[Rank]) -> list[Group]:
    """Return the groups of ranks that have their roles, by S-rank."""
    groups = []
    for place, rank in enumerate(ranks):
        if rank.role == "SR":
            groups.append(Group(place, [place]))
        elif rank.role == "S":
            pool = [p for p, other in enumerate(ranks) if other.role == "R" and other.serves in (None, rank.rank)]
            groups.append(Group(place, pool))
    return groups
