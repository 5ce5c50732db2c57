"""The engine: a model loaded over the ranks of a team, and the lanes that take rows from a desk and bring them back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.desk import Desk, RankReport
from hpcdecode.engine.duties import run_lead, run_remote
from hpcdecode.engine.kv import open_attention_worker, open_prompts
from hpcdecode.engine.s_rank import SRank
from hpcdecode.engine.setup import (
    Scale,
    apart,
    choose_scale,
    direct,
    limit_torch,
    load,
    measure_room,
    measure_speeds,
    partition_of,
)
from hpcdecode.engine.survive import work_on
from hpcdecode.engine.work import Work
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.staging import direct as direct_links
from hpcdecode.exchange.staging import staged as staged_links
from hpcdecode.model import SplitModel
from hpcdecode.ranks.launch import Team
from hpcdecode.ranks.roles import Rank
from hpcdecode.report.account import Account
from hpcdecode.report.metrics import Metrics
from hpcdecode.report.progress import Progress
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.auto import LOOKAHEAD
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.system.signals import Signals
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.engine.remote import RemoteDesk
    from hpcdecode.exchange.memory import LaneSpec
    from hpcdecode.exchange.mpi import MpiRLink

_PREFIX_BYTES = 1 << 30  # of an S-rank, for K and V of what prompts share
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
        lost: ranks that were lost while the job went on.
        comms: communicators of the run under way; one list for the engine's life.

    Raises:
        UserError: the model cannot be run; on every rank.
    """

    def __init__(
        self,
        options: EngineOptions,
        team: Team,
        model: SplitModel | None = None,
        timeline: Timeline | None = None,
    ):
        self.options, self.team, self.timeline = options, team, timeline or Timeline()
        torch.set_num_threads(team.me.threads)
        limit_torch(team.me.device, options.gpu_memory)
        self.setup, self._loaded = load(options, team, model)
        measure_room(options, team, self.setup)
        measure_speeds(team)
        self.lost: list[Rank] = []
        self.comms: list[MPI.Intracomm] = []
        self._attention: AttentionWorker | None = None  # kept from run to run
        self._slots = 0  # that it has
        self._work = Work()
        self._abandoned: list[Sequence[SLink | MpiRLink]] = []

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
    def partition(self) -> Partition:
        """Return how the attention is spread over the R-ranks."""
        return partition_of(self.options, self.team)

    @property
    def stops(self) -> Stops:
        """Return what ends a sequence; on S-ranks."""
        return Stops(self.setup.eos, self.tokenizer.decode)

    def limits(self, batch: int, scale: Scale, prefix_tokens: int = 0) -> LaneLimits:
        """Return the limits of a lane whose share of B is `batch`."""
        return LaneLimits(
            batch,
            scale.period,
            scale.steps,
            scale.prefill_tokens,
            self.setup.max_positions,
            prefix_tokens,
            self.options.schedule,
            scale.load * batch // scale.batch,
        )

    def placement(self, lanes: int) -> Placement:
        """Return what an S-rank may use of the R-ranks' KV caches."""
        r_ranks = [r for r in self.team.ranks if r.has_r]
        capacity = self.partition.capacity([r.kv_tokens // len(self.team.s_ranks) for r in r_ranks])
        speeds = self.partition.speeds([r.speed for r in r_ranks])
        return Placement(capacity, self.setup.block_tokens, lanes, speeds)

    def scale(self, desk: Desk | None) -> Scale:
        """Return B, F and lanes for the rows of the lead's desk, on every rank."""
        scale = choose_scale(self.options, self.team, self.setup, *desk.feed.preview(LOOKAHEAD)) if desk else None
        return self.team.broadcast(scale, Scale)

    def work(
        self, desk: Desk | None, scale: Scale, signals: Signals, progress: Progress, checkpoint_seconds: float
    ) -> Metrics:
        """Play this rank's role until all rows of the lead's desk are done, or the lead's `signals` say to stop.

        Args:
            desk: on the lead; None on others.
            scale: sizes of the work, alike on all ranks.
            signals: of the lead.
            progress: of the lead.
            checkpoint_seconds: after which S-ranks other than the lead hand in what is in flight.
        """
        try:
            if self.team.comm is not None:
                run = partial(self._run_over_mpi, desk, signals, progress, checkpoint_seconds)
                return work_on(self, desk, scale, run) if self.options.survive else run(scale)
            attention = self._open_attention(scale)
            assert desk is not None, "expected a desk on the lead"
            local = [LocalLink(attention, lane, scale.slots * lane) for lane in range(scale.lanes)]
            links = staged_links(local, self.model.device) if apart(self.team) else local
            self._work = Work(attention, links=links)
            run_lead(self._make_s_rank(scale, links, desk), desk, signals, progress)
            attention.check()
            return self.metrics()
        except BaseException:
            self._attention = None  # sequences are left in it
            raise

    def metrics(self) -> Metrics:
        """Return what this rank counted in its last work."""
        return self._work.metrics(Account.of(self.team.me, self.timeline))

    def report(self) -> RankReport:
        """Return what this rank knows of the requests that it works on."""
        return self._work.report()

    def give_up(self) -> None:
        """Drop lanes, KV cache and sequences; messages under way may still be written to the lanes' memory."""
        self._abandoned.append(self._work.links)
        self._work, self._attention = Work(), None
        self.comms.clear()

    def _run_over_mpi(
        self, desk: Desk | None, signals: Signals, progress: Progress, checkpoint_seconds: float, scale: Scale
    ) -> Metrics:
        from hpcdecode.exchange.mpi import lane_communicators, subset

        team, comm = self.team, self.team.comm
        assert comm is not None, "expected a world of ranks"
        comms = lane_communicators(comm, team.s_ranks, team.r_ranks, list(map(len, scale.lane_batches)))
        self.comms += [lane for _, lane in comms]
        attention = self._open_attention(scale) if team.me.has_r else None
        self._work = Work(attention)
        if attention is not None:
            self._run_r(attention, comms, scale)
        else:
            links = self._s_links([lane for _, lane in comms], scale)
            s_comm = subset(comm, team.s_ranks) if len(team.s_ranks) > 1 else None
            self.comms += [s_comm] if s_comm else []
            if desk is not None:
                run_lead(self._make_s_rank(scale, links, desk), desk, signals, progress, s_comm)
            else:
                assert s_comm is not None, "expected a desk on the only S-rank"
                self._run_remote(scale, links, s_comm, checkpoint_seconds)
        self.timeline.enter("wait")
        for link in self._work.links:
            link.close()
        self.comms.clear()
        return self.metrics()

    def _run_r(self, attention: AttentionWorker, comms: Sequence[tuple[int, MPI.Intracomm]], scale: Scale) -> None:
        """Serve all lanes; comms: index of the S-rank and communicator of each."""
        from hpcdecode.engine.r_rank import PlanOrder, lane_program, serve
        from hpcdecode.exchange.mpi import MpiRLink

        spec = self._lane_spec(scale, torch.device(self.team.me.kv_device if self._direct else "cpu"))
        links = [MpiRLink(comm, spec, scale.slots * lane) for lane, (_, comm) in enumerate(comms)]
        self._work.links = links
        orders = [PlanOrder() for _ in self.team.s_ranks]
        serve([lane_program(i, links[i], attention, orders[s]) for i, (s, _) in enumerate(comms)], self.timeline)
        attention.check()

    def _s_links(self, comms: Sequence[MPI.Intracomm], scale: Scale) -> Sequence[SLink]:
        """Return this S-rank's ends of its lanes."""
        from hpcdecode.exchange.memory import HOST
        from hpcdecode.exchange.mpi import MpiSLink

        self.timeline.enter("wait")
        spec = self._lane_spec(scale, self.model.device if self._direct else HOST)
        plain = [MpiSLink(comm, spec) for comm in comms]
        links = (direct_links if self._direct else staged_links)(plain, self.model.device)
        self._work.links = links
        return links

    def _run_remote(
        self, scale: Scale, links: Sequence[SLink], s_comm: MPI.Intracomm, checkpoint_seconds: float
    ) -> None:
        """Run the lanes of an S-rank that is not the lead."""
        from hpcdecode.engine.remote import RemoteDesk

        desk = RemoteDesk(s_comm, self.tokenizer)
        run_remote(self._make_s_rank(scale, links, desk), desk, checkpoint_seconds)

    def _lane_spec(self, scale: Scale, device: torch.device) -> LaneSpec:
        from hpcdecode.exchange.memory import LaneSpec, shared_bytes

        dtype, slots, partition = getattr(torch, self.setup.dtype), scale.slots, self.partition
        shapes = list(map(partition.shape, self.setup.shapes))
        shared = (0, 0) if self._direct else shared_bytes(shapes, slots, scale.prefill_tokens, dtype)
        return LaneSpec(self.setup.shapes, slots, dtype, partition, shared, self.options.overlap, device)

    @property
    def _direct(self) -> bool:
        return direct(self.options, self.team)

    def _make_s_rank(self, scale: Scale, links: Sequence[SLink], desk: Desk | RemoteDesk) -> SRank:
        team = self.team
        batches = scale.lane_batches[team.s_ranks.index(team.place)]
        placement, stops = self.placement(len(batches)), self.stops
        beside = self._attention.kv_cache if self._attention else None
        prompts = open_prompts(team, self.setup, self.model, beside)
        shared = prompts.attention.tokens_in(_PREFIX_BYTES // len(batches)) if self.options.prefix_sharing else 0
        limits = [self.limits(batch, scale, shared) for batch in batches]
        schedulers = [Scheduler(lane, desk, placement, limit, stops) for lane, limit in enumerate(limits)]
        self._work.s_rank = SRank(
            self.model, links, schedulers, desk, stops, prompts, self.timeline, self.tokenizer.grammars
        )
        return self._work.s_rank

    def _open_attention(self, scale: Scale) -> AttentionWorker:
        """Return the attention worker, kept from run to run unless it has too few slots."""
        slots = scale.slots * scale.lanes
        if self._attention is None or slots > self._slots:
            self._attention, self._work = None, Work()  # its memory goes first
            partition, direct = self.partition, self._direct
            self._attention = open_attention_worker(self.team, self.setup, partition, slots, direct, self.timeline)
            self._slots = slots
        return self._attention
