"""The engine: a model loaded over the ranks of a team, and the lanes that take rows from a desk and bring them back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import torch

from hpcdecode.attention.base import KvCache, LayerShape
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import PromptAttention
from hpcdecode.attention.prefill_torch import TorchPrompts
from hpcdecode.config import EngineOptions
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.counters import metrics_of
from hpcdecode.engine.desk import Desk, RankReport
from hpcdecode.engine.prefill import StoredPrompts
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
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.staging import CudaQueue, staged
from hpcdecode.model import SplitModel
from hpcdecode.mpi.wait import Backoff
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
    from hpcdecode.exchange.mpi import MpiRLink

_PREFIX_BYTES = 1 << 30  # of an S-rank, for K and V of what prompts share
_NO_CONTEXT_LIMIT = 1 << 40


class Engine:
    """One rank's part in a loaded model and its KV caches. Every method is called by all ranks of `team`.

    model: one loaded before, in place of `options.model`. setup, model, tokenizer: what was loaded; the last two are
    None on R-ranks. timeline: of this rank. Raises UserError, on every rank, where the model cannot be run.
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
        self.setup, self.model, self.tokenizer = load(options, team, model)
        measure_room(options, team, self.setup)
        measure_speeds(team)
        self._part: AttentionWorker | None = None
        self._slots = 0  # that the part has
        self._worker: SRank | None = None
        self._links: Sequence[SLink | MpiRLink] = []
        self._abandoned: list[Sequence[SLink | MpiRLink]] = []
        self.comms: list[MPI.Intracomm] = []  # of the work under way
        self.lost: list[Rank] = []

    @property
    def max_positions(self) -> int:
        """The context, tokens; a large number where the model has no limit."""
        return self.setup.max_positions or _NO_CONTEXT_LIMIT

    @property
    def partition(self) -> Partition:
        return partition_of(self.options, self.team)

    @property
    def r_shapes(self) -> list[LayerShape]:
        """What an R-rank has of every layer."""
        return list(map(self.partition.shape, self.setup.shapes))

    @property
    def stops(self) -> Stops:
        """What ends a sequence; on S-ranks."""
        return Stops(self.setup.eos, self.tokenizer.decode)

    def limits(self, batch: int, scale: Scale, prefix_tokens: int = 0) -> LaneLimits:
        """Of a lane whose share of B is `batch`."""
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
        """What an S-rank may use of the R-ranks' KV caches."""
        r_ranks = [r for r in self.team.ranks if r.has_r]
        capacity = self.partition.capacity([r.kv_tokens // len(self.team.s_ranks) for r in r_ranks])
        speeds = self.partition.speeds([r.speed for r in r_ranks])
        return Placement(capacity, self.setup.block_tokens, lanes, speeds)

    def scale(self, desk: Desk | None) -> Scale:
        """B, F and lanes for the rows of the lead's desk."""
        scale = choose_scale(self.options, self.team, self.setup, *desk.feed.preview(LOOKAHEAD)) if desk else None
        return self.team.broadcast(scale, Scale)

    def work(
        self, desk: Desk | None, scale: Scale, signals: Signals, progress: Progress, checkpoint_seconds: float
    ) -> Metrics:
        """Play this rank's role until all rows of the lead's desk are done, or the lead's `signals` say to stop."""
        try:
            if self.team.comm is not None:
                run = partial(self._work_over_mpi, desk, signals, progress, checkpoint_seconds)
                if not self.options.survive:
                    return run(scale)
                return work_on(self, desk, scale, run)
            part = self._opened_part(scale)
            links = [LocalLink(part, lane, scale.slots * lane) for lane in range(scale.lanes)]
            self._run_lead(desk, scale, links, signals, progress)
            part.check()
            return self.metrics()
        except BaseException:
            self._part = None  # sequences are left in it
            raise

    def _work_over_mpi(
        self, desk: Desk | None, signals: Signals, progress: Progress, checkpoint_seconds: float, scale: Scale
    ) -> Metrics:
        from hpcdecode.engine.r_rank import Turns, lane_program, serve
        from hpcdecode.exchange.mpi import MpiRLink, MpiSLink, lane_communicators, subset
        from hpcdecode.exchange.wire import HOST, shared_sizes

        team, shapes, slots = self.team, self.setup.shapes, scale.slots
        dtype = getattr(torch, self.setup.dtype)
        partition, own = self.partition, self.r_shapes
        sizes = (0, 0) if self._direct else shared_sizes(own, slots, scale.prefill_tokens, dtype)
        wire = (shapes, slots, dtype, sizes, partition, self.options.overlap)
        comms = lane_communicators(team.comm, team.s_ranks, team.r_ranks, list(map(len, scale.lane_batches)))
        self.comms += [comm for _, comm in comms]
        if team.me.has_r:
            part = self._opened_part(scale)
            turns = [Turns() for _ in team.s_ranks]
            place = torch.device(team.me.kv_device if self._direct else "cpu")
            links = [MpiRLink(comm, *wire, slots * i, place) for i, (_, comm) in enumerate(comms)]
            self._links = links
            programs = [lane_program(i, links[i], part, turns[s]) for i, (s, _) in enumerate(comms)]
            serve(programs, self.timeline)
            part.check()
        else:
            self.timeline.enter("wait")
            links = [MpiSLink(comm, *wire, self.model.device if self._direct else HOST) for _, comm in comms]
            self._links = links
            s_comm = subset(team.comm, team.s_ranks) if len(team.s_ranks) > 1 else None
            self.comms += [s_comm] if s_comm else []
            if desk:
                self._run_lead(desk, scale, links, signals, progress, s_comm)
            else:
                self._run_remote(scale, links, checkpoint_seconds, s_comm)
        self.timeline.enter("wait")
        for link in links:
            link.close()
        self.comms.clear()
        return self.metrics()

    @property
    def _direct(self) -> bool:
        return direct(self.options, self.team)

    def metrics(self) -> Metrics:
        """What this rank counted in its last work."""
        return metrics_of(Account.of(self.team.me, self.timeline), self._worker, self._part)

    def report(self) -> RankReport:
        """What this rank knows of the rows that it works on."""
        worker = self._worker
        return worker.sink.last_report(worker.unfinished()) if worker else RankReport(-1, [], [], [])

    def give_up(self) -> None:
        """Drop lanes, KV cache and sequences. Messages that are under way may still be written to the lanes' memory."""
        self._abandoned.append(self._links)
        self._links, self._part, self._worker = [], None, None
        self.comms.clear()

    def _run_lead(
        self,
        desk: Desk,
        scale: Scale,
        links: Sequence[SLink],
        signals: Signals,
        progress: Progress,
        s_comm: MPI.Intracomm | None = None,
    ) -> None:
        worker, clients = self._make_worker(scale, links, desk), None
        if s_comm is not None:
            from hpcdecode.engine.remote import Clients

            clients = Clients(desk, s_comm)
        desk.writer.unfinished = lambda: [
            *desk.unfinished(),
            *worker.unfinished(),
            *(clients.unfinished() if clients else ()),
        ]
        progress.restart()

        def duties() -> None:
            worker.stopping = signals.stopping
            if clients:
                clients.serve(stop=worker.stopping)
            desk.writer.tick()
            if progress.due():
                tokens = worker.tokens + (clients.tokens if clients else 0)
                progress.update(desk.rows, tokens, worker.tokens_in_flight)

        worker.run(duties)
        backoff = Backoff()
        while clients and clients.open:
            duties()
            backoff.pause()
        progress.close(desk.rows)

    def _run_remote(
        self, scale: Scale, links: Sequence[SLink], checkpoint_seconds: float, s_comm: MPI.Intracomm
    ) -> None:
        from hpcdecode.engine.remote import RemoteDesk

        desk = RemoteDesk(s_comm, self.tokenizer)
        worker = self._make_worker(scale, links, desk)
        checkpoint_due = monotonic() + checkpoint_seconds

        def duties() -> None:
            nonlocal checkpoint_due
            worker.stopping = worker.stopping or desk.told_to_stop()
            if monotonic() >= checkpoint_due:
                desk.checkpoint(worker.unfinished())
                checkpoint_due = monotonic() + checkpoint_seconds

        worker.run(duties)
        desk.close(worker.unfinished())

    def _make_worker(self, scale: Scale, links: Sequence[SLink], desk: Desk | RemoteDesk) -> SRank:
        team, setup = self.team, self.setup
        batches = scale.lane_batches[team.s_ranks.index(team.place)]
        placement = self.placement(len(batches))
        prompts, grammars, stops = self._prompt_attention(), self.tokenizer.grammars, self.stops
        shared = prompts.tokens_in(_PREFIX_BYTES // len(batches)) if self.options.prefix_sharing else 0
        limits = [self.limits(batch, scale, shared) for batch in batches]
        if apart(self.team):
            links = staged(links, self.model.device, self._direct)
        schedulers = [Scheduler(lane, desk, placement, limit, stops) for lane, limit in enumerate(limits)]
        rest = desk, stops, prompts, self.timeline, grammars
        self._worker = SRank(self.model, setup.shapes, links, schedulers, *rest)
        return self._worker

    def _prompt_attention(self) -> PromptAttention | TorchPrompts | StoredPrompts:
        prompts, setup = self._exact_prompt_attention(), self.setup
        return prompts if setup.kv_dtype == setup.dtype else StoredPrompts(prompts, setup.shapes, setup.kv_dtype)

    def _exact_prompt_attention(self) -> PromptAttention | TorchPrompts:
        me, setup = self.team.me, self.setup
        if self.model.device.type != "cpu":
            return TorchPrompts(setup.shapes, self.model.dtype, self.model.device)
        return PromptAttention(
            setup.shapes,
            dtype=setup.dtype,
            threads=me.threads,
            cpus=me.cpus if me.pinned else None,
            beside=self._part.store if self._part else None,
        )

    def _opened_part(self, scale: Scale) -> AttentionWorker:
        """The R-part, kept from work to work unless it has too few slots."""
        slots = scale.slots * scale.lanes
        if self._part is None or slots > self._slots:
            self._part = None  # its memory goes first
            self._part, self._slots = self._open_part(slots), slots
        return self._part

    def _open_part(self, slots: int) -> AttentionWorker:
        me, setup = self.team.me, self.setup
        store = (
            self._store_on_device(slots)
            if me.kv_device != "cpu"
            else open_kv_cache(
                self.r_shapes,
                kv_dtype=setup.kv_dtype,
                capacity_tokens=me.kv_tokens,
                max_sequences=slots,
                block_tokens=setup.block_tokens,
                threads=me.threads,
                cpus=me.cpus if me.pinned else None,
                team=self.model is not None,
            )
        )
        rank = self.team.r_ranks.index(self.team.place)
        heads = [self.partition.heads(shape, rank) for shape in setup.shapes]
        sinks = [None if s is None else torch.tensor(s[own]) for s, own in zip(setup.sinks, heads, strict=True)]
        queue = CudaQueue(torch.device(me.kv_device)) if me.kv_device != "cpu" and apart(self.team) else None
        return AttentionWorker(store, sinks, self.timeline, queue)

    def _store_on_device(self, slots: int) -> KvCache:
        from hpcdecode.attention.cuda import CudaKvCache, HostKvCache

        me, setup = self.team.me, self.setup
        kind = HostKvCache if apart(self.team) and not self._direct else CudaKvCache
        return kind(self.r_shapes, setup.kv_dtype, me.kv_tokens, slots, setup.block_tokens, me.kv_device)
