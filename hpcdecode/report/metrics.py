"""Counters of the ranks, and the summary of a job that follows from them."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcdecode._version import __version__
from hpcdecode.errors import InvariantViolation
from hpcdecode.report.account import Account
from hpcdecode.requests.shortcuts import Shortcuts

if TYPE_CHECKING:
    from hpcdecode.ranks.roles import Rank


_SUMS = (
    *("s_seconds", "steps", "prefill_seconds", "decode_seconds", "decode_tokens", "shared_tokens"),
    *("drafted_tokens", "confirmed_tokens", "preemptions", "preempted_tokens", "bytes_read", "attend_seconds"),
    *("swapped", "swapped_tokens", "swap_failures", "swap_out_bytes", "swap_in_bytes", "swap_seconds"),
    *("swap_wait_seconds", "sum_bytes", "whole_sum_bytes", "expert_choices"),
)
_PEAKS = ("peak_prefill_tokens", "peak_load", "peak_tokens")


class RowCounts(NamedTuple):
    """Counts of a desk.

    Attributes:
        done: Rows that are finished.
        errors: Rows that could not be used.
        prompt_tokens: Prompt tokens of the finished rows.
        generated_tokens: Generated tokens of the finished rows.
        shortcuts: What they were spared.
    """

    done: int
    errors: int
    prompt_tokens: int
    generated_tokens: int
    shortcuts: Shortcuts


class Metrics(msgspec.Struct, kw_only=True):
    """Counters of one rank. Seconds are wall-clock.

    Attributes:
        account: Time account.
        peak_rss: Peak resident memory in bytes.
        s_role: Whether the rank worked as S-rank; the following fields are for these.
        s_seconds: Seconds of the S loop.
        steps: Steps of all lanes.
        prefill_seconds: Seconds of prompt tokens. The seconds of a step are divided evenly among its tokens.
        decode_seconds: Seconds of decode tokens, likewise.
        decode_tokens: Tokens that decode steps took as input.
        peak_prefill_tokens: Most prompt tokens whose K and V the rank held.
        peak_load: Most tokens that the sequences of all lanes attended to in a step.
        shared_tokens: Prompt tokens that came from shared prefixes.
        drafted_tokens: Tokens that were guessed, in speculative decoding.
        confirmed_tokens: Those of them that were right.
        preemptions: How often sequences gave up their room in KV caches, under optimistic admission.
        preempted_tokens: Tokens whose K and V were dropped so, and were computed again.
        swapped: How often sequences that gave up their room moved to a tier.
        swapped_tokens: Tokens whose K and V moved so.
        swap_failures: How often these did not come back, and were computed again.
        sum_bytes: Bytes that it sent to the other members of its group for sums.
        whole_sum_bytes: What these would be if all rows of all shares were sent.
        expert_choices: Choices of experts by routers, one a token, layer and choice, whose experts it has; with
            `--ep` alone.
        r_role: Whether the rank worked as R-rank; the following fields are for these.
        bytes_read: Bytes of the KV cache that attention read.
        attend_seconds: Seconds of decode attention.
        peak_tokens: Most tokens in the KV cache.
        kv_left: Tokens in the KV cache at the end.
        swap_out_bytes: Bytes that were written to tiers.
        swap_in_bytes: Bytes that came back from them.
        swap_seconds: Seconds of the threads that moved them.
        swap_wait_seconds: Seconds in which attention waited for what comes in, under `--schedule fluid`.
    """

    account: Account
    peak_rss: int = 0
    s_role: bool = False
    s_seconds: float = 0.0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    peak_prefill_tokens: int = 0
    peak_load: int = 0
    shared_tokens: int = 0
    drafted_tokens: int = 0
    confirmed_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    swapped: int = 0
    swapped_tokens: int = 0
    swap_failures: int = 0
    sum_bytes: int = 0
    whole_sum_bytes: int = 0
    expert_choices: int = 0
    r_role: bool = False
    bytes_read: int = 0
    attend_seconds: float = 0.0
    peak_tokens: int = 0
    kv_left: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    swap_seconds: float = 0.0
    swap_wait_seconds: float = 0.0

    def after(self, earlier: Metrics) -> Metrics:
        """Return the metrics of an earlier run and this one together; the account of this one covers both."""
        both = {name: getattr(self, name) + getattr(earlier, name) for name in _SUMS}
        both |= {name: max(getattr(self, name), getattr(earlier, name)) for name in _PEAKS}
        return msgspec.structs.replace(self, **both)

    def spent(self, *operations: str) -> float:
        """Return the seconds in `operations`."""
        return sum(self.account.seconds.get(o, 0.0) for o in operations)


def check_emptied(ranks: list[Metrics]) -> None:
    """Check that every rank's KV cache is empty, as it is once all rows are done.

    Raises:
        InvariantViolation: If a KV cache holds tokens.
    """
    left = {place: metrics.kv_left for place, metrics in enumerate(ranks) if metrics.kv_left}
    if left:
        raise InvariantViolation("KV caches are empty once all rows are done", f"tokens left, by rank: {left}")


def summarize(
    rows: RowCounts, ranks: list[Metrics], lost: list[Rank], startup: float, seconds: float
) -> dict[str, Any]:
    """Return the `summary` attribute of the results. In a process with both roles, S is busy while R is not.

    Args:
        rows: Counts of the lead's desk.
        ranks: Metrics of the ranks that were there at the end.
        lost: Ranks that were lost before.
        startup: Seconds from the start of the lead's process to the start of the work.
        seconds: Seconds of the work.
    """
    s_ranks, r_ranks = [m for m in ranks if m.s_role], [m for m in ranks if m.r_role]
    wall, computed = max(seconds, 1e-9), [m.spent("slice", "logits", "prefill") for m in s_ranks]
    attending = sum(m.attend_seconds for m in r_ranks)
    return {
        "rows": rows.done,
        "errors": rows.errors,
        "prompt_tokens": rows.prompt_tokens,
        "shared_prompt_tokens": sum(m.shared_tokens for m in s_ranks),
        "drafted_tokens": sum(m.drafted_tokens for m in s_ranks),
        "confirmed_tokens": sum(m.confirmed_tokens for m in s_ranks),
        "preemptions": sum(m.preemptions for m in s_ranks),
        "preempted_tokens": sum(m.preempted_tokens for m in s_ranks),
        "swapped": sum(m.swapped for m in s_ranks),
        "swapped_tokens": sum(m.swapped_tokens for m in s_ranks),
        "swap_failures": sum(m.swap_failures for m in s_ranks),
        "swap_out_bytes": sum(m.swap_out_bytes for m in r_ranks),
        "swap_in_bytes": sum(m.swap_in_bytes for m in r_ranks),
        "swap_seconds": sum(m.swap_seconds for m in r_ranks),
        "swap_wait_seconds": sum(m.swap_wait_seconds for m in r_ranks),
        "generated_tokens": rows.generated_tokens,
        "startup_seconds": startup,
        "seconds": seconds,
        "prefill_seconds": max(m.prefill_seconds for m in s_ranks),
        "decode_seconds": max(m.decode_seconds for m in s_ranks),
        "decode_tokens": sum(m.decode_tokens for m in s_ranks),
        "tokens_per_second": rows.generated_tokens / wall,
        "s_busy": sum(m.s_seconds - m.spent("wait", "idle", "append", "attend") for m in s_ranks) / len(s_ranks) / wall,
        "s_balance": sum(computed) / len(s_ranks) / max(*computed, 1e-9),
        "sum_bytes": sum(m.sum_bytes for m in s_ranks),
        "whole_sum_bytes": sum(m.whole_sum_bytes for m in s_ranks),
        "expert_choices": [m.expert_choices for m in s_ranks],
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
    """Return the versions of Python, of this package and of those that results depend on."""
    packages = {name: metadata.version(name) for name in ("h5py", "numpy", "torch", "transformers")}
    return {"hpcdecode": __version__, "python": platform.python_version(), **packages}
