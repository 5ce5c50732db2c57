"""What the ranks counted, and the figures of a job that follow from it."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcdecode._version import __version__
from hpcdecode.errors import InvariantViolation
from hpcdecode.report.account import Account

if TYPE_CHECKING:
    from hpcdecode.ranks.roles import Rank


_SUMS = (
    *("s_seconds", "steps", "prefill_seconds", "decode_seconds", "decode_tokens", "shared_tokens"),
    *("bytes_read", "attend_seconds"),
)
_PEAKS = ("peak_prefill_tokens", "peak_load", "peak_tokens")


class RowCounts(NamedTuple):
    """The rows that a desk has finished, those that could not be used, and the tokens of the finished ones."""

    done: int
    errors: int
    prompt_tokens: int
    generated_tokens: int


class Metrics(msgspec.Struct, kw_only=True):
    """Counters of one rank. Seconds are wall-clock.

    prefill_seconds, decode_seconds: of prompt tokens, and of those that follow (`decode_tokens`); the seconds of a step
    belong to all of its tokens alike.
    """

    account: Account
    peak_rss: int = 0  # bytes
    s_role: bool = False
    s_seconds: float = 0.0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    peak_prefill_tokens: int = 0
    peak_load: int = 0
    shared_tokens: int = 0
    r_role: bool = False
    bytes_read: int = 0
    attend_seconds: float = 0.0
    peak_tokens: int = 0
    kv_left: int = 0  # tokens in the KV cache at the end

    def after(self, earlier: Metrics) -> Metrics:
        """Of both together. The account is this one's, which goes on from the other."""
        both = {name: getattr(self, name) + getattr(earlier, name) for name in _SUMS}
        both |= {name: max(getattr(self, name), getattr(earlier, name)) for name in _PEAKS}
        return msgspec.structs.replace(self, **both)

    def spent(self, *operations: str) -> float:
        """Seconds in these operations."""
        return sum(self.account.seconds.get(o, 0.0) for o in operations)


def check_emptied(ranks: list[Metrics]) -> None:
    """Raise InvariantViolation unless every rank's KV cache is empty, as it is once all rows are done."""
    left = {place: metrics.kv_left for place, metrics in enumerate(ranks) if metrics.kv_left}
    if left:
        raise InvariantViolation("KV caches are empty once all rows are done", f"tokens left, by rank: {left}")


def summarize(
    rows: RowCounts, ranks: list[Metrics], lost: list[Rank], startup: float, seconds: float
) -> dict[str, Any]:
    """The `summary` attribute. In a process with both roles, S is busy when R is not.

    ranks: those that were there at the end; lost: the others. startup: seconds from the start of the lead's process to
    the start of the work, which took `seconds`.
    """
    s_ranks, r_ranks = [m for m in ranks if m.s_role], [m for m in ranks if m.r_role]
    wall = max(seconds, 1e-9)
    attending = sum(m.attend_seconds for m in r_ranks)
    return {
        "rows": rows.done,
        "errors": rows.errors,
        "prompt_tokens": rows.prompt_tokens,
        "shared_prompt_tokens": sum(m.shared_tokens for m in s_ranks),
        "generated_tokens": rows.generated_tokens,
        "startup_seconds": startup,
        "seconds": seconds,
        "prefill_seconds": max(m.prefill_seconds for m in s_ranks),
        "decode_seconds": max(m.decode_seconds for m in s_ranks),
        "decode_tokens": sum(m.decode_tokens for m in s_ranks),
        "tokens_per_second": rows.generated_tokens / wall,
        "s_busy": sum(m.s_seconds - m.spent("wait", "append", "attend") for m in s_ranks) / len(s_ranks) / wall,
        "r_busy": sum(m.spent("append", "attend") for m in r_ranks) / len(r_ranks) / wall,
        "r_gigabytes_per_second": sum(m.bytes_read for m in r_ranks) / max(attending, 1e-9) / 1e9,
        "peak_kv_tokens": sum(m.peak_tokens for m in r_ranks),
        "peak_load_tokens": sum(m.peak_load for m in s_ranks),
        "peak_prefill_tokens_on_s": max(m.peak_prefill_tokens for m in s_ranks),
        "peak_rss_bytes": [m.peak_rss for m in ranks],
        "steps": max(m.steps for m in s_ranks),
        "lost": [{"rank": r.rank, "host": r.host} for r in lost],
        "accounts": msgspec.to_builtins([m.account for m in ranks]),
    }


def versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("h5py", "numpy", "torch", "transformers")}
    return {"hpcdecode": __version__, "python": platform.python_version(), **packages}
