"""The job: a job and a communicator in, a results file out. All that `hpcdecode generate` and `score` do."""

from __future__ import annotations

import gc
import logging
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.config import LITERAL, Job
from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.kept import KeptColumns
from hpcdecode.data.prompts.opening import is_once
from hpcdecode.data.prompts.order import in_order
from hpcdecode.data.prompts.row_template import row_template
from hpcdecode.data.prompts.rows import read_rows
from hpcdecode.data.prompts.total import RowTotal
from hpcdecode.data.results.earlier import EarlierRun
from hpcdecode.data.results.identity import kept_before
from hpcdecode.data.results.status import StatusFile
from hpcdecode.data.results.wanted import Wanted
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.doctor import binding
from hpcdecode.engine.announce import announce, explain
from hpcdecode.engine.desk import Desk
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.row_errors import RowErrors
from hpcdecode.engine.scale import capacity_of, rows_ahead
from hpcdecode.engine.setup import together
from hpcdecode.engine.survey import Begin, survey
from hpcdecode.engine.weight_facts import weight_facts
from hpcdecode.errors import InvariantViolation, RowProblem, UserError
from hpcdecode.model import SplitModel
from hpcdecode.planning.auto import advise, planned, profile_for
from hpcdecode.planning.fluid import foresee
from hpcdecode.planning.job_schedule import with_schedule
from hpcdecode.ranks.fit import require_fit
from hpcdecode.ranks.team import Team, WeightFacts, assemble
from hpcdecode.ranks.watchdog import Watchdog
from hpcdecode.report import text
from hpcdecode.report.metrics import Metrics, check_emptied, summarize, versions
from hpcdecode.report.progress import Progress
from hpcdecode.report.stages import Stages
from hpcdecode.report.trace import clock_offset, write_trace
from hpcdecode.schedule.auto import LOOKAHEAD
from hpcdecode.system.signals import Signals
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

ROW_ERRORS = 3  # exit code of a job that is done, with rows that could not be used
logger = logging.getLogger(__name__)


def generate(
    job: Job,
    comm: MPI.Intracomm | None = None,
    *,
    model: SplitModel | None = None,
    signals: Signals | None = None,
) -> int:
    """Run a job over the ranks of `comm`.

    Args:
        job: The job.
        comm: The ranks; None for this process alone, which then plays both roles.
        model: A model loaded before, in place of `job.model`.
        signals: Signals, already entered as a context; None for new ones.

    Returns:
        The exit code, which is 0 on all ranks but the lead.

    Raises:
        UserError: If the job cannot run as asked.
    """
    timeline = Timeline(trace=job.trace is not None)
    if job.survive:
        _check_survive(comm)
    layout = job.layout
    if layout == "auto" and (job.partition != "request" or job.pools != "shared" or job.route != "fixed"):
        layout = "split"  # of which these speak
    wishes = msgspec.structs.replace(job.wishes, layout=layout)
    advice = partial(advise, job, wishes) if job.profile else None
    weights = WeightFacts() if model else weight_facts(job)
    team = assemble(comm, wishes, job.device, job.r_device, weights, advice)
    require_fit(team.ranks)
    job = with_schedule(job, team)
    with nullcontext(signals) if signals else Signals() as held, Watchdog(team, timeline, job.stall_timeout):
        return _generate(job, team, timeline, held, model)


def _generate(job: Job, team: Team, timeline: Timeline, signals: Signals, model: SplitModel | None) -> int:
    stages = Stages(announce=team.lead)
    begin = survey(job, team)
    earlier = begin.earlier if begin else None
    if team.broadcast(earlier is not None and earlier.complete, bool):
        return _say_complete(job, earlier) if earlier else 0
    problems = binding(team)
    if begin and problems:
        logger.warning("\n".join(problems))
    team.pin()
    stages.done("imports")
    offset = clock_offset(team) if job.trace else 0
    engine = Engine(job, team, model, timeline)
    together(team, lambda: _check_params(job, engine) if team.lead else None)
    stages.done("model")
    profile = together(team, lambda: profile_for(job.profile, engine) if team.lead and job.profile else None)
    signals.hold_interrupts()
    lead = _open_lead(job, engine, begin) if begin else None
    desk = lead.desk if lead else None
    with _kept(lead):
        if desk and profile:
            engine.options = planned(profile, engine, *desk.feed.preview(rows_ahead(engine.team)))
        scales = engine.scales(desk)
    if desk:
        stages.done("rows")
        explain(engine, scales, *desk.feed.preview(LOOKAHEAD))
        announce(engine, scales, stages)
        if profile:
            foresee(profile, engine, scales[0], desk.feed.preview(LOOKAHEAD)[0])
        if time_left := signals.drain_before(job.drain_before):
            logger.log(logging.INFO if signals.has_deadline else logging.WARNING, time_left)
    gc.freeze()  # collections need not traverse what was imported and loaded, which would take 0.2 s
    gc.enable()
    start = perf_counter()
    with _kept(lead):
        progress = Progress(status=_status_file(lead, engine) if lead else None)
        if lead:
            progress.expect(lead.before, lambda: lead.total.rows)
        metrics = engine.work(desk, scales, signals, progress, job.checkpoint_every)
        team = engine.team
    every = team.gather_all(metrics, Metrics)
    if lead and not signals.stopping:
        check_emptied(every)
    timeline.enter("end")
    code = 0
    if lead:
        figures = summarize(lead.desk.counts, every, engine.lost, stages.seconds, perf_counter() - start)
        code = _finish(job, lead, figures | ({"scored": True} if job.score else {}), signals)
    team.broadcast(code, int)  # no rank ends before the results are complete
    if job.trace:
        write_trace(job.trace, team, timeline, offset)
    return code


