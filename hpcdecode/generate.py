"""The generation job: from a world and a job to a results file. Everything `hpcdecode generate` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import torch

from hpcdecode import launch
from hpcdecode.attention import LayerShape, block_tokens_for, bytes_per_token, capacity_for, isa, open_store
from hpcdecode.data.feed import RowFeed
from hpcdecode.data.prompts import read_rows
from hpcdecode.data.results import ResultsWriter, require_free
from hpcdecode.data.tokens import Tokenizer, tokenized
from hpcdecode.errors import UserError
from hpcdecode.exchange.base import SLink
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.wait import Backoff
from hpcdecode.job import Job
from hpcdecode.launch import Rank
from hpcdecode.memory import available_bytes
from hpcdecode.model import AttendSpec, SplitModel, load_split
from hpcdecode.model.config import read_config
from hpcdecode.report import text
from hpcdecode.report.figures import Metrics, summarize, versions
from hpcdecode.report.progress import Progress
from hpcdecode.schedule.auto import LOOKAHEAD, choose
from hpcdecode.schedule.injector import Injector, Limits
from hpcdecode.schedule.placement import Placement
from hpcdecode.setup import Scale, Setup
from hpcdecode.signals import Signals
from hpcdecode.workers.desk import Desk
from hpcdecode.workers.r_part import RPart
from hpcdecode.workers.s_rank import SRank

if TYPE_CHECKING:
    from hpcdecode.workers.remote import RemoteDesk

_MEMORY_SHARE = 0.7  # of what is available, for the KV caches of a host
_NO_CONTEXT_LIMIT = 1 << 40


def generate(job: Job, comm=None, *, model: SplitModel | None = None) -> int:
    """Run `job` over the ranks of `comm` (None: this process alone plays both roles); returns the exit code.

    model: a model loaded before, in place of `job.model`'s weights. Raises UserError where the job cannot run.
    """
    ranks = launch.describe_ranks(comm, job.s_ranks)
    run = _Run(job, comm, ranks)
    with Signals() as signals:
        return run.run(signals, model)


class _Run:
    """One rank's part in a job, stage by stage; every stage is collective over `comm`."""

    def __init__(self, job: Job, comm, ranks: list[Rank]):
        self.job, self.comm, self.ranks = job, comm, ranks
        self.me = ranks[comm.rank if comm else 0]
        self.lead = self.me.rank == 0
        self.s_ranks = [r.rank for r in ranks if r.has_s]
        self.r_ranks = [r.rank for r in ranks if r.has_r]

    def run(self, signals: Signals, model: SplitModel | None) -> int:
        self.signals = signals
        self._use_cores()
        self._load(model)
        self._measure_capacity()
        desk = self._open_desk() if self.lead else None
        self._resolve_scale(desk)
        if self.lead:
            print(text.topology(self.ranks), file=sys.stderr)
            print(self._describe_scale(), file=sys.stderr, flush=True)
        start = perf_counter()
        metrics = self._work(desk)
        return self._finish(desk, metrics, perf_counter() - start)

    def _use_cores(self) -> None:
        if self.me.pinned:
            os.sched_setaffinity(0, self.me.cpus)
        torch.set_num_threads(self.me.threads)

    def _load(self, model: SplitModel | None) -> None:
        """Load the model on the S-ranks and check the lead's files; any rank's UserError is raised on every rank."""
        setup, eos, problem = None, [], ""
        try:
            if self.lead:
                _require_prompts(self.job.prompts)
                require_free(self.job.output, overwrite=self.job.overwrite)
                self.tokenizer = Tokenizer.load(self.job.model)
                eos = sorted(self.tokenizer.eos_token_ids)
            if self.me.has_s:
                self.model = model or load_split(self.job.model, dtype=self.job.dtype or _auto_dtype(self.job.model))
                setup = self._setup()
        except UserError as error:
            problem = str(error)
        problems = launch.gather_all(self.comm, problem, str)
        if any(problems):
            raise UserError(next(p for p in problems if p), everywhere=True)
        self.setup: Setup = launch.broadcast(self.comm, setup, Setup)
        self.eos = frozenset(launch.broadcast(self.comm, eos, list[int]))

    def _setup(self) -> Setup:
        model = self.model
        dtype = str(model.dtype).removeprefix("torch.")
        sinks = [model.sinks(i) for i in range(len(model.attends))]
        return Setup(
            shapes=[_layer_shape(spec) for spec in model.attends],
            sinks=[None if s is None else s.tolist() for s in sinks],
            dtype=dtype,
            kv_dtype=self.job.kv_dtype or dtype,
            max_positions=model.max_positions,
            weight_bytes=sum(f.stat().st_size for f in Path(self.job.model).glob("*.safetensors")),
        )

    def _measure_capacity(self) -> None:
        """KV tokens of this rank; then everybody knows everybody's."""
        if self.me.has_r:
            self.me.isa = isa()
            self.me.kv_tokens = capacity_for(self.setup.shapes, self.setup.kv_dtype, self._kv_bytes())
        self.ranks = launch.gather_all(self.comm, self.me, Rank)
        for rank in self.ranks:
            if rank.has_r and rank.kv_tokens < 1:
                per_token = bytes_per_token(self.setup.shapes, self.setup.kv_dtype)
                raise UserError(
                    f"rank {rank.rank} on {rank.host} has no room for a KV cache: this model needs "
                    f"{per_token:,.0f} bytes a token; raise --kv-memory, or give the rank more memory",
                    everywhere=True,
                )

    def _kv_bytes(self) -> int:
        if self.job.kv_memory is not None:
            return self.job.kv_memory
        here = [r for r in self.ranks if r.host == self.me.host]
        weights = self.setup.weight_bytes * sum(r.has_s for r in here)
        return int(max(available_bytes() - weights, 0) * _MEMORY_SHARE / sum(r.has_r for r in here))

    def _open_desk(self) -> Desk:
        attributes = {
            "job": msgspec.to_builtins(self.job),
            "model": {
                "path": os.path.abspath(self.job.model),
                "architectures": self.model.config.architectures,
                "layers": len(self.setup.shapes),
                "dtype": self.setup.dtype,
                "kv_dtype": self.setup.kv_dtype,
            },
            "versions": versions(),
            "topology": msgspec.to_builtins(self.ranks),
        }
        writer = ResultsWriter(self.job.output, overwrite=self.job.overwrite, attributes=attributes)
        rows = read_rows(self.job.prompts, self.job.params)
        feed = RowFeed(tokenized(rows, self.tokenizer, self.setup.max_positions or _NO_CONTEXT_LIMIT), writer)
        return Desk(feed, writer, self.tokenizer)

    def _resolve_scale(self, desk: Desk | None) -> None:
        scale = None
        if desk is not None:
            first, all_rows = desk.feed.preview(LOOKAHEAD)
            capacity = sum(r.kv_tokens for r in self.ranks)
            batch, period, steps = choose(
                self.job.batch, self.job.period, first, all_rows, self.job.params.max_tokens, capacity
            )
            batch = max(batch, len(self.s_ranks))
            shares = _split(batch, len(self.s_ranks))
            lanes = [_split(share, min(self.job.lanes, share)) for share in shares]
            scale = Scale(batch, period, steps, lanes)
        self.scale: Scale = launch.broadcast(self.comm, scale, Scale)

    def _describe_scale(self) -> str:
        scale, setup = self.scale, self.setup
        lanes = "+".join(str(len(lanes)) for lanes in scale.lane_batches)
        return (
            f"{self.job.model}: {len(setup.shapes)} layers, {setup.dtype}, KV {setup.kv_dtype}; batch {scale.batch}, "
            f"period {scale.period} of {scale.steps} steps, lanes {lanes}"
        )

    def _work(self, desk: Desk | None) -> Metrics:
        """Play this rank's role until the job ends."""
        part = self._open_part() if self.me.has_r else None
        if self.comm is None:
            slots = self.scale.slots
            links = [LocalLink(part, slots * lane) for lane in range(len(self.scale.lane_batches[0]))]
            worker = self._run_lead(desk, links)
        else:
            worker = self._work_over_mpi(desk, part)
        return Metrics.of(worker, part)

    def _work_over_mpi(self, desk: Desk | None, part: RPart | None) -> SRank | None:
        from hpcdecode.exchange.mpi import MpiRLink, MpiSLink, lane_communicators, subset
        from hpcdecode.workers.r_rank import Turns, lane_program, serve

        shapes, slots, dtype = self.setup.shapes, self.scale.slots, getattr(torch, self.setup.dtype)
        comms = lane_communicators(self.comm, self.s_ranks, self.r_ranks, [len(b) for b in self.scale.lane_batches])
        if part is not None:
            turns = [Turns() for _ in self.s_ranks]
            serve(
                [
                    lane_program(MpiRLink(comm, shapes, slots, slots * number, dtype), part, turns[s])
                    for number, (s, comm) in enumerate(comms)
                ],
                self.signals.check,
            )
            return None
        links = [MpiSLink(comm, shapes, slots, dtype) for _, comm in comms]
        s_comm = subset(self.comm, self.s_ranks) if len(self.s_ranks) > 1 else None
        worker = self._run_lead(desk, links, s_comm) if desk else self._run_remote(links, s_comm)
        for link in links:
            link.close()
        return worker

    def _run_lead(self, desk: Desk, links: Seq[SLink], s_comm=None) -> SRank:
        worker = self._s_rank(links, desk)
        progress = Progress()
        clients = None
        if s_comm is not None:
            from hpcdecode.workers.remote import Clients

            clients = Clients(desk, s_comm)

        def duties() -> None:
            if self.signals.received is not None:
                worker.stopping = True
            if clients:
                if worker.stopping:
                    clients.stop()
                clients.serve()
            desk.writer.tick()
            progress.update(desk.rows, desk.generated_tokens, worker.tokens_in_flight)

        worker.run(duties)
        backoff = Backoff()
        while clients and clients.open:
            duties()
            backoff.pause()
        progress.close()
        return worker

    def _run_remote(self, links: Seq[SLink], s_comm) -> SRank:
        from hpcdecode.workers.remote import RemoteDesk

        desk = RemoteDesk(s_comm)
        worker = self._s_rank(links, desk)

        def duties() -> None:
            self.signals.check()
            if desk.told_to_stop():
                worker.stopping = True

        worker.run(duties)
        desk.close()
        return worker

    def _s_rank(self, links: Seq[SLink], desk: Desk | RemoteDesk) -> SRank:
        scale = self.scale
        batches = scale.lane_batches[self.s_ranks.index(self.me.rank)]
        share = len(self.s_ranks)
        capacity = [r.kv_tokens // share for r in self.ranks if r.has_r]
        placement = Placement(capacity, block_tokens_for(self.setup.shapes, self.setup.kv_dtype), len(batches))
        injectors = [
            Injector(
                lane,
                desk,
                placement,
                Limits(batch, scale.period, scale.steps, self.job.prefill_tokens, self.setup.max_positions),
            )
            for lane, batch in enumerate(batches)
        ]
        return SRank(self.model, self.setup.shapes, links, injectors, desk, self.eos)

    def _open_part(self) -> RPart:
        setup, lanes = self.setup, sum(len(lanes) for lanes in self.scale.lane_batches)
        store = open_store(
            setup.shapes,
            kv_dtype=setup.kv_dtype,
            capacity_tokens=self.me.kv_tokens,
            max_sequences=self.scale.slots * lanes,
            threads=self.me.threads,
            cpus=self.me.cpus if self.me.pinned else None,
        )
        return RPart(store, [None if s is None else torch.tensor(s) for s in setup.sinks])

    def _finish(self, desk: Desk | None, metrics: Metrics, seconds: float) -> int:
        """Gather what the ranks counted; the lead completes the results and prints the summary."""
        every = launch.gather_all(self.comm, metrics, Metrics)
        code = 0
        if desk is not None:
            code = self.signals.exit_code
            desk.feed.close()
            figures = summarize(desk, every, seconds)
            desk.writer.close(complete=code == 0, summary=figures)
            print(text.summary(figures), file=sys.stderr)
            if code:
                print(f"hpcdecode: stopped by a signal; finished rows are in {self.job.output}", file=sys.stderr)
        return launch.broadcast(self.comm, code, int)


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def _require_prompts(path: str) -> None:
    if not os.path.isfile(path):
        what = "is a directory" if os.path.isdir(path) else "does not exist"
        raise UserError(f"prompt file {path}: expected a JSON Lines file, but it {what}")


def _auto_dtype(model: str) -> str:
    """bfloat16 for a 16-bit checkpoint on a CPU that multiplies bfloat16, else float32."""
    narrow = read_config(model).dtype in (torch.bfloat16, torch.float16)
    return "bfloat16" if narrow and "bf16" in isa() else "float32"


def _layer_shape(spec: AttendSpec) -> LayerShape:
    return LayerShape(
        q_heads=spec.q_heads,
        kv_heads=spec.kv_heads,
        k_dim=spec.k_dim,
        v_dim=spec.v_dim,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks=spec.sinks is not None,
    )
