"""The command `hpcdecode merge`: joins the results of the parts of a job, such as the shards of an array job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdecode.data.results.checked import open_sorted, reading
from hpcdecode.data.results.diskfile import new_file
from hpcdecode.data.results.identity import differences, job_name
from hpcdecode.data.results.layout import write_attributes
from hpcdecode.data.results.merge import merge
from hpcdecode.data.results.read import Results
from hpcdecode.data.results.segments import parts_folder, segment_files
from hpcdecode.data.results.verify import verified
from hpcdecode.errors import UserError
from hpcdecode.requests.shard import Shard
from hpcdecode.system.durable import destination, write_errors


def join(output: str, paths: Sequence[str], *, overwrite: bool = False) -> None:
    """Merge results files into one, sorted by line. It is complete if all of them are.

    This needs about 20 bytes of memory a row.

    Args:
        output: The file to write.
        paths: The files to merge. Shards must be all shards of one job; the output is then that of the whole job.
        overwrite: Whether a file with the name `output` is replaced.

    Raises:
        UserError: The files have different models or sampling, or a row twice, or a shard is missing.
    """
    out = destination(output)
    if any(out.exists() and os.path.samefile(out, path) for path in paths if os.path.exists(path)):
        raise UserError(f"{out}: expected a new file, got one of those to merge; choose another name")
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists already; use --overwrite to replace it, or choose another name")
    if segment_files(parts_folder(out)):
        left = f"the rows of an unfinished job lie in {parts_folder(out)}"
        raise UserError(f"{out}: {left}; let it end, remove that folder, or choose another name")
    parts = [_PartFile(path) for path in paths]
    _require_one_job(parts)
    _require_all_shards(parts)
    _require_distinct(parts)
    attributes = {**parts[0].attributes, "summary": {"merged": [p.attributes.get("summary", {}) for p in parts]}}
    for name in ("identity", "job"):
        attributes[name] = {**attributes.get(name, {}), "shard": None}
    attributes["job"]["limit"] = min((p.limit for p in parts if p.limit is not None), default=None)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    with write_errors(out, "free some space"), new_file(temporary, out) as (file, check):
        merge([source for part in parts for source in part.sources], file, check)
        write_attributes(file, attributes, complete=all(part.complete for part in parts))


class _PartFile:
    """One of the files to merge.

    Attributes:
        path: Its path.
        complete: Whether its job is complete.
        attributes: Its root attributes.
        identity: The identity of its job.
        limit: Number of rows that its job takes at most; None for all.
        shard: The shard that it is; None if it is not one.
        sources: Sorted files with its rows: the file itself, or the segments of an interrupted job.
        keys: Line and sample of its rows, and lines of its errors with sample -1, [rows + errors, 2] int64.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with Results(path) as results:
            self.complete, self.attributes = results.complete, results.attributes
            is_index = bool(results.sources)
        self.identity, job = (self._object(name) for name in ("identity", "job"))
        limit, shard = job.get("limit"), self.identity.get("shard")
        self.limit: int | None = limit if isinstance(limit, int) else None
        try:
            self.shard = Shard.parse(str(shard)) if shard else None
        except ValueError as e:
            raise UserError(f"{path}: expected the name of a shard under identity: {e}") from None
        self.sources = self._segments() if is_index else [Path(path)]
        self.keys = np.concatenate([keys for source in self.sources for keys in _keys(source)])

    def _segments(self) -> list[Path]:
        """Return the segments of an interrupted job, which may be more than its index shows."""
        folder = parts_folder(Path(os.path.realpath(self.path)))
        segments, damaged = verified(folder, job_name(self.identity))
        if damaged:
            raise UserError(f"{damaged[0]}: is damaged; let the job go on, which generates its rows again")
        return [folder / segment.name for segment in segments]

    def _object(self, name: str) -> dict[str, Any]:
        value = self.attributes.setdefault(name, {})
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: attribute {name}: expected a JSON object, got {type(value).__name__}")
        return value


def _keys(path: Path) -> Iterator[np.ndarray]:
    """Yield line and sample of a file's rows, [rows, 2] int64, and lines of its errors with sample -1."""
    with open_sorted(path) as file, reading(path):
        names = ("rows/line", "rows/sample")
        yield np.stack([file[name][:].astype(np.int64) for name in names], axis=1)
        lines = file["errors/line"][:].astype(np.int64)
        yield np.stack([lines, np.full_like(lines, -1)], axis=1)


def _require_one_job(parts: Sequence[_PartFile]) -> None:
    """Raise UserError unless all parts have one model and sampling, and shards also the same prompt files."""
    ignored = ("shard",) if any(part.shard for part in parts) else ("shard", "prompts")
    first, *others = ({k: v for k, v in part.identity.items() if k not in ignored} for part in parts)
    for part, identity in zip(parts[1:], others, strict=True):
        changed = list(differences(first, identity))
        if changed:
            raise UserError(f"{part.path}: holds rows of another job than {parts[0].path}: {'; '.join(changed)}")


def _require_all_shards(parts: Sequence[_PartFile]) -> None:
    """Raise UserError unless the parts are all shards of one job, each of them once, or no part is a shard."""
    first, path = next(((part.shard, part.path) for part in parts if part.shard), (None, ""))
    if first is None:
        return
    found: dict[int, str] = {}
    for part in parts:
        if part.shard is None or part.shard.count != first.count:
            is_one = f"{path} is shard {first}"
            raise UserError(f"{part.path}: {is_one}, so expected another of them, got {part.shard or 'no shard'}")
        if part.shard.index in found:
            raise UserError(f"{part.path}: is shard {part.shard}, as is {found[part.shard.index]}; give one of them")
        found[part.shard.index] = part.path
    missing = [str(Shard(i, first.count)) for i in range(first.count) if i not in found]
    if missing:
        raise UserError(f"expected all {first.count} shards, got {len(found)}: {', '.join(missing)} missing")


def _require_distinct(parts: Sequence[_PartFile]) -> None:
    """Raise UserError if a row is in the files more than once."""
    rows, counts = np.unique(np.concatenate([part.keys for part in parts]), axis=0, return_counts=True)
    twice = rows[counts > 1]
    if len(twice):
        raise UserError(f"{len(twice)} rows are in the files more than once, the first of them line {twice[0][0]}")
