"""The sizes of a group's work: B, F, S and its lanes, chosen by the lead for all groups."""

from __future__ import annotations

import msgspec

from hpcdecode.attention.reach import reach_of
from hpcdecode.attention.shapes import recurrent_shapes
from hpcdecode.config import EngineOptions
from hpcdecode.engine.drafting import Drafting
from hpcdecode.engine.setup import Setup, apart, footprint_of, partition_of
from hpcdecode.engine.swap_room import swaps_of
from hpcdecode.ranks.layout import Group
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.admission import LaneFeed, LaneSource
from hpcdecode.schedule.auto import (
    LOOKAHEAD,
    at_once,
    choose,
    load_limit,
    mean_prompt,
    split,
    usual_lanes,
)
from hpcdecode.schedule.limits import LaneLimits, prefill_limit
from hpcdecode.schedule.optimistic import placement_kind
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.policies import POLICIES
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.spread import UNKNOWN, Spread, prefix_room, shared_by_pairs, spread_of

MOST_GROWTH = 8  # of B, with optimistic admission
_AHEAD_ON_GPUS = 2048  # rows looked at for each group on GPUs, whose B may be as large
_MOST_AHEAD = 4096  # rows looked at


class Scale(msgspec.Struct, frozen=True):
    """The sizes of a group's work.

    Attributes:
        batch, period, steps: B, F and S.
        load: W_lim, tokens that sequences attend to in a step.
        prefill_tokens: the most prompt tokens of a lane's step.
        lanes: B of every lane.
        growth: to how many times that they may grow if sequences end early.
        live: whether rows come while the engine works.
        spread: how many rows share prefixes.
    """

    batch: int
    period: int
    steps: int
    load: int
    prefill_tokens: int
    lanes: list[int]
    growth: int = 1
    live: bool = False
    spread: Spread = UNKNOWN

    @property
    def slots(self) -> int:
        """Return how many sequences any lane may hold at once."""
        return max(LaneLimits(b, 1, 1, 1, None, growth=self.growth).slots for b in self.lanes)

    @property
    def most(self) -> int:
        """Return the greatest B that the group may have."""
        return self.batch * self.growth

    @property
    def injection(self) -> int:
        """Return M, the sequences that enter together in the steady state."""
        return -(-self.batch * self.period // self.steps)


def rows_ahead(team: Team) -> int:
    """Return how many rows are looked at before the sizes are chosen."""
    on_gpus = any(team.ranks[group.home].device != "cpu" for group in team.groups)
    return min((_AHEAD_ON_GPUS if on_gpus else LOOKAHEAD) * len(team.groups), _MOST_AHEAD)


def choose_scales(
    options: EngineOptions, team: Team, setup: Setup, first: list[Prompt], all_rows: bool, live: bool = False
) -> list[Scale]:
    """Return the sizes of every group; called by the lead.

    Args:
        options: of the engine.
        team: with the KV tokens of every R-rank.
        setup: of the model.
        first: rows at the beginning of the job.
        all_rows: whether there are no others.
        live: whether rows come while the engine works.
    """
    alike = shared_by_pairs(first) if options.prefix_sharing else []
    shared, spread = sum(alike), spread_of([p.sequences for p in first], alike)
    return [_choose(options, team, group, setup, first, all_rows, live, shared, spread) for group in team.groups]


def _choose(
    options: EngineOptions,
    team: Team,
    group: Group,
    setup: Setup,
    first: list[Prompt],
    all_rows: bool,
    live: bool,
    shared: int,
    spread: Spread,
) -> Scale:
    """Return the sizes of a group. B is at most what its KV caches hold of sequences of one block."""
    capacities = capacity_of(options, team, group)
    capacity = sum(capacities)
    crosses = apart(team, group)
    home = team.ranks[group.home]
    lanes = options.lanes or usual_lanes(home.pp, home.turns, crosses, home.copies - home.turns)
    largest, footprint = _largest_batch(options, home, setup, lanes), footprint_of(options, team, group, setup)
    batch, period, steps = choose(
        options.batch,
        options.period,
        first,
        all_rows,
        1,
        capacity,
        setup.max_positions,
        len(team.groups),
        footprint,
        largest,
        shared,
    )
    batch = max(min(batch, capacity // (setup.state_tokens + setup.block_tokens)), 1)
    load = options.load_limit or load_limit(batch, period, steps, mean_prompt(first), capacity, footprint)
    most = max([at_once(p) for p in first], default=1)  # a row is run by one lane
    prefill = options.prefill_tokens or prefill_limit(crosses)
    of_lanes = split(batch, max(min(lanes, batch // most), 1))
    grows = options.admission == "optimistic" and options.batch is None
    growth = max(min(MOST_GROWTH, largest // batch), 1) if grows else 1
    return Scale(batch, period, steps, load, prefill, of_lanes, growth, live, spread)


def _largest_batch(options: EngineOptions, home: Rank, setup: Setup, lanes: int) -> int:
    """Return the largest B to choose for a group: on GPUs as many sequences a lane as their GEMMs are worth.

    The lead measures its own GPU, and takes those of other groups to be like it.
    """
    if home.device == "cpu" or options.batch is not None:
        return LOOKAHEAD
    from hpcdecode.engine.ridge import measured_lane_batch

    return lanes * measured_lane_batch(home.device, setup.dtype)


def capacity_of(options: EngineOptions, team: Team, group: Group) -> list[int]:
    """Return the KV tokens that a group may use of the R-ranks that plans name: those that each member's have."""
    sharing = sum(other.pools == group.pools for other in team.groups)
    of_members = (
        partition_of(options, pool).capacity([team.ranks[p].kv_tokens // sharing for p in pool]) for pool in group.pools
    )
    return list(map(min, zip(*of_members, strict=True)))


def placement_of(options: EngineOptions, team: Team, setup: Setup, lanes: int) -> Placement:
    """Return what this rank's group may use of its R-ranks' KV caches, for so many lanes."""
    group = team.group
    of_members = [partition_of(options, pool).speeds([team.ranks[p].speed for p in pool]) for pool in group.pools]
    speeds = list(map(min, zip(*of_members, strict=True)))  # the lane waits for the slowest member's R-rank
    footprint = footprint_of(options, team, group, setup)
    reach = reach_of(setup.shapes, state_load(setup))
    return placement_kind(options.admission)(capacity_of(options, team, group), footprint, lanes, speeds, reach)


def portion_of(options: EngineOptions, scale: Scale) -> int:
    """Return how many sequences enter a lane together, of a schedule that lets them in by portions; else 0."""
    return -(-scale.injection // len(scale.lanes)) if POLICIES[options.schedule].by_portions else 0


def schedulers_of(
    options: EngineOptions,
    team: Team,
    setup: Setup,
    scale: Scale,
    prefix_tokens: int,
    feed: LaneSource,
    stops: Stops,
    drafting: Drafting,
) -> list[Scheduler]:
    """Return the schedulers of this rank's lanes, which share a feed and its R-ranks' KV caches.

    Args:
        options: of the engine.
        team: of which this rank is one.
        setup: of the model.
        scale: of this rank's group.
        prefix_tokens: the most tokens of prefixes of a lane.
        feed: where rows come from.
        stops: what ends a sequence.
        drafting: of the engine, which knows what was generated before.
    """
    placement = placement_of(options, team, setup, len(scale.lanes))
    prefixes = prefix_tokens, prefix_room(placement.capacity, len(scale.lanes))
    limits = [lane_limits(options, setup, batch, scale, *prefixes) for batch in scale.lanes]
    swaps = swaps_of(options, team, placement.footprint)
    guesses = drafting.speculation(setup, placement, scale.slots * len(limits))
    return [
        Scheduler(lane, LaneFeed(feed, lane), placement, own, stops, swaps, guesses) for lane, own in enumerate(limits)
    ]


def state_load(setup: Setup) -> int:
    """Return the tokens that take as long to attend to as a sequence's states take, which are read and written."""
    return 2 * (setup.state_tokens or setup.block_tokens) if recurrent_shapes(setup.shapes) else 0


def lane_limits(
    options: EngineOptions, setup: Setup, batch: int, scale: Scale, prefix_tokens: int = 0, room: int = 0
) -> LaneLimits:
    """Return the limits of a lane whose share of the group's B is `batch`."""
    return LaneLimits(
        batch,
        scale.period,
        scale.steps,
        scale.prefill_tokens,
        setup.max_positions,
        prefix_tokens,
        options.schedule,
        scale.load * batch // scale.batch,
        scale.growth,
        1 if options.admission == "optimistic" and options.period is None else None,
        keeps_prefixes=scale.live,
        apart=options.prefill_ranks > 0,
        spread=scale.spread,
        prefix_room=room,
    )
