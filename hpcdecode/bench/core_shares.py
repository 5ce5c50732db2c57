"""Ranks that have a share of a core each, by quotas of a control group: more ranks than cores, none of which shares.

A rank runs for its share of every period and rests for what is left of it, as on a core that is so much slower.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpcdecode.errors import UserError

_QUOTA = 1000  # microseconds of a period, the least that Linux takes
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


class CoreShares:
    """Context of control groups with a CPU quota, one for each rank; they go with it.

    Args:
        ranks: Number of ranks.
        share: Of a core, for each rank.

    Raises:
        UserError: This process cannot make them.
    """

    def __init__(self, ranks: int, share: float):
        self.ranks, self.share = ranks, share
        self._folder: Path | None = None

    def __enter__(self) -> CoreShares:
        try:
            self._make()
        except OSError as error:
            self.__exit__()
            raise UserError(
                f"shares of cores: expected the right to make control groups with CPU quotas, got {error}; start the "
                "command as root, or on a machine with a core for each rank"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            for group in (*map(self._group, range(self.ranks)), self._folder):
                with suppress(OSError):
                    group.rmdir()

    def prefix(self, rank: int) -> list[str]:
        """Return what to put before the command of a rank."""
        return ["sh", "-c", f'echo $$ > {self._group(rank)}/cgroup.procs && exec "$@"', "sh"]

    def _make(self) -> None:
        first = (_V1 / "cpu.cfs_period_us").exists()
        self._folder = Path(tempfile.mkdtemp(prefix="hpcdecode-", dir=_V1 if first else _V2))
        if not first:
            (self._folder / "cgroup.subtree_control").write_text("+cpu")
        period = round(_QUOTA / self.share)
        for rank in range(self.ranks):
            group = self._group(rank)
            os.mkdir(group)
            if first:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(_QUOTA))
            else:
                (group / "cpu.max").write_text(f"{_QUOTA} {period}")

    def _group(self, rank: int) -> Path:
        assert self._folder is not None, "expected an open context"
        return self._folder / str(rank)


def line(launcher: str, command: Sequence[str], shares: CoreShares) -> list[str]:
    """Return the command line that starts a command on all ranks, each with its share."""
    parts = [["-n", "1", *shares.prefix(rank), *command] for rank in range(shares.ranks)]
    return [launcher, *parts[0], *(word for part in parts[1:] for word in (":", *part))]
