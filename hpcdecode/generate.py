"""The generation job: from a communicator and a job to a results file. Everything `hpcdecode generate` does."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.config import STDIN, Job
from hpcdecode.data.prompts.files import resolve
from hpcdecode.data.prompts.rows import read_rows
from hpcdecode.data.prompts.tokenizer import Tokenizer, tokenized
from hpcdecode.data.results.identity import identity
from hpcdecode.data.results.resume import Earlier, find_earlier
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.doctor import binding
from hpcdecode.engine.desk import Desk
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.setup import Scale, auto_dtype, together
from hpcdecode.errors import InvariantViolation, RowProblem, UserError
from hpcdecode.model import SplitModel
from hpcdecode.planning.auto import planned, profile_for
from hpcdecode.ranks import launch
from hpcdecode.ranks.launch import Team
from hpcdecode.ranks.watchdog import Watchdog
from hpcdecode.report import text
from hpcdecode.report.metrics import Metrics, check_emptied, summarize, versions
from hpcdecode.report.progress import Progress
from hpcdecode.report.stages import Stages
from hpcdecode.report.trace import check_path, clock_offset, write_trace
from hpcdecode.schedule.auto import LOOKAHEAD
from hpcdecode.system.signals import Signals
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

ROW_ERRORS = 3  # exit code of a job that is done, with rows that could not be used


def generate(
    job: Job,
    comm: MPI.Intracomm | None = None,
    *,
    model: SplitModel | None = None,
    signals: Signals | None = None,
) -> int:
    """Run `job` over the ranks of `comm` (None: this process alone plays both roles).

    Returns the exit code, which is 0 on all ranks but the lead.
    model: a model loaded before, used in place of loading `job.model`. signals: entered before. Raises UserError where
    the job cannot run.
    """
    timeline = Timeline(trace=job.trace is not None)
    if job.survive:
        _check_survive(comm)
    team = launch.assemble(comm, job.s_ranks, job.device, job.r_device)
    with nullcontext(signals) if signals else Signals() as held, Watchdog(team, timeline, job.stall_timeout):
        return _generate(job, team, timeline, held, model)


def _generate(job: Job, team: Team, timeline: Timeline, signals: Signals, model: SplitModel | None) -> int:
    stages = Stages()
    begin = _survey(job, team)
    earlier = begin.earlier if begin else None
    if team.broadcast(earlier is not None and earlier.complete, bool):
        return _say_complete(job, earlier) if earlier else 0
    problems = binding(team)
    if begin:
        print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr, flush=True)
    team.pin()
    stages.done("imports")
    offset = clock_offset(team) if job.trace else 0
    engine = Engine(job, team, model, timeline)
    together(team, lambda: _check_params(job, engine.tokenizer) if team.lead else None)
    stages.done("model")
    profile = together(team, lambda: profile_for(job.profile, engine) if team.lead and job.profile else None)
    signals.hold_interrupts()
    desk, wanted = _open_desk(job, engine, begin) if begin else (None, None)
    with _kept(desk):
        if desk and profile:
            engine.options = planned(profile, engine, *desk.feed.preview(LOOKAHEAD))
        scale = engine.scale(desk)
    if desk:
        stages.done("rows")
        _announce(engine, scale, stages, signals.drain_before(job.drain_before))
    gc.freeze()  # it stays: a full collection would take 0.2 s to look at what was imported and loaded
    gc.enable()
    start = perf_counter()
    with _kept(desk):
        metrics = engine.work(desk, scale, signals, Progress(), job.checkpoint_every)
        team = engine.team
    every = team.gather_all(metrics, Metrics)
    if desk and not signals.stopping:
        check_emptied(every)
    timeline.enter("end")
    figures = summarize(desk.counts, every, engine.lost, stages.seconds, perf_counter() - start) if desk else {}
    code = _finish(job, desk, wanted, figures, signals) if desk else 0
    team.broadcast(code, int)  # nobody leaves before the results are whole
    if job.trace:
        write_trace(job.trace, team, timeline, offset)
    return code


@contextmanager
def _kept(desk: Desk | None) -> Iterator[None]:
    """Make durable what the lead's desk has, whatever ends the block, unless it may be wrong."""
    try:
        yield
    except InvariantViolation:
        raise
    except BaseException:
        if desk:
            with suppress(Exception):
                desk.writer.checkpoint()
        raise


def _check_survive(comm: MPI.Intracomm | None) -> None:
    problem = "got a single process"
    if comm is not None:
        from hpcdecode.mpi import ulfm

        problem = ulfm.problem()
    if problem:
        raise UserError(
            f"--survive: expected ranks of Open MPI 5 that were started by `mpiexec --with-ft ulfm`, {problem}; "
            "start the job so, or leave --survive out",
            everywhere=True,
        )


class _Begin(msgspec.Struct, frozen=True):
    """Where the lead begins. identity: all that the tokens depend on; earlier: the run to continue, if there is one."""

    files: list[str]
    identity: dict[str, Any]
    earlier: Earlier | None


