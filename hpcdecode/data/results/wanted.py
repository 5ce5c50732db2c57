"""Says which rows of the prompt files a run of a job is to do."""

from __future__ import annotations

from hpcdecode.config import Job
from hpcdecode.data.results.earlier import EarlierRun


class Wanted:
    """Predicate of a row's line: whether this job is to do the row.

    Attributes:
        rows: Number of rows so far that it is to do.
    """

    def __init__(self, job: Job, earlier: EarlierRun | None):
        self._shard, self._earlier = job.shard, earlier
        self.rows = 0

    def __call__(self, line: int) -> bool:
        """Return whether the row of a line is to be done."""
        here = self._shard is None or self._shard.holds(line)
        wanted = here and not (self._earlier and self._earlier.done(line))
        self.rows += wanted
        return wanted
