"""What the lead finds out about a job before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from hpcdecode.config import STDIN, Job
from hpcdecode.data.prompts.files import require_formats, resolve
from hpcdecode.data.prompts.first_rows import require_usable
from hpcdecode.data.prompts.kept import ALL, Selection
from hpcdecode.data.prompts.row_template import row_template
from hpcdecode.data.prompts.rows import require_columns
from hpcdecode.data.results.earlier import EarlierRun
from hpcdecode.data.results.identity import identity
from hpcdecode.data.results.resume import columns_kept, find_earlier
from hpcdecode.engine.setup import together
from hpcdecode.engine.weight_facts import auto_dtype
from hpcdecode.errors import UserError
from hpcdecode.ranks.team import Team
from hpcdecode.report.trace import check_path


class Begin(msgspec.Struct, frozen=True):
    """Findings of the lead before anything is loaded.

    Attributes:
        files: Prompt files.
        identity: Everything that the tokens depend on, and which columns are kept.
        earlier: The run to continue; None if there is none.
        selection: The input columns to keep.
    """

    files: list[str]
    identity: dict[str, Any]
    earlier: EarlierRun | None
    selection: Selection


def survey(job: Job, team: Team) -> Begin | None:
    """Examine prompts, model and output before anything is loaded. Return None on all ranks but the lead.

    Raises:
        UserError: On every rank, if the lead finds that the job cannot run.
    """

    def look() -> Begin:
        files = resolve(job.prompts)
        template = row_template(job)
        if any(os.path.realpath(path) == os.path.realpath(job.output) for path in files if path != STDIN):
            raise UserError(f"results {job.output}: expected a file that is no prompt file; choose another -o")
        if job.trace:
            check_path(job.trace, [job.output, *files])
        require_formats(files)
        dtype = job.dtype or auto_dtype(job.model, team.me.device)
        kv_dtype = job.kv_dtype or dtype
        keep = job.keep_columns or (None if job.overwrite else columns_kept(job.output)) or ALL
        if job.keep_columns:
            require_columns(files, Selection(keep, job.prompt_column), job.prompt_column, template, job.score)
        what = identity(job, files, dtype, kv_dtype, keep)
        earlier = find_earlier(job.output, what, overwrite=job.overwrite, limit=job.limit)
        if earlier is None:
            if keep != (keep := job.keep_columns or ALL):  # those of results that are replaced do not count
                what = identity(job, files, dtype, kv_dtype, keep)
            require_usable(job, files, template)
        return Begin(files, what, earlier, Selection(keep, job.prompt_column))

    return together(team, lambda: look() if team.lead else None)
