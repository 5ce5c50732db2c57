"""`hpcdecode merge`: the results of parts of a job, such as the shards of an array job, as one file."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from hpcdecode.data.diskfile import new_file
from hpcdecode.data.durable import write_errors
from hpcdecode.data.identity import differences
from hpcdecode.data.layout import write_attributes
from hpcdecode.data.merge import merge
from hpcdecode.data.read import Results
from hpcdecode.data.segments import parts_folder, segments_in
from hpcdecode.errors import UserError


def join(output: str, paths: Seq[str], *, overwrite: bool = False) -> None:
    """Merge results files by line into `output`, which is complete if all of them are.

    Memory grows by some 20 bytes a row. Raises UserError where the files are not of one model and sampling, or hold a
    row twice.
    """
    out = Path(output)
    if any(out.exists() and os.path.samefile(out, path) for path in paths if os.path.exists(path)):
        raise UserError(f"{out}: expected a new file, got one of those to merge; choose another name")
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists already; use --overwrite to replace it, or choose another name")
    attributes, complete = _agreed(paths)
    _require_distinct(paths)
    with write_errors(out, "free some space"), new_file(out.with_name(out.name + ".tmp"), out) as (file, check):
        merge([source for path in paths for source in _sources(Path(path))], file, check)
        write_attributes(file, attributes, complete=complete)


def _agreed(paths: Seq[str]) -> tuple[dict, bool]:
    """The attributes of the first file, with every file's summary, and whether all are complete."""
    first, summaries, complete = {}, [], True
    for path in paths:
        with Results(path) as results:
            first = first or results.attributes
            before, now = ({**a.get("identity", {}), "prompts": None} for a in (first, results.attributes))
            changed = list(differences(before, now))
            if changed:
                raise UserError(f"{path}: holds rows of another job than {paths[0]}: {'; '.join(changed)}")
            summaries.append(results.attributes.get("summary", {}))
            complete = complete and results.complete
    return {**first, "summary": {"merged": summaries}}, complete


def _require_distinct(paths: Seq[str]) -> None:
    seen = np.empty((0, 2), np.int64)
    for path in paths:
        with Results(path) as results:
            keys = np.stack([results.column("line"), results.column("sample").astype(np.int64)], axis=1)
        seen = np.concatenate([seen, keys])
    rows, counts = np.unique(seen, axis=0, return_counts=True)
    twice = rows[counts > 1]
    if len(twice):
        raise UserError(f"{len(twice)} rows are in several of the files, the first of them line {twice[0][0]}")


def _sources(path: Path) -> list[Path]:
    """Sorted files: the results of a complete job, or the segments of an interrupted one."""
    with Results(path) as results:
        if results.complete:
            return [path]
    parts = parts_folder(path)
    return [parts / segment.name for segment in segments_in(parts)]
