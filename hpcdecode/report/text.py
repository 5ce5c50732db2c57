"""The topology and the summary as text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from hpcdecode.ranks.roles import Rank

_MOST_LINES = 16  # of ranks that are shown one by one
_MOST_RUNS = 4  # of numbers of ranks in a line


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose columns are aligned to the left, two spaces apart."""
    cells = [list(header), *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def topology(ranks: Sequence[Rank]) -> str:
    """Return a table of all ranks. Of many, those that are alike are a line."""
    header, lines = topology_cells(ranks)
    return table(header, lines)


def topology_cells(ranks: Sequence[Rank]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the lines of the table of all ranks."""
    header = ("rank", "host", "role", "device", "NUMA", "threads", "ISA", "KV capacity")
    differ = any(r.speed != 1 for r in ranks)
    kinds: dict[tuple[object, ...], list[Rank]] = {}
    for r in ranks:
        alike = (r.role, r.device, r.kv_device, r.threads, r.pinned, r.isa, r.speed)
        kinds.setdefault(alike if len(ranks) > _MOST_LINES else (r.rank,), []).append(r)
    return header, [_line(kind, differ) for kind in kinds.values()]


def _line(kind: Sequence[Rank], differ: bool) -> tuple[str, ...]:
    """Return the line of ranks that are alike but for their hosts, NUMA nodes and room."""
    r, hosts = kind[0], list(dict.fromkeys(r.host for r in kind))
    return (
        numbers([r.rank for r in kind]),
        hosts[0] if len(hosts) == 1 else f"{hosts[0]} .. {hosts[-1]} ({len(hosts)})",
        r.role,
        " + ".join(dict.fromkeys([r.device] * r.has_s + [r.kv_device] * r.has_r)),
        ",".join(dict.fromkeys(r.numa for r in kind)),
        f"{r.threads}{'' if r.pinned else ' (unpinned)'}",
        r.isa or "-",
        f"{span([r.kv_tokens for r in kind])} tokens{f', speed {r.speed:.1f}' if differ else ''}" if r.has_r else "-",
    )


def numbers(ranks: Sequence[int]) -> str:
    """Return ascending numbers as text, such as 0, 2-5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(text if len(text) <= _MOST_RUNS else [*text[:_MOST_RUNS], f"... ({len(ranks)} in all)"])


def span(values: Sequence[int]) -> str:
    """Return the least and the largest of some numbers as text."""
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} .. {most:,}"


def summary(figures: dict[str, Any]) -> str:
    """Return the closing lines of a job from `figures`, the `summary` attribute of its results."""
    f = figures
    shared = f" ({f['shared_prompt_tokens']:,} shared)" if f["shared_prompt_tokens"] else ""
    several = sum("S" in account["role"] for account in f["accounts"]) > 1
    balance = f" (the mean of S-ranks is {f['s_balance']:.0%} of the busiest)" if several else ""
    lost = [f"rank {r['rank']} on {r['host']}" for r in f["lost"]]
    return "\n".join(
        (
            *([f"lost while the job went on: {', '.join(lost)}"] if lost else []),
            f"rows {f['rows']:,}, errors {f['errors']:,}, tokens {f['generated_tokens']:,} {_verb(f)}"
            f" and {f['prompt_tokens']:,} of prompts{shared}, in {f['seconds']:.1f} s",
            f"{f['tokens_per_second']:,.1f} tokens/s, S busy {f['s_busy']:.0%}{balance}, R busy {f['r_busy']:.0%},"
            f" R-part {f['r_gigabytes_per_second']:.1f} GB/s, peak KV {f['peak_kv_tokens']:,} tokens,"
            f" peak load {f['peak_load_tokens']:,}",
            *([_speculated(f)] if f.get("drafted_tokens") else []),
            *([_preempted(f)] if f["preemptions"] else []),
            *([_swapped(f)] if f.get("swapped") else []),
            *([_rotated(f)] if f.get("swap_in_bytes") and not f.get("swapped") else []),
            *([_of_experts(f)] if any(f.get("expert_choices", ())) else []),
            f"peak memory of ranks 0.. (MiB): {_memories([b >> 20 for b in f['peak_rss_bytes']])}",
        )
    )


def _verb(f: dict[str, Any]) -> str:
    """Return what the job did with tokens."""
    return "scored" if f.get("scored") else "generated"


def closing(output: str, rows: int, total: int | None, samples: int, errors: int) -> str:
    """Return the last line of a job.

    Args:
        output: The results file.
        rows: Rows that are done, errors included.
        total: All rows; None if it is not known.
        samples: Samples of the rows with results.
        errors: Rows that could not be used.
    """
    of = f" of {total:,}" if total is not None else ""
    several = f", {samples:,} samples" if samples != rows - errors else ""
    failed = f"{errors:,} error" + "s" * (errors != 1)
    return f"results: {output} ({rows:,}{of} rows{several}, {failed}): hpcdecode show {shlex.quote(output)}"


def _of_experts(f: dict[str, Any]) -> str:
    """Return how evenly the experts' work fell on the ranks that have them, and what sums sent."""
    choices = f["expert_choices"]
    shares = [count / sum(choices) for count in choices]
    mean = 1 / len(choices) / max(shares)
    return (
        f"experts: {min(shares):.1%} .. {max(shares):.1%} of the routers' choices on a rank (the mean is {mean:.0%} of "
        f"the busiest); sums sent {f['sum_bytes'] / 1e6:,.1f} MB, with all rows {f['whole_sum_bytes'] / 1e6:,.1f} MB"
    )


def _speculated(f: dict[str, Any]) -> str:
    """Return what became of drafts."""
    drafted, confirmed = f["drafted_tokens"], f["confirmed_tokens"]
    return f"guessed {drafted:,} tokens ahead, {confirmed:,} of them right ({confirmed / drafted:.0%})"


def _preempted(f: dict[str, Any]) -> str:
    """Return what optimistic admission took back."""
    return f"preempted {f['preemptions']:,} times, {f['preempted_tokens']:,} tokens prefilled again"


def _swapped(f: dict[str, Any]) -> str:
    """Return what moved to tiers and back."""
    lost = f", {f['swap_failures']:,} of them lost and prefilled again" if f["swap_failures"] else ""
    moved = f"{f['swap_out_bytes'] / 1e6:,.0f} MB out and {f['swap_in_bytes'] / 1e6:,.0f} MB back"
    return f"{f['swapped']:,} times to tiers, {moved} in {f['swap_seconds']:.1f} s beside the work{lost}"


def _rotated(f: dict[str, Any]) -> str:
    """Return what came from tiers and went there under the schedule `fluid`."""
    return (
        f"rotation of groups: {f['swap_in_bytes'] / 1e6:,.0f} MB from tiers, {f['swap_out_bytes'] / 1e6:,.0f} MB to "
        f"them, attention waited {f.get('swap_wait_seconds', 0.0):.1f} s for it"
    )


def _memories(mebibytes: Sequence[int]) -> str:
    """Return the peaks of all ranks; of many, the least and the largest."""
    return ", ".join(map(str, mebibytes)) if len(mebibytes) <= _MOST_LINES else span(mebibytes)
