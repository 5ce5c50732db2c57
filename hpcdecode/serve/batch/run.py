"""Runs a batch from its file to its answers, in a thread of its own; a later run goes on from what is on disk."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdecode.data.results.earlier import EarlierRun
from hpcdecode.data.results.identity import job_name
from hpcdecode.data.results.resume import find_earlier
from hpcdecode.data.results.segments import parts_folder
from hpcdecode.data.results.writer import ResultsWriter
from hpcdecode.errors import RowProblem, UserError, first_line
from hpcdecode.serve.batch.answers import write_answers
from hpcdecode.serve.batch.flow import BatchFlow, RowDesk, ServerEnds
from hpcdecode.serve.batch.record import BatchProblem, BatchRecord, Ending, save
from hpcdecode.serve.batch.rows import batch_rows, first_problem
from hpcdecode.serve.files.store import FileStore

_RETRY_SECONDS = 30.0  # after the disk has refused a write
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BatchMeans:
    """What all batches of a server share.

    Attributes:
        folder: Where states and results of batches are.
        files: Files of the clients.
        desk: Where rows go.
        about: Everything that tokens depend on but requests; a batch goes on only with what it began with.
        attributes: Attributes of results files, such as `model` (see `ResultsWriter`).
        models: Names by which requests may ask for the model, beside those of its directory; answers have the first.
        share: Returns how many rows of a batch may be in flight.
        most_requests: Requests that a batch may have.
    """

    folder: Path
    files: FileStore
    desk: RowDesk
    about: dict[str, Any]
    attributes: dict[str, Any]
    models: Sequence[str]
    share: Callable[[], int]
    most_requests: int


class BatchRun:
    """A batch under way.

    Args:
        record: The batch.
        means: What batches share.
        lock: Held while the status changes.
        ended: Is told when the run has ended.
    """

    def __init__(self, record: BatchRecord, means: BatchMeans, lock: threading.RLock, ended: Callable[[], None]):
        self.record, self._means, self._lock, self._tell_end = record, means, lock, ended
        self._results = means.folder / f"{record.id}.h5"
        self._flow: BatchFlow | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=record.id, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let it see that the batch is to be cancelled."""
        if flow := self._flow:
            flow.wake()

    def stop(self) -> None:
        """Let it end soon; what is done is kept."""
        self._stopped.set()
        if flow := self._flow:
            flow.stop()

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not self._attempt():
                self._stopped.wait(_RETRY_SECONDS)
        finally:
            self._tell_end()

    def _attempt(self) -> bool:
        """Run the batch; return whether there is no more to do for this server."""
        try:
            self._stages()
        except ServerEnds:
            with suppress(OSError), self._lock:
                save(self.record, self._means.folder)  # its counts
            return True
        except UserError as e:
            if isinstance(e.__cause__, OSError):
                logger.warning(f"hpcdecode: {self.record.id}: {e}; it is tried again in {_RETRY_SECONDS:.0f} s")
                return False
            self._give_up(e)
        except OSError as e:
            logger.warning(f"hpcdecode: {self.record.id}: {e}; it is tried again in {_RETRY_SECONDS:.0f} s")
            return False
        except Exception as e:
            self._give_up(e)
        return True

    def _stages(self) -> None:
        if self.record.status in ("validating", "cancelling") and not self.record.total and not self._validate():
            return
        if self.record.ending is None:
            self._generate()
        self._publish()

    def _validate(self) -> bool:
        """Count the requests; return whether the batch can begin."""
        record, means = self.record, self._means
        try:
            path = means.files.path(means.files.get(record.input_file_id, record.owner))
            count, problem, line = first_problem(path, means.most_requests)
        except UserError as e:
            count, problem, line = 0, RowProblem(str(e)), 1
        if problem is not None:
            self._fail(BatchProblem("invalid_request_file", str(problem), line=line))
            return False
        with self._lock:
            record.total, record.made_with = count, job_name(means.about)
            if record.status == "validating":
                record.in_progress_at, record.status = int(time.time()), "in_progress"
            save(record, means.folder)
        return True

    def _generate(self) -> None:
        """Do the rows that are left, and write all of them into one file."""
        record, means = self.record, self._means
        if record.made_with != job_name(means.about):
            message = "expected the model that the batch began with, got another one since the server's restart"
            self._fail(BatchProblem("model_changed", f"{message}; create the batch again"))
            raise ServerEnds
        identity = {**means.about, "batch": record.id}
        earlier = find_earlier(self._results, identity, overwrite=False)
        record.completed, record.failed = (earlier.lines - earlier.errors, earlier.errors) if earlier else (0, 0)
        if earlier and earlier.complete:  # the last run was ended before it could say so
            self._end_rows("completed" if record.status == "in_progress" else "cancelled")
            return
        if earlier:
            for warning in earlier.warnings:
                logger.warning(f"hpcdecode: {record.id}: {warning}")
        attributes = {**means.attributes, "identity": identity}
        writer = ResultsWriter(self._results, attributes=attributes, earlier=earlier, overwrite=False)
        try:
            ending = self._flow_through(writer, earlier)
            writer.close(complete=True, summary={"batch": record.id, "ended": ending})
        except BaseException:
            with suppress(UserError):
                writer.close(complete=False, summary={})
            writer.abandon()
            raise
        self._end_rows(ending)

    def _flow_through(self, writer: ResultsWriter, earlier: EarlierRun | None) -> Ending:
        record, means = self.record, self._means
        path = means.files.path(means.files.get(record.input_file_id, record.owner))
        rows = batch_rows(path, record.endpoint, means.models, earlier.done if earlier else lambda line: False)
        self._flow = BatchFlow(record, rows, writer, means.desk, means.share)
        if self._stopped.is_set():
            raise ServerEnds
        try:
            return self._flow.run()
        finally:
            self._flow = None

    def _end_rows(self, ending: Ending) -> None:
        with self._lock:
            record = self.record
            record.ending = ending = "cancelled" if record.status == "cancelling" else ending
            if ending != "cancelled":
                record.finalizing_at, record.status = int(time.time()), "finalizing"
            save(record, self._means.folder)

    def _publish(self) -> None:
        """Write the answers, and end the batch."""
        record, means = self.record, self._means
        output, errors = write_answers(record, self._results, means.files, means.models)
        with self._lock:
            assert record.ending is not None, "rows are done before they are published"
            record.output_file_id, record.error_file_id = output, errors
            setattr(record, f"{record.ending}_at", int(time.time()))
            record.status = record.ending  # last, since others read it at any time
            save(record, means.folder)
        self._results.unlink(missing_ok=True)

    def _fail(self, problem: BatchProblem) -> None:
        with self._lock:
            self.record.errors, self.record.failed_at = [problem], int(time.time())
            self.record.status = "failed"
            save(self.record, self._means.folder)
        _remove(self._results)

    def _give_up(self, e: Exception) -> None:
        """Fail after what is no fault of the batch; the log says more than the client is told."""
        logger.error(f"hpcdecode: {self.record.id} has failed: {first_line(e)}", exc_info=e)
        with suppress(OSError):
            self._fail(BatchProblem("server_error", "the server could not go on with the batch; its log says why"))


def _remove(results: Path) -> None:
    """Remove a results file, and its folder of parts."""
    results.unlink(missing_ok=True)
    parts = parts_folder(results)
    for path in parts.iterdir() if parts.is_dir() else ():
        path.unlink()
    with suppress(FileNotFoundError):
        parts.rmdir()
