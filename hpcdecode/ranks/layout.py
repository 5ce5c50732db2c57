"""The layout of a world: which ranks hold the weights, and which hold the KV caches of the rows that these decode.

`replicas` gives every rank both roles: a group shares nothing with others but the lead's desk. `split` gives every rank
one role, as FastDecode and Lamina do. N ranks that are alike are never faster split: with W and A seconds of S- and
R-work in a step of one rank, replicas take (W + A) / N and K S-ranks max(W / K, A / (N - K)). So a world of ranks that
are alike gets replicas, of as many ranks as the weights need, and a world in which some ranks see a GPU is split.

A model may take a group of several S-ranks, its members. Tensor parallelism deals weights and attention heads out to
them; pipeline parallelism gives each stage of them a run of layers. Rotation gives each of them the whole model: they
run the slices of a lane in turn. Ranks that only prefill have the whole model, too: they are further members of the
group of an S-rank, which gives them its prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcdecode.errors import UserError
from hpcdecode.ranks.fit import too_large
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.wishes import GroupShape, Wishes


class Group(msgspec.Struct, frozen=True):
    """S-ranks that share the weights of one model, and their pools, by their places in a team.

    Attributes:
        members: Ranks that hold the weights: those of the last stage first, or copy by copy. The first is the group's
            home, which schedules and samples.
        pools: For each member the ranks that hold the KV caches of its layers and attention heads, in order; itself in
            the layout `replicas`.
        tp: Members of a stage.
    """

    members: list[int]
    pools: list[list[int]]
    tp: int = 1

    @property
    def home(self) -> int:
        """The first member."""
        return self.members[0]

    @property
    def stages(self) -> list[list[int]]:
        """The members of each stage, the last stage first, or of each copy."""
        return [self.members[i : i + self.tp] for i in range(0, len(self.members), self.tp)]

    @property
    def alone(self) -> bool:
        """Whether its members attend to its rows themselves."""
        return self.pools == [[member] for member in self.members]

    def pool_of(self, place: int) -> list[int]:
        """Return the pool of a member, or the pool that an R-rank is in."""
        if place in self.members:
            return self.pools[self.members.index(place)]
        return next(pool for pool in self.pools if place in pool)


def assign_roles(ranks: Sequence[Rank], wishes: Wishes) -> str:
    """Set the role and group of every rank, and whom R-ranks serve; return why, as a line for the user.

    S-ranks are ranks that see a GPU first. Without a number, each GPU has one; rank 0 is one if there are none.

    Raises:
        UserError: If the world does not have what is asked for.
    """
    size, s_ranks = len(ranks), wishes.s_ranks
    if size == 1:
        given = {"s-ranks": s_ranks, "tp": wishes.tp, "pp": wishes.pp, "route": wishes.route}
        asked = [(flag, value) for flag, value in given.items() if value not in (None, 1, "fixed")]
        if wishes.prefill_ranks:
            asked.append(("prefill-ranks", wishes.prefill_ranks))
        for flag, value in asked:
            raise UserError(
                f"--{flag} {value}: the world has 1 rank, which plays both roles; start more ranks",
                everywhere=True,
            )
        ranks[0].role = "SR"
        return "one rank of both roles"
    if wishes.layout == "replicas" and s_ranks is not None:
        raise UserError(
            f"--layout replicas: expected no --s-ranks, since every rank has both roles, got {s_ranks}; leave one out",
            everywhere=True,
        )
    shape = wishes.shape()
    split = s_ranks is not None or wishes.layout == "split" or shape.copies > 1
    why = None if split else against_replicas(ranks, shape.size)
    if why and wishes.layout == "auto" and wishes.tp is None and not _some_own_gpus(ranks):
        shapes = [GroupShape(tp, wishes.pp) for tp in range(2, size + 1)]
        fitting = (s for s in shapes if size % s.size == 0 and against_replicas(ranks, s.size) is None)
        if found := next(fitting, None):
            return f"{_replicas(ranks, found)}: {why}"
    if wishes.layout == "replicas" or (not split and why is None):
        return _replicas(ranks, shape)
    prefill = wishes.prefill_ranks
    count = _split(ranks, (s_ranks or 1) + prefill if prefill else s_ranks, shape)
    assign_pools(ranks, wishes.pools)
    each = f" (groups of {shape.text})" * (shape.size > 1)
    weights = f"{count - prefill} S + {prefill} prefill" if prefill else f"{count} S{each}"
    return f"{weights} + {size - count} R" + f": {why}" * (why is not None)


def _replicas(ranks: Sequence[Rank], shape: GroupShape) -> str:
    """Give every rank both roles, in groups; return that as a line for the user."""
    if len(ranks) % shape.size:
        raise UserError(
            f"{shape.flags}: expected a number of ranks that is a multiple of {shape.size}, as {shape.size} ranks "
            f"share a model, got {len(ranks)}; start more ranks or fewer, or change the flags",
            everywhere=True,
        )
    for rank in ranks:
        rank.role = "SR"
    _assign_groups(ranks, shape)
    if shape.size == 1:
        return f"{len(ranks)} replicas, each rank with both roles"
    count = len(ranks) // shape.size
    return f"{f'{count} replicas' if count > 1 else 'one model'} of {shape.text}, each rank with both roles"


def _assign_groups(s_ranks: Sequence[Rank], shape: GroupShape) -> None:
    """Make S-ranks members of groups, those of a group next to each other."""
    for place, rank in enumerate(s_ranks):
        rank.member, rank.tp, rank.pp, rank.copies, rank.prefill = place % shape.size, *shape
        rank.home = s_ranks[place - place % shape.size].rank


def against_replicas(ranks: Sequence[Rank], size: int = 1) -> str | None:
    """Return why the ranks should be no replicas of `size` ranks each, or None if they should.

    Weights of ranks that all have a GPU of their own lie there, and take no memory of hosts.
    """
    owners = len(_owners(ranks))
    if _some_own_gpus(ranks):
        return f"{len(ranks)} ranks, {owners} of them with a GPU of their own"
    return None if owners else too_large(ranks, size)


def _some_own_gpus(ranks: Sequence[Rank]) -> bool:
    """Return whether some ranks have a GPU of their own and others have none."""
    return 0 < len(_owners(ranks)) < len(ranks)


def _split(ranks: Sequence[Rank], s_ranks: int | None, shape: GroupShape) -> int:
    """Make some ranks S-ranks and the others R-ranks; return the number of S-ranks."""
    size, owners = len(ranks), _owners(ranks)
    count = s_ranks or (len(owners) if 0 < len(owners) < size else shape.size)
    if count >= size:
        asked = "--s-ranks and --prefill-ranks, together" if shape.prefill else "--s-ranks"
        raise UserError(
            f"{asked} {count}: the world has {size} ranks, which leaves no R-rank to hold the KV cache; "
            f"expected 1 to {size - 1}, or start more ranks",
            everywhere=True,
        )
    if count % shape.size or (size - count) % shape.parts:
        raise UserError(
            f"{shape.flags}: expected multiples of {shape.size} S-ranks and of {shape.parts} R-ranks, as each of the "
            f"{shape.parts} parts of a model has R-ranks of its own, got {count} S-ranks and {size - count} R-ranks; "
            + _ranks_instead(size, count, shape),
            everywhere=True,
        )
    chosen = sorted(ranks, key=lambda r: (r.rank not in owners, not r.gpus, r.rank))[:count]
    for rank in ranks:
        rank.role = "S" if rank in chosen else "R"
    _assign_groups([r for r in ranks if r.role == "S"], shape)
    return count


def _ranks_instead(size: int, s_ranks: int, shape: GroupShape) -> str:
    """Return what to change if parts of a model cannot have equally many R-ranks.

    Unequal pools are not worth their plans: every sequence has K and V in the pool of each part, so the smallest pool
    sets the time and the room of a step, as if the other pools had no more R-ranks than it.
    """
    if s_ranks % shape.size:
        return "change --s-ranks, the flags or the number of ranks"
    fewer = size - (size - s_ranks) % shape.parts
    counts = [n for n in (fewer, fewer + shape.parts) if n > s_ranks]
    return (
        f"start {' or '.join(map(str, counts))} ranks, or change --s-ranks or the flags. A part with more R-ranks than "
        "others would gain nothing: each holds some heads or layers of every row, so the fewest set speed and room"
    )


def _owners(ranks: Sequence[Rank]) -> set[int]:
    """Return the ranks that can have a GPU of their own: of those that see the same one, the first."""
    owners: set[int] = set()
    taken: set[tuple[str, str]] = set()
    for rank in sorted(ranks, key=lambda r: len(r.gpus)):  # those that see one GPU have no other
        free = [(rank.host, gpu) for gpu in rank.gpus if (rank.host, gpu) not in taken]
        if free:
            owners.add(rank.rank)
            taken.add(free[0])
    return owners


def assign_pools(ranks: Sequence[Rank], pools: str) -> None:
    """Settle which member of which groups each R-rank serves: of all groups, or of one if each can have its own.

    Raises:
        UserError: If there are fewer R-ranks than S-ranks that want their own.
    """
    s_ranks, r_ranks = ([r for r in ranks if r.role == role] for role in ("S", "R"))
    wanting = sum(not r.only_prefills for r in s_ranks)
    if pools == "own" and len(r_ranks) < wanting:
        raise UserError(
            f"--pools own: expected at least one R-rank for each of {wanting} S-ranks, got {len(r_ranks)}; "
            "start more ranks, lower --s-ranks, or use --pools shared",
            everywhere=True,
        )
    homes, first = [r for r in s_ranks if r.member == 0], s_ranks[0]
    size = first.parts
    for place, rank in enumerate(r_ranks):
        rank.member, rank.tp, rank.pp, rank.copies = place % size, first.tp, first.pp, first.copies
        rank.prefill = first.prefill
        share = place // size * len(homes) // max(len(r_ranks) // size, 1)
        rank.serves = homes[share].rank if pools == "own" else None


def dissolve_groups(ranks: Sequence[Rank], groups: Sequence[Group], left: Sequence[int]) -> None:
    """Take the role from those members of some groups that are left, by their places: alone they cannot work."""
    for group in groups:
        for place in set(group.members) & set(left):
            ranks[place].role = ""


def deal_pools(ranks: Sequence[Rank], size: int) -> bool:
    """Deal R-ranks out anew after a loss, and return whether there are enough.

    Those that are too many for all members to have as many lose their role.

    Args:
        ranks: The ranks that are left.
        size: Members that have a copy of the model between them.
    """
    s_ranks, r_ranks = ([r for r in ranks if r.role == role] for role in ("S", "R"))
    if not s_ranks:
        return any(r.role == "SR" for r in ranks)
    used = len(r_ranks) // size * size
    for rank in r_ranks[used:]:
        rank.role = ""
    if used:
        own = any(r.serves is not None for r in r_ranks) and used >= len(s_ranks)
        assign_pools(ranks, "own" if own else "shared")
    return used > 0


def groups_of(ranks: Sequence[Rank]) -> list[Group]:
    """Return the groups of ranks that have their roles, by home."""
    groups: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        if rank.has_s:
            groups.setdefault(rank.rank if rank.home is None else rank.home, []).append(place)
    return [
        Group(members, [_pool(ranks, home, place) for place in members], ranks[members[0]].tp)
        for home, members in groups.items()
    ]


def _pool(ranks: Sequence[Rank], home: int, place: int) -> list[int]:
    """Return the pool of a member of a group."""
    if ranks[place].role == "SR":
        return [place]
    member = ranks[place].member % ranks[place].parts
    return [p for p, r in enumerate(ranks) if r.role == "R" and r.serves in (None, home) and r.member == member]
