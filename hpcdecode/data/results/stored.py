"""What the file at an output says of itself, before its job goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcdecode.data.results.diskfile import open_segment


class StoredFile:
    """What the file at an output says of itself. Raises what h5py and msgspec raise.

    Attributes:
        limit: rows of the prompt files that it covers if it is complete; None for all.
        shown: its rows and errors.
        holds_rows: whether they lie in it; else it is an index.
    """

    def __init__(self, path: Path) -> None:
        with open_segment(path) as file:
            lines = file["rows/line"], file["errors/line"]
            self.shown = sum(map(len, lines))
            own = not any(dataset.is_virtual for dataset in lines)
            self.complete = bool(file.attrs["complete"]) and own
            self.holds_rows = self.complete or (own and self.shown > 0)
            self.identity = msgspec.json.decode(file.attrs["identity"])
            job = msgspec.json.decode(file.attrs.get("job", "null"))
        limit = job.get("limit") if isinstance(job, dict) else None
        self.limit = limit if isinstance(limit, int) else None

    def covers(self, limit: int | None) -> bool:
        """Whether a complete file has all rows of a job that takes `limit` of them."""
        return self.limit is None or (limit is not None and limit <= self.limit)
