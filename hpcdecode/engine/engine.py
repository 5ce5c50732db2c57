"""The engine: a model loaded over the ranks of a team, and the lanes that take rows from a desk and bring them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.batch_format import require_adapter_names
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.desk import Desk, RankReport
from hpcdecode.engine.drafting import Drafting
from hpcdecode.engine.duties import run_lead, run_remote
from hpcdecode.engine.kv import open_attention_worker, open_prompts
from hpcdecode.engine.links import (
    Lane,
    group_lanes,
    home_communicators,
    lane_spec,
    lanes_of,
    local_links,
    pool_communicators,
    r_links,
    s_link,
    slots_of,
)
from hpcdecode.engine.member import Member
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.prefill_ranks import PrefillMember, prefill_copy, prefill_lanes
from hpcdecode.engine.programs import PlanOrder, Program, serve
from hpcdecode.engine.room import limit_torch, measure_room, measure_speeds, prefix_bytes
from hpcdecode.engine.s_rank import SRank
from hpcdecode.engine.scale import Scale, choose_scales, portion_of, rows_ahead, schedulers_of
from hpcdecode.engine.setup import direct, load
from hpcdecode.engine.survive import on_loss, work_on
from hpcdecode.engine.work import Work
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.staging import staged
from hpcdecode.model import SplitModel
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.report.account import Account
from hpcdecode.report.metrics import Metrics
from hpcdecode.report.progress import Progress
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.routes import Rotation
from hpcdecode.system.signals import Signals
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.engine.remote import RemoteDesk
    from hpcdecode.exchange.mpi import MpiRLink

_NO_CONTEXT_LIMIT = 1 << 40


class Engine:
    """One rank's part in a loaded model and its KV caches. Every method is called by all ranks of `team`.

    Args:
        options: of the engine.
        team: the ranks and their roles.
        model: one loaded before, in place of `options.model`.
        timeline: of this rank.

    Attributes:
        setup: what every rank knows of the model.
        lost: ranks that were lost while the job went on; told: how many of them the user knows of.
        comms: communicators of the run under way; one list for the engine's life.

    Raises:
        UserError: the model cannot be run; on every rank.
    """

    def __init__(
        self, options: EngineOptions, team: Team, model: SplitModel | None = None, timeline: Timeline | None = None
    ):
        self.options, self.team, self.timeline = options, team, timeline or Timeline()
        team.occupy()
        limit_torch(team.me.device, options.gpu_memory)
        require_adapter_names(options.adapters, options.model)
        self.setup, self._loaded = load(options, team, model)
        self._drafting = Drafting(options, team, self._loaded, self.timeline)
        measure_room(options, team, self.setup)
        measure_speeds(team)
        self.lost: list[Rank] = []
        self.told = 0
        self.comms: list[MPI.Intracomm] = []
        self._attention: AttentionWorker | None = None  # kept from run to run
        self._slots = 0  # that it has
        self._work = Work()
        self._abandoned: list[Work] = []

    @property
    def model(self) -> SplitModel:
        """Return the model; on S-ranks."""
        assert self._loaded is not None, "expected an S-rank"
        return self._loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; on S-ranks."""
        assert self._loaded is not None, "expected an S-rank"
        return self._loaded.tokenizer

    @property
    def max_positions(self) -> int:
        """Return the context in tokens, a large number if the model has no limit."""
        return self.setup.max_positions or _NO_CONTEXT_LIMIT

    @property
    def stops(self) -> Stops:
        """Return what ends a sequence; on S-ranks."""
        return Stops(self.setup.eos, self.tokenizer.decode)

    def scales(self, desk: Desk | None) -> list[Scale]:
        """Return B, F and lanes of every group for the rows of the lead's desk, on every rank."""
        size = partial(choose_scales, self.options, self.team, self.setup)
        found = size(*desk.feed.preview(rows_ahead(self.team)), desk.live) if desk else None
        return self.team.broadcast(found, list[Scale])

    def work(
        self, desk: Desk | None, scales: list[Scale], signals: Signals, progress: Progress, checkpoint_seconds: float
    ) -> Metrics:
        """Play this rank's roles until all rows of the lead's desk are done, or the lead's `signals` say to stop.

        Args:
            desk: on the lead; None on others.
            scales: sizes of the work by group, alike on all ranks.
            signals: of the lead.
            progress: of the lead.
            checkpoint_seconds: after which S-ranks other than the lead hand in what is in flight.
        """
        self.team.occupy()  # in whatever thread this is

        def run(scales: list[Scale]) -> Metrics | None:
            done = self._run(scales, partial(self._run_s, desk, signals, progress, checkpoint_seconds, scales))
            return self.metrics() if done else None

        try:
            if self.options.survive:
                return work_on(self, desk, scales, run)
            self.open(scales)
            metrics = run(scales)
            assert metrics is not None, "no rank was lost: expected all rows to be done"
            return metrics
        except BaseException:
            self._attention = None  # sequences are left in it
            if self.team.comm is None:
                self._work = Work()  # which holds it too
            raise

    def metrics(self) -> Metrics:
        """Return what this rank counted in its last work."""
        return self._work.metrics(Account.of(self.team.me, self.timeline))

    def report(self) -> RankReport:
        """Return what this rank knows of the requests that it works on."""
        return self._work.report()

    def give_up(self) -> None:
        """Drop lanes, KV cache and sequences; messages under way may still be written to the lanes' memory."""
        self._abandoned.append(Work(links=self._work.links, groups=self._work.groups))
        self._work, self._attention = Work(), None
        self.comms.clear()

    def open(self, scales: list[Scale]) -> None:
        """Open this rank's ends of its lanes, and the communicators of the work."""
        team, lanes = self.team, lanes_of(self.team, scales)
        comms, groups = pool_communicators(team, scales), group_lanes(team, self.setup, scales, self.timeline)
        home_comms = home_communicators(team)
        self.comms += [*comms, *(comm for group in groups for comm in group.comms), *home_comms]
        attention = self._open_attention(lanes) if team.me.has_r else None
        self._work = Work(attention, groups=groups, home_comms=home_comms)
        if team.me.has_s:
            self._work.links = self._s_links(lanes, comms, attention)
        elif team.me.has_r:
            self._work.links = self._r_links(lanes, comms)

    def _run(self, scales: list[Scale], run_s: Callable[[], bool]) -> bool:
        """Work until this rank's lanes are closed; return whether all rows are done.

        They are not if some are left that a lost rank had. `run_s` runs the lanes of an S-rank.
        """
        team, done, work = self.team, True, self._work
        if team.me.has_s:
            done = run_s()
        elif team.me.has_r:
            self._run_r(lanes_of(team, scales))
        if work.attention is not None:
            work.attention.check()
        self.timeline.enter("wait")
        work.close()
        self.comms.clear()
        return done

    def _s_links(
        self, lanes: Sequence[Lane], comms: Sequence[MPI.Intracomm], attention: AttentionWorker | None
    ) -> Sequence[SLink]:
        """Return this S-rank's ends of its lanes."""
        device = self.model.device
        if attention is not None:
            return local_links(self.team, lanes, attention, device)
        from hpcdecode.exchange.memory import HOST

        self.timeline.enter("wait")
        options, team = self.options, self.team
        spec = lane_spec(options, team, self.setup, lanes[0].scale, device if direct(self.options, self.team) else HOST)
        plain = [s_link(options, team, number, comm, spec) for number, comm in enumerate(comms)]
        self.comms += [link.graph for link in plain if link.graph]
        return staged(plain, device)

    def _r_links(self, lanes: Sequence[Lane], comms: Sequence[MPI.Intracomm]) -> Sequence[MpiRLink]:
        """Return this R-rank's ends of its lanes, those of a lane side by side."""
        place = self.team.me.kv_device if direct(self.options, self.team) else "cpu"
        ends = r_links(self.options, self.team, self.setup, lanes, comms, torch.device(place))
        self.comms += [link.graph for of_lane in ends for link in of_lane if link.graph]
        return [link for of_lane in ends for link in of_lane]

    def _run_s(
        self, desk: Desk | None, signals: Signals, progress: Progress, checkpoint_seconds: float, scales: list[Scale]
    ) -> bool:
        """Run the lanes of an S-rank; the lead has the desk, which others reach. Return whether all rows are done."""
        homes, scale = self.team.homes, scales[self.team.own[0]]
        if self.team.place not in homes:
            self._run_member()
            return True
        if len(homes) == 1 and desk is not None:
            return run_lead(self._make_s_rank(scale, desk), desk, signals, progress)
        from hpcdecode.engine.remote import Clients, RemoteDesk

        (home_comm,) = self._work.home_comms
        if desk is not None:
            clients = Clients(desk, home_comm, [s.most for s in scales], on_loss(self, homes))
            return run_lead(self._make_s_rank(scale, desk), desk, signals, progress, clients)
        lanes = [batch * scale.growth for batch in scale.lanes]
        remote = RemoteDesk(home_comm, self.tokenizer, lanes, portion_of(self.options, scale), scale.live)
        run_remote(self._make_s_rank(scale, remote), remote, checkpoint_seconds)
        return True

    def _run_member(self) -> None:
        """Run the lanes of an S-rank that is not its group's home."""
        kind, links = PrefillMember if self.team.me.only_prefills else Member, cast("Sequence[SLink]", self._work.links)
        self._work.member = kind(self.model, links, self._work.groups, self._open_prompts(), self.timeline)
        self._work.member.run()

    def _run_r(self, lanes: Sequence[Lane]) -> None:
        """Serve all lanes."""
        from hpcdecode.engine.r_rank import programs_of, tell_swapped

        me, attention, links = self.team.me, self._work.attention, cast("Sequence[MpiRLink]", self._work.links)
        assert attention is not None, "expected an R-rank"
        orders, route = [PlanOrder() for _ in self.team.groups], Rotation(me.turns, len(self.setup.shapes_of(me)))
        ends = [links[i : i + me.copies] for i in range(0, len(links), me.copies)]
        programs: list[Program] = []
        for i, ((group, number, *_), own) in enumerate(zip(lanes, ends, strict=True)):
            prefill = prefill_copy(me, number) if me.prefill else None
            programs += programs_of(i, own, attention, orders[group], partial(route.copy, number), prefill)
        self._serve_r(programs, partial(tell_swapped, [own[0] for own in ends], attention) if attention.swap else None)

    def _serve_r(self, programs: Sequence[Program], between: Callable[[], None] | None) -> None:
        serve(programs, self.timeline, between)

    def _make_s_rank(self, scale: Scale, desk: Desk | RemoteDesk) -> SRank:
        options, stops, prompts = self.options, self.stops, self._open_prompts()
        room = prefix_bytes(options, self.team, self.setup) // len(scale.lanes)
        shared = prompts.attention.tokens_in(room) if options.prefix_sharing else 0
        schedulers = schedulers_of(options, self.team, self.setup, scale, shared, desk, stops, self._drafting)
        links = cast("Sequence[SLink]", self._work.links)
        grammars, told = self.tokenizer.grammars, desk.sampled if scale.live else None
        apart = prefill_lanes(self.team.me, self._work.groups, self.model.device)
        self._work.s_rank = SRank(
            *(self.model, links, schedulers, desk, stops, prompts, self.timeline, grammars),
            *(() if apart else self._work.groups, told, options.max_gap, apart),
        )
        return self._work.s_rank

    def _open_prompts(self) -> PromptKvCache:
        """Return what attends from prompts, on the threads of this rank's KV cache if it has one."""
        beside = self._attention.kv_cache if self._attention else None
        return open_prompts(self.team, self.setup, self.model, beside)

    def _open_attention(self, lanes: Sequence[Lane]) -> AttentionWorker:
        """Return the attention worker, kept from run to run unless it has too few slots for the lanes."""
        slots = slots_of(lanes)
        if self._attention is None or slots > self._slots:
            self._attention, self._work = None, Work()  # its memory goes first
            on_device = direct(self.options, self.team)
            self._attention = open_attention_worker(
                self.team, self.setup, self.options, slots, on_device, self.timeline
            )
            self._slots = slots
        return self._attention
