"""The generation job: from a communicator and a job to a results file. Everything `hpcdecode generate` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence as Seq
from contextlib import suppress
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import msgspec
import torch

from hpcdecode import launch
from hpcdecode.attention import PromptAttention, open_store
from hpcdecode.data.prompts import read_rows
from hpcdecode.data.results import ResultsWriter
from hpcdecode.data.resume import Earlier
from hpcdecode.data.tokens import Tokenizer, tokenized
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.wait import Backoff
from hpcdecode.job import Job
from hpcdecode.launch import Team
from hpcdecode.model import SplitModel
from hpcdecode.report import text
from hpcdecode.report.figures import Metrics, summarize, versions
from hpcdecode.report.progress import Progress
from hpcdecode.report.stages import Stages
from hpcdecode.schedule.auto import LOOKAHEAD
from hpcdecode.schedule.injector import Injector
from hpcdecode.schedule.microbatch import Limits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.stops import Stops
from hpcdecode.setup import Begin, Scale, Setup, choose_scale, load, measure_room, survey
from hpcdecode.signals import Signals
from hpcdecode.workers.desk import Desk
from hpcdecode.workers.r_part import RPart
from hpcdecode.workers.s_rank import SRank

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.workers.remote import RemoteDesk

ROW_ERRORS = 3  # exit code of a job that is done, with rows that could not be used
_PREFIX_BYTES = 1 << 30  # of an S-rank, for K and V of what prompts share
_NO_CONTEXT_LIMIT = 1 << 40


def generate(job: Job, comm: MPI.Intracomm | None = None, *, model: SplitModel | None = None) -> int:
    """Run `job` over the ranks of `comm` (None: this process alone plays both roles); returns the exit code.

    model: a model loaded before, used in place of loading `job.model`. Raises UserError where the job cannot run.
    """
    stages = Stages()
    team = launch.assemble(comm, job.s_ranks)
    begin = survey(job, team)
    earlier = begin.earlier if begin else None
    if team.broadcast(earlier is not None and earlier.complete, bool):
        return team.broadcast(_say_complete(job, earlier) if earlier else 0, int)
    if team.me.pinned:
        os.sched_setaffinity(0, team.me.cpus)
    torch.set_num_threads(team.me.threads)
    stages.done("imports")
    setup, model, tokenizer = load(job, team, model)
    stages.done("model")
    measure_room(job, team, setup)
    with Signals() as signals:
        desk = _open_desk(job, team, setup, model, tokenizer, begin) if begin else None
        scale = choose_scale(job, team, *desk.feed.preview(LOOKAHEAD)) if desk else None
        run = _Run(job, team, setup, team.broadcast(scale, Scale), model, tokenizer, signals)
        if desk:
            stages.done("rows")
            run.announce(stages)
        start = perf_counter()
        try:
            metrics = run.work(desk)
        except BaseException:
            if desk:
                with suppress(Exception):
                    desk.writer.checkpoint()
            raise
        return run.finish(desk, metrics, stages.seconds, perf_counter() - start)


def _say_complete(job: Job, earlier: Earlier) -> int:
    print(f"{job.output}: complete already, {earlier.rows:,} rows, {earlier.errors:,} errors", file=sys.stderr)
    return ROW_ERRORS if earlier.errors else 0


def _open_desk(job: Job, team: Team, setup: Setup, model: SplitModel, tokenizer: Tokenizer, begin: Begin) -> Desk:
    about_model = {
        "path": os.path.abspath(job.model),
        "architectures": model.config.architectures,
        "layers": len(setup.shapes),
        "dtype": setup.dtype,
        "kv_dtype": setup.kv_dtype,
    }
    attributes = {
        "job": msgspec.to_builtins(job),
        "identity": begin.identity,
        "model": about_model,
        "versions": versions(),
        "topology": msgspec.to_builtins(team.ranks),
    }
    earlier = begin.earlier
    writer = ResultsWriter(job.output, attributes=attributes, earlier=earlier, checkpoint_seconds=job.checkpoint_every)
    done = earlier.done if earlier else None
    rows = read_rows(begin.files, job.params, column=job.prompt_column, limit=job.limit, done=done)
    prompts = tokenized(rows, tokenizer, setup.max_positions or _NO_CONTEXT_LIMIT)
    return Desk(earlier.continued(prompts) if earlier else prompts, writer, tokenizer, job.max_errors)


class _Run:
    """One rank's part in the work."""

    def __init__(
        self,
        job: Job,
        team: Team,
        setup: Setup,
        scale: Scale,
        model: SplitModel | None,
        tokenizer: Tokenizer | None,
        signals: Signals,
    ):
        self.job, self.team, self.setup, self.scale = job, team, setup, scale
        self.model, self.tokenizer, self.signals = model, tokenizer, signals
        self.part: RPart | None = None

    def announce(self, stages: Stages) -> None:
        """Print the topology, what `auto` became, and what the start took."""
        setup, scale = self.setup, self.scale
        lanes = "+".join(str(len(batches)) for batches in scale.lane_batches)
        print(text.topology(self.team.ranks), file=sys.stderr)
        print(
            f"{self.job.model}: {len(setup.shapes)} layers, {setup.dtype}, KV {setup.kv_dtype}; batch {scale.batch}, "
            f"period {scale.period} of {scale.steps} steps, lanes {lanes}",
            file=sys.stderr,
        )
        print(stages.text(), file=sys.stderr, flush=True)

    def work(self, desk: Desk | None) -> Metrics:
        """Play this rank's role until the job ends."""
        part = self.part = self._open_part() if self.team.me.has_r else None
        if self.team.comm is not None:
            return Metrics.of(self._work_over_mpi(desk, part), part)
        links = [LocalLink(part, self.scale.slots * lane) for lane in range(self.scale.lanes)]
        return Metrics.of(self._run_lead(desk, links), part)

    def finish(self, desk: Desk | None, metrics: Metrics, startup: float, seconds: float) -> int:
        """Gather what the ranks counted; the lead completes the results and prints the summary."""
        every = self.team.gather_all(metrics, Metrics)
        code = self.signals.exit_code
        if desk is not None:
            desk.feed.close()
            figures = summarize(desk, every, startup, seconds)
            desk.writer.close(complete=code == 0, summary=figures)
            print(text.summary(figures), file=sys.stderr)
            if code:
                print(
                    f"hpcdecode: stopped by a signal; finished rows are in {self.job.output}; the same command goes on",
                    file=sys.stderr,
                )
            elif desk.writer.error_count:
                code = ROW_ERRORS
        return self.team.broadcast(code, int)

    def _work_over_mpi(self, desk: Desk | None, part: RPart | None) -> SRank | None:
        from hpcdecode.exchange.mpi import MpiRLink, MpiSLink, lane_communicators, subset
        from hpcdecode.workers.r_rank import Turns, lane_program, serve

        team, shapes, slots = self.team, self.setup.shapes, self.scale.slots
        dtype = getattr(torch, self.setup.dtype)
        comms = lane_communicators(team.comm, team.s_ranks, team.r_ranks, list(map(len, self.scale.lane_batches)))
        if part is not None:
            turns = [Turns() for _ in team.s_ranks]
            links = [MpiRLink(comm, shapes, slots, slots * i, dtype) for i, (_, comm) in enumerate(comms)]
            programs = [lane_program(link, part, turns[s]) for link, (s, _) in zip(links, comms, strict=True)]
            serve(programs, self.signals.check)
            worker = None
        else:
            links = [MpiSLink(comm, shapes, slots, dtype) for _, comm in comms]
            s_comm = subset(team.comm, team.s_ranks) if len(team.s_ranks) > 1 else None
            worker = self._run_lead(desk, links, s_comm) if desk else self._run_remote(links, s_comm)
        for link in links:
            link.close()
        return worker

    def _run_lead(self, desk: Desk, links: Seq[SLink], s_comm: MPI.Intracomm | None = None) -> SRank:
        worker, progress, clients = self._s_rank(links, desk), Progress(), None
        if s_comm is not None:
            from hpcdecode.workers.remote import Clients

            clients = Clients(desk, s_comm)
        desk.writer.unfinished = lambda: worker.unfinished() + (clients.unfinished() if clients else [])

        def duties() -> None:
            worker.stopping = self.signals.received is not None
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
        return worker

    def _run_remote(self, links: Seq[SLink], s_comm: MPI.Intracomm) -> SRank:
        from hpcdecode.workers.remote import RemoteDesk

        desk = RemoteDesk(s_comm, self.tokenizer)
        worker = self._s_rank(links, desk)
        checkpoint_due = monotonic() + self.job.checkpoint_every

        def duties() -> None:
            nonlocal checkpoint_due
            self.signals.check()
            worker.stopping = worker.stopping or desk.told_to_stop()
            if monotonic() >= checkpoint_due:
                desk.checkpoint(worker.unfinished())
                checkpoint_due = monotonic() + self.job.checkpoint_every

        worker.run(duties)
        desk.close(worker.unfinished())
        return worker

    def _s_rank(self, links: Seq[SLink], desk: Desk | RemoteDesk) -> SRank:
        team, setup, scale = self.team, self.setup, self.scale
        batches = scale.lane_batches[team.s_ranks.index(team.me.rank)]
        capacity = [r.kv_tokens // len(team.s_ranks) for r in team.ranks if r.has_r]
        placement = Placement(capacity, setup.block_tokens, len(batches))
        prompts = self._prompt_attention()
        shared = prompts.tokens_in(_PREFIX_BYTES // len(batches)) if self.job.prefix_sharing else 0
        sizes = (scale.period, scale.steps, self.job.prefill_tokens, setup.max_positions, shared)
        limits = [Limits(batch, *sizes) for batch in batches]
        stops = Stops(setup.eos, self.tokenizer.decode)
        injectors = [Injector(lane, desk, placement, limit, stops) for lane, limit in enumerate(limits)]
        return SRank(self.model, setup.shapes, links, injectors, desk, stops, prompts)

    def _prompt_attention(self) -> PromptAttention:
        me, setup = self.team.me, self.setup
        return PromptAttention(
            setup.shapes,
            dtype=setup.dtype,
            threads=me.threads,
            cpus=me.cpus if me.pinned else None,
            beside=self.part.store if self.part else None,
        )

    def _open_part(self) -> RPart:
        me, setup = self.team.me, self.setup
        store = open_store(
            setup.shapes,
            kv_dtype=setup.kv_dtype,
            capacity_tokens=me.kv_tokens,
            max_sequences=self.scale.slots * self.scale.lanes,
            block_tokens=setup.block_tokens,
            threads=me.threads,
            cpus=me.cpus if me.pinned else None,
        )
        return RPart(store, [None if s is None else torch.tensor(s) for s in setup.sinks])