@dataclass(frozen=True)
class _Lead:
    """What only the lead has.

    Attributes:
        desk: Its desk.
        writer: The writer of the results behind it.
        wanted: The rows that are to be done.
        before: Rows that an earlier run has done, without those that it could not use.
        total: Number of all rows.
        errors_before: Rows that an earlier run could not use.
    """

    desk: Desk
    writer: ResultsWriter
    wanted: Wanted
    before: int
    total: RowTotal
    errors_before: int


@contextmanager
def _kept(lead: _Lead | None) -> Iterator[None]:
    """Save the lead's results if an exception ends the block, unless they may be wrong."""
    try:
        yield
    except InvariantViolation:
        raise
    except BaseException:
        if lead:
            with suppress(Exception):
                lead.writer.checkpoint()
        raise


def _check_survive(comm: MPI.Intracomm | None) -> None:
    problem: str | None = "got a single process"
    if comm is not None:
        from hpcdecode.mpi import ulfm

        problem = ulfm.problem()
    if problem:
        raise UserError(
            f"--survive: expected ranks of Open MPI 5 that were started by `mpiexec --with-ft ulfm`, {problem}; "
            "start the job so, or leave --survive out",
            everywhere=True,
        )


def _check_params(job: Job, engine: Engine) -> None:
    """Check the job's own sampling parameters against the vocabulary."""
    tokenizer = engine.tokenizer
    try:
        tokenizer.check_params(job.params)
        tokenizer.bad_word_ids(job.params.bad_words)
    except RowProblem as problem:
        raise UserError(f"--{problem}".replace("_", "-", 2)) from None


def _say_complete(job: Job, earlier: EarlierRun) -> int:
    kept = job.limit is not None and earlier.rows + earlier.errors > job.limit
    logger.info(
        f"{job.output}: complete already, {earlier.rows:,} rows, {earlier.errors:,} errors"
        + f"; --limit {job.limit} takes none of them away" * kept
        + f": hpcdecode show {shlex.quote(job.output)}"
    )
    return ROW_ERRORS if earlier.errors else 0


def _open_lead(job: Job, engine: Engine, begin: Begin) -> _Lead:
    setup, earlier, tokenizer = engine.setup, begin.earlier, engine.tokenizer
    attributes = {
        "job": {**msgspec.to_builtins(job), "keep_columns": kept_before(begin.identity)},
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
    once = any(map(is_once, begin.files))  # else they were searched before
    kept = KeptColumns(begin.selection, search=once and not earlier) if begin.selection.any else None
    writer = ResultsWriter(
        job.output,
        attributes=attributes,
        earlier=earlier,
        checkpoint_seconds=job.checkpoint_every,
        overwrite=job.overwrite,
        kept=kept,
    )
    wanted = Wanted(job, earlier)
    rows = read_rows(
        begin.files,
        job.params,
        column=job.prompt_column,
        model=job.model,
        limit=job.limit,
        wanted=wanted,
        kept=kept,
        template=row_template(job),
        score=job.score,
        adapters=tuple(job.adapters),
    )
    if job.prefix_sharing and not once:
        rows = in_order(rows, kept.size if kept else None)
    prompts = tokenized(rows, tokenizer, engine.max_positions, kept)
    if earlier:
        for warning in earlier.warnings:
            logger.warning(warning)
        done = f"{earlier.rows:,} rows and {earlier.errors:,} errors are done"
        logger.debug(f"hpcdecode: the job continues: {done}, {len(earlier.unfinished):,} rows have tokens already")
        prompts = earlier.continued(prompts, tokenizer.vocab_size)
    given = all(path.startswith(LITERAL) for path in begin.files)  # the command says itself why a prompt has no answer
    told = None if given else RowErrors(several=len(begin.files) > 1)
    desk = Desk(prompts, writer, tokenizer, job.max_errors, kept.size if kept else None, told)
    total = RowTotal(begin.files, job.prompt_column, job.limit, job.shard)
    before, errors = (earlier.lines - earlier.errors, earlier.errors) if earlier else (0, 0)
    return _Lead(desk, writer, wanted, before, total, errors)


def _status_file(lead: _Lead, engine: Engine) -> StatusFile:
    capacity = sum(capacity_of(engine.options, engine.team, engine.team.group))
    return StatusFile(lead.writer.path, capacity, len(engine.team.groups))


def _finish(job: Job, lead: _Lead, figures: dict[str, Any], signals: Signals) -> int:
    """Complete the results, log the summary `figures` and return the exit code."""
    code = signals.exit_code
    lead.desk.feed.close()
    lead.writer.close(complete=code == 0, summary=figures, rows_read=lead.wanted.rows)
    logger.info(text.summary(figures))
    done, errors = lead.before + lead.desk.done, lead.writer.error_count
    if code:
        logger.warning(
            f"hpcdecode: stopped by {signals.cause}; finished rows are in {job.output}; the same command goes on"
        )
    if causes := lead.desk.told.summary(lead.errors_before) if lead.desk.told else "":
        logger.warning(causes)
    logger.info(text.closing(job.output, done, lead.total.rows if code else done, lead.writer.sample_count, errors))
    return code or (ROW_ERRORS if lead.writer.error_count else 0)