def _survey(job: Job, team: Team) -> _Begin | None:
    """Look at prompts, model and output before anything is loaded; None on all but the lead.

    The lead's UserError is raised on every rank.
    """

    def look() -> _Begin:
        files = resolve(job.prompts)
        if any(os.path.realpath(path) == os.path.realpath(job.output) for path in files if path != STDIN):
            raise UserError(f"results {job.output}: expected a file that is no prompt file; choose another -o")
        if job.trace:
            check_path(job.trace, [job.output, *files])
        dtype = job.dtype or auto_dtype(job.model, team.me.device)
        what = identity(job, files, dtype, job.kv_dtype or dtype)
        return _Begin(files, what, find_earlier(job.output, what, overwrite=job.overwrite, limit=job.limit))

    return together(team, lambda: look() if team.lead else None)


def _check_params(job: Job, tokenizer: Tokenizer) -> None:
    """Once for all rows: what the job's own parameters ask of the vocabulary."""
    try:
        tokenizer.check_params(job.params)
        tokenizer.bad_word_ids(job.params.bad_words)
    except RowProblem as problem:
        raise UserError(f"--{problem}".replace("_", "-", 2)) from None


def _say_complete(job: Job, earlier: Earlier) -> int:
    kept = job.limit is not None and earlier.rows + earlier.errors > job.limit
    print(
        f"{job.output}: complete already, {earlier.rows:,} rows, {earlier.errors:,} errors"
        + f"; --limit {job.limit} takes none of them away" * kept,
        file=sys.stderr,
    )
    return ROW_ERRORS if earlier.errors else 0


def _open_desk(job: Job, engine: Engine, begin: _Begin) -> tuple[Desk, _Wanted]:
    setup, earlier = engine.setup, begin.earlier
    attributes = {
        "job": msgspec.to_builtins(job),
        "identity": begin.identity,
        "model": {
            "path": os.path.abspath(job.model),
            "architectures": engine.model.facts.architectures,
            "layers": len(setup.shapes),
            "dtype": setup.dtype,
            "weights": job.weights or setup.dtype,
            "kv_dtype": setup.kv_dtype,
        },
        "versions": versions(),
        "topology": msgspec.to_builtins(engine.team.ranks),
    }
    every = {"checkpoint_seconds": job.checkpoint_every, "overwrite": job.overwrite}
    writer = ResultsWriter(job.output, attributes=attributes, earlier=earlier, **every)
    wanted = _Wanted(job, earlier)
    rows = read_rows(begin.files, job.params, column=job.prompt_column, model=job.model, limit=job.limit, wanted=wanted)
    prompts = tokenized(rows, engine.tokenizer, engine.max_positions)
    if earlier:
        print(*earlier.warnings, sep="\n", end="\n" * bool(earlier.warnings), file=sys.stderr, flush=True)
        prompts = earlier.continued(prompts, engine.tokenizer.vocab_size)
    return Desk(prompts, writer, engine.tokenizer, job.max_errors), wanted


class _Wanted:
    """Tells by a row's line whether it is for this job to do. rows: how many were so far."""

    def __init__(self, job: Job, earlier: Earlier | None):
        self._shard, self._earlier = job.shard, earlier
        self.rows = 0

    def __call__(self, line: int) -> bool:
        here = self._shard is None or self._shard.holds(line)
        wanted = here and not (self._earlier and self._earlier.done(line))
        self.rows += wanted
        return wanted


def _announce(engine: Engine, scale: Scale, stages: Stages, time_left: str) -> None:
    """Print the topology, what `auto` became, what the start took, and the time that is left."""
    setup = engine.setup
    lanes = "+".join(str(len(batches)) for batches in scale.lane_batches)
    weights = f" with {engine.options.weights} weights" if engine.options.weights else ""
    limit = f" up to {scale.load:,} tokens a step" if engine.options.schedule == "load-control" else ""
    print(text.topology(engine.team.ranks), file=sys.stderr)
    print(
        f"{engine.options.model}: {len(setup.shapes)} layers, {setup.dtype}{weights}, KV {setup.kv_dtype}; "
        f"batch {scale.batch}, period {scale.period} of {scale.steps} steps, lanes {lanes}, "
        f"up to {scale.prefill_tokens:,} prompt tokens a step, schedule {engine.options.schedule}{limit}",
        file=sys.stderr,
    )
    print(*filter(None, (stages.text(), time_left)), sep="\n", file=sys.stderr, flush=True)


def _finish(job: Job, desk: Desk, wanted: _Wanted, figures: dict[str, Any], signals: Signals) -> int:
    """Complete the results and print the summary, `figures`; returns the exit code."""
    code = signals.exit_code
    desk.feed.close()
    desk.writer.close(complete=code == 0, summary=figures, rows_read=wanted.rows)
    print(text.summary(figures), file=sys.stderr)
    if code:
        print(
            f"hpcdecode: stopped by {signals.cause}; finished rows are in {job.output}; the same command goes on",
            file=sys.stderr,
        )
        return code
    return ROW_ERRORS if desk.writer.error_count else 0
